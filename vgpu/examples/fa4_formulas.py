"""Attention and its gradients in float64, and the error that a kernel may have."""

import dataclasses
import math

import numpy as np


def to_bf16(x):
    """float32 values rounded to bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(x):
    return (to_bf16(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool = False
    distance: bool = False  # a score_mod adds abs(i - j) to each score

    @property
    def scale(self):
        return 1 / math.sqrt(self.head_dim)

    @property
    def group(self):
        return self.heads_q // self.heads_k


def softmax(q, k, shape):
    """Returns exp(score - largest) of (batch, heads, i, j), and their sum and the largest score for each query."""
    scores = np.einsum("bihd,bjhd->bhij", q, k) * np.asarray(shape.scale, q.dtype)
    rows, columns = np.arange(shape.seqlen_q)[:, None], np.arange(shape.seqlen_k)[None, :]
    if shape.distance:
        scores = scores + np.abs(rows - columns).astype(q.dtype)
    if shape.causal:  # aligned at the bottom right
        scores = np.where(columns <= rows + shape.seqlen_k - shape.seqlen_q, scores, -np.inf)
    largest = scores.max(axis=-1, initial=-np.inf)
    p = np.exp(scores - np.where(np.isfinite(largest), largest, 0)[..., None])
    return p, p.sum(axis=-1), largest


def attention(q, k, v, shape, round_p=False):
    """Inputs are (batch, seqlen, heads, head_dim). round_p rounds P and the output to bfloat16."""
    k, v = (np.repeat(x, shape.group, axis=2) for x in (k, v))
    p, total, _ = softmax(q, k, shape)
    p = to_bf16(p) if round_p else p
    out = np.einsum("bhij,bjhd->bihd", p, v)
    out = out / np.where(total == 0, 1, total).swapaxes(1, 2)[..., None]
    return to_bf16(out) if round_p else out


def gradients(q, k, v, dout, shape, round_p=False):
    """Returns the output, lse, dq, dk, dv. round_p rounds P, dS and the results to bfloat16."""
    rounded = to_bf16 if round_p else lambda x: x
    p, total, largest = softmax(q, k, shape)
    lse = largest + np.log(np.where(total == 0, 1, total))  # -inf for a query without keys
    p = p / np.where(total == 0, 1, total)[..., None]
    out = rounded(np.einsum("bhij,bjhd->bihd", rounded(p), v))
    delta = np.einsum("bihd,bihd->bhi", out, dout)[..., None]
    ds = rounded(p * (np.einsum("bihd,bjhd->bhij", dout, v) - delta))
    scale = np.asarray(shape.scale, q.dtype)
    dq, dk = np.einsum("bhij,bjhd->bihd", ds, k) * scale, np.einsum("bhij,bihd->bjhd", ds, q) * scale
    dv = np.einsum("bhij,bihd->bjhd", rounded(p), dout)
    return out, lse, rounded(dq), rounded(dk), rounded(dv)


def allowed_error(plain, exact):
    """Returns twice the error of standard attention in bfloat16, plus the rounding to float32."""
    slack = 2 * np.abs((exact + 0.3 - 0.3) - exact).max()
    return float(2 * np.abs(plain - exact).max() + slack)
