"""The FlashAttention-4 interface (tandem.fa4): results and gradients against standard attention in float64."""

import functools
import types
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import CU_K, CU_Q, INF, VARLEN, int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa4 as fa4  # noqa: E402

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
    """Computes out and lse, with gradients through both, and of a sink."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fa4_takes_a_sink_of_any_type(random, dtype, sink_dtype):
    """The sink's gradient has a separate type."""
    q, k, sink = random(1, 5, 4, 8, dtype=dtype), random(1, 7, 2, 8, dtype=dtype), random(4).to(sink_dtype)
    sink.requires_grad_()
    plain = sink.detach().float().requires_grad_()
    got, want = fa4.flash_attn_func(q, k, k, learnable_sink=sink)[0], tandem.attention(q, k, k, sink=plain)
    torch.testing.assert_close(got, want)
    got.float().sum().backward()
    want.float().sum().backward()
    assert sink.grad.dtype == sink_dtype
    torch.testing.assert_close(sink.grad.float(), plain.grad, rtol=2e-2, atol=1e-2)


def test_fa4_combines_packed_parts(random):
    q, k = random(5, 4, 8), random(9, 2, 8)
    cu = [int32(0, 5), int32(0, 9), int32(0, 4), int32(0, 5)]
    parts = [
        fa4.flash_attn_varlen_func(q, x, x, cu_seqlens_q=cu[0], cu_seqlens_k=c, return_lse=True)
        for x, c in ((k[:4], cu[2]), (k[4:], cu[3]))
    ]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([lse.T for _, lse in parts])
    out, lse = fa4.flash_attn_combine(outs, lses, cu_seqlens=cu[0])
    want, want_lse = fa4.flash_attn_varlen_func(q, k, k, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse.T)
    assert fa4.flash_attn_combine(outs, lses, return_lse=False)[1] is None
    plan = fa4.get_scheduler_metadata(5, 9, 4, 2, 8, 2, cu_seqlens_q=cu[0])
    assert plan.num_splits_dynamic_ptr is None and plan.tile_count_semaphore is None
    again, _ = fa4.flash_attn_varlen_func(
        q, k, k, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], scheduler_metadata=plan, num_splits=2
    )
    torch.testing.assert_close(again, want)


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
        assert out.requires_grad and lse is not None and lse.requires_grad
        out, lse = function(needing, *inputs[1:], **more, return_lse=True)
        assert out.requires_grad and lse.requires_grad


@pytest.mark.parametrize("packed", ["neither", "q", "k"])
def test_fa4_varlen_of_dense_sides(random, packed):
    """Each side is dense with used lengths, or packed. The result has q's shape."""
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


def test_functions_of_flash_attention_4(random):
    """Captures aux_tensors, which are learned, and reads lengths and the beginning of a packed sequence."""

    def bias(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        table, place = aux_tensors[0], kv_idx + seqlen_info.offset_k
        return score * aux_scalars[0] + table[h, place] * (q_idx + seqlen_info.seqlen_k)

    def mask(b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return (kv_idx <= q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q) & (kv_idx >= aux_scalars[1])

    def biases(table, q, k, first=0):
        keys = k.shape[0]
        rows = torch.arange(q.shape[0], dtype=table.dtype)[:, None] + keys
        return table[:, None, first : first + keys] * rows

    def dense(q, k, v, table):
        one = [
            torch_reference.attend(
                *x, causal=True, window=(None, None), scale=2 * 16**-0.5,
                bias=biases(table, *x[:2]).masked_fill(torch.arange(13) < 1, -INF),
            )
            for x in zip(q, k, v)
        ]  # fmt: skip
        return tuple(torch.stack(x) for x in zip(*one))

    def packed(q, k, v, table):
        one = []
        for a, b, c, d in zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:]):
            shown = biases(table, q[a:b], k[c:d], c).masked_fill(torch.arange(d - c) < 1, -INF)
            one.append(torch_reference.attend(q[a:b], k[c:d], v[c:d], causal=True, scale=2 * 16**-0.5, bias=shown))
        return torch.cat([x for x, _ in one]), torch.cat([x for _, x in one], 1)

    def options(table, return_lse=True):
        aux = {"aux_tensors": [table], "aux_scalars": (2.0, 1)}
        return {"score_mod": bias, "mask_mod": mask, **aux, "return_lse": return_lse}

    inputs = [random(2, 9, 4, 16), random(2, 13, 2, 16), random(2, 13, 2, 24), random(4, 19) * 0.1]
    torch_reference.hold(lambda *x: fa4.flash_attn_func(*x[:3], **options(x[3])), dense, inputs, outputs=2)
    inputs = [random(14, 4, 16), random(19, 2, 16), random(19, 2, 24), random(4, 19) * 0.1]
    ours = lambda *x: fa4.flash_attn_varlen_func(*x[:3], **VARLEN, **options(x[3]))  # noqa: E731
    torch_reference.hold(ours, packed, inputs, outputs=2)
    q, table = random(1, 3, 4, 8), random(4, 19).requires_grad_()
    assert fa4.flash_attn_func(q, q, q, **options(table, return_lse=False))[1] is not None


