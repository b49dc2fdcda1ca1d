"""The C interface over ctypes: serves where _native cannot be loaded (free-threaded CPython), at some microseconds more
a call. run() is _native's; _library.py describes it."""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import threading
from typing import Any

import numpy as np

from tandem import _arrays

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


class _ContextOptions(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("device", ctypes.c_char_p),
        ("threads", _int32),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_for_data", ctypes.c_void_p),
    ]


_WRITTEN = ({"out", "lse"}, {"dq", "dk", "dv", "dbias", "dsink"})
_COPIED = ({"q", "k", "v"}, {"q", "k", "v", "out", "dout"})


class _Args(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        *((name, ctypes.POINTER(_Tensor)) for name in _arrays.TENSORS),
        ("max_seqlen_q", _int64),
        ("max_seqlen_k", _int64),
        ("softmax_scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("causal", _int32),
        ("alignment", _int32),
        ("window", _int32),
        ("reserved", _int32),
        ("window_left", _int64),
        ("window_right", _int64),
        ("dropout_p", ctypes.c_double),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_offset", ctypes.c_uint64),
        ("dropout_seed_ptr", ctypes.c_void_p),
        ("dropout_offset_ptr", ctypes.c_void_p),
        ("num_splits", _int32),
        ("deterministic", _int32),
        ("batch_invariant", _int32),
        ("validate", _int32),
    ]


def _load() -> ctypes.CDLL:
    libraries = glob.glob(os.path.join(_FOLDER, "libtandem.so.*"))
    if len(libraries) != 1:
        has = f"{_FOLDER} has {len(libraries)} libtandem.so.*, not 1"
        raise ImportError(f"tandem is not built: {has}; pip install . builds it")
    library = ctypes.CDLL(libraries[0])
    arguments = [ctypes.c_void_p, ctypes.POINTER(_Args), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.tandem_forward.argtypes = library.tandem_backward.argtypes = arguments
    library.tandem_check.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Args)]
    library.tandem_prepare.argtypes = library.tandem_check.argtypes
    library.tandem_context_create.argtypes = [ctypes.POINTER(_ContextOptions), ctypes.POINTER(ctypes.c_void_p)]
    library.tandem_workspace_size.argtypes = [*library.tandem_check.argtypes, ctypes.POINTER(ctypes.c_size_t)]
    library.tandem_version.restype = library.tandem_last_error.restype = ctypes.c_char_p
    library.tandem_context_description.argtypes = [ctypes.c_void_p]
    library.tandem_context_description.restype = ctypes.c_char_p
    return library


def _load_threads() -> ctypes.CDLL | None:
    """The part of the extension module that is no Python: which threads a call runs on."""
    try:
        threads = ctypes.CDLL(os.path.join(_FOLDER, "_native.abi3.so"))
    except OSError:
        return None
    threads.tandem_python_use_openmp_of.argtypes = [ctypes.c_char_p]
    threads.tandem_python_context.restype = ctypes.c_void_p
    return threads


_library = _load()
_threads = _load_threads()
_gpus: dict[int, ctypes.c_void_p] = {}
_opening = threading.Lock()
version = _library.tandem_version().decode()


def _context() -> int | None:
    return _threads.tandem_python_context() if _threads is not None else None


def use_openmp_of(library: str) -> bool:
    """Calls run on the OpenMP threads of this loaded library from now on; False where that cannot be."""
    return _threads is not None and bool(_threads.tandem_python_use_openmp_of(os.fsencode(library)))


def last_error() -> str:
    """The sentence of this thread's last call that failed."""
    return _library.tandem_last_error().decode(errors="replace")


def description() -> str:
    """One line about what will run on the CPU."""
    return _library.tandem_context_description(_context()).decode()


def open_gpu(index: int) -> int:
    """Makes what calls on that GPU need; a tandem_status."""
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
    """One line about what will run there; None before it has been opened."""
    return _library.tandem_context_description(_gpus[index]).decode() if index in _gpus else None


