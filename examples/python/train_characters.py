#!/usr/bin/env python3
"""Trains a small character-level transformer on this repository's own documentation, and prints a text that it writes.

    python examples/python/train_characters.py               # one minute, on the GPU if there is one
    python examples/python/train_characters.py --device cpu
    python examples/python/train_characters.py --seconds 600 --text some.txt

Attention, forward and backward, is `tandem.attention`; everything else is plain torch. On a GPU products use bfloat16
(torch.autocast). The loss is in nats per character. The loss starts near ln(number of different characters), the loss
of equal probabilities.
"""

import argparse
import math
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional as F

import tandem

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 2, 4, 128, 12
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        # (batch, seqlen, heads, head_dim) each: views of one projection, which attention reads without copies.
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        x = x + self.out(tandem.attention(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Characters(nn.Module):
    """Logits of the next character for every position of (batch, seqlen) character numbers."""

    def __init__(self, characters):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # nearly equal probabilities at first

    def forward(self, numbers):
        x = self.embedding(numbers) + self.positions.weight[: numbers.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(model, data, seconds, steps, device):
    """Trains until the first limit of seconds or steps; prints the mean loss since the last line."""
    warm_up, rate = 20, 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    start, step, done, shown, losses = time.monotonic(), 0, 0.0, 0.0, []
    while done < 1:
        # Linear warm-up, then a cosine over the remaining steps.
        scale = min(1, (step + 1) / warm_up) * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))
        optimizer.param_groups[0]["lr"] = rate * scale
        begin = torch.randint(len(data) - CONTEXT, (BATCH, 1))
        window = data[begin + torch.arange(CONTEXT + 1)].to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        elapsed = time.monotonic() - start
        done = max(elapsed / seconds, step / steps)
        if step == 1 or done > shown + 1 / 12 or done >= 1:
            print(f"step {step:5d}  {elapsed:5.1f} s  loss {sum(losses) / len(losses):.3f}", flush=True)
            shown, losses = done, []


@torch.no_grad()
def write(model, numbers, length, temperature=0.7):
    """Continues (1, n) character numbers by `length` characters."""
    for _ in range(length):
        with torch.autocast(numbers.device.type, dtype=torch.bfloat16, enabled=numbers.is_cuda):
            logits = model(numbers[:, -CONTEXT:])[:, -1].float() / temperature
        numbers = torch.cat([numbers, torch.multinomial(logits.softmax(-1), 1)], 1)
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to train (default: 60)")
    parser.add_argument("--steps", type=float, default=math.inf, help="how many steps at most (default: any number)")
    parser.add_argument(
        "--text", type=pathlib.Path, help="what to learn (default: the Markdown files of the repository)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)

    files = [arguments.text] if arguments.text else [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    lines = "\n".join(file.read_text(encoding="utf-8") for file in files).splitlines()
    text = "\n".join(line for line in lines if not line.startswith("|"))  # tables are no prose
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text])
    model = Characters(len(characters)).to(arguments.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text)} characters, {len(characters)} different: ln {math.log(len(characters)):.3f}")
    print(f"{parameters} parameters, on {arguments.device}; attention: {tandem.description()}")

    train(model, data, arguments.seconds, arguments.steps, arguments.device)
    start = torch.tensor([[characters.index("\n")]], device=arguments.device)
    print("".join(characters[i] for i in write(model, start, 400)[0]))


if __name__ == "__main__":
    main()
