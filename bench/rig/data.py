"""Distributions of a problem's tensors besides normal random numbers, and their difficulty for an online softmax.

Real data have features that random data lack. One key may score far above the rest in every row (the first key: an
attention sink; a middle key: a needle). Rows may attend to one key each (copy heads), and logits may be large.
"""

from __future__ import annotations

import functools
import math
import random

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def shape(x, activations: str | None = None) -> None:
    """Changes a problem's normal inputs to its distribution, in place."""
    kind = x.cell.data
    if kind == "sigma10":
        x.q *= 10
    elif kind.startswith("sink"):
        _one_key(x, float(kind[4:]), lambda length: 0)
    elif kind == "needle":
        _one_key(x, 50.0, lambda length: length * 4 // 9)
    elif kind == "copy":
        _copy(x, 30.0)
    elif kind == "model":
        _model(x, activations)
    else:
        assert kind == "normal", kind


def _one_key(x, nats: float, place) -> None:
    """Adds a dimension that only this key has. The key's score is `nats` in every row; all other scores are normal."""
    size = math.sqrt(nats / x.scale)
    x.q[..., 0], x.k[..., 0] = size, 0
    for n, length in enumerate(x.cell.key_lengths()):
        key = x.sequence(x.k, n)[place(length)]
        key.zero_()
        key[..., 0] = size


def _copy(x, nats: float) -> None:
    """Sets queries along the preceding key. A normal vector's square is its dimension."""
    heads = torch.tensor([x.kv_head(h) for h in range(x.cell.heads)], device=x.q.device)
    for n in range(len(x.cell.sequences())):
        before, queries = x.sequence(x.k, n).roll(1, 0), x.sequence(x.q, n)
        diagonal = torch.arange(len(queries), device=before.device) + len(before) - len(queries)
        queries.copy_(before[diagonal.clamp_min(0)][:, heads] * (nats / x.scale / x.cell.head_dim))


@functools.lru_cache(1)
def _activations(path: str):
    return torch.load(path, weights_only=True)


def _model(x, path: str | None) -> None:
    """Repeats the saved tensors to the problem's size: tokens and heads are repeated, and each head's vectors are
    repeated until they fill head_dim. Queries are scaled so that the scores equal the model's.
    """
    if not path:
        raise ValueError("--activations must be given for data 'model': name a file that bench/activations.py wrote")
    saved = _activations(path)
    heads, tokens, dim = saved["q"].shape
    model_scale = saved["scale"]
    copies = -(-x.cell.head_dim // dim)
    if x.cell.head_dim % dim or x.cell.dim_v % dim:
        raise ValueError(
            f"the activations' head_dim ({dim}) must divide {x.cell.head_dim} and {x.cell.dim_v}: record others"
        )
    group = x.cell.heads // x.cell.kv_heads
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        own = torch.arange(tensor.shape[-2]) // (group if name == "q" else 1) % heads
        source = saved[name].float()[own]  # heads of the problem, tokens, dim
        if name == "q":
            source *= model_scale / (copies * x.scale)
        source = source.repeat(1, 1, tensor.shape[-1] // dim).transpose(0, 1).to(tensor)
        for n, length in enumerate(x.cell.sequences() if name == "q" else x.cell.key_lengths()):
            x.sequence(tensor, n).copy_(source[torch.arange(length, device=source.device) % tokens])


ROWS, KEYS, TILE = 64, 128, 2  # a warpgroup's rows, an iteration's keys, warpgroups per tile
RESCALE, LOST = 24.0, 100.0  # log2 of the sums for a rescale, for a retry


def hardness(x, scores, sampled: int = 3, tiles: int = 6) -> dict:
    """Returns, on sampled tiles, the share of iterations in which a warpgroup rescales, and the share of repeated
    tiles. The sampling follows the rules of kernels/device/rescale.cuh for bfloat16 with 128 keys per iteration, last
    keys first. scores(q, k, rows, head) returns scores in nats, -inf for hidden keys. (The kernel's tiles may differ.)
    """
    draw, steps, rescaled, lost, seen = random.Random(2), 0, 0, 0, 0
    sequences = x.cell.sequences()
    for _ in range(sampled):
        b, head = draw.randrange(len(sequences)), draw.randrange(x.cell.heads)
        q, k = x.sequence(x.q, b)[:, head], x.sequence(x.k, b)[:, x.kv_head(head)]
        starts = range(0, len(q), ROWS * TILE)
        for start in draw.sample(starts, min(tiles, len(starts))):
            rows = torch.arange(start, min(start + ROWS * TILE, len(q)), device=q.device)
            found = _walk(scores(q, k, rows, head) / math.log(2))
            steps, rescaled = steps + found[0], rescaled + found[1]
            lost, seen = lost + found[2], seen + 1
    return dict(rescaled_steps=rescaled / max(1, steps), redone_tiles=lost / max(1, seen))


def _walk(scores) -> tuple[int, int, bool]:
    """Returns (iterations, iterations with a rescale, repeated) of a tile: its scores in log2 units, rows by keys."""
    reference = torch.full((len(scores),), -math.inf, device=scores.device)
    total = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)  # relative to reference
    steps = rescaled = 0
    lost = False
    for end in range(scores.shape[1], 0, -KEYS):
        step = scores[:, max(0, end - KEYS) : end].double()
        seen = step.amax(1) > -math.inf
        if not seen.any():
            continue
        first = seen & (reference == -math.inf)
        reference = torch.where(first, step.amax(1), reference)
        total = total + torch.where(seen[:, None], (step - reference[:, None]).exp2(), 0).sum(1)
        moves = total > 2.0**RESCALE
        lost = lost or bool((total > 2.0**LOST).any())
        exponent = torch.where(moves, total.log2().floor(), 0)
        reference, total = reference + exponent, total * (-exponent).exp2()
        warpgroups = [bool(part.any()) for part in moves.split(ROWS)]
        steps, rescaled = steps + len(warpgroups), rescaled + sum(warpgroups)
    return steps, rescaled, lost
