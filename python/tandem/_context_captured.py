"""Gradients of the tensors that a score_mod reads, in the executions of a ContextPlan on torch tensors.

All ranks receive the same float32 sums. The sums have the order of src/context_parallel/captured.h.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem import _binding, _score_mod
from tandem._context_chunks import Chunk, TreeSum, chunk_rows, nodes_left
from tandem._context_plan import ContextPlan

if TYPE_CHECKING:
    from tandem._context_calls import Call
    from tandem._context_execution import Execution

# The dimensions of heads in call_args, from the end.
_OF_QUERIES = {"q": -2, "out": -2, "dout": -2, "dq": -2, "lse": -2, "dlse": -2, "alibi_slopes": -1}
_OF_QUERIES.update({"bias": -3, "dbias": -3})
_OF_KEYS = {"k": -2, "v": -2, "dk": -2, "dv": -2}
_FIRST_HEAD = 7  # the member of the struct tandem_place


class Captured:
    """The sums of one backward. A vector of cells has all gradients.

    mod: the score_mod. wanted: whether each of its tensors has a gradient. by_heads: a rank has some of the heads.
    """

    def __init__(self, plan: ContextPlan, mod: _score_mod.Bound, wanted: Sequence[bool], by_heads: bool) -> None:
        self.plan, self.mod, self.by_heads = plan, mod, by_heads
        self.tensors: list[Tensor] = _score_mod.tensors_of(mod)
        self.wanted = list(wanted)
        sizes = [x.numel() if w else 0 for x, w in zip(self.tensors, self.wanted)]
        self.places = list(itertools.accumulate(sizes, initial=0))
        self.cells = self.places[-1]
        self.sum: Tensor | None = None  # without chunks
        self.trees: dict[Chunk, TreeSum] = {}  # with chunks: over the steps of a query chunk
        self.chunks = TreeSum(())  # and over the query chunks of all documents
        chunks = (-(-n // plan.chunk) if plan.chunk > 0 else 0 for n in plan.lengths().tolist())
        self.first_chunks = list(itertools.accumulate(chunks, initial=0))  # each document's

    def _views(self, cells: Tensor) -> list[Tensor | None]:
        parts = zip(self.tensors, self.wanted, self.places, self.places[1:])
        return [cells[begin:end].view(x.shape) if w else None for x, w, begin, end in parts]

    def _zeros(self, *shape: int) -> Tensor:
        device = next(x.device for x, w in zip(self.tensors, self.wanted) if w)
        return torch.zeros(*shape, self.cells, device=device)

    def begin(self, execution: Execution, heads_k: int) -> None:
        """Begins the backward of an execution, which has the queries of a rank and these key heads."""
        if self.plan.chunk == 0:
            self.sum = self._zeros() if self.sum is None else self.sum
            return
        self.chunks = self._tree()
        orders = execution.chunk_schedule().orders
        self.trees = {chunk: TreeSum(found) for chunk, found in orders.items()}
        for chunk, _, _ in chunk_rows(execution.plan, execution.rank, keys=False):
            if chunk not in orders:
                self._add_chunk(chunk, self._zeros(heads_k))

    def call(self, call: Call, args: dict[str, Any]) -> None:
        """Computes the backward of a call, and adds its gradients."""
        if self.sum is not None:
            cells = self._zeros()
            self._compute(args, cells)
            self.sum += cells
            return
        (step,) = call.steps
        heads_k = args["k"].shape[-2]
        group = args["q"].shape[-2] // heads_k
        cells = self._zeros(heads_k)
        for head in range(heads_k):
            self._compute(_heads_of(args, slice(head * group, (head + 1) * group), slice(head, head + 1)), cells[head])
        chunk = step.document, step.q_order
        tree = self.trees[chunk]
        tree.add(0, step.k_order, cells, torch.add)
        if tree.is_complete:
            self._add_chunk(chunk, tree.values()[0])
            del self.trees[chunk]

    def _compute(self, args: dict[str, Any], cells: Tensor) -> None:
        mod = _score_mod.replaced(self.mod, self.tensors, self._views(cells))
        _binding.call(_binding.BACKWARD, {**args, "score_mod": mod})

    def _tree(self) -> TreeSum:
        return TreeSum(range(self.first_chunks[-1]))

    def _number(self, chunk: Chunk) -> int:
        return self.first_chunks[chunk[0]] + chunk[1]

    def _add_chunk(self, chunk: Chunk, cells: Tensor) -> None:
        self.chunks.add(0, self._number(chunk), cells, torch.add)

    def finish(self, execution: Execution, heads_k: list[int]) -> list[Tensor | None]:
        """Returns the gradients, summed over all ranks. heads_k: the key heads of each rank."""
        rank, ranks = execution.rank, self.plan.ranks
        bounds = [self.cells * n // ranks for n in range(ranks + 1)]
        widths = [end - begin for begin, end in zip(bounds, bounds[1:])]
        if self.plan.chunk == 0:
            own, heads_k = (self._zeros() if self.sum is None else self.sum)[None], [1] * ranks
        else:
            own = torch.cat([*self.chunks.values(), self._zeros(0)])
        nodes = [self._nodes(peer) for peer in range(ranks)]
        parts = [own.new_empty(len(nodes[peer]) * heads_k[peer], widths[rank]) for peer in range(ranks)]
        parts = _exchanged(execution, [x.contiguous() for x in own.split(widths, dim=1)], parts)
        total = self._sum(nodes, parts, heads_k)
        sums = _exchanged(execution, [total] * ranks, [own.new_empty(width) for width in widths])
        return [None if x is None else x.to(y.dtype) for x, y in zip(self._views(torch.cat(sums)), self.tensors)]

    def _nodes(self, rank: int) -> list[tuple[int, int]]:
        """Returns the nodes of the tree over the query chunks that a rank sends: one without chunks or by heads."""
        if self.plan.chunk == 0 or self.by_heads:
            return [(0, 0)] if self.plan.chunk == 0 or self.first_chunks[-1] > 0 else []
        own = [self._number(chunk) for chunk, _, _ in chunk_rows(self.plan, rank, keys=False)]
        return nodes_left(range(self.first_chunks[-1]), own)

    def _sum(self, nodes: list[list[tuple[int, int]]], parts: list[Tensor], heads_k: list[int]) -> Tensor:
        """Sums this rank's cells in the order of the ranks, or of the key heads."""
        vectors = [x for part in parts for x in part]
        if self.plan.chunk > 0 and not self.by_heads and vectors:
            tree = self._tree()
            for places, part, heads in zip(nodes, parts, heads_k):
                for (level, index), value in zip(places, part.split(heads)):
                    tree.add(level, index, value, torch.add)
            vectors = list(tree.values()[0])
        return in_order(vectors, parts[0].new_zeros(parts[0].shape[1]))


