"""The functions of FlashAttention-4's module flash_attn.cute, on tandem.attention.

Shapes and rules equal tandem.flash_attn's, with these differences.

- The result is always (out, lse). lse, a natural logarithm, (batch, heads, seqlen_q) or (heads, total_q), is None
  unless return_lse is True or an input requires a gradient. The LSE has a gradient, and is -inf for a row that sees no
  key.
- A bound of window_size may be None. A negative bound is a bound, but left + right < 0 means no window.
- learnable_sink (heads), of any floating-point type, is one more logit in every softmax, with a gradient.
- num_splits divides the keys on a GPU; a number below 1 lets the plan choose. pack_gqa, min_seqlen_k,
  scheduler_metadata and disable_scheduler_metadata tune FlashAttention-4's kernels and change no result.
- score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors) and mask_mod(b, h, q_idx, kv_idx, seqlen_info,
  aux_tensors) are plain Python functions of single numbers. aux_scalars is one more argument if given. The functions
  are traced as tandem.flex_attention's. Float aux_tensors have a gradient, and score_mod_bwd is not needed.
- block_sparse_tensors of flash_attn_func are lists of blocks that are visible, in part or whole, with their
  block_size. block_sparse_tensors_bwd is not read.
- Functions that call cutlass, gather_kv_indices with its gather_bwd_ arguments, and qv are refused.

T. Zadouri et al. FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for Asymmetric Hardware Scaling.
arXiv 2603.05451.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, Callable, NamedTuple

import torch

import tandem
from tandem._binding import check_mask
from tandem._trace import Symbol, lengths, trace
from tandem.compat._arguments import (
    in_words,
    is_tensor,
    lengths_of,
    pack,
    pack_keys,
    pair,
    refuse_given,
    sink_for,
    splits,
    type_name,
    unit_stride,
)
from tandem.compat.flash_attn._combine import combine

__version__ = "4.0.0"

_NAMES = {"sink": "learnable_sink", "window": "window_size"}  # our arguments' names in this interface


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    """Attention of q (batch, seqlen_q, heads, head_dim) to k and v (batch, seqlen_k, heads_k, head_dim or head_dim_v).

    Returns (out, lse).
    """
    _refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    if block_sparse_tensors is None:
        _refuse(block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    is_tensor(q, "q")
    options = _options(softmax_scale, causal, window_size, learnable_sink, softcap, splits(num_splits), deterministic)
    options.update(_mods(q, score_mod, mask_mod, aux_tensors, aux_scalars, softcap))
    if block_sparse_tensors is not None:
        options["block_mask"] = _blocks(block_sparse_tensors)
    return _attend(q, k, v, options, return_lse)


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    """Attention of sequences of different lengths. q is packed or dense, and so are k and v.

    q : (total_q, heads, head_dim) with cu_seqlens_q (batch + 1, int32), or (batch, seqlen_q, heads, head_dim).
    k, v : (total_k, ...) with cu_seqlens_k, or (batch, seqlen_k, ...).
    seqused_q, seqused_k : (batch) int32, the used rows of each sequence.
    seqlen_k_per_split : if given, results do not depend on the rest of the batch.
    page_table : (batch, pages) int32; k and v are then (pages, page_size, heads_k, head_dim).
    Returns (out, lse), shaped by q.
    """
    _refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        block_sparse_tensors=block_sparse_tensors,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    is_tensor(q, "q")
    options = _options(softmax_scale, causal, window_size, learnable_sink, softcap, splits(num_splits), deterministic)
    options.update(
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        batch_invariant=seqlen_k_per_split is not None,
        max_seqlen_q=_longest(q, cu_seqlens_q, max_seqlen_q),
        max_seqlen_k=_longest(k, cu_seqlens_k, max_seqlen_k),
    )
    mods = (q, score_mod, mask_mod, aux_tensors, aux_scalars, softcap)
    return _attend_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, options, mods, return_lse)


def flash_attn_combine(
    out_partial,
    lse_partial,
    out=None,
    out_dtype=None,
    cu_seqlens=None,
    seqused=None,
    virtual_batch_idx=None,
    return_lse=True,
):
    """Attention to all keys from attention to parts of them, computed in float32. The result has no gradient.

    out_partial : (parts, batch, seqlen, heads, head_dim) or packed (parts, total, heads, head_dim).
    lse_partial : out_partial's shape without head_dim, natural logarithm; -inf for a row that saw no key of its part.
    out : tensor to write to. out_dtype : type of the result; out_partial's unless given.
    cu_seqlens, seqused and virtual_batch_idx : accepted; all rows are combined.
    Returns (out, lse); lse is None unless return_lse.
    """
    out, lse = combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if return_lse else None


class SchedulerMetadata(NamedTuple):
    """FlashAttention-4's plan of a call, with its field names. Fields of its kernels are None."""

    num_m_blocks_ptr: Any = None
    num_splits_dynamic_ptr: Any = None
    virtual_batch_idx_ptr: Any = None
    num_nheads_in_l2_ptr: Any = None
    tile_count_semaphore: Any = None
    cu_total_m_blocks: Any = None
    cu_total_splits_m_blocks: Any = None
    blocks_to_batch_idx: Any = None


