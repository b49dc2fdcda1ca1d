"""The package's GPU code on a machine without a GPU: gradients by torch's operator, padding, opening a GPU, its
workspace, the search for the compiler. test_cuda*.py need a GPU."""

import types

import pytest

import tandem

torch = pytest.importorskip("torch")

from tandem import _binding, _flash_backward, _gpu, _gradients, _torch_api, _torch_ops  # noqa: E402


def tensors(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


# ---- Masks ----------------------------------------------------------------------------------------------------------


def flash_visible(seqlen_q, seqlen_k, causal, left, right, longest_k=None):
    """Returns the visible keys of one sequence by the bounds of FlashAttention-2's backward sources."""
    longest_k = seqlen_k if longest_k is None else longest_k
    left, right = (-1 if x is None else x for x in (left, right))
    right = 0 if causal else right
    left, right = (-1 if x >= longest_k else x for x in (left, right))
    is_causal = left < 0 and right == 0
    if left < 0 and right >= 0:
        left = longest_k
    if left >= 0 and right < 0:
        right = longest_k
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)[None]
    if is_causal:
        return j <= i
    if left < 0 and right < 0:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    return (j >= i - left) & (j <= i + right)


def visible(seqlen_q, seqlen_k, causal, alignment, window):
    """Returns the visible keys by docs/semantics.md."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]
    i = i if alignment == "top_left" else i + seqlen_k - seqlen_q
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_sees_the_same_keys(causal, alignment):
    served = refused = 0
    bounds = [None, -1, 0, 1, 2, 3, 5, 8, 20]
    for seqlen_q in (1, 2, 3, 6, 11):
        for seqlen_k in (1, 2, 3, 6, 11):
            q, k = (torch.empty(1, seqlen, 1, 8) for seqlen in (seqlen_q, seqlen_k))
            for window in ((left, right) for left in bounds for right in bounds):
                try:
                    mask = _flash_backward._mask(
                        {"q": q, "k": k, "causal": causal, "alignment": alignment, "window": window}
                    )
                except tandem.Unsupported:
                    refused += 1
                    continue
                served += 1
                shown = flash_visible(seqlen_q, seqlen_k, *mask)
                assert torch.equal(shown, visible(seqlen_q, seqlen_k, causal, alignment, window)), (shown, window)
    assert served > 500 and refused > 100


def test_the_operator_sees_the_same_keys_of_packed_sequences():
    served = 0
    lengths = [(q, k) for q in range(5) for k in range(5)]
    for window in ((left, right) for left in (None, 0, 1, 3) for right in (None, 0, 1, 3)):
        for causal in (False, True):
            packed = {"cu_seqlens_q": CU[0], "max_seqlen_q": 4, "max_seqlen_k": 4}
            mask = _flash_backward._mask({**packed, "causal": causal, "window": window})
            served += 1
            for q, k in lengths:
                shown = flash_visible(q, k, *mask, longest_k=4)
                assert torch.equal(shown, visible(q, k, causal, "bottom_right", window)), (q, k, window)
    assert served == 32
    with pytest.raises(tandem.Unsupported, match="top_left"):
        _flash_backward._mask({**packed, "causal": True, "alignment": "top_left"})


# ---- Gradients ------------------------------------------------------------------------------------------------------


def flash_backward_of_one(dout, q, k, v, out, lse, scale, seen):
    """Computes FlashAttention-2's backward of one sequence, (seqlen, heads, head_dim).

    The computation reconstructs the softmax from the lse.
    """
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * torch.einsum("ihd,jhd->hij", q, wide_k)
    p = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    dp = torch.einsum("ihd,jhd->hij", dout, wide_v)
    ds = scale * p * (dp - (dout * out).sum(-1).T[..., None])
    dq = torch.einsum("hij,jhd->ihd", ds, wide_k)
    dk, dv = torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", p, dout)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


@pytest.fixture
def operator():
    """Implements torch's operator on the CPU, where torch has none."""
    calls = []

    def backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, rng_state, unused, *, scale=None,
                 window_size_left=None, window_size_right=None):  # fmt: skip
        calls.append(causal)
        assert dropout_p == 0 and rng_state.shape == (2,) and rng_state.dtype == torch.uint64 and unused.dim() == 0
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == out.shape[-1] == dout.shape[-1]
        assert lse.is_contiguous()

        def seen(x, y):
            return flash_visible(x.shape[0], y.shape[0], causal, window_size_left, window_size_right, max_k)

        if cu_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            parts = [flash_backward_of_one(*x, scale, seen(x[1], x[2])) for x in zip(dout, q, k, v, out, lse)]
            return tuple(map(torch.stack, zip(*parts)))
        ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
        assert max_q >= max(cu_q.diff()) and max_k >= max(cu_k.diff())
        parts = []
        for b in range(len(ends_q) - 1):
            i, j = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
            parts.append(flash_backward_of_one(dout[i], q[i], k[j], v[j], out[i], lse[:, i], scale, seen(q[i], k[j])))
        return tuple(map(torch.cat, zip(*parts)))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield calls
    library._destroy()


