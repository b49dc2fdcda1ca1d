"""The predicted times of the executions of a ContextPlan, and the choice of the fastest.

The model has both passes. In gather and ring, messages overlap with attention, and parts of rows are merged and summed.
By heads, NCCL's messages overlap nothing, and copies all but the first and the last group of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem._context_copies import parts_of
from tandem._context_plan import ContextPlan

_PASSES = 3.5  # times the operations of the forward


@dataclass(frozen=True)
class Link:
    """The latency in seconds, and rates in bytes per second, measured on two H200.

    gather, ring: NCCL's messages from all peers at once, and from one. copies: all copies to one rank. merges: received
    keys, whose results gather and ring merge and sum.
    """

    latency: float = 35e-6
    gather: float = 250e9
    ring: float = 300e9
    copies: float = 360e9
    merges: float = 100e9


@dataclass(frozen=True)
class Shapes:
    """The heads and head dims of a call, the bytes of an element, and the operations that a rank computes a second."""

    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    element: int = 2
    rate: float = 600e12

    def seconds(self, pairs: float, heads: float) -> float:
        return _PASSES * 2 * pairs * heads * (self.head_dim + self.head_dim_v) / self.rate

    def key_bytes(self, rows: float) -> float:
        return rows * self.heads_k * (self.head_dim + self.head_dim_v) * self.element

    def query_bytes(self, rows: float) -> float:
        """Bytes of q and of out."""
        return rows * self.heads_q * (self.head_dim + self.head_dim_v) * self.element


def predicted(
    plan: ContextPlan, shapes: Shapes, link: Link | None = None, has_copies: bool = False
) -> dict[str, float]:
    """Returns the predicted seconds of both passes by execution. Equal on all ranks."""
    link = link or Link()
    ranks = range(plan.ranks)
    gather, ring, pairs = [0.0], [0.0], 0
    for rank in ranks:
        work, moved = [], []  # by round
        for n in ranks:
            steps = plan.steps(rank, (rank - n) % plan.ranks)
            pairs += int(steps["pairs"].sum())
            work.append(shapes.seconds(float(steps["pairs"].sum()), shapes.heads_q))
            moved.append(shapes.key_bytes(_rows(steps)) if n > 0 else 0.0)
        merges = sum(moved) / link.merges if plan.chunk == 0 else 0.0  # chunks are merged in all executions
        gather.append(max(work[0], _arrival(sum(moved), link.latency, link.gather)) + sum(work[1:]) + merges)
        arrivals = [_arrival(x, link.latency, link.ring) for x in moved[1:]]
        ring.append(sum(max(x, y) for x, y in zip(work, [*arrivals, 0.0])) + merges)
    own_heads = -(-shapes.heads_q // plan.ranks)
    if plan.chunk > 0:
        own_heads = -(-shapes.heads_k // plan.ranks) * (shapes.heads_q // shapes.heads_k)
    heads = shapes.seconds(pairs, own_heads)
    if plan.ranks > 1:
        heads += _head_messages(plan, shapes, link, heads if has_copies else None)
    return {"gather": max(gather), "ring": max(ring), "heads": heads}


def _arrival(count: float, latency: float, rate: float) -> float:
    """The keys arrive in both passes, and the backward returns their gradients."""
    return 3 * (latency + count / rate) if count > 0 else 0.0


def _head_messages(plan: ContextPlan, shapes: Shapes, link: Link, copied: float | None) -> float:
    """Returns the seconds of messages that the execution by heads does not overlap: to heads and to tokens, twice.
    copied: seconds of attention of a rank with copies.
    """
    rows = max(plan.rows(rank) for rank in range(plan.ranks))
    # Ranks that share key heads each receive a copy.
    shared = max(1.0, plan.ranks / shapes.heads_k)
    count = (plan.ranks - 1) / plan.ranks * (shapes.query_bytes(rows[0]) + shared * shapes.key_bytes(rows[1]))
    rate = link.gather
    if copied is not None:
        queries = rows[0] * shapes.heads_q // plan.ranks * shapes.head_dim * shapes.element
        parts, rate = parts_of(queries, copied, shapes.heads_k // plan.ranks), link.copies
        count *= parts[0] / sum(parts)
    return 2 * (2 * link.latency + count / rate)


def _rows(steps: object) -> int:
    """Returns the number of key rows that the steps need, each once."""
    rows = end = 0
    for first, count in sorted(zip(steps["k_row"].tolist(), steps["k_count"].tolist())):  # type: ignore[index]
        rows += max(0, first + count - max(first, end))
        end = max(end, first + count)
    return rows


def chosen(plan: ContextPlan, shapes: Shapes, has_copies: bool = False) -> str:
    """Returns the fastest execution; gather if others are not faster by a hundredth."""
    key = "chosen", shapes, has_copies
    found = plan.kept.get(key)
    if found is None:
        times = predicted(plan, shapes, has_copies=has_copies)
        best = min(times, key=lambda name: times[name])
        found = plan.kept[key] = best if times[best] < 0.99 * times["gather"] else "gather"
    return found
