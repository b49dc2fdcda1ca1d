#!/usr/bin/env python3
"""Reduces the raw rounds of a benchmark to medians and spreads: the form in which docs/results keeps them.

    python bench/gpu.py --json raw.json && python bench/compact.py raw.json docs/results/hopper-forward-bench.json
    python bench/compact.py raw.json docs/results/hopper-options.json --about device="NVIDIA H200" commit=85f929d

A list of rounds becomes its median. The spread is the width of the middle half of the rounds, as a part of the median.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics

DROPPED = ("absent", "errors", "lse_errors", "plain", "target", "watts", "microseconds", "of_ceiling", "right")
EMPTY = ({}, [], None)


def median(rounds: list[float]) -> float:
    middle = float(f"{statistics.median(rounds):.5g}")
    return int(middle) if middle.is_integer() else middle


def spread(rounds: list[float]) -> float:
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return round((high - low) / statistics.median(rounds), 4)


def has_rounds(value: object) -> bool:
    """Returns True for a dictionary from a name to the figures of its rounds."""
    return isinstance(value, dict) and bool(value) and all(isinstance(x, list) for x in value.values())


def compact_row(row: dict) -> dict:
    found = {}
    for key, value in row.items():
        if key in DROPPED or any(value == empty for empty in EMPTY):
            continue
        if has_rounds(value):
            found[key] = {name: median(rounds) for name, rounds in value.items() if rounds}
            if key != "mhz":
                found[f"{key} spread"] = {name: spread(rounds) for name, rounds in value.items() if len(rounds) > 1}
        else:
            found[key] = value
    return found


def compact_run(run: dict) -> dict:
    """Keeps the conditions of a run, and the ceilings of the tensor core in TFLOP/s."""
    found = {key: value for key, value in run.items() if key not in ("limits", "absent") and value not in EMPTY}
    if run.get("limits"):
        mma = run["limits"]["mma"]
        found["ceilings"] = {name: {kind: round(rate, 1) for kind, rate in of.items()} for name, of in mma.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=pathlib.Path)
    parser.add_argument("compact", type=pathlib.Path)
    parser.add_argument("--about", nargs="*", default=[], metavar="KEY=VALUE", help="conditions of the run")
    args = parser.parse_args()
    raw = json.loads(args.raw.read_text())
    about = dict(word.split("=", 1) for word in args.about)
    runs = [compact_run(run) for run in raw["runs"]] if isinstance(raw, dict) else [about]
    rows = [compact_row(row) for row in (raw["cells"] if isinstance(raw, dict) else raw)]
    lines = (",\n".join(json.dumps(row) for row in part) for part in (runs, rows))
    args.compact.write_text('{{"runs": [\n{}\n],\n"cells": [\n{}\n]}}\n'.format(*lines))


if __name__ == "__main__":
    main()
