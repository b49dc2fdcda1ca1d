"""Cases of context_parallel_ranks.py: modules that take the place of other libraries' context parallelism."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import tandem
from tandem.compat import ring_flash_attn, torch_context_parallel
from tandem.compat.transformer_engine import attn_forward_func_with_cp

BATCH, HEADS, HEADS_K, DIM = 2, 4, 2, 16
LAYOUTS = {"ring": "contiguous", "zigzag_ring": "per_document", "stripe": "striped"}


def expect_error(kind, part, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind as error:
        assert part in str(error), error
        return
    raise AssertionError(f"no {kind.__name__} with {part!r}")


def close(x, y):
    torch.testing.assert_close(x, y, atol=3e-5, rtol=1e-4)


def gradients(out, dout, inputs):
    return torch.autograd.grad((out * dout).sum(), inputs)


def dense(r, length):
    """q, k, v and dout of a batch of equal sequences."""
    heads = HEADS, HEADS_K, HEADS_K, HEADS
    return [r.random(BATCH, length, h, DIM, seed=n) for n, h in enumerate(heads)]


def shards(plan, rank, tensors, dim):
    return [plan.shard(x, rank, dim=dim).clone().requires_grad_() for x in tensors]


def case_ring_flash_attn(r):
    length = 8 * r.ranks
    batch = dense(r, length)
    slopes = torch.tensor([0.1, 0.2, 0.0, 0.5])
    options = [{}, {"causal": True}, {"causal": True, "window_size": (9, -1)}, {"causal": True, "alibi_slopes": slopes}]
    for (kind, layout), given in itertools.product(LAYOUTS.items(), options):
        if kind == "stripe" and "alibi_slopes" in given:
            continue
        whole = [x.clone().requires_grad_() for x in batch[:3]]
        window = (9, None) if "window_size" in given else None
        mask = {"causal": given.get("causal", False), "window": window, "alibi_slopes": given.get("alibi_slopes")}
        out, lse = tandem.attention(*whole, return_lse=True, **mask)
        expected = gradients(out, batch[3], whole)
        plan = tandem.ContextPlan([length], r.ranks, layout=layout)
        own = shards(plan, r.rank, batch[:3], 1)
        function = getattr(ring_flash_attn, f"{kind}_flash_attn_func")
        ours, ours_lse, nothing = function(*own, return_attn_probs=True, **given)
        assert nothing is None
        close(ours, plan.shard(out, r.rank, dim=1))
        close(ours_lse, plan.shard(lse, r.rank, dim=2))
        for x, y in zip(gradients(ours, plan.shard(batch[3], r.rank, dim=1), own), expected):
            close(x, plan.shard(y, r.rank, dim=1))
        kv = torch.stack(own[1:], 2).detach()
        packed = getattr(ring_flash_attn, f"{kind}_flash_attn_kvpacked_func")
        assert torch.equal(packed(own[0], kv, **given), ours)
    expect_error(tandem.Unsupported, "dropout_p (0.1) must be 0", function, *own, dropout_p=0.1)
    expect_error(
        tandem.Unsupported,
        "llama3_flash_attn_varlen_func is not served",
        getattr,
        ring_flash_attn,
        "llama3_flash_attn_varlen_func",
    )


def case_ring_flash_attn_varlen(r):
    lengths = [4 * r.ranks, 2 * r.ranks, 6 * r.ranks]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = (r.random(sum(lengths), h, DIM, seed=n) for n, h in enumerate((HEADS, HEADS_K, HEADS_K)))
    out = tandem.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    for kind in ("ring", "zigzag_ring"):
        rows = []
        for begin, length in zip(cu.tolist(), lengths):
            plan = tandem.ContextPlan([length], r.ranks, layout=LAYOUTS[kind])
            rows += [begin + n for n in plan.positions(r.rank).tolist()]
        function = getattr(ring_flash_attn, f"{kind}_flash_attn_varlen_func")
        own = [x[rows] for x in (q, k, v)]
        close(function(*own, cu // r.ranks, max(lengths) // r.ranks, causal=True), out[rows])
        packed = getattr(ring_flash_attn, f"{kind}_flash_attn_varlen_kvpacked_func")
        kv = torch.stack(own[1:], 1)
        close(packed(own[0], kv, cu // r.ranks, max(lengths) // r.ranks, causal=True), out[rows])


def transformer_engine(q, k, v, comm="p2p", cu=None, **options):
    arguments = (True, q, k, v, cu, cu, 0, 0, cu, cu, 0.0, None, None, None, comm)
    return attn_forward_func_with_cp(*arguments, **options)


def case_transformer_engine(r):
    length, call = 8 * r.ranks, transformer_engine
    batch, sink = dense(r, length), torch.tensor([0.5, -1, 2, 0])
    plan = tandem.ContextPlan([length], r.ranks, layout="per_document")
    cases = itertools.product(("p2p", "all_gather", "a2a"), ("bshd", "sbhd"), (None, sink))
    for n, (comm, form, offset) in enumerate(cases):
        whole = [x.clone().requires_grad_() for x in batch[:3]]
        window = (9, 0) if n % 2 else None
        out = tandem.attention(*whole, causal=True, window=window, sink=offset)
        expected = gradients(out, batch[3], whole)
        own = shards(plan, r.rank, batch[:3], 1)
        forms = [x.transpose(0, 1) if form == "sbhd" else x for x in own]
        options = {"softmax_type": "vanilla" if offset is None else "learnable", "window_size": window}
        options["softmax_offset"] = None if offset is None else offset.view(1, -1, 1, 1)
        ours = call(*forms, comm, qkv_format=form, **options)
        ours = ours.transpose(0, 1) if form == "sbhd" else ours
        close(ours, plan.shard(out, r.rank, dim=1))
        for x, y in zip(gradients(ours, plan.shard(batch[3], r.rank, dim=1), own), expected):
            close(x, plan.shard(y, r.rank, dim=1))
    lengths = [4 * r.ranks, 2 * r.ranks]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = [x[0, : sum(lengths)] for x in batch[:3]]
    plan = tandem.ContextPlan(lengths, r.ranks, layout="per_document")
    own = [plan.shard(x, r.rank) for x in packed]
    for kind, slopes in (("no_bias", None), ("alibi", torch.tensor([2.0 ** (-2 * n) for n in (1, 2, 3, 4)]))):
        out = tandem.attention(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, alibi_slopes=slopes)
        ours = call(*own, cu=cu, qkv_format="thd", attn_mask_type="padding_causal", attn_bias_type=kind)
        close(ours, plan.shard(out, r.rank))
    own = [x[None] for x in own]
    expect_error(tandem.Unsupported, "cp_comm_type ('a2a+p2p') must be one of p2p", call, *own, "a2a+p2p")
    expect_error(tandem.Unsupported, "fp8 (True) is not served", call, *own, fp8=True)
    expect_error(tandem.Unsupported, "must have no padding", call, *own, attn_mask_type="padding")
    expect_error(ValueError, "softmax_offset must be given", call, *own, softmax_type="learnable")


def case_transformer_engine_biases(r):
    """Rows of a bias are the rank's queries, and its columns are all keys."""
    length, call = 8 * r.ranks, transformer_engine
    batch = dense(r, length)
    plan = tandem.ContextPlan([length], r.ranks, layout="per_document")
    own = shards(plan, r.rank, batch[:3], 1)
    shapes = itertools.product((1, BATCH), (1, HEADS))
    for (comm, form), shape in zip(
        itertools.product(("p2p", "all_gather", "a2a"), ("bshd", "sbhd")), [*shapes, *shapes]
    ):
        whole = [x.clone().requires_grad_() for x in (*batch[:3], r.random(*shape, length, length, seed=8))]
        out = tandem.attention(*whole[:3], causal=True, bias=whole[3], softcap=4)
        expected = gradients(out, batch[3], whole)
        (bias,) = shards(plan, r.rank, [whole[3].detach()], 2)
        forms = [x.transpose(0, 1) if form == "sbhd" else x for x in own]
        given = {"attn_bias_type": "post_scale_bias", "attn_bias": bias, "softcap": 4.0, "use_fused_attention": True}
        ours = call(*forms, comm, qkv_format=form, **given)
        ours = ours.transpose(0, 1) if form == "sbhd" else ours
        close(ours, plan.shard(out, r.rank, dim=1))
        found = gradients(ours, plan.shard(batch[3], r.rank, dim=1), (*own, bias))
        for n, (x, y) in enumerate(zip(found, expected)):
            close(x, plan.shard(y, r.rank, dim=2 if n == 3 else 1))
    row = r.random(1, 1, 1, length, seed=9)
    given = {"attn_bias_type": "post_scale_bias", "attn_bias": row, "attn_mask_type": "no_mask"}
    close(call(*own, **given), plan.shard(tandem.attention(*batch[:3], bias=row), r.rank, dim=1))
    for heads, slopes in ((HEADS, [2.0 ** (-2 * n) for n in (1, 2, 3, 4)]), (3, [2**-4, 2**-8, 2**-2])):
        q, k = batch[0][:, :, :heads], batch[1][:, :, :1]
        out = tandem.attention(q, k, k, alibi_slopes=torch.tensor(slopes))
        parts = (plan.shard(x, r.rank, dim=1) for x in (q, k, k))
        close(call(*parts, attn_bias_type="alibi", attn_mask_type="no_mask"), plan.shard(out, r.rank, dim=1))
    given["attn_bias"] = row.clone().requires_grad_()
    expect_error(tandem.Unsupported, "attn_bias of one row must not require", call, *own, **given)
    given["attn_bias"] = row[..., :-1]
    expect_error(ValueError, "attn_bias (shape (1, 1, 1,", call, *own, **given)
    given["attn_bias"] = None
    expect_error(ValueError, "attn_bias must be given with", call, *own, **given)
    given.update(attn_bias=row, attn_bias_type="pre_scale_bias")
    expect_error(tandem.Unsupported, "multiply attn_bias by softmax_scale", call, *own, **given)
    given.update(attn_bias_type="post_scale_bias", qkv_format="thd")
    expect_error(tandem.Unsupported, "attn_bias must be None with qkv_format 'thd'", call, *own, **given)
    strategy = {"load_balancing_strategy": "NO_LOAD_BALANCE"}
    expect_error(tandem.Unsupported, "load_balancing_strategy (NO_LOAD_BALANCE)", call, *own, **strategy)


