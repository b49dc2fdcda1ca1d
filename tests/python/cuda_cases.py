"""Shared parts of the tests of CUDA tensors. A module that imports this is skipped without a GPU.

The files named test_cuda*.py compare with float64 on the GPU, by the 2x rule. Each file runs under pytest and alone:

    PYTHONPATH=python python -m pytest -q tests/python/test_cuda*.py
    PYTHONPATH=python python tests/python/test_cuda.py [part of a test's name]    # without pytest
    TANDEM_PYTHON_BOUNDARY=ctypes ...                                             # through ctypes
"""

import sys
import time
import traceback
import unittest

try:
    import torch
except ImportError:
    torch = None

if torch is None or not torch.cuda.is_available():
    why = "SKIPPED: tests of CUDA tensors need a GPU and a torch built for it"
    print(why, file=sys.stderr)
    if "pytest" not in sys.modules:
        sys.exit(77)
    raise unittest.SkipTest(why)


import reference
import tandem

GPU = torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def tensors(*shapes, dtype=BF16, seed=0, device=GPU):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]


def lengths(*counts, device=GPU):
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def int32(*values, device=GPU):
    return torch.tensor(values, dtype=torch.int32, device=device)


def hold(result, plain, *inputs, what="", **options):
    """Checks a result, a tensor or (out, lse), against plain(*inputs) in float64 and in the type of the inputs."""
    exact = plain(*(x.double() for x in inputs), **options)
    low = plain(*inputs, **options)
    results = result if isinstance(result, tuple) else (result,)
    for name, *values in zip(("out", "lse"), results, exact, low):
        reference.hold(*(x.detach().double().cpu().numpy() for x in values), f"{what} {name}")


def near(got, want):
    """Compares two computations of 16-bit results: they are within a few roundings of the largest."""
    assert got.shape == want.shape and got.dtype == want.dtype
    error, allowed = (got.double() - want.double()).abs().max(), 2**-5 * want.double().abs().max()
    assert error <= allowed, f"largest difference {error:.3g}, allowed {allowed:.3g}"


def raises(error, words, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except error as found:
        text = str(found)
        assert all(word in text for word in words.split()), text
        return
    raise AssertionError(f"no {error.__name__} with {words!r}")


def captured(function, *arguments, **named):
    """Returns a graph of the call, and the call's result, which the graph's replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*arguments, **named)
    return graph, result


def run(tests):
    """Runs a module's tests, or the tests whose names contain a word of the command line. Returns the exit status."""
    failed = 0
    start = time.monotonic()
    names = [n for n in tests if n.startswith("test_") and all(part in n for part in sys.argv[1:])]
    print(tandem.description())
    for name in names:
        print(name, end=" ", flush=True)
        begin = time.monotonic()
        try:
            tests[name]()
        except unittest.SkipTest as why:
            print(f"not run: {why}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok, {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{len(names) - failed} of {len(names)} passed in {time.monotonic() - start:.0f} s")
    return failed != 0
