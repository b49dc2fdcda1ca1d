"""Attention as a function with gradients: jax.custom_vjp around the operations of both passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tandem._errors import Unsupported
from tandem.jax._batching import batched
from tandem.jax._check import check
from tandem.jax._operation import Operation, call
from tandem.jax._sharding import partitioned

_REFUSAL = (
    "second derivatives of tandem.jax.attention are not served: compute the attention with jax.nn.dot_product_attention"
)


@functools.lru_cache(maxsize=4096)
def operator(operation: Operation) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation with a rule for jax.vmap and one for partitioning."""

    @jax.custom_batching.custom_vmap
    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        function = functools.partial(call, operation) if in_shard_map() else partitioned(operation)
        return function(*arrays)

    @function.def_vmap
    def rule(size: int, mapped: Sequence[bool], *arrays: jax.Array) -> Any:
        results = batched(operation, operator(operation), size, mapped, arrays)
        return results, (True,) * len(results)

    return function


def in_shard_map() -> bool:
    """Returns True inside jax.shard_map, where the caller has partitioned the arrays."""
    return bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


@functools.lru_cache(maxsize=4096)
def _once(operation: Operation) -> Callable[..., tuple[jax.Array, ...]]:
    """The operator, whose own derivative is refused."""

    @jax.custom_vjp
    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return operator(operation)(*arrays)

    def refuse(*_: Any) -> Any:
        raise Unsupported(_REFUSAL)

    function.defvjp(refuse, refuse)
    return function


def _outputs_of_backward(operation: Operation, wanted: Sequence[str]) -> Operation:
    return operation._replace(outputs=tuple("d" + name for name in wanted))


@functools.lru_cache(maxsize=4096)
def differentiable(forward: Operation) -> Callable[..., tuple[jax.Array, ...]]:
    """forward with gradients of its float inputs. Only the gradients that a caller needs are computed."""
    with_lse = forward._replace(outputs=("out", "lse"))

    @jax.custom_vjp
    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return operator(forward)(*arrays)

    def run_forward(*primals: Any) -> Any:
        arrays = [x.value for x in primals]
        for name, x in zip(forward.inputs, primals):
            if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating) and not _has_gradient(name, x.value):
                raise Unsupported(
                    f"{name} must not be differentiated, because {name} has no gradient: pass "
                    f"jax.lax.stop_gradient({name}), or compute the scores with score_mod"
                )
        wanted = {name: () for name, x in zip(forward.inputs, primals) if x.perturbed and _has_gradient(name, x.value)}
        backward = _outputs_of_backward(with_lse._replace(backward=True), tuple(wanted))
        check(backward, arrays)
        out, lse = _once(with_lse)(*arrays)
        return (out, lse)[: len(forward.outputs)], (wanted, arrays, out, lse)

    def run_backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
        wanted, arrays, out, lse = residuals
        dout, *others = cotangents
        dlse = [x for x in others if not isinstance(x, SymbolicZero)]
        if isinstance(dout, SymbolicZero):
            dout = jnp.zeros_like(out)
        inputs = (*forward.inputs, "out", "lse", "dout", "dlse")[: len(arrays) + 3 + len(dlse)]
        backward = forward._replace(backward=True, inputs=inputs, float32=frozenset())
        operation = _outputs_of_backward(backward, tuple(wanted))
        found = dict(zip(wanted, _once(operation)(*arrays, out, lse, dout, *dlse))) if wanted else {}
        return tuple(found.get(name) for name in forward.inputs)

    function.defvjp(run_forward, run_backward, symbolic_zeros=True)
    return jax.jit(function)


def _has_gradient(name: str, x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and (name in ("q", "k", "v", "bias", "sink") or "score_mod." in name)
