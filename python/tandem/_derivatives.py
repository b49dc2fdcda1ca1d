"""Derivatives that do not exist: second derivatives and forward-mode tangents are refused on every path.

Kernels compute the gradients, so autograd cannot differentiate them. Under create_graph=True they pass through Once,
whose backward raises. create_graph=True alone is legal, because only the evaluation of a second derivative raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem._errors import Unsupported

_SECOND = (
    "the second derivative of attention is not served: compute the attention with torch's own operations for a "
    "gradient penalty, hvp or hessian"
)
_FORWARD = (
    "forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad) of attention are not served: use "
    "reverse mode, such as torch.func.vjp, or compute the attention with torch's own operations"
)


def refuse_second(*_: Any) -> NoReturn:
    raise Unsupported(_SECOND)


def refuse_forward(*_: Any) -> NoReturn:
    raise Unsupported(_FORWARD)


def refuse_tangents(values: Iterable[Any]) -> None:
    """Raises if one of these, or of the lists in them, is a tensor with a forward-mode tangent."""
    if forward_ad._current_level < 0:
        return
    for x in values:
        if isinstance(x, (list, tuple)):
            refuse_tangents(x)
        elif isinstance(x, Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None:
            refuse_forward()


class Once(torch.autograd.Function):
    """The identity of the first `count` tensors, which depend on the rest. The operator has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    backward = staticmethod(refuse_second)
    jvp = staticmethod(refuse_forward)


def once_differentiable(results: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """The results as functions of the sources that have no derivative. Results that are not tensors stay as they are.
    sources: everything that the results were computed from."""
    tensors = [x for x in results if isinstance(x, Tensor)]
    if not tensors or not torch.is_grad_enabled():
        return list(results)
    attached = iter(Once.apply(len(tensors), *tensors, *(x for x in sources if isinstance(x, Tensor))))
    return [next(attached) if isinstance(x, Tensor) else x for x in results]
