"""The functions of flash_attn.flash_attn_interface (FlashAttention-2), on tandem.attention.

Shapes: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim), or packed (total, heads,
head_dim) with cu_seqlens (batch + 1, int32). Any head_dim up to 512; heads is a multiple of heads_k. softmax_scale is
1 / sqrt(head_dim) unless given; causal and window_size (left, right) measure from the bottom right corner, a negative
bound is no bound; softcap of 0 or less is off; alibi_slopes (heads) or (batch, heads) is float32. dropout_p is rounded
to a multiple of 1/256, and what is kept is scaled by that.

With return_attn_probs the result is (out, softmax_lse, S_dmask). softmax_lse, (batch, heads, seqlen_q) or (heads,
total_q), is float32 and has a gradient. It is +inf for a row that sees no key, where tandem.attention returns -inf.
S_dmask is empty without dropout; with it, it holds the probabilities, (batch, heads, seqlen_q, seqlen_k), negative
where dropout dropped them: a testing aid, as large as the array that attention avoids.

Setting the environment variable FLASH_ATTENTION_DETERMINISTIC=1 is the same as deterministic=True everywhere.

T. Dao. FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning. arXiv 2307.08691.
"""

from __future__ import annotations

import torch

import tandem
from tandem.compat.flash_attn import _kvcache, _packed
from tandem.compat._arguments import bounds, cap, in_words, is_deterministic, is_tensor, places, splits, unit_stride

# Our arguments' names here.
_NAMES = {"window": "window_size", "page_table": "block_table"}
_NAMES_KV = {**_NAMES, **dict.fromkeys("kv", "kv")}
_NAMES_QKV = {
    **_NAMES,
    **dict.fromkeys("qkv", "qkv"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen"),
}


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q (batch, seqlen_q, heads, head_dim) to k and v (batch, seqlen_k, heads_k, head_dim).

    Returns out, like q, or (out, softmax_lse, S_dmask); the module's text has the rules.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q)
    return _attend(q, k, v, options, return_attn_probs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attention of packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim).

    Sequence b holds the rows from cu_seqlens[b] to cu_seqlens[b + 1]; max_seqlen_* are at least the longest. With
    block_table (batch, pages, int32) k and v are (pages, page_size, heads_k, head_dim).
    Returns out, like q, or (out, softmax_lse, S_dmask).
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q)
    options.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if block_table is None:
        options.update(cu_seqlens_k=cu_seqlens_k)
    else:  # pages have no place in a packed tensor: cu_seqlens_k only tells the lengths
        options.update(page_table=block_table, seqused_k=torch.diff(cu_seqlens_k))
    return _attend(q, k, v, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Self-attention of qkv (batch, seqlen, 3, heads, head_dim), whose gradient is one tensor of that shape.

    Returns out (batch, seqlen, heads, head_dim) or (out, softmax_lse, S_dmask).
    """
    _check_packed("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, qkv)
    return _attend_packed(None, qkv, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q (batch, seqlen_q, heads, head_dim) to kv (batch, seqlen_k, 2, heads_k, head_dim).

    Returns out, like q, or (out, softmax_lse, S_dmask). The gradient of kv is one tensor.
    """
    _check_packed("kv", kv, "(batch, seqlen_k, 2, heads_k, head_dim)")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q)
    return _attend_packed(q, kv, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Self-attention of packed sequences: qkv (total, 3, heads, head_dim), whose gradient is one tensor of that shape.

    Returns out (total, heads, head_dim) or (out, softmax_lse, S_dmask).
    """
    _check_packed("qkv", qkv, "(total, 3, heads, head_dim)")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, qkv)
    options.update(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
    return _attend_packed(None, qkv, options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of packed sequences: q (total_q, heads, head_dim) to kv (total_k, 2, heads_k, head_dim).

    Returns out, like q, or (out, softmax_lse, S_dmask). The gradient of kv is one tensor.
    """
    _check_packed("kv", kv, "(total_k, 2, heads_k, head_dim)")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q)
    options.update(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    return _attend_packed(q, kv, options, return_attn_probs)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Appends k and v to a cache, in place, then attends to it. No gradient.

    q (batch, seqlen_q, heads, head_dim); k_cache, v_cache (batch_cache, seqlen_cache, heads_k, head_dim); k and v
    (batch, seqlen_new, heads_k, head_dim) go to the places from cache_seqlens (an int, or (batch) int32) on.
    cache_batch_idx (batch, int32): which of the cache's rows belongs to each row of q. cache_leftpad (batch, int32):
    where the keys of a row begin. rotary_cos, rotary_sin (places, rotary_dim / 2): k is rotated by its place in the
    cache; q by cache_seqlens + i when causal or windowed, else by cache_seqlens.
    block_table is refused. Nothing is written when a call is refused.
    Returns out, like q, or (out, softmax_lse).
    """
    _kvcache.refuse_pages("block_table", block_table)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        is_tensor(x, name)
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": bounds(window_size),
        "softcap": cap(softcap),
        "alibi_slopes": alibi_slopes,
        "num_splits": splits(num_splits, q),
    }
    # A window that covers the whole cache is none, and then every query stands at the same place.
    local = any(bound is not None and bound < k_cache.shape[1] for bound in options["window"] or ())
    out, lse = _kvcache.append_and_attend(
        _kvcache.Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad),
        q,
        k,
        v,
        _kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, each_query=bool(causal) or local),
        options,
    )
    return (out, _lse(lse)) if return_softmax_lse else out


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q):
    """The arguments that all forms share, as tandem.attention's."""
    is_tensor(q, "q")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": bounds(window_size),
        "softcap": cap(softcap),
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        # Drawn here, since S_dmask and the backward pass of packed forms need it again.
        "seed": torch.randint(2**63 - 1, (2,), device=q.device) if dropout_p else None,
        "deterministic": is_deterministic(deterministic),
    }


