"""Arguments of the FlashAttention interfaces in tandem.attention's form."""

from __future__ import annotations

import operator
import os
from typing import Any, Callable

import torch

import tandem
from tandem._arrays import flag_of, integer
from tandem._errors import renamed


def in_words(names: dict[str, str], function: Callable, *arguments: Any, **options: Any) -> Any:
    """Calls function(*arguments, **options); errors have the caller's names of the arguments."""
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError, tandem.Unsupported) as error:
        raise renamed(error, names) from None


def is_tensor(x: Any, name: str) -> None:
    """Raises if x is no torch tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} ({type(x).__name__}) must be a torch tensor: convert it with torch.as_tensor, or call "
            "tandem.attention, which accepts other arrays"
        )


def type_name(x: Any) -> str:
    """Returns the name of x's type, for a message."""
    return type(x).__name__


def refuse_given(ways_out: dict[str, str], arguments: dict[str, Any], shown: Callable = type_name) -> None:
    """Refuses the first argument that is not None; ways_out has the remedy of each."""
    for name, value in arguments.items():
        if value is not None:
            raise tandem.Unsupported(f"{name} ({shown(value)}) is not served: {ways_out[name]}")


def refuse_scales(**scales: Any) -> None:
    """Refuses the scales of 8-bit inputs."""
    for name, scale in scales.items():
        if scale is not None:
            raise tandem.Unsupported(f"{name} is given, but 8-bit inputs are not served: convert them to bfloat16")


def refuse_8_bit(**tensors: torch.Tensor) -> None:
    """Refuses 8-bit tensors, by their names."""
    for name, x in tensors.items():
        is_tensor(x, name)
        if x.element_size() == 1:
            raise tandem.Unsupported(f"{name} ({x.dtype}) is not served: convert 8-bit inputs to bfloat16")


