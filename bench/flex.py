#!/usr/bin/env python3
"""Compares score_mods and mask_mods on a GPU with torch's compiled FlexAttention, on the same tensors, round by round.

    python bench/flex.py                              # the gallery of docs/score_mod.md, forward and backward
    python bench/flex.py --only options,documents     # a mask_mod and the option, documents and packed sequences
    python bench/flex.py --only masks,learned,cold    # creating block masks, learned tables, a new expression
    python bench/flex.py --only fa4 --fa4 FOLDER      # the gallery in FlashAttention-4
    python bench/flex.py --json flex.json

A figure is the median of rounds in random order. A ratio is the peer's time divided by ours, the median again.
out, dq, dk and dv of one head are compared with float64 and with torch's: twice torch's error plus rounding is allowed.
A mask is created before the clock starts, unless its creation is measured.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import torch
from rig import clock, peers
from rig.compare import (
    Contest,
    Inputs,
    add_arguments,
    check_arguments,
    exact,
    judge_of,
    slopes_of,
    with_options,
)
from torch.nn.attention import flex_attention as theirs

import tandem
from tandem import flex

PARTS = ("gallery", "options", "documents", "masks", "learned", "cold", "fa4")
BATCH, HEADS, WIDTH, IMAGE = 2, 16, 1024, 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default="gallery", metavar="PARTS", help=f"of {', '.join(PARTS)} (default: gallery)")
    add("--entries", metavar="NAMES", help="only these entries of the gallery, separated by semicolons")
    add("--fa4", metavar="FOLDER", help="folder of FlashAttention-4's Python packages")
    add("--seqlen", type=int, default=8192)
    add("--head-dim", type=int, default=128)
    add_arguments(parser)
    options = parser.parse_args()
    check_arguments(parser, options, PARTS)
    if "fa4" in options.only and not (options.fa4 and pathlib.Path(options.fa4).exists()):
        parser.error(f"--fa4 ({options.fa4}) must be a folder: name the folder of FlashAttention-4's packages")
    if options.seqlen < 128:
        parser.error(f"--seqlen ({options.seqlen}) must be at least 128: choose a longer sequence")
    return options


# ---- The gallery --------------------------------------------------------------------------------------------------


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < WIDTH)


def prefix_lm(b, h, q, k):
    return (k < 1000) | (q >= k)


def dilated(b, h, q, k):
    return (q >= k) & ((q - k) % 4 == 0)


def neighbourhood(b, h, q, k):
    return ((q % IMAGE - k % IMAGE).abs() <= 3) & ((q // IMAGE - k // IMAGE).abs() <= 3)


def first_and_window(b, h, q, k):
    return (q >= k) & ((k < 4) | (q - k < WIDTH))


def softcap(score, b, h, q, k):
    return 30 * torch.tanh(score / 30)


def hash_dropout(score, b, h, q, k):
    x = (q * 7919 + k) * 31337
    return torch.where(((x ^ (x >> 15)) & 255) < 26, -float("inf"), score)


def alibi(slope):
    return lambda score, b, h, q, k: score - slope[h] * (q - k).abs()


def relative(table):
    return lambda score, b, h, q, k: score + table[h, torch.clamp(q - k + 32, 0, 64)]


def temperature(scale):
    return lambda score, b, h, q, k: score * scale[h]


def same_document(document):
    return lambda b, h, q, k: (document[q] == document[k]) & (q >= k)


def documents_of(seqlen: int, count: int) -> list[int]:
    """Returns the lengths of log-normal documents that fill a sequence."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(count, generator=generator).mul(0.8).exp()
    lengths = (weights / weights.sum() * (seqlen - count)).long() + 1
    lengths[0] += seqlen - int(lengths.sum())
    return lengths.tolist()