CU = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 6, 11])]
CASES = {
    "plain": ((2, 6, 4, 8), (2, 7, 2, 8), 8, {}),
    "causal": ((2, 6, 4, 8), (2, 4, 2, 8), 8, {"causal": True}),
    "top-left": ((1, 7, 2, 8), (1, 9, 2, 8), 8, {"causal": True, "alignment": "top_left", "window": (9, 0)}),
    "window": ((1, 9, 2, 8), (1, 9, 2, 8), 8, {"window": (2, 3), "softmax_scale": 0.7}),
    "another head_dim_v": ((1, 5, 2, 16), (1, 6, 2, 16), 8, {}),
    "packed": ((8, 4, 8), (11, 2, 8), 8, {
        "causal": True, "cu_seqlens_q": CU[0], "cu_seqlens_k": CU[1], "max_seqlen_q": 5, "max_seqlen_k": 5}),
    "no keys": ((1, 3, 1, 8), (1, 0, 1, 8), 8, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_by_the_operator(operator, name, with_sink):
    q_shape, k_shape, dim_v, given = CASES[name]
    q, k, v, dout, sink = tensors(
        q_shape, k_shape, (*k_shape[:-1], dim_v), (*q_shape[:-1], dim_v), q_shape[-2:-1], dtype=torch.float64
    )
    sink = sink if with_sink else None
    if name == "top-left":  # more keys than queries shift the operator's bounds
        k, v = k[:, :7], v[:, :7]
    out, lse = tandem.attention(q, k, v, sink=sink, return_lse=True, **given)
    wanted = tandem.attention_backward(dout, q, k, v, out, lse, sink=sink, **given)
    record = {**given, "q": q, "k": k, "v": v, "sink": sink, "out": out, "lse": lse, "dout": dout}
    got = _flash_backward.gradients(record, [True, True, True, False, with_sink])
    assert got[3] is None and (got[4] is not None) == with_sink
    for x, want in zip((*got[:3], got[4]), (*wanted[:3], wanted[4])):
        if want is not None:
            torch.testing.assert_close(x, want.to(x.dtype), rtol=1e-5, atol=1e-6)
    assert len(operator) == (name != "no keys")
    only_k = _flash_backward.gradients(record, [False, True, False, False, False])
    assert [x is not None for x in only_k] == [False, True, False, False, False]


def test_what_the_operator_cannot_do_is_refused():
    q, k, v, bias, slopes = tensors((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8), (1, 1, 4, 4), (2,))
    used = torch.tensor([3], dtype=torch.int32)

    qkv = {"q": q, "k": k, "v": v}

    def refused(words, **named):
        with pytest.raises(tandem.Unsupported, match=words):
            _flash_backward.refuse({**qkv, **named})

    refused("bias", bias=bias)
    refused("alibi_slopes", alibi_slopes=slopes)
    refused("seqused", seqused_k=used)
    refused("seqused", seqused_q=used)
    refused("page_table", page_table=used[None])
    refused(r"softcap \(2.0\)", softcap=2.0)
    refused(r"dropout_p \(0.5\)", dropout_p=0.5)
    refused("deterministic", deterministic=True)
    refused(r"left bound.*\(-1\)", window=(-1, 2))
    torch.use_deterministic_algorithms(True)
    try:
        _flash_backward.refuse({**qkv, "deterministic": True})
    finally:
        torch.use_deterministic_algorithms(False)
    out, lse = _torch_ops.new_outputs(q, v)
    with pytest.raises(tandem.Unsupported, match="lse has a gradient"):
        _flash_backward.gradients({**qkv, "out": out, "lse": lse, "dout": out, "dlse": lse}, [True] * 5)


# ---- Padding --------------------------------------------------------------------------------------------------------


@pytest.fixture
def padding(monkeypatch):
    """Makes the CPU pad as a GPU must."""
    monkeypatch.setattr(_gradients, "needs_padding", lambda q, v: q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0)


@pytest.mark.parametrize("dims", [(20, 20), (16, 5), (3, 24)])
def test_padding_changes_nothing(padding, monkeypatch, dims):
    q, k, v = (x.requires_grad_() for x in tensors((2, 5, 4, dims[0]), (2, 7, 2, dims[0]), (2, 7, 2, dims[1])))
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    with torch.no_grad():
        mine = torch.full_like(out, float("nan"))
        assert tandem.attention(q, k, v, causal=True, out=mine) is mine
    compiled = torch.compile(tandem.attention, backend="aot_eager", fullgraph=True)(q, k, v, causal=True)
    heads_first = _torch_api.attention_heads_first(*(x.detach().transpose(1, 2) for x in (q, k, v)), causal=True)
    monkeypatch.undo()
    want, want_lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    for x in (out, mine, compiled, heads_first):
        torch.testing.assert_close(x, want)
    torch.testing.assert_close(lse, want_lse)
    for x, y in zip(gradients, torch.autograd.grad(want.square().sum(), (q, k, v))):
        torch.testing.assert_close(x, y)


def test_padding_hides_no_mistake(padding):
    q, k, v = tensors((1, 4, 2, 20), (1, 4, 2, 24), (1, 4, 2, 24))
    with pytest.raises(ValueError, match="head_dim.*2[04]"):
        tandem.attention(q, k, v)
    with pytest.raises(ValueError, match="out"):
        tandem.attention(q, q, q, out=torch.empty(1, 4, 1, 20))


# ---- Opening, workspace, compiler, streams --------------------------------------------------------------------------


class Binding:
    """A binding whose calls return this answer."""

    def __init__(self, *answers, opened=0):
        self.answers, self.opened, self.calls, self.open = list(answers), opened, [], []

    def run(self, what, record, workspace=0, size=0):
        self.calls.append((what, dict(record), workspace, size))
        return self.answers.pop(0)

    def open_gpu(self, index):
        self.open.append(index)
        return self.opened

    def last_error(self):
        return "the sentence"


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("TANDEM_NVRTC", "/none")


def test_a_call_opens_its_gpu_and_gets_workspace(monkeypatch, no_compiler):
    binding = Binding(("open", 2), ("workspace", 64), ("workspace", 4096), None)
    monkeypatch.setattr(_binding, "binding", binding)
    (q,) = tensors((1, 2, 1, 8))
    _binding.call(_binding.FORWARD, {"q": q})
    assert binding.open == [2]
    sizes = [size for *_, size in binding.calls]
    assert sizes == [0, 0, 64, 4096] and [memory != 0 for _, _, memory, _ in binding.calls] == [False] * 2 + [True] * 2


def test_a_gpu_that_does_not_open(monkeypatch, no_compiler):
    monkeypatch.setattr(_binding, "binding", Binding(("open", 0), opened=2))
    with pytest.raises(tandem.Unsupported, match="the sentence"):
        _binding.call(_binding.FORWARD, {"q": tensors((1, 2, 1, 8))[0]})


def test_rows_that_are_not_pieces_of_16_bytes_are_copied_in_silence(monkeypatch, recwarn):
    binding = Binding(("copy", ["q"]), None)
    monkeypatch.setattr(_binding, "binding", binding)
    monkeypatch.setattr(_binding, "_said_that_copies_are_made", False)
    q = torch.zeros(2 * 8 + 1)[1:].view(1, 2, 1, 8)
    _binding.call(_binding.FORWARD, {"q": q})
    assert binding.calls[1][1]["q"].data_ptr() % 16 == 0 and not recwarn.list


def test_the_compiler_of_torchs_version_is_found(tmp_path, monkeypatch):
    def library(folder, major):
        path = tmp_path / folder / "nvidia" / f"cu{major}" / "lib" / f"libnvrtc.so.{major}"
        path.parent.mkdir(parents=True)
        path.touch()
        (path.parent / f"libnvrtc.so.{major}.0.88").touch()
        return str(path)

    first, second = library("a", 13), library("b", 13)
    old = library("b", 12)
    folders = [str(tmp_path / x) for x in "ab"]
    for version, want in (("13.0", first), ("12.8", old), ("11.8", first), (None, first)):
        monkeypatch.setitem(
            _gpu.sys.modules, "torch", types.SimpleNamespace(version=types.SimpleNamespace(cuda=version))
        )
        assert _gpu.find_compiler(folders) == want
    assert _gpu.find_compiler(folders[1:]) == second and _gpu.find_compiler([str(tmp_path)]) is None


@pytest.mark.parametrize("binding", ["_native", "_ctypes"])
def test_requests_of_the_binding(binding):
    run = pytest.importorskip(f"tandem.{binding}").run

    def on_gpu(address, strides, dim=8, bits=16):  # on GPU number 77, like _arrays.describe
        return (address, 2, 77, 4, bits, (1, 2, 1, dim), (*strides, 1), False, None)

    def asked(*given, what=0):
        return run(what, dict(zip(("q", "k", "v", "out"), given)))

    whole, off, wide = on_gpu(64, (16, 8, 8)), on_gpu(66, (16, 8, 8)), on_gpu(64, (18, 9, 9))
    assert asked(whole, whole, whole, whole) == ("open", 77)
    assert asked(whole, whole, whole, whole, what=_binding.CHECK) == ("open", 77)
    assert asked(whole, off, wide, off) == ("copy", ["k", "v"])  # out must be written in place
    assert asked(off, on_gpu(64, (16, 8, 8), bits=32), whole, whole) == ("copy", ["q"])
    odd = on_gpu(64, (10, 5, 5), dim=5)  # a copy would not help
    assert asked(odd, odd, odd, odd) == ("open", 77)
    on_cpu = (66, 1, 0, 4, 16, (0, 2, 1, 8), (16, 8, 8, 1), False, None)
    assert asked(on_cpu, on_cpu, on_cpu, on_cpu) is None


def test_what_lies_on_a_gpu_and_is_no_torch_tensor():
    class Array:
        def __dlpack__(self, **_):
            raise AssertionError("it would have to be copied to the host")

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(TypeError, match="torch.from_dlpack"):
        tandem.attention(Array(), Array(), Array())


@pytest.mark.parametrize("binding", ["_native", "_ctypes"])
def test_no_gpu_here(binding, monkeypatch, no_compiler):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: test_cuda.py")
    module = pytest.importorskip(f"tandem.{binding}")
    code = module.open_gpu(0)
    assert code != 0 and len(module.last_error()) > 20
    assert module.gpu_description(0) is None
    assert "\n" not in tandem.description()


# ---- torch's registry -----------------------------------------------------------------------------------------------


def test_the_registered_forward_is_torchs():
    torch_sdpa = pytest.importorskip("tandem.torch_sdpa")
    q, k, v = (x.transpose(1, 2) for x in tensors((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)))
    out, lse, random, unused, mask = torch_sdpa._forward(q, k, v, None, None, 6, 6, 0.0, True, False, scale=0.3)
    want, want_lse = tandem.attention(q, k, v, causal=True, softmax_scale=0.3, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and out.stride() == q.stride()
    assert random.dtype == torch.uint64 and random.shape == (2,) and unused.dim() == 0 and mask.numel() == 0
    rows = (x.flatten(0, 1)[:8] for x in (q, k, v))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 8], [0, 2, 8]))
    q, k, v = rows
    out, lse, *_ = torch_sdpa._forward(q, k, v, cu_q, cu_k, 5, 6, 0.0, True, False, window_size_left=-1)
    assert torch.isposinf(lse[:, :3]).all() and lse[:, 3:].isfinite().all() and not out[:3].any()
    for refused in ({"dropout_p": 0.5}, {"return_debug_mask": True}, {"block_table": cu_q}, {"num_splits": 2}):
        named = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False, **refused}
        with pytest.raises(tandem.Unsupported):
            torch_sdpa._forward(q, k, v, None, None, 8, 8, **named)


