"""Gradients of CUDA tensors."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import BF16, F32, GPU, int32, lengths, near, raises, run, tensors

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
        ("top-left", (1, 70, 4, 64), (1, 70, 4, 64), 64, {"causal": "top_left"}, {"causal": True}),
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


def test_gradients_that_are_refused_before_anything_is_computed():
    q, k, v, bias = (
        x.requires_grad_() for x in tensors((1, 40, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), (1, 2, 40, 40))
    )
    slopes = torch.ones(2, device=GPU)
    cases = (
        ("bias", {"bias": bias}),
        ("bias", {"bias": bias.detach() > 0}),
        ("alibi_slopes", {"alibi_slopes": slopes}),
        ("softcap", {"softcap": 2.0}),
        ("seqused_q", {"seqused_k": int32(30)}),
        ("deterministic", {"deterministic": True}),
        ("left below", {"window": (-3, 5)}),
    )
    for words, given in cases:
        raises(tandem.Unsupported, f"{words} gradient", tandem.attention, q, k, v, **given)
        if "bias" not in given and "deterministic" not in given:
            raises(tandem.Unsupported, words, tandem.check, "backward", q, k, v, **given)
        with torch.no_grad():
            assert tandem.attention(q, k, v, **given).isfinite().all()
    out, lse = tandem.attention(q, k, v, return_lse=True)
    raises(tandem.Unsupported, "lse detach", torch.autograd.grad, lse.sum(), q)
    torch.use_deterministic_algorithms(True)
    try:
        twice = [
            torch.autograd.grad(tandem.attention(q, k, v, deterministic=True).float().square().sum(), (q, k, v))
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(*twice))


if __name__ == "__main__":
    sys.exit(run(globals()))
