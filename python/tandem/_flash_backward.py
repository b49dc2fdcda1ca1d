"""Gradients on GPUs for which Tandem has no backward kernels (Blackwell): torch's FlashAttention-2 backward on Tandem's
results.

The backward serves some of the forward's options. A forward call that needs gradients with other options is refused
before the call computes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem._binding import CallArgs
from tandem._errors import Unsupported

_INFINITY = float("inf")


class _Mask(NamedTuple):
    """The mask in the form of torch's operator; None: unbounded."""

    causal: bool
    left: int | None
    right: int | None


def refuse(call_args: CallArgs) -> None:
    """Raises Unsupported if torch's operator cannot compute the gradients of this call."""
    softcap, dropout_p = call_args.get("softcap"), call_args.get("dropout_p")
    used = call_args.get("seqused_q") is not None or call_args.get("seqused_k") is not None
    deterministic = call_args.get("deterministic") and not torch.are_deterministic_algorithms_enabled()
    reasons = (
        (call_args.get("bias") is not None, "bias is given", "mask with causal and window, or detach q, k, v and bias"),
        (call_args.get("alibi_slopes") is not None, "alibi_slopes is given", "omit alibi_slopes"),
        (call_args.get("score_mod") is not None, "score_mod is given", "omit score_mod"),
        (call_args.get("mask_mod") is not None, "mask_mod is given", "mask with causal and window"),
        (call_args.get("kv_num_blocks") is not None, "block_mask is given", "mask with causal and window"),
        (softcap, f"softcap ({softcap}) is given", "omit softcap"),
        (
            used,
            "seqused_q or seqused_k is given",
            "pack the used part of each sequence, with cu_seqlens_q and cu_seqlens_k",
        ),
        (call_args.get("page_table") is not None, "page_table is given", "pass keys and values dense or packed"),
        (call_args.get("float32_out"), "out_dtype (float32) is given", "omit out_dtype"),
        (dropout_p, f"dropout_p ({dropout_p}) is given", "omit dropout_p"),
        (
            deterministic,
            "deterministic (True) is set for one call",
            "set torch.use_deterministic_algorithms(True) for all calls",
        ),
    )
    for refused, what, way_out in reasons:
        if refused:
            _raise(what, way_out)
    _mask(call_args)


def _raise(what: str, way_out: str) -> None:
    raise Unsupported(
        f"{what}, which torch's FlashAttention backward does not serve on this GPU: "
        f"{way_out}, or compute the gradient on the CPU"
    )


def _is_packed(call_args: CallArgs) -> bool:
    return call_args.get("cu_seqlens_q") is not None


def _lengths(call_args: CallArgs) -> tuple[int, int]:
    """Returns the numbers of queries and keys of a sequence; packed: of the longest sequences."""
    if _is_packed(call_args):
        return call_args.get("max_seqlen_q") or 0, call_args.get("max_seqlen_k") or 0
    return call_args["q"].shape[1], call_args["k"].shape[1]


