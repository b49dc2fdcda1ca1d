"""The functions of ring_flash_attn (0.1.8), on tandem.context_parallel.

Every function takes the shards that ring_flash_attn's function of its name takes, and returns out or, with
return_attn_probs, (out, softmax_lse, None).

- ring: rank r has part r of each sequence, of equal lengths.
- zigzag_ring: rank r has parts r and 2 * ranks - 1 - r of the 2 * ranks equal parts of each sequence.
- stripe: rank r has the positions r, r + ranks, ... of each sequence.
- The varlen functions take the cu_seqlens of this rank's rows. The host reads them.

softmax_lse is (batch, heads, rows), or (heads, rows) of varlen functions. Windows and alibi_slopes are served, in all
functions except for alibi_slopes in stripe. deterministic changes nothing. dropout_p and the functions of llama3 and of
the adapters for transformers are refused.
"""

from __future__ import annotations

from typing import Any

import torch

import tandem
from tandem.compat._arguments import bounds, is_tensor
from tandem.compat._ranks import attend_dense, lengths_of, plan_of, ranks_of

__version__ = "0.1.8"

_NAMES = {"window": "window_size"}
_LAYOUTS = {"ring": "contiguous", "zigzag_ring": "per_document", "stripe": "striped"}
_OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "return_attn_probs", "group")


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _OPTIONS}


def _options(qkv: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    for name, x in zip("qkv", qkv):
        is_tensor(x, name)
    if options["dropout_p"]:
        raise tandem.Unsupported(f"dropout_p ({options['dropout_p']}) must be 0: call tandem.context_parallel for it")
    return {
        "group": options["group"],
        "execution": "ring",
        "softmax_scale": options["softmax_scale"],
        "alibi_slopes": options["alibi_slopes"],
    }


def _dense(kind: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    given = _options((q, k, v), options)
    for name, x in zip("qkv", (q, k, v)):
        if x.dim() != 4:
            raise ValueError(f"{name} ({x.dim()} dimensions) must be (batch, rows, heads, head_dim): pass the shard")
    ranks = ranks_of(options["group"])
    window = bounds(options["window_size"])
    plan = plan_of((q.shape[1] * ranks,), ranks, _LAYOUTS[kind], bool(options["causal"]), window)
    out, lse = attend_dense(q, k, v, plan, _NAMES, **given)
    return (out, lse, None) if options["return_attn_probs"] else out


def _varlen(kind: str, qkv: tuple[Any, ...], cu_seqlens: Any, options: dict[str, Any]) -> Any:
    given = _options(qkv, options)
    ranks, window = ranks_of(options["group"]), bounds(options["window_size"])
    lengths = tuple(ranks * n for n in lengths_of(cu_seqlens, "cu_seqlens"))
    causal = bool(options["causal"])
    if kind != "ring":
        plan = plan_of(lengths, ranks, _LAYOUTS[kind], causal, window)
        out, lse = tandem.context_parallel(*qkv, plan=plan, return_lse=True, **given)
    else:
        out, lse = _each_sequence(qkv, lengths, (ranks, _LAYOUTS[kind], causal, window), given)
    return (out, lse, None) if options["return_attn_probs"] else out


def _each_sequence(
    qkv: tuple[Any, ...], lengths: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Computes sequence after sequence: no plan has a contiguous part of each sequence on each rank."""
    rows = sum(lengths) // arguments[0]
    for name, x in zip("qkv", qkv):
        if x.shape[0] != rows:
            raise ValueError(f"cu_seqlens[-1] ({rows}) must be the rows of {name} ({x.shape[0]}): extend cu_seqlens")
    results, begin = [], 0
    for n, length in enumerate(lengths):
        rows = slice(begin, begin + length // arguments[0])
        begin = rows.stop
        slopes = options["alibi_slopes"]
        own = {**options, "alibi_slopes": slopes[n] if slopes is not None and slopes.dim() == 2 else slopes}
        shard = [x[rows] for x in qkv]
        results.append(tandem.context_parallel(*shard, plan=plan_of((length,), *arguments), return_lse=True, **own))
    if not results:
        q, _, v = qkv
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[1], 0), dtype=torch.float32)
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=1)


def ring_flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of q, k and v (batch, rows, heads, head_dim), shards by contiguous parts."""
    return _dense("ring", q, k, v, _given(locals()))


def ring_flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of q, and kv (batch, rows, 2, heads_k, head_dim), shards by contiguous parts."""
    return _dense("ring", q, kv[:, :, 0], kv[:, :, 1], _given(locals()))


def ring_flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of qkv (batch, rows, 3, heads, head_dim), shards by contiguous parts."""
    return _dense("ring", qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], _given(locals()))


def ring_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of packed q, k and v (rows, heads, head_dim), shards by contiguous parts of each sequence."""
    return _varlen("ring", (q, k, v), cu_seqlens, _given(locals()))


def ring_flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of packed q, and kv (rows, 2, heads_k, head_dim), shards by contiguous parts of each sequence."""
    return _varlen("ring", (q, kv[:, 0], kv[:, 1]), cu_seqlens, _given(locals()))


def ring_flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of packed qkv (rows, 3, heads, head_dim), shards by contiguous parts of each sequence."""
    return _varlen("ring", (qkv[:, 0], qkv[:, 1], qkv[:, 2]), cu_seqlens, _given(locals()))


def zigzag_ring_flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of q, k and v (batch, rows, heads, head_dim), shards by zigzags."""
    return _dense("zigzag_ring", q, k, v, _given(locals()))


def zigzag_ring_flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of q, and kv (batch, rows, 2, heads_k, head_dim), shards by zigzags."""
    return _dense("zigzag_ring", q, kv[:, :, 0], kv[:, :, 1], _given(locals()))


def zigzag_ring_flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of qkv (batch, rows, 3, heads, head_dim), shards by zigzags."""
    return _dense("zigzag_ring", qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], _given(locals()))


def zigzag_ring_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of packed q, k and v (rows, heads, head_dim), shards by zigzags of each sequence."""
    return _varlen("zigzag_ring", (q, k, v), cu_seqlens, _given(locals()))


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of packed q, and kv (rows, 2, heads_k, head_dim), shards by zigzags of each sequence."""
    return _varlen("zigzag_ring", (q, kv[:, 0], kv[:, 1]), cu_seqlens, _given(locals()))


def zigzag_ring_flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of packed qkv (rows, 3, heads, head_dim), shards by zigzags of each sequence."""
    return _varlen("zigzag_ring", (qkv[:, 0], qkv[:, 1], qkv[:, 2]), cu_seqlens, _given(locals()))


def stripe_flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of q, k and v (batch, rows, heads, head_dim), shards by stripes."""
    return _dense("stripe", q, k, v, _given(locals()))


def stripe_flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of q, and kv (batch, rows, 2, heads_k, head_dim), shards by stripes."""
    return _dense("stripe", q, kv[:, :, 0], kv[:, :, 1], _given(locals()))


def stripe_flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """Attention of qkv (batch, rows, 3, heads, head_dim), shards by stripes."""
    return _dense("stripe", qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], _given(locals()))


def __getattr__(name: str) -> Any:
    if name.startswith("llama3_flash_attn") or name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        raise tandem.Unsupported(f"{name} is not served: call tandem.context_parallel with a tandem.ContextPlan")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
