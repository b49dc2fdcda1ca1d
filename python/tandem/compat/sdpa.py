"""torch.nn.functional.scaled_dot_product_attention, on tandem.attention: ``tandem.sdpa(query, key, value, ...)``.

The module can be called itself; ``tandem.sdpa.scaled_dot_product_attention`` is the same function, and the form that
torch.compile can trace.
"""

from __future__ import annotations

import inspect
import math
import sys
import types

import torch

import tandem
from tandem.compat._arguments import in_words, is_tensor, unit_stride

# Our arguments' names in this interface.
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "softmax_scale": "scale", "causal": "is_causal"}


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """``softmax(scale * query key^T + attn_mask) value``, with torch's arguments and rules.

    query : (..., heads, L, E). key, value : (..., heads, S, E) and (..., heads, S, Ev). Any number of leading
        dimensions, also none; they broadcast.
    attn_mask : broadcasts to (..., heads, L, S). Boolean: True where a query sees a key. Floating-point: added to the
        scores, with a gradient; numbers below -2.3e38 hide a key as -inf does.
    dropout_p : below 1, rounded to a multiple of 1/256; applies whenever it is not 0.
    is_causal : hides key j from query i where j > i (top-left); attn_mask must then be None.
    scale : factor of the products; None: 1 / sqrt(E).
    enable_gqa : query's heads are a multiple of key's and value's, and share them.

    Returns (..., heads, L, Ev). A row whose keys are all hidden gives 0, as in torch since 2.5. Tensors are read in
    place; transposed views of (batch, seqlen, heads, head_dim) are not copied.
    Raises ValueError or TypeError for wrong arguments, tandem.Unsupported for calls that are not served.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None where is_causal is True: hide later keys in attn_mask instead")
    for name, x in (("query", query), ("key", key), ("value", value)):
        is_tensor(x, name)
    if query.is_nested or key.is_nested or value.is_nested:
        raise tandem.Unsupported(
            "nested tensors are not served: pass their values to tandem.attention as packed tensors with cu_seqlens"
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            f"query, key and value ({query.dim()}, {key.dim()} and {value.dim()} dimensions) must have at least 2: "
            "pass (..., L, E), (..., S, E) and (..., S, Ev)"
        )
    batch, heads, heads_k, lead = _leading(query, key, value, enable_gqa)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (key, value))
    bias = None
    if attn_mask is not None:
        bias = _bias(attn_mask, (*lead, query.shape[-2], key.shape[-2]), batch)
    out = in_words(
        _NAMES,
        tandem.attention,
        _dense(query, batch, heads),
        _dense(key, batch, heads_k),
        _dense(value, batch, heads_k),
        softmax_scale=scale,
        causal=is_causal,
        alignment="top_left",
        bias=bias,
        dropout_p=dropout_p,
    )
    out = out.transpose(1, 2)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


def _leading(query, key, value, enable_gqa):
    """Returns the batch dimensions, query's and key's heads, and all leading dimensions of the result."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    if not enable_gqa:
        lead = _broadcast(shapes, query, key, value)
        # One head of keys for all queries equals grouped heads, so that it need not be repeated.
        heads_k = 1 if all(math.prod(s[-1:]) == 1 for s in shapes[1:]) else lead[-1]
        return lead[:-1], lead[-1] if lead else 1, heads_k, lead
    if min(map(len, shapes)) < 1 or any(s[-1] == 0 or shapes[0][-1] % s[-1] for s in shapes[1:]):
        raise ValueError(
            f"query's heads (shape {tuple(query.shape)}) must be a multiple of key's and value's (shapes "
            f"{tuple(key.shape)} and {tuple(value.shape)}) where enable_gqa is True: correct the heads"
        )
    heads, heads_k = shapes[0][-1], shapes[1][-1] if shapes[1][-1] == shapes[2][-1] else shapes[0][-1]
    batch = _broadcast([s[:-1] for s in shapes], query, key, value)
    return batch, heads, heads_k, (*batch, heads)


def _broadcast(shapes, query, key, value):
    if all(s == shapes[0] for s in shapes):
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(
            f"the leading dimensions of query, key and value (shapes {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}) must be equal or 1: expand them or pass enable_gqa=True"
        ) from None


def _dense(x, batch, heads):
    """Returns x (..., heads, seqlen, dim) as (batch, seqlen, heads, dim), without a copy if possible."""
    if x.shape[:-2] != (*batch, heads):
        x = x.expand(*batch, heads, *x.shape[-2:])
    if x.dim() != 4:
        x = x.reshape(math.prod(batch), heads, *x.shape[-2:])
    return unit_stride(x.transpose(1, 2), "query, key or value")


def _bias(mask, scores, batch):
    """Converts mask to tandem.attention's bias: (batch|1, heads_q|1, L|1, S|1)."""
    is_tensor(mask, "attn_mask")
    pairs = zip(reversed(mask.shape), reversed(scores))
    if not 2 <= mask.dim() <= len(scores) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(
            f"attn_mask (shape {tuple(mask.shape)}) must have at least 2 dimensions, and broadcast to {scores}: "
            "reshape it"
        )
    own = math.prod(mask.shape[:-3])
    if own != 1:
        mask, own = mask.expand(*batch, *mask.shape[-3:]), math.prod(batch)
    return unit_stride(mask.reshape(own, math.prod(mask.shape[-3:-2]), *mask.shape[-2:]), "attn_mask")


class _Callable(types.ModuleType):
    """A module that is also its function."""

    __signature__ = inspect.signature(scaled_dot_product_attention)
    __call__ = staticmethod(scaled_dot_product_attention)


sys.modules[__name__].__class__ = _Callable
