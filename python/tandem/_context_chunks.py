"""One rank's calls of a ContextPlan with chunks, and the tree of sums over chunk numbers.

Four groups of chunks hold the keys of a document. A step is the attention of one chunk of queries to its keys of one
group. Many chunks that the queries see whole are a step without a mask. Steps depend on positions alone, so every
number of ranks computes the same steps. A rank first computes steps whose keys it owns. The other steps read a buffer
with all of their keys, in the order of the positions.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from tandem._context_calls import Call, Step, calls_of
from tandem._context_plan import ContextPlan

Chunk = tuple[int, int]  # document and number

_GROUPS = 4
# The rows between the steps of one call, as a part of a step's rows.
_GAP = 0.125
# From this number of queries times keys on a step has its own call, whose tensors are not packed.
_LARGE = 1 << 22


def chunk_size(plan: ContextPlan, document: int, number: int, keys: bool) -> int:
    return min(plan.chunk, int(plan.lengths(keys)[document]) - number * plan.chunk)


def chunk_rows(plan: ContextPlan, rank: int, keys: bool) -> list[tuple[tuple[int, int], int, int]]:
    """Returns the chunks of a rank in the order of its rows: (document, number), first row and end."""
    found = plan.kept.get(("chunks", rank, keys))
    if found is None:
        found = []
        documents, positions = plan.documents(rank, keys), plan.positions(rank, keys)
        row = 0
        while row < len(documents):
            key = int(documents[row]), int(positions[row]) // plan.chunk
            end = row + chunk_size(plan, *key, keys)
            found.append((key, row, end))
            row = end
        plan.kept["chunks", rank, keys] = found  # whole, because threads may share a plan
    return found


def group_size(plan: ContextPlan, document: int) -> int:
    """Returns the number of key chunks of a group."""
    chunks = -(-int(plan.lengths(keys=True)[document]) // plan.chunk)
    return max(1, -(-chunks // _GROUPS))


def key_chunks(plan: ContextPlan, step: Step) -> range:
    """Returns the numbers of a step's key chunks."""
    return range(step.k_begin // plan.chunk, (step.k_begin + step.k_end - step.k_row - 1) // plan.chunk + 1)


def chunk_steps(plan: ContextPlan, rank: int) -> list[Step]:
    """Returns a rank's steps of whole chunks. Key rows count from 0 in each step. k_order is the order of the steps of
    a chunk of queries.
    """
    rows = {key: (begin, end) for key, begin, end in chunk_rows(plan, rank, keys=False)}
    found: dict[tuple[int, int, int], dict[int, tuple[int, int]]] = {}  # by key chunk: diagonal of the document, pairs
    for peer in range(plan.ranks):
        for s in plan.steps(rank, peer):
            document, number = int(s["document"]), int(s["k_order"])
            key = document, int(s["q_order"]), number // group_size(plan, document)
            found.setdefault(key, {})[number] = int(s["diagonal"] + s["k_begin"] - s["q_begin"]), int(s["pairs"])
    steps = []
    for (document, q_order, group), chunks in sorted(found.items()):
        q_row, q_end = rows[document, q_order]
        sizes = {number: chunk_size(plan, document, number, True) for number in chunks}
        whole = [n for n in sizes if chunks[n][1] == sizes[n] * (q_end - q_row)]
        for order, numbers in enumerate(_runs(sizes, whole, q_end - q_row)):
            if not numbers:
                continue
            q_begin, k_begin = q_order * plan.chunk, numbers[0] * plan.chunk
            diagonal = chunks[numbers[0]][0] + q_begin - k_begin
            place = q_row, q_end, 0, sum(sizes[n] for n in numbers), q_begin, k_begin, diagonal
            pairs = sum(chunks[n][1] for n in numbers)
            steps.append(Step(document, 1, *place, *plan.window, q_order, 3 * group + order, pairs))
    return steps


def _runs(sizes: dict[int, int], whole: list[int], rows: int) -> tuple[list[int], list[int], list[int]]:
    """Divides the key chunks of a group before and after the chunks that the queries see whole, if these are a large
    step.
    """
    numbers = sorted(sizes)
    if sum(sizes[n] for n in whole) * rows < _LARGE:
        return [], numbers, []
    begin, end = numbers.index(min(whole)), numbers.index(max(whole)) + 1
    return numbers[:begin], numbers[begin:end], numbers[end:]


def is_large(step: Step) -> bool:
    return (step.q_end - step.q_row) * (step.k_end - step.k_row) >= _LARGE


class _Owners:
    """The rank and the rows of each chunk of keys."""

    def __init__(self, plan: ContextPlan) -> None:
        self.rows = [
            {key: (begin, end) for key, begin, end in chunk_rows(plan, rank, keys=True)} for rank in range(plan.ranks)
        ]

    def runs(self, rank: int, chunks: Iterable[Chunk]) -> list[tuple[Chunk, int, int]]:
        """Returns the rank's chunks among ascending ones, as few runs of its rows: first chunk, first row and end.
        The chunks of a run are consecutive.
        """
        runs: list[tuple[Chunk, int, int]] = []
        last = None
        for chunk in chunks:
            if chunk not in self.rows[rank]:
                continue
            begin, end = self.rows[rank][chunk]
            if last == (chunk[0], chunk[1] - 1) and runs[-1][2] == begin:
                runs[-1] = runs[-1][0], runs[-1][1], end
            else:
                runs.append((chunk, begin, end))
            last = chunk
        return runs


class _RankSteps:
    """A rank's steps with its own keys, and its other steps with their key chunks in the order of the positions."""

    def __init__(self, plan: ContextPlan, owners: _Owners, rank: int) -> None:
        self.own: list[Step] = []
        self.others: list[Step] = []
        chunks: set[Chunk] = set()
        for step in chunk_steps(plan, rank):
            needed = [(step.document, number) for number in key_chunks(plan, step)]
            runs = owners.runs(rank, needed)
            if len(runs) == 1 and runs[0][2] - runs[0][1] == step.k_end:
                self.own.append(step.with_keys_at(runs[0][1]))
            else:
                self.others.append(step)
                chunks.update(needed)
        self.chunks = sorted(chunks)
        sizes = [chunk_size(plan, *chunk, True) for chunk in self.chunks]
        self.places = dict(zip(self.chunks, itertools.accumulate(sizes, initial=0)))
        self.rows = sum(sizes)
        first = [(step.document, key_chunks(plan, step)[0]) for step in self.others]
        self.others = [step.with_keys_at(self.places[chunk]) for step, chunk in zip(self.others, first)]


class ChunkSchedule:
    """A rank's calls: first and last with its own keys, and between them with keys of a buffer.

    is_dense: each call has one step, because packed calls refuse a bias.
    """

    def __init__(self, plan: ContextPlan, rank: int, is_dense: bool = False) -> None:
        self.plan, self.rank, self.is_dense = plan, rank, is_dense
        self.k_rows = plan.rows(rank)[1]
        owners = _Owners(plan)
        ranks = [_RankSteps(plan, owners, peer) for peer in range(plan.ranks)]
        own = ranks[rank]
        self.buffer_rows = own.rows
        # The orders of the steps of each chunk of queries.
        self.orders: dict[Chunk, list[int]] = {}
        for step in [*own.own, *own.others]:
            self.orders.setdefault((step.document, step.q_order), []).append(step.k_order)
        # Rows of the own keys and their places in the buffer; rows that peers send and receive.
        self.copies = [(begin, end, own.places[chunk]) for chunk, begin, end in owners.runs(rank, own.chunks)]
        self.receives = [
            (peer, own.places[chunk], own.places[chunk] + end - begin)
            for peer in range(plan.ranks)
            if peer != rank
            for chunk, begin, end in owners.runs(peer, own.chunks)
        ]
        self.sends = [
            (reader, begin, end)
            for reader in range(plan.ranks)
            if reader != rank
            for _, begin, end in owners.runs(rank, ranks[reader].chunks)
        ]
        travels = bool(self.sends or self.receives)
        first, last = _halves(own.own) if travels else (own.own, [])
        self.first, self.last, self.others = self._calls(first), self._calls(last), self._calls(own.others)
        # The first rows of the key chunks in the own keys and in the buffer.
        self.own_chunks = {chunk: begin for chunk, (begin, _) in owners.rows[rank].items()}
        self.places = own.places

    def _calls(self, steps: list[Step]) -> list[Call]:
        """Returns calls of steps. A chunk of queries with one step has calls without rows between the steps."""
        large = [step for step in steps if self.is_dense or is_large(step)]
        packed = [] if self.is_dense else [step for step in steps if not is_large(step)]
        whole = [step for step in packed if len(self.orders[step.document, step.q_order]) == 1]
        parts = [step for step in packed if len(self.orders[step.document, step.q_order]) > 1]
        calls = calls_of(whole, True, 0) + calls_of(parts, True, _GAP)
        calls += [Call([step], is_packed=False) for step in large]
        return sorted(calls, key=lambda call: (call.steps[0].document, call.steps[0].k_order, call.steps[0].q_order))

    def is_whole(self, call: Call) -> bool:
        """Returns whether the call has all keys of its queries."""
        return len(self.orders[call.steps[0].document, call.steps[0].q_order]) == 1

    def units(self, calls: list[Call]) -> list[list[Call]]:
        """Returns the calls as lists of one, or of two that are siblings in the tree of a key chunk's sums."""
        units: list[list[Call]] = []
        for call in calls:
            if units and len(units[-1]) == 1 and _are_siblings(units[-1][0], call):
                units[-1].append(call)
            else:
                units.append([call])
        return units


def _halves(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """Divides steps by documents and keys. The first have about half of the pairs."""
    ordered = sorted(steps, key=lambda step: (step.document, step.k_order, step.q_order))
    work = np.cumsum([0, *(step.pairs for step in ordered)])
    middle = int(np.searchsorted(work, work[-1] / 2))
    return ordered[:middle], ordered[middle:]


def _are_siblings(left: Call, right: Call) -> bool:
    a, b = left.steps[0], right.steps[0]
    single = len(left.steps) == len(right.steps) == 1
    same = (a.document, a.k_order, a.q_order + 1) == (b.document, b.k_order, b.q_order)
    return single and same and a.q_order % 2 == 0 and a.k_row < b.k_end and b.k_row < a.k_end


class TreeSum:
    """A sum over leaves of the tree over chunk numbers (src/context_parallel/tree_sum.h)."""

    def __init__(self, leaves: Iterable[int]) -> None:
        self._leaves = sorted(set(leaves))
        self.nodes: dict[int, tuple[int, int, Any]] = {}  # first chunk: level, index, value

    def _count(self, level: int, index: int) -> int:
        bounds = index << level, (index + 1) << level
        begin, end = (bisect.bisect_left(self._leaves, bound) for bound in bounds)
        return end - begin

    def add(self, level: int, index: int, value: Any, merge: Any) -> None:
        while self._count(level, index) < len(self._leaves):
            if self._count(level, index ^ 1) > 0:
                found = self.nodes.get((index ^ 1) << level)
                if found is None or found[0] != level:
                    break
                del self.nodes[(index ^ 1) << level]
                value = merge(value, found[2]) if index % 2 == 0 else merge(found[2], value)
            level, index = level + 1, index // 2
        self.nodes[index << level] = level, index, value

    @property
    def is_complete(self) -> bool:
        return [self._count(*node[:2]) for node in self.nodes.values()] == [len(self._leaves)]

    def values(self) -> list[Any]:
        """Returns the values that remain, in the order of the chunks. A complete sum has one."""
        return [self.nodes[first][2] for first in sorted(self.nodes)]


def nodes_left(leaves: Iterable[int], own: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (level, index) of the nodes that remain after a rank has added its leaves."""
    tree = TreeSum(leaves)
    for leaf in sorted(own):
        tree.add(0, leaf, None, lambda left, right: None)
    return [tree.nodes[first][:2] for first in sorted(tree.nodes)]


def key_leaves(plan: ContextPlan, k_rank: int) -> dict[Chunk, dict[int, list[int]]]:
    """Returns the query chunks that see each key chunk of a rank, by the rank of the queries."""
    found = plan.kept.get(("key leaves", k_rank))
    if found is None:
        chunks: dict[Chunk, dict[int, list[int]]] = {}
        for q_rank in range(plan.ranks):
            for s in plan.steps(q_rank, k_rank):
                by_rank = chunks.setdefault((int(s["document"]), int(s["k_order"])), {})
                by_rank.setdefault(q_rank, []).append(int(s["q_order"]))
        found = plan.kept["key leaves", k_rank] = dict(sorted(chunks.items()))
    return found
