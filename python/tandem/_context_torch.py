"""Executions of a ContextPlan on torch tensors: on GPUs with the group's NCCL, in the order of the current stream.

The host issues calls of attention, merges, sums and messages, and waits for none of them. torch runs messages on a
stream of the group, and events order the two streams, so that messages and attention overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem import _binding
from tandem._context_calls import (
    Batch,
    Call,
    ChunkLeaves,
    KeyRuns,
    Schedule,
    TreeSum,
    chunk_rows,
    chunk_size,
    nodes_left,
    uncovered,
)
from tandem._context_plan import ContextPlan
from tandem._context_transport import Messages

# More parts are merged as they are computed.
_MAX_PARTS = 4


@dataclass
class Execution:
    """The arguments of both passes. options: softmax_scale, softcap and alibi_slopes as call_args."""

    plan: ContextPlan
    rank: int
    group: Any  # None: the plan has one rank
    rounds_at_once: int
    options: dict[str, Any]
    # Multiprocessors that calls leave to messages while messages are in flight.
    spare_sms: int = 0
    busy: bool = field(default=False, init=False)

    def schedule(self) -> Schedule:
        key = "schedule", self.rank, self.rounds_at_once, self.by_distance
        found = self.plan.kept.get(key)
        if found is None:
            found = self.plan.kept[key] = Schedule(self.plan, *key[1:])
        return found

    def leaves(self) -> ChunkLeaves:
        key = "leaves", self.rank
        found = self.plan.kept.get(key)
        if found is None:
            found = self.plan.kept[key] = ChunkLeaves(self.plan, self.rank)
        return found

    @property
    def by_distance(self) -> bool:
        return self.options.get("alibi_slopes") is not None

    def alone(self, options: dict[str, Any]) -> Execution:
        """Returns the execution of all tokens on this rank."""
        return Execution(self.plan.on_one_rank(), 0, None, 1, options)

    def messages(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Messages:
        return Messages(self.group, sends, receives)

    def attend(self, what: int, call: Call, tensors: dict[str, Tensor | None], accumulate: bool = False) -> None:
        """Computes a call. tensors: rows of queries and keys of the call, as call_args."""
        args = {**self.options, **_sequences(call, tensors["q"].device, self.options.get("alibi_slopes"))}
        if not call.is_packed:
            tensors = {name: None if x is None else x[None] for name, x in tensors.items()}
        if accumulate:
            args["accumulate"] = True
        if self.plan.chunk > 0:
            args["batch_invariant"] = True
        if self.busy and self.spare_sms > 0 and tensors["q"].is_cuda:
            sms = torch.cuda.get_device_properties(tensors["q"].device).multi_processor_count
            args["sm_limit"] = sms - self.spare_sms
        _binding.call(what, {**args, **tensors})


def _sequences(call: Call, device: torch.device, slopes: Tensor | None) -> dict[str, Any]:
    """Returns the sequences and the mask of a call as call_args, without a copy from the host after the first time."""
    found = call.on_device.get(device)
    if found is None:
        cu_q, cu_k, diagonals, documents = call.sequences()
        found = call.on_device[device] = (
            {"alignment": "explicit", "window": call.window},
            torch.tensor(documents, device=device),
        )
        if call.is_packed:
            q, k, diagonal = (torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k, diagonals))
            found[0].update(cu_seqlens_q=q, cu_seqlens_k=k, diagonal_offsets=diagonal)
            for name, cu in (("max_seqlen_q", cu_q), ("max_seqlen_k", cu_k)):
                found[0][name] = max(end - begin for begin, end in zip(cu, cu[1:]))
        else:
            found[0]["diagonal_offset"] = diagonals[0]
    args, documents = found
    if slopes is not None and slopes.dim() == 2:
        return {**args, "alibi_slopes": slopes.index_select(0, documents)}
    return args


def _concatenated(x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the rows of runs, without a copy if they are one compact run."""
    rows = [x[begin:end] for begin, end in runs]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows) if rows else x[:0].contiguous()


class _Keys:
    """Keys and values of each batch. The next batch is in flight while the present one is computed."""

    def __init__(self, execution: Execution, k: Tensor, v: Tensor) -> None:
        self.execution, self.own = execution, (k, v)
        self.schedule = execution.schedule()
        self.next: tuple[Messages, tuple[Tensor, Tensor]] | None = None

    def _start(self, n: int) -> None:
        self.next = None
        if n >= len(self.schedule.batches):
            return
        batch = self.schedule.batches[n]
        buffers = tuple(x.new_empty((batch.rows, *x.shape[1:])) for x in self.own)
        sends, receives = [], []
        for reader, runs in self.schedule.readers[n]:
            sends += [(reader, _concatenated(x, runs.runs)) for x in self.own]
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