def _mask(call_args: CallArgs) -> _Mask:
    """Converts Tandem's causal, window and alignment to the operator's arguments, or raises Unsupported.

    The operator's diagonal is bottom-right. The operator treats a bound of seqlen_k or more as unbounded. If only one
    side has a bound, the operator bounds the other side by seqlen_k, which matters where queries outnumber keys.
    """
    seqlen_q, seqlen_k = _lengths(call_args)
    window = left, right = call_args.get("window") or (None, None)
    if call_args.get("causal"):
        right = 0 if right is None else min(right, 0)
    alignment = call_args.get("alignment")
    if alignment in ("top_left", "explicit") and (left is not None or right is not None):
        if call_args.get("diagonal_offsets") is not None:
            _raise("diagonal_offset is an array", "pass an integer in one call per sequence")
        if _is_packed(call_args):
            which = "alignment is 'top_left'" if alignment == "top_left" else "diagonal_offset is given"
            _raise(f"{which} with cu_seqlens_q", "pass 'bottom_right' if lengths are equal")
        shift = seqlen_k - seqlen_q - (call_args.get("diagonal_offset") or 0)
        left = None if left is None else left + shift
        right = None if right is None else right - shift
    # A bound that hides nothing is dropped.
    left = None if left is not None and left >= seqlen_k - 1 else left
    right = None if right is not None and right >= seqlen_q - 1 and seqlen_q > 0 else right
    for side, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            what = f"window's {side} bound ({bound}) is negative, counted from the last query and key"
            _raise(what, "omit queries and keys that the window hides")
    as_wide = right >= max(seqlen_k, 1) if right is not None else left is not None and seqlen_q > seqlen_k + 1
    if as_wide:
        _raise(
            f"window {window} is as wide as the keys ({seqlen_k}), which are fewer than the queries ({seqlen_q})",
            "split off the queries that see no key",
        )
    return _Mask(left is None and right == 0, left, right)


def gradients(call_args: CallArgs, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Returns the requested gradients of q, k, v, bias and sink, else None.

    call_args: the arguments of the call, with out, lse, dout and dlse.
    """
    refuse(call_args)
    if call_args.get("dlse") is not None:
        _raise("lse has a gradient", "use lse.detach()")
    inputs = [call_args.get(name) for name in ("q", "k", "v", "bias", "sink")]
    out, sink = call_args["out"], call_args.get("sink")
    dout = torch.zeros_like(out) if call_args["dout"] is None else call_args["dout"]
    if call_args["q"].numel() == 0 or call_args["k"].numel() == 0:
        return [torch.zeros_like(x) if w else None for x, w in zip(inputs, wanted)]
    # The operator requires +inf if a query sees no key.
    lse = call_args["lse"].masked_fill(call_args["lse"] == -_INFINITY, _INFINITY)
    result: list[Tensor | None] = [None] * 5
    if any(wanted[:3]):
        result[:3] = (x if w else None for x, w in zip(_flash_backward(call_args, dout, lse), wanted))
    if sink is not None and wanted[4]:
        result[4] = _sink_gradient(dout, out, lse, sink)
    return result


def _flash_backward(call_args: CallArgs, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk and dv. The operator reconstructs the softmax from its lse, which includes a sink."""
    q, k, v, out = call_args["q"], call_args["k"], call_args["v"], call_args["out"]
    mask = _mask(call_args)
    random = torch.empty(2, dtype=torch.uint64, device=q.device)  # for dropout
    dim, dim_v = q.shape[-1], v.shape[-1]  # the operator has one head_dim: zero columns change nothing
    scale = call_args.get("softmax_scale")
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(_in_pieces(x, max(dim, dim_v)) for x in (dout, q, k, v, out)),
        lse.contiguous(),
        *(call_args[name].contiguous() if _is_packed(call_args) else None for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *_lengths(call_args),
        0.0,
        mask.causal,
        random,
        random.new_empty(()),
        scale=dim**-0.5 if scale is None else scale,
        window_size_left=mask.left,
        window_size_right=mask.right,
    )
    return dq[..., :dim], dk[..., :dim], dv[..., :dim_v]


def _in_pieces(x: Tensor, dim: int) -> Tensor:
    """Returns x padded with zeros to head_dim dim.

    x is copied if its rows are not pieces of 16 bytes (8 elements of 16 bits).
    """
    if x.shape[-1] != dim:
        return torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in x.stride()[:-1])
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Returns the negative sum of p_sink * (dout . out) over batch and queries, with p_sink = exp(sink - lse).

    lse is (batch, heads, seqlen_q) or (heads, total_q).
    """
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    share = (sink.float()[:, None] - lse).exp()
    return -(share * delta).sum(-1).reshape(-1, sink.shape[0]).sum(0).to(sink.dtype)
