#!/usr/bin/env python3
"""Finds the fastest tiles of the forward kernel on this GPU, and writes the table that src/plan reads.

    python bench/tune.py cubins/ --build                        # compiles ahead, on any machine with NVRTC and g++
    python bench/tune.py cubins/ --write src/plan/sm90/tuning.h       # the rest; compiles missing kernels
    python bench/tune.py cubins/ --dims 128 --only 128x128x2_pingpong --seqlens 1024,16384 --fa3 libfa3_sm90.so
    python bench/tune.py cubins/ --all --seqlens 16384 --json rates.json # every tile, for bench/clocks.py --variants
    python bench/tune.py --regret --library libtandem_tuning.so          # the plan's choices: rig/regret.py

Tries every number of warpgroups, keys of a block and stages, with and without ping-pong, for each head_dim, full and
causal, by length. The search skips kernels that spill registers or with more than twice the error of standard
attention. The remaining kernels are timed once, then the fastest few in interleaved rounds. A table keeps a tile from
one length to the next unless another is more than half a percent faster. Afterwards build the library and compare:
bench/gpu.py.

During the development of a kernel, --only shows the effect of a change on a few tiles, and --fa3 adds FlashAttention-3
and cuDNN for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

from rig import shapes, tiles

DIMS = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# The candidate values of each field of a configuration.
TRIED = {"warpgroups": (2, 3, 4), "tile_n": range(48, 193, 16), "stages": (2, 3), "pingpong": (False, True)}
FINALISTS = 6
WORTH = 1.005  # minimum gain of a further table entry
PATIENCE = 10  # seconds for a kernel's first trial


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the cubins are kept")
    parser.add_argument("--build", action="store_true", help="compile, and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once (default: all cores)")
    parser.add_argument("--dims", help="only these: 128 or 192/128, comma-separated")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only tiles whose names match: 192x80, pingpong, ..."
    )
    parser.add_argument("--fa3", metavar="LIBRARY", help="shared library of FlashAttention-3, to time it and cuDNN too")
    parser.add_argument("--seqlens", default=",".join(map(str, SEQLENS)), help="lengths to tune separately")
    parser.add_argument("--all", action="store_true", help="time all in interleaved rounds, not the best few alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=15, help="a window's milliseconds")
    parser.add_argument("--write", type=pathlib.Path, metavar="tuning.h", help="put the choices into this table")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all rates and clocks here")
    options = parser.parse_args(arguments)
    try:
        options.seqlens = sorted(int(n) for n in options.seqlens.split(","))
        asked = [tuple(map(int, d.split("/"))) for d in options.dims.split(",")] if options.dims else DIMS
        options.dims = [d * 2 if len(d) == 1 else d for d in asked]
        options.only = re.compile(options.only)
    except ValueError:
        parser.error("--seqlens and --dims must be numbers: separate them with commas")
    except re.error as why:
        parser.error(f"--only ({options.only}) must be a regular expression ({why}): correct it")
    for d in options.dims:
        if d not in DIMS:
            known = ", ".join(f"{a}/{b}" for a, b in DIMS)
            parser.error(f"--dims ({d[0]}/{d[1]}) must be of {known}: choose from these")
    if options.rounds < 1 or options.jobs < 1 or options.ms <= 0 or options.seqlens[0] < 1:
        parser.error("--rounds, --jobs, --ms and --seqlens must be above 0: pass positive numbers")
    for name in ("write", "fa3"):
        path = getattr(options, name)
        if path and not pathlib.Path(path).exists():
            parser.error(f"--{name} ({path}) must exist: correct the path")
    if options.write and options.only.pattern:
        parser.error("--write must be given without --only, which may hide better tiles: omit one of them")
    return options


def settle(name: str) -> None:
    """Waits for the GPU. A kernel that never ends terminates the program, because it blocks all later kernels."""
    import torch

    event, begin = torch.cuda.Event(), time.monotonic()
    event.record()
    while not event.query():
        if time.monotonic() - begin > PATIENCE:
            print(f"{name} must end within {PATIENCE} s, but hangs: remove it from candidates().", flush=True)
            os._exit(3)
        time.sleep(0.0005)


def sound(kernel: tiles.Kernel, judges: list) -> bool:
    if kernel.spilled:
        print(f"{kernel.name}: spills {kernel.spilled} bytes")
        return False
    for judge in judges:
        out = kernel.bind(judge.x)()
        settle(kernel.name)
        verdict = judge(out)
        if not verdict.right:
            print(f"{kernel.name}: {verdict.why()}", flush=True)
            return False
    return True


def load(folder, layout, d, causal) -> list[tiles.Kernel]:
    from rig.judge import Judge

    # Each entry has batch, seqlen, heads and heads_k, without common divisors. The last has more tiles
    # than the GPU has SMs.
    sizes = ((2, 300, 4, 2), (1, 1111, 2, 1), (2, 2500, 16, 4))
    judges = [
        Judge(shapes.Inputs(shapes.Cell("check", str(n), n, h, *d, heads_k=k, batch=b, causal=causal)))
        for b, n, h, k in sizes
    ]
    there = [t for t in layout.tiles if t.dims == d and (folder / f"{t.kernel(causal)}.cubin").exists()]
    return [k for k in (tiles.Kernel(folder, layout, t, causal) for t in there) if sound(k, judges)]


def peers_of(options) -> dict:
    if not options.fa3:
        return {}
    from rig import peers

    return {"cuDNN": peers.cudnn, "FA3": peers.fa3(options.fa3)}


def race(kernels: list, x, options, kept) -> tuple[dict, dict, dict]:
    """Returns TFLOP/s of the fastest few tiles, of the tile for the next longer sequences, and of peers. Also returns
    the multiprocessors' clock rate in MHz for each of them.
    """
    import torch
    from rig import clock
    from rig import clocks as sm_clocks

    def timed(bind, ms):
        return sm_clocks.Clocked(clock.Timed(bind(x), ms))

    first = {k: clock.Timed(k.bind(x), 4).window() for k in kernels}
    finalists = sorted(kernels, key=first.get)[: None if options.all else FINALISTS]
    finalists += [k for k in kernels if k.tile == kept and k not in finalists]
    binds = {k.name: k.bind for k in finalists}
    if x.cell.dim_v == x.cell.head_dim:
        binds.update(peers_of(options))
    racing = {name: timed(bind, options.ms) for name, bind in binds.items()}
    times = clock.interleaved(racing, options.rounds)
    torch.cuda.empty_cache()
    rates = {name: x.cell.flops() / statistics.median(t) / 1e12 for name, t in times.items()}
    clocks = {name: round(statistics.median(racer.megahertz)) for name, racer in racing.items()}
    return {k.tile: rates.pop(k.name) for k in finalists}, rates, clocks


def choose(folder, layout, d, causal, options) -> tuple[list, dict, dict]:
    """Returns [(minimum length, tile), ...], the longest first, ending with a tile of two warpgroups for any length;
    all rates; all clocks.
    """
    kernels = load(folder, layout, d, causal)
    if not kernels:
        raise SystemExit(f"a kernel for {d} must pass the checks: correct the tiles or pass other --dims")
    choices, rates, clocks, kept = [], {}, {}, None
    for seqlen in reversed(options.seqlens):
        x = shapes.Inputs(shapes.dense(*d, causal, seqlen))
        found, of_peers, clocks[seqlen] = race(kernels, x, options, kept)
        best = max(found, key=found.get)
        if kept is None or found[best] > WORTH * found[kept]:
            kept = best
            choices.append([seqlen, kept])
        choices[-1][0] = seqlen
        rates[seqlen] = {t.kernel(causal): rate for t, rate in found.items()}
        ranked = sorted(found, key=found.get, reverse=True)[:4]
        shown = [f"{t.kernel(causal)} {found[t]:.0f}" for t in ranked] + [f"{n} {r:.0f}" for n, r in of_peers.items()]
        print(f"{seqlen}: {kept.kernel(causal)} ({', '.join(shown)})", flush=True)
    choices[-1][0] = 0
    if choices[-1][1].fields["warpgroups"] > 2:  # a few rows would leave warpgroups idle
        small = [k for k in kernels if k.tile.fields["warpgroups"] == 2]
        if small:
            found, _, _ = race(small, shapes.Inputs(shapes.dense(*d, causal, options.seqlens[0])), options, None)
            choices.append([0, max(found, key=found.get)])
    return choices, rates, clocks


def entries(d, by_mask: dict) -> list[str]:
    """Returns the lines of kSm90TuningRows."""
    if by_mask["full"] == by_mask["bounded"]:
        by_mask = {"any": by_mask["full"]}
    lines = []
    for mask, choices in by_mask.items():
        for keys, tile in choices:
            warpgroups = tile.fields["warpgroups"]
            rows = 64 * (warpgroups - 1) + 1 if warpgroups > 2 else 0
            lines.append(f"{{{d[0]}, {d[1]}, {rows}, {keys}, Mask::{mask}, Scores::plain, {tile.columns}}}")
    return lines


def rewrite(text: str, found: dict) -> str:
    """Returns the table's text with new measurements of these dims. Rows for windows and score options are kept."""
    match = re.search(r"(kSm90TuningRows\[\] = \{)(.*?)(\n\};)", text, re.S)
    if not match:
        raise SystemExit("--write: the file must have kSm90TuningRows[]: name a tuning.h")
    table: dict = {}
    for entry in re.findall(r"\{[^{}]*\}", match[2]):
        d = tuple(int(n) for n in re.findall(r"\d+", entry)[:2])
        table.setdefault(d, []).append(entry)
    for d, entries_of_d in found.items():
        old = table.get(d, [])
        plain = [e for e in old if "Scores::plain" in e]
        windows = [e for e in plain if "Mask::left" in e or not e.endswith(("true}", "false}"))]  # or of one query
        others = [e for e in old if "Scores::plain" not in e]
        table[d] = windows + entries_of_d + others
    lines = [entry for d in sorted(table) for entry in table[d]]
    body = "".join(f"\n    {entry}," for entry in lines)
    return text[: match.start(2)] + body + text[match.end(2) :]


