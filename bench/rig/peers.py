"""The other attention libraries on this machine. Each peer takes a problem's inputs and returns a call, or the reason
why not.

A call returns the output in the layout of q, or (output, LSE) if the peer provides an LSE.
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


def refuse(name: str, **features) -> None:
    unserved = [feature for feature, asked in features.items() if asked]
    if unserved:
        raise Absent(f"{name} has no {' and no '.join(unserved).replace('_', ' ')}")


def _dims_differ(cell) -> bool:
    return cell.dim_v != cell.head_dim


def needs_cudnn_graph(cell) -> bool:
    """Returns True for problems that torch's interface to cuDNN does not describe."""
    return bool(cell.window or cell.sink or cell.lengths or (cell.causal and cell.keys != cell.seqlen))


def cudnn(x):
    """Runs torch's SDPA backend, or cuDNN's frontend if torch's interface lacks an option."""
    cell = x.cell
    refuse("cuDNN", softcap=cell.softcap)
    if needs_cudnn_graph(cell):
        from rig import cudnn_graph

        return cudnn_graph.forward(x)
    turned = [t.transpose(1, 2) for t in (x.q, x.k, x.v)]
    options = dict(is_causal=cell.causal, scale=x.scale)
    if cell.kv_heads != cell.heads:
        options["enable_gqa"] = True

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*turned, **options).transpose(1, 2)

    return call


def fa2(x):
    """Runs torch's built-in FlashAttention-2 by its operator, because SDPA has neither windows nor lengths."""
    cell = x.cell
    refuse("torch's FA2", sink=cell.sink, softcap=cell.softcap, head_dim_v_of_its_own=_dims_differ(cell))
    window = dict(window_size_left=cell.window - 1, window_size_right=0) if cell.window else {}
    arguments = (x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, cell.seqlen, cell.keys, 0.0, cell.causal, False)
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
    """Runs compiled FlexAttention, for problems with more than a causal mask."""
    cell = x.cell
    if not (cell.window or cell.sink or cell.softcap or cell.lengths):
        raise Absent("FlexAttention runs only for score_mods and mask_mods")
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


class _Fa3Forward(c.Structure):
    """FlashAttention-3's forward, with its names; total_q and total_k count if cu_q and cu_k are not null. A window of
    -1 is unbounded. metadata: memory for the scheduler.
    """

    _fields_ = (
        [(name, c.c_void_p) for name in "q k v o lse cu_q cu_k metadata".split()]
        + [(name, c.c_int) for name in "b max_q max_k total_q total_k h hk d dv".split()]
        + [(name, c.c_int) for name in "causal window_left window_right f16 num_sm".split()]
        + [(name, c.c_float) for name in "scale softcap".split()]
    )


def fa3_dense(run):
    """FlashAttention-3 through fa3_fwd(q, k, v, out, lse, sizes, ...): contiguous bfloat16 of one head_dim."""
    run.argtypes = [c.c_void_p] * 5 + [c.c_int] * 7 + [c.c_float, c.c_int, c.c_void_p, c.c_int, c.c_void_p, c.c_void_p]
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def bind(x):
        cell = x.cell
        refuse(
            "this build of FA3", sink=cell.sink, softcap=cell.softcap, window=cell.window, packed_form=cell.lengths,
            float16=cell.dtype == "f16", head_dim_v_of_its_own=_dims_differ(cell),
        )  # fmt: skip
        out = torch.empty_like(x.q)
        lse = torch.empty(cell.batch, cell.heads, cell.seqlen, device=x.q.device)
        counter = torch.zeros(4, dtype=torch.int32, device=x.q.device)
        pointers = [t.data_ptr() for t in (x.q, x.k, x.v, out, lse)]
        sizes = [cell.batch, cell.seqlen, cell.keys, cell.heads, cell.kv_heads, cell.head_dim, int(cell.causal)]

        def call(_alive=(x, counter)):
            stream = torch.cuda.current_stream().cuda_stream
            code = run(*pointers, *sizes, x.scale, sms, counter.data_ptr(), 0, None, stream)
            if code:
                raise RuntimeError(
                    f"fa3_fwd returned {code}: the library must have this kernel: build FlashAttention-3 with it"
                )
            return out, lse

        return call

    return bind


def fa3(library: str):
    """FlashAttention-3 through a C function: int fa3_forward(const Fa3Forward*, cudaStream_t), or fa3_fwd."""
    functions = c.CDLL(os.path.abspath(library))
    if not hasattr(functions, "fa3_forward"):
        return fa3_dense(functions.fa3_fwd)
    run = functions.fa3_forward
    run.argtypes = [c.POINTER(_Fa3Forward), c.c_void_p]
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def bind(x):
        cell = x.cell
        refuse("FA3", sink=cell.sink)
        new = functools.partial(torch.empty, device=x.q.device)
        out = new(*x.q.shape[:-1], cell.dim_v, dtype=x.q.dtype)
        total = len(x.q) if cell.lengths else cell.batch * cell.seqlen
        total_k = len(x.k) if cell.lengths else cell.batch * cell.keys
        lse = new((cell.heads, total) if cell.lengths else (cell.batch, cell.heads, cell.seqlen))
        batch = len(cell.sequences())
        metadata = new(4 * (batch + 4), dtype=torch.int32)
        tensors = dict(q=x.q, k=x.k, v=x.v, o=out, lse=lse, metadata=metadata, cu_q=x.cu_seqlens, cu_k=x.cu_seqlens)
        arguments = _Fa3Forward(
            b=batch, max_q=cell.seqlen, max_k=cell.keys, total_q=total, total_k=total_k, h=cell.heads, hk=cell.kv_heads,
            d=cell.head_dim, dv=cell.dim_v, causal=cell.causal, window_left=cell.window - 1,
            window_right=0 if cell.window else -1, f16=cell.dtype == "f16", num_sm=sms, scale=x.scale,
            softcap=cell.softcap, **{name: t.data_ptr() for name, t in tensors.items() if t is not None},
        )  # fmt: skip

        def call(_alive=tensors):
            code = run(c.byref(arguments), torch.cuda.current_stream().cuda_stream)
            if code:
                raise RuntimeError(
                    f"fa3_forward returned {code}: the library must have this kernel: build FlashAttention-3 with it"
                )
            return out, lse

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


def found(names: list[str], fa3_library: str | None, fa4_folder: str | None) -> tuple[dict, dict]:
    """Returns (name -> bind, name -> reason of absence) of the selected peers."""
    optional = {
        "FA3": (fa3_library, lambda: fa3(fa3_library), "--fa3 must name its library"),
        "FA4": (fa4_folder, lambda: fa4(fa4_folder), "--fa4 must name the folder of its packages"),
        "cuDNN": (True, lambda: cudnn, ""),
        "FA2": (True, lambda: fa2, ""),
        "Flex": (True, lambda: flex, ""),
    }
    there, absent = {}, {}
    for name, (given, make, otherwise) in optional.items():
        if name not in names:
            absent[name] = "left out by --peers"
        elif not given:
            absent[name] = otherwise
        else:
            try:
                there[name] = make()
            except Exception as why:  # an import may fail for any reason
                absent[name] = first_line(why)
    return there, absent


def first_line(why: BaseException) -> str:
    if isinstance(why, Absent):
        return str(why)
    text = str(why).strip().splitlines()
    return f"{type(why).__name__}: {text[0][:160]}" if text else type(why).__name__
