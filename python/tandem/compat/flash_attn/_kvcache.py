"""Appends keys and values to a cache and attends to the cache, for the functions flash_attn_with_kvcache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import tandem
from tandem import _torch_api
from tandem._arrays import integer
from tandem._tensors import check_layout, check_out, shares_memory
from tandem.compat._arguments import in_words, is_tensor, places, refuse_8_bit, unit_stride

_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "window": "window_size"}


class Pages(NamedTuple):
    """The table of a cache in pages, (batch, max_pages) int32, and the name of its argument."""

    table: torch.Tensor
    name: str


class Cache(NamedTuple):
    """Keys and values, (batch_cache, seqlen_cache, heads_k, head_dim), and the part of them that a call reads.

    With pages, k and v are (pages, page_size, heads_k, head_dim).
    """

    k: torch.Tensor
    v: torch.Tensor
    seqlens: Any = None  # an int, or (batch) int32: the cached keys; None: all
    batch_idx: torch.Tensor | None = None  # (batch) int32: the row of the cache; None: row b
    leftpad: torch.Tensor | None = None  # (batch) int32: the place of the first key; None: 0
    pages: Pages | None = None

    def capacity(self) -> int:
        """Returns the places of a sequence."""
        return self.k.shape[1] * (1 if self.pages is None else self.pages.table.shape[1])


class Rotary(NamedTuple):
    """The rotation of new keys by their place in the cache, and of queries."""

    cos: torch.Tensor | None  # (places, rotary_dim / 2)
    sin: torch.Tensor | None
    interleaved: bool
    each_query: bool  # queries have the places of the new keys; else the first
    seqlens: torch.Tensor | None = None  # (batch) int32: the first new key; None: Cache.seqlens


def longest_q(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: Any) -> int:
    """Returns the queries of the longest sequence, or a bound on them."""
    _check_rank(q, cu_seqlens_q)
    if cu_seqlens_q is None:
        return q.shape[1]
    return q.shape[0] if max_seqlen_q is None else integer(max_seqlen_q, "max_seqlen_q")


def pages_of(name: str, table: torch.Tensor | None, **refused: torch.Tensor | None) -> Pages | None:
    """Returns the pages of a call. refused: arguments that must be None with pages."""
    if table is None:
        return None
    is_tensor(table, name)
    if table.dtype != torch.int32 or table.dim() != 2:
        raise ValueError(
            f"{name} ({table.dtype}, shape {tuple(table.shape)}) must be int32, of shape (batch, max_pages): convert it"
        )
    for other, value in refused.items():
        if value is not None:
            raise tandem.Unsupported(f"{other} must be None with {name}: select rows of {name} instead")
    return Pages(table, name)


@torch.no_grad()
def append_and_attend(
    cache: Cache,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary: Rotary,
    options: dict[str, Any],
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) after k and v were written into the cache. Refusals come before any write.

    q (batch, seqlen_q, heads, head_dim), or (total_q, ...) with cu_seqlens_q; k and v (batch, seqlen_new, heads_k,
    head_dim), or (total_new, ...) with cu_seqlens_k_new. options: tandem.attention's, with max_seqlen_q as the only
    length. With pages, rows of q after the last sequence are not read; on the CPU they give 0 and -inf.
    """
    refuse_8_bit(q=q, k_cache=cache.k, v_cache=cache.v)
    _check_rank(q, cu_seqlens_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    cache = _with_selected_pages(_checked(cache, q, batch))
    if (out := options.get("out")) is not None:
        _check_out(out, cache, q, k, v)
        if torch.compiler.is_compiling() or not _torch_api.is_eager(q, cache.k, cache.v):
            options = {**options, "out": None}
            result, lse = append_and_attend(cache, q, k, v, rotary, options, cu_seqlens_q, cu_seqlens_k_new)
            return out.copy_(result), lse
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, batch, may_have_rest=cache.pages is not None)
    if cu_seqlens_q is not None and not q.is_cuda and int(cu_seqlens_q[-1]) < q.shape[0]:

        def attend(q, options):
            return append_and_attend(cache, q, k, v, rotary, options, cu_seqlens_q, cu_seqlens_k_new)

        return _with_rest(q, options, attend, int(cu_seqlens_q[-1]))
    used = cache.seqlens
    if k is not None or v is not None:
        _check_new(cache, k, v, batch, cu_seqlens_k_new)
        _check_overlaps(cache, {"q": q, "cu_seqlens_q": cu_seqlens_q, **options})
        used = used + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    _check_values(cache, used)
    _check_pages_of_new(cache, k, used)
    tables = _rotary_tables(rotary, cache, q, k, cu_seqlens_q, cu_seqlens_k_new)
    q = unit_stride(q, "q")
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format) if tables else q

    tensors, arguments, unsort = _call(cache, rotated, used, cu_seqlens_q, options)
    if k is not None:
        in_words(_names(cache), tandem.check, "forward", *tensors, **arguments)
        if tables:
            tables.update(q=q, q_out=rotated, cu_seqlens_q=cu_seqlens_q)
        _append(cache, unit_stride(k, "k"), unit_stride(v, "v"), cu_seqlens_k_new, tables)
        copied = any(_address(x) != _address(y) for x, y in zip(tensors[1:], cache))
        if copied or (tables and tensors[0] is not rotated):
            tensors, arguments, unsort = _call(cache, rotated, used, cu_seqlens_q, options)
    return unsort(*in_words(_names(cache), tandem.attention, *tensors, return_lse=True, **arguments))


