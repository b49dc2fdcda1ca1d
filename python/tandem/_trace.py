"""Converts a Python function of torch's FlexAttention to an expression, by one call with symbols in place of numbers.

Symbols are subclasses of torch.Tensor without values. torch's functions and operators reach _torch_function(), which
applies a rule of _trace_rules.py or _trace_rows.py or refuses with the function's file and line.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from tandem import _trace_rows
from tandem._errors import Unsupported
from tandem._expressions import BOOL, FLOAT, INT, RESERVED, Graph, Node, TooLong
from tandem._score_mod import Mod, is_number
from tandem._trace_rules import RULES, UNKNOWN, kind_of, wrapped
from tandem._trace_values import changes, fits

_ARGUMENTS = {"score_mod": ("score", "batch", "head", "q", "k"), "mask_mod": ("batch", "head", "q", "k")}
_MAX_NAMES = 32  # limit per expression
_DTYPES = {BOOL: torch.bool, INT: torch.int32, FLOAT: torch.float32}
_NARROW = (torch.uint8, torch.int8, torch.int16)  # results wrap around; expressions read them as int32
_WIDE = (torch.int64, torch.uint32, torch.uint64)  # may hold numbers that exceed an int
_NOT_USERS = tuple(os.path.dirname(module.__file__) + os.sep for module in (torch, np, sys.modules["tandem"]))


@torch.compiler.disable
def trace(function: Callable[..., Any], argument: str, device: torch.device, compiled: bool = False) -> Mod:
    """Returns the expression of a function of torch's FlexAttention: score_mod(score, b, h, q_idx, kv_idx) or
    mask_mod(b, h, q_idx, kv_idx).

    argument: "score_mod" or "mask_mod". device: the device of the attention. compiled: under torch.compile
    changing numbers become tensors, so that no new graph is needed.
    Raises Unsupported, with file and line, for a function without an expression.
    """
    tracing = _Tracing(argument, device)
    try:
        with _no_autograd_functions():
            symbols = [
                tracing.symbol(tracing.input(name, FLOAT if name == "score" else INT)) for name in _ARGUMENTS[argument]
            ]
            node = tracing.result(function(*symbols), function)
        return tracing.mod(node, function, compiled)
    except TooLong:
        raise Unsupported(
            f"{argument} ({_place(function)}): the function has too many operations for one expression: read numbers "
            "from a captured tensor, as in table[q_idx]"
        ) from None


def lengths(symbol: Symbol) -> tuple[Symbol, Symbol]:
    """Returns the lengths of the queries' and the keys' sequence, as symbols of the trace of `symbol`."""
    tracing = symbol.tracing
    return tuple(tracing.symbol(tracing.input(name, INT)) for name in ("seqlen_q", "seqlen_k"))


def _place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    return f'"{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}'


def _user_frame() -> FrameType:
    """Returns the innermost frame of the caller's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return frame


# ---- Functions with a custom backward --------------------------------------------------------------------------------

_lock = threading.Lock()
_traces = 0
_torch_apply = torch.autograd.Function.__dict__["apply"]


def _refusing_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Symbolic):
            x.tracing.refuse(
                f"{cls.__name__} is a torch.autograd.Function, whose backward is not supported: use torch's "
                "functions, whose gradients tandem derives"
            )
    return _torch_apply.__func__(cls, *args, **kwargs)


@contextlib.contextmanager
def _no_autograd_functions() -> Iterator[None]:
    """A context in which torch.autograd.Function.apply refuses symbols; all other calls are served."""
    global _traces
    with _lock:
        _traces += 1
        torch.autograd.Function.apply = classmethod(_refusing_apply)
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                torch.autograd.Function.apply = _torch_apply


