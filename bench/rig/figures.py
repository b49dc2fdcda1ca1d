"""Summaries of a problem's raw rounds, in numbers and in lines. The module needs neither torch nor a GPU.

A problem's result is a dictionary as written to the JSON; docs/results/README.md defines its fields.
"""

from __future__ import annotations

import json
import pathlib
import statistics

OURS, BEFORE = "Tandem", "before"
ALL_THREE = ("FA3", "FA4", "cuDNN")  # the peers of a claim
PAR = 0.015  # ratios closer to 1 are par


def seconds(result: dict, name: str) -> float:
    return statistics.median(result["us"][name]) * 1e-6


def rate(result: dict, name: str) -> float:
    """TFLOP/s."""
    return result["flops"] / seconds(result, name) / 1e12


def peers(result: dict) -> list[str]:
    """Returns the name of the fastest peer."""
    names = [name for name in result["us"] if name not in (OURS, BEFORE)]
    return sorted(names, key=lambda name: seconds(result, name))


def verdict(ratio: float) -> str:
    return "par" if abs(ratio - 1) <= PAR else "won" if ratio > 1 else "lost"


def quartiles(values: list[float]) -> list[float]:
    """Returns the ends of the middle half."""
    if len(values) < 2:
        return [values[0], values[0]]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return [lower, upper]


def conclude(result: dict, limits: dict | None = None) -> dict:
    """Adds summaries to the raw rounds. ratio: the best peer's time in a round divided by ours, the median."""
    result["tflops"] = {name: round(rate(result, name), 1) for name in result["us"]}
    if OURS not in result["us"]:
        return result
    ours, others = result["us"][OURS], peers(result)
    if others:
        best = [min(times) for times in zip(*(result["us"][name] for name in others))]
        ratios = [b / o for b, o in zip(best, ours)]
        result["best"] = others[0]
        result["ratio"] = round(statistics.median(ratios), 4)
        result["ratio_quartiles"] = [round(x, 4) for x in quartiles(ratios)]
        result["verdict"] = "wrong" if OURS in result["wrong"] else verdict(result["ratio"])
    if BEFORE in result["us"]:
        result["before"] = round(statistics.median(b / o for b, o in zip(result["us"][BEFORE], ours)), 4)
    if limits and "ceiling" in result:
        kind = "sustained" if result["sustained"] else "burst"
        result["of_ceiling"] = round(rate(result, OURS) / limits["mma"][result["ceiling"]][kind], 3)
    return result


HEADING = (
    "TFLOP/s, ratio to the best peer of each round and its middle half, share of the ceiling, SM clock and power, "
    "error of ours / of the plain formula; *: host-bound"
)


def _figure(result: dict, name: str) -> str:
    shown = f"{seconds(result, name) * 1e6:.2f} us" if result["microseconds"] else f"{rate(result, name):.0f}"
    return shown + ("*" if name in result["host_bound"] else "")


def line(result: dict) -> str:
    """Returns the heading of the table."""
    ours = OURS in result["us"]
    parts = [f"  {result['column']:12}{_figure(result, OURS) if ours else '-':>8}"]
    if OURS in result["wrong"]:
        parts.append("WRONG")
    if "ratio" in result:
        low, high = result["ratio_quartiles"]
        parts.append(f"{result['ratio']:6.3f} ({low:.3f} to {high:.3f}) {result['verdict']:5}")
        if result["ratio"] < result["target"] * (1 - PAR):
            parts.append(f"< {result['target']:.2f}")
    if "of_ceiling" in result:
        parts.append(f"{result['of_ceiling']:.2f}")
    if ours and result.get("mhz", {}).get(OURS):
        clock, power = (statistics.median(result[of][OURS]) for of in ("mhz", "watts"))
        parts.append(f"{clock:.0f} MHz {power:.0f} W")
    if OURS in result["errors"]:
        error = result["errors"][OURS]
        parts.append(f"{'no number' if error is None else f'{error:.1e}'} / {result['plain']:.1e}")
    if "rescaled_steps" in result:
        parts.append(f"rescaled {result['rescaled_steps']:.0%} of steps, redone {result['redone_tiles']:.0%} of tiles")
    if "before" in result:
        parts.append(f"before {result['before']:.3f}")
    others = [f"{name} {_figure(result, name)}" for name in peers(result)]
    parts.append(", ".join(others + [f"{name} WRONG" for name in result["wrong"] if name != OURS]))
    return "  ".join(parts)


