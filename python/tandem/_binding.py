"""The binding to the C interface: the arguments of a call, and the requests that come back.

A call's arguments are a dict, call_args, from names to values; a missing name means None. _options.py lists the names:
tandem.attention's arguments, and the results and gradients of tandem_attention_args ("out", "lse", "dout", "dlse",
"dq", ...). Tensors are numpy arrays, torch tensors or descriptions (_arrays.describe). Options have tandem.attention's
form, with these exceptions. alignment is "explicit" with diagonal_offset (a number) or diagonal_offsets (a tensor).
float32_out and layout_of_q describe out, and a binding ignores them. seed is an integer, two integers (seed, offset),
or a tensor of two int64. score_mod and mask_mod are _score_mod.Bound.

A binding is a module with these names.

- ``run(what, call_args, workspace=0, bytes=0)``. The argument what is FORWARD or BACKWARD, plus a flag. CHECK only
  checks, CHECK_DATA also checks data, PREPARE only compiles, and SERVING compiles for all lengths. HEADS_FIRST: q, k
  and v are (batch, heads, seqlen, head_dim). workspace and bytes are the address and size of GPU memory that the call
  may use. The function returns None when the call is done, else a request.
- ``merge(outs, lses, (out, lse))`` takes tuples of descriptions and returns None or a request.
- ``cascade(call_args, groups, max_rows_group, workspace=0, bytes=0)`` runs a forward of each request's own keys and of
  the keys of groups: descriptions of cu_seqlens_group, group_page_table and group_seqused_k. The rest is run()'s.
- ``append_kv(tensors, interleaved, single_q_position)`` takes a tuple of descriptions or None, in the order of
  tandem_append_kv_args, and returns None or a request.
- ``open_gpu(index)`` returns a tandem_status, and ``gpu_description(index)`` is None before it.
- ``last_error()``, ``description()``, ``use_openmp_of(library)`` and ``version``

The requests are these.

- ("refused", a tandem_status)
- ("describe", name of a tensor that it cannot read)
- ("read-only", name of a tensor that it would write to)
- ("copy", names of tensors whose last dimension is not contiguous or, on a GPU, whose rows are not multiples of 16
  bytes)
- ("open", index of a GPU)
- ("workspace", bytes that it needs)

A call on a GPU is queued on the stream that the tensors' library works on, and returns then.

_native is the binding in C; _ctypes serves where it cannot be loaded.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tandem import _arrays, _gpu, _score_mod
from tandem._errors import Unsupported, error_of, renamed

CallArgs = dict[str, Any]

FORWARD, BACKWARD, CHECK, HEADS_FIRST, PREPARE, SERVING, CHECK_DATA = 0, 1, 2, 4, 8, 16, 32


def _load(chosen: str) -> Any:
    """Returns the binding that TANDEM_PYTHON_BOUNDARY names; by default the faster one that can be loaded."""
    if chosen not in ("", "native", "ctypes"):
        raise ImportError(
            f"TANDEM_PYTHON_BOUNDARY ({chosen!r}) must be 'native', 'ctypes' or unset: set the variable to one of "
            "these modules, or unset it"
        )
    # Free-threaded CPython 3.13 finds stable-ABI modules and crashes in them, because its objects have another layout.
    free_threaded = "t" in getattr(sys, "abiflags", "")
    if free_threaded and chosen == "native":
        raise ImportError(
            "TANDEM_PYTHON_BOUNDARY ('native') must be 'ctypes' or not set on free-threaded CPython, because the "
            "native module needs the stable ABI: unset the variable"
        )
    try:
        if chosen != "ctypes" and not free_threaded:
            from tandem import _native

            return _native
    except ImportError:
        if chosen == "native":
            raise
    from tandem import _ctypes

    return _ctypes


binding: Any = _load(os.environ.get("TANDEM_PYTHON_BOUNDARY", ""))

_said_that_copies_are_made = False


def check_parts(outs: Sequence[Any], lses: Sequence[Any]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not hasattr(parts, "__len__") or not hasattr(parts, "__getitem__"):
            raise TypeError(f"{name} ({type(parts).__name__}) must be a list of arrays: pass one")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"outs ({len(outs)}) and lses ({len(lses)}) must have one length of at least 1: pass one lse for each out"
        )


def merge(outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any) -> None:
    """Merges parts into out and lse; raises as call() does."""
    arrays = {f"outs[{n}]": x for n, x in enumerate(outs)}
    arrays.update((f"lses[{n}]", x) for n, x in enumerate(lses))
    described = [_arrays.describe(x, name) for name, x in arrays.items()]
    result = (_arrays.describe(out, "out"), _arrays.describe(lse, "lse"))
    for name, x in zip(("out", "lse"), result):
        if x[7]:
            raise ValueError(f"{name} must be writable: copy the array first")
    parts = tuple(described[: len(outs)]), tuple(described[len(outs) :]), result
    request = binding.merge(*parts)
    if request is not None and request[0] == "open":
        _gpu.open_gpu(binding, request[1])
        request = binding.merge(*parts)
    if request is not None:
        raise renamed(error_of(request[1], binding.last_error(), arrays), {"part_out": "outs", "part_lse": "lses"})


WRITTEN_BY_APPEND = ("k_cache", "v_cache", "q_out")  # the results of append_kv


def append_kv(arrays: dict[str, Any], flags: tuple[bool, bool]) -> None:
    """Appends to a cache; raises as call() does. arrays: by name, in the order of tandem_append_kv_args."""
    described = tuple(None if x is None else _arrays.describe(x, name) for name, x in arrays.items())
    for name, x in zip(arrays, described):
        if x is not None and x[7] and name in WRITTEN_BY_APPEND:
            raise ValueError(f"{name} must be writable: copy the array first")
    request = binding.append_kv(described, *flags)
    if request is not None and request[0] == "open":
        _gpu.open_gpu(binding, request[1])
        request = binding.append_kv(described, *flags)
    if request is not None:
        raise error_of(request[1], binding.last_error(), arrays)


def make_block_mask(mask_mod: _score_mod.Bound, sizes: tuple[int, ...], lists: dict[str, Any], workspace: Any) -> None:
    """Fills the lists of a block mask, by name, in the order of tandem_block_mask_args: four or eight.

    sizes: batch, heads, seqlen_q, seqlen_k, and queries and keys of a block. workspace: an array of bytes. Raises as
    call() does.
    """
    described = tuple(_arrays.describe(x, name) for name, x in lists.items())
    text = _score_mod.described(mask_mod, "mask_mod")
    memory = _arrays.describe(workspace, "workspace")[0], workspace.shape[0]
    request = binding.make_block_mask(text, sizes, described, *memory)
    if request is not None and request[0] == "open":
        _gpu.open_gpu(binding, request[1])
        request = binding.make_block_mask(text, sizes, described, *memory)
    if request is not None:
        arrays = {**lists, **_score_mod.named({"mask_mod": mask_mod})}
        raise error_of(request[1], binding.last_error(), arrays)


def call(what: int, call_args: CallArgs) -> None:
    """Runs a pass. Raises ValueError, TypeError, RuntimeError or tandem.Unsupported with the library's sentence."""
    request = binding.run(what, call_args)
    if request is not None:
        _retry_until_done(request, functools.partial(binding.run, what), dict(call_args), {})