class _Tracing:
    """The state of a function that is being traced."""

    def __init__(self, argument: str, device: torch.device):
        self.argument = argument
        self.device = device
        self.graph = Graph()
        self.bindings: dict[str, Any] = {}
        self.grad_enabled = torch.is_grad_enabled()
        self._names: dict[Any, str] = {}  # key: the number, or the tensor's id
        self._tensors: list[Tensor] = []  # keeps the ids alive
        self._suffixes: dict[str, int] = {}
        self._numbers: dict[str, list[Node]] = {}  # the leaves of each number

    def input(self, name: str, kind: int) -> Node:
        node = self.graph.leaf(name, kind, name != "score")
        node.differentiable = name == "score"
        return node

    def symbol(self, node: Node) -> Symbol:
        hides_gradient = self.grad_enabled and node.differentiable and not torch.is_grad_enabled()
        if hides_gradient and node.operands:
            self.refuse(
                "torch.no_grad() hides a float from its gradient, which is not supported: omit torch.no_grad(), or "
                "compute with tensors that require no gradient"
            )
        return Symbol(self, node)

    def refuse(self, what: str, kind: type[Exception] = Unsupported) -> NoReturn:
        frame = _user_frame()
        code = frame.f_code
        where = f'"{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
        raise kind(f"{self.argument} ({where}): {what}")

    def result(self, value: Any, function: Any) -> Node:
        """Returns the node of the function's return value."""
        wanted = "a bool" if self.argument == "mask_mod" else "a number"
        given = type(value).__name__
        if isinstance(value, Tensor) and value.dim():
            given = f"a tensor of shape {tuple(value.shape)}"
        elif isinstance(value, (Tensor, np.generic)) or is_number(value):
            node = self.node(value)
            if (node.kind == BOOL) == (self.argument == "mask_mod"):
                return node
            given = ("a bool", "an int", "a float")[node.kind]
        raise TypeError(
            f"{self.argument} ({_place(function)}) must return {wanted} for each score, and returns {given}: correct "
            "the return value"
        )

    def mod(self, node: Node, function: Any, compiled: bool) -> Mod:
        """Returns the expression of a result, with the bindings that it needs."""
        expression, needed = self.graph.expression(node, tuple(self.bindings))
        if len(needed) > _MAX_NAMES:
            self._inline_numbers(needed)
            expression, needed = self.graph.expression(node, tuple(self.bindings))
        bindings = {name: x for name, x in self.bindings.items() if name in needed}
        if compiled:
            for name, x in bindings.items():
                if is_number(x) and changes(function, f"{self.argument}.{name}", x):
                    dtype = torch.int32 if isinstance(x, int) else torch.float64
                    bindings[name] = torch.tensor(x, dtype=dtype, device=self.device)
        mod = Mod(expression, **bindings)
        mod.origin = _place(function)
        return mod

    def _inline_numbers(self, needed: set[str]) -> None:
        """Writes numbers into the expression, first numbers without a variable, until the names are few enough."""
        numbers = sorted((n for n in self._numbers if n in needed), key=lambda name: not name.startswith("number"))
        for name in numbers[: len(needed) - _MAX_NAMES]:
            for leaf in self._numbers.pop(name):
                constant = self.graph.constant(self.bindings[name])
                leaf.mark = constant.mark
            del self.bindings[name]

    # ---- Operands ----

    def node(self, x: Any) -> Node:
        """Converts an operand: a symbol, a number, or a tensor without dimensions."""
        if isinstance(x, Symbol):
            return x.node
        if isinstance(x, np.generic):
            x = x.item()
        if is_number(x):
            return self._number(x)
        if isinstance(x, Tensor) and x.dim():
            self.refuse(
                f"a tensor of shape {tuple(x.shape)} is combined with one score: index it, as in table[b, q_idx]"
            )
        if isinstance(x, Tensor):
            return self.element(x, ())
        self.refuse(f"{type(x).__name__} is neither a number nor a tensor: convert it outside of the function")

    def _number(self, x: Any) -> Node:
        """Converts a number: a literal of the function's code, or a captured number, which may change."""
        if isinstance(x, int) and not -(2**31) < x < 2**31:
            self.refuse(f"the number {x} has more than int's 32 bits: write it as a float")
        if isinstance(x, bool) or (isinstance(x, float) and not math.isfinite(x)) or _is_literal(x):
            return self.graph.constant(x)
        # 0.0 and -0.0 are different keys.
        name = self._name_of(lambda v: v is x and type(v) is type(x), (type(x), repr(x)), x, "number")
        leaf = self.graph.leaf(name, INT if isinstance(x, int) else FLOAT, isinstance(x, int) and x >= 0)
        self._numbers.setdefault(name, []).append(leaf)
        return leaf

    def element(self, tensor: Tensor, indices: tuple[Node, ...]) -> Node:
        """Returns the element of a captured tensor."""
        if not tensor.dim() and tensor.device != self.device and tensor.device.type == "cpu":
            return self._number(tensor.item())
        if tensor.is_complex() or tensor.is_quantized:
            self.refuse(f"a captured tensor ({tensor.dtype}) must have floats, ints or bools: convert it")
        if tensor.is_meta and self.device.type != "meta":
            self.refuse("a captured tensor is on meta, which has no values: create it on the attention's device")
        name = self._names.get(id(tensor))
        if name is None:
            value = tensor
            if tensor.dtype in _NARROW or tensor.dtype == torch.uint16:
                value = tensor.to(torch.int32)
            elif tensor.dtype in _WIDE:
                if not fits(tensor):
                    self.refuse(
                        f"a captured tensor of {tensor.dtype} must have numbers of at most 32 bits: renumber them, for "
                        "example with torch.unique(x, return_inverse=True)[1]"
                    )
                value = tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)
            self._tensors.append(tensor)
            name = self._name_of(lambda v: v is tensor, id(tensor), value, "tensor")
        node = self.graph.element(name, kind_of(tensor.dtype), indices)
        node.differentiable = node.kind == FLOAT and tensor.requires_grad
        node.narrow = tensor.dtype if tensor.dtype in _NARROW else None
        return node

    def _name_of(self, is_x: Callable[[Any], bool], key: Any, value: Any, otherwise: str) -> str:
        """Returns the name of a number or tensor in the expression: its variable's name, if it has one."""
        if (name := self._names.get(key)) is not None:
            return name
        frame = _user_frame()
        variables = ((n, frame.f_globals.get(n)) for n in frame.f_code.co_names)
        own = next((n for n, v in (*variables, *frame.f_locals.items()) if is_x(v)), "")
        if not (own.isascii() and own.isidentifier() and len(own) < 50) or frame.f_code.co_name == "<genexpr>":
            own = f"{otherwise}{len(self._names)}"
        name = own
        while name in RESERVED or name in self.bindings:
            count = self._suffixes[own] = self._suffixes.get(own, 0) + 1
            name = f"{own}_{count}"
        self._names[key] = name
        self.bindings[name] = value
        return name

    # ---- Operations ----

    def unary(self, mark: str, a: Any) -> Symbol:
        node = self.node(a)
        if mark == "-" and node.kind == BOOL:
            self.refuse("'-' must have a number, not a bool: use ~")
        if mark == "~" and node.kind == FLOAT:
            self.refuse("'~' must have a bool or an int, not a float: convert it with .int()")
        return self.symbol(wrapped(self, self.graph.unary(mark, node), node.narrow))

    def binary(self, mark: str, a: Any, b: Any) -> Symbol:
        narrow = self._narrow(a, b)
        a, b = self.node(a), self.node(b)
        if a.kind == b.kind == BOOL:
            mark = {"+": "|", "*": "&"}.get(mark, mark)
            if mark not in ("&", "|", "^", "==", "!="):
                a, b = self.to(INT, a), self.to(INT, b)
        if mark in ("&", "|", "^", "<<", ">>") and FLOAT in (a.kind, b.kind):
            self.refuse(f"{mark!r} must have bools or ints, not a float: compare the float first")
        return self.symbol(wrapped(self, self.graph.binary(mark, a, b), narrow))

    def _narrow(self, *operands: Any) -> Any:
        """Returns the torch type of a result of 8- and 16-bit ints, by torch's promotion; None for other operands."""
        dtypes = []
        for x in operands:
            if isinstance(x, (int, float, np.generic)):
                continue  # a Python number takes the tensor's type
            node = self.node(x)
            if node.kind == INT and node.narrow is None or node.kind == FLOAT:
                return None
            dtypes.append(node.narrow if node.kind == INT else torch.bool)
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else None
        return dtype if dtype in _NARROW else None

    def call(self, name: str, *operands: Any, kind: int | None = None) -> Symbol:
        """Applies a function of numbers, all of one kind unless kind is given."""
        narrow = self._narrow(*operands)
        nodes = [self.node(x) for x in operands]
        nodes = [self.to(INT, x) if x.kind == BOOL else x for x in nodes]
        node = self.graph.call(name, max(x.kind for x in nodes) if kind is None else kind, *nodes)
        return self.symbol(wrapped(self, node, narrow))

    def constant(self, value: Any) -> Symbol:
        return self.symbol(self.graph.constant(value))

    def select(self, condition: Any, a: Any, b: Any) -> Symbol:
        narrow = self._narrow(a, b)
        condition, a, b = self.node(condition), self.node(a), self.node(b)
        if condition.kind != BOOL:
            self.refuse("a condition must be a bool, not a number: compare the number")
        node = self.graph.call("select", max(a.kind, b.kind), condition, a, b)
        return self.symbol(wrapped(self, node, narrow))

    def to(self, kind: int, x: Any) -> Node:
        node = x if isinstance(x, Node) else self.node(x)
        return node if node.kind == kind else self.graph.call(("bool", "int", "float")[kind], kind, node)

    def row(self, x: Any) -> Any:
        return x if isinstance(x, Symbolic) else Row(self, x)

    def index(self, row: Row, index: Any) -> Any:
        """Returns an element of a tensor, or the remaining tensor if indices are missing."""
        parts = index if isinstance(index, tuple) else (index,)
        free = [n for n, slot in enumerate(row.slots) if slot is None]
        if any(x is Ellipsis for x in parts):
            at = next(n for n, x in enumerate(parts) if x is Ellipsis)
            parts = (*parts[:at], *(slice(None),) * (len(free) - len(parts) + 1), *parts[at + 1 :])
        if any(x is None for x in parts):
            self.refuse("an index must not be None, because a score is one number: omit None")
        if len(parts) > len(free):
            self.refuse(f"{len(parts)} indices are too many for a tensor of {tuple(row.shape)}: omit some", IndexError)
        slots = list(row.slots)
        for place, part in zip(free, parts):
            if not (isinstance(part, slice) and part == slice(None)):
                slots[place] = self._position(part, row.tensor.shape[place])
        if None in slots:
            return Row(self, row.tensor, slots)
        return self.symbol(self.element(row.tensor, tuple(slots)))

    def _position(self, x: Any, size: int) -> Node:
        """Converts an index to an expression's, which counts from 0. torch counts negative indices from the end."""
        if isinstance(x, int) and not isinstance(x, bool):
            if not -size <= x < size:
                self.refuse(f"index ({x}) must be from {-size} to {size - 1}: correct it", IndexError)
            return self.graph.constant(x % size)
        if isinstance(x, (slice, list, bool)):
            self.refuse(f"an index must be a number, not a {type(x).__name__}: index with ints")
        node = self.node(x)
        if node.kind != INT:
            self.refuse(f"an index must be an int, not a {('bool', '', 'float')[node.kind]}: convert it with .int()")
        if node.positive:
            return node
        below = self.graph.binary("<", node, self.graph.constant(0))
        return self.graph.call("select", INT, below, self.graph.binary("+", node, self._number(size)), node)


