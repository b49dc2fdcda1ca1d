"""The times of a GPU's kernels by kind, from torch's profiler, and the time of the host that issues them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

KINDS = {
    "messages": ("nccl",),
    "merge": ("merge",),
    "prepare": ("preprocess", "postprocess", "schedule", "combine"),
    "attention": ("forward", "backward", "dq_kernel"),
    "head start": ("spin_kernel", "sleep"),
}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "copies and sums")


def profiled(function, calls: int) -> list[tuple[str, int, float, float]]:
    """Returns the GPU's kernels and copies of some calls: name, stream, begin and end in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    found = []
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0:
            begin = event.start_ns() / 1e6
            found.append((event.name(), event.device_resource_id(), begin, begin + event.duration_ns() / 1e6))
    return sorted(found, key=lambda entry: entry[2])


def by_kind(kernels: list[tuple[str, int, float, float]], calls: int) -> dict[str, float]:
    """Returns milliseconds a call by kind of kernel, and the idle time of the stream that attention uses."""
    found: dict[str, float] = {}
    streams = [stream for name, stream, _, _ in kernels if kind_of(name) == "attention"]
    for name, stream, begin, end in kernels:
        kind = "copy engines" if "memcpy" in name.lower() and stream not in streams else kind_of(name)
        found[kind] = found.get(kind, 0.0) + (end - begin) / calls
    own = [entry for entry in kernels if streams and entry[1] == streams[0]]
    idle = sum(max(0.0, b[2] - a[3]) for a, b in zip(own, own[1:]))
    launches = sum(entry[1] == streams[0] for entry in kernels) / calls if streams else 0
    found["idle"] = idle / calls
    found["whole"] = (own[-1][3] - own[0][2]) / calls if own else 0.0
    found["launches"] = launches
    return found


def say_host_time(r, case: str, both) -> None:
    """Prints the time in which the host issues both passes. r: the rank of context_parallel.py."""
    both()
    r.sync()
    start = time.perf_counter()
    both()
    host = 1e3 * (time.perf_counter() - start)
    r.sync()
    r.say(f"host: {case} are issued in {r.worst(host)[0]:.3f} ms", host=host)


def say_kernels(r, case: str, both) -> None:
    """Prints the times of the kernels of both passes, which have run before."""
    calls = 3
    dist.barrier(r.host)
    kernels = profiled(both, calls)
    lines = [None] * r.ranks
    dist.all_gather_object(lines, by_kind(kernels, calls), group=r.host)
    for rank, line in enumerate(lines):
        r.say(f"breakdown {case}, rank {rank}: " + ", ".join(f"{name} {ms:.3f}" for name, ms in line.items()),
              case=f"breakdown {case}", rank=rank, milliseconds=line)
    r.lines.append({"case": f"kernels {case}", "kernels": [(a[:60], b, round(c - kernels[0][2], 4), round(d - c, 4))
                                                          for a, b, c, d in kernels]})
