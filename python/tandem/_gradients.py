"""Gradients of torch tensors: Tandem's backward on CPUs and Hopper GPUs, torch's on other GPUs (_flash_backward)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem import _flash_backward, _score_mod
from tandem._binding import BACKWARD, CHECK, CallArgs, call
from tandem._padding import needs_padding, padded_gradients
from tandem._tensors import resolved

DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
_KERNELS_FOR = 9  # the compute capability's major number: Hopper

_by_gpu: dict[int, bool] = {}


def is_own(q: Tensor) -> bool:
    """Returns True if Tandem has a backward for the device of q."""
    if not q.is_cuda:
        return True
    index = q.device.index
    own = _by_gpu.get(index)
    if own is None:
        own = _by_gpu[index] = torch.cuda.get_device_capability(index)[0] == _KERNELS_FOR
    return own


def like(x: Tensor) -> Tensor:
    """Returns a tensor for the gradient of x, in x's memory layout if the C interface can write it."""
    compact = x.dim() == 0 or x.stride(-1) == 1
    return torch.empty_like(x) if compact else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def refuse(call_args: CallArgs) -> None:
    """Raises the error of gradients() for this call on a GPU. call_args: with out and lse, not filled yet."""
    if not is_own(call_args["q"]):
        _flash_backward.refuse(call_args)
        return
    bias, mod = call_args.get("bias"), call_args.get("score_mod")
    dbias = like(bias) if bias is not None and bias.requires_grad else None
    if mod is not None:
        captured = _score_mod.tensors_of(mod)
        mod = _score_mod.replaced(mod, captured, [like(x) if x.requires_grad else None for x in captured])
    call(CHECK + BACKWARD, {**call_args, "dout": call_args["out"], "dbias": dbias, "score_mod": mod})


def refuse_early(call_args: CallArgs) -> None:
    """Raises refuse()'s error before the forward runs. A forward with pages is served, and only its gradient is not."""
    if call_args.get("page_table") is None:
        refuse(call_args)


def gradients(call_args: CallArgs, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Returns the requested gradients of q, k, v, bias and sink, then of the tensors that score_mod names; else None.
    call_args: the arguments of the call, with out, lse, dout and dlse."""
    if not is_own(call_args["q"]):
        return _flash_backward.gradients(call_args, wanted)
    if call_args["dout"] is None:
        call_args["dout"] = torch.zeros_like(call_args["out"])
    call_args["dout"], call_args["dlse"] = resolved(call_args["dout"]), resolved(call_args.get("dlse"))
    if needs_padding(call_args["q"], call_args["v"]):
        return padded_gradients(gradients, call_args, wanted)
    captured = _score_mod.tensors_of(call_args.get("score_mod"))
    inputs = [call_args.get(name) for name in DIFFERENTIABLE] + captured
    found = [like(x) if w else None for x, w in zip(inputs, wanted)]
    call_args["dq"], call_args["dk"], call_args["dv"], call_args["dbias"], call_args["dsink"] = found[:5]
    if captured:
        call_args["score_mod"] = _score_mod.replaced(call_args["score_mod"], captured, found[5:])
    call(BACKWARD, call_args)
    return found