class Model(torch.nn.Module):
    """One layer of attention with a residual, by torch's function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def case_torch_context_parallel(r):
    """A training step under torch's names, also with a length that does not divide."""
    mesh = init_device_mesh("cpu", (r.ranks,))
    for length, rotation in ((8 * r.ranks, "allgather"), (8 * r.ranks + 3, "alltoall")):
        model, x, target = Model(), r.random(BATCH, length, 32, seed=1), r.random(BATCH, length, 32, seed=2)
        out = model(x)
        (out - target).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        before = x.clone(), F.scaled_dot_product_attention
        torch_context_parallel.set_rotate_method(rotation)
        with torch_context_parallel.context_parallel(
            mesh, buffers=(x, target), buffer_seq_dims=(1, 1), no_restore_buffers={target}
        ):
            ours = model(x)
            (ours - target).square().sum().backward()
            (whole,) = torch_context_parallel.context_parallel_unshard(mesh, [ours], [1])
            expect_error(
                tandem.Unsupported,
                "attn_mask is not served",
                F.scaled_dot_product_attention,
                *[x[:, None]] * 3,
                attn_mask=x,
            )
        assert torch.equal(x, before[0]) and F.scaled_dot_product_attention is before[1]
        assert target.shape[1] < length
        close(whole, out.detach())
        for p, y in zip(model.parameters(), expected):
            torch.distributed.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, y, atol=1e-3, rtol=1e-4)


def case_torch_shards(r):
    """The shards equal the shards of torch's context_parallel."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (r.ranks,))
    x = r.random(BATCH, 8 * r.ranks, 32, seed=1)
    own = []
    for manager in (context_parallel, torch_context_parallel.context_parallel):
        with manager(mesh, buffers=[x], buffer_seq_dims=[1]):
            own.append(x.clone())
    assert torch.equal(*own)


CASES = [function for name, function in list(globals().items()) if name.startswith("case_")]
