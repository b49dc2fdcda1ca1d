"""CUDA tensors through every module that replaces another library."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import BF16, GPU, captured, hold, int32, lengths, run, tensors

# isort: split
import sys

import torch
import torch.nn.functional as F
import torch_reference

import reference
import tandem
from tandem import fa3, fa4, flash_attn
from tandem.flash_attn import bert_padding


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


def cache_case(**given):
    """Returns flash_attn_with_kvcache's arguments, the cache after the call, and out, in float64."""
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
    # The dense form never waits, so that a graph can capture it. The form's lengths may change in the graph.
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
        # torch's math backend keeps the scores in float32, so that a rounding of the probabilities to 16 bits is
        # allowed, too.
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


if __name__ == "__main__":
    sys.exit(run(globals()))
