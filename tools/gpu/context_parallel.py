#!/usr/bin/env python3
"""Checks and times context parallelism on the GPUs of one machine, next to torch's own.

    tools/gpu/context_parallel.py [--ranks 2] [--only check,options,copies,times,...] [--out ranks.json] [--cpu]

The program needs torch with CUDA and NCCL, and tandem installed. The program starts one process for each GPU. NVLink multicast
stays off.

check: every execution, forward and gradients, for masks, layouts, packed documents, grouped heads and sinks. Errors
against float64 may be twice the errors of one GPU. With chunks the bits must be the bits of one rank.
options: the same for bias, block masks, dropout, and a score_mod with gradients of its tensors. The library's CPU kernels
compute the float64 results.
copies: by heads, copies between GPUs must have the bits of NCCL's messages. transports: the times of both.
graphs: forwards as a captured graph.
times: causal, 32 heads of 128, bfloat16, forward and backward together. efficiency = time of one GPU / (ranks * time).
breakdown: the kernels of both passes by torch's profiler. Prints the milliseconds of attention, merges, copies and
sums, messages, and those in which the stream of attention is idle. The file has every kernel of rank 0.
peer: torch's context_parallel with cuDNN's attention, for the same problem.
--cpu runs the same program over gloo at tiny sizes, to try it. Prints one line a case; exits 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import time
import traceback

os.environ["NCCL_NVLS_ENABLE"] = "0"

import kernel_times
import torch
import torch.distributed as dist
import torch.multiprocessing

HEADS, HEAD_DIM = 32, 128
EXECUTIONS = ("gather", "ring", "heads")
STEPS = ("check", "options", "copies", "times", "transports", "graphs", "breakdown", "peer")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(STEPS), type=lambda x: x.split(","))
    parser.add_argument("--tokens", default="16384,65536", type=lambda x: [int(n) for n in x.split(",")])
    parser.add_argument("--seconds", type=float, default=130, help="further cases are left out after this time")
    parser.add_argument("--out", help="file of the lines as JSON")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


class Rank:
    """One process of the group."""

    def __init__(self, rank: int, ranks: int, port: int, arguments: argparse.Namespace) -> None:
        self.rank, self.ranks, self.arguments = rank, ranks, arguments
        self.cpu, self.start = arguments.cpu, time.perf_counter()
        self.lines: list[dict] = []
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if self.cpu:
            torch.set_num_threads(1)
            self.device = torch.device("cpu")
            dist.init_process_group("gloo", rank=rank, world_size=ranks)
        else:
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks, device_id=self.device)
        import tandem

        self.tandem = tandem

    def late(self, part: float = 1) -> bool:
        """Returns True on all ranks if rank 0 has used this part of the time."""
        late = time.perf_counter() - self.start > part * self.arguments.seconds
        late = torch.tensor([float(late)], device=self.device)
        dist.broadcast(late, 0)
        return bool(late.item())

    def say(self, text: str, **line) -> None:
        self.lines.append(line)
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.start:5.1f} s] {text}", flush=True)

    def worst(self, *values: float) -> list[float]:
        """Returns the largest values of all ranks."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.tolist()

    def sync(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()

    def random(self, *shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype)

    def attend(self, qkv, plan, execution="gather", sink=None, group=None):
        """tandem.context_parallel; with --cpu, the executions that serve GPUs."""
        if not self.cpu:
            return self.tandem.context_parallel(
                *qkv, plan=plan, execution=execution, sink=sink, group=group, return_lse=True
            )
        from tandem import _context_parallel

        given = {"softcap": 0.0, "softmax_scale": None, "alibi_slopes": None}
        tensors = {**dict(zip("qkv", qkv)), "sink": sink, "alibi_slopes": None, "bias": None}
        return _context_parallel._on_tensors(plan, group, execution, given, tensors)

    def both(self, plan, batch, execution="gather", sink=None, group=None, rank=None):
        """Returns out, lse, and the gradients of q, k, v and sink of the rank's shard."""
        rank = self.rank if rank is None else rank
        q, k, v, dout = (plan.shard(x, rank, keys=keys) for x, keys in zip(batch, (False, True, True, False)))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        inputs += [] if sink is None else [sink.clone().requires_grad_()]
        own_sink = None if sink is None else inputs[3]
        out, lse = self.attend(inputs[:3], plan, execution, own_sink, group)
        loss = (out.float() * dout.float()).sum() + lse.square().sum() * 1e-3
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def exact(lens, batch, mask, sink, dtype, with_lse=True):
    """Standard attention of packed documents in a type, with gradients of out, and of lse with with_lse."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in batch[:3]]
    logits = None if sink is None else sink.detach().to(dtype).requires_grad_()
    outs, lses, begin = [], [], 0
    for n in lens:
        q, k, v = (x[begin : begin + n].transpose(0, 1) for x in inputs)
        begin += n
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        distance = torch.arange(n, device=q.device)[None] - torch.arange(n, device=q.device)[:, None]
        left, right = mask.get("window") or (None, None)
        right = 0 if mask.get("causal") else right
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left is not None:
            hidden |= distance < -left
        if right is not None:
            hidden |= distance > right
        scores = scores.masked_fill(hidden, -torch.inf)
        whole = scores if logits is None else torch.cat((scores, logits[:, None, None].expand(-1, n, 1)), -1)
        lses.append(whole.logsumexp(-1))
        outs.append((torch.exp(scores - lses[-1][..., None]).to(dtype) @ v).transpose(0, 1))
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    loss = (out * batch[3].to(dtype)).sum() + (lse.square().sum() * 1e-3 if with_lse else 0)
    gradients = torch.autograd.grad(loss, [*inputs, *([] if logits is None else [logits])])
    return [out.detach(), *([lse.detach()] if with_lse else []), *gradients]


def check(r: Rank) -> None:
    """The 2x rule: the error against float64 is at most twice the error of one rank, and small numbers count as 1."""
    size = 8 if r.cpu else 128
    lens_list = [[11 * size + 3], [5 * size, 0, 1, 4 * size + 7, size]]
    masks = [{"causal": True}, {"causal": True, "window": (2 * size + 5, None)}, {"window": (size, size // 2)}]
    masks += [{}] if r.cpu else []  # fewer kernels to compile
    layouts = ("balanced", "contiguous", "zigzag", "per_document", "striped")
    heads = (8, 2) if not r.cpu else (4, 2)
    cases = itertools.product(lens_list, enumerate(masks), EXECUTIONS, (0, 4 * size))
    dtype = torch.float32 if r.cpu else torch.bfloat16
    for n, (lens, (m, mask), execution, chunk) in enumerate(cases):
        if r.late(0.5):
            r.say(f"check: no time left after {n} cases")
            return
        total, dim = sum(lens), 16 if r.cpu else HEAD_DIM
        shapes = [(total, heads[0], dim), (total, heads[1], dim), (total, heads[1], dim), (total, heads[0], dim)]
        batch = [r.random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
        sink = r.random(heads[0], seed=9, dtype=torch.float32) if m % 2 else None
        # Layouts of chunks rotate in another order than executions.
        layout = layouts[(n + n // 6) % 5]
        plan = r.tandem.ContextPlan(lens, r.ranks, layout=layout, chunk=chunk, **mask)
        one = r.tandem.ContextPlan(lens, 1, chunk=chunk, **mask)
        ours = r.both(plan, batch, execution, sink)
        alone = r.both(one, batch, "gather", sink, group=r.alone, rank=0)
        truth = exact(lens, batch, mask, sink, torch.float64)
        errors, allowed, same = [], [], True
        for name, x, y, z in zip(NAMES, ours, alone, truth):
            shard = (lambda t: t) if name == "dsink" else lambda t: plan.shard(t, r.rank, dim=int(name == "lse"))
            keys = name in ("dk", "dv")
            if keys:
                shard = lambda t: plan.shard(t, r.rank, keys=True)
            errors.append(error_of(x, shard(z)))
            allowed.append(error_of(y, z))
            same = same and torch.equal(x, shard(y))
        judge(r, f"check {len(lens)} documents, {mask}, {execution}, {layout}, chunk {chunk}", errors, allowed, same, chunk)


def judge(r: Rank, text: str, errors: list, allowed: list, same: bool, chunk: int) -> None:
    """Prints whether errors are at most twice one rank's errors. With chunks the bits must be one rank's."""
    errors, allowed = r.worst(*errors), r.worst(*allowed)
    floor = 1e-6 if r.cpu else 4e-3
    right = all(a <= max(2 * b, floor) for a, b in zip(errors, allowed))
    same = r.worst(float(not same))[0] == 0
    right = right and (same or chunk == 0)
    worst = max(a / max(b, floor / 2) for a, b in zip(errors, allowed))
    r.say(f"{'ok   ' if right else 'WRONG'} {text}: error {worst:.2f} of one rank's, equal bits: {same}",
          case=text, right=right, error=worst, same=same)


def error_of(x, truth) -> float:
    if x.numel() == 0:
        return 0.0
    if not torch.isfinite(x).all():
        return 1e30
    x, truth = x.detach(), truth.detach()
    return float(((x.double() - truth.double()).abs() / truth.double().abs().clamp(min=1)).max())


def milliseconds(r: Rank, function, calls: int) -> float:
    """The median of several rounds, of the slowest rank."""
    rounds = []
    for n in range(4 if not r.cpu else 2):
        r.sync()
        dist.barrier(r.host)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        r.sync()
        if n > 0:
            rounds.append(1e3 * (time.perf_counter() - start) / calls)
    return r.worst(statistics.median(rounds))[0]


def training(r: Rank, attend, inputs, dout):
    """A forward with its backward. inputs: q, k and v."""

    def both():
        torch.autograd.grad(attend(*inputs), inputs, dout)

    return both


def inputs_of(r: Rank, rows: tuple[int, int], heads: tuple[int, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns q, k and v, and dout."""
    shapes = [(rows[n in (1, 2)], heads[n in (1, 2)], dim_of(r)) for n in range(4)]
    q, k, v, dout = (r.random(*shape, seed=n) for n, shape in enumerate(shapes))
    return [x.requires_grad_() for x in (q, k, v)], dout


def one_gpu(r: Rank, lens: list[int], heads: tuple[int, int], window) -> tuple[float, float]:
    """The times of tandem.attention on all tokens: forward, and both passes."""
    tokens, packed = sum(lens), {}
    (q, k, v), dout = inputs_of(r, (tokens, tokens), heads)
    if len(lens) == 1:
        q, k, v, dout = (x.detach()[None].requires_grad_(x is not dout) for x in (q, k, v, dout))
    else:
        ends = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=r.device)
        packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lens), "max_seqlen_k": max(lens)}

    def attend(q, k, v):
        return r.tandem.attention(q, k, v, causal=True, window=window, **packed)

    calls = calls_of(r, tokens)
    with torch.no_grad():
        forward = milliseconds(r, lambda: attend(q, k, v), calls)
    return forward, milliseconds(r, training(r, attend, (q, k, v), dout), calls)