def absences(results: list[dict]) -> list[str]:
    """Returns the missing peers by problem, with reasons, and the wrong peers with their first error."""
    where: dict[tuple, list] = {}
    for result in results:
        for name, why in result["absent"].items():
            where.setdefault((name, "absent", why), []).append(result["cell"])
        for name in result["wrong"]:
            where.setdefault((name, "WRONG", ""), []).append(result["cell"])
    first = {name: why for result in reversed(results) for name, why in result["wrong"].items()}
    return [
        f"{name} {what} in {len(cells)} ({cells[0]}{', ...' if len(cells) > 1 else ''}): {why or first[name]}"
        for (name, what, why), cells in where.items()
    ]


def claim(results: list[dict]) -> str:
    """Returns the number of problems won, and the peers that they were won against."""
    judged = [r for r in results if "verdict" in r]
    if not judged:
        return "no cell has both Tandem and a peer"
    counts = [f"{sum(r['verdict'] == v for r in judged)} {v}" for v in ("won", "par", "lost", "wrong")]
    served = sum(all(name in r["us"] for name in ALL_THREE) for r in judged)
    return (
        f"{len(judged)} cells: {', '.join(c for c in counts if c != '0 wrong')} (par: within {PAR:.1%}); "
        f"{served} against all three of {', '.join(ALL_THREE)}"
    )


def summary(results: list[dict]) -> str:
    rows: dict[str, list] = {}
    for result in results:
        if "ratio" in result:
            rows.setdefault(result["title"], []).append(result)
    lines = ["", "rows, by the least ratio of their cells:"]
    for title, cells in rows.items():
        counts = {v: sum(c["verdict"] == v for c in cells) for v in ("won", "par", "lost", "wrong")}
        said = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
        lines.append(f"  {title:32} least {min(c['ratio'] for c in cells):.3f}: {said}")
    lines.append(claim(results))
    before = [r["before"] for r in results if "before" in r]
    if before:
        lines.append(f"before / now: median {statistics.median(before):.3f}, {min(before):.3f} to {max(before):.3f}")
    return "\n".join(lines + absences(results))


def table(results: list[dict]) -> str:
    """Returns the lines that a run prints, one per problem."""
    lines, title = ["", HEADING], None
    for result in results:
        if result["title"] != title:
            title = result["title"]
            lines.append(title)
        lines.append(line(result))
    return "\n".join(lines)


def save(path: pathlib.Path, runs: list[dict], results: list[dict]) -> None:
    """Returns the table with one problem per line."""
    body = ",\n".join(json.dumps(result) for result in results)
    path.write_text(f'{{"runs": {json.dumps(runs, indent=1)},\n"cells": [\n{body}\n]}}\n')


def merge(paths: list[pathlib.Path]) -> tuple[list[dict], list[dict]]:
    """Returns (runs, problems) of several runs that measured parts of one table, each problem once."""
    runs, results = [], []
    for path in paths:
        part = json.loads(path.read_text())
        for cell in part["cells"]:
            results.append({**cell, "run": cell["run"] + len(runs)})
        runs += part["runs"]
    commits = {run["commit"] for run in runs}
    if len(commits) > 1:
        raise ValueError(
            f"parts must be of one commit, not of {', '.join(sorted(commits))}: measure them again with one"
        )
    names = [result["cell"] for result in results]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"parts must have each cell once (twice: {', '.join(twice)}): omit a part")
    return runs, results
