#!/usr/bin/env python3
"""Compares Tandem's forward or backward on a GPU with its alternatives, on the same inputs, round by round.

    python bench/gpu.py --quick            # head_dim 64, 128, 256, full and causal, 1k to 16k: a minute
    python bench/gpu.py --fa3 libfa3_sm90.so --fa4 packages/ --limits limits.json --json gpu.json --svg gpu.svg
    python bench/gpu.py --part 1/3 --json 1.json     # a third of it; the other parts can run in separate processes
    python bench/gpu.py --merge 1.json 2.json 3.json --json gpu.json --svg gpu.svg
    python bench/gpu.py --cells d128,causal --cells packed --peers FA3,Flex
    python bench/gpu.py --cells d128,16k --data sigma10,sink20,copy
    python bench/gpu.py --backward --fa3 libfa3_sm90.so --cells d128 --cells packed
    python bench/gpu.py --before libtandem.so.0 --cells d128,burst   # changes since that build
    python bench/gpu.py --costs            # host time of a call, and compile times: half a minute

Torch includes cuDNN, FlashAttention-2 and FlexAttention. FlashAttention-3 is a library with the C functions fa3_forward
(or fa3_fwd) and fa3_bwd. Deterministic forms of FA3 and cuDNN are separate peers. FlashAttention-4 is a folder with its
Python packages. cuDNN's windows, sinks and packed form need nvidia-cudnn-frontend. A missing peer, or one that does not
serve a problem, prints one line with the reason. Every output, gradient and LSE is compared with float64; a wrong peer
does not count. --before is an older build of this library, which runs in the same rounds. "before" is its time divided
by ours; it is no peer.

A figure is the median of the rounds, which run in random order. The ratio is the best peer's time in a round divided by
ours, the median again; within 1.5 % of 1 it is par. TFLOP/s count half of the square for causal, and the visible pairs
of a window. --limits reads the output of bench/limits: "ceiling" is then the share of the tensor core's measured rate.

The JSON has every round, with clock and power. The library is located like in bench/versus_torch.py: build/release, or
TANDEM_LIBRARY.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

from rig import figures, shapes
from rig.figures import BEFORE, OURS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ("FA3", "FA4", "cuDNN", "FA2", "Flex")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--fa3", metavar="LIBRARY", help="shared library of FlashAttention-3")
    add("--fa4", metavar="FOLDER", help="folder of FlashAttention-4's Python packages")
    add("--peers", metavar="NAMES", help=f"of {', '.join(PEERS)} (default: all but Flex, which compiles for long; "
        "--quick: not FA2 either)")  # fmt: skip
    add("--before", metavar="LIBRARY", help="an older build of libtandem.so, in the same rounds")
    add("--backward", action="store_true", help="gradients of q, k and v, with all that they cost")
    add("--quick", action="store_true", help="the main table in short")
    add("--cells", action="append", default=[], metavar="WORDS",
        help="only cells with all of these comma-separated words: d128, causal, 4k, sustained, packed, f16, untuned, "
        "llama, ... (several times: any of them)")  # fmt: skip
    add("--data", default="normal", metavar="KINDS",
        help="default: normal; " + "; ".join(f"{kind}: {what}" for kind, what in shapes.DATA.items()))  # fmt: skip
    add("--activations", metavar="FILE", help="file of bench/activations.py, for --data model")
    add("--part", metavar="I/N", help="only the I-th of N stretches of the cells, which take about as long")
    add("--merge", nargs="+", type=pathlib.Path, metavar="JSON", help="measure nothing: join these parts")
    add("--costs", action="store_true", help="what a call costs besides the GPU's time, instead of the table")
    add("--rounds", type=int, default=15)
    add("--ms", type=float, help="a window's milliseconds (default: 20, sustained 150)")
    add("--device", type=int, default=0, help="number of the GPU (default: 0)")
    add("--limits", type=pathlib.Path, metavar="JSON", help="file of bench/limits/measure.py from this GPU")
    add("--commit", help="commit of the library (default: from git)")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all figures here, after every cell")
    add("--svg", type=pathlib.Path, metavar="FILE", help="draw the bursts here")
    return parser


def several(error, option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            error(f"{option} ('{name}') must be of {', '.join(known)}: choose from these names")
    return names


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    from_words = parser()
    chosen, error = from_words.parse_args(arguments), from_words.error
    if chosen.rounds < 1:
        error(f"--rounds ({chosen.rounds}) must be at least 1: pass a larger number")
    if chosen.ms is not None and not 0 < chosen.ms <= 5000:
        error(f"--ms ({chosen.ms:g}) must be above 0 and at most 5000: pass such a number")
    for name in ("fa3", "fa4", "before", "activations", "limits"):
        path = getattr(chosen, name)
        if path and not pathlib.Path(path).exists():
            error(f"--{name} ({path}) must exist: correct the path")
    for path in chosen.merge or []:
        if not path.exists():
            error(f"--merge ({path}) must exist: correct the path")
    usual = [name for name in PEERS if name != "Flex" and not (chosen.quick and name == "FA2")]
    chosen.peers = several(error, "--peers", chosen.peers, PEERS) if chosen.peers else usual
    kinds = several(error, "--data", chosen.data, tuple(shapes.DATA))
    if "model" in kinds and not chosen.activations:
        error("--activations must be given with --data model: name a file that bench/activations.py wrote")
    of_shape = shapes.chosen(shapes.quick() if chosen.quick else shapes.grid(), chosen.cells)
    chosen.cells = [
        dataclasses.replace(cell, data=kind, backward=chosen.backward) for kind in kinds for cell in of_shape
    ]
    if chosen.part:
        chosen.cells = shapes.part(chosen.cells, *shapes.numbers_of_part(error, chosen.part))
    if not chosen.cells:
        error("--cells and --part must leave a cell: choose other words or another part")
    return chosen


def rounded(x: float | None, digits: int = 3) -> float | None:
    """Returns None for infinities, which JSON lacks."""
    return float(f"{x:.{digits}g}") if x is not None and math.isfinite(x) else None


class Bench:
    def __init__(self, options: argparse.Namespace):
        import torch
        from rig import card, peers, peers_backward, tandem

        self.options, self.confirms_losses = options, False
        self.limits = json.loads(options.limits.read_text()) if options.limits else None
        device = f"cuda:{options.device}"
        try:
            self.context = tandem.Context(device)
            self.before = tandem.other_build(options.before, device) if options.before else None
        except RuntimeError as why:
            raise SystemExit(str(why)) from why
        if options.backward:
            self.peers, self.missing = peers.found([n for n in options.peers if n != "FA3"], None, options.fa4)
            self.peers = peers_backward.found(self.peers, self.missing, options.fa3 if "FA3" in options.peers else None)
        else:
            self.peers, self.missing = peers.found(options.peers, options.fa3, options.fa4)
        self.first_line = peers.first_line
        self.card = card.Card(f"GPU-{torch.cuda.get_device_properties(options.device).uuid}")
        self.other_work = torch.ones(1 << 22, device=device)

    def bind(self, x, absent: dict) -> dict:
        """Returns name -> call, for peers that serve the problem. absent receives the reasons of the rest."""
        from rig import tandem

        ours = tandem.Backward if x.cell.backward else tandem.Forward
        binds = {OURS: lambda x: ours(self.context, x), **self.peers}
        if self.before:
            binds[BEFORE] = lambda x: ours(self.before, x)
        if x.cell.sustained and binds.pop("FA2", None):
            absent["FA2"] = "left out of long windows: it is far behind in bursts already"
        calls = {}
        for name, bind in binds.items():
            try:
                calls[name] = bind(x)
            except Exception as why:  # any failure of a peer, which must not end the run
                absent[name] = self.first_line(why)
        return calls

    def measure(self, cell) -> dict:
        """Returns the problem's result in the form of the JSON."""
        from rig import tandem
        from rig.judge import Judge
        from rig.judge_gradients import GradientJudge

        x = shapes.Inputs(cell, self.options.activations)
        if cell.backward:
            x.out, x.lse = tandem.Forward(self.context, x)()
        judge = GradientJudge(x) if cell.backward else Judge(x)
        result = dict(
            cell=cell.name, title=cell.title, row=cell.row, column=cell.column, dtype=cell.dtype, data=cell.data,
            sustained=cell.sustained, microseconds=cell.microseconds, flops=cell.flops(), target=cell.target, run=0,
            absent={}, wrong={}, errors={}, lse_errors={}, plain=rounded(judge.plain),
        )  # fmt: skip
        if not cell.microseconds and not cell.backward:
            result["ceiling"] = f"d{cell.head_dim if cell.dim_v == cell.head_dim else cell.dim_v}"
        if cell.data != "normal" and not cell.backward:
            result.update(judge.hardness())
        calls = {}
        for name, call in self.bind(x, result["absent"]).items():
            try:
                said = judge(call())
            except Exception as why:
                result["absent"][name] = self.first_line(why)
                continue
            result["errors"][name], result["lse_errors"][name] = rounded(said.error), rounded(said.lse_error)
            if not said.right:
                result["wrong"][name] = said.why()
            if said.right or name == OURS:
                calls[name] = call
        self.time(cell, calls, result)
        figures.conclude(result, self.limits)
        if self.confirms_losses and result.get("verdict") == "lost":
            self.confirm_loss(cell, calls, result)
        return result

    def confirm_loss(self, cell, calls: dict, result: dict) -> None:
        """Times a lost problem again, in rounds of ours and the best peer alone. Both timings must show the loss."""
        again = dict(result, absent={}, wrong={})
        self.time(cell, {name: calls[name] for name in (OURS, result["best"])}, again)
        figures.conclude(again)
        result["again"] = again["ratio"]
        if again["verdict"] != "lost":
            result["verdict"] = "par"

    def time(self, cell, calls: dict, result: dict) -> None:
        """Adds the rounds."""
        from rig import clock

        def other():
            self.other_work.mul_(1.0)

        ms = self.options.ms or (150 if cell.sustained else 20)
        timed = {"other": clock.Timed(other, ms)} if cell.between else {}
        for name, call in calls.items():
            try:
                timed[name] = clock.Timed((lambda call=call: (call(), other())) if cell.between else call, ms)
            except Exception as why:
                result["absent"][name] = self.first_line(why)
        self.card.forget()
        times = clock.interleaved(timed, self.options.rounds, self.card.look)
        apart = times.pop("other", [0.0] * self.options.rounds)
        result["us"] = {
            name: [rounded((t - o) * 1e6, 5) for t, o in zip(rounds, apart)] for name, rounds in times.items()
        }
        result["mhz"] = {name: seen for name, seen in self.card.mhz.items() if name in times}
        result["watts"] = {name: [round(w) for w in seen] for name, seen in self.card.watts.items() if name in times}
        result["host_bound"] = [name for name in times if not timed[name].captured]


