"""The functions of vLLM's module vllm.vllm_flash_attn (0.33), on tandem.attention, and an attention backend for vLLM.

The functions need no vLLM. Shapes and rules equal tandem.flash_attn's, with these differences.

- fa_version 2, 3 and 4 compute the same result. The LSE of a row that sees no key is +inf with 2, else -inf.
- Every fa_version serves alibi_slopes, softcap, windows, num_splits, s_aux (attention sinks), mask_mod,
  dynamic_causal and cp_world_size. FlashAttention serves a part of them in each version.
- scheduler_metadata, deterministic, return_attn_probs and aux_tensor_leading_dims change no result.
- Descales are ignored for 16-bit inputs, as FlashAttention-4 ignores them. 8-bit inputs are refused.
- VLLM_BATCH_INVARIANT=1 in the environment means batch_invariant: a request's bits do not depend on its batch.
- q_v, output_scale, block_sparse_tensors and gather_kv_indices are refused.

vLLM finds the backend by the entry point ``tandem`` of the group ``vllm.general_plugins``, under the name TANDEM:
``vllm serve MODEL --attention-backend TANDEM``. `register` registers it by hand.
"""

from __future__ import annotations

from typing import Any

from tandem.compat.vllm.flash_attn_interface import (
    compile_flash_attn_varlen_func_from_specs,
    fa_version_unsupported_reason,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    is_fa_version_supported,
    reshape_and_cache_flash,
)

__all__ = [
    "compile_flash_attn_varlen_func_from_specs",
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
    "register",
    "reshape_and_cache_flash",
]

_BACKEND = ("TandemAttentionBackend", "TandemAttentionImpl", "TandemMetadata", "TandemMetadataBuilder")


def register() -> None:
    """Registers the attention backend TANDEM with vLLM. A second call changes nothing."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise _missing(error) from error
    path = "tandem.compat.vllm.backend.TandemAttentionBackend"
    if "TANDEM" not in AttentionBackendEnum.__members__:
        register_backend("TANDEM", path)


def __getattr__(name: str) -> Any:
    if name not in _BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tandem.compat.vllm import backend
    except ImportError as error:
        raise _missing(error) from error
    return getattr(backend, name)


def _missing(error: ImportError) -> ImportError:
    return ImportError(
        f"vllm ({error}) must be installed for the attention backend, version 0.33: install it with "
        "'pip install vllm==0.33.0'. The functions of tandem.vllm work without it",
        name="vllm",
    )
