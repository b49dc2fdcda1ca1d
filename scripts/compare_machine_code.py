#!/usr/bin/env python3
"""Compares the machine code of kernels before and after a change of the source. Compiles some of the library's kernels
for both architectures. Needs NVRTC and nvdisasm, and no GPU.

    python scripts/compare_machine_code.py old/tandem build/release/tandem
    python scripts/compare_machine_code.py --keep before old/tandem       # compiles only; before/ then serves as OLD
    python scripts/compare_machine_code.py before build/release/tandem --only 'h200 .*causal'

OLD and NEW are `tandem` commands, or folders of cubins. A kernel is identical if every instruction is, operands and
registers included; addresses and names of labels may differ. Otherwise the output states that the order differs, or
which loops have more or fewer instructions. Exit code: 0 if all are identical, else 1.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

CARDS = {"h200": "--card h200", "b200": "--device vgpu:b200"}
# Sizes for which every entry of the tables of tiles serves some kernel.
SHAPES = {
    "h200": {
        "d64": "--head-dim 64 --seqlen 4096",
        "d64-short": "--head-dim 64 --seqlen 64",
        "d128": "--head-dim 128 --seqlen 4096",
        "d192v128-long": "--head-dim 192 --head-dim-v 128 --seqlen 32768",
        "d192v128": "--head-dim 192 --head-dim-v 128 --seqlen 4096",
        "d192v128-short": "--head-dim 192 --head-dim-v 128 --seqlen 512",
        "d192": "--head-dim 192 --seqlen 4096",
        "d256": "--head-dim 256 --seqlen 4096",
        "d72v136": "--head-dim 72 --head-dim-v 136 --seqlen 512",
    },
    "b200": {
        "d64": "--head-dim 64 --seqlen 4096",
        "d128": "--head-dim 128 --seqlen 4096",
        "d192v128": "--head-dim 192 --head-dim-v 128 --seqlen 4096",
        "d256": "--head-dim 256 --seqlen 4096",
        "d72v136": "--head-dim 72 --head-dim-v 136 --seqlen 512",
    },
}
OPTIONS = {
    "full": "",
    "causal": "--causal",
    "packed window": "--window 127,0 --lengths-q {seqlen},{seqlen}",
}
# Options for fewer sizes: the other type, options that change the scores, and several options at once.
MORE = {
    "window both": "--window 100,100",
    "f16 causal": "--dtype f16 --causal",
    "softcap": "--softcap 30",
    "alibi bias32 causal": "--alibi --bias f32 --causal",
    "mask padded": "--bias bool --seqused 50",
    "f16 packed": "--dtype f16 --lengths-q {seqlen},{seqlen}",
}
MORE_SHAPES = ("d64", "d128", "d256")


def problems() -> dict[str, list[str]]:
    """Returns the flags of `tandem explain`, by name."""
    forward = of_a_pass()
    return forward | {f"{name} backward": [*flags, "--backward"] for name, flags in forward.items()}


def of_a_pass() -> dict[str, list[str]]:
    found = {}
    for card, where in CARDS.items():
        for shape, sizes in SHAPES[card].items():
            for options in (OPTIONS, MORE) if shape in MORE_SHAPES else (OPTIONS,):
                for name, flags in options.items():
                    text = f"{where} --dtype bf16 --heads 8 {sizes} {flags}".format(seqlen=sizes.split()[-1]).split()
                    found[f"{card} {shape} {name}"] = last_of_each(text)
    return found


def last_of_each(flags: list[str]) -> list[str]:
    """Removes repeated flags, because the command accepts a flag once. A later flag replaces an earlier flag."""
    by_name: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            by_name[word] = []
            name = word
        else:
            by_name[name].append(word)
    return [word for name, values in by_name.items() for word in (name, *values)]


# ---- Compiling and disassembling ------------------------------------------------------------------------------------


def nvdisasm() -> str:
    wheel = "lib/*/site-packages/nvidia/*/bin/nvdisasm"
    places = [os.environ.get("TANDEM_NVDISASM"), shutil.which("nvdisasm")]
    for venv in (os.environ.get("VIRTUAL_ENV", "/none"), "build/nvdisasm"):
        places += map(str, pathlib.Path(venv).glob(wheel))
    for place in filter(None, places):
        if os.path.exists(place):
            return place
    raise SystemExit(
        "nvdisasm must be installed: pip install nvidia-cuda-nvdisasm, or set TANDEM_NVDISASM to the program"
    )


def compiled(command: str, name: str, flags: list[str], folder: pathlib.Path) -> pathlib.Path:
    cubin = folder / f"{name.replace(' ', '-')}.cubin"
    if not cubin.exists():
        environment = dict(os.environ, TANDEM_NVDISASM=nvdisasm())
        said = subprocess.run(
            [command, "explain", "--machine-code", "--save-cubin", str(cubin), *flags],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if not cubin.exists():
            raise SystemExit(f"{name}: {command} explain {' '.join(flags)}\n{said.stderr.strip()}")
    return cubin


@dataclasses.dataclass(frozen=True)
class Function:
    code: tuple[str, ...]  # labels are numbered in the order of the code
    loops: tuple[tuple[int, int], ...]  # [first, last] instruction, by backward branches

    def opcodes(self, first: int, last: int) -> collections.Counter:
        return collections.Counter(re.sub(r"^@!?U?P\w+ ", "", line).split()[0] for line in self.code[first : last + 1])


def functions(listing: str) -> dict[str, Function]:
    """Returns nvdisasm's output of each kernel by name."""
    found, name, code, labels = {}, None, [], {}

    def finish() -> None:
        if name is None:
            return
        numbers = {label: f"L{n}" for n, label in enumerate(labels)}
        text = tuple(re.sub(r"`\((\.L\w+)\)", lambda m: numbers.get(m[1], m[1]), line) for line in code)
        loops = {}
        for at, line in enumerate(code):
            for label in re.findall(r"`\((\.L\w+)\)", line):
                head = labels.get(label, at + 1)
                if head <= at:
                    loops[head] = max(at, loops.get(head, 0))
        found[name] = Function(text, tuple(sorted(loops.items())))

    for line in listing.splitlines():
        if section := re.match(r"\s*\.section\s+\.?(\S+?),", line):
            finish()
            name, code, labels = None, [], {}
            if section[1].startswith("text."):
                name = section[1][5:]
        elif label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    finish()
    return found


