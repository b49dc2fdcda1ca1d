"""Appending keys and values to a cache, with rotary position embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem import _arrays
from tandem._api import use_torch
from tandem._arrays import flag_of
from tandem._binding import append_kv as append_to


def append_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    slot_mapping: Any = None,
    page_table: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cu_seqlens_new: Any = None,
    q: Any = None,
    q_out: Any = None,
    cu_seqlens_q: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_seqlens: Any = None,
    positions: Any = None,
    rotary_interleaved: bool = False,
    single_q_position: bool = False,
) -> Any:
    """Writes new keys and values into a cache, in place. With q, returns q rotated by its positions.

    k, v : (batch, seqlen_new, heads_k, ...), or (total_new, heads_k, ...) with cu_seqlens_new or slot_mapping; None to
        rotate q only.
    k_cache, v_cache : (pages, page_size, heads_k, ...); without page_table and slot_mapping (rows, seqlen, heads_k,
        ...). Strides are free, but the last dimension is contiguous.
    slot_mapping : (length) int64, page * page_size + place of each of the first keys; a negative slot skips the key.
    page_table : (batch, max_pages) int32. New keys follow the first cache_seqlens (batch, int32) keys of a sequence.
    cache_batch_idx : (batch) int32, the row of page_table or of the cache.
    q : (batch, seqlen_q, heads, head_dim), or packed with cu_seqlens_q or positions. q_out : array to write to; it may
        be q.
    rotary_cos, rotary_sin : (table_rows, rotary_dim / 2), to rotate k and q in float32 with one rounding.
    positions : (length) int64, with slot_mapping. Otherwise positions begin at rotary_seqlens, or at cache_seqlens.
    rotary_interleaved : pairs are dimensions (2 i, 2 i + 1); otherwise (i, i + rotary_dim / 2).
    single_q_position : all queries of a sequence have the position of its first new key.

    The CPU refuses a slot, place or position outside the cache or the tables before it writes anything. A GPU skips
    such a key, does not rotate at such a position, and never waits. The CPU also refuses two new keys that differ and
    have one place. The function has no gradient: outside of torch.no_grad() it refuses tensors that require one.
    """
    arrays = {name: x for name, x in locals().items() if name in _arrays.APPEND_TENSORS}
    flags = flag_of(rotary_interleaved, "rotary_interleaved"), flag_of(single_q_position, "single_q_position")
    front = use_torch()
    if front is not None and isinstance(k if q is None else q, front.Tensor):
        if q is not None and q_out is None:
            arrays["q_out"] = front.torch.empty_like(q, memory_format=front.torch.contiguous_format)
        front.append_kv(arrays, flags)
        return arrays["q_out"]
    _arrays.check_foreign(arrays.items())
    views = {name: None if x is None else _arrays.view(x, name) for name, x in arrays.items()}
    if q is not None and q_out is None:
        views["q_out"] = np.empty(views["q"].shape, views["q"].dtype)
    append_to(views, flags)
    return _arrays.like(q, views["q_out"]) if q_out is None and q is not None else q_out
