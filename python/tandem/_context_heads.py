"""The execution of a ContextPlan by heads on torch tensors: ranks exchange tokens for heads, and results return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class _HeadExchange:
    """Moves tensors between the rank's tokens with all heads, and all tokens with the rank's heads."""

    def __init__(self, execution: Execution, heads: tuple[int, int], device: torch.device) -> None:
        self.execution, self.plan, self.rank = execution, execution.plan, execution.rank
        self.shares = [share_of(self.plan, heads, rank)[0] for rank in range(self.plan.ranks)]
        self.runs = share_of(self.plan, heads, self.rank)[1]
        key = "tokens", device
        found = self.plan.kept.get(key)
        if found is None:
            found = self.plan.kept[key] = [self._indices(keys, device) for keys in (False, True)]
        self.indices = found

    @property
    def shares_no_key_head(self) -> bool:
        """Is True if each key head has one rank."""
        shares = [share for share in self.shares if share.k_begin < share.k_end]
        return all(a.k_end <= b.k_begin for a, b in zip(shares, shares[1:]))

    def _indices(self, keys: bool, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Returns the rows of each rank in the batch, and the place of each row of the batch in the ranks' rows."""
        rows = [self.plan.indices(rank, keys) for rank in range(self.plan.ranks)]
        order = np.argsort(np.concatenate(rows))
        return [torch.from_numpy(x).to(device) for x in rows], torch.from_numpy(order).to(device)

    def _slice(self, rank: int, kind: int) -> slice:
        share = self.shares[rank]
        heads = (share.q_begin, share.q_end), (share.k_begin, share.k_end), (0, 1)
        return slice(*heads[kind])

    def _shape(self, x: Tensor, kind: int, rows_of: int, heads_of: int) -> tuple[int, ...]:
        heads = self._slice(heads_of, kind)
        return self.plan.rows(rows_of)[kind == _KEYS], heads.stop - heads.start, *x.shape[2:]

    def _move(self, sent: Callable[[int], list[Tensor]], shapes: Callable[[int], list[tuple[int, ...]]]) -> Any:
        """Returns the tensors of each rank."""
        own = sent(self.rank)
        received = [own if peer == self.rank else None for peer in range(self.plan.ranks)]
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for peer in range(self.plan.ranks):
            if peer == self.rank:
                continue
            sends += [(peer, x) for x in sent(peer)]
            received[peer] = [x.new_empty(shape) for x, shape in zip(own, shapes(peer))]
            receives += [(peer, x) for x in received[peer]]
        self.execution.messages(sends, receives).wait()
        return received

    def to_heads(self, tensors: _Tensors) -> list[Tensor]:
        """tensors: rows of this rank with all heads."""

        def shapes(peer: int) -> list[tuple[int, ...]]:
            return [self._shape(x, kind, peer, self.rank) for x, kind in tensors]

        received = self._move(lambda peer: [x[:, self._slice(peer, kind)].contiguous() for x, kind in tensors], shapes)
        return [
            torch.cat([part[n] for part in received]).index_select(0, self.indices[kind == _KEYS][1])
            for n, (_, kind) in enumerate(tensors)
        ]

    def to_tokens(self, tensors: _Tensors) -> list[list[Tensor]]:
        """tensors: all rows with this rank's heads. Returns the rows of this rank with the heads of each rank."""

        def shapes(peer: int) -> list[tuple[int, ...]]:
            return [self._shape(x, kind, self.rank, peer) for x, kind in tensors]

        def sent(peer: int) -> list[Tensor]:
            return [x.index_select(0, self.indices[kind == _KEYS][0][peer]) for x, kind in tensors]

        received = self._move(sent, shapes)
        return [[part[n] for part in received] for n in range(len(tensors))]

    def options(self, run: Heads) -> dict[str, Any]:
        slopes = self.execution.options.get("alibi_slopes")
        if slopes is None:
            return self.execution.options
        return {**self.execution.options, "alibi_slopes": slopes[..., run.q_begin : run.q_end].contiguous()}

    def places(self, run: Heads) -> tuple[slice, slice]:
        """Returns the query heads and the key heads of a run among this rank's heads."""
        own = self.shares[self.rank]
        q = slice(run.q_begin - own.q_begin, run.q_end - own.q_begin)
        return q, slice(run.k_begin - own.k_begin, run.k_end - own.k_begin)

    def summed(self, parts: list[Tensor], heads_k: int) -> Tensor:
        """Returns gradients of key heads, of which several ranks may have a part, summed in the order of the ranks."""
        if self.shares_no_key_head:
            return torch.cat(parts, dim=1)
        total = parts[0].new_zeros((parts[0].shape[0], heads_k, *parts[0].shape[2:]))
        for rank, part in enumerate(parts):
            total[:, self._slice(rank, True)] += part
        return total


