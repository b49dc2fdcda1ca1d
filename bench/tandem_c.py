"""The part of the C interface that the benchmarks need, through ctypes, for torch tensors on the CPU."""

import ctypes as c
import os
import pathlib

import torch


def _library():
    root = pathlib.Path(__file__).resolve().parent.parent
    for path in (os.environ.get("TANDEM_LIBRARY"), root / "build/release/src/libtandem.so.0"):
        if path and os.path.exists(path):
            return load(path)
    raise SystemExit(
        "libtandem.so.0 must exist: build it (./test.sh or cmake --build --preset release), or name it in "
        "TANDEM_LIBRARY"
    )


class _Device(c.Structure):
    _fields_ = [("type", c.c_int32), ("index", c.c_int32)]


class _DType(c.Structure):
    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class _Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device", _Device),
        ("ndim", c.c_int32),
        ("dtype", _DType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


_TENSORS = (
    "q k v out lse dout dlse dq dk dv bias dbias sink dsink alibi_slopes cu_seqlens_q cu_seqlens_k seqused_q "
    "seqused_k page_table"
).split()


class _Args(c.Structure):
    _fields_ = (
        [("size", c.c_int64)]
        + [(name, c.POINTER(_Tensor)) for name in _TENSORS]
        + [
            ("max_seqlen_q", c.c_int64),
            ("max_seqlen_k", c.c_int64),
            ("softmax_scale", c.c_double),
            ("softcap", c.c_double),
            ("causal", c.c_int32),
            ("alignment", c.c_int32),
            ("window", c.c_int32),
            ("reserved", c.c_int32),
            ("window_left", c.c_int64),
            ("window_right", c.c_int64),
            ("dropout_p", c.c_double),
            ("dropout_seed", c.c_uint64),
            ("dropout_offset", c.c_uint64),
            ("dropout_seed_ptr", c.c_void_p),
            ("dropout_offset_ptr", c.c_void_p),
            ("num_splits", c.c_int32),
            ("deterministic", c.c_int32),
            ("batch_invariant", c.c_int32),
            ("validate", c.c_int32),
        ]
    )


def load(path):
    """A libtandem with its functions declared. Several builds may be loaded together, each from a separate file."""
    library = c.CDLL(os.path.abspath(path))
    library.tandem_last_error.restype = c.c_char_p
    library.tandem_context_description.restype = c.c_char_p
    library.tandem_workspace_size.argtypes = [c.c_void_p, c.c_int, c.POINTER(_Args), c.POINTER(c.c_size_t)]
    for function in (library.tandem_forward, library.tandem_backward):
        function.argtypes = [c.c_void_p, c.POINTER(_Args), c.c_void_p, c.c_size_t, c.c_void_p]
    return library


_lib = _library()

_DTYPES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int32: (0, 32)}


def description():
    return _lib.tandem_context_description(None).decode()


def _check(status, library=_lib):
    if status:
        raise RuntimeError(library.tandem_last_error().decode())


class Call:
    """One call with its arguments and its workspace; it can be called repeatedly."""

    def __init__(self, backward, **arguments):
        self._args = _Args(size=c.sizeof(_Args))
        self._alive = []
        for name, value in arguments.items():
            setattr(self._args, name, self._tensor(value) if isinstance(value, torch.Tensor) else value)
        size = c.c_size_t()
        _check(_lib.tandem_workspace_size(None, int(backward), c.byref(self._args), c.byref(size)))
        self.workspace_bytes = size.value
        self._workspace = torch.empty(size.value, dtype=torch.uint8)
        self._run = _lib.tandem_backward if backward else _lib.tandem_forward

    def _tensor(self, t):
        shape, strides = (c.c_int64 * t.dim())(*t.shape), (c.c_int64 * t.dim())(*t.stride())
        code, bits = _DTYPES[t.dtype]
        view = _Tensor(t.data_ptr(), _Device(1, 0), t.dim(), _DType(code, bits, 1), shape, strides, 0)
        self._alive += [t, shape, strides, view]
        return c.pointer(view)

    def __call__(self):
        _check(self._run(None, c.byref(self._args), self._workspace.data_ptr(), self.workspace_bytes, None))


def _rows(x):
    return x.transpose(1, 2)


def forward(q, k, v, **options):
    """Returns (call, out, lse) for tensors in torch's order (batch, heads, seqlen, head_dim)."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32)
    return Call(False, q=_rows(q), k=_rows(k), v=_rows(v), out=_rows(out), lse=lse, **options), out, lse


def backward(q, k, v, out, lse, dout, **options):
    """Returns (call, dq, dk, dv) for tensors in torch's order."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    return (
        Call(
            True,
            q=_rows(q),
            k=_rows(k),
            v=_rows(v),
            out=_rows(out),
            lse=lse,
            dout=_rows(dout),
            dq=_rows(dq),
            dk=_rows(dk),
            dv=_rows(dv),
            **options,
        ),
        dq,
        dk,
        dv,
    )
