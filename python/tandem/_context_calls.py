"""The calls of attention that compute one rank's steps of a ContextPlan, for executions on torch tensors.

A batch is the steps with keys that arrive together. A call is a packed attention over some of the batch's steps: their
queries and their keys are disjoint and ascending. Rows between the steps have no keys or no queries. The arithmetic is
numpy's, and its results are kept for further calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem._context_plan import UNBOUNDED, ContextPlan


@dataclass(frozen=True)
class Step:
    """Queries [q_row, q_end) of the rank and keys [k_row, k_end) of a buffer. A bound of None hides no key. The spans
    are the rows of whole chunks, and without chunks the same rows.
    """

    document: int
    stride: int
    q_row: int
    q_end: int
    k_row: int
    k_end: int
    q_begin: int
    k_begin: int
    diagonal: int
    left: int | None
    right: int | None
    q_order: int
    k_order: int
    pairs: int
    q_span: tuple[int, int]
    k_span: tuple[int, int]

    @property
    def is_full(self) -> bool:
        return self.pairs == (self.q_end - self.q_row) * (self.k_end - self.k_row)

    def halves(self) -> list[Step]:
        """Returns the step as two steps, each with half of the queries and the keys that these see."""
        rows = (self.q_end - self.q_row) // 2
        if rows == 0:
            return [self]
        keys = self.k_end - self.k_row
        first_keys = keys if self.right is None else min(keys, rows + self.diagonal + self.right)
        skipped = 0 if self.left is None else max(0, rows + self.diagonal - self.left)
        middle, first_end, begin = self.q_row + rows, self.k_row + first_keys, self.k_row + skipped
        spans = {"q_span": (self.q_row, middle), "k_span": (self.k_row, first_end)}
        first = replace(self, q_end=middle, k_end=first_end, **spans)
        place = {"q_row": middle, "k_row": begin, "q_span": (middle, self.q_end), "k_span": (begin, self.k_end)}
        begins = {"q_begin": self.q_begin + rows * self.stride, "k_begin": self.k_begin + skipped * self.stride}
        second = replace(self, **place, **begins, diagonal=self.diagonal + rows - skipped)
        return [replace(step, pairs=step.count_pairs()) for step in (first, second)]

    def count_pairs(self) -> int:
        first = np.arange(self.q_end - self.q_row) + self.diagonal
        keys = self.k_end - self.k_row
        low = 0 if self.left is None else np.clip(first - self.left, 0, keys)
        high = keys if self.right is None else np.clip(first + self.right + 1, 0, keys)
        return int(np.maximum(high - low, 0).sum()) if len(first) > 0 else 0

    def with_keys_at(self, row: int) -> Step:
        """Returns the step with its first key at another row of a buffer."""
        move = row - self.k_row
        return replace(self, k_row=row, k_end=self.k_end + move, k_span=(self.k_span[0] + move, self.k_span[1] + move))


def steps_of(plan: ContextPlan, q_rank: int, k_rank: int) -> list[Step]:
    """Returns the steps, with the plan's window where a bound hides no key. Equal windows can share a call."""
    left, right = plan.window
    steps = []
    for s in plan.steps(q_rank, k_rank):
        bounds = [None if bound == UNBOUNDED else int(bound) for bound in (s["window_left"], s["window_right"])]
        if bounds[0] is None and s["stride"] == 1:
            bounds[0] = left
        if bounds[1] is None and (s["stride"] == 1 or right == 0):
            bounds[1] = right
        places = [int(s[name]) for name in ("q_row", "q_count", "k_row", "k_count")]
        rows = places[0], places[0] + places[1], places[2], places[2] + places[3]
        orders = int(s["q_order"]), int(s["k_order"]), int(s["pairs"])
        begins = int(s["q_begin"]), int(s["k_begin"]), int(s["diagonal"])
        spans = rows[:2], rows[2:]
        if plan.chunk > 0:
            spans = _chunk_span(plan, s, "q"), _chunk_span(plan, s, "k")
        steps.append(Step(int(s["document"]), int(s["stride"]), *rows, *begins, *bounds, *orders, *spans))
    return steps


def _chunk_span(plan: ContextPlan, step: np.void, kind: str) -> tuple[int, int]:
    number = int(step[kind + "_order"])
    first = int(step[kind + "_row"]) - (int(step[kind + "_begin"]) - number * plan.chunk)
    return first, first + chunk_size(plan, int(step["document"]), number, kind == "k")


class KeyRuns:
    """The rows of a peer's keys that a rank needs, as ascending runs [begin, end) that follow each other in a buffer.
    With chunks, the rows of whole chunks.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.runs: list[tuple[int, int]] = []
        for begin, end in sorted(step.k_span for step in steps):
            if self.runs and begin <= self.runs[-1][1]:
                self.runs[-1] = self.runs[-1][0], max(end, self.runs[-1][1])
            else:
                self.runs.append((begin, end))
        self._places = list(itertools.accumulate((end - begin for begin, end in self.runs), initial=0))
        self.rows = self._places[-1]

    def place(self, row: int) -> int:
        """Returns the place in the buffer of a row of the peer's shard."""
        n = np.searchsorted([begin for begin, _ in self.runs], row, side="right") - 1
        return self._places[n] + row - self.runs[n][0]


