"""jax.vmap of an operation: the examples become one larger batch where their results do not change, else one call
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tandem.jax._operation import BATCH_FIRST, BROADCAST, Operation

_OWN_ROWS = ("dq", "dk", "dv", "dbias", "out", "lse")  # outputs with a row for each example


def batched(
    operation: Operation, function: Callable[..., Any], size: int, mapped: Sequence[bool], inputs: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The results of all examples. mapped: True for an input whose first dimension counts the examples."""
    if size > 0 and _can_be_one_batch(operation, mapped, inputs):
        return _one_batch(operation, function, size, mapped, inputs)

    def one(examples: list[jax.Array]) -> tuple[jax.Array, ...]:
        rest = iter(examples)
        return function(*(next(rest) if m else x for m, x in zip(mapped, inputs)))

    return jax.lax.map(one, [x for m, x in zip(mapped, inputs) if m])


def _can_be_one_batch(operation: Operation, mapped: Sequence[bool], inputs: Sequence[jax.Array]) -> bool:
    """Dropout and some expressions depend on the place in the batch, and gradients of shared inputs are needed for each
    example.
    """
    if not operation.is_dense or "seed" in operation.inputs or operation.mentions("batch"):
        return False
    if any(name not in _OWN_ROWS for name in operation.outputs):
        return False
    foldable = BATCH_FIRST | BROADCAST | {"alibi_slopes"}
    return not any(m and name not in foldable for name, m in zip(operation.inputs, mapped))


def _one_batch(
    operation: Operation, function: Callable[..., Any], size: int, mapped: Sequence[bool], inputs: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    at = dict(zip(operation.inputs, zip(inputs, mapped)))
    q, q_is_mapped = at["q"]
    batch = q.shape[1 if q_is_mapped else 0]
    whole = {"bias"} if "dbias" in operation.outputs else set()  # a gradient for each example

    def folded(name: str) -> jax.Array:
        x, is_mapped = at[name]
        dims = x.ndim - is_mapped
        shared = name not in BATCH_FIRST and name not in whole and (name not in BROADCAST or x.shape[0] == 1)
        if not is_mapped and (shared or (name == "alibi_slopes" and dims == 1)):
            return x
        if name == "alibi_slopes" and dims == 1:
            x = x[:, None]  # (examples, 1, heads)
        x = x if is_mapped else x[None]
        return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])

    found = function(*map(folded, operation.inputs))
    results = []
    for name, x in zip(operation.outputs, found):
        x = x.reshape(size, batch, *x.shape[1:])
        if name == "dbias":
            bias, is_mapped = at["bias"]
            if bias.shape[int(is_mapped)] == 1 and batch != 1:
                x = x.sum(1, keepdims=True, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)
        results.append(x)
    return tuple(results)
