#!/usr/bin/env python3
"""Compares the timing model (tandem explain --clocks) with an H200: docs/results/hopper-forward-bench.json.

    python bench/clocks.py build/release/tandem --json clocks.json     # our kernels; needs NVRTC and nvdisasm, no GPU
    python bench/clocks.py build/release/tandem --fa4 <folder>      # FlashAttention-4's for sm_90a: d64_full.cubin, ...
    python bench/clocks.py build/release/tandem --backward          # main kernels of gradients, 4k and longer
    python bench/clocks.py build/release/tandem --variants rates.json cubins/<folder>  # tiles of bench/tune.py --all

The model's parameters were fitted to every second problem of a kernel ("fit"); the rest is for testing ("test"). The
kernels are compiled again, and ptxas is not deterministic, so that the error includes the effect of a recompilation.
Variants use the timed cubins; the parameters were fitted to every second tile of a problem. If the clock rate of a
measurement was recorded, the comparison is in clocks: FLOP per clock of a multiprocessor.
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENS, WIDTH = 16384, 2048  # batch * seqlen, heads * head_dim
SMS, TILE_BYTES = 132, 20  # multiprocessors; bytes per clock of Q and O in the model
CLOSE = 0.03  # a smaller difference counts as equal


def problem_of(cell: dict) -> list[str] | None:
    """The flags of a problem with only a head_dim, a length and an optional causal mask."""
    name = re.fullmatch(r"(?:f16 |untuned )?d(\d+)(?:/(\d+))? (full|causal)", cell["title"])
    if not name or cell["sustained"] or cell["data"] != "normal":
        return None
    head_dim, head_dim_v = int(name[1]), int(name[2] or name[1])
    length = cell["column"]
    seqlen = int(length[:-1]) * 1024 if length.endswith("k") else int(length)
    batch, heads = max(1, TOKENS // seqlen), WIDTH // head_dim_v
    flops = 2 * batch * heads * seqlen * seqlen * (head_dim + head_dim_v) / (2 if name[3] == "causal" else 1)
    if abs(flops / cell["flops"] - 1) > 0.05:
        batch = round(batch * cell["flops"] / flops) or 1
    flags = {"dtype": cell["dtype"], "head-dim": head_dim, "head-dim-v": head_dim_v, "heads": heads, "batch": batch}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    return [*words, "--seqlen", str(seqlen)] + (["--causal"] if name[3] == "causal" else [])


def modelled(tandem: str, flags: list[str]) -> dict:
    done = subprocess.run([tandem, "explain", "--clocks", "--json", "-", *flags], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(flags)}: {done.stderr}")
    return json.loads(done.stdout)


def rate_of(model: dict) -> float:
    """Returns TFLOP/s of the iterations alone, on all multiprocessors."""
    return round(model["flops_a_clock"] * SMS * model["megahertz"] * 1e-6, 1)


def flops_a_clock(problem: str, seqlen: int, tile: str, step: float) -> float:
    """Returns the useful operations of the GPU per clock. Tiles of one length fill whole rounds; with several lengths
    the last rounds are short.
    """
    head_dim, head_dim_v, mask = re.split("[/ ]", problem)
    rows, keys = map(int, re.search(r"_(\d+)x(\d+)x", tile).groups())
    head_dim, head_dim_v, causal = int(head_dim), int(head_dim_v), mask == "bounded"
    heads = WIDTH // head_dim_v * max(1, TOKENS // seqlen)
    m_blocks = math.ceil(seqlen / rows)
    seen = [min(seqlen, (m + 1) * rows) if causal else seqlen for m in range(m_blocks)]  # keys of each tile
    clocks = sum(math.ceil(n / keys) * step + 2 * rows * (head_dim + head_dim_v) / TILE_BYTES for n in seen) / m_blocks
    rounds = m_blocks * heads / SMS
    flops = 2 * heads * seqlen * seqlen * (head_dim + head_dim_v) / (2 if causal else 1)
    return flops / (clocks * (rounds if causal else math.ceil(rounds)))


def backward(tandem: str) -> list[dict]:
    """Models dense gradients if the main kernel adds dq.

    From 4096 queries on the other kernels take a few percent of a call.
    """
    rows = []
    for cell in json.loads((ROOT / "docs/results/hopper-backward-bench.json").read_text())["cells"]:
        name = re.fullmatch(r"(?:f16 )?d(\d+)(?:/(\d+))? (full|causal)", cell["row"])
        if not name or cell["sustained"] or cell["data"] != "normal" or cell["column"] not in ("4k", "16k", "32k"):
            continue
        head_dim, head_dim_v, seqlen = int(name[1]), int(name[2] or name[1]), int(cell["column"][:-1]) * 1024
        if head_dim > 128:  # dS in global memory: two kernels
            continue
        of_one = 5 * seqlen * seqlen * (head_dim + head_dim_v) / (2 if name[3] == "causal" else 1)
        heads = WIDTH // head_dim_v
        flags = ["--dtype", cell["dtype"], "--head-dim", head_dim, "--head-dim-v", head_dim_v, "--heads", heads]
        flags += ["--batch", max(1, round(cell["flops"] / of_one / heads)), "--seqlen", seqlen]
        flags += ["--causal"] if name[3] == "causal" else []
        model = modelled(tandem, ["--card", "h200", "--backward", *map(str, flags)])
        if "turns" not in model:
            print(cell["cell"], "is left out: the model does not play the tiles of", model["kernel"])
            continue
        row = {"cell": cell["cell"], "kernel": model["kernel"], "step": round(model["step"])}
        ratio = cell["flops"] / model["turns"]["flops"]  # the benchmark's count
        tflops = model["turns"]["flops"] * ratio * model["megahertz"] / model["turns"]["clocks"] * 1e-6
        rows.append({**row, "measured": cell["tflops"]["Tandem"], "modelled": round(tflops, 1)})
    return rows


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(k) for k in range(len(values))]


def errors_of(rows: list[dict]) -> list[float]:
    return [abs(row["modelled"] / row["measured"] - 1) for row in rows]


def choices(rows: list[dict]) -> list[bool]:
    """Returns, for each pair of tiles with different times, whether the model predicts the faster tile."""
    pairs = [(a, b) for k, a in enumerate(rows) for b in rows[:k] if abs(a["measured"] / b["measured"] - 1) > CLOSE]
    return [(a["modelled"] > b["modelled"]) == (a["measured"] > b["measured"]) for a, b in pairs]


def judge_pairs(problems: dict[str, list[dict]], title: str) -> None:
    """Returns the pairs within each problem."""
    errors = [e for rows in problems.values() for e in errors_of(rows)]
    right = [r for rows in problems.values() for r in choices(rows)]
    error, share = statistics.median(errors), statistics.mean(right)
    print(f"{title}: {len(errors)} tiles, median error {error:.3f}, right {share:.3f}")


def judge(rows: list[dict], title: str) -> dict:
    errors, right = errors_of(rows), choices(rows)
    rank = statistics.correlation(ranks([r["modelled"] for r in rows]), ranks([r["measured"] for r in rows]))
    result = {
        "cells": len(rows),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "rank_correlation": round(rank, 3),
        "right_choices": round(sum(right) / max(1, len(right)), 3),
    }
    print(f"{title:<6} {result}")
    return result


def variants(tandem: str, measured: dict, folder: Path) -> tuple[dict, list[dict]]:
    """For each problem, compares the ranking of the timed tiles with a GPU's."""
    rows, found = [], {}
    for problem, by_length in measured["rates"].items():
        timed = [(int(n), name, rate) for n, tiles in by_length.items() for name, rate in tiles.items()]
        with ThreadPoolExecutor(2) as pool:
            models = pool.map(lambda entry: modelled(tandem, ["--cubin", str(folder / f"{entry[1]}.cubin")]), timed)
        of_problem = []
        for (seqlen, name, rate), model in zip(timed, models, strict=True):
            row = {"cell": problem, "kernel": name, "step": round(model["step"])}
            clock = measured.get("megahertz", {}).get(problem, {}).get(str(seqlen), {}).get(name)
            of_clock = flops_a_clock(problem, seqlen, name, model["step"])
            if clock:
                row |= {"tflops": round(rate, 1), "megahertz": clock}
                row |= {"measured": round(rate / clock * 1e6 / SMS), "modelled": round(of_clock / SMS)}
            else:  # TFLOP/s
                row |= {"measured": round(rate, 1), "modelled": round(of_clock * model["megahertz"] * 1e-6, 1)}
            of_problem.append(row)
        rows += of_problem
        if len(of_problem) > 3:
            parts = {"all": of_problem, "fit": of_problem[::2], "test": of_problem[1::2]}
            found[problem] = {title: judge(part, f"{problem}, {title}:") for title, part in parts.items()}
    for title, first, every in (("all", 0, 1), ("fit", 0, 2), ("test", 1, 2)):
        judge_pairs({problem: [r for r in rows if r["cell"] == problem][first::every] for problem in found}, title)
    return found, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem")
    parser.add_argument("--fa4", type=Path, help="folder of FlashAttention-4's cubins: longest cells, steps alone")
    parser.add_argument("--backward", action="store_true", help="gradients beside hopper-backward-bench.json")
    parser.add_argument("--variants", nargs=2, type=Path, metavar=("RATES", "FOLDER"), help="of bench/tune.py --all")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    if args.variants:
        measured = json.loads(args.variants[0].read_text())
        found, rows = variants(args.tandem, measured, args.variants[1])
        if args.json:
            lines = ",\n".join(json.dumps(row) for row in rows)
            unit = "FLOP a clock and multiprocessor" if "megahertz" in measured else "TFLOP/s"
            head = f'"device": "{measured["device"]}", "unit": "{unit}", "problems": {json.dumps(found, indent=1)}'
            args.json.write_text(f'{{{head},\n"variants": [\n{lines}\n]}}\n')
        return
    cells = json.loads((ROOT / "docs/results/hopper-forward-bench.json").read_text())["cells"]
    rows = []
    if args.backward:
        rows = backward(args.tandem)
    elif args.fa4:
        for cell in cells:
            name = cell["title"].replace(" ", "_").replace("/128", "")
            file = args.fa4 / f"{name}.cubin"
            if cell["column"] != "32k" or cell["sustained"] or cell["data"] != "normal" or not file.exists():
                continue
            model = modelled(args.tandem, ["--cubin", str(file)])
            rows.append({"cell": cell["cell"], "measured": cell["tflops"]["FA4"], "modelled": rate_of(model)})
    else:
        known = [(cell, flags) for cell in cells if (flags := problem_of(cell))]
        with ThreadPoolExecutor(2) as pool:
            models = pool.map(lambda entry: modelled(args.tandem, ["--card", "h200", *entry[1]]), known)
        for (cell, _), model in zip(known, models, strict=True):
            row = {"cell": cell["cell"], "kernel": model["kernel"], "step": round(model["step"]), **model["grid"]}
            rows.append({**row, "measured": cell["tflops"]["Tandem"], "modelled": round(model["tflops"], 1)})
    for row in rows:
        print(f"{row['cell']:<28} measured {row['measured']:6.1f}  modelled {row['modelled']:6.1f}")
    halves = {"fit": judge(rows[::2], "fit"), "test": judge(rows[1::2], "test")} if len(rows) > 3 else {}
    if args.json:
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.json.write_text(f'{{"halves": {json.dumps(halves)},\n"cells": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