def _is_literal(x: Any) -> bool:
    """Returns True if a number is a literal of the running function, and not a captured one."""
    frame = _user_frame()
    code = frame.f_code

    def is_x(y: Any) -> bool:
        return type(y) is type(x) and y == x

    captured = [frame.f_locals.get(name) for name in code.co_freevars]
    captured += [frame.f_globals.get(name) for name in code.co_names]
    return any(map(is_x, code.co_consts)) and not any(map(is_x, captured))


# ---- Symbols -------------------------------------------------------------------------------------------------------

_PROPERTIES = ("shape", "dtype", "ndim", "layout", "is_nested", "is_sparse", "is_quantized", "is_mkldnn", "names")
_METHODS = ("dim", "size", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed")


def _torch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of one of torch's functions of symbols."""
    flat = [*args, *kwargs.values()]
    flat += [y for x in flat if isinstance(x, (tuple, list)) for y in x]
    tracing = next(x.tracing for x in flat if isinstance(x, Symbolic))
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return _property(tracing, args[0], func, name)
    if name in _METHODS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name == "__getitem__" and isinstance(args[0], Tensor) and not isinstance(args[0], Symbol):
        if isinstance(args[0], Vector):
            return _trace_rows.SHAPES["__getitem__"](tracing, args[0], args[1])
        return tracing.index(tracing.row(args[0]), args[1])
    if name in ("__len__", "__iter__", "unbind") and isinstance(args[0], (Row, Vector)):
        rows = [args[0][n] for n in range(args[0].shape[0])]
        return len(rows) if name == "__len__" else iter(rows) if name == "__iter__" else tuple(rows)
    if name in UNKNOWN:
        tracing.refuse(UNKNOWN[name])
    if func is Tensor.where:
        args = (args[1], args[0], *args[2:])
    rule = _trace_rows.rule_of(name, args, kwargs) or RULES.get(name)
    if rule is None:
        tracing.refuse(f"no expression has torch's {name}: use the functions that docs/score_mod.md lists")
    try:
        return rule(tracing, *args, **kwargs)
    except TypeError as error:
        tracing.refuse(f"no expression has torch's {name} with these arguments ({error}): see docs/score_mod.md")


def _property(tracing: _Tracing, x: Symbolic, func: Any, access: str) -> Any:
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if access == "__get__" and name in ("device", "is_cuda", "is_cpu", "is_meta"):
        kind = {"is_cuda": "cuda", "is_cpu": "cpu", "is_meta": "meta"}.get(name)
        return tracing.device if kind is None else tracing.device.type == kind
    if access == "__get__" and name in _PROPERTIES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(x)
    if access == "__get__" and name in ("T", "mT", "H", "mH") and isinstance(x, Symbol):
        return x
    tracing.refuse(f"no expression has a tensor's {name}: use the functions that docs/score_mod.md lists")


class Symbolic(torch.Tensor):
    """A tensor without values. The tensor's class defines its meaning. The tensor's device is "meta"."""

    tracing: _Tracing

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _torch_function(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        """Applies an operator with a numpy number on its left side."""
        if method != "__call__" or len(inputs) != 2 or not all(isinstance(x, (Symbolic, np.generic)) for x in inputs):
            self.tracing.refuse(UNKNOWN["__array__"])
        return _torch_function(ufunc, inputs, {})

    def __round__(self, *_: Any) -> NoReturn:
        self.tracing.refuse(UNKNOWN["__round__"])

    def __repr__(self, **_: Any) -> str:
        return type(self).__name__

    def __format__(self, _: str) -> str:
        return repr(self)

    def __hash__(self) -> int:
        return id(self)


def _stand_in(cls: type, shape: Sequence[int], dtype: torch.dtype) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype, device="meta"))


