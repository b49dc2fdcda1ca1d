"""Rows of captured tensors in a traced function: they are unrolled into their elements, up to 256.

A function of single numbers is applied to each element, with torch's broadcasting. Reductions join the elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem._expressions import BOOL, FLOAT, INT
from tandem._trace_rules import RULES

_MAX_ELEMENTS = 256


def _classes() -> Any:
    from tandem import _trace

    return _trace


def _is_array(x: Any) -> bool:
    """Returns True if x stands for several numbers."""
    trace = _classes()
    return isinstance(x, (trace.Row, trace.Vector)) or (
        isinstance(x, Tensor) and not isinstance(x, trace.Symbol) and x.dim() > 0
    )


def unrolled(t: Any, x: Any) -> Any:
    """Returns x as a Vector: a symbol has the shape ()."""
    trace = _classes()
    if isinstance(x, trace.Vector):
        return x
    if not _is_array(x):
        return trace.Vector(t, [t.symbol(t.node(x))], ())
    row = t.row(x)
    _check_count(t, row)
    free = [n for n, slot in enumerate(row.slots) if slot is None]
    elements = []
    for position in torch.cartesian_prod(*(torch.arange(n) for n in row.shape)).reshape(-1, len(free)).tolist():
        slots = list(row.slots)
        for place, at in zip(free, position):
            slots[place] = t.graph.constant(at)
        elements.append(t.symbol(t.element(row.tensor, tuple(slots))))
    return trace.Vector(t, elements, row.shape)


def _check_count(t: Any, x: Any) -> None:
    if x.numel() > _MAX_ELEMENTS:
        t.refuse(
            f"a tensor of shape {tuple(x.shape)} is combined with one score and must have at most {_MAX_ELEMENTS} "
            "elements: index it, as in table[h] or table[b, q_idx]"
        )


def _picked(x: Any, places: Tensor) -> Any:
    """Returns the elements of a Vector at these places, in the shape of the places."""
    elements = [x.elements[n] for n in places.flatten().tolist()]
    if not places.dim():
        return elements[0]
    return _classes().Vector(x.tracing, elements, places.shape)


def _places(x: Any) -> Tensor:
    return torch.arange(len(x.elements)).reshape(x.shape)


def _elementwise(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a rule of single numbers to a rule of Vectors."""

    def apply(t: Any, *args: Any, **kwargs: Any) -> Any:
        arrays = {n: unrolled(t, x) for n, x in enumerate(args) if _is_array(x)}
        named = {name: unrolled(t, x) for name, x in kwargs.items() if _is_array(x)}
        try:
            shape = torch.broadcast_shapes(*(tuple(x.shape) for x in (*arrays.values(), *named.values())))
        except RuntimeError:
            shapes = " and ".join(str(tuple(x.shape)) for x in (*arrays.values(), *named.values()))
            t.refuse(f"tensors of shapes {shapes} must broadcast: reshape them")
        wide = {key: _picked(x, _places(x).expand(shape)) for key, x in (*arrays.items(), *named.items())}
        count = shape.numel() if isinstance(shape, torch.Size) else torch.Size(shape).numel()
        if count > _MAX_ELEMENTS:
            t.refuse(
                f"a tensor of shape {tuple(shape)} is created for each score and must have at most {_MAX_ELEMENTS} "
                "elements: index its operands"
            )
        results = [
            rule(
                t,
                *(wide[n].elements[at] if n in wide else x for n, x in enumerate(args)),
                **{name: wide[name].elements[at] if name in wide else x for name, x in kwargs.items()},
            )
            for at in range(count)
        ]
        return _classes().Vector(t, results, shape)

    return apply


# ---- Shapes ----


def _reshaped(name: str) -> Callable[..., Any]:
    def rule(t: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        vector = unrolled(t, x)
        return _picked(vector, getattr(Tensor, name)(_places(vector), *args, **kwargs))

    return rule


def _getitem(t: Any, x: Any, index: Any) -> Any:
    x = unrolled(t, x)
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) for part in parts):
        t.refuse("an index of a computed row must be a number or a slice: index the captured tensor first")
    return _picked(x, _places(x)[index])


def _stack(t: Any, tensors: Any, dim: int = 0) -> Any:
    vectors = [unrolled(t, x) for x in tensors]
    return _joined(t, vectors, torch.stack, dim)


def _cat(t: Any, tensors: Any, dim: int = 0) -> Any:
    return _joined(t, [unrolled(t, x) for x in tensors], torch.cat, dim)


def _joined(t: Any, vectors: list[Any], join: Callable[..., Tensor], dim: int) -> Any:
    first, places = 0, []
    for x in vectors:
        places.append(_places(x) + first)
        first += len(x.elements)
    elements = [y for x in vectors for y in x.elements]
    order = join(places, dim)
    return _classes().Vector(t, [elements[n] for n in order.flatten().tolist()], order.shape)


# ---- Reductions ----


class Extreme(NamedTuple):
    """The result of torch.max(x, dim), of which only the values exist."""

    values: Any
    indices: None = None