def cascade(call_args: CallArgs, groups: dict[str, Any], max_rows_group: int) -> None:
    """Runs a cascade; raises as call() does. groups: its index arrays by name, in the order of tandem_cascade_args."""
    described = tuple(_arrays.describe(x, name) for name, x in groups.items())

    def run(call_args: CallArgs, *workspace: int) -> tuple[str, Any] | None:
        return binding.cascade(call_args, described, max_rows_group, *workspace)

    _retry_until_done(run(call_args), run, dict(call_args), groups)


def _retry_until_done(
    request: tuple[str, Any] | None,
    run: Callable[[CallArgs, int, int], tuple[str, Any] | None],
    call_args: CallArgs,
    others: dict[str, Any],
) -> None:
    """Serves the binding's requests and runs the call again, until the call is done or an error is raised.

    others: the call's arrays that are not in call_args, by name.
    """
    arrays = dict(call_args)  # the arrays before the binding described them
    memory, size = 0, 0
    while request is not None:
        wanted, detail = request
        if wanted == "copy":
            for name in detail:
                arrays[name] = call_args[name] = _copy(arrays[name], name)
        elif wanted == "workspace":
            size = detail
            workspace = _gpu.workspace(arrays["q"], size)
            memory = workspace.data_ptr()
        elif wanted == "open":
            _gpu.open_gpu(binding, detail)
        elif wanted == "read-only":
            what = f"a gradient of {detail}" if detail in _score_mod.MODS else detail
            raise ValueError(f"{what} must be writable: copy the array first")
        elif wanted == "describe":
            if detail in _score_mod.MODS:
                call_args[detail] = _score_mod.described(arrays[detail], detail)
            else:
                call_args[detail] = described = _arrays.describe(arrays[detail], detail)
                if detail == "seed":
                    _check_seed(described)
        else:
            raise error_of(detail, binding.last_error(), {**arrays, **others, **_score_mod.named(arrays)})
        request = run(call_args, memory, size)


