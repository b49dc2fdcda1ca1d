"""Tensors for results that the caller allocates: they are checked before anything is written, and written exactly."""

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flash_attn_cases import int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3  # noqa: E402
import tandem.fa4  # noqa: E402
import tandem.sglang  # noqa: E402

HEADS, DIM = 2, 16


def new(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# Each: the tensor, from q and the cache of keys.
BAD_OUTS = {
    "shape": lambda q, cache: new(2, 2, HEADS, DIM),
    "broadcast": lambda q, cache: new(3, *q.shape),
    "dtype": lambda q, cache: new(*q.shape, dtype=torch.float64),
    "ints": lambda q, cache: new(*q.shape, dtype=torch.int32),
    "cache": lambda q, cache: cache[:, :1],
    "query": lambda q, cache: q,
    "negated": lambda q, cache: torch._neg_view(new(*q.shape)),
    "gradient": lambda q, cache: new(*q.shape).requires_grad_(),
    "expanded": lambda q, cache: new(1, 1, 1, DIM).expand(q.shape),
    "array": lambda q, cache: np.zeros(q.shape, np.float32),
}


def sglang(q, caches, new_keys, out, **options):
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    return tandem.sglang.flash_attn_with_kvcache(q, *caches, *new_keys, cache_seqlens=lengths, out=out, **options)


def sglang_rows(q, caches, new_keys, out):
    return sglang(q, caches, new_keys, out, cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32))


def fa3_operator(q, caches, new_keys, out):
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError("out: torch checks the schema")
    return torch.ops.flash_attn_3.fwd(q, *caches, *new_keys, out=out, seqused_k=lengths)[0]


@pytest.mark.parametrize("function", [sglang, sglang_rows, fa3_operator])
@pytest.mark.parametrize("kind", BAD_OUTS)
def test_a_refused_out_leaves_the_cache_unchanged(random, function, kind):
    if function is fa3_operator and kind == "negated":
        pytest.skip("torch's dispatcher serves a lazily negated tensor")
    q = random(2, 1, HEADS, DIM)
    new_keys = random(2, 1, HEADS, DIM), random(2, 1, HEADS, DIM)
    caches = random(2, 8, HEADS, DIM), random(2, 8, HEADS, DIM)
    before = [x.clone() for x in caches]
    with pytest.raises((TypeError, ValueError), match="out"):
        function(q, caches, new_keys, BAD_OUTS[kind](q, caches[0]))
    assert all(torch.equal(x, y) for x, y in zip(caches, before))


