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
    """Queries [q_row, q_end) of the rank and keys [k_row, k_end) of a buffer. A bound of None hides no key."""

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

    @property
    def is_full(self) -> bool:
        return self.pairs == (self.q_end - self.q_row) * (self.k_end - self.k_row)

    def cut(self, row: int) -> list[Step]:
        """Returns the step as two steps, with the queries before a row and from it, and the keys that these see."""
        rows, keys = row - self.q_row, self.k_end - self.k_row
        if not 0 < rows < self.q_end - self.q_row:
            return [self]
        first_keys = keys if self.right is None else max(0, min(keys, rows + self.diagonal + self.right))
        skipped = 0 if self.left is None else min(keys, max(0, rows + self.diagonal - self.left))
        first_end, begin = self.k_row + first_keys, self.k_row + skipped
        first = replace(self, q_end=row, k_end=first_end)
        place = {"q_row": row, "k_row": begin}
        begins = {"q_begin": self.q_begin + rows * self.stride, "k_begin": self.k_begin + skipped * self.stride}
        second = replace(self, **place, **begins, diagonal=self.diagonal + rows - skipped)
        counted = [replace(step, pairs=step.count_pairs()) for step in (first, second)]
        return [step for step in counted if step.pairs > 0]

    def cut_keys(self, row: int) -> list[Step]:
        """Returns the step as two steps, with the keys before a row and from it, and the queries that see these."""
        keys = row - self.k_row
        if not 0 < keys < self.k_end - self.k_row:
            return [self]
        rows = self.q_end - self.q_row
        first_rows = rows if self.left is None else max(0, min(rows, keys - self.diagonal + self.left))
        skipped = 0 if self.right is None else min(rows, max(0, keys - self.diagonal - self.right))
        first = replace(self, q_end=self.q_row + first_rows, k_end=row)
        place = {"q_row": self.q_row + skipped, "k_row": row, "diagonal": self.diagonal + skipped - keys}
        begins = {"q_begin": self.q_begin + skipped * self.stride, "k_begin": self.k_begin + keys * self.stride}
        counted = [replace(step, pairs=step.count_pairs()) for step in (first, replace(self, **place, **begins))]
        return [step for step in counted if step.pairs > 0]

    @property
    def lines(self) -> tuple[int | None, int | None]:
        """The least and the greatest difference of a visible key's row and a query's row; None: not bounded."""
        middle = self.diagonal + self.k_row - self.q_row
        return None if self.left is None else middle - self.left, None if self.right is None else middle + self.right

    def followed_by(self, other: Step) -> Step | None:
        """Returns a step with the pairs of this step and of one with the next queries; None: no mask has both."""
        if self.q_end != other.q_row or self.k_row != other.k_row or self.document != other.document:
            return None
        if self.is_full and other.is_full and self.k_end == other.k_end:
            mask = other if other.left is None and other.right is None else self
        elif self.left is None and other.left is None:
            mask = self if other.is_full or other.right is None else other
        else:
            return None
        end, move = max(self.k_end, other.k_end), mask.q_row - self.q_row
        place = {"q_row": self.q_row, "q_end": other.q_end, "k_end": end, "diagonal": mask.diagonal - move}
        joint = replace(mask, **place, q_begin=self.q_begin, k_begin=self.k_begin)
        found = [joint.rows(step.q_row, step.q_end) for step in (self, other)]
        # The joint mask shows no fewer keys of either step, so equal numbers of pairs are equal pairs.
        shows_both = all(x.shows(step) and x.count_pairs() == step.pairs for x, step in zip(found, (self, other)))
        return replace(joint, pairs=self.pairs + other.pairs) if shows_both else None

    def rows(self, begin: int, end: int) -> Step:
        """Returns the step with some of its queries and all of its keys."""
        return replace(self, q_row=begin, q_end=end, diagonal=self.diagonal + begin - self.q_row)

    def shows(self, other: Step) -> bool:
        """Returns whether the bounds hide no pair of a step with the same queries and first key."""
        least, greatest = self.lines
        first, last = other.k_row - (other.q_end - 1), other.k_end - 1 - other.q_row
        low, high = other.lines
        first, last = max(first, first if low is None else low), min(last, last if high is None else high)
        return (least is None or least <= first) and (greatest is None or greatest >= last)

    def count_pairs(self) -> int:
        first = np.arange(self.q_end - self.q_row) + self.diagonal
        keys = self.k_end - self.k_row
        low = np.zeros_like(first) if self.left is None else np.clip(first - self.left, 0, keys)
        high = keys if self.right is None else np.clip(first + self.right + 1, 0, keys)
        return int(np.maximum(high - low, 0).sum())

    def block_parts(self, sizes: tuple[int, int]) -> list[Step]:
        """Divides the step at the first block boundary of its queries and of its keys, if rows have no strides."""
        ends = self.q_end - self.q_row, self.k_end - self.k_row
        cuts = []
        for begin, end, size in zip((self.q_begin, self.k_begin), ends, sizes):
            first = min(end, -begin % size)
            cuts.append([(0, first), (first, end)])
        parts = []
        for (q, q_end), (k, k_end) in itertools.product(*cuts):
            rows = {"q_row": self.q_row + q, "q_end": self.q_row + q_end, "q_begin": self.q_begin + q}
            keys = {"k_row": self.k_row + k, "k_end": self.k_row + k_end, "k_begin": self.k_begin + k}
            part = replace(self, **rows, **keys, diagonal=self.diagonal + q - k)
            parts.append(replace(part, pairs=part.count_pairs()))
        return [part for part in parts if part.pairs > 0]

    def with_keys_at(self, row: int) -> Step:
        """Returns the step with its first key at another row of a buffer."""
        move = row - self.k_row
        return replace(self, k_row=row, k_end=self.k_end + move)


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
        steps.append(Step(int(s["document"]), int(s["stride"]), *rows, *begins, *bounds, *orders))
    if plan.block_lists is None:
        return steps
    return [part for step in steps for part in step.block_parts(plan.block_lists.sizes)]


