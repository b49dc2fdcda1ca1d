"""One rank of the tests of context parallelism: runs all cases in a gloo group, and writes their errors as JSON.

context_parallel_ranks.py <rank> <ranks> <file of the group> <file of the errors>
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
import traceback
from datetime import timedelta
from unittest import mock

import context_copies
import context_drop_ins
import numpy as np
import torch
import torch.distributed as dist
from context_drop_ins import expect_error

import reference
import tandem
from tandem import _context_chunks, _context_heads, _context_parallel

EXECUTIONS = ("gather", "ring", "heads")
LENGTHS = [41, 0, 1, 26]


class Rank:
    """The group, and the group of this rank alone."""

    def __init__(self, rank, ranks, file):
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        self.rank, self.ranks = rank, ranks
        self.alone = [dist.new_group([r]) for r in range(ranks)][rank]

    def random(self, *shape, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(dtype)

    def batch(self, lengths=LENGTHS, heads=(4, 2), dims=(16, 8), dtype=torch.float32):
        """q, k, v, dout and dlse of a packed batch, the same on every rank."""
        total = sum(lengths)
        shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])
        q, k, v, dout = (self.random(total, *shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes))
        return q, k, v, dout, self.random(heads[0], total, seed=9)

    def run(self, plan, batch, rank=None, group=None, attend=tandem.context_parallel, **options):
        """Returns out, lse and the gradients of q, k, v, sink, bias and score_mod's tensors of a rank's shard. bias: of
        all queries.
        """
        rank = self.rank if rank is None else rank
        sink, bias = options.pop("sink", None), options.pop("bias", None)
        sink = None if sink is None else sink.clone().requires_grad_()
        q, k, v, dout = (plan.shard(x, rank) for x in batch[:4])
        inputs = [x.requires_grad_() for x in (q, k, v)] + ([] if sink is None else [sink])
        if bias is not None:
            options["bias"] = plan.shard(bias, rank, dim=1).requires_grad_(bias.dtype != torch.bool)
            inputs += [options["bias"]] if bias.dtype != torch.bool else []
        if isinstance(options.get("score_mod"), tandem.Mod):
            inputs += [x for x in options["score_mod"].bindings.values() if getattr(x, "requires_grad", False)]
        out, lse = attend(*inputs[:3], plan=plan, group=group, sink=sink, return_lse=True, **options)
        loss = (out.float() * dout.float()).sum() + (lse * plan.shard(batch[4], rank, dim=1)).sum()
        return out, lse, *torch.autograd.grad(loss, inputs)


def by_torch(q, k, v, *, plan, group=None, sink=None, bias=None, execution="gather", return_lse=True, **options):
    """The executions on torch tensors, which serve GPUs, on CPU tensors."""
    options = {"softcap": 0.0, "softmax_scale": None, "alibi_slopes": None, **options}
    for name in ("score_mod", "mask_mod"):
        if isinstance(options.get(name), tandem.Mod):
            options[name] = _context_parallel._bound(options[name], name)
    tensors = {"q": q, "k": k, "v": v, "sink": sink, "alibi_slopes": options["alibi_slopes"], "bias": bias}
    return _context_parallel._on_tensors(plan, group, execution, options, tensors)


def exact(batch, dtype, lengths=LENGTHS, sink=None, **options):
    """out, lse and gradients of the whole batch by standard attention."""
    q, k, v, dout, dlse = (x.double().numpy().astype(dtype) for x in batch)
    sink = None if sink is None else sink.numpy()
    results, dsinks, begin = [], [], 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        out, lse = reference.forward(q[rows], k[rows], v[rows], sink=sink, dtype=dtype, **options)
        dq, dk, dv, _, dsink = reference.backward(
            dout[rows], q[rows], k[rows], v[rows], dlse=dlse[:, rows], sink=sink, dtype=dtype, **options
        )
        results.append((out, lse.T, dq, dk, dv))
        dsinks.append(dsink)
    out, lse, *gradients = (np.concatenate(x) for x in zip(*results))
    return out, lse.T, *gradients, *([] if sink is None else [sum(dsinks)])


NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
BIAS_NAMES = (*NAMES[:5], "dbias")


def exact_with_bias(batch, bias, dtype):
    """out, lse and gradients of the whole batch under a causal mask and a bias."""
    q, k, v, dout, dlse = (x.double().numpy().astype(dtype) for x in batch)
    bias, results, begin = bias.numpy().astype(dtype), [], 0
    dbias = np.zeros(bias.shape, dtype)
    for length in LENGTHS:
        rows, keys = slice(begin, begin + length), slice(length)
        begin += length
        options = {"bias": bias[:, rows, keys], "causal": True, "dtype": dtype}
        out, lse = reference.forward(q[rows], k[rows], v[rows], **options)
        dq, dk, dv, gradient, _ = reference.backward(
            dout[rows], q[rows], k[rows], v[rows], dlse=dlse[:, rows], **options
        )
        dbias[:, rows, keys] = gradient.sum(0, keepdims=True) if len(bias) == 1 else gradient
        results.append((out, lse.T, dq, dk, dv))
    out, lse, *gradients = (np.concatenate(x) for x in zip(*results))
    return out, lse.T, *gradients, dbias


def expect_accurate(r, plan, batch, options, mask, lengths=LENGTHS):
    expected, plain = (
        exact(batch, dtype, lengths, sink=options.get("sink"), **mask) for dtype in (np.float64, np.float32)
    )
    for name, ours, one, other in zip(NAMES, r.run(plan, batch, **options), expected, plain):
        if name != "dsink":
            dim = int(name == "lse")
            one, other = (plan.shard(x, r.rank, dim=dim) for x in (one, other))
        reference.hold(ours.detach(), one, other, f"{name}, {options}, {plan!r}")


def case_options(r):
    """Every execution with every option and layout."""
    sink = torch.tensor([0.5, -1, 2, 0])
    masks = [{}, {"causal": True}, {"causal": True, "window": (9, None)}, {"window": (5, 3)}]
    batch = r.batch()
    layouts = ("balanced", "contiguous", "zigzag", "per_document", "striped")
    for n, execution in enumerate(EXECUTIONS):
        for m, mask in enumerate(masks):
            for chunk in (0, 8):
                plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layouts[(n + m + chunk) % 5], chunk=chunk, **mask)
                options = {"execution": execution, "sink": sink if m % 2 else None, "softcap": 3.0 if m == 2 else 0.0}
                expect_accurate(r, plan, batch, options, {**mask, "softcap": options["softcap"]})


def case_torch_options(r):
    """The executions for GPUs with every option and layout."""
    sink = torch.tensor([0.5, -1, 2, 0])
    masks = [{}, {"causal": True}, {"causal": True, "window": (9, None)}, {"window": (5, 3)}, {"window": (-2, 7)}]
    batch = r.batch()
    layouts = ("balanced", "contiguous", "zigzag", "per_document", "striped")
    for n, execution in enumerate(EXECUTIONS):
        for m, mask in enumerate(masks):
            for layout, chunk in ((layouts[(n + m) % 5], 0), (layouts[(n + m + 2) % 5], 0), (layouts[m], 8)):
                plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layout, chunk=chunk, **mask)
                options = {"execution": execution, "sink": sink if m % 2 else None, "softcap": 3.0 if m == 2 else 0.0}
                mask_options = {**mask, "softcap": options["softcap"]}
                expect_accurate(r, plan, batch, {**options, "attend": by_torch}, mask_options)


def case_head_groups(r):
    """Groups of heads, whose messages travel one after the other, have the bits of one group."""
    sink, mask = r.random(16), {"causal": True, "window": (30, None)}
    batch = r.batch(heads=(16, 8))
    for layout, chunk in (("balanced", 0), ("striped", 0), ("zigzag", 8)):
        plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layout, chunk=chunk, **mask)
        options = {"execution": "heads", "sink": sink, "attend": by_torch}
        expected = r.run(plan, batch, **options)
        to_heads = mock.patch.object(_context_heads, "_ToHeads", wraps=_context_heads._ToHeads)
        with mock.patch.object(_context_heads._Exchange, "_fast_parts", return_value=(1, 1)), to_heads as exchanges:
            plan = copy.copy(plan)  # without the parts that the plan has kept
            expect_accurate(r, plan, batch, options, mask)
            assert exchanges.call_count == 2 * 2
            assert all(torch.equal(x, y) for x, y in zip(r.run(plan, batch, **options), expected))


def case_copies(r):
    """Copies to memory that the ranks share have the bits of messages."""
    context_copies.check_bits(r, by_torch)


def case_refused_copies(r):
    """All ranks use messages if one rank does not serve copies."""
    context_copies.check_refusals(r, by_torch)


def case_biases(r):
    """A rank has the bias rows of its queries, for both implementations."""
    batch, wide = r.batch(), max(LENGTHS) + 3
    for heads, execution, attend in itertools.product((1, 4), EXECUTIONS, (tandem.context_parallel, by_torch)):
        bias = r.random(heads, sum(LENGTHS), wide, seed=20)
        expected, plain = ([exact_with_bias(batch, bias, dtype)] for dtype in (np.float64, np.float32))
        for layout, chunk in (("balanced", 0), ("striped", 0), ("zigzag", 8)):
            plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layout, chunk=chunk, causal=True)
            results = r.run(plan, batch, attend=attend, execution=execution, bias=bias)
            for name, ours, one, other in zip(BIAS_NAMES, results, *expected, *plain):
                dim = int(name in ("lse", "dbias"))
                one, other = (plan.shard(x, r.rank, dim=dim) for x in (one, other))
                reference.hold(ours.detach(), one, other, f"{name}, {heads} heads, {execution}, {attend}, {plan!r}")


def captured_tensors(r, dtype=torch.float32):
    """Tensors that a score_mod reads, by absolute positions and heads."""
    shapes = {"t": (), "table": (4, 41), "factor": (41,)}
    tensors = {
        name: r.random(*shape, seed=30 + n, dtype=torch.float64) for n, (name, shape) in enumerate(shapes.items())
    }
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


CAPTURED = "score * t + table[head, q] * factor[k]"
CAPTURED_NAMES = (*NAMES[:5], "dt", "dtable", "dfactor")


def exact_captured(r, batch, dtype):
    """out, lse and gradients of the whole batch under a causal mask and the expression CAPTURED, by autograd."""
    q, k, v, dout, dlse = (x.to(dtype) for x in batch)
    inputs, tensors = [x.clone().requires_grad_() for x in (q, k, v)], captured_tensors(r, dtype)
    results, begin = [], 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        begin += length
        own_q, own_k, own_v = (x[rows].transpose(0, 1) for x in inputs)
        scores = own_q @ own_k.repeat_interleave(2, 0).mT * q.shape[-1] ** -0.5 * tensors["t"]
        scores = scores + tensors["table"][:, :length, None] * tensors["factor"][:length]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse[..., None]) @ own_v.repeat_interleave(2, 0)
        results.append((out.transpose(0, 1), lse.t()))
    out, lse = (torch.cat(x) for x in zip(*results))
    gradients = torch.autograd.grad((out * dout).sum() + (lse.t() * dlse).sum(), [*inputs, *tensors.values()])
    return [x.detach().numpy() for x in (out, lse.t(), *gradients)]


def case_captured_tensors(r):
    """Every rank has the whole gradients of score_mod's tensors. With chunks they have the bits of one rank."""
    batch = r.batch()
    expected, plain = (exact_captured(r, batch, dtype) for dtype in (torch.float64, torch.float32))
    for attend in (tandem.context_parallel, by_torch):
        one = tandem.ContextPlan(LENGTHS, 1, causal=True, chunk=8)
        mod = {"score_mod": tandem.Mod(CAPTURED, **captured_tensors(r))}
        alone = r.run(one, batch, rank=0, group=r.alone, attend=attend, **mod)
        for execution, (layout, chunk) in itertools.product(
            EXECUTIONS, (("balanced", 0), ("striped", 0), ("zigzag", 8))
        ):
            plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layout, chunk=chunk, causal=True)
            results = r.run(plan, batch, attend=attend, execution=execution, **mod)
            for n, (name, ours, x, other) in enumerate(zip(CAPTURED_NAMES, results, expected, plain)):
                whole = [x, other, alone[n].detach()]
                if n < 5:
                    whole = [plan.shard(part, r.rank, dim=int(n == 1)) for part in whole]
                reference.hold(ours.detach(), *whole[:2], f"{name}, {execution}, {attend}, {plan!r}")
                assert chunk == 0 or torch.equal(ours, whole[2]), f"{name}, {execution}, {attend}"
    # A bias of all heads, some of the gradients, and chunks of queries without keys. The four key heads have an order.
    batch, tensors = r.batch(heads=(4, 4)), captured_tensors(r)
    tensors = {"t": tensors["t"].detach(), "f": tensors["factor"]}
    tensors["table"] = captured_tensors(r, torch.bfloat16)["table"]
    options = {"score_mod": tandem.Mod("score * t + table[head, q] * f[k]", **tensors), "bias": r.random(1, 68, 41)}
    for attend in (tandem.context_parallel, by_torch):
        one, plan = (tandem.ContextPlan(LENGTHS, n, window=(-9, 12), chunk=8) for n in (1, r.ranks))
        alone = r.run(one, batch, rank=0, group=r.alone, attend=attend, **options)
        for execution in EXECUTIONS:
            *_, dbias, df, dtable = r.run(plan, batch, execution=execution, attend=attend, **options)
            assert torch.equal(dtable, alone[-1]) and dtable.dtype == torch.bfloat16 and dtable.any()
            assert torch.equal(df, alone[-2]) and df.any()
            assert torch.equal(dbias, plan.shard(alone[-3], r.rank, dim=1))


