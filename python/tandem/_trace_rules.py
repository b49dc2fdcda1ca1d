"""torch's functions as expressions: rule(tracing, *arguments) by name. The methods of tracing create nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tandem._expressions import BOOL, COMPARISONS, FLOAT, INT, Node


def kind_of(dtype: torch.dtype) -> int:
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


_WRAPS = {torch.uint8: (0, 255), torch.int8: (128, 255), torch.int16: (32768, 65535), torch.uint16: (0, 65535)}
_ROUNDED = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_OVERFLOWS = ("+", "-", "*", "//", "<<", "~", "abs")


def wrapped(t: Any, node: Node, dtype: Any) -> Node:
    """Converts an int to the narrow type that it would have in torch; returns other nodes unchanged."""
    if dtype is None or node.kind != INT:
        return node
    if node.mark in _OVERFLOWS or node.narrow is not None:
        node = _wrap(t, node, dtype)
    node.narrow = dtype
    return node


def _wrap(t: Any, node: Node, dtype: torch.dtype) -> Node:
    shift, mask = _WRAPS[dtype]
    graph = t.graph
    if shift:
        node = graph.binary("+", node, graph.constant(shift))
    node = graph.binary("&", node, graph.constant(mask))
    return graph.binary("-", node, graph.constant(shift)) if shift else node


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
    """Converts torch.pow. Constant exponents use a form with few operations and a gradient at 0."""
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        is_float = isinstance(b, float) or t.node(a).kind == FLOAT
        if b == 0:
            return t.constant(1.0 if is_float else 1)
        if b in (0.5, -0.5):
            root = t.call("sqrt", a, kind=FLOAT)
            return root if b > 0 else _inverse(t, root)
        if b == int(b) and 1 <= abs(b) <= 64:
            power = _product(t, a, abs(int(b)))
            power = power if isinstance(b, int) else t.symbol(t.to(FLOAT, power))
            return _inverse(t, power) if b < 0 else power
    if isinstance(a, (int, float)) and not isinstance(a, bool) and a > 0:
        return t.call("exp2", b if a == 2 else t.binary("*", b, math.log2(a)), kind=FLOAT)
    return _general_power(t, a, b)


def _general_power(t: Any, a: Any, b: Any) -> Any:
    """Computes exp2(b log2 |a|), with IEEE's pow for a <= 0 and b = 0."""
    a, b = (t.symbol(t.to(FLOAT, x)) for x in (a, b))
    zero = t.constant(0.0)
    size = t.call("exp2", t.binary("*", b, t.call("log2", t.call("abs", a), kind=FLOAT)), kind=FLOAT)
    is_whole = t.binary("==", t.call("floor", b), b)
    is_odd = t.binary("==", t.binary("%", b, t.constant(2.0)), t.constant(1.0))
    signed = t.select(is_odd, t.unary("-", size), size)
    power = t.select(t.binary("<", a, zero), t.select(is_whole, signed, t.constant(math.nan)), size)
    # At 0 the derivative of the exponential is 0 and the derivative of the logarithm is infinite: their product would
    # be NaN.
    vanishes = t.binary("&", t.binary("==", a, zero), t.binary(">=", b, t.constant(1.0)))
    power = t.select(vanishes, t.select(t.binary("==", b, t.constant(1.0)), a, zero), power)
    return t.select(t.binary("==", b, zero), t.constant(1.0), power)


def _log1p_exp(t: Any, a: Any) -> Any:
    """Computes log(1 + exp(a)), which does not overflow."""
    rest = t.call("log1p", t.call("exp", t.unary("-", t.call("abs", a)), kind=FLOAT), kind=FLOAT)
    return t.binary("+", RULES["relu"](t, a), rest)


def _softplus(t: Any, x: Any, beta: float = 1, threshold: float = 20) -> Any:
    x = t.symbol(t.to(FLOAT, x))
    scaled = x if beta == 1 else t.binary("*", x, float(beta))
    soft = t.call("log1p", t.call("exp", scaled, kind=FLOAT), kind=FLOAT)
    soft = soft if beta == 1 else t.binary("/", soft, float(beta))
    return t.select(t.binary(">", scaled, t.constant(float(threshold))), x, soft)


