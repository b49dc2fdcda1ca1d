"""The attention functions that SGLang (0.5.23) calls, on tandem.attention.

The names and parameters equal sglang.kernels.ops.attention.flash_attention's. The functions of sgl_kernel.flash_attn
have a part of these parameters. Shapes and rules equal tandem.fa3's, with these differences.

- ver 3 and 4 compute the same result. With return_softmax_lse ver 4 returns (out, lse) without empty parts.
- Every ver serves new keys, rotary embeddings, cache_batch_idx, cache_leftpad, sinks, score_mod and mask_mod.
- score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors) and mask_mod(b, h, q_idx, kv_idx, seqlen_info,
  aux_tensors) are plain Python functions of single numbers, as in tandem.fa4.
- out is a tensor to write to.
- scheduler_metadata, pack_gqa and sm_margin change no result.
- qv, only_qv, descales, MXFP8 scales (sfq, sfk, sfv), rel_bias, and attention_chunk with mask_mod are refused.
"""

from __future__ import annotations

from typing import Optional, Union

import torch

import tandem
from tandem._arrays import flag_of
from tandem.compat import fa4
from tandem.compat._arguments import (
    bounds,
    cap,
    chunked,
    in_words,
    is_tensor,
    lengths_of,
    no_metadata,
    refuse_given,
    refuse_scales,
    sink_for,
    splits,
    type_name,
)
from tandem.compat.flash_attn import _kvcache

_NAMES = {"sink": "sinks", "learnable_sink": "sinks", "window": "window_size"}
_WAYS_OUT = {
    "qv": "join q with qv and k with v along head_dim, and omit qv",
    "only_qv": "pass the keys as k, and omit only_qv",
    "rel_bias": "add the bias with score_mod and aux_tensors",
    "rel_bias_prep_cache": "omit it, because rel_bias is not served",
}


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_table: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk: Optional[int] = None,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    only_qv=False,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
    score_mod=None,
    aux_tensors=None,
    sfq=None,
    sfk=None,
    sfv=None,
    rel_bias=None,
    rel_bias_prep_cache=None,
    ver=3,
    out=None,
    max_seqlen_k: Optional[int] = None,
    mask_mod=None,
):
    """Appends k and v to a cache, in place, then attends to the cache. The function has no gradient.

    tandem.fa3.flash_attn_with_kvcache describes the shapes. Rows of q after cu_seqlens_q[-1] are not read with
    page_table. A refused call writes nothing.
    Returns out, or with return_softmax_lse (out, softmax_lse, empty, empty); with ver 4 (out, softmax_lse).
    """
    _refuse(ver, qv, only_qv, rel_bias, rel_bias_prep_cache)
    refuse_scales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, sfq=sfq, sfk=sfk, sfv=sfv)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        is_tensor(x, name)
    has_mods = score_mod is not None or mask_mod is not None
    sorts = cache_leftpad is not None or (page_table is None and (cache_batch_idx, cu_seqlens_q) != (None, None))
    if has_mods and sorts:
        raise tandem.Unsupported(
            "score_mod and mask_mod with cache_leftpad, or with cache_batch_idx or cu_seqlens_q without page_table, "
            "are not served: pass page_table without cache_leftpad"
        )
    cache = _kvcache.Cache(
        k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, _kvcache.pages_of("page_table", page_table)
    )
    options = {
        **_options(q, softmax_scale, causal, window_size, softcap, num_splits, sinks),
        **fa4._mods(q, score_mod, mask_mod, aux_tensors, None, softcap, cu_seqlens_q, None),
        "alibi_slopes": None,
        "out": out,
        "max_seqlen_q": max_seqlen_q,
    }
    options = chunked(options, attention_chunk, mask_mod)
    seqlen_q = _kvcache.longest_q(q, cu_seqlens_q, max_seqlen_q)
    left, right = options["window"] or (None, None)
    local = (left is not None and left < cache.capacity() - 1) or (right is not None and right < seqlen_q - 1)
    local = local or (attention_chunk or 0) > 0
    each_query = options["causal"] or local
    rotary = _kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, each_query, rotary_seqlens)
    lengths = cu_seqlens_q, cu_seqlens_k_new
    out, lse = in_words(_NAMES, _kvcache.append_and_attend, cache, q, k, v, rotary, options, *lengths)
    return _results(out, lse, ver) if return_softmax_lse else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
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
    only_qv=False,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
    score_mod=None,
    aux_tensors=None,
    sfq=None,
    sfk=None,
    sfv=None,
    rel_bias=None,
    rel_bias_prep_cache=None,
    ver=3,
    out=None,
    mask_mod=None,
):
    """Attention of sequences of different lengths. q is packed with cu_seqlens_q, or dense, and so are k and v.

    tandem.fa4.flash_attn_varlen_func describes the shapes. With page_table the lengths of the keys are seqused_k, or
    the differences of cu_seqlens_k.
    Returns out, like q, or the tuple of flash_attn_with_kvcache.
    """
    _refuse(ver, qv, only_qv, rel_bias, rel_bias_prep_cache)
    refuse_scales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, sfq=sfq, sfk=sfk, sfv=sfv)
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_tensor(x, name)
    if page_table is not None and cu_seqlens_k is not None:
        seqused_k = lengths_of(cu_seqlens_k, "cu_seqlens_k") if seqused_k is None else seqused_k
        cu_seqlens_k = None
    options = {
        **_options(q, softmax_scale, causal, window_size, softcap, num_splits, sinks),
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "page_table": page_table,
        "max_seqlen_q": fa4._longest(q, cu_seqlens_q, max_seqlen_q),
        "max_seqlen_k": fa4._longest(k, cu_seqlens_k, max_seqlen_k),
        "out": out,
    }
    options = chunked(options, attention_chunk, mask_mod)
    mods = (q, score_mod, mask_mod, aux_tensors, None, softcap)
    arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, options, mods, return_softmax_lse)
    out, lse = in_words(_NAMES, fa4._attend_varlen, *arguments)
    return _results(out, lse, ver) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size=(-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
):
    """An empty int32 tensor for scheduler_metadata: Tandem plans nothing ahead."""
    return no_metadata(cache_seqlens)


def is_fa3_supported(device=None) -> bool:
    """True: every device that Tandem serves has these functions."""
    return True


def _results(out, lse, ver):
    """Returns the tuple of a version. FlashAttention-3's also has the parts of a split call, which are empty here."""
    return (out, lse) if ver == 4 else (out, lse, lse.new_empty(0), lse.new_empty(0))


def _options(q, softmax_scale, causal, window_size, softcap, num_splits, sinks):
    return {
        "softmax_scale": softmax_scale,
        "causal": flag_of(causal, "causal"),
        "window": bounds(window_size),
        "softcap": cap(0.0 if softcap is None else softcap),
        "num_splits": splits(num_splits),
        "sink": sink_for(q, sinks, "sinks"),
    }


def _refuse(ver, qv, only_qv, rel_bias, rel_bias_prep_cache):
    if ver not in (3, 4):
        raise ValueError(f"ver ({ver!r}) must be 3 or 4: pass one of them")
    refused = {
        "qv": qv,
        "rel_bias_prep_cache": rel_bias_prep_cache,
        "only_qv": only_qv or None,
        "rel_bias": rel_bias,
    }
    refuse_given(_WAYS_OUT, refused, lambda x: x if isinstance(x, (bool, int)) else type_name(x))
