"""Errors of dq, dk and dv against float64 for a sample of key heads, compared with standard attention. The comparison
rounds probabilities, gradients of scores and results like a kernel. A single run may be accurate by chance where few
keys count, so that standard attention runs several times with random rounding, as in tests/support/check_accuracy.h.
"""

from __future__ import annotations

import math
import random

import torch

from rig.judge import TINY, TOGETHER, Verdict, visible_scores
from rig.shapes import Inputs

KV_HEADS = 2
AT_ONCE = 1 << 26  # scores
RUNS = 6


def gradients(x: Inputs, n: int, kv_head: int, dtype, rounded=None, noise=None):
    """Computes [dq of each head that reads kv_head, dk, dv] of the n-th sequence, with every operation in dtype.
    rounded: the type of probabilities, gradients of scores and results; a tensor core needs this rounding.
    noise: a generator of random rounding errors of at most half a unit; None: to nearest.
    """
    cell, group = x.cell, x.cell.heads // x.cell.kv_heads

    def lost(t):
        if rounded and noise:
            return t * (1 + (torch.rand(t.shape, generator=noise, device=t.device) - 0.5) * torch.finfo(rounded).eps)
        return t.to(rounded).to(dtype) if rounded else t

    k, v = (x.sequence(t, n)[:, kv_head] for t in (x.k, x.v))
    wide_k, wide_v = k.to(dtype), v.to(dtype)
    dk, dv, dqs = torch.zeros_like(wide_k), torch.zeros_like(wide_v), []
    for head in range(kv_head * group, (kv_head + 1) * group):
        q, dout = x.sequence(x.q, n)[:, head], x.sequence(x.dout, n)[:, head].to(dtype)
        dq = torch.empty(q.shape, dtype=dtype, device=q.device)
        for rows in torch.arange(len(q), device=q.device).split(max(1, AT_ONCE // len(k))):
            s = visible_scores(q, k, rows, cell, x.scale, dtype)
            total = torch.logsumexp(s, 1, keepdim=True)
            if x.sink is not None:
                total = torch.logaddexp(total, x.sink[head].to(dtype))
            p = (s - total).exp().nan_to_num(0.0)  # rows without keys
            delta = (lost(lost(p) @ wide_v) * dout[rows]).sum(1, keepdim=True)  # from out as it is stored
            ds = p * (dout[rows] @ wide_v.T - delta)
            if cell.softcap:
                ds *= 1 - (s / cell.softcap).clamp_min(-1) ** 2  # ds is 0 for hidden keys
            ds = lost(ds)
            dq[rows] = ds @ wide_k * x.scale
            dk += ds.T @ q[rows].to(dtype) * x.scale
            dv += lost(p).T @ dout[rows]
        dqs.append(lost(dq))
    return [*dqs, lost(dk), lost(dv)]


class GradientJudge:
    """A gradient's error may be twice standard attention's, plus the rounding of its type; numbers of neighbouring
    rows have a common bound.
    """

    def __init__(self, x: Inputs):
        self.x, self.samples, self.plain = x, [], 0.0
        draw, lengths = random.Random(1), x.cell.sequences()
        for n in sorted({lengths.index(max(lengths)), lengths.index(min(lengths)), len(lengths) - 1})[:KV_HEADS]:
            kv_head = draw.randrange(x.cell.kv_heads)
            wants = gradients(x, n, kv_head, torch.float64)
            noise = torch.Generator(x.q.device).manual_seed(1)
            largest, squares = [torch.zeros_like(w) for w in wants], [torch.zeros_like(w) for w in wants]
            for run in range(RUNS):
                plain = gradients(x, n, kv_head, torch.float32, x.q.dtype, noise if run else None)
                for most, square, got, want in zip(largest, squares, plain, wants):
                    error = (got.double() - want).abs()
                    torch.maximum(most, error, out=most)
                    square += error**2 / RUNS
            bounds = []
            for want, most, square in zip(wants, largest, squares):
                plain_error = torch.maximum(most, 3 * square.sqrt())
                self.plain = max(self.plain, most.max().item())
                near = want.to(x.q.dtype)
                slack = (near + 0.3 - 0.3 - near).abs().double()
                pairs = zip(plain_error.split(TOGETHER), slack.split(TOGETHER))
                bound = torch.cat([(2 * (e.max() + s.max())).expand(len(e), 1) for e, s in pairs])
                bounds.append(bound.clamp_min(TINY))
            self.samples.append((n, kv_head, wants, bounds))

    def __call__(self, result) -> Verdict:
        """result: a call's dq, dk and dv."""
        dq, dk, dv = result
        group = self.x.cell.heads // self.x.cell.kv_heads
        error = share = 0.0
        for n, kv_head, wants, bounds in self.samples:
            got = [self.x.sequence(dq, n)[:, kv_head * group + g] for g in range(group)]
            got += [self.x.sequence(t, n)[:, kv_head] for t in (dk, dv)]
            for g, want, bound in zip(got, wants, bounds):
                difference = (g.double() - want).abs().nan_to_num(math.inf)
                error, share = max(error, difference.max().item()), max(share, (difference / bound).max().item())
        return Verdict(error, share, None)