def _gelu(t: Any, x: Any, *, approximate: str = "none") -> Any:
    x = t.symbol(t.to(FLOAT, x))
    if approximate == "tanh":
        cubic = t.binary("+", x, t.binary("*", t.constant(0.044715), _product(t, x, 3)))
        inner = t.call("tanh", t.binary("*", t.constant(math.sqrt(2 / math.pi)), cubic), kind=FLOAT)
    elif approximate == "none":
        inner = t.call("erf", t.binary("*", x, t.constant(math.sqrt(0.5))), kind=FLOAT)
    else:
        t.refuse(f"approximate ({approximate!r}) must be 'none' or 'tanh': pass one of them")
    return t.binary("*", t.binary("*", x, t.constant(0.5)), t.binary("+", inner, t.constant(1.0)))


def _elu(t: Any, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    x = t.symbol(t.to(FLOAT, x))
    below = t.binary("*", t.call("expm1", x, kind=FLOAT), float(alpha))
    return t.select(t.binary(">", x, t.constant(0.0)), x, below)


def _leaky_relu(t: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return t.select(t.binary(">", x, t.constant(0)), x, t.binary("*", x, float(negative_slope)))


def _inverse(t: Any, a: Any) -> Any:
    return t.binary("/", t.constant(1.0), a)


def _product(t: Any, a: Any, times: int) -> Any:
    """Computes a ** times, times at least 1."""
    if times == 1:
        return t.symbol(t.node(a))
    half = _product(t, a, times // 2)
    square = t.binary("*", half, half)
    return t.binary("*", square, a) if times % 2 else square


def _clamp(t: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        t.refuse("clamp must have min or max: pass one of them")
    node = t.symbol(t.node(x))
    if all(bound is None or t.node(bound).kind == INT for bound in (node, min, max)):
        node = node if min is None else t.call("max", node, min)
        return node if max is None else t.call("min", node, max)
    return t.call("clamp", node, -math.inf if min is None else min, math.inf if max is None else max)


def _where(t: Any, condition: Any, a: Any = None, b: Any = None) -> Any:
    if a is None or b is None:
        t.refuse("where must have a condition and two values: pass all three")
    return t.select(condition, a, b)


def _cast(t: Any, x: Any, dtype: torch.dtype) -> Any:
    """Converts x to this torch type: ints of 8 and 16 bits wrap around, and rounding to 16-bit floats is refused."""
    node = t.node(x)
    if dtype in _ROUNDED or (dtype.is_floating_point and dtype not in (torch.float32, torch.float64)):
        t.refuse(f"a cast to {_ROUNDED.get(dtype, dtype)} rounds, which is not supported: omit the cast")
    if dtype.is_complex or dtype in (torch.uint32, torch.uint64):
        t.refuse(f"a cast to {dtype} is not supported, because ints have 32 bits and a sign: cast to int32")
    kind = kind_of(dtype)
    node = t.to(kind, node)
    if dtype in _WRAPS and node.narrow != dtype:
        node = _wrap(t, node, dtype)
        node.narrow = dtype if dtype != torch.uint16 else None
    elif node.narrow is not None and node.narrow != dtype:
        node = t.graph.binary("+", node, t.graph.constant(0))  # the same value as a wide int
    return t.symbol(node)


def _convert(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda t, x, *_, **__: _cast(t, x, dtype)


def _to(t: Any, x: Any, *arguments: Any, **named: Any) -> Any:
    for y in (*arguments, *named.values()):
        dtype = y if isinstance(y, torch.dtype) else getattr(y, "dtype", None)
        if isinstance(y, str) and not named.get("device") == y:
            dtype = _DTYPES_BY_NAME.get(y.rpartition(".")[2])
        if dtype is not None:
            return _cast(t, x, dtype)
    return t.symbol(t.node(x))


_DTYPES_BY_NAME = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "LongTensor": torch.int64,
    "BFloat16Tensor": torch.bfloat16, "IntTensor": torch.int32, "ShortTensor": torch.int16, "CharTensor": torch.int8,
    "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip


def _filled(value: Any, sized: bool = False) -> Callable[..., Any]:
    """Converts torch.ones_like(x) and similar functions, and x.new_ones(()) if sized.

    If value is None, each call passes the value.
    """

    def rule(t: Any, x: Any, *arguments: Any, dtype: Any = None, **named: Any) -> Any:
        arguments = [*arguments, *(named[name] for name in ("size", "fill_value") if name in named)]
        if sized and (not arguments or arguments.pop(0) not in ((), [], torch.Size(()))):
            t.refuse("a created tensor must have no dimensions, because a score is one number: pass () as its size")
        kind = t.node(x).kind if dtype is None else kind_of(dtype)
        if value is not None:
            return t.symbol(t.graph.constant((bool, int, float)[kind](value)))
        return t.symbol(t.to(kind, arguments[0]))

    return rule


def _detach(t: Any, x: Any) -> Any:
    if t.grad_enabled and t.node(x).differentiable:
        t.refuse("detach() hides a float from its gradient, which is not supported: detach captured tensors instead")
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
    **{
        name: _of_floats(name)
        for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "erf", "tanh", "sigmoid", "sqrt")
    },
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
    "bool": _convert(torch.bool),
    "byte": _convert(torch.uint8),
    "char": _convert(torch.int8),
    "short": _convert(torch.int16),
    "int": _convert(torch.int32),
    "long": _convert(torch.int64),
    "half": _convert(torch.float16),
    "bfloat16": _convert(torch.bfloat16),
    "float": _convert(torch.float32),
    "double": _convert(torch.float64),
    "tan": lambda t, a: t.binary("/", t.call("sin", a, kind=FLOAT), t.call("cos", a, kind=FLOAT)),
    "erfc": lambda t, a: t.binary("-", t.constant(1.0), t.call("erf", a, kind=FLOAT)),
    "log10": lambda t, a: t.binary("*", t.call("log2", a, kind=FLOAT), t.constant(math.log10(2))),
    "gelu": _gelu,
    "softplus": _softplus,
    "log_sigmoid": lambda t, a: t.unary("-", _log1p_exp(t, t.unary("-", t.symbol(t.to(FLOAT, a))))),
    "softsign": lambda t, a: t.binary("/", a, t.binary("+", t.call("abs", a), t.constant(1.0))),
    "mish": lambda t, a, inplace=False: t.binary("*", a, t.call("tanh", _softplus(t, a), kind=FLOAT)),
    "elu": _elu,
    "leaky_relu": _leaky_relu,
    "relu6": lambda t, a, inplace=False: _clamp(t, a, 0, 6),
    "hardtanh": lambda t, a, min_val=-1.0, max_val=1.0, inplace=False: _clamp(t, a, min_val, max_val),
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
    "expm1": ("special_expm1",), "log1p": ("special_log1p",), "erf": ("special_erf",), "erfc": ("special_erfc",),
    "log_sigmoid": ("logsigmoid",),
}.items():  # fmt: skip
    RULES.update(dict.fromkeys(_others, RULES[_name]))
# By name of a rule: the name of the operator's method without the underscores (add: __add__).
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

# The reasons why some of a tensor's methods have no rule.
_VALUE = "scores and indices are symbols without values"
UNKNOWN = {
    "__bool__": f"if, and, or, not, min() and max() need a value, but {_VALUE}: use torch.where, &, |, ~, "
    "torch.minimum and torch.maximum",
    "__int__": f"int() needs a value, but {_VALUE}: use .int()",
    "__float__": f"float() and functions of math need a value, but {_VALUE}: use .float() and functions of torch",
    "__complex__": "complex() must not be used, because expressions have no complex numbers: use floats",
    "__index__": f"an index of anything but a tensor needs a value, but {_VALUE}: index a torch tensor",
    "__len__": "len() must not be used, because a score and its indices are single numbers: omit len()",
    "__iter__": "a loop must not iterate over a score or an index, because both are single numbers: omit the loop",
    "__array__": f"numpy needs values, but {_VALUE}: use torch's functions",
    "__contains__": f"'in' needs a value, but {_VALUE}: compare with each element, and join the results by |",
    "__setitem__": "a score and its indices must not be assigned to: use torch.where",
    "__round__": f"round() needs a value, but {_VALUE}: use torch.round",
    "__format__": f"a formatted string needs a value, but {_VALUE}: omit the string",
    "item": f"item() needs a value, but {_VALUE}: omit item()",
    "tolist": f"tolist() needs a value, but {_VALUE}: omit tolist()",
    "numpy": f"numpy() needs a value, but {_VALUE}: use torch's functions",
}
