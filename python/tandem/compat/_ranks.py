"""Shards of other libraries as calls of tandem.context_parallel."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist

import tandem
from tandem._context_plan import ContextPlan
from tandem.compat._arguments import in_words

_MAX_PLANS = 64
_plans: OrderedDict[Any, ContextPlan] = OrderedDict()


def plan_of(lengths: tuple[int, ...], ranks: int, layout: str, causal: bool, window: Any) -> ContextPlan:
    """Returns a plan, which further calls with equal arguments share."""
    key = lengths, ranks, layout, causal, window
    found = _plans.get(key)
    if found is None:
        found = _plans[key] = tandem.ContextPlan(
            lengths, ranks, layout=layout, causal=causal, window=window, alignment="top_left"
        )
        if len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    _plans.move_to_end(key)
    return found


def ranks_of(group: Any) -> int:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group (without torch.distributed's initialization) must be a process group: call "
            "torch.distributed.init_process_group first"
        )
    return dist.get_world_size(group)


def attend_dense(q: Any, k: Any, v: Any, plan: ContextPlan, names: dict[str, str], **options: Any) -> Any:
    """Returns out and lse of shards (batch, rows, heads, head_dim) of equal sequences, of which plan has one.

    The heads of all sequences become the heads of one sequence.
    """
    batch = q.shape[0]
    folded = [x.transpose(0, 1).flatten(1, 2) for x in (q, k, v)]
    for name in ("alibi_slopes", "sink"):
        x = options.get(name)
        if x is not None:
            options[name] = x.flatten() if x.dim() == 2 else x.repeat(batch)
    bias = options.get("bias")  # (1 or batch, 1 or heads, rows, keys)
    if bias is not None:
        shared = bias.shape[0] == bias.shape[1] == 1
        options["bias"] = bias[0] if shared else bias.expand(batch, q.shape[2], -1, -1).flatten(0, 1)
    out, lse = in_words(names, tandem.context_parallel, *folded, plan=plan, return_lse=True, **options)
    out = out.unflatten(1, (batch, q.shape[2])).transpose(0, 1)
    return out, lse.unflatten(0, (batch, q.shape[2]))


def lengths_of(cu_seqlens: torch.Tensor, name: str) -> tuple[int, ...]:
    """Returns the lengths of packed sequences on the host."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise TypeError(f"{name} must be a tensor of (sequences + 1) int32: pass the beginnings and the total")
    starts = cu_seqlens.tolist()
    return tuple(end - begin for begin, end in zip(starts, starts[1:]))
