"""The FlashAttention-3 interface (tandem.fa3): results and gradients against standard attention in float64."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import CU_K, CU_Q, DIM, HEADS, HEADS_K, INF, OPTIONS, VARLEN, caches, int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.fa4 as fa4  # noqa: E402

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


@pytest.mark.parametrize(
    ("name", "value"), [("qv", 1), ("q_descale", 1), ("k_descale", 1), ("v_descale", 1), ("attention_chunk", 4)]
)
def test_refusals_of_flash_attention_3(random, name, value):
    q = random(3, 2, 2, 8)
    refused = pytest.raises(tandem.Unsupported, match=name)
    value = torch.ones(3, 2) if name != "attention_chunk" else value
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
