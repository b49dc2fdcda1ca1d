"""The boundary to the C interface, and what its codes mean.

A boundary is a module with

  ``run(what, tensors, options, workspace=0, bytes=0) -> code``
      what: 0 forward, 1 backward; plus 2 to check only, or 8 to prepare only; plus 4 where q, k and v are (batch,
      heads, seqlen, head_dim).
      tensors: those of ``tandem_attention_args`` in its order, then
      the seed (int64, two elements: seed and offset); None for absent ones. Each is a numpy array, a torch tensor or a
      description (_arrays.describe). options: as options() below returns them.
      workspace, bytes: on a GPU the address and size of the device's memory that the call may use.
      code: 0 done; 1 to 7 a ``tandem_status``; 100 + i: tensor i must be described; 200 + i: tensor i is written to and
      read-only; 300 + i: GPU i must be opened; 1000 + n: a workspace of n bytes is wanted; negative: the bits of -code
      name the tensors to copy, whose last dimension is not contiguous or, on a GPU, whose rows are not pieces of 16
      bytes.
  ``open_gpu(index) -> tandem_status``, ``gpu_description(index)``: None before it has been opened
  ``last_error()``, ``description()``, ``use_openmp_of(library)``, ``version``

A call on a GPU runs on the stream that the tensors' library works on, and returns when it has been put there.

_native does it in C; _ctypes where that cannot be loaded.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem import _arrays, _gpu
from tandem._errors import error_of

boundary: Any
try:
    if os.environ.get("TANDEM_PYTHON_BOUNDARY") == "ctypes":
        raise ImportError
    from tandem import _native

    boundary = _native
except ImportError:
    from tandem import _ctypes

    boundary = _ctypes

FORWARD, BACKWARD, CHECK, FORWARD_HEADS_FIRST, PREPARE = 0, 1, 2, 4, 8
NAMES = (*_arrays.TENSORS, "seed")
_DOUT = NAMES.index("dout")

_said_that_copies_are_made = False


def call(what: int, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Runs a pass; raises ValueError, TypeError, RuntimeError or tandem.Unsupported with the library's sentence."""
    code = boundary.run(what, tensors, options)
    if code:
        _recover(code, what, list(tensors), options)


def _recover(code: int, what: int, tensors: list[Any], options: tuple[Any, ...]) -> None:
    memory, size = 0, 0
    while code:
        if code < 0:
            _copy(-code, tensors)
        elif code >= 1000:
            size = code - 1000
            workspace = _gpu.workspace(_owner(tensors[0]), size)
            memory = workspace.data_ptr()
        elif code >= 300:
            _gpu.open_gpu(boundary, code - 300)
        elif code >= 200:
            name = NAMES[code - 200]
            raise ValueError(f"{name} is read-only and would be written to: give an array that may be written")
        elif code >= 100:
            index = code - 100
            tensors[index] = _arrays.describe(tensors[index], NAMES[index])
            if NAMES[index] == "seed":
                shape, bits = tensors[index][5], tensors[index][4]
                if shape != (2,) or bits != 64:
                    raise ValueError(f"seed (shape {shape}) must be an integer or two int64: the seed and the offset")
        else:
            raise error_of(code, boundary.last_error())
        code = boundary.run(what, tuple(tensors), options, memory, size)


def _owner(x: Any) -> Any:
    """The array itself, also of a description."""
    return x[-1] if type(x) is tuple else x


def _copy(mask: int, tensors: list[Any]) -> None:
    global _said_that_copies_are_made
    for index in range(len(tensors)):
        if not mask >> index & 1:
            continue
        owner = _owner(tensors[index])
        if _arrays.is_torch(owner):
            scattered = owner.stride(-1) != 1
            tensors[index] = owner.detach().clone(memory_format=sys.modules["torch"].contiguous_format)
        else:
            scattered = True
            tensors[index] = np.ascontiguousarray(owner)
        if scattered and not _said_that_copies_are_made and index != _DOUT:
            _said_that_copies_are_made = True
            warnings.warn(
                f"{NAMES[index]}: the last dimension is not contiguous, so tandem copies it, here and in later calls; "
                "make it contiguous to save the time",
                stacklevel=5,
            )


def options(
    softmax_scale: float | None,
    causal: bool | str,
    window: Sequence[int | None] | None,
    softcap: float,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    seed: tuple[int, int],
    deterministic: bool,
    batch_invariant: bool,
    num_splits: int | None,
) -> tuple[Any, ...]:
    """The options of a call as run() takes them."""
    left = right = None
    top_left = 0
    if causal is not True and causal is not False:
        if causal == "top_left":
            top_left = 1
        elif causal not in (0, 1, None):
            raise ValueError(
                f"causal ({causal!r}) must be False, True (the last query meets the last key) or 'top_left' (the first "
                "query meets the first key)"
            )
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"window ({window!r}) must be None or (left, right), each a number of keys or None")
        left, right = window
    if softmax_scale is None:
        scale = 0.0  # the C interface's default: 1 / sqrt(head_dim)
    else:
        scale = softmax_scale or 5e-324  # the least number stands for 0, which would be the default
    seed_number, offset = seed
    if seed_number or offset:  # 64 bits, of which torch's operators know the signed kind
        seed_number, offset = (seed_number + 2**63) % 2**64 - 2**63, (offset + 2**63) % 2**64 - 2**63
    return (
        max_seqlen_q or 0,
        max_seqlen_k or 0,
        scale,
        softcap or 0.0,
        1 if causal else 0,
        top_left,
        left,
        right,
        dropout_p,
        seed_number,
        offset,
        num_splits or 0,
        1 if deterministic else 0,
        1 if batch_invariant else 0,
    )


def seed_parts(seed: Any) -> tuple[tuple[int, int], Any]:
    """The seed and offset as numbers, or as an array of both that is read where the call runs."""
    if seed is None:
        return (0, 0), None
    if isinstance(seed, (int, np.integer)):
        return (int(seed), 0), None
    if isinstance(seed, (tuple, list)):
        if len(seed) != 2:
            raise ValueError(f"seed ({seed!r}) must be an integer or two: the seed and the offset")
        return (int(seed[0]), int(seed[1])), None
    return (0, 0), _arrays.view(seed, "seed")