def _check_out(out, cache, q, k, v):
    """Refuses an out that attention could not write after the new keys are in the cache."""
    check_out(out, q, cache.v, {"q": q, "k_cache": cache.k, "v_cache": cache.v, "k": k, "v": v}.items())
    if out.stride(-1) != 1:
        raise ValueError(f"out (strides {out.stride()}) must have a contiguous last dimension: allocate such a tensor")


def _check_overlaps(cache, read):
    """Refuses caches over tensors that attention reads after the new keys are in the caches."""
    if torch.compiler.is_compiling():
        return
    for mod in (name for name in ("score_mod", "mask_mod") if read.get(name) is not None):
        read.update((f"{mod}.{name}", x) for name, x in read[mod].bindings.items())
    for name, into in (("k_cache", cache.k), ("v_cache", cache.v)):
        for other, x in read.items():
            if isinstance(x, torch.Tensor) and shares_memory(into, x):
                raise ValueError(f"{name}.data overlaps {other}: pass separate memory for {other}")


def _with_rest(q, options, attend, rows):
    """Returns attend's (out, lse) for the first rows of q, with rows of 0 and -inf after them."""
    target = options.get("out")
    few, lse = attend(q[:rows], {**options, "out": None if target is None else target[:rows]})
    out = few.new_zeros(q.shape[0], *few.shape[1:]) if target is None else target
    if target is None:
        out[:rows] = few
    return out, F.pad(lse, (0, q.shape[0] - rows), value=float("-inf"))


def _names(cache):
    return _NAMES if cache.pages is None else {**_NAMES, "page_table": cache.pages.name}


def _check_pages_of_new(cache, k, used):
    """Refuses new keys without a page. Tensors on a GPU are not checked."""
    if k is None or cache.pages is None or used.is_cuda:
        return
    table, name = cache.pages
    first = torch.arange(table.shape[1])[None] * cache.k.shape[1]
    grows = (used > cache.seqlens)[:, None]
    new = grows & (first + cache.k.shape[1] > cache.seqlens[:, None]) & (first < used[:, None])
    page = table[new]
    if page.numel() and not 0 <= int(page.min()) <= int(page.max()) < cache.k.shape[0]:
        raise ValueError(
            f"{name} (pages {int(page.min())} to {int(page.max())} of the new keys) must name pages of the cache, 0 to "
            f"{cache.k.shape[0] - 1}: give new keys pages before the call"
        )


def _append(cache, k, v, cu_seqlens_k_new, rotation):
    """Writes the new keys and values into the cache, and rotates keys and queries."""
    tandem.append_kv(
        k,
        v,
        cache.k,
        cache.v,
        page_table=None if cache.pages is None else cache.pages.table,
        cache_seqlens=cache.seqlens,
        cache_batch_idx=cache.batch_idx,
        cu_seqlens_new=cu_seqlens_k_new,
        **rotation,
    )


