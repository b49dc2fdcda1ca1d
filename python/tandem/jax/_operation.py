"""One pass of attention on arrays of JAX: its names, the shapes of its results, and XLA's custom call."""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tandem import _ctypes
from tandem._options import KINDS

PASSES = ("forward", "backward")
_ALIGNMENTS = {"bottom_right": 0, "top_left": 1, "explicit": 2}
# Converts a number, by the kind of an option or by the number's type in an expression.
_NUMBERS: dict[Any, Any] = {
    **{"Length": np.int64, "Count": np.int32, "Flag": np.int32, "Real": np.float64},
    "Scale": lambda value: np.float64(value or np.finfo(np.float64).tiny),  # 0 means "not given" in C
    **{bool: np.bool_, int: np.int64, float: np.float64},
}
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # the handlers' names, and XLA's names of the platforms

# The inputs with a row for each sequence of a dense call. rows_q and rows_k are (batch, segments + 1): the begins and
# ends of the segments within each sequence.
BATCH_FIRST = {
    *("q", "k", "v", "out", "lse", "dout", "dlse", "seqused_q", "seqused_k", "diagonal_offsets", "rows_q", "rows_k")
}
# The inputs whose first dimensions are (batch|1, heads|1).
BROADCAST = {"bias", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"}
_LIKE_Q = {"q", "k", "v", "out", "dout"}
_LIKE_LSE = {"lse", "dlse"}


class Expression(NamedTuple):
    """A score_mod or mask_mod. A number is (name, type, value), because 1, 1.0 and True are equal."""

    argument: str
    text: str
    numbers: tuple[tuple[str, type, Any], ...]


class Operation(NamedTuple):
    """A pass without its arrays, hashable, so that traced functions are kept for each pass.

    options: a call's options in the form of tandem._binding.
    """

    backward: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    expressions: tuple[Expression, ...] = ()
    float32: frozenset[str] = frozenset()  # outputs of this type

    def mentions(self, variable: str) -> bool:
        """Returns True if an expression reads batch or head."""
        return any(re.search(rf"\b{variable}\b", expression.text) for expression in self.expressions)

    @property
    def is_dense(self) -> bool:
        return "cu_seqlens_q" not in self.inputs


def register() -> None:
    """Registers the handlers of libtandem with XLA."""
    library = _ctypes.library()
    for platform, name in _PLATFORMS.items():
        for which in PASSES:
            handler = getattr(library, f"tandem_xla_{platform}_{which}")
            handler.restype, handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            jax.ffi.register_ffi_target(f"tandem_{which}", jax.ffi.pycapsule(handler), platform=name)


def result_of(name: str, operation: Operation, arrays: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """The shape and type of an output."""
    q = arrays["q"]
    if name == "out":
        shape, dtype = (*q.shape[:-1], arrays["v"].shape[-1]), q.dtype
    elif name == "lse":
        shape = (q.shape[0], q.shape[2], q.shape[1]) if len(q.shape) == 4 else (q.shape[1], q.shape[0])
        dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    else:
        shape, dtype = arrays[name[1:]].shape, arrays[name[1:]].dtype
    return jax.ShapeDtypeStruct(shape, jnp.float32 if name in operation.float32 else dtype)


def _attributes(operation: Operation) -> dict[str, Any]:
    """The options and expressions as attributes of the custom call."""
    made: dict[str, Any] = {}
    for name, value in operation.options:
        kind = KINDS[name]
        if kind == "Window":
            bounds = [(f"window_{side}", bit, x) for side, bit, x in zip(("left", "right"), (1, 2), value)]
            made["window"] = np.int32(sum(bit for _, bit, x in bounds if x is not None))
            made.update((bound, np.int64(x)) for bound, _, x in bounds if x is not None)
        elif kind == "Alignment":
            made[name] = np.int32(_ALIGNMENTS[value])
        else:
            made[name] = _NUMBERS[kind](value)
    for argument, text, numbers in operation.expressions:
        made[argument] = text
        made.update((f"{argument}.{name}", _NUMBERS[kind](value)) for name, kind, value in numbers)
    return made


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes (jax.shard_map) over which an array varies."""
    aval = jax.typeof(x)
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else getattr(aval, "vma", frozenset())


def _as_varying(result: jax.ShapeDtypeStruct, x: Any) -> jax.ShapeDtypeStruct:
    """A result that varies over the same manual axes as x."""
    if not varying_axes(x):
        return result
    aval = jax.typeof(x)
    if not hasattr(aval, "manual_axis_type"):
        return jax.ShapeDtypeStruct(result.shape, result.dtype, vma=aval.vma)
    place = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    axes = aval.manual_axis_type
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=place, manual_axis_type=axes)


def call(operation: Operation, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """The custom call. Segments are packed before the call."""
    arrays = dict(zip(operation.inputs, inputs))
    results = {name: result_of(name, operation, arrays) for name in operation.outputs}
    if "rows_q" not in arrays:
        return _custom_call(operation, arrays, results)
    packed = {name: _packed(name, x) for name, x in arrays.items() if not name.startswith("rows_")}
    packed["cu_seqlens_q"] = _cu_seqlens(arrays["rows_q"], arrays["q"].shape[1])
    packed["cu_seqlens_k"] = _cu_seqlens(arrays["rows_k"], arrays["k"].shape[1])
    found = _custom_call(operation, packed, {name: _packed_result(name, x) for name, x in results.items()})
    return tuple(_unpacked(name, x, results[name].shape) for name, x in zip(results, found))


def _custom_call(operation: Operation, arrays: dict[str, Any], results: dict[str, Any]) -> tuple[jax.Array, ...]:
    results = {name: _as_varying(x, arrays["q"]) for name, x in results.items()}
    target = f"tandem_{PASSES[operation.backward]}"
    function = jax.ffi.ffi_call(target, tuple(results.values()), vmap_method="sequential")
    names = {"inputs": ",".join(arrays), "outputs": ",".join(results)}
    return function(*arrays.values(), **names, **_attributes(operation))


def _cu_seqlens(rows: jax.Array, length: int) -> jax.Array:
    """cu_seqlens of all segments of all sequences, each of `length` rows."""
    batch = rows.shape[0]
    begins = rows[:, :-1] + length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.append(begins.reshape(-1), jnp.int32(batch * length))


def _packed(name: str, x: jax.Array) -> jax.Array:
    if name in _LIKE_Q:
        return x.reshape(-1, *x.shape[2:])
    if name in _LIKE_LSE:
        return x.transpose(1, 0, 2).reshape(x.shape[1], -1)
    return x


def _packed_result(name: str, x: Any) -> jax.ShapeDtypeStruct:
    if name == "out" or name[1:] in _LIKE_Q:
        return jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype)
    if name == "lse":
        return jax.ShapeDtypeStruct((x.shape[1], x.shape[0] * x.shape[2]), x.dtype)
    return x


def _unpacked(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if name == "lse":
        return x.reshape(shape[1], shape[0], shape[2]).transpose(1, 0, 2)
    return x.reshape(shape)