def document_of(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().cuda()


def captured(seqlen: int) -> dict:
    """Data that the gallery's functions read: documents of a sequence, numbers per head."""
    return dict(
        document=document_of(documents_of(seqlen, 12)),
        slope=slopes_of(HEADS),
        table=torch.randn(HEADS, 65, device="cuda") * 0.5,
        scale=torch.rand(HEADS, device="cuda") + 0.5,
    )


def gallery(document, slope, table, scale) -> dict:
    """Returns (score_mod, mask_mod) of each name."""
    return {
        "causal": (None, causal),
        "window": (None, window),
        "prefix-LM": (None, prefix_lm),
        "documents": (None, same_document(document)),
        "dilated": (None, dilated),
        "neighbourhood": (None, neighbourhood),
        "first keys and window": (None, first_and_window),
        "ALiBi, causal": (alibi(slope), causal),
        "softcap, causal": (softcap, causal),
        "relative table": (relative(table), None),
        "temperature, causal": (temperature(scale), causal),
        "hash": (hash_dropout, None),
    }


# ---- Compared functions ----------------------------------------------------------------------------------------------


def ours_of(score_mod, mask_mod, seqlen: int):
    mask = flex.create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cuda") if mask_mod else None
    return lambda q, k, v: flex.flex_attention(q, k, v, score_mod, mask)


compiled = torch.compile(theirs.flex_attention, dynamic=False)


def theirs_of(score_mod, mask_mod, seqlen: int):
    mask = theirs.create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cuda") if mask_mod else None
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=mask)


# ---- Parts --------------------------------------------------------------------------------------------------------


def chosen(entries: dict, options) -> dict:
    wanted = options.entries.split(";") if options.entries else entries
    return {name: entry for name, entry in entries.items() if name in wanted}


def run_gallery(contest: Contest, options) -> None:
    inputs = Inputs(BATCH, HEADS, options.seqlen, options.head_dim)
    for name, (score_mod, mask_mod) in chosen(gallery(**captured(options.seqlen)), options).items():
        torch._dynamo.reset()
        functions = {"Tandem": ours_of(score_mod, mask_mod, options.seqlen)}
        functions["FlexAttention"] = theirs_of(score_mod, mask_mod, options.seqlen)
        contest.run(name, inputs, functions, judge_of(3, exact(inputs, 3, score_mod, mask_mod)))
    say_means(contest, "FlexAttention")


def say_means(contest: Contest, other: str) -> None:
    for passing in ("forward", "backward"):
        ratios = [line[key] for line in contest.results if (key := f"{passing} ratio {other}") in line]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{passing} beside {other}: geometric mean {mean:.3f}, least {min(ratios):.3f}, of {len(ratios)}")


def run_options(contest: Contest, options) -> None:
    """Compares an expression that equals an option with the option."""
    for seqlen in (4096, 16384):
        inputs = Inputs(BATCH, HEADS, seqlen, options.head_dim)
        slope = slopes_of(HEADS)
        rows = {
            "causal": (None, causal, with_options(causal=True)),
            "window": (None, window, with_options(window=(WIDTH - 1, 0))),
            "softcap": (softcap, None, with_options(softcap=30.0)),
            "ALiBi, causal": (alibi(slope), causal, with_options(causal=True, alibi_slopes=slope)),
        }
        for name, (score_mod, mask_mod, built_in) in rows.items():
            functions = {"text": ours_of(score_mod, mask_mod, seqlen), "option": built_in}
            contest.run(f"{name}, {seqlen}", inputs, functions)


def run_documents(contest: Contest, options) -> None:
    """Compares 54 documents in 65,536 tokens, causal, as a mask and as packed sequences."""
    seqlen = 65536
    lengths = documents_of(seqlen, 54)
    inputs = Inputs(1, HEADS, seqlen, options.head_dim)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")

    def packed(q, k, v):
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        out = tandem.attention(*rows, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(lengths),
                               max_seqlen_k=max(lengths), causal=True)  # fmt: skip
        return out.transpose(0, 1)[None]

    mask_mod = flex.and_masks(causal, same_document(document_of(lengths)))
    contest.run("54 documents, 65536", inputs, {"text": ours_of(None, mask_mod, seqlen), "packed": packed})