def _call(cache, q, used, cu_seqlens_q, options):
    """Returns (q, k, v), the other arguments of tandem.attention, and a function that restores the order of q.

    If sequences do not fill the cache's rows from their beginning, the cache is read as one packed tensor. Each
    sequence then begins at its first key and has its used length, and sequences are sorted by the cache's rows.
    """
    longest = None if cu_seqlens_q is None else options.get("max_seqlen_q")
    options = {name: x for name, x in options.items() if name != "max_seqlen_q"}
    if cache.pages is not None and cache.leftpad is not None:
        cache = _gathered(cache, used)
    if cache.pages is not None:
        arguments = {**options, "seqused_k": used, "page_table": cache.pages.table}
        if cu_seqlens_q is not None:
            arguments.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=q.shape[0] if longest is None else longest)
        return (q, cache.k, cache.v), arguments, lambda out, lse: (out, lse)
    if cache.batch_idx is None and cache.leftpad is None and cu_seqlens_q is None:
        batch = q.shape[0]
        return (q, cache.k[:batch], cache.v[:batch]), {**options, "seqused_k": used}, lambda out, lse: (out, lse)
    batch = used.numel()
    k_cache, v_cache = cache.k, cache.v
    row = torch.arange(batch, device=q.device) if cache.batch_idx is None else cache.batch_idx.long()
    if row.unique().numel() < batch:  # sequences that share a row would overlap
        k_cache, v_cache = k_cache[row], v_cache[row]
        row = torch.arange(batch, device=q.device)
    spacing = _spacing(k_cache, v_cache)
    if spacing is None:
        k_cache, v_cache, spacing = k_cache.contiguous(), v_cache.contiguous(), k_cache.shape[1]

    order = row.argsort()
    leftpad = torch.zeros_like(used) if cache.leftpad is None else cache.leftpad
    begin = (row * spacing + leftpad)[order]
    first = int(begin[0])
    k, v = _rows(k_cache, spacing)[first:], _rows(v_cache, spacing)[first:]

    sequence = places(q, cu_seqlens_q)[0].expand(q.shape[:-2]).flatten()
    sort = order.argsort()[sequence].argsort(stable=True)
    lengths = sequence.bincount(minlength=batch)[order]
    slopes = options["alibi_slopes"]
    target = options.get("out")
    arguments = {
        **options,
        "out": None,
        "alibi_slopes": slopes[order] if slopes is not None and slopes.shape[:-1] == (batch,) else slopes,
        "cu_seqlens_q": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "cu_seqlens_k": F.pad(begin - first, (0, 1), value=k.shape[0]).int(),
        "max_seqlen_q": longest or int(lengths.max()),
        "max_seqlen_k": k.shape[0],
        "seqused_k": (used - leftpad)[order],
    }

    def unsort(out, lse):
        back = sort.argsort()
        out, lse = out[back].reshape(*q.shape[:-1], v.shape[-1]), lse[:, back]
        out = out if target is None else target.copy_(out)
        return out, lse if cu_seqlens_q is not None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)

    return (q.flatten(0, -3)[sort], k, v), arguments, unsort


def _with_selected_pages(cache):
    """Returns a cache in pages with the rows of its table that batch_idx names."""
    if cache.pages is None or cache.batch_idx is None:
        return cache
    table, name = cache.pages
    row = cache.batch_idx.long()
    if not row.is_cuda and not 0 <= int(row.min()) <= int(row.max()) < table.shape[0]:
        raise ValueError(
            f"cache_batch_idx ({int(row.min())} to {int(row.max())}) must name rows of {name}, 0 to "
            f"{table.shape[0] - 1}: correct the indices"
        )
    return cache._replace(batch_idx=None, pages=Pages(table[row], name))


def _gathered(cache, used):
    """Returns a cache without pages: a copy of the pages of each sequence."""
    table, name = cache.pages
    pages, size = cache.k.shape[:2]
    first = torch.arange(table.shape[1], device=table.device)[None] * size
    needed = (first + size > cache.leftpad[:, None]) & (first < used[:, None])
    if not table.is_cuda and bool((needed & ((table < 0) | (table >= pages))).any()):
        raise ValueError(f"{name} must name pages of the cache, 0 to {pages - 1}, for all used keys: correct the pages")
    index = table.long().clamp(0, pages - 1)
    k, v = (x[index].flatten(1, 2) for x in (cache.k, cache.v))
    return cache._replace(k=k, v=v, pages=None)


def _address(x):
    return x.untyped_storage().data_ptr()


def _spacing(*caches):
    """Returns the distance between the rows of the caches' batches, in places; None if it is no whole number."""
    found = set()
    for x in caches:
        spacing = x.shape[1] if x.shape[0] == 1 else x.stride(0) // max(x.stride(1), 1)
        whole = x.shape[0] == 1 or spacing * x.stride(1) == x.stride(0)
        fits = whole and x.shape[1] <= spacing and x.shape[0] * spacing < 2**31
        found.add(spacing if fits else None)
    return found.pop() if len(found) == 1 else None


