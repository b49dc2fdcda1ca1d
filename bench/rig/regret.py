"""The regret of the plan's choices: their time divided by the least time of all alternatives, on random problems.

    python bench/tune.py --regret --few --seed 7 --count 40 --library build/release/bench/libtandem_tuning.so
    python bench/tune.py --regret --backward ... --fa3 libfa3_sm90.so --json regret.json    # with the peers' times

Forward: each tile of kSm90OtherTiles and several numbers of splits of the keys. Backward, up to head_dim 128: splits of
all n_blocks or of the last ones (m_splits, unsplit_tiles), sums of dq (dq_splits), l2_heads and spt. Causal masks also
have DiagonalParts (part_n_blocks, head_parts), and other calls have WrappedIterations (wraps). Wider heads: the
n_blocks of a sum of dq (dq_sum_n_blocks), and the tiles of a chunk of dS (ds_chunk_tiles).
--compile only compiles the kernels of a part of the problems; run several parts at once.
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import json
import os
import pathlib
import statistics
import time

from rig import random_shapes, shapes

OTHER_TILES = 4  # tiles of kSm90OtherTiles in src/plan/sm90/tuning.h
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_SPLIT_TILES = 800
DQ_SUM_N_BLOCKS = (128, 64, 32, 16, 8)
DS_CHUNK_TILES, MAX_DS_BYTES = (264, 528, 1056, 4096), 1 << 30
L2_HEADS = (2, 4, 8, 16)
SMS = 132  # kH200Sms
M_SPLITS, DQ_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4, 8, 16, 32)
WRAPPED_M_SPLITS = (1, 2, 3, 4, 5, 6, 8)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune.py --regret", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--library", required=True, help="libtandem_tuning.so: cmake --build build/release --target tandem_tuning")
    add("--few", action="store_true", help="batch 1 and at most 16 heads, instead of the general distribution")
    add("--backward", action="store_true")
    add("--seed", type=int, default=1, help="a seed below 100 (default: 1)")
    add("--count", type=int, default=40)
    add("--part", default="1/1", metavar="I/N", help="every N-th problem, from the I-th on")
    add("--compile", action="store_true", help="compile kernels, time nothing")
    add("--fa3", metavar="LIBRARY", help="shared library of FlashAttention-3, for its time and cuDNN's")
    add("--only", default="", help="only problems whose names have this text")
    add("--rounds", type=int, default=3)
    add("--ms", type=float, default=2, help="milliseconds of a window")
    add("--seconds", type=float, default=1e9, help="start no further problem after this time")
    add("--json", type=pathlib.Path, metavar="FILE", help="all times, written after every problem")
    chosen = parser.parse_args(arguments)
    first, step = shapes.numbers_of_part(parser.error, chosen.part)
    distribution = "few" if chosen.few else "general"
    cells = random_shapes.problems(distribution, chosen.seed, chosen.count, chosen.backward)[first - 1 :: step]
    chosen.cells = [cell for cell in cells if chosen.only in cell.name]
    return chosen


def alternatives(cell) -> list[dict]:
    """Forced choices of a problem. The first one is empty: the plan's own choice."""
    if not cell.backward:
        tiles = range(OTHER_TILES + 1) if cell.head_dim <= 128 else [OTHER_TILES]
        splits = [n for n in SPLITS if random_shapes.tiles(cell) * n <= MAX_SPLIT_TILES or n <= 2]
        return [{}] + [dict(other_tile=tile, num_splits=n) for tile in tiles for n in splits]
    if cell.lengths:
        return [{}]
    if cell.head_dim > 128:
        chunks = [dict(ds_chunk_tiles=n, min_ds_bytes=MAX_DS_BYTES) for n in DS_CHUNK_TILES]
        return [{}] + [dict(dq_sum_n_blocks=n) for n in DQ_SUM_N_BLOCKS] + chunks
    group = cell.heads // cell.kv_heads
    parts = [m for m in M_SPLITS if not cell.causal or group % m == 0]
    found = [dict(spt=0, m_splits=m, dq_splits=dq) for m, dq in itertools.product(parts, DQ_SPLITS)]
    if cell.causal:
        found += [dict(part_n_blocks=0), *diagonal_parts(cell)]
    else:
        waves = -(-cell.keys // 128) * cell.kv_heads * cell.batch // SMS
        found += [
            dict(m_splits=m, dq_splits=dq, unsplit_tiles=n * SMS)
            for m, dq, n in itertools.product(M_SPLITS[1:], (1, 4), (waves, waves - 1))
            if n > 0
        ]
        found += [dict(m_splits=m, dq_splits=dq, wraps=1) for m, dq in itertools.product(WRAPPED_M_SPLITS, (2, 4))]
    grouped = [
        dict(spt=0, m_splits=1, dq_splits=dq, l2_heads=n)
        for dq, n in itertools.product(DQ_SPLITS, L2_HEADS)
        if n <= cell.batch * cell.kv_heads
    ]
    return [{}] + ([dict(spt=1)] if cell.causal else []) + found + grouped


def diagonal_parts(cell) -> list[dict]:
    """DiagonalParts with the shortest parts whose tiles are at most some multiples of SMS, and parts of heads alone."""
    n_blocks, found = -(-cell.keys // 128), []
    group = cell.heads // cell.kv_heads
    for head_parts in (n for n in range(1, group + 1) if group % n == 0):
        heads, lengths = cell.batch * cell.kv_heads * head_parts, {n_blocks} if head_parts > 1 else set()
        for waves in (0.35, 0.5, 0.7, 1, 1.5):
            fitting = (n for n in range(1, n_blocks) if heads * sum(k // n + 1 for k in range(n_blocks)) <= waves * SMS)
            lengths |= {next(fitting, n_blocks if head_parts > 1 else 0)} - {0}
        found += [dict(part_n_blocks=n, head_parts=head_parts) for n in sorted(lengths)]
    return found


class Forced:
    """A context whose plans use forced choices."""

    def __init__(self, library: str):
        os.environ["TANDEM_LIBRARY"] = library
        from rig import tandem

        self.tandem, self.context = tandem, tandem.Context()
        force = self.context.library.tandem_force_plan
        force.argtypes = [c.c_void_p, c.c_int, c.POINTER(c.c_char_p), c.POINTER(c.c_int64)]
        self.force = force

    def choose(self, choices: dict) -> None:
        names = (c.c_char_p * len(choices))(*(name.encode() for name in choices))
        values = (c.c_int64 * len(choices))(*choices.values())
        if self.force(self.context.handle, len(choices), names, values):
            raise SystemExit(f"--library: tandem_force_plan must know {', '.join(choices)}: build it from this commit")

    def bind(self, x, choices: dict):
        """Returns the call with these choices, which must be captured before the next call of this function."""
        choices = dict(choices)
        splits = choices.pop("num_splits", 0)
        self.choose(choices)
        if x.cell.backward:
            return self.tandem.Backward(self.context, x)
        return self.tandem.Forward(self.context, x, splits)


def times_of(calls: dict, options) -> dict[str, float]:
    """Returns the median microseconds of each timed call."""
    from rig import clock

    times = clock.interleaved(calls, options.rounds)
    return {name: statistics.median(t) * 1e6 for name, t in times.items()}


def peers_of(options):
    from rig import peers, peers_backward

    if not options.fa3:
        return {}
    found, missing = (
        peers.found(["cuDNN"], None, None) if options.backward else peers.found(["FA3", "cuDNN"], options.fa3, None)
    )
    return peers_backward.found(found, missing, options.fa3) if options.backward else found


def measure(forced: Forced, cell, peers: dict, options) -> dict:
    from rig import clock

    x = shapes.Inputs(cell, None)
    if cell.backward:
        forced.choose({})
        x.out, x.lse = forced.tandem.Forward(forced.context, x)()
    calls, workspaces = {}, {}
    for choices in alternatives(cell):
        name = ",".join(f"{key}={value}" for key, value in choices.items()) or "chosen"
        try:
            call = forced.bind(x, choices)
            calls[name] = clock.Timed(call, options.ms)
        except RuntimeError:  # the plan refuses the choice
            continue
        workspaces[name] = call.workspace.numel()
    for name, bind in peers.items():
        try:
            calls[name] = clock.Timed(bind(x), options.ms)
        except Exception:  # any failure of a peer
            continue
    us = times_of(calls, options)
    return dict(cell=cell.name, us={n: round(t, 2) for n, t in us.items()}, workspaces=workspaces)


def line(result: dict, peers: dict) -> str:
    ours = {name: t for name, t in result["us"].items() if name not in peers}
    best = min(ours, key=ours.get)
    text = f"{result['cell']:52} {ours['chosen']:8.1f}  {ours['chosen'] / ours[best]:.3f} of {ours[best]:8.1f} {best}"
    theirs = {name: t for name, t in result["us"].items() if name in peers}
    if theirs:
        first = min(theirs, key=theirs.get)
        text += f"; {first} {theirs[first]:.1f}: {theirs[first] / ours['chosen']:.2f}"
        text += f", best {theirs[first] / ours[best]:.2f}"
    return text


def summary(results: list[dict], peers: dict) -> str:
    if not results:
        return "no problem was timed"
    regrets = []
    for r in results:
        ours = [t for name, t in r["us"].items() if name not in peers]
        regrets.append(r["us"]["chosen"] / min(ours))
    regrets.sort()
    high = regrets[min(len(regrets) - 1, int(0.95 * len(regrets)))]
    return f"{len(regrets)} problems: mean regret {statistics.mean(regrets):.3f}, 95th percentile {high:.3f}"


def compile_kernels(forced: Forced, cells: list) -> None:
    for cell in cells:
        x = shapes.Inputs(cell, None)
        forced.choose({})
        if cell.backward:
            forward = forced.tandem.Forward(forced.context, x)
            forward.prepare()
            x.out, x.lse = forward.out, forward.lse
        for choices in alternatives(cell):
            try:
                forced.bind(x, choices).prepare()
            except RuntimeError:  # the plan refuses the choice
                continue


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    import torch

    from rig import clock

    torch.set_grad_enabled(False)
    clock.use_own_stream()
    forced = Forced(options.library)
    if options.compile:
        return compile_kernels(forced, options.cells)
    peers, results, begin = peers_of(options), [], time.monotonic()
    for cell in options.cells:
        if time.monotonic() - begin > options.seconds:
            break
        results.append(measure(forced, cell, peers, options))
        print(line(results[-1], peers), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(summary(results, peers))
