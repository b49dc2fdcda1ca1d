"""The binding over ctypes. The binding serves where _native cannot be loaded (free-threaded CPython), and costs some
microseconds more a call. _binding.py describes run()."""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import threading
from typing import Any

import numpy as np

from tandem import _arrays, _options, _score_mod

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_int32, _int64 = ctypes.c_int32, ctypes.c_int64


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", _int32),
        ("device_index", _int32),
        ("ndim", _int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(_int64)),
        ("strides", ctypes.POINTER(_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ModScalar(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("type", _int32), ("reserved", _int32), ("value", ctypes.c_double)]


class _ModTensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("tensor", ctypes.POINTER(_Tensor)),
        ("gradient", ctypes.POINTER(_Tensor)),
    ]


class _Mod(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("text", ctypes.c_char_p),
        ("scalars", ctypes.POINTER(_ModScalar)),
        ("scalar_count", _int64),
        ("tensors", ctypes.POINTER(_ModTensor)),
        ("tensor_count", _int64),
    ]


class _ContextOptions(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("device", ctypes.c_char_p),
        ("threads", _int32),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_for_data", ctypes.c_void_p),
    ]


_FIRST = ("q", "k", "v")

_TYPES = {
    "int32_t": _int32,
    "int64_t": _int64,
    "double": ctypes.c_double,
    "uint64_t": ctypes.c_uint64,
    "const uint64_t*": ctypes.c_void_p,
    "const tandem_tensor*": ctypes.POINTER(_Tensor),
    "const tandem_mod*": ctypes.POINTER(_Mod),
}


class _Args(ctypes.Structure):
    _fields_ = [("size", _int64), *((name, _TYPES[type_]) for name, type_ in _options.MEMBERS)]


class _MergeArgs(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("parts", _int64),
        ("part_out", ctypes.POINTER(ctypes.POINTER(_Tensor))),
        ("part_lse", ctypes.POINTER(ctypes.POINTER(_Tensor))),
        ("out", ctypes.POINTER(_Tensor)),
        ("lse", ctypes.POINTER(_Tensor)),
    ]


class _CascadeArgs(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("own", ctypes.POINTER(_Args)),
        ("cu_seqlens_group", ctypes.POINTER(_Tensor)),
        ("group_page_table", ctypes.POINTER(_Tensor)),
        ("group_seqused_k", ctypes.POINTER(_Tensor)),
        ("max_rows_group", _int64),
    ]


class _AppendKvArgs(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        *((name, ctypes.POINTER(_Tensor)) for name in _arrays.APPEND_TENSORS),
        ("rotary_interleaved", _int32),
        ("single_q_position", _int32),
    ]


_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_LISTS = (*_BLOCKS, *(name.replace("kv_", "q_") for name in _BLOCKS))
_SIZES = ("batch", "heads", "seqlen_q", "seqlen_k", "mask_block_q", "mask_block_k")


class _BlockMaskArgs(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("mask_mod", ctypes.POINTER(_Mod)),
        *((name, _int64) for name in _SIZES),
        *((name, ctypes.POINTER(_Tensor)) for name in _LISTS),
    ]


def _load() -> ctypes.CDLL:
    libraries = glob.glob(os.path.join(_FOLDER, "libtandem.so.*"))
    if len(libraries) != 1:
        raise ImportError(
            f"{_FOLDER} ({len(libraries)} files libtandem.so.*) must have one such file: build it with 'pip install .'"
        )
    library = ctypes.CDLL(libraries[0])
    arguments = [ctypes.c_void_p, ctypes.POINTER(_Args), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.tandem_forward.argtypes = library.tandem_backward.argtypes = arguments
    library.tandem_check.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Args)]
    library.tandem_prepare.argtypes = library.tandem_check_data.argtypes = library.tandem_check.argtypes
    library.tandem_prepare_serving.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Args)]
    library.tandem_merge.argtypes = [ctypes.c_void_p, ctypes.POINTER(_MergeArgs), ctypes.c_void_p]
    library.tandem_cascade.argtypes = [ctypes.c_void_p, ctypes.POINTER(_CascadeArgs), *arguments[2:]]
    library.tandem_cascade_workspace_size.argtypes = [
        *library.tandem_cascade.argtypes[:2], ctypes.POINTER(ctypes.c_size_t),
    ]  # fmt: skip
    library.tandem_append_kv.argtypes = [ctypes.c_void_p, ctypes.POINTER(_AppendKvArgs), ctypes.c_void_p]
    library.tandem_make_block_mask.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(_BlockMaskArgs), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ]  # fmt: skip
    library.tandem_context_create.argtypes = [ctypes.POINTER(_ContextOptions), ctypes.POINTER(ctypes.c_void_p)]
    library.tandem_workspace_size.argtypes = [*library.tandem_check.argtypes, ctypes.POINTER(ctypes.c_size_t)]
    library.tandem_version.restype = library.tandem_last_error.restype = ctypes.c_char_p
    library.tandem_context_description.argtypes = [ctypes.c_void_p]
    library.tandem_context_description.restype = ctypes.c_char_p
    return library


