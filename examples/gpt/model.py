"""A GPT: learned positions, blocks of causal attention and a perceptron after LayerNorms, tied embedding and head."""

import dataclasses

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    tokens: int  # per sequence
    vocabulary: int = 256  # bytes


class Block(nn.Module):
    def __init__(self, size, attend):
        super().__init__()
        self.heads, self.attend = size.heads, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x):
        # (batch, seqlen, heads, head_dim) each: views of one projection, which attention reads without copies.
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v, causal=True).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Logits (batch, seqlen, vocabulary) of the next token, for tokens (batch, seqlen)."""

    def __init__(self, size, attend):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The additions of all layers to the residual stream together have the size of one layer's.
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if added else 0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.lookup(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def lookup(self, tokens):
        """self.embedding(tokens). torch sums its gradient on a GPU in any order; a product has a fixed order."""
        weight = self.embedding.weight
        with torch.autocast(weight.device.type, enabled=False):
            return nn.functional.one_hot(tokens, len(weight)).to(weight.dtype) @ weight

    def set_attention(self, attend):
        for block in self.blocks:
            block.attend = attend


def cross_entropy(model, tokens):
    """Mean loss in nats of each token of (batch, seqlen + 1) except the first, predicted from the tokens before it."""
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
