"""tandem.vllm: the signatures of vLLM's functions, steps of a batch against float64, and the attention backend.

The signatures are recorded in engine_signatures.json. If a machine has vLLM's Python files (engine_files.py), the
record is compared with them, and the backend runs on vLLM's classes instead of on vllm_stand_in.py's.
"""

import importlib
import pathlib
import re
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import engine_files  # noqa: E402
import vllm_stand_in  # noqa: E402
from engine_steps import BLOCK, CONTEXT, DIM, HEADS, HEADS_K, NEW, Step, int32  # noqa: E402

import tandem  # noqa: E402
import tandem.vllm as ours  # noqa: E402

INTERFACE = "vllm/vllm_flash_attn/flash_attn_interface.py"
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
EACH = int32([1, 0, 1, 0, 1])
# Arguments of flash_attn_varlen_func, and options of standard attention.
OPTIONS = {
    "causal": ({"causal": True}, lambda b: {"causal": True}),
    "not causal": ({}, lambda b: {}),
    "window": ({"causal": True, "window_size": [12, 0]}, lambda b: {"window": (12, 0)}),
    "no window": ({"causal": True, "window_size": [-1, -1]}, lambda b: {"causal": True}),
    "softcap": ({"causal": True, "softcap": 1.5}, lambda b: {"causal": True, "softcap": 1.5}),
    "alibi": ({"causal": True, "alibi_slopes": SLOPES}, lambda b: {"causal": True, "slopes": SLOPES.double()}),
    "sinks": ({"causal": True, "s_aux": SINKS, "fa_version": 3}, lambda b: {"causal": True, "sink": SINKS}),
    "scale": ({"causal": True, "softmax_scale": 0.4, "num_splits": 3}, lambda b: {"causal": True, "scale": 0.4}),
    "each causal": ({"causal": True, "dynamic_causal": EACH}, lambda b: {"causal": bool(EACH[b])}),
    "each windowed": (
        {"dynamic_causal": EACH, "window_size": [6, 6]},
        lambda b: {"window": (6, 0 if EACH[b] else 6)},
    ),
}
SCALE = torch.ones(1)


def call(step, **options):
    """Returns flash_attn_varlen_func of a step."""
    k, v = step.caches()
    lengths = {"seqused_k": step.seq_lens, "block_table": step.block_table, "max_seqlen_k": step.max_seq_len}
    sizes = {"cu_seqlens_q": step.query_start_loc, "max_seqlen_q": step.max_query_len}
    return ours.flash_attn_varlen_func(step.q, k, v, **sizes, **lengths, **options)


def write(step):
    for new in (False, True):
        key, value, slots = step.written(new)
        ours.reshape_and_cache_flash(key, value, *step.caches(), slots, "auto", SCALE, SCALE)


@pytest.mark.parametrize("path", engine_files.RECORDED["vllm 0.33.0"])
def test_recorded_signatures_are_the_files(path):
    file = engine_files.find(path)
    if file is None:
        pytest.skip("vLLM's files are not on this machine")
    found = engine_files.signatures(file.read_text())
    for name, parameters in engine_files.RECORDED["vllm 0.33.0"][path].items():
        assert found[name] == parameters, name


@pytest.mark.parametrize("name", engine_files.RECORDED["vllm 0.33.0"][INTERFACE])
def test_signatures(name):
    assert engine_files.ours(getattr(ours, name)) == engine_files.RECORDED["vllm 0.33.0"][INTERFACE][name]


def test_signature_of_the_cache_write():
    recorded = engine_files.RECORDED["vllm 0.33.0"]["vllm/_custom_ops.py"]["reshape_and_cache_flash"]
    assert engine_files.ours(ours.reshape_and_cache_flash) == recorded


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("options", "each"), OPTIONS.values(), ids=OPTIONS)
def test_step(random, options, each, layout):
    step = Step(random, layout=layout)
    write(step)
    step.check_cache()
    out = torch.full_like(step.q, 5.0)
    metadata = ours.get_scheduler_metadata(
        len(NEW), step.max_query_len, step.max_seq_len, HEADS, HEADS_K, DIM, step.seq_lens
    )
    result, lse = call(step, **options, out=out, scheduler_metadata=metadata, return_softmax_lse=True)
    assert result is out and torch.equal(call(step, **options)[: step.tokens], out[: step.tokens])
    assert (out[step.tokens :] == 5.0).all(), "rows of padding are not written"
    expected, expected_lse = step.expected(each)
    torch.testing.assert_close(out[: step.tokens].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[:, : step.tokens].double(), expected_lse, rtol=1e-4, atol=1e-5)


