"""The steps "copies" and "transports" of context_parallel.py: the execution by heads with copies and with NCCL's messages.

As a program, this file loses the second of two ranks within a pass. The first one must end by torch's watchdog.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from datetime import timedelta
from unittest import mock

import kernel_times
import torch
import torch.distributed as dist
from context_parallel import Timing, calls_of, documents_of, heads_of, inputs_of, one_gpu, training

# Parts of the heads in each group.
PARTS = (1,), (1, 1), (1, 2, 1), (1, 1, 1, 1)
WAYS = ("messages", PARTS[0]), *(("copies", parts) for parts in PARTS[:3])


def use(transport: str, parts: tuple[int, ...], plans: list) -> None:
    """Selects the transport and the groups of heads of the next passes, on all ranks. Ranks with fewer heads than parts
    have one group.
    """
    from tandem import _context_copies

    _context_copies.ENABLED = transport != "messages"
    _context_copies.PARTS, _context_copies.LEAST_BYTES, _context_copies.LEAST_SECONDS = parts, 1, 0
    for plan in plans:  # without the groups that the plan has kept
        for key in [key for key in plan.kept if isinstance(key, tuple) and key[0] == "heads"]:
            del plan.kept[key]


@contextlib.contextmanager
def equal_groups():
    """Messages have the groups of heads of copies."""
    from tandem import _context_copies, _context_heads

    alone = _context_heads._Exchange._fast_parts

    def fast_parts(self, heads, wires, _):
        return alone(self, heads, wires, True)

    constants = {name: getattr(_context_copies, name) for name in ("ENABLED", "PARTS", "LEAST_BYTES", "LEAST_SECONDS")}
    with mock.patch.object(_context_heads._Exchange, "_fast_parts", fast_parts):
        with mock.patch.multiple(_context_copies, **constants):
            yield


def opened(r, group):
    """Returns the group's copies, or None."""
    from tandem import _context_copies

    return _context_copies.copies_of(group or dist.group.WORLD, r.device)


