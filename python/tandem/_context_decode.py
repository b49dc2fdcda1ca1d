"""Decoding over the ranks of a torch process group, each of which has a part of the keys of every sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem import _api, _binding
from tandem._context_transport import all_gathered, checked_group
from tandem._errors import Unsupported
from tandem._score_mod import Mod
from tandem._tensors import check_tensor

LAYOUTS = ("interleaved", "contiguous")
# A GPU merges more parts only into float32.
_MAX_PARTS = 60


def context_parallel_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    total_k: Tensor,
    group: Any = None,
    layout: str = "interleaved",
    page_table: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of a few queries to keys that the ranks of a group share. All ranks call together.

    q : (batch, seqlen_q, heads_q, head_dim), the same on every rank. The last row matches a sequence's last key.
    k, v : the rank's keys, (batch, rows, heads_k, ...), or (pages, page_size, heads_k, ...) with page_table.
    total_k : (batch) int32 on q's device, the keys of each sequence on all ranks.
    group : a torch process group with a backend for q's device; None: the default group.
    layout : "interleaved": key j is row j // ranks of rank j % ranks. "contiguous": key j is row j % rows of rank
        j // rows, where rows is the size of k's dimension, or pages of page_table times page_size.
    page_table : (batch, pages) int32, for the rank's rows.
    causal, softmax_scale, softcap, sink : as :func:`tandem.attention`. sink is whole on every rank.
    return_lse : also return the logarithm of each softmax's sum, (batch, heads_q, seqlen_q) float32.

    One all-gather collects float32 parts, and every rank merges them in the order of the ranks. The results have the
    same bits on all ranks, and no gradients. The host waits for no device.
    """
    group = _check({"q": q, "k": k, "v": v, "total_k": total_k, "sink": sink}, layout, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "page_table": page_table}
    rows = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    if layout == "interleaved":
        used = (total_k + (ranks - 1 - rank)).div(ranks, rounding_mode="floor").clamp(0, rows)
        if causal and q.shape[1] > 1:
            text = "k * ranks + rank <= q + total[batch] - seqlen_q"
            options["mask_mod"] = Mod(text, ranks=ranks, rank=rank, total=total_k)
    else:
        used = (total_k - rank * rows).clamp(0, rows)
        if causal and q.shape[1] > 1:
            options.update(causal=True, diagonal_offset=(total_k - (q.shape[1] + rank * rows)).to(torch.int32))
    if rank == 0:
        options["sink"] = sink  # the sink enters each softmax once
    with torch.no_grad():
        part = _api.attention(
            q, k, v, seqused_k=used.to(torch.int32), return_lse=True, out_dtype=torch.float32, **options
        )
        out, lse = _merged(part, q.dtype, group)
    return (out, lse) if return_lse else out


def _check(tensors: dict[str, Any], layout: str, group: Any) -> Any:
    """Returns the group."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout ({layout!r}) must be one of {', '.join(LAYOUTS)}: choose one of them")
    for name, x in tensors.items():
        if x is None and name == "sink":
            continue
        check_tensor(x, name)
        if x.device != tensors["q"].device:
            raise ValueError(f"{name} ({x.device}) must be on q's device, {tensors['q'].device}: move the tensor")
        if x.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"{name} must not require a gradient in decoding: call under torch.no_grad()")
        if name in ("q", "k", "v") and x.dim() != 4:
            raise ValueError(
                f"{name} ({x.dim()} dimensions) must be (batch, seqlen, heads, head_dim): pass dense tensors or pages"
            )
    total_k = tensors["total_k"]
    if total_k.dtype != torch.int32 or tuple(total_k.shape) != (tensors["q"].shape[0],):
        raise ValueError(
            f"total_k ({total_k.dtype}, shape {tuple(total_k.shape)}) must be int32 of shape "
            f"({tensors['q'].shape[0]}): pass the keys of each sequence"
        )
    return checked_group(group, tensors["q"].device.type)


def _merged(part: tuple[Tensor, Tensor], dtype: torch.dtype, group: Any) -> tuple[Tensor, Tensor]:
    """Merges the parts of all ranks after one all-gather."""
    out, lse = part
    both = torch.cat((out.reshape(-1), lse.reshape(-1)))
    parts = [x.split((out.numel(), lse.numel())) for x in all_gathered(both, group)]
    outs, lses = [x.view(out.shape) for x, _ in parts], [x.view(lse.shape) for _, x in parts]
    result = torch.empty_like(out, dtype=dtype if len(parts) <= _MAX_PARTS else out.dtype)
    result_lse = torch.empty_like(lse)
    if out.numel() > 0:
        _binding.merge(outs, lses, result, result_lse)
    return result.to(dtype), result_lse
