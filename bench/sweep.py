#!/usr/bin/env python3
"""Compares Tandem with its alternatives on random problems of a GPU: the distribution instead of chosen shapes.

    python bench/sweep.py --seed 7 --count 40 --fa3 libfa3_sm90.so --fa4 packages/         # forward
    python bench/sweep.py --few --backward --part 1/4 --json 1.json --fa3 libfa3_sm90.so   # a quarter of the final seed
    python bench/sweep.py --merge 1.json 2.json 3.json 4.json --svg sweep.svg
    python bench/sweep.py --list --few --seed 7 --count 5                                  # prints problems alone

rig/random_shapes.py draws the problems and names the final seeds, which no tuning uses. Without --seed the final seed
counts. A run with --json continues where an interrupted one ended, and --seconds starts no further problem after that
time. Timing, peers and the comparison with float64 come from bench/gpu.py. A problem is lost below 0.985 of the best
peer's speed if a second timing of both alone agrees. Peers that fail or refuse are listed with their reasons.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import pathlib
import statistics
import sys
import time

from rig import figures, random_shapes, scatter, shapes
from rig.figures import OURS

import gpu

PEERS = ("FA3", "FA4", "cuDNN", "FA2")
DETERMINISTIC = ("FA3 deterministic", "cuDNN deterministic")
LOST = 1 - figures.PAR


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--few", action="store_true", help="batch 1 and at most 16 heads, instead of the general distribution")
    add("--backward", action="store_true", help="gradients of q, k and v, with all that they cost")
    add("--seed", type=int, help="default: the final seed of the distribution")
    add("--count", type=int, default=200, help="problems of the seed (default: 200)")
    add("--part", default="1/1", metavar="I/N", help="every N-th problem, from the I-th on")
    add("--only", default="", metavar="TEXT", help="only problems whose names have this text")
    add("--fa3", metavar="LIBRARY", help="shared library of FlashAttention-3")
    add("--fa4", metavar="FOLDER", help="folder of FlashAttention-4's Python packages")
    add("--peers", default=",".join(PEERS), metavar="NAMES", help=f"of {', '.join(PEERS)}")
    add("--before", metavar="LIBRARY", help="an older build of libtandem.so, in the same rounds")
    add("--rounds", type=int, default=5)
    add("--ms", type=float, default=8, help="milliseconds of a window")
    add("--device", type=int, default=0)
    add("--commit", help="commit of the library (default: from git)")
    add("--seconds", type=float, default=math.inf, help="start no further problem after this time")
    add("--json", type=pathlib.Path, metavar="FILE", help="results, written after every problem")
    add("--svg", type=pathlib.Path, metavar="FILE", help="picture of ratio against work")
    add("--merge", nargs="+", type=pathlib.Path, metavar="JSON", help="measure nothing: join these parts")
    add("--list", action="store_true", help="print the problems, measure nothing")
    chosen = parser.parse_args(arguments)
    chosen.distribution = "few" if chosen.few else "general"
    if chosen.seed is None:
        chosen.seed = random_shapes.FINAL_SEEDS[chosen.distribution]
    if chosen.count < 1 or chosen.rounds < 1 or not 0 < chosen.ms <= 5000:
        parser.error("--count and --rounds must be at least 1, and --ms above 0 and at most 5000: pass such numbers")
    first, step = shapes.numbers_of_part(parser.error, chosen.part)
    chosen.peers = gpu.several(parser.error, "--peers", chosen.peers, PEERS)
    for path in [chosen.fa3, chosen.fa4, chosen.before, *(chosen.merge or [])]:
        if path and not pathlib.Path(path).exists():
            parser.error(f"{path} must exist: correct the path")
    cells = random_shapes.problems(chosen.distribution, chosen.seed, chosen.count, chosen.backward)
    chosen.cells = [cell for cell in cells[first - 1 :: step] if chosen.only in cell.name]
    if not chosen.cells:
        parser.error(f"--only ({chosen.only}) must be part of a problem's name: --list prints the names")
    chosen.activations = chosen.limits = None
    return chosen


def ratio(result: dict, names) -> float | None:
    """The time of the best of these peers in a round divided by ours, the median; None without such a peer."""
    rounds = [result["us"][name] for name in names if name in result["us"]]
    if OURS not in result["us"] or not rounds:
        return None
    return statistics.median(min(times) / ours for *times, ours in zip(*rounds, result["us"][OURS]))


def distribution(ratios: list[float]) -> str:
    tenth = statistics.quantiles(ratios, n=10, method="inclusive")[0] if len(ratios) > 1 else ratios[0]
    lost = sum(r < LOST for r in ratios)
    return (
        f"{len(ratios):4} problems: geometric mean {statistics.geometric_mean(ratios):.3f}, median "
        f"{statistics.median(ratios):.3f}, tenth percentile {tenth:.3f}, least {min(ratios):.3f}, "
        f"lost {lost} ({lost / len(ratios):.0%})"
    )


def decided(result: dict) -> float:
    """Returns the ratio, from the better of two timings if the second contradicts a loss."""
    return max(result["ratio"], result.get("again", 0.0))


def summary(results: list[dict]) -> str:
    judged = [r for r in results if "ratio" in r]
    if not judged:
        return "no problem has both Tandem and a peer"
    lines = ["", f"all            {distribution([decided(r) for r in judged])}"]
    for title, key in (("kind", "kind"), ("head_dim", "head_dim")):
        groups = collections.defaultdict(list)
        for r in judged:
            groups[r[key]].append(decided(r))
        lines += [f"by {title}"] + [f"  {name!s:12} {distribution(groups[name])}" for name in sorted(groups, key=str)]
    fixed = [x for r in judged if (x := ratio(r, DETERMINISTIC)) is not None]
    if fixed:
        lines.append(f"deterministic peers {distribution(fixed)}")
    lost = sorted((r for r in judged if r["verdict"] == "lost"), key=decided)
    lines += [f"lost: {r['cell']}  {decided(r):.3f} of {r['best']}, {r['kind']}" for r in lost]
    wrong = [f"WRONG: {r['cell']}: {r['wrong'][OURS]}" for r in results if OURS in r["wrong"]]
    return "\n".join(lines + wrong + figures.absences(results))


def draw(runs: list[dict], results: list[dict]) -> str:
    points = [
        (r["flops"] / 1e9, decided(r), r["tiles"] / r["sms"], f"{r['cell']}: {decided(r):.2f}")
        for r in results
        if "ratio" in r
    ]
    run, first = runs[0], results[0]
    what = "backward" if first["title"].startswith("backward") else "forward"
    peers = ", ".join(run["peers"])
    about = f"{run['device']}, {len(points)} problems of seed {run['seed']}; best of {peers}; {run['date']}"
    return scatter.draw(f"Attention {what}, random shapes: speed relative to the best peer", about, points)


def finish(options: argparse.Namespace, runs: list[dict], results: list[dict]) -> int:
    print(summary(results))
    if options.json:
        figures.save(options.json, runs, results)
    if options.svg and any("ratio" in r for r in results):
        options.svg.write_text(draw(runs, results))
    return any(OURS in r["wrong"] for r in results)


def merge(options: argparse.Namespace) -> int:
    try:
        runs, results = figures.merge(options.merge)
    except ValueError as why:
        raise SystemExit(f"--merge: {why}") from why
    if len({(run["distribution"], run["seed"], run["device"]) for run in runs}) > 1:
        raise SystemExit("--merge: parts must have one distribution, seed and GPU: omit the parts that differ")
    return finish(options, runs, results)


def earlier(options: argparse.Namespace) -> list[dict]:
    """The results of an interrupted run of the same part."""
    if not (options.json and options.json.exists()):
        return []
    names = {cell.name for cell in options.cells}
    return [r for r in json.loads(options.json.read_text())["cells"] if r["cell"] in names]


def measure(options: argparse.Namespace) -> int:
    import torch
    from rig import clock, versions

    if not torch.cuda.is_available():
        raise SystemExit("torch must find a CUDA device: run this benchmark on a GPU")
    torch.cuda.set_device(options.device)
    clock.use_own_stream()
    torch.set_grad_enabled(False)
    bench = gpu.Bench(options)
    bench.confirms_losses = True
    sms = torch.cuda.get_device_properties(options.device).multi_processor_count
    run = dict(gpu.machine(options), tandem=bench.context.description, absent=bench.missing, seed=options.seed)
    run.update(distribution=options.distribution, peers=list(bench.peers), versions=versions.of_peers())
    print(f"{run['device']}; Tandem {run['commit']}; " + ", ".join(f"{n} {v}" for n, v in run["versions"].items()))
    for name, why in bench.missing.items():
        print(f"{name} absent: {why}")
    print(figures.HEADING)
    results, begin = earlier(options), time.monotonic()
    measured = {r["cell"] for r in results}
    for cell in options.cells:
        if cell.name in measured:
            continue
        if time.monotonic() - begin > options.seconds:
            print(f"stopped after {options.seconds:g} s: {len(results)} of {len(options.cells)} problems")
            break
        try:
            result = bench.measure(cell)
        except torch.OutOfMemoryError:
            print(f"  {cell.column}: not enough memory on this GPU", flush=True)
            continue
        tiles, kind = random_shapes.tiles(cell), random_shapes.kind(cell, sms)
        result.update(tiles=tiles, kind=kind, sms=sms, head_dim=cell.head_dim)
        results.append(result)
        print(figures.line(result), flush=True)
        if options.json:
            figures.save(options.json, [run], results)
        torch.cuda.empty_cache()
    return finish(options, [run], results)


def main() -> None:
    options = parse()
    if options.list:
        for cell in options.cells:
            print(f"{cell.column:60} {cell.flops() / 1e9:9.1f} GFLOP, {random_shapes.tiles(cell)} tiles")
        sys.exit(0)
    sys.exit(merge(options) if options.merge else measure(options))


if __name__ == "__main__":
    main()
