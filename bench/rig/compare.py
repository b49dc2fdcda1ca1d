"""Compares functions on the same tensors, forward and backward, for options of tandem's Python interface that
bench/gpu.py's problems do not have.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics

import torch

import tandem
from rig import clock
from rig.peers import first_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ms", type=float, default=10, help="a window's milliseconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all rounds here, after every entry")


def check_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace, parts: tuple[str, ...]) -> None:
    options.only = options.only.split(",")
    for part in options.only:
        if part not in parts:
            parser.error(f"--only ('{part}') must be of {', '.join(parts)}: choose from these parts")
    if options.rounds < 1 or options.ms <= 0:
        parser.error("--rounds must be at least 1 and --ms above 0: pass such numbers")


WRONG = 2**-4  # relative to the largest number: above any rounding error


class Inputs:
    """Returns q, k, v and dout, (batch, heads, seqlen, head_dim) in bfloat16, filled with normal random numbers."""

    def __init__(self, batch: int, heads: int, seqlen: int, dim: int, seqlen_k: int = 0):
        generator = torch.Generator("cuda").manual_seed(1)
        draw = dict(device="cuda", dtype=torch.bfloat16, generator=generator)
        self.q, self.dout = (torch.randn(batch, heads, seqlen, dim, **draw) for _ in range(2))
        self.k, self.v = (torch.randn(batch, heads, seqlen_k or seqlen, dim, **draw) for _ in range(2))
        for x in self.leaves:
            x.requires_grad_()

    @property
    def leaves(self):
        return self.q, self.k, self.v


def with_options(**of):
    return lambda q, k, v: tandem.attention(*(x.transpose(1, 2) for x in (q, k, v)), **of).transpose(1, 2)


def slopes_of(heads: int) -> torch.Tensor:
    """Returns the slopes of ALiBi."""
    return torch.exp2(-torch.arange(1, heads + 1, device="cuda") * 8.0 / heads)


def exact(inputs: Inputs, head: int, score_mod=None, mask_mod=None) -> list[torch.Tensor]:
    """Computes out, dq, dk and dv of a head of the first sequence, in float64."""
    q, k, v, dout = (x[0, head].detach().double() for x in (*inputs.leaves, inputs.dout))
    for x in (q, k, v):
        x.requires_grad_()
    s = q @ k.T / math.sqrt(q.shape[-1])
    zero, h = torch.tensor(0, device="cuda"), torch.tensor(head, device="cuda")
    rows, keys = torch.arange(len(q), device="cuda")[:, None], torch.arange(len(k), device="cuda")[None, :]
    if score_mod:
        s = score_mod(s, zero, h, rows, keys)
    if mask_mod:
        s = s.masked_fill(~mask_mod(zero, h, rows, keys), -torch.inf)
    out = s.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def judge_of(head: int, want: list[torch.Tensor]):
    """Returns the largest errors of that head, relative to the largest number, for the comparison's run()."""
    return lambda got: [
        float((g[0, head].detach().double() - w).abs().max() / w.abs().max()) for g, w in zip(got, want)
    ]


def is_right(ours: list[float], *others: list[float]) -> bool:
    """Allows twice the error of the other functions, which may have no gradients."""

    def allowed(place: int) -> float:
        return max((2 * errors[place] + 2**-8 for errors in others if place < len(errors)), default=2**-5)

    return all(error <= allowed(place) for place, error in enumerate(ours))


class Contest:
    """Prints a line for each entry: the first function's median time, and the ratio of each other function's time to
    it. A ratio is computed per round, then the median.
    """

    def __init__(self, options: argparse.Namespace):
        if not torch.cuda.is_available():
            raise SystemExit("torch must find a CUDA device: run this benchmark on a GPU")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {tandem.description()}")
        clock.use_own_stream()
        self.options, self.results = options, []

    def run(self, name: str, inputs: Inputs, functions: dict, judge=None, work: float = 1.0) -> None:
        """functions: each returns out for (q, k, v); ours is the first. judge(out and gradients): errors, of which
        twice the peers' are allowed. work: the first function's share of the peers' operations, a factor of the
        ratios.

        A function that fails or is wrong is absent in this direction, with the reason.
        """
        line = {"name": name, "seqlen": inputs.q.shape[2], "head_dim": inputs.q.shape[3], "work": work}
        calls, found = {"forward": {}, "backward": {}}, {}
        for who, function in functions.items():

            def forward(function=function):
                with torch.no_grad():
                    return function(*inputs.leaves)

            try:
                out = function(*inputs.leaves)
                found[who] = [out]
                calls["forward"][who] = clock.Timed(forward, self.options.ms)
            except Exception as why:  # a function may refuse a problem with any error
                line[f"absent {who}"] = first_line(why)
                continue

            def backward(out=out):
                return torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)

            try:
                found[who] += backward()
                calls["backward"][who] = clock.Timed(backward, self.options.ms)
            except Exception as why:
                line[f"absent {who} backward"] = first_line(why)
        us, *others = functions
        if judge and us in found:
            line["errors"] = errors = {who: judge(got) for who, got in found.items()}
            for who in [who for who in others if who in found and not all(e <= WRONG for e in errors[who])]:
                line[f"absent {who}"] = f"wrong, by {errors[who]}"
                for timed in (calls["forward"], calls["backward"], found):
                    timed.pop(who, None)
            line["right"] = is_right(errors[us], *(errors[who] for who in others if who in found))
        for passing, timed in calls.items():
            if us in timed:
                rounds = clock.interleaved(timed, self.options.rounds)
                line[passing] = {who: [round(s * 1e6, 2) for s in times] for who, times in rounds.items()}
        self.say(line)

    def say(self, line: dict) -> None:
        self.results.append(line)
        parts = [f"{line['name']:<34}"]
        for passing in ("forward", "backward"):
            times = line.get(passing, {})
            if not times:
                continue
            ours, *others = times
            parts.append(f"{passing} {statistics.median(times[ours]):9.1f} us")
            for other in others:
                ratio = line.get("work", 1) * statistics.median(b / a for a, b in zip(times[ours], times[other]))
                line[f"{passing} ratio {other}"] = round(ratio, 4)
                parts.append(f"{ratio:6.3f} {other}")
        if line.get("right") is False:
            parts.append(f"WRONG {line['errors']}")
        parts += [f"{name}: {line[name]}" for name in line if name.startswith("absent") or name.startswith("ms")]
        print("  ".join(parts), flush=True)
        if self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")
