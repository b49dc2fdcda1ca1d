"""The messages of the execution by heads: rows of the ranks in a packed batch, and tensors that travel together."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem._context_copies import Pass, is_direct
from tandem._context_execution import Execution
from tandem._context_plan import ContextPlan

# Rows of a rank [begin, end), and a tensor with these rows.
Piece = tuple[int, int, Tensor]


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

    def put(self, rank: int, x: Tensor, batch: Tensor) -> None:
        """Copies the rows of a rank to the packed batch."""
        if self.indices:
            batch.index_copy_(0, self.indices[rank], x)
            return
        for begin, end, place in self.runs[rank]:
            copy_wide(x[begin:end], batch[place : place + end - begin])

    def take(self, rank: int, batch: Tensor) -> list[Piece]:
        """Returns the rows of a rank in the packed batch."""
        if self.indices:
            return [(0, self.counts[rank], batch.index_select(0, self.indices[rank]))]
        return [(begin, end, batch[place : place + end - begin]) for begin, end, place in self.runs[rank]]


def copy_wide(x: Tensor, to: Tensor) -> None:
    """Copies x, by elements of 16 bytes if the tensors permit it: torch copies strided elements one by one."""
    if x.dtype == to.dtype and _is_wide(x) and _is_wide(to):
        x, to = x.view(torch.complex128), to.view(torch.complex128)
    to.copy_(x)


_WIDE = 16  # bytes


def _is_wide(x: Tensor) -> bool:
    numbers = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
    aligned = all(n * x.element_size() % _WIDE == 0 for n in numbers) and x.data_ptr() % _WIDE == 0
    return aligned and x.stride(-1) == 1


def places_of(shapes: list[tuple[int, ...]], sizes: list[int]) -> list[int]:
    """Returns the places of tensors in a message, and its bytes. sizes: of the tensors' elements."""
    places = [0]
    for shape, size in zip(shapes, sizes):
        places.append(places[-1] + -(-math.prod(shape) * size // _WIDE) * _WIDE)
    return places


class Parcel:
    """Tensors that travel between two ranks as one message, because each message costs the host's time."""

    def __init__(self, shapes: list[tuple[int, ...]], like: list[Tensor], memory: Tensor | None = None) -> None:
        places = places_of(shapes, [x.element_size() for x in like])
        if memory is None:
            memory = torch.empty(places[-1], dtype=torch.uint8, device=like[0].device)
        self.bytes = memory
        self.tensors = [
            self.bytes[place : place + math.prod(shape) * x.element_size()].view(x.dtype).view(shape)
            for place, shape, x in zip(places, shapes, like)
        ]


class Route(NamedTuple):
    """The messages to and from a peer: of each tensor the shape, and to the peer also its rows."""

    peer: int
    sent: list[list[Piece]]
    sent_shapes: list[tuple[int, ...]]
    shapes: list[tuple[int, ...]]


class Transfer:
    """Messages on their way. copies: of the pass; None: the group sends the messages. like: a tensor of each type."""

    def __init__(
        self, execution: Execution, copies: Pass | None, number: int, routes: list[Route], like: list[Tensor]
    ) -> None:
        if copies is not None:
            self._copy(copies, number, routes, like)
            return
        sends = []
        for route in routes:
            parcel = Parcel(route.sent_shapes, like)
            for to, pieces in zip(parcel.tensors, route.sent):
                for begin, end, x in pieces:
                    copy_wide(x, to[begin:end])
            sends.append((route.peer, parcel.bytes))
        self.arriving = [(route.peer, Parcel(route.shapes, like)) for route in routes]
        receives = [(peer, parcel.bytes) for peer, parcel in self.arriving]
        self._wait = execution.messages(sends, receives).wait

    def _copy(self, copies: Pass, number: int, routes: list[Route], like: list[Tensor]) -> None:
        sends, sizes = [], [x.element_size() for x in like]
        for route in routes:
            places, found = places_of(route.sent_shapes, sizes), []
            for place, shape, size, pieces in zip(places, route.sent_shapes, sizes, route.sent):
                row = math.prod(shape[1:]) * size
                found += [(place + begin * row, x if is_direct(x) else _packed(x)) for begin, _, x in pieces]
            sends.append((route.peer, places[-1], found))
        copies.send(number, sends)
        self.arriving = [
            (route.peer, Parcel(route.shapes, like, copies.region(number, route.peer))) for route in routes
        ]
        self._wait = functools.partial(copies.wait, number)

    def wait(self) -> list[tuple[int, list[Tensor]]]:
        """Returns the tensors of each peer."""
        self._wait()
        return [(peer, parcel.tensors) for peer, parcel in self.arriving]


def _packed(x: Tensor) -> Tensor:
    to = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy_wide(x, to)
    return to
