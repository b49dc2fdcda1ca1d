"""torch.ops.flash_attn_3: the operators of FlashAttention-3's extension, on the functions of tandem.fa3.

The operators are defined only where FlashAttention-3 is not installed. torch sees no gradient in fwd; bwd computes it.
bwd returns the three gradients and five empty tensors for FlashAttention-3's internal results.
"""

from __future__ import annotations

import importlib.util

import torch

import tandem
from tandem._tensors import check_out
from tandem.compat import fa3
from tandem.compat._arguments import in_words, refuse_given, type_name

_LENGTHS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
_WINDOW = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
_SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    f"Tensor(out!)? out=None, {_LENGTHS}Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    f"{_WINDOW}int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    f"Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, {_LENGTHS}Tensor? seqused_q=None, Tensor? seqused_k=None, "
    f"int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, {_WINDOW}float softcap=0.0, "
    "bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    f"int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, {_LENGTHS}Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
    f"{_WINDOW}int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor",
)
# The names of fa3.flash_attn_with_kvcache's arguments in the operator.
_NAMES = {
    "k": "k_new",
    "v": "v_new",
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx",
    "cache_leftpad": "leftpad_k",
    "rotary_seqlens": "seqlens_rotary",
    "qv": "q_v",
}
_WAYS_OUT = dict.fromkeys(
    ("cu_seqlens_k", "seqused_q"), "omit it where the call appends keys, reads pages, or names rows of a cache"
)


def _fwd(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    q_v=None,
    out=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    is_rotary_interleaved=False,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    options = {
        "softmax_scale": softmax_scale,
        "causal": is_causal,
        "qv": q_v,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "num_splits": num_splits,
    }
    if out is not None:
        check_out(out, q, v, {"q": q, "k": k, "v": v, "k_new": k_new, "v_new": v_new}.items())
    of_cache = (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin)
    if any(x is not None for x in of_cache) or (cu_seqlens_q is not None and cu_seqlens_k is None):
        refuse_given(_WAYS_OUT, {"cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q}, type_name)
        tensors = q, k, v, k_new, v_new
        result, lse, *parts = in_words(
            _NAMES,
            fa3.flash_attn_with_kvcache,
            *tensors,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q,
            rotary_seqlens=seqlens_rotary,
            rotary_interleaved=is_rotary_interleaved,
            return_softmax_lse=True,
            **options,
        )
    else:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
        with torch.no_grad():
            result, lse = fa3.flash_attn_varlen_func(q, k, v, *lengths, **options, return_attn_probs=True)
        parts = [lse.new_empty(0), lse.new_empty(0)]
    return result if out is None else out.copy_(result), lse, *parts


def _bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq=None,
    dk=None,
    dv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    options = fa3._options(softmax_scale, is_causal, (window_size_left, window_size_right), softcap, deterministic, 0)
    with torch.no_grad():
        found = tandem.attention_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            dq=dq,
            dk=dk,
            dv=dv,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **options,
        )
    return (*found[:3], *(softmax_lse.new_empty(0) for _ in range(5)))


def _get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k, *_, **__
):
    return fa3.no_metadata(seqused_k)


def _define() -> torch.library.Library | None:
    """Defines the operators and returns their library; None where FlashAttention-3's own exist."""
    if hasattr(torch.ops.flash_attn_3, "fwd") or importlib.util.find_spec("flash_attn_3") is not None:
        return None
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for schema, function in zip(_SCHEMAS, (_fwd, _bwd, fa3.combine, _get_scheduler_metadata)):
        library.impl(library.define(schema), function, "CompositeExplicitAutograd")
    return library


_library = _define()
