"""Partitions an operation over the devices of a mesh: batch and heads may be sharded, all other dimensions not.

The sequences and heads of a shard are independent of other shards. Exceptions keep their dimension whole: expressions
that read `batch` or `head`, and dropout, whose random bits depend on both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from tandem.jax._operation import BROADCAST, Operation, call

_DENSE = {"q": "b.n.", "k": "b.k.", "v": "b.k.", "out": "b.n.", "lse": "bn.", "rows_q": "b.", "rows_k": "b."}
_PACKED = {"q": ".n.", "k": ".k.", "v": ".k.", "out": ".n.", "lse": "n."}
_ANY = {"sink": "n", "seqused_q": "b", "seqused_k": "b", "diagonal_offsets": "b"}


def _roles(operation: Operation, name: str, shape: tuple[int, ...]) -> str:
    """A letter for each dimension: b for the batch, n for query heads, k for key heads, else a dot."""
    name = {"dout": "out", "dlse": "lse"}.get(name, name)
    known = _DENSE if operation.is_dense else _PACKED
    if name in known or name in _ANY:
        roles = known.get(name) or _ANY[name]
        return roles if operation.is_dense else roles.replace("b", ".")
    if name == "alibi_slopes":
        return "bn"[-len(shape) :] if operation.is_dense else ".n"[-len(shape) :]
    if name in BROADCAST:
        return "".join(role if size != 1 else "." for role, size in zip("bn", shape)) + "." * (len(shape) - 2)
    return "." * len(shape)


def _result_roles(operation: Operation, name: str, shape: tuple[int, ...]) -> str:
    return _roles(operation, name if name in ("out", "lse") else name[1:], shape)


def _free(operation: Operation) -> str:
    """The roles of the dimensions that may be sharded."""
    if "seed" in operation.inputs:
        return ""
    dense = operation.is_dense and not operation.mentions("batch")
    return ("b" if dense else "") + ("" if operation.mentions("head") else "nk")


def _rule(operation: Operation, inputs: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """Shardy's rule. A query head is a pair of key head and group."""
    shapes = dict(zip(operation.inputs, inputs))
    heads_q, heads_k = shapes["q"].shape[-2], shapes["k"].shape[-2]
    group = heads_q // max(heads_k, 1)
    counter = itertools.count()

    def factor(role: str, size: int) -> Any:
        if role == "." or size <= 1:
            return f"w{next(counter)}"
        if role == "n" and group > 1 and heads_k > 1:
            return CompoundFactor("k", "g")
        return "k" if role == "n" and group == 1 else "g" if role == "n" else role

    def mapping(roles: str, shape: tuple[int, ...]) -> ArrayMapping:
        return ArrayMapping(*(factor(role, size) for role, size in zip(roles, shape)))

    operands = tuple(mapping(_roles(operation, name, x.shape), x.shape) for name, x in shapes.items())
    outputs = tuple(
        mapping(_result_roles(operation, name, x.shape), x.shape) for name, x in zip(operation.outputs, results)
    )
    dims = [dim for mapping in (*operands, *outputs) for dim in mapping]
    used = dict.fromkeys(name for dim in dims for name in ([dim] if isinstance(dim, str) else dim))
    free = _free(operation).replace("n", "g")
    whole = tuple(name for name in used if name.startswith("w") or name not in free)  # in the order of their use
    sizes = {"g": group} if group > 1 and heads_k > 1 and "g" in used else {}
    return SdyShardingRule(operands, outputs, need_replication_factors=whole, **sizes)


def _axes_of(operation: Operation, mesh: Any, q: Any, heads_k: int) -> dict[str, Any]:
    """The mesh axes of each role, from the sharding of q."""
    spec = (*q.sharding.spec, *(None,) * (len(q.shape) - len(q.sharding.spec)))
    free = _free(operation)

    def dividing(axes: Any, *sizes: int) -> Any:
        """The axes, or None where they do not divide the sizes: XLA would pad shards with elements of any value."""
        count = math.prod(mesh.shape[axis] for axis in _names(axes))
        return axes if all(size % count == 0 for size in sizes) else None

    batch = dividing(spec[0], q.shape[0]) if "b" in free else None
    heads = dividing(spec[-2], q.shape[-2], *([heads_k] if heads_k != 1 else [])) if "n" in free else None
    return {"b": batch, "n": heads, "k": heads if heads_k != 1 else None, ".": None}


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _partition(operation: Operation, mesh: Any, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
    at = dict(zip(operation.inputs, inputs))
    axes = _axes_of(operation, mesh, at["q"], at["k"].shape[-2])

    def sharding(roles: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes[role] for role in roles)))

    roles = {name: _result_roles(operation, name, x.shape) for name, x in zip(operation.outputs, results)}
    every = _names(axes["b"]) + _names(axes["n"])
    # Gradients of inputs that several shards share are sums over these shards.
    shared = {name: tuple(a for a in every if a not in _axes_in(r, axes)) for name, r in roles.items()}
    partial = frozenset(name for name, over in shared.items() if over)
    inner = operation._replace(float32=operation.float32 | partial)
    dtypes = [x.dtype for x in results]

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = call(operation if arrays[0].dtype == jnp.float64 else inner, *arrays)
        summed = (jax.lax.psum(x, shared[name]) if shared[name] else x for name, x in zip(operation.outputs, found))
        return tuple(x.astype(dtype) for x, dtype in zip(summed, dtypes))

    arguments = tuple(sharding(_roles(operation, name, x.shape)) for name, x in at.items())
    return mesh, local, tuple(map(sharding, roles.values())), arguments


def _axes_in(roles: str, axes: dict[str, Any]) -> tuple[str, ...]:
    return sum((_names(axes[role]) for role in roles), ())


def _infer(operation: Operation, mesh: Any, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
    return _partition(operation, mesh, inputs, results)[2]


def in_explicit_mesh(operation: Operation, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a mesh with explicit axes: the results are sharded as q, by the automatic partitioning."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        at = dict(zip(operation.inputs, arrays))
        axes = _axes_of(operation, mesh, jax.typeof(at["q"]), at["k"].shape[-2])
        roles = [_roles(operation, name, (0,) * at["q"].ndim) for name in operation.outputs]
        specs = tuple(PartitionSpec(*(axes[role] for role in r)) for r in roles)
        return jax.sharding.auto_axes(function, out_sharding=specs)(*arrays)

    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    is_explicit = mesh is not None and not mesh.empty and getattr(mesh, "explicit_axes", ())
    return run if is_explicit else function


@functools.lru_cache(maxsize=4096)
def partitioned(operation: Operation) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation for JAX's automatic partitioning."""

    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return call(operation, *arrays)

    made = custom_partitioning(function)
    made.def_partition(
        partition=functools.partial(_partition, operation),
        infer_sharding_from_operands=functools.partial(_infer, operation),
        sharding_rule=lambda mesh, inputs, results: _rule(operation, inputs, results),
    )
    return made
