"""The messages of the execution by heads: rows of the ranks in a packed batch, and tensors that travel together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem._context_copies import Pass, Strip, strip_of
from tandem._context_execution import Execution
from tandem._context_plan import ContextPlan


class Wire(NamedTuple):
    """A tensor of messages: its kind, its type, and the dimensions after rows and heads."""

    kind: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        """The bytes of a row of one head."""
        return math.prod(self.shape) * self.dtype.itemsize


class Rows:
    """The places of the ranks' queries, or of their keys, in the packed batch."""

    # With more runs a rank, on average, rows are copied by index.
    _MOST_RUNS = 8

    def __init__(self, plan: ContextPlan, keys: bool, device: torch.device) -> None:
        indices = [plan.indices(rank, keys) for rank in range(plan.ranks)]
        self.counts = [len(x) for x in indices]
        self.total = sum(self.counts)
        self.runs: list[list[tuple[int, int, int]]] = []  # each rank's rows [begin, end), and the first's place
        self.indices: list[Tensor] = []
        cuts = [np.flatnonzero(np.diff(x) != 1) + 1 for x in indices]
        if sum(map(len, cuts)) > self._MOST_RUNS * plan.ranks:
            self.indices = [torch.from_numpy(x).to(device) for x in indices]
            return
        for x, cut in zip(indices, cuts):
            begins = [0, *cut.tolist()] if len(x) > 0 else []
            self.runs.append([(b, e, int(x[b])) for b, e in zip(begins, [*begins[1:], len(x)])])

    def put(self, rank: int, x: Tensor, batch: Tensor, copies: Copied) -> None:
        """Copies the rows of a rank to the packed batch."""
        if self.indices:
            batch.index_copy_(0, self.indices[rank], x)
            return
        x, batch = wide(x, batch)
        runs = self.runs[rank]
        if len(runs) == 1:
            ((_, count, place),) = runs
            copies.add(batch[place : place + count], x)
            return
        for begin, end, place in runs:
            copies.add(batch[place : place + end - begin], x[begin:end])

    def take(self, rank: int, batch: Tensor) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """Returns rows of a rank: a tensor, and which of the rank's rows [begin, end) lie from where in the tensor."""
        if self.indices:
            return batch.index_select(0, self.indices[rank]), [(0, self.counts[rank], 0)]
        return batch, self.runs[rank]


class Copied:
    """Copies of tensors that torch issues by one call."""

    def __init__(self) -> None:
        self._to: list[Tensor] = []
        self._from: list[Tensor] = []

    def add(self, to: Tensor, x: Tensor) -> None:
        if x.shape[0] > 0:
            self._to.append(to)
            self._from.append(x)

    def issue(self) -> None:
        if self._to:
            torch._foreach_copy_(self._to, self._from)


_WIDE = 16  # bytes


def wide(x: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both with elements of 16 bytes if the tensors permit it: torch copies strided elements one by one."""
    if x.dtype == to.dtype and _is_wide(x) and _is_wide(to):
        return x.view(torch.complex128), to.view(torch.complex128)
    return x, to


def _is_wide(x: Tensor) -> bool:
    *strides, last = x.stride()
    numbers = x.shape[-1] | x.storage_offset()
    for stride in strides:
        numbers |= stride
    return last == 1 and (numbers * x.element_size() | x.data_ptr()) % _WIDE == 0


class Parcel:
    """The tensors that travel from one rank to another as one message, because each message costs the host's time.

    rows: of each tensor. heads: of each tensor. places: of the tensors among the bytes.
    """

    def __init__(self, rows: list[int], heads: list[slice], wires: Sequence[Wire]) -> None:
        self.heads, self.places = heads, [0]
        counts = [h.stop - h.start for h in heads]
        self.row_bytes = [n * wire.bytes for n, wire in zip(counts, wires)]
        for row, size in zip(rows, self.row_bytes):
            self.places.append(self.places[-1] + -(-row * size // _WIDE) * _WIDE)
        self.bytes = self.places[-1]
        self._views = [
            (place, place + n * size, wire.dtype, (n, count, *wire.shape))
            for place, n, size, count, wire in zip(self.places, rows, self.row_bytes, counts, wires)
        ]

    def views(self, memory: Tensor) -> list[Tensor]:
        return [memory[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in self._views]


class Route(NamedTuple):
    """The messages to and from a peer."""

    peer: int
    sent: Parcel
    received: Parcel


# Rows of a rank for a peer, see Rows.take(), and the heads of the tensor that travel.
Load = tuple[Tensor, list[tuple[int, int, int]], slice]


class Transfer:
    """Messages on their way. copies: of the pass; None: the group sends the messages. loads: of each route."""

    def __init__(
        self, execution: Execution, copies: Pass | None, number: int, routes: list[Route], loads: list[list[Load]]
    ) -> None:
        self._number, self._copies = number, copies
        if copies is not None:
            self._copy(copies, routes, loads)
            return
        memories = [
            [torch.empty(parcel.bytes, dtype=torch.uint8, device=loads[0][0][0].device) for parcel in (sent, received)]
            for _, sent, received in routes
        ]
        copied = Copied()
        for (_, sent, _), (memory, _), load in zip(routes, memories, loads):
            for to, (x, runs, heads) in zip(sent.views(memory), load):
                from_x, to = wide(x[:, heads], to)
                for begin, end, place in runs:
                    copied.add(to[begin:end], from_x[place : place + end - begin])
        copied.issue()
        sends, receives = ([(route.peer, pair[n]) for route, pair in zip(routes, memories)] for n in (0, 1))
        self._arriving = [(route.peer, route.received.views(pair[1])) for route, pair in zip(routes, memories)]
        self._wait: Callable[[], None] = execution.messages(sends, receives).wait

    def _copy(self, copies: Pass, routes: list[Route], loads: list[list[Load]]) -> None:
        sends, alive = [], []
        for (peer, sent, _), load in zip(routes, loads):
            found = []
            for place, size, (x, runs, heads) in zip(sent.places, sent.row_bytes, load):
                strip = strip_of(x, heads)
                if strip is None:
                    x = x[:, heads].contiguous()
                    strip = Strip(x.data_ptr(), size, size, x.shape[0])
                alive.append(x)
                address, pitch, width, _ = strip
                for begin, end, row in runs:
                    found.append((place + begin * size, Strip(address + row * pitch, pitch, width, end - begin)))
            sends.append((peer, sent.bytes, found))
        copies.send(self._number, sends, alive)
        self._arriving = [
            (route.peer, copies.arriving(self._number, route.peer, route.received.views)) for route in routes
        ]

    def wait(self) -> list[tuple[int, list[Tensor]]]:
        """Returns the tensors of each peer."""
        if self._copies is None:
            self._wait()
        else:
            self._copies.wait(self._number)
        return self._arriving