def _load_threads() -> ctypes.CDLL | None:
    """Loads the functions of the extension module that need no Python: they choose the threads of a call."""
    try:
        threads = ctypes.CDLL(os.path.join(_FOLDER, "_native.abi3.so"))
    except OSError:
        return None
    threads.tandem_python_use_openmp_of.argtypes = [ctypes.c_char_p]
    threads.tandem_python_context.restype = ctypes.c_void_p
    return threads


_library = _load()


def library() -> ctypes.CDLL:
    """libtandem, loaded once."""
    return _library


_threads = _load_threads()
_gpus: dict[int, ctypes.c_void_p] = {}
_opening = threading.Lock()
version = _library.tandem_version().decode()


def _context() -> int | None:
    return _threads.tandem_python_context() if _threads is not None else None


def use_openmp_of(library: str) -> bool:
    """Makes calls run on the OpenMP threads of this loaded library. Returns False if that is impossible."""
    return _threads is not None and bool(_threads.tandem_python_use_openmp_of(os.fsencode(library)))


def last_error() -> str:
    """Returns the message of this thread's last failed call."""
    return _library.tandem_last_error().decode(errors="replace")


def description() -> str:
    """Describes the CPU engine in one line."""
    return _library.tandem_context_description(_context()).decode()


def open_gpu(index: int) -> int:
    """Creates the context of that GPU, and returns a tandem_status."""
    with _opening:
        if index in _gpus:
            return 0
        options = _ContextOptions(size=ctypes.sizeof(_ContextOptions), device=f"cuda:{index}".encode())
        context = ctypes.c_void_p()
        status = _library.tandem_context_create(options, ctypes.byref(context))
        if status == 0:
            _gpus[index] = context
        return status


def gpu_description(index: int) -> str | None:
    """Describes the GPU in one line; None before it has been opened."""
    return _library.tandem_context_description(_gpus[index]).decode() if index in _gpus else None


_ALIGNMENTS = {"bottom_right": 0, "top_left": 1, "explicit": 2}
_SCALAR_TYPES = {bool: 6, int: 0, float: 2}
_LEAST = 5e-324  # replaces a softmax_scale of 0, which means "not given" in C
_WINDOW_LEFT, _WINDOW_RIGHT = 1, 2


def _real(value: Any, name: str) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        kind = ValueError if isinstance(value, int) else TypeError
        raise kind(f"{name} ({_arrays.shown(value)}) must be a number: convert it") from None


def _set_window(args: _Args, window: tuple[Any, Any]) -> None:
    for index, (bound, bit, name) in enumerate(
        zip(window, (_WINDOW_LEFT, _WINDOW_RIGHT), ("window_left", "window_right"))
    ):
        if bound is not None:
            args.window |= bit
            setattr(args, name, _arrays.integer(bound, f"window[{index}]", otherwise=", or None"))


def _mod_of(mod: _score_mod.Bound, name: str, forward_or_backward: int) -> _Mod | None:
    """Returns None if a gradient's tensor is read-only."""
    text, items = _score_mod.described(mod, name)
    scalars = [
        _ModScalar(n.encode(), next(code for t, code in _SCALAR_TYPES.items() if isinstance(x, t)), 0, x)
        for n, x, _ in items
        if _score_mod.is_number(x)
    ]
    tensors = [
        _ModTensor(
            n.encode(),
            ctypes.pointer(_tensor_of(x)),
            ctypes.pointer(_tensor_of(gradient)) if gradient is not None and forward_or_backward else None,
        )
        for n, x, gradient in items
        if not _score_mod.is_number(x)
    ]
    if forward_or_backward and any(gradient is not None and gradient[7] for _, _, gradient in items):
        return None
    lists = (_ModScalar * len(scalars))(*scalars), len(scalars), (_ModTensor * len(tensors))(*tensors), len(tensors)
    return _Mod(ctypes.sizeof(_Mod), text.encode(), *lists)


def _scale(value: Any, name: str) -> float:
    return _real(value, name) or _LEAST


def _count(value: Any, name: str) -> int:
    return _arrays.integer(value, name, bits=32)