def _copy(x: Any, name: str) -> Any:
    global _said_that_copies_are_made
    if _arrays.is_torch(x):
        scattered = x.stride(-1) != 1
        copy = x.detach().clone(memory_format=sys.modules["torch"].contiguous_format)
    else:
        scattered = True
        copy = np.ascontiguousarray(_arrays.view(x, name))
    if scattered and not _said_that_copies_are_made and name != "dout":
        _said_that_copies_are_made = True
        warnings.warn(
            f"{name}: the last dimension is not contiguous, so tandem copies the array in this and later calls: "
            "pass a contiguous array to save the time",
            stacklevel=5,
        )
    return copy


def _check_seed(described: tuple[Any, ...]) -> None:
    if not _arrays.is_seed(described):
        _, bits, shape, strides = described[3:7]
        raise ValueError(
            f"seed (shape {shape}, strides {strides}, {bits} bits) must be an integer or two contiguous int64: "
            "pass the seed, or (seed, offset)"
        )


def check_mask(causal: Any, alignment: Any) -> None:
    """Raises ValueError if an option has a value that tandem.attention does not have."""
    if isinstance(causal, str):
        remedy = f"pass alignment={causal!r}" if causal in ("bottom_right", "top_left") else "pass one of them"
        raise ValueError(f"causal ({causal!r}) must be True or False: {remedy}")
    _arrays.flag_of(causal, "causal")
    if alignment not in ("bottom_right", "top_left"):
        raise ValueError(
            f"alignment ({alignment!r}) must be 'bottom_right' (the last query matches the last key) or 'top_left' "
            "(the first query matches the first key): pass one of them"
        )


def diagonal_of(diagonal_offset: Any, alignment: str) -> CallArgs:
    """Returns an explicit diagonal as call arguments: a number for all sequences, or an array with one for each."""
    if alignment != "bottom_right":
        raise ValueError(
            f"alignment ({alignment!r}) must be left out where diagonal_offset is given: pass only one of the two"
        )
    if isinstance(diagonal_offset, (bool, str, float)):
        raise TypeError(
            f"diagonal_offset ({diagonal_offset!r}) must be an integer, or an array of int32 (batch): convert it"
        )
    if getattr(diagonal_offset, "shape", ()) == () and hasattr(diagonal_offset, "__index__"):
        return {"alignment": "explicit", "diagonal_offset": int(diagonal_offset)}
    return {"alignment": "explicit", "diagonal_offsets": _arrays.view(diagonal_offset, "diagonal_offset")}


def blocks_of(block_mask: Any) -> CallArgs:
    """Returns a block mask, any object with the names of torch's, as call arguments."""
    if not hasattr(block_mask, "kv_num_blocks") or not hasattr(block_mask, "BLOCK_SIZE"):
        raise TypeError(
            f"block_mask ({type(block_mask).__name__}) must be a tandem.Blocks, or a BlockMask of torch: pass one"
        )
    size_q, size_k = block_mask.BLOCK_SIZE
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    found = {name: getattr(block_mask, name, None) for name in names}
    blocks = {name: x for name, x in found.items() if x is not None}
    size_q, size_k = _arrays.integer(size_q, "BLOCK_SIZE[0]"), _arrays.integer(size_k, "BLOCK_SIZE[1]")
    call_args = {**blocks, "mask_block_q": size_q, "mask_block_k": size_k}
    return {**call_args, "blocks_of_mask_mod": True} if getattr(block_mask, "of_mask_mod", False) else call_args


