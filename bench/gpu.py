#!/usr/bin/env python3
"""Tandem's forward on a GPU beside all that one would use instead, on the same inputs, in interleaved rounds.

    python bench/gpu.py --quick            # head_dim 64, 128, 256, full and causal, 1k to 16k: half a minute
    python bench/gpu.py --fa3 libfa3_sm90.so --fa4 packages/ --limits limits.json --json gpu.json --svg gpu.svg
    python bench/gpu.py --cells d128,causal --cells packed --flex
    python bench/gpu.py --costs            # of the host for a call, and of compiling: half a minute

Torch brings cuDNN, FlashAttention-2 and FlexAttention. FlashAttention-3 is a library behind the C function fa3_fwd,
FlashAttention-4 a folder with its Python packages. A peer that is not there, or does not serve a cell, is a line that
says why. Every output is held to float64; one that fails does not count.

A figure is the median of the rounds. A ratio is that of the best peer's time to ours within a round, again the median.
TFLOP/s count half of the square for causal, and exactly what a window shows. --limits takes what bench/limits wrote:
"ceiling" is then the share of the tensor core's rate on such products alone. The library is found as
bench/versus_torch.py finds it: build/release, or TANDEM_LIBRARY.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import time

from rig import cells

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = "Tandem"
COUNTS = 0.99  # of its target: a cell holds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", metavar="LIBRARY", help="shared library of FlashAttention-3")
    parser.add_argument("--fa4", metavar="FOLDER", help="folder of FlashAttention-4's Python packages")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, which compiles for a while")
    parser.add_argument("--quick", action="store_true", help="the main table in short, without FA2 and without costs")
    parser.add_argument("--cells", action="append", default=[], metavar="WORDS",
                        help="only cells with all of these comma-separated words: d128, causal, 4k, sustained, packed, "
                        "llama, ... (several times: any of them)")  # fmt: skip
    parser.add_argument("--costs", action="store_true", help="only what a call costs besides the GPU's time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, help="a window's milliseconds (default: 20, sustained 150)")
    parser.add_argument("--device", type=int, default=0, help="of the GPUs (default: 0)")
    parser.add_argument("--limits", type=pathlib.Path, metavar="JSON", help="what bench/limits found on this card")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--svg", type=pathlib.Path, metavar="FILE", help="draw the bursts here")
    chosen = parser.parse_args(arguments)
    if chosen.costs and chosen.quick:
        parser.error("--costs and --quick leave nothing to do: --quick is without costs")
    if chosen.rounds < 1:
        parser.error(f"--rounds ({chosen.rounds}) must be at least 1")
    if chosen.ms is not None and not 0 < chosen.ms <= 5000:
        parser.error(f"--ms ({chosen.ms:g}) must be above 0 and at most 5000")
    for name in ("fa3", "fa4", "limits"):
        path = getattr(chosen, name)
        if path and not pathlib.Path(path).exists():
            parser.error(f"--{name}: there is no {path}")
    chosen.cells = cells.chosen(cells.quick() if chosen.quick else cells.grid(), chosen.cells)
    if not chosen.cells:
        parser.error("--cells: no cell has all of these words")
    return chosen


class Bench:
    def __init__(self, options: argparse.Namespace):
        from rig import peers, tandem

        self.options, self.absent = options, {}
        self.limits = json.loads(options.limits.read_text()) if options.limits else None
        try:
            self.context = tandem.Context(f"cuda:{options.device}")
        except RuntimeError as why:
            raise SystemExit(str(why)) from why
        self.peers, missing = peers.found(options.fa3, options.fa4, options.flex, not options.quick)
        for name, why in missing.items():
            print(f"{name} absent: {why}")
        self.first_line = peers.first_line

    def bind(self, x) -> dict:
        """name -> call, of those that serve the cell; the others' reasons are kept."""
        from rig import tandem

        binds = {OURS: lambda x: tandem.Forward(self.context, x), **self.peers}
        if x.cell.sustained:
            binds.pop("FA2", None)  # far behind on Hopper in bursts already, and long windows are dear
        calls = {}
        for name, bind in binds.items():
            try:
                calls[name] = bind(x)
            except Exception as why:  # peers fail in ways of their own, and none of them may end the run
                self.note(name, x.cell, self.first_line(why))
        return calls

    def note(self, name: str, cell, why: str) -> None:
        self.absent.setdefault((name, why), []).append(cell.name)
        if name == OURS:
            print(f"  {cell.column}: Tandem absent: {why}", flush=True)

    def measure(self, cell) -> dict:
        from rig import clock
        from rig.judge import Judge

        x = cells.Inputs(cell)
        judge = Judge(x)
        ms = self.options.ms or (150 if cell.sustained else 20)
        timed, errors, wrong = {}, {}, []
        for name, call in self.bind(x).items():
            try:
                errors[name] = judge.error(call())
                if not judge.right(errors[name]):
                    wrong.append(name)
                    self.note(
                        name, cell, f"wrong: its error is {errors[name]:.1e}, the plain formula's {judge.plain:.1e}"
                    )
                if name == OURS or name not in wrong:
                    timed[name] = clock.Timed(call, ms)
            except Exception as why:
                self.note(name, cell, self.first_line(why))
        times = clock.interleaved(timed, self.options.rounds)
        result = dict(cell=cell.name, row=cell.row, column=cell.column, sustained=cell.sustained, flops=cell.flops())
        result.update(seconds=times, errors=errors, plain=judge.plain, wrong=wrong, target=cell.target)
        result["host_bound"] = [name for name, t in timed.items() if not t.captured]
        result["rates"] = {name: cell.flops() / statistics.median(t) / 1e12 for name, t in times.items()}
        self.compare(cell, result)
        return result

    def compare(self, cell, result: dict) -> None:
        rates, times = result["rates"], result["seconds"]
        others = {name: rate for name, rate in rates.items() if name != OURS}
        result["best"] = max(others, key=others.get) if others else None
        if OURS not in rates:
            return
        if others:
            result["ratio"] = statistics.median(t / o for t, o in zip(times[result["best"]], times[OURS]))
            result["holds"] = result["ratio"] >= COUNTS * cell.target and OURS not in result["wrong"]
        if self.limits and not cell.microseconds:
            of = self.limits["mma"][f"d{min(cell.head_dim, 128) if cell.dim_v != cell.head_dim else cell.head_dim}"]
            result["of_ceiling"] = rates[OURS] / of["sustained" if cell.sustained else "burst"]