def test_the_registered_backward_is_torchs():
    torch_sdpa = pytest.importorskip("tandem.torch_sdpa")
    q, k, v, dout = (x.transpose(1, 2) for x in tensors(*[(2, 3, 6, 8)] * 4))
    for causal, window, rows in ((True, (-1, None), 6), (False, (2, 1), 6), (True, (None, None), 4)):
        keys, values = k[:, :rows], v[:, :rows]  # fewer keys than queries: some queries see none
        named = {"scale": 0.3, "window_size_left": window[0], "window_size_right": window[1]}
        out, lse, random, unused, _ = torch_sdpa._forward(
            q, keys, values, None, None, 6, rows, 0.0, causal, False, **named
        )
        got = torch_sdpa._backward(
            dout, q, keys, values, out, lse, None, None, 6, rows, 0.0, causal, random, unused, **named
        )
        leaves = [x.detach().requires_grad_() for x in (q, keys, values)]
        bounds = tuple(x if x is not None and x >= 0 else None for x in window)
        mine = tandem.attention(*leaves, causal=causal, softmax_scale=0.3, window=bounds)
        for x, want in zip(got, torch.autograd.grad(mine, leaves, dout)):
            assert torch.equal(x, want)
    with pytest.raises(tandem.Unsupported):
        torch_sdpa._backward(dout, q, k, v, out, lse, None, None, 6, 6, 0.5, True, random, unused)


