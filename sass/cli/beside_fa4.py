#!/usr/bin/env python3
"""Compares Tandem's Blackwell forward and backward with FlashAttention-4's in tables.

The columns are clocks and rate of a modelled step, instructions of a warp per role, issue slots of all roles, and the
longest wait. The program needs no GPU. Run this program in the environment that fa4_cubin.py describes.

  python sass/cli/beside_fa4.py build/release/tandem cubins

The second argument is the folder of FlashAttention-4's cubins. Missing cubins are compiled first.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROBLEM = ["--device", "vgpu:b200", "--dtype", "bf16", "--heads", "16", "--seqlen", "4096"]
ONE_CTA = "one CTA"

# Each case has a name, Tandem's flags and FlashAttention-4's flags.
FORWARD = [
    (f"d{dim}{', causal' if causal else ''}", ["--head-dim", dim] + more + causal, [])
    for dim, more in [("64", []), ("128", []), ("192", ["--head-dim-v", "128"]), ("256", [])]
    for causal in ([], ["--causal"])
]
# Tandem's backward is always deterministic, FlashAttention-4's only in the cases of that name.
BACKWARD = [
    (f"d{dim}{', ' + form if form else ''}{', causal' if causal else ''}", ["--head-dim", str(dim)] + causal, flags)
    for dim, form, flags in [
        (64, "", []),
        (64, "deterministic", ["--deterministic"]),
        (128, "", []),
        (128, "deterministic", ["--deterministic"]),
        (128, ONE_CTA, ["--one-cta"]),
    ]
    for causal in ([], ["--causal"])
]


def modelled(tandem: str, arguments: list[str]) -> dict:
    command = [tandem, "explain", "--clocks", "--json", "-", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cubin(folder: Path, name: str, flags: list[str]) -> Path:
    path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.cubin"
    if not path.exists():
        compiler = [sys.executable, HERE / "fa4_cubin.py", path, *flags]
        subprocess.run(compiler, check=True, stdout=subprocess.DEVNULL)
    return path


def row_of(kernel: dict, roles: tuple[str, ...]) -> list[str]:
    of_block = [role for role in kernel["roles"] if role["block"] == 0]
    instructions = {role["role"]: round(role["instructions"]) for role in of_block}
    slots = sum(role["instructions"] * role["warps"] for role in of_block)
    step = f"{kernel['step']:.0f} ({kernel['step_least']:.0f}-{kernel['step_most']:.0f})"
    counts = "/".join(str(instructions.get(role, 0)) for role in roles)
    binds = kernel["chain"][0]
    rate = f"{kernel['flops_a_clock']:.0f}"
    return [step, rate, str(kernel["assumed"]), counts, f"{slots:.0f}", f"{binds['what']} {binds['clocks']:.0f}"]


def table(tandem: str, folder: Path, kind: str, cases: list, flags: list[str], roles: tuple[str, ...]) -> None:
    head = ["whose", "clocks a step", "FLOP a clock", "assumed", "/".join(roles), "slots", "most of the chain"]
    print(f"| {kind} | {' | '.join(head)} |\n{'|---' * (1 + len(head))}|")
    for name, ours, theirs in cases:
        kernel = cubin(folder, f"{kind}, {name}", flags + ours + theirs)
        if ONE_CTA in name:
            ours = [*ours, "--seqlen-k", "128"]  # too few keys for two CTAs
        for whose, found in [
            ("ours", modelled(tandem, [*flags, *PROBLEM, *ours])),
            ("FlashAttention-4", modelled(tandem, ["--cubin", str(kernel)])),
        ]:
            print("|", " | ".join([name if whose == "ours" else "", whose, *row_of(found, roles)]), "|", flush=True)
    print()


def main() -> None:
    tandem, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    table(tandem, folder, "forward", FORWARD, [], ("softmax", "mma", "correction", "load"))
    table(tandem, folder, "backward", BACKWARD, ["--backward"], ("softmax", "mma", "reduction", "load"))


if __name__ == "__main__":
    main()