def figure(cell, result: dict, name: str) -> str:
    if cell.microseconds:
        return f"{statistics.median(result['seconds'][name]) * 1e6:.2f} us"
    return f"{result['rates'][name]:.0f}"


def line(cell, result: dict) -> str:
    rates = result["rates"]
    ours = figure(cell, result, OURS) if OURS in rates else "-"
    ratio = f"{result['ratio']:.3f}" if "ratio" in result else "-"
    verdict = "WRONG" if OURS in result["wrong"] else "" if result.get("holds", True) else f"< {cell.target:.2f}"
    ceiling = f"{result['of_ceiling']:.2f}" if "of_ceiling" in result else ""
    error = f"{result['errors'][OURS]:.1e}" if OURS in result["errors"] else "-"
    peers = sorted((name for name in rates if name != OURS), key=rates.get, reverse=True)
    others = ", ".join(
        f"{name} {figure(cell, result, name)}{'*' if name in result['host_bound'] else ''}" for name in peers
    )
    return f"  {cell.column:12}{ours:>8}{ratio:>8} {verdict:7}{ceiling:>5}  {error} / {result['plain']:.1e}  {others}"


def machine() -> dict:
    import torch

    def said(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        except OSError:
            return ""
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""

    return dict(
        device=torch.cuda.get_device_name(),
        driver=said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        commit=said("git", "rev-parse", "--short", "HEAD"),
        date=datetime.date.today().isoformat(),
        command=" ".join(sys.argv),
    )


def cublas(rounds: int) -> dict:
    """TFLOP/s of a large product: what the card gives at this hour."""
    import torch
    from rig import clock

    n = 8192
    a, b = (torch.randn(n, n, device=cells.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    found = {}
    for what, ms in (("burst", 20), ("sustained", 150)):
        timed = clock.Timed(lambda: torch.mm(a, b, out=out), ms)
        times = clock.interleaved({"cuBLAS": timed}, rounds)["cuBLAS"]
        found[what] = 2 * n**3 / statistics.median(times) / 1e12
    return found


def host_costs(bench: Bench) -> dict:
    """Microseconds of a warm call from entry to return, on the smallest problem."""
    import torch
    from rig import clock, peers, tandem

    x = cells.Inputs(next(c for c in cells.grid() if c.microseconds))
    forward = tandem.Forward(bench.context, x)
    forward()
    call, nothing = tandem.host_calls(forward)
    costs = {"C": clock.host_seconds(call) - clock.host_seconds(nothing)}

    def in_python(x):
        sys.path.insert(0, str(ROOT / "python"))
        from tandem import attention

        return lambda: attention(x.q, x.k, x.v)

    one = torch.zeros(1, device=x.q.device)
    others = {
        "tandem.attention": in_python,
        "cuDNN through SDPA": peers.cudnn,
        "FA2 through aten": peers.fa2,
        "torch.add(out=)": lambda x: lambda: torch.add(one, one, out=one),
    }
    for name, bind in others.items():
        try:
            other = bind(x)
            other()
            costs[name] = clock.host_seconds(other)
        except Exception as why:
            print(f"host cost of {name} absent: {bench.first_line(why)}")
    return {name: seconds * 1e6 for name, seconds in costs.items()}


def costs(bench: Bench) -> dict:
    """What a call costs besides the GPU's time. Prints as it goes; what cannot be measured is a line."""
    from rig import compiling

    found = {}
    try:
        found["host_us"] = host_costs(bench)
        said = ", ".join(f"{name} {us:.1f}" for name, us in found["host_us"].items())
        print(f"\nhost cost of a warm call (us): {said}")
    except Exception as why:
        print(f"\nhost cost absent: {bench.first_line(why)}")
    try:
        found["first_call_s"] = compiling.measured()
        for what, seconds in found["first_call_s"].items():
            slowest = max(seconds, key=seconds.get)
            print(
                f"{what} (ms, 2 cores): median {statistics.median(seconds.values()) * 1e3:.1f}, longest "
                f"{seconds[slowest] * 1e3:.1f} ({slowest}) of {len(seconds)} kernels"
            )
    except Exception as why:
        print(f"compile times absent: {bench.first_line(why)}")
    return found


def summary(results: list[dict]) -> None:
    rows: dict[tuple, list] = {}
    for r in results:
        if "ratio" in r:
            rows.setdefault((r["row"], r["sustained"]), []).append(r)
    print("\nrows, by the least ratio of their cells:")
    for (row, sustained), cells_of_row in rows.items():
        ratios = [r["ratio"] for r in cells_of_row]
        held = sum(r["holds"] for r in cells_of_row)
        name = row + (" sustained" if sustained else "")
        print(f"  {name:24} least {min(ratios):.3f}, {held} of {len(ratios)} cells hold")


def draw(results: list[dict], about: dict) -> str:
    from rig import chart

    rows: dict[str, dict] = {}
    for r in results:
        if not r["sustained"] and r["rates"] and r["row"] != "smallest":
            rows.setdefault(r["row"], {})[r["column"]] = r["rates"]
    title = "Attention forward, bf16, TFLOP/s by seqlen"
    return chart.draw(title, f"{about['device']}, torch {about['torch']}, {about['date']}; median of rounds", rows)


def table(bench: Bench) -> list[dict]:
    """Every cell's result, printed as it comes, and what the rows amount to."""
    import torch

    results, row = [], None
    print(
        "\nTFLOP/s, ratio to the best peer, share of the ceiling, error of ours / of the plain formula; *: host-bound"
    )
    for cell in bench.options.cells:
        if (cell.row, cell.sustained) != row:
            row = (cell.row, cell.sustained)
            print(cell.row + (" sustained" if cell.sustained else ""), flush=True)
        try:
            results.append(bench.measure(cell))
            print(line(cell, results[-1]), flush=True)
        except torch.OutOfMemoryError:
            print(f"  {cell.column}: not enough memory on this card", flush=True)
        except RuntimeError as why:  # of the device: it serves nobody after that
            print(f"  {cell.column}: {bench.first_line(why)}; stopped here", flush=True)
            break
        torch.cuda.empty_cache()
    summary(results)
    for (name, why), where in bench.absent.items():
        print(f"{name} absent in {len(where)} ({where[0]}{', ...' if len(where) > 1 else ''}): {why}")
    return results


def main() -> None:
    begin = time.perf_counter()
    options = parse()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "torch finds no CUDA device here: this benchmark needs one (bench/versus_torch.py runs on CPUs)"
        )
    torch.cuda.set_device(options.device)
    torch.set_grad_enabled(False)
    about = machine()
    print(f"{about['device']}, driver {about['driver']}, torch {about['torch']}, cuDNN {about['cudnn']}")
    bench = Bench(options)
    print(f"Tandem: {bench.context.description}")
    results = []
    if not options.costs:
        about["cublas"] = cublas(options.rounds)
        print("cuBLAS 8192^3: " + ", ".join(f"{rate:.0f} {what}" for what, rate in about["cublas"].items()))
        results = table(bench)
    about.update({} if options.quick else costs(bench))
    if options.json:
        options.json.write_text(json.dumps(dict(machine=about, cells=results), indent=1) + "\n")
    if options.svg and any(r["rates"] for r in results):
        options.svg.write_text(draw(results, about))
    print(f"{time.perf_counter() - begin:.0f} s")
    sys.exit(any(OURS in r["wrong"] for r in results))


if __name__ == "__main__":
    main()
