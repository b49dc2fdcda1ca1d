"""The functions of FlashAttention-3's module flash_attn_interface, on tandem.attention.

Shapes and rules equal tandem.flash_attn's, with two differences. v may have another head_dim than q, and lse is -inf
for a row that sees no key. num_splits divides the keys on a GPU; a number below 1 lets the plan choose. pack_gqa,
sm_margin and scheduler_metadata tune FlashAttention-3's kernels; they are accepted and change no result. 8-bit inputs
(q_descale, k_descale, v_descale) and qv are refused. With attention_chunk a query sees only keys of the same
chunk, forward and backward, and with causal and window_size; 0 and less mean no chunks.

J. Shah et al. FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision. arXiv 2407.08608.
"""

from __future__ import annotations

import torch

import tandem
from tandem._arrays import flag_of
from tandem.compat._arguments import (
    bounds,
    cap,
    chunked,
    in_words,
    is_deterministic,
    is_tensor,
    no_metadata,
    refuse_scales,
    splits,
    unit_stride,
)
from tandem.compat.flash_attn import _kvcache, _packed
from tandem.compat.flash_attn._combine import combine

__version__ = "3.0.0"

flash_attn_3_gpu = torch.ops.flash_attn_3

_NAMES = {"window": "window_size"}  # our arguments' names in this interface


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of q (batch, seqlen_q, heads, head_dim) to k and v (batch, seqlen_k, heads_k, head_dim or head_dim_v).

    Returns out, or with return_attn_probs (out, softmax_lse): (batch, heads, seqlen_q), with a gradient.
    """
    _refuse(qv, q_descale, k_descale, v_descale)
    is_tensor(q, "q")
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, attention_chunk)
    return _attend(q, k, v, {**options, "num_splits": splits(num_splits)}, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """Self-attention of qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 heads_k, head_dim)
    with num_heads_q. The gradient is one tensor of that shape.

    Returns out (batch, seqlen, heads, head_dim), or with return_attn_probs (out, softmax_lse).
    """
    _refuse(None, q_descale, k_descale, v_descale)
    is_tensor(qkv, "qkv")
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        unpack = _unbind
    elif qkv.dim() == 4 and num_heads_q is not None and qkv.shape[2] >= num_heads_q + 2:
        num_heads_k, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if rest:
            raise ValueError(
                f"qkv.heads ({qkv.shape[2]}) must be num_heads_q ({num_heads_q}) plus an even number: pass "
                "num_heads_q + 2 heads_k heads"
            )
        sizes = (num_heads_q, num_heads_k, num_heads_k)

        def unpack(x):
            return x.split(sizes, dim=-2)

    else:
        raise ValueError(
            f"qkv (shape {tuple(qkv.shape)}) must be (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, "
            f"num_heads_q + 2 heads_k, head_dim) with num_heads_q ({num_heads_q}): reshape it"
        )
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, attention_chunk)
    names = {**_NAMES, **dict.fromkeys("qkv", "qkv")}
    out, lse = in_words(names, _packed.attention, None, qkv, unpack, options)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim or head_dim_v).

    Sequence b holds the rows from cu_seqlens[b] to cu_seqlens[b + 1] (int32), of which seqused[b] are used; the rest of
    the result is 0. Returns out, or with return_attn_probs (out, softmax_lse): (heads, total_q), with a gradient.
    """
    _refuse(qv, q_descale, k_descale, v_descale)
    is_tensor(q, "q")
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, attention_chunk)
    options.update(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=splits(num_splits),
    )
    return _attend(q, k, v, options, return_attn_probs)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Attention to all keys from attention to parts of them, computed in float32. The result has no gradient.

    out_partial : (parts, batch, seqlen, heads, head_dim).
    lse_partial : out_partial's shape without head_dim, natural logarithm; -inf for a row that saw no key of its part.
    out : tensor to write to. out_dtype : type of the result; out_partial's unless given.
    Returns (out, lse): (batch, seqlen, heads, head_dim) and (batch, seqlen, heads).
    """
    return combine(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """tandem.compat.flash_attn.flash_attn_with_kvcache, also for packed q and packed new keys, without a gradient.

    q (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q; k and v (batch, seqlen_new,
    heads_k, head_dim), or (total_new, ...) with cu_seqlens_k_new. rotary_seqlens (batch, int32) takes the place of
    cache_seqlens for the rotation. With page_table (batch, max_pages, int32) the caches are (pages, page_size, heads_k,
    head_dim). cache_batch_idx then selects rows of page_table, and cache_leftpad costs a copy of the pages. Nothing is
    written when a call is refused.
    Returns out, like q, or (out, softmax_lse, out_accum, softmax_lse_accum); the last two, which hold the parts of a
    split call in FlashAttention-3, are empty.
    """
    _refuse(qv, q_descale, k_descale, v_descale)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        is_tensor(x, name)
    pages = _kvcache.pages_of("page_table", page_table)
    cache = _kvcache.Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, pages)
    options = _options(softmax_scale, causal, window_size, softcap, False, attention_chunk)
    options.update(alibi_slopes=None, num_splits=splits(num_splits), max_seqlen_q=max_seqlen_q)
    # A window that hides nothing is dropped, so that every query has the same place.
    seqlen_q = _kvcache.longest_q(q, cu_seqlens_q, max_seqlen_q)
    left, right = options["window"] or (None, None)
    local = (left is not None and left < cache.capacity() - 1) or (right is not None and right < seqlen_q - 1)
    local = local or "mask_mod" in options
    out, lse = _kvcache.append_and_attend(
        cache,
        q,
        k,
        v,
        _kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, flag_of(causal, "causal") or local, rotary_seqlens),
        options,
        cu_seqlens_q,
        cu_seqlens_k_new,
    )
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """An empty int32 tensor for flash_attn_with_kvcache's scheduler_metadata: Tandem plans nothing ahead."""
    return no_metadata(cache_seqlens)


def _options(softmax_scale, causal, window_size, softcap, deterministic, attention_chunk):
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": bounds(window_size),
        "softcap": cap(softcap),
        "deterministic": is_deterministic(deterministic),
    }
    return chunked(options, attention_chunk)


def _attend(q, k, v, options, return_attn_probs):
    q, k, v = unit_stride(q, "q"), unit_stride(k, "k"), unit_stride(v, "v")
    if not return_attn_probs:
        return in_words(_NAMES, tandem.attention, q, k, v, **options)
    return in_words(_NAMES, tandem.attention, q, k, v, return_lse=True, **options)


def _unbind(packed):
    return packed.unbind(-3)


def _refuse(qv, q_descale, k_descale, v_descale):
    if qv is not None:
        raise tandem.Unsupported(
            "qv is given, but a second product is not served: join q with qv and k with v along head_dim, and omit qv"
        )
    refuse_scales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


from tandem.compat import _fa3_ops  # noqa: E402, F401  # defines torch.ops.flash_attn_3
