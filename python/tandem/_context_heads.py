"""The execution of a ContextPlan by heads on torch tensors: ranks exchange tokens for heads, and results return.

The heads of a rank are divided into groups, so that the messages of a group travel while another group is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem import _context_torch
from tandem._context_captured import in_order
from tandem._context_choice import Shapes
from tandem._context_copies import Layout, copies_of, parts_of
from tandem._context_execution import Biases, Execution
from tandem._context_head_messages import Copied, Load, Parcel, Route, Rows, Transfer, Wire, wide
from tandem._context_plan import ContextPlan

# The kinds of tensors: of queries, of keys, and a bias of all heads.
_QUERIES, _KEYS, _ONE_HEAD = 0, 1, 2
_Tensors = list[tuple[Tensor, int]]  # with their kinds
_Wires = tuple[Wire, ...]
_Parts = tuple[int, ...]  # the shares of the groups in the heads


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


class Group(NamedTuple):
    """The heads of each rank that are exchanged together, this rank's calls, and the routes to heads and to tokens."""

    shares: list[Heads]
    runs: list[Heads]
    routes: tuple[list[Route], list[Route]]


class _ToHeads:
    """Tensors on their way from the rank's tokens with all heads to all tokens with a group's heads."""

    def __init__(self, exchange: _Exchange, number: int, tensors: _Tensors) -> None:
        group = exchange.groups[number]
        self.rows = [exchange.rows(kind) for _, kind in tensors]
        self.batches: list[Tensor] = []
        share, copied = group.shares[exchange.rank], Copied()
        loads: list[list[Load]] = [
            [(x, [(0, x.shape[0], 0)], heads) for (x, _), heads in zip(tensors, route.sent.heads)]
            for route in group.routes[0]
        ]
        self.transfer = Transfer(exchange.execution, exchange.copies, number, group.routes[0], loads)
        for (x, kind), rows in zip(tensors, self.rows):
            own = x[:, _slice(share, kind)]
            batch = x.new_empty((rows.total, *own.shape[1:]))
            rows.put(exchange.rank, own, batch, copied)
            self.batches.append(batch)
        copied.issue()

    def wait(self) -> list[Tensor]:
        copied = Copied()
        for peer, tensors in self.transfer.wait():
            for x, rows, batch in zip(tensors, self.rows, self.batches):
                rows.put(peer, x, batch, copied)
        copied.issue()
        return self.batches


class _ToTokens:
    """Tensors on their way from all tokens with a group's heads to the rank's tokens with all heads."""

    def __init__(self, exchange: _Exchange, number: int, tensors: _Tensors) -> None:
        self.group, self.rank = exchange.groups[number], exchange.rank
        self.kinds = [kind for _, kind in tensors]
        rows = [exchange.rows(kind) for kind in self.kinds]
        every = [slice(0, x.shape[1]) for x, _ in tensors]

        def taken(rank: int) -> list[Load]:
            return [(*r.take(rank, x), heads) for r, (x, _), heads in zip(rows, tensors, every)]

        self.own, routes = taken(self.rank), self.group.routes[1]
        number += len(exchange.groups)
        loads = [taken(route.peer) for route in routes]
        self.transfer = Transfer(exchange.execution, exchange.copies, number, routes, loads)

    def store(self, results: list[Tensor], adds_keys: bool = False) -> None:
        """Stores the ranks' heads in tensors of all heads, or adds key heads in the order of the ranks."""
        parts: dict[int, list[Any]] = {
            peer: [(x, [(0, x.shape[0], 0)], None) for x in tensors] for peer, tensors in self.transfer.wait()
        }
        parts[self.rank], copied = self.own, Copied()
        for peer in sorted(parts):
            share = self.group.shares[peer]
            for result, kind, (x, runs, _) in zip(results, self.kinds, parts[peer]):
                to, adds = result[:, _slice(share, kind)], adds_keys and kind == _KEYS
                if not adds:
                    x, to = wide(x, to)
                for begin, end, place in runs:
                    if adds:
                        to[begin:end].add_(x[place : place + end - begin])
                    else:
                        copied.add(to[begin:end], x[place : place + end - begin])
        copied.issue()


def _slice(share: Heads, kind: int) -> slice:
    return (slice(share.q_begin, share.q_end), slice(share.k_begin, share.k_end), slice(0, 1))[kind]