def heads_of(r: Rank) -> int:
    return 2 if r.cpu else HEADS


def dim_of(r: Rank) -> int:
    return 16 if r.cpu else HEAD_DIM


def calls_of(r: Rank, tokens: int) -> int:
    return 1 if r.cpu else max(2, 10 * 16384 // tokens)


def groups_of(r: Rank) -> list[tuple[str, object, int, int]]:
    """Groups with a name, the multiprocessors that attention leaves to their messages, and the messages' head start."""
    if r.cpu:
        return [("gloo", None, 0, 0)]
    groups = {}
    for ctas in (0, 16):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if ctas:
            options.config.max_ctas = ctas
        groups[ctas] = dist.new_group(list(range(r.ranks)), backend="nccl", pg_options=options)
    found = []
    for ctas, spare, start in ((0, 0, 15_000), (0, 0, 0), (0, 0, 40_000), (0, 16, 15_000), (0, 32, 15_000), (16, 16, 0)):
        name = f"max_ctas {ctas or 'default'}, {spare} SMs spared, head start {start}"
        found.append((name, groups[ctas], spare, start))
    return found


class Timing:
    """Times of context parallelism and of one GPU."""

    def __init__(self, r: Rank) -> None:
        self.r, self.alone, self.group = r, {}, ("", None, 0, 0)

    def measure(self, lens: list[int], execution: str = "gather", chunk: int = 0, window=None, heads=None) -> float:
        """Returns the time of both passes."""
        from tandem import _context_execution, _context_torch_call

        r, tokens, heads = self.r, sum(lens), heads or (heads_of(self.r),) * 2
        key = tuple(lens), heads, window
        if key not in self.alone:
            self.alone[key] = one_gpu(r, lens, heads, window)
        name, group, _context_torch_call.SPARE_SMS, _context_execution.HEAD_START = self.group
        plan = r.tandem.ContextPlan(lens, r.ranks, causal=True, window=window, chunk=chunk)
        inputs, dout = inputs_of(r, plan.rows(r.rank), heads)

        def attend(q, k, v):
            return r.attend((q, k, v), plan, execution, group=group)[0]

        with torch.no_grad():
            forward = milliseconds(r, lambda: attend(*inputs), calls_of(r, tokens))
        both = milliseconds(r, training(r, attend, inputs, dout), calls_of(r, tokens))
        what = f"{tokens} tokens" if len(lens) == 1 else f"{len(lens)} documents of {tokens} tokens"
        case = f"{what}, {heads[0]}/{heads[1]} heads, window {window}, {execution}, chunk {chunk}, {name}"
        report(r, case, (forward, both), self.alone[key])
        _context_torch_call.SPARE_SMS = 0
        return both


def times(r: Rank) -> None:
    timing, found = Timing(r), []
    lengths = r.arguments.tokens if not r.cpu else [64, 128]
    longest = lengths[-1]
    for group in groups_of(r):
        timing.group = group
        if group[3] == 0:
            links(r, group)
        found.append((timing.measure([lengths[0]]), len(found), group))
    timing.group = min(found)[2]
    r.say(f"further times with {timing.group[0]}")
    cases = [{"lens": [n]} for n in lengths[1:]]
    cases += [{"lens": [n], "execution": name} for n in lengths for name in ("heads", "ring")]
    documents = documents_of(lengths[0] * r.ranks // 2)
    for name in ("gather", "heads"):
        cases.append({"lens": [longest], "chunk": longest // 16, "execution": name})
        cases.append({"lens": [longest], "window": (longest // 64, None), "execution": name})
        cases.append({"lens": documents, "heads": (64, 8) if not r.cpu else (4, 2), "execution": name})
    for case in cases:
        if r.late():
            r.say("times: no time left")
            return
        timing.measure(**case)
    host_time(r, lengths[0])


def documents_of(tokens: int) -> list[int]:
    """Returns random lengths of packed documents, the same on all ranks."""
    generator, lens = torch.Generator().manual_seed(7), []
    while sum(lens) < tokens:
        length = int(torch.exp(7 + 1.2 * torch.randn((), generator=generator)))
        lens.append(min(max(1, length), tokens - sum(lens)))
    return lens


def report(r: Rank, case: str, own: tuple[float, float], alone: tuple[float, float]) -> None:
    efficiency = [b / (r.ranks * a) for a, b in zip(own, alone)]
    r.say(
        f"time {case}: forward {own[0]:.3f} ms (one GPU {alone[0]:.3f}, efficiency {efficiency[0]:.3f}), "
        f"both {own[1]:.3f} ms (one GPU {alone[1]:.3f}, efficiency {efficiency[1]:.3f})",
        case=case, milliseconds=own, one_gpu=alone, efficiency=efficiency, right=True,
    )


def host_time(r: Rank, tokens: int) -> None:
    """The time in which the host issues both passes, which must stay below the time of the GPU."""
    plan = r.tandem.ContextPlan([tokens], r.ranks, causal=True)
    inputs, dout = inputs_of(r, plan.rows(r.rank), (heads_of(r),) * 2)
    both = training(r, lambda *x: r.attend(x, plan, "gather")[0], inputs, dout)
    kernel_times.say_host_time(r, f"both passes of {tokens} tokens", both)


def links(r: Rank, group: tuple[str, object, int, int]) -> None:
    """The times of messages, for the choice between executions."""
    for size in (2**20, 2**25, 2**27) if not r.cpu else (2**10,):
        x, y = (torch.empty(size, dtype=torch.uint8, device=r.device) for _ in range(2))
        peer = (r.rank + 1) % r.ranks, (r.rank - 1) % r.ranks

        def step():
            pair = [
                dist.P2POp(function, tensor, group=group[1], group_peer=other)
                for function, tensor, other in ((dist.irecv, y, peer[1]), (dist.isend, x, peer[0]))
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        duration = milliseconds(r, step, 10 if not r.cpu else 1)
        text = f"link {group[0]}: ring step of {size >> 20} MB {duration:.3f} ms, {size / duration / 1e6:.0f} GB/s"
        r.say(text, size=size, milliseconds=duration)


def breakdown(r: Rank) -> None:
    """The kernels of both passes, of each rank."""
    if r.cpu:
        return
    long = r.arguments.tokens[-1]
    cases = [{"tokens": n} for n in r.arguments.tokens]
    cases += [{"tokens": long, "chunk": long // 16}, {"tokens": long, "window": (long // 64, None)}]
    group = groups_of(r)[0][1]
    for case in cases:
        if r.late():
            r.say("breakdown: no time left")
            return
        plan = r.tandem.ContextPlan(
            [case["tokens"]], r.ranks, causal=True, window=case.get("window"), chunk=case.get("chunk", 0)
        )
        inputs, dout = inputs_of(r, plan.rows(r.rank), (HEADS, HEADS))
        both = training(r, lambda *x, plan=plan: r.attend(x, plan, "gather", group=group)[0], inputs, dout)
        both()
        kernel_times.say_kernels(r, str(case), both)


def peer(r: Rank) -> None:
    """torch's context_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (r.ranks,))
    for tokens, rotate in itertools.product(r.arguments.tokens, ("allgather", "alltoall")):
        if r.late():
            return
        _attention.set_rotate_method(rotate)
        q, k, v, dout = (r.random(1, HEADS, tokens, HEAD_DIM, seed=n) for n in range(4))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context_parallel(mesh, buffers=(q, k, v, dout), buffer_seq_dims=(2,) * 4):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]

            def attend(q, k, v):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            with torch.no_grad():
                forward = milliseconds(r, lambda: attend(*inputs), calls_of(r, tokens))
            both = milliseconds(r, training(r, attend, inputs, dout), calls_of(r, tokens))
        flops = 2 * tokens**2 * HEADS * HEAD_DIM
        rate = 3.5 * flops / both / 1e9 / r.ranks
        r.say(f"peer torch context_parallel {rotate}, {tokens} tokens: forward {forward:.3f} ms, both {both:.3f} ms, "
              f"{rate:.0f} TFLOP/s a GPU", case=f"torch {rotate} {tokens}", milliseconds=[forward, both])


def run(rank: int, port: int, arguments: argparse.Namespace) -> None:
    r = Rank(rank, arguments.ranks, port, arguments)
    r.host = dist.new_group(backend="gloo")
    r.alone = [dist.new_group([n], backend=None if arguments.cpu else "nccl") for n in range(r.ranks)][rank]
    name = "CPU" if r.cpu else torch.cuda.get_device_name()
    r.say(f"torch {torch.__version__}, tandem {r.tandem.__version__}, {r.ranks} x {name}", name=name)
    from context_copies import copies, transports  # import this module
    from context_graphs import graphs
    from context_options import options

    steps = [check, options, copies, times, transports, graphs, breakdown, *([] if r.cpu else [peer])]
    for step in [step for name in arguments.only for step in steps if step.__name__ == name]:
        try:
            step(r)
        except Exception:
            r.lines.append({"case": step.__name__, "right": step in (peer, breakdown)})
            print(f"rank {rank}: {step.__name__}\n{traceback.format_exc()}", flush=True)
            if step not in (peer, breakdown):
                break  # the other ranks may wait for this rank
    if rank == 0 and arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(r.lines, file, indent=1)
    right = all(line.get("right", True) for line in r.lines)
    if not right:
        os._exit(1)  # the other ranks may wait
    dist.destroy_process_group()


def main() -> int:
    arguments = parse()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        torch.multiprocessing.spawn(run, (port, arguments), nprocs=arguments.ranks)
    except torch.multiprocessing.ProcessExitedException:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
