"""A call of context_parallel on torch tensors by an execution of this package: agreement, both passes, dsink."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _binding, _context_heads, _context_torch, _gradients, _score_mod
from tandem._arrays import wants_gradient
from tandem._context_captured import Captured
from tandem._context_chunks import TreeSum, chunk_rows
from tandem._context_execution import PLACE, Execution
from tandem._context_plan import ContextPlan
from tandem._context_transport import all_gathered
from tandem._errors import Unsupported

# Multiprocessors that attention leaves to NCCL's kernels while messages are in flight.
SPARE_SMS = 0


class TorchCall:
    """The plan, the group and the options of a call, for both passes. group None: the plan has one rank."""

    def __init__(self, plan: ContextPlan, rank: int, group: Any, execution: str, options: dict[str, Any]) -> None:
        self.options = options
        self.by_heads = execution == "heads" and plan.ranks > 1
        rounds_at_once = 1 if execution == "ring" else max(1, plan.ranks - 1)
        self.execution = Execution(plan, rank, group, rounds_at_once, options, SPARE_SMS)
        self.name = execution
        self.sources: list[Tensor] = []  # by heads: tensors of the graphs of q, k and v

    def forward(self, tensors: dict[str, Any], sink: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns out, lse, and further tensors that the backward needs. tensors: q, k, v and bias."""
        execution = replace(self.execution, bias=tensors["bias"])
        qkv = [tensors[name] for name in ("q", "k", "v")]
        self.shapes, self.dtype = [tuple(x.shape) for x in qkv], qkv[0].dtype
        if self.by_heads:
            out, lse, kept, self.parts = _context_heads.forward(execution, *qkv, sink)
            return out, lse, kept
        return *_context_torch.forward(execution, *qkv, sink), []

    def backward(
        self, tensors: dict[str, Any], sink: Tensor | None, dbias: Tensor | None, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Returns the gradients of q, k, v, sink and the wanted tensors of score_mod, and fills in dbias. tensors: as
        forward(), out, lse, dout, dlse, and kept, the further tensors of the forward, if there are any.
        """
        if dbias is not None:
            dbias.zero_()  # columns without a step
        plan, captured = self.execution.plan, None
        if any(wanted):
            captured = Captured(plan, self.options["score_mod"], wanted, self.by_heads)
        execution = replace(self.execution, bias=tensors["bias"], dbias=dbias, captured=captured)
        gradients: list[Tensor | None]
        if self.by_heads:
            tensors = {**tensors, "parts": self.parts}
            gradients = [*_context_heads.backward(execution, tensors, self.shapes, self.dtype)]
        else:
            gradients = [*_context_torch.backward(execution, tensors, self.dtype)]
        gradients.append(None if sink is None else self._dsink(tensors, sink))
        if captured is None:
            return [*gradients, *(None for _ in wanted)]
        heads = self.shapes[0][1], self.shapes[1][1]
        heads_k = [heads[1]] * plan.ranks
        if self.by_heads:
            shares = [_context_heads.share_of(plan, heads, rank)[0] for rank in range(plan.ranks)]
            heads_k = [share.k_end - share.k_begin for share in shares]
        return [*gradients, *captured.finish(execution, heads_k)]

    def agree(self, tensors: dict[str, Tensor | None], with_gradients: bool) -> None:
        """Compares the call between the ranks, at the first call with a plan, shapes and options. Raises on all ranks
        if the calls differ or if a rank refuses its call.
        """
        plan = self.execution.plan
        shapes = [
            (name, x.dtype, (x.shape[0], x.shape[2], x.requires_grad) if name == "bias" else x.shape[1:])
            for name, x in tensors.items()
            if x is not None
        ]
        words = repr((self.name, shapes, sorted(self._numbers().items()), with_gradients))
        agreed = plan.kept.setdefault("agreed", set())
        key = words, id(self.execution.group), *(tensors[name].shape[0] for name in ("q", "k"))
        key = *key, None if tensors["bias"] is None else tensors["bias"].shape[1]
        if key in agreed:
            return
        words = repr((plan.hash, words))
        error = self._refusal(tensors, with_gradients)
        number = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "little")
        own = torch.tensor([int(error is not None), number], device=tensors["q"].device)
        results = [x.tolist() for x in all_gathered(own, self.execution.group)]
        if error is not None:
            raise error
        for peer, (refused, _) in enumerate(results):
            if refused:
                raise ValueError(f"rank {peer} refused the call: read the error message of this rank")
        for peer, (_, other) in enumerate(results):
            if other != results[0][1]:
                raise ValueError(
                    f"plan, shapes or options of rank {peer} must equal the ones of rank 0: pass equal arguments on "
                    "all ranks"
                )
        agreed.add(key)

    def _numbers(self) -> dict[str, Any]:
        """Returns the options that ranks compare: numbers, and texts and types of expressions."""
        numbers = {n: x for n, x in self.execution.options.items() if not isinstance(x, Tensor)}
        for name in _score_mod.MODS:
            if numbers.get(name) is not None:
                text, values = numbers[name]
                types = [
                    (key, (x.dtype, x.shape, x.requires_grad) if isinstance(x, Tensor) else x) for key, x, _ in values
                ]
                numbers[name] = text, types
        return numbers

    def _refusal(self, tensors: dict[str, Any], with_gradients: bool) -> Exception | None:
        try:
            self._check(tensors, with_gradients)
        except (ValueError, TypeError, RuntimeError) as error:
            return error
        return None

    def _check(self, tensors: dict[str, Any], with_gradients: bool) -> None:
        plan, rank = self.execution.plan, self.execution.rank
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        if plan.blocks is not None and plan.chunk > 0:
            raise Unsupported("plan.blocks must be None with a chunk on a GPU: pass mask_mod, or chunk=0")
        if plan.blocks is not None and q.is_cuda and any(x % 128 for x in plan.block_lists.sizes):
            raise Unsupported(
                f"plan.blocks.BLOCK_SIZE {plan.block_lists.sizes} must be multiples of 128 on a GPU: pass larger "
                "blocks, or mask_mod alone"
            )
        for name, x, rows in (("q", q, plan.rows(rank)[0]), ("k", k, plan.rows(rank)[1])):
            if x.shape[0] != rows:
                raise ValueError(
                    f"{name} rows ({x.shape[0]}) must be the {rows} of rank {rank} in this plan: shard the batch by "
                    "the plan's layout"
                )
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"v rows ({v.shape[0]}) must be the {k.shape[0]} of k: pass one row for each key")
        sink, slopes = tensors.get("sink"), tensors.get("alibi_slopes")
        if sink is not None and tuple(sink.shape) != (q.shape[1],):
            raise ValueError(f"sink (shape {tuple(sink.shape)}) must be the {q.shape[1]} query heads: pass one each")
        documents = len(plan.lengths())
        if slopes is not None and tuple(slopes.shape) not in ((q.shape[1],), (documents, q.shape[1])):
            raise ValueError(
                f"alibi_slopes (shape {tuple(slopes.shape)}) must be (heads_q) or ({documents} documents, heads_q): "
                "pass one slope for each head"
            )
        bias = tensors["bias"]
        if bias is not None:
            self._check_bias(q, bias)
        self._check_engine(q, k, v, bias, with_gradients)

    def _check_bias(self, q: Tensor, bias: Tensor) -> None:
        keys = int(self.execution.plan.lengths(keys=True).max(initial=0))
        heads, rows, columns = bias.shape
        if heads not in (1, q.shape[1]):
            raise ValueError(f"bias.shape[0] ({heads}) must be 1 or the {q.shape[1]} query heads: expand the bias")
        if rows != q.shape[0]:
            raise ValueError(f"bias.shape[1] ({rows}) must be the {q.shape[0]} q rows: pass rows of the rank's queries")
        if columns < keys:
            raise ValueError(
                f"bias.shape[2] ({columns}) must be at least the {keys} keys of the longest document: pass a column "
                "for each key position"
            )

    def _check_engine(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_gradients: bool) -> None:
        """Raises if the device does not serve one row of such tensors."""
        q, k, v = (x.new_empty((1, 1, *x.shape[1:])) for x in (q, k, v))
        options = {n: x for n, x in self.execution.options.items() if not isinstance(x, Tensor)}
        if self.execution.reads_places:
            options["places"] = torch.zeros((1, PLACE), dtype=torch.int32, device=q.device)
        lse = torch.empty((1, q.shape[2], 1), dtype=torch.float32, device=q.device)
        call_args = {**options, "q": q, "k": k, "v": v, "out": q.new_empty((*q.shape[:-1], v.shape[-1])), "lse": lse}
        if bias is not None:
            call_args["bias"] = bias.new_empty((1, bias.shape[0], 1, 1))
        _binding.call(_binding.CHECK + _binding.FORWARD, call_args)
        if not with_gradients:
            return
        if not _gradients.is_own(q):
            raise Unsupported("q (this GPU) must be on a Hopper GPU for gradients: call under torch.no_grad()")
        gradients = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        if bias is not None and bias.requires_grad:
            gradients["dbias"] = torch.empty_like(call_args["bias"])
        if captured := _score_mod.tensors_of(options.get("score_mod")):
            places = [torch.empty_like(x, dtype=torch.float32) if wants_gradient(x) else None for x in captured]
            call_args["score_mod"] = _score_mod.replaced(options["score_mod"], captured, places)
        _binding.call(_binding.CHECK + _binding.BACKWARD, {**call_args, "dout": call_args["out"], **gradients})

    def _dsink(self, tensors: dict[str, Any], sink: Tensor) -> Tensor:
        """The sink enters each row once: dsink = sum over rows of p_sink * (dlse - dout * out), in float64."""
        plan, rank = self.execution.plan, self.execution.rank
        gradient = -(tensors["dout"].float() * tensors["out"].float()).sum(-1).t().double()
        if tensors["dlse"] is not None:
            gradient = gradient + tensors["dlse"]
        logits = sink.detach().double()[:, None]
        p = torch.where(torch.isneginf(logits), 0.0, torch.exp(logits - tensors["lse"].double()))
        rows = p * gradient  # (heads, rows)
        if plan.chunk == 0:
            return _in_order(all_gathered(rows.sum(1), self.execution.group)).to(sink.dtype)
        chunks = [chunk_rows(plan, peer, keys=False) for peer in range(plan.ranks)]
        own = rows.new_zeros((max(map(len, chunks)), rows.shape[0]))
        for n, (_, begin, end) in enumerate(chunks[rank]):
            own[n] = rows[:, begin:end].sum(1)
        sums = {
            key: part[n]
            for peer, part in enumerate(all_gathered(own, self.execution.group))
            for n, (key, _, _) in enumerate(chunks[peer])
        }
        trees: dict[int, TreeSum] = {}
        for document, number in sorted(sums):
            leaves = range(-(-int(plan.lengths()[document]) // plan.chunk))
            tree = trees.setdefault(document, TreeSum(leaves))
            tree.add(0, number, sums[document, number], torch.add)
        parts = [tree.values()[0] for tree in trees.values()]
        return (_in_order(parts) if parts else torch.zeros_like(sink)).to(sink.dtype)


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
