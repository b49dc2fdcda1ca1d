"""CUDA tensors: the call and every module under another library's name, streams, graphs, torch.compile, autocast,
gradients, torch's own scaled_dot_product_attention. Judged by float64 on the GPU and the 2x rule.

    PYTHONPATH=python python -m pytest -q tests/python/test_cuda.py
    PYTHONPATH=python python tests/python/test_cuda.py [part of a test's name]    # without pytest
    TANDEM_PYTHON_BOUNDARY=ctypes ...                                             # the other way to the C interface
"""

import sys
import threading
import time
import traceback
import unittest
import warnings

try:
    import torch
except ImportError:
    torch = None

if torch is None or not torch.cuda.is_available():
    why = "SKIPPED: test_cuda.py needs a GPU and a torch built for it"
    print(why, file=sys.stderr)
    if __name__ == "__main__":
        sys.exit(77)
    raise unittest.SkipTest(why)

import torch.nn.functional as F
import torch_reference

import reference
import tandem
from tandem import fa3, fa4, flash_attn
from tandem.flash_attn import bert_padding

GPU = torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def tensors(*shapes, dtype=BF16, seed=0, device=GPU):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]


def lengths(*counts, device=GPU):
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def int32(*values, device=GPU):
    return torch.tensor(values, dtype=torch.int32, device=device)


def hold(result, plain, *inputs, what="", **options):
    """result, a tensor or (out, lse), against plain(*inputs): exact in float64, plain in the inputs' own type."""
    exact = plain(*(x.double() for x in inputs), **options)
    low = plain(*inputs, **options)
    results = result if isinstance(result, tuple) else (result,)
    for name, *values in zip(("out", "lse"), results, exact, low):
        reference.hold(*(x.detach().double().cpu().numpy() for x in values), f"{what} {name}")


def near(got, want):
    """Two ways to 16-bit results: within a few roundings of the largest."""
    assert got.shape == want.shape and got.dtype == want.dtype
    error, allowed = (got.double() - want.double()).abs().max(), 2**-5 * want.double().abs().max()
    assert error <= allowed, f"largest difference {error:.3g}, allowed {allowed:.3g}"


