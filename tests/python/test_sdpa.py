"""tandem.sdpa against torch's scaled_dot_product_attention in float64, by the 2x rule."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import tandem  # noqa: E402
import tandem.sdpa as sdpa  # noqa: E402

HEADS = {"2d": (), "3d": (3,), "4d": (2, 3), "5d": (2, 2, 3)}


def tensors(q_lead, k_lead=None, v_lead=None, sizes=(5, 7, 8, 6), dtype=torch.float32, seed=0):
    """Returns query, key and value for L, S, E, Ev = sizes."""
    generator = torch.Generator().manual_seed(seed)
    length_q, length_k, dim, dim_v = sizes
    k_lead = q_lead if k_lead is None else k_lead
    shapes = (
        (*q_lead, length_q, dim),
        (*k_lead, length_k, dim),
        (*(k_lead if v_lead is None else v_lead), length_k, dim_v),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def torchs(*inputs, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs, **options)


def same(inputs, **options):
    torch_reference.hold(
        lambda *x: sdpa.scaled_dot_product_attention(*x, **options), lambda *x: torchs(*x, **options), inputs
    )


@pytest.mark.parametrize("lead", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}, {"scale": 0.0}, {"scale": -0.4}], ids=str)
def test_any_number_of_leading_dimensions(lead, options):
    same(tensors(lead), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype):
    same(tensors((2, 3), sizes=(20, 33, 16, 16), dtype=dtype), is_causal=True)


def test_causal_with_more_queries_than_keys():
    same(tensors((2, 3), sizes=(9, 4, 8, 8)), is_causal=True)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 3), (1, 3), None),
        ((2, 3), (2, 1), None),
        ((2, 1), (2, 3), None),
        ((2, 3), (2, 3), (2, 1)),
        ((2, 3), (3,), None),
        ((3,), (2, 1), (2, 3)),
        ((2, 3), (), None),
        ((), (3,), None),
        ((2, 1, 3), (2, 3), None),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast(q, k, v):
    same(tensors(q, k, v))


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 6), (2, 3), None),
        ((6,), (2,), None),
        ((2, 6), (1, 2), None),
        ((2, 6), (2, 3), (2, 2)),
        ((2, 2, 4), (2, 2, 1), None),
    ],
    ids=str,
)
def test_grouped_heads(q, k, v):
    same(tensors(q, k, v), enable_gqa=True)


MASKS = {
    "(L, S)": (5, 7),
    "(L, 1)": (5, 1),
    "(1, S)": (1, 7),
    "(1, 1)": (1, 1),
    "(H, L, S)": (3, 5, 7),
    "(B, 1, 1, S)": (2, 1, 1, 7),
    "(B, H, L, S)": (2, 3, 5, 7),
    "(1, 1, L, S)": (1, 1, 5, 7),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks(shape, dtype):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if dtype == torch.bool:
        same(tensors((2, 3)), attn_mask=mask > -0.5)
    else:  # dout is a leaf with a separate gradient
        torch_reference.hold(
            lambda q, k, v, m: sdpa.scaled_dot_product_attention(q, k, v, attn_mask=m),
            lambda q, k, v, m: torchs(q, k, v, attn_mask=m),
            [*tensors((2, 3)), mask],
        )


@pytest.mark.parametrize(
    ("lead", "shape"),
    [
        ((), (5, 7)),
        ((3,), (5, 7)),
        ((3,), (3, 1, 7)),
        ((2, 2, 3), (5, 7)),
        ((2, 2, 3), (2, 1, 5, 7)),
        ((2, 2, 3), (2, 2, 3, 1, 7)),
        ((2, 2, 3), (2, 1, 1, 1, 7)),
    ],
    ids=str,
)
def test_masks_over_other_leading_dimensions(lead, shape):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    torch_reference.hold(
        lambda q, k, v, m: sdpa.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda q, k, v, m: torchs(q, k, v, attn_mask=m),
        [*tensors(lead), mask],
    )


def test_masks_with_grouped_heads_and_of_another_type():
    mask = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(3))
    same(tensors((2, 6), (2, 2)), attn_mask=mask, enable_gqa=True)
    ours = sdpa.scaled_dot_product_attention(*tensors((2, 6), dtype=torch.bfloat16), attn_mask=mask)
    assert ours.dtype == torch.bfloat16


def test_an_expanded_mask_is_read():
    mask = torch.randn(5, 1, generator=torch.Generator().manual_seed(3)).expand(5, 7)
    same(tensors((2, 3)), attn_mask=mask)


@pytest.mark.parametrize("mask", [torch.zeros(5, 7, dtype=torch.bool), torch.full((5, 7), float("-inf"))])
def test_rows_that_see_no_key_give_what_torch_gives(mask):
    mask[1:] = mask.dtype == torch.bool
    inputs = [x.requires_grad_() for x in tensors((2, 3))]
    results = []
    for function in (sdpa.scaled_dot_product_attention, torchs):
        out = function(*inputs, attn_mask=mask)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(results[0][0][:, :, 0], torch.zeros(2, 3, 6))


def test_transposed_views_are_not_copied(monkeypatch):
    q, k, v = (torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3))
    addresses = []
    attention = tandem.attention

    def watched(*inputs, **options):
        addresses.extend(x.data_ptr() for x in inputs)
        return attention(*inputs, **options)

    monkeypatch.setattr(tandem, "attention", watched)
    out = sdpa.scaled_dot_product_attention(q, k, v)
    assert addresses == [x.data_ptr() for x in (q, k, v)]
    assert out.transpose(1, 2).is_contiguous()


def test_a_last_dimension_that_is_not_contiguous():
    q, k, v = (x.transpose(-1, -2) for x in tensors((2, 3), sizes=(8, 8, 7, 7)))
    torch.testing.assert_close(sdpa.scaled_dot_product_attention(q, k, v), torchs(q, k, v))


@pytest.mark.parametrize("sizes", [(0, 7, 8, 8), (5, 0, 8, 8)])
def test_nothing_to_do(sizes):
    q, k, v = tensors((2, 3), sizes=sizes)
    assert torch.equal(sdpa.scaled_dot_product_attention(q, k, v), torchs(q, k, v))


def test_dropout_draws_from_torchs_generator():
    q, k, _ = tensors((1, 2), sizes=(40, 40, 8, 8))
    v = torch.eye(40).expand(1, 2, 40, 40)

    def drawn(seed):
        torch.manual_seed(seed)
        return sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    p = drawn(1)
    assert torch.equal(p, drawn(1)) and not torch.equal(p, drawn(2))
    plain = torchs(q, k, v)
    kept = p > 0
    torch.testing.assert_close(p[kept], plain[kept] / 0.75)
    assert 0.7 < kept.double().mean() < 0.8  # 3200 samples with probability 0.75


def test_autocast_casts_as_it_does_for_torch():
    q, k, v = tensors((2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa.scaled_dot_product_attention(q, k.bfloat16(), v)
        assert out.dtype == F.scaled_dot_product_attention(q, k.bfloat16(), v).dtype == torch.bfloat16


def test_the_module_is_the_function():
    q, k, v = tensors((2, 3))
    assert torch.equal(
        tandem.sdpa(q, k, v, is_causal=True), sdpa.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}, {"enable_gqa": True}], ids=str)
def test_compiled(options):
    inputs = tensors((2, 4), (2, 2) if "enable_gqa" in options else None)
    if "attn_mask" in options:
        options = {"attn_mask": torch.randn(5, 7) > 0}

    def function(q, k, v):
        return sdpa.scaled_dot_product_attention(q, k, v, **options)

    weights = [torch.randn(2, 4, 5, 6)]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(
        torch_reference.run(compiled, inputs, weights), torch_reference.run(function, inputs, weights)
    ):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_refusals():
    q, k, v = tensors((2, 4))
    mask = torch.ones(5, 7, dtype=torch.bool)

    def refused(*inputs, error=ValueError, match, **options):
        with pytest.raises(error, match=match):
            sdpa.scaled_dot_product_attention(*inputs, **options)

    refused(q, k, v, mask, is_causal=True, match="attn_mask must be None")
    refused(q, k[:, :2], v[:, :2], match="enable_gqa=True")
    refused(q, k[:, :3], v[:, :3], enable_gqa=True, match="multiple")
    refused(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True, match="multiple")
    refused(q[0, 0, 0], k, v, match="at least 2")
    refused(q, k, v, mask[0], match="attn_mask")
    refused(q, k, v, mask.expand(3, 2, 4, 5, 7), match="attn_mask")
    refused(q, k, v, mask[:, :6], match="attn_mask")
    refused(q[:1], k[:1], v[:1], mask.expand(2, 1, 5, 7), match="attn_mask")
    refused(q, k, v, mask.int(), match=r"attn_mask\.dtype")
    refused(q.double(), k, v, match=r"key\.dtype")
    nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    refused(nested, nested, nested, error=tandem.Unsupported, match="nested")
    with pytest.raises(TypeError):
        sdpa.scaled_dot_product_attention(q, k, v, None, 0.0, False, 0.5)  # scale is keyword-only