_TILE_ROWS = 128  # rows that SchedulerMetadata.cu_total_m_blocks counts as one


def get_scheduler_metadata(
    max_seqlen_q,
    max_seqlen_k,
    nheads,
    nheads_kv,
    headdim,
    num_splits,
    headdim_v=None,
    pack_gqa=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    seqlen_k_new=0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    seqlen_k_per_split=None,
    _arch=None,
):
    """A plan for flash_attn_varlen_func's scheduler_metadata, which changes no result: Tandem plans nothing ahead.

    With cu_seqlens_q or seqused_q, cu_total_m_blocks (batch + 1, int32) has the sums of each sequence's tiles of 128
    rows. With pack_gqa, which is the default of grouped heads, a query has one row for each head of its group.
    """
    if cu_seqlens_q is None and seqused_q is None:
        return SchedulerMetadata()
    if seqused_q is not None:
        is_tensor(seqused_q, "seqused_q")
    if nheads_kv < 1:
        raise ValueError(f"nheads_kv ({nheads_kv}) must be at least 1: pass the heads of k")
    lengths = lengths_of(cu_seqlens_q, "cu_seqlens_q") if seqused_q is None else seqused_q
    rows = lengths * (nheads // nheads_kv if pack_gqa is None or pack_gqa else 1)
    tiles = (rows + _TILE_ROWS - 1) // _TILE_ROWS
    return SchedulerMetadata(cu_total_m_blocks=torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).int())


def _attend_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, options, mods, return_lse):
    """Returns (out, lse) of packed or dense q and k. options: tandem.attention's without cu_seqlens; mods: the first
    arguments of _mods.
    """
    dense_q = None
    # tandem.attention requires both or none
    if options["page_table"] is None and (cu_seqlens_q is None) != (cu_seqlens_k is None):
        if cu_seqlens_q is None:
            dense_q = q.shape[:2]
            q, cu_seqlens_q, options["max_seqlen_q"] = pack(q, "q")
        else:
            k, v, cu_seqlens_k, options["max_seqlen_k"] = pack_keys(k, v)
    options.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options.update(_mods(*mods, cu_seqlens_q, cu_seqlens_k))
    if dense_q is not None and options.get("out") is not None:
        options["out"] = _packed_out(options["out"], (*dense_q, q.shape[1], v.shape[-1]))
    out, lse = _attend(q, k, v, options, return_lse)
    if dense_q is not None:
        out = out.unflatten(0, dense_q)
        lse = None if lse is None else lse.unflatten(1, dense_q).transpose(0, 1)
    return out, lse


def _packed_out(out, shape):
    """Returns out (batch, seqlen, ...) as one packed tensor in the same memory."""
    if out.shape != shape or (out.numel() and out.stride(0) != out.shape[1] * out.stride(1) and out.shape[0] > 1):
        raise ValueError(
            f"out (shape {tuple(out.shape)}, strides {out.stride()}) must be of shape {tuple(shape)}, and without gaps "
            "between its sequences: allocate such a tensor"
        )
    return out.view(-1, *out.shape[2:])


def _longest(x, cu_seqlens, max_seqlen):
    """Returns max_seqlen, or a bound on the sequences of a packed x."""
    is_packed = max_seqlen is None and cu_seqlens is not None and x.dim() > 0
    return x.shape[0] if is_packed else max_seqlen


def _options(softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, deterministic):
    left, right = pair(window_size)
    check_mask(causal, "bottom_right")
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        left = right = None
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": None if left is None and right is None else (left, right),
        "softcap": softcap,
        "sink": learnable_sink,
        "num_splits": num_splits,
        "deterministic": deterministic,
    }


