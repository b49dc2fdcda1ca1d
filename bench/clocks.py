#!/usr/bin/env python3
"""The timing model (tandem explain --clocks) beside what an H200 measured: docs/results/hopper-forward-bench.json.

  python bench/clocks.py build/release/tandem --json clocks.json     # our kernels; needs NVRTC and nvdisasm, no GPU
  python bench/clocks.py build/release/tandem --fa4 <folder>      # FlashAttention-4's for sm_90a: d64_full.cubin, ...
  python bench/clocks.py build/release/tandem --variants rates.json cubins/<folder>  # all tiles of bench/tune.py --all

Every second cell of a kernel was looked at when the model's figures were chosen ("fit"); the others were not ("test").
The kernels are compiled anew, and ptxas does not repeat itself: the error includes what another compilation changes.
Not so of variants, whose cubins are those that were timed: there the steps alone are modelled, and none was looked at.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENS, WIDTH = 16384, 2048  # batch * seqlen, heads * head_dim
CLOSE = 0.03  # two cells of one problem that differ by less are no choice


def problem_of(cell: dict) -> list[str] | None:
    """Flags of a cell that has nothing but a head_dim, a length and perhaps a causal mask."""
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
    """TFLOP/s of steps alone, on all multiprocessors."""
    return round(model["flops_a_clock"] * 132 * model["megahertz"] * 1e-6, 1)


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(k) for k in range(len(values))]


def judge(rows: list[dict], title: str) -> dict:
    errors = [abs(row["modelled"] / row["measured"] - 1) for row in rows]
    rank = statistics.correlation(ranks([r["modelled"] for r in rows]), ranks([r["measured"] for r in rows]))
    pairs = [(a, b) for k, a in enumerate(rows) for b in rows[:k] if abs(a["measured"] / b["measured"] - 1) > CLOSE]
    right = [(a["modelled"] > b["modelled"]) == (a["measured"] > b["measured"]) for a, b in pairs]
    result = {
        "cells": len(rows),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "rank_correlation": round(rank, 3),
        "right_choices": round(sum(right) / max(1, len(right)), 3),
    }
    print(f"{title:<6} {result}")
    return result


def variants(tandem: str, rates: dict, folder: Path) -> tuple[dict, list[dict]]:
    """Of each problem the tiles that were timed, by their steps: how far they are ranked as a GPU ranks them."""
    rows, found = [], {}
    for problem, by_length in rates.items():
        timed = [entry for tiles in by_length.values() for entry in tiles.items()]
        with ThreadPoolExecutor(2) as pool:
            models = pool.map(lambda entry: modelled(tandem, ["--cubin", str(folder / f"{entry[0]}.cubin")]), timed)
        of_problem = [
            {
                "cell": problem,
                "kernel": name,
                "step": round(model["step"]),
                "measured": round(rate, 1),
                "modelled": rate_of(model),
            }
            for (name, rate), model in zip(timed, models, strict=True)
        ]
        rows += of_problem
        if len(of_problem) > 3:
            found[problem] = judge(of_problem, problem)
    return found, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem")
    parser.add_argument("--fa4", type=Path, help="folder of FlashAttention-4's cubins: longest cells, steps alone")
    parser.add_argument("--variants", nargs=2, type=Path, metavar=("RATES", "FOLDER"), help="of bench/tune.py --all")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    if args.variants:
        rates = json.loads(args.variants[0].read_text())
        found, rows = variants(args.tandem, rates["rates"], args.variants[1])
        if args.json:
            lines = ",\n".join(json.dumps(row) for row in rows)
            head = f'"device": "{rates["device"]}", "problems": {json.dumps(found, indent=1)}'
            args.json.write_text(f'{{{head},\n"variants": [\n{lines}\n]}}\n')
        return
    cells = json.loads((ROOT / "docs/results/hopper-forward-bench.json").read_text())["cells"]
    rows = []
    if args.fa4:
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
        args.json.write_text(json.dumps({"halves": halves, "cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
