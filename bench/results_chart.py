#!/usr/bin/env python3
"""Draws the chart of README.md from docs/results: Tandem, FlashAttention-3 and cuDNN on an H200.

python bench/results_chart.py        # writes docs/images/h200.svg; needs no GPU
"""

from __future__ import annotations

import json
import pathlib

from rig import chart

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
SHOWN = ("Tandem", "FA3", "cuDNN")
TABLES = {"forward": "hopper-forward-bench.json", "backward": "hopper-backward-bench.json"}
TITLE = "bfloat16 attention on one H200, TFLOP/s"
SUBTITLE = "Causal mask; heads x head_dim = 2048; 16k tokens in all (32k: one sequence); medians of bursts"


def rates(table: str, row: str) -> dict[str, dict[str, float]]:
    """Returns TFLOP/s of one row by column and name."""
    cells = json.loads((DOCS / "results" / table).read_text())["cells"]
    plain = [c for c in cells if c["row"] == row and c["data"] == "normal" and not c["sustained"]]
    return {c["column"]: {name: c["tflops"][name] for name in SHOWN if name in c["tflops"]} for c in plain}


def main() -> None:
    rows = {}
    for head_dim in (64, 128, 256):
        for direction, table in TABLES.items():
            rows[f"{direction}, head_dim {head_dim}"] = rates(table, f"d{head_dim} causal")
    (DOCS / "images" / "h200.svg").write_text(chart.draw(TITLE, SUBTITLE, rows))


if __name__ == "__main__":
    main()
