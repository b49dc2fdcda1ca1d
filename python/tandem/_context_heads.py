"""The execution of a ContextPlan by heads on torch tensors: ranks exchange tokens for heads, and results return.

The heads of a rank are divided into groups, so that the messages of a group travel while another group is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem import _context_torch
from tandem._context_captured import in_order
from tandem._context_execution import Biases, Execution
from tandem._context_plan import ContextPlan

# The kinds of tensors: of queries, of keys, and a bias of all heads.
_QUERIES, _KEYS, _ONE_HEAD = 0, 1, 2
_Tensors = list[tuple[Tensor, int]]  # with their kinds


@dataclass(frozen=True)
class Heads:
    """Query heads [q_begin, q_end) and their key heads."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int


def runs_of(heads_q: int, heads_k: int, ranks: int, rank: int) -> list[Heads]:
    """Returns the heads of a rank as few calls with grouped heads (src/context_parallel/heads.h)."""
    runs, group = [], heads_q // heads_k
    begin, end = heads_q * rank // ranks, heads_q * (rank + 1) // ranks
    while begin < end:
        key_head = begin // group
        # A run is a part of one group, or whole groups.
        stop = min(end, (key_head + 1) * group)
        if begin % group == 0 and end - begin >= group:
            stop = end // group * group
        runs.append(Heads(begin, stop, key_head, (stop - 1) // group + 1))
        begin = stop
    return runs


def share_of(plan: ContextPlan, heads: tuple[int, int], rank: int) -> tuple[Heads, list[Heads]]:
    """Returns all heads of a rank, and its calls. With chunks a rank has whole groups of query heads."""
    heads_q, heads_k = heads
    if plan.chunk == 0:
        runs = runs_of(heads_q, heads_k, plan.ranks, rank)
    else:
        begin, end, group = heads_k * rank // plan.ranks, heads_k * (rank + 1) // plan.ranks, heads_q // heads_k
        runs = [Heads(begin * group, end * group, begin, end)] if begin < end else []
    if not runs:
        return Heads(0, 0, 0, 0), []
    return Heads(runs[0].q_begin, runs[-1].q_end, runs[0].k_begin, runs[-1].k_end), runs


# The least bytes of a group's queries for each peer, because short messages are slow.
_GROUP_BYTES = 4 << 20
_MOST_GROUPS = 2


class Group(NamedTuple):
    """The heads of each rank that are exchanged together, and this rank's calls."""

    shares: list[Heads]
    runs: list[Heads]


# Rows of a rank [begin, end), and a tensor with these rows.
_Piece = tuple[int, int, Tensor]


class _Rows:
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
            _copy(x[begin:end], batch[place : place + end - begin])

    def take(self, rank: int, batch: Tensor) -> list[_Piece]:
        """Returns the rows of a rank in the packed batch."""
        if self.indices:
            return [(0, self.counts[rank], batch.index_select(0, self.indices[rank]))]
        return [(begin, end, batch[place : place + end - begin]) for begin, end, place in self.runs[rank]]


def _copy(x: Tensor, to: Tensor) -> None:
    """Copies x, by elements of 16 bytes if the tensors permit it: torch copies strided elements one by one."""
    if x.dtype == to.dtype and _is_wide(x) and _is_wide(to):
        x, to = x.view(torch.complex128), to.view(torch.complex128)
    to.copy_(x)


_WIDE = 16  # bytes


def _is_wide(x: Tensor) -> bool:
    numbers = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
    aligned = all(n * x.element_size() % _WIDE == 0 for n in numbers) and x.data_ptr() % _WIDE == 0
    return aligned and x.stride(-1) == 1


class _Parcel:
    """Tensors that travel between two ranks as one message, because each message costs the host's time."""

    def __init__(self, shapes: list[tuple[int, ...]], like: list[Tensor]) -> None:
        places = [0]
        for shape, x in zip(shapes, like):
            places.append(places[-1] + -(-math.prod(shape) * x.element_size() // _WIDE) * _WIDE)
        self.bytes = torch.empty(places[-1], dtype=torch.uint8, device=like[0].device)
        self.tensors = [
            self.bytes[place : place + math.prod(shape) * x.element_size()].view(x.dtype).view(shape)
            for place, shape, x in zip(places, shapes, like)
        ]


class _ToHeads:
    """Tensors on their way from the rank's tokens with all heads to all tokens with a group's heads."""

    def __init__(self, exchange: _Exchange, group: Group, tensors: _Tensors) -> None:
        self.rows = [exchange.rows(kind) for _, kind in tensors]
        own = [x[:, _slice(group.shares[exchange.rank], kind)] for x, kind in tensors]
        self.batches = [x.new_empty((rows.total, *x.shape[1:])) for x, rows in zip(own, self.rows)]
        self.arriving: list[tuple[int, _Parcel]] = []
        sends, receives = [], []
        for peer in exchange.peers:
            parts = [x[:, _slice(group.shares[peer], kind)] for x, kind in tensors]
            parcel = _Parcel([tuple(x.shape) for x in parts], parts)
            for x, to in zip(parts, parcel.tensors):
                _copy(x, to)
            sends.append((peer, parcel.bytes))
            shapes = [(rows.counts[peer], *x.shape[1:]) for rows, x in zip(self.rows, self.batches)]
            self.arriving.append((peer, _Parcel(shapes, self.batches)))
            receives.append((peer, self.arriving[-1][1].bytes))
        self.messages = exchange.execution.messages(sends, receives)
        for x, rows, batch in zip(own, self.rows, self.batches):
            rows.put(exchange.rank, x, batch)

    def wait(self) -> list[Tensor]:
        self.messages.wait()
        for peer, parcel in self.arriving:
            for x, rows, batch in zip(parcel.tensors, self.rows, self.batches):
                rows.put(peer, x, batch)
        return self.batches


class _ToTokens:
    """Tensors on their way from all tokens with a group's heads to the rank's tokens with all heads."""

    def __init__(self, exchange: _Exchange, group: Group, tensors: _Tensors) -> None:
        self.kinds, rank = [kind for _, kind in tensors], exchange.rank
        batches = [x for x, _ in tensors]
        all_rows = [exchange.rows(kind) for kind in self.kinds]
        self.parts: list[tuple[Heads, list[list[_Piece]]]] = []  # by rank, and by tensor
        sends, receives = [], []
        for peer, share in enumerate(group.shares):
            pieces = [rows.take(peer, x) for rows, x in zip(all_rows, batches)]
            if peer == rank:
                self.parts.append((share, pieces))
                continue
            parcel = _Parcel([(rows.counts[peer], *x.shape[1:]) for rows, x in zip(all_rows, batches)], batches)
            for to, found in zip(parcel.tensors, pieces):
                for begin, end, x in found:
                    _copy(x, to[begin:end])
            sends.append((peer, parcel.bytes))
            heads = [_slice(share, kind) for kind in self.kinds]
            shapes = [
                (rows.counts[rank], h.stop - h.start, *x.shape[2:]) for rows, h, x in zip(all_rows, heads, batches)
            ]
            arriving = _Parcel(shapes, batches)
            receives.append((peer, arriving.bytes))
            self.parts.append((share, [[(0, len(x), x)] for x in arriving.tensors]))
        self.messages = exchange.execution.messages(sends, receives)

    def store(self, results: list[Tensor], adds_keys: bool = False) -> None:
        """Stores the ranks' heads in tensors of all heads, or adds key heads in the order of the ranks."""
        self.messages.wait()
        for share, tensors in self.parts:
            for result, kind, pieces in zip(results, self.kinds, tensors):
                for begin, end, x in pieces:
                    to = result[begin:end, _slice(share, kind)]
                    if adds_keys and kind == _KEYS:
                        to.add_(x)
                    else:
                        _copy(x, to)


def _slice(share: Heads, kind: int) -> slice:
    return (slice(share.q_begin, share.q_end), slice(share.k_begin, share.k_end), slice(0, 1))[kind]


class _Exchange:
    """The ranks, the rows and the groups of heads of an execution by heads. row_bytes: of a row of one query head."""

    def __init__(self, execution: Execution, heads: tuple[int, int], row_bytes: int, device: torch.device) -> None:
        self.execution, self.plan, self.rank = execution, execution.plan, execution.rank
        self.peers = [peer for peer in range(self.plan.ranks) if peer != self.rank]
        key = "rows", device
        self._rows = self.plan.kept.get(key)
        if self._rows is None:
            self._rows = self.plan.kept[key] = [_Rows(self.plan, keys, device) for keys in (False, True)]
        self.groups = self._groups(heads, row_bytes)

    def _groups(self, heads: tuple[int, int], row_bytes: int) -> list[Group]:
        """Divides all heads into groups. Ranks whose heads are no whole groups of query heads have one group."""
        found = [share_of(self.plan, heads, rank) for rank in range(self.plan.ranks)]
        shares, runs = [share for share, _ in found], found[self.rank][1]
        of_key_head = heads[0] // heads[1]
        key_heads = [share.k_end - share.k_begin for share in shares]
        whole = all(share.q_end - share.q_begin == of_key_head * n for share, n in zip(shares, key_heads))
        fewest_bytes = min(self.rows(_QUERIES).counts) * row_bytes * of_key_head * min(key_heads)
        count = min(_MOST_GROUPS, min(key_heads), fewest_bytes // _GROUP_BYTES)
        sums_heads = self.plan.chunk > 0 and self.execution.options.get("score_mod") is not None
        if not whole or count < 2 or self.execution.bias is not None or sums_heads:
            return [Group(shares, runs)]
        groups = []
        for n in range(count):
            bounds = [(s.k_begin + k * n // count, s.k_begin + k * (n + 1) // count) for s, k in zip(shares, key_heads)]
            parts = [Heads(begin * of_key_head, end * of_key_head, begin, end) for begin, end in bounds]
            groups.append(Group(parts, [parts[self.rank]]))
        return groups

    def rows(self, kind: int) -> _Rows:
        return self._rows[kind == _KEYS]

    def options(self, run: Heads) -> dict[str, Any]:
        slopes = self.execution.options.get("alibi_slopes")
        if slopes is None:
            return self.execution.options
        return {**self.execution.options, "alibi_slopes": slopes[..., run.q_begin : run.q_end].contiguous()}

    def places(self, group: Group, run: Heads) -> tuple[slice, slice]:
        """Returns the query heads and the key heads of a run among this rank's heads."""
        own = group.shares[self.rank]
        q = slice(run.q_begin - own.q_begin, run.q_end - own.q_begin)
        return q, slice(run.k_begin - own.k_begin, run.k_end - own.k_begin)


def _bias_of(execution: Execution) -> _Tensors:
    """Returns the bias as (rows, heads, keys), as one or no tensor."""
    bias = execution.bias
    return [] if bias is None else [(bias.transpose(0, 1), _ONE_HEAD if len(bias) == 1 else _QUERIES)]


def _biases(bias: list[Tensor], dbias: Tensor | None, heads: slice) -> Biases:
    """Returns the bias and the gradient of some of this rank's heads."""
    parts = [x.transpose(0, 1) if x.shape[1] == 1 else x[:, heads].transpose(0, 1) for x in bias]
    return parts[0] if parts else None, None if dbias is None else dbias[:, heads].transpose(0, 1)


def forward(
    execution: Execution, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns out and lse of the rank's rows, and what the backward reads: of each group the tensors of _KEPT."""
    heads = q.shape[1], k.shape[1]
    exchange = _Exchange(execution, heads, q.shape[2] * q.element_size(), q.device)
    moved = [(q, _QUERIES), (k, _KEYS), (v, _KEYS), *_bias_of(execution)]
    arriving = [_ToHeads(exchange, group, moved) for group in exchange.groups]
    returning, kept = [], []
    for group, to_heads in zip(exchange.groups, arriving):
        all_q, all_k, all_v, *bias = to_heads.wait()
        parts = []
        for run in group.runs:
            at, keys_at = exchange.places(group, run)
            own_sink = None if sink is None else sink[run.q_begin : run.q_end]
            alone = execution.alone(exchange.options(run), run.q_begin, heads[0], _biases(bias, None, at))
            part = _context_torch.forward(alone, all_q[:, at], all_k[:, keys_at], all_v[:, keys_at], own_sink)
            parts.append((part[0], part[1].t()))
        if not parts:  # the rank has no heads
            parts = [(q.new_empty((len(all_q), 0, v.shape[-1])), torch.empty((len(all_q), 0), device=q.device))]
        out, lse = map(_joined, zip(*parts))
        returning.append(_ToTokens(exchange, group, [(out, _QUERIES), (lse, _QUERIES)]))
        kept += [all_q, all_k, all_v, out, lse, *bias]
    out, lse = q.new_empty((*q.shape[:2], v.shape[-1])), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for to_tokens in returning:
        to_tokens.store([out, lse])
    return out, lse.t().contiguous(), kept


_KEPT = ("q", "k", "v", "out", "lse", "bias")


def _joined(runs: tuple[Tensor, ...]) -> Tensor:
    """Returns the heads of all runs."""
    return runs[0].contiguous() if len(runs) == 1 else torch.cat(runs, dim=1)


def backward(
    execution: Execution, tensors: dict[str, Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    """Returns the gradients of q, k and v in a type, and fills in the execution's dbias. tensors: dout, dlse, and kept,
    the tensors of forward(). shapes: of q, k and v.
    """
    dout, dlse = tensors["dout"], tensors["dlse"]
    heads = shapes[0][1], shapes[1][1]
    exchange = _Exchange(execution, heads, shapes[0][2] * dout.element_size(), dout.device)
    moved = [(dout, _QUERIES), *([] if dlse is None else [(dlse.t(), _QUERIES)])]
    arriving = [_ToHeads(exchange, group, moved) for group in exchange.groups]
    # Gradients of key heads that several ranks share are summed in float32.
    is_shared = not all(_shares_no_key_head(group) for group in exchange.groups)
    own = torch.float32 if is_shared else dtype
    count, returning = len(tensors["kept"]) // len(exchange.groups), []
    for n, (group, to_heads) in enumerate(zip(exchange.groups, arriving)):
        whole = dict(zip(_KEPT, tensors["kept"][n * count : (n + 1) * count]))
        whole.update(zip(("dout", "dlse"), to_heads.wait()))
        outputs = _group_backward(exchange, group, whole, (heads[0], own))
        returning.append(_ToTokens(exchange, group, outputs))
    create = torch.zeros if is_shared else torch.empty
    results = [create(shape, dtype=own, device=dout.device) for shape in shapes]
    if execution.dbias is not None:
        results.append(_own_dbias(execution.dbias, dout))
    for to_tokens in returning:
        to_tokens.store(results, is_shared)
    if execution.dbias is not None:
        _store_dbias(results.pop(), execution.dbias)
    return [x.to(dtype) for x in results]


def _group_backward(
    exchange: _Exchange, group: Group, whole: dict[str, Tensor], result: tuple[int, torch.dtype]
) -> _Tensors:
    """Returns the gradients of a group's heads, of all tokens. result: the number of all query heads, and the type."""
    execution, (heads_q, dtype) = exchange.execution, result
    bias = [whole.pop("bias")] if "bias" in whole else []
    dbias = None if execution.dbias is None else _own_dbias(execution.dbias, whole["q"])
    parts = []
    for run in group.runs:
        at, keys_at = exchange.places(group, run)
        of_run: dict[str, Any] = {"dlse": None}
        for name, x in whole.items():
            x = x[:, keys_at if name in ("k", "v") else at]
            of_run[name] = x.t() if name in ("lse", "dlse") else x
        alone = execution.alone(exchange.options(run), run.q_begin, heads_q, _biases(bias, dbias, at))
        parts.append(_context_torch.backward(alone, of_run, dtype))
    if not parts:  # the rank has no heads
        parts = [[torch.empty_like(whole[name], dtype=dtype) for name in ("q", "k", "v")]]
    gradients = list(zip(map(_joined, zip(*parts)), (_QUERIES, _KEYS, _KEYS)))
    return gradients if dbias is None else [*gradients, (dbias, _QUERIES)]


def _shares_no_key_head(group: Group) -> bool:
    """Returns whether each key head has one rank."""
    shares = [share for share in group.shares if share.k_begin < share.k_end]
    return all(a.k_end <= b.k_begin for a, b in zip(shares, shares[1:]))


def _own_dbias(dbias: Tensor, q: Tensor) -> Tensor:
    """Returns zeros for q's rows and heads, (rows, heads, keys)."""
    dtype = torch.float32 if len(dbias) == 1 else dbias.dtype
    return torch.zeros((*q.shape[:2], dbias.shape[-1]), dtype=dtype, device=dbias.device)


def _store_dbias(heads: Tensor, dbias: Tensor) -> None:
    """Stores the gradients of all heads, (rows, heads, keys), or their sum in this order."""
    if len(dbias) == 1:
        dbias[0] = in_order(heads.unbind(1), torch.zeros_like(heads[:, 0]))
    else:
        dbias.copy_(heads.transpose(0, 1))
