"""Attention of requests that share the first pages of their keys."""

from __future__ import annotations

from typing import Any

from tandem import _arrays
from tandem._api import attention, merge


def cascade_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    page_table: Any,
    seqused_k: Any,
    cu_seqlens_group: Any,
    group_page_table: Any,
    group_seqused_k: Any,
    max_seqlen_q: int | None = None,
    max_rows_group: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = True,
    sink: Any = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention to keys that a group of requests shares, and to each request's own keys. Shared keys are read once.

    q : (total_q, heads, head_dim), packed by cu_seqlens_q (batch + 1, int32). Requests of a group are neighbours.
    k, v : pages, (pages, page_size, heads_k, ...), of shared and own keys.
    page_table, seqused_k : the pages and the number of each request's own keys, which follow the shared keys.
    cu_seqlens_group : (groups + 1) int32, the first row of q of each group; the last entry equals cu_seqlens_q's.
    group_page_table, group_seqused_k : the pages and the number of each group's shared keys; 0 for no shared keys.
    max_seqlen_q, max_rows_group : bounds on the queries of a request and of a group; None: total_q.

    The other arguments are :func:`attention`'s. causal hides own keys only. Returns out, or (out, lse).

    The shared part runs as one sequence per group, without a mask. :func:`merge` adds the own part to the shared part,
    both in float32. Results do not have the bits of a call without groups. On a GPU all lengths and tables are read on
    the device, and a graph may be replayed with other values. The function has no gradient.
    """
    total = q.shape[0]
    common = {
        "softmax_scale": softmax_scale, "softcap": softcap, "batch_invariant": batch_invariant,
        "out_dtype": None if str(q.dtype).endswith("float64") else "float32", "return_lse": True,
    }  # fmt: skip
    shared = attention(
        q, k, v, cu_seqlens_q=cu_seqlens_group, page_table=group_page_table, seqused_k=group_seqused_k,
        max_seqlen_q=total if max_rows_group is None else max_rows_group, **common,
    )  # fmt: skip
    own = attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, page_table=page_table, seqused_k=seqused_k, causal=causal, sink=sink,
        max_seqlen_q=total if max_seqlen_q is None else max_seqlen_q, **common,
    )  # fmt: skip
    out, lse = merge(*zip(shared, own))
    if out.dtype != q.dtype:
        out = out.to(q.dtype) if _arrays.is_torch(out) else out.astype(q.dtype)
    return (out, lse) if return_lse else out
