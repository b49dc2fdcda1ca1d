"""The FlashAttention-3 interface (tandem.fa3): results and gradients against standard attention in float64."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import CU_K, CU_Q, DIM, HEADS, HEADS_K, INF, OPTIONS, VARLEN, caches, int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.fa4 as fa4  # noqa: E402
import tandem.flash_attn as fa2  # noqa: E402

FA3_OPTIONS = {name: pair for name, pair in OPTIONS.items() if "alibi" not in name}


@pytest.mark.parametrize(("options", "plain"), FA3_OPTIONS.values(), ids=FA3_OPTIONS)
def test_fa3(random, options, plain):
    hints = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8}
    torch_reference.hold(
        lambda *x: fa3.flash_attn_func(*x, **options, **hints),
        lambda *x: torch_reference.dense(*x, **plain),
        [random(2, 9, 4, 16), random(2, 13, 2, 16), random(2, 13, 2, 24)],
    )
    torch_reference.hold(
        lambda *x: fa3.flash_attn_varlen_func(*x, **VARLEN, **options, **hints),
        lambda *x: torch_reference.packed(*x, CU_Q, CU_K, **plain),
        [random(14, 4, 16), random(19, 2, 16), random(19, 2, 24)],
    )
    torch_reference.hold(
        lambda qkv: fa3.flash_attn_qkvpacked_func(qkv, **options),
        lambda qkv: torch_reference.dense(*qkv.unbind(2), **plain),
        [random(2, 9, 3, 4, 16)],
    )
    torch_reference.hold(
        lambda qkv: fa3.flash_attn_qkvpacked_func(qkv, **options, num_heads_q=4),
        lambda qkv: torch_reference.dense(*qkv.split((4, 2, 2), dim=2), **plain),
        [random(2, 9, 8, 16)],
    )


def test_fa3_returns_the_lse_when_asked(random):
    q, k = random(1, 5, 4, 8).requires_grad_(), random(1, 2, 2, 8)
    assert isinstance(fa3.flash_attn_func(q, k, k), torch.Tensor)
    out, lse = fa3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad
    assert torch.equal(lse[..., :3], torch.full((1, 4, 3), -INF)) and lse[..., 3:].isfinite().all()
    out, lse = fa3.flash_attn_qkvpacked_func(random(1, 5, 3, 2, 8).requires_grad_(), return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad and lse.shape == (1, 2, 5)


def test_fa3_used_lengths(random):
    q, k, v = random(14, 4, 16), random(19, 2, 16), random(19, 2, 16)
    used_q, used_k = int32(7, 5), int32(6, 4)
    out = fa3.flash_attn_varlen_func(q, k, v, **VARLEN, seqused_q=used_q, seqused_k=used_k, causal=True)
    for b in range(2):
        first, past = int(CU_Q[b]), int(CU_Q[b + 1])
        rows = slice(first, first + int(used_q[b]))
        keys = slice(int(CU_K[b]), int(CU_K[b] + used_k[b]))
        expected, _ = torch_reference.attend(q[rows], k[keys], v[keys], causal=True)
        torch.testing.assert_close(out[rows], expected, rtol=1e-5, atol=1e-6)
        assert not out[rows.stop : past].any()


def test_fa3_combine(random):
    q, k, v = random(2, 5, 2, 8), random(2, 12, 2, 8), random(2, 12, 2, 8)
    exact, exact_lse = torch_reference.dense(q.double(), k.double(), v.double())
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 5), slice(5, 12))]
    # A part without visible keys has weight 0, for any contents of its out.
    parts.append((torch.full((2, 5, 2, 8), float("nan")), torch.full((2, 2, 5), -INF)))
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse.transpose(1, 2), rtol=1e-5, atol=1e-6)

    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    given = torch.empty(2, 5, 2, 8, dtype=torch.float16)
    assert fa3.flash_attn_combine(outs, lses, out=given)[0] is given
    assert torch.equal(given, out.half())
    nothing, lse = fa3.flash_attn_combine(outs[2:], lses[2:])
    assert not nothing.any() and torch.equal(lse, torch.full((2, 5, 2), -INF))
    with pytest.raises(ValueError, match="lse_partial"):
        fa3.flash_attn_combine(outs, lses.transpose(2, 3)[..., :1])
    with pytest.raises(ValueError, match="out_dtype"):
        fa3.flash_attn_combine(outs, lses, out=given, out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [fa3, fa4])
def test_combine_needs_memory_for_one_part(random, module, dtype):
    parts = random(24, 1, 512, 4, 64, dtype=dtype)
    lse = random(24, 1, 512, 4)
    of_one_part = 4 * parts[0].numel()
    with torch.profiler.profile(profile_memory=True) as profile:
        out, _ = module.flash_attn_combine(parts, lse)
    in_use = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            most = max(most, in_use)
    assert of_one_part <= most <= 3.5 * of_one_part, f"{most / of_one_part:.1f} parts"
    weights = (lse.double() - lse.double().logsumexp(0)).exp()
    exact = (parts.double() * weights[..., None]).sum(0)
    torch.testing.assert_close(out, exact.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["qv", "q_descale", "k_descale", "v_descale"])
def test_refusals_of_flash_attention_3(random, name):
    q = random(3, 2, 2, 8)
    refused = pytest.raises(tandem.Unsupported, match=name)
    value = torch.ones(3, 2)
    with refused:
        fa3.flash_attn_func(q, q, q, **{name: value})
    with refused:
        fa3.flash_attn_varlen_func(q[0], q[0], q[0], int32(0, 2), int32(0, 2), 2, 2, **{name: value})
    if name != "qv":
        with refused:
            fa3.flash_attn_qkvpacked_func(random(2, 3, 3, 2, 8), **{name: value})
    k_cache, v_cache = caches(random, "places first")
    before = k_cache.clone()
    new = random(3, 2, HEADS_K, DIM)
    with refused:
        fa3.flash_attn_with_kvcache(
            random(3, 2, HEADS, DIM), k_cache, v_cache, new, new, cache_seqlens=3, **{name: value}
        )
    assert torch.equal(k_cache, before)
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(random(2, 3, 7, 8), num_heads_q=4)


@pytest.mark.parametrize("function", [fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache])
@pytest.mark.parametrize("name", ["q", "k_cache"])
def test_caches_of_8_bits_are_refused_first(random, function, name):
    tensors = {
        "q": random(2, 1, HEADS, DIM),
        "k_cache": random(2, 8, HEADS_K, DIM),
        "v_cache": random(2, 8, HEADS_K, DIM),
    }
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    new, cos = random(2, 1, HEADS_K, DIM), random(8, 4)
    with pytest.raises(tandem.Unsupported, match=rf"^{name} \(torch.float8_e4m3fn\) is not served: convert 8-bit"):
        function(**tensors, k=new, v=new, rotary_cos=cos, rotary_sin=cos, cache_seqlens=3)


def test_operators_of_flash_attention_3(random):
    """FlashAttention-3's test states these results of the schemas."""
    fwd, bwd = (str(getattr(torch.ops.flash_attn_3, name).default._schema) for name in ("fwd", "bwd"))
    assert fwd.endswith("bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)")
    assert bwd.endswith("-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)")
    ops = fa3.flash_attn_3_gpu
    q, k = random(2, 5, 4, 8).requires_grad_(), random(2, 7, 2, 8).requires_grad_()
    expected, expected_lse = fa3.flash_attn_func(q, k, k, causal=True, attention_chunk=4, return_attn_probs=True)
    target = torch.empty(2, 5, 4, 8)
    out, lse, *parts = ops.fwd(q, k, k, out=target, is_causal=True, attention_chunk=4)
    assert torch.equal(out, expected) and torch.equal(target, expected) and torch.equal(lse, expected_lse)
    assert [x.numel() for x in parts] == [0, 0]

    expected, expected_lse = fa3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    dout = random(2, 5, 4, 8)
    wanted = torch.autograd.grad(expected, (q, k), dout)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    found = ops.bwd(dout, q, k, k, expected, expected_lse, dq, dk, dv, is_causal=True)
    assert torch.equal(found[0], wanted[0]) and torch.equal(dq, wanted[0])
    torch.testing.assert_close(dk + dv, wanted[1])

    pages, table, used = random(4, 8, 2, 8), int32(3, 1, 0, 2).reshape(2, 2), int32(9, 11)
    cached = ops.fwd(q, pages, pages, seqused_k=used, page_table=table)[0]
    assert torch.equal(cached, fa3.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=used, page_table=table))
    assert ops.get_scheduler_metadata(2, 5, 7, 4, 2, 8, 8, torch.bfloat16, used).numel() == 0
    outs, lses = random(2, 1, 5, 4, 8), random(2, 1, 5, 4)
    assert torch.equal(ops.fwd_combine(outs, lses)[0], fa3.flash_attn_combine(outs, lses)[0])
    with pytest.raises(tandem.Unsupported, match="seqused_q .* is not served"):
        ops.fwd(q, pages, pages, seqused_q=used, seqused_k=used, page_table=table)
    with pytest.raises(tandem.Unsupported, match="qv is given"):
        ops.fwd(q, k, k, q_v=q)
