"""torch.func.vmap of the operators: the examples become one larger batch where possible, else one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_QKV = 3  # the first inputs: (batch, seqlen, heads, head_dim), dense
_BIAS, _SINK, _SLOPES = "bias", "sink", "alibi_slopes"


def _front(x: Any, dim: int | None, count: int) -> Any:
    """Returns x with its examples in front; without examples it is repeated."""
    if not isinstance(x, Tensor):
        return x
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _folded(x: Tensor, dim: int | None, count: int, batch: int) -> Tensor:
    """Expands a tensor with a batch (or 1 for all of it) to all examples' batches."""
    if dim is None and x.shape[0] == 1 and batch != 1:
        return x
    whole = _front(x, dim, count)
    if whole.shape[1] != batch:
        whole = whole.expand(count, batch, *whole.shape[2:])
    return whole.flatten(0, 1)


class Rule:
    """Returns vmap's rule of an operator. names: its inputs' names after the first `before` ones, which have a batch
    first.
    """

    def __init__(self, operator: Any, names: Sequence[str], before: int):
        self._operator, self._names, self._before = operator, names, before

    def __call__(self, info: Any, in_dims: Sequence[int | None], *arguments: Any, **options: Any) -> Any:
        count = info.batch_size
        dims = tuple(in_dims) + (None,) * (len(arguments) - len(in_dims))
        if count > 0 and self._can_be_one_batch(arguments, dims, options):
            return self._one_batch(count, dims, arguments, options)
        return _one_by_one(self._operator, count, dims, arguments, options)

    def _can_be_one_batch(self, arguments: Sequence[Any], dims: Sequence[int | None], options: dict[str, Any]) -> bool:
        """Returns False if examples need separate calls. Dropout and expressions depend on the index in the batch, and
        gradients of shared inputs are needed for each example.
        """
        if any(options.get(name) for name in ("dropout_p", "score_mod", "mask_mod")):
            return False
        if any(options.get("wanted", ())[_QKV:]):
            return False
        inputs = list(zip(self._names, arguments[self._before :], dims[self._before :]))
        if any(x.dim() - (dim is not None) != 4 for _, x, dim in inputs[:_QKV]):
            return False
        for name, x, dim in inputs[_QKV:]:
            if x is None or name == _BIAS or (dim is None and name == _SINK):
                continue
            if not (dim is None and name == _SLOPES and x.dim() == 1):
                return False
        return True

    def _one_batch(
        self, count: int, dims: Sequence[int | None], arguments: Sequence[Any], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        q, dim = arguments[self._before], dims[self._before]
        batch = q.shape[0 if dim is None or dim > 0 else 1]

        def fold(n: int) -> Any:
            x, name = arguments[n], self._names[n - self._before] if n >= self._before else ""
            if x is None or name in (_SINK, _SLOPES):
                return x
            if name == _BIAS:
                return _folded(x, dims[n], count, batch)
            return _front(x, dims[n], count).flatten(0, 1)

        found = self._operator(*map(fold, range(len(arguments))), **options)
        # A gradient that is not requested is an empty tensor. Captured tensors without gradients have an empty list.
        mapped = [isinstance(x, Tensor) and x.dim() > 1 for x in found]
        return tuple(x.unflatten(0, (count, batch)) if m else x for x, m in zip(found, mapped)), tuple(
            [] if isinstance(x, list) else 0 if m else None for x, m in zip(found, mapped)
        )


def _one_by_one(
    operator: Callable[..., Any],
    count: int,
    dims: Sequence[int | None],
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    if count == 0:
        raise ValueError(
            "vmap's examples (0) must be at least 1, because they define the result's shape: pass one or more"
        )
    examples = [operator(*(_example(x, dim, n) for x, dim in zip(arguments, dims)), **options) for n in range(count)]
    results = tuple(
        [torch.stack(y) for y in zip(*x)] if isinstance(x[0], list) else torch.stack(x) for x in zip(*examples)
    )
    return results, tuple([0] * len(x) if isinstance(x, list) else 0 for x in results)


def _example(x: Any, dim: Any, n: int) -> Any:
    """Returns example n of an argument, which may be a list."""
    if isinstance(x, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(x)
        return [_example(y, d, n) for y, d in zip(x, dims)]
    return x if dim is None else x.select(dim, n)
