"""Rotary position embedding under the names of flash_attn.layers.rotary, in plain torch, with gradients.

Pairs of dimensions (a, b) are rotated by an angle that grows with the place: (a cos - b sin, a sin + b cos). A pair is
dimensions i and i + rotary_dim / 2 (GPT-NeoX), or 2 i and 2 i + 1 where interleaved (GPT-J); dimensions from rotary_dim
on stay. The products are computed in float32. cos and sin, (places, rotary_dim / 2), have no gradient; a place beyond
them is not rotated.

J. Su et al. RoFormer. arXiv 2104.09864; with scale_base Y. Sun et al. XPos. arXiv 2212.10554.
"""

from __future__ import annotations

import torch

from tandem.compat._arguments import places


def rotate(x, cos, sin, place, interleaved=False, conjugate=False):
    """Returns a copy of x (..., heads, head_dim), with each row rotated by its place; conjugate rotates back.

    place broadcasts to x.shape[:-2].
    """
    half = cos.shape[-1]
    beyond = ((place < 0) | (place >= cos.shape[0]))[..., None]
    place = place.clamp(0, cos.shape[0] - 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    c = cos[place].to(wide).masked_fill(beyond, 1.0)[..., None, :]
    s = sin[place].to(wide).masked_fill(beyond, 0.0)[..., None, :]
    if conjugate:
        s = -s
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2].to(wide), x[..., 1 : 2 * half : 2].to(wide)
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _place(x, cos, sin, seqlen_offsets, cu_seqlens=None, max_seqlen=None):
    """Returns the place of each row of x: its place in the sequence plus seqlen_offsets (one, or one a sequence)."""
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin (shapes {tuple(cos.shape)} and {tuple(sin.shape)}) must both be (places, rotary_dim / 2), "
            f"with rotary_dim at most head_dim ({x.shape[-1]}): pass such tables"
        )
    seqlen = x.shape[1] if cu_seqlens is None else max_seqlen or 0
    last = seqlen if isinstance(seqlen_offsets, torch.Tensor) else seqlen + seqlen_offsets
    if last > cos.shape[0]:
        raise ValueError(f"cos and sin ({cos.shape[0]} places) must have {last} places or more: compute longer ones")
    sequence, place = places(x, cu_seqlens)
    return place + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets)


