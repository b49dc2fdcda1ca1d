"""What the FlashAttention interfaces say in their own way, as tandem.attention takes it."""

from __future__ import annotations

import os
from typing import Any, Callable

import torch

import tandem
from tandem._errors import renamed


def in_words(names: dict[str, str], function: Callable, *arguments: Any, **options: Any) -> Any:
    """function(*arguments, **options), whose errors say the caller's names for our arguments."""
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError, tandem.Unsupported) as error:
        raise renamed(error, names) from None


def is_tensor(x: Any, name: str) -> None:
    """Raises where x is none of torch's."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} ({type(x).__name__}) must be a torch tensor: torch.as_tensor makes one; tandem.attention takes "
            "other arrays too"
        )


def unit_stride(x: torch.Tensor, name: str) -> torch.Tensor:
    """x, or a copy of it where its last dimension is not contiguous."""
    is_tensor(x, name)
    try:
        return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()
    except RuntimeError:
        kind = "nested" if x.is_nested else str(x.layout).rpartition(".")[2]
        raise TypeError(f"{name} ({kind}) must be a plain tensor, of one shape and with strides") from None


def sink_for(q: torch.Tensor, sink: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """sink in a type that tandem.attention takes beside q: its own where that is one, else float32 or q's float64."""
    if sink is None:
        return None
    is_tensor(sink, name)
    if sink.dtype == q.dtype or not sink.is_floating_point():
        return sink
    return sink.to(torch.promote_types(q.dtype, torch.float32))


def is_deterministic(deterministic: bool) -> bool:
    """The argument, or what the environment asks of all calls."""
    asked = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0")
    if asked not in ("0", "1", ""):
        raise ValueError(f"FLASH_ATTENTION_DETERMINISTIC ({asked!r}) must be 0 or 1, or not set: it is for all calls")
    return deterministic or asked == "1"


def pair(window_size: Any) -> tuple[Any, Any]:
    """A window's two bounds."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size ({window_size!r}) must be (left, right), numbers of keys beside each query's own place; "
            "(-1, -1) is no window"
        )
    left, right = window_size
    if not ((left is None or hasattr(left, "__index__")) and (right is None or hasattr(right, "__index__"))):
        raise TypeError(f"window_size ({window_size!r}) must be two whole numbers, of which None and -1 are no bound")
    return left, right


def bounds(window_size: Any) -> tuple[int | None, int | None] | None:
    """(left, right) with negative numbers for "unbounded", as tandem.attention's window."""
    left, right = pair(window_size)
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return None if left is None and right is None else (left, right)


def cap(softcap: Any) -> Any:
    """softcap, of which 0 and less are none. What is no number goes on to where it is refused."""
    return 0.0 if isinstance(softcap, (int, float)) and softcap < 0 else softcap


def splits(num_splits: Any, q: torch.Tensor) -> Any:
    """Less than 1 leaves the number of splits to the device, which a GPU has no choice of: its keys are not split."""
    return None if q.is_cuda or (isinstance(num_splits, int) and num_splits < 1) else num_splits


def places(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of x's rows and the row's place in it: (batch, 1) and (1, seqlen), or twice (total)."""
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        return torch.arange(batch, device=x.device)[:, None], torch.arange(seqlen, device=x.device)[None]
    starts = cu_seqlens.long()
    sequence = torch.arange(starts.numel() - 1, device=x.device)
    total = x.shape[0] if x.is_cuda else None  # told, a GPU need not be waited for
    sequence = torch.repeat_interleave(sequence, starts.diff(), output_size=total)
    return sequence, torch.arange(sequence.numel(), device=x.device) - starts[sequence]
