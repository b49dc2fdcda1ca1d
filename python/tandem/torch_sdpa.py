"""Tandem below torch's own scaled_dot_product_attention, on GPUs: no line of a model changes.

    import tandem.torch_sdpa
    torch.nn.attention.activate_flash_attention_impl("Tandem")
    torch.nn.attention.restore_flash_attention_impl()  # ends it

From then on torch's flash attention (scaled_dot_product_attention where torch chooses its flash backend, varlen_attn)
computes by Tandem what Tandem serves. All other calls, and every backward, which takes Tandem's out and logsumexp,
reach torch's own kernels. Which backend torch chooses is not touched: where it prefers cuDNN,
``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` asks for this one.

Importing this module registers the name "Tandem"; torch 2.11 is the first that has the registry.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tandem import _torch
from tandem._errors import Unsupported
from tandem._library import FORWARD, call, options

_OPERATOR = "_flash_attention_forward"

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    raise ImportError(
        f"torch is {torch.__version__} and must be 2.11 or later, which lets others serve its flash attention: pip "
        "install -U torch, or call tandem.sdpa"
    )


class _Registration:
    """Tandem in the place of torch's forward operator, until remove()."""

    def __init__(self) -> None:
        try:
            self._own = torch.library.get_kernel(f"aten::{_OPERATOR}", "CUDA")
        except RuntimeError as error:
            raise Unsupported(
                f"torch {torch.__version__} has no flash attention for GPUs: install one that was built with CUDA"
            ) from error
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that an operator is replaced is what was asked for
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(_OPERATOR, self._forward, "CUDA", with_keyset=True)

    def remove(self) -> None:
        """Brings torch's own back."""
        self._library._destroy()

    def _forward(
        self, keyset: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any, **named: Any
    ) -> Any:
        try:
            return _forward(q, k, v, *arguments, **named)
        except Unsupported:
            return self._own.call_boxed(keyset, q, k, v, *arguments, **named)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
    alibi_slopes: Any = None, **newer: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_forward: q (batch, seqlen, heads, head_dim), or packed with cu_seqlens. Raises Unsupported
    for what torch shall compute. Returns out, logsumexp, two tensors about dropout, and an empty one."""
    if dropout_p or return_debug_mask or any(x is not None for x in newer.values()) or q.shape[-1] != v.shape[-1]:
        raise Unsupported("dropout, its mask, pages and splits are torch's")
    left = None if window_size_left is None or window_size_left < 0 else window_size_left
    right = None if window_size_right is None or window_size_right < 0 else window_size_right
    packed = cu_seqlens_q is not None
    out, lse = torch.empty_like(q), _torch.new_lse(q)  # out in q's layout, as torch's own
    tensors = (
        q, k, v, out, lse, None, None, None, None, None, None, None, None, None, alibi_slopes, cu_seqlens_q,
        cu_seqlens_k, None, seqused_k, None, None,
    )  # fmt: skip
    lengths = (max_q, max_k) if packed else (None, None)
    call(FORWARD, tensors, options(scale, is_causal, (left, right), 0.0, *lengths, 0.0, (0, 0), False, False, None))
    if packed or left is not None or right is not None or seqused_k is not None or (is_causal and max_q > max_k):
        lse.masked_fill_(lse == float("-inf"), float("inf"))  # as torch marks a query that sees no key
    random = torch.empty(2, dtype=torch.uint64, device=q.device)
    return out, lse, random, random.new_empty(()), q.new_empty(0)


torch.nn.attention.register_flash_attention_impl("Tandem", register_fn=_Registration)