@pytest.mark.parametrize("function", [sglang, sglang_rows, fa3_operator])
@pytest.mark.parametrize("autocast", [False, True])
def test_out_has_the_result(random, function, autocast):
    q = random(2, 1, HEADS, DIM)
    new_keys = random(2, 1, HEADS, DIM), random(2, 1, HEADS, DIM)
    caches = random(2, 8, HEADS, DIM), random(2, 8, HEADS, DIM)
    out = new(*q.shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = function(q, [x.clone() for x in caches], new_keys, None)
        assert function(q, caches, new_keys, out) is out or function is fa3_operator
    assert torch.equal(out, expected.float())


def test_combine_refuses_an_out_among_the_parts(random):
    parts, lses = random(3, 2, 5, HEADS, DIM), random(3, 2, 5, HEADS)
    before = parts.clone()
    for module in (tandem.fa3, tandem.fa4):
        with pytest.raises(ValueError, match="out.data overlaps out_partial"):
            module.flash_attn_combine(parts, lses, out=parts[1])
        for out_dtype, out in ((None, new(2, 5, HEADS, DIM, dtype=torch.int64)), (torch.int32, None)):
            with pytest.raises(ValueError, match="out"):
                module.flash_attn_combine(parts, lses, out=out, out_dtype=out_dtype)
    assert torch.equal(parts, before)


def test_an_out_beside_the_query_in_one_buffer_is_served(random):
    both = random(2, 1, HEADS, 2 * DIM)
    caches = random(2, 8, HEADS, DIM), random(2, 8, HEADS, DIM)
    q, out = both[..., :DIM], both[..., DIM:]
    expected = sglang(q, caches, (None, None), None)
    assert torch.equal(sglang(q, caches, (None, None), out), expected) and torch.equal(out, expected)


def test_lse_and_dense_outs_of_flash_attention_4(random):
    q, k, v = random(2, 3, HEADS, DIM), random(9, HEADS, DIM), random(9, HEADS, DIM)
    packed = {"cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32), "max_seqlen_k": 5}
    out = new(*q.shape)
    bad = ({"lse": new(4, 2, HEADS, 3)}, {"lse": new(1, 1, 1).expand(2, HEADS, 3)}, {"lse": out[..., 0].mT})
    for results in (*bad, {"out": new(3, 2, HEADS, DIM)}, {"out": new(2, 4, HEADS, DIM)[:, :3]}):
        name = next(iter(results))
        with pytest.raises(ValueError, match=f"^{name}"):
            tandem.fa4._flash_attn_fwd(q, k, v, **packed, **{"out": out, **results})
        assert not out.any()
    lse = new(2, HEADS, 3)
    result = tandem.fa4._flash_attn_fwd(q, k, v, **packed, out=out, lse=lse)
    plain = tandem.fa4._flash_attn_fwd(q, k, v, **packed, return_lse=True)
    assert result[0] is out and torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_max_scores_under_autocast_belong_to_the_rounded_tensors(random):
    q, k, v = (random(2, 5, HEADS, DIM) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        for bad in (new(3, 2, HEADS, 5), new(1, 1, 1).expand(2, HEADS, 5), new(2, HEADS, 5, dtype=torch.int32)):
            with pytest.raises(ValueError, match="max_scores"):
                tandem.attention(q, k, v, max_scores=bad)
        largest = new(2, HEADS, 5)
        tandem.attention(q, k, v, max_scores=largest)
    rounded = [x.bfloat16().double().transpose(1, 2) for x in (q, k)]
    expected = (rounded[0] @ rounded[1].mT).amax(-1) / 4
    torch.testing.assert_close(largest.double(), expected, rtol=1e-5, atol=1e-6)


def test_checks_read_results_and_numbers(random):
    q = random(2, 3, HEADS, DIM)
    bad = (
        {"out": new(2, 3, HEADS, 8)}, {"out": new(2, 3, HEADS, DIM, dtype=torch.int32)}, {"max_scores": new(2, 3, 5)},
        {"out": new(2, 3, HEADS, DIM, dtype=torch.float64), "out_dtype": torch.float32},
        {"softmax_scale": torch.ones((), requires_grad=True)}, {"alibi_slopes": new(HEADS).requires_grad_()},
    )  # fmt: skip
    for options in bad:
        with pytest.raises((ValueError, tandem.Unsupported)) as attention:
            tandem.attention(q, q, q, **options)
        with pytest.raises(attention.type) as check:
            tandem.check("forward", q, q, q, **options)
        assert str(check.value) == str(attention.value)
    tandem.check("forward", q, q, q, out=new(2, 3, HEADS, DIM), max_scores=new(2, HEADS, 3))


class Other(torch.Tensor):
    """A subclass without separate rules."""


def results_like(x, inputs):
    """Returns tensors that a caller may pass for a result of x's shape, most of them wrong, by name."""
    with torch.inference_mode():
        inference = torch.zeros(x.shape)
    part = inputs[0].detach().flatten()[: x.numel()].view(x.shape)
    expanded = new(1, *x.shape[1:]).expand(x.shape)
    return {
        "new": torch.zeros_like(x), "none": None, "float64": x.double(), "bfloat16": x.bfloat16(), "inputs": part,
        "negated": torch._neg_view(torch.zeros_like(x)), "conjugated": x.to(torch.complex64).conj(),
        "imaginary": torch.zeros(x.shape, dtype=torch.complex64).conj().imag, "expanded": expanded,
        "overlapping": torch.zeros(x.numel()).as_strided(x.shape, (1,) * x.dim()), "inference": inference,
        "gradient": torch.zeros_like(x).requires_grad_(), "meta": x.to("meta"), "sparse": x.to_sparse(),
        "zero": torch._efficientzerotensor(x.shape), "subclass": torch.zeros_like(x).as_subclass(Other),
        "shape": new(*x.shape[:-1], x.shape[-1] + 1), "flat": x.flatten(), "numpy": x.numpy(), "text": "x",
        "false": False, "list": [1.0], "transposed": torch.zeros_like(x).transpose(-1, -2).contiguous().mT,
    }  # fmt: skip


def outcome(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode, "autocast"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"score_mod": True}, {"gradient": True}], ids=str)
@pytest.mark.parametrize("name", ["out", "max_scores"])
def test_checks_judge_as_calls_do(random, mode, options, name):
    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else mode():
        q, k, v = (random(2, 5, HEADS, DIM) for _ in range(3))
        q.requires_grad_("gradient" in options and mode is not torch.inference_mode)
        others = {"bias": random(2, HEADS, 5, 5)} if "bias" in options else {}
        if "score_mod" in options:
            others["score_mod"] = tandem.Mod("score + w[head]", w=random(HEADS))
        like = random(2, 5, HEADS, DIM) if name == "out" else random(2, HEADS, 5)
        state = torch.get_rng_state()
        for kind, x in results_like(like, (q, k, v)).items():
            before = x.clone() if kind in ("new", "inputs", "transposed") else None
            checked = outcome(tandem.check, "forward", q, k, v, **others, **{name: x}, dropout_p=0.5)
            assert torch.equal(torch.get_rng_state(), state)
            assert before is None or torch.equal(before, x)
            called = outcome(tandem.attention, q, k, v, **others, **{name: x}, dropout_p=0.5, seed=1)
            assert checked == called, kind


def test_checks_judge_arrays_as_calls_do():
    q = np.zeros((2, 5, HEADS, DIM), np.float32)
    constant = np.zeros_like(q)
    constant.flags.writeable = False
    kinds = (
        np.empty_like(q), q, q[:], constant, np.broadcast_to(np.float32(0), q.shape), q.astype(np.float64), [1],
        np.ma.array(q.copy()), np.lib.stride_tricks.as_strided(np.empty(999, np.float32), q.shape, (4,) * 4),
        np.empty_like(q)[::-1], np.empty(q.shape, ">f4"), torch._neg_view(torch.zeros(q.shape)),
    )  # fmt: skip
    for x in kinds:
        assert outcome(tandem.check, "forward", q, q, q, out=x) == outcome(tandem.attention, q, q, q, out=x)


def test_checks_read_lengths_and_pages_on_the_cpu(random):
    q, pages = random(10, HEADS, DIM), random(4, 8, HEADS, DIM)
    wrong = (
        ((q, q, q), {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 4, 10)}),
        ((q, q, q), {"cu_seqlens_q": int32(0, 11, 10), "cu_seqlens_k": int32(0, 4, 10)}),
        ((random(2, 5, HEADS, DIM),) * 3, {"seqused_k": int32(3, 6)}),
        (
            (random(1, 5, HEADS, DIM), pages, pages),
            {"page_table": int32(0, 4).reshape(1, 2), "seqused_k": int32(9)},
        ),
    )
    for tensors, options in wrong:
        kind, sentence = outcome(tandem.check, "forward", *tensors, **options)
        assert (kind, sentence) == outcome(tandem.attention, *tensors, **options)


