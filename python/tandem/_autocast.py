"""The operators' rule under autocast: their first inputs have autocast's type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register_autocast(library: torch.library.Library, name: str, casts: int) -> None:
    """Registers an operator's rule: the first `casts` inputs have autocast's type."""
    operator = getattr(torch.ops.tandem, name).default
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, _kernel(operator, casts, device, getattr(torch._C.DispatchKey, key)), key)


def _kernel(operator: Any, casts: int, device: str, key: Any) -> Any:
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*inputs: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.device.type != device or x.layout is not torch.strided:
                return x
            return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*map(cast, inputs[:casts]), *inputs[casts:], **options)

    return kernel
