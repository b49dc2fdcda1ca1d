"""What torch's functions are in a text: by name, rule(tracing, *arguments). tracing is that of _trace.py, whose methods
make nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tandem._expressions import BOOL, COMPARISONS, FLOAT, INT


def kind_of(dtype: torch.dtype) -> int:
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def _binary(mark: str) -> Callable[..., Any]:
    return lambda t, a, b: t.binary(mark, a, b)


def _of_floats(name: str) -> Callable[..., Any]:
    return lambda t, a: t.call(name, a, kind=FLOAT)


def _logical(mark: str) -> Callable[..., Any]:
    return lambda t, a, b: t.symbol(t.graph.binary(mark, t.to(BOOL, a), t.to(BOOL, b)))


def _scaled(mark: str) -> Callable[..., Any]:
    return lambda t, a, b, *, alpha=1: t.binary(mark, a, b if alpha == 1 else t.binary("*", b, alpha))


def _extreme(name: str, mark: str) -> Callable[..., Any]:
    def rule(t: Any, a: Any, b: Any) -> Any:
        a, b = t.symbol(t.node(a)), t.symbol(t.node(b))
        return t.binary(mark, a, b) if a.node.kind == b.node.kind == BOOL else t.call(name, a, b)

    return rule


def _rounded(name: str) -> Callable[..., Any]:
    def rule(t: Any, a: Any, *, decimals: int = 0) -> Any:
        if decimals:
            t.refuse(f"decimals ({decimals}) must be 0: multiply before, and divide after")
        return t.call(name, a)

    return rule


def _divide(t: Any, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return t.binary("//", a, b)
    if rounding_mode is None:
        return t.binary("/", a, b)
    a, b = t.symbol(t.node(a)), t.symbol(t.node(b))
    if FLOAT in (a.node.kind, b.node.kind):
        return t.call("trunc", t.binary("/", a, b))
    sign = t.binary("*", t.call("sign", a), t.call("sign", b))
    return t.binary("*", sign, t.binary("//", t.call("abs", a), t.call("abs", b)))


def _power(t: Any, a: Any, b: Any) -> Any:
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        if b == 0.5:
            return t.call("sqrt", a, kind=FLOAT)
        if b == int(b) and 1 <= abs(b) <= 64:
            power = _product(t, a, abs(int(b)))
            power = power if isinstance(b, int) else t.symbol(t.to(FLOAT, power))
            return _inverse(t, power) if b < 0 else power
    if isinstance(a, (int, float)) and not isinstance(a, bool) and a > 0:
        return t.call("exp2", b if a == 2 else t.binary("*", b, math.log2(a)), kind=FLOAT)
    t.refuse("a power has a whole number or 0.5 as its exponent, or a positive number as its base: use torch.exp2")


def _inverse(t: Any, a: Any) -> Any:
    return t.binary("/", t.constant(1.0), a)


def _product(t: Any, a: Any, times: int) -> Any:
    """a ** times, times at least 1."""
    if times == 1:
        return t.symbol(t.node(a))
    half = _product(t, a, times // 2)
    square = t.binary("*", half, half)
    return t.binary("*", square, a) if times % 2 else square


def _clamp(t: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        t.refuse("clamp needs min or max")
    node = t.symbol(t.node(x))
    if all(bound is None or t.node(bound).kind == INT for bound in (node, min, max)):
        node = node if min is None else t.call("max", node, min)
        return node if max is None else t.call("min", node, max)
    return t.call("clamp", node, -math.inf if min is None else min, math.inf if max is None else max)


def _where(t: Any, condition: Any, a: Any = None, b: Any = None) -> Any:
    if a is None or b is None:
        t.refuse("where takes a condition and two values")
    return t.select(condition, a, b)


def _convert(kind: int) -> Callable[..., Any]:
    return lambda t, x, *_, **__: t.symbol(t.to(kind, x))


def _to(t: Any, x: Any, *arguments: Any, **named: Any) -> Any:
    for y in (*arguments, *named.values()):
        dtype = y if isinstance(y, torch.dtype) else getattr(y, "dtype", None)
        if dtype is not None:
            return t.symbol(t.to(kind_of(dtype), x))
    return t.symbol(t.node(x))


def _filled(value: Any, sized: bool = False) -> Callable[..., Any]:
    """torch.ones_like(x) and the like, and x.new_ones(()) where sized; without value, that comes with the call."""

    def rule(t: Any, x: Any, *arguments: Any, dtype: Any = None, **named: Any) -> Any:
        arguments = [*arguments, *(named[name] for name in ("size", "fill_value") if name in named)]
        if sized and (not arguments or arguments.pop(0) not in ((), [], torch.Size(()))):
            t.refuse("a tensor with dimensions is made, and a score is one number: its size is ()")
        kind = t.node(x).kind if dtype is None else kind_of(dtype)
        if value is not None:
            return t.symbol(t.graph.constant((bool, int, float)[kind](value)))
        return t.symbol(t.to(kind, arguments[0]))

    return rule


def _detach(t: Any, x: Any) -> Any:
    if t.node(x).kind == FLOAT:
        t.refuse("detach() of a float would hide it from its gradient, which no text can say")
    return x


def _embedding(t: Any, indices: Any, weight: Any, *_: Any, **__: Any) -> Any:
    return t.index(t.row(weight), indices)


RULES: dict[str, Callable[..., Any]] = {
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "rsub": lambda t, a, b: t.binary("-", b, a),
    "mul": _binary("*"),
    "div": _divide,
    "floor_divide": _binary("//"),
    "remainder": _binary("%"),
    "pow": _power,
    "bitwise_and": _binary("&"),
    "bitwise_or": _binary("|"),
    "bitwise_xor": _binary("^"),
    "bitwise_left_shift": _binary("<<"),
    "bitwise_right_shift": _binary(">>"),
    "bitwise_not": lambda t, a: t.unary("~", a),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "logical_not": lambda t, a: t.symbol(t.graph.unary("~", t.to(BOOL, a))),
    **{name: _binary(mark) for name, mark in zip(("lt", "le", "gt", "ge", "eq", "ne"), COMPARISONS)},
    "neg": lambda t, a: t.unary("-", a),
    "positive": lambda t, a: a,
    **{name: _of_floats(name) for name in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt")},
    **{name: _rounded(name) for name in ("floor", "ceil", "trunc", "round")},
    "abs": lambda t, a: t.call("abs", a),
    "sign": lambda t, a: t.call("sign", a),
    "square": lambda t, a: t.binary("*", a, a),
    "reciprocal": lambda t, a: _inverse(t, a),
    "rsqrt": lambda t, a: _inverse(t, t.call("sqrt", a, kind=FLOAT)),
    "relu": lambda t, a, inplace=False: t.select(t.binary("<=", a, t.constant(0)), t.constant(0), a),
    "silu": lambda t, a, inplace=False: t.binary("*", a, t.call("sigmoid", a, kind=FLOAT)),
    "minimum": _extreme("min", "&"),
    "maximum": _extreme("max", "|"),
    "clamp": _clamp,
    "clamp_min": lambda t, x, min: _clamp(t, x, min),
    "clamp_max": lambda t, x, max: _clamp(t, x, None, max),
    "where": _where,
    "masked_fill": lambda t, x, mask, value: t.select(mask, value, x),
    "isnan": lambda t, x: t.binary("!=", x, x),
    "isinf": lambda t, x: t.binary("==", t.call("abs", x), math.inf),
    "isfinite": lambda t, x: t.binary("<", t.call("abs", x), math.inf),
    "isneginf": lambda t, x: t.binary("==", x, -math.inf),
    "isposinf": lambda t, x: t.binary("==", x, math.inf),
    "to": _to,
    **{name: _convert(BOOL) for name in ("bool",)},
    **{name: _convert(INT) for name in ("int", "long", "short")},
    **{name: _convert(FLOAT) for name in ("float", "double", "half", "bfloat16")},
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "full_like": _filled(None),
    "new_ones": _filled(1, sized=True),
    "new_zeros": _filled(0, sized=True),
    "new_full": _filled(None, sized=True),
    "new_tensor": _filled(None),
    "clone": lambda t, x, **_: x,
    "contiguous": lambda t, x, **_: x,
    "detach": _detach,
    "embedding": _embedding,
}
for _name, _others in {
    "sub": ("subtract",), "mul": ("multiply",), "div": ("divide", "true_divide"), "neg": ("negative",),
    "abs": ("absolute",), "trunc": ("fix",), "clamp": ("clip",), "pow": ("float_power",), "lt": ("less",),
    "le": ("less_equal",), "gt": ("greater",), "ge": ("greater_equal",), "ne": ("not_equal",), "minimum": ("min",),
    "maximum": ("max",), "sigmoid": ("special_expit",), "exp2": ("special_exp2",), "to": ("type", "type_as"),
}.items():  # fmt: skip
    RULES.update(dict.fromkeys(_others, RULES[_name]))
# Operators, by the name of what they are, and theirs between two underscores.
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "floor_divide": "floordiv", "remainder": "mod",
    "pow": "pow", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
}  # fmt: skip
OTHERS = {
    "bitwise_not": "invert", "neg": "neg", "abs": "abs", "positive": "pos",
    **{name: name for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}  # fmt: skip
for _name, _special in BINARY.items():
    RULES.update(dict.fromkeys((f"__{_special}__", f"__i{_special}__"), RULES[_name]))
    RULES[f"__r{_special}__"] = lambda t, a, b, _rule=RULES[_name]: _rule(t, b, a)
RULES.update((f"__{_special}__", RULES[_name]) for _name, _special in OTHERS.items())