def machine(options: argparse.Namespace) -> dict:
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
        commit=options.commit or said("git", "describe", "--always", "--dirty", "--exclude=*") or "unknown",
        date=datetime.date.today().isoformat(),
        command=" ".join(sys.argv),
        rounds=options.rounds,
    )


def cublas(rounds: int) -> dict:
    """Returns TFLOP/s of a large product, which shows the GPU's present speed."""
    import torch
    from rig import clock

    n = 8192
    a, b = (torch.randn(n, n, device=shapes.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    found = {}
    for what, ms in (("burst", 20), ("sustained", 150)):
        timed = clock.Timed(lambda: torch.mm(a, b, out=out), ms)
        times = clock.interleaved({"cuBLAS": timed}, min(rounds, 5))["cuBLAS"]
        found[what] = round(2 * n**3 / statistics.median(times) / 1e12)
    return found


def draw(runs: list[dict], results: list[dict]) -> str:
    from rig import chart

    rows: dict[str, dict] = {}
    for r in results:
        if not r["sustained"] and not r["microseconds"] and r["tflops"]:
            rows.setdefault(r["title"], {})[r["column"]] = {n: v for n, v in r["tflops"].items() if n != BEFORE}
    about = f"{runs[0]['device']}, torch {runs[0]['torch']}, {runs[0]['date']}; median of {runs[0]['rounds']} rounds"
    what = "backward" if results[0]["title"].startswith("backward") else "forward"
    return chart.draw(f"Attention {what}, TFLOP/s by seqlen", about, rows)


def write(options: argparse.Namespace, runs: list[dict], results: list[dict]) -> None:
    if options.json:
        figures.save(options.json, runs, results)
    if options.svg and any(not r["microseconds"] and r["tflops"] for r in results):
        options.svg.write_text(draw(runs, results))


def measure_all(bench: Bench, run: dict) -> list[dict]:
    """Prints every problem's result after it is measured."""
    import torch

    results, title = [], None
    print(f"\n{figures.HEADING}")
    for cell in bench.options.cells:
        if cell.title != title:
            title = cell.title
            print(title, flush=True)
        try:
            results.append(bench.measure(cell))
            print(figures.line(results[-1]), flush=True)
        except torch.OutOfMemoryError:
            print(f"  {cell.column}: not enough memory on this card", flush=True)
        except RuntimeError as why:  # the device has failed and serves no further call
            print(f"  {cell.column}: {bench.first_line(why)}; stopped here", flush=True)
            break
        if bench.options.json:
            figures.save(bench.options.json, [run], results)
        torch.cuda.empty_cache()
    return results


def merge(options: argparse.Namespace) -> int:
    try:
        runs, results = figures.merge(options.merge)
    except ValueError as why:
        raise SystemExit(f"--merge: {why}") from why
    print(figures.table(results))
    print(figures.summary(results))
    write(options, runs, results)
    return any(OURS in r["wrong"] for r in results)


def measure(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "torch must find a CUDA device: run this benchmark on a GPU, or bench/versus_torch.py on a CPU"
        )
    from rig import clock

    torch.cuda.set_device(options.device)
    clock.use_own_stream()
    torch.set_grad_enabled(False)
    run = machine(options)
    print(f"{run['device']}, driver {run['driver']}, torch {run['torch']}, cuDNN {run['cudnn']}")
    bench = Bench(options)
    run.update(tandem=bench.context.description, absent=bench.missing)
    print(f"Tandem: {run['tandem']}, commit {run['commit']}")
    for name, why in bench.missing.items():
        print(f"{name} absent: {why}")
    if bench.card.absent:
        print(f"clock and power absent: {bench.card.absent}")
    if options.costs:
        from rig import costs

        run["costs"] = costs.measured(bench.context)
        write(options, [run], [])
        return 0
    run.update(cublas=cublas(options.rounds), limits=bench.limits)
    print("cuBLAS 8192^3: " + ", ".join(f"{rate} {what}" for what, rate in run["cublas"].items()))
    results = measure_all(bench, run)
    print(figures.summary(results))
    write(options, [run], results)
    return any(OURS in r["wrong"] for r in results)


def main() -> None:
    begin = time.perf_counter()
    options = parse()
    failed = merge(options) if options.merge else measure(options)
    print(f"{time.perf_counter() - begin:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
