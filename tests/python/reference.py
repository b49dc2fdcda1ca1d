"""Standard attention in numpy, in float64 by default. The tests compare Tandem with it.

Follows docs/semantics.md line by line and shares nothing with the package. Gradients are derived by hand.
"""

from __future__ import annotations

import numpy as np


def softmax_parts(q, k, *, softmax_scale=None, causal=False, alignment="bottom_right", window=None, softcap=0.0,
                  alibi_slopes=None, bias=None, sink=None, sk_used=None, sq_used=None, diagonal_offset=None,
                  dtype=np.float64):  # fmt: skip
    """Of one sequence: probabilities, LSE and d(score)/d(product), (heads, seqlen_q, seqlen_k)."""
    q, k = q.astype(dtype), k.astype(dtype)
    sq, heads, dim = q.shape
    sk = k.shape[0]
    group = heads // k.shape[1] if k.shape[1] else 1
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    s = np.einsum("ihd,jhd->hij", q, k.repeat(group, axis=1)) * dtype(scale)
    slope = np.full_like(s, scale)
    if softcap:
        t = np.tanh(s / dtype(softcap))
        s = t * dtype(softcap)
        slope = slope * (1 - t * t)
    visible = np.ones((heads, sq, sk), bool)
    if bias is not None:
        if bias.dtype == bool:
            visible &= bias
        else:
            s = s + bias.astype(dtype)
    used_q, used_k = sq if sq_used is None else sq_used, sk if sk_used is None else sk_used
    offset = 0 if alignment == "top_left" else used_k - used_q
    if diagonal_offset is not None:
        offset = diagonal_offset
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    if alibi_slopes is not None:
        s = s - alibi_slopes.astype(dtype)[:, None, None] * np.abs(i + offset - j)
    left, right = window if window is not None else (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        visible &= j >= i + offset - left
    if right is not None:
        visible &= j <= i + offset + right
    visible &= (j < used_k) & (i < used_q)
    s = np.where(visible, s, -np.inf)
    logits = s
    if sink is not None:
        column = np.where(i < used_q, sink.astype(dtype)[:, None, None], -np.inf)
        logits = np.concatenate([s, np.broadcast_to(column, (heads, sq, 1))], axis=2)
    top = logits.max(axis=2, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0)
    total = np.exp(logits - safe[..., None]).sum(axis=2)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + safe, -np.inf)
    p = np.where(visible, np.exp(s - np.where(np.isfinite(lse), lse, 0)[..., None]), 0)
    return p.astype(dtype), lse, slope


def forward(q, k, v, *, kept=None, dtype=np.float64, **options):
    """Returns out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q) of one sequence. kept: the factors of
    dropout.
    """
    p, lse, _ = softmax_parts(q, k, dtype=dtype, **options)
    if kept is not None:
        p = p * kept
    group = q.shape[1] // v.shape[1]
    return np.einsum("hij,jhd->ihd", p, v.astype(dtype).repeat(group, axis=1)), lse


def backward(dout, q, k, v, *, dlse=None, kept=None, dtype=np.float64, **options):
    """Returns dq, dk, dv, dbias (not summed over broadcasts yet) and dsink of one sequence."""
    p, lse, slope = softmax_parts(q, k, dtype=dtype, **options)
    heads, heads_k = q.shape[1], k.shape[1]
    group = heads // heads_k
    q, k, v, dout = (
        q.astype(dtype),
        k.astype(dtype).repeat(group, axis=1),
        v.astype(dtype).repeat(group, axis=1),
        dout.astype(dtype),
    )
    z = p if kept is None else p * kept
    dv = np.einsum("hij,ihd->jhd", z, dout)
    dz = np.einsum("ihd,jhd->hij", dout, v)
    dp = dz if kept is None else dz * kept
    delta = np.einsum("ihd,ihd->hi", dout, np.einsum("hij,jhd->ihd", z, v))
    if dlse is not None:
        delta = delta - np.where(np.isfinite(lse), dlse, 0)
    ds = p * (dp - delta[..., None])
    dq = np.einsum("hij,jhd->ihd", ds * slope, k)
    dk = np.einsum("hij,ihd->jhd", ds * slope, q)
    dsink = None
    if options.get("sink") is not None:
        share = np.exp(options["sink"].astype(dtype)[:, None] - np.where(np.isfinite(lse), lse, np.inf))
        dsink = -(share * delta).sum(axis=1)

    def sum_group(x):
        return x.reshape(x.shape[0], heads_k, group, x.shape[2]).sum(axis=2)

    return dq, sum_group(dk), sum_group(dv), ds, dsink


def hold(ours, exact, plain, what=""):
    """The 2x rule: our largest error is at most twice the error of standard attention, plus 16 units of float32.

    One run of standard attention on few numbers may have small errors by chance. The C++ tests account for that and are
    stricter.
    """
    ours, exact, plain = (np.asarray(x, np.float64) for x in (ours, exact, plain))
    assert ours.shape == exact.shape, f"{what}: shape {ours.shape}, expected {exact.shape}"
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(ours), finite), f"{what}: infinities or NaN in other places"
    assert np.array_equal(ours[~finite], exact[~finite]), f"{what}: other infinities"
    if not finite.any():
        return
    ours, exact, plain = ours[finite], exact[finite], plain[finite]
    error = np.abs(ours - exact).max()
    allowed = 2 * np.abs(plain - exact).max() + 2**-19 * max(1.0, np.abs(exact).max())
    assert error <= allowed, f"{what}: largest error {error:.3g}, allowed {allowed:.3g}"
