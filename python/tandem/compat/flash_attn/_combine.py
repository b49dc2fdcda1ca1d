"""Computes attention to all keys from attention to parts of them: flash_attn_combine of FlashAttention-3 and -4."""

from __future__ import annotations

import torch

from tandem._tensors import check_result
from tandem.compat._arguments import is_tensor

_NOTHING = float("-inf")
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Returns (out, lse) of out_partial (parts, ..., heads, head_dim) and lse_partial (parts, ..., heads), in float32.

    Parts are added one after another, so that memory holds only one of them.
    """
    is_tensor(out_partial, "out_partial")
    is_tensor(lse_partial, "lse_partial")
    if not out_partial.is_floating_point() or out_partial.dim() < 2:
        raise ValueError(
            f"out_partial ({out_partial.dtype}, shape {tuple(out_partial.shape)}) must be floating-point, (parts, "
            "batch, seqlen, heads, head_dim): convert or reshape it"
        )
    shape = tuple(out_partial.shape[1:])
    if out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"lse_partial (shape {tuple(lse_partial.shape)}) must have out_partial's shape "
            f"{tuple(out_partial.shape)} without head_dim: pass the lse of each part"
        )
    if out_dtype not in (None, *_TYPES):
        raise ValueError(f"out_dtype ({out_dtype}) must be one of {', '.join(map(str, _TYPES))}: pass one of them")
    if out is not None:
        if out_dtype not in (None, getattr(out, "dtype", None)):
            raise ValueError(f"out_dtype ({out_dtype}) must be None or out's type: omit out_dtype")
        read = {"out_partial": out_partial, "lse_partial": lse_partial}
        check_result(out, "out", shape, _TYPES if out_dtype is None else (out_dtype,), read.items())
    wide = torch.promote_types(out_partial.dtype, torch.float32)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    lse = lse_partial.to(wide).logsumexp(0)
    in_place = out is not None and out.dtype == wide
    total = (out if in_place else out_partial.new_empty(shape, dtype=wide)).zero_()
    part = torch.empty_like(total)
    for one, one_lse in zip(out_partial, lse_partial):
        # A part without visible keys has weight 0, for any contents of its out.
        seen = (one_lse > _NOTHING)[..., None]
        weight = torch.where(seen, (one_lse.to(wide) - lse)[..., None].exp(), 0.0)
        total += part.copy_(one).mul_(weight).masked_fill_(~seen, 0.0)
    if out is not None:
        return out if in_place else out.copy_(total), lse
    return total.to(dtype), lse
