"""Executions of a ContextPlan with chunks on torch tensors. The bits do not depend on the number of ranks.

A rank merges the parts of a chunk of queries in the order of the steps. The sums of dk and dv follow the tree
over the numbers of the query chunks, and ranks return nodes of this tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tandem import _binding
from tandem._context_calls import Call, uncovered
from tandem._context_chunks import Chunk, TreeSum, chunk_rows, chunk_size, key_chunks, key_leaves, nodes_left
from tandem._context_execution import Execution, Part, attend_backward, write
from tandem._context_plan import ContextPlan
from tandem._context_transport import Messages


class _Keys:
    """The rank's own keys, and a buffer with keys in the order of the positions, which arrives meanwhile."""

    def __init__(self, execution: Execution, k: Tensor, v: Tensor) -> None:
        self.execution, self.schedule, self.own = execution, execution.chunk_schedule(), (k, v)
        self.buffers = tuple(x.new_empty((self.schedule.buffer_rows, *x.shape[1:])) for x in self.own)
        sends = [(reader, x[begin:end].contiguous()) for reader, begin, end in self.schedule.sends for x in self.own]
        receives = [(peer, x[begin:end]) for peer, begin, end in self.schedule.receives for x in self.buffers]
        self.messages = execution.messages(sends, receives)
        execution.busy = bool(sends or receives)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Returns the buffers with all keys."""
        for x, buffer in zip(self.own, self.buffers):
            for begin, end, place in self.schedule.copies:
                buffer[place : place + end - begin] = x[begin:end]
        self.messages.wait()
        self.execution.busy = False
        return self.buffers


class Forward:
    def __init__(self, execution: Execution, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.execution, self.q, self.k, self.v = execution, q, k, v
        self.schedule = execution.chunk_schedule()
        self.result = Part.empty(q.shape[0], q.shape[1], v.shape[-1], q.dtype, q.device)
        self.rows = {key: (begin, end) for key, begin, end in chunk_rows(execution.plan, execution.rank, False)}
        self.parts: dict[Chunk, dict[int, Part]] = {}  # by the order of the step

    def run(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        keys = _Keys(self.execution, self.k, self.v)
        for call in [*self.schedule.first, *self.schedule.last]:
            self._attend(call, (self.k, self.v), sink)
        buffers = keys.wait()
        for call in self.schedule.others:
            self._attend(call, buffers, sink)
        for chunk, interval in self.rows.items():
            if chunk not in self.schedule.orders:
                write([], sink, self.result.rows(*interval))
        return self.result.out, self.result.lse

    def _attend(self, call: Call, keys: tuple[Tensor, Tensor], sink: Tensor | None) -> None:
        direct = sink is None and self.schedule.is_whole(call)
        if direct:
            part = self.result.rows(call.q_begin, call.q_end)
        else:
            heads, dim = self.result.out.shape[1:]
            part = Part.empty(call.q_end - call.q_begin, heads, dim, torch.float32, self.q.device)
        k, v = (x[call.k_begin : call.k_end] for x in keys)
        tensors = {"q": self.q[call.q_begin : call.q_end], "k": k, "v": v, "out": part.out, "lse": part.lse}
        self.execution.attend(_binding.FORWARD, call, tensors)
        for step in [] if direct else call.steps:
            chunk = step.document, step.q_order
            parts = self.parts.setdefault(chunk, {})
            parts[step.k_order] = part.rows(step.q_row - call.q_begin, step.q_end - call.q_begin)
            if len(parts) == len(self.schedule.orders[chunk]):
                write([parts[order] for order in sorted(parts)], sink, self.result.rows(*self.rows[chunk]))
                del self.parts[chunk]


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    for x, y in zip(left, right):
        x.add_(y)
    return left


class Backward:
    """Gradients of the rank's shard, in a type."""

    def __init__(self, execution: Execution, tensors: dict[str, Any], dtype: torch.dtype) -> None:
        self.execution, self.tensors, self.dtype = execution, tensors, dtype
        self.plan, self.rank, self.schedule = execution.plan, execution.rank, execution.chunk_schedule()
        self.q, self.k, self.v = (tensors[name] for name in ("q", "k", "v"))
        self.q_trees: dict[Chunk, TreeSum] = {}
        self.k_trees: dict[Chunk, TreeSum] = {}
        # The rank and the query chunks of each key chunk that this rank's queries see.
        self.leaves: dict[Chunk, tuple[int, list[int]]] = {}
        for owner in range(self.plan.ranks):
            for chunk, by_rank in key_leaves(self.plan, owner).items():
                if owner == self.rank or self.rank in by_rank:
                    self.leaves[chunk] = owner, sum(by_rank.values(), [])

    def run(self) -> list[Tensor]:
        keys = _Keys(self.execution, self.k, self.v)
        self._compute(self.schedule.first, (self.k, self.v), self.schedule.own_chunks)
        self._compute(self.schedule.others, keys.wait(), self.schedule.places)
        messages, parts = self._return_nodes()
        self._compute(self.schedule.last, (self.k, self.v), self.schedule.own_chunks)
        messages.wait()
        self.execution.busy = False
        for chunk, (level, index), value in parts:
            self._tree(chunk).add(level, index, value, _added)
        return self._finish()

    def _compute(self, calls: list[Call], keys: tuple[Tensor, Tensor], places: dict[Chunk, int]) -> None:
        for unit in self.schedule.units(calls):
            begin, end = min(call.k_begin for call in unit), max(call.k_end for call in unit)
            sums = [_float32(x, end - begin) for x in (self.k, self.v)]
            for n, call in enumerate(unit):
                rows = call.k_begin - begin, call.k_end - begin
                self._attend(call, keys, [x[slice(*rows)] for x in sums], accumulate=n > 0)
                for gap in uncovered(end - begin, [rows]) if n == 0 else []:
                    for x in sums:
                        x[slice(*gap)].zero_()
            for chunk, level, index in _nodes(self.plan, unit):
                place = places[chunk] - begin
                rows = slice(place, place + chunk_size(self.plan, *chunk, True))
                self._tree(chunk).add(level, index, [x[rows] for x in sums], _added)

    def _attend(self, call: Call, keys: tuple[Tensor, Tensor], sums: list[Tensor], accumulate: bool) -> None:
        dq = _float32(self.q, call.q_end - call.q_begin)
        if accumulate:
            dq.zero_()
        gradients = {"dq": dq, "dk": sums[0], "dv": sums[1]}
        attend_backward(self.execution, call, self.tensors, keys, gradients, accumulate)
        for step in call.steps:
            chunk = step.document, step.q_order
            tree = self.q_trees.setdefault(chunk, TreeSum(self.schedule.orders[chunk]))
            tree.add(0, step.k_order, [dq[step.q_row - call.q_begin : step.q_end - call.q_begin]], _added)

    def _tree(self, chunk: Chunk) -> TreeSum:
        found = self.k_trees.get(chunk)
        if found is None:
            found = self.k_trees[chunk] = TreeSum(self.leaves[chunk][1])
        return found

    def _return_nodes(self) -> tuple[Messages, list[tuple[Chunk, tuple[int, int], list[Tensor]]]]:
        """Sends the sums of other ranks' keys to their owners. Returns the nodes that arrive, with their places."""
        sends, receives, parts = [], [], []
        for chunk in sorted(self.leaves):
            owner = self.leaves[chunk][0]
            if owner != self.rank:
                sends += [(owner, x) for node in self.k_trees.pop(chunk).values() for x in node]
        for reader in range(self.plan.ranks):
            for chunk, by_rank in key_leaves(self.plan, self.rank).items():
                if reader == self.rank or reader not in by_rank:
                    continue
                for node in nodes_left(self.leaves[chunk][1], by_rank[reader]):
                    value = [_float32(x, chunk_size(self.plan, *chunk, True)) for x in (self.k, self.v)]
                    receives += [(reader, x) for x in value]
                    parts.append((chunk, node, value))
        self.execution.busy = bool(sends or receives)
        return self.execution.messages(sends, receives), parts

    def _finish(self) -> list[Tensor]:
        gradients = []
        for n, (like, trees, keys) in enumerate(
            ((self.q, self.q_trees, False), (self.k, self.k_trees, True), (self.v, self.k_trees, True))
        ):
            x = torch.empty(like.shape, dtype=self.dtype, device=like.device)
            for chunk, begin, end in chunk_rows(self.plan, self.rank, keys):
                if chunk in trees:
                    # 0 is added, because sums of other numbers of zeros may differ in the sign.
                    torch.add(trees[chunk].values()[0][max(0, n - 1)], 0.0, out=x[begin:end])
                else:
                    x[begin:end].zero_()
            gradients.append(x)
        return gradients


def _float32(like: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, *like.shape[1:]), dtype=torch.float32, device=like.device)


def _nodes(plan: ContextPlan, unit: list[Call]) -> Iterator[tuple[Chunk, int, int]]:
    """Returns the node of the tree, level and index, that a unit computes for each key chunk."""
    seen: dict[Chunk, list[int]] = {}
    for step in (step for call in unit for step in call.steps):
        for number in key_chunks(plan, step):
            seen.setdefault((step.document, number), []).append(step.q_order)
    for chunk, numbers in seen.items():
        yield (chunk, 1, numbers[0] // 2) if len(numbers) == 2 else (chunk, 0, numbers[0])