def main() -> None:
    if "--regret" in sys.argv:
        from rig import regret

        return regret.main([word for word in sys.argv[1:] if word != "--regret"])
    options = parse()
    layout = tiles.Layout(options.dims, TRIED, options.only)
    for d in options.dims:
        if not any(t.dims == d for t in layout.tiles):
            raise SystemExit(
                f"--only ('{options.only.pattern}') must match a tile of head_dim {d[0]}/{d[1]}: correct it"
            )
    folder = tiles.build(options.folder, layout, options.jobs)
    if options.build:
        return
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit(
            "torch must find a Hopper GPU (compute capability 9.0): use one, or stop after compiling with --build"
        )
    torch.set_grad_enabled(False)
    found, rates, clocks = {}, {}, {}
    for d in options.dims:
        by_mask = {}
        for mask, causal in (("bounded", True), ("full", False)):
            print(f"head_dim {d[0]}/{d[1]}, {'causal' if causal else 'full'}", flush=True)
            problem = f"{d[0]}/{d[1]} {mask}"
            by_mask[mask], rates[problem], clocks[problem] = choose(folder, layout, d, causal, options)
        found[d] = entries(d, by_mask)
    print("\n" + "\n".join(f"    {line}," for lines in found.values() for line in lines))
    if options.json:
        measured = dict(device=torch.cuda.get_device_name(), rates=rates, megahertz=clocks)
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    if options.write:
        options.write.write_text(rewrite(options.write.read_text(), found))
        formatter = shutil.which("clang-format-16")
        if formatter:
            subprocess.run([formatter, "-i", str(options.write)], check=True)


if __name__ == "__main__":
    main()