def test_functions_that_call_cutlass(random, monkeypatch):
    q = random(1, 3, 2, 8)
    monkeypatch.setitem(globals(), "cute", types.ModuleType("cutlass.cute"))

    def kernel(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return cute.where(q_idx >= kv_idx, score, -INF)  # noqa: F821

    def jit(function):
        return functools.wraps(function)(lambda *x: None)

    for function in (kernel, jit(kernel)):
        with pytest.raises(tandem.Unsupported, match=r"score_mod \(kernel\) calls cute, which is cutlass.cute"):
            fa4.flash_attn_func(q, q, q, score_mod=function)
    twice = jit(lambda score, *_: score * 2)
    assert torch.equal(
        fa4.flash_attn_func(q, q, q, score_mod=twice)[0], tandem.attention(q, q, q, score_mod="score * 2")
    )
    with pytest.raises(ValueError, match="softcap .3.0. must be 0 where score_mod is given"):
        fa4.flash_attn_func(q, q, q, score_mod=twice, softcap=3.0)


class BlockSparse(NamedTuple):
    """The fields of flash_attn.cute.block_sparsity.BlockSparseTensorsTorch."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    block_size: Any = None


def test_block_sparsity(random):
    q, k = random(2, 20, 4, 16), random(2, 24, 2, 16)

    def mask(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return q_idx >= kv_idx

    def ints(*values):
        return torch.tensor([[values]], dtype=torch.int32)

    part, whole = ints([0, 9], [9, 9], [1, 0]), ints([9, 9], [1, 9], [9, 9])
    blocks = BlockSparse(ints(1, 0, 2), part, ints(0, 1, 0), whole, (8, 12))
    seen = torch.arange(20)[:, None] >= torch.arange(24)
    seen[:8, 12:] = seen[8:16, :12] = False
    seen[8:16, 12:] = True
    out, _ = fa4.flash_attn_func(q, k, k, mask_mod=mask, block_sparse_tensors=blocks, block_sparse_tensors_bwd=blocks)
    wanted = tandem.attention(q, k, k, bias=seen[None, None])
    torch.testing.assert_close(out, wanted)
    for refused in (blocks._replace(block_size=None), lambda *x: x[0]):
        with pytest.raises(tandem.Unsupported, match="block_sparse_tensors .* must have a block_size"):
            fa4.flash_attn_func(q, k, k, block_sparse_tensors=refused)


@pytest.mark.parametrize("name", ["qv", "gather_kv_indices", "block_sparse_tensors", "block_sparse_tensors_bwd"])
def test_refusals_of_flash_attention_4(random, name):
    q = random(1, 3, 2, 8)
    value = torch.ones(1) if name in ("qv", "gather_kv_indices") else (lambda *x: x[0])
    with pytest.raises(tandem.Unsupported, match=name):
        fa4.flash_attn_func(q, q, q, **{name: value})
    if name != "block_sparse_tensors_bwd":
        with pytest.raises(tandem.Unsupported, match=name):
            fa4.flash_attn_varlen_func(q, q, q, **{name: value})


def test_arguments_of_other_kinds_are_refused(random):
    q, k = random(1, 3, 2, 8), random(1, 4, 2, 8)
    for name, value in (
        ("causal", torch.ones(2)),
        ("score_mod", 3),
        ("mask_mod", "k <= q"),
        ("aux_tensors", torch.ones(3)),
    ):
        mod = {"mask_mod": lambda b, h, q_idx, kv_idx, seqlen_info, aux_tensors: kv_idx <= q_idx}
        with pytest.raises(TypeError, match=f"^{name} .* must be"):
            fa4.flash_attn_func(q, k, k, **(mod | {name: value}))
    packed = {"cu_seqlens_q": int32(0, 3), "max_seqlen_q": 3}
    for name, value in (("k", k[0, 0, 0]), ("v", k.transpose(0, 1).reshape(2, 2, 2, 8))):
        with pytest.raises(ValueError, match=f"{name} .shape .* must "):
            fa4.flash_attn_varlen_func(q[0], **({"k": k, "v": k} | {name: value}), **packed)
    for name, value in (("cu_seqlens_q", [0, 3]), ("nheads_kv", 0)):
        sizes = {"nheads_kv": 2, "cu_seqlens_q": int32(0, 3), name: value}
        with pytest.raises((TypeError, ValueError), match=name):
            fa4.get_scheduler_metadata(5, 9, 4, headdim=8, num_splits=2, **sizes)


def test_pages_of_flash_attention_4(random):
    q, pages, table = random(3, 2, 8), random(4, 3, 2, 8), int32(3, 1)[None]
    out = fa4.flash_attn_varlen_func(q, pages, pages, cu_seqlens_q=int32(0, 3), page_table=table, seqused_k=int32(5))[0]
    keys = torch.cat([pages[3], pages[1, :2]])[None]
    assert torch.equal(out, fa4.flash_attn_func(q[None], keys, keys)[0][0])


def test_empty_queries_of_a_packed_call(random):
    q, k = random(0, 2, 8), random(7, 2, 8)
    cu = {"cu_seqlens_q": int32(0, 0, 0), "cu_seqlens_k": int32(0, 4, 7)}
    out, lse = fa4.flash_attn_varlen_func(q, k, k, **cu, max_seqlen_q=0, max_seqlen_k=4, return_lse=True)
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)


@pytest.mark.parametrize("pack_gqa", [None, False])
def test_tiles_of_scheduler_metadata(pack_gqa):
    cu = int32(0, 100, 100, 229)
    rows = [length * (2 if pack_gqa is None else 1) for length in (100, 0, 129)]
    tiles = [0, *torch.tensor([-(-x // 128) for x in rows]).cumsum(0).tolist()]
    plan = fa4.get_scheduler_metadata(129, 129, 4, 2, 64, 1, pack_gqa=pack_gqa, cu_seqlens_q=cu)
    assert plan.cu_total_m_blocks.tolist() == tiles and plan.cu_total_m_blocks.dtype == torch.int32
    used = fa4.get_scheduler_metadata(
        129, 129, 4, 2, 64, 1, pack_gqa=pack_gqa, cu_seqlens_q=cu, seqused_q=int32(1, 0, 0)
    )
    assert used.cu_total_m_blocks.tolist() == [0, 1, 1, 1]
    assert fa4.get_scheduler_metadata(129, 129, 4, 2, 64, 1).cu_total_m_blocks is None


@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward_with_tensors_to_write_to(random, packed):
    lead_q, lead_k = ((14,), (19,)) if packed else ((2, 9), (2, 13))
    inputs = [random(*lead_q, 4, 16), random(*lead_k, 2, 16), random(*lead_k, 2, 24), random(4)]
    q, k, v, sink = (x.requires_grad_() for x in inputs)
    options = {**(VARLEN if packed else {}), "causal": True, "learnable_sink": sink}
    function = fa4.flash_attn_varlen_func if packed else fa4.flash_attn_func
    expected, expected_lse = function(q, k, v, **options, return_lse=True)
    dout, dlse = random(*expected.shape), random(*expected_lse.shape)
    wanted = torch.autograd.grad((expected, expected_lse), inputs, (dout, dlse))

    out, lse, *rest = fa4._flash_attn_fwd(q, k, v, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and rest == [None, None]
    assert not out.requires_grad
    targets = torch.full_like(expected, float("nan")), torch.full_like(expected_lse, float("nan"))
    with torch.no_grad():
        found = fa4._flash_attn_fwd(q, k, v, **options, out=targets[0], lse=targets[1])
    assert found[0] is targets[0] and found[1] is targets[1]
    assert torch.equal(targets[0], expected) and torch.equal(targets[1], expected_lse)
    assert fa4._flash_attn_fwd(*(x.detach() for x in inputs[:3]), causal=True, **(VARLEN if packed else {}))[1] is None

    guarded = [torch.full((x.shape[0] + 2, *x.shape[1:]), float("nan")) for x in (q, k, v)]
    dq, dk, dv = (x[1:-1] for x in guarded)
    arguments = (q, k, v, out, dout, lse)
    gradients = fa4._flash_attn_bwd(*arguments, **options, dlse=dlse, dq=dq, dk=dk, dv=dv)
    assert gradients[0] is dq and gradients[1] is dk and gradients[2] is dv
    for got, want in zip(gradients, wanted):
        assert torch.equal(got, want)
    assert all(x[0].isnan().all() and x[-1].isnan().all() for x in guarded)
    again = fa4._flash_attn_bwd(*arguments, **{**options, "learnable_sink": None}, dlse=dlse)
    assert len(again) == 3
    with pytest.raises(tandem.Unsupported, match="_flash_attn_bwd_sparse_mla is not served"):
        fa4._flash_attn_bwd_sparse_mla(q, k, v)
