"""TransformerEngine's attn_forward_func_with_cp, on tandem.context_parallel.

Shards have TransformerEngine's layout DualChunkSwap: each sequence is divided into 2 * ranks equal parts. Rank r has
the parts r and 2 * ranks - 1 - r. The result has q's form.

- cp_comm_type "p2p" is the execution "ring", "all_gather" is "gather", and "a2a" is "heads". All of them serve windows,
  learnable softmax offsets (attention sinks), grouped heads and values of another head_dim.
- qkv_format "thd": cu_seqlens_q has the sequences of all ranks, and the host reads it.
- attn_bias_type "post_scale_bias": attn_bias is (batch or 1, heads or 1, rows, keys of the sequence), with gradients.
  The rows are the rank's, and the keys have their order in the sequence. A bias of one row needs no gradient.
- attn_bias_type "alibi" has TransformerEngine's default slopes.
- cp_global_ranks, cp_stream, deterministic, use_fused_attention, use_flash_attn_3, use_flash_attn_4 and layer_number
  change no result.
- Padding inside of sequences, other lengths of keys, "pre_scale_bias", a bias with "thd", dropout, FP8,
  return_max_logit, the softmax "off-by-one", "a2a+p2p" and load_balancing_strategy NO_LOAD_BALANCE are refused.
"""

from __future__ import annotations

from typing import Any

import torch

import tandem
from tandem.compat._arguments import bounds, is_tensor
from tandem.compat._ranks import attend_dense, lengths_of, plan_of, ranks_of

EXECUTIONS = {"p2p": "ring", "all_gather": "gather", "a2a": "heads"}
_MASKS = ("causal", "no_mask", "padding", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
_NAMES = {"window": "window_size", "sink": "softmax_offset", "bias": "attn_bias"}
_BIAS_TYPES = ("no_bias", "post_scale_bias", "alibi")


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
    softcap=0.0,
    fp8=False,
    fp8_meta=None,
    quantizers=None,
    pad_between_seqs=False,
    use_flash_attn_3=False,
    use_flash_attn_4=False,
    softmax_type="vanilla",
    softmax_offset=None,
    fp8_output=False,
    layer_number=1,
    return_max_logit=False,
    load_balancing_strategy=None,
):
    """Attention of the rank's shard.

    q, k, v : (batch, rows, heads, head_dim) for "bshd", (rows, batch, heads, head_dim) for "sbhd", packed (rows, heads,
        head_dim) for "thd". The order of the arguments is TransformerEngine 2.20's.
    """
    _refuse(locals())
    for name, x in zip("qkv", (q, k, v)):
        is_tensor(x, name)
    ranks, causal = ranks_of(cp_group), "causal" in attn_mask_type
    options = {
        "group": cp_group,
        "execution": EXECUTIONS[cp_comm_type],
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": _default_slopes(q) if attn_bias_type == "alibi" else None,
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
    if attn_bias is not None:
        options["bias"] = _bias_of(q, attn_bias, ranks)
    out, _ = attend_dense(q, k, v, plan, _NAMES, **options)
    return out.movedim((0, 1), dims)


def _refuse(given: dict[str, Any]) -> None:
    choices = {
        "cp_comm_type": tuple(EXECUTIONS),
        "qkv_format": ("bshd", "sbhd", "thd"),
        "attn_mask_type": _MASKS,
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
    _refuse_biases(given)
    strategy = getattr(given["load_balancing_strategy"], "name", given["load_balancing_strategy"])
    if strategy not in (None, "DUAL_CHUNK_SWAP"):
        raise tandem.Unsupported(f"load_balancing_strategy ({strategy}) must be DUAL_CHUNK_SWAP: leave it out")
    for name in ("dropout_p", "fp8", "fp8_output", "pad_between_seqs", "return_max_logit"):
        if given[name]:
            raise tandem.Unsupported(f"{name} ({given[name]!r}) is not served: leave it out")


def _refuse_biases(given: dict[str, Any]) -> None:
    kind, bias = given["attn_bias_type"], given["attn_bias"]
    if kind not in _BIAS_TYPES:
        remedy = "choose one of them"
        if kind == "pre_scale_bias":
            remedy = "multiply attn_bias by softmax_scale, and pass 'post_scale_bias' without softcap"
        raise tandem.Unsupported(f"attn_bias_type ({kind!r}) must be one of {', '.join(_BIAS_TYPES)}: {remedy}")
    if (kind == "post_scale_bias") != (bias is not None):
        raise ValueError(
            "attn_bias must be given with attn_bias_type 'post_scale_bias' and only then: pass both or none"
        )
    if bias is not None and given["qkv_format"] == "thd":
        raise tandem.Unsupported("attn_bias must be None with qkv_format 'thd': pass 'bshd' or 'sbhd'")


def _bias_of(q: torch.Tensor, bias: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns the bias of q (batch, rows, heads, head_dim) as (1 or batch, 1 or heads, rows, keys)."""
    is_tensor(bias, "attn_bias")
    batch, rows, heads, _ = q.shape
    sizes = (1, batch), (1, heads), (1, rows), (rows * ranks,)
    if bias.dim() != 4 or any(n not in allowed for n, allowed in zip(bias.shape, sizes)):
        raise ValueError(
            f"attn_bias (shape {tuple(bias.shape)}) must be ({batch} or 1, {heads} or 1, {rows} or 1, {rows * ranks}): "
            "pass the rows of the rank's queries and all keys"
        )
    if bias.shape[2] < rows and bias.requires_grad:
        raise tandem.Unsupported(
            "attn_bias of one row must not require gradients, which would be sums over all ranks: expand its rows"
        )
    return bias.expand(-1, -1, rows, -1)


def _default_slopes(q: torch.Tensor) -> torch.Tensor:
    """Returns ALiBi's slopes of TransformerEngine for q (..., heads, head_dim)."""
    heads = q.shape[-2]
    n = 2 ** (max(1, heads).bit_length() - 1)
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [
        2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)
    ]
    return torch.tensor(slopes[:heads], dtype=torch.float32, device=q.device)


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
