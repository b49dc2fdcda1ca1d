"""The FlashAttention interfaces (tandem.flash_attn, tandem.fa3, tandem.fa4): results and gradients against the plain
formula in float64, and every refusal leaves its arguments as they were."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.fa4 as fa4  # noqa: E402
import tandem.flash_attn as fa2  # noqa: E402

INF = float("inf")


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
# What flash_attn is told, and the same for the plain formula.
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "window left": ({"window_size": (4, -1)}, {"window": (4, None)}),
    "window right": ({"window_size": (-1, 0)}, {"window": (None, 0)}),
    "causal window": ({"window_size": (3, 2), "causal": True}, {"window": (3, 2), "causal": True}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "no softcap": ({"softcap": -1.0}, {}),
    "scale": ({"softmax_scale": 0.4}, {"scale": 0.4}),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
    "alibi of batches": ({"alibi_slopes": SLOPES * int32(1, 3)[:, None]}, {"slopes": SLOPES * int32(1, 3)[:, None]}),
}
all_options = pytest.mark.parametrize(("options", "plain"), OPTIONS.values(), ids=OPTIONS)
CU_Q, CU_K = int32(0, 9, 14), int32(0, 6, 19)
VARLEN = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 9, "max_seqlen_k": 13}


# ---- FlashAttention-2 -----------------------------------------------------------------------------------------------


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
    assert out.requires_grad and not lse.requires_grad and probabilities.shape == (0,)
    assert torch.equal(out[:, :3], torch.zeros(1, 3, 4, 8))
    assert torch.equal(lse[..., :3], torch.full((1, 4, 3), INF)), "flash_attn marks empty rows by +inf"
    _, exact = torch_reference.dense(q.double(), k.double(), v.double(), causal=True)
    torch.testing.assert_close(lse[..., 3:].double(), exact[..., 3:].detach(), rtol=0, atol=1e-6)

    qkv = random(7, 3, 4, 8).requires_grad_()
    out, lse, probabilities = fa2.flash_attn_varlen_qkvpacked_func(qkv, int32(0, 3, 7), 4, return_attn_probs=True)
    assert out.requires_grad and not lse.requires_grad and lse.shape == (4, 7) and probabilities.shape == (0,)


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
    # Attending to an identity gives the undropped probabilities themselves, here of the first sequence.
    q, k, _ = split(*inputs)
    first = [x[: cu[n][1]] if varlen else x[0] for n, x in enumerate((q, k))]
    identity = torch.eye(first[1].shape[0], dtype=torch.float64)[:, None].expand(-1, k.shape[-2], -1)
    exact, _ = torch_reference.attend(first[0].double(), first[1].double(), identity, **plain_options)
    ours = probabilities[0, :, : first[0].shape[0], : first[1].shape[0]].transpose(0, 1)
    torch.testing.assert_close(ours.abs().double(), exact, rtol=0, atol=1e-6)


def test_s_dmask_of_more_keys_than_a_head_dim(random):
    q, k, v = random(1, 3, 2, 8), random(1, 700, 1, 8), random(1, 700, 1, 8)
    out, _, probabilities = fa2.flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True)
    assert probabilities.shape == (1, 2, 3, 700)
    torch.testing.assert_close(probabilities.abs().sum(-1), torch.ones(1, 2, 3))
    expected = torch.einsum("bhij,bjd->bihd", probabilities.clamp(min=0) / 0.6, v[:, :, 0])
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


def test_refusals_of_flash_attention_2(random):
    q, pages = random(4, 2, 16), random(3, 8, 2, 16)
    with pytest.raises(tandem.Unsupported, match="page_table"):
        fa2.flash_attn_varlen_func(
            q, pages, pages, int32(0, 2, 4), int32(0, 8, 16), 2, 8, block_table=int32(0, 1).reshape(2, 1)
        )
    for name, shape in (("qkv", (2, 7, 2, 4, 16)), ("qkv", (7, 3, 4, 16)), ("kv", (2, 7, 3, 4, 16))):
        function = getattr(fa2, f"flash_attn_{name}packed_func")
        inputs = [random(*shape)] if name == "qkv" else [random(2, 7, 4, 16), random(*shape)]
        with pytest.raises(ValueError, match=f"{name} .*shape"):
            function(*inputs)
    with pytest.raises(ValueError, match="dropout_p"):
        fa2.flash_attn_func(q[None], q[None], q[None], dropout_p=1.5)


# ---- Caches ---------------------------------------------------------------------------------------------------------

ROWS, PLACES, HEADS, HEADS_K, DIM, DIM_V = 5, 16, 4, 2, 16, 12


def caches(random, layout, dim_v=DIM):
    """Keys and values, (ROWS, PLACES, HEADS_K, dim), in one of the ways they lie in memory."""
    if layout == "places first":
        return random(ROWS, PLACES, HEADS_K, DIM), random(ROWS, PLACES, HEADS_K, dim_v)
    if layout == "heads first":
        return random(ROWS, HEADS_K, PLACES, DIM).transpose(1, 2), random(ROWS, HEADS_K, PLACES, dim_v).transpose(1, 2)
    if layout == "keys beside values":
        both = random(ROWS, PLACES, 2, HEADS_K, DIM)
        return both[:, :, 0], both[:, :, 1]
    if layout == "places before rows":
        return random(PLACES, ROWS, HEADS_K, DIM).transpose(0, 1), random(PLACES, ROWS, HEADS_K, dim_v).transpose(0, 1)
    if layout == "keys and values unlike":
        return random(ROWS, PLACES, HEADS_K, DIM), random(ROWS, HEADS_K, PLACES, dim_v).transpose(1, 2)
    assert layout == "odd gaps"
    gaps = (random(ROWS, PLACES * HEADS_K * dim + 8)[:, 8:] for dim in (DIM, dim_v))
    return [x.unflatten(1, (PLACES, HEADS_K, dim)) for x, dim in zip(gaps, (DIM, dim_v))]


def turned(x, cos, sin, places, interleaved):
    """x (seqlen, heads, head_dim) turned as complex numbers, in float64."""
    x = x.double()
    half = cos.shape[1]
    order = torch.arange(2 * half)
    order = order.reshape(half, 2) if interleaved else order.reshape(2, half).T
    z = torch.complex(x[..., order[:, 0]], x[..., order[:, 1]])
    z = z * torch.complex(cos.double(), sin.double())[places][:, None]
    result = x.clone()
    result[..., order[:, 0]], result[..., order[:, 1]] = z.real, z.imag
    return result


VIEWED = ["places first", "heads first", "keys beside values"]
LAYOUTS = [*VIEWED, "places before rows", "keys and values unlike", "odd gaps"]
KV_OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (4, 1)}, {"window": (4, 1)}),
    "wide window": ({"window_size": (PLACES, -1)}, {}),
    "alibi": ({"alibi_slopes": SLOPES, "softcap": 2.0}, {"slopes": SLOPES, "softcap": 2.0}),
    "alibi of batches": (
        {"alibi_slopes": SLOPES * int32(1, 2, 3)[:, None]},
        {"slopes": SLOPES * int32(1, 2, 3)[:, None]},
    ),
}
LENGTHS = int32(3, 9, 6)


@pytest.mark.parametrize(("options", "plain"), KV_OPTIONS.values(), ids=KV_OPTIONS)
@pytest.mark.parametrize(("rotation", "seqlen_new"), [(None, 0), (None, 4), ("halves", 1), ("interleaved", 4)])
@pytest.mark.parametrize("where", ["rows in order", "batch_idx", "leftpad", "both"])
def test_kvcache(random, options, plain, rotation, where, seqlen_new):
    # Each option meets each place to attend to in another layout.
    layout = LAYOUTS[(list(KV_OPTIONS.values()).index((options, plain)) + len(where) + seqlen_new) % len(LAYOUTS)]
    k_cache, v_cache = caches(random, layout)
    q = random(3, 4, HEADS, DIM)
    k, v = (random(3, seqlen_new, HEADS_K, DIM) for _ in range(2)) if seqlen_new else (None, None)
    batch_idx = int32(4, 0, 2) if where in ("batch_idx", "both") else None
    leftpad = int32(0, 5, 2) if where in ("leftpad", "both") else None
    arguments = {"cache_seqlens": LENGTHS, "cache_batch_idx": batch_idx, "cache_leftpad": leftpad, **options}
    cos, sin = random(PLACES, 4), random(PLACES, 4)
    if rotation:
        arguments.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotation == "interleaved")
    each_query = plain.get("causal") or "window" in plain

    expected_k, expected_v = k_cache.double(), v_cache.double()
    outs, lses = [], []
    for b in range(3):
        row = b if batch_idx is None else int(batch_idx[b])
        old, first = int(LENGTHS[b]), 0 if leftpad is None else int(leftpad[b])
        used = old + seqlen_new
        query = q[b].double()
        if seqlen_new:
            expected_k[row, old:used], expected_v[row, old:used] = k[b].double(), v[b].double()
        if rotation:
            turn = (cos, sin), rotation == "interleaved"
            expected_k[row, old:used] = turned(k[b], *turn[0], torch.arange(old, used), turn[1])
            places = torch.arange(4) + old if each_query else torch.full((4,), old)
            query = turned(query, *turn[0], places, turn[1])
        own = {**plain, "slopes": plain["slopes"][b]} if plain.get("slopes", SLOPES).dim() == 2 else plain
        out, lse = torch_reference.attend(query, expected_k[row, first:used], expected_v[row, first:used], **own)
        outs.append(out)
        lses.append(lse)

    # What lies beyond a sequence's keys is read by nobody.
    for cache in (k_cache, v_cache):
        for b in range(3):
            row = b if batch_idx is None else int(batch_idx[b])
            cache[row, int(LENGTHS[b]) + seqlen_new :] = float("nan")
            cache[row, : 0 if leftpad is None else int(leftpad[b])] = float("nan")
    untouched = k_cache.clone(), v_cache.clone()
    out, lse = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **arguments, return_softmax_lse=True)
    torch.testing.assert_close(out.double(), torch.stack(outs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        lse.double(), torch.stack(lses).masked_fill(torch.stack(lses) == -INF, INF), rtol=1e-4, atol=1e-5
    )
    for cache, before, expected in ((k_cache, untouched[0], expected_k), (v_cache, untouched[1], expected_v)):
        for b in range(3) if seqlen_new else ():
            row, old = b if batch_idx is None else int(batch_idx[b]), int(LENGTHS[b])
            written = slice(old, old + seqlen_new)
            torch.testing.assert_close(cache[row, written].double(), expected[row, written], rtol=1e-6, atol=1e-6)
            before[row, written] = cache[row, written]
        assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0)), "nothing else is written"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_read_where_it_lies(random, monkeypatch, layout):
    k_cache, v_cache = caches(random, layout)
    storages = []
    attention = tandem.attention

    def watched(q, k, v, **options):
        storages.extend(x.untyped_storage().data_ptr() for x in (k, v))
        return attention(q, k, v, **options)

    monkeypatch.setattr(tandem, "attention", watched)
    arguments = {"cache_seqlens": LENGTHS, "cache_batch_idx": int32(4, 0, 2), "cache_leftpad": int32(0, 5, 2)}
    fa2.flash_attn_with_kvcache(random(3, 1, HEADS, DIM), k_cache, v_cache, **arguments)
    own = [x.untyped_storage().data_ptr() for x in (k_cache, v_cache)]
    assert (storages == own) == (layout in VIEWED)


def test_kvcache_lengths(random):
    k_cache, v_cache = caches(random, "places first")
    q = random(3, 2, HEADS, DIM)

    def attend(**arguments):
        return fa2.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)

    exact = torch_reference.dense(*(x[:3].double() for x in (q, k_cache, v_cache)))[0]
    torch.testing.assert_close(attend().double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attend(cache_seqlens=7), attend(cache_seqlens=int32(7, 7, 7)))
    torch.testing.assert_close(attend(cache_seqlens=7), attend(cache_seqlens=7, cache_leftpad=int32(0, 0, 0)))
    # Several sequences may read the same row.
    shared = attend(cache_seqlens=int32(7, 3, 7), cache_batch_idx=int32(1, 1, 0))
    for b, (row, length) in enumerate(((1, 7), (1, 3), (0, 7))):
        one, _ = torch_reference.attend(q[b], k_cache[row, :length], v_cache[row, :length])
        torch.testing.assert_close(shared[b], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_rows_read_what_was_appended(random, layout):
    k_cache, v_cache = caches(random, layout)
    q, k, v = random(2, 1, HEADS, DIM), random(1, 1, HEADS_K, DIM), random(1, 1, HEADS_K, DIM)
    out = fa2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), cache_seqlens=4,
        cache_batch_idx=int32(3, 3),
    )  # fmt: skip
    assert torch.equal(k_cache[3, 4], k[0, 0]) and torch.equal(v_cache[3, 4], v[0, 0])
    expected, _ = torch_reference.dense(
        q, k_cache[3:4, :5].expand(2, -1, -1, -1), v_cache[3:4, :5].expand(2, -1, -1, -1)
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_kvcache_has_no_gradient(random):
    k_cache, v_cache = caches(random, "places first")
    q, k = random(3, 1, HEADS, DIM).requires_grad_(), random(3, 1, HEADS_K, DIM).requires_grad_()
    out = fa2.flash_attn_with_kvcache(q, k_cache.requires_grad_(), v_cache, k, k, cache_seqlens=2)
    assert not out.requires_grad and not v_cache.requires_grad


REFUSED = {
    "block_table": ({"block_table": int32(0, 1, 2).reshape(3, 1)}, tandem.Unsupported, "block_table"),
    "no lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens"),
    "too long": ({"cache_seqlens": int32(3, PLACES, 3)}, ValueError, "cache_seqlens"),
    "negative": ({"cache_seqlens": int32(3, -1, 3)}, ValueError, "cache_seqlens"),
    "int64 lengths": ({"cache_seqlens": int32(3, 3, 3).long()}, ValueError, "cache_seqlens"),
    "too few lengths": ({"cache_seqlens": int32(3, 3)}, ValueError, "cache_seqlens"),
    "row beyond": ({"cache_batch_idx": int32(0, 1, ROWS)}, ValueError, "cache_batch_idx"),
    "leftpad beyond": ({"cache_leftpad": int32(0, 4, 0)}, ValueError, "cache_leftpad"),
    "k alone": ({"v": None}, ValueError, "together"),
    "k of other heads": ({"k": torch.zeros(3, 2, HEADS_K + 1, DIM)}, ValueError, "k "),
    "k of another type": ({"k": torch.zeros(3, 2, HEADS_K, DIM).double()}, ValueError, "k "),
    "cos alone": ({"rotary_cos": torch.zeros(PLACES, 4)}, ValueError, "rotary"),
    "cos too short": ({"rotary_cos": torch.zeros(3, 4), "rotary_sin": torch.zeros(3, 4)}, ValueError, "places"),
    "cos too wide": ({"rotary_cos": torch.zeros(16, 9), "rotary_sin": torch.zeros(16, 9)}, ValueError, "rotary"),
    "slopes": ({"alibi_slopes": torch.zeros(HEADS + 1)}, ValueError, "alibi_slopes"),
    "slopes of packed calls": (
        {"alibi_slopes": torch.zeros(HEADS + 1), "cache_batch_idx": int32(2, 0, 1)}, ValueError, "alibi_slopes",
    ),
    "slopes of other batches": (
        {"alibi_slopes": torch.zeros(4, HEADS), "cache_batch_idx": int32(2, 0, 1)}, ValueError, "alibi_slopes",
    ),
    "q of other heads": ({"q": torch.zeros(3, 2, HEADS_K + 1, DIM)}, ValueError, "heads"),
    "q of another type": ({"q": torch.zeros(3, 2, HEADS, DIM).double()}, ValueError, "k.dtype"),
    "q of more sequences": ({"q": torch.zeros(ROWS + 1, 2, HEADS, DIM)}, ValueError, "batch"),
    "packed q": ({"q": torch.zeros(6, HEADS, DIM)}, ValueError, "q "),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_kvcache_refuses_it_does_not_write(random, changed, error, match):
    k_cache, v_cache = caches(random, "places first")
    arguments = {
        "q": random(3, 2, HEADS, DIM),
        "k": random(3, 2, HEADS_K, DIM),
        "v": random(3, 2, HEADS_K, DIM),
        "cache_seqlens": int32(3, 3, 3),
        **changed,
    }
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(error, match=match):
        fa2.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **arguments)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seqlens_q", int32(0, 2, 4, 5)),
        ("cu_seqlens_q", int32(1, 2, 4, 6)),
        ("cu_seqlens_k_new", int32(0, 4, 2, 6)),
        ("cu_seqlens_k_new", int32(0, 2, 6)),
        ("cu_seqlens_k_new", int32(0, 2, 4, 6).long()),
        ("rotary_seqlens", int32(0, 2)),
        ("rotary_seqlens", int32(0, 2, PLACES)),
    ],
    ids=str,
)
def test_what_kvcache_refuses_of_packed_calls_it_does_not_write(random, name, value):
    k_cache, v_cache = caches(random, "places first")
    cos, sin = random(PLACES, 4), random(PLACES, 4)
    arguments = {"cu_seqlens_q": int32(0, 2, 4, 6), "cu_seqlens_k_new": int32(0, 2, 4, 6), name: value}
    q, new = random(6, HEADS, DIM), random(6, HEADS_K, DIM)
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match="places" if value[-1] == PLACES else name):
        fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=3, **arguments
        )
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def test_rotation_needs_new_keys(random):
    k_cache, v_cache = caches(random, "places first")
    tables = {"rotary_cos": random(PLACES, 4), "rotary_sin": random(PLACES, 4)}
    with pytest.raises(ValueError, match="without k"):
        fa2.flash_attn_with_kvcache(random(3, 1, HEADS, DIM), k_cache, v_cache, cache_seqlens=3, **tables)


# ---- FlashAttention-3 -----------------------------------------------------------------------------------------------

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
    assert out.requires_grad and not lse.requires_grad
    assert torch.equal(lse[..., :3], torch.full((1, 4, 3), -INF)) and lse[..., 3:].isfinite().all()
    out, lse = fa3.flash_attn_qkvpacked_func(random(1, 5, 3, 2, 8).requires_grad_(), return_attn_probs=True)
    assert out.requires_grad and not lse.requires_grad and lse.shape == (1, 2, 5)


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


@pytest.mark.parametrize("each_query", [False, True])
@pytest.mark.parametrize("batch_idx", [None, int32(4, 0, 2)])
def test_fa3_kvcache_of_packed_queries_and_keys(random, each_query, batch_idx):
    k_cache, v_cache = caches(random, "heads first", DIM_V)
    cu_q, cu_new = int32(0, 2, 2, 7), int32(0, 1, 4, 6)
    q, k, v = random(7, HEADS, DIM), random(6, HEADS_K, DIM), random(6, HEADS_K, DIM_V)
    cos, sin, start = random(40, 4), random(40, 4), int32(20, 0, 31)
    expected_k, expected_v, outs, lses = k_cache.double(), v_cache.double(), [], []
    for b in range(3):
        row = b if batch_idx is None else int(batch_idx[b])
        rows, new = slice(cu_q[b], cu_q[b + 1]), slice(cu_new[b], cu_new[b + 1])
        old, used = int(LENGTHS[b]), int(LENGTHS[b] + cu_new[b + 1] - cu_new[b])
        places = torch.arange(used - old) + start[b]
        expected_k[row, old:used], expected_v[row, old:used] = turned(k[new], cos, sin, places, False), v[new].double()
        query_places = start[b] + torch.arange(rows.stop - rows.start) * each_query
        query = turned(q[rows], cos, sin, query_places, False)
        out, lse = torch_reference.attend(query, expected_k[row, :used], expected_v[row, :used], causal=each_query)
        outs.append(out)
        lses.append(lse)
    results = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS, cache_batch_idx=batch_idx,
        cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, max_seqlen_q=5, rotary_seqlens=start, causal=each_query,
        rotary_interleaved=False, return_softmax_lse=True,
        scheduler_metadata=fa3.get_scheduler_metadata(3, 5, PLACES, HEADS, HEADS_K, DIM, LENGTHS),
    )  # fmt: skip
    assert len(results) == 4 and results[2].numel() == results[3].numel() == 0
    torch.testing.assert_close(results[0].double(), torch.cat(outs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1].double(), torch.cat(lses, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k_cache.double(), expected_k, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v_cache.double(), expected_v, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("window", "turns"), [((-1, 3), False), ((-1, 2), True), ((PLACES - 1, -1), False), ((4, -1), True)]
)
def test_fa3_windows_that_hide_nothing_do_not_spread_queries(random, window, turns):
    k_cache, v_cache = caches(random, "places first")
    q, k = random(3, 4, HEADS, DIM), random(3, 4, HEADS_K, DIM)
    cos, sin = random(PLACES, 4), random(PLACES, 4)
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, k, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS, window_size=window
    )
    for b in range(3):
        old, bounds = int(LENGTHS[b]), tuple(None if w < 0 else w for w in window)
        query = turned(q[b], cos, sin, old + torch.arange(4) * turns, True)
        expected, _ = torch_reference.attend(
            query, k_cache[b, : old + 4].double(), v_cache[b, : old + 4].double(), window=bounds
        )
        torch.testing.assert_close(out[b].double(), expected, rtol=1e-4, atol=1e-5)


def test_fa3_combine(random):
    q, k, v = random(2, 5, 2, 8), random(2, 12, 2, 8), random(2, 12, 2, 8)
    exact, exact_lse = torch_reference.dense(q.double(), k.double(), v.double())
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 5), slice(5, 12))]
    # A part that saw nothing does not count, whatever it left behind.
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
    for more in ({name: value}, {"page_table": int32(0, 1, 2)[:, None]}):
        with pytest.raises(tandem.Unsupported, match=next(iter(more))):
            fa3.flash_attn_with_kvcache(random(3, 2, HEADS, DIM), k_cache, v_cache, new, new, cache_seqlens=3, **more)
    assert torch.equal(k_cache, before)
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(random(2, 3, 7, 8), num_heads_q=4)


# ---- FlashAttention-4 -----------------------------------------------------------------------------------------------

FA4_OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "window left": ({"window_size": (4, None)}, {"window": (4, None)}),
    "window right": ({"window_size": (None, -2)}, {"window": (None, -2)}),
    "window away": ({"window_size": (5, -2)}, {"window": (5, -2)}),
    "no window": ({"window_size": (-1, -1)}, {}),
    "no window, causal": ({"window_size": (-1, -1), "causal": True}, {"causal": True}),
    "causal window": ({"window_size": (3, -2), "causal": True}, {"window": (3, None), "causal": True}),
    "softcap": ({"softcap": 1.5, "softmax_scale": 0.4}, {"softcap": 1.5, "scale": 0.4}),
}


@pytest.mark.parametrize(("options", "plain"), FA4_OPTIONS.values(), ids=FA4_OPTIONS)
def test_fa4(random, options, plain):
    """out and lse, with gradients through both, and of a sink."""

    def ours(*x):
        return fa4.flash_attn_func(*x[:3], **options, learnable_sink=x[3], return_lse=True)

    inputs = [random(2, 9, 4, 16), random(2, 13, 2, 16), random(2, 13, 2, 24), random(4)]
    torch_reference.hold(ours, lambda *x: torch_reference.dense(*x[:3], **plain, sink=x[3]), inputs, outputs=2)
    torch_reference.hold(
        lambda *x: fa4.flash_attn_varlen_func(*x, **VARLEN, **options, num_splits=3, return_lse=True),
        lambda *x: torch_reference.packed(*x, CU_Q, CU_K, **plain),
        [random(14, 4, 16), random(19, 2, 16), random(19, 2, 24)],
        outputs=2,
    )


def test_fa4_returns_the_lse_when_it_is_needed(random):
    q, k = random(1, 5, 4, 8), random(1, 2, 2, 8)
    cu = {"cu_seqlens_q": int32(0, 5), "cu_seqlens_k": int32(0, 2)}
    for function, inputs, more in (
        (fa4.flash_attn_func, (q, k, k), {}),
        (fa4.flash_attn_varlen_func, (q[0], k[0], k[0]), cu),
    ):
        out, lse = function(*inputs, **more)
        assert lse is None and out.shape == inputs[0].shape
        out, lse = function(*inputs, **more, causal=True, return_lse=True)
        assert torch.equal(lse[..., :3], torch.full_like(lse[..., :3], -INF)) and lse[..., 3:].isfinite().all()
        needing = inputs[0].clone().requires_grad_()
        out, lse = function(needing, *inputs[1:], **more)
        assert out.requires_grad and lse is not None and not lse.requires_grad
        out, lse = function(needing, *inputs[1:], **more, return_lse=True)
        assert out.requires_grad and lse.requires_grad


@pytest.mark.parametrize("packed", ["neither", "q", "k"])
def test_fa4_varlen_of_dense_sides(random, packed):
    """Each side is dense with used lengths, or packed; the result has q's shape."""
    lengths_q, lengths_k = (6, 4), (3, 7)
    q, k, v = random(2, 6, 4, 16), random(2, 7, 2, 16), random(2, 7, 2, 16)
    used = {"seqused_q": int32(*lengths_q), "seqused_k": int32(*lengths_k)}
    if packed == "neither":
        arguments, inputs = used, [q, k, v]
    elif packed == "q":
        arguments = {"cu_seqlens_q": int32(0, 6, 10), "max_seqlen_q": 6, "seqused_k": used["seqused_k"]}
        inputs = [torch.cat([q[0], q[1, :4]]), k, v]
    else:
        arguments = {"cu_seqlens_k": int32(0, 3, 10), "max_seqlen_k": 7, "seqused_q": used["seqused_q"]}
        inputs = [q, torch.cat([k[0, :3], k[1]]), torch.cat([v[0, :3], v[1]])]

    def plain(q, k, v):
        sides = {"q": int32(0, 6, 10), "k": int32(0, 3, 10)}
        rows = [q[slice(*sides["q"][b : b + 2])] if packed == "q" else q[b, : lengths_q[b]] for b in range(2)]
        keys = [
            [x[slice(*sides["k"][b : b + 2])] if packed == "k" else x[b, : lengths_k[b]] for x in (k, v)]
            for b in range(2)
        ]
        results = [torch_reference.attend(rows[b], *keys[b], causal=True) for b in range(2)]
        if packed == "q":
            return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results], 1)
        pad = torch.nn.functional.pad
        return (
            torch.stack([pad(o, (0, 0, 0, 0, 0, 6 - o.shape[0])) for o, _ in results]),
            torch.stack([pad(lse, (0, 6 - lse.shape[1]), value=-INF) for _, lse in results]),
        )

    torch_reference.hold(
        lambda *x: fa4.flash_attn_varlen_func(*x, **arguments, causal=True, seqlen_k_per_split=64, return_lse=True),
        plain,
        inputs,
        outputs=2,
    )


@pytest.mark.parametrize(
    "name", ["qv", "gather_kv_indices", "score_mod", "mask_mod", "block_sparse_tensors", "block_sparse_tensors_bwd"]
)
def test_refusals_of_flash_attention_4(random, name):
    q = random(1, 3, 2, 8)
    value = torch.ones(1) if name in ("qv", "gather_kv_indices") else (lambda *x: x[0])
    with pytest.raises(tandem.Unsupported, match=name):
        fa4.flash_attn_func(q, q, q, **{name: value})
    if name != "block_sparse_tensors_bwd":
        with pytest.raises(tandem.Unsupported, match=name):
            fa4.flash_attn_varlen_func(q, q, q, **{name: value})
    with pytest.raises(tandem.Unsupported, match="page_table"):
        fa4.flash_attn_varlen_func(q[0], q, q, cu_seqlens_q=int32(0, 3), page_table=int32(0)[None], seqused_k=int32(3))