def raises(error, words, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except error as found:
        text = str(found)
        assert all(word in text for word in words.split()), text
        return
    raise AssertionError(f"no {error.__name__} with {words!r}")


def captured(function, *arguments, **named):
    """A graph of the call, and what the call returned; the graph's replay writes there."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*arguments, **named)
    return graph, result


# ---- The call -------------------------------------------------------------------------------------------------------


def test_options():
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05], device=GPU)
    (sink,) = tensors((4,), dtype=F32)
    mask = torch.rand(2, 1, 70, 130, device=GPU) > 0.3
    (bias,) = tensors((1, 4, 70, 130))
    cases = (
        ("plain", {}, {}),
        ("scale", {"softmax_scale": 0.3}, {"scale": 0.3}),
        ("causal", {"causal": True}, {"causal": True}),
        ("top-left", {"causal": "top_left"}, {"causal": True, "top_left": True}),
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

    def shifted(x):  # by one element: no row begins at a multiple of 16 bytes
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)

    def spread(x):
        return torch.empty((*x.shape[:-1], 65), dtype=x.dtype, device=x.device)[..., :64].copy_(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # these copies are no news
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
        ("dropout_p", (q, k, v), {"dropout_p": 0.1}),
        ("page_table", (q, k.view(1, 20, 2, 64), v), {"page_table": int32(0)[None], "seqused_k": int32(20)}),
        ("num_splits", (q, k, v), {"num_splits": 4}),
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


# ---- Streams, graphs, devices, threads ------------------------------------------------------------------------------


def test_streams():
    q, k, v = tensors((1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4, 64))
    want = tandem.attention(q, k, v)
    (busy,) = tensors((4096, 4096))
    torch.cuda.synchronize()
    for _ in range(3):
        producer, stream = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(producer):
            for _ in range(20):
                busy @ busy  # what follows comes late
            late = [x.clone() for x in (q, k, v)]
        stream.wait_stream(producer)
        with torch.cuda.stream(stream):
            late = [x * 1 for x in late]
            result = tandem.attention(*late)
            result = result + 0  # the same stream: no wait is needed
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(result, want)
        torch.cuda.synchronize()


def test_graphs():
    dense = tensors((2, 200, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    counts = (50, 120, 30)
    packed = tensors((200, 4, 64), (200, 2, 64), (200, 2, 64))
    cu = lengths(*counts)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 200, "max_seqlen_k": 200}
    for inputs, options in ((dense, {}), (packed, given)):
        tandem.prepare("forward", *inputs, causal=True, **options)
        graph, out = captured(tandem.attention, *inputs, causal=True, **options)
        for seed in (1, 2):
            for x, y in zip(inputs, tensors(*(x.shape for x in inputs), seed=seed)):
                x.copy_(y)
            if options:
                cu.copy_(lengths(*counts[:: seed * 2 - 3]))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, tandem.attention(*inputs, causal=True, **options))
    inputs = tensors((1, 33, 2, 88), (1, 33, 2, 88), (1, 33, 2, 88))

    def cold():
        raises(RuntimeError, "captured prepare", tandem.attention, *inputs, softcap=3.0)
        inputs[0].add(1)  # the capture goes on

    captured(cold)


def test_gradients_in_a_graph():
    q, k, v = (x.requires_grad_() for x in tensors((1, 200, 2, 64), (1, 200, 2, 64), (1, 200, 2, 64)))

    def step():
        return torch.autograd.grad(tandem.attention(q, k, v, causal=True).float().square().sum(), (q, k, v))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, got = captured(step)
    graph.replay()
    for x, y in zip(got, want):
        near(x, y)  # dq is summed in any order


def test_two_gpus():
    if torch.cuda.device_count() < 2:
        print("(one GPU: not run)", end=" ")
        return
    other = torch.device("cuda", 1)
    q, k, v = tensors((1, 100, 4, 64), (1, 100, 2, 64), (1, 100, 2, 64))
    want = tandem.attention(q, k, v, causal=True)
    there = [x.to(other).requires_grad_() for x in (q, k, v)]
    out = tandem.attention(*there, causal=True)
    assert torch.cuda.current_device() == 0 and out.device == other and torch.equal(out.to(GPU), want)
    out.sum().backward()
    assert there[0].grad.device == other and there[0].grad.isfinite().all()
    raises(ValueError, "device", tandem.attention, q, there[1].detach(), v)


def test_threads():
    q, k, v = tensors((1, 128, 2, 96), (1, 128, 2, 96), (1, 128, 2, 96))
    want = torch_reference.dense(*(x.double() for x in (q, k, v)))[0]
    plain = torch_reference.dense(q, k, v)[0]
    allowed = 2 * (plain.double() - want).abs().max() + 2**-19
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    error = (tandem.attention(q, k, v).double() - want).abs().max()
                    assert error <= allowed, error
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# ---- torch.compile, autocast ----------------------------------------------------------------------------------------


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def test_compile():
    q, k, v = (x.requires_grad_() for x in tensors((2, 90, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64)))

    def loss(q, k, v):
        return (tandem.attention(q * 1, k, v, causal=True) * 2).float().square().sum()

    want = loss(q, k, v), *torch.autograd.grad(loss(q, k, v), (q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice
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
    options = tandem._library.options(None, True, None, 0.0, None, None, 0.0, (0, 0), False, False, None)
    inputs = (q, k, v, *[None] * 9)
    out, lse = torch.ops.tandem.forward(*inputs, *options)
    hold((out, lse), torch_reference.dense, q, k, v, causal=True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tandem.forward.default, (*inputs, *options), test_utils=tests)
    wanted = [True, True, True, False, False]
    arguments = (torch.ones_like(out), None, out, lse, *inputs, *options, wanted)
    torch.library.opcheck(torch.ops.tandem.backward.default, arguments, test_utils=tests)


def test_autocast():
    q, k, v = (x.requires_grad_() for x in tensors((1, 60, 2, 64), (1, 60, 2, 64), (1, 60, 2, 64), dtype=F32))
    with torch.autocast("cuda", dtype=BF16):
        out = tandem.attention(q, k, v, causal=True)
    assert out.dtype == BF16
    out.float().square().sum().backward()
    hold(out, torch_reference.dense, *(x.detach().bfloat16() for x in (q, k, v)), causal=True)
    assert q.grad.dtype == F32 and q.grad.isfinite().all()


# ---- Gradients ------------------------------------------------------------------------------------------------------


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


# ---- The names of others --------------------------------------------------------------------------------------------


def test_flash_attn():
    q, k, v = tensors((2, 60, 4, 64), (2, 60, 4, 64), (2, 60, 4, 64))
    plain = torch_reference.dense
    out, lse, mask = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    hold((out, lse), plain, q, k, v, causal=True)
    assert mask.numel() == 0
    hold(flash_attn.flash_attn_func(q, k, v, window_size=(9, 4)), plain, q, k, v, window=(9, 4))
    hold(flash_attn.flash_attn_func(q, k, v, softcap=3.0), plain, q, k, v, softcap=3.0)
    qkv, kv = torch.stack((q, k, v), 2), torch.stack((k, v), 2)
    torch_reference.hold(
        lambda x: flash_attn.flash_attn_qkvpacked_func(x, causal=True),
        lambda x: plain(*x.unbind(2), causal=True),
        [qkv],
    )
    torch_reference.hold(flash_attn.flash_attn_kvpacked_func, lambda q, x: plain(q, *x.unbind(2)), [q, kv])
    rows, cu = qkv.flatten(0, 1), lengths(20, 70, 30)
    ends = {"cu_seqlens_q": cu.tolist(), "cu_seqlens_k": cu.tolist(), "causal": True}

    def packed(x):
        return torch_reference.packed(*x.unbind(1), **ends)

    torch_reference.hold(lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 70, causal=True), packed, [rows])
    got = flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], cu, cu, 70, 70, causal=True)
    hold(got, packed, rows)
    got = flash_attn.flash_attn_varlen_func(*rows.unbind(1), cu, cu, 70, 70, causal=True, return_attn_probs=True)
    hold(got[:2], packed, rows)
    raises(tandem.Unsupported, "dropout_p", flash_attn.flash_attn_func, q, k, v, dropout_p=0.5)


def cache_case(**given):
    """flash_attn_with_kvcache's arguments, with what the cache holds after the call and out, in float64."""
    k_cache, v_cache, q, k, v = tensors((3, 80, 2, 64), (3, 80, 2, 64), (2, 2, 4, 64), (2, 2, 2, 64), (2, 2, 2, 64))
    seqlens, rows, pads = (5, 60), given.get("cache_batch_idx", int32(0, 1)).tolist(), given.get("cache_leftpad")
    pads = (0, 0) if pads is None else pads.tolist()
    want_k, want_v = k_cache.clone(), v_cache.clone()
    parts = []
    for b, (n, row, pad) in enumerate(zip(seqlens, rows, pads)):
        want_k[row, n : n + 2], want_v[row, n : n + 2] = k[b], v[b]
        parts.append((q[b], want_k[row, pad : n + 2], want_v[row, pad : n + 2]))
    return (q, k_cache, v_cache, k, v), int32(*seqlens), (want_k, want_v), parts


def test_flash_attn_with_kvcache():
    for given in ({}, {"cache_batch_idx": int32(2, 0)}, {"cache_leftpad": int32(2, 11)}):
        for module in (flash_attn, fa3):
            inputs, seqlens, (want_k, want_v), parts = cache_case(**given)
            out = module.flash_attn_with_kvcache(*inputs, cache_seqlens=seqlens, causal=True, num_splits=3, **given)
            assert torch.equal(inputs[1], want_k) and torch.equal(inputs[2], want_v)
            for x, part in zip(out, parts):
                hold(x, torch_reference.attend, *part, causal=True, what=f"{module.__name__} {given}")
    # The dense form waits for nothing: it can be in a graph, where its lengths may change.
    (q, k_cache, v_cache, _, _), _, _, _ = cache_case()
    seqlens = int32(5, 60, device=GPU)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, causal=True)
    graph, out = captured(flash_attn.flash_attn_with_kvcache, q, k_cache, v_cache, cache_seqlens=seqlens, causal=True)
    seqlens.copy_(int32(30, 9))
    graph.replay()
    for x, y, b, n in zip(out, q, range(2), (30, 9)):
        hold(x, torch_reference.attend, y, k_cache[b, :n], v_cache[b, :n], causal=True)


