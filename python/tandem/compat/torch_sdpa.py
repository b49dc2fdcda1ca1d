"""torch's scaled_dot_product_attention computed by Tandem on GPUs, without a change of the model.

    import tandem.torch_sdpa
    torch.nn.attention.activate_flash_attention_impl("Tandem")
    torch.nn.attention.restore_flash_attention_impl()  # ends it

torch's flash attention (scaled_dot_product_attention with its flash backend, and varlen_attn) then runs Tandem's
kernels, forward and, on Hopper GPUs, backward. Calls that Tandem does not serve run torch's kernels; Tandem and torch
read each other's out and logsumexp. torch still chooses the backend:
``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` selects this one where torch prefers cuDNN.

Importing this module registers the name "Tandem", which needs torch 2.11 or later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tandem import _gradients, _torch_ops
from tandem._binding import FORWARD, CallArgs, call
from tandem._errors import Unsupported

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    raise ImportError(
        f"torch is {torch.__version__} and must be 2.11 or later: upgrade torch with 'pip install -U torch', or call "
        "tandem.sdpa"
    )


class _Registration:
    """Tandem's functions in place of torch's operators, until remove()."""

    def __init__(self) -> None:
        ours = {"_flash_attention_forward": _forward, "_flash_attention_backward": _backward}
        try:
            instead = {name: _or(own, torch.library.get_kernel(f"aten::{name}", "CUDA")) for name, own in ours.items()}
        except RuntimeError as error:
            raise Unsupported(
                f"torch {torch.__version__} must have flash attention for GPUs: install a torch built with CUDA"
            ) from error
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns that an operator is replaced
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in instead.items():
                self._library.impl(name, kernel, "CUDA", with_keyset=True)

    def remove(self) -> None:
        """Restores torch's kernels."""
        self._library._destroy()


def _or(ours: Callable[..., Any], theirs: Any) -> Callable[..., Any]:
    """Calls Tandem's function, or torch's if Tandem's refuses the call."""

    def kernel(keyset: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return ours(*arguments, **named)
        except Unsupported:
            return theirs.call_boxed(keyset, *arguments, **named)

    return kernel


def _record(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_q: int, max_k: int,
    is_causal: bool, scale: float | None, left: int | None, right: int | None,
) -> CallArgs:  # fmt: skip
    """The arguments that both of torch's operators have; q (batch, seqlen, heads, head_dim), or packed."""
    call_args: CallArgs = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "softmax_scale": scale,
        "causal": is_causal,
        "window": tuple(None if x is None or x < 0 else x for x in (left, right)),
    }
    if cu_seqlens_q is not None:
        call_args.update(max_seqlen_q=max_q, max_seqlen_k=max_k)
    return call_args


def _may_hide_all(call_args: CallArgs, max_q: int, max_k: int) -> bool:
    """Returns True if a query may see no key: torch's lse is then +inf and Tandem's -inf."""
    named = ("cu_seqlens_q", "seqused_k")
    return (
        any(call_args.get(name) is not None for name in named)
        or call_args["window"] != (None, None)
        or (call_args["causal"] and max_q > max_k)
    )


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
    alibi_slopes: Any = None, **newer: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_forward: q (batch, seqlen, heads, head_dim), or packed with cu_seqlens. Raises Unsupported
    for what torch shall compute. Returns out, logsumexp, two tensors about dropout, and an empty one."""
    if dropout_p or return_debug_mask or any(x is not None for x in newer.values()) or q.shape[-1] != v.shape[-1]:
        raise Unsupported("dropout, its mask, pages and splits are not served: use torch's kernels")
    call_args = _record(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right
    )
    out, lse = torch.empty_like(q), _torch_ops.new_lse(q)  # out has q's layout, like torch's result
    call_args.update(alibi_slopes=alibi_slopes, seqused_k=seqused_k, out=out, lse=lse)
    call(FORWARD, call_args)
    if _may_hide_all(call_args, max_q, max_k):
        lse.masked_fill_(lse == float("-inf"), float("inf"))
    random = torch.empty(2, dtype=torch.uint64, device=q.device)
    return out, lse, random, random.new_empty(()), q.new_empty(0)


def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any,
    unused: Any, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **newer: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_backward. Returns dq, dk, dv."""
    if dropout_p or any(x is not None for x in newer.values()) or not _gradients.is_own(q):
        raise Unsupported("dropout, newer options and GPUs without a backward are not served: use torch's kernels")
    call_args = _record(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right
    )
    if _may_hide_all(call_args, max_q, max_k):
        lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    call_args.update(out=out, lse=lse, dout=dout)
    return tuple(_gradients.gradients(call_args, [True, True, True, False, False])[:3])


torch.nn.attention.register_flash_attention_impl("Tandem", register_fn=_Registration)