class Problem:
    """One attention, whose passes are separate functions."""

    def __init__(self, r, lens, heads, layout, mask, has_sink) -> None:
        self.r, self.text = r, f"{lens}, {heads} heads, {layout}, {mask}, sink {has_sink}"
        self.plan = r.tandem.ContextPlan(lens, r.ranks, layout=layout, **mask)
        self.inputs, self.dout = inputs_of(r, self.plan.rows(r.rank), heads)
        self.sink = r.random(heads[0], seed=9, dtype=torch.float32).requires_grad_() if has_sink else None

    def forward(self) -> list[torch.Tensor]:
        return self.r.attend(self.inputs, self.plan, "heads", self.sink)

    def backward(self, out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        loss = (out.float() * self.dout.float()).sum() + lse.square().sum() * 1e-3
        inputs = self.inputs if self.sink is None else [*self.inputs, self.sink]
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def pause(r, n: int) -> None:
    """Delays the stream of one rank, so that ranks reach each other's messages at different times."""
    if not r.cpu and n % r.ranks == r.rank:
        torch.cuda._sleep(1 + 400_000 * (n % 7))


def copies(r) -> None:
    """Copies must have the bits of messages with the same groups, while two problems alternate and sizes change."""
    with equal_groups():
        check_bits(r)


def check_bits(r) -> None:
    size = 8 if r.cpu else 128
    causal, window = {"causal": True}, {"causal": True, "window": (2 * size, None)}
    cases = [
        ([33 * size + 5], (8, 8), "balanced", causal, False),
        ([12 * size, 0, 1, 25 * size + 7], (8, 2), "zigzag", causal, True),
        ([9 * size], (4, 4), "striped", window, False),  # rows that are copied by index
        ([64 * size], (16, 16), "balanced", causal, False),
    ]
    if r.ranks > 2:
        cases.append(([20 * size + 1], (8, 2), "contiguous", causal, False))  # ranks share key heads
    found = opened(r, None)
    if not r.cpu:
        r.say(f"{'WRONG' if found is None else 'ok   '} copies: this machine serves copies: {found is not None}",
              case="copies serve", right=found is not None)
    problems = [Problem(r, *case) for case in cases]
    plans, expected = [problem.plan for problem in problems], {}
    for parts in PARTS:
        use("messages", parts, plans)
        expected[parts] = [problem.backward(*problem.forward()) for problem in problems]
    for n in range(20):
        if r.late():
            r.say(f"copies: no time left after {n} passes")
            return
        # The forwards of two problems come before their backwards.
        both = [(n + n // 7) % len(problems), (n * 3 + 1) % len(problems)]
        parts = PARTS[n % 4]
        use("copies", parts, plans)
        pause(r, n)
        outs = [problems[i].forward() for i in both]
        pause(r, 3 * n + 1)
        results = [problems[i].backward(*out) for i, out in zip(both, outs)]
        same = all(torch.equal(x, y) for i, result in zip(both, results) for x, y in zip(result, expected[parts][i]))
        right = r.worst(float(not same))[0] == 0
        r.say(f"{'ok   ' if right else 'WRONG'} copies, pass {n}, parts {parts}: {problems[both[0]].text}; {problems[both[1]].text}",
              case=f"copies {n}", right=right)
    if found is not None:
        r.say(f"copies: {found.number} passes, {found.capacity >> 20} MiB of regions on each rank")


def rates(r, group) -> None:
    """The rates of copies to one peer, by all ranks at once: whole, and of rows of some bytes."""
    from tandem import _context_copies

    found, count = opened(r, group), 128 << 20
    if found is None:
        r.say("transports: copies are not served")
        return
    driver, peer = found.driver, (r.rank + 1) % r.ranks
    driver.mark()
    addresses = found._share(group, count)
    x = torch.zeros((1, count), dtype=torch.uint8, device=r.device)
    for width in (count, 4096, 2048, 1024, 512, 256):
        rows = x if width == count else torch.zeros((count // width, 2 * width), dtype=torch.uint8, device=r.device)
        strip = _context_copies.strip_of(rows, slice(0, width))
        durations = []
        for _ in range(4):
            r.sync()
            dist.barrier(r.host)
            start = time.perf_counter()
            with driver.on_device():
                for _ in range(5):
                    driver.copy(driver.copy_stream(peer), addresses[peer], strip)
            r.sync()
            durations.append((time.perf_counter() - start) / 5)
        rate = count / r.worst(min(durations[1:]))[0] / 1e9
        r.say(f"rate of copies, rows of {width} bytes: {rate:.0f} GB/s", case=f"rate {width}", rate=rate)
    dist.barrier(r.host)
    found._release(group, addresses)


def transports(r) -> None:
    """Times both transports by turns, with several numbers of groups, and prints the kernels of the fastest. Then times
    windows and packed documents by gather, and by heads with copies.
    """
    group = None
    if not r.cpu:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group = dist.new_group(list(range(r.ranks)), backend="nccl", pg_options=options)
        rates(r, group)
    with equal_groups():
        for tokens in r.arguments.tokens if not r.cpu else [64]:
            time_ways(r, tokens, group)
        others(r, group)


def time_ways(r, tokens: int, group) -> None:
    alone = one_gpu(r, [tokens], (heads_of(r),) * 2, None)
    plan = r.tandem.ContextPlan([tokens], r.ranks, causal=True)
    inputs, dout = inputs_of(r, plan.rows(r.rank), (heads_of(r),) * 2)
    both = training(r, lambda *x, plan=plan: r.attend(x, plan, "heads", group=group)[0], inputs, dout)
    times: dict[tuple, list] = {way: [] for way in WAYS}
    for n, way in itertools.product(range(7 if not r.cpu else 2), WAYS):
        use(*way, [plan])
        both()
        r.sync()
        dist.barrier(r.host)
        start = time.perf_counter()
        for _ in range(calls_of(r, tokens)):
            both()
        r.sync()
        if n > 0:
            times[way].append(1e3 * (time.perf_counter() - start) / calls_of(r, tokens))
    medians = {way: r.worst(statistics.median(x), min(x)) for way, x in times.items()}
    for way, (median, least) in medians.items():
        r.say(f"time {tokens} tokens, heads, {way[0]}, parts {way[1]}: median {median:.3f} ms, least {least:.3f}, "
              f"efficiency {alone[1] / r.ranks / median:.3f}",
              case=f"{tokens} tokens, {way}", milliseconds=[median, least], one_gpu=alone)
    for way in [min((way for way in WAYS if way[0] == name), key=medians.get) for name in ("messages", "copies")]:
        use(*way, [plan])
        case = f"{tokens} tokens, {way[0]}, parts {way[1]}"
        kernel_times.say_host_time(r, case, both)
        if not r.cpu:
            kernel_times.say_kernels(r, case, both)


def others(r, group) -> None:
    """Times gather, and heads with copies in one group and in three, for windows and packed documents."""
    timing, long = Timing(r), r.arguments.tokens[-1] if not r.cpu else 128
    documents = documents_of(r.arguments.tokens[0] * r.ranks // 2 if not r.cpu else 64)
    cases = [{"lens": [long], "window": (long // 64, None)}]
    cases.append({"lens": documents, "heads": (64, 8) if not r.cpu else (4, 2)})
    for case, (execution, parts) in itertools.product(cases, (("gather", (1,)), ("heads", (1,)), ("heads", (1, 2, 1)))):
        use("copies", parts, [])
        timing.group = f"parts {parts}", group, 0, 15_000 if not r.cpu else 0
        if r.late(0.9):
            r.say("transports: no time left")
            return
        timing.measure(**case, execution=execution)


SECONDS = 20


def lose(rank: int, folder: str) -> None:
    """Rank 1 leaves after its first messages of the second pass."""
    torch.cuda.set_device(rank)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=rank, world_size=2, timeout=timeout)
    import tandem
    from tandem import _context_copies, _context_heads

    plan = tandem.ContextPlan([2048], 2, causal=True)
    q = torch.randn(plan.rows(rank)[0], 4, 128, device="cuda", dtype=torch.bfloat16)

    def forward():
        with torch.no_grad():
            tandem.context_parallel(q, q, q, plan=plan, execution="heads")
        torch.cuda.synchronize()

    forward()
    served = _context_copies.copies_of(dist.group.WORLD, q.device) is not None
    print(f"rank {rank}: one pass is done, copies served: {served}", flush=True)
    if rank == 1:
        mock.patch.object(_context_heads.Transfer, "wait", side_effect=lambda: os._exit(0)).start()
    forward()
    print("WRONG: the pass ended without rank 1", flush=True)


def main() -> int:
    import multiprocessing
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=lose, args=(rank, folder)) for rank in range(2)]
        start = time.perf_counter()
        for process in processes:
            process.start()
        processes[0].join(SECONDS + 90)
        code = processes[0].exitcode
        for process in processes:
            process.kill()
    right = code is not None and code != 0
    print(f"{'ok   ' if right else 'WRONG'} lost rank: the other rank ended with {code} after "
          f"{time.perf_counter() - start:.0f} s, of which the group's timeout is {SECONDS}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
