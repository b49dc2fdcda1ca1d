#!/usr/bin/env python3
"""The cost of an option on a GPU, and attention with few queries or keys compared with torch's, forward and backward.

    python bench/options.py                      # dropout, softcap, window, sink, ALiBi and bias
    python bench/options.py --rows "bias|d128 dropout"   # some of them
    python bench/options.py --only cross         # compared with torch's cuDNN and FlashAttention-2

The ratio of an option compares operations per second with a call without options: 0.8 means that the visible scores
take a quarter longer. The ratio of a peer is its time divided by ours. Figures are medians of rounds in random order.
"""

from __future__ import annotations

import argparse
import re

import torch
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PARTS = ("options", "cross")
SEQLEN, WINDOW = 4096, 1024
# batch, queries, keys, heads, head_dim
CROSS = ((2, 4096, 77, 16, 64), (1, 8192, 256, 8, 64), (1, 8192, 256, 8, 128), (16, 1, 4096, 16, 128))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="options", metavar="PARTS", help=f"of {', '.join(PARTS)} (default: options)")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only these options: bias, d128 dropout, ...")
    add_arguments(parser)
    options = parser.parse_args()
    check_arguments(parser, options, PARTS)
    try:
        options.rows = re.compile(options.rows)
    except re.error as why:
        parser.error(f"--rows ({options.rows}) must be a regular expression ({why}): correct it")
    return options


def run_options(contest: Contest, chosen: re.Pattern) -> None:
    for dim in (64, 128):
        heads = 2048 // dim
        inputs = Inputs(4, heads, SEQLEN, dim)
        bias = torch.randn(1, heads, SEQLEN, SEQLEN, device="cuda")
        none, causal = with_options(), with_options(causal=True)
        seen = WINDOW * (SEQLEN - (WINDOW - 1) / 2) / SEQLEN**2
        rows = {
            "dropout 0.1": (with_options(dropout_p=0.1), none, 1.0),
            "dropout 0.1, causal": (with_options(causal=True, dropout_p=0.1), causal, 1.0),
            "softcap": (with_options(softcap=30.0), none, 1.0),
            "softcap, causal": (with_options(causal=True, softcap=30.0), causal, 1.0),
            "window of 1024": (with_options(window=(WINDOW - 1, 0)), none, seen),
            "sink, causal": (with_options(causal=True, sink=torch.zeros(heads, device="cuda")), causal, 1.0),
            "ALiBi, causal": (with_options(causal=True, alibi_slopes=slopes_of(heads)), causal, 1.0),
            "bias": (with_options(bias=bias), none, 1.0),
        }
        for name, (function, beside, work) in rows.items():
            if chosen.search(f"d{dim} {name}"):
                contest.run(f"d{dim} {name}", inputs, {name: function, "none": beside}, work=work)


def of_torch(backend):
    def function(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return function


def run_cross(contest: Contest) -> None:
    peers = {"cuDNN": of_torch(SDPBackend.CUDNN_ATTENTION), "FA2": of_torch(SDPBackend.FLASH_ATTENTION)}
    for batch, queries, keys, heads, dim in CROSS:
        inputs = Inputs(batch, heads, queries, dim, keys)
        name = f"{batch} x {queries} x {keys}, {heads} heads of {dim}"
        contest.run(name, inputs, {"Tandem": with_options(), **peers}, judge_of(1, exact(inputs, 1)))


def main() -> None:
    options = parse()
    contest = Contest(options)
    if "options" in options.only:
        run_options(contest, options.rows)
    if "cross" in options.only:
        run_cross(contest)


if __name__ == "__main__":
    main()
