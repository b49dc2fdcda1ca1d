#!/usr/bin/env python3
"""Runs FlashAttention-4's backwards for Blackwell on the virtual GPU, under several schedules, and prints a table. The
columns are the error of the gradients over its bound, and the checker's findings in the main kernel. Another column
shows whether the float32 sums of dq have the same bits under every schedule. The program needs no GPU; run it in the
environment that sass/cli/fa4_cubin.py describes.

  python vgpu/examples/fa4_backwards.py build/release/tandem ptx --schedules 6

The second argument is the folder of the kernels' PTX: missing files are compiled first. Exit code 1 where a
result is wrong, or where the result of a deterministic kernel depends on the schedule.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parent / "flash_attention_4.py"
CASES = [
    f"bwd_{kind}{form}"
    for kind, forms in (
        ("d64", ("", "_deterministic")),
        ("d64_causal", ("", "_deterministic")),
        ("d128", ("", "_deterministic", "_one_cta", "_one_cta_deterministic")),
        ("d128_causal", ("", "_deterministic", "_one_cta", "_one_cta_deterministic")),
    )
    for form in forms
]
# The problems have partial last tiles, one query, few keys, or several sequences.
PROBLEMS = [
    {"seqlen-q": 300, "seqlen-k": 400, "heads": 2},
    {"seqlen-q": 513, "seqlen-k": 130, "heads": 1},
    {"seqlen-q": 1, "seqlen-k": 300, "heads": 2},
    {"seqlen-q": 130, "seqlen-k": 600, "heads": 3, "batch": 2},
]
WITHIN = re.compile(r"(\w+): all \d+ elements are as in \S+ the largest error is (\S+), (\S+) is allowed")


def said(command: list, good: tuple[int, ...] = (0,)) -> str:
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if run.returncode not in good:
        sys.exit(f"{' '.join(str(word) for word in command)}\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


class Kernels:
    """The three kernels of a backward, launched for one problem."""

    def __init__(self, tandem: str, ptx: Path, problem: dict, folder: Path) -> None:
        self.tandem, self.ptx, self.folder = tandem, ptx, folder
        flags = [word for name, value in problem.items() for word in (f"--{name}", value)]
        said([sys.executable, EXAMPLE, "launch", ptx, "--out", folder, *flags])

    def command(self, verb: str, part: str) -> list:
        kernel = self.ptx if part == "main" else self.ptx.with_suffix(f".{part}.ptx")
        return [self.tandem, "vgpu", verb, kernel, "--launch", self.folder / f"{part}.json"]

    def run(self, schedule: int) -> tuple[dict, str]:
        """Returns the error over its bound of each gradient, infinite if wrong, and a digest of the sums of dq."""
        parts = dict.fromkeys(("dq", "dk", "dv"), float("inf"))
        for part in ("pre", "main", "post"):
            more = ["--schedule", schedule, "--out", self.folder / part]
            text = said([*self.command("run", part), *more], good=(0, 1))
            found = WITHIN.findall(" ".join(text.split()))  # lines are wrapped to the width of a terminal
            parts |= {name: float(error) / float(allowed) for name, error, allowed in found}
        return parts, hashlib.sha256((self.folder / "main/dq_accum.npy").read_bytes()).hexdigest()

    def check(self, schedules: int) -> tuple[set, set]:
        """The rules that the main kernel breaks: errors, and findings by the letter."""
        path = self.folder / "findings.json"
        said([*self.command("check", "main"), "--schedules", schedules, "--json", path], good=(0, 1))
        findings = json.loads(path.read_text())["findings"]
        by_grade = [{f["rule"] for f in findings if f["grade"] == grade} for grade in ("error", "letter")]
        return by_grade[0], by_grade[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedules", type=int, default=6)
    arguments = parser.parse_args()
    missing = [case for case in CASES if not (arguments.folder / f"sm_100a/{case}.post.ptx").exists()]
    if missing:
        said([sys.executable, EXAMPLE, "dump", arguments.folder, *missing])
    print("| kernel | dq | dk | dv | sums of dq | errors | by the letter |\n|---|---|---|---|---|---|---|")
    wrong = False
    for case in CASES:
        worst, sums, errors, letter = {}, set(), set(), set()
        for problem in PROBLEMS:
            with tempfile.TemporaryDirectory() as folder:
                kernels = Kernels(arguments.tandem, arguments.folder / f"sm_100a/{case}.ptx", problem, Path(folder))
                runs = [kernels.run(schedule) for schedule in range(arguments.schedules)]
                for parts, _ in runs:
                    worst = {name: max(part, worst.get(name, 0)) for name, part in parts.items()}
                sums.add(len({digest for _, digest in runs}))
                found = kernels.check(arguments.schedules)
                errors, letter = errors | found[0], letter | found[1]
        same = sums == {1}
        wrong = wrong or max(worst.values()) > 1 or ("deterministic" in case and not same)
        bits = "same bits" if same else f"up to {max(sums)} of {arguments.schedules}"
        cells = [f"{100 * worst[name]:.0f} %" for name in ("dq", "dk", "dv")]
        lists = [", ".join(sorted(rules)) or "none" for rules in (errors, letter)]
        print("|", " | ".join([case, *cells, bits, *lists]), "|", flush=True)
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
