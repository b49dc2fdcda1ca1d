"""The other libraries' gradients of attention on this machine, like rig/peers.py. A call returns dq, dk and dv, and
includes all kernels.
"""

from __future__ import annotations

import copy
import ctypes as c
import os

import torch

from rig import peers
from rig.peers import Absent


def through_autograd(forward):
    """Computes a library's gradients of a forward that torch differentiates."""

    def bind(x):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        of_leaves = copy.copy(x)
        of_leaves.q, of_leaves.k, of_leaves.v = leaves
        with torch.enable_grad():
            out = forward(of_leaves)()
        out = out[0] if isinstance(out, tuple) else out
        if not out.requires_grad:
            raise Absent("the peer's forward has no gradients")
        return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)

    return bind


def cudnn(x):
    if peers.needs_cudnn_graph(x.cell):
        from rig import cudnn_graph

        return cudnn_graph.backward(x)
    return through_autograd(peers.cudnn)(x)


def deterministic_cudnn(x):
    from rig import cudnn_graph

    return cudnn_graph.backward(x, deterministic=True)


def fa3_gradients(library: str, deterministic: bool):
    """Runs FlashAttention-3 through a C function fa3_bwd(...): dense bfloat16 of head_dim 64, 128 or 256."""
    run = c.CDLL(os.path.abspath(library)).fa3_bwd
    run.argtypes = [c.c_void_p] * 14 + [c.c_int] * 7 + [c.c_float, c.c_int, c.c_void_p, c.c_void_p, c.c_int, c.c_void_p]
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def of(q, k, v, out, lse, dout, causal, scale):
        (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, _) = q.shape, k.shape
        up = lambda n, m: -(-n // m) * m  # noqa: E731
        rows = 128 if head_dim == 64 else 64 if causal or head_dim > 128 else 80
        sq, sk = up(seqlen_q, rows), up(seqlen_k, 128)
        grads = [torch.empty_like(t) for t in (q, k, v)]
        new = lambda *n: torch.empty(*n, device=q.device)  # noqa: E731
        dqa, dsum, l2 = new(batch, heads, sq, head_dim), new(batch, heads, sq), new(batch, heads, sq)
        dka, dva = (new(batch, kv_heads, sk, head_dim) if heads != kv_heads else None for _ in range(2))
        turns = torch.zeros(sq // rows, batch, heads, dtype=torch.int32, device=q.device)
        sem = torch.zeros(8, dtype=torch.int32, device=q.device)
        tensors = (q, k, v, out, lse, dout, *grads, dqa, dka, dva, dsum, l2)
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        sizes = [batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, int(causal)]

        def call(_alive=tensors):
            stream = torch.cuda.current_stream().cuda_stream
            code = run(*pointers, *sizes, scale, sms, sem.data_ptr(), turns.data_ptr(), int(deterministic), stream)
            if code:
                raise RuntimeError(f"fa3_bwd returned {code}")
            return grads

        return call

    return of


def fa3(library: str, deterministic: bool):
    of = fa3_gradients(library, deterministic)

    def bind(x):
        cell = x.cell
        peers.refuse(
            "this build of FA3's backward", sink=cell.sink, softcap=cell.softcap, window=cell.window,
            packed_form=cell.lengths, float16=cell.dtype == "f16", head_dim_v_of_its_own=cell.dim_v != cell.head_dim,
        )  # fmt: skip
        if deterministic and cell.head_dim > 128:
            raise Absent("FA3 is not deterministic beyond head_dim 128")
        return of(x.q, x.k, x.v, x.out, x.lse, x.dout, cell.causal, x.scale)

    return bind


def found(forwards: dict, absent: dict, fa3_library: str | None) -> dict:
    """Returns name -> bind, for the peers with an available forward."""
    there = {}
    for name, forward in forwards.items():
        there[name] = cudnn if name == "cuDNN" else through_autograd(forward)
    if "cuDNN" in forwards:
        there["cuDNN deterministic"] = deterministic_cudnn
    if fa3_library:  # the forward may belong to another library
        absent.pop("FA3", None)
        for name, deterministic in (("FA3", False), ("FA3 deterministic", True)):
            try:
                there[name] = fa3(fa3_library, deterministic)
            except Exception as why:
                absent[name] = peers.first_line(why)
    return there