class KeyRuns:
    """The rows of a peer's keys that a rank needs: ascending runs [begin, end), which follow each other in a buffer."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.runs = intervals_of((step.k_row, step.k_end) for step in steps)
        self.places = list(itertools.accumulate((end - begin for begin, end in self.runs), initial=0))
        self.rows = self.places[-1]

    def rows_of(self, x: Any) -> list[tuple[int, int, Any]]:
        """Returns the runs with their rows of x, a buffer."""
        return [(begin, end, x[n : n + end - begin]) for (begin, end), n in zip(self.runs, self.places)]

    def place(self, row: int) -> int:
        """Returns the place in the buffer of a row of the peer's shard."""
        n = np.searchsorted([begin for begin, _ in self.runs], row, side="right") - 1
        return self.places[n] + row - self.runs[n][0]


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
        count = last.k_end - last.k_row
        follows = last.document == step.document and step.k_begin - last.k_begin == count * step.stride
        if (last.left, last.right) == (step.left, step.right) and follows:
            found[-1] = replace(last, k_end=step.k_end, pairs=last.pairs + step.pairs)
        elif last.is_full and step.left is None and last.document == step.document and not by_distance:
            pairs = last.pairs + step.pairs
            right = step.right if step.right is not None else last.right
            k_begin = step.k_begin - count * step.stride
            place = {"k_row": last.k_row, "k_begin": k_begin, "diagonal": step.diagonal + count}
            found[-1] = replace(step, **place, right=right, pairs=pairs)
        else:
            found.append(step)
    return found if by_distance else _joined_queries(found)


def _joined_queries(steps: list[Step]) -> list[Step]:
    """Joins steps whose keys begin at one row and whose queries are neighbours, if one mask serves them."""
    found: list[Step] = []
    for step in sorted(steps, key=lambda s: (s.k_row, s.q_row)):
        both = found[-1].followed_by(step) if found else None
        if both is None:
            found.append(step)
        else:
            found[-1] = both
    return found


