"""The functions of flash_attn.flash_attn_interface (FlashAttention-2), on tandem.attention.

Shapes: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim), or packed (total, heads,
head_dim) with cu_seqlens (batch + 1, int32). head_dim is at most 512 on CPUs and 256 on GPUs; heads_k divides heads.

- softmax_scale: factor of the products; None: 1 / sqrt(head_dim).
- causal and window_size (left, right), in keys, measure from the bottom right corner. A negative bound is no bound.
- softcap: 0 or less is off. alibi_slopes: (heads) or (batch, heads), float32.
- dropout_p: rounded to a multiple of 1/256, which is the share that is dropped. Kept entries are scaled by
  1 / (1 - dropout_p) with the dropout_p of the call, as in flash_attn.
- return_attn_probs: the result is (out, softmax_lse, S_dmask). softmax_lse, (batch, heads, seqlen_q) or (heads,
  total_q), is float32 and has a gradient. The LSE is +inf for a row that sees no key, where tandem.attention returns
  -inf. S_dmask is empty without dropout. With dropout, S_dmask holds exp(score - largest score of the row), (batch,
  heads, seqlen_q, seqlen_k), negative where the entry was dropped. The block of _get_block_size_n therefore has all
  keys. S_dmask is for tests, because it has the size that attention avoids.
- FLASH_ATTENTION_DETERMINISTIC=1 in the environment means deterministic=True in every call.

T. Dao. FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning. arXiv 2307.08691.
"""

from __future__ import annotations

import math

import torch

import tandem
from tandem._arrays import flag_of
from tandem.compat._arguments import (
    Refused,
    bounds,
    cap,
    in_words,
    is_deterministic,
    is_tensor,
    lengths_of,
    places,
    splits,
    unit_stride,
)
from tandem.compat.flash_attn import _kvcache, _packed

# Our arguments' names in this interface.
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

    Returns out, like q, or (out, softmax_lse, S_dmask); the module's docstring has the rules.
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
    else:  # pages are not packed: cu_seqlens_k only gives lengths
        options.update(page_table=block_table, seqused_k=lengths_of(cu_seqlens_k, "cu_seqlens_k"))
        if return_attn_probs and dropout_p:
            raise tandem.Unsupported("block_table must be None with S_dmask: omit return_attn_probs or dropout_p")
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
    """Self-attention of qkv (batch, seqlen, 3, heads, head_dim), with one tensor of that shape as its gradient.

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
    """Self-attention of packed sequences: qkv (total, 3, heads, head_dim), with one tensor of that shape as its
    gradient.

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
    """Appends k and v to a cache, in place, then attends to the cache. The function has no gradient.

    q : (batch, seqlen_q, heads, head_dim).
    k_cache, v_cache : (batch_cache, seqlen_cache, heads_k, head_dim).
    k, v : (batch, seqlen_new, heads_k, head_dim), written from position cache_seqlens on.
    cache_seqlens : an int, or (batch) int32. cache_batch_idx : (batch) int32, the cache's row of each row of q.
    cache_leftpad : (batch) int32, position of each row's first key.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2). k is rotated by its position in the cache, q by cache_seqlens
        + i if causal or windowed, else by cache_seqlens.
    block_table : (batch, max_pages) int32; the caches are then (pages, page_size, heads_k, head_dim), without
        cache_batch_idx and cache_leftpad.
    Returns out, like q, or (out, softmax_lse). A refused call writes nothing.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        is_tensor(x, name)
    pages = _kvcache.pages_of("block_table", block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    cache = _kvcache.Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, pages)
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": bounds(window_size),
        "softcap": cap(softcap),
        "alibi_slopes": alibi_slopes,
        "num_splits": splits(num_splits),
    }
    # A window that covers the whole cache is dropped, and then every query has the same place.
    local = any(bound is not None and bound < cache.capacity() for bound in options["window"] or ())
    out, lse = _kvcache.append_and_attend(
        cache,
        q,
        k,
        v,
        _kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, each_query=flag_of(causal, "causal") or local),
        options,
    )
    return (out, _lse(lse)) if return_softmax_lse else out


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q):
    """Converts the arguments that all forms share to tandem.attention's."""
    is_tensor(q, "q")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": bounds(window_size),
        "softcap": cap(softcap),
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        # The seed is drawn here, because S_dmask and the backward pass of packed forms need it again.
        "seed": torch.randint(2**63 - 1, (2,), device=q.device) if dropout_p else None,
        "deterministic": is_deterministic(deterministic),
    }