def chunk_size(plan: ContextPlan, document: int, number: int, keys: bool) -> int:
    return min(plan.chunk, int(plan.lengths(keys)[document]) - number * plan.chunk)


def chunk_rows(plan: ContextPlan, rank: int, keys: bool) -> list[tuple[tuple[int, int], int, int]]:
    """Returns the chunks of a rank in the order of its rows: (document, number), first row and end."""
    found = plan.kept.get(("chunks", rank, keys))
    if found is None:
        found = plan.kept["chunks", rank, keys] = []
        documents, positions = plan.documents(rank, keys), plan.positions(rank, keys)
        row = 0
        while row < len(documents):
            key = int(documents[row]), int(positions[row]) // plan.chunk
            end = row + chunk_size(plan, *key, keys)
            found.append((key, row, end))
            row = end
    return found


def joined(steps: list[Step], by_distance: bool) -> list[Step]:
    """Joins steps whose queries are the same rows and whose keys are neighbours in the buffer. The mask of the second
    step serves both if the first step is full, unless the call reads distances.
    """
    found: list[Step] = []
    for step in sorted(steps, key=lambda s: (s.q_row, s.q_end, s.k_row)):
        last = found[-1] if found else None
        if last is None or (last.q_row, last.q_end, last.k_end) != (step.q_row, step.q_end, step.k_row):
            found.append(step)
            continue
        count, span = last.k_end - last.k_row, (last.k_row, step.k_end)
        follows = last.document == step.document and step.k_begin - last.k_begin == count * step.stride
        if (last.left, last.right) == (step.left, step.right) and follows:
            found[-1] = replace(last, k_end=step.k_end, k_span=span, pairs=last.pairs + step.pairs)
        elif last.is_full and step.left is None and last.document == step.document and not by_distance:
            pairs = last.pairs + step.pairs
            right = step.right if step.right is not None else last.right
            k_begin = step.k_begin - count * step.stride
            place = {"k_row": last.k_row, "k_begin": k_begin, "k_span": span, "diagonal": step.diagonal + count}
            found[-1] = replace(step, **place, right=right, pairs=pairs)
        else:
            found.append(step)
    return found


