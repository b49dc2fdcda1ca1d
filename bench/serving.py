#!/usr/bin/env python3
"""Serving on a GPU: decode, a mixed batch and a shared prefix, against other libraries, in CUDA graphs.

    python bench/serving.py --json serving.json       # about three minutes
    python bench/serving.py --problems "8 x 32k" --rounds 9

The time of a call is the median of rounds in which all calls alternate. "read" is the share of the rate of a bulk read
of the same bytes (torch.sum). "best peer" is the least time of a peer divided by the call's time. "append" includes
tandem.append_kv, which writes one key per request and rotates keys and queries. The last table has a line for each
figure: its goal, and whether the ratio reaches the goal. A figure whose peer is absent has no ratio.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics

import torch
from rig import clock, serving
from rig.peers import first_line

import tandem

TRACE = pathlib.Path(__file__).with_name("serving_trace.json")
# batch, keys, heads, heads of keys, head_dim
DECODES = {
    "64 x 4k": (64, 4096, 32, 8, 128),
    "1 x 8k": (1, 8192, 32, 8, 128),
    "1 x 131k": (1, 131072, 32, 8, 128),
    "8 x 32k, 128 heads on 1": (8, 32768, 128, 1, 128),
}
PROBLEMS = {
    **{name: lambda sizes=sizes: serving.Decode(*sizes) for name, sizes in DECODES.items()},
    "mixed batch": lambda: serving.Mixed(json.loads(TRACE.read_text())),
    "64 x (8k shared, 256 own)": lambda: serving.Shared(64, 8192, 256, 32, 8, 128),
}
READ_GOALS = {"pages 16": (0.91, 0.97), "pages 64": (0.94, 0.97), "contiguous": (0.94, 0.97)}
MEMORY_BOUND = ("64 x 4k", "1 x 131k")
PEERS = ("SDPA", "FA3", "FlashInfer", "FlashAttention")  # the names of other libraries' calls begin so
WRONG = 2**-6  # relative to the largest number


def draw_trace(seed: int) -> dict:
    """Draws the requests of bench/serving_trace.json: 3 chunks of prefills and 60 decodes, in random order."""
    draw = random.Random(seed)
    chunks = [2 ** draw.randint(8, 11) for _ in range(3)]
    requests = [(queries, queries + draw.randrange(8192)) for queries in chunks]
    requests += [(1, int(256 * 64 ** draw.random())) for _ in range(60)]
    draw.shuffle(requests)
    mix = "3 chunks of 256 to 2048 queries after up to 8191 keys, and 60 decodes of 256 to 16384 keys"
    return {"seed": seed, "mix": mix, "heads": 32, "heads_k": 8, "head_dim": 128, "requests": requests}


def timed_calls(x: serving.Requests, ms: float) -> dict[str, clock.Timed]:
    """Returns the calls that this machine has, after a comparison with float64."""
    exact, calls = x.exact(), {}
    for name, make in {**x.calls(), **x.peers()}.items():
        try:
            call = make()
            error = float((call().double() - exact).abs().max() / exact.abs().max())
            if not error <= WRONG:
                raise RuntimeError(f"the error is {error:.3g}")
            calls[name] = clock.Timed(call, ms)
        except Exception as why:  # a peer may be missing, or refuse a problem with any error
            print(f"  absent: {name}: {first_line(why)[:100]}")
            torch.cuda.synchronize()
            continue
        if not calls[name].captured:
            print(f"  {name} is timed without a graph")
    return calls


def run(name: str, rounds: int, ms: float) -> dict:
    """Times a problem, and returns its medians in microseconds and the times of all rounds."""
    x = PROBLEMS[name]()
    print(f"{name}: {x.bytes / 1e6:.0f} MB of keys and values")
    words = [t.view(torch.int64) for t in x.cache]
    calls = {"bulk read": clock.Timed(lambda: [t.sum() for t in words], ms), **timed_calls(x, ms)}
    times = clock.interleaved(calls, rounds)
    medians = {call: statistics.median(rows) * 1e6 for call, rows in times.items()}
    best = min((medians[peer] for peer in x.peers() if peer in medians), default=None)
    print(f"  {'call':34} {'us':>9} {'read':>6} {'best peer':>10}")
    for call, time in medians.items():
        ratio = f"{best / time:10.2f}" if best else ""
        print(f"  {call:34} {time:9.1f} {medians['bulk read'] / time:6.2f} {ratio}")
    return {"problem": name, "medians": medians, "best_peer": best, "seconds": times}


def figures(results: list[dict]) -> list[dict]:
    """Returns the line of each figure. A ratio above 1 is in favour of the first call."""
    lines = []

    def add(row: str, result: dict, call: str, other: str | None, goals: tuple[float, float]) -> None:
        medians = result["medians"]
        if call not in medians:
            return
        time = result["best_peer"] if other is None else medians.get(other)
        ratio = time / medians[call] if time else None
        reached = [name for name, goal in zip(("must", "aim"), goals) if ratio is not None and ratio >= goal]
        line = {"figure": row, "problem": result["problem"], "call": call, "ratio": ratio, "must": goals[0]}
        lines.append({**line, "aim": goals[1], "reached": reached[-1] if reached else None})

    for result in results:
        problem, medians = result["problem"], result["medians"]
        for call, goals in READ_GOALS.items() if problem in DECODES else ():
            if problem in MEMORY_BOUND:
                add("decode, of the read limit", result, call, "bulk read", goals)
                add("decode, of the best peer", result, call, None, (0.985, 1.02))
            else:
                add("few tiles, of the best peer", result, call, None, (1.1, 1.5))
        for call in (call for call in medians if not call.startswith(PEERS)):
            if call.endswith(", invariant"):
                add("batch_invariant", result, call, call.removesuffix(", invariant"), (0.95, 1.0))
            if call.endswith(", append"):
                add("append and rotary", result, call, call.removesuffix(", append"), (0.95, 0.98))
            if call.startswith("shared, "):
                add("shared prefix", result, call, call.replace("shared", "without sharing"), (3, 8))
            if call.startswith("mixed, "):
                add("mixed batch, of the best peer", result, call, None, (1.1, 1.3))
    return lines


def show(lines: list[dict]) -> None:
    print(f"{'figure':30} {'problem':26} {'call':30} {'ratio':>6} {'must':>6} {'aim':>6}")
    for line in lines:
        ratio = "none" if line["ratio"] is None else f"{line['ratio']:.3f}"
        text = f"{line['figure']:30} {line['problem']:26} {line['call']:30} {ratio:>6}"
        print(f"{text} {line['must']:6} {line['aim']:6}  {line['reached'] or 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="", metavar="TEXT", help="only problems whose name contains this text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ms", type=float, default=8, help="a window's milliseconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all rounds and the figures here")
    parser.add_argument("--draw-trace", type=int, metavar="SEED", help=f"write {TRACE.name} and exit")
    options = parser.parse_args()
    if options.draw_trace is not None:
        TRACE.write_text(json.dumps(draw_trace(options.draw_trace)) + "\n")
        return
    if options.rounds < 1 or options.ms <= 0:
        parser.error("--rounds must be at least 1 and --ms above 0: pass such numbers")
    if not torch.cuda.is_available():
        raise SystemExit("torch must find a CUDA device: run this benchmark on a GPU")
    clock.use_own_stream()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {tandem.description()}"
    print(device)
    results = [run(name, options.rounds, options.ms) for name in PROBLEMS if options.problems in name]
    lines = figures(results)
    show(lines)
    if options.json:
        options.json.write_text(json.dumps({"device": device, "results": results, "figures": lines}))


if __name__ == "__main__":
    main()
