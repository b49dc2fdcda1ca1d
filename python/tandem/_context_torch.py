"""Executions of a ContextPlan without chunks on torch tensors: on GPUs with the group's NCCL.

The host issues calls of attention, merges, sums and messages, and waits for none of them. torch runs messages on a
stream of the group, and events order the two streams, so that messages and attention overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem import _binding, _context_chunks_torch
from tandem._context_calls import Batch, Call, KeyRuns, Schedule, intervals_of, overlap, uncovered
from tandem._context_execution import Execution, Part, attend_backward, concatenated, merge, write
from tandem._context_transport import Messages

# More parts of a row are merged as they are computed.
_MAX_PARTS = 4


class _Keys:
    """Keys and values of each batch. The next batch is in flight while the present one is computed."""

    def __init__(self, execution: Execution, schedule: Schedule, k: Tensor, v: Tensor) -> None:
        self.execution, self.own = execution, (k, v)
        self.schedule = schedule
        self.next: tuple[Messages, tuple[Tensor, Tensor]] | None = None

    def _start(self, n: int) -> None:
        self.next = None
        if n >= len(self.schedule.batches):
            return
        batch = self.schedule.batches[n]
        buffers = tuple(x.new_empty((batch.rows, *x.shape[1:])) for x in self.own)
        sends, receives = [], []
        for reader, runs in self.schedule.readers[n]:
            sends += [(reader, concatenated(x, runs.runs)) for x in self.own]
        for index, peer in enumerate(batch.peers):
            receives += [(peer, x[batch.places[index] : batch.places[index + 1]]) for x in buffers]
        self.next = self.execution.messages(sends, receives), buffers

    def __iter__(self) -> Iterator[tuple[int, Batch, Tensor, Tensor]]:
        for n, batch in enumerate(self.schedule.batches):
            buffers = self.own
            if self.next is not None:
                messages, buffers = self.next
                messages.wait()
            self._start(n + 1)
            self.execution.busy = self.next is not None
            yield n, batch, *buffers
        self.execution.busy = False


# ---- Forward ---------------------------------------------------------------------------------------------------------

_Layer = list[tuple[int, int, Part]]  # rows [begin, end) and their part; the rows are disjoint


class _Forward:
    def __init__(self, execution: Execution, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.execution, self.q, self.k, self.v = execution, q, k, v
        self.rows, self.heads, self.dim = q.shape[0], q.shape[1], v.shape[-1]
        self.layers: list[_Layer] = []

    def _attend(self, call: Call, k: Tensor, v: Tensor, result: Part) -> None:
        keys = slice(call.k_begin, call.k_end)
        tensors = {"q": self.q[call.q_begin : call.q_end], "k": k[keys], "v": v[keys]}
        self.execution.attend(_binding.FORWARD, call, {**tensors, "out": result.out, "lse": result.lse})

    def _layer(self, calls: list[Call], k: Tensor, v: Tensor) -> _Layer:
        layer = []
        for call in calls:
            part = Part.empty(call.q_end - call.q_begin, self.heads, self.dim, torch.float32, self.q.device)
            self._attend(call, k, v, part)
            layer.append((call.q_begin, call.q_end, part))
        return layer

    def run(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        result = Part.empty(self.rows, self.heads, self.dim, self.q.dtype, self.q.device)
        schedule = self.execution.schedule(self.q, self.k)
        done: list[tuple[int, int]] = []
        for _, batch, k, v in _Keys(self.execution, schedule, self.k, self.v):
            if sink is None:
                for call in batch.direct:
                    self._attend(call, k, v, result.rows(call.q_begin, call.q_end))
                    done += [(step.q_row, step.q_end) for step in call.steps]
                parts = batch.parts
            else:
                parts = [batch.direct, *batch.parts] if batch.direct else batch.parts
            for calls in parts:
                self._add(self._layer(calls, k, v))
        for begin, end in uncovered(self.rows, done):
            for first, last, found in _pieces(self.layers, begin, end):
                write(found, sink, result.rows(first, last))
        return result.out, result.lse

    def _add(self, layer: _Layer) -> None:
        self.layers.append(layer)
        if len(self.layers) < _MAX_PARTS:
            return
        pieces = [(begin, end, parts) for begin, end, parts in _pieces(self.layers, 0, self.rows) if parts]
        for _, _, parts in pieces:
            if len(parts) > 1:
                merge(parts, parts[0])
        self.layers = [[(begin, end, parts[0]) for begin, end, parts in pieces]]


def _pieces(layers: list[_Layer], begin: int, end: int) -> list[tuple[int, int, list[Part]]]:
    """Divides rows [begin, end) at the bounds of parts. Returns the parts of each piece, in the order of the layers."""
    bounds = {begin, end}
    for first, last, _ in (entry for layer in layers for entry in layer):
        bounds.update(row for row in (first, last) if begin < row < end)
    rows = sorted(bounds)
    pieces = []
    for first, last in zip(rows, rows[1:]):
        entries = [(row, part) for layer in layers for row, stop, part in layer if row <= first and last <= stop]
        pieces.append((first, last, [part.rows(first - row, last - row) for row, part in entries]))
    return pieces


# ---- Backward --------------------------------------------------------------------------------------------------------


class _Sum:
    """float32 rows [begin, end) that calls write. A row's first call overwrites it, and further calls add to it."""

    def __init__(self, like: Tensor, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.x = torch.empty((max(0, end - begin), *like.shape[1:]), dtype=torch.float32, device=like.device)
        self.written: list[tuple[int, int]] = []

    def rows(self, begin: int, end: int) -> Tensor:
        return self.x[begin - self.begin : end - self.begin]

    def is_new(self, begin: int, end: int) -> bool:
        return not overlap(self.written, begin, end)

    def clear_rest(self, begin: int, end: int) -> None:
        """Sets the rows that no call has written to 0."""
        done = [(max(a, begin) - begin, min(b, end) - begin) for a, b in self.written if a < end and begin < b]
        for gap in uncovered(end - begin, done):
            self.rows(begin + gap[0], begin + gap[1]).zero_()

    def total(self) -> Tensor:
        self.clear_rest(self.begin, self.end)
        return self.x


class _Gradient:
    """A gradient of the rank's rows. Calls write rows that need no sum, and a sum has the parts of the other rows."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.x, self.sum = torch.empty(like.shape, dtype=dtype, device=like.device), _Sum(like, 0, like.shape[0])
        self.done: list[tuple[int, int]] = []

    def finish(self, entries: list[tuple[int, int, Tensor]]) -> Tensor:
        """Adds parts of rows to the sum, in this order. The last addition of a row also rounds it."""
        for gap in uncovered(self.x.shape[0], self.done):
            self.sum.clear_rest(*gap)
        result, total = self.x, self.sum.x
        for n, (begin, end, part) in enumerate(entries):
            rest = entries[n + 1 :]
            later = [(max(a, begin) - begin, min(b, end) - begin) for a, b, _ in rest if a < end and begin < b]
            last = uncovered(end - begin, later)
            for first, stop in last:
                rows = slice(begin + first, begin + stop)
                torch.add(total[rows], part[first:stop], out=result[rows])
            for first, stop in uncovered(end - begin, last):
                total[begin + first : begin + stop] += part[first:stop]
        for begin, end in uncovered(total.shape[0], [*self.done, *(entry[:2] for entry in entries)]):
            result[begin:end] = total[begin:end]
        return result


def _queries_of(like: Tensor, calls: Sequence[Call]) -> _Sum:
    """Returns a sum of the rows of the calls' queries."""
    begin, end = min((c.q_begin for c in calls), default=0), max((c.q_end for c in calls), default=0)
    return _Sum(like, begin, end)


class _Backward:
    """Gradients of the rank's shard. The gradients of other ranks' keys return to their owners."""

    def __init__(self, execution: Execution, tensors: dict[str, Any], dtype: torch.dtype) -> None:
        self.execution, self.tensors, self.dtype = execution, tensors, dtype
        self.q, self.k, self.v = (tensors[name] for name in ("q", "k", "v"))
        self.schedule = execution.schedule(self.q, self.k)
        self.gradients: list[_Gradient] = []
        self.returned: list[tuple[Messages, list[tuple[KeyRuns, list[Tensor]]]]] = []

    def _compute(self, calls: Sequence[Call], keys: Sequence[Tensor], sums: tuple[_Sum, _Sum, _Sum]) -> None:
        """Adds the gradients of calls to sums of dq, dk and dv. Rows that need no sum are stored directly."""
        for call in calls:
            rows, key_rows = (call.q_begin, call.q_end), (call.k_begin, call.k_end)
            entries = list(zip(self.gradients, sums, (rows, key_rows, key_rows)))
            direct = call.owns_queries, call.owns_keys, call.owns_keys
            summed = [(x, interval) for (_, x, interval), is_direct in zip(entries, direct) if not is_direct]
            accumulate = not all(x.is_new(*interval) for x, interval in summed)
            for x, interval in summed:
                if accumulate:
                    x.clear_rest(*interval)
                x.written.append(interval)
            views = {}
            for name, (gradient, x, interval), is_direct in zip(("dq", "dk", "dv"), entries, direct):
                views[name] = gradient.x[slice(*interval)] if is_direct else x.rows(*interval)
                if is_direct:
                    gradient.done.append(interval)
                if is_direct and accumulate:
                    views[name].zero_()
            attend_backward(self.execution, call, self.tensors, keys, views, accumulate)

    def run(self) -> list[Tensor]:
        own_batch, *others = self.schedule.batches
        if not others and len(own_batch.calls) == 1:
            return self._run_one(own_batch.calls[0])
        # The own, the other and the last calls have their own dq, so that few calls read the sums of earlier ones.
        self.gradients = [_Gradient(x, self.dtype) for x in (self.q, self.k, self.v)]
        own = tuple(gradient.sum for gradient in self.gradients)
        other_dq = _queries_of(self.q, [call for batch in others for call in batch.calls])
        for n, batch, *keys in _Keys(self.execution, self.schedule, self.k, self.v):
            if n == 0:
                self._compute(batch.first, keys, own)
                continue
            sums = _Sum(self.k, 0, batch.rows), _Sum(self.v, 0, batch.rows)
            self._compute(batch.calls, keys, (other_dq, *sums))
            self._return(n, batch, [x.total() for x in sums])
        self.execution.busy = bool(self.returned)
        last_dq = _queries_of(self.q, own_batch.last)
        self._compute(own_batch.last, (self.k, self.v), (last_dq, *own[1:]))
        parts = []
        for messages, found in self.returned:
            messages.wait()
            parts += found
        self.execution.busy = False
        dq = [(begin, end, x.rows(begin, end)) for x in (other_dq, last_dq) for begin, end in intervals_of(x.written)]
        results = [self.gradients[0].finish(dq)]
        for n, gradient in enumerate(self.gradients[1:]):
            entries = [entry for runs, part in parts for entry in runs.rows_of(part[n])]
            results.append(gradient.finish(entries))
        return results

    def _run_one(self, call: Call) -> list[Tensor]:
        """Computes the gradients by one call, which writes all rows of its span."""
        gradients, views = [], {}
        rows, keys = (call.q_begin, call.q_end), (call.k_begin, call.k_end)
        for name, like, interval in (("dq", self.q, rows), ("dk", self.k, keys), ("dv", self.v, keys)):
            x = torch.empty(like.shape, dtype=self.dtype, device=like.device)
            for gap in uncovered(x.shape[0], [interval]):
                x[slice(*gap)].zero_()
            gradients.append(x)
            views[name] = x[slice(*interval)]
        attend_backward(self.execution, call, self.tensors, (self.k, self.v), views)
        return gradients

    def _return(self, n: int, batch: Batch, sums: list[Tensor]) -> None:
        sends, receives, parts = [], [], []
        for index, peer in enumerate(batch.peers):
            sends += [(peer, x[batch.places[index] : batch.places[index + 1]]) for x in sums]
        for reader, runs in self.schedule.readers[n]:
            part = [x.new_empty((runs.rows, *x.shape[1:])) for x in sums]
            receives += [(reader, x) for x in part]
            parts.append((runs, part))
        self.returned.append((self.execution.messages(sends, receives), parts))


def forward(execution: Execution, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns out and lse of the rank's rows."""
    run = _context_chunks_torch.Forward if execution.plan.chunk > 0 else _Forward
    return run(execution, q, k, v).run(sink)


def backward(execution: Execution, tensors: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Returns the gradients of q, k and v in a type. tensors: q, k, v, out, lse, dout and dlse."""
    if execution.captured is not None:
        execution.captured.begin(execution, tensors["k"].shape[1])
    run = _context_chunks_torch.Backward if execution.plan.chunk > 0 else _Backward
    return run(execution, tensors, dtype).run()
