#!/usr/bin/env python3
"""Compares versions of NVRTC on the forward: the speed of the kernels, and the compile times.

    python bench/compilers.py --nvrtc 12.9/libnvrtc.so.12 --nvrtc 13.0/libnvrtc.so.13
    python bench/compilers.py --cells d128 --cells packed --rounds 9 --json compilers.json

Without --nvrtc: all versions that bench/tune.py finds. `pip download nvidia-cuda-nvrtc-cu12==12.8.*`, unpacked, gives
another version; libnvrtc-builtins.so must be in the same folder. Each version runs in a separate process, which holds
the library with kernels from this compiler only. In every round each process times one window on the GPU. The library
is located like in bench/versus_torch.py: build/release, or TANDEM_LIBRARY.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

from rig import cells, nvrtc


def usual() -> list[cells.Cell]:
    """A selection of the grid: the main table at two lengths, and problems with other kernels."""
    columns = {"4k", "16k", "window-128", "8k"}
    return [c for c in cells.grid() if not c.sustained and (c.column in columns or c.lengths)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", action="append", default=[], metavar="LIBRARY", help="a libnvrtc.so (several times)")
    parser.add_argument("--cells", action="append", default=[], metavar="WORDS", help="as bench/gpu.py has it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=15, help="a window's milliseconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not 0 < options.ms <= 5000:
        parser.error("--rounds must be at least 1, --ms above 0 and at most 5000")
    for path in options.nvrtc:
        if not pathlib.Path(path).exists():
            parser.error(f"--nvrtc: there is no {path}")
    options.cells = cells.chosen(cells.grid(), options.cells) if options.cells else usual()
    return options


# ---- A process with one compiler ------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Reads requests from stdin, one JSON value per line: {"cell": n} prepares a problem, {} times a window of it."""
    import torch
    from rig import clock, tandem
    from rig.judge import Judge

    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_grad_enabled(False)
    context = tandem.Context()
    answer = {"compiler": context.description.rpartition("compiled by ")[2]}
    timed = None
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        try:
            if "cell" in request:
                timed = None
                torch.cuda.empty_cache()
                x = cells.Inputs(options.cells[request["cell"]])
                forward = tandem.Forward(context, x)
                begin = time.perf_counter()
                forward.prepare()
                answer = {"prepared": time.perf_counter() - begin}
                answer["right"] = Judge(x)(forward()).right
                timed = clock.Timed(forward, options.ms)
            else:
                answer = {"seconds": timed.window()}
        except Exception as why:
            answer = {"failed": str(why).splitlines()[0]}


class Worker:
    def __init__(self, path: str, arguments: list[str]):
        environment = dict(os.environ, TANDEM_NVRTC=path, TANDEM_CACHE="off", CUDA_CACHE_DISABLE="1")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.path, self.compile_seconds = path, []

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with {self.path} ended (status {self.process.wait()})")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"{self.path}: {answer['failed']}")
        return answer

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def ready(self, cell: int) -> None:
        answer = self.ask({"cell": cell})
        if not answer["right"]:
            raise RuntimeError(f"{self.path}: the result misses float64")
        if answer["prepared"] > 0.05:  # else the kernel was cached
            self.compile_seconds.append(answer["prepared"])

    def window(self) -> float:
        """See clock.Timed."""
        return self.ask({})["seconds"]

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# ---- All of them ----------------------------------------------------------------------------------------------------


def opened(paths: list[str], arguments: list[str]) -> dict[str, Worker]:
    """Version -> its process; prints a line for an unusable version."""
    workers = {}
    for worker in [Worker(path, arguments) for path in paths]:
        try:
            compiler = worker.answer()["compiler"]
        except RuntimeError as why:
            print(why)
            continue
        version = re.sub("^NVRTC ", "", compiler)
        if not compiler.startswith("NVRTC ") or version in workers:
            print(f"{worker.path} left out: {compiler}{' is there already' if version in workers else ''}")
            worker.end()
            continue
        print(f"NVRTC {version}: {worker.path}")
        workers[version] = worker
    return workers


def race(workers: dict[str, Worker], n: int, cell: cells.Cell, rounds: int) -> dict[str, float]:
    """TFLOP/s by version, the median of the rounds."""
    from rig import clock

    racing = {}
    for version, worker in workers.items():
        try:
            worker.ready(n)
            racing[version] = worker
        except RuntimeError as why:
            print(f"  {cell.name}: {why}", flush=True)
    times = clock.interleaved(racing, rounds)
    return {version: cell.flops() / statistics.median(t) / 1e12 for version, t in times.items()}


def summary(workers: dict[str, Worker], rates: dict[str, dict[str, float]]) -> dict:
    """By version: the geometric mean of its speed relative to the best, and its compile times."""
    complete = [r for r in rates.values() if len(r) == len(workers)]
    found = {}
    for version, worker in workers.items():
        shares = [r[version] / max(r.values()) for r in complete]
        seconds = worker.compile_seconds or [math.nan]
        found[version] = dict(
            of_best=statistics.geometric_mean(shares) if shares else math.nan, least=min(shares, default=math.nan),
            median_compile=statistics.median(seconds), longest_compile=max(seconds), kernels=len(seconds),
        )  # fmt: skip
    return found


def main() -> None:
    options = parse()
    if options.worker:
        return work(options)
    paths = options.nvrtc or [path for path in nvrtc.candidates() if os.path.exists(path)]
    arguments = [flag for flag in sys.argv[1:] if flag != "--worker"]
    workers = opened(paths, arguments)
    if not workers:
        raise SystemExit("no NVRTC can be used: pip install nvidia-cuda-nvrtc, or name some by --nvrtc")
    rates = {}
    print(f"\nTFLOP/s{'':23}" + "".join(f"{version:>8}" for version in workers))
    for n, cell in enumerate(options.cells):
        rates[cell.name] = race(workers, n, cell, options.rounds)
        shown = (f"{rates[cell.name][v]:8.1f}" if v in rates[cell.name] else f"{'-':>8}" for v in workers)
        print(f"  {cell.name:28}" + "".join(shown), flush=True)
    for worker in workers.values():
        worker.end()
    found = summary(workers, rates)
    print()
    for version, s in found.items():
        print(
            f"NVRTC {version}: {s['of_best']:.3f} of the best (least {s['least']:.3f}); {s['kernels']} kernels, "
            f"compiled in {s['median_compile']:.2f} s (median), {s['longest_compile']:.2f} s (longest)"
        )
    print(f"the fastest kernels: NVRTC {max(found, key=lambda v: found[v]['of_best'])}")
    if options.json:
        options.json.write_text(json.dumps(dict(versions=found, rates=rates), indent=1) + "\n")


if __name__ == "__main__":
    main()
