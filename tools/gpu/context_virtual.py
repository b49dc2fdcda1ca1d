#!/usr/bin/env python3
"""Checks context parallelism with the kernels of a virtual GPU: ranks are threads, and messages go through queues.

    tools/gpu/context_virtual.py [vgpu:h200] [--quick]

The program needs torch, NVRTC, and a tandem package that finds libtandem_vgpu.so (TANDEM_VGPU_LIBRARY). All cases take
about seven minutes on two cores, most of it for compiling kernels. The errors against float64 may be twice the errors
of one rank. With chunks the bits must be the bits of one rank. Exits 1 if a case is wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import sys
import threading
import traceback

os.environ["TANDEM_PYTHON_BOUNDARY"] = "ctypes"  # with ctypes the context of a call can be chosen

import torch
from context_parallel import exact

import tandem
from tandem import (
    _binding,
    _context_chunks,
    _context_copies,
    _context_execution,
    _context_heads,
    _context_parallel,
    _context_torch_call,
    _ctypes,
    _score_mod,
)

QUEUES: dict[tuple[int, int], queue.Queue] = {}
NUMBERS = threading.local()  # the thread's rank
CPU = _ctypes._context


class QueueMessages:
    """Takes the place of Messages."""

    on_gpu = False

    def __init__(self, _, sends, receives) -> None:
        self.receives = receives
        for peer, x in sends:
            QUEUES.setdefault((NUMBERS.rank, peer), queue.Queue()).put(x.clone())

    def wait(self) -> None:
        for peer, x in self.receives:
            x.copy_(QUEUES.setdefault((peer, NUMBERS.rank), queue.Queue()).get(timeout=300))


def open_device(name: str) -> None:
    """Runs all calls on that device, one at a time."""
    context, lock = ctypes.c_void_p(), threading.Lock()
    options = _ctypes._ContextOptions(size=ctypes.sizeof(_ctypes._ContextOptions), device=name.encode())
    if _ctypes._library.tandem_context_create(options, ctypes.byref(context)) != 0:
        raise SystemExit(_ctypes.last_error())
    _ctypes._context = lambda: context
    _context_execution.Messages = QueueMessages

    def one_at_a_time(function):
        def call(*arguments):
            with lock:
                return function(*arguments)

        return call

    _binding.call, _binding.merge = one_at_a_time(_binding.call), one_at_a_time(_binding.merge)


def in_groups() -> None:
    """Messages have several groups of heads too, in the calls that copies serve."""
    alone = _context_heads._Exchange._fast_parts

    def fast_parts(self, heads, wires, _):
        return alone(self, heads, wires, self.plan.chunk == 0 and not self.execution.is_dense)

    _context_heads._Exchange._fast_parts = fast_parts
    _context_copies.PARTS, _context_copies.LEAST_BYTES, _context_copies.LEAST_SECONDS = (1, 1), 1, 0


def learned(options: dict) -> list:
    """Returns score_mod's tensors that need gradients."""
    return [x for x in _score_mod.tensors_of(options.get("score_mod")) if x.requires_grad]


def exact_on_cpu(lens, batch, options: dict, captured: list) -> list:
    """Returns out, dq, dk, dv and gradients of captured tensors by the library's float64 loops. With a bias the batch
    is one document.
    """
    q, k, v, dout = (x.double().requires_grad_() for x in batch)
    cu = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    chosen, _ctypes._context = _ctypes._context, CPU
    if "bias" in options:
        options = {**options, "bias": options["bias"][None].double()}
        out = tandem.attention(*(x[None] for x in (q, k, v)), **options)[0]
    else:
        out = tandem.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    gradients = torch.autograd.grad(out, (q, k, v, *captured), dout.detach())
    _ctypes._context = chosen
    return [out.detach(), *gradients]


