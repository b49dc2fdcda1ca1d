"""TransformerEngine's attn_forward_func_with_cp, on tandem.context_parallel.

Shards have TransformerEngine's layout DualChunkSwap: each sequence is divided into 2 * ranks equal parts. Rank r has
the parts r and 2 * ranks - 1 - r. The result has q's form.

- cp_comm_type "p2p" is the execution "ring", "all_gather" is "gather", and "a2a" is "heads". All of them serve windows,
  learnable softmax offsets (attention sinks), grouped heads and values of another head_dim.
- qkv_format "thd": cu_seqlens_q has the sequences of all ranks, and the host reads it.
- cp_global_ranks, cp_stream, deterministic, use_fused_attention, use_flash_attn_3 and layer_number change no result.
- Padding inside of sequences, other lengths of keys, bias, dropout, FP8, return_max_logit, the softmax "off-by-one" and
  "a2a+p2p" are refused.
"""

from __future__ import annotations

from typing import Any

import torch

import tandem
from tandem.compat._arguments import bounds, is_tensor, refuse_given
from tandem.compat._ranks import attend_dense, lengths_of, plan_of, ranks_of

EXECUTIONS = {"p2p": "ring", "all_gather": "gather", "a2a": "heads"}
_MASKS = ("causal", "no_mask", "padding", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
_NAMES = {"window": "window_size", "sink": "softmax_offset"}


def attn_forward_func_with_cp(
    is_training,
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    dropout_p,
    cp_group,
    cp_global_ranks,
    cp_stream,
    cp_comm_type,
    softmax_scale=None,
    qkv_format="bshd",
    attn_mask_type="causal",
    attn_bias_type="no_bias",
    attn_bias=None,
    deterministic=False,
    use_fused_attention=False,
    window_size=None,
    fp8=False,
    fp8_meta=None,
    quantizers=None,
    pad_between_seqs=False,
    use_flash_attn_3=False,
    softmax_type="vanilla",
    softmax_offset=None,
    fp8_output=False,
    layer_number=1,
    return_max_logit=False,
):
    """Attention of the rank's shard.

    q, k, v : (batch, rows, heads, head_dim) for "bshd", (rows, batch, heads, head_dim) for "sbhd", packed (rows, heads,
        head_dim) for "thd".
    """
    _refuse(locals())
    for name, x in zip("qkv", (q, k, v)):
        is_tensor(x, name)
    ranks, causal = ranks_of(cp_group), "causal" in attn_mask_type
    options = {
        "group": cp_group,
        "execution": EXECUTIONS[cp_comm_type],
        "softmax_scale": softmax_scale,
        "sink": None if softmax_offset is None else softmax_offset.reshape(-1),
    }
    window = None if window_size is None else bounds(window_size)
    if qkv_format == "thd":
        lengths = _packed_lengths(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        plan = plan_of(lengths, ranks, "per_document", causal, window)
        return tandem.context_parallel(q, k, v, plan=plan, **options)
    dims = (0, 1) if qkv_format == "bshd" else (1, 0)
    q, k, v = (x.movedim(dims, (0, 1)) for x in (q, k, v))
    if q.shape[:2] != k.shape[:2]:
        raise tandem.Unsupported(
            f"k rows ({tuple(k.shape[:2])}) must be q's, {tuple(q.shape[:2])}: call tandem.context_parallel for others"
        )
    plan = plan_of((q.shape[1] * ranks,), ranks, "per_document", causal, window)
    out, _ = attend_dense(q, k, v, plan, _NAMES, **options)
    return out.movedim((0, 1), dims)


def _refuse(given: dict[str, Any]) -> None:
    choices = {
        "cp_comm_type": tuple(EXECUTIONS),
        "qkv_format": ("bshd", "sbhd", "thd"),
        "attn_mask_type": _MASKS,
        "attn_bias_type": ("no_bias",),
        "softmax_type": ("vanilla", "learnable"),
    }
    for name, values in choices.items():
        if given[name] not in values:
            raise tandem.Unsupported(f"{name} ({given[name]!r}) must be one of {', '.join(values)}: choose one of them")
    if "padding" in given["attn_mask_type"] and given["qkv_format"] != "thd":
        raise tandem.Unsupported(
            f"attn_mask_type ({given['attn_mask_type']!r}) must have no padding with qkv_format "
            f"{given['qkv_format']!r}: pass packed sequences, 'thd'"
        )
    if (given["softmax_type"] == "learnable") != (given["softmax_offset"] is not None):
        raise ValueError("softmax_offset must be given with softmax_type 'learnable' and only then: pass both or none")
    for name in ("dropout_p", "fp8", "fp8_output", "pad_between_seqs", "return_max_logit"):
        if given[name]:
            raise tandem.Unsupported(f"{name} ({given[name]!r}) is not served: leave it out")
    refuse_given({"attn_bias": "leave it out"}, {"attn_bias": given["attn_bias"]})


def _packed_lengths(cu_q: Any, cu_k: Any, padded_q: Any, padded_k: Any) -> tuple[int, ...]:
    """Returns the lengths of the sequences on all ranks. Only the padding after a sequence's end could differ."""
    lengths = lengths_of(cu_q, "cu_seqlens_q")
    for name, other in (
        ("cu_seqlens_kv", cu_k),
        ("cu_seqlens_q_padded", padded_q),
        ("cu_seqlens_kv_padded", padded_k),
    ):
        if other is not None and other is not cu_q and not torch.equal(other, cu_q):
            raise tandem.Unsupported(f"{name} must equal cu_seqlens_q: pass sequences without padding")
    return lengths
