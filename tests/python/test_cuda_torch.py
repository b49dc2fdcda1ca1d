"""CUDA tensors through torch.compile, operators, autocast, and torch's scaled_dot_product_attention."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import BF16, F32, hold, lengths, near, run, tensors

# isort: split
import sys
import warnings

import torch
import torch.nn.functional as F
import torch_reference

import tandem


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def test_compile():
    q, k, v = (x.requires_grad_() for x in tensors((2, 90, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64)))

    def loss(q, k, v):
        return (tandem.attention(q * 1, k, v, causal=True) * 2).float().square().sum()

    want = loss(q, k, v), *torch.autograd.grad(loss(q, k, v), (q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prints advice
        for options in ({"backend": "aot_eager"}, {}):
            value = compiled(loss, **options)(q, k, v)
            got = value, *torch.autograd.grad(value, (q, k, v))
            for x, y in zip(got, want):
                near(x, y)
        with torch.no_grad():
            padded = [x[..., :20] for x in (q, k, v)]
            near(compiled(tandem.attention, backend="aot_eager")(*padded), tandem.attention(*padded))


def test_operators():
    q, k, v = tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64))
    options = {"causal": True}
    out, lse = torch.ops.tandem.forward(q, k, v, **options)
    hold((out, lse), torch_reference.dense, q, k, v, causal=True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tandem.forward.default, (q, k, v), options, test_utils=tests)
    wanted = [True, True, True, False, False]
    inputs = (torch.ones_like(out), None, out, lse, q, k, v)
    torch.library.opcheck(torch.ops.tandem.backward.default, inputs, {**options, "wanted": wanted}, test_utils=tests)


def test_autocast():
    q, k, v = (x.requires_grad_() for x in tensors((1, 60, 2, 64), (1, 60, 2, 64), (1, 60, 2, 64), dtype=F32))
    with torch.autocast("cuda", dtype=BF16):
        out = tandem.attention(q, k, v, causal=True)
    assert out.dtype == BF16
    out.float().square().sum().backward()
    hold(out, torch_reference.dense, *(x.detach().bfloat16() for x in (q, k, v)), causal=True)
    assert q.grad.dtype == F32 and q.grad.isfinite().all()


def test_torch_sdpa():
    import tandem.torch_sdpa as provider

    calls = []
    forward = provider._forward

    def counted(*arguments, **named):
        result = forward(*arguments, **named)
        calls.append(named)
        return result

    q, k, v = (x.requires_grad_() for x in tensors((2, 4, 90, 64), (2, 4, 90, 64), (2, 4, 90, 64)))

    def run(**given):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, **given)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    own = run(is_causal=True)
    provider._forward = counted
    torch.nn.attention.activate_flash_attention_impl("Tandem")
    try:
        for x, y in zip(run(is_causal=True), own):
            near(x, y)
        assert len(calls) == 1
        run()
        assert len(calls) == 2
        run(dropout_p=0.2)  # torch's implementation serves it
        assert len(calls) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = compiled(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True) * 1, backend="aot_eager")
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                near(function(q, k, v), own[0])
        assert len(calls) == 3
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            varlen_attn = None
        if varlen_attn is not None:
            rows, cu = [x.detach().transpose(1, 2).flatten(0, 1) for x in (q, k, v)], lengths(100, 80)
            got = varlen_attn(*rows, cu, cu, 100, 100)
            hold(got, torch_reference.packed, *rows, cu_seqlens_q=cu.tolist(), cu_seqlens_k=cu.tolist())
            assert len(calls) == 4
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        provider._forward = forward
    count = len(calls)
    run()
    assert len(calls) == count


if __name__ == "__main__":
    sys.exit(run(globals()))
