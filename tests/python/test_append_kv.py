"""tandem.append_kv against a reference in float64, for arrays of numpy and tensors of torch."""

import numpy as np
import pytest

import tandem

torch = pytest.importorskip("torch", reason="torch is not installed")

from flash_attn_cases import int32, turned  # noqa: E402

from tandem._arrays import APPEND_TENSORS  # noqa: E402

HEADS, DIM, PAGES, SIZE = 2, 16, 7, 4
TABLE = int32(5, 2, 0, 3, 6, 1).reshape(2, 3)
CACHED = int32(3, 6)


@pytest.fixture
def call(random):
    return {
        "k": random(2, 5, HEADS, DIM), "v": random(2, 5, HEADS, DIM), "k_cache": random(PAGES, SIZE, HEADS, DIM),
        "v_cache": random(PAGES, SIZE, HEADS, DIM), "page_table": TABLE, "cache_seqlens": CACHED,
    }  # fmt: skip


def expected(call, cos=None, sin=None):
    k_cache, v_cache = call["k_cache"].clone(), call["v_cache"].clone()
    for b in range(2):
        place = int(CACHED[b]) + torch.arange(5)
        where = TABLE[b, place // SIZE].long(), place % SIZE
        k = call["k"][b] if cos is None else turned(call["k"][b], cos, sin, place, False).to(k_cache.dtype)
        k_cache[where], v_cache[where] = k, call["v"][b]
    return k_cache, v_cache


def test_torch(call):
    k_cache, v_cache = expected(call)
    assert tandem.append_kv(**call) is None
    assert torch.equal(call["k_cache"], k_cache) and torch.equal(call["v_cache"], v_cache)


def test_numpy(call):
    k_cache, v_cache = expected(call)
    arrays = {name: x.numpy() for name, x in call.items()}
    assert tandem.append_kv(**arrays) is None
    assert np.array_equal(arrays["k_cache"], k_cache) and np.array_equal(arrays["v_cache"], v_cache)


@pytest.mark.parametrize("compiled", [False, True])
def test_rotated_queries(random, call, compiled):
    cos, sin, q = random(12, 6), random(12, 6), random(2, 5, 4, DIM)
    k_cache, _ = expected(call, cos, sin)

    def append(q, call):
        return tandem.append_kv(**call, q=q, rotary_cos=cos, rotary_sin=sin)

    q_out = (torch.compile(append, backend="eager", fullgraph=True) if compiled else append)(q, call)
    for b in range(2):
        exact = turned(q[b], cos, sin, int(CACHED[b]) + torch.arange(5), False)
        torch.testing.assert_close(q_out[b].double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(call["k_cache"], k_cache, rtol=1e-6, atol=1e-6)
    result = np.empty(q.shape, np.float32)
    arrays = {name: x.numpy() for name, x in call.items()}
    tables = {"rotary_cos": cos.numpy(), "rotary_sin": sin.numpy()}
    assert tandem.append_kv(**arrays, q=q.numpy(), q_out=result, **tables) is result
    assert np.array_equal(result, q_out)


def test_refusals_write_nothing(call):
    before = call["k_cache"].clone()
    for name, value, match in (
        ("page_table", TABLE - 9, "page_table"),
        ("cache_seqlens", CACHED + 90, "cache_seqlens"),
        ("cache_seqlens", CACHED.long(), "cache_seqlens.dtype"),
        ("v", None, "v .None. must be given with k"),
        ("k", call["k"].bfloat16(), "v.dtype"),
        ("page_table", TABLE[:, :1], "k .5 new keys of sequence 0. must have at most 4 keys"),
    ):
        with pytest.raises(ValueError, match=match):
            tandem.append_kv(**{**call, name: value})
    arrays = {name: x.numpy() for name, x in call.items()}
    arrays["k_cache"].flags.writeable = False
    with pytest.raises(ValueError, match="k_cache must be writable"):
        tandem.append_kv(**arrays)
    with pytest.raises(TypeError, match="k_cache .*ndarray.* must be a torch tensor"):
        tandem.append_kv(**{**call, "k_cache": arrays["k_cache"]})
    assert torch.equal(call["k_cache"], before)


@pytest.mark.parametrize("name", ["rotary_interleaved", "single_q_position"])
@pytest.mark.parametrize(
    "value", ["no", np.array([True, False]), torch.tensor([True, False])], ids=["word", "array", "tensor"]
)
def test_flags_are_single_values(call, name, value):
    before = call["k_cache"].clone()
    with pytest.raises(TypeError, match=f"{name} .* must be True or False"):
        tandem.append_kv(**call, **{name: value})
    assert torch.equal(call["k_cache"], before)


def test_keys_and_queries_of_different_libraries(random, call):
    tables = {"rotary_cos": random(12, 6), "rotary_sin": random(12, 6)}
    q, arrays = random(2, 5, 4, DIM), {name: x.numpy() for name, x in call.items()}
    with pytest.raises(TypeError, match="k .ndarray. must be a torch tensor, as q is"):
        tandem.append_kv(**arrays, q=q, **tables)
    want = tandem.append_kv(**call, q=q, **tables)
    result = tandem.append_kv(**call, q=q.numpy(), **tables)
    assert isinstance(result, np.ndarray) and np.array_equal(result, want)


def test_prepare_for_serving(call):
    arguments = call["k"], call["k_cache"], call["v_cache"]
    options = {"page_table": TABLE, "seqused_k": CACHED}
    tandem.prepare("forward", *arguments, serving=True, **options)
    with pytest.raises(ValueError, match="pass_ .'backward'. must be 'forward' with serving"):
        tandem.prepare("backward", *arguments, serving=True, **options)
    with pytest.raises(ValueError, match="seqused_k.dtype"):
        tandem.prepare("forward", *arguments, serving=True, **{**options, "seqused_k": CACHED.long()})


def empty_call(**options):
    new = torch.randn(2, 3, 2, 8)
    arguments = {"k": new, "v": new.clone(), "k_cache": torch.zeros(2, 8, 2, 8), "v_cache": torch.zeros(2, 8, 2, 8)}
    return {**arguments, "cache_seqlens": torch.tensor([1, 2], dtype=torch.int32), **options}


def test_writes_are_counted():
    arguments = empty_call()
    q = torch.randn(2, 1, 2, 8).requires_grad_()
    pending = tandem.attention(q, arguments["k_cache"], arguments["v_cache"])
    tandem.append_kv(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.sum().backward()
    versions = [x._version for x in (arguments["k_cache"], arguments["v_cache"])]
    torch.ops.tandem.append_kv(*(arguments.get(name) for name in APPEND_TENSORS), False, False)
    assert [x._version for x in (arguments["k_cache"], arguments["v_cache"])] == [n + 1 for n in versions]


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_gradients_are_refused(name):
    arguments = empty_call()
    arguments[name].requires_grad_()
    with pytest.raises((ValueError, tandem.Unsupported), match=f"^{name} must not require a gradient"):
        tandem.append_kv(**arguments)
    assert not arguments["k_cache"].any() and not arguments["v_cache"].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tangents_and_lazily_negated_caches_are_refused():
    arguments = empty_call()
    with pytest.raises(ValueError, match="k_cache .lazily negated"):
        tandem.append_kv(**{**arguments, "k_cache": torch._neg_view(arguments["k_cache"])})
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(arguments["k"], arguments["k"])
        with pytest.raises(tandem.Unsupported, match="forward-mode"):
            tandem.append_kv(**{**arguments, "k": dual})
    assert not arguments["k_cache"].any()


@pytest.mark.parametrize("paged", [False, True])
def test_keys_that_differ_need_their_own_places(paged):
    same = torch.tensor([1, 1], dtype=torch.int32)
    places = {"page_table": same[:, None]} if paged else {"cache_batch_idx": same}
    arguments = empty_call(**places)
    with pytest.raises(ValueError, match=f"place 2 of {'page' if paged else 'row'} 1 for two new keys that differ"):
        tandem.append_kv(**arguments)
    assert not arguments["k_cache"].any()
    same = torch.randn(1, 3, 2, 8).expand(2, 3, 2, 8)
    equal = empty_call(**places, k=same, v=same, cache_seqlens=torch.tensor([1, 1], dtype=torch.int32))
    tandem.append_kv(**equal)
    assert torch.equal(equal["k_cache"][1, 1:4], same[0])
    apart = empty_call(**places, cache_seqlens=torch.tensor([1, 4], dtype=torch.int32))
    tandem.append_kv(**apart)
    assert torch.equal(apart["k_cache"][1, 1:7], apart["k"].flatten(0, 1))


@pytest.mark.parametrize("name", ["cache_seqlens", "page_table", "slot_mapping"])
def test_caches_over_indices_are_refused(name):
    cache = torch.zeros(2, 8, 2, 8)
    memory = cache.view(-1).view(torch.int64 if name == "slot_mapping" else torch.int32)
    indices = {"cache_seqlens": memory[:2], "page_table": memory[:2, None], "slot_mapping": memory[:6]}[name]
    arguments = empty_call(k_cache=cache, **{name: indices})
    if name == "slot_mapping":
        del arguments["cache_seqlens"]
        arguments.update(k=arguments["k"].flatten(0, 1), v=arguments["v"].flatten(0, 1))
    with pytest.raises(ValueError, match=f"k_cache.data overlaps {name}"):
        tandem.append_kv(**arguments)
    assert not cache.any()
