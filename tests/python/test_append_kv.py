"""tandem.append_kv against a reference in float64, for arrays of numpy and tensors of torch."""

import numpy as np
import pytest

import tandem

torch = pytest.importorskip("torch", reason="torch is not installed")

from flash_attn_cases import int32, turned  # noqa: E402

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


def test_prepare_for_serving(call):
    arguments = call["k"], call["k_cache"], call["v_cache"]
    options = {"page_table": TABLE, "seqused_k": CACHED}
    tandem.prepare("forward", *arguments, serving=True, **options)
    with pytest.raises(ValueError, match="pass_ .'backward'. must be 'forward' with serving"):
        tandem.prepare("backward", *arguments, serving=True, **options)
    with pytest.raises(ValueError, match="seqused_k.dtype"):
        tandem.prepare("forward", *arguments, serving=True, **{**options, "seqused_k": CACHED.long()})
