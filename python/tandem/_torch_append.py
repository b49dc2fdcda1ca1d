"""The operator of tandem.append_kv, which writes its caches and q_out in place."""

from __future__ import annotations

from typing import Any

import torch

from tandem._arrays import APPEND_TENSORS
from tandem._binding import WRITTEN_BY_APPEND, refuse_gradient
from tandem._binding import append_kv as append_to
from tandem._operands import DEVICES, checked
from tandem._tensors import check_layout, check_writable, count_write, resolved
from tandem._torch_ops import library

library.define(
    "append_kv(Tensor? k, Tensor? v, Tensor(a!)? k_cache, Tensor(b!)? v_cache, Tensor? slot_mapping, "
    "Tensor? page_table, Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cu_seqlens_new, Tensor? q, "
    "Tensor(c!)? q_out, Tensor? cu_seqlens_q, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, "
    "Tensor? positions, bool interleaved, bool single_q_position) -> ()"
)


def _kernel(*arguments: Any) -> None:
    for name, x in zip(APPEND_TENSORS, arguments):
        refuse_gradient(x, name, "call under torch.no_grad()")
    tensors = {name: None if x is None else x.detach() for name, x in zip(APPEND_TENSORS, arguments)}
    append_to(tensors, arguments[len(tensors) :])
    for name, x in zip(APPEND_TENSORS, arguments):
        if name in WRITTEN_BY_APPEND:
            count_write(x)


def _lazy(*arguments: Any) -> None:
    """Runs append_kv of lazily negated tensors and of zero tensors without memory. Neither may be written."""
    for name, x in zip(APPEND_TENSORS, arguments):
        if name in WRITTEN_BY_APPEND and x is not None:
            check_layout(x, name)
            check_writable(x, name)
    with torch._C._ExcludeDispatchKeyGuard(_LAZY):
        torch.ops.tandem.append_kv(*map(resolved, arguments))


_keys = torch._C.DispatchKey
_LAZY = torch._C.DispatchKeySet(_keys.Negative) | torch._C.DispatchKeySet(_keys.ZeroTensor)

_check = checked(APPEND_TENSORS, ())
for _device in DEVICES:
    library.impl("append_kv", _check(_kernel), _device)
for _device in ("Negative", "ZeroTensor"):
    library.impl("append_kv", _lazy, _device)
torch.library.register_fake("tandem::append_kv", _check(lambda *_: None), lib=library)