def _alignment(value: Any, name: str) -> int:
    if not isinstance(value, str) or value not in _ALIGNMENTS:
        raise TypeError(f"{name} ({_arrays.shown(value)}) must be 'bottom_right' or 'top_left': pass one of them")
    return _ALIGNMENTS[value]


_READERS: dict[str, Any] = {
    "Length": _arrays.integer,
    "Scale": _scale,
    "Real": _real,
    "Count": _count,
    "Flag": _arrays.flag_of,
    "Alignment": _alignment,
}


def _set_option(args: _Args, name: str, value: Any) -> None:
    kind = _options.KINDS.get(name)
    if kind is None:
        raise TypeError(f"a call has no {name!r}: correct the name of the argument")
    if kind == "Window":
        _set_window(args, value)
    elif kind != "OutputOnly":
        setattr(args, name, _READERS[kind](value, name))


def _set_seed(args: _Args, seed: Any) -> bool:
    """Returns False if the seed is a tensor that must be described."""
    if isinstance(seed, int) or (isinstance(seed, tuple) and len(seed) == 2):
        number, offset = seed if isinstance(seed, tuple) else (seed, 0)
        args.dropout_seed, args.dropout_offset = number % 2**64, offset % 2**64
        return True
    described = seed if isinstance(seed, tuple) else _arrays.describe(seed, "seed")
    if not _arrays.is_seed(described):
        return False
    address = described[0]
    args.dropout_seed_ptr, args.dropout_offset_ptr = address, address + 8
    return True


def run(what: int, call_args: dict[str, Any], workspace: int = 0, workspace_bytes: int = 0) -> tuple[str, Any] | None:
    """Runs a call. _binding.py describes it."""
    args = _Args(size=ctypes.sizeof(_Args))
    return _read(what, call_args, args) or _serve(what, args, workspace, workspace_bytes)


def cascade(
    call_args: dict[str, Any], groups: tuple[Any, ...], max_rows_group: int, workspace: int = 0, size: int = 0
) -> tuple[str, Any] | None:
    """Runs a cascade. _binding.py describes it."""
    own = _Args(size=ctypes.sizeof(_Args))
    if (request := _read(0, call_args, own)) is not None:
        return request
    tensors = (ctypes.pointer(_tensor_of(x)) for x in groups)
    args = _CascadeArgs(ctypes.sizeof(_CascadeArgs), ctypes.pointer(own), *tensors, max_rows_group)
    functions = _library.tandem_cascade_workspace_size, _library.tandem_cascade
    return _execute(functions, args, _gpu_of(own), workspace, size)


