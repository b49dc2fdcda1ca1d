"""Compares tandem.flash_attn.layers.rotary with complex numbers in float64, and tests tandem.flash_attn.bert_padding in
both directions.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flash_attn_cases import int32  # noqa: E402

import reference  # noqa: E402
from tandem.flash_attn import bert_padding  # noqa: E402
from tandem.flash_attn.layers import rotary  # noqa: E402


def turned(x, cos, sin, places, interleaved):
    """Rotates x (..., seqlen, heads, head_dim) as complex numbers by its positions, (..., seqlen)."""
    half = cos.shape[1]
    order = torch.arange(2 * half)
    order = order.reshape(half, 2) if interleaved else order.reshape(2, half).T
    z = torch.complex(x[..., order[:, 0]], x[..., order[:, 1]]) * torch.complex(cos, sin)[places][..., None, :]
    result = x.clone()
    result[..., order[:, 0]], result[..., order[:, 1]] = z.real, z.imag
    return result


def hold(ours, x, expected, cos, sin):
    """Checks ours(x, cos, sin) and its gradient within one rounding to x's type.

    The rotation is linear, and its products are float32.
    """
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    exact_x = x.double().requires_grad_()
    exact = expected(exact_x, cos.double(), sin.double())
    (exact_dx,) = torch.autograd.grad(exact, exact_x, dout.double())
    leaf = x.clone().requires_grad_()
    out = ours(leaf, cos, sin)
    (dx,) = torch.autograd.grad(out, leaf, dout)
    for got, wanted in ((out, exact), (dx, exact_dx)):
        assert got.dtype == x.dtype
        rounded = wanted.detach().to(x.dtype)
        reference.hold(*(y.detach().double().numpy() for y in (got, wanted, rounded)))
    return leaf, out


both_ways = pytest.mark.parametrize("interleaved", [False, True])


@both_ways
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [0, 3, int32(4, 0)], ids=str)
def test_rotary(random, interleaved, inplace, dtype, offsets):
    x, cos, sin = random(2, 5, 3, 20, dtype=dtype), random(9, 6, dtype=dtype), random(9, 6, dtype=dtype)
    places = torch.arange(5) + (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets)
    leaf, out = hold(
        lambda x, c, s: rotary.apply_rotary_emb(x, c, s, interleaved, inplace, offsets),
        x,
        lambda x, c, s: turned(x, c, s, places.expand(2, 5), interleaved),
        cos,
        sin,
    )
    assert (leaf.data_ptr() == out.data_ptr()) == inplace
    assert torch.equal(leaf, out if inplace else x)


@both_ways
@pytest.mark.parametrize("offsets", [0, 2, int32(4, 0, 3)], ids=str)
def test_rotary_of_packed_sequences(random, interleaved, offsets):
    cu = int32(0, 3, 3, 8)
    places = torch.cat([torch.arange(3), torch.arange(5)])
    places += offsets if isinstance(offsets, int) else torch.repeat_interleave(offsets, cu.diff())
    hold(
        lambda x, c, s: rotary.apply_rotary_emb(x, c, s, interleaved, False, offsets, cu, 5),
        random(8, 3, 20),
        lambda x, c, s: turned(x, c, s, places, interleaved),
        random(9, 6),
        random(9, 6),
    )


def test_places_beyond_the_tables_are_not_turned(random):
    x, cos, sin = random(2, 4, 1, 8), random(6, 4), random(6, 4)
    out = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=int32(0, 4))
    assert torch.equal(out[1, 2:], x[1, 2:])
    torch.testing.assert_close(out[1, :2], turned(x[1, :2], cos, sin, torch.tensor([4, 5]), False))


def test_the_torch_form_has_gradients_of_its_tables(random):
    for interleaved in (False, True):
        x, cos, sin = (y.double().requires_grad_() for y in (random(2, 5, 3, 20), random(5, 6), random(5, 6)))
        out = rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)
        expected = turned(x, cos, sin, torch.arange(5).expand(2, 5), interleaved)
        torch.testing.assert_close(out, expected)
        dout = random(2, 5, 3, 20).double()
        for ours, exact in zip(*(torch.autograd.grad(y, (x, cos, sin), dout) for y in (out, expected))):
            torch.testing.assert_close(ours, exact)
        batched = rotary.apply_rotary_emb_torch(x, cos.expand(2, 5, 6), sin.expand(2, 5, 6), interleaved)
        torch.testing.assert_close(batched, out)


def test_rotate_half():
    x = torch.arange(1.0, 5.0)
    assert rotary.rotate_half(x).tolist() == [-3, -4, 1, 2]
    assert rotary.rotate_half(x, interleaved=True).tolist() == [-2, 1, -4, 3]


@both_ways
@pytest.mark.parametrize("heads_k", [None, 1])
@pytest.mark.parametrize("own_k", [False, True])
@pytest.mark.parametrize("offsets", [1, int32(3, 0)], ids=str)
def test_rotary_of_qkv(random, interleaved, heads_k, own_k, offsets):
    shape, heads = ((2, 5, 3, 4, 16), None) if heads_k is None else ((2, 5, 4 + 2 * heads_k, 16), 4)
    tables_k = (random(9, 6), random(9, 6)) if own_k else (None, None)
    places = (torch.arange(5) + (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets)).expand(2, 5)

    def expected(qkv, c, s):
        q, k, v = qkv.unbind(2) if heads is None else qkv.split((4, heads_k, heads_k), 2)
        c_k, s_k = (t.double() for t in tables_k) if own_k else (c, s)
        parts = turned(q, c, s, places, interleaved), turned(k, c_k, s_k, places, interleaved), v
        return torch.stack(parts, 2) if heads is None else torch.cat(parts, 2)

    leaf, out = hold(
        lambda x, c, s: rotary.apply_rotary_emb_qkv_(x, c, s, *tables_k, interleaved, offsets, heads),
        random(*shape),
        expected,
        random(9, 6),
        random(9, 6),
    )
    assert leaf.data_ptr() == out.data_ptr() and torch.equal(leaf, out)


@both_ways
def test_rotary_of_kv(random, interleaved):
    places = torch.arange(2, 7).expand(2, 5)
    leaf, out = hold(
        lambda x, c, s: rotary.apply_rotary_emb_kv_(x, c, s, interleaved, 2),
        random(2, 5, 2, 4, 16),
        lambda kv, c, s: torch.stack((turned(kv[:, :, 0], c, s, places, interleaved), kv[:, :, 1]), 2),
        random(9, 6),
        random(9, 6),
    )
    assert leaf.data_ptr() == out.data_ptr()


def tables(dim, seqlen, base, scale_base):
    """Returns cos and sin of q and of k in float64, by RoFormer's and XPos' formulas."""
    i = torch.arange(0, dim, 2, dtype=torch.float64)
    angles = torch.arange(seqlen, dtype=torch.float64)[:, None] / base ** (i / dim)
    scale = torch.ones_like(angles)
    if scale_base is not None:
        scale = ((i / dim + 0.4) / 1.4) ** ((torch.arange(seqlen)[:, None] - seqlen // 2) / scale_base)
    return (angles.cos() * scale, angles.sin() * scale), (angles.cos() / scale, angles.sin() / scale)


@both_ways
@pytest.mark.parametrize("scale_base", [None, 32.0])
@pytest.mark.parametrize("form", ["qkv", "grouped", "q and kv"])
@pytest.mark.parametrize("offset", [0, 3, int32(0, 4)], ids=str)
def test_rotary_module(random, interleaved, scale_base, form, offset):
    module = rotary.RotaryEmbedding(12, base=100.0, interleaved=interleaved, scale_base=scale_base)
    length = 5 + (4 if isinstance(offset, torch.Tensor) else offset)
    arguments = {"seqlen_offset": offset, "max_seqlen": length if isinstance(offset, torch.Tensor) else None}
    of_q, of_k = tables(12, length, 100.0, scale_base)
    places = (torch.arange(5) + (offset[:, None] if isinstance(offset, torch.Tensor) else offset)).expand(2, 5)
    q, k, v = (
        random(2, 5, 4, 16),
        random(2, 5, 4 if form == "qkv" else 2, 16),
        random(2, 5, 4 if form == "qkv" else 2, 16),
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if form == "qkv":
        result = module(torch.stack(leaves, 2), **arguments).unbind(2)
    elif form == "grouped":
        result = module(torch.cat(leaves, 2), **arguments, num_heads_q=4).split((4, 2, 2), 2)
    else:
        new_q, new_kv = module(leaves[0].clone(), torch.stack(leaves[1:], 2), **arguments)
        result = new_q, *new_kv.unbind(2)
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = (
        turned(exact_leaves[0], *of_q, places, interleaved),
        turned(exact_leaves[1], *of_k, places, interleaved),
        exact_leaves[2],
    )
    for ours, expected in zip(result, exact):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    weights = [random(*x.shape) for x in result]
    sums = [sum((y * w).sum() for y, w in zip(ys, weights)) for ys in (result, exact)]
    for ours, expected in zip(torch.autograd.grad(sums[0], leaves), torch.autograd.grad(sums[1], exact_leaves)):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_rotary_module_keeps_its_tables(random):
    module = rotary.RotaryEmbedding(8)
    assert not module.state_dict(), "the frequencies are computed, not saved"
    module(random(1, 6, 3, 2, 8))
    cos = module._cos_cached
    module(random(1, 4, 3, 2, 8))
    assert module._cos_cached is cos and module._seq_len_cached == 6
    module(random(1, 7, 3, 2, 8))
    assert module._cos_cached.shape == (7, 4)
    # Positions in bfloat16 would be exact only up to 256.
    module = rotary.RotaryEmbedding(8).to(torch.bfloat16)
    module(random(1, 300, 3, 1, 8, dtype=torch.bfloat16))
    (cos, _), _ = tables(8, 300, 10000.0, None)
    assert torch.equal(module._cos_cached, cos.float().to(torch.bfloat16))
    with torch.inference_mode():
        module = rotary.RotaryEmbedding(8)
        module(random(1, 6, 3, 2, 8))
    trained = random(1, 6, 3, 2, 8).requires_grad_()
    module(trained.clone()).sum().backward()
    assert trained.grad is not None


def test_rotary_refusals(random):
    x, cos, sin = random(1, 5, 2, 8), random(5, 4), random(5, 4)
    before = x.clone()
    for arguments, match in (
        ((x, cos, sin, False, True, 1), "must have 6 places or more"),
        ((x, cos[:4], sin[:4], False, True), "must have 5 places or more"),
        ((x, cos, sin[:4], False, True), "must both be"),
        ((x, random(5, 5), random(5, 5), False, True), "head_dim"),
    ):
        with pytest.raises(ValueError, match=match):
            rotary.apply_rotary_emb(*arguments)
    qkv = random(1, 5, 7, 8)
    for arguments, match in (((), "num_heads_q"), ((None, None, False, 0, 4), "even|num_heads_q")):
        with pytest.raises(ValueError, match=match):
            rotary.apply_rotary_emb_qkv_(qkv, cos, sin, *arguments)
    assert torch.equal(x, before)


# ---- Padding --------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_unpad_and_pad(random, dtype):
    x = random(3, 4, 2, 5).requires_grad_()
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert cu_seqlens.tolist() == [0, 3, 6, 7] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and isinstance(longest, int)
    assert used.tolist() == [3, 3, 1] and used.dtype == torch.int32
    padded = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(padded, x * MASK[..., None, None])
    weights = random(3, 4, 2, 5)
    (dx,) = torch.autograd.grad((padded * weights).sum(), x)
    assert torch.equal(dx, weights * MASK[..., None, None])


def test_unpad_keeps_unused_rows(random):
    x, unused = random(3, 4, 5), torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    for mask, more in ((MASK, unused), (MASK.bool(), unused.bool())):
        rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, more)
        assert torch.equal(rows, x[(MASK + unused).bool()])
        assert cu_seqlens.tolist() == [0, 4, 8, 9] and longest == 4 and used.tolist() == [3, 3, 1]


def test_unpad_concatenated_sequences(random):
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = random(3, 6, 4).requires_grad_()
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    kept = torch.tensor([[1] * 5 + [0], [1] * 5 + [0], [1] * 6]).bool()
    assert torch.equal(rows, x[kept]) and torch.equal(indices, kept.flatten().nonzero().flatten())
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6
    (dx,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(dx, kept[..., None].expand(3, 6, 4).float())


def test_index_functions(random):
    x, indices = random(6, 2, 3).double().requires_grad_(), torch.tensor([4, 0, 4])
    values = random(3, 2, 3).double().requires_grad_()
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[indices])
    assert torch.autograd.gradcheck(bert_padding.index_first_axis, (x, indices))
    placed = bert_padding.index_put_first_axis(values, torch.tensor([5, 1, 2]), 6)
    assert torch.equal(placed[[5, 1, 2]], values) and not placed[[0, 3, 4]].any()
    assert torch.autograd.gradcheck(lambda v: bert_padding.index_put_first_axis(v, torch.tensor([5, 1, 2]), 6), values)
    taken, rest = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(taken, x[indices]) and torch.equal(rest, x)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis_residual(x, indices), x)
    for name in ("IndexFirstAxis", "IndexPutFirstAxis", "IndexFirstAxisResidual"):
        assert issubclass(getattr(bert_padding, name), torch.autograd.Function)