class _Lengths(NamedTuple):
    """The lengths of a sequence, and the first row of a packed one: an argument of score_mod and mask_mod."""

    seqlen_q: Symbol
    seqlen_k: Symbol
    offset_q: Any
    offset_k: Any


def _mods(q, score_mod, mask_mod, aux_tensors, aux_scalars, softcap, cu_seqlens_q=None, cu_seqlens_k=None):
    """Returns tandem.attention's score_mod and mask_mod."""
    if score_mod is not None and softcap:
        raise ValueError(f"softcap ({softcap}) must be 0 where score_mod is given: cap the scores there")
    mods = {}
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            plain = _plain(function, name)
            rest = (_aux(aux_tensors), *(() if aux_scalars is None else (aux_scalars,)))

            def mod(*symbols, plain=plain, rest=rest):
                batch = symbols[-4]
                starts = (0 if x is None else x[batch] for x in (cu_seqlens_q, cu_seqlens_k))
                return plain(*symbols, _Lengths(*lengths(batch), *starts), *rest)

            mods[name] = trace(mod, name, q.device)
    return mods


def _aux(aux_tensors: Any) -> list[Any]:
    """Returns aux_tensors as a list of tensors."""
    if aux_tensors is None:
        return []
    if isinstance(aux_tensors, torch.Tensor) or not hasattr(aux_tensors, "__iter__"):
        raise TypeError(f"aux_tensors ({type_name(aux_tensors)}) must be a list of torch tensors: pass a list")
    for n, x in enumerate(found := list(aux_tensors)):
        is_tensor(x, f"aux_tensors[{n}]")
    return found


def _blocks(tensors: Any) -> tandem.Blocks:
    """Converts block sparsity to tandem.attention's block_mask."""
    size = getattr(tensors, "block_size", None)
    if size is None or getattr(tensors, "cu_total_m_blocks", None) is not None:
        raise tandem.Unsupported(
            f"block_sparse_tensors ({type(tensors).__name__}) must have a block_size and be of dense tensors: set "
            "block_size, such as (128, 128), and omit cu_total_m_blocks"
        )
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    return tandem.Blocks(*(getattr(tensors, name, None) for name in names), BLOCK_SIZE=size)


def _plain(function: Callable, name: str) -> Callable:
    """Returns the function below its decorators, which are cutlass's. Refuses a function that calls cutlass itself."""
    if not callable(function):
        raise TypeError(
            f"{name} ({type_name(function)}) must be a Python function of single numbers: pass one, or call "
            "tandem.attention with an expression"
        )
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    for called in code.co_names if code is not None else ():
        module = function.__globals__.get(called)
        if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] in ("cutlass", "quack"):
            raise tandem.Unsupported(
                f"{name} ({function.__name__}) calls {called}, which is {module.__name__} and runs only in "
                f"FlashAttention-4's kernels: write {called} in plain Python, with torch's functions"
            )
    return function


def _attend(q, k, v, options, return_lse):
    q, k, v = unit_stride(q, "q"), unit_stride(k, "k"), unit_stride(v, "v")
    options["sink"] = sink_for(q, options["sink"], "learnable_sink")
    out, lse = in_words(_NAMES, tandem.attention, q, k, v, return_lse=True, **options)
    if return_lse:
        return out, lse
    captured = (x for name in ("score_mod", "mask_mod") if name in options for x in options[name].bindings.values())
    inputs = (q, k, v, options["sink"], *(x for x in captured if isinstance(x, torch.Tensor)))
    return out, lse if any(x is not None and x.requires_grad for x in inputs) else None


_WAYS_OUT = {
    "qv": "join q with qv and k with v along head_dim, and pass them without qv",
    "gather_kv_indices": "gather the keys and values beforehand",
    "gather_bwd_recompute_p": "omit it, because gather_kv_indices is not served",
    "gather_bwd_token_chunk": "omit it, because gather_kv_indices is not served",
    # remedies if the block mask is unsupported
    "block_sparse_tensors": "omit it, because mask_mod decides which keys a query sees",
    "block_sparse_tensors_bwd": "omit it, because mask_mod decides which keys a query sees",
}


def _refuse(**arguments):
    refuse_given(_WAYS_OUT, arguments)


from tandem.compat._fa4_low_level import (  # noqa: E402, F401  # private names that programs import
    _flash_attn_bwd,
    _flash_attn_bwd_sparse_mla,
    _flash_attn_fwd,
)
