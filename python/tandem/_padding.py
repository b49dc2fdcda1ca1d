"""Head dims that are no multiple of 8, which GPUs do not serve: tensors are padded with zeros and results are cut.

Columns of zeros change no score, and add columns of zeros to a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem._binding import CallArgs


def needs_padding(q: Tensor, v: Tensor) -> bool:
    return q.is_cuda and (q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0)


def padded(x: Tensor) -> Tensor:
    """Returns x padded with zeros to a head_dim that is a multiple of 8."""
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def padded_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v with padded head dims; unchanged if q's and k's differ, so that the call is refused for it."""
    if q.shape[-1] != k.shape[-1]:
        return q, k, v
    return padded(q), padded(k), padded(v)


def _scale(call_args: CallArgs) -> float:
    """Returns the call's softmax_scale. The default depends on the head_dim before padding."""
    scale = call_args.get("softmax_scale")
    return call_args["q"].shape[-1] ** -0.5 if scale is None else scale


def padded_attention(attention: Callable[..., Any], call_args: CallArgs, return_lse: bool) -> Any:
    """Computes attention(call_args, return_lse) with padded head dims."""
    q, k, v, out = call_args["q"], call_args["k"], call_args["v"], call_args.get("out")
    dim = v.shape[-1]
    padding = {**dict(zip(("q", "k", "v"), padded_qkv(q, k, v))), "softmax_scale": _scale(call_args)}
    if out is not None:
        padding["out"] = out.new_empty((*out.shape[:-1], out.shape[-1] + -dim % 8))
    result = attention({**call_args, **padding}, return_lse)
    if result is None:  # the call was only checked
        return None
    whole, *lse = result if return_lse else (result,)
    whole = whole[..., :dim] if out is None else out.copy_(whole[..., :dim])
    return (whole, *lse) if return_lse else whole


def padded_gradients(
    gradients: Callable[..., list[Tensor | None]], call_args: CallArgs, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Computes gradients(call_args, wanted) with padded head dims."""
    dims = [call_args[name].shape[-1] for name in ("q", "k", "v")]
    whole = {name: padded(call_args[name]) for name in ("q", "k", "v", "out", "dout")}
    result = gradients({**call_args, **whole, "softmax_scale": _scale(call_args)}, wanted)
    result[:3] = (x if x is None else x[..., :dim] for x, dim in zip(result, dims))
    return result
