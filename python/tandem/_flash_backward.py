"""Gradients on GPUs, where Tandem's own kernels go forward only: torch's FlashAttention-2 backward on Tandem's results.

It serves a part of what the forward does. Beyond that a forward call that wants gradients is refused, before anything
is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem._errors import Unsupported

_INFINITY = float("inf")
_ALIBI, _CU_Q, _CU_K, _USED_Q, _USED_K, _PAGES = 5, 6, 7, 8, 9, 10  # of an operator's inputs, after q, k, v, bias, sink


class _Mask(NamedTuple):
    """What a query sees, as torch's operator takes it; None is no bound."""

    causal: bool
    left: int | None
    right: int | None


def refuse(inputs: Sequence[Any], options: Sequence[Any]) -> None:
    """Raises Unsupported where torch's operator cannot compute the gradients. inputs, options: tandem::forward's."""
    q, k, bias = inputs[0], inputs[1], inputs[3]
    softcap, dropout_p, deterministic = options[3], options[8], options[12]
    packed = inputs[_CU_Q] is not None
    reasons = (
        (bias is not None, "bias is given", "mask with causal and window, or detach q, k, v and bias"),
        (inputs[_ALIBI] is not None, "alibi_slopes is given", "leave it out"),
        (bool(softcap), f"softcap ({softcap}) is given", "leave it out"),
        (
            inputs[_USED_Q] is not None or inputs[_USED_K] is not None,
            "seqused_q or seqused_k is given",
            "pack what is used of each sequence, with cu_seqlens_q and cu_seqlens_k",
        ),
        (inputs[_PAGES] is not None, "page_table is given", "give keys and values as dense or packed tensors"),
        (bool(dropout_p), f"dropout_p ({dropout_p}) is given", "leave it out"),
        (
            bool(deterministic) and not torch.are_deterministic_algorithms_enabled(),
            "deterministic (True) is asked of one call",
            "torch.use_deterministic_algorithms(True) asks it of all",
        ),
    )
    for refused, what, way_out in reasons:
        if refused:
            _raise(what, way_out)
    _mask(options, *_lengths(q, k, packed, options), packed)


def _raise(what: str, way_out: str) -> None:
    raise Unsupported(
        f"{what}, and a gradient is wanted on a GPU: there gradients are those of torch's FlashAttention backward, "
        f"which does not serve it; {way_out}, or compute it on the CPU"
    )


def _lengths(q: Tensor, k: Tensor, packed: bool, options: Sequence[Any]) -> tuple[int, int]:
    """The queries and keys of a sequence; packed: of the longest ones."""
    return (options[0], options[1]) if packed else (q.shape[1], k.shape[1])


def _mask(options: Sequence[Any], seqlen_q: int, seqlen_k: int, packed: bool) -> _Mask:
    """Tandem's causal, window and alignment as torch's operator means them, else Unsupported.

    That one has its diagonal bottom-right. It takes a bound of seqlen_k or more for none, and puts one of seqlen_k
    where only the other side has a bound: that matters where there are more queries than keys.
    """
    causal, top_left, left, right = options[4:8]
    if causal:
        right = 0 if right is None else min(right, 0)
    if top_left and (left is not None or right is not None):
        if packed:
            _raise("causal is 'top_left' with cu_seqlens_q", "where lengths are equal causal=True is the same")
        shift = seqlen_k - seqlen_q
        left = None if left is None else left + shift
        right = None if right is None else right - shift
    # A bound that hides nothing is none.
    left = None if left is not None and left >= seqlen_k - 1 else left
    right = None if right is not None and right >= seqlen_q - 1 and seqlen_q > 0 else right
    for side, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            _raise(f"window's {side} bound, counted from the last query and key, ({bound}) is below 0", "mask the keys")
    as_wide = right >= max(seqlen_k, 1) if right is not None else left is not None and seqlen_q > seqlen_k + 1
    if as_wide:
        _raise(
            f"window ({options[6]}, {options[7]}) is as wide as the keys ({seqlen_k}), which are fewer than the "
            f"queries ({seqlen_q})",
            "split off the queries that see no key",
        )
    return _Mask(left is None and right == 0, left, right)


def gradients(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, inputs: Sequence[Any], options: Sequence[Any],
    wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The wanted gradients of q, k, v, bias and sink; None for the others. The arguments are those of the operator."""
    refuse(inputs, options)
    if dlse is not None:
        _raise("lse has a gradient", "use lse.detach()")
    q, k, v, bias, sink = inputs[:5]
    dout = torch.zeros_like(out) if dout is None else dout
    if q.numel() == 0 or k.numel() == 0:
        return [torch.zeros_like(x) if w else None for x, w in zip(inputs[:5], wanted)]
    # The operator wants +inf where a query sees no key.
    lse = lse.masked_fill(lse == -_INFINITY, _INFINITY)
    result: list[Tensor | None] = [None] * 5
    if any(wanted[:3]):
        found = _flash_backward(dout, out, lse, q, k, v, inputs[_CU_Q], inputs[_CU_K], options)
        result[:3] = (x if w else None for x, w in zip(found, wanted))
    if sink is not None and wanted[4]:
        result[4] = _sink_gradient(dout, out, lse, sink)
    return result


def _flash_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    options: Sequence[Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv. A sink needs no word of its own: it is in the lse, which is all the operator knows of the softmax."""
    lengths = _lengths(q, k, cu_q is not None, options)
    mask = _mask(options, *lengths, cu_q is not None)
    random = torch.empty(2, dtype=torch.uint64, device=q.device)  # for dropout
    dim, dim_v = q.shape[-1], v.shape[-1]  # the operator takes one: columns of zeros change nothing
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(_in_pieces(x, max(dim, dim_v)) for x in (dout, q, k, v, out)),
        lse.contiguous(),
        None if cu_q is None else cu_q.contiguous(),
        None if cu_k is None else cu_k.contiguous(),
        *lengths,
        0.0,
        mask.causal,
        random,
        random.new_empty(()),
        scale=options[2] or dim**-0.5,
        window_size_left=mask.left,
        window_size_right=mask.right,
    )
    return dq[..., :dim], dk[..., :dim], dv[..., :dim_v]


def _in_pieces(x: Tensor, dim: int) -> Tensor:
    """x with zeros up to head_dim dim, copied where its rows are not pieces of 16 bytes (8 elements of 16 bits)."""
    if x.shape[-1] != dim:
        return torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in x.stride()[:-1])
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """- sum of p_sink * (dout . out) over batch and queries, p_sink = exp(sink - lse); lse (batch, heads, seqlen_q) or
    (heads, total_q)."""
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    share = (sink.float()[:, None] - lse).exp()
    return -(share * delta).sum(-1).reshape(-1, sink.shape[0]).sum(0).to(sink.dtype)