def case_block_masks(r):
    """Blocks that cross the bounds of shards hide the keys that the same mask hides on one rank."""
    mask = "(q * 5 + k * 3) % 7 < 5 and (q // 8 + k // 4) % 3 > 0"
    blocks = tandem.Blocks.of(mask, 41, 41, BLOCK_SIZE=(8, 4), device="cpu")
    assert int(blocks.kv_num_blocks.sum()) < 50
    batch, cu = r.batch(), torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
    inputs = [x.clone().requires_grad_() for x in batch[:3]]
    whole, lse = tandem.attention(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, mask_mod=mask, return_lse=True)
    gradients = torch.autograd.grad((whole * batch[3]).sum() + (lse * batch[4]).sum(), inputs)
    expected = [x.detach() for x in (whole, lse, *gradients)]
    ways = [(tandem.context_parallel, mask), (by_torch, _context_parallel._bound(mask, "mask_mod"))]
    divisions = ("balanced", 0), ("zigzag", 0), ("striped", 8)
    for execution, (layout, chunk), (attend, mod) in itertools.product(EXECUTIONS, divisions, ways):
        if chunk > 0 and attend is by_torch:
            continue
        plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layout, chunk=chunk, blocks=blocks)
        for n, x in enumerate(r.run(plan, batch, execution=execution, attend=attend, mask_mod=mod)):
            shard = plan.shard(expected[n], r.rank, dim=int(n == 1))
            torch.testing.assert_close(x.detach(), shard, atol=2e-5, rtol=1e-4)
    # Without mask_mod the listed blocks are visible whole.
    plans = [tandem.ContextPlan(LENGTHS, r.ranks, layout="contiguous", blocks=x) for x in (None, blocks)]
    by_mod = r.run(plans[0], batch, execution="ring", mask_mod="(q // 8 + k // 4) % 3 > 0")
    for attend, _ in ways:
        for x, y in zip(by_mod, r.run(plans[1], batch, execution="ring", attend=attend)):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)
    plan = tandem.ContextPlan([8], 1, chunk=8, blocks=blocks)
    x = r.random(8, 2, 8)
    with_chunk = {"plan": plan, "group": r.alone}
    expect_error(tandem.Unsupported, "plan.blocks must be None with a chunk", by_torch, x, x, x, **with_chunk)