def run(plan, batch, execution: str, mods: dict) -> list:
    """Returns out, dq, dk, dv and gradients of captured tensors of each rank, or its exception."""
    results: list = [None] * plan.ranks
    QUEUES.clear()
    options = {"softmax_scale": batch[0].shape[-1] ** -0.5, "softcap": 0.0, "alibi_slopes": None, **mods}
    whole_bias = options.pop("bias", None)

    def body(rank: int) -> None:
        NUMBERS.rank = rank
        try:
            q, k, v, dout = (plan.shard(x.detach(), rank, keys=keys) for x, keys in zip(batch, (0, 1, 1, 0)))
            call = _context_torch_call.TorchCall(plan, rank, object(), execution, options)
            bias = None if whole_bias is None else plan.shard(whole_bias, rank, dim=1)
            inputs = {"q": q, "k": k, "v": v, "bias": bias}
            out, lse, kept = call.forward(inputs, None)
            dbias = None if bias is None else torch.empty_like(bias)
            tensors = {**inputs, "out": out, "lse": lse, "dout": dout, "dlse": None, "kept": kept}
            gradients = call.backward(tensors, None, dbias, [True for _ in learned(options)])
            results[rank] = [out, *gradients[:3], *gradients[4:]]
        except Exception as error:
            traceback.print_exc()
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(plan.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def is_right(plan, results: list, one: list, truth: list) -> bool:
    if any(isinstance(x, Exception) for x in results):
        return False
    right = True
    for (rank, own), n in itertools.product(enumerate(results), range(len(one))):
        x, whole, expected = own[n], one[n], truth[n]
        if n < 4:  # captured tensors are whole on every rank
            whole, expected = (plan.shard(part, rank) for part in (whole, expected))
        if x.numel() == 0:
            continue
        allowed = max(2 * (one[n].double() - truth[n]).abs().max().item(), 4e-3)
        right = right and (x.double() - expected).abs().max().item() <= allowed
        right = right and (
            plan.chunk == 0 or torch.equal(*(part.contiguous().view(torch.uint8) for part in (x, whole)))
        )
    return right


def main() -> int:
    arguments = [x for x in sys.argv[1:] if not x.startswith("--")]
    quick = "--quick" in sys.argv
    open_device(arguments[0] if arguments else "vgpu:h200")
    generator, wrong = torch.Generator().manual_seed(1), 0
    _context_chunks._LARGE = 1 << 12  # small problems have large steps too
    in_groups()
    by_position = {"mask_mod": _context_parallel._bound("k <= q", "mask_mod")}
    documents, causal = [330, 0, 1, 150], {"causal": True}
    # Lengths, the mask of the plan, the whole mask, and expressions.
    masks = [([600], causal, causal, {}), (documents, {}, causal, by_position)]
    masks += [(documents, {**causal, "window": (100, None)}, {**causal, "window": (100, None)}, {})]
    masks += [(documents, causal, causal, {"dropout_p": 0.25, "seed": (5, 2)})]
    masks += [([300], causal, causal, {"bias": torch.randn((1, 300, 300), generator=generator)})]
    table = torch.randn((8, 300), generator=generator).requires_grad_()
    scaled = tandem.Mod("score + table[head, q] * t[k % 4]", table=table, t=torch.randn(4, requires_grad=True))
    bound = {"score_mod": _context_parallel._bound(scaled, "score_mod")}
    masks += [([300], causal, {**causal, "score_mod": scaled}, bound)]
    text = "(q // 128 + k // 128) % 2 == 0 and (q + k) % 5 > 0"
    blocks = {"blocks": tandem.Blocks.of(text, 300, 300)}
    masks += [([300], blocks, {"mask_mod": text}, {"mask_mod": _context_parallel._bound(text, "mask_mod")})]
    cases = itertools.product([(2, 2), (8, 4)], masks, (0, 80))
    for heads, (lens, mask, whole, mods), chunk in itertools.islice(cases, 4 if quick else None):
        if chunk > 0 and "blocks" in mask:
            continue
        shapes = [(sum(lens), n, 64) for n in (heads[0], heads[1], heads[1], heads[0])]
        batch = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        one = run(tandem.ContextPlan(lens, 1, chunk=chunk, **mask), batch, "gather", mods)[0]
        on_cpu = any(name in mods for name in ("dropout_p", "bias", "score_mod")) or "blocks" in mask
        truth = [] if on_cpu else exact(lens, batch, whole, None, torch.float64, with_lse=False)
        if on_cpu:
            truth = exact_on_cpu(lens, batch, {**mods, **whole}, learned(mods))
        for ranks, execution, layout in ((2, "gather", "balanced"), (3, "ring", "striped"), (2, "heads", "zigzag")):
            layout = "contiguous" if "blocks" in mask else layout  # the striped layout needs a chunk
            plan = tandem.ContextPlan(lens, ranks, chunk=chunk, layout=layout, **mask)
            right = is_right(plan, run(plan, batch, execution, mods), one, truth)
            wrong += not right
            text = f"{heads} heads, {lens}, {', '.join(mask)}, {', '.join(mods) or 'no expression'}, chunk {chunk}, {execution}"
            print(f"{'ok   ' if right else 'WRONG'} {text}, {plan!r}", flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
