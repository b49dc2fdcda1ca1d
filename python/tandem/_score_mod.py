"""Expressions that modify scores and masks (docs/score_mod.md), and their form in a call's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem import _arrays

MODS = ("score_mod", "mask_mod")

# An expression in the form of call_args: for each name (name, number or tensor, tensor for its gradient or None).
Bound = tuple[str, tuple[tuple[str, Any, Any], ...]]


class Mod:
    """An expression for score_mod or mask_mod of :func:`tandem.attention`, with the values of its names.

        tandem.Mod("score - slope[head] * abs(q - k)", slope=slopes)
        tandem.Mod("q - k < width", width=128)

    A name is a number or an array. A number is a bool, int or float, whose value comes with each call and needs no new
    kernel. An array has float, int32, int64 or bool elements and 0 to 4 dimensions. An expression without such names
    may be passed as a str. docs/score_mod.md describes the language.
    """

    __slots__ = ("bindings", "origin", "text")

    def __init__(self, text: str, /, **bindings: Any):
        if not isinstance(text, str) or "\0" in text:
            raise TypeError(
                f"text ({text!r}) must be a str such as 'score - slope[head] * abs(q - k)': pass such a text"
            )
        self.text = text
        self.bindings = bindings
        self.origin = ""  # file and line of the traced function

    def __repr__(self) -> str:
        return ", ".join((f"Mod({self.text!r}", *(f"{name}={_shown(x)}" for name, x in self.bindings.items()))) + ")"


class Blocks(NamedTuple):
    """A block mask of :func:`tandem.attention`, by the names of torch's BlockMask: the visible blocks of queries and
    keys.

    kv_num_blocks (batch|1, heads|1, blocks of queries) and kv_indices (batch|1, heads|1, blocks of queries, any
    number) are int32. The first kv_num_blocks entries of a row of kv_indices are blocks of keys in which mask_mod
    decides; without a mask_mod they are visible whole. The blocks of full_kv_indices are visible whole. All other
    blocks are hidden. BLOCK_SIZE: queries and keys of a block. of_mask_mod: Blocks.of computed the lists from the
    mask_mod that is passed with them. A mask_mod that is a window is then served as a window, without the lists.
    """

    kv_num_blocks: Any
    kv_indices: Any
    full_kv_num_blocks: Any = None
    full_kv_indices: Any = None
    BLOCK_SIZE: tuple[int, int] = (128, 128)
    of_mask_mod: bool = False

    @classmethod
    def of(
        cls,
        mask_mod: Any,
        seqlen_q: int,
        seqlen_k: int,
        *,
        batch: int = 1,
        heads: int = 1,
        BLOCK_SIZE: tuple[int, int] = (128, 128),
        device: Any = None,
    ) -> Blocks:
        """The visible blocks of a mask_mod: an expression, or a :class:`Mod` whose arrays lie on the device.

        As in torch, a block is in full_kv_indices if all of it is visible and within the sequences. A block is else in
        kv_indices if some of it is visible. batch, heads: 1 if the expression reads neither. device: None for numpy
        arrays, else the device of torch tensors. Interval arithmetic decides most blocks, and no array of seqlen_q x
        seqlen_k is built.

        Pass the mask_mod to attention as well: it decides within blocks that are visible in part.
        Raises ValueError or TypeError for wrong arguments, tandem.Unsupported for what a GPU does not serve.
        """
        names = ("batch", "heads", "seqlen_q", "seqlen_k", "BLOCK_SIZE[0]", "BLOCK_SIZE[1]")
        given = (batch, heads, seqlen_q, seqlen_k, *BLOCK_SIZE)
        sizes = tuple(_arrays.integer(x, name) for name, x in zip(names, given))
        return cls(**made_lists(mask_mod, sizes, device, by_keys=False), BLOCK_SIZE=sizes[4:])


def made_lists(mask_mod: Any, sizes: tuple[int, ...], device: Any, by_keys: bool) -> dict[str, Any]:
    """Returns the lists of a block mask by torch's names: :class:`Blocks`' lists and, with by_keys, the lists for each
    block of keys. sizes: batch, heads, seqlen_q, seqlen_k, queries and keys of a block.
    """
    from tandem import _binding

    batch, heads, *lengths = (max(x, 0) for x in sizes[:4])
    rows, columns = (-(-length // max(size, 1)) for length, size in zip(lengths, sizes[4:]))
    new = _new_arrays(device)
    made = {}
    for kind, count, most in (("kv", rows, columns), ("q", columns, rows))[: 1 + by_keys]:
        for full in ("", "full_"):
            made[f"{full}{kind}_num_blocks"] = new((batch, heads, count), "int32")
            made[f"{full}{kind}_indices"] = new((batch, heads, count, most), "int32")
    cells = new((batch * heads * rows * columns,), "uint8")
    _binding.make_block_mask(bound(mask_mod, "mask_mod"), sizes, made, cells)
    return made


def _new_arrays(device: Any) -> Any:
    """Returns a function that creates an array from a shape and the name of a type."""
    if device is None:
        return np.empty
    import torch

    return lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _shown(x: Any) -> str:
    return f"{type(x).__name__} of {tuple(x.shape)}" if getattr(x, "shape", ()) else repr(x)


def is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


def bound(mod: Any, argument: str) -> Bound:
    """Returns the caller's score_mod or mask_mod in the form of call_args."""
    if isinstance(mod, str):
        mod = Mod(mod)
    if not isinstance(mod, Mod):
        remedy = "pass a function to tandem.flex_attention" if callable(mod) else "pass one of them"
        raise TypeError(f"{argument} ({type(mod).__name__}) must be an expression (str) or a tandem.Mod: {remedy}")
    return mod.text, tuple((name, _value(x, f"{argument}.{name}"), None) for name, x in mod.bindings.items())


