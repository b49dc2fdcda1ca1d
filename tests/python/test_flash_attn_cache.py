"""flash_attn_with_kvcache of tandem.flash_attn and tandem.fa3 against standard attention in float64.

The tests cover the keys that it appends, reads and returns. A refusal does not change the cache.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import DIM, DIM_V, HEADS, HEADS_K, INF, PLACES, ROWS, SLOPES, caches, int32, turned  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.flash_attn as fa2  # noqa: E402

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
    # Each pair of an option and a place has another layout.
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

    # Values beyond a sequence's keys are not read.
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


@pytest.mark.parametrize(("options", "plain"), KV_OPTIONS.values(), ids=KV_OPTIONS)
@pytest.mark.parametrize("seqlen_new", [0, 3])
def test_pages_give_the_bits_of_a_dense_cache(random, options, plain, seqlen_new):
    size, columns = 4, -(-PLACES // 4)
    q = random(3, 2, HEADS, DIM)
    k, v = (random(3, seqlen_new, HEADS_K, DIM) for _ in range(2)) if seqlen_new else (None, None)
    fused = random(3 * columns + 2, 2, size, HEADS_K, DIM)
    table = torch.randperm(3 * columns).int().reshape(3, columns)
    pages = fused[:, 0], fused[:, 1]
    dense = [x[table.long()].flatten(1, 2).clone() for x in pages]
    arguments = {"cache_seqlens": LENGTHS, **options}
    if seqlen_new:
        arguments.update(rotary_cos=random(4 * columns, 4), rotary_sin=random(4 * columns, 4))
    for b in range(3):  # entries without keys have any value
        table[b, -(-(int(LENGTHS[b]) + seqlen_new) // size) :] = 999
    for function, name in ((fa2, "block_table"), (fa3, "page_table")):
        if function is fa3 and "alibi_slopes" in options:
            continue
        call = function.flash_attn_with_kvcache
        expected = call(q, *dense, k, v, **arguments, return_softmax_lse=True)
        ours = call(q, *pages, k, v, **arguments, **{name: table}, return_softmax_lse=True)
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
        for x, y in zip(pages, dense):
            for b in range(3):
                used = int(LENGTHS[b]) + seqlen_new
                places = torch.arange(used)
                assert torch.equal(x[table[b, places // size].long(), places % size], y[b, :used])


def test_pages_with_packed_queries(random):
    q, k, v = random(4, HEADS, DIM), random(5, 4, HEADS_K, DIM), random(5, 4, HEADS_K, DIM)
    table, cu = int32(3, 0, 4, 1).reshape(2, 2), int32(0, 1, 4)
    out = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(6, 7), page_table=table, cu_seqlens_q=cu, max_seqlen_q=3, causal=True
    )
    for b in range(2):
        keys, values = (x[table[b].long()].flatten(0, 1)[None, : 6 + b] for x in (k, v))
        one = fa2.flash_attn_func(q[None, cu[b] : cu[b + 1]], keys, values, causal=True)
        assert torch.equal(out[cu[b] : cu[b + 1]], one[0])


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
    "places beyond the table": (
        {"block_table": int32(0, 1, 2)[:, None], "cache_seqlens": int32(3, PLACES, 3)}, ValueError, "cache_seqlens",
    ),
    "no page for new keys": ({"block_table": int32(0, -1, 2).reshape(3, 1)}, ValueError, "block_table .* new keys"),
    "pages and leftpad": (
        {"block_table": int32(0, 1, 2).reshape(3, 1), "cache_leftpad": int32(0, 0, 0)},
        tandem.Unsupported, "cache_leftpad must be None with block_table",
    ),
    "pages in int64": ({"block_table": int32(0, 1, 2).long()[:, None]}, ValueError, "block_table .* must be int32"),
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
    "q of another type": ({"q": torch.zeros(3, 2, HEADS, DIM).double()}, ValueError, "k_cache.dtype"),
    "q of more sequences": ({"q": torch.zeros(ROWS + 1, 2, HEADS, DIM)}, ValueError, "batch"),
    "q without dimensions": ({"q": torch.tensor(1.0)}, ValueError, "q "),
    "k of one dimension": ({"k": torch.zeros(3)}, ValueError, "k .shape .3,.. must be"),
    "lengths elsewhere": ({"cache_seqlens": int32(3, 3, 3).to("meta")}, ValueError, "cache_seqlens .on meta. must be"),
    "tables of whole numbers": (
        {"rotary_cos": torch.ones(16, 4).int(), "rotary_sin": torch.ones(16, 4).int()}, ValueError, "cos .*int32",
    ),
    "several flags": ({"causal": torch.ones(2)}, TypeError, "causal .Tensor. must be True or False"),
    "a word for a flag": (
        {"rotary_cos": torch.ones(16, 4), "rotary_sin": torch.ones(16, 4), "rotary_interleaved": "no"}, TypeError,
        "rotary_interleaved .'no'. must be True or False",
    ),
    "few rows of pages": ({"block_table": int32(0, 1).reshape(2, 1)}, ValueError, "block_table .2 rows. must have"),
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
        ("cu_seqlens_q", [0, 2, 4, 6]),
        ("max_seqlen_q", 1),
        ("max_seqlen_q", "long"),
        ("attention_chunk", 2.5),
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
    places = isinstance(value, torch.Tensor) and value[-1] == PLACES
    with pytest.raises((TypeError, ValueError), match="places" if places else name):
        fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=3, **arguments
        )
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("name", ["q", "alibi_slopes"])
def test_caches_over_tensors_that_attention_reads_are_refused(random, name):
    shape = (3, 2, HEADS, DIM) if name == "q" else (HEADS,)
    size = ROWS * PLACES * HEADS_K * DIM
    k_cache = random(size)
    tensor = k_cache[: torch.Size(shape).numel()].view(shape)
    arguments = {"q": random(3, 2, HEADS, DIM), name: tensor}
    k_cache, new = k_cache.view(ROWS, PLACES, HEADS_K, DIM), random(3, 2, HEADS_K, DIM)
    before, v_cache = k_cache.clone(), torch.zeros_like(k_cache)
    with pytest.raises(ValueError, match=f"k_cache.data overlaps {name}"):
        fa2.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, k=new, v=new, cache_seqlens=0, **arguments)
    assert torch.equal(k_cache, before) and not v_cache.any()
    fa2.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, cache_seqlens=3, **arguments)


def test_refusals_of_the_operator_have_its_names(random):
    arguments = random(2, 3, HEADS, DIM), *caches(random, "places first"), random(2, 3, HEADS_K, DIM)
    before = arguments[1].clone()
    for name, error, options in (
        ("seqused_k", ValueError, {"seqused_k": int32(3, PLACES)}),
        ("kv_batch_idx", ValueError, {"seqused_k": int32(3, 4), "kv_batch_idx": int32(0, ROWS)}),
        ("leftpad_k", ValueError, {"seqused_k": int32(3, 4), "leftpad_k": int32(0, 5)}),
    ):
        with pytest.raises(error, match=f"^{name} "):
            torch.ops.flash_attn_3.fwd(*arguments, arguments[3].clone(), **options)
    with pytest.raises(ValueError, match="^k_new and v_new must be given together"):
        torch.ops.flash_attn_3.fwd(*arguments)
    assert torch.equal(arguments[1], before)


def test_rotation_needs_new_keys(random):
    k_cache, v_cache = caches(random, "places first")
    tables = {"rotary_cos": random(PLACES, 4), "rotary_sin": random(PLACES, 4)}
    with pytest.raises(ValueError, match="without k"):
        fa2.flash_attn_with_kvcache(random(3, 1, HEADS, DIM), k_cache, v_cache, cache_seqlens=3, **tables)


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