def test_rotary_in_the_cache():
    (q, k_cache, v_cache, k, v), seqlens, _, _ = cache_case()
    angles = torch.rand(80, 16, device=GPU) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    on_cpu = [x.cpu().float() for x in (q, k_cache, v_cache, k, v, cos, sin)]
    named = {"causal": True, "rotary_interleaved": False}
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=seqlens, **named)
    want = flash_attn.flash_attn_with_kvcache(*on_cpu, cache_seqlens=seqlens.cpu(), **named)
    torch.testing.assert_close(out.cpu().float(), want, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(k_cache.cpu().float(), on_cpu[1], rtol=1e-2, atol=1e-2)


def test_fa3_and_fa4():
    q, k, v = tensors((2, 60, 4, 64), (2, 60, 2, 64), (2, 60, 2, 64))
    plain = torch_reference.dense
    hold(fa3.flash_attn_func(q, k, v, causal=True, num_splits=2, return_attn_probs=True), plain, q, k, v, causal=True)
    (sink,) = tensors((4,))
    out, lse = fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True, num_splits=4)
    hold((out, lse), lambda q, k, v, s: plain(q, k, v, causal=True, sink=s), q, k, v, sink)
    torch_reference.hold(
        lambda q, k, v, s: fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=s)[0],
        lambda q, k, v, s: plain(q, k, v, causal=True, sink=s),
        [q, k, v, sink],
    )
    cu = lengths(20, 70, 30)
    ends = {"cu_seqlens_q": cu.tolist(), "cu_seqlens_k": cu.tolist()}
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    hold(fa3.flash_attn_varlen_func(*rows, cu, cu, 70, 70), torch_reference.packed, *rows, **ends)
    out, lse = fa4.flash_attn_varlen_func(*rows, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    hold((out, lse), torch_reference.packed, *rows, **ends)
    used = int32(40, 7)
    out, _ = fa4.flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True)
    for b, n in enumerate((40, 7)):
        hold(out[b], torch_reference.attend, q[b], k[b, :n], v[b, :n], causal=True)