def _attend(q, k, v, options, return_attn_probs):
    q, k, v = unit_stride(q, "q"), unit_stride(k, "k"), unit_stride(v, "v")
    if not return_attn_probs:
        return in_words(_NAMES, tandem.attention, q, k, v, **options)
    out, lse = in_words(_NAMES, tandem.attention, q, k, v, return_lse=True, **options)
    return out, _lse(lse), _probabilities(q, k, options)


def _attend_packed(q, packed, options, return_attn_probs):
    names = _NAMES_KV if q is not None else _NAMES_QKV
    out, lse = in_words(names, _packed.attention, q, packed, _unbind, options)
    if not return_attn_probs:
        return out
    q, k = (q, _unbind(packed)[0]) if q is not None else _unbind(packed)[:2]
    return out, _lse(lse), _probabilities(q, k, options)


def _unbind(packed):
    return packed.unbind(-3)


def _check_packed(name, x, shape):
    is_tensor(x, name)
    ndim, parts = shape.count(",") + 1, 3 if name == "qkv" else 2
    if x.dim() != ndim or x.shape[-3] != parts:
        raise ValueError(f"{name} (shape {tuple(x.shape)}) must be {shape}; stack its parts along that dimension")


def _lse(lse):
    """flash_attn's lse is +inf for a row that sees no key."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


@torch.no_grad()
def _probabilities(q, k, options):
    """The probabilities, (batch, heads, seqlen_q, seqlen_k) in q's type, negative where dropout drops the entry.

    To attend to the rows of an identity matrix returns the probabilities themselves, or with dropout what is left of
    them.
    """
    if not options["dropout_p"]:
        return q.new_empty(0)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_wide, k_wide = q.detach().to(wide), k.detach().to(wide)
    plain = {**options, "dropout_p": 0.0, "seed": None}

    _, place = places(k, options.get("cu_seqlens_k"))
    place = place.flatten()
    seqlen_k = int(place.max()) + 1 if place.numel() else 0
    chunks = []
    for columns in torch.arange(seqlen_k, device=q.device).split(512):  # the widest head_dim_v
        identity = (place[:, None, None] == columns).to(wide)
        identity = identity.expand(*k.shape[:-1], -1)
        p = tandem.attention(q_wide, k_wide, identity, **plain)
        kept = tandem.attention(q_wide, k_wide, identity, **options) > 0
        chunks.append(torch.where(kept, p, -p).to(q.dtype))
    signed = torch.cat(chunks, dim=-1) if chunks else q.new_empty(*q.shape[:-1], 0)

    cu_seqlens_q = options.get("cu_seqlens_q")
    if cu_seqlens_q is not None:  # packed rows go to a rectangle that the longest sequence fills
        sequence, place = places(q, cu_seqlens_q)
        seqlen_q = int(place.max()) + 1 if place.numel() else 0
        dense = signed.new_zeros(cu_seqlens_q.numel() - 1, seqlen_q, *signed.shape[1:])
        dense[sequence, place] = signed
        signed = dense
    return signed.transpose(1, 2)