def _reduction(join: Callable[[Any, list[Any]], Any]) -> Callable[..., Any]:
    """Returns a rule x.f(dim, keepdim) that combines the elements along dim, or all of them."""

    def rule(t: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **other: Any) -> Any:
        is_dim = dim is None or type(dim) is int or (type(dim) in (tuple, list) and all(type(d) is int for d in dim))
        if not is_dim:
            raise TypeError("dim must be a literal int or a tuple of ints: write the numbers")
        if other:
            raise TypeError(f"{', '.join(other)} must not be passed: omit it")
        vector = unrolled(t, x)
        if dtype is not None:
            vector = _elementwise(RULES["to"])(t, vector, dtype) if vector.dim() else RULES["to"](t, vector, dtype)
        places = _places(vector)
        dims = range(places.dim()) if dim is None or dim in ((), []) else [dim] if isinstance(dim, int) else dim
        dims = sorted({d % max(places.dim(), 1) for d in dims})
        if not places.dim():
            dims = []
        kept = [d for d in range(places.dim()) if d not in dims]
        groups = places.permute(*kept, *dims).reshape(*(places.shape[d] for d in kept), -1)
        shape = [1 if d in dims else n for d, n in enumerate(places.shape)] if keepdim else groups.shape[:-1]
        results = [join(t, [vector.elements[n] for n in row]) for row in groups.reshape(-1, groups.shape[-1]).tolist()]
        return results[0] if not len(shape) else _classes().Vector(t, results, tuple(shape))

    return rule


def _folded(name: str, empty: Any) -> Callable[[Any, list[Any]], Any]:
    def join(t: Any, elements: list[Any]) -> Any:
        if not elements:
            if empty is None:
                t.refuse("a row must have elements, because an empty row has no extreme: check its shape")
            return t.constant(empty)
        return functools.reduce(lambda a, b: RULES[name](t, a, b), elements)

    return join


def _sum(t: Any, elements: list[Any]) -> Any:
    return _folded("add", 0.0)(t, [t.symbol(t.to(INT, x)) if t.node(x).kind == BOOL else x for x in elements])


def _mean(t: Any, elements: list[Any]) -> Any:
    return RULES["div"](t, _sum(t, elements), float(len(elements)))


def _bools(name: str, empty: bool) -> Callable[[Any, list[Any]], Any]:
    join = _folded(name, empty)
    return lambda t, elements: join(t, [t.symbol(t.to(BOOL, x)) for x in elements])


def _count(t: Any, elements: list[Any]) -> Any:
    return _sum(t, [t.symbol(t.to(BOOL, x)) for x in elements])


def _norm(t: Any, elements: list[Any]) -> Any:
    if not elements:
        return t.constant(0.0)
    squares = [RULES["mul"](t, x, x) for x in elements]
    return t.call("sqrt", t.symbol(t.to(FLOAT, _sum(t, squares))), kind=FLOAT)


def _norm_rule(t: Any, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **other: Any) -> Any:
    if p not in (2, 2.0, "fro", None) or other.pop("dtype", None) is not None or other.pop("out", None) is not None:
        t.refuse(f"the norm's order ({p}) must be 2: pass 2, without dtype and out")
    return _reduction(_norm)(t, x, dim, keepdim)


def _extreme(name: str) -> Callable[..., Any]:
    reduce = _reduction(_folded(name, None))

    def rule(t: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return reduce(t, x) if dim is None else Extreme(reduce(t, x, dim, keepdim))

    return rule


def _dot(t: Any, a: Any, b: Any) -> Any:
    a, b = unrolled(t, a), unrolled(t, b)
    if a.dim() != 1 or a.shape != b.shape:
        t.refuse(f"dot (rows of {tuple(a.shape)} and {tuple(b.shape)}) must have rows of one length: reshape them")
    return _sum(t, [RULES["mul"](t, x, y) for x, y in zip(a.elements, b.elements)])


SHAPES: dict[str, Callable[..., Any]] = {
    **{
        name: _reshaped(name)
        for name in (
            "unsqueeze", "squeeze", "reshape", "view", "flatten", "unflatten", "expand", "transpose", "permute", "flip",
            "roll", "repeat", "movedim", "narrow", "select", "t",
        )
    },
    "__getitem__": _getitem,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _reduction(_sum),
    "mean": _reduction(_mean),
    "prod": _reduction(_folded("mul", 1.0)),
    "any": _reduction(_bools("bitwise_or", False)),
    "all": _reduction(_bools("bitwise_and", True)),
    "amax": _reduction(_folded("maximum", None)),
    "amin": _reduction(_folded("minimum", None)),
    "count_nonzero": _reduction(_count),
    "norm": _norm_rule,
    "linalg_vector_norm": _norm_rule,
    "linalg_norm": _norm_rule,
    "vector_norm": _norm_rule,
}
_PAIRS: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("dot", "vdot", "inner", "linalg_vecdot", "matmul", "__matmul__", "__rmatmul__", "mv"), _dot
)
_JOINED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("stack",), _stack),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
}


def rule_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns the rule of a function for these arguments, if they have rows, or if the function creates or combines
    rows.
    """
    if name in _JOINED:
        return _JOINED[name]
    if name in _PAIRS:
        return _PAIRS[name]
    if name in SHAPES or name in _REDUCTIONS:
        return SHAPES.get(name) or _REDUCTIONS[name]
    arrays = any(map(_is_array, (*args, *kwargs.values())))
    if name in ("max", "min") and (arrays or len(args) == 1) and len(args) + len(kwargs) < 4:
        others = args[1:] + tuple(kwargs.values())
        if not any(isinstance(x, Tensor) for x in others):
            return _extreme("maximum" if name == "max" else "minimum")
    if arrays and name == "embedding":
        return None
    return _elementwise(RULES[name]) if arrays and name in RULES else None