def _value(x: Any, name: str) -> Any:
    if isinstance(x, np.generic):
        x = x.item()
    if is_number(x):
        return x
    if isinstance(x, (str, complex, list, tuple)) or x is None:
        raise TypeError(f"{name} ({type(x).__name__}) must be a number or an array: convert it")
    return _arrays.view(x, name)


def tensors_of(mod: Bound | None) -> list[Any]:
    """Returns the tensors that an expression names, in order."""
    return [] if mod is None else [x for _, x, _ in mod[1] if not is_number(x)]


def replaced(mod: Bound, tensors: Sequence[Any], gradients: Sequence[Any] = ()) -> Bound:
    """Returns the same expression with other tensors, and with tensors for their gradients."""
    values, places = iter(tensors), iter(gradients)
    items = ((name, x, None) if is_number(x) else (name, next(values), next(places, None)) for name, x, _ in mod[1])
    return mod[0], tuple(items)


def described(mod: Bound, argument: str) -> Bound:
    """Returns the same expression with descriptions of its tensors, for a binding that cannot read them."""
    items = []
    for name, x, gradient in mod[1]:
        known = x if is_number(x) or isinstance(x, tuple) else _arrays.describe(x, f"{argument}.{name}")
        if gradient is not None and not isinstance(gradient, tuple):
            gradient = _arrays.describe(gradient, f"{argument}.{name}.gradient")
        items.append((name, known, gradient))
    return mod[0], tuple(items)


def named(call_args: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a call's expressions, by their names in error messages."""
    return {
        f"{argument}.{name}": x
        for argument in MODS
        for name, x, _ in (call_args.get(argument) or ("", ()))[1]
        if not is_number(x)
    }


def take_out(call_args: dict[str, Any]) -> list[Any]:
    """Removes the tensors of a call's expressions and returns them."""
    found = []
    for argument in MODS:
        if (mod := call_args.get(argument)) is not None:
            tensors = tensors_of(mod)
            call_args[argument] = replaced(mod, [None] * len(tensors))
            found += tensors
    return found


def put_back(call_args: dict[str, Any], tensors: Sequence[Any]) -> None:
    """Restores the tensors that take_out() returned."""
    start = 0
    for argument in MODS:
        if (mod := call_args.get(argument)) is not None:
            count = len(tensors_of(mod))
            call_args[argument] = replaced(mod, tensors[start : start + count])
            start += count
