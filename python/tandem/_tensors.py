"""torch tensors in the C interface's form: checked, without lazy negation, and with their versions counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
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
    if x.is_neg() or x.is_conj():
        lazily = "negated" if x.is_neg() else "conjugated"
        raise ValueError(f"{name} (lazily {lazily}) must be a plain tensor, since it is written: pass a new tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require a gradient, since it is written in place: pass {name}.detach(), or call under "
            "torch.no_grad()"
        )


def check_result(
    x: Any, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype], read: Iterable[tuple[str, Any]] = ()
) -> None:
    """Raises unless a result of this shape, and of one of these types, may be written to x.

    read: tensors that the call reads or writes, which must share no memory with x.
    """
    check_tensor(x, name)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_layout(x, name)
    if tuple(x.shape) != tuple(shape) or x.dtype not in dtypes:
        types = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{name} ({x.dtype}, shape {tuple(x.shape)}) must be {types}, of shape {tuple(shape)}: allocate such a "
            "tensor"
        )
    if compiling:
        return
    check_writable(x, name)
    if x.requires_grad:
        raise ValueError(f"{name} must not require a gradient, since it is written in place: pass {name}.detach()")
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride())):
        raise ValueError(
            f"{name}.strides {tuple(x.stride())} make its elements overlap: allocate {name} without broadcast "
            "dimensions"
        )
    for other, y in read:
        if isinstance(y, Tensor) and shares_memory(x, y):
            raise ValueError(f"{name}.data overlaps {other}: pass separate memory for {name}")


def check_out(out: Any, q: Tensor, v: Tensor, read: Iterable[tuple[str, Any]]) -> None:
    """Raises unless attention of q, with the head_dim of v, may be written to out."""
    dtypes = (q.dtype,) if q.dtype == torch.float64 else (q.dtype, torch.float32)
    check_result(out, "out", (*q.shape[:-1], v.shape[-1]), dtypes, read)


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Returns True if two strided tensors share a byte. Nothing is read, so that they may lie on a GPU."""
    if x.layout is not torch.strided or y.layout is not torch.strided:
        return False
    if type(x) not in PLAIN or type(y) not in PLAIN or x.device != y.device or not x.numel() or not y.numel():
        return False
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and np.shares_memory(
        *(np.asarray(_Addresses(t)) for t in (x, y))
    )


class _Addresses:
    """The addresses of a tensor's elements in numpy's form."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "data": (x.data_ptr(), True),
        }


def count_write(x: Any) -> None:
    """Increments x's version, by which autograd detects that x was written in place."""
    if isinstance(x, Tensor) and not x.is_inference():
        torch.autograd.graph.increment_version(x)