def run_masks(contest: Contest, options) -> None:
    """Times the creation of the block mask of 32k x 32k."""
    seqlen = 32768
    for name, mask_mod in (("causal", causal), ("documents", same_document(document_of(documents_of(seqlen, 27))))):
        line = {"name": f"block mask of {name}, {seqlen}"}
        makers = {"Tandem": flex.create_block_mask, "torch": theirs.create_block_mask}
        for who, make in makers.items():
            times = []
            for _ in range(max(3, options.rounds)):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                make(mask_mod, None, None, seqlen, seqlen, device="cuda")
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin) * 1e3)
            line[f"ms {who}"] = round(statistics.median(times), 3)
        contest.say(line)


def run_learned(contest: Contest, options) -> None:
    """Times the backward with gradients of a score_mod's tensors, relative to the backward without them."""
    inputs = Inputs(BATCH, HEADS, options.seqlen, options.head_dim)
    table = (torch.randn(HEADS, 65, device="cuda") * 0.5).requires_grad_()
    scale = (torch.rand(HEADS, device="cuda") + 0.5).requires_grad_()
    for name, mod, learned in (("relative table", relative, table), ("scale of each head", temperature, scale)):
        line = {"name": f"learned {name}", "seqlen": options.seqlen, "head_dim": options.head_dim}
        timed = {}
        for who, of, leaves in (
            ("with", mod(learned), (*inputs.leaves, learned)),
            ("without", mod(learned.detach()), inputs.leaves),
        ):
            out = flex.flex_attention(*inputs.leaves, of)

            def backward(out=out, leaves=leaves):
                return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

            timed[who] = clock.Timed(backward, options.ms)
        rounds = clock.interleaved(timed, options.rounds)
        line["backward"] = {who: [round(s * 1e6, 2) for s in times] for who, times in rounds.items()}
        contest.say(line)


def run_cold(contest: Contest, options) -> None:
    """Times a new expression until the result, then another value of a scalar."""
    inputs = Inputs(BATCH, HEADS, 1024, options.head_dim)
    q, k, v = (x.detach().transpose(1, 2) for x in inputs.leaves)
    tandem.attention(q, k, v, score_mod="score + 0.5")
    new = f"score * width + {time.time_ns() % 100000 / 1000} * tanh(score)"
    line = {"name": "a new text"}
    for what, value in (("compiled", 1.0), ("another value", 1.5)):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tandem.attention(q, k, v, score_mod=tandem.Mod(new, width=value))
        torch.cuda.synchronize()
        line[f"ms {what}"] = round((time.perf_counter() - begin) * 1e3, 3)
    contest.say(line)


def run_fa4(contest: Contest, options) -> None:
    """The gallery compared with FlashAttention-4: its modifications, and its options with the same meaning."""
    peers.fa4(options.fa4)
    from rig import fa4_mods

    inputs = Inputs(BATCH, HEADS, options.seqlen, options.head_dim)
    tensors = captured(options.seqlen)
    theirs_by_name = fa4_mods.gallery(WIDTH, IMAGE, **tensors)
    for name, (score_mod, mask_mod) in chosen(gallery(**tensors), options).items():
        try:
            mods, mask = theirs_by_name[name], None
            if mask_mod:
                mask = theirs.create_block_mask(mask_mod, None, None, options.seqlen, options.seqlen, device="cuda")
            functions = {
                "Tandem": ours_of(score_mod, mask_mod, options.seqlen),
                "FA4": fa4_mods.function_of(mods, mask),
            }
            if by_option := fa4_mods.by_option(name, mods, WIDTH):
                functions["FA4's option"] = by_option
            contest.run(name, inputs, functions, judge_of(3, exact(inputs, 3, score_mod, mask_mod)))
        except Exception as why:  # an entry failed; the rest still runs
            contest.say({"name": name, "absent": peers.first_line(why)})
    say_means(contest, "FA4")


def main() -> None:
    options = parse()
    contest = Contest(options)
    parts = dict(zip(PARTS, (run_gallery, run_options, run_documents, run_masks, run_learned, run_cold, run_fa4)))
    for part in options.only:
        print(f"\n{part}: {(parts[part].__doc__ or 'beside compiled FlexAttention').strip()}")
        parts[part](contest, options)


if __name__ == "__main__":
    main()
