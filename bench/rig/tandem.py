"""Tandem through its C interface and ctypes, for tensors on a GPU and the current stream."""

from __future__ import annotations

import ctypes as c

import tandem_c as api
import torch

CUDA = 2
FORWARD, BACKWARD = 0, 1


class _Options(c.Structure):
    _fields_ = [
        ("size", c.c_int64),
        ("device", c.c_char_p),
        ("threads", c.c_int32),
        ("parallel_for", c.c_void_p),
        ("parallel_for_data", c.c_void_p),
    ]


class Context:
    """A context of the tested library, or of another build."""

    def __init__(self, device: str = "cuda:0", library: c.CDLL = api._lib):
        self.library = library
        library.tandem_context_create.argtypes = [c.POINTER(_Options), c.POINTER(c.c_void_p)]
        library.tandem_context_description.argtypes = [c.c_void_p]
        library.tandem_prepare.argtypes = [c.c_void_p, c.c_int, c.POINTER(api._Args)]
        self.handle = c.c_void_p()
        options = _Options(size=c.sizeof(_Options), device=device.encode())
        self.check(library.tandem_context_create(c.byref(options), c.byref(self.handle)))
        self.description = library.tandem_context_description(self.handle).decode()

    def check(self, status: int) -> None:
        api._check(status, self.library)


def other_build(path: str, device: str) -> Context:
    return Context(device, api.load(path))


def view(t: torch.Tensor, alive: list):
    """Returns a pointer to the C view of a tensor. `alive` receives all objects that must outlive its use."""
    shape, strides = (c.c_int64 * t.dim())(*t.shape), (c.c_int64 * t.dim())(*t.stride())
    code, bits = api._DTYPES[t.dtype]
    device = api._Device(CUDA if t.is_cuda else 1, t.device.index or 0)
    described = api._Tensor(t.data_ptr(), device, t.dim(), api._DType(code, bits, 1), shape, strides, 0)
    alive += [t, shape, strides, described]
    return c.pointer(described)


class _Call:
    """A pass over a problem's inputs. All calls write the same result tensors, which begin as NaN."""

    def __init__(self, context: Context, x, which: int, tensors: dict, num_splits: int = 0):
        cell = x.cell
        self.context, self.which, self._alive = context, which, []
        self.args = api._Args(size=c.sizeof(api._Args), causal=int(cell.causal), softcap=cell.softcap)
        self.args.num_splits = num_splits
        if cell.window:
            self.args.window, self.args.window_left = 1, cell.window - 1
        tensors = dict(tensors, q=x.q, k=x.k, v=x.v, sink=x.sink)
        if cell.lengths:
            tensors.update(cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens)
            self.args.max_seqlen_q = self.args.max_seqlen_k = cell.seqlen
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self.args, name, view(tensor, self._alive))
        size = c.c_size_t()
        context.check(context.library.tandem_workspace_size(context.handle, which, c.byref(self.args), c.byref(size)))
        self.workspace = torch.empty(size.value, dtype=torch.uint8, device=x.q.device)
        # All arguments of the call except the stream.
        self.call = (context.handle, c.byref(self.args), c.c_void_p(self.workspace.data_ptr()), size)

    def prepare(self):
        """Compiles or loads the call's kernels."""
        self.context.check(self.context.library.tandem_prepare(self.call[0], self.which, self.call[1]))

    def launch(self) -> None:
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        library = self.context.library
        run = library.tandem_backward if self.which == BACKWARD else library.tandem_forward
        self.context.check(run(*self.call, stream))


class Forward(_Call):
    """A call returns (out, lse)."""

    def __init__(self, context: Context, x, num_splits: int = 0):
        cell, rows = x.cell, x.q.shape[:-2]
        self.out = torch.full((*rows, cell.heads, cell.dim_v), float("nan"), dtype=x.q.dtype, device=x.q.device)
        lse = (cell.heads, rows[0]) if cell.lengths else (rows[0], cell.heads, rows[1])
        self.lse = torch.full(lse, float("nan"), device=x.q.device)
        super().__init__(context, x, FORWARD, dict(out=self.out, lse=self.lse), num_splits)

    def __call__(self):
        self.launch()
        return self.out, self.lse


class Backward(_Call):
    """A call returns (dq, dk, dv), and includes all kernels."""

    def __init__(self, context: Context, x):
        self.gradients = tuple(torch.full_like(t, float("nan")) for t in (x.q, x.k, x.v))
        dq, dk, dv = self.gradients
        super().__init__(context, x, BACKWARD, dict(out=x.out, lse=x.lse, dout=x.dout, dq=dq, dk=dk, dv=dv))

    def __call__(self):
        self.launch()
        return self.gradients


def host_calls(forward: Forward):
    """Returns (a call of tandem_forward, a call of an empty C function), both through ctypes."""
    stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
    run, arguments = forward.context.library.tandem_forward, (*forward.call, stream)
    nothing = c.CDLL(None)["abs"]  # the function reads only its first argument
    nothing.argtypes = run.argtypes
    return lambda: run(*arguments), lambda: nothing(*arguments)