def rotate_half(x, interleaved=False):
    """Replaces (a, b) by (-b, a) in each pair of x's last dimension."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """Returns x (batch, seqlen, heads, head_dim) rotated by cos and sin, in their type and with their gradients too.

    cos and sin are (seqlen, rotary_dim / 2), or have a batch in front.
    """
    turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    if interleaved:
        cos, sin = (t.repeat_interleave(2, dim=-1)[..., None, :] for t in (cos, sin))
    else:
        cos, sin = (torch.cat((t, t), dim=-1)[..., None, :] for t in (cos, sin))
    return torch.cat((turned * cos + rotate_half(turned, interleaved) * sin, rest), dim=-1)


class ApplyRotaryEmb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
        place = _place(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
        ctx.save_for_backward(cos, sin, place)
        ctx.interleaved = interleaved
        out = rotate(x, cos, sin, place, interleaved)
        return x.copy_(out) if inplace else out

    @staticmethod
    def backward(ctx, dout):
        return rotate(dout, *ctx.saved_tensors, ctx.interleaved, conjugate=True), *(None,) * 7


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets=0,
    cu_seqlens=None,
    max_seqlen=None,
):
    """Returns x (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens, rotated by its places.

    seqlen_offsets, an int or (batch), is added to the places. inplace overwrites x; the result carries the gradient.
    """
    return ApplyRotaryEmb.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


apply_rotary_emb_func = apply_rotary_emb


def _q_and_k(qkv, num_heads_q):
    if qkv.dim() == 5:
        return qkv[:, :, 0], qkv[:, :, 1]
    if num_heads_q is None:
        raise ValueError(
            f"num_heads_q (None) must be given for qkv (shape {tuple(qkv.shape)}) with all heads in one dimension: "
            "pass the number of q's heads"
        )
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    if qkv.shape[2] != num_heads_q + 2 * num_heads_k:
        raise ValueError(
            f"qkv.heads ({qkv.shape[2]}) must be num_heads_q ({num_heads_q}) plus an even number: pass "
            "num_heads_q + 2 heads_k heads"
        )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


class ApplyRotaryEmbQKV_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        q, k = _q_and_k(qkv, num_heads_q)
        place, place_k = _place(q, cos, sin, seqlen_offsets), _place(k, cos_k, sin_k, seqlen_offsets)
        ctx.save_for_backward(cos, sin, place, cos_k, sin_k, place_k)
        ctx.interleaved, ctx.num_heads_q = interleaved, num_heads_q
        q.copy_(rotate(q, cos, sin, place, interleaved))
        k.copy_(rotate(k, cos_k, sin_k, place_k, interleaved))
        return qkv

    @staticmethod
    def backward(ctx, dqkv):
        dqkv = dqkv.clone()
        for x, turn in zip(_q_and_k(dqkv, ctx.num_heads_q), (ctx.saved_tensors[:3], ctx.saved_tensors[3:])):
            x.copy_(rotate(x, *turn, ctx.interleaved, conjugate=True))
        return dqkv, *(None,) * 7


def apply_rotary_emb_qkv_(
    qkv,
    cos,
    sin,
    cos_k=None,
    sin_k=None,
    interleaved=False,
    seqlen_offsets=0,
    num_heads_q=None,
):
    """Rotates q and k in qkv, in place: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2
    heads_k, head_dim) with num_heads_q. k has cos_k and sin_k where given. Returns qkv, which carries the gradient."""
    return ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


class ApplyRotaryEmbKV_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, cos, sin, interleaved=False, seqlen_offsets=0):
        k = kv[:, :, 0]
        place = _place(k, cos, sin, seqlen_offsets)
        ctx.save_for_backward(cos, sin, place)
        ctx.interleaved = interleaved
        k.copy_(rotate(k, cos, sin, place, interleaved))
        return kv

    @staticmethod
    def backward(ctx, dkv):
        dkv = dkv.clone()
        dk = dkv[:, :, 0]
        dk.copy_(rotate(dk, *ctx.saved_tensors, ctx.interleaved, conjugate=True))
        return dkv, None, None, None, None


def apply_rotary_emb_kv_(
    kv,
    cos,
    sin,
    interleaved=False,
    seqlen_offsets=0,
):
    """Rotates k in kv (batch, seqlen, 2, heads_k, head_dim), in place. Returns kv, which carries the gradient."""
    return ApplyRotaryEmbKV_.apply(kv, cos, sin, interleaved, seqlen_offsets)


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k by angles place / base^(2 i / dim), with tables of cos and sin that grow when needed.

    dim is the number of rotated dimensions. With scale_base (XPos; 512 is usual) q is also scaled by
    ((2 i / dim + 0.4) / 1.4)^((place - middle) / scale_base), and k by the inverse.
    """

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = None
        self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device=None):
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and (cached.device, cached.dtype) == (device, dtype)
            and not (self.training and cached.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # Angles are computed in float32 for any type of the module, because places in bfloat16 are inexact above 256.
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        place = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(place, inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is not None:
            scale = self.scale.float() ** ((place - seqlen // 2) / self.scale_base)[:, None]
            self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
            cos, sin = cos * scale, sin * scale
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotates q and k in place and returns qkv, or (q, kv) if kv is given.

        qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 heads_k, head_dim). With kv (batch,
        seqlen, 2, heads_k, head_dim) it is q (batch, seqlen, heads, head_dim). seqlen_offset, an int or (batch), is
        added to the places; give max_seqlen with a tensor, so that the tables are long enough.
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, device=qkv.device, dtype=qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        if self.scale is None:
            cos_k, sin_k = cos, sin
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