def _attend(q, k, v, options, return_attn_probs):
    q, k, v = unit_stride(q, "q"), unit_stride(k, "k"), unit_stride(v, "v")
    if not return_attn_probs:
        out = in_words(_NAMES, tandem.attention, q, k, v, **options)
        return _scaled(_check_gradient(out, q, k, v, options), options["dropout_p"])
    out, lse = in_words(_NAMES, tandem.attention, q, k, v, return_lse=True, **options)
    for x in (out, lse):
        _check_gradient(x, q, k, v, options)
    return _scaled(out, options["dropout_p"]), _lse(lse), _dropout_mask(q, k, options)


def _scaled(out, dropout_p):
    """Returns out with the factor 1 / (1 - dropout_p). tandem.attention's factor has the rounded dropout_p."""
    if not dropout_p:
        return out
    rounded = min(max(math.floor(dropout_p * 256 + 0.5), 1), 255) / 256
    return out if rounded == dropout_p else out * ((1 - rounded) / (1 - dropout_p))


def _check_gradient(result, q, k, v, options):
    """Returns result, whose gradient is refused with this interface's names if keys lie in pages."""
    if "page_table" in options and result.requires_grad and not torch.compiler.is_compiling():
        result.register_hook(lambda _: in_words(_NAMES, tandem.check, "backward", q, k, v, **options))
    return result


def _attend_packed(q, packed, options, return_attn_probs):
    names = _NAMES_KV if q is not None else _NAMES_QKV
    out, lse = in_words(names, _packed.attention, q, packed, _unbind, options)
    out = _scaled(out, options["dropout_p"])
    if not return_attn_probs:
        return out
    q, k = (q, _unbind(packed)[0]) if q is not None else _unbind(packed)[:2]
    return out, _lse(lse), _dropout_mask(q, k, options)


def _unbind(packed):
    return packed.unbind(-3)


def _check_packed(name, x, shape):
    is_tensor(x, name)
    ndim, parts = shape.count(",") + 1, 3 if name == "qkv" else 2
    if x.dim() != ndim or x.shape[-3] != parts:
        raise ValueError(f"{name} (shape {tuple(x.shape)}) must be {shape}: stack its parts along dimension -3")


