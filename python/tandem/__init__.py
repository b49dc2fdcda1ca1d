"""Exact attention, forward and backward, on CPUs and on NVIDIA GPUs (see docs/support.md for which).

    import tandem
    out = tandem.attention(q, k, v, causal=True)  # numpy arrays, torch tensors, or any other arrays with __dlpack__

torch tensors have gradients: Tandem's own on CPUs and Hopper GPUs, and torch's FlashAttention-2 backward's on Blackwell
GPUs. :func:`attention_backward` computes the gradients of other arrays.

Modules that take the place of other libraries: ``tandem.flash_attn`` (FlashAttention-2), ``tandem.fa3``,
``tandem.fa4``, ``tandem.sdpa`` (torch's scaled_dot_product_attention), ``tandem.flex`` (torch's flex_attention, also
``tandem.flex_attention``) and ``tandem.transformers``. ``tandem.torch_sdpa`` makes torch's own function run Tandem on
GPUs. ``tandem.patch()`` makes ``import flash_attn`` find Tandem. docs/python.md describes all of them.
``tandem.jax.attention`` is attention for JAX (docs/jax.md). ``tandem.context_parallel`` is attention over the ranks
of a torch process group, and ``tandem.context_parallel_decode`` attends to keys that ranks share.
"""

from __future__ import annotations

import importlib
from typing import Any

from tandem import _gpu, _import_paths
from tandem._api import Gradients, attention, attention_backward, merge, use_torch
from tandem._append import append_kv
from tandem._binding import binding as _active
from tandem._cascade import cascade_attention
from tandem._errors import Unsupported
from tandem._inspection import check, prepare
from tandem._score_mod import Blocks, Mod

__version__: str = _active.version
__all__ = [
    "Blocks",
    "ContextPlan",
    "Gradients",
    "Mod",
    "Unsupported",
    "append_kv",
    "attention",
    "attention_backward",
    "cascade_attention",
    "check",
    "context_parallel",
    "context_parallel_decode",
    "description",
    "merge",
    "patch",
    "prepare",
]

_FLEX_NAMES = ("BlockMask", "and_masks", "create_block_mask", "create_mask", "flex_attention", "noop_mask", "or_masks")

_import_paths.install()
use_torch()  # if torch is loaded; otherwise a later call does this


def description() -> str:
    """Returns a line per device: the CPU's threads and instruction set, then the GPUs in use or torch's current GPU."""
    front = use_torch()
    gpus = _gpu.descriptions(_active, front.torch) if front is not None else []
    return "\n".join((_active.description(), *gpus))


def __getattr__(name: str) -> Any:
    if name == "patch":
        globals()["patch"] = function = importlib.import_module("tandem.compat.patch").patch
        return function
    if name == "ContextPlan":
        return importlib.import_module("tandem._context_plan").ContextPlan
    if name == "context_parallel_decode":
        return importlib.import_module("tandem._context_decode").context_parallel_decode
    if name == "context_parallel":
        return importlib.import_module("tandem._context_parallel").context_parallel
    if name in _FLEX_NAMES:
        return getattr(importlib.import_module("tandem.compat.flex"), name)
    if name in ("compat", "jax") or name in _import_paths.MODULES:
        return importlib.import_module(f"tandem.{name}")
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