def case_bias_bits(r):
    """With chunks a bias leaves the bits of one rank. Columns beyond the keys of a document have the gradient 0."""
    mask = r.random(4, sum(LENGTHS), 41, seed=21) > -1
    for attend, bias in itertools.product(
        (tandem.context_parallel, by_torch), (r.random(1, sum(LENGTHS), 41, seed=20), r.random(4, 68, 41), mask)
    ):
        batch = r.batch()
        one = tandem.ContextPlan(LENGTHS, 1, window=(20, 3), chunk=8)
        expected = r.run(one, batch, rank=0, group=r.alone, attend=attend, bias=bias)
        for execution in EXECUTIONS:
            plan = tandem.ContextPlan(LENGTHS, r.ranks, window=(20, 3), chunk=8, layout="striped")
            results = r.run(plan, batch, execution=execution, attend=attend, bias=bias)
            for name, x, whole in zip(BIAS_NAMES, results, expected):
                whole = plan.shard(whole, r.rank, dim=int(name in ("lse", "dbias")))
                assert torch.equal(x, whole), f"{name}, {execution}, {attend}"
        if bias.dtype != torch.bool:
            assert not expected[-1][:, 41:, 26:].any()


def case_torch_documents(r):
    """Gradients of documents that one rank has are stored without a sum."""
    lengths = [30, 5, 80, 20, 12, 7, 10]
    for mask in ({"causal": True}, {"causal": True, "window": (9, None)}):
        plan = tandem.ContextPlan(lengths, r.ranks, **mask)
        expect_accurate(r, plan, r.batch(lengths), {"attend": by_torch, "execution": "gather"}, mask, lengths)