def _lse(lse):
    """Converts lse: flash_attn's is +inf for a row that sees no key."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


@torch.no_grad()
def _dropout_mask(q, k, options):
    """Returns S_dmask, (batch, heads, seqlen_q, seqlen_k) in q's type.

    Attention to the rows of an identity matrix returns the probabilities. A probability divided by the row's largest
    probability is exp(score - largest score). The entries that dropout keeps do not depend on the scores: equal scores
    show them without underflow.
    """
    if not options["dropout_p"]:
        return q.new_empty(0)
    wide = q.dtype if q.is_cuda else torch.promote_types(q.dtype, torch.float32)  # GPUs multiply 16-bit numbers
    q_wide, k_wide = q.detach().to(wide), k.detach().to(wide)
    plain = {**options, "dropout_p": 0.0, "seed": None}
    equal = {**options, "alibi_slopes": None, "softcap": 0.0}
    out_dtype = torch.float32 if q.dtype != torch.float64 else None

    _, place = places(k, options.get("cu_seqlens_k"))
    place = place.flatten()
    seqlen_k = int(place.max()) + 1 if place.numel() else 0
    chunks = []
    for columns in torch.arange(seqlen_k, device=q.device).split(256 if q.is_cuda else 512):  # head_dim_v's limit
        identity = (place[:, None, None] == columns).to(wide)
        identity = identity.expand(*k.shape[:-1], -1)
        p = tandem.attention(q_wide, k_wide, identity, **plain, out_dtype=out_dtype)
        kept = tandem.attention(torch.zeros_like(q_wide), k_wide, identity, **equal, out_dtype=out_dtype) > 0
        chunks.append(torch.where(kept, p, -p))
    signed = torch.cat(chunks, dim=-1) if chunks else q.new_zeros(*q.shape[:-1], 1)
    largest = signed.abs().amax(-1, keepdim=True)
    signed = torch.where(largest > 0, signed / largest, 0.0)[..., :seqlen_k].to(q.dtype)

    cu_seqlens_q = options.get("cu_seqlens_q")
    if cu_seqlens_q is not None:  # a rectangle that the longest sequence fills
        sequence, place = places(q, cu_seqlens_q)
        seqlen_q = int(place.max()) + 1 if place.numel() else 0
        dense = signed.new_zeros(cu_seqlens_q.numel() - 1, seqlen_q, *signed.shape[1:])
        dense[sequence, place] = signed
        signed = dense
    return signed.transpose(1, 2)


# ---- Private names that programs import ---------------------------------------------------------------------------

USE_TRITON_ROCM = False


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """Returns the keys of a block of S_dmask: more than any sequence has, because one block has all keys."""
    return 2**31 - 1


class _Extension(Refused):
    """Represents flash_attn's compiled extension, which is not served. A generator has a separate message."""

    _GENERATORS = {"fwd": 12, "varlen_fwd": 20, "bwd": 17, "varlen_bwd": 22}  # the argument's position

    def __getattr__(self, name):
        position = self._GENERATORS.get(name)
        if position is None:
            return super().__getattr__(name)

        def call(*arguments, **_):
            if len(arguments) > position and arguments[position] is not None:
                raise tandem.Unsupported(
                    f"the `generator` argument is no longer supported by {name}: pass None, and set torch's seed"
                )
            return super(_Extension, self).__getattr__(name)

        return call


flash_attn_gpu = _Extension("flash_attn_gpu", "call flash_attn_func or tandem.attention")


@torch.no_grad()
def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    """Returns (out, softmax_lse, S_dmask, rng_state) of flash_attn_func, without a gradient. rng_state: the dropout's
    seed.
    """
    window = (window_size_left, window_size_right)
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, q)
    return _low_level(q, k, v, options, return_softmax)


@torch.no_grad()
def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
    num_splits=0,
):
    """Returns (out, softmax_lse, S_dmask, rng_state) of flash_attn_varlen_func, without a gradient. leftpad_k is
    refused, and so is num_splits above 1 with block_table, as in flash_attn.
    """
    if block_table is not None and num_splits > 1:
        raise tandem.Unsupported(f"num_splits > 1 is not supported with block_table, but is {num_splits}: pass 0")
    if leftpad_k is not None:
        raise tandem.Unsupported("leftpad_k is not served: begin the sequences of k at cu_seqlens_k's offsets")
    window = (window_size_left, window_size_right)
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, q)
    options.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    options.update(num_splits=splits(num_splits))
    if block_table is None:
        options.update(cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    else:
        options.update(
            page_table=block_table,
            seqused_k=lengths_of(cu_seqlens_k, "cu_seqlens_k") if seqused_k is None else seqused_k,
        )
    return _low_level(q, k, v, options, return_softmax)


def _low_level(q, k, v, options, return_softmax):
    out, lse, probabilities = _attend(q, k, v, options, True)
    if not return_softmax:
        probabilities = q.new_empty(0)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device) if options["seed"] is None else options["seed"]
    return out, lse, probabilities, seed
