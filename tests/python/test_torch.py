"""torch tensors: all gradients, the operators, torch.compile, autocast, threads."""

import threading

import numpy as np
import pytest

import reference
import tandem

torch = pytest.importorskip("torch")


def tensors(*shapes, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def inputs_of(q, k, v, bias=None, sink=None, slopes=None, cu_q=None, cu_k=None, used_q=None, used_k=None, seed=None):
    return q, k, v, bias, sink, slopes, cu_q, cu_k, used_q, used_k, None, seed


LENGTHS = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 6, 11])]
PACKED = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*LENGTHS, 5, 6)))
MASKED = {"causal": True, "alignment": "top_left", "window": (3, 0), "softcap": 1.0}
CASES = {
    "plain": ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 5), {}),
    "causal": ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), {"causal": True}),
    "top-left, window, softcap": ((1, 6, 2, 4), (1, 9, 1, 4), (1, 9, 1, 4), MASKED),
    "packed": ((8, 2, 4), (11, 2, 4), (11, 2, 4), {"causal": True, **PACKED}),
    "used": ((2, 4, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4), {"seqused_k": torch.tensor([3, 5], dtype=torch.int32)}),
    "alibi": ((1, 4, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4), {"alibi_slopes": torch.tensor([0.5, 0.1])}),
    "dropout": ((1, 4, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4), {"dropout_p": 0.3, "seed": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("extra", ["", "bias", "sink"])
def test_gradcheck(name, extra):
    *shapes, options = CASES[name]
    arguments = tensors(*shapes, dtype=torch.float64)
    names = []
    if extra == "sink":
        arguments += tensors((shapes[0][-2],), dtype=torch.float64)
        names = ["sink"]
    if extra == "bias":
        if name == "packed":
            pytest.skip("a bias is for dense calls")
        arguments += tensors((1, shapes[0][-2], shapes[0][1], 1), dtype=torch.float64)
        names = ["bias"]

    def function(q, k, v, *rest):
        return tandem.attention(q, k, v, return_lse=True, **dict(zip(names, rest)), **options)

    assert torch.autograd.gradcheck(function, arguments)


def test_gradients_are_those_of_the_numpy_call():
    q, k, v, bias, sink = tensors((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (1, 4, 9, 12), (4,))
    out, lse = tandem.attention(q, k, v, bias=bias, sink=sink, causal=True, return_lse=True)
    dout, dlse = tensors(out.shape, lse.shape, seed=1, grad=False)
    torch.autograd.backward((out, lse), (dout, dlse))
    n = [x.detach().numpy() for x in (dout, q, k, v, out, lse)]
    options = {"bias": bias.detach().numpy(), "sink": sink.detach().numpy(), "causal": True}
    wanted = tandem.attention_backward(*n, dlse=dlse.numpy(), **options)
    for x, want in zip((q, k, v, bias, sink), wanted):
        np.testing.assert_allclose(x.grad.numpy(), want, rtol=0, atol=0)


def test_only_wanted_gradients_are_computed():
    q, k, v = tensors(*[(1, 5, 2, 8)] * 3)
    (dk,) = torch.autograd.grad(tandem.attention(q, k, v).sum(), k)
    out = tandem.attention(q.detach(), k, v.detach())
    out.sum().backward()
    assert torch.equal(k.grad, dk) and q.grad is None
    assert not tandem.attention(q.detach(), k.detach(), v.detach()).requires_grad
    with torch.no_grad():
        assert not tandem.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert torch.equal(tandem.attention(q, k, v), tandem.attention(q.clone(), k, v))


def test_the_lse_alone_has_a_gradient():
    q, k, v = tensors((1, 5, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    _, lse = tandem.attention(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 8**-0.5
    want = torch.autograd.grad(s.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(dq, want[0])
    torch.testing.assert_close(dk, want[1])


def test_second_derivatives_are_refused():
    q, k, v = tensors(*[(1, 3, 1, 4)] * 3, dtype=torch.float64)
    (dq,) = torch.autograd.grad(tandem.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_and_layouts(dtype):
    q, k, v, dout = tensors(*[(2, 3, 20, 16)] * 4, dtype=dtype)
    turned = [x.transpose(1, 2) for x in (q, k, v)]  # memory has the order (batch, heads, seqlen, dim)
    out = tandem.attention(*turned, causal=True)
    assert out.dtype == dtype and out.is_contiguous() and out.shape == (2, 20, 3, 16)
    out.backward(dout.transpose(1, 2))
    assert q.grad.dtype == dtype and q.grad.shape == q.shape
    n = [x.detach().float().numpy()[0].transpose(1, 0, 2) for x in (dout, q, k, v)]
    low = {torch.float32: np.float32}.get(dtype, np.float32)
    exact, plain = (reference.backward(*n, causal=True, dtype=t)[0] for t in (np.float64, low))
    plain = torch.from_numpy(plain).to(dtype).double().numpy()
    # In 16 bits P and the gradient of the scores are rounded too, to 2^-9 or 2^-12 of their size.
    slack = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 0}[dtype] * np.abs(exact).max()
    got = q.grad[0].double().numpy().transpose(1, 0, 2)
    assert np.abs(got - exact).max() <= 2 * np.abs(plain - exact).max() + slack + 2**-19


def test_a_gradient_of_any_strides():
    q, k, v = tensors(*[(1, 5, 2, 8)] * 3)
    tandem.attention(q, k, v).sum().backward()  # an expanded scalar has strides of 0
    expanded = q.grad.clone()
    q.grad = None
    out = tandem.attention(q, k, v)
    out.backward(torch.ones_like(out))
    assert torch.equal(q.grad, expanded)


def sample_calls():
    q, k, v, bias, sink = tensors((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 1, 6, 7), (4,))
    causal = {"causal": True, "window_left": 4, "softcap": 2.0, "deterministic": True}
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    yield inputs_of(q, k, v), {}
    yield inputs_of(q, k, v, bias, sink), causal
    yield inputs_of(q, k, v, bias > 0, slopes=torch.rand(4)), {**causal, "alignment": "top_left"}
    yield inputs_of(q, k, v, seed=torch.tensor([3, 4])), {"dropout_p": 0.5}
    yield inputs_of(*tensors(*[(6, 2, 8)] * 3), cu_q=cu, cu_k=cu), {"max_seqlen_q": 4, "max_seqlen_k": 4}
    yield inputs_of(*tensors(*[(2, 5, 2, 8)] * 3), used_k=torch.tensor([5, 2], dtype=torch.int32)), causal
    yield inputs_of(*(x.detach() for x in (q, k, v))), {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's, torch 2.14
@pytest.mark.parametrize("n", range(7))
def test_opcheck_of_forward(n):
    torch.library.opcheck(torch.ops.tandem.forward.default, *list(sample_calls())[n])


@pytest.mark.parametrize("n", range(7))
def test_opcheck_of_backward(n):
    inputs, options = list(sample_calls())[n]
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    out, lse = torch.ops.tandem.forward(*inputs, **options)
    bias, sink = inputs[3], inputs[4]
    wanted = [True, n % 2 == 0, True, bias is not None and bias.is_floating_point(), sink is not None]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            torch.ops.tandem.backward.default,
            (torch.randn_like(out), dlse, out, lse, *inputs),
            {**options, "wanted": wanted},
        )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compile_whole(name, dynamic):
    *shapes, options = CASES[name]
    arguments = tensors(*shapes)

    def function(q, k, v):
        out, lse = tandem.attention(q * 1.0, k, v, return_lse=True, **options)
        return (out * 2).sum() + lse.tanh().sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got = torch.autograd.grad(compiled(*arguments), arguments)
    want = torch.autograd.grad(function(*arguments), arguments)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_compile_where_tandem_is_loaded_first(run_python):
    run_python("""
        import tandem, torch
        q = torch.randn(1, 5, 2, 8)
        f = torch.compile(lambda q: tandem.attention(q, q, q, causal=True) + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(f(q), tandem.attention(q, q, q, causal=True) + 1)
    """)


def test_compiled_dropout_draws_anew_and_by_seed():
    (q,) = tensors((1, 16, 2, 8))
    torch._dynamo.reset()
    f = torch.compile(lambda q: tandem.attention(q, q, q, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = f(q), f(q)
    torch.manual_seed(1)
    assert not torch.equal(first, second) and torch.equal(first, f(q))
    torch.manual_seed(1)
    one = tandem.attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(one, tandem.attention(q, q, q, dropout_p=0.5))


def test_autocast():
    q, k, v = tensors(*[(1, 9, 2, 8)] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = tandem.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, tandem.attention(*(x.bfloat16() for x in (q, k, v))))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        double = q.detach().double()
        assert tandem.attention(double, double, double).dtype == torch.float64


def test_transforms_see_the_operator():
    q, k, v = tensors(*[(1, 4, 2, 8)] * 3)
    want = torch.autograd.grad(tandem.attention(q, k, v).pow(2).sum(), q)[0]
    got = torch.func.grad(lambda q: tandem.attention(q, k, v).pow(2).sum())(q)
    assert torch.equal(got, want)
    got = torch.func.vjp(lambda q: tandem.attention(q, k, v), q)[1](want)[0]
    assert torch.equal(got, torch.autograd.grad(tandem.attention(q, k, v), q, want)[0])
    from torch._subclasses.fake_tensor import FakeTensorMode

    detached = [x.detach() for x in (q, k, v)]
    with FakeTensorMode() as mode:
        out, lse = tandem.attention(*(mode.from_tensor(x) for x in detached), return_lse=True)
        assert out.shape == (1, 4, 2, 8) and lse.shape == (1, 2, 4)


# Names of inputs that only some examples have, and the examples. All examples share the other inputs.
MAPPED = {
    "dense": ({"q": 0, "k": 0, "v": 0}, {"causal": True}, {}),
    "shared keys": ({"q": 1}, {}, {}),
    "shared queries": ({"k": 2, "v": 0}, {"return_lse": True}, {}),
    "bias of one batch": ({"q": 0, "bias": 0}, {}, {"bias": (1, 2, 4, 5)}),
    "shared bias": ({"q": 0}, {}, {"bias": (3, 1, 1, 5)}),
    "sink": ({"v": 0}, {}, {"sink": (2,)}),
    "a sink in each": ({"v": 0, "sink": 0}, {}, {"sink": (2,)}),
    "slopes": ({"q": 0}, {"alibi_slopes": torch.tensor([0.5, 0.25])}, {}),
    "lengths": ({"q": 0}, {"seqused_k": torch.tensor([5, 0, 2], dtype=torch.int32)}, {}),
    "dropout": ({"q": 0}, {"dropout_p": 0.4, "seed": torch.tensor([3, 4])}, {}),
}


@pytest.mark.parametrize("case", MAPPED)
def test_vmap_is_the_examples_one_by_one(case):
    mapped, options, more = MAPPED[case]
    shapes = {"q": (3, 4, 2, 8), "k": (3, 5, 2, 8), "v": (3, 5, 2, 8), **more}
    torch.manual_seed(5)
    inputs = {}
    for name, shape in shapes.items():
        x = torch.randn(*shape) if name not in mapped else torch.randn(6, *shape).movedim(0, mapped[name])
        inputs[name] = x
    dims = tuple(mapped.get(name) for name in shapes)

    def run(*values):
        return tandem.attention(**dict(zip(shapes, values)), **options)

    def loss(*values):
        result = run(*values)
        out, lse = result if isinstance(result, tuple) else (result, torch.zeros(()))
        return out.pow(2).sum() + torch.where(lse > -1e30, lse, 0.0).sum()

    gradient = torch.func.grad(loss, argnums=tuple(range(len(shapes))))
    for function in (run, gradient):
        got = torch.func.vmap(function, in_dims=dims)(*inputs.values())
        examples = [
            function(*(x if d is None else x.select(d, n) for x, d in zip(inputs.values(), dims))) for n in range(6)
        ]
        single = not isinstance(got, tuple)
        for n, whole in enumerate([got] if single else got):
            want = torch.stack([e if single else e[n] for e in examples])
            torch.testing.assert_close(whole, want, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_vmap_over_vmap():
    q, k, v = tensors(*[(2, 3, 1, 4, 2, 8)] * 3, grad=False)
    got = torch.func.vmap(torch.func.vmap(tandem.attention))(q, k, v)
    want = tandem.attention(*(x.flatten(0, 2) for x in (q, k, v))).unflatten(0, (2, 3, 1))
    assert torch.equal(got, want)


def test_out_and_mixed_kinds():
    q, k, v = tensors(*[(1, 4, 2, 8)] * 3, grad=False)
    out = torch.empty_like(q)
    assert tandem.attention(q, k, v, out=out) is out and torch.equal(out, tandem.attention(q, k, v))
    with pytest.raises(TypeError, match="k .ndarray. must be a torch tensor"):
        tandem.attention(q, k.numpy(), v)
    before = out.clone()
    for bad in ({"q": q.clone().requires_grad_()}, {"out": out.clone().requires_grad_()}):
        with pytest.raises(ValueError, match="out must be None if a gradient is required"):
            tandem.attention(**{"q": q, "k": k, "v": v, "out": out, **bad})
    assert torch.equal(before, out)


def test_calls_from_many_threads():
    q, k, v = tensors(*[(1, 64, 2, 16)] * 3, grad=False)
    want, wrong = tandem.attention(q, k, v), []

    def work():
        for _ in range(50):
            a, b, c = q.clone(), k.clone(), v.clone()
            if not torch.equal(tandem.attention(a, b, c), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_runs_on_torchs_threads(run_python):
    """Tandem starts no second set of threads on the same cores, and torch.set_num_threads limits it."""
    run_python("""
        import torch, tandem, os
        torch.set_num_threads(2)
        a = torch.randn(512, 512)
        a @ a
        before = len(os.listdir("/proc/self/task"))
        q = torch.randn(1, 2048, 4, 32)
        tandem.attention(q, q, q)
        tandem.attention(*[q.numpy()] * 3)
        assert len(os.listdir("/proc/self/task")) <= max(before, 2), "more threads than torch's"
        assert "2 threads" in tandem.description(), tandem.description()
        torch.set_num_threads(1)
        assert "1 thread," in tandem.description(), tandem.description()
    """)


def test_forked_processes(run_python):
    run_python("""
        import os, signal, torch, tandem
        torch.set_num_threads(2)
        q = torch.randn(1, 1024, 4, 32)
        want = tandem.attention(q, q, q)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            ours = tandem.attention(q, q, q).numpy()  # torch's own parallel loops hang in such a child
            os._exit(0 if ours.tobytes() == want.numpy().tobytes() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(tandem.attention(q, q, q), want)
    """)
