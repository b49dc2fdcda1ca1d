"""What the FlashAttention interfaces say in their own way, as tandem.attention takes it."""

from __future__ import annotations

import os

import torch


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def is_deterministic(deterministic: bool) -> bool:
    """The argument, or what the environment asks of all calls."""
    return deterministic or os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"


def bounds(window_size) -> tuple[int | None, int | None] | None:
    """(left, right) with negative numbers for "unbounded", as tandem.attention's window."""
    left, right = window_size
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return None if left is None and right is None else (left, right)


def splits(num_splits: int, q: torch.Tensor) -> int | None:
    """Less than 1 leaves the number of splits to the device, which a GPU has no choice of: its keys are not split."""
    return num_splits if num_splits >= 1 and not q.is_cuda else None


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
