"""_flash_attn_fwd and _flash_attn_bwd of flash_attn.cute.interface, on the functions of tandem.fa4."""

from __future__ import annotations

import torch

import tandem
from tandem._tensors import check_result
from tandem.compat import fa4
from tandem.compat._arguments import in_words, is_tensor, refuse_scales, sink_for, splits


@torch.no_grad()
def _flash_attn_fwd(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    tile_mn=None,
    mma_pv_is_rs=None,
    intra_wg_overlap=None,
    num_threads=384,
    num_splits=1,
    pack_gqa=None,
    _arch=None,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    return_lse=False,
    out=None,
    lse=None,
    aux_tensors=None,
    aux_scalars=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    gather_kv_indices=None,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
):
    """Returns (out, lse, None, None) of flash_attn_varlen_func, without a gradient. out and lse: tensors to write to.

    lse is None unless it is given, return_lse is True or an input requires a gradient.
    """
    fa4._refuse(qv=qv, gather_kv_indices=gather_kv_indices)
    refuse_scales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    is_tensor(q, "q")
    if lse is not None:
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        check_result(lse, "lse", shape, (dtype,), {"q": q, "k": k, "v": v, "out": out}.items())
    softcap = softcap or 0.0
    window = (window_size_left, window_size_right)
    options = fa4._options(softmax_scale, causal, window, learnable_sink, softcap, splits(num_splits), False)
    options.update(
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        batch_invariant=seqlen_k_per_split is not None,
        max_seqlen_q=fa4._longest(q, cu_seqlens_q, max_seqlen_q),
        max_seqlen_k=fa4._longest(k, cu_seqlens_k, max_seqlen_k),
        out=out,
    )
    if block_sparse_tensors is not None:
        options["block_mask"] = fa4._blocks(block_sparse_tensors)
    mods = (q, score_mod, mask_mod, aux_tensors, aux_scalars, softcap)
    result, found = fa4._attend_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, options, mods, True)
    if lse is not None:
        lse.copy_(found)
    elif return_lse or any(x is not None and x.requires_grad for x in (q, k, v, learnable_sink)):
        lse = found
    return (result if out is None else out), lse, None, None


@torch.no_grad()
def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    m_block_size=64,
    n_block_size=128,
    num_threads=256,
    pack_gqa=False,
    num_stages_Q=2,
    num_stages_dO=2,
    SdP_swapAB=False,
    dKV_swapAB=False,
    dQ_swapAB=False,
    AtomLayoutMSdP=2,
    AtomLayoutNdKV=2,
    AtomLayoutMdQ=2,
    V_in_regs=False,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    dlse=None,
    learnable_sink=None,
):
    """Returns (dq, dk, dv), and with learnable_sink also dsink, from the results of _flash_attn_fwd.

    dq, dk and dv are tensors to write to. Arguments that tune FlashAttention-4's kernels change no result.
    """
    is_tensor(q, "q")
    window = (window_size_left, window_size_right)
    options = fa4._options(softmax_scale, causal, window, learnable_sink, softcap, None, deterministic)
    del options["num_splits"]
    options.update(fa4._mods(q, score_mod, mask_mod, aux_tensors, aux_scalars, softcap, cu_seqlens_q, cu_seqlens_k))
    options["sink"] = sink_for(q, learnable_sink, "learnable_sink")
    options.update(dscore_mod=False, dlse=dlse, dq=dq, dk=dk, dv=dv, seqused_q=seqused_q, seqused_k=seqused_k)
    options.update(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=fa4._longest(q, cu_seqlens_q, max_seqlen_q),
        max_seqlen_k=fa4._longest(k, cu_seqlens_k, max_seqlen_k),
    )
    if block_sparse_tensors is not None:
        options["block_mask"] = fa4._blocks(block_sparse_tensors)
    found = in_words(fa4._NAMES, tandem.attention_backward, dout, q, k, v, out, lse, **options)
    return found[:3] if learnable_sink is None else (*found[:3], found.dsink.to(learnable_sink.dtype))


def _flash_attn_bwd_sparse_mla(*_, **__):
    raise tandem.Unsupported(
        "_flash_attn_bwd_sparse_mla is not served: gather the keys and values beforehand, and call _flash_attn_bwd"
    )