def case_torch_bits(r):
    """With chunks the executions for GPUs have the bits of one rank. Large steps are calls without packed tensors."""
    sink = torch.tensor([0.5, -1, 2, 0])
    masks = (torch.float32, {"causal": True}), (torch.bfloat16, {"window": (20, 3)})
    for (dtype, mask), _context_chunks._LARGE in itertools.product(masks, (1 << 22, 100)):
        batch = r.batch(dtype=dtype)
        one = tandem.ContextPlan(LENGTHS, 1, chunk=8, **mask)
        options = {"sink": sink, "attend": by_torch, "dropout_p": 0.25 if "window" in mask else 0.0, "seed": 5}
        expected = r.run(one, batch, rank=0, group=r.alone, **options)
        for n, execution in enumerate(EXECUTIONS):
            layout = ("balanced", "striped", "contiguous")[n]
            plan = tandem.ContextPlan(LENGTHS, r.ranks, chunk=8, layout=layout, **mask)
            results = r.run(plan, batch, execution=execution, **options)
            for name, x, whole in zip(NAMES, results, expected):
                if name != "dsink":
                    whole = plan.shard(whole, r.rank, dim=int(name == "lse"))
                assert torch.equal(x, whole), f"{name}, {execution}, {dtype}"


def case_auto(r):
    """The execution that the model chooses has one of the executions' results."""
    batch, plan = r.batch(), tandem.ContextPlan(LENGTHS, r.ranks, causal=True)
    results = [r.run(plan, batch, execution=name)[0] for name in (*EXECUTIONS, "auto")]
    assert any(torch.equal(results[3], x) for x in results[:3])


