"""A Python function of torch's FlexAttention as a text: it is called once, with symbols in place of numbers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from tandem._errors import Unsupported
from tandem._expressions import BOOL, FLOAT, INT, RESERVED, Graph, Node
from tandem._score_mod import Mod, is_number
from tandem._trace_rules import BINARY, OTHERS, RULES, kind_of

_ARGUMENTS = {"score_mod": ("score", "batch", "head", "q", "k"), "mask_mod": ("batch", "head", "q", "k")}
_WIDENED = (torch.uint8, torch.int8, torch.int16)  # which texts do not read
_DTYPES = {BOOL: torch.bool, INT: torch.int32, FLOAT: torch.float32}
_NOT_USERS = tuple(os.path.dirname(module.__file__) + os.sep for module in (torch, np, sys.modules["tandem"]))


@torch.compiler.disable
def trace(function: Callable[..., Any], argument: str, device: torch.device) -> Mod:
    """The modification that a function of torch's FlexAttention is: score_mod(score, b, h, q_idx, kv_idx) or
    mask_mod(b, h, q_idx, kv_idx). argument: which of the two. device: where the attention is computed.

    Raises Unsupported, with file and line, for what no text says.
    """
    tracing = _Tracing(argument, device)
    symbols = [
        tracing.symbol(tracing.graph.leaf(name, FLOAT if name == "score" else INT, name != "score"))
        for name in _ARGUMENTS[argument]
    ]
    node = tracing.result(function(*symbols), function)
    text, needed = tracing.graph.text(node, tuple(tracing.bindings))
    return Mod(text, **{name: x for name, x in tracing.bindings.items() if name in needed})


def lengths(symbol: Symbol) -> tuple[Symbol, Symbol]:
    """How long the queries' and the keys' sequence is, beside a symbol that trace() has given."""
    tracing = symbol.tracing
    return tuple(tracing.symbol(tracing.graph.leaf(name, INT, True)) for name in ("seqlen_q", "seqlen_k"))


def _user_frame() -> FrameType:
    """The innermost frame that is the caller's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return frame