def test_a_request_has_the_same_bits_alone(random, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    step = Step(random)
    write(step)
    together = call(step, causal=True)
    for b in range(len(NEW) - 1):
        rows = slice(int(step.query_start_loc[b]), int(step.query_start_loc[b + 1]))
        k, v = step.caches()
        alone = ours.flash_attn_varlen_func(
            step.q[rows], k, v, NEW[b], int32([0, NEW[b]]), int(step.seq_lens[b]), causal=True,
            seqused_k=step.seq_lens[b : b + 1], block_table=step.block_table[b : b + 1],
        )  # fmt: skip
        assert torch.equal(alone, together[rows])


def test_keys_that_are_not_paged(random):
    step = Step(random)
    rows = step.q[: step.tokens]
    keys, values = torch.cat(step.keys), torch.cat(step.values)
    starts = torch.nn.functional.pad(step.seq_lens.cumsum(0), (1, 0)).int()
    arguments = (step.max_query_len, step.query_start_loc, step.max_seq_len)
    out = ours.flash_attn_varlen_func(rows, keys, values, *arguments, cu_seqlens_k=starts, causal=True)
    expected, _ = step.expected(lambda b: {"causal": True})
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    dense = [torch.full((len(NEW), 50, HEADS_K, DIM), torch.nan) for _ in range(2)]
    for target, source in zip(dense, (step.keys, step.values)):
        for b, x in enumerate(source):
            target[b, : len(x)] = x
    again = ours.flash_attn_varlen_func(rows, *dense, *arguments, seqused_k=step.seq_lens, causal=True)
    torch.testing.assert_close(again.double(), expected, rtol=1e-4, atol=1e-5)


def test_ranks_of_context_parallelism_merge_to_the_whole(random):
    step, ranks = Step(random), 3
    outs, lses = [], []
    for rank in range(ranks):
        keys, values = ([x[rank::ranks] for x in y] for y in (step.keys, step.values))
        lengths = int32([len(x) for x in keys])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        out, lse = ours.flash_attn_varlen_func(
            step.q[: step.tokens], torch.cat(keys), torch.cat(values), step.max_query_len, step.query_start_loc,
            int(lengths.max()), cu_seqlens_k=starts, causal=True, return_softmax_lse=True, fa_version=3,
            cp_world_size=ranks, cp_rank=rank, cp_tot_seqused_k=step.seq_lens,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    out, _ = tandem.merge(outs, lses)
    expected, _ = step.expected(lambda b: {"causal": True})
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_mask_mod(random):
    step = Step(random)
    write(step)
    prefix = int32([4, 8, 1, 2, 0])

    def mask(b, h, q, k, seqlen_info, aux_tensors):
        place = q + seqlen_info.seqlen_k - seqlen_info.seqlen_q
        return (k <= place) & ((k < aux_tensors[0][b]) | (place - k < 5))

    out = call(step, mask_mod=mask, aux_tensors=[prefix], fa_version=4)

    def visible(b):
        place = torch.arange(NEW[b])[:, None] + CONTEXT[b]
        k = torch.arange(CONTEXT[b] + NEW[b])[None]
        return {"bias": ((k <= place) & ((k < int(prefix[b])) | (place - k < 5)))[None]}

    expected, _ = step.expected(visible)
    torch.testing.assert_close(out[: step.tokens].double(), expected, rtol=1e-4, atol=1e-5)


def test_lse_of_a_row_without_keys(random):
    q, empty = random(2, HEADS, DIM), random(0, HEADS_K, DIM)
    for version, sign in ((2, 1), (3, -1), (4, -1)):
        _, lse = ours.flash_attn_varlen_func(
            q,
            empty,
            empty,
            2,
            int32([0, 2]),
            0,
            cu_seqlens_k=int32([0, 0]),
            return_softmax_lse=True,
            fa_version=version,
        )
        assert (lse == sign * torch.inf).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_v", torch.zeros(1)), ("output_scale", torch.ones(1)), ("block_sparse_tensors", SimpleNamespace()),
        ("gather_kv_indices", int32([0])), ("gather_kv_valid_length", int32([0])), ("fa_version", 5),
        ("cu_seqlens_k", int32([0])), ("cp_world_size", 2), ("alibi_slopes", SLOPES[:3]), ("s_aux", SINKS[:3]),
        ("causal", "no"), ("causal", torch.ones(2)), ("dynamic_causal", int32([1])), ("dynamic_causal", True),
        ("cp_world_size", 2.5), ("mask_mod", "k <= q"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument_and_write_nothing(random, name, value):
    step = Step(random)
    write(step)
    out = torch.full_like(step.q, 5.0)
    with pytest.raises((tandem.Unsupported, TypeError, ValueError), match=name):
        call(step, **{"out": out, "causal": True, name: value})
    assert (out == 5.0).all()


def test_ranks_outside_the_group_are_refused(random):
    step = Step(random)
    write(step)
    for rank, total in ((2, step.seq_lens), (-1, step.seq_lens), (1, step.seq_lens[:1])):
        with pytest.raises(ValueError, match="cp_rank|cp_tot_seqused_k"):
            call(step, causal=True, cp_world_size=2, cp_rank=rank, cp_tot_seqused_k=total)


def test_dense_values_belong_to_dense_keys(random):
    q, k = random(4, HEADS, DIM), random(2, 6, HEADS_K, DIM)
    lengths = {"max_seqlen_q": 2, "cu_seqlens_q": int32([0, 2, 4]), "max_seqlen_k": 6, "seqused_k": int32([6, 3])}
    for v in (random(6, 2, HEADS_K, DIM), random(2, 7, HEADS_K, DIM)):
        with pytest.raises(ValueError, match="v .shape .* must have k's batch and seqlen"):
            ours.flash_attn_varlen_func(q, k, v, **lengths)
    with pytest.raises(ValueError, match="k .shape .6,.. must be .batch, seqlen, heads, head_dim."):
        ours.flash_attn_varlen_func(q, random(6), random(6), **lengths)


def test_8_bit_inputs_are_refused_and_descales_of_others_ignored(random):
    step = Step(random)
    write(step)
    descale = torch.full((1,), 7.0).expand(len(NEW), HEADS_K)
    scaled = call(step, causal=True, q_descale=descale, k_descale=descale, v_descale=descale)
    assert torch.equal(scaled[: step.tokens], call(step, causal=True)[: step.tokens])
    step.kv_cache = step.kv_cache.nan_to_num().to(torch.float8_e4m3fn)
    with pytest.raises(tandem.Unsupported, match="k .*float8_e4m3fn"):
        call(step, causal=True, k_descale=descale)


def test_cache_write_refuses_before_it_writes(random):
    step = Step(random)
    key, value, slots = step.written(new=True)
    caches = step.caches()
    blocks = caches[0].shape[0]
    cases = [
        ("slot_mapping", (key, value, *caches, slots.int(), "auto")),
        ("slot_mapping", (key, value, *caches, slots + blocks * BLOCK, "auto")),
        ("kv_cache_dtype", (key, value, *caches, slots, "fp8")),
        ("kv_cache_dtype", (key, value, *caches, slots, "float16")),
        ("key", (key.numpy(), value, *caches, slots, "auto")),
        ("value", (key, value.half(), *caches, slots, "auto")),
        ("key", (key[:2], value, *caches, slots, "auto")),
    ]
    for name, arguments in cases:
        with pytest.raises((tandem.Unsupported, TypeError, ValueError), match=name):
            ours.reshape_and_cache_flash(*arguments, SCALE, SCALE)
        assert step.kv_cache.isnan().all()
    ours.reshape_and_cache_flash(key, value, *caches, torch.full_like(slots, -1), "auto", SCALE, SCALE)
    assert step.kv_cache.isnan().all()


def test_the_last_token_of_a_slot_is_written(random):
    step = Step(random)
    caches = step.caches()
    key, value = random(4, HEADS_K, DIM), random(4, HEADS_K, DIM)
    ours.reshape_and_cache_flash(key, value, *caches, torch.tensor([-1, 3, 5, 3]), "auto", SCALE, SCALE)
    for cache, new in zip(caches, (key, value)):
        assert torch.equal(cache[0, 3], new[3]) and torch.equal(cache[0, 5], new[2])
        assert int(cache.isnan().sum()) == cache.numel() - 2 * new[0].numel()


def test_versions():
    for version in (2, 3, 4):
        assert ours.is_fa_version_supported(version) and ours.fa_version_unsupported_reason(version) is None
    with pytest.raises(ValueError, match="fa_version"):
        ours.is_fa_version_supported(5)
    ours.compile_flash_attn_varlen_func_from_specs(
        q_shape=(2, 4, 16), k_shape=(9, 16, 2, 16), v_shape=(9, 16, 2, 16), q_dtype=torch.float16,
        cu_seqlens_q_shape=(3,), seqused_k_shape=(2,), page_table_shape=(2, 4), max_seqlen_q=1, max_seqlen_k=64,
        causal=True, window_size=[1, -1], fa_version=4,
    )  # fmt: skip


# ---- The backend ---------------------------------------------------------------------------------------------


def test_without_vllm_the_backend_names_it(monkeypatch):
    for name in [x for x in sys.modules if x == "vllm" or x.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "tandem.compat.vllm.backend", raising=False)
    for use in (ours.register, lambda: ours.TandemAttentionBackend):
        with pytest.raises(ImportError, match=r"vllm .* must be installed .*pip install vllm"):
            use()


@pytest.fixture
def backend(monkeypatch):
    vllm_stand_in.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "tandem.compat.vllm.backend", raising=False)
    yield ours.TandemAttentionBackend
    sys.modules.pop("tandem.compat.vllm.backend", None)


def test_registration(backend):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours.register()
    ours.register()
    assert AttentionBackendEnum["TANDEM"].get_path() == "tandem.compat.vllm.backend.TandemAttentionBackend"


def test_the_entry_point_names_the_registration():
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, _, name = re.search(r'general_plugins"\]\ntandem = "(.+)"', text)[1].partition(":")
    assert getattr(importlib.import_module(module), name) is ours.register


def test_signatures_of_the_backend(backend):
    recorded = engine_files.RECORDED["vllm 0.33.0"]
    classes = {
        "AttentionBackend": backend, "AttentionImpl": backend.get_impl_cls(),
        "FlashAttentionImpl": backend.get_impl_cls(), "AttentionMetadataBuilder": backend.get_builder_cls(),
    }  # fmt: skip
    for path in ("vllm/v1/attention/backend.py", "vllm/v1/attention/backends/flash_attn.py"):
        for name, parameters in recorded[path].items():
            owner, _, method = name.partition(".")
            found = engine_files.ours(getattr(classes[owner], method))
            bound = [x for x in parameters if x[0] != "cls"]
            assert found[: len(bound)] == bound and found[len(bound) :] in ([], [["sinks", "None"]]), name


def test_capabilities(backend):
    assert backend.get_name() == "TANDEM" and not backend.forward_includes_kv_cache_update
    sizes = {n: backend.supports_head_size(n) for n in (8, 20, 64, 80, 192, 256, 264)}
    assert sizes == {8: True, 20: False, 64: True, 80: True, 192: True, 256: True, 264: False}
    assert [backend.supports_dtype(x) for x in (torch.bfloat16, torch.float16, torch.float32)] == [True, True, False]
    assert [backend.supports_kv_cache_dtype(x) for x in ("auto", "fp8", None)] == [True, False, True]
    assert [backend.supports_block_size(x) for x in (8, 16, 48, 128)] == [False, True, True, True]
    assert all(backend.supports_attn_type(x) for x in ("decoder", "encoder", "encoder_only", "encoder_decoder"))
    majors = [backend.supports_compute_capability(SimpleNamespace(major=x, minor=0)) for x in (8, 9, 10, 12)]
    assert majors == [False, True, True, False]
    supported = ("sink", "sliding_window", "non_causal", "batch_invariance")
    assert all(getattr(backend, "supports_" + x)() for x in supported)
    refused = ("mm_prefix", "rswa", "per_head_quant_scales", "pcp", "dcp", "alibi_sqrt")
    assert not any(getattr(backend, "supports_" + x)() for x in refused)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", ["plain", "window", "alibi and softcap", "sinks", "not causal", "each causal"])
def test_step_of_the_backend(random, backend, case, layout):
    step = Step(random, torch.bfloat16, layout=layout)
    own = {
        "window": {"sliding_window": 13}, "sinks": {"sinks": SINKS},
        "alibi and softcap": {"alibi_slopes": SLOPES.tolist(), "logits_soft_cap": 2.0},
    }.get(case, {})  # fmt: skip
    plain = {
        "window": {"window": (12, 0)}, "sinks": {"causal": True, "sink": SINKS}, "not causal": {},
        "alibi and softcap": {"causal": True, "slopes": SLOPES.double(), "softcap": 2.0},
    }.get(case, {"causal": True})  # fmt: skip
    causal = {"not causal": False, "each causal": EACH}.get(case, True)
    layer = SimpleNamespace(_q_scale=SCALE, _k_scale=SCALE, _v_scale=SCALE)
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_K, **own)
    builder = backend.get_builder_cls()(SimpleNamespace(), ["layer"], SimpleNamespace(), torch.device("cpu"))
    key, value, slots = step.written(new=True)
    common = vllm_stand_in.common_metadata(step, slots, causal)
    metadata = builder.build(0, common)

    old_key, old_value, old_slots = step.written(new=False)
    impl.do_kv_cache_update(layer, old_key, old_value, step.kv_cache, old_slots)
    impl.do_kv_cache_update(layer, key, value, step.kv_cache, metadata.slot_mapping)
    step.check_cache()
    output = torch.full((len(step.q), HEADS * DIM), 5.0, dtype=torch.bfloat16)
    assert impl.forward(layer, step.q, key, value, step.kv_cache, metadata, output) is output
    assert (output[step.tokens :] == 5.0).all()
    expected, _ = step.expected((lambda b: {"causal": bool(EACH[b])}) if case == "each causal" else lambda b: plain)
    torch.testing.assert_close(output[: step.tokens].double(), expected.flatten(1), rtol=2e-2, atol=2e-2)

    shared = builder.update_block_table(metadata, step.block_table.clone(), metadata.slot_mapping)
    again = torch.full_like(output, 5.0)
    assert torch.equal(impl.forward(layer, step.q, key, value, step.kv_cache, shared, again), output)
    assert not impl.forward(layer, step.q, key, value, step.kv_cache, None, again).any(), "a profiling run"


def test_encoder_of_the_backend(random, backend):
    step = Step(random, torch.bfloat16)
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_K, attn_type="encoder_only")
    metadata = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(
        0, vllm_stand_in.common_metadata(step, torch.empty(0, dtype=torch.int64), False)
    )
    key, value, _ = step.written(new=True)
    output = torch.zeros(len(step.q), HEADS, DIM, dtype=torch.bfloat16)
    impl.forward(None, step.q, key, value, torch.empty(0), metadata, output)
    step.keys, step.values = ([x[c:] for x, c in zip(y, CONTEXT)] for y in (step.keys, step.values))
    torch.testing.assert_close(output[: step.tokens].double(), step.expected()[0], rtol=2e-2, atol=2e-2)


def test_the_backend_refuses_by_name(random, backend):
    with pytest.raises(tandem.Unsupported, match="kv_cache_dtype"):
        backend.get_impl_cls()(HEADS, DIM, 1.0, kv_cache_dtype="fp8")
    impl = backend.get_impl_cls()(HEADS, DIM, 1.0)
    with pytest.raises(tandem.Unsupported, match="output_scale"):
        impl.forward(None, *[torch.zeros(1)] * 4, None, torch.zeros(1), output_scale=SCALE)
    step = Step(random)
    common = vllm_stand_in.common_metadata(step, torch.empty(0, dtype=torch.int64), True)
    common.mm_req_doc_ranges = {0: [(0, 3)]}
    with pytest.raises(tandem.Unsupported, match="mm_req_doc_ranges"):
        backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
