"""The predicted times of the executions of a ContextPlan, and the choice of the fastest.

The model has no exchange for a rank's own keys, and full overlap of messages with attention in gather and ring. The
execution by heads overlaps nothing. Only the forward is modelled: the backward moves and computes in like proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem._context_plan import ContextPlan


@dataclass(frozen=True)
class Link:
    """Latency in seconds, and bytes per second that a rank receives from all peers at once and from one peer. The
    defaults are measured on two H200 over NVLink, with messages of 32 MB and 256 MB.
    """

    latency: float = 35e-6
    gather: float = 250e9
    ring: float = 300e9


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
        return 2 * pairs * heads * (self.head_dim + self.head_dim_v) / self.rate

    def key_bytes(self, rows: float) -> float:
        return rows * self.heads_k * (self.head_dim + self.head_dim_v) * self.element

    def query_bytes(self, rows: float) -> float:
        """Bytes of q and of out."""
        return rows * self.heads_q * (self.head_dim + self.head_dim_v) * self.element


def predicted(plan: ContextPlan, shapes: Shapes, link: Link | None = None) -> dict[str, float]:
    """Returns the predicted seconds of the forward by execution. Equal on all ranks."""
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
        received = sum(moved)
        arrival = link.latency + received / link.gather if received > 0 else 0.0
        gather.append(max(work[0], arrival) + sum(work[1:]))
        arrivals = [link.latency + x / link.ring if x > 0 else 0.0 for x in moved[1:]]
        ring.append(sum(max(x, y) for x, y in zip(work, [*arrivals, 0.0])))
    rows = max(plan.rows(rank) for rank in ranks)
    away = (plan.ranks - 1) / plan.ranks
    # Ranks that share key heads each receive a copy.
    copies = max(1.0, plan.ranks / shapes.heads_k)
    moved_bytes = away * (shapes.query_bytes(rows[0]) + copies * shapes.key_bytes(rows[1]))
    own_heads = -(-shapes.heads_q // plan.ranks)
    if plan.chunk > 0:
        own_heads = -(-shapes.heads_k // plan.ranks) * (shapes.heads_q // shapes.heads_k)
    messages = 2 * link.latency + moved_bytes / link.gather if plan.ranks > 1 else 0.0
    return {"gather": max(gather), "ring": max(ring), "heads": shapes.seconds(pairs, own_heads) + messages}


def _rows(steps: object) -> int:
    """Returns the number of key rows that the steps need, each once."""
    rows = end = 0
    for first, count in sorted(zip(steps["k_row"].tolist(), steps["k_count"].tolist())):  # type: ignore[index]
        rows += max(0, first + count - max(first, end))
        end = max(end, first + count)
    return rows


def chosen(plan: ContextPlan, shapes: Shapes) -> str:
    """Returns the fastest execution; gather if others are not faster by a hundredth."""
    key = "chosen", shapes
    found = plan.kept.get(key)
    if found is None:
        times = predicted(plan, shapes)
        best = min(times, key=lambda name: times[name])
        found = plan.kept[key] = best if times[best] < 0.99 * times["gather"] else "gather"
    return found
