"""What else computes attention on this machine. Each peer takes a cell's inputs and returns a call, or says why not.

A call returns the output, laid out as q is. What a peer can do but torch's interface to it cannot is counted as absent.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Absent(Exception):
    pass


def _refuse(name: str, **features) -> None:
    unserved = [feature for feature, asked in features.items() if asked]
    if unserved:
        raise Absent(f"{name} has no {' and no '.join(unserved).replace('_', ' ')}")


def _dims_differ(cell) -> bool:
    return cell.dim_v != cell.head_dim


def cudnn(x):
    """Through torch: SDPA's backend. (Its operator for packed sequences is left out: a
    process died where a graph captured the packed cells.)"""
    cell = x.cell
    _refuse("torch's cuDNN", window=cell.window, sink=cell.sink, softcap=cell.softcap, packed=bool(cell.lengths))
    turned = [t.transpose(1, 2) for t in (x.q, x.k, x.v)]
    options = dict(is_causal=cell.causal, scale=x.scale)
    if cell.kv_heads != cell.heads:
        options["enable_gqa"] = True

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*turned, **options).transpose(1, 2)

    return call


def fa2(x):
    """The FlashAttention-2 that is built into torch, by its operator: SDPA's own call has no window and no lengths."""
    cell = x.cell
    _refuse("torch's FA2", sink=cell.sink, softcap=cell.softcap, head_dim_v_of_its_own=_dims_differ(cell))
    window = dict(window_size_left=cell.window - 1, window_size_right=0) if cell.window else {}
    arguments = (x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, cell.seqlen, cell.seqlen, 0.0, cell.causal, False)
    return lambda: torch.ops.aten._flash_attention_forward(*arguments, scale=x.scale, **window)[0]


@functools.lru_cache(None)
def _compiled_flex():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.config.cache_size_limit = 64

    def plain(q, k, v, score, mask, scale, gqa):
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=gqa)

    def sunk(q, k, v, score, mask, scale, gqa, sink):
        out, aux = flex_attention(
            q, k, v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=gqa, return_aux=AuxRequest(lse=True)
        )
        return (out * torch.sigmoid(aux.lse - sink[:, None])[..., None]).to(out.dtype)

    options = dict(dynamic=False)
    return [torch.compile(f, **options) for f in (plain, sunk, create_block_mask)]


def flex(x):
    """FlexAttention, compiled: for what is more than full or causal."""
    cell = x.cell
    if not (cell.window or cell.sink or cell.softcap or cell.lengths):
        raise Absent("FlexAttention is asked for masks and scores of one's own only")
    plain, sunk, create_block_mask = _compiled_flex()
    length = x.q.shape[-3]
    document = None
    if cell.lengths:
        sizes = torch.tensor(cell.lengths, device=x.q.device)
        document = torch.repeat_interleave(torch.arange(len(sizes), device=x.q.device), sizes)

    def mask(b, h, i, j):
        seen = i >= j
        if cell.window:
            seen = seen & (i - j < cell.window)
        if document is not None:
            seen = seen & (document[i] == document[j])
        return seen

    def score(s, b, h, i, j):
        return cell.softcap * torch.tanh(s / cell.softcap)

    blocks = create_block_mask(mask, None, None, length, length, device=x.q.device)
    tensors = [(t[None] if cell.lengths else t).transpose(1, 2) for t in (x.q, x.k, x.v)]
    arguments = (*tensors, score if cell.softcap else None, blocks, x.scale, cell.kv_heads != cell.heads)

    def call():
        out = plain(*arguments) if x.sink is None else sunk(*arguments, x.sink)
        out = out.transpose(1, 2)
        return out[0] if cell.lengths else out

    return call


def fa3(library: str):
    """FlashAttention-3 behind a C function: fa3_fwd(q, k, v, out, lse, batch, seqlen_q, seqlen_k, heads, heads_k,
    head_dim, causal, scale, SMs, counter, e4m3, descale, stream), dense tensors."""
    run = c.CDLL(os.path.abspath(library)).fa3_fwd
    run.argtypes = [c.c_void_p] * 5 + [c.c_int] * 7 + [c.c_float, c.c_int, c.c_void_p, c.c_int] + [c.c_void_p] * 2
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def bind(x):
        cell = x.cell
        _refuse(
            "the library of FA3",
            window=cell.window,
            sink=cell.sink,
            softcap=cell.softcap,
            packed_form=bool(cell.lengths),
            head_dim_v_of_its_own=_dims_differ(cell),
        )
        out = torch.empty_like(x.q)
        lse = torch.empty(cell.batch, cell.heads, cell.seqlen, device=x.q.device)
        counter = torch.zeros(8, dtype=torch.int32, device=x.q.device)
        pointers = [t.data_ptr() for t in (x.q, x.k, x.v, out, lse)]
        sizes = [cell.batch, cell.seqlen, cell.seqlen, cell.heads, cell.kv_heads, cell.head_dim, int(cell.causal)]

        def call(_alive=(lse, counter)):
            stream = torch.cuda.current_stream().cuda_stream
            code = run(*pointers, *sizes, x.scale, sms, counter.data_ptr(), 0, None, stream)
            if code:
                raise RuntimeError(f"fa3_fwd returned {code}")
            return out

        return call

    return bind


def fa4(folder: str):
    """FlashAttention-4's Python packages, unpacked into one folder."""
    folder = os.path.abspath(folder)
    dsl = os.path.join(folder, "nvidia_cutlass_dsl")
    sys.path[:0] = [folder, os.path.join(dsl, "dsl_packages")]
    runtime = os.path.join(dsl, "cu13", "lib", "libcute_dsl_runtime.so")
    if os.path.exists(runtime):
        os.environ.setdefault("CUTE_DSL_LIBS", runtime)
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def bind(x):
        cell = x.cell
        options = dict(softmax_scale=x.scale, causal=cell.causal, softcap=cell.softcap, learnable_sink=x.sink)
        if cell.window:
            options["window_size"] = (cell.window - 1, 0)
        if not cell.lengths:
            return lambda: flash_attn_func(x.q, x.k, x.v, **options)[0]
        options.update(cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens)
        options.update(max_seqlen_q=cell.seqlen, max_seqlen_k=cell.seqlen)
        return lambda: flash_attn_varlen_func(x.q, x.k, x.v, **options)[0]

    return bind


def found(fa3_library: str, fa4_folder: str, with_flex: bool, with_fa2: bool) -> tuple[dict, dict]:
    """(name -> bind, name -> why it is absent), in the order that tables have them."""
    optional = {
        "FA3": (fa3_library, lambda: fa3(fa3_library), "--fa3 does not say where its library is"),
        "FA4": (fa4_folder, lambda: fa4(fa4_folder), "--fa4 does not say where its packages are"),
        "cuDNN": (True, lambda: cudnn, ""),
        "FA2": (with_fa2, lambda: fa2, "left out of --quick"),
        "Flex": (with_flex, lambda: flex, "it compiles for long: --flex runs it"),
    }
    there, absent = {}, {}
    for name, (asked, make, otherwise) in optional.items():
        if not asked:
            absent[name] = otherwise
            continue
        try:
            there[name] = make()
        except Exception as why:  # a package that does not import fails in ways of its own
            absent[name] = first_line(why)
    return there, absent


def first_line(why: BaseException) -> str:
    if isinstance(why, Absent):
        return str(why)
    text = str(why).strip().splitlines()
    return f"{type(why).__name__}: {text[0][:160]}" if text else type(why).__name__