def _rows(x, spacing):
    """Returns a view of all of the cache's places, and of the memory between its batches:

    (places, heads_k, head_dim).
    """
    return x.as_strided(((x.shape[0] - 1) * spacing + x.shape[1], *x.shape[2:]), x.stride()[1:])


def _rotary_tables(rotary, cache, q, k, cu_seqlens_q, cu_seqlens_k_new):
    """Returns the rotation as arguments of tandem.append_kv; an empty dict if there is no rotation."""
    cos, sin = rotary.cos, rotary.sin
    if cos is None and sin is None:
        return {}
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x is not None:
            is_tensor(x, name)
            _check_device(name, x, q)
            if not x.is_floating_point():
                raise ValueError(f"{name} ({x.dtype}) must be floating-point: convert it")
    if cos is None or sin is None or cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            "rotary_cos and rotary_sin must both be (places, rotary_dim / 2), with rotary_dim at most head_dim "
            f"({q.shape[-1]}): pass such tables"
        )
    if k is None:
        raise ValueError("rotary_cos must not be given without k, because it rotates new keys: pass k and v as well")
    if rotary.seqlens is not None:
        _check_index("rotary_seqlens", rotary.seqlens, cache.seqlens.numel(), q)
    start = cache.seqlens if rotary.seqlens is None else rotary.seqlens
    if not start.is_cuda:
        _check_positions(start, cos, ((q, cu_seqlens_q, rotary.each_query), (k, cu_seqlens_k_new, True)))
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = (unit_stride(x if x.dtype in (q.dtype, wide) else x.to(wide), "rotary_cos") for x in (cos, sin))
    return {
        "rotary_cos": cos,
        "rotary_sin": sin,
        "rotary_seqlens": rotary.seqlens,
        "rotary_interleaved": rotary.interleaved,
        "single_q_position": not rotary.each_query,
    }


def _check_positions(start, cos, rows):
    """Refuses positions outside the tables."""
    for x, cu_seqlens, by_place in rows:
        sequence, place = places(x, cu_seqlens)
        place = start.long()[sequence] + (place if by_place else 0)
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < cos.shape[0]:
            raise ValueError(
                f"rotary_cos ({cos.shape[0]} places) must have places {int(place.min())} to {int(place.max())}: "
                "compute it for all places of the cache"
            )


def _check_rank(q, cu_seqlens_q):
    if cu_seqlens_q is not None:
        is_tensor(cu_seqlens_q, "cu_seqlens_q")
    check_layout(q, "q")
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(
            f"q (shape {tuple(q.shape)}) must be (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with "
            "cu_seqlens_q: reshape it"
        )


def _checked(cache, q, batch):
    """Returns cache, with its lengths as a tensor."""
    k, v = cache.k, cache.v
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache (shapes {tuple(k.shape)} and {tuple(v.shape)}) must be (batch, seqlen, heads_k, "
            "head_dim), alike except for head_dim: reshape them"
        )
    for name, x in (("k_cache", k), ("v_cache", v)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} (strides {x.stride()}) must have a contiguous last dimension: copy it")
    if batch < 1 or (cache.batch_idx is None and cache.pages is None and batch > k.shape[0]):
        raise ValueError(
            f"q's batch ({batch}) must be at least 1 and at most k_cache's ({k.shape[0]}): pass cache_batch_idx if "
            "sequences share a row of the cache"
        )
    seqlens = cache.capacity() if cache.seqlens is None else cache.seqlens
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"q, k_cache and v_cache (on {q.device}, {k.device} and {v.device}) must be on one device: move them there"
        )
    if not isinstance(seqlens, torch.Tensor):
        if not isinstance(seqlens, int):
            raise TypeError(
                f"cache_seqlens ({type(seqlens).__name__}) must be an int, or a tensor of int32 (batch): convert it"
            )
        if not 0 <= seqlens <= cache.capacity():
            _refuse_lengths(cache, seqlens, seqlens, seqlens)
        seqlens = torch.full((batch,), seqlens, dtype=torch.int32, device=q.device)
    for name, x in (
        ("cache_seqlens", seqlens),
        ("cache_batch_idx", cache.batch_idx),
        ("cache_leftpad", cache.leftpad),
    ):
        if x is not None:
            _check_index(name, x, batch, q)
    if cache.pages is not None:
        table, name = cache.pages
        _check_device(name, table, q)
        if cache.batch_idx is None and table.shape[0] != batch:
            raise ValueError(
                f"{name} ({table.shape[0]} rows) must have a row for each of the {batch} sequences, or "
                "cache_batch_idx: pass one row of pages per sequence"
            )
    return cache._replace(seqlens=seqlens)