def is_float32(out_dtype: Any, out: Any = None) -> bool:
    """Returns True for the out_dtype float32, False for None. out: the caller's array for the result."""
    if out_dtype is None:
        return False
    name = getattr(out_dtype, "name", None) or getattr(out_dtype, "__name__", None) or str(out_dtype)
    if name.rpartition(".")[2] != "float32":
        raise ValueError(
            f"out_dtype ({name.rpartition('.')[2]}) must be None, for a result of q's type, or float32: pass one"
        )
    if out is not None and "float32" not in str(getattr(out, "dtype", "float32")):
        raise ValueError(f"out_dtype (float32) must be None or out's type ({out.dtype}): omit out_dtype")
    return True


def window_of(window: Any) -> tuple[Any, Any]:
    """Returns a window in the form of call_args."""
    bounds = window.tolist() if hasattr(window, "tolist") else window
    if isinstance(bounds, (str, bytes, dict, set)) or not hasattr(bounds, "__len__") or len(bounds) != 2:
        raise ValueError(
            f"window ({window!r}) must be None or (left, right), each a number of keys or None: pass a pair"
        )
    left, right = bounds
    for n, bound in enumerate(bounds):
        if bound is True or bound is False:
            raise TypeError(f"window[{n}] ({bound}) must be an integer of at most 64 bits, or None: pass one")
    return left, right


_DIFFERENTIABLE = {
    "softmax_scale": "multiply the queries by it",
    "scale": "multiply the queries by it",
    "softcap": "compute the scores with score_mod",
}


def number_of(x: Any, name: str) -> Any:
    """Returns a number that may be a scalar of any library; None is returned as it is."""
    if x is None or type(x).__name__ in ("float", "int", "SymFloat"):
        return x
    refuse_gradient(x, name, _DIFFERENTIABLE.get(name, f"float({name})"))
    if _arrays.is_torch(x):
        sys.modules["tandem._derivatives"].refuse_tangents((x,))
    try:
        if isinstance(x, (str, bytes)):
            raise TypeError
        return float(x)
    except (TypeError, ValueError, RuntimeError):  # several values, or none
        shown = repr(x) if isinstance(x, str) else type(x).__name__
        raise TypeError(f"{name} ({shown}) must be a number: convert it") from None


def refuse_gradient(x: Any, name: str, remedy: str) -> None:
    """Raises if autograd would expect a gradient of an argument that has none."""
    if getattr(x, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise Unsupported(
            f"{name} must not require a gradient, because {name} has none: pass {name}.detach(), or {remedy}"
        )


def slopes_of(x: Any) -> Any:
    """Returns alibi_slopes, which have no gradient."""
    refuse_gradient(x, "alibi_slopes", "compute the scores with score_mod")
    return x


def _within_64_bits(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed ({seed}) must be at least -2**63 and below 2**64: pass seed % 2**64")
    return seed


def seed_of(seed: Any, q: Any) -> Any:
    """Returns a seed in the form of call_args. An array becomes numbers, because its owner may write to it."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return _within_64_bits(int(seed))
    if isinstance(seed, (tuple, list)):
        if len(seed) != 2:
            raise ValueError(f"seed ({seed!r}) must be an integer or two: pass the seed, or (seed, offset)")
        number, offset = seed
        if hasattr(number, "__index__") and hasattr(offset, "__index__"):
            return _within_64_bits(int(number)), _within_64_bits(int(offset))
    if isinstance(seed, (bool, str, float, tuple, list)):
        raise TypeError(f"seed ({seed!r}) must be an integer or two: pass the seed, or (seed, offset)")
    seed = _arrays.view(seed, "seed")
    name = str(seed.dtype).rpartition(".")[2]
    if tuple(seed.shape) != (2,) or name not in ("int64", "uint64"):
        raise ValueError(
            f"seed ({name}, shape {tuple(seed.shape)}) must be an integer or two int64: pass the seed, or (seed, "
            "offset)"
        )
    if isinstance(seed, np.ndarray):
        return int(seed[0]), int(seed[1])
    device = q.device if _arrays.is_torch(q) else "cpu"
    if str(seed.device) != str(device):
        raise ValueError(f"seed (on {seed.device}) must be on q's device ({device}): move it there")
    return seed if seed.stride(0) == 1 else seed.contiguous()
