"""tandem.sglang: the signatures of SGLang's functions, and steps of a batch against float64."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import engine_files  # noqa: E402
from engine_steps import CONTEXT, DIM, HEADS, HEADS_K, NEW, Step, int32  # noqa: E402
from flash_attn_cases import turned  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.sglang as ours  # noqa: E402

ENGINE, KERNELS = (engine_files.RECORDED[x] for x in ("sglang 0.5.23", "sglang-kernel 0.4.10"))
ENGINE_FILE, KERNELS_FILE = "sglang/kernels/ops/attention/flash_attention.py", "sgl_kernel/flash_attn.py"
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
# Arguments of SGLang's functions, and options of standard attention.
OPTIONS = {
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"causal": True, "window_size": (12, 0), "softcap": 2.0}, {"window": (12, 0), "softcap": 2.0}),
    "sinks": ({"causal": True, "sinks": SINKS, "num_splits": 2}, {"causal": True, "sink": SINKS}),
    "not causal": ({"softmax_scale": 0.4}, {"scale": 0.4}),
}


def with_cache(step, **options):
    sizes = {"cache_seqlens": step.seq_lens, "page_table": step.block_table}
    lengths = {"cu_seqlens_q": step.query_start_loc, "max_seqlen_q": step.max_query_len}
    return ours.flash_attn_with_kvcache(step.q, *step.caches(), **{**sizes, **lengths, **options})


def fill(step, context_only=False):
    k, v = step.caches()
    block = step.kv_cache.shape[2]
    for b, slots in enumerate(step.slots):
        used = torch.tensor(slots[: CONTEXT[b] if context_only else None], dtype=torch.int64)
        place = (used // block, used % block)
        k[place], v[place] = step.keys[b][: len(used)], step.values[b][: len(used)]


@pytest.mark.parametrize(("recorded", "path"), [(ENGINE, ENGINE_FILE), (KERNELS, KERNELS_FILE)])
def test_recorded_signatures_are_the_files(recorded, path):
    file = engine_files.find(path)
    if file is None:
        pytest.skip("SGLang's files are not on this machine")
    found = engine_files.signatures(file.read_text())
    for name, parameters in recorded[path].items():
        assert found[name] == parameters, name


@pytest.mark.parametrize("name", ENGINE[ENGINE_FILE])
def test_signatures(name):
    assert engine_files.ours(getattr(ours, name)) == ENGINE[ENGINE_FILE][name]


@pytest.mark.parametrize("name", KERNELS[KERNELS_FILE])
def test_signatures_of_the_kernels(name):
    """The parameters of sgl_kernel's functions are a part of SGLang's, and equal to ours where SGLang has no such
    function.
    """
    found, recorded = engine_files.ours(getattr(ours, name)), KERNELS[KERNELS_FILE][name]
    if name in ENGINE[ENGINE_FILE]:
        assert all(x in found for x in recorded)
    else:
        assert found == recorded


@pytest.mark.parametrize(("options", "plain"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ver", [3, 4])
@pytest.mark.parametrize("block", [1, 16])
def test_step(random, options, plain, ver, block):
    step = Step(random, block=block)
    fill(step)
    out = torch.full_like(step.q, 5.0)
    metadata = ours.get_scheduler_metadata(
        len(NEW), step.max_query_len, step.max_seq_len, HEADS, HEADS_K, DIM, step.seq_lens, page_size=block
    )
    results = with_cache(step, **options, ver=ver, out=out, scheduler_metadata=metadata, return_softmax_lse=True)
    assert results[0] is out and len(results) == (4 if ver == 3 else 2)
    expected, lse = step.expected(lambda b: plain)
    torch.testing.assert_close(out[: step.tokens].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1][:, : step.tokens].double(), lse, rtol=1e-4, atol=1e-5)
    alone = with_cache(step, **options, ver=ver)
    assert torch.equal(alone[: step.tokens], out[: step.tokens])
    varlen = ours.flash_attn_varlen_func(
        step.q, *step.caches(), step.query_start_loc, None, step.max_query_len, step.max_seq_len,
        seqused_k=step.seq_lens, page_table=step.block_table, **options, ver=ver,
    )  # fmt: skip
    assert torch.equal(varlen[: step.tokens], out[: step.tokens])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("selects", [False, True])
def test_appended_keys_with_rotary(random, interleaved, selects):
    """New keys of different counts are rotated (a part of head_dim), written to pages, and seen."""
    step = Step(random)
    fill(step, context_only=True)
    cos, sin = random(60, 5), random(60, 5)
    offsets = int32([1, 0, 4, 2, 0])
    news = [x[c:] for x, c in zip(step.keys, CONTEXT)]
    k, v = (torch.cat([x[c:] for x, c in zip(y, CONTEXT)]) for y in (step.keys, step.values))
    rows = slice(0, step.tokens)
    for b, c in enumerate(CONTEXT):
        places = torch.arange(c, c + NEW[b]) + int(offsets[b])
        step.keys[b] = step.keys[b].clone()
        step.keys[b][c:] = turned(news[b], cos, sin, places, interleaved)
    table, batch_idx = step.block_table, None
    if selects:
        table = torch.cat([torch.full_like(table[:1], -7), table.flip(0)])
        batch_idx = int32([5, 4, 3, 2, 1])
    out, lse, _, _ = with_cache(
        step, k=k, v=v, cache_seqlens=int32(CONTEXT), rotary_cos=cos, rotary_sin=sin, causal=True, page_table=table,
        cache_batch_idx=batch_idx, rotary_interleaved=interleaved, cu_seqlens_k_new=step.query_start_loc,
        rotary_seqlens=int32(CONTEXT) + offsets, return_softmax_lse=True,
    )  # fmt: skip
    for b, c in enumerate(CONTEXT):
        own = slice(int(step.query_start_loc[b]), int(step.query_start_loc[b + 1]))
        places = torch.arange(c, c + NEW[b]) + int(offsets[b])
        step.q[own] = turned(step.q[own], cos, sin, places, interleaved).float()
    expected, expected_lse = step.expected(lambda b: {"causal": True})
    torch.testing.assert_close(out[rows].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[:, rows].double(), expected_lse, rtol=1e-4, atol=1e-5)
    assert not out[step.tokens :].any() and (lse[:, step.tokens :] == -torch.inf).all()


def test_leftpad_with_pages(random):
    step = Step(random)
    fill(step)
    leftpad = int32([5, 17, 0, 2, 0])
    cached = [x.clone() for x in step.caches()]
    block = step.kv_cache.shape[2]
    for b, slots in enumerate(step.slots):
        hidden = torch.tensor(slots[: int(leftpad[b])], dtype=torch.int64)
        for x in cached:
            x[hidden // block, hidden % block] = torch.nan
        step.keys[b], step.values[b] = step.keys[b][int(leftpad[b]) :], step.values[b][int(leftpad[b]) :]
    step.kv_cache = torch.cat(cached, -1).transpose(1, 2)
    table = step.block_table.clone()
    table[1, 0] = 2**30  # a page without keys
    out = with_cache(step, cache_leftpad=leftpad, page_table=table, causal=True)
    expected, _ = step.expected(lambda b: {"causal": True})
    torch.testing.assert_close(out[: step.tokens].double(), expected, rtol=1e-4, atol=1e-5)
    lengths = {"cu_seqlens_q": step.query_start_loc, "max_seqlen_q": step.max_query_len, "page_table": table}
    sizes = {"cache_seqlens": step.seq_lens, "cache_leftpad": leftpad}
    same = fa3.flash_attn_with_kvcache(step.q, *step.caches(), **sizes, **lengths, causal=True)
    assert torch.equal(same[: step.tokens], out[: step.tokens])
    table[1, 1] = 2**30
    with pytest.raises(ValueError, match="page_table"):
        with_cache(step, cache_leftpad=leftpad, page_table=table, causal=True)


def test_functions_of_scores(random):
    step = Step(random)
    fill(step)
    bias = random(5)

    def score(s, b, h, q, k, seqlen_info, aux_tensors):
        return s + aux_tensors[0][b] * k

    out = with_cache(step, score_mod=score, aux_tensors=[bias], causal=True, ver=4)
    plain = step.expected(
        lambda b: {"causal": True, "bias": (bias[b] * torch.arange(CONTEXT[b] + NEW[b])).expand(1, NEW[b], -1)}
    )
    torch.testing.assert_close(out[: step.tokens].double(), plain[0], rtol=1e-4, atol=1e-5)


def test_dense_queries_write_to_out(random):
    q, k, v = random(2, 3, HEADS, DIM), random(9, HEADS_K, DIM), random(9, HEADS_K, DIM)
    out = torch.empty_like(q)
    arguments = {"cu_seqlens_k": int32([0, 4, 9]), "max_seqlen_k": 5, "causal": True}
    result = ours.flash_attn_varlen_func(q, k, v, None, out=out, **arguments)
    packed = ours.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, int32([0, 3, 6]), max_seqlen_q=3, return_softmax_lse=True, ver=4, **arguments
    )
    assert torch.equal(result, out) and torch.equal(out.flatten(0, 1), packed[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qv", SINKS), ("only_qv", True), ("q_descale", SINKS), ("k_descale", SINKS),
        ("v_descale", SINKS), ("sfq", SINKS), ("sfk", SINKS), ("sfv", SINKS), ("rel_bias", SINKS), ("ver", 2),
        ("rel_bias_prep_cache", {}), ("sinks", SINKS[:3]), ("causal", "no"), ("score_mod", 3),
        ("attention_chunk", "4"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument_and_write_nothing(random, name, value):
    step = Step(random)
    fill(step, context_only=True)
    before, out = step.kv_cache.clone(), torch.full_like(step.q, 5.0)
    new = torch.cat([x[c:] for x, c in zip(step.keys, CONTEXT)])
    starts = {"cache_seqlens": int32(CONTEXT), "cu_seqlens_k_new": step.query_start_loc}
    with pytest.raises((tandem.Unsupported, TypeError, ValueError), match=name):
        with_cache(step, k=new, v=new, out=out, **{**starts, name: value})
    assert torch.equal(step.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0)) and (out == 5.0).all()
    lengths = (step.query_start_loc, None, step.max_query_len, step.max_seq_len)
    with pytest.raises((tandem.Unsupported, TypeError, ValueError), match=name):
        ours.flash_attn_varlen_func(
            step.q, *step.caches(), *lengths, seqused_k=step.seq_lens, page_table=step.block_table, **{name: value}
        )


def test_score_functions_with_sorted_sequences_are_refused(random):
    step = Step(random)
    fill(step)

    def mask(b, h, q, k, seqlen_info, aux_tensors):
        return k <= q

    with pytest.raises(tandem.Unsupported, match="mask_mod with cache_leftpad"):
        with_cache(step, mask_mod=mask, cache_leftpad=int32([0] * 5), ver=4)
