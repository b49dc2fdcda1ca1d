"""Converts arrays of all libraries: numpy views of DLPack arrays, results of the caller's kind, descriptions for the C
interface.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

CPU, CUDA = 1, 2  # DLPack's device types
_FLOAT, _OPAQUE, _BFLOAT = 2, 3, 4  # DLPack's type codes
_CODES = {"b": 6, "i": 0, "u": 1, "f": _FLOAT}  # by numpy's kind
_TORCH_DTYPES = {
    "torch.float64": (_FLOAT, 64),
    "torch.float32": (_FLOAT, 32),
    "torch.float16": (_FLOAT, 16),
    "torch.bfloat16": (_BFLOAT, 16),
    "torch.bool": (6, 8),
    "torch.int64": (0, 64),
    "torch.int32": (0, 32),
    "torch.int16": (0, 16),
    "torch.int8": (0, 8),
    "torch.uint8": (1, 8),
}

# The tensors of tandem_append_kv_args, in its order.
APPEND_TENSORS = (
    "k", "v", "k_cache", "v_cache", "slot_mapping", "page_table", "cache_seqlens", "cache_batch_idx", "cu_seqlens_new",
    "q", "q_out", "cu_seqlens_q", "rotary_cos", "rotary_sin", "rotary_seqlens", "positions",
)  # fmt: skip


def is_torch(x: Any) -> bool:
    """Returns True if x is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_fake(x: Any) -> bool:
    """Returns True for a torch tensor without memory, whose data_ptr() gives a warning."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(x, fakes.FakeTensor)


def shown(value: Any) -> str:
    """Returns a refused value for a message: itself, or its type."""
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def flag_of(x: Any, name: str) -> bool:
    """Returns a flag that may be a scalar of any library; None is False."""
    try:
        if isinstance(x, (str, bytes)):
            raise TypeError
        return x if x is True or x is False else bool(x)
    except (RuntimeError, TypeError, ValueError):  # an array with several values, or with no value
        raise TypeError(f"{name} ({shown(x)}) must be True or False: pass one of them") from None


def integer(value: Any, name: str, bits: int = 64, otherwise: str = "") -> int:
    """Returns a whole number that a field of this width in C can represent. otherwise: what else the rule allows."""
    error: Any = ValueError
    try:
        number = operator.index(value)
        if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            return number
    except TypeError:
        error = TypeError
    raise error(f"{name} ({shown(value)}) must be an integer of at most {bits} bits{otherwise}: pass one")


def _refuse_negation(x: Any, name: str) -> None:
    if x.is_neg():
        raise ValueError(f"{name} (lazily negated) must be a plain tensor: pass {name}.resolve_neg()")


def is_seed(described: tuple[Any, ...]) -> bool:
    """Returns True if an array, as describe() returns it, is two contiguous integers of 64 bits."""
    code, bits, shape, strides = described[3:7]
    return code in (0, 1) and bits == 64 and shape == (2,) and strides == (1,)


def check_foreign(arrays: Iterable[tuple[str, Any]]) -> None:
    """Raises if an array's memory does not show a mask of numpy, or a lazy negation or gradient of torch."""
    for name, x in arrays:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name} (MaskedArray) must be a plain array, because masks of numpy are not read: fill it")
        if is_torch(x):
            _refuse_negation(x, name)
            if x.requires_grad and sys.modules["torch"].is_grad_enabled():
                raise ValueError(
                    f"{name} must not require a gradient, because q is no torch tensor and the result has none: pass "
                    f"{name}.detach(), or q as a torch tensor"
                )


def view(x: Any, name: str) -> Any:
    """Returns x if it is a numpy array or a torch tensor; else a numpy array over the memory of a DLPack producer."""
    if isinstance(x, np.ndarray) or is_torch(x):
        return x
    if not hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{name} ({type(x).__name__}) must be an array of numpy, of torch or with __dlpack__: convert it, for "
            "example with numpy.asarray"
        )
    if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) == CUDA:
        raise TypeError(
            f"{name} ({type(x).__name__} on a GPU) must be a torch tensor: convert it with torch.from_dlpack, without "
            "a copy"
        )
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        if not hasattr(x, "__array__"):
            raise TypeError(
                f"{name} ({type(x).__name__}) must be readable in place ({error}): convert it to a numpy array"
            ) from error
        return np.asarray(x)  # numpy cannot import bfloat16; such arrays convert