def _set_options(args: _Args, options: tuple[Any, ...]) -> None:
    scalars = (
        "max_seqlen_q max_seqlen_k softmax_scale softcap causal alignment window_left window_right dropout_p "
        "dropout_seed dropout_offset num_splits deterministic batch_invariant"
    ).split()
    for name, value in zip(scalars, options):
        if name in ("window_left", "window_right"):
            if value is None:
                continue
            args.window |= 1 if name == "window_left" else 2
        setattr(args, name, value)


def run(
    what: int, tensors: tuple[Any, ...], options: tuple[Any, ...], workspace: int = 0, workspace_bytes: int = 0
) -> int:
    """See _library.py."""
    forward_or_backward, heads_first = what & 1, what & 4
    args = _Args(size=ctypes.sizeof(_Args))
    _set_options(args, options)
    to_copy = 0
    gpu = None
    for index, x in enumerate(tensors):
        if x is None:
            continue
        name = _arrays.TENSORS[index] if index < len(_arrays.TENSORS) else "seed"
        described = x if type(x) is tuple else _arrays.describe(x, name)
        address, device, device_index, code, bits, shape, strides, read_only, _ = described
        if name == "seed":
            if shape != (2,) or bits != 64:
                return 100 + index
            args.dropout_seed_ptr, args.dropout_offset_ptr = address, address + 8
            continue
        if read_only and name in _WRITTEN[forward_or_backward]:
            return 200 + index
        if name == "q" and device == _arrays.CUDA:
            gpu = device_index
        n = len(shape)
        if heads_first and index < 3 and n == 4:
            shape, strides = ((x[0], x[2], x[1], x[3]) for x in (shape, strides))
        sizes = (_int64 * n)(*shape)
        steps = None if 0 in shape else (_int64 * n)(*strides)  # those of no elements may be anything
        tensor = _Tensor(address, device, device_index, n, code, bits, 1, sizes, steps, 0)
        setattr(args, name, ctypes.pointer(tensor))
        if name in _COPIED[forward_or_backward] and n and 0 not in shape:
            scattered = shape[-1] > 1 and strides[-1] != 1
            if scattered or (device == _arrays.CUDA and _is_off_16_bytes(address, shape, strides, bits // 8)):
                to_copy |= 1 << index
    if to_copy:
        return -to_copy
    if gpu is not None and gpu not in _gpus:
        return 300 + gpu
    return _serve(what, args, gpu, workspace, workspace_bytes)


def _is_off_16_bytes(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """A GPU reads rows in pieces of 16 bytes. A row not made of these must be padded, which a copy does not do."""
    pieces = shape[-1] * size % 16 == 0
    return pieces and (address % 16 != 0 or any(stride * size % 16 for stride in strides[:-1]))


def _serve(what: int, args: _Args, gpu: int | None, workspace: int, workspace_bytes: int) -> int:
    context = _context() if gpu is None else _gpus[gpu]
    forward_or_backward = what & 1
    if what & 2:
        return _library.tandem_check(context, forward_or_backward, args)
    if what & 8:
        return _library.tandem_prepare(context, forward_or_backward, args)
    size = ctypes.c_size_t(0)
    status = _library.tandem_workspace_size(context, forward_or_backward, args, ctypes.byref(size))
    if status != 0:
        return status
    stream = None
    if gpu is None:
        memory = np.empty(size.value, np.uint8)  # ctypes' own buffers are zeroed
        workspace, workspace_bytes = memory.ctypes.data, size.value
    else:
        if size.value > workspace_bytes:
            return 1000 + size.value
        stream = sys.modules["torch"].cuda.current_stream(gpu).cuda_stream
    function = _library.tandem_backward if forward_or_backward else _library.tandem_forward
    return function(context, args, workspace, workspace_bytes, stream)
