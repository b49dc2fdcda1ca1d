"""Errors against float64 on a sample of rows, compared with standard attention that rounds like a kernel."""

from __future__ import annotations

import dataclasses
import math
import random

import torch

from rig.shapes import Inputs

ROWS = 256  # rows per sampled head
TOGETHER = 32  # rows with a common bound
HEADS = 4
TINY = 1e-30  # bound of an exact zero


def visible_scores(q, k, rows, cell, scale, dtype):
    """Returns scores of the queries at these rows of a sequence, one head, -inf for hidden keys."""
    s = (q[rows].to(dtype) @ k.to(dtype).T) * scale
    if cell.softcap:
        s = cell.softcap * torch.tanh(s / cell.softcap)
    key = torch.arange(len(k), device=k.device) - (len(k) - len(q))  # 0: on the diagonal of the first query
    if cell.causal:
        s.masked_fill_(key > rows[:, None], -math.inf)
    if cell.window:
        s.masked_fill_(key <= rows[:, None] - cell.window, -math.inf)
    return s


def attend(q, k, v, rows, cell, scale, sink, dtype, rounded=None):
    """Computes (out, lse) of these rows, with every operation in dtype. rounded: the type of exponentials, relative to
    the largest score, and of results; a tensor core needs this rounding.
    """
    s = visible_scores(q, k, rows, cell, scale, dtype)
    largest = s.amax(1, keepdim=True)
    empty = largest == -math.inf  # rows without keys: out is 0, LSE is -inf
    largest = largest.masked_fill(empty, 0)
    if sink is not None:
        largest = largest.clamp_min(sink.to(dtype))
    p = (s - largest).exp()
    total = p.sum(1, keepdim=True)
    if sink is not None:
        total += (sink.to(dtype) - largest).exp()
    if rounded:
        p = p.to(rounded).to(dtype)
    out = p @ v.to(dtype) / total.masked_fill(total == 0, 1)
    return (out.to(rounded).to(dtype) if rounded else out), (largest + total.log())[:, 0]


@dataclasses.dataclass
class Verdict:
    error: float  # largest error of the sample; inf for NaN
    share: float  # error divided by its bound
    lse_error: float | None  # None: without an LSE
    lse_share: float = 0.0

    @property
    def right(self) -> bool:
        return self.share <= 1 and self.lse_share <= 1

    def why(self) -> str:
        of_lse = f"; of its LSE {self.lse_error:.1e}, {self.lse_share:.1f} times" if self.lse_share > 1 else ""
        return f"its error is {self.error:.1e}, {self.share:.1f} times what it may be{of_lse}"


class Judge:
    """An output's error may be twice standard attention's, plus the rounding of its type; neighbouring rows have a
    common bound. An LSE's error may be half of a probability's rounding.
    """

    def __init__(self, x: Inputs):
        self.x, self.samples, self.plain = x, [], 0.0
        cell, draw = x.cell, random.Random(1)
        self.lse_bound = torch.finfo(x.q.dtype).eps / 4
        sequences = cell.sequences()
        picked = {0, sequences.index(max(sequences)), sequences.index(min(sequences)), len(sequences) - 1}
        for n in range(HEADS):
            b, head = sorted(picked)[n % len(picked)], draw.randrange(cell.heads)
            length = sequences[b]
            # The first rows see the fewest keys, and the last rows the most.
            ends = [*range(min(TOGETHER, length)), *range(max(0, length - TOGETHER), length)]
            rows = sorted({*ends, *draw.sample(range(length), min(length, ROWS - 2 * TOGETHER))})
            rows = torch.tensor(rows, device=x.q.device)
            of_kv = x.kv_head(head)
            q, k, v = (x.sequence(t, b)[:, h] for t, h in zip((x.q, x.k, x.v), (head, of_kv, of_kv)))
            given = (q, k, v, rows, cell, x.scale, None if x.sink is None else x.sink[head])
            want, lse = attend(*given, torch.float64)
            plain, _ = attend(*given, torch.float32, rounded=x.q.dtype)
            plain_error = (plain.double() - want).abs()
            self.plain = max(self.plain, plain_error.max().item())
            near = want.to(x.q.dtype)
            lost = (near + 0.3 - 0.3 - near).abs().double()
            bound = torch.cat(
                [
                    (2 * (e.max() + slack.max())).expand(len(e), 1)
                    for e, slack in zip(plain_error.split(TOGETHER), lost.split(TOGETHER))
                ]
            )
            self.samples.append((b, head, rows, want, bound.clamp_min(TINY), lse))

    def __call__(self, result) -> Verdict:
        """result: a call's output or (output, LSE)."""
        out, lse = result if isinstance(result, tuple) else (result, None)
        error = share = lse_error = 0.0
        for b, head, rows, want, bound, want_lse in self.samples:
            difference = (self.x.sequence(out, b)[rows, head].double() - want).abs().nan_to_num(math.inf)
            error = max(error, difference.max().item())
            share = max(share, (difference / bound).max().item())
            if lse is not None:
                got = self.x.rows_of_lse(lse, b, head)[rows].double()
                difference = (got - want_lse).abs().masked_fill(got == want_lse, 0)  # -inf where no key is visible
                lse_error = max(lse_error, difference.nan_to_num(math.inf).max().item())
        if lse is None:
            return Verdict(error, share, None)
        return Verdict(error, share, lse_error, lse_error / self.lse_bound)

    def hardness(self) -> dict:
        from rig import data

        x = self.x
        return data.hardness(x, lambda q, k, rows, head: visible_scores(q, k, rows, x.cell, x.scale, torch.float32))
