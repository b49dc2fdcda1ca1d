"""Timing on the GPU: windows of many calls, of several functions in turn."""

from __future__ import annotations

import functools
import random
import time

import torch

PAUSE = 0.02  # seconds between windows
AT_ONCE = 50  # most calls in one CUDA graph


def use_own_stream() -> None:
    """All that follows is on a stream of its own: torch's gradients are on that of their forward, and the default one
    cannot be captured."""
    torch.cuda.set_stream(torch.cuda.Stream())


def _seconds(function, count: int, meanwhile=None) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        function()
    end.record()
    if meanwhile:
        meanwhile()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Timed:
    """A call that is to be timed in windows of this many milliseconds.

    Calls are replayed from a CUDA graph, so that what the host does for each of them is not in the figure; a call that
    cannot be captured is timed as it is (captured is False). A graph has addresses and keeps nothing that is there, so
    the call is kept, and with it the tensors that it was made of.
    """

    def __init__(self, call, ms: float):
        self.call = call
        call()
        torch.cuda.synchronize()
        once = _seconds(call, 2) / 2
        self.calls = max(1, min(AT_ONCE, int(min(10.0, ms) * 1e-3 / once)))
        self.captured = True
        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            own = None if stream == torch.cuda.default_stream() else stream
            with torch.cuda.graph(graph, stream=own, capture_error_mode="relaxed"):
                for _ in range(self.calls):
                    call()
            self.run = graph.replay
            self.run()
        except Exception:  # whatever a peer's capture fails with
            torch.cuda.synchronize()
            self.captured, self.calls, self.run = False, 1, call
        self.replays = max(1, round(ms * 1e-3 / _seconds(self.run, 1)))

    def window(self, meanwhile=None) -> float:
        """Seconds of a call. meanwhile is called once while the GPU works."""
        return _seconds(self.run, self.replays, meanwhile) / (self.replays * self.calls)


def interleaved(timed: dict[str, Timed], rounds: int, look=None) -> dict[str, list[float]]:
    """Seconds of a call in each round. Each round has an order of its own: a fixed neighbour costs up to 3 %.
    look(name) is called in the middle of each window."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(timed), len(timed)):
            times[name].append(timed[name].window(*([functools.partial(look, name)] if look else [])))
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
