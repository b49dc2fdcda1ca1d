"""Attention of requests that share the first pages of their keys."""

from __future__ import annotations

from typing import Any

from tandem import _arrays
from tandem._api import use_torch
from tandem._arrays import flag_of
from tandem._binding import cascade, check_mask, number_of


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

    The shared part runs as one sequence per group, without a mask. The call merges the own part with the shared part,
    both in float32. Results do not have the bits of a call without groups. On a GPU all lengths and tables are read on
    the device, and a graph may be replayed with other values. The function has no gradient.
    """
    check_mask(causal, "bottom_right")
    groups = {
        "cu_seqlens_group": cu_seqlens_group, "group_page_table": group_page_table, "group_seqused_k": group_seqused_k,
    }  # fmt: skip
    views = {name: _arrays.view(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    if len(views["q"].shape) != 3:
        raise ValueError(f"q (shape {tuple(views['q'].shape)}) must be (total_q, heads, head_dim): pass packed queries")
    total = views["q"].shape[0]
    call_args = {
        **views, "sink": sink if sink is None else _arrays.view(sink, "sink"), "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": seqused_k, "page_table": page_table,
        "max_seqlen_q": total if max_seqlen_q is None else _arrays.integer(max_seqlen_q, "max_seqlen_q"),
        "softmax_scale": number_of(softmax_scale, "softmax_scale"), "softcap": number_of(softcap, "softcap"),
        "causal": bool(causal), "batch_invariant": flag_of(batch_invariant, "batch_invariant"),
    }  # fmt: skip
    max_rows = total if max_rows_group is None else _arrays.integer(max_rows_group, "max_rows_group")
    front = use_torch()
    if front is not None and isinstance(q, front.Tensor):
        result = front.cascade(call_args, groups, max_rows)
    else:
        _arrays.check_foreign((*call_args.items(), *groups.items()))
        call_args["out"], call_args["lse"] = result = _arrays.new_outputs(views["q"], views["v"], False)
        cascade(call_args, {name: _arrays.view(x, name) for name, x in groups.items()}, max_rows)
        result = tuple(_arrays.like(q, x) for x in result)
    return result if return_lse else result[0]
