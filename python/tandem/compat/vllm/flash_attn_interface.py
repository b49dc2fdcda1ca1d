"""The functions of vllm.vllm_flash_attn.flash_attn_interface, and vllm._custom_ops.reshape_and_cache_flash.

The docstring of tandem.compat.vllm has the rules.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import tandem
from tandem._arrays import flag_of, integer
from tandem.compat import fa4
from tandem.compat._arguments import (
    bounds,
    cap,
    in_words,
    is_tensor,
    no_metadata,
    pack_keys,
    refuse_8_bit,
    refuse_given,
    sink_for,
    splits,
    unit_stride,
)

DEFAULT_FA_VERSION = 2

# Our arguments' names in this interface.
_NAMES = {"window": "window_size", "page_table": "block_table", "sink": "s_aux"}
_CACHE_NAMES = {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}
_WAYS_OUT = {
    "q_v": "join q with q_v and k with v along head_dim, and omit q_v",
    "output_scale": "omit it, and quantize the result",
    "block_sparse_tensors": "omit it, because mask_mod decides which keys a query sees",
    "gather_kv_indices": "gather the keys and values beforehand",
    "gather_kv_valid_length": "gather the keys and values beforehand",
}


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size: list[int] | None = None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits: int = 0,
    output_scale=None,
    fa_version: int = DEFAULT_FA_VERSION,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_tensor_leading_dims=None,
    dynamic_causal: torch.Tensor | None = None,
    gather_kv_indices=None,
    gather_kv_valid_length=None,
):
    """Attention of packed queries, (total_q, heads, head_dim) with cu_seqlens_q, to packed keys or to a paged cache.

    k, v : (total_k, heads_k, ...) with cu_seqlens_k; (blocks, block_size, heads_k, ...) with block_table (batch,
        max_blocks, int32) and seqused_k (batch, int32); or (batch, seqlen_k, heads_k, ...) with seqused_k. Views of
        one fused cache are read in place.
    out : tensor to write to. Rows of q after cu_seqlens_q[-1] are neither read nor written with block_table.
    s_aux : (heads), one more logit in each softmax.
    mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors) : a Python function of single numbers.
    dynamic_causal : (batch) int32, in place of causal: a sequence with 0 is not causal. window_size bounds all
        sequences, so that its right bound must not be 0 where a sequence is not causal.
    cp_world_size, cp_rank, cp_tot_seqused_k : keys of this rank, every cp_world_size-th key of a sequence of
        cp_tot_seqused_k (batch, int32) keys; causal compares the places in the whole sequence.
    Returns out, or with return_softmax_lse (out, softmax_lse): (heads, total_q), a natural logarithm.
    """
    refused = {"q_v": q_v, "output_scale": output_scale, "block_sparse_tensors": block_sparse_tensors}
    gathers = {"gather_kv_indices": gather_kv_indices, "gather_kv_valid_length": gather_kv_valid_length}
    refuse_given(_WAYS_OUT, refused | gathers)
    _check_version(fa_version)
    for name, x in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q)):
        is_tensor(x, name)
    refuse_8_bit(q=q, k=k, v=v)
    _check_lengths(cu_seqlens_k, seqused_k, block_table, fa_version)
    q, k, v = unit_stride(q, "q"), unit_stride(k, "k"), unit_stride(v, "v")
    options = {
        "softmax_scale": softmax_scale,
        "causal": flag_of(causal, "causal"),
        "window": None if window_size is None else bounds(window_size),
        "softcap": cap(softcap),
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "sink": sink_for(q, s_aux, "s_aux"),
        "num_splits": splits(num_splits),
        "batch_invariant": _batch_invariant(),
        "out": out,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "seqused_k": seqused_k,
    }
    if block_table is not None:
        cu_seqlens_k = None  # pages are not packed: seqused_k has the lengths
    elif cu_seqlens_k is None:
        k, v, cu_seqlens_k, max_seqlen_k = pack_keys(k, v)
    options.update(page_table=block_table, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    modes = {"mask_mod": mask_mod, "dynamic_causal": dynamic_causal, "cp_world_size": cp_world_size}
    _add_masks(options, q, modes, aux_tensors, cp_rank, cp_tot_seqused_k)
    if not return_softmax_lse:
        return in_words(_NAMES, tandem.attention, q, k, v, **options)
    out, lse = in_words(_NAMES, tandem.attention, q, k, v, return_lse=True, **options)
    return out, lse.masked_fill(lse == float("-inf"), float("inf")) if fa_version == 2 else lse


@torch.no_grad()
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes new keys and values into a paged cache.

    key, value : (tokens, heads_k, ...), of which the first slot_mapping.numel() tokens are read.
    key_cache, value_cache : (blocks, block_size, heads_k, ...), with any strides of the first three dimensions.
    slot_mapping : int64, block * block_size + place of each token; a negative slot skips the token.
    kv_cache_dtype : "auto", or the type of the cache. k_scale and v_scale belong to 8-bit caches and are not read.
    The function never waits for a GPU, which skips slots outside of the cache. The CPU refuses them before it writes.
    If several tokens have one slot, the last of them is written.
    """
    refuse_8_bit(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    if kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise tandem.Unsupported(f'kv_cache_dtype ("{kv_cache_dtype}") is not served: pass "auto" and a 16-bit cache')
    caches = key_cache, value_cache
    if kv_cache_dtype != "auto" and key_cache.dtype != getattr(torch, kv_cache_dtype):
        raise ValueError(
            f'kv_cache_dtype ("{kv_cache_dtype}") must be "auto" or key_cache\'s type ({key_cache.dtype}): pass "auto"'
        )
    new = unit_stride(key, "key"), unit_stride(value, "value")
    is_tensor(slot_mapping, "slot_mapping")
    in_words(_CACHE_NAMES, tandem.append_kv, *new, *caches, slot_mapping=slot_mapping.flatten())


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens: torch.Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """An empty int32 tensor for flash_attn_varlen_func's scheduler_metadata: Tandem plans nothing ahead."""
    return no_metadata(cache_seqlens)


def is_fa_version_supported(fa_version: int) -> bool:
    """True for 2, 3 and 4, on every device that Tandem serves."""
    _check_version(fa_version)
    return True


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """None for 2, 3 and 4."""
    _check_version(fa_version)
    return None


def compile_flash_attn_varlen_func_from_specs(
    *,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    q_dtype: torch.dtype,
    v_stride: tuple[int, ...] | None = None,
    k_stride: tuple[int, ...] | None = None,
    cu_seqlens_q_shape: tuple[int, ...] | None = None,
    cu_seqlens_k_shape: tuple[int, ...] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale=None,
    causal=False,
    window_size: list[int] | None = None,
    deterministic=False,
    return_softmax_lse=False,
    num_splits: int = 0,
    fa_version: int = DEFAULT_FA_VERSION,
    seqused_k_shape: tuple[int, ...] | None = None,
    page_table_shape: tuple[int, ...] | None = None,
    softcap: float | None = None,
) -> None:
    """Compiles the kernels of such calls of flash_attn_varlen_func. Does nothing without a GPU."""
    _check_version(fa_version)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def empty(shape, stride=None):
        if stride is None:
            return torch.empty(shape, dtype=q_dtype, device=device)
        return torch.empty_strided(shape, stride, dtype=q_dtype, device=device)

    def zeros(shape):
        return None if shape is None else torch.zeros(shape, dtype=torch.int32, device=device)

    options = {
        "softmax_scale": softmax_scale,
        "causal": flag_of(causal, "causal"),
        "window": None if window_size is None else bounds(window_size),
        "softcap": cap(softcap or 0.0),
        "dropout_p": dropout_p,
        "seed": 0 if dropout_p else None,
        "num_splits": splits(num_splits),
        "batch_invariant": _batch_invariant(),
        "cu_seqlens_q": zeros(cu_seqlens_q_shape),
        "cu_seqlens_k": zeros(cu_seqlens_k_shape),
        "seqused_k": zeros(seqused_k_shape),
        "page_table": zeros(page_table_shape),
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "return_lse": return_softmax_lse,
    }
    tensors = empty(q_shape), empty(k_shape, k_stride), empty(v_shape, v_stride)
    if device == "cuda":
        in_words(_NAMES, tandem.prepare, "forward", *tensors, **options)


def _add_masks(options, q, modes, aux_tensors, cp_rank, cp_tot_seqused_k):
    """Adds the mask_mod of mask_mod, dynamic_causal or cp_world_size to options."""
    ranks = 1 if modes["cp_world_size"] is None else integer(modes["cp_world_size"], "cp_world_size")
    used = [name for name, x in modes.items() if x is not None and (name != "cp_world_size" or ranks > 1)]
    if len(used) > 1:
        raise tandem.Unsupported(f"{' with '.join(used)} is not served: pass one of these arguments")
    if "mask_mod" in used:
        lengths = options["cu_seqlens_q"], options["cu_seqlens_k"]
        options.update(fa4._mods(q, None, modes["mask_mod"], aux_tensors, None, 0.0, *lengths))
    elif "dynamic_causal" in used:
        _check_per_sequence("dynamic_causal", modes["dynamic_causal"], options["cu_seqlens_q"])
        text = "every[batch] == 0 or k <= q + seqlen_k - seqlen_q"
        options.update(causal=False, mask_mod=tandem.Mod(text, every=modes["dynamic_causal"]))
    elif used:
        if options["window"] is not None or options["alibi_slopes"] is not None:
            raise tandem.Unsupported("cp_world_size with window_size or alibi_slopes is not served: pass neither")
        if options["causal"]:
            if cp_tot_seqused_k is None:
                raise ValueError("cp_tot_seqused_k (None) must be given with cp_world_size: pass (batch) int32 lengths")
            _check_per_sequence("cp_tot_seqused_k", cp_tot_seqused_k, options["cu_seqlens_q"])
            if not 0 <= (rank := integer(cp_rank, "cp_rank")) < ranks:
                raise ValueError(f"cp_rank ({rank}) must be 0 to {ranks - 1}, with cp_world_size {ranks}: correct it")
            text = "k * ranks + rank <= q + total[batch] - seqlen_q"
            mod = tandem.Mod(text, ranks=ranks, rank=rank, total=cp_tot_seqused_k)
            options.update(causal=False, mask_mod=mod)


def _check_per_sequence(name, x, cu_seqlens_q):
    is_tensor(x, name)
    if tuple(x.shape) != (cu_seqlens_q.numel() - 1,):
        raise ValueError(
            f"{name} (shape {tuple(x.shape)}) must be (batch), here ({cu_seqlens_q.numel() - 1}): reshape it"
        )


def _batch_invariant() -> bool:
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def _check_version(fa_version: Any) -> None:
    if not isinstance(fa_version, int) or fa_version not in (2, 3, 4):
        raise ValueError(f"fa_version ({fa_version!r}) must be 2, 3 or 4: pass one of them")


def _check_lengths(cu_seqlens_k, seqused_k, block_table, fa_version):
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError("cu_seqlens_k or seqused_k (both None) must be given: pass the lengths of the keys")
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k (None) must be given with block_table: pass the number of keys of each sequence")
    if fa_version != 4 and cu_seqlens_k is not None and seqused_k is not None:
        raise ValueError(
            f"cu_seqlens_k and seqused_k must not both be given with fa_version ({fa_version}): pass one of them, or "
            "fa_version 4"
        )
