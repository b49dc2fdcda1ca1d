"""The FlashAttention-2 interface (tandem.flash_attn): results and gradients against standard attention in float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import CU_K, CU_Q, INF, OPTIONS, SLOPES, VARLEN, int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.flash_attn as fa2  # noqa: E402
from tandem.flash_attn.flash_attn_interface import _get_block_size_n  # noqa: E402

all_options = pytest.mark.parametrize(("options", "plain"), OPTIONS.values(), ids=OPTIONS)


@all_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense(random, options, plain, dtype):
    inputs = random(2, 9, 4, 20, dtype=dtype), random(2, 13, 2, 20, dtype=dtype), random(2, 13, 2, 20, dtype=dtype)
    torch_reference.hold(
        lambda *x: fa2.flash_attn_func(*x, **options), lambda *x: torch_reference.dense(*x, **plain), inputs
    )


@all_options
def test_varlen(random, options, plain):
    inputs = random(14, 4, 16), random(19, 2, 16), random(19, 2, 16)
    torch_reference.hold(
        lambda *x: fa2.flash_attn_varlen_func(*x, **VARLEN, **options),
        lambda *x: torch_reference.packed(*x, CU_Q, CU_K, **plain),
        inputs,
    )


@all_options
def test_qkvpacked(random, options, plain):
    torch_reference.hold(
        lambda qkv: fa2.flash_attn_qkvpacked_func(qkv, **options),
        lambda qkv: torch_reference.dense(*qkv.unbind(2), **plain),
        [random(2, 11, 3, 4, 16)],
    )
    torch_reference.hold(
        lambda qkv: fa2.flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 9, **options),
        lambda qkv: torch_reference.packed(*qkv.unbind(1), CU_Q, CU_Q, **plain),
        [random(14, 3, 4, 16)],
    )


@all_options
def test_kvpacked_with_grouped_heads(random, options, plain):
    torch_reference.hold(
        lambda q, kv: fa2.flash_attn_kvpacked_func(q, kv, **options),
        lambda q, kv: torch_reference.dense(q, *kv.unbind(2), **plain),
        [random(2, 9, 4, 16), random(2, 13, 2, 2, 16)],
    )
    torch_reference.hold(
        lambda q, kv: fa2.flash_attn_varlen_kvpacked_func(q, kv, **VARLEN, **options),
        lambda q, kv: torch_reference.packed(q, *kv.unbind(1), CU_Q, CU_K, **plain),
        [random(14, 4, 16), random(19, 2, 2, 16)],
    )


def test_more_queries_than_keys_and_empty_sequences(random):
    torch_reference.hold(
        lambda *x: fa2.flash_attn_func(*x, causal=True),
        lambda *x: torch_reference.dense(*x, causal=True),
        [random(1, 5, 2, 8), random(1, 2, 2, 8), random(1, 2, 2, 8)],
    )
    cu_q, cu_k = int32(0, 0, 5, 7, 7), int32(0, 3, 5, 5, 5)
    torch_reference.hold(
        lambda *x: fa2.flash_attn_varlen_func(*x, cu_q, cu_k, 5, 3, causal=True),
        lambda *x: torch_reference.packed(*x, cu_q, cu_k, causal=True),
        [random(7, 2, 8), random(5, 2, 8), random(5, 2, 8)],
    )


def test_strided_inputs(random):
    q, k, v = random(2, 4, 9, 16).transpose(1, 2), random(2, 13, 2, 32)[..., ::2], random(13, 2, 2, 16).transpose(0, 1)
    with torch.no_grad():
        ours = fa2.flash_attn_func(q, k, v)
    torch.testing.assert_close(ours, fa2.flash_attn_func(*(x.contiguous() for x in (q, k, v))))


def test_return_attn_probs_without_dropout(random):
    q, k, v = random(1, 5, 4, 8).requires_grad_(), random(1, 2, 2, 8), random(1, 2, 2, 8)
    out, lse, probabilities = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad and probabilities.shape == (0,)
    assert torch.equal(out[:, :3], torch.zeros(1, 3, 4, 8))
    assert torch.equal(lse[..., :3], torch.full((1, 4, 3), INF)), "flash_attn marks empty rows by +inf"
    _, exact = torch_reference.dense(q.double(), k.double(), v.double(), causal=True)
    torch.testing.assert_close(lse[..., 3:].double(), exact[..., 3:].detach(), rtol=0, atol=1e-6)

    qkv = random(7, 3, 4, 8).requires_grad_()
    out, lse, probabilities = fa2.flash_attn_varlen_qkvpacked_func(qkv, int32(0, 3, 7), 4, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad and lse.shape == (4, 7) and probabilities.shape == (0,)


def test_windows_are_any_two_integers(random):
    q = random(1, 6, 2, 8)
    expected = fa2.flash_attn_func(q, q, q, window_size=(2, 1))
    for window in ([2, 1], torch.tensor([2, 1]), np.array([2, 1]), torch.Size([2, 1]), range(2, 0, -1)):
        assert torch.equal(fa2.flash_attn_func(q, q, q, window_size=window), expected)
        assert torch.equal(fa3.flash_attn_func(q, q, q, window_size=window), expected)
        assert torch.equal(tandem.attention(q, q, q, window=window), expected)
    for window in ("ab", {1, 2}, 3, None):
        with pytest.raises(ValueError, match="must be .*left, right"):
            fa2.flash_attn_func(q, q, q, window_size=window)


def test_names_that_are_not_public(random):
    from tandem.flash_attn import flash_attn_interface as interface

    q, k, v = random(1, 6, 2, 8), random(1, 6, 2, 8), random(1, 6, 2, 8)
    out, lse, probabilities, seed = interface._flash_attn_forward(q, k, v, 0.25, None, True, return_softmax=True)
    assert probabilities.shape == (1, 2, 6, 6) and seed.shape == (2,) and lse.shape == (1, 2, 6)
    ends = int32(0, 2, 6)
    packed = (x[0] for x in (q, k, v))
    out, lse, probabilities, _ = interface._flash_attn_varlen_forward(*packed, ends, ends, 4, 4, 0.0, None, True)
    assert torch.equal(out, fa2.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4, causal=True))
    assert probabilities.numel() == 0
    for name in ("fwd", "anything"):
        with pytest.raises(tandem.Unsupported, match=f"flash_attn_gpu.{name} is not served"):
            getattr(interface.flash_attn_gpu, name)(q, k, v)
    for name, position in (("fwd", 12), ("varlen_fwd", 20), ("bwd", 17), ("varlen_bwd", 22)):
        with pytest.raises(RuntimeError, match="the `generator` argument is no longer supported"):
            getattr(interface.flash_attn_gpu, name)(*[None] * position, 1, None)
    pages, table = random(3, 8, 2, 8), int32(2, 0, 1)[:, None]
    arguments = (q[0, :3], pages, pages, int32(0, 1, 2, 3), int32(0, 8, 13, 14), 1, 8, 0.0, None, False)
    results = [
        interface._flash_attn_varlen_forward(*arguments, block_table=table, **x)[0] for x in ({}, {"num_splits": 0})
    ]
    assert torch.equal(*results)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported with block_table, but is 2"):
        interface._flash_attn_varlen_forward(*arguments, block_table=table, num_splits=2)


@pytest.mark.parametrize("form", ["dense", "varlen", "qkvpacked", "varlen_qkvpacked", "kvpacked", "varlen_kvpacked"])
def test_dropout_is_what_s_dmask_says(random, form):
    p_drop, options = 0.3, {"causal": True, "window_size": (9, -1), "alibi_slopes": SLOPES}
    plain_options = {"causal": True, "window": (9, None), "slopes": SLOPES}
    varlen = form.startswith("varlen")
    lead_q, lead_k = ((14,), (19,)) if varlen else ((2, 9), (2, 13))
    cu = (CU_Q, CU_K) if varlen else ()
    arguments = VARLEN if varlen else {}
    if "qkvpacked" in form:
        inputs, split = [random(*lead_q, 3, 4, 16)], lambda qkv: qkv.unbind(-3)
        cu = (CU_Q, CU_Q) if varlen else ()
        arguments = {"cu_seqlens": CU_Q, "max_seqlen": 9} if varlen else {}
    elif "kvpacked" in form:
        inputs, split = [random(*lead_q, 4, 16), random(*lead_k, 2, 2, 16)], lambda q, kv: (q, *kv.unbind(-3))
    else:
        inputs, split = [random(*lead_q, 4, 16), random(*lead_k, 2, 16), random(*lead_k, 2, 16)], lambda *x: x
    function = getattr(fa2, f"flash_attn_{form}_func" if form != "dense" else "flash_attn_func")

    def dropped(*x, **more):
        torch.manual_seed(5)
        return function(*x, **arguments, dropout_p=p_drop, **options, **more)

    out, lse, probabilities = dropped(*inputs, return_attn_probs=True)
    assert torch.equal(out, dropped(*inputs)), "asking for the probabilities changes what is dropped"
    undropped = function(*inputs, **arguments, **options, return_attn_probs=True)[1]
    torch.testing.assert_close(lse, undropped)
    visible = probabilities != 0
    kept = probabilities > 0
    share = kept.sum() / visible.sum()
    assert abs(share - (1 - p_drop)) < 0.1, "about 600 entries"

    plain = torch_reference.packed if varlen else torch_reference.dense
    multiplier = kept.double() / (1 - p_drop)
    torch_reference.hold(dropped, lambda *x: plain(*split(*x), *cu, kept=multiplier, **plain_options), inputs)
    # Attention to an identity matrix returns the probabilities before dropout, here of the first sequence.
    q, k, _ = split(*inputs)
    first = [x[: cu[n][1]] if varlen else x[0] for n, x in enumerate((q, k))]
    identity = torch.eye(first[1].shape[0], dtype=torch.float64)[:, None].expand(-1, k.shape[-2], -1)
    exact, _ = torch_reference.attend(first[0].double(), first[1].double(), identity, **plain_options)
    ours = probabilities[0, :, : first[0].shape[0], : first[1].shape[0]].transpose(0, 1)
    exact = exact / exact.amax(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(ours.abs().double(), exact, rtol=0, atol=1e-6)


def test_s_dmask_of_more_keys_than_a_head_dim(random):
    q, k, v = random(1, 3, 2, 8), random(1, 700, 1, 8), random(1, 700, 1, 8)
    out, lse, mask = fa2.flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True)
    assert mask.shape == (1, 2, 3, 700)
    assert torch.equal(mask.abs().amax(-1), torch.ones(1, 2, 3))
    # flash_attn's test computes the probabilities from blocks of _get_block_size_n keys.
    scores = torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) * 8**-0.5
    assert len(scores.split(_get_block_size_n(q.device, 8, True, False), dim=-1)) == 1
    probabilities = mask * torch.exp(scores.amax(-1) - lse)[..., None]
    torch.testing.assert_close(probabilities.abs().sum(-1), torch.ones(1, 2, 3))
    expected = torch.einsum("bhij,bjd->bihd", probabilities.clamp(min=0) / (1 - 0.4), v[:, :, 0])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("packed", ["qkv", "kv", "varlen_qkv", "varlen_kv"])
@pytest.mark.parametrize("wanted", ["both", "q", "packed"])
def test_packed_gradients_are_written_into_one_tensor(random, monkeypatch, packed, wanted):
    targets = []
    backward = tandem.attention_backward

    def watched(*tensors, **options):
        given = (options[name] for name in ("dq", "dk", "dv"))
        targets.extend(x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else x for x in given)
        return backward(*tensors, **options)

    monkeypatch.setattr(tandem, "attention_backward", watched)
    varlen = packed.startswith("varlen")
    parts = 3 if packed.endswith("qkv") else 2
    x = random(*((14,) if varlen else (2, 7)), parts, 4, 16).requires_grad_(wanted != "q")
    q = random(*x.shape[:-3], 4, 16).requires_grad_(wanted != "packed")
    if varlen:
        arguments = (int32(0, 6, 14), 8) if parts == 3 else (int32(0, 6, 14), int32(0, 6, 14), 8, 8)
    else:
        arguments = ()
    function = getattr(fa2, f"flash_attn_{packed}packed_func")
    out = function(x, *arguments) if parts == 3 else function(q, x, *arguments)
    if not out.requires_grad:
        return
    out.sum().backward()
    if x.requires_grad:
        assert targets[-parts:] == [x.grad.untyped_storage().data_ptr()] * parts
    else:
        assert targets == [None, False, False], "gradients that nobody wants are not computed"
    if parts == 2:
        assert (q.grad is not None) == q.requires_grad


def test_packed_forms_under_autocast(random):
    qkv = random(2, 7, 3, 4, 16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = fa2.flash_attn_qkvpacked_func(qkv)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert qkv.grad.dtype == torch.float32 and qkv.grad[:, :, 2].abs().sum() > 0


def test_deterministic_by_the_environment(random, monkeypatch):
    seen = []
    attention = tandem.attention

    def watched(*tensors, **options):
        seen.append(bool(options["deterministic"]))
        return attention(*tensors, **options)

    monkeypatch.setattr(tandem, "attention", watched)
    q = random(1, 3, 2, 8)
    for value in (None, "0", "1"):
        if value is not None:
            monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        fa2.flash_attn_func(q, q, q)
        fa3.flash_attn_func(q, q, q)
    fa2.flash_attn_func(q, q, q, deterministic=True)
    assert seen == [False] * 4 + [True] * 3


def test_compiled(random):
    def dense(q, k, v):
        return fa2.flash_attn_func(q, k, v, causal=True, window_size=(4, -1), softcap=2.0)

    def varlen(q, k, v):
        return fa2.flash_attn_varlen_func(q, k, v, **VARLEN, causal=True)

    def packed(qkv):
        out, lse, _ = fa2.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
        return out

    cases = (
        (dense, [random(2, 9, 4, 16), random(2, 13, 2, 16), random(2, 13, 2, 16)], (2, 9, 4, 16)),
        (varlen, [random(14, 4, 16), random(19, 2, 16), random(19, 2, 16)], (14, 4, 16)),
        (packed, [random(2, 9, 3, 4, 16)], (2, 9, 4, 16)),
    )
    for function, inputs, shape in cases:
        weights = [random(*shape)]
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        eager = torch_reference.run(function, inputs, weights)
        for ours, expected in zip(torch_reference.run(compiled, inputs, weights), eager):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_pages_of_flash_attention_2(random):
    q, pages, table = random(4, 2, 16), random(3, 8, 2, 16), int32(2, 0).reshape(2, 1)
    out = fa2.flash_attn_varlen_func(q, pages, pages, int32(0, 2, 4), int32(0, 8, 13), 2, 8, block_table=table)
    keys = torch.cat([pages[2], pages[0, :5]])
    assert torch.equal(out, fa2.flash_attn_varlen_func(q, keys, keys, int32(0, 2, 4), int32(0, 8, 13), 2, 8))
    for lengths in (None, [0, 8, 13], int32(0, 8, 13)[None]):
        with pytest.raises((TypeError, ValueError), match="^cu_seqlens_k .* must be"):
            fa2.flash_attn_varlen_func(q, pages, pages, int32(0, 2, 4), lengths, 2, 8, block_table=table)


def test_gradients_through_pages_are_refused_when_they_are_computed(random):
    q, pages, table = random(4, 2, 16).requires_grad_(), random(3, 8, 2, 16), int32(2, 0).reshape(2, 1)
    arguments = (q, pages, pages, int32(0, 2, 4), int32(0, 8, 13), 2, 8)
    for probs in (False, True):
        results = fa2.flash_attn_varlen_func(*arguments, block_table=table, return_attn_probs=probs)
        for x in results[:2] if probs else (results,):
            assert x.requires_grad
            with pytest.raises(tandem.Unsupported, match="^block_table must be None in the backward"):
                x.sum().backward(retain_graph=True)
    assert q.grad is None
    with pytest.raises(tandem.Unsupported, match="^block_table must be None with S_dmask"):
        fa2.flash_attn_varlen_func(*arguments, 0.5, block_table=table, return_attn_probs=True)


def test_refusals_of_flash_attention_2(random):
    q = random(4, 2, 16)
    for name, shape in (("qkv", (2, 7, 2, 4, 16)), ("qkv", (7, 3, 4, 16)), ("kv", (2, 7, 3, 4, 16))):
        function = getattr(fa2, f"flash_attn_{name}packed_func")
        inputs = [random(*shape)] if name == "qkv" else [random(2, 7, 4, 16), random(*shape)]
        with pytest.raises(ValueError, match=f"{name} .*shape"):
            function(*inputs)
    with pytest.raises(ValueError, match="dropout_p"):
        fa2.flash_attn_func(q[None], q[None], q[None], dropout_p=1.5)
