"""Random problems by seed, for bench/sweep.py and bench/tune.py.

Lengths are log-uniform, and 60 % are multiples of 64. A quarter of the problems has other key lengths. 60 % are causal.
The forward takes 3 GFLOP to 1.2 TFLOP. `few` has batch 1 and at most 16 heads: a tensor-parallel rank's prefill, a long
document, a video model. One problem in six of `general` is packed.

Seeds below 100 may be used to tune. The figures of docs/performance.md come from FINAL_SEEDS, which no tuning uses.
"""

from __future__ import annotations

import dataclasses
import math
import random

from rig.shapes import Cell

FINAL_SEEDS = {"general": 1301, "few": 1302}
DISTRIBUTIONS = tuple(FINAL_SEEDS)
HEAD_DIMS = (64, 128, 256, 96, 80)
# The data of a problem, with their weights: random numbers alone are the best case of an online softmax.
DATA = {"normal": 2, "sigma10": 1, "sink20": 1}
FLOPS = (3e9, 1.2e12)  # forward
LENGTHS = (64, 20000)
MAX_TOKENS = 1 << 19  # queries or keys of all sequences


def _log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _length(draw: random.Random) -> int:
    n = _log_uniform(draw, *LENGTHS)
    return n if draw.random() < 0.4 else max(64, n // 64 * 64)


def _heads(draw: random.Random, few: bool) -> tuple[int, int]:
    """Returns (heads, heads_k)."""
    while True:
        heads_k = _log_uniform(draw, 1, 16)
        heads = heads_k * draw.choice((1, 1, 2, 4, 8))
        if heads <= (16 if few else 128):
            return heads, heads_k


def _packed_lengths(draw: random.Random) -> tuple[int, ...]:
    """Lengths of 2 to 64 documents, log-normal."""
    count, mean = _log_uniform(draw, 2, 64), _log_uniform(draw, 64, 4000)
    return tuple(max(1, min(LENGTHS[1], round(mean * draw.lognormvariate(-0.6, 1.1)))) for _ in range(count))


def _problem(draw: random.Random, few: bool) -> Cell:
    heads, heads_k = _heads(draw, few)
    seqlen = _length(draw)
    cell = Cell(
        row="few" if few else "general", column="", seqlen=seqlen, heads=heads, heads_k=heads_k,
        head_dim=draw.choice(HEAD_DIMS), batch=1 if few else _log_uniform(draw, 1, 64), causal=draw.random() < 0.6,
        seqlen_k=seqlen if draw.random() < 0.75 else _length(draw),
        data=draw.choices(tuple(DATA), tuple(DATA.values()))[0],
    )  # fmt: skip
    if few or draw.random() >= 1 / 6:
        return cell
    lengths = _packed_lengths(draw)
    return dataclasses.replace(cell, lengths=lengths, seqlen=max(lengths), seqlen_k=0, batch=1)


def describe(cell: Cell) -> str:
    """The words of a table's line, such as "b1 4096 h8/2 d128 causal"."""
    if cell.lengths:
        rows = f"{len(cell.lengths)} packed, {sum(cell.lengths)}"
    else:
        rows = f"b{cell.batch} {cell.seqlen}" + (f"x{cell.keys}" if cell.keys != cell.seqlen else "")
    mask = "causal" if cell.causal else "full"
    return f"{rows} h{cell.heads}/{cell.kv_heads} d{cell.head_dim} {mask} {cell.data}"


def problems(distribution: str, seed: int, count: int, backward: bool = False) -> list[Cell]:
    """The first `count` problems of a seed. Each has a unique name."""
    draw, cells = random.Random(f"{distribution} {seed}"), []
    while len(cells) < count:
        cell = _problem(draw, distribution == "few")
        tokens = max(sum(cell.sequences()), sum(cell.key_lengths()))
        if FLOPS[0] <= cell.flops() <= FLOPS[1] and tokens <= MAX_TOKENS:
            column = f"{seed}.{len(cells)} {describe(cell)}"
            cells.append(dataclasses.replace(cell, column=column, backward=backward))
    return cells


def tiles(cell: Cell) -> int:
    """The m_blocks of 128 queries in all heads."""
    return cell.heads * sum(-(-n // 128) for n in cell.sequences())


def kind(cell: Cell, sms: int) -> str:
    """The kind by which lost problems are counted."""
    if cell.lengths:
        return "packed"
    if cell.keys >= 4 * cell.seqlen and cell.seqlen <= 512:
        return "few queries"
    if cell.seqlen >= 4 * cell.keys and cell.keys <= 512:
        return "few keys"
    waves = tiles(cell) / sms
    return "under 1 wave" if waves < 1 else "1 to 2 waves" if waves < 2 else "2 to 4 waves" if waves < 4 else "more"
