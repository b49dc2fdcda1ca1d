"""Timing on the GPU: windows of many calls, of several functions in turn."""

from __future__ import annotations

import time

import torch

PAUSE = 0.02  # seconds between windows
AT_ONCE = 50  # most calls in one CUDA graph


def _seconds(function, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Timed:
    """A call that is to be timed in windows of this many milliseconds.

    Calls are replayed from a CUDA graph, so that what the host does for each of them is not in the figure; a call that
    cannot be captured is timed as it is (captured is False).
    """

    def __init__(self, call, ms: float):
        call()
        torch.cuda.synchronize()
        once = _seconds(call, 2) / 2
        self.calls = max(1, min(AT_ONCE, int(min(10.0, ms) * 1e-3 / once)))
        self.captured = True
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                for _ in range(self.calls):
                    call()
            self.run = graph.replay
            self.run()
        except Exception:  # whatever a peer's capture fails with
            torch.cuda.synchronize()
            self.captured, self.calls, self.run = False, 1, call
        self.replays = max(1, round(ms * 1e-3 / _seconds(self.run, 1)))

    def window(self) -> float:
        """Seconds of a call."""
        return _seconds(self.run, self.replays) / (self.replays * self.calls)


def interleaved(timed: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call in each round; each round begins with another one."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    for n in range(rounds):
        first = n % max(1, len(names))
        for name in names[first:] + names[:first]:
            times[name].append(timed[name].window())
            time.sleep(PAUSE)
    return times


def host_seconds(call, calls: int = 200, turns: int = 15) -> float:
    """What a call costs the host, the GPU's queue being empty at first: the fastest of several turns."""
    best = float("inf")
    for _ in range(turns):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return best