class _Part:
    """float32 rows of attention over some keys. Rows without keys have lse -inf, and no value in out."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    def rows(self, begin: int, end: int) -> _Part:
        return _Part(self.out[begin:end], self.lse[:, begin:end])


def _merge(parts: Sequence[_Part], result: _Part) -> None:
    if result.out.numel() > 0:
        _binding.merge([p.out for p in parts], [p.lse for p in parts], result.out, result.lse)


def _merged(left: _Part, right: _Part) -> _Part:
    result = _Part(torch.empty_like(left.out), torch.empty_like(left.lse))
    _merge((left, right), result)
    return result


class _Forward:
    def __init__(self, execution: Execution, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.execution, self.q, self.k, self.v = execution, q, k, v
        self.rows, self.heads, self.dim = q.shape[0], q.shape[1], v.shape[-1]
        self.parts: list[_Part] = []
        self.trees: dict[tuple[int, int], TreeSum] = {}
        self._chunks = chunk_rows(execution.plan, execution.rank, False) if execution.plan.chunk > 0 else []

    def _part(self, part: list[Call], k: Tensor, v: Tensor, result: _Part | None = None) -> _Part:
        """Computes the calls of a part."""
        if result is None:
            result = _Part(
                torch.empty((self.rows, self.heads, self.dim), dtype=torch.float32, device=self.q.device),
                torch.empty((self.heads, self.rows), dtype=torch.float32, device=self.q.device),
            )
            for begin, end in uncovered(self.rows, [(call.q_begin, call.q_end) for call in part]):
                result.lse[:, begin:end].fill_(-torch.inf)
        for call in part:
            rows = result.rows(call.q_begin, call.q_end)
            keys = slice(call.k_begin, call.k_end)
            tensors = {"q": self.q[call.q_begin : call.q_end], "k": k[keys], "v": v[keys]}
            self.execution.attend(_binding.FORWARD, call, {**tensors, "out": rows.out, "lse": rows.lse})
        return result

    def run(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        result = _Part(
            self.q.new_empty((self.rows, self.heads, self.dim)),
            torch.empty((self.heads, self.rows), dtype=torch.float32, device=self.q.device),
        )
        batches = self.execution.schedule().batches
        only = [part for batch in batches for part in batch.parts]
        covered = len(only) == 1 and not uncovered(self.rows, [(c.q_begin, c.q_end) for c in only[0]])
        direct = covered and sink is None and self.execution.plan.chunk == 0
        for _, batch, k, v in _Keys(self.execution, self.k, self.v):
            for part in batch.parts:
                if direct:
                    self._part(part, k, v, result)
                elif self.execution.plan.chunk > 0:
                    self._add_leaves(part, self._part(part, k, v))
                else:
                    self._add(self._part(part, k, v))
        if direct:
            return result.out, result.lse
        self._finish(sink, result)
        return result.out, result.lse

    def _add(self, part: _Part) -> None:
        self.parts.append(part)
        if len(self.parts) == _MAX_PARTS:
            _merge(self.parts, self.parts[0])
            del self.parts[1:]

    def _add_leaves(self, part: list[Call], result: _Part) -> None:
        rows = {key: (begin, end) for key, begin, end in self._chunks}
        leaves = self.execution.leaves().of_queries
        for step in (step for call in part for step in call.steps):
            key = step.document, step.q_order
            tree = self.trees.setdefault(key, TreeSum(leaves[key]))
            tree.add(0, step.k_order, result.rows(*rows[key]), _merged)

    def _finish(self, sink: Tensor | None, result: _Part) -> None:
        if self.execution.plan.chunk == 0:
            _write(self.parts, sink, result)
            return
        for key, begin, end in self._chunks:
            tree = self.trees.get(key)
            _write([] if tree is None else tree.values(), sink, result.rows(begin, end))


def _write(parts: list[_Part], sink: Tensor | None, result: _Part) -> None:
    """Merges parts and the sink, a key with the value 0 that each row has once."""
    rows, heads, dim = result.out.shape
    if sink is not None:
        zeros = torch.zeros((1, 1, dim), dtype=torch.float32, device=sink.device)
        parts = [*parts, _Part(zeros.expand(rows, heads, dim), sink.detach().float()[:, None].expand(heads, rows))]
    if parts:
        _merge(parts, result)
    else:
        result.out.zero_()
        result.lse.fill_(-torch.inf)


# ---- Backward --------------------------------------------------------------------------------------------------------


class _Sum:
    """float32 rows that calls write. The first call of a row overwrites it, and further calls add to it."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.x = torch.empty((rows, *like.shape[1:]), dtype=torch.float32, device=like.device)
        self.written: list[tuple[int, int]] = []

    def is_new(self, begin: int, end: int) -> bool:
        return all(end <= other[0] or other[1] <= begin for other in self.written)

    def clear_rest(self, begin: int, end: int) -> None:
        """Sets the rows that no call has written to 0."""
        done = [(max(a, begin) - begin, min(b, end) - begin) for a, b in self.written if a < end and begin < b]
        for gap in uncovered(end - begin, done):
            self.x[begin + gap[0] : begin + gap[1]].zero_()

    def total(self) -> Tensor:
        self.clear_rest(0, self.x.shape[0])
        return self.x


