"""Expressions of score_mod and mask_mod (docs/score_mod.md) as a graph, which is written as one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BOOL, INT, FLOAT = 0, 1, 2  # kinds, in the order of their conversion

# Binding strength of operators, as in Python.
_BINARY = {
    "<": 1, "<=": 1, ">": 1, ">=": 1, "==": 1, "!=": 1, "|": 2, "^": 3, "&": 4, "<<": 5, ">>": 5, "+": 6, "-": 6,
    "*": 7, "/": 7, "//": 7, "%": 7,
}  # fmt: skip
_COMPARISON, _UNARY, _ATOM = 1, 8, 9
_MAX_DEPTH = 12  # deeper parts get a name: the language allows 64 levels
_MAX_NODES = 1 << 16  # far above any expression's limit; tracing stops here

COMPARISONS = tuple(mark for mark, tight in _BINARY.items() if tight == _COMPARISON)
INPUTS = ("score", "batch", "head", "q", "k", "seqlen_q", "seqlen_k")
RESERVED = frozenset(
    (*INPUTS, "and", "or", "not", "if", "else", "true", "false", "True", "False", "inf", "nan", "abs", "sign", "floor",
     "ceil", "trunc", "round", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "erf", "tanh", "sigmoid",
     "sqrt", "float", "int", "bool", "min", "max", "clamp", "select", "where")
)  # fmt: skip


class Node:
    """A value.

    mark: an operator, a function, "[]" of a tensor's elements (its first operand is the name), or a leaf's own
    characters. positive: an int that is certainly not below 0. differentiable: a float with a gradient. narrow: the
    torch type of 8- and 16-bit ints, which wrap around, else None.
    """

    __slots__ = ("differentiable", "kind", "mark", "narrow", "operands", "positive")

    def __init__(self, mark: str, kind: int, operands: Sequence[Node] = (), positive: bool = False):
        self.mark = mark
        self.kind = kind
        self.operands = tuple(operands)
        self.positive = positive
        self.differentiable = kind == FLOAT and any(x.differentiable for x in self.operands)
        self.narrow: Any = None


class TooLong(ValueError):
    """Raised if a graph has more nodes than any expression may have."""


class Graph:
    """The nodes of one expression, each after its operands."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def leaf(self, text: str, kind: int, positive: bool = False) -> Node:
        return self._added(Node(text, kind, (), positive))

    def constant(self, value: Any) -> Node:
        if isinstance(value, bool):
            return self.leaf("true" if value else "false", BOOL)
        if isinstance(value, int):
            return self.leaf(str(value), INT, value >= 0)
        return self.leaf("nan" if math.isnan(value) else repr(value), FLOAT)

    def unary(self, mark: str, a: Node) -> Node:
        return self._added(Node(mark, a.kind, (a,)))

    def binary(self, mark: str, a: Node, b: Node) -> Node:
        if mark in COMPARISONS:
            kind = BOOL
        else:
            kind = FLOAT if mark == "/" else max(a.kind, b.kind)
        of = (_positive(a), _positive(b))
        positive = all(of) and mark in ("+", "*", "//", "|", "^", ">>") or (mark == "&" and any(of))
        positive = positive or (mark == "%" and of[1])
        return self._added(Node(mark, kind, (a, b), kind == INT and positive))

    def call(self, name: str, kind: int, *operands: Node) -> Node:
        of = [_positive(x) for x in operands]
        positive = {"abs": True, "max": any(of), "min": all(of), "clamp": of[1:2] == [True], "select": all(of[1:])}
        known = positive.get(name, name == "int" and operands[0].kind == BOOL)
        return self._added(Node(name, kind, operands, kind == INT and known))

    def element(self, tensor: str, kind: int, indices: Sequence[Node]) -> Node:
        return self._added(Node("[]", kind, (Node(tensor, kind), *indices))) if indices else self.leaf(tensor, kind)

    def _added(self, node: Node) -> Node:
        if len(self.nodes) == _MAX_NODES:
            raise TooLong
        self.nodes.append(node)
        return node

    def expression(self, result: Node, names: Sequence[str]) -> tuple[str, set[str]]:
        """Returns the expression, and the names that it needs. The expression's parts get names that are not among
        them."""
        taken = frozenset(names)
        uses: dict[Node, int] = {result: 1}
        for node in reversed(self.nodes):
            for operand in node.operands if node in uses else ():
                uses[operand] = uses.get(operand, 0) + 1
        parts, written = [], {}  # by node: its characters, binding strength and depth
        for node in self.nodes:
            if node not in uses:
                continue
            text, tight, depth = _written(node, written)
            if node.operands and node is not result and (uses[node] > 1 or depth > _MAX_DEPTH):
                name = _free_name(len(parts), taken)
                parts.append(f"{name} = {text}; ")
                text, tight, depth = name, _ATOM, 0
            written[node] = text, tight, depth
        needed = {(node.operands[0] if node.mark == "[]" else node).mark for node in written}
        return "".join(parts) + written[result][0], needed.intersection(names)


def _positive(node: Node) -> bool:
    return node.positive or node.kind == BOOL


def _free_name(number: int, taken: frozenset[str]) -> str:
    name = f"t{number}"
    while name in taken:
        name += "_"
    return name


def _written(node: Node, written: dict[Node, tuple[str, int, int]]) -> tuple[str, int, int]:
    """Returns a node's characters, its binding strength and its depth."""
    mark, operands = node.mark, node.operands
    if not operands:
        return mark, _UNARY if mark.startswith("-") else _ATOM, 0
    if mark == "[]":
        indices = [written[x] for x in operands[1:]]
        return f"{operands[0].mark}[{', '.join(x[0] for x in indices)}]", _ATOM, 1 + max(x[2] for x in indices)
    of = [written[x] for x in operands]
    depth = 1 + max(x[2] for x in of)
    if mark in _BINARY and len(of) == 2:
        tight = _BINARY[mark]
        least = tight + (tight == _COMPARISON), tight + 1  # comparisons of comparisons would be read as a chain
        a, b = (text if t >= wanted else f"({text})" for (text, t, _), wanted in zip(of, least))
        return f"{a} {mark} {b}", tight, depth
    if mark in ("-", "~"):
        text, tight, _ = of[0]
        return mark + (text if tight >= _ATOM else f"({text})"), _UNARY, depth
    return f"{mark}({', '.join(x[0] for x in of)})", _ATOM, depth
