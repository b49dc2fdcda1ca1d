"""tandem.cascade_attention for torch tensors: one operator, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem._autocast import register_autocast
from tandem._binding import CallArgs, refuse_gradient
from tandem._binding import cascade as run
from tandem._derivatives import refuse_tangents
from tandem._operands import DEVICES, checked
from tandem._padding import needs_padding, padded_attention
from tandem._tensors import check_tensor
from tandem._torch_ops import library, new_outputs, outputs_of

_INPUTS = ("q", "k", "v", "sink", "cu_seqlens_q", "seqused_k", "page_table")
_GROUPS = ("cu_seqlens_group", "group_page_table", "group_seqused_k")

library.define(
    "cascade(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor cu_seqlens_q, Tensor seqused_k, Tensor page_table, "
    "Tensor cu_seqlens_group, Tensor group_page_table, Tensor group_seqused_k, SymInt max_rows_group, *, "
    "SymInt max_seqlen_q, float? softmax_scale, float softcap, bool causal, bool batch_invariant) "
    "-> (Tensor out, Tensor lse)"
)


def cascade(call_args: CallArgs, groups: dict[str, Any], max_rows_group: int) -> tuple[Tensor, Tensor]:
    """Computes tandem.cascade_attention. call_args: each request's own keys. Returns out and lse."""
    for name, x in (*call_args.items(), *groups.items()):
        if name in _GROUPS or (name in _INPUTS and (x is not None or name != "sink")):
            check_tensor(x, name)
            refuse_gradient(x, name, "call under torch.no_grad()")
    refuse_tangents((*call_args.values(), *groups.values()))
    if needs_padding(call_args["q"], call_args["v"]) and call_args["q"].shape[-1] == call_args["k"].shape[-1]:
        return padded_attention(lambda padded, _: cascade(padded, groups, max_rows_group), call_args, True)
    inputs = [call_args[name] for name in _INPUTS]
    options = {name: x for name, x in call_args.items() if name not in _INPUTS}
    with torch.no_grad():
        return torch.ops.tandem.cascade(*inputs, *(groups[name] for name in _GROUPS), max_rows_group, **options)


def _kernel(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    own, (*groups, max_rows_group) = inputs[: len(_INPUTS)], inputs[len(_INPUTS) :]
    for name, x in zip((*_INPUTS, *_GROUPS), inputs):
        refuse_gradient(x, name, "call under torch.no_grad()")
    call_args = {**dict(zip(_INPUTS, own)), **options}
    call_args["out"], call_args["lse"] = result = outputs_of(call_args)
    run(call_args, dict(zip(_GROUPS, groups)), max_rows_group)
    return result


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return new_outputs(q, v)


_check = checked((*_INPUTS, *_GROUPS), (*(name for name in _INPUTS if name != "sink"), *_GROUPS))
for _device in DEVICES:
    library.impl("cascade", _check(_kernel), _device)
torch.library.register_fake("tandem::cascade", _check(_fake), lib=library)
register_autocast(library, "cascade", _INPUTS.index("sink"))