def _added(left: Any, right: Any) -> Any:
    for x, y in zip(left, right):
        x.add_(y)
    return left


class _Backward:
    """Gradients of the rank's shard. The gradients of other ranks' keys return to their owners."""

    def __init__(self, execution: Execution, tensors: dict[str, Any]) -> None:
        self.execution, self.tensors = execution, tensors
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        self.k, self.v = k, v
        self.dq = _Sum(q, q.shape[0])
        self.schedule = execution.schedule()
        self.returned: list[tuple[Messages, list[tuple[int, Any]]]] = []
        self.q_trees: dict[tuple[int, int], TreeSum] = {}
        self.k_trees: dict[tuple[int, int], TreeSum] = {}

    def _compute(self, calls: Sequence[Call], keys: tuple[Tensor, Tensor], sums: tuple[_Sum, _Sum]) -> None:
        for call in calls:
            rows, key_rows = (call.q_begin, call.q_end), (call.k_begin, call.k_end)
            all_sums = (self.dq, rows), (sums[0], key_rows), (sums[1], key_rows)
            accumulate = not all(x.is_new(*interval) for x, interval in all_sums)
            for x, interval in all_sums:
                if accumulate:
                    x.clear_rest(*interval)
                x.written.append(interval)
            views = {name: x.x[slice(*interval)] for name, (x, interval) in zip(("dq", "dk", "dv"), all_sums)}
            self._attend(call, keys, views, accumulate)

    def _attend(self, call: Call, keys: tuple[Tensor, Tensor], views: dict[str, Tensor], accumulate: bool) -> None:
        rows = slice(call.q_begin, call.q_end)
        of_rows: dict[str, Tensor | None] = {name: self.tensors[name][rows] for name in ("q", "out", "dout")}
        for name in ("lse", "dlse"):
            x = self.tensors[name]
            of_rows[name] = None if x is None else x[:, rows]
        k, v = (x[call.k_begin : call.k_end] for x in keys)
        self.execution.attend(_binding.BACKWARD, call, {**of_rows, "k": k, "v": v, **views}, accumulate)

    def run(self) -> list[Tensor]:
        return self._run_chunks() if self.execution.plan.chunk > 0 else self._run_sums()

    # Without chunks. Some calls with the rank's own keys come last, while gradients return to their owners.
    def _run_sums(self) -> list[Tensor]:
        own = _Sum(self.k, self.schedule.k_rows), _Sum(self.v, self.schedule.k_rows)
        last: list[Call] = []
        for n, batch, *keys in _Keys(self.execution, self.k, self.v):
            if n == 0:
                last = batch.last
                self._compute(batch.first or batch.calls, tuple(keys), own)
                continue
            sums = _Sum(self.k, batch.rows), _Sum(self.v, batch.rows)
            self._compute(batch.calls, tuple(keys), sums)
            self._return(n, batch, [x.total() for x in sums])
        self.execution.busy = bool(self.returned)
        self._compute(last, (self.k, self.v), own)
        totals = [x.total() for x in own]
        for messages, parts in self.returned:
            messages.wait()
            for runs, part in parts:
                for x, y in zip(totals, part):
                    _add_runs(x, y, runs)
        self.execution.busy = False
        return [self.dq.total(), *totals]

    def _return(self, n: int, batch: Batch, sums: list[Tensor]) -> None:
        sends, receives, parts = [], [], []
        for index, peer in enumerate(batch.peers):
            sends += [(peer, x[batch.places[index] : batch.places[index + 1]]) for x in sums]
        for reader, runs in self.schedule.readers[n]:
            part = [x.new_empty((runs.rows, *x.shape[1:])) for x in sums]
            receives += [(reader, x) for x in part]
            parts.append((runs, part))
        self.returned.append((self.execution.messages(sends, receives), parts))

    # With chunks.
    def _run_chunks(self) -> list[Tensor]:
        own_leaves = self.execution.leaves().of_keys(self.execution.rank)
        self.k_trees = {key: TreeSum(sum(by_rank.values(), [])) for key, by_rank in own_leaves.items()}
        for n, batch, *keys in _Keys(self.execution, self.k, self.v):
            trees = [self.k_trees] if n == 0 else [self._peer_trees(peer) for peer in batch.peers]
            for call in batch.calls:
                self._add_leaves(call, batch, tuple(keys), trees)
            if n > 0:
                self._return_nodes(n, batch, trees)
        for messages, parts in self.returned:
            messages.wait()
            for reader, part in parts:
                self._add_nodes(reader, part)
        return self._finish_chunks()

    def _peer_trees(self, peer: int) -> dict[tuple[int, int], TreeSum]:
        leaves = self.execution.leaves().of_keys(peer).items()
        return {key: TreeSum(sum(x.values(), [])) for key, x in leaves if self.execution.rank in x}

    def _add_leaves(
        self, call: Call, batch: Batch, keys: tuple[Tensor, Tensor], trees: list[dict[tuple[int, int], TreeSum]]
    ) -> None:
        (q_begin, q_end), (k_begin, k_end) = call.q_span, call.k_span
        q = self.tensors["q"]
        sums = _Sum(q, q_end - q_begin), _Sum(self.k, k_end - k_begin), _Sum(self.v, k_end - k_begin)
        views = {}
        for name, x, first, begin, end in (
            ("dq", sums[0], q_begin, call.q_begin, call.q_end),
            ("dk", sums[1], k_begin, call.k_begin, call.k_end),
            ("dv", sums[2], k_begin, call.k_begin, call.k_end),
        ):
            x.written.append((begin - first, end - first))
            x.total()
            views[name] = x.x[begin - first : end - first]
        self._attend(call, keys, views, False)
        leaves = self.execution.leaves().of_queries
        for step in call.steps:
            dq = sums[0].x[step.q_span[0] - q_begin : step.q_span[1] - q_begin]
            dk, dv = (x.x[step.k_span[0] - k_begin : step.k_span[1] - k_begin] for x in sums[1:])
            key = step.document, step.q_order
            tree = self.q_trees.setdefault(key, TreeSum(leaves[key]))
            tree.add(0, step.k_order, [dq], _added)
            index = next(n for n in range(len(trees)) if step.k_row < batch.places[n + 1])
            trees[index][step.document, step.k_order].add(0, step.q_order, [dk, dv], _added)

    def _return_nodes(self, n: int, batch: Batch, trees: list[dict[tuple[int, int], TreeSum]]) -> None:
        sends, receives, parts = [], [], []
        for peer, chunks in zip(batch.peers, trees):
            for key in sorted(chunks):
                sends += [(peer, x) for node in chunks[key].values() for x in node]
        own_leaves = self.execution.leaves().of_keys(self.execution.rank)
        for reader, _ in self.schedule.readers[n]:
            part = []
            for key, by_rank in own_leaves.items():
                if reader not in by_rank:
                    continue
                rows = chunk_size(self.execution.plan, *key, keys=True)
                for node in nodes_left(sum(by_rank.values(), []), by_rank[reader]):
                    value = [
                        torch.empty((rows, *x.shape[1:]), dtype=torch.float32, device=x.device)
                        for x in (self.k, self.v)
                    ]
                    receives += [(reader, x) for x in value]
                    part.append((key, node, value))
            parts.append((reader, part))
        self.returned.append((self.execution.messages(sends, receives), parts))

    def _add_nodes(self, reader: int, part: list[Any]) -> None:
        for key, (level, index), value in part:
            self.k_trees[key].add(level, index, value, _added)

    def _finish_chunks(self) -> list[Tensor]:
        plan, rank = self.execution.plan, self.execution.rank
        dk, dv = _Sum(self.k, self.schedule.k_rows), _Sum(self.v, self.schedule.k_rows)
        for (x, sums), keys in (((self.q_trees, (self.dq,)), False), ((self.k_trees, (dk, dv)), True)):
            for key, row, end in chunk_rows(plan, rank, keys):
                if key not in x:
                    continue
                for total, value in zip(sums, x[key].values()[0]):
                    total.x[row:end] = value
                    total.written.append((row, end))
        return [self.dq.total(), dk.total(), dv.total()]


def _add_runs(x: Tensor, part: Tensor, runs: KeyRuns) -> None:
    row = 0
    for begin, end in runs.runs:
        x[begin:end] += part[row : row + end - begin]
        row += end - begin


def forward(execution: Execution, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns out and lse of the rank's rows."""
    return _Forward(execution, q, k, v).run(sink)


def backward(execution: Execution, tensors: dict[str, Any]) -> list[Tensor]:
    """Returns the float32 gradients of q, k and v. tensors: q, k, v, out, lse, dout and dlse."""
    return _Backward(execution, tensors).run()