@dataclass
class Call:
    """Queries [q_begin, q_end) and keys [k_begin, k_end), in the sequences of steps and of the rows between steps."""

    steps: list[Step]
    is_packed: bool
    on_device: dict[Any, Any] = field(default_factory=dict)  # tensors by device
    # The backward: no other call has a gradient of these queries, or of these keys on any rank.
    owns_queries: bool = False
    owns_keys: bool = False

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
    def pairs(self) -> int:
        return sum(step.pairs for step in self.steps)

    @property
    def window(self) -> tuple[int | None, int | None]:
        if not self.is_packed and self.steps[0].is_full:
            return None, None
        return self.steps[0].left, self.steps[0].right

    def sequences(self) -> tuple[list[int], list[int], list[int], list[Step]]:
        """Returns cu_seqlens of queries and of keys, diagonals, and the steps at the sequences."""
        q, k, diagonals, steps = [0], [0], [], []
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
                steps.append(step)
        return q, k, diagonals, steps


def divided(steps: list[Step], pairs: float) -> tuple[list[Step], list[Step]]:
    """Divides steps into first and last ones, with other keys. The last have about this number of pairs."""
    first, last = sorted(steps, key=lambda step: (step.q_row, step.k_row)), []
    while first and pairs > 0:
        step = first.pop()
        if step.pairs <= pairs:
            last.append(step)
            pairs -= step.pairs
            continue
        cut = step.cut_keys(_key_before(step, pairs))
        if len(cut) == 2:
            first.append(cut[0])
            last.append(cut[1])
        else:
            (last if 2 * pairs > step.pairs else first).append(step)
        break
    return first, last


def _key_before(step: Step, pairs: float) -> int:
    """Returns a row of the step's keys, from which on there are about this number of pairs. The row is a multiple of a
    GPU's tile if the step has several.
    """
    tile = 128 if step.k_end - step.k_row > 256 else 1
    low, high = 0, (step.k_end - step.k_row) // tile
    while low < high:
        middle = (low + high + 1) // 2
        if step.cut_keys(step.k_row + middle * tile)[-1].pairs >= pairs:
            low = middle
        else:
            high = middle - 1
    return step.k_row + low * tile


ALONE = -1.0  # the gap of calls of one step


def calls_of(steps: list[Step], always_packed: bool, gap: float = np.inf) -> list[Call]:
    """Divides steps into few calls. A step enters the first call that it can follow.

    gap: the most rows between two steps of a call, as a part of the second step's rows.
    """
    lists: list[list[Step]] = []
    for step in sorted(steps, key=lambda s: (s.q_row, s.k_row)):
        for other in lists:
            last = other[-1]
            windows = (last.left, last.right) == (step.left, step.right)
            gaps = step.q_row - last.q_end, step.k_row - last.k_end
            limits = gap * (step.q_end - step.q_row), gap * (step.k_end - step.k_row)
            if windows and 0 <= gaps[0] <= limits[0] and 0 <= gaps[1] <= limits[1]:
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
            if all(call.q_end <= other.q_begin or other.q_end <= call.q_begin for other in part):
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
    places: list[int]  # and the rows of the buffer
    steps: list[Step]
    calls: list[Call]
    # The forward: calls whose queries have no other keys, and parts, which are merged.
    direct: list[Call]
    parts: list[list[Call]]
    # Only for the own keys: calls of the backward that precede and follow the calls with other keys.
    first: list[Call] = field(default_factory=list)
    last: list[Call] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.places[-1]


def _batch(plan: ContextPlan, rank: int, peers: list[int], by_distance: bool, gap: float) -> Batch:
    places, steps = [0], []
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
        places.append(first + keys.rows)
    if plan.block_lists is None:
        steps = joined(steps, by_distance)
    calls = calls_of(steps, False, gap)
    return Batch(peers, places, steps, calls, [], parts_of(calls))


# The time of a key's transfer, as the pairs that a GPU computes meanwhile in the backward, and a half more. The numbers
# hold for equal numbers of query and key heads, 400 TFLOP/s and 270 GB/s. A returned key has two float32 gradients.
_PAIRS_OF_KEY, _PAIRS_OF_GRADIENT = 960, 1920