class _Tracing:
    """What is known of a function while it is being called."""

    def __init__(self, argument: str, device: torch.device):
        self.argument = argument
        self.device = device
        self.graph = Graph()
        self.bindings: dict[str, Any] = {}
        self._bound: list[tuple[Any, Any, str]] = []  # what the function gave, what it is bound to, the name

    def symbol(self, node: Node) -> Symbol:
        return Symbol(self, node)

    def refuse(self, what: str, kind: type[Exception] = Unsupported) -> NoReturn:
        frame = _user_frame()
        code = frame.f_code
        where = f'"{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
        raise kind(f"{self.argument} ({where}): {what}")

    def result(self, value: Any, function: Any) -> Node:
        """What the function returned."""
        code = getattr(function, "__code__", None)
        where = f'"{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code else repr(function)
        wanted = "a bool" if self.argument == "mask_mod" else "a number"
        given = type(value).__name__
        if isinstance(value, (Symbol, Tensor, np.generic)) or is_number(value):
            if isinstance(value, Tensor) and value.dim():
                given = f"a tensor of shape {tuple(value.shape)}"
            else:
                node = self.node(value)
                if (node.kind == BOOL) == (self.argument == "mask_mod"):
                    return node
                given = ("a bool", "an int", "a float")[node.kind]
        elif isinstance(value, Row):
            given = f"a tensor of shape {tuple(value.shape)}"
        raise TypeError(f"{self.argument} ({where}) must return {wanted} for each score, and returns {given}")

    # ---- What comes in ----

    def node(self, x: Any) -> Node:
        """An operand: a symbol, a number, or a tensor without dimensions."""
        if isinstance(x, Symbol):
            return x.node
        if isinstance(x, np.generic):
            x = x.item()
        if is_number(x):
            return self._number(x)
        if isinstance(x, Row) or (isinstance(x, Tensor) and x.dim()):
            self.refuse(
                f"a tensor of shape {tuple(x.shape)} meets one score: index it, as in table[h] or table[b, q_idx]"
            )
        if isinstance(x, Tensor):
            return self._tensor(x, ())
        self.refuse(f"{type(x).__name__} is neither a number nor a tensor: convert it outside of the function")

    def _number(self, x: Any) -> Node:
        """A literal of the function's own text, or a number that it captured: one that may change without the text."""
        if isinstance(x, int) and not -(2**31) < x < 2**31:
            self.refuse(f"the number {x} has more than int's 32 bits")
        if isinstance(x, bool) or (isinstance(x, float) and not math.isfinite(x)) or _is_literal(x):
            return self.graph.constant(x)
        name = self._name_of(x, lambda given: given is x and type(given) is type(x), x, "number")
        return self.graph.leaf(name, INT if isinstance(x, int) else FLOAT, isinstance(x, int) and x >= 0)

    def _tensor(self, tensor: Tensor, indices: tuple[Node, ...]) -> Node:
        if not tensor.dim() and tensor.device != self.device and tensor.device.type == "cpu":
            return self._number(tensor.item())
        if tensor.is_complex():
            self.refuse(f"a tensor of {tensor.dtype} is captured, and texts read floats, ints and bools")
        value = tensor
        if tensor.dtype in _WIDENED and not any(given is tensor for given, _, _ in self._bound):
            value = tensor.to(torch.int32)
        name = self._name_of(tensor, lambda given: given is tensor, value, "tensor")
        return self.graph.element(name, kind_of(tensor.dtype), indices)

    def _name_of(self, x: Any, is_x: Callable[[Any], bool], value: Any, otherwise: str) -> str:
        """The name that x has in the text: that of the variable it is in, where there is one."""
        for given, _, name in self._bound:
            if is_x(given):
                return name
        frame = _user_frame()
        variables = {**{n: frame.f_globals.get(n) for n in frame.f_code.co_names}, **frame.f_locals}
        name = next((n for n, v in variables.items() if is_x(v)), f"{otherwise}{len(self._bound)}")
        name = name if name.isascii() and name.isidentifier() and len(name) < 60 else f"{otherwise}{len(self._bound)}"
        while name in RESERVED or name in self.bindings:
            name += "_"
        self._bound.append((x, value, name))
        self.bindings[name] = value
        return name

    # ---- Operations ----

    def unary(self, mark: str, a: Any) -> Symbol:
        node = self.node(a)
        if mark == "-" and node.kind == BOOL:
            self.refuse("'-' takes a number, and this is a bool: use ~")
        if mark == "~" and node.kind == FLOAT:
            self.refuse("'~' takes a bool or an int, and this is a float")
        return self.symbol(self.graph.unary(mark, node))

    def binary(self, mark: str, a: Any, b: Any) -> Symbol:
        a, b = self.node(a), self.node(b)
        if a.kind == b.kind == BOOL:
            mark = {"+": "|", "*": "&"}.get(mark, mark)
            if mark not in ("&", "|", "^", "==", "!="):
                a, b = self.to(INT, a), self.to(INT, b)
        if mark in ("&", "|", "^", "<<", ">>") and FLOAT in (a.kind, b.kind):
            self.refuse(f"{mark!r} takes bools or ints, and one side is a float: compare it")
        return self.symbol(self.graph.binary(mark, a, b))

    def call(self, name: str, *operands: Any, kind: int | None = None) -> Symbol:
        """A function of numbers, all of one kind unless kind says which."""
        nodes = [self.node(x) for x in operands]
        nodes = [self.to(INT, x) if x.kind == BOOL else x for x in nodes]
        return self.symbol(self.graph.call(name, max(x.kind for x in nodes) if kind is None else kind, *nodes))

    def constant(self, value: Any) -> Symbol:
        return self.symbol(self.graph.constant(value))

    def select(self, condition: Any, a: Any, b: Any) -> Symbol:
        condition, a, b = self.node(condition), self.node(a), self.node(b)
        if condition.kind != BOOL:
            self.refuse("a condition is a bool, and this is a number: compare it")
        return self.symbol(self.graph.call("select", max(a.kind, b.kind), condition, a, b))

    def to(self, kind: int, x: Any) -> Node:
        node = x if isinstance(x, Node) else self.node(x)
        return node if node.kind == kind else self.graph.call(("bool", "int", "float")[kind], kind, node)

    def row(self, x: Any) -> Row:
        return x if isinstance(x, Row) else Row(self, x)

    def index(self, row: Row, index: Any) -> Any:
        """An element of a tensor, or what is left of it where indices are still to come."""
        parts = index if isinstance(index, tuple) else (index,)
        free = [n for n, slot in enumerate(row.slots) if slot is None]
        if any(x is Ellipsis for x in parts):
            at = next(n for n, x in enumerate(parts) if x is Ellipsis)
            parts = (*parts[:at], *(slice(None),) * (len(free) - len(parts) + 1), *parts[at + 1 :])
        if any(x is None for x in parts):
            self.refuse("None adds a dimension, and a score is one number: index without it")
        if len(parts) > len(free):
            self.refuse(f"{len(parts)} indices are given to a tensor of shape {tuple(row.shape)}", IndexError)
        slots = list(row.slots)
        for place, part in zip(free, parts):
            if not (isinstance(part, slice) and part == slice(None)):
                slots[place] = self._position(part, row.tensor.shape[place])
        if None in slots:
            return Row(self, row.tensor, slots)
        return self.symbol(self._tensor(row.tensor, tuple(slots)))

    def _position(self, x: Any, size: int) -> Node:
        """An index as texts have it: from 0, where torch counts negative ones from the end."""
        if isinstance(x, int) and not isinstance(x, bool):
            if not -size <= x < size:
                self.refuse(f"index {x} is out of bounds for a dimension of {size}", IndexError)
            return self.graph.constant(x % size)
        if isinstance(x, (slice, list, bool)):
            self.refuse(f"an index is a number, and this is a {type(x).__name__}")
        node = self.node(x)
        if node.kind != INT:
            self.refuse(f"an index is an int, and this is a {('bool', '', 'float')[node.kind]}: .int() makes it one")
        if node.positive:
            return node
        below = self.graph.binary("<", node, self.graph.constant(0))
        return self.graph.call("select", INT, below, self.graph.binary("+", node, self._number(size)), node)


