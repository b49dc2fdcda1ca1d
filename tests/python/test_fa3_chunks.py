"""attention_chunk of tandem.fa3 and tandem.sglang against FlashAttention-3's rule in float64, forward and backward."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import CU_K, CU_Q, DIM, HEADS, HEADS_K, INF, PLACES, VARLEN, int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.sglang as sglang  # noqa: E402

OPTIONS = {
    "chunk only": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "wide window": ({"window_size": (30, -1), "softcap": 1.5}, {"window": (30, None), "softcap": 1.5}),
}
all_options = pytest.mark.parametrize(("options", "plain"), OPTIONS.values(), ids=OPTIONS)


def chunk_bias(seqlen_q, seqlen_k, chunk):
    """Returns 0 for the keys of each query's chunk, else -inf: construct_chunk_mask of FlashAttention-3's tests."""
    row = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    first = row - row % chunk
    key = torch.arange(seqlen_k)
    hidden = (key < first) | (key >= first + chunk)
    return torch.zeros(seqlen_q, seqlen_k, dtype=torch.float64).masked_fill(hidden, -INF)


def attend(q, k, v, chunk, **plain):
    bias = chunk_bias(q.shape[0], k.shape[0], chunk).to(q.dtype)
    return torch_reference.attend(q, k, v, bias=bias[None], **plain)


def dense(q, k, v, chunk, **plain):
    results = [attend(*x, chunk, **plain) for x in zip(q, k, v)]
    return tuple(torch.stack(x) for x in zip(*results))


def packed(q, k, v, chunk, **plain):
    rows = zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:])
    results = [attend(q[a:b], k[c:d], v[c:d], chunk, **plain) for a, b, c, d in rows]
    return torch.cat([x for x, _ in results]), torch.cat([x for _, x in results], 1)


@all_options
@pytest.mark.parametrize("chunk", [1, 4, 5, 40])
def test_chunks(random, options, plain, chunk):
    torch_reference.hold(
        lambda *x: fa3.flash_attn_func(*x, **options, attention_chunk=chunk),
        lambda *x: dense(*x, chunk, **plain),
        [random(2, 9, 4, 16), random(2, 13, 2, 16), random(2, 13, 2, 24)],
    )
    torch_reference.hold(
        lambda *x: fa3.flash_attn_varlen_func(*x, **VARLEN, **options, attention_chunk=chunk),
        lambda *x: packed(*x, chunk, **plain),
        [random(14, 4, 16), random(19, 2, 16), random(19, 2, 24)],
    )
    torch_reference.hold(
        lambda qkv: fa3.flash_attn_qkvpacked_func(qkv, **options, attention_chunk=chunk),
        lambda qkv: dense(*qkv.unbind(2), chunk, **plain),
        [random(2, 9, 3, 4, 16)],
    )


@all_options
@pytest.mark.parametrize("where", ["rows", "leftpad", "batch_idx", "pages"])
def test_chunks_of_a_cache(random, options, plain, where):
    """Chunks count from a sequence's first key, which cache_leftpad moves."""
    chunk, lengths = 5, int32(7, 15, 10)
    q = random(3, 4, HEADS, DIM)
    k, v = random(3, PLACES, HEADS_K, DIM), random(3, PLACES, HEADS_K, DIM)
    arguments = {"cache_seqlens": lengths, **options, "attention_chunk": chunk}
    first, rows, caches = [0, 0, 0], [0, 1, 2], (k, v)
    if where == "leftpad":
        first = [0, 6, 2]
        arguments["cache_leftpad"] = int32(*first)
    elif where == "batch_idx":
        rows = [2, 0, 1]
        arguments["cache_batch_idx"] = int32(*rows)
    elif where == "pages":
        table = int32(5, 2, 4, 0, 1, 3).reshape(3, 2)
        arguments["page_table"] = table
        caches = [torch.empty(6, PLACES // 2, HEADS_K, DIM) for _ in range(2)]
        for pages, x in zip(caches, (k, v)):
            pages[table.flatten().long()] = x.reshape(6, PLACES // 2, HEADS_K, DIM)
    expected = []
    for b in range(3):
        keys = slice(first[b], int(lengths[b]))
        expected.append(attend(q[b].double(), k[rows[b], keys].double(), v[rows[b], keys].double(), chunk, **plain))
    for function in (fa3.flash_attn_with_kvcache, sglang.flash_attn_with_kvcache):
        out, lse, *_ = function(q, *caches, **arguments, return_softmax_lse=True)
        torch.testing.assert_close(out.double(), torch.stack([x for x, _ in expected]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse.double(), torch.stack([x for _, x in expected]), rtol=1e-5, atol=1e-6)


def test_chunks_rotate_each_query(random):
    """FlashAttention-3 rotates queries by their own places if a chunk or a window may hide keys."""
    q, k, cos, sin = random(1, 3, 2, 16), random(1, 8, 2, 16), random(16, 4), random(16, 4)
    new = random(1, 3, 2, 16)

    def attend(**options):
        arguments = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": int32(4)}
        return fa3.flash_attn_with_kvcache(q, k.clone(), k.clone(), new, new, **arguments, **options)

    chunked = attend(attention_chunk=100)
    torch.testing.assert_close(chunked, attend(window_size=(6, -1)))
    assert not torch.allclose(chunked, attend())


def test_values_of_attention_chunk(random):
    q = random(1, 6, 2, 8)
    whole = fa3.flash_attn_func(q, q, q)
    for chunk in (0, -3, 6, 2**40):
        torch.testing.assert_close(fa3.flash_attn_func(q, q, q, attention_chunk=chunk), whole)
    cu = {"cu_seqlens_q": int32(0, 6), "cu_seqlens_k": int32(0, 6), "max_seqlen_q": 6, "max_seqlen_k": 6}
    chunked = fa3.flash_attn_func(q, q, q, attention_chunk=2)
    assert torch.equal(sglang.flash_attn_varlen_func(q[0], q[0], q[0], **cu, attention_chunk=2), chunked[0])
    with pytest.raises(tandem.Unsupported, match=r"attention_chunk \(2\) with mask_mod is not served: compare"):
        sglang.flash_attn_varlen_func(q[0], q[0], q[0], **cu, attention_chunk=2, mask_mod=lambda b, h, i, j, *_: i >= j)