def _bias_of(execution: Execution) -> _Tensors:
    """Returns the bias as (rows, heads, keys), as one or no tensor."""
    bias = execution.bias
    return [] if bias is None else [(bias.transpose(0, 1), _ONE_HEAD if len(bias) == 1 else _QUERIES)]


def _biases(bias: list[Tensor], dbias: Tensor | None, heads: slice) -> Biases:
    """Returns the bias and the gradient of some of this rank's heads."""
    parts = [x.transpose(0, 1) if x.shape[1] == 1 else x[:, heads].transpose(0, 1) for x in bias]
    return parts[0] if parts else None, None if dbias is None else dbias[:, heads].transpose(0, 1)


def forward(execution: Execution, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    exchange = _HeadExchange(execution, (q.shape[1], k.shape[1]), q.device)
    moved = [(q, _QUERIES), (k, _KEYS), (v, _KEYS), *_bias_of(execution)]
    all_q, all_k, all_v, *bias = exchange.to_heads(moved)
    out = q.new_empty((*all_q.shape[:2], v.shape[-1]))
    lse = torch.empty(all_q.shape[:2], dtype=torch.float32, device=q.device)
    for run in exchange.runs:
        heads, key_heads = exchange.places(run)
        own_sink = None if sink is None else sink[run.q_begin : run.q_end]
        alone = execution.alone(exchange.options(run), run.q_begin, q.shape[1], _biases(bias, None, heads))
        part = _context_torch.forward(alone, all_q[:, heads], all_k[:, key_heads], all_v[:, key_heads], own_sink)
        out[:, heads], lse[:, heads] = part[0], part[1].t()
    outs, lses = exchange.to_tokens([(out, _QUERIES), (lse, _QUERIES)])
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1).t().contiguous()


def backward(execution: Execution, tensors: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Returns the gradients of q, k and v, and fills in the execution's dbias."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    exchange = _HeadExchange(execution, (q.shape[1], k.shape[1]), q.device)
    names = [name for name, x in tensors.items() if x is not None]
    rows = [tensors[name].t() if name in ("lse", "dlse") else tensors[name] for name in names]
    moved = [(x, _KEYS if name in ("k", "v") else _QUERIES) for name, x in zip(names, rows)]
    received = exchange.to_heads([*moved, *_bias_of(execution)])
    whole, bias = dict(zip(names, received)), received[len(names) :]
    dbias = None if execution.dbias is None else _own_dbias(execution.dbias, whole["q"])
    # Gradients of key heads that several ranks share are summed in float32.
    own = dtype if exchange.shares_no_key_head else torch.float32
    gradients = [torch.empty(whole[name].shape, dtype=own, device=q.device) for name in ("q", "k", "v")]
    for run in exchange.runs:
        heads, key_heads = exchange.places(run)
        of_run: dict[str, Any] = {"dlse": None}
        for name, x in whole.items():
            x = x[:, key_heads if name in ("k", "v") else heads]
            of_run[name] = x.t() if name in ("lse", "dlse") else x
        alone = execution.alone(exchange.options(run), run.q_begin, q.shape[1], _biases(bias, dbias, heads))
        parts = _context_torch.backward(alone, of_run, own)
        gradients[0][:, heads] = parts[0]
        for x, part in zip(gradients[1:], parts[1:]):
            x[:, key_heads] = part
    outputs = [*zip(gradients, (_QUERIES, _KEYS, _KEYS)), *([] if dbias is None else [(dbias, _QUERIES)])]
    dq, dk, dv, *dbiases = exchange.to_tokens(outputs)
    if execution.dbias is not None:
        _store_dbias(torch.cat(dbiases[0], dim=1), execution.dbias)
    sums = [torch.cat(dq, dim=1), exchange.summed(dk, k.shape[1]), exchange.summed(dv, v.shape[1])]
    return [x.to(dtype) for x in sums]


def _own_dbias(dbias: Tensor, q: Tensor) -> Tensor:
    """Returns zeros for all rows and this rank's heads, (rows, heads, keys)."""
    dtype = torch.float32 if len(dbias) == 1 else dbias.dtype
    return torch.zeros((*q.shape[:2], dbias.shape[-1]), dtype=dtype, device=dbias.device)


def _store_dbias(heads: Tensor, dbias: Tensor) -> None:
    """Stores the gradients of all heads, (rows, heads, keys), or their sum in this order."""
    if len(dbias) == 1:
        dbias[0] = in_order(heads.unbind(1), torch.zeros_like(heads[:, 0]))
    else:
        dbias.copy_(heads.transpose(0, 1))
