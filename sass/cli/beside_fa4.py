#!/usr/bin/env python3
"""Compares Tandem's Blackwell forward and backward with FlashAttention-4's in the clock model.

Each ratio is Tandem's clocks to FlashAttention-4's. The range has the ratio with every charge (sass/docs/clocks.md)
halved and doubled, one after the other and all together. A verdict that flips in this range is "unknown". The program
needs no GPU. Run this program in the environment that fa4_cubin.py describes.

  python sass/cli/beside_fa4.py build/release/tandem cubins [forward|backward]

The second argument is the folder of FlashAttention-4's cubins. Missing cubins are compiled first.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROBLEM = ["--device", "vgpu:b200", "--dtype", "bf16", "--heads", "16"]
SEQLEN = {"forward": ["--seqlen", "4096"], "backward": ["--seqlen", "16384"]}
ROLES = ("softmax", "mma", "correction", "staging", "reduction", "load")
BOUNDS = {"forward": 0.97, "backward": 1.0}  # ratios of clocks that Tandem must not exceed

HEADS = [("d64", ["--head-dim", "64"]), ("d128", ["--head-dim", "128"])]
HEADS += [("(192,128)", ["--head-dim", "192", "--head-dim-v", "128"]), ("d256", ["--head-dim", "256"])]
# FlashAttention-4's kernels of the backward at head_dim 256, and their iterations for 128 x 128 scores. Both are
# deterministic, because neither adds to global memory.
PARTS = [("dq", 1), ("dkdv", 2)]
# The model needs scores, which Tandem's dq kernel of head_dim 256 does not have. The kernel moves 160 KiB through
# shared memory for 128 x 128 scores: 1280 clocks. The first pass's modelled clocks are 1.22 times its counted clocks.
# The same factor applies here.
DQ_KERNEL = 1567


def modelled(tandem: str, arguments: list[str], other: Path) -> list[dict]:
    """Returns the models of Tandem's kernel and of the other kernel, whose tiles run in Tandem's order."""
    command = [tandem, "explain", "--clocks", "--json", "-", *arguments, "--beside", str(other)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    ours, end = json.JSONDecoder().raw_decode(text)
    return [ours, json.loads(text[end:])]


def cubin(folder: Path, flags: list[str]) -> Path:
    name = "_".join(flag.strip("-") for flag in flags) + ".cubin"
    path = folder / name
    if not path.exists():
        compiler = [sys.executable, HERE / "fa4_cubin.py", path, *flags]
        subprocess.run(compiler, check=True, stdout=subprocess.DEVNULL)
    return path


def clocks(kernel: dict, step: float) -> float:
    """Returns clocks for 10^6 floating-point operations of a CTA, because iterations differ between kernels."""
    return 1e6 * step / (kernel["flops_a_clock"] * kernel["step"])


def further(kernel: dict) -> float:
    return kernel["second_pass"] + kernel.get("dq_kernel", 0)


def ratios(ours: dict, theirs: dict, work: float) -> list[float]:
    """Returns the ratio as modelled, then with each charge halved and doubled. work: FLOP of theirs to ours."""

    def step(kernel: dict, charge: str, factor: float) -> float:
        for one in kernel["variations"]:
            if (one["charge"], one["factor"]) == (charge, factor):
                return one["step"] + further(kernel)
        return kernel["step"] + further(kernel)

    names = sorted({one["charge"] for kernel in (ours, theirs) for one in kernel["variations"]})
    cases = [("", 1.0)] + [(name, factor) for name in names for factor in (0.5, 2.0)]
    return [work * step(ours, *case) / step(theirs, *case) for case in cases]


def together(kernels: list[tuple[dict, int]]) -> dict:
    """Returns the model of kernels that run one after the other, with their iterations."""
    main = max(kernels, key=lambda one: one[1] * one[0]["step"])[0]
    names = {(one["charge"], one["factor"]) for kernel, _ in kernels for one in kernel["variations"]}

    def varied(kernel: dict, charge: str, factor: float) -> float:
        same = [one for one in kernel["variations"] if (one["charge"], one["factor"]) == (charge, factor)]
        return same[0]["step"] if same else kernel["step"]

    def total(name: str) -> float:
        return sum(times * kernel[name] for kernel, times in kernels)

    variations = [
        {"charge": charge, "factor": factor, "step": sum(times * varied(k, charge, factor) for k, times in kernels)}
        for charge, factor in sorted(names)
    ]
    result = {name: total(name) for name in ("step", "step_least", "step_most")}
    doubt = "; ".join(kernel["doubt"] for kernel, _ in kernels if kernel["doubt"])
    result |= {"second_pass": 0, "variations": variations, "doubt": doubt}
    return result | {"roles": main["roles"], "chain": main["chain"]}


def verdict(bound: float, found: list[float], doubts: list[str]) -> str:
    if any(doubts):
        return "unknown: a loop is not followed"
    if max(found) <= bound:
        return f"at most {bound}"
    return f"above {bound}" if min(found) > bound else "unknown: flips"


def row(kernel: dict) -> list[str]:
    roles = {role["role"]: round(role["instructions"]) for role in kernel["roles"] if role["block"] == 0}
    parts = (kernel["second_pass"], kernel.get("dq_kernel", 0))
    second = "".join(f" + {part:.0f}" for part in parts if part)
    step = f"{kernel['step']:.0f}{second} ({kernel['step_least']:.0f}-{kernel['step_most']:.0f})"
    dq, turns = kernel.get("dq"), kernel.get("turns")
    path = f"{dq['step']:.0f}, {dq['hand_over']:.0f}" if dq else ""
    total = f"{turns['clocks'] / 1e3:.0f}k, {100 * turns['waiting']:.1f} %" if turns else ""
    return [step, "/".join(str(roles.get(role, 0)) for role in ROLES), path, total]


def longest_wait(kernel: dict) -> str:
    return f"{kernel['chain'][0]['what']} {kernel['chain'][0]['clocks']:.0f}"


def compare(tandem: str, folder: Path, kind: str) -> None:
    print(f"| {kind} | kernel | clocks an iteration | {'/'.join(ROLES)} | dq path, hand-over | total, waiting |")
    print(f"{'|---' * 6}|")
    verdicts = []
    for name, dims in HEADS:
        for causal in ([], ["--causal"]):
            flags = ["--backward", "--deterministic"] if kind == "backward" else []
            problem = [*PROBLEM, *SEQLEN[kind], *dims, *causal, *(["--backward"] if flags else [])]
            parts = PARTS if kind == "backward" and name == "d256" else [("", 1)]
            models = []
            for part, times in parts:
                file = cubin(folder, [*flags, *dims, *causal, *(["--part", part] if part else [])])
                ours, other = modelled(tandem, problem, file)
                models.append((other, times))
            if len(models) > 1:
                ours["dq_kernel"] = DQ_KERNEL
            theirs = together(models) if len(models) > 1 else models[0][0]
            label = name + (", causal" if causal else "")
            print("|", " | ".join([label, "Tandem", *row(ours)]), "|", flush=True)
            print("|", " | ".join(["", "FlashAttention-4", *row(theirs)]), "|", flush=True)
            # A second pass multiplies scores twice, so its FLOP count does not compare iterations.
            work = 1.0 if kind == "backward" else clocks(ours, 1) / clocks(theirs, 1)
            found = ratios(ours, theirs, work)
            doubts = [ours["doubt"], theirs["doubt"]]
            judged = verdict(BOUNDS[kind], found, doubts)
            verdicts.append([label, f"{found[0]:.2f}", f"{min(found):.2f} to {max(found):.2f}", judged])
            verdicts[-1] += [longest_wait(ours), longest_wait(theirs)]
    head = [kind, "ratio", "range", "verdict", "most of the chain, Tandem", "FlashAttention-4"]
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for one in verdicts:
        print("|", " | ".join(one), "|")
    print()


def main() -> None:
    tandem, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in sys.argv[3:] or ["forward", "backward"]:
        compare(tandem, folder, kind)


if __name__ == "__main__":
    main()
