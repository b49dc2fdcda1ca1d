"""torch tensors in the C interface's form: checked, without lazy negation, and with their versions counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


def check_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} ({type(x).__name__}) must be a torch tensor, as q is: convert it with torch.as_tensor")


def check_layouts(tensors: Iterable[tuple[str, Any]]) -> None:
    """Raises if a tensor has no strides or several shapes."""
    for name, x in tensors:
        if isinstance(x, Tensor):
            check_layout(x, name)


def check_layout(x: Tensor, name: str) -> None:
    if x.is_nested:
        layout = "jagged, nested" if x.layout is torch.jagged else "nested"
        raise TypeError(
            f"{name} ({layout}) must be a plain tensor: pass its values() packed, (total, heads, head_dim), with "
            "cu_seqlens and max_seqlen"
        )
    if x.layout is not torch.strided:
        raise TypeError(
            f"{name} ({str(x.layout).rpartition('.')[2]}) must be a strided tensor: convert it with to_dense()"
        )
    if x._is_zerotensor():
        raise TypeError(f"{name} (a zero tensor without memory) must have memory: copy it with torch.zeros_like")


def resolved(x: Any) -> Any:
    """Returns x with a lazy negation carried out, which the C interface cannot see."""
    if isinstance(x, Tensor):
        if x.is_neg():
            return x.resolve_neg()
        if x._is_zerotensor():
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x


def check_writable(x: Tensor, name: str) -> None:
    """Raises if a tensor that is written in place is lazily negated, or requires a gradient."""
    if x.is_neg():
        raise ValueError(f"{name} (lazily negated) must be a plain tensor, since it is written: pass a new tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require a gradient, since it is written in place: pass {name}.detach(), or call under "
            "torch.no_grad()"
        )


def count_write(x: Any) -> None:
    """Increments x's version, by which autograd detects that x was written in place."""
    if isinstance(x, Tensor) and not x.is_inference():
        torch.autograd.graph.increment_version(x)