class Schedule:
    """A rank's batches, in the order in which they are computed. The first has the rank's own keys.

    group: the number of query heads of a key head. is_dense: each call has one step, because packed calls refuse a
    bias and block lists.
    """

    def __init__(
        self, plan: ContextPlan, rank: int, rounds_at_once: int, by_distance: bool, group: int, is_dense: bool = False
    ) -> None:
        ranks = plan.ranks
        self.gap = ALONE if is_dense else np.inf
        rounds = [[0]] + [
            list(range(first, min(first + rounds_at_once, ranks))) for first in range(1, ranks, rounds_at_once)
        ]
        self.plan, self.rank = plan, rank
        self.q_rows, self.k_rows = plan.rows(rank)
        self.batches = [
            _batch(plan, rank, [(rank - n) % ranks for n in batch], by_distance, self.gap) for batch in rounds
        ]
        # The readers of the rank's keys in each batch, with the rows that they need.
        self.readers = [
            [((rank + n) % ranks, KeyRuns(steps_of(plan, (rank + n) % ranks, rank))) for n in batch if n > 0]
            for batch in rounds
        ]
        self._divide_forward()
        if ranks > 1 or len(self.batches[0].calls) > 1:
            self._divide_backward(group)

    def _divide_forward(self) -> None:
        """Finds the own calls whose results are complete. Own steps are cut for that if few queries have other keys."""
        own = self.batches[0]
        others = intervals_of((step.q_row, step.q_end) for batch in self.batches[1:] for step in batch.steps)
        steps = own.steps
        may_cut = self.plan.block_lists is None
        if may_cut and 4 * sum(end - begin for begin, end in others) <= self.q_rows:
            for row in (row for interval in others for row in interval):
                steps = [part for step in steps for part in step.cut(row)]
        begins = [begin for begin, _ in others]
        shared, alone = [], []
        for step in steps:
            n = int(np.searchsorted(begins, step.q_end))  # intervals that begin before the step's end
            (shared if n > 0 and others[n - 1][1] > step.q_row else alone).append(step)
        direct = parts_of(calls_of(alone, False, self.gap))
        if len(direct) == 1:
            own.direct, own.parts = direct[0], parts_of(calls_of(shared, False, self.gap))

    def _divide_backward(self, group: int) -> None:
        """The first calls compute while keys arrive, and the last ones while gradients return."""
        own = self.batches[0]
        read = intervals_of(run for readers in self.readers for _, runs in readers for run in runs.runs)
        others = [call for batch in self.batches[1:] for call in batch.calls]
        arriving = sum(batch.rows for batch in self.batches[1:]) * _PAIRS_OF_KEY / group
        returning = sum(runs.rows for readers in self.readers for _, runs in readers)
        returning = max(returning, sum(batch.rows for batch in self.batches[1:])) * _PAIRS_OF_GRADIENT / group
        part = 0.0
        if returning > 0 and self.plan.block_lists is None:
            part = min(returning, sum(step.pairs for step in own.steps) * returning / (arriving + returning))
        own.first, own.last = (self._own_calls(steps, read, others) for steps in divided(own.steps, part))
        calls = [*own.first, *own.last]
        for call in calls:
            rest = [other for other in calls if other is not call]
            queries = [(other.q_begin, other.q_end) for other in [*rest, *others]]
            keys = [(other.k_begin, other.k_end) for other in rest]
            call.owns_queries = not overlap(queries, call.q_begin, call.q_end)
            call.owns_keys = not overlap([*keys, *read], call.k_begin, call.k_end)

    def _own_calls(self, steps: list[Step], read: list[tuple[int, int]], others: list[Call]) -> list[Call]:
        """Returns calls of own steps. Many steps that share no queries and keys with other ranks have their own calls,
        so that their gradients need no sum.
        """
        queries = [(call.q_begin, call.q_end) for call in others]
        shared, alone = [], []
        for step in steps:
            is_shared = overlap(queries, step.q_row, step.q_end) or overlap(read, step.k_row, step.k_end)
            (shared if is_shared else alone).append(step)
        if 4 * sum(step.q_end - step.q_row for step in alone) < self.q_rows:
            return calls_of(steps, False, self.gap)
        return calls_of(alone, False, self.gap) + calls_of(shared, False, self.gap)


def overlap(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> bool:
    return any(first < end and begin < last for first, last in intervals)


def intervals_of(rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the union of intervals as disjoint ascending intervals."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(rows):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