def like(original: Any, result: np.ndarray) -> Any:
    """Converts a numpy result to the caller's kind of array, by the array API's namespace if there is one."""
    if isinstance(original, np.ndarray):
        return result
    if hasattr(original, "__array_namespace__"):
        space = original.__array_namespace__()
    else:
        space = sys.modules.get(type(original).__module__.partition(".")[0])
    if not hasattr(space, "from_dlpack"):
        return result
    try:
        return space.from_dlpack(result)
    except (BufferError, RuntimeError, TypeError):
        return space.asarray(result)


def describe(x: Any, name: str) -> tuple[Any, ...]:
    """Returns (address, device type, device index, type code, bits, shape, strides, read-only, owner), strides in
    elements.
    """
    if isinstance(x, np.ndarray):
        code = _CODES.get(x.dtype.kind)
        if code is None and x.dtype.name == "bfloat16":  # x.dtype.name builds a new string each time
            code = _BFLOAT
        size = x.dtype.itemsize
        if code is None or not x.dtype.isnative or size > 8:
            raise TypeError(f"{name}.dtype ({x.dtype}) must be a number type of this machine: convert it with astype")
        if any(stride % size for stride in x.strides):
            raise ValueError(
                f"{name} (strides of {x.strides} bytes) must have strides in multiples of {size} bytes: copy it"
            )
        _check_dimensions(x.ndim, name)
        strides = tuple(stride // size for stride in x.strides)
        return x.ctypes.data, CPU, 0, code, 8 * size, x.shape, strides, not x.flags.writeable, x
    if is_torch(x):
        device = {"cpu": CPU, "cuda": CUDA}.get(x.device.type)
        if device is None:
            without = ", which has no values," if x.is_meta else ""
            raise TypeError(f"{name} is on {x.device.type}{without} and must be on cpu or cuda: create it there")
        _refuse_negation(x, name)
        if x.layout is not sys.modules["torch"].strided:
            raise TypeError(f"{name} ({x.layout}) must be a strided tensor: convert it with to_dense()")
        dtype = _TORCH_DTYPES.get(str(x.dtype)) or (_OPAQUE, 8 * x.element_size())  # the library refuses other types
        _check_dimensions(x.dim(), name)
        address = x.storage_offset() * x.element_size() if is_fake(x) else x.data_ptr()
        return (address, device, x.device.index or 0, *dtype, tuple(x.shape), tuple(x.stride()), False, x)
    return describe(view(x, name), name)


def _check_dimensions(count: int, name: str) -> None:
    if count > 8:
        raise ValueError(f"{name} ({count} dimensions) must have at most 8 dimensions: reshape it to at most 4")


def new_lse(q: np.ndarray) -> np.ndarray:
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    shape = q.shape
    if len(shape) == 4:
        return np.empty((shape[0], shape[2], shape[1]), dtype)
    return np.empty(shape[1::-1], dtype)


def new_outputs(q: np.ndarray, v: np.ndarray, float32: bool) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(q.shape[:-1] + v.shape[-1:], np.float32 if float32 else q.dtype), new_lse(q)


def new_gradient(x: np.ndarray) -> np.ndarray:
    return np.empty(x.shape, x.dtype)


def wants_gradient(x: Any) -> bool:
    """Returns True if the backward computes a gradient of x by default: for torch tensors, if they require one."""
    return x.requires_grad if is_torch(x) else is_floating(x)


def is_floating(x: Any) -> bool:
    if x is None:
        return False
    return x.is_floating_point() if is_torch(x) else x.dtype.kind not in "b?iu"