@dataclass
class Call:
    """Queries [q_begin, q_end) and keys [k_begin, k_end), in the sequences of steps and of the rows between steps."""

    steps: list[Step]
    is_packed: bool
    on_device: dict[Any, Any] = field(default_factory=dict)  # tensors by device

    @property
    def q_begin(self) -> int:
        return self.steps[0].q_row

    @property
    def q_end(self) -> int:
        return self.steps[-1].q_end

    @property
    def k_begin(self) -> int:
        return self.steps[0].k_row

    @property
    def k_end(self) -> int:
        return self.steps[-1].k_end

    @property
    def q_span(self) -> tuple[int, int]:
        return self.steps[0].q_span[0], self.steps[-1].q_span[1]

    @property
    def k_span(self) -> tuple[int, int]:
        return self.steps[0].k_span[0], self.steps[-1].k_span[1]

    @property
    def pairs(self) -> int:
        return sum(step.pairs for step in self.steps)

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.steps[0].left, self.steps[0].right

    def sequences(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Returns cu_seqlens of queries and of keys, diagonals, and documents."""
        q, k, diagonals, documents = [0], [0], [], []
        for step in self.steps:
            q_row, k_row = step.q_row - self.q_begin, step.k_row - self.k_begin
            # Queries without keys, then keys without queries.
            for q_end, k_end in ((q_row, k[-1]), (q_row, k_row), (q_row + step.q_end - step.q_row, None)):
                end = k_row + step.k_end - step.k_row if k_end is None else k_end
                if (q_end, end) == (q[-1], k[-1]):
                    continue
                q.append(q_end)
                k.append(end)
                diagonals.append(step.diagonal)
                documents.append(step.document)
        return q, k, diagonals, documents


def in_two(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """Divides steps into first and last ones, the smaller first. The first have at most half of the work, if they are
    several. One step is cut.
    """
    steps = steps[0].halves() if len(steps) == 1 else steps
    ordered = sorted(steps, key=lambda step: step.pairs)
    first, work = ordered[:1], sum(step.pairs for step in ordered[:1])
    for step in ordered[1:]:
        work += step.pairs
        if 2 * work > sum(other.pairs for other in steps):
            break
        first.append(step)
    return first, ordered[len(first) :]


def calls_of(steps: list[Step], always_packed: bool) -> list[Call]:
    """Divides steps into few calls. A step enters the first call that it can follow."""
    lists: list[list[Step]] = []
    for step in sorted(steps, key=lambda s: (s.q_row, s.k_row)):
        for other in lists:
            last = other[-1]
            windows = (last.left, last.right) == (step.left, step.right)
            if windows and last.q_span[1] <= step.q_span[0] and last.k_span[1] <= step.k_span[0]:
                other.append(step)
                break
        else:
            lists.append([step])
    return [Call(found, always_packed or len(found) > 1) for found in lists]


def parts_of(calls: list[Call]) -> list[list[Call]]:
    """Divides calls into few parts. The calls of a part have disjoint queries, so that one tensor has their results."""
    parts: list[list[Call]] = []
    for call in calls:
        for part in parts:
            if all(call.q_span[1] <= other.q_span[0] or other.q_span[1] <= call.q_span[0] for other in part):
                part.append(call)
                break
        else:
            parts.append([call])
    return parts


def uncovered(rows: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intervals of [0, rows) without the covered ones."""
    gaps, end = [], 0
    for begin, stop in [*sorted(covered), (rows, rows)]:
        if begin > end:
            gaps.append((end, begin))
        end = max(end, stop)
    return gaps


@dataclass
class Batch:
    """Keys that arrive together: the rank's own, or of peers, each with the place of its rows in the buffer."""

    peers: list[int]
    runs: list[KeyRuns]
    places: list[int]  # and the rows of the buffer
    calls: list[Call]
    parts: list[list[Call]]
    # Only for the own keys: calls of the backward that precede and follow the calls with other keys.
    first: list[Call] = field(default_factory=list)
    last: list[Call] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.places[-1]


def _batch(plan: ContextPlan, rank: int, peers: list[int], by_distance: bool) -> Batch:
    runs, places, steps = [], [0], []
    for peer in peers:
        found = steps_of(plan, rank, peer)
        if peer == rank:
            steps += found
            places.append(plan.rows(rank)[1])
            continue
        keys = KeyRuns(found)
        first = places[-1]
        for step in found:
            steps.append(step.with_keys_at(first + keys.place(step.k_row)))
        runs.append(keys)
        places.append(first + keys.rows)
    chunks = plan.chunk > 0
    steps = steps if chunks else joined(steps, by_distance)
    calls = calls_of(steps, chunks)
    batch = Batch(peers, runs, places, calls, parts_of(calls))
    if peers == [rank] and plan.ranks > 1 and not chunks:
        batch.first, batch.last = (calls_of(part, False) for part in in_two(steps))
    return batch


class Schedule:
    """A rank's batches, in the order in which they are computed. The first has the rank's own keys."""

    def __init__(self, plan: ContextPlan, rank: int, rounds_at_once: int, by_distance: bool) -> None:
        ranks = plan.ranks
        rounds = [[0]] + [
            list(range(first, min(first + rounds_at_once, ranks))) for first in range(1, ranks, rounds_at_once)
        ]
        self.plan, self.rank = plan, rank
        self.q_rows, self.k_rows = plan.rows(rank)
        self.batches = [_batch(plan, rank, [(rank - n) % ranks for n in batch], by_distance) for batch in rounds]
        # The readers of the rank's keys in each batch, with the rows that they need.
        self.readers = [
            [((rank + n) % ranks, KeyRuns(steps_of(plan, (rank + n) % ranks, rank))) for n in batch if n > 0]
            for batch in rounds
        ]


class TreeSum:
    """A sum over leaves of the tree over chunk numbers (src/context_parallel/tree_sum.h)."""

    def __init__(self, leaves: Iterable[int]) -> None:
        self._leaves = sorted(leaves)
        self.nodes: dict[int, tuple[int, int, Any]] = {}  # first chunk: level, index, value

    def _count(self, level: int, index: int) -> int:
        bounds = index << level, (index + 1) << level
        begin, end = (int(np.searchsorted(self._leaves, bound)) for bound in bounds)
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

    def values(self) -> list[Any]:
        """Returns the values that remain, in the order of the chunks. A complete sum has one."""
        return [self.nodes[first][2] for first in sorted(self.nodes)]


def nodes_left(leaves: Iterable[int], own: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (level, index) of the nodes that remain after a rank has added its leaves."""
    tree = TreeSum(leaves)
    for leaf in sorted(own):
        tree.add(0, leaf, None, lambda left, right: None)
    return [tree.nodes[first][:2] for first in sorted(tree.nodes)]


class ChunkLeaves:
    """The leaves of a rank's sums over chunks: of its query chunks, and of the key chunks of each rank."""

    def __init__(self, plan: ContextPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.of_queries: dict[tuple[int, int], list[int]] = {}
        for peer in range(plan.ranks):
            for step in steps_of(plan, rank, peer):
                self.of_queries.setdefault((step.document, step.q_order), []).append(step.k_order)
        self._of_keys: dict[int, dict[tuple[int, int], dict[int, list[int]]]] = {}

    def of_keys(self, k_rank: int) -> dict[tuple[int, int], dict[int, list[int]]]:
        """Returns the query chunks that see each key chunk of a rank, by the rank of the queries."""
        found = self._of_keys.get(k_rank)
        if found is None:
            chunks: dict[tuple[int, int], dict[int, list[int]]] = {}
            for q_rank in range(self._plan.ranks):
                for step in steps_of(self._plan, q_rank, k_rank):
                    by_rank = chunks.setdefault((step.document, step.k_order), {})
                    by_rank.setdefault(q_rank, []).append(step.q_order)
            found = self._of_keys[k_rank] = dict(sorted(chunks.items()))
        return found
