"""Timing on the GPU: windows of many calls of alternating functions."""

from __future__ import annotations

import functools
import random
import time

import torch

PAUSE = 0.02  # seconds between windows
AT_ONCE = 50  # most calls in one CUDA graph


def use_own_stream() -> None:
    """Runs everything that follows on a separate stream. torch runs gradients on their forward's stream, and the
    default stream cannot be captured.
    """
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
    """A call that is timed in windows of this many milliseconds.

    Calls are replayed from a CUDA graph, so that the figure excludes the host's work. A call that cannot be
    captured is timed directly (captured is False). A graph has only addresses; therefore the call and its tensors
    are kept.
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
        except Exception:  # a peer's capture may fail for any reason
            torch.cuda.synchronize()
            self.captured, self.calls, self.run = False, 1, call
        self.replays = max(1, round(ms * 1e-3 / _seconds(self.run, 1)))

    def window(self, meanwhile=None) -> float:
        """Returns seconds per call. meanwhile is called once while the GPU works."""
        return _seconds(self.run, self.replays, meanwhile) / (self.replays * self.calls)


def interleaved(timed: dict[str, Timed], rounds: int, look=None) -> dict[str, list[float]]:
    """Returns seconds per call in each round. The order of a round is random, because a fixed neighbour costs up to 3
    %. look(name) is called in the middle of each window.
    """
    times: dict[str, list[float]] = {name: [] for name in timed}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(timed), len(timed)):
            times[name].append(timed[name].window(*([functools.partial(look, name)] if look else [])))
            time.sleep(PAUSE)
    return times


def host_seconds(call, calls: int = 200, turns: int = 15) -> float:
    """Returns the host's time for a call while the GPU's queue is empty: the minimum of several turns."""
    best = float("inf")
    for _ in range(turns):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return best
