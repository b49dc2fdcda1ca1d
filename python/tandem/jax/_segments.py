"""Segments of packed training batches as begins and ends of sequences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rows_of(segment_ids: Any, max_segments: int | None, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """rows_q and rows_k, (batch, segments + 1) int32: the begins of the segments of each sequence. The third result is
    None, or for traced ids True for each sequence that has at most max_segments, the same for queries and keys.
    """
    pair = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(
            f"segment_ids ({len(pair)} arrays) must be one array or two: pass the ids, or (queries' ids, keys' ids)"
        )
    ids = [_checked(x, like) for x, like in zip(pair, (q, k))]
    is_traced = any(isinstance(x, jax.core.Tracer) for x in ids)
    if max_segments is None:
        if is_traced:
            raise ValueError(
                "max_segments (None) must be a number inside jax.jit: pass the most segments of one sequence"
            )
        max_segments = max(int((x[:, 1:] != x[:, :-1]).sum(1).max(initial=0)) + 1 for x in map(np.asarray, ids))
    if isinstance(max_segments, bool) or not isinstance(max_segments, (int, np.integer)) or max_segments < 1:
        raise ValueError(
            f"max_segments ({max_segments!r}) must be an integer of at least 1: pass the most segments of a sequence"
        )
    rows_q, rows_k, served = _rows(*ids, int(max_segments))
    if is_traced:
        return rows_q, rows_k, served
    if not np.all(served):
        raise ValueError(
            f"segment_ids must have at most max_segments ({max_segments}) runs of equal ids, the same for queries and "
            "keys: raise max_segments or correct the ids"
        )
    return rows_q, rows_k, None


def _checked(ids: Any, like: Any) -> jax.Array:
    x = jnp.asarray(ids)
    if x.shape != tuple(like.shape[:2]) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids ({x.dtype.name} of shape {x.shape}) must be integers of shape {tuple(like.shape[:2])}: pass "
            "one for each row"
        )
    if 0 in x.shape:
        raise ValueError(f"segment_ids (shape {x.shape}) must have at least one row: pass a row for each sequence")
    return x


@functools.partial(jax.jit, static_argnums=2)
def _rows(ids_q: jax.Array, ids_k: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    numbers = [_numbers(x) for x in (ids_q, ids_k)]
    rows = [_begins(n, count) for n in numbers]
    fits = (numbers[0][:, -1] < count) & (numbers[1][:, -1] == numbers[0][:, -1])
    firsts = [jnp.take_along_axis(x, jnp.minimum(r[:, :-1], x.shape[1] - 1), 1) for x, r in zip((ids_q, ids_k), rows)]
    exists = jnp.arange(count) <= numbers[0][:, -1:]
    return *rows, fits & jnp.all((firsts[0] == firsts[1]) | ~exists, axis=1)


def _numbers(ids: jax.Array) -> jax.Array:
    """The number of each row's run of equal ids, from 0."""
    changes = (ids[:, 1:] != ids[:, :-1]).astype(jnp.int32)
    return jnp.pad(jnp.cumsum(changes, axis=1), ((0, 0), (1, 0)))


def _begins(numbers: jax.Array, count: int) -> jax.Array:
    """The first row of each run; the number of rows for runs that do not exist, and as the last end."""
    wanted = jnp.arange(count, dtype=numbers.dtype)
    begins = jax.vmap(lambda row: jnp.searchsorted(row, wanted))(numbers).astype(jnp.int32)
    return jnp.pad(begins, ((0, 0), (0, 1)), constant_values=numbers.shape[1])