def _check_device(name, x, q):
    if x.device != q.device:
        raise ValueError(f"{name} (on {x.device}) must be on q's device ({q.device}): move it there")


def _check_index(name, x, length, q):
    is_tensor(x, name)
    if x.dtype != torch.int32 or tuple(x.shape) != (length,):
        raise ValueError(f"{name} ({x.dtype}, shape {tuple(x.shape)}) must be int32, of shape ({length},): convert it")
    _check_device(name, x, q)


def _check_cu_seqlens(name, cu_seqlens, x, batch, may_have_rest=False):
    if cu_seqlens is None:
        return
    _check_index(name, cu_seqlens, batch + 1, x)
    if cu_seqlens.is_cuda:
        return
    end = int(cu_seqlens[-1])
    ends_well = end <= x.shape[0] if may_have_rest else end == x.shape[0]
    if int(cu_seqlens[0]) != 0 or not ends_well or int(cu_seqlens.diff().min()) < 0:
        raise ValueError(
            f"{name} ({cu_seqlens.tolist()}) must begin with 0, never decrease, and end with {x.shape[0]}: pass the "
            "cumulative sums of the lengths"
        )


def _check_new(cache, k, v, batch, cu_seqlens_k_new):
    if k is None or v is None:
        raise ValueError("k and v must be given together, because both are appended to the cache: pass both or neither")
    rank = 4 if cu_seqlens_k_new is None else 3
    for name, x in (("k", k), ("v", v)):
        is_tensor(x, name)
        if x.dim() != rank:
            raise ValueError(
                f"{name} (shape {tuple(x.shape)}) must be (batch, seqlen_new, heads_k, head_dim), or (total_new, "
                "heads_k, head_dim) with cu_seqlens_k_new: reshape it"
            )
        _check_device(name, x, cache.k)
    _check_cu_seqlens("cu_seqlens_k_new", cu_seqlens_k_new, k, batch)
    lead = (batch, k.shape[1]) if cu_seqlens_k_new is None else (k.shape[0],)
    for name, x, into in (("k", k, cache.k), ("v", v, cache.v)):
        if tuple(x.shape) != (*lead, *into.shape[2:]) or x.dtype != into.dtype:
            raise ValueError(
                f"{name} ({x.dtype}, shape {tuple(x.shape)}) must be {into.dtype} and {(*lead, *into.shape[2:])}, as "
                f"{name}_cache of shape {tuple(into.shape)} requires: convert or reshape it"
            )


def _refuse_lengths(cache, least, most, used):
    remedy = "enlarge the cache" if cache.pages is None else f"add columns to {cache.pages.name}"
    raise ValueError(
        f"cache_seqlens ({least} to {most}) must be at least 0 and, with new keys ({used} in all), at most the cache's "
        f"{cache.capacity()} places: {remedy}"
    )


def _check_values(cache, used):
    """Refuses lengths and indices beyond the cache, which would be written there. Tensors on a GPU are not
    checked, because reading them waits for the GPU, which a CUDA graph forbids."""
    if used.is_cuda:
        return
    rows, seqlen = cache.k.shape[0], cache.capacity()
    if int(cache.seqlens.min()) < 0 or int(used.max()) > seqlen:
        _refuse_lengths(cache, int(cache.seqlens.min()), int(cache.seqlens.max()), int(used.max()))
    if cache.leftpad is not None and bool(((cache.leftpad < 0) | (cache.leftpad > cache.seqlens)).any()):
        raise ValueError("cache_leftpad must be at least 0 and at most cache_seqlens: pass the place of each first key")
    if cache.batch_idx is not None and not 0 <= int(cache.batch_idx.min()) <= int(cache.batch_idx.max()) < rows:
        raise ValueError(
            f"cache_batch_idx ({int(cache.batch_idx.min())} to {int(cache.batch_idx.max())}) must name rows of the "
            f"cache, 0 to {rows - 1}: correct the indices"
        )
