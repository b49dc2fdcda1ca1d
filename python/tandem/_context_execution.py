"""One rank's part in an attention on torch tensors: calls, merges and messages, in the order of the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from tandem import _binding, _score_mod
from tandem._context_calls import Call, Schedule
from tandem._context_captured import Captured, in_order
from tandem._context_chunks import ChunkSchedule
from tandem._context_plan import ContextPlan
from tandem._context_transport import Messages

Biases = tuple[Optional[Tensor], Optional[Tensor]]  # a bias and its gradient

# Clocks between the start of messages and the next call.
HEAD_START = 15_000


@dataclass
class Execution:
    """The arguments of both passes. The call's first query head is first_head of heads_q; None: the call has all heads.

    options: softmax_scale, softcap, alibi_slopes, score_mod, mask_mod, dropout_p and seed as call_args.
    """

    plan: ContextPlan
    rank: int
    group: Any  # None: the plan has one rank
    rounds_at_once: int
    options: dict[str, Any]
    # Multiprocessors that calls leave to messages while messages are in flight.
    spare_sms: int = 0
    first_head: int = 0
    heads_q: int | None = None
    # The bias of the rank's queries, (heads or 1, rows, keys), and its gradient, which may have more heads.
    bias: Tensor | None = None
    dbias: Tensor | None = None
    # The backward: gradients of the tensors that score_mod reads.
    captured: Captured | None = None
    busy: bool = field(default=False, init=False)

    def schedule(self, q: Tensor, k: Tensor) -> Schedule:
        group = max(1, q.shape[1] // max(1, k.shape[1]))
        key = "schedule", self.rank, self.rounds_at_once, self.by_distance, group, self.is_dense
        found = self.plan.kept.get(key)
        if found is None:
            found = self.plan.kept[key] = Schedule(self.plan, *key[1:])
        return found

    def chunk_schedule(self) -> ChunkSchedule:
        key = "chunk schedule", self.rank, self.bias is not None or self.captured is not None
        found = self.plan.kept.get(key)
        if found is None:
            found = self.plan.kept[key] = ChunkSchedule(self.plan, *key[1:])
        return found

    @property
    def is_dense(self) -> bool:
        """Is True if calls have a bias or block lists, which packed calls refuse."""
        return self.bias is not None or self.plan.block_lists is not None

    @property
    def by_distance(self) -> bool:
        """Is True if a call reads positions, which the mask of joined steps does not have."""
        return self.reads_places or self.options.get("alibi_slopes") is not None or self.bias is not None

    @property
    def reads_places(self) -> bool:
        """Is True if calls need the tensor of places. The mask has ALiBi's distances, unless rows have strides."""
        strides = self.plan.layout == "striped" and self.plan.chunk == 0 and self.plan.ranks > 1
        names = (*_score_mod.MODS, *(("alibi_slopes",) if strides else ()))
        return bool(self.options.get("dropout_p")) or any(self.options.get(name) is not None for name in names)

    def alone(self, options: dict[str, Any], first_head: int, heads_q: int, biases: Biases) -> Execution:
        """Returns the execution of all tokens on this rank. biases: of its heads."""
        heads = {"first_head": first_head, "heads_q": heads_q}
        tensors = {"bias": biases[0], "dbias": biases[1], "captured": self.captured}
        return Execution(self.plan.on_one_rank(), 0, None, 1, options, **heads, **tensors)

    def messages(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Messages:
        """Starts messages. On a GPU calls that follow start later than NCCL's kernels, because a call's CTAs keep their
        multiprocessors until its end.
        """
        messages = Messages(self.group, sends, receives)
        if messages.on_gpu:
            torch.cuda._sleep(HEAD_START)
        return messages

    def attend(self, what: int, call: Call, tensors: dict[str, Tensor | None], accumulate: bool = False) -> None:
        """Computes a call. tensors: rows of queries and keys of the call, as call_args."""
        args = {**self.options, **self._sequences(call, tensors["q"])}
        if not call.is_packed:
            tensors = {name: None if x is None else x[None] for name, x in tensors.items()}
        if accumulate:
            args["accumulate"] = True
        if self.plan.chunk > 0:
            args["batch_invariant"] = True
        if self.busy and self.spare_sms > 0 and tensors["q"].is_cuda:
            sms = torch.cuda.get_device_properties(tensors["q"].device).multi_processor_count
            args["sm_limit"] = sms - self.spare_sms
        if self.plan.block_lists is not None:
            args.update(self._block_lists(call, tensors["q"].device))
        if self.bias is None:
            self._call(what, call, {**args, **tensors})
        else:
            self._attend_with_bias(what, call, {**args, **tensors})

    def _call(self, what: int, call: Call, args: dict[str, Any]) -> None:
        if what == _binding.BACKWARD and self.captured is not None:
            self.captured.call(call, args)
        else:
            _binding.call(what, args)

    def _block_lists(self, call: Call, device: torch.device) -> dict[str, Any]:
        """Returns the block mask of a call of one step as call_args."""
        found = call.on_device.get(("blocks", device))
        if found is None:
            (step,) = call.steps
            counts = step.q_end - step.q_row, step.k_end - step.k_row
            lists = self.plan.block_lists.of(step.document, (step.q_begin, step.k_begin), counts)
            found = {name: torch.from_numpy(x).to(device) for name, x in lists.items()}
            call.on_device["blocks", device] = found
        sizes = self.plan.block_lists.sizes
        return {**found, "mask_block_q": sizes[0], "mask_block_k": sizes[1]}

    def _attend_with_bias(self, what: int, call: Call, args: dict[str, Any]) -> None:
        """Computes a call of one step. With chunks the gradient of a bias of all heads is summed in their order, as the
        execution by heads sums it.
        """
        (step,) = call.steps
        last = step.k_begin + (step.k_end - step.k_row - 1) * step.stride
        part = slice(None), slice(step.q_row, step.q_end), slice(step.k_begin, last + 1, step.stride)
        bias, heads = self.bias[part], args["q"].shape[-2]
        dbias = None if what != _binding.BACKWARD or self.dbias is None else self.dbias[part]
        if dbias is None:
            self._call(what, call, {**args, "bias": bias[None]})
            return
        sums_heads = self.plan.chunk > 0 and len(dbias) == 1
        gradient = torch.zeros((heads, *dbias.shape[1:]), device=dbias.device) if sums_heads else dbias
        self._call(what, call, {**args, "bias": bias.expand(gradient.shape)[None], "dbias": gradient[None]})
        if sums_heads:
            dbias[0] = in_order(gradient, torch.zeros_like(gradient[0]))

    def _sequences(self, call: Call, q: Tensor) -> dict[str, Any]:
        """Returns the sequences of a call as call_args, without a copy from the host after the first time."""
        heads = self.first_head, self.heads_q or q.shape[-2]
        found = call.on_device.get((q.device, heads))
        if found is None:
            found = call.on_device[q.device, heads] = _sequences(self.plan, call, heads, q.device)
        args = dict(found)
        places = args["places"]
        slopes = self.options.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            args["alibi_slopes"] = slopes.index_select(0, places[:, 0])
        if not self.reads_places:
            del args["places"]
        return args


# The members of the struct tandem_place.
PLACE = 9


def _sequences(plan: ContextPlan, call: Call, heads: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Returns the sequences, the mask and the places of a call as call_args."""
    cu_q, cu_k, diagonals, steps = call.sequences()
    args: dict[str, Any] = {"alignment": "explicit", "window": call.window}
    if call.is_packed:
        q, k, diagonal = (torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k, diagonals))
        args.update(cu_seqlens_q=q, cu_seqlens_k=k, diagonal_offsets=diagonal)
        for name, cu in (("max_seqlen_q", cu_q), ("max_seqlen_k", cu_k)):
            args[name] = max(end - begin for begin, end in zip(cu, cu[1:]))
    else:
        args["diagonal_offset"] = diagonals[0]
    documents = plan.lengths(), plan.lengths(keys=True), plan.diagonals()
    places = [
        (s.document, s.q_begin, s.k_begin, s.stride, *(int(x[s.document]) for x in documents), *heads) for s in steps
    ]
    args["places"] = torch.tensor(places, dtype=torch.int32, device=device)
    return args


def concatenated(x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the rows of runs, without a copy if they are one compact run."""
    rows = [x[begin:end] for begin, end in runs]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows) if rows else x[:0].contiguous()


class Part:
    """Rows of attention over some keys. Rows without keys have lse -inf, and no value in out."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Part:
        lse = torch.empty((heads, rows), dtype=torch.float32, device=device)
        return cls(torch.empty((rows, heads, dim), dtype=dtype, device=device), lse)

    def rows(self, begin: int, end: int) -> Part:
        return Part(self.out[begin:end], self.lse[:, begin:end])


def merge(parts: Sequence[Part], result: Part) -> None:
    if result.out.numel() > 0:
        _binding.merge([p.out for p in parts], [p.lse for p in parts], result.out, result.lse)


def write(parts: list[Part], sink: Tensor | None, result: Part) -> None:
    """Merges parts and the sink, a key with the value 0 that each row has once."""
    rows, heads, dim = result.out.shape
    if sink is not None:
        zeros = torch.zeros((1, 1, dim), dtype=torch.float32, device=sink.device)
        parts = [*parts, Part(zeros.expand(rows, heads, dim), sink.detach().float()[:, None].expand(heads, rows))]
    if parts:
        merge(parts, result)
    else:
        result.out.zero_()
        result.lse.fill_(-torch.inf)


def attend_backward(
    execution: Execution,
    call: Call,
    tensors: dict[str, Any],
    keys: Sequence[Tensor],
    gradients: dict[str, Tensor],
    accumulate: bool = False,
) -> None:
    """Computes the backward of a call. tensors: of all rows of the rank. keys: k and v of the call's buffer."""
    rows = slice(call.q_begin, call.q_end)
    of_rows: dict[str, Tensor | None] = {name: tensors[name][rows] for name in ("q", "out", "dout")}
    for name in ("lse", "dlse"):
        x = tensors[name]
        of_rows[name] = None if x is None else x[:, rows]
    k, v = (x[call.k_begin : call.k_end] for x in keys)
    execution.attend(_binding.BACKWARD, call, {**of_rows, "k": k, "v": v, **gradients}, accumulate)
