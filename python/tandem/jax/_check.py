"""Checks a call from the shapes and types of its arrays, so that it is refused before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tandem import _arrays, _gpu
from tandem._binding import BACKWARD, CHECK, FORWARD, binding
from tandem._errors import Unsupported, error_of, renamed
from tandem.jax._operation import Operation, result_of

_NAMES = {
    **{"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "causal": "is_causal"},
    **{"seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths", "lse": "residual"},
    **{"window": "local_window_size", "float32_out": "out_dtype"},
}
_LIKE_Q = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
_CODES = {"b": 6, "i": 0, "u": 1, "f": 2}  # DLPack's type codes by numpy's kind
_BFLOAT = 4


def device_type(arrays: Sequence[Any]) -> int:
    """DLPack's device type of the arrays; for traced arrays the default device's."""
    concrete = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    default = jax.config.jax_default_device
    if len(concrete) == len(arrays):
        platform = next(iter(concrete[0].devices())).platform
    elif default is not None:
        platform = default if isinstance(default, str) else default.platform
    else:
        platform = jax.default_backend()
    if platform == "cpu":
        return _arrays.CPU
    if platform in ("gpu", "cuda"):
        return _arrays.CUDA
    raise Unsupported(f"the device ({platform}) must be a CPU or an NVIDIA GPU: use jax.default_device(...)")


def _described(x: Any, name: str, device: int) -> tuple[Any, ...]:
    dtype = np.dtype(x.dtype)
    code = _BFLOAT if dtype == jnp.bfloat16 else _CODES.get(dtype.kind)
    if code is None or dtype.itemsize > 8 or jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2:
        raise TypeError(
            f"{name}.dtype ({dtype.name}) must be bool, an integer, or a float of 16 to 64 bits: convert it"
        )
    strides = tuple(math.prod(x.shape[d + 1 :]) for d in range(len(x.shape)))
    return 0, device, 0, code, 8 * dtype.itemsize, tuple(x.shape), strides, False, x


def check(operation: Operation, arrays: Sequence[Any]) -> None:
    """Raises what a call of these arrays would raise. In a backward pass, arrays are the inputs of the forward."""
    at = dict(zip(operation.inputs, arrays))
    device = device_type(arrays)
    results = {name: result_of(name, operation, at) for name in operation.outputs if _is_shaped(at)}
    if operation.backward and results:
        results.update((name, result_of(name, operation, at)) for name in ("out", "lse"))
        results["dout"] = results["out"]
    if "rows_q" in at:
        at, results = _of_segments(at), _of_segments(results)
    call_args: dict[str, Any] = dict(operation.options)
    for name, x in {**at, **results}.items():
        if "." not in name and name != "seed":
            call_args[name] = _described(x, _NAMES.get(name, name), device)
    for argument, text, numbers in operation.expressions:
        items: list[Any] = [(name, value, None) for name, _, value in numbers]
        for name, x in at.items():
            if name.startswith(argument + "."):
                gradient = f"d{name}" if f"d{name}" in results else None
                place = _described(results[gradient], name, device) if gradient else None
                items.append((name.partition(".")[2], _described(x, name, device), place))
        call_args[argument] = text, tuple(items)
    _raise_refusal(CHECK + (BACKWARD if operation.backward else FORWARD), call_args, at)


def _raise_refusal(what: int, call_args: dict[str, Any], arrays: dict[str, Any]) -> None:
    request = binding.run(what, call_args)
    if request is not None and request[0] == "open":
        _gpu.open_gpu(binding, request[1])
        request = binding.run(what, call_args)
    if request is None:
        return
    if request[0] != "refused":
        raise TypeError(f"{request[1]} must have rows of multiples of 16 bytes on a GPU: pad the last dimension")
    raise renamed(error_of(request[1], binding.last_error(), arrays), _NAMES)


def _is_shaped(at: dict[str, Any]) -> bool:
    """Returns False if no result has a shape, because the call will be refused."""
    return len(at["q"].shape) in (3, 4) and len(at["v"].shape) > 0


def _of_segments(arrays: dict[str, Any]) -> dict[str, Any]:
    """Shapes of arrays after their segments are packed."""
    found = {}
    for name, x in arrays.items():
        shape, dtype = tuple(x.shape), x.dtype
        if name.startswith("rows_"):
            name, shape = f"cu_seqlens_{name[-1]}", (shape[0] * (shape[1] - 1) + 1,)
        elif name in ("lse", "dlse"):
            shape = (shape[1], shape[0] * shape[2])
        elif name in _LIKE_Q:
            shape = (shape[0] * shape[1], *shape[2:])
        found[name] = jax.ShapeDtypeStruct(shape, dtype)
    return found