def test_sdpa():
    q, k, v = tensors((2, 4, 50, 64), (2, 4, 70, 64), (2, 4, 70, 64))
    mask = torch.rand(2, 1, 50, 70, device=GPU) > 0.4
    (bias,) = tensors((4, 50, 70))
    for given in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": bias}, {"scale": 0.2}):
        exact = {n: x.double() if n == "attn_mask" and x.dtype != torch.bool else x for n, x in given.items()}
        want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), **exact)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            low = F.scaled_dot_product_attention(q, k, v, **given)
        got = tandem.sdpa(q, k, v, **given)
        # torch's plain way keeps the scores in float32: a rounding of the probabilities to 16 bits is allowed, too.
        error, allowed = (got - want).abs().max(), 2 * (low - want).abs().max() + 2**-9 * want.abs().max()
        assert error <= allowed, (given, error, allowed)
    grouped = tandem.sdpa(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert torch.equal(grouped, tandem.sdpa(q, *(x[:, :2].repeat_interleave(2, 1) for x in (k, v))))


def test_patch_and_padding():
    with tandem.patch():
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import pad_input, unpad_input
    assert flash_attn_func is flash_attn.flash_attn_func and pad_input is bert_padding.pad_input
    (x,) = tensors((3, 20, 2, 64))
    attention_mask = (torch.arange(20, device=GPU) < int32(20, 3, 11)[:, None]).int()
    rows, indices, cu, longest, used = unpad_input(x, attention_mask)
    out = flash_attn.flash_attn_varlen_func(rows, rows, rows, cu, cu, longest, longest)
    padded = pad_input(out, indices, 3, 20)
    for b, n in enumerate(used.tolist()):
        hold(padded[b, :n], torch_reference.attend, *[x[b, :n]] * 3)


def test_transformers():
    try:
        import transformers

        import tandem.transformers  # noqa: F401
    except ImportError as error:
        print(f"(not run: {error})", end=" ")
        return
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    tokens = torch.randint(99, (3, 40), generator=torch.Generator().manual_seed(1)).to(GPU)
    kept = torch.arange(40, device=GPU) >= int32(0, 30, 11)[:, None]

    def logits(implementation, dtype):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(GPU, dtype).eval()
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(tokens, attention_mask=kept.long()).logits[kept].double(), model

    exact, _ = logits("sdpa", torch.float64)
    plain, _ = logits("eager", BF16)
    got, model = logits("tandem", BF16)
    reference.hold(*(x.cpu().numpy() for x in (got, exact, plain)), "logits")
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    generated = model.generate(tokens[:, :8], max_new_tokens=4, do_sample=False)
    assert generated.shape == (3, 12)


# ---- Below torch's own functions ------------------------------------------------------------------------------------


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
        run(dropout_p=0.2)  # torch's own serves it
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


def main():
    failed = 0
    start = time.monotonic()
    names = [n for n in globals() if n.startswith("test_") and all(part in n for part in sys.argv[1:])]
    print(tandem.description())
    for name in names:
        print(name, end=" ", flush=True)
        begin = time.monotonic()
        try:
            globals()[name]()
        except Exception:
            failed += 1
            print(f"FAILED\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok, {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{len(names) - failed} of {len(names)} passed in {time.monotonic() - start:.0f} s")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
