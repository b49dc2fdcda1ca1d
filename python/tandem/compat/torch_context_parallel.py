"""The names of torch.distributed.tensor.experimental for context parallelism, on tandem.context_parallel.

    from tandem.torch_context_parallel import context_parallel  # in place of torch's
    with context_parallel(mesh, buffers=(x, labels), buffer_seq_dims=(1, 1)):
        loss = model(x, labels)  # torch's scaled_dot_product_attention computes all tokens of the group
        loss.backward()

Buffers are sharded in place and restored afterwards, as torch does it. Rank r has the parts r and 2 * ranks - 1 - r of
the 2 * ranks equal parts of the sequence. Lengths need not divide. CPU tensors with gloo and CUDA tensors with NCCL are
served. attn_mask and dropout_p are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tandem
from tandem._context_plan import ContextPlan
from tandem.compat._ranks import attend_dense, plan_of

_ROTATIONS = {"allgather": "gather", "alltoall": "ring"}
_rotation = "allgather"


def set_rotate_method(rotate_method: str) -> None:
    """Chooses the execution: "allgather" is tandem's "gather", and "alltoall" is "ring"."""
    global _rotation
    if rotate_method not in _ROTATIONS:
        raise ValueError(f"rotate_method ({rotate_method!r}) must be 'allgather' or 'alltoall': choose one of them")
    _rotation = rotate_method


def _plan(length: int, ranks: int, causal: bool = False) -> ContextPlan:
    return plan_of((length,), ranks, "per_document", causal, None)


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Shards buffers along their sequence dimensions, and makes torch's scaled_dot_product_attention attend to the
    tokens of all ranks. The backward runs inside of the context or after it.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    if not buffers or len(buffers) != len(dims):
        raise ValueError(
            f"buffer_seq_dims ({len(dims)}) must have a dimension for each of buffers ({len(buffers)}), at least one: "
            "pass the buffers that have the sequence"
        )
    if any(all(x is not other for other in buffers) for x in kept):
        raise ValueError("no_restore_buffers must be a subset of buffers: pass the same tensors")
    group = mesh.get_group()
    length, ranks, rank = buffers[0].shape[dims[0]], dist.get_world_size(group), dist.get_rank(group)
    for n, (x, dim) in enumerate(zip(buffers, dims)):
        if x.shape[dim] != length:
            raise ValueError(f"buffers[{n}].shape[{dim}] ({x.shape[dim]}) must be {length}: pass the whole sequences")
        if x.requires_grad:
            raise ValueError(f"buffers[{n}] must not require a gradient, since it is resized: detach it")
    originals = [None if any(x is other for other in kept) else x.clone() for x in buffers]
    for x, dim in zip(buffers, dims):
        shard = _plan(length, ranks).shard(x, rank, dim=dim)
        x.resize_(shard.shape)
        x.copy_(shard)
    functional = torch.nn.functional
    before, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, _attention(group, length)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
        for x, original in zip(buffers, originals):
            if original is not None:
                x.resize_(original.shape)
                x.copy_(original)


def _attention(group: Any, length: int) -> Any:
    ranks, rank, execution = dist.get_world_size(group), dist.get_rank(group), _ROTATIONS[_rotation]

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of shards (batch, heads, rows, head_dim) to the keys of all ranks."""
        for name, given in (("attn_mask", attn_mask is not None), ("dropout_p", dropout_p != 0)):
            if given:
                raise tandem.Unsupported(f"{name} is not served inside of context_parallel: leave it out")
        plan = _plan(length, ranks, bool(is_causal))
        rows = plan.rows(rank)[0]
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 4 or x.shape[2] != rows:
                raise ValueError(
                    f"{name} (shape {tuple(x.shape)}) must be (batch, heads, {rows} rows, head_dim), a shard of the "
                    f"sequence of {length} tokens: shard it by context_parallel's buffers"
                )
        if not enable_gqa and key.shape[1] != query.shape[1]:
            raise ValueError(f"key.heads ({key.shape[1]}) must be query's {query.shape[1]}: pass enable_gqa=True")
        shards = [x.transpose(1, 2) for x in (query, key, value)]
        names = {"softmax_scale": "scale"}
        out, _ = attend_dense(*shards, plan, names, group=group, execution=execution, softmax_scale=scale)
        return out.transpose(1, 2)

    return scaled_dot_product_attention


def context_parallel_unshard(
    mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: Any = None
) -> list[Tensor]:
    """Returns the whole tensors of shards, without gradients. All ranks call together."""
    if load_balancer is not None:
        raise tandem.Unsupported("load_balancer must be None, because the shards are Tandem's: leave it out")
    group = mesh.get_group()
    results = []
    for x, dim in zip(buffers, seq_dims):
        rows = torch.tensor([x.shape[dim]], device=x.device)
        dist.all_reduce(rows, group=group)
        plan = _plan(int(rows.item()), dist.get_world_size(group))
        results.append(plan.collect(x, group, dim=dim))
    return results