def test_max_scores_under_vmap_belong_to_the_examples(random):
    q, out = random(3, 2, 5, HEADS, DIM), new(3, 2, HEADS, 5)
    attend = lambda x, scores: tandem.attention(x, x, x, max_scores=scores)  # noqa: E731
    torch.func.vmap(attend)(q, out)
    exact = torch.einsum("nbqhd,nbkhd->nbhqk", q.double(), q.double()).amax(-1) / 4
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="max_scores must be an argument of the function under vmap"):
        torch.func.vmap(lambda x: attend(x, out[0]))(q)


def test_other_values_than_tensors_are_refused_by_a_sentence(random):
    q, cache = random(2, 1, HEADS, DIM), random(2, 8, HEADS, DIM)
    parts = (x for x in (q, q))
    for outs, lses, name in ((None, [], "outs"), (parts, [], "outs"), ([q], None, "lses")):
        with pytest.raises(TypeError, match=rf"{name} \(\w+\) must be a list of arrays"):
            tandem.merge(outs, lses)
    with pytest.raises(tandem.Unsupported, match="append_kv is not served under torch.func's transforms"):
        torch.func.vmap(lambda x: tandem.append_kv(x, x, cache, cache.clone(), cache_seqlens=int32(1, 2)))(q[None])
    with pytest.raises(tandem.Unsupported, match="tandem.check and tandem.prepare are not served in transforms"):
        torch.func.grad(lambda x: (tandem.check("forward", x, x, x), x.sum())[1])(q)


@pytest.mark.parametrize("binding", ["_native", "_ctypes"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_fake_tensors_are_checked_without_data(monkeypatch, capfd, binding, pass_):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(tandem._binding, "binding", importlib.import_module(f"tandem.{binding}"))
    torch.set_warn_always(True)
    try:
        with FakeTensorMode():
            q, k, lengths = new(2, 5, HEADS, DIM), new(2, 5, HEADS, DIM - 1), new(2, dtype=torch.int32)
            tandem.check(pass_, q, q, q, seqused_k=lengths)
            with pytest.raises(ValueError, match="head_dim"):
                tandem.check(pass_, q, k, q)
    finally:
        torch.set_warn_always(False)
    assert capfd.readouterr().err == ""
