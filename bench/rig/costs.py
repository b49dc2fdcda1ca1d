"""The costs of a call besides the GPU's time: the host's time, and compilation."""

from __future__ import annotations

import pathlib
import statistics
import sys

import torch

from rig import clock, compiling, peers, shapes, tandem

PYTHON = pathlib.Path(__file__).resolve().parents[2] / "python"


def _in_python(x):
    sys.path.insert(0, str(PYTHON))
    from tandem import attention

    return lambda: attention(x.q, x.k, x.v)


def host(context: tandem.Context) -> dict[str, float]:
    """Returns the microseconds of a warm call from entry to return, on the smallest problem."""
    x = shapes.Inputs(next(c for c in shapes.grid() if c.microseconds))
    forward = tandem.Forward(context, x)
    forward()
    call, nothing = tandem.host_calls(forward)
    found = {"C": clock.host_seconds(call) - clock.host_seconds(nothing)}
    one = torch.zeros(1, device=x.q.device)
    others = {
        "tandem.attention": _in_python,
        "cuDNN through SDPA": peers.cudnn,
        "FA2 through aten": peers.fa2,
        "torch.add(out=)": lambda x: lambda: torch.add(one, one, out=one),
    }
    for name, bind in others.items():
        try:
            other = bind(x)
            other()
            found[name] = clock.host_seconds(other)
        except Exception as why:
            print(f"host cost of {name} absent: {peers.first_line(why)}")
    return {name: round(seconds * 1e6, 2) for name, seconds in found.items()}


def measured(context: tandem.Context) -> dict:
    """Prints each figure when it is measured; a failure prints one line."""
    found = {}
    try:
        found["host_us"] = host(context)
        said = ", ".join(f"{name} {us:.1f}" for name, us in found["host_us"].items())
        print(f"\nhost cost of a warm call (us): {said}")
    except Exception as why:
        print(f"\nhost cost absent: {peers.first_line(why)}")
    try:
        found["first_call_s"] = compiling.measured()
        for what, seconds in found["first_call_s"].items():
            slowest = max(seconds, key=seconds.get)
            print(
                f"{what} (ms, 2 cores): median {statistics.median(seconds.values()) * 1e3:.1f}, longest "
                f"{seconds[slowest] * 1e3:.1f} ({slowest}) of {len(seconds)} kernels"
            )
    except Exception as why:
        print(f"compile times absent: {peers.first_line(why)}")
    return found