def no_metadata(cache_seqlens: torch.Tensor) -> torch.Tensor:
    """Returns an empty int32 tensor for scheduler_metadata: Tandem plans nothing ahead."""
    is_tensor(cache_seqlens, "cache_seqlens")
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def unit_stride(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns x, or a copy of it if its last dimension is not contiguous."""
    is_tensor(x, name)
    try:
        return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()
    except RuntimeError:
        kind = "nested" if x.is_nested else str(x.layout).rpartition(".")[2]
        raise TypeError(f"{name} ({kind}) must be a plain tensor, of one shape and with strides: convert it") from None


def sink_for(q: torch.Tensor, sink: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """Returns sink in a type that tandem.attention accepts: q's type, else float32, or float64 for a float64 q."""
    if sink is None:
        return None
    is_tensor(sink, name)
    if sink.dtype == q.dtype or not sink.is_floating_point():
        return sink
    return sink.to(torch.promote_types(q.dtype, torch.float32))


def is_deterministic(deterministic: bool) -> bool:
    """Returns the argument, or True if the environment requests it for all calls."""
    asked = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0")
    if asked not in ("0", "1", ""):
        raise ValueError(f"FLASH_ATTENTION_DETERMINISTIC ({asked!r}) must be 0 or 1, or not set: set it to 0 or 1")
    return flag_of(deterministic, "deterministic") or asked == "1"


def pair(window_size: Any) -> tuple[Any, Any]:
    """Returns a window's two bounds, from any sequence, array or tensor of two."""
    bounds = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    try:
        left, right = (None, None) if isinstance(bounds, (str, bytes, dict, set)) else tuple(bounds)
        is_pair = not isinstance(bounds, (str, bytes, dict, set))
    except (TypeError, ValueError):
        is_pair = False
    if not is_pair:
        raise ValueError(
            f"window_size ({window_size!r}) must be (left, right), the numbers of keys before and after each query: "
            "pass such a pair, or (-1, -1) for no window"
        )
    if any(x is not None and (isinstance(x, bool) or not hasattr(x, "__index__")) for x in (left, right)):
        raise TypeError(f"window_size ({window_size!r}) must be two whole numbers: pass None or -1 for no bound")
    return left if left is None else operator.index(left), right if right is None else operator.index(right)


_NO_WINDOW = (-1, -1)


def bounds(window_size: Any) -> tuple[int | None, int | None] | None:
    """Converts (left, right) with negative numbers for "unbounded" to tandem.attention's window."""
    if type(window_size) is tuple and window_size == _NO_WINDOW:
        return None
    left, right = pair(window_size)
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return None if left is None and right is None else (left, right)


def chunked(options: dict[str, Any], attention_chunk: int | None, mask_mod: Any = None) -> dict[str, Any]:
    """Adds FlashAttention-3's attention_chunk to options: a query sees only keys of the same chunk.

    Chunks divide the keys. A query belongs to the chunk of key q + seqlen_k - seqlen_q. Numbers below 1 add nothing.
    """
    if attention_chunk is None or (chunk := integer(attention_chunk, "attention_chunk")) < 1:
        return options
    if mask_mod is not None:
        raise tandem.Unsupported(
            f"attention_chunk ({attention_chunk}) with mask_mod is not served: compare the chunks in mask_mod"
        )
    chunk = min(chunk, 2**31 - 1)
    # The window hides nothing that the mask shows, and lets kernels skip keys of other chunks.
    left, right = (chunk - 1 if x is None else min(x, chunk - 1) for x in options["window"] or (None, None))
    mask = tandem.Mod("(q + seqlen_k - seqlen_q) // chunk == k // chunk", chunk=chunk)
    return {**options, "window": (left, right), "mask_mod": mask}


def cap(softcap: Any) -> Any:
    """Converts softcap: 0 and less mean none. tandem.attention refuses a value that is not a number."""
    return 0.0 if isinstance(softcap, (int, float)) and softcap < 0 else softcap


def splits(num_splits: Any) -> Any:
    """Converts num_splits: a number below 1 leaves the choice to the plan."""
    return None if isinstance(num_splits, int) and num_splits < 1 else num_splits


def lengths_of(cu_seqlens: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the lengths of the sequences that cu_seqlens bounds."""
    is_tensor(cu_seqlens, name)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"{name} (shape {tuple(cu_seqlens.shape)}) must be (batch + 1): reshape it")
    return cu_seqlens.diff()


def pack(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns x (batch, seqlen, heads, head_dim) as one packed tensor, its cu_seqlens, and seqlen."""
    if x.dim() != 4:
        raise ValueError(
            f"{name} (shape {tuple(x.shape)}) must be (batch, seqlen, heads, head_dim) without cu_seqlens: reshape it"
        )
    batch, seqlen = x.shape[:2]
    return x.flatten(0, 1), seqlen * torch.arange(batch + 1, dtype=torch.int32, device=x.device), seqlen


def pack_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns k and v (batch, seqlen, ...) as packed tensors, their cu_seqlens, and seqlen."""
    (keys, cu_seqlens, seqlen), (values, *_) = pack(k, "k"), pack(v, "v")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"v (shape {tuple(v.shape)}) must have k's batch and seqlen {tuple(k.shape[:2])}: pass one value per key"
        )
    return keys, values, cu_seqlens, seqlen


def places(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sequence of each of x's rows and the row's place in it:

    (batch, 1) and (1, seqlen), or twice (total). A row after the last sequence has place 0 of the last sequence.
    """
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        return torch.arange(batch, device=x.device)[:, None], torch.arange(seqlen, device=x.device)[None]
    starts = cu_seqlens.long()
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(starts[1:], row, right=True).clamp(max=starts.numel() - 2)
    return sequence, torch.where(row < starts[-1], row - starts[sequence], 0)


class Refused:
    """Represents an object of another library and refuses every attribute."""

    def __init__(self, name: str, instead: str):
        self._name, self._instead = name, instead

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise tandem.Unsupported(f"{self._name}.{name} is not served: {self._instead}")
