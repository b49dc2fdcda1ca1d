"""torch: operators in the tandem:: namespace with gradients, fake tensors, autocast, and a short way for eager calls.

An eager call of plain tensors goes straight to the C interface, by an autograd.Function where a gradient is wanted;
whatever traces or transforms (torch.compile, functorch, fake tensors, autocast, subclasses, modes) sees the operators.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem import _gpu
from tandem._flash_backward import gradients as gradients_on_gpu
from tandem._flash_backward import refuse as refuse_gradients_on_gpu
from tandem._library import BACKWARD, FORWARD, FORWARD_HEADS_FIRST, boundary, call, options, seed_parts

# One set of threads for torch and for us. Without torch's OpenMP our own threads serve; they sleep between calls.
boundary.use_openmp_of(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))

_PLAIN = (Tensor, torch.nn.Parameter)


def new_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, not filled."""
    return _new_out(q, v), new_lse(q)


def _new_out(q: Tensor, v: Tensor) -> Tensor:
    shape = q.shape
    if shape[-1] == v.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # two thirds of new_empty's time
    return q.new_empty((*shape[:-1], v.shape[-1]))


def new_lse(q: Tensor) -> Tensor:
    sizes = q.shape
    shape = (sizes[0], sizes[2], sizes[1]) if len(sizes) == 4 else (sizes[1], sizes[0])
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return q.new_empty(shape)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def gradient_like(x: Tensor) -> Tensor:
    """A tensor for the gradient of x, in x's memory layout where the C interface can write it."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _needs_padding(q: Tensor, v: Tensor) -> bool:
    """GPUs serve multiples of 8."""
    return q.is_cuda and (q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0)


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros up to a head_dim that is a multiple of 8, which changes no score and adds columns of zeros
    to the result. As they are where q and k do not belong together: what is wrong is then said of them."""
    if q.shape[-1] != k.shape[-1]:
        return q, k, v
    q, k, v = (torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v))
    return q, k, v


def describe_gpus() -> list[str]:
    """One line for each GPU in use, or for torch's current one where none is yet."""
    if not torch.cuda.is_available():
        return []
    gpus = range(torch.cuda.device_count())
    lines = [line for line in map(boundary.gpu_description, gpus) if line is not None]
    if lines:
        return lines
    index = torch.cuda.current_device()
    try:
        _gpu.open_gpu(boundary, index)
    except RuntimeError as error:
        return [f"cuda:{index} is not served: {error}"]
    return [boundary.gpu_description(index)]


# ---- Operators -----------------------------------------------------------------------------------------------------

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? alibi_slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? page_table, Tensor? seed"
)
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, float softcap, int causal, int top_left, "
    "SymInt? window_left, SymInt? window_right, float dropout_p, int seed_number, int offset, SymInt num_splits, "
    "int deterministic, int batch_invariant"
)
_library = torch.library.Library("tandem", "DEF")
_library.define(f"forward({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}, bool[5] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
_forward = torch.ops.tandem.forward.default
_backward = torch.ops.tandem.backward.default
_N_INPUTS = 12
_SINK = 4  # of the inputs; those before it are cast by autocast


def _run_forward(out: Tensor, lse: Tensor | None, inputs: Sequence[Any], opts: tuple[Any, ...]) -> None:
    q, k, v, bias, sink = inputs[:5]
    call(FORWARD, (q, k, v, out, lse, None, None, None, None, None, bias, None, sink, None, *inputs[5:]), opts)


def _run_backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, inputs: Sequence[Any], opts: tuple[Any, ...],
    wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The wanted gradients of q, k, v, bias and sink."""
    if out.is_cuda:
        return gradients_on_gpu(dout, dlse, out, lse, inputs, opts, wanted)
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = [gradient_like(x) if w else None for x, w in zip(inputs[:5], wanted)]
    dq, dk, dv, dbias, dsink = gradients
    q, k, v, bias, sink = inputs[:5]
    call(BACKWARD, (q, k, v, out, lse, dout, dlse, dq, dk, dv, bias, dbias, sink, dsink, *inputs[5:]), opts)
    return gradients


def _forward_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, opts = arguments[:_N_INPUTS], arguments[_N_INPUTS:]
    out, lse = new_outputs(inputs[0], inputs[2])
    _run_forward(out, lse, inputs, opts)
    return out, lse


def _backward_kernel(dout: Any, dlse: Any, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    inputs, opts, wanted = rest[:_N_INPUTS], rest[_N_INPUTS:-1], rest[-1]
    gradients = _run_backward(dout, dlse, out, lse, inputs, opts, wanted)
    return tuple(out.new_empty(0) if g is None else _laid_out(g, x) for g, x in zip(gradients, inputs))


def _laid_out(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of x in the layout that the operator promises, which others' results need not have."""
    if not gradient.is_cuda or gradient.stride() == gradient_like(x.detach().to("meta")).stride():
        return gradient
    return gradient_like(x).copy_(gradient)


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)


