"""The checks of an operator's arguments. The checks precede every allocation and every write.

torch passes None for a tensor that the schema requires. torch runs the fake kernel if one tensor is on the device
"meta". Sparse, nested and quantized tensors have no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tandem import _score_mod
from tandem._binding import CallArgs
from tandem._tensors import check_layout

Kernel = Callable[..., Any]

# The dispatch keys of a checked kernel. The checks refuse devices and layouts other than CPU's and CUDA's.
DEVICES = ("CPU", "CUDA", "CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor")


def check_operands(names: Sequence[str], required: Sequence[str], values: Sequence[Any]) -> None:
    """Raises if a required tensor is None, a tensor has no strides, or two tensors are on different devices."""
    tensors: list[tuple[str, Any]] = []
    for name, value in zip(names, values):
        if isinstance(value, (list, tuple)):
            tensors += [(f"{name}[{n}]", x) for n, x in enumerate(value)]
        elif value is not None or name in required:
            tensors.append((name, value))
    for name, x in tensors:
        if x is None:
            raise TypeError(f"{name} (None) must be a tensor: pass one")
        if isinstance(x, Tensor):
            check_layout(x, name)
            first, device = tensors[0][0], tensors[0][1].device
            if x.device != device:
                raise ValueError(f"{name} (on {x.device}) must be on the device of {first} ({device}): move it there")


def checked(names: Sequence[str], required: Sequence[str]) -> Callable[[Kernel], Kernel]:
    """Returns a decorator of an operator's kernel, whose arguments by position have these names."""

    def decorate(kernel: Kernel) -> Kernel:
        def checked_kernel(*values: Any, **options: Any) -> Any:
            check_operands(names, required, values)
            return kernel(*values, **options)

        return checked_kernel

    return decorate


def check_mods(call_args: CallArgs, captured: Sequence[Tensor]) -> None:
    """Raises unless the names of score_mod and mask_mod have one number or one captured tensor each."""
    count = 0
    for argument in _score_mod.MODS:
        names, numbers = (call_args.get(f"{argument}_{part}") or () for part in ("names", "numbers"))
        if call_args.get(argument) is None and (names or numbers):
            raise ValueError(f"{argument} (None) must be an expression if {argument}_names has values: pass one")
        if len(numbers) > len(names):
            raise ValueError(
                f"{argument}_numbers ({len(numbers)} values) must have at most one for each of {argument}_names "
                f"({len(names)}): omit the rest"
            )
        count += len(names) - len(numbers)
    if len(captured) != count:
        raise ValueError(
            f"captured ({len(captured)} tensors) must have {count}, one for each name of score_mod and mask_mod "
            "without a number: pass these tensors"
        )


def check_wanted(call_args: CallArgs, names: Sequence[str], wanted: Sequence[bool]) -> None:
    """Raises unless wanted has one value for each of these inputs, and True only for inputs that are present."""
    if len(wanted) != len(names):
        raise ValueError(
            f"wanted ({len(wanted)} values) must have {len(names)}, one for each of {', '.join(names)}: pass them"
        )
    for n, (name, w) in enumerate(zip(names, wanted)):
        if w and call_args.get(name) is None:
            raise ValueError(f"wanted[{n}] (True) must be False, because {name} is None: pass False")
