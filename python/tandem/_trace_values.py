"""Captured numbers that change from call to call, and captured tensors of wide ints."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_first_values: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_CHANGED = object()
_checked = WeakIdKeyDictionary()  # by tensor: the last version whose elements fit


def changes(function: Any, name: str, value: Any) -> bool:
    """Returns True if this number of a compiled function had another value in an earlier call."""
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    values = _first_values.setdefault(code, {})
    known = values.setdefault(name, value)
    if known is not _CHANGED and (type(known) is not type(value) or known != value):
        known = values[name] = _CHANGED
    return known is _CHANGED


def fits(tensor: Tensor) -> bool:
    """Returns true if all elements of a tensor of wide ints are ints of 32 bits.

    A GPU tensor is read once for each version.
    """
    if not tensor.numel() or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    version = None if tensor.is_inference() else tensor._version
    if version is not None and _checked.get(tensor) == version:
        return True
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # no value can be read in a CUDA graph
    values = tensor.detach()
    least, most = (
        (int(x) for x in (values.min(), values.max()))
        if tensor.dtype == torch.int64
        else (
            0,
            max(int(x) for x in values.flatten().tolist()),
        )
    )
    if not -(2**31) <= least <= most < 2**31:
        return False
    if version is not None:
        _checked[tensor] = version
    return True