@torch.library.register_fake("tandem::forward", lib=_library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return new_outputs(arguments[0], arguments[2])


@torch.library.register_fake("tandem::backward", lib=_library)
def _(dout: Any, dlse: Any, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(gradient_like(x) if w else out.new_empty(0) for x, w in zip(rest, rest[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:_N_INPUTS])
    ctx.options = inputs[_N_INPUTS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias and sink, by the operator."""
    if dout is None and dlse is None:
        return (None,) * 5
    out, lse, *inputs = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:5])
    gradients = _backward(dout, dlse, out, lse, *inputs, *ctx.options, wanted)
    return tuple(g if w else None for g, w in zip(gradients, wanted))


def _below_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return _forward.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


class _Operator(torch.autograd.Function):
    """The operator's gradient. torch.library.register_autograd would do, at 160 us more a call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs, (rest, keyset) = arguments[:5], arguments[5:]
        result = _below_autograd(keyset, *inputs, *rest)
        _save(ctx, inputs + rest, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return (*_differentiate(ctx, dout, dlse), None, None)


def _autograd_kernel(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments[:5]):
        if arguments[0].is_cuda:
            refuse_gradients_on_gpu(arguments[:_N_INPUTS], arguments[_N_INPUTS:])
        return _Operator.apply(*arguments[:5], arguments[5:], keyset)
    return _below_autograd(keyset, *arguments)


_library.impl("forward", _autograd_kernel, "Autograd", with_keyset=True)


def _autocast_kernel(device: str, key: Any) -> Any:
    excluded = torch._C.DispatchKeySet(key)

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device:
                return x.to(dtype)
            return x

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _forward(*map(cast, arguments[:_SINK]), *arguments[_SINK:])

    return forward


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _library.impl("forward", _autocast_kernel(_device, getattr(torch._C.DispatchKey, _key)), _key)


# ---- Eager calls ----------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The operator's gradient without the dispatcher. Takes q, k, v, bias, sink, then the others as one: each argument
    costs time."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        inputs, (others, opts, return_lse) = arguments[:5], arguments[5:]
        inputs += others
        out, lse = new_outputs(inputs[0], inputs[2])
        _run_forward(out, lse, inputs, opts)
        _save(ctx, inputs + opts, (out, lse))
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # In grad mode (create_graph) a second derivative must be refused; otherwise there is none to refuse.
        return _gradients_once(ctx, *gradients) if torch.is_grad_enabled() else _gradients(ctx, *gradients)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
    nothing = (None,) * 3
    if dout is None and dlse is None:
        return (None,) * 5 + nothing
    out, lse, *inputs = ctx.saved_tensors
    return (*_run_backward(dout, dlse, out, lse, inputs, ctx.options, ctx.needs_input_grad), *nothing)


_gradients_once = torch.autograd.function.once_differentiable(_gradients)
_apply = super(torch.autograd.Function, _Attention).apply  # without functorch's share, which is ruled out before


class _Transformed(torch.autograd.Function):
    """The same for functorch (torch.func.grad), which torch.library's own gradients do not serve."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward(*arguments[:-1], *arguments[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs[:-1] + inputs[-1], output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return (*_differentiate(ctx, dout, dlse), *(None,) * (_N_INPUTS - 5 + 1))


def _is_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing watches these tensors but autograd."""
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._get_tracing_state()
    )


def _seed_tensor(seed: Any, q: Tensor) -> tuple[tuple[int, int], Tensor | None]:
    """As seed_parts; None draws from torch's generator."""
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    return ((0, 0), seed) if isinstance(seed, Tensor) else seed_parts(seed)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, alibi_slopes: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    seqused_q: Any, seqused_k: Any, page_table: Any, seed: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    softmax_scale: Any, softcap: Any, causal: Any, window: Any, dropout_p: float, deterministic: bool,
    batch_invariant: bool, num_splits: Any, return_lse: bool, out: Tensor | None,
) -> Any:  # fmt: skip
    """tandem.attention for torch tensors."""
    for x, name in ((k, "k"), (v, "v")):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} ({type(x).__name__}) must be a torch tensor, as q is: torch.as_tensor makes one")
    if _needs_padding(q, v) and q.shape[-1] == k.shape[-1]:
        dim = v.shape[-1]
        result = attention(
            *padded(q, k, v), bias, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
            seed, max_seqlen_q, max_seqlen_k, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap,
            causal, window, dropout_p, deterministic, batch_invariant, num_splits, return_lse,
            None if out is None else out.new_empty((*out.shape[:-1], out.shape[-1] + -dim % 8)),
        )  # fmt: skip
        whole, *lse = result if return_lse else (result,)
        whole = whole[..., :dim] if out is None else out.copy_(whole[..., :dim])
        return (whole, *lse) if return_lse else whole
    seed_numbers, seed_tensor = (0, 0), None
    if dropout_p:
        seed_numbers, seed_tensor = _seed_tensor(seed, q)
    opts = options(
        softmax_scale, causal, window, softcap, max_seqlen_q, max_seqlen_k, dropout_p, seed_numbers, deterministic,
        batch_invariant, num_splits,
    )  # fmt: skip
    inputs = (
        q, k, v, bias, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, seed_tensor,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not _is_eager(q, k, v):
        if out is not None:
            raise ValueError(
                "out must be None under torch.compile, autocast and transforms: the result is a new tensor"
            )
        if torch._C._are_functorch_transforms_active():
            result = _Transformed.apply(*inputs, opts)
        else:
            result = _forward(*inputs, *opts)
        return result if return_lse else result[0]
    wants_gradient = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
    if out is not None:
        if wants_gradient or out.requires_grad:
            raise ValueError(
                "out must be None where a gradient is wanted, and must not require one itself: it is written in place; "
                "leave it out, or call under torch.no_grad() with detached tensors"
            )
        lse = new_lse(q) if return_lse else None
    elif wants_gradient:
        if q.is_cuda:
            refuse_gradients_on_gpu(inputs, opts)
        return _apply(*inputs[:5], inputs[5:], opts, return_lse)
    else:
        out = _new_out(q, v)
        lse = new_lse(q) if return_lse else None
    _run_forward(out, lse, inputs, opts)
    return (out, lse) if return_lse else out


def attention_heads_first(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, softcap: float = 0.0, sink: Tensor | None = None,
    causal: bool | str = False, window: Any = None, bias: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """attention() of q, k, v (batch, heads, seqlen, head_dim), as models have them; out is (batch, seqlen_q, heads_q,
    head_dim_v). Three transposes, which take as long as all the rest of a small call, are had for nothing here."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _is_eager(q, k, v) or _needs_padding(q, v):
        return attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, sink, None, None, None, seqused_q, seqused_k,
            None, None, None, None, softmax_scale, softcap, causal, window, 0.0, False, False, None, False, None,
        )  # fmt: skip
    opts = options(softmax_scale, causal, window, softcap, None, None, 0.0, (0, 0), False, False, None)
    batch, heads, seqlen, _ = q.shape
    out = q.new_empty((batch, seqlen, heads, v.shape[3]))
    tensors = (
        q, k, v, out, None, None, None, None, None, None, bias, None, sink, None, None, None, None, seqused_q,
        seqused_k, None, None,
    )  # fmt: skip
    call(FORWARD_HEADS_FIRST, tensors, opts)
    return out
