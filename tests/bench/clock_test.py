#!/usr/bin/env python3
"""Checks which calls are timed, with graphs of a fake torch. The test needs no torch and no GPU."""

import contextlib
import gc
import pathlib
import sys
import types
import unittest
import weakref


class Event:
    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


class Graph:
    """Replays captured calls as CUDA does, without keeping their inputs alive."""

    def replay(self):
        pass


@contextlib.contextmanager
def capturing(graph, stream, capture_error_mode):
    yield


cuda = types.SimpleNamespace(
    Event=Event, CUDAGraph=Graph, graph=capturing, synchronize=lambda: None, current_stream=lambda: 1,
    default_stream=lambda: 0,
)  # fmt: skip
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from rig import clock  # noqa: E402


class Tensor:
    pass


class Timed(unittest.TestCase):
    def test_what_a_captured_call_reads_lives_as_long_as_the_graph(self):
        timed, tensors = {}, []
        for name in ("with", "without"):  # the second graph replaces the first of its name
            out = Tensor()
            tensors.append(weakref.ref(out))

            def call(out=out):
                return out

            timed[name] = clock.Timed(call, 10)
        del out, call
        gc.collect()
        self.assertTrue(all(timed[name].captured for name in timed))
        self.assertTrue(all(tensor() is not None for tensor in tensors))
        del timed
        gc.collect()
        self.assertTrue(all(tensor() is None for tensor in tensors))


if __name__ == "__main__":
    unittest.main()
