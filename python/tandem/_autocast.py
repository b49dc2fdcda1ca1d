"""The operators' rule under autocast: their first inputs have autocast's type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def register_autocast(library: torch.library.Library, name: str, casts: int) -> None:
    """Registers an operator's rule: the first `casts` inputs have autocast's type."""
    operator = getattr(torch.ops.tandem, name).default
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, _kernel(operator, casts, device, getattr(torch._C.DispatchKey, key)), key)


def _cast(x: Any, device: str) -> Any:
    if not isinstance(x, Tensor) or x.device.type != device or x.layout is not torch.strided:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x


def autocast_inputs(inputs: Sequence[Any], casts: int) -> list[Any]:
    """Returns an operator's inputs as its kernel receives them, with and without autocast."""
    device = inputs[0].device.type
    active = torch.is_autocast_enabled(device)
    return [_cast(x, device) if active and n < casts else x for n, x in enumerate(inputs)]


def _kernel(operator: Any, casts: int, device: str, key: Any) -> Any:
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*inputs: Any, **options: Any) -> Any:
        first = [_cast(x, device) for x in inputs[:casts]]
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*first, *inputs[casts:], **options)

    return kernel
