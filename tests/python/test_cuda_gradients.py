"""Gradients of CUDA tensors."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import BF16, F32, GPU, captured, int32, lengths, near, raises, run, tensors

# isort: split
import sys

import torch
import torch_reference

import tandem


def test_gradients():
    (sink,) = tensors((4,), dtype=F32)
    cases = (
        ("plain", (2, 70, 4, 64), (2, 90, 2, 64), 64, {}, {}),
        ("causal", (1, 130, 4, 128), (1, 130, 4, 128), 128, {"causal": True}, {"causal": True}),
        ("causal, more keys", (1, 70, 4, 64), (1, 90, 2, 64), 64, {"causal": True}, {"causal": True}),
        ("causal, more queries", (1, 90, 4, 64), (1, 70, 2, 64), 64, {"causal": True}, {"causal": True}),
        ("top-left", (1, 70, 4, 64), (1, 70, 4, 64), 64, {"causal": True, "alignment": "top_left"}, {"causal": True}),
        ("window", (1, 200, 2, 64), (1, 200, 2, 64), 64, {"window": (20, 30)}, {"window": (20, 30)}),
        ("left", (1, 200, 2, 64), (1, 200, 2, 64), 64, {"window": (20, 0)}, {"window": (20, 0)}),
        ("another head_dim_v", (1, 70, 2, 192), (1, 70, 2, 192), 128, {"causal": True}, {"causal": True}),
        ("head_dim 20", (1, 70, 2, 20), (1, 70, 2, 20), 20, {}, {}),
    )
    for what, q_shape, k_shape, dim_v, given, plain in cases:
        inputs = tensors(q_shape, k_shape, (*k_shape[:-1], dim_v))
        try:
            torch_reference.hold(
                lambda q, k, v, given=given: tandem.attention(q, k, v, **given),
                lambda q, k, v, plain=plain: torch_reference.dense(q, k, v, **plain),
                inputs,
            )
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
    torch_reference.hold(
        lambda q, k, v, sink: tandem.attention(q, k, v, sink=sink, causal=True),
        lambda q, k, v, sink: torch_reference.dense(q, k, v, sink=sink, causal=True),
        [*tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64)), sink],
    )


def test_gradients_of_packed():
    cu_q, cu_k = lengths(5, 0, 130, 64), lengths(90, 17, 130, 3)
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 130, "max_seqlen_k": 130, "causal": True}
    ends = {"cu_seqlens_q": cu_q.tolist(), "cu_seqlens_k": cu_k.tolist()}
    torch_reference.hold(
        lambda q, k, v: tandem.attention(q, k, v, **given),
        lambda q, k, v: torch_reference.packed(q, k, v, causal=True, **ends),
        tensors((199, 4, 64), (240, 2, 64), (240, 2, 64)),
    )


def test_the_backward_call():
    q, k, v, dout = tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64), (2, 70, 4, 64))
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(tandem.attention(*leaves, causal=True), leaves, dout)
    buffer = torch.empty(2, 90, 2, 2, 64, dtype=BF16, device=GPU)
    got = tandem.attention_backward(dout, q, k, v, out, lse, causal=True, dk=buffer[:, :, 0], dv=buffer[:, :, 1])
    near(got.dq, want[0])
    assert got.dk.data_ptr() == buffer.data_ptr() and got.dbias is None
    near(buffer[:, :, 0], want[1])
    near(buffer[:, :, 1], want[2])
    only = tandem.attention_backward(dout, q, k, v, out, lse, causal=True, dq=False, dk=False)
    assert only.dq is None and only.dk is None
    near(only.dv, want[2])


def test_gradients_with_every_score_option():
    slopes = torch.tensor([0.1, 0.02, 0.5, 0.003], device=GPU)
    (bias,) = tensors((1, 4, 70, 90))
    cases = (
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": slopes}, {"slopes": slopes}),
        ({"bias": bias}, {"bias": bias}),
        ({"bias": bias > 0}, {"bias": bias > 0}),
        ({"window": (-3, 30)}, {"window": (-3, 30)}),
    )
    inputs = tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    for given, plain in cases:
        torch_reference.hold(
            lambda q, k, v, given=given: tandem.attention(q, k, v, **given),
            lambda q, k, v, plain=plain: torch_reference.dense(q, k, v, **plain),
            inputs,
        )


def test_the_gradient_of_a_bias():
    for shape in ((2, 4, 70, 90), (1, 4, 1, 90), (2, 1, 70, 1)):
        torch_reference.hold(
            lambda q, k, v, bias: tandem.attention(q, k, v, bias=bias),
            lambda q, k, v, bias: torch_reference.dense(q, k, v, bias=bias.expand(2, 4, 70, 90)),
            tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64), shape),
        )


def test_gradients_of_used_lengths():
    q, k, v, dout = tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64), (2, 70, 4, 64))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(tandem.attention(*leaves, seqused_k=int32(30, 90), causal=True), leaves, dout)
    for b, used in ((0, 30), (1, 90)):
        part = [q[b : b + 1], k[b : b + 1, :used], v[b : b + 1, :used]]
        part = [x.detach().requires_grad_() for x in part]
        want = torch.autograd.grad(tandem.attention(*part, causal=True), part, dout[b : b + 1])
        near(got[0][b : b + 1], want[0])
        near(got[1][b : b + 1, :used], want[1])
        near(got[2][b : b + 1, :used], want[2])
        assert not got[1][b, used:].any() and not got[2][b, used:].any()


def test_a_gradient_through_the_lse():
    inputs = [x.requires_grad_() for x in tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))]
    out, lse = tandem.attention(*inputs, causal=True, return_lse=True)
    got = torch.autograd.grad(out.float().square().sum() + lse.sin().sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want_out, want_lse = torch_reference.dense(*exact, causal=True)
    want = torch.autograd.grad(want_out.square().sum() + want_lse.sin().sum(), exact)
    for x, y in zip(got, want):
        near(x, y.to(x.dtype))


def test_dropout_is_that_of_the_cpu():
    q, k, v, dout = tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64), (2, 70, 4, 64))
    for seed in (7, torch.tensor([-5, 2**40 + 3])):
        on_gpu = [x.requires_grad_() for x in (q, k, v)]
        on_cpu = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
        its = seed.to(GPU) if isinstance(seed, torch.Tensor) else seed
        out = tandem.attention(*on_gpu, causal=True, dropout_p=0.3, seed=its)
        want = tandem.attention(*on_cpu, causal=True, dropout_p=0.3, seed=seed)
        near(out.cpu(), want)
        got = torch.autograd.grad(out, on_gpu, dout)
        for x, y in zip(got, torch.autograd.grad(want, on_cpu, dout.cpu())):
            near(x.cpu(), y)


def test_the_same_bits_every_time():
    q, k, v, sink, dout = tensors((4, 1030, 8, 128), (4, 1030, 2, 128), (4, 1030, 2, 128), (8,), (4, 1030, 8, 128))
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]

    def gradients(**given):
        out = tandem.attention(*leaves[:3], sink=leaves[3], causal=True, **given)
        return torch.autograd.grad(out, leaves, dout)

    first = gradients()
    for given in ({}, {"deterministic": True}, {"batch_invariant": True}):
        for _ in range(5):
            assert all(torch.equal(x, y) for x, y in zip(first, gradients(**given)))


def test_gradients_in_a_graph():
    q, k, v, dout = tensors((2, 130, 4, 64), (2, 130, 4, 64), (2, 130, 4, 64), (2, 130, 4, 64))
    out, lse = tandem.attention(q, k, v, return_lse=True)
    want = tandem.attention_backward(dout, q, k, v, out, lse)
    graph, got = captured(tandem.attention_backward, dout, q, k, v, out, lse)
    for _ in range(3):
        for x in got[:3]:
            x.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(got[:3], want[:3]))


def test_gradients_that_are_refused_before_anything_is_computed():
    q, k, v = (x.requires_grad_() for x in tensors((1, 40, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64)))
    raises(tandem.Unsupported, "page_table", tandem.check, "backward", q, k, v, page_table=int32(0)[None])


if __name__ == "__main__":
    sys.exit(run(globals()))
