"""Parts of an attention: the position of the diagonal, float32 results, merging, summed gradients."""

import numpy as np
import pytest

import reference
import tandem

f32 = np.float32


def arrays(seed, *shapes, dtype=f32):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def test_an_offset_for_each_sequence():
    q, k, v = arrays(1, (3, 5, 2, 8), (3, 9, 2, 8), (3, 9, 2, 8))
    offsets = np.array([4, -2, 100], np.int32)
    out = tandem.attention(q, k, v, causal=True, diagonal_offset=offsets)
    for b, offset in enumerate(offsets):
        one = tandem.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True, diagonal_offset=int(offset))
        np.testing.assert_array_equal(out[b], one[0])
    np.testing.assert_array_equal(
        tandem.attention(q, k, v, causal=True), tandem.attention(q, k, v, causal=True, diagonal_offset=4)
    )


def test_what_no_offset_is():
    q, k, v = arrays(2, (1, 5, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    with pytest.raises(ValueError, match="alignment .'top_left'. must be left out where diagonal_offset is given"):
        tandem.attention(q, k, v, causal=True, alignment="top_left", diagonal_offset=3)
    for wrong in (1.5, "4", True):
        with pytest.raises(TypeError, match="diagonal_offset .* must be an integer, or an array of int32"):
            tandem.attention(q, k, v, causal=True, diagonal_offset=wrong)
    with pytest.raises(ValueError, match="diagonal_offsets.length .2. must be 1"):
        tandem.attention(q, k, v, causal=True, diagonal_offset=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="diagonal_offsets.dtype .int64. must be int32"):
        tandem.attention(q, k, v, causal=True, diagonal_offset=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="alignment .'explicit'. must be"):
        tandem.attention(q, k, v, alignment="explicit")
    tandem.check("forward", q, k, v, causal=True, diagonal_offset=-7, out_dtype="float32")


def test_float32_results_of_float16():
    q, k, v = arrays(3, (1, 20, 2, 16), (1, 30, 2, 16), (1, 30, 2, 16), dtype=np.float16)
    exact = tandem.attention(*(x.astype(np.float64) for x in (q, k, v)))
    narrow, wide = tandem.attention(q, k, v), tandem.attention(q, k, v, out_dtype=f32)
    assert wide.dtype == f32 and narrow.dtype == np.float16
    assert np.abs(wide - exact).max() < np.abs(narrow - exact).max()
    np.testing.assert_array_equal(wide.astype(np.float16), narrow)
    given = np.empty_like(wide)
    assert tandem.attention(q, k, v, out=given) is given
    np.testing.assert_array_equal(given, wide)
    with pytest.raises(ValueError, match="out_dtype .float16. must be None, for a result of q's type, or float32"):
        tandem.attention(q, k, v, out_dtype=np.float16)


def ring(q, k, v, parts, sink, **options):
    """Returns (out, lse) of each part of the keys. The queries are the last of the sequence."""
    size, results = k.shape[1] // parts, []
    for n in range(parts):
        keys = slice(n * size, (n + 1) * size)
        offset = k.shape[1] - q.shape[1] - n * size
        own = sink if n == 0 else None
        results.append(
            tandem.attention(
                q, k[:, keys], v[:, keys], causal=True, diagonal_offset=offset, sink=own, return_lse=True, **options
            )
        )
    return results


def test_merged_parts_are_the_whole():
    q, k, v = arrays(4, (2, 10, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16))
    sink = np.array([0.3, -1, 2, 0], f32)
    out, lse = tandem.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    outs, lses = zip(*ring(q, k, v, 3, sink))
    merged, merged_lse = tandem.merge(outs, lses)
    np.testing.assert_allclose(merged, out, atol=2e-6)
    np.testing.assert_allclose(merged_lse, lse, atol=2e-6)
    again, _ = tandem.merge([merged], [merged_lse])
    np.testing.assert_allclose(again, merged, atol=1e-6)


def test_what_cannot_be_merged():
    out, lse = np.zeros((1, 3, 2, 8), f32), np.zeros((1, 2, 3), f32)
    with pytest.raises(ValueError, match="outs .0. and lses .0. must have one length of at least 1"):
        tandem.merge([], [])
    with pytest.raises(ValueError, match="outs .2. and lses .1. must have one length"):
        tandem.merge([out, out], [lse])
    with pytest.raises(ValueError, match=r"outs\[1\].head_dim .7. must equal out.head_dim .8."):
        tandem.merge([out, out[..., :7].copy()], [lse, lse])
    with pytest.raises(ValueError, match=r"lses\[0\].heads .3. must equal out.heads .2."):
        tandem.merge([out], [lse.transpose(0, 2, 1).copy()])
    with pytest.raises(TypeError, match="lses.0. .list. must be an array"):
        tandem.merge([out], [[1]])


def test_gradients_are_added_up():
    q, k, v, dout = arrays(5, (1, 9, 2, 16), (1, 14, 2, 16), (1, 14, 2, 16), (1, 9, 2, 16))
    sink = np.array([0.5, -0.5], f32)
    out, lse = tandem.attention(q, k, v, sink=sink, return_lse=True)
    one = tandem.attention_backward(dout, q, k, v, out, lse, sink=sink)
    before = [x.copy() for x in arrays(6, q.shape, k.shape, v.shape, sink.shape)]
    dq, dk, dv, dsink = (x.copy() for x in before)
    sums = tandem.attention_backward(
        dout, q, k, v, out, lse, sink=sink, dq=dq, dk=dk, dv=dv, dsink=dsink, accumulate=True
    )
    assert sums.dq is dq
    for got, old, new in zip((dq, dk, dv, dsink), before, (one.dq, one.dk, one.dv, one.dsink)):
        np.testing.assert_allclose(got, old + new, atol=1e-5)
    alone = tandem.attention_backward(dout, q, k, v, out, lse, sink=sink, accumulate=True)
    np.testing.assert_allclose(alone.dq, one.dq, atol=1e-6)


def test_float32_gradients_of_float16():
    q, k, v, dout = arrays(7, (1, 9, 2, 16), (1, 14, 2, 16), (1, 14, 2, 16), (1, 9, 2, 16), dtype=np.float16)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    exact = reference.backward(dout[0], q[0], k[0], v[0])
    dq = np.zeros(q.shape, f32)
    tandem.attention_backward(dout, q, k, v, out, lse, dq=dq, dk=False, dv=False)
    narrow = tandem.attention_backward(dout, q, k, v, out, lse, dk=False, dv=False).dq
    np.testing.assert_array_equal(dq.astype(np.float16), narrow)
    assert np.abs(dq[0] - exact[0]).max() <= np.abs(narrow[0] - exact[0]).max()


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch")

    def tensors(self, *shapes, dtype=None):
        generator = self.torch.Generator().manual_seed(0)
        dtype = dtype or self.torch.float32
        return [self.torch.randn(x, generator=generator).to(dtype).requires_grad_() for x in shapes]

    def test_gradients_through_merged_parts(self):
        torch = self.torch
        q, k, v = self.tensors((2, 10, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16))
        sink = torch.tensor([0.3, -1, 2, 0], requires_grad=True)
        weights, lse_weights = torch.randn(2, 10, 4, 16), torch.randn(2, 4, 10)

        def loss(out, lse):
            return (out * weights).sum() + (lse * lse_weights).sum()

        inputs = (q, k, v, sink)
        whole = torch.autograd.grad(loss(*tandem.attention(q, k, v, causal=True, sink=sink, return_lse=True)), inputs)
        outs, lses = zip(*ring(q, k, v, 3, sink))
        merged = torch.autograd.grad(loss(*tandem.merge(outs, lses)), inputs)
        for a, b in zip(merged, whole):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)

    def test_merge_by_finite_differences(self):
        torch = self.torch
        outs = self.tensors((1, 3, 2, 4), (1, 3, 2, 4), dtype=torch.float64)
        lses = self.tensors((1, 2, 3), (1, 2, 3), dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda *x: tandem.merge(x[:2], x[2:]), (*outs, *lses))

    def test_merge_in_a_compiled_graph(self):
        torch = self.torch
        outs = self.tensors((1, 3, 2, 4), (1, 3, 2, 4))
        lses = [torch.randn(1, 2, 3), torch.full((1, 2, 3), -torch.inf)]
        torch.library.opcheck(torch.ops.tandem.merge.default, (outs, lses, True))
        compiled = torch.compile(lambda o, s: tandem.merge(o, s), fullgraph=True, backend="aot_eager")
        for a, b in zip(compiled(outs, lses), tandem.merge(outs, lses)):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("traced", [False, True])
    def test_float32_results_have_gradients(self, traced):
        torch = self.torch
        q, k, v = self.tensors((1, 10, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16), dtype=torch.bfloat16)

        def run(q, k, v, **options):
            out = tandem.attention(q, k, v, causal=True, diagonal_offset=3, **options)
            return out, torch.autograd.grad(out.float().square().sum(), (q, k, v))

        if traced:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                wide, gradients = run(q, k, v, out_dtype=torch.float32)
        else:
            wide, gradients = run(q, k, v, out_dtype=torch.float32)
        narrow, expected = run(q, k, v)
        assert wide.dtype is torch.float32 and all(x.dtype is torch.bfloat16 for x in gradients)
        assert torch.equal(wide.bfloat16(), narrow)
        for a, b in zip(gradients, expected):
            torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)

    def test_an_offset_for_each_sequence_has_gradients(self):
        torch = self.torch
        q, k, v = self.tensors((2, 6, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8))
        offsets = torch.tensor([3, -1], dtype=torch.int32)
        together = torch.autograd.grad(
            tandem.attention(q, k, v, causal=True, diagonal_offset=offsets).square().sum(), (q, k, v)
        )
        for b, offset in enumerate(offsets.tolist()):
            own = [x[b : b + 1].detach().requires_grad_() for x in (q, k, v)]
            alone = torch.autograd.grad(tandem.attention(*own, causal=True, diagonal_offset=offset).square().sum(), own)
            for x, y in zip(together, alone):
                torch.testing.assert_close(x[b : b + 1], y)