def read(cubin: pathlib.Path) -> dict[str, Function]:
    said = subprocess.run([nvdisasm(), str(cubin)], capture_output=True, text=True)
    if said.returncode or not (found := functions(said.stdout)):
        raise SystemExit(f"{cubin} must have code: compile it again\n{said.stderr.strip()}")
    return found


# ---- Comparing ------------------------------------------------------------------------------------------------------


def difference(old: Function, new: Function) -> str:
    """Describes the difference; "" for identical kernels."""
    if old.code == new.code:
        return ""
    all_old, all_new = old.opcodes(0, len(old.code)), new.opcodes(0, len(new.code))
    if all_old == all_new and len(old.loops) == len(new.loops):
        if all(old.opcodes(*a) == new.opcodes(*b) for a, b in zip(old.loops, new.loops)):
            return "the same instructions, loop by loop, in another order or other registers"
    lines = [f"different: {len(old.code)} -> {len(new.code)} instructions{counts(all_old, all_new)}"]
    if len(old.loops) != len(new.loops):
        return f"{lines[0]}; {len(old.loops)} -> {len(new.loops)} loops"
    for n, (a, b) in enumerate(zip(old.loops, new.loops)):
        if old.opcodes(*a) != new.opcodes(*b):
            sizes = f"{a[1] - a[0] + 1} -> {b[1] - b[0] + 1}"
            lines.append(f"    loop {n}: {sizes} instructions{counts(old.opcodes(*a), new.opcodes(*b))}")
    return "\n".join(lines)


def counts(old: collections.Counter, new: collections.Counter) -> str:
    changed = {name: new[name] - old[name] for name in {**old, **new} if new[name] != old[name]}
    shown = sorted(changed.items(), key=lambda item: -abs(item[1]))[:8]
    return "".join(f", {n:+} {name}" for name, n in shown) + (", ..." if len(changed) > 8 else "")


def compare(old: pathlib.Path, new: pathlib.Path) -> str:
    if old.read_bytes() == new.read_bytes():
        return ""
    before, after = read(old), read(new)
    found = {name: difference(before[name], after[name]) for name in before if name in after}
    found |= {name: "gone" for name in before if name not in after}
    found |= {name: "new" for name in after if name not in before}
    return "\n".join(f"{name}: {text}" for name, text in found.items() if text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW", nargs="?")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="keep the cubins of the last command here")
    parser.add_argument("--only", default="", metavar="REGEX", help="only problems whose names match: 'b200 d128', f16")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once (default: all cores)")
    options = parser.parse_args()
    if not options.new and not options.keep:
        parser.error("NEW must be given without --keep: name it, or pass --keep FOLDER to keep OLD's kernels")
    chosen = {name: flags for name, flags in problems().items() if re.search(options.only, name)}
    if not chosen:
        parser.error(f"--only ({options.only!r}) must match a name: choose from {', '.join(problems())}")
    sides = [side for side in (options.old, options.new) if side]
    for side in sides:
        if not os.path.exists(side):
            parser.error(f"{side} must exist: correct the path")
    results = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:

        def cubins(n: int, name: str) -> pathlib.Path:
            side = sides[n]
            if os.path.isdir(side):
                if not (cubin := pathlib.Path(side, f"{name.replace(' ', '-')}.cubin")).exists():
                    raise SystemExit(f"{cubin} must exist: compile it with --keep {side}")
                return cubin
            keep = options.keep if n == len(sides) - 1 else None
            folder = keep or pathlib.Path(temporary, str(n))
            folder.mkdir(parents=True, exist_ok=True)
            return compiled(side, name, chosen[name], folder)

        def one(name: str) -> str:
            found = [cubins(n, name) for n in range(len(sides))]
            return compare(*found) if len(found) == 2 else ""

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for name, text in zip(chosen, pool.map(one, chosen)):
                results["identical" if not text else "reordered" if "different" not in text else "different"] += 1
                if text or len(sides) == 1:
                    print(f"{name}: {text or 'compiled'}", flush=True)
    if len(sides) == 1:
        print(f"{len(chosen)} kernels in {options.keep}")
        return 0
    print(f"{len(chosen)} kernels: " + ", ".join(f"{n} {what}" for what, n in results.items()))
    return 0 if results["identical"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