# ---- Choice of the backward
# -------------------------------------------------------------------------------------------


def test_hopper_has_a_backward_and_others_have_torchs(monkeypatch):
    monkeypatch.setattr(_gradients, "_by_gpu", {})
    asked = []

    def capability(index):
        asked.append(index)
        return (9, 0) if index == 1 else (10, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)

    def on(index):
        return types.SimpleNamespace(is_cuda=index is not None, device=types.SimpleNamespace(index=index))

    assert [_gradients.is_own(on(i)) for i in (None, 1, 2, 1)] == [True, True, False, True] and asked == [1, 2]


def test_gradients_are_padded_as_results_are(padding):
    q, k, v, dout = tensors((2, 5, 4, 20), (2, 7, 2, 20), (2, 7, 2, 12), (2, 5, 4, 12))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    want = torch.autograd.grad(tandem.attention(*leaves, causal=True), leaves, dout)
    mine = torch.full_like(v, 2.0)
    got = tandem.attention_backward(dout, q, k, v, out, lse, causal=True, dv=mine, accumulate=True)
    assert got.dv is mine
    for x, y in zip((got.dq, got.dk, got.dv - 2), want):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_call_whose_gradient_is_refused_is_refused_before(monkeypatch):
    q, k, v = tensors((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    monkeypatch.setattr(_gradients, "is_own", lambda q: True)
    out, lse = _torch_ops.new_outputs(q, v)
    _gradients.refuse({"q": q, "k": k, "v": v, "out": out, "lse": lse})
    with pytest.raises(ValueError, match="dbias"):
        bias = torch.zeros(1, 2, 4, 4, requires_grad=True)
        monkeypatch.setattr(_gradients, "like", lambda x: x.detach()[..., :2])
        _gradients.refuse({"q": q, "k": k, "v": v, "out": out, "lse": lse, "bias": bias})


def test_a_torch_without_cuda_cannot_activate_it():
    pytest.importorskip("tandem.torch_sdpa")
    assert "Tandem" in torch.nn.attention.list_flash_attention_impls()
    if torch.version.cuda is None:
        with pytest.raises(tandem.Unsupported, match="CUDA"):
            torch.nn.attention.activate_flash_attention_impl("Tandem")
