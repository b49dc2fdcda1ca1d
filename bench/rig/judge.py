"""Errors against float64, on a sample of rows, beside those of the same formula computed plainly in bfloat16."""

from __future__ import annotations

import math
import random

import torch

from rig.cells import Inputs

ROWS = 256  # of each sampled head
HEADS = 3


def attend(q, k, v, rows, cell, scale, sink, dtype):
    """Attention of the queries at these rows of a sequence, one head, every step in dtype."""
    s = (q[rows].to(dtype) @ k.to(dtype).T) * scale
    if cell.softcap:
        s = cell.softcap * torch.tanh(s / cell.softcap)
    key = torch.arange(len(k), device=k.device)
    if cell.causal:
        s.masked_fill_(key > rows[:, None], -math.inf)
    if cell.window:
        s.masked_fill_(key <= rows[:, None] - cell.window, -math.inf)
    if sink is not None:
        s = torch.cat([s, sink.to(dtype).expand(len(rows), 1)], 1)
    return s.softmax(-1)[:, : len(k)] @ v.to(dtype)


class Judge:
    def __init__(self, x: Inputs):
        self.x, self.samples = x, []
        self.plain, self.slack = 0.0, 0.0
        cell, draw = x.cell, random.Random(1)
        sequences = cell.sequences()
        picked = {0, sequences.index(max(sequences)), sequences.index(min(sequences))}
        for n in range(HEADS):
            b, head = sorted(picked)[n % len(picked)], draw.randrange(cell.heads)
            length = sequences[b]
            # The first rows see the fewest keys, the last ones the most.
            ends = [*range(min(32, length)), *range(max(0, length - 32), length)]
            rows = sorted({*ends, *draw.sample(range(length), min(length, ROWS - 64))})
            rows = torch.tensor(rows, device=x.q.device)
            q, k, v = (
                x.sequence(t, b)[:, h]
                for t, h in zip((x.q, x.k, x.v), (head, *[head * cell.kv_heads // cell.heads] * 2))
            )
            sink = None if x.sink is None else x.sink[head]
            want = attend(q, k, v, rows, cell, x.scale, sink, torch.float64)
            plain = attend(q, k, v, rows, cell, x.scale, sink, torch.bfloat16)
            self.plain = max(self.plain, (plain.double() - want).abs().max().item())
            near = want.to(torch.bfloat16)
            self.slack = max(self.slack, 2 * (near + 0.3 - 0.3 - near).abs().max().item())
            self.samples.append((b, head, rows, want))

    def error(self, out) -> float:
        """The largest on the sample; infinite where out is not a number."""
        worst = 0.0
        for b, head, rows, want in self.samples:
            difference = self.x.sequence(out, b)[rows, head].double() - want
            worst = max(worst, difference.abs().nan_to_num(math.inf).max().item())
        return worst

    def right(self, error: float) -> bool:
        return error <= 2 * self.plain + self.slack