def in_order(parts: Iterable[Tensor], total: Tensor) -> Tensor:
    """Adds the parts to the total, one after the other."""
    for part in parts:
        total += part
    return total


def _heads_of(args: dict[str, Any], q: slice, k: slice) -> dict[str, Any]:
    """Returns the arguments of a call with some of its heads."""
    found = dict(args)
    for heads, dims in ((q, _OF_QUERIES), (k, _OF_KEYS)):
        for name, dim in dims.items():
            x = args.get(name)
            if x is not None and (x.shape[dim] > 1 or dim > -3):
                found[name] = x.narrow(dim, heads.start, heads.stop - heads.start)
    if found.get("alibi_slopes") is not None:
        found["alibi_slopes"] = found["alibi_slopes"].contiguous()
    found["places"] = args["places"].clone()
    found["places"][:, _FIRST_HEAD] += q.start
    return found


def _exchanged(execution: Execution, sent: list[Tensor], received: list[Tensor]) -> list[Tensor]:
    """Sends one tensor to each rank, and fills in and returns the tensors from each rank."""
    received[execution.rank] = sent[execution.rank]
    peers = [peer for peer in range(execution.plan.ranks) if peer != execution.rank]
    sends, receives = ([(peer, x[peer]) for peer in peers] for x in (sent, received))
    execution.messages(sends, receives).wait()
    return received