def _is_literal(x: Any) -> bool:
    """Whether a number is written in the function that is at work, and is no number that it captured."""
    frame = _user_frame()
    code = frame.f_code

    def is_x(y: Any) -> bool:
        return type(y) is type(x) and y == x

    captured = [frame.f_locals.get(name) for name in code.co_freevars]
    captured += [frame.f_globals.get(name) for name in code.co_names]
    return any(map(is_x, code.co_consts)) and not any(map(is_x, captured))


def _torch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What one of torch's functions is asked to do with symbols."""
    flat = [*args, *kwargs.values()]
    flat += [y for x in flat if isinstance(x, (tuple, list)) for y in x]
    tracing = next(x.tracing for x in flat if isinstance(x, (Symbol, Row)))
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__" and isinstance(args[0], Tensor):
        return tracing.index(tracing.row(args[0]), args[1])
    if func is Tensor.where:
        args = (args[1], args[0], *args[2:])
    rule = RULES.get(name)
    if rule is None:
        tracing.refuse(f"torch's {name} is not among what a text can say (docs/score_mod.md): write it with what is")
    try:
        return rule(tracing, *args, **kwargs)
    except TypeError as error:
        tracing.refuse(f"torch's {name} is called as no text can say: {error}")


class Row:
    """A captured tensor of which some dimensions have their index (a node), and others (None) do not."""

    def __init__(self, tracing: _Tracing, tensor: Tensor, slots: Any = None):
        self.tracing = tracing
        self.tensor = tensor
        self.slots = [None] * tensor.dim() if slots is None else slots

    @property
    def shape(self) -> torch.Size:
        return torch.Size(n for n, slot in zip(self.tensor.shape, self.slots) if slot is None)

    def __getitem__(self, index: Any) -> Any:
        return self.tracing.index(self, index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _torch_function(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.tracing.node(self)


_VALUE = "the function is read once for all scores, so that its symbols have no value"
_UNKNOWN = {
    "__bool__": f"if, and, or, not, min() and max() ask for a value, but {_VALUE}: use torch.where, &, |, ~, "
    "torch.minimum and torch.maximum",
    "__int__": f"int() asks for a value, but {_VALUE}: use .int()",
    "__float__": f"float() and functions of math ask for a value, but {_VALUE}: use .float() and functions of torch",
    "__complex__": "complex numbers are nothing that a text can say",
    "__index__": f"an index of what is no tensor asks for a value, but {_VALUE}: index a torch tensor",
    "__len__": "a score and its indices are single numbers, which have no length",
    "__iter__": "a score and its indices are single numbers, which cannot be iterated over",
    "__array__": f"numpy asks for values, but {_VALUE}: use torch's functions",
    "__contains__": f"'in' asks for a value, but {_VALUE}: compare with each, joined by |",
    "__setitem__": "nothing can be assigned to: use torch.where",
    "item": f"item() asks for a value, but {_VALUE}",
    "tolist": f"tolist() asks for a value, but {_VALUE}",
    "numpy": f"numpy() asks for a value, but {_VALUE}: use torch's functions",
}


class Symbol:
    """A number that has no value yet, in place of a score or an index."""

    __slots__ = ("node", "tracing")
    __hash__ = object.__hash__
    shape = torch.Size(())
    ndim = 0

    def __init__(self, tracing: _Tracing, node: Node):
        self.tracing = tracing
        self.node = node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _torch_function(func, args, kwargs or {})

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.node.kind]

    @property
    def device(self) -> torch.device:
        return self.tracing.device

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return self.shape

    def numel(self) -> int:
        return 1

    def is_floating_point(self) -> bool:
        return self.node.kind == FLOAT

    def where(self, condition: Any, other: Any) -> Symbol:
        return self.tracing.select(condition, self, other)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        """An operator whose left side is a number of numpy's."""
        if method != "__call__" or len(inputs) != 2 or not all(isinstance(x, (Symbol, np.generic)) for x in inputs):
            self.tracing.refuse(_UNKNOWN["__array__"])
        return _torch_function(ufunc, inputs, {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in RULES:
            self.tracing.refuse(f"a tensor's {name} is not among what a text can say (docs/score_mod.md)")
        return lambda *args, **kwargs: RULES[name](self.tracing, self, *args, **kwargs)


def _method(name: str, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        return RULES[name](self.tracing, *operands)

    return method


def _unknown(what: str) -> Callable[..., Any]:
    def method(self: Symbol, *_: Any, **__: Any) -> NoReturn:
        self.tracing.refuse(what)

    return method


for _name, _special in BINARY.items():
    setattr(Symbol, f"__{_special}__", _method(_name))
    setattr(Symbol, f"__i{_special}__", _method(_name))  # x += y is x = x + y
    setattr(Symbol, f"__r{_special}__", _method(_name, reflected=True))
for _name, _special in OTHERS.items():
    setattr(Symbol, f"__{_special}__", _method(_name))
for _name, _what in _UNKNOWN.items():
    setattr(Symbol, _name, _unknown(_what))