def _read(what: int, call_args: dict[str, Any], args: _Args) -> tuple[str, Any] | None:
    """Reads call_args, and returns the request that must be served first."""
    forward_or_backward, heads_first = what & 1, what & 4
    to_copy = []
    for name, x in call_args.items():
        if x is None:
            continue
        if name == "seed":
            if not _set_seed(args, x):
                return "describe", name
            continue
        if name in _score_mod.MODS:
            mod = _mod_of(x, name, forward_or_backward)
            if mod is None:
                return "read-only", name
            setattr(args, name, ctypes.pointer(mod))
            continue
        if _options.KINDS.get(name) != "Tensor":
            _set_option(args, name, x)
            continue
        described = x if type(x) is tuple else _arrays.describe(x, name)
        device, bits, shape, strides, read_only = described[1], *described[4:8]
        address = described[0]
        if read_only and name in _options.WRITTEN[forward_or_backward]:
            return "read-only", name
        n = len(shape)
        if heads_first and name in _FIRST and n == 4:
            shape, strides = ((x[0], x[2], x[1], x[3]) for x in (shape, strides))
            described = (*described[:5], shape, strides, *described[7:])
        setattr(args, name, ctypes.pointer(_tensor_of(described)))
        if name in _options.COMPACTED[forward_or_backward] and n and 0 not in shape:
            scattered = shape[-1] > 1 and strides[-1] != 1
            if scattered or (device == _arrays.CUDA and _is_off_16_bytes(address, shape, strides, bits // 8)):
                to_copy.append(name)
    if to_copy:
        return "copy", to_copy
    gpu = _gpu_of(args)
    return ("open", gpu) if gpu is not None and gpu not in _gpus else None


def _gpu_of(args: _Args) -> int | None:
    return args.q[0].device_index if args.q and args.q[0].device_type == _arrays.CUDA else None


def _tensor_of(described: tuple[Any, ...]) -> _Tensor:
    address, device, device_index, code, bits, shape, strides = described[:7]
    n = len(shape)
    sizes = (_int64 * n)(*shape)
    steps = None if 0 in shape else (_int64 * n)(*strides)  # without elements, strides may have any value
    return _Tensor(address, device, device_index, n, code, bits, 1, sizes, steps, 0)


def merge(outs: tuple[Any, ...], lses: tuple[Any, ...], result: tuple[Any, Any]) -> tuple[str, Any] | None:
    """Merges parts. _binding.py describes it."""
    pointer = ctypes.POINTER(_Tensor)
    lists = [(pointer * len(tensors))(*(ctypes.pointer(_tensor_of(x)) for x in tensors)) for tensors in (outs, lses)]
    out, lse = (ctypes.pointer(_tensor_of(x)) for x in result)
    args = _MergeArgs(ctypes.sizeof(_MergeArgs), len(outs), *lists, out, lse)
    return _run_on(result[0], _library.tandem_merge, args)


def append_kv(tensors: tuple[Any, ...], interleaved: bool, single_q_position: bool) -> tuple[str, Any] | None:
    """Appends to a cache. _binding.py describes it."""
    pointers = [None if x is None else ctypes.pointer(_tensor_of(x)) for x in tensors]
    args = _AppendKvArgs(ctypes.sizeof(_AppendKvArgs), *pointers, interleaved, single_q_position)
    first = next((x for x in tensors if x is not None), (0, _arrays.CPU, 0))
    return _run_on(first, _library.tandem_append_kv, args)


def make_block_mask(
    mask_mod: _score_mod.Bound, sizes: tuple[int, ...], lists: tuple[Any, ...], workspace: int, workspace_bytes: int
) -> tuple[str, Any] | None:
    """Computes a block mask. _binding.py describes it."""
    args = _BlockMaskArgs(size=ctypes.sizeof(_BlockMaskArgs), **dict(zip(_SIZES, sizes)))
    args.mask_mod = ctypes.pointer(_mod_of(mask_mod, "mask_mod", 0))
    for name, described in zip(_LISTS, lists):
        setattr(args, name, ctypes.pointer(_tensor_of(described)))
    return _run_on(lists[0], _library.tandem_make_block_mask, args, workspace, workspace_bytes)


def _run_on(first: tuple[Any, ...], function: Any, *arguments: Any) -> tuple[str, Any] | None:
    """Runs a function on the device of the tensor that first describes, on torch's current stream."""
    device, index = first[1:3]
    if device != _arrays.CUDA:
        return _answer(function(_context(), *arguments, None))
    if index not in _gpus:
        return "open", index
    stream = sys.modules["torch"].cuda.current_stream(index).cuda_stream
    return _answer(function(_gpus[index], *arguments, stream))


def _is_off_16_bytes(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """Returns True if rows are not made of 16-byte pieces, which a GPU reads.

    Such rows must be padded, which a copy does not do.
    """
    pieces = shape[-1] * size % 16 == 0
    return pieces and (address % 16 != 0 or any(stride * size % 16 for stride in strides[:-1]))


def _serve(what: int, args: _Args, workspace: int, workspace_bytes: int) -> tuple[str, Any] | None:
    gpu, forward_or_backward = _gpu_of(args), what & 1
    context = _context() if gpu is None else _gpus[gpu]
    if what & 2:
        return _answer(_library.tandem_check(context, forward_or_backward, args))
    if what & 32:
        return _answer(_library.tandem_check_data(context, forward_or_backward, args))
    if what & 16:
        return _answer(_library.tandem_prepare_serving(context, args))
    if what & 8:
        return _answer(_library.tandem_prepare(context, forward_or_backward, args))
    functions = (
        lambda context, args, size: _library.tandem_workspace_size(context, forward_or_backward, args, size),
        _library.tandem_backward if forward_or_backward else _library.tandem_forward,
    )
    return _execute(functions, args, gpu, workspace, workspace_bytes)


def _execute(
    functions: tuple[Any, Any], args: Any, gpu: int | None, workspace: int, workspace_bytes: int
) -> tuple[str, Any] | None:
    """Runs a call. functions: the query of its workspace's size, and the call."""
    workspace_size, function = functions
    context = _context() if gpu is None else _gpus[gpu]
    size = ctypes.c_size_t(0)
    status = workspace_size(context, args, ctypes.byref(size))
    if status != 0:
        return _answer(status)
    stream = None
    if gpu is None:
        memory = np.empty(size.value, np.uint8)  # ctypes' own buffers are zeroed
        workspace, workspace_bytes = memory.ctypes.data, size.value
    else:
        if size.value > workspace_bytes:
            return "workspace", size.value
        stream = sys.modules["torch"].cuda.current_stream(gpu).cuda_stream
    return _answer(function(context, args, workspace, workspace_bytes, stream))


def _answer(status: int) -> tuple[str, Any] | None:
    return None if status == 0 else ("refused", status)
