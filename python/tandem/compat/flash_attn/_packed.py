"""Attention over tensors that hold several of q, k and v, with their gradients written into one tensor as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch

import tandem
from tandem import _torch_api
from tandem._derivatives import once_differentiable, refuse_forward
from tandem.compat._arguments import unit_stride

Unpack = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def attention(
    q: torch.Tensor | None, packed: torch.Tensor, unpack: Unpack, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of the tensors unpack(packed): q, k and v, or k and v with a separate q.

    unpack returns views and is applied to the gradient too, so that no gradients have to be concatenated.
    """
    packed = unit_stride(packed, "qkv" if q is None else "kv")
    q = None if q is None else unit_stride(q, "q")
    # Tracers and transforms see the parts and join the gradients. A GPU's gradients may come from torch's operator.
    if (
        packed.is_cuda
        or torch.compiler.is_compiling()
        or not _torch_api.is_eager(packed, packed, packed if q is None else q)
    ):
        parts = unpack(packed) if q is None else (q, *unpack(packed))
        return tandem.attention(*parts, return_lse=True, **options)
    return _PackedAttention.apply(q, packed, unpack, options)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, packed, unpack, options):
        parts = unpack(packed) if q is None else (q, *unpack(packed))
        out, lse = tandem.attention(*parts, return_lse=True, **options)
        # autograd then refuses a backward after a write to one of the options, such as cu_seqlens.
        ctx.save_for_backward(q, packed, out, lse, *(x for x in options.values() if isinstance(x, torch.Tensor)))
        ctx.unpack, ctx.options = unpack, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        q, packed, out, lse, *_ = ctx.saved_tensors
        with torch.no_grad():
            dq, dpacked = _gradients(ctx, dout, dlse, q, packed, out, lse)
        dq, dpacked = once_differentiable([dq, dpacked], (dout, dlse, q, packed, out, lse))
        return dq, dpacked, None, None

    jvp = staticmethod(refuse_forward)


def _gradients(ctx, dout, dlse, q, packed, out, lse):
    """Returns dq and the packed gradient, None if they are not requested."""
    wants_q, wants_packed = ctx.needs_input_grad[:2]
    parts = list(ctx.unpack(packed))
    dpacked = torch.empty_like(packed) if wants_packed else None
    targets = list(ctx.unpack(dpacked)) if wants_packed else [False] * len(parts)
    if q is not None:
        parts.insert(0, q)
        targets.insert(0, None if wants_q else False)
    dq, dk, dv = targets
    dout = torch.zeros_like(out) if dout is None else dout
    result = tandem.attention_backward(dout, *parts, out, lse, **ctx.options, dlse=dlse, dq=dq, dk=dk, dv=dv)
    return result.dq if q is not None else None, dpacked
