"""Modules that take the place of other libraries' attention, with their names, parameters, defaults and results.

- flash_attn: FlashAttention-2 (package flash_attn)
- fa3, fa4: FlashAttention-3 (flash_attn_interface) and FlashAttention-4 (flash_attn.cute)
- sdpa: torch.nn.functional.scaled_dot_product_attention
- flex: torch.nn.attention.flex_attention
- torch_sdpa: torch's scaled_dot_product_attention, computed by Tandem
- transformers: Hugging Face transformers with attn_implementation="tandem"
- vllm: vLLM's vllm_flash_attn and an attention backend; sglang: the functions that SGLang calls
- ring_flash_attn, transformer_engine, torch_context_parallel: context parallelism of these libraries and of torch
- patch: ``import flash_attn`` finds Tandem

Each can be imported without "compat": ``tandem.flash_attn`` and ``tandem.compat.flash_attn`` are one module."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    from tandem._import_paths import MODULES

    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
