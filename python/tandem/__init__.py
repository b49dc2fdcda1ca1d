"""Tandem: exact attention, forward and backward, on CPUs, and forward on Hopper GPUs.

    import tandem
    out = tandem.attention(q, k, v, causal=True)  # numpy, torch, or anything that speaks DLPack

Other people's names for it, each a module: ``tandem.flash_attn`` (FlashAttention-2), ``tandem.fa3``, ``tandem.fa4``,
``tandem.sdpa`` (torch's scaled_dot_product_attention), ``tandem.flex`` (torch's flex_attention, also
``tandem.flex_attention``), ``tandem.transformers``. ``tandem.torch_sdpa`` puts Tandem below
torch's own function on GPUs. ``tandem.patch()`` makes ``import flash_attn`` resolve to Tandem. docs/python.md is one
page about all.
"""

from __future__ import annotations

import importlib
from typing import Any

from tandem import _gpu
from tandem._attention import Gradients, attention, attention_backward, check, merge, prepare, use_torch
from tandem._errors import Unsupported
from tandem._library import boundary as _boundary
from tandem._mods import Blocks, Mod

__version__: str = _boundary.version
__all__ = [
    "Blocks",
    "Gradients",
    "Mod",
    "Unsupported",
    "attention",
    "attention_backward",
    "check",
    "description",
    "merge",
    "patch",
    "prepare",
]

_MODULES = ("fa3", "fa4", "flash_attn", "flex", "sdpa", "torch_sdpa", "transformers")
# torch's names of FlexAttention, which tandem.flex has.
_OF_FLEX = ("BlockMask", "and_masks", "create_block_mask", "create_mask", "flex_attention", "noop_mask", "or_masks")

use_torch()  # registers the operators where torch is loaded already; later calls see to it otherwise


def description() -> str:
    """What will run, a line for each device: the CPU's threads and instruction set, then the GPUs in use or, where none
    is yet, torch's current one."""
    front = use_torch()
    gpus = _gpu.descriptions(_boundary, front.torch) if front is not None else []
    return "\n".join((_boundary.description(), *gpus))


def __getattr__(name: str) -> Any:
    if name == "patch":
        globals()["patch"] = function = importlib.import_module("tandem.patch").patch  # not the module of that name
        return function
    if name in _OF_FLEX:
        return getattr(importlib.import_module("tandem.flex"), name)
    if name in _MODULES:
        return importlib.import_module(f"tandem.{name}")
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
