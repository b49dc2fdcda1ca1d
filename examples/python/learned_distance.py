#!/usr/bin/env python3
"""Learns a distance: a table of distances, read by a score_mod, is trained through flex_attention.

    python examples/python/learned_distance.py [--back 3] [--steps 100]

Rows hold several documents of random tokens. For every token the model predicts the token --back places before it in
its document. Tokens have no positions: one bias for each distance distinguishes them, which no query or key contains.
Tandem computes the gradient of the expression that the two functions below become (docs/score_mod.md), on the CPU.
"""

import argparse

import torch
from torch.nn import functional as F

from tandem import create_block_mask, flex_attention

BATCH, SEQLEN, TOKENS, WIDTH, DISTANCES = 8, 128, 24, 32, 16


def attend(x, distances, documents):
    """x (batch, seqlen, width) is the query, key and value of one head."""

    def bias(score, b, h, q_idx, kv_idx):
        return score + distances[torch.clamp(q_idx - kv_idx, 0, DISTANCES - 1)]

    def earlier_in_its_document(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    heads = x[:, None]
    mask = create_block_mask(earlier_in_its_document, BATCH, None, SEQLEN, SEQLEN, device=x.device)
    return flex_attention(heads, heads, heads, bias, mask)[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--back", type=int, default=3, help=f"0 to {DISTANCES - 2}")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(TOKENS, WIDTH)
    torch.nn.init.normal_(embedding.weight, std=0.4)
    distances = torch.nn.Parameter(torch.zeros(DISTANCES))
    optimizer = torch.optim.Adam([*embedding.parameters(), distances], lr=0.05)
    for step in range(options.steps):
        tokens = torch.randint(TOKENS, (BATCH, SEQLEN))
        lengths = torch.randint(20, 60, (BATCH, SEQLEN // 20))
        documents = (torch.arange(SEQLEN)[:, None] >= lengths.cumsum(1)[:, None]).sum(
            2
        )  # document number of each token
        wanted = tokens.roll(options.back, 1)
        known = documents == documents.roll(options.back, 1)
        known[:, : options.back] = False
        out = attend(embedding(tokens), distances, documents)
        loss = F.cross_entropy((out @ embedding.weight.T)[known], wanted[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, looks {distances.argmax().item()} back", flush=True)


if __name__ == "__main__":
    main()