class Symbol(Symbolic):
    """A number without a value, in place of a score or an index."""

    node: Node

    def __new__(cls, tracing: _Tracing, node: Node) -> Symbol:
        x = _stand_in(cls, (), node.narrow or _DTYPES[node.kind])
        x.tracing, x.node = tracing, node
        return x

    def __init__(self, *_: Any) -> None:
        pass


class Row(Symbolic):
    """A captured tensor. Some dimensions have an index, which is a node; None marks the rest."""

    tensor: Tensor
    slots: list[Node | None]

    def __new__(cls, tracing: _Tracing, tensor: Tensor, slots: Any = None) -> Row:
        slots = [None] * tensor.dim() if slots is None else slots
        shape = [n for n, slot in zip(tensor.shape, slots) if slot is None]
        x = _stand_in(cls, shape, tensor.dtype)
        x.tracing, x.tensor, x.slots = tracing, tensor, slots
        return x

    def __init__(self, *_: Any) -> None:
        pass


class Vector(Symbolic):
    """Several symbols in a shape."""

    elements: list[Symbol]

    def __new__(cls, tracing: _Tracing, elements: list[Symbol], shape: Sequence[int]) -> Vector:
        x = _stand_in(cls, shape, elements[0].dtype if elements else torch.float32)
        x.tracing, x.elements = tracing, elements
        return x

    def __init__(self, *_: Any) -> None:
        pass