class _Exchange:
    """The ranks, the rows and the groups of heads of an execution by heads, and the copies of its pass.

    wires: the tensors that travel to heads, and to tokens. parts: of the groups, for the backward; (): fast ones.
    """

    def __init__(
        self,
        execution: Execution,
        heads: tuple[int, int],
        device: torch.device,
        wires: tuple[_Wires, _Wires],
        parts: _Parts,
    ) -> None:
        self.execution, self.plan, self.rank = execution, execution.plan, execution.rank
        # Calls with chunks can have more launches than a stream holds. The host would then wait for a lost rank before
        # it issues the collective that ends this wait.
        is_short = self.plan.chunk == 0 and not execution.is_dense
        copies = copies_of(execution.group, device) if is_short else None
        kept, key = self.plan.kept, ("rows", device)
        self._rows = kept.get(key) or kept.setdefault(key, [Rows(self.plan, keys, device) for keys in (False, True)])
        key = "heads", self.rank, heads, device, wires, parts, copies is None
        found = kept.get(key)
        if found is None:
            self.parts = parts or self._fast_parts(heads, wires[0], copies is not None)
            self.groups = self._groups(heads, wires)
            found = kept[key] = self.parts, self.groups, self._layout(wires)
        self.parts, self.groups, layout = found
        self.copies = None if copies is None else copies.begin(execution.group, layout)

    def _fast_parts(self, heads: tuple[int, int], wires: _Wires, has_copies: bool) -> _Parts:
        """Ranks whose heads are no whole groups of query heads have one group. Messages of the group have one, because
        each of them needs much time of the host.
        """
        shares = [share_of(self.plan, heads, rank)[0] for rank in range(self.plan.ranks)]
        of_key_head = heads[0] // heads[1]
        key_heads = [share.k_end - share.k_begin for share in shares]
        whole = all(share.q_end - share.q_begin == of_key_head * n for share, n in zip(shares, key_heads))
        if not has_copies or not whole:
            return (1,)
        least = min(key_heads)
        pairs = float(self.plan.on_one_rank().steps(0, 0)["pairs"].sum())
        shapes = Shapes(*heads, wires[0].shape[-1], wires[2].shape[-1])
        count = min(self.rows(_QUERIES).counts) * wires[0].bytes * of_key_head * least
        return parts_of(count, shapes.seconds(pairs, of_key_head * least), least)

    def _groups(self, heads: tuple[int, int], wires: tuple[_Wires, _Wires]) -> list[Group]:
        """Divides all heads into groups."""
        found = [share_of(self.plan, heads, rank) for rank in range(self.plan.ranks)]
        shares = [share for share, _ in found]
        if len(self.parts) == 1:
            return [Group(shares, found[self.rank][1], self._routes(shares, wires))]
        of_key_head, groups = heads[0] // heads[1], []
        ends = list(itertools.accumulate(self.parts, initial=0))
        for first, last in zip(ends, ends[1:]):
            counts = [(s.k_begin, s.k_end - s.k_begin) for s in shares]
            bounds = [(k + n * first // ends[-1], k + n * last // ends[-1]) for k, n in counts]
            own = [Heads(begin * of_key_head, end * of_key_head, begin, end) for begin, end in bounds]
            groups.append(Group(own, [own[self.rank]], self._routes(own, wires)))
        return groups

    def _routes(self, shares: list[Heads], wires: tuple[_Wires, _Wires]) -> tuple[list[Route], list[Route]]:
        """Returns the routes to heads and to tokens. A message has the heads of one rank and the tokens of another."""
        to_heads, to_tokens = [], []
        for peer in (peer for peer in range(self.plan.ranks) if peer != self.rank):
            own, others = (
                [self._parcel(shares[a], b, x) for x in wires] for a, b in ((self.rank, peer), (peer, self.rank))
            )
            to_heads.append(Route(peer, others[0], own[0]))
            to_tokens.append(Route(peer, own[1], others[1]))
        return to_heads, to_tokens

    def _parcel(self, share: Heads, rank: int, wires: _Wires) -> Parcel:
        """Returns the message with heads of the tokens of a rank."""
        rows = [self.rows(wire.kind).counts[rank] for wire in wires]
        return Parcel(rows, [_slice(share, wire.kind) for wire in wires], wires)

    def _layout(self, wires: tuple[_Wires, _Wires]) -> Layout:
        """Returns the places of the messages to heads of all groups, and then of the messages to tokens."""
        ranks, sizes = range(self.plan.ranks), []
        for to_tokens, group in itertools.product((False, True), self.groups):
            # The receiver's share arrives of the sender's tokens, or the sender's share of the receiver's tokens.
            message = [[(a, b) if to_tokens else (b, a) for b in ranks] for a in ranks]
            sizes.append(
                [
                    [0 if s == t else self._parcel(group.shares[s], t, wires[to_tokens]).bytes for s, t in row]
                    for row in message
                ]
            )
        return Layout(sizes)

    def end(self) -> None:
        """Follows the last read of messages."""
        if self.copies is not None:
            self.copies.end()

    def rows(self, kind: int) -> Rows:
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
) -> tuple[Tensor, Tensor, list[Tensor], _Parts]:
    """Returns out and lse of the rank's rows, the tensors that the backward reads, and the parts of the groups. The
    backward reads the tensors of _KEPT of each group.
    """
    heads = q.shape[1], k.shape[1]
    moved = [(q, _QUERIES), (k, _KEYS), (v, _KEYS), *_bias_of(execution)]
    returned = Wire(_QUERIES, q.dtype, v.shape[2:]), Wire(_QUERIES, torch.float32, torch.Size())  # out and lse
    exchange = _Exchange(execution, heads, q.device, (_wires(moved), returned), ())
    arriving = [_ToHeads(exchange, n, moved) for n in range(len(exchange.groups))]
    returning, kept = [], []
    for n, (group, to_heads) in enumerate(zip(exchange.groups, arriving)):
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
        returning.append(_ToTokens(exchange, n, [(out, _QUERIES), (lse, _QUERIES)]))
        kept += [all_q, all_k, all_v, out, lse, *bias]
    out, lse = q.new_empty((*q.shape[:2], v.shape[-1])), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for to_tokens in returning:
        to_tokens.store([out, lse])
    exchange.end()
    return out, lse.t().contiguous(), kept, exchange.parts


_KEPT = ("q", "k", "v", "out", "lse", "bias")


def _wires(tensors: _Tensors) -> _Wires:
    return tuple(Wire(kind, x.dtype, x.shape[2:]) for x, kind in tensors)


def _joined(runs: tuple[Tensor, ...]) -> Tensor:
    """Returns the heads of all runs."""
    return runs[0].contiguous() if len(runs) == 1 else torch.cat(runs, dim=1)


def backward(
    execution: Execution, tensors: dict[str, Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    """Returns the gradients of q, k and v in a type, and fills in the execution's dbias. tensors: dout, dlse, and kept
    and parts, the results of forward(). shapes: of q, k and v.
    """
    dout, dlse = tensors["dout"], tensors["dlse"]
    heads = shapes[0][1], shapes[1][1]
    moved = [(dout, _QUERIES), *([] if dlse is None else [(dlse.t(), _QUERIES)])]
    # Gradients of key heads that several ranks share are summed in float32.
    plan = execution.plan
    is_shared = _shares_key_heads(plan, heads)
    own = torch.float32 if is_shared else dtype
    returned = tuple(Wire(kind, own, shape[2:]) for kind, shape in zip((_QUERIES, _KEYS, _KEYS), shapes))
    if execution.dbias is not None:
        shape = execution.dbias.shape[2:]
        returned = *returned, Wire(_QUERIES, _own_type(execution.dbias), shape)
    exchange = _Exchange(execution, heads, dout.device, (_wires(moved), returned), tensors["parts"])
    arriving = [_ToHeads(exchange, n, moved) for n in range(len(exchange.groups))]
    count, returning = len(tensors["kept"]) // len(exchange.groups), []
    for n, (group, to_heads) in enumerate(zip(exchange.groups, arriving)):
        whole = dict(zip(_KEPT, tensors["kept"][n * count : (n + 1) * count]))
        whole.update(zip(("dout", "dlse"), to_heads.wait()))
        outputs = _group_backward(exchange, group, whole, (heads[0], own))
        returning.append(_ToTokens(exchange, n, outputs))
    create = torch.zeros if is_shared else torch.empty
    results = [create(shape, dtype=own, device=dout.device) for shape in shapes]
    if execution.dbias is not None:
        results.append(_own_dbias(execution.dbias, dout))
    for to_tokens in returning:
        to_tokens.store(results, is_shared)
    exchange.end()
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


def _shares_key_heads(plan: ContextPlan, heads: tuple[int, int]) -> bool:
    """Returns whether a key head has several ranks."""
    key = "shared", heads
    found = plan.kept.get(key)
    if found is None:
        shares = [share_of(plan, heads, rank)[0] for rank in range(plan.ranks)]
        shares = [share for share in shares if share.k_begin < share.k_end]
        found = plan.kept[key] = any(a.k_end > b.k_begin for a, b in zip(shares, shares[1:]))
    return found


def _own_dbias(dbias: Tensor, q: Tensor) -> Tensor:
    """Returns zeros for q's rows and heads, (rows, heads, keys)."""
    return torch.zeros((*q.shape[:2], dbias.shape[-1]), dtype=_own_type(dbias), device=dbias.device)


def _own_type(dbias: Tensor) -> torch.dtype:
    return torch.float32 if len(dbias) == 1 else dbias.dtype


def _store_dbias(heads: Tensor, dbias: Tensor) -> None:
    """Stores the gradients of all heads, (rows, heads, keys), or their sum in this order."""
    if len(dbias) == 1:
        dbias[0] = in_order(heads.unbind(1), torch.zeros_like(heads[:, 0]))
    else:
        dbias.copy_(heads.transpose(0, 1))