def case_slopes(r):
    """ALiBi has the slopes of each document."""
    slopes = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0, 0, 0], [1, 1, 1, 1.0], [0.5, 0.25, 0.2, 0.1]])
    batch, cu = r.batch(), torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
    whole = tandem.attention(*batch[:3], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, alibi_slopes=slopes)
    for layout in ("balanced", "striped"):
        plan = tandem.ContextPlan(LENGTHS, r.ranks, causal=True, layout=layout)
        for execution, attend in itertools.product(EXECUTIONS, (tandem.context_parallel, by_torch)):
            out = r.run(plan, batch, execution=execution, alibi_slopes=slopes, attend=attend)[0]
            torch.testing.assert_close(out.detach(), plan.shard(whole, r.rank), atol=1e-5, rtol=1e-5)


def case_mods_and_dropout(r):
    """Expressions and dropout read the positions and heads of the whole batch."""
    table = torch.linspace(-1, 1, 41)
    options = {
        "score_mod": tandem.Mod("score + table[q] - 0.1 * head", table=table),
        "mask_mod": "k <= q + batch",
        "dropout_p": 0.25,
        "seed": (7, 3),
    }
    batch, cu = r.batch(), torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
    inputs = [x.clone().requires_grad_() for x in batch[:3]]
    whole = tandem.attention(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    gradients = torch.autograd.grad((whole * batch[3]).sum(), inputs)
    for execution in EXECUTIONS:
        plan = tandem.ContextPlan(LENGTHS, r.ranks)
        out, _, *own = r.run(plan, (*batch[:4], torch.zeros_like(batch[4])), execution=execution, **options)
        for x, y in zip((out.detach(), *own), (whole.detach(), *gradients)):
            torch.testing.assert_close(x, plan.shard(y, r.rank), atol=2e-5, rtol=1e-4)


def case_torch_mods_and_dropout(r):
    """Expressions and dropout in the executions for GPUs read the positions and heads of the whole batch."""
    table = torch.linspace(-1, 1, 41)
    options = {
        "score_mod": tandem.Mod("d = q - k; score + table[q] - 0.1 * head + 0.01 * d / seqlen_k  # k", table=table),
        "mask_mod": "k <= q + batch or (head + seqlen_q) % 3 == at_",
    }
    options["mask_mod"] = tandem.Mod(options["mask_mod"], at_=1)
    numbers = {"dropout_p": 0.25, "seed": (7, 3)}
    batch, cu = r.batch(), torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
    for chosen in ({**options}, {**options, **numbers}, numbers):
        inputs = [x.clone().requires_grad_() for x in batch[:3]]
        whole, lse = tandem.attention(
            *inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, window=(30, None), return_lse=True, **chosen
        )
        gradients = torch.autograd.grad((whole * batch[3]).sum() + (lse * batch[4]).sum(), inputs)
        bound = {n: _context_parallel._bound(x, n) if n in options else x for n, x in chosen.items()}
        for n, execution in enumerate(EXECUTIONS):
            for layout, chunk in (("balanced", 0), ("striped", 0), (("zigzag", "striped", "contiguous")[n], 8)):
                plan = tandem.ContextPlan(LENGTHS, r.ranks, layout=layout, chunk=chunk, window=(30, None))
                out, own_lse, *own = r.run(plan, batch, execution=execution, attend=by_torch, **bound)
                own_lse, shard = own_lse.detach(), plan.shard(lse.detach(), r.rank, dim=1)
                torch.testing.assert_close(own_lse, shard, atol=2e-5, rtol=1e-4)
                for x, y in zip((out.detach(), *own), (whole.detach(), *gradients)):
                    torch.testing.assert_close(x, plan.shard(y, r.rank), atol=2e-5, rtol=1e-4)


def case_bits(r):
    """With chunks the bits are equal to the bits of one rank, for 16-bit types too."""
    sink = torch.tensor([0.5, -1, 2, 0])
    for dtype in (torch.float32, torch.bfloat16):
        batch = r.batch(dtype=dtype)
        one = tandem.ContextPlan(LENGTHS, 1, causal=True, chunk=8)
        expected = r.run(one, batch, rank=0, group=r.alone, sink=sink)
        for execution in EXECUTIONS:
            plan = tandem.ContextPlan(LENGTHS, r.ranks, causal=True, chunk=8)
            for name, x, whole in zip(NAMES, r.run(plan, batch, execution=execution, sink=sink), expected):
                if name != "dsink":
                    whole = plan.shard(whole, r.rank, dim=int(name == "lse"))
                assert torch.equal(x, whole), f"{name}, {execution}, {dtype}"


def case_shards(r):
    """Shards of all ranks are the batch, with the positions of their rows."""
    plan = tandem.ContextPlan(LENGTHS, r.ranks, layout="zigzag")
    batch = torch.arange(sum(LENGTHS))[None] * torch.tensor([[1], [100]])
    own = plan.shard(batch, r.rank, dim=1)
    assert torch.equal(plan.collect(own, dim=1), batch)
    starts = np.cumsum([0, *LENGTHS])
    rows = starts[plan.documents(r.rank)] + plan.positions(r.rank)
    assert np.array_equal(own[0].numpy(), rows)
    assert np.array_equal(plan.unshard([plan.shard(starts[:1].repeat(68), n) for n in range(r.ranks)]), np.zeros(68))


DISAGREEMENT = "rank 1 must equal the ones of rank 0"


def case_disagreement(r):
    """Another plan or option on one rank is an error on all ranks."""
    batch = r.batch()
    chunk = 4 if r.rank == 1 else 0
    for execution in EXECUTIONS:
        plan = tandem.ContextPlan(LENGTHS, r.ranks, chunk=chunk, layout="contiguous")
        expect_error(ValueError, DISAGREEMENT, r.run, plan, batch, execution=execution)
    plan = tandem.ContextPlan(LENGTHS, r.ranks)
    softcap = 2.0 if r.rank == 1 else 0.0
    expect_error(ValueError, DISAGREEMENT, r.run, plan, batch, softcap=softcap)


def case_wrong_shard(r):
    """A shard with other rows is refused on its rank, and the refusal is an error on all ranks."""
    plan = tandem.ContextPlan(LENGTHS, r.ranks)
    q = plan.shard(r.random(68, 2, 8), r.rank)
    wrong = torch.cat((q, q)) if r.rank == 1 else q
    part = f"q rows ({len(wrong)}) must be the {len(q)} of rank 1" if r.rank == 1 else "rank 1 refused the call"
    expect_error(ValueError, part, tandem.context_parallel, wrong, wrong, wrong, plan=plan)


def case_refusals(r):
    """Arguments that one rank can judge have a sentence."""
    plan = tandem.ContextPlan([8], 1)
    x = r.random(8, 2, 8)

    def call(*tensors, **options):
        return lambda: tandem.context_parallel(*tensors, **{"plan": plan, "group": r.alone, **options})

    expect_error(TypeError, "plan (NoneType) must be a tandem.ContextPlan", call(x, x, x, plan=None))
    expect_error(ValueError, "execution ('best') must be one of gather", call(x, x, x, execution="best"))
    expect_error(ValueError, "q (4 dimensions) must be (rows, heads, head_dim)", call(x[None], x, x))
    expect_error(ValueError, "bias (2 dimensions) must be (heads, rows, keys)", call(x, x, x, bias=torch.ones(8, 8)))
    for shape, sentence, other in (
        ((3, 8, 8), "bias.heads (3) must be 1", "bias.shape[0] (3) must be 1"),
        ((1, 1, 8), "bias.seqlen_q (1) must equal the 8", "bias.shape[1] (1) must be the 8"),
        ((1, 8, 7), "bias.seqlen_k (7) must be at least 8", "bias.shape[2] (7) must be at least the 8"),
    ):
        with_bias = {"plan": plan, "group": r.alone, "bias": torch.ones(shape)}
        expect_error(ValueError, sentence, tandem.context_parallel, x, x, x, **with_bias)
        expect_error(ValueError, other, by_torch, x, x, x, **with_bias)
    expect_error(TypeError, "k (str) must be a torch tensor", call(x, "k", x))
    expect_error(tandem.Unsupported, "q.dtype (float64) must be", call(*[x.double()] * 3))
    expect_error(tandem.Unsupported, "q (meta) must be on a CPU or a GPU", call(*[x.to("meta")] * 3))
    expect_error(ValueError, "alibi_slopes.shape[0] (3) must be", call(x, x, x, alibi_slopes=torch.ones(3, 2)))
    expect_error(ValueError, "seed (None) must be an integer or two", call(x, x, x, dropout_p=0.5))
    learned = tandem.Mod("t[head] > 0", t=torch.zeros(2, requires_grad=True))
    expect_error(tandem.Unsupported, "mask_mod's tensors must not require", call(x, x, x, mask_mod=learned))
    expect_error(TypeError, "softcap ('a') must be a number", call(x, x, x, softcap="a"))
    other = tandem.ContextPlan([8], r.ranks + 1)
    expect_error(ValueError, "transport.ranks", call(x, x, x, plan=other, group=None))


def case_second_derivatives(r):
    """The gradient has no derivative. By heads the backward needs no q, k and v, but knows their graphs."""
    plan = tandem.ContextPlan([20], r.ranks)
    for attend, execution in itertools.product((tandem.context_parallel, by_torch), EXECUTIONS):
        q, k, v = (plan.shard(r.random(20, 4, 8, seed=n), r.rank).requires_grad_() for n in range(3))
        out, _ = attend(q, k, v, plan=plan, execution=execution, return_lse=True)
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        for x in (k, v):
            second = functools.partial(torch.autograd.grad, gradient.sum(), x, retain_graph=True)
            expect_error(tandem.Unsupported, "second derivative", second)


def case_decode(r):
    """Few queries attend to keys that the ranks share. Some ranks have no key of a sequence."""
    total, rows, page = torch.tensor([17, 1, 6, 40], dtype=torch.int32), 40 // r.ranks, 4
    sink = torch.tensor([0.5, -1, 2, 0])
    k, v = r.random(4, 40, 2, 16, seed=1), r.random(4, 40, 2, 8, seed=2)
    own = {
        "interleaved": [x[:, r.rank :: r.ranks] for x in (k, v)],
        "contiguous": [x[:, r.rank * rows : (r.rank + 1) * rows] for x in (k, v)],
    }
    # The pages of the sequences, from the last one to the first.
    pages = rows // page if rows % page == 0 else 0
    table = torch.arange(4 * pages, dtype=torch.int32).flip(0).view(4, pages) if pages else None
    for seqlen in (1, 3):
        q = r.random(4, seqlen, 4, 16, seed=3)
        for causal in (True, False):
            options = {"causal": causal, "softcap": 5.0, "sink": sink}
            whole = tandem.attention(q, k, v, seqused_k=total, return_lse=True, **options)
            for layout, (k_own, v_own) in own.items():
                call = {"total_k": total, "layout": layout, "return_lse": True, **options}
                results = [tandem.context_parallel_decode(q, k_own, v_own, **call)]
                if table is not None:
                    paged = [x.reshape(4 * pages, page, *x.shape[2:]).flip(0) for x in (k_own, v_own)]
                    results.append(tandem.context_parallel_decode(q, *paged, page_table=table, **call))
                for result in results:
                    for x, y in zip(result, whole):
                        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)
                        gathered = [torch.empty_like(x) for _ in range(r.ranks)]
                        dist.all_gather(gathered, x)
                        assert all(torch.equal(x, other) for other in gathered)
    with torch.no_grad():
        half = tandem.context_parallel_decode(*(x.bfloat16() for x in (q, *own["contiguous"])), **call, group=None)
    assert half[0].dtype == torch.bfloat16
    expect_error(
        ValueError,
        "layout ('best') must be one of interleaved",
        tandem.context_parallel_decode,
        q,
        k,
        v,
        total_k=total,
        layout="best",
    )
    expect_error(ValueError, "total_k (torch.int64", tandem.context_parallel_decode, q, k, v, total_k=total.long())
    learned = q.clone().requires_grad_()
    expect_error(tandem.Unsupported, "q must not require", tandem.context_parallel_decode, learned, k, v, total_k=total)


def case_lost_rank(r):
    """The last case: the last rank leaves, and the other ranks end in torch's error."""
    plan = tandem.ContextPlan(LENGTHS, r.ranks)
    batch = r.batch()
    r.run(plan, batch)
    if r.rank == r.ranks - 1:
        return
    expect_error(RuntimeError, "", lambda: [r.run(plan, batch, execution="ring") for _ in range(3)])


CASES = [function for name, function in list(globals().items()) if name.startswith("case_")]
CASES[-1:-1] = context_drop_ins.CASES  # before the lost rank


def main(rank, ranks, group, errors):
    torch.set_num_threads(1)
    r = Rank(int(rank), int(ranks), group)
    results = {}
    for case in CASES:
        try:
            case(r)
            results[case.__name__] = ""
        except Exception:
            results[case.__name__] = traceback.format_exc()
            if case is not case_lost_rank:
                break  # the other ranks may wait for this rank
    with open(errors, "w") as file:
        json.dump(results, file)
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
