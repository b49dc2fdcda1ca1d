"""Calls with CUDA tensors: options, shapes, packed and shorter sequences, layouts, refusals, reproducible bits."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import BF16, F16, F32, GPU, hold, int32, lengths, raises, run, tensors

# isort: split
import sys
import warnings

import torch
import torch.nn.functional as F
import torch_reference

import tandem


def test_options():
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05], device=GPU)
    (sink,) = tensors((4,), dtype=F32)
    mask = torch.rand(2, 1, 70, 130, device=GPU) > 0.3
    (bias,) = tensors((1, 4, 70, 130))
    cases = (
        ("plain", {}, {}),
        ("scale", {"softmax_scale": 0.3}, {"scale": 0.3}),
        ("causal", {"causal": True}, {"causal": True}),
        ("top-left", {"causal": True, "alignment": "top_left"}, {"causal": True, "top_left": True}),
        ("window", {"window": (20, 30)}, {"window": (20, 30)}),
        ("softcap", {"softcap": 2.0}, {"softcap": 2.0}),
        ("alibi", {"alibi_slopes": slopes, "causal": True}, {"slopes": slopes, "causal": True}),
        ("sink", {"sink": sink, "causal": True}, {"sink": sink, "causal": True}),
        ("boolean bias", {"bias": mask}, {"bias": mask}),
        ("bias", {"bias": bias}, {"bias": bias}),
        ("bias of float32", {"bias": bias.float()}, {"bias": bias.float()}),
    )
    q, k, v = tensors((2, 70, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64))
    for what, given, plain in cases:
        got = tandem.attention(q, k, v, return_lse=True, **given)
        assert got[0].dtype == BF16 and got[1].dtype == F32 and got[0].is_contiguous()
        hold(got, torch_reference.dense, q, k, v, what=what, **plain)


def test_shapes_and_types():
    cases = (
        (F16, (1, 1, 1, 128), (1, 1, 1, 128), 128),
        (BF16, (2, 300, 8, 128), (2, 257, 1, 128), 128),
        (BF16, (1, 65, 2, 256), (1, 70, 2, 256), 256),
        (BF16, (1, 130, 2, 192), (1, 130, 2, 192), 128),
        (F16, (3, 40, 6, 40), (3, 5, 3, 40), 72),
    )
    for dtype, q_shape, k_shape, dim_v in cases:
        q, k, v = tensors(q_shape, k_shape, (*k_shape[:-1], dim_v), dtype=dtype)
        got = tandem.attention(q, k, v, causal=True, return_lse=True)
        hold(got, torch_reference.dense, q, k, v, causal=True, what=str(q_shape))
    nothing = tandem.attention(q, k[:, :0], v[:, :0])
    assert not nothing.any() and tandem.attention(q[:0], k[:0], v[:0]).shape == (0, 40, 6, 72)


def test_packed():
    counts_q, counts_k = (5, 0, 130, 64), (90, 17, 130, 3)
    cu_q, cu_k = lengths(*counts_q), lengths(*counts_k)
    q, k, v = tensors((199, 4, 64), (240, 2, 64), (240, 2, 64))
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 130, "max_seqlen_k": 130}
    for causal in (False, True):
        got = tandem.attention(q, k, v, causal=causal, return_lse=True, **given)
        hold(
            got, torch_reference.packed, q, k, v, cu_seqlens_q=cu_q.tolist(), cu_seqlens_k=cu_k.tolist(), causal=causal
        )
    raises(ValueError, "max_seqlen", tandem.attention, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_used_lengths():
    q, k, v = tensors((3, 33, 2, 64), (3, 100, 2, 64), (3, 100, 2, 64))
    used_q, used_k = int32(33, 0, 20), int32(7, 100, 50)
    k[0, 7:] = float("nan")
    v[0, 7:] = float("nan")
    out, lse = tandem.attention(q, k, v, causal=True, seqused_q=used_q, seqused_k=used_k, return_lse=True)
    for b, (n, m) in enumerate(((33, 7), (0, 100), (20, 50))):
        parts = q[b, :n], k[b, :m], v[b, :m]
        hold((out[b, :n], lse[b, :, :n]), torch_reference.attend, *parts, causal=True, what=str(b))
        assert not out[b, n:].any() and torch.isneginf(lse[b, :, n:]).all()


def test_head_dims_that_are_no_multiple_of_8():
    for dim, dim_v in ((20, 20), (64, 50)):
        q, k, v = tensors((2, 50, 2, dim), (2, 60, 2, dim), (2, 60, 2, dim_v))
        hold(tandem.attention(q, k, v, return_lse=True), torch_reference.dense, q, k, v, what=f"{dim}, {dim_v}")
        out = torch.full((2, 50, 2, dim_v), float("nan"), dtype=BF16, device=GPU)
        assert tandem.attention(q, k, v, out=out) is out
        hold(out, torch_reference.dense, q, k, v, what="out")


def test_layouts():
    q, k, v = tensors((2, 4, 50, 64), (2, 2, 60, 64), (2, 2, 60, 64))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    want = tandem.attention(*(x.contiguous() for x in turned))
    hold(want, torch_reference.dense, *turned)
    assert torch.equal(tandem.attention(*turned), want)

    def shifted(x):  # offset by one element: rows are not 16-byte aligned
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)

    def spread(x):
        return torch.empty((*x.shape[:-1], 65), dtype=x.dtype, device=x.device)[..., :64].copy_(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # these copies must not warn
        assert torch.equal(tandem.attention(*map(shifted, turned)), want)
        assert torch.equal(tandem.attention(*map(spread, turned)), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in turned]
        assert last[0].stride(-1) != 1 and torch.equal(tandem.attention(*last), want)
    one = k[:1, :1].transpose(1, 2)
    wide = one.expand(2, 60, 4, 64)
    assert torch.equal(tandem.attention(turned[0], wide, wide), tandem.attention(turned[0], *[wide.contiguous()] * 2))
    out = torch.full((2, 4, 50, 64), float("nan"), dtype=BF16, device=GPU).transpose(1, 2)
    assert tandem.attention(*turned, out=out) is out and torch.equal(out, want)


def test_refusals_and_nothing_written():
    q, k, v = tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64))
    out = torch.full_like(q, 7.0)
    cases = (
        ("float32", [x.float() for x in (q, k, v)], {}),
        ("float64", [x.double() for x in (q, k, v)], {}),
        ("k.page_size (20)", (q, k.view(1, 20, 2, 64), v), {"page_table": int32(0)[None], "seqused_k": int32(20)}),
        ("num_splits", (q, k, v), {"num_splits": 4, "batch_invariant": True}),
        ("264", [F.pad(x, (0, 200)) for x in (q, k, v)], {}),
    )
    for words, (x, y, z), given in cases:
        target = out if x.dtype == BF16 and x.shape == q.shape else None
        raises(tandem.Unsupported, words, tandem.attention, x, y, z, out=target, **given)
        raises(tandem.Unsupported, words, tandem.check, "forward", x, y, z, **given)
    raises(ValueError, "k device", tandem.attention, q, k.cpu(), v, out=out)
    raises(ValueError, "k.dtype float16", tandem.attention, q, k.half(), v, out=out)
    assert (out == 7.0).all()
    tandem.check("forward", q, k, v)
    assert str(torch.cuda.get_device_name(GPU)) in tandem.description() and "cpu" in tandem.description()


def test_the_same_every_time():
    q, k, v = tensors((2, 700, 8, 128), (2, 700, 2, 128), (2, 700, 2, 128))
    want = tandem.attention(q, k, v, causal=True)
    for _ in range(20):
        assert torch.equal(tandem.attention(q, k, v, causal=True), want)


if __name__ == "__main__":
    sys.exit(run(globals()))
