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

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(
        f"torch is {torch.__version__} and must be 2.10 or later, whose tensors tandem can read: pip install -U torch"
    )

from tandem import _api, _gradients, _score_mod, _vmap
from tandem._errors import Unsupported
from tandem._binding import FORWARD, HEADS_FIRST, OPTIONS, TENSORS, CallArgs, binding, call
from tandem._binding import merge as merge_into

# One set of threads for torch and for us. Without torch's OpenMP our own threads serve; they sleep between calls.
binding.use_openmp_of(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))

_PLAIN = (Tensor, torch.nn.Parameter)


def new_outputs(q: Tensor, v: Tensor, float32: bool | None = False) -> tuple[Tensor, Tensor]:
    """out and lse, not filled."""
    return _new_out(q, v, float32), new_lse(q)


def _new_out(q: Tensor, v: Tensor, float32: bool | None = False) -> Tensor:
    shape = q.shape
    if float32 and shape and v.dim():
        return torch.empty((*shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
    if not shape or v.dim() == 0:
        return q.new_empty(0)  # refused by the call
    if shape[-1] == v.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # two thirds of new_empty's time
    return q.new_empty((*shape[:-1], v.shape[-1]))


def new_lse(q: Tensor) -> Tensor:
    sizes = q.shape
    shape = (sizes[0], sizes[2], sizes[1]) if len(sizes) == 4 else sizes[1::-1]
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return q.new_empty(shape)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a head_dim that GPUs serve. As they are where q and k do not belong together: what is wrong is
    then said of them."""
    if q.shape[-1] != k.shape[-1]:
        return q, k, v
    return _gradients.padded(q), _gradients.padded(k), _gradients.padded(v)


# ---- Operators -----------------------------------------------------------------------------------------------------

# An operator takes a call_args apart: its tensors, with the seed, by their place, and its options by their names. A tensor
# of a later version goes to the end, so that others keep their places.
_LATER = TENSORS[TENSORS.index("diagonal_offsets") :]
_INPUTS = (*(name for name in TENSORS if name not in _LATER), "seed", *_LATER)
_SEED = _INPUTS.index("seed")
_SINK = _INPUTS.index("sink")  # those before it are cast by autocast
_DIFFERENTIABLE = _SINK + 1  # so many have gradients, the first
_WITHOUT_GRADIENT = frozenset(TENSORS[_DIFFERENTIABLE:])
_OPTIONS = {
    "max_seqlen_q": "SymInt? max_seqlen_q=None",
    "max_seqlen_k": "SymInt? max_seqlen_k=None",
    "softmax_scale": "float? softmax_scale=None",
    "softcap": "float softcap=0.0",
    "causal": "bool causal=False",
    "alignment": "str alignment='bottom_right'",
    "window_left": "SymInt? window_left=None",
    "window_right": "SymInt? window_right=None",
    "dropout_p": "float dropout_p=0.0",
    "num_splits": "SymInt? num_splits=None",
    "deterministic": "bool deterministic=False",
    "batch_invariant": "bool batch_invariant=False",
    "diagonal_offset": "SymInt? diagonal_offset=None",
    "float32_out": "bool float32_out=False",
    "mask_block_q": "SymInt mask_block_q=0",
    "mask_block_k": "SymInt mask_block_k=0",
    "blocks_of_mask_mod": "bool blocks_of_mask_mod=False",
    # A modification's text, its names, those of numbers first, and these numbers.
    "score_mod": "str? score_mod=None",
    "score_mod_names": "str[]? score_mod_names=None",
    "score_mod_numbers": "Scalar[]? score_mod_numbers=None",
    "mask_mod": "str? mask_mod=None",
    "mask_mod_names": "str[]? mask_mod_names=None",
    "mask_mod_numbers": "Scalar[]? mask_mod_numbers=None",
}
_FLAGS = ("causal", "deterministic", "batch_invariant", "float32_out", "blocks_of_mask_mod")
_parameters = ", ".join(("Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}=None" for name in _INPUTS[3:])))
_parameters += ", Tensor[]? captured=None"  # what score_mod names, then what mask_mod does
_parameters += ", *, " + ", ".join(_OPTIONS.values())
_library = torch.library.Library("tandem", "DEF")
_library.define(f"forward({_parameters}) -> (Tensor out, Tensor lse)")
_library.define(f"max_scores({_parameters}) -> Tensor")
_library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_parameters}, bool[5] wanted, "
    "bool[]? wanted_captured=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink, Tensor[] dcaptured)"
)
_forward = torch.ops.tandem.forward.default
_backward = torch.ops.tandem.backward.default


def to_op_args(call_args: CallArgs) -> tuple[list[Any], dict[str, Any]]:
    """A call_args as the operator's arguments."""
    inputs = [call_args.get(name) for name in _INPUTS]
    seed = inputs[_SEED]
    if seed is not None and not isinstance(seed, Tensor):
        pair = seed if isinstance(seed, tuple) else (seed, 0)
        signed = [(x + 2**63) % 2**64 - 2**63 for x in pair]
        inputs[_SEED] = torch.tensor(signed, dtype=torch.int64, device=call_args["q"].device)
    options = {name: call_args[name] for name in OPTIONS if call_args.get(name) is not None}
    options.update((name, bool(x)) for name, x in options.items() if name in _FLAGS)
    if "window" in options:
        options["window_left"], options["window_right"] = options.pop("window")
    captured: list[Any] = []
    for argument in _score_mod.MODS:
        if (mod := call_args.get(argument)) is not None:
            numbers = [(name, x) for name, x, _ in mod[1] if _score_mod.is_number(x)]
            others = [(name, x) for name, x, _ in mod[1] if not _score_mod.is_number(x)]
            options[argument] = mod[0]
            options[f"{argument}_names"] = [name for name, _ in numbers + others]
            options[f"{argument}_numbers"] = [x for _, x in numbers]
            captured += [x for _, x in others]
    return append_captured(inputs, captured), options


def append_captured(inputs: Sequence[Any], captured: Sequence[Tensor]) -> list[Any]:
    """An operator's inputs and what modifications capture."""
    return [*inputs, list(captured)] if captured else list(inputs)


def _captured(inputs: Sequence[Any]) -> Sequence[Tensor]:
    return inputs[len(_INPUTS)] or () if len(inputs) > len(_INPUTS) else ()


def from_op_args(inputs: Sequence[Any], options: dict[str, Any]) -> CallArgs:
    """The call_args of an operator's arguments; those that have their defaults may be missing."""
    call_args = dict(zip(_INPUTS, inputs))
    call_args.update(options)
    call_args["window"] = (call_args.pop("window_left", None), call_args.pop("window_right", None))
    for argument in _score_mod.MODS:
        names, numbers = (call_args.pop(f"{argument}_{of}", None) or () for of in ("names", "numbers"))
        if call_args.get(argument) is not None:
            values = (*numbers, *(None,) * (len(names) - len(numbers)))
            call_args[argument] = call_args[argument], tuple((name, x, None) for name, x in zip(names, values))
    _score_mod.put_back(call_args, _captured(inputs))
    return call_args


def _forward_kernel(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    call_args = from_op_args(inputs, options)
    call_args["out"], call_args["lse"] = result = new_outputs(call_args["q"], call_args["v"], call_args.get("float32_out"))
    call(FORWARD, call_args)
    return result


def _max_scores_kernel(*inputs: Any, **options: Any) -> Tensor:
    call_args = from_op_args(inputs, options)
    call_args["out"] = new_outputs(call_args["q"], call_args["v"], call_args.get("float32_out"))[0]
    result = call_args["max_scores"] = new_lse(call_args["q"])
    call(FORWARD, call_args)
    return result


def _backward_kernel(
    dout: Any,
    dlse: Any,
    out: Tensor,
    lse: Tensor,
    *inputs: Any,
    wanted: Sequence[bool],
    wanted_captured: Sequence[bool] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    call_args = from_op_args(inputs, options)
    call_args.update(out=out, lse=lse, dout=dout, dlse=dlse)
    captured = _score_mod.tensors_of(call_args.get("score_mod"))
    wanted_captured = wanted_captured or ()
    gradients = _gradients.gradients(call_args, [*wanted, *wanted_captured[: len(captured)]])
    inputs = (*(call_args.get(name) for name in _INPUTS[:_DIFFERENTIABLE]), *captured)
    found = [out.new_empty(0) if g is None else _laid_out(g, x) for g, x in zip(gradients, inputs)]
    found += [out.new_empty(0) for _ in wanted_captured[len(captured) :]]
    return (*found[:_DIFFERENTIABLE], found[_DIFFERENTIABLE:])


def _laid_out(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of x in the layout that the operator promises, which others' results need not have."""
    if not gradient.is_cuda or gradient.stride() == _gradients.like(x.detach().to("meta")).stride():
        return gradient
    return _gradients.like(x).copy_(gradient)


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("max_scores", _max_scores_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)


@torch.library.register_fake("tandem::forward", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, float32_out: bool = False, **__: Any) -> tuple[Tensor, Tensor]:
    return new_outputs(q, v, float32_out)


@torch.library.register_fake("tandem::max_scores", lib=_library)
def _(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return new_lse(q)


@torch.library.register_fake("tandem::backward", lib=_library)
def _(
    dout: Any,
    dlse: Any,
    out: Tensor,
    lse: Tensor,
    *inputs: Any,
    wanted: Sequence[bool],
    wanted_captured: Sequence[bool] | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    def results(tensors: Sequence[Any], wanted: Sequence[bool]) -> list[Tensor]:
        return [_gradients.like(x) if w else out.new_empty(0) for x, w in zip(tensors, wanted)]

    inputs += (None,) * (_DIFFERENTIABLE - len(inputs))
    return (*results(inputs, wanted), results(_captured(inputs), wanted_captured or ()))


torch.library.register_vmap("tandem::forward", _vmap.Rule(_forward, _INPUTS, before=0), lib=_library)
torch.library.register_vmap("tandem::backward", _vmap.Rule(_backward, _INPUTS, before=4), lib=_library)


def _save(ctx: Any, inputs: Sequence[Any], captured: Sequence[Any], options: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*output, *inputs, *captured)
    ctx.inputs = len(inputs)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """out, lse, the inputs, and what modifications captured."""
    out, lse, *saved = ctx.saved_tensors
    return out, lse, saved[: ctx.inputs], saved[ctx.inputs :]


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, wanted_captured: Sequence[bool] = ()
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The gradients of q, k, v, bias and sink, and of what modifications captured, by the operator."""
    if dout is None and dlse is None:
        return (None,) * _DIFFERENTIABLE, (None,) * len(wanted_captured)
    out, lse, inputs, captured = _saved(ctx)
    wanted, options = list(ctx.needs_input_grad[:_DIFFERENTIABLE]), ctx.options
    if captured:
        names, numbers = (options.get(f"score_mod_{of}") or () for of in ("names", "numbers"))
        of_score = len(names) - len(numbers)  # they come first; a mask has no gradient
        wanted_captured = [w and n < of_score for n, w in enumerate(wanted_captured)]
        options = {**options, "wanted_captured": wanted_captured}
    *gradients, others = _backward(dout, dlse, out, lse, *append_captured(inputs, captured), **options, wanted=wanted)
    return tuple(g if w else None for g, w in zip(gradients, wanted)), tuple(
        g if w else None for g, w in zip(others, wanted_captured)
    )


def _below_autograd(keyset: Any, inputs: Sequence[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return _forward.redispatch(keyset & torch._C._after_autograd_keyset, *inputs, **options)


class _Operator(torch.autograd.Function):
    """The operator's gradient. torch.library.register_autograd would do, at 160 us more a call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        others, options, keyset, *captured = arguments[_DIFFERENTIABLE:]
        inputs = (*arguments[:_DIFFERENTIABLE], *others)
        result = _below_autograd(keyset, append_captured(inputs, captured), options)
        _save(ctx, inputs, captured, options, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        gradients, captured = _differentiate(ctx, dout, dlse, ctx.needs_input_grad[_DIFFERENTIABLE + 3 :])
        return (*gradients, None, None, None, *captured)


def _autograd_kernel(keyset: Any, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    inputs += (None,) * (_DIFFERENTIABLE - len(inputs))
    differentiable, others = inputs[:_DIFFERENTIABLE], inputs[_DIFFERENTIABLE : len(_INPUTS)]
    captured = _captured(inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*differentiable, *captured):
        if inputs[0].is_cuda and type(inputs[0]) in _PLAIN:  # a fake tensor's shapes cannot be looked at from C
            call_args = from_op_args(inputs, options)
            call_args["out"], call_args["lse"] = new_outputs(call_args["q"], call_args["v"], call_args.get("float32_out"))
            _gradients.refuse(call_args)
        return _Operator.apply(*differentiable, others, options, keyset, *captured)
    return _below_autograd(keyset, inputs, options)


_library.impl("forward", _autograd_kernel, "Autograd", with_keyset=True)


def _autocast_kernel(device: str, key: Any) -> Any:
    excluded = torch._C.DispatchKeySet(key)

    def forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device:
                return x.to(dtype)
            return x

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _forward(*map(cast, inputs[:_SINK]), *inputs[_SINK:], **options)

    return forward


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _library.impl("forward", _autocast_kernel(_device, getattr(torch._C.DispatchKey, _key)), _key)


# ---- Eager calls ----------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The operator's gradient without the dispatcher. Takes q, k, v, bias, sink, then the whole call_args, since each
    argument costs time, and the tensors that score_mod names."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        call_args, return_lse = arguments[_DIFFERENTIABLE : _DIFFERENTIABLE + 2]
        call_args["out"], call_args["lse"] = result = new_outputs(arguments[0], arguments[2], call_args.get("float32_out"))
        if result[0].is_cuda:
            _gradients.refuse(call_args)
        call(FORWARD, call_args)
        # Tensors are saved apart from the call_args, by what knows when they are changed and when no longer needed.
        del call_args["out"], call_args["lse"]
        call_args.pop("max_scores", None)
        kept = None if isinstance(call_args.get("seed"), Tensor) else "seed"
        captured = _score_mod.take_out(call_args)
        _save(ctx, [None if name == kept else call_args.pop(name, None) for name in _INPUTS], captured, call_args, result)
        return result if return_lse else result[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # In grad mode (create_graph) a second derivative must be refused; otherwise there is none to refuse.
        return _refusing_more(ctx, *gradients) if torch.is_grad_enabled() else _differentiate_now(ctx, *gradients)


def _differentiate_now(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    out, lse, inputs, captured = _saved(ctx)
    call_args = {**dict(zip(_INPUTS, inputs)), **ctx.options, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    _score_mod.put_back(call_args, captured)
    needed = ctx.needs_input_grad
    found = _gradients.gradients(call_args, needed[:_DIFFERENTIABLE] + needed[_DIFFERENTIABLE + 2 :])
    return (*found[:_DIFFERENTIABLE], None, None, *found[_DIFFERENTIABLE:])


_refusing_more = torch.autograd.function.once_differentiable(_differentiate_now)
_apply = super(torch.autograd.Function, _Attention).apply  # without functorch's share, which is ruled out before


class _Transformed(torch.autograd.Function):
    """The same for functorch (torch.func.grad, vmap), which torch.library's own gradients do not serve."""

    generate_vmap_rule = True  # by those of the operators

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward(*arguments[:-1], **arguments[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs[:-1], (), inputs[-1], output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return (*_differentiate(ctx, dout, dlse)[0], *(None,) * (len(_INPUTS) - _DIFFERENTIABLE + 1))


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


def _check_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} ({type(x).__name__}) must be a torch tensor, as q is: torch.as_tensor makes one")


def attention(call_args: CallArgs, return_lse: bool) -> Any:
    """tandem.attention for torch tensors. call_args: its arguments."""
    q, k, v = call_args["q"], call_args["k"], call_args["v"]
    bias, sink, out = call_args.get("bias"), call_args.get("sink"), call_args.get("out")
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)) or bias is not None or sink is not None or out is not None:
        for name in ("k", "v", "bias", "sink", "out"):
            _check_tensor(call_args.get(name, q), name)
    if "max_scores" in call_args:
        _check_tensor(call_args["max_scores"], "max_scores")
    captured = []
    if "score_mod" in call_args or "mask_mod" in call_args:
        for name, x in _score_mod.named(call_args).items():
            _check_tensor(x, name)
        captured = _score_mod.tensors_of(call_args.get("score_mod"))
    if _gradients.needs_padding(q, v) and q.shape[-1] == k.shape[-1]:
        return _padded_attention(call_args, return_lse)
    if "dropout_p" in call_args and "seed" not in call_args:
        call_args["seed"] = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    if torch.compiler.is_compiling() or not _is_eager(q, k, v):
        return _traced(call_args, return_lse)
    wants_gradient = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
        or any(x.requires_grad for x in captured)
    )
    if out is not None:
        if wants_gradient or out.requires_grad:
            raise ValueError(
                "out must be None where a gradient is wanted, and must not require one itself: it is written in place; "
                "leave it out, or call under torch.no_grad() with detached tensors"
            )
    elif wants_gradient:
        if not _WITHOUT_GRADIENT.isdisjoint(call_args):
            for name in _WITHOUT_GRADIENT.intersection(call_args):
                _check_tensor(call_args[name], name)
        return _apply(q, k, v, bias, sink, call_args, return_lse, *captured)
    else:
        out = call_args["out"] = _new_out(q, v, call_args.get("float32_out"))
    if return_lse:
        lse = call_args["lse"] = new_lse(q)
        call(FORWARD, call_args)
        return out, lse
    call(FORWARD, call_args)
    return out


def _traced(call_args: CallArgs, return_lse: bool) -> Any:
    """attention() as whatever traces or transforms it must see it: by the operator."""
    if "out" in call_args:
        raise ValueError("out must be None under torch.compile, autocast and transforms: the result is a new tensor")
    inputs, options = to_op_args(call_args)
    if (max_scores := call_args.get("max_scores")) is not None:
        # Operators write into nothing they are given. This one's forward is another: what traces sees both.
        max_scores.copy_(torch.ops.tandem.max_scores(*_detached(inputs), **options))
    if torch._C._are_functorch_transforms_active():
        if _captured(inputs):
            raise Unsupported(
                "score_mod and mask_mod must name no tensors under torch.func's transforms (grad, vmap), which do not "
                "see these: use autograd, and a larger batch"
            )
        result = _Transformed.apply(*inputs, options)
    else:
        result = _forward(*inputs, **options)
    return result if return_lse else result[0]


def _detached(inputs: Sequence[Any]) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else _detached(x) if isinstance(x, list) else x for x in inputs]


def _padded_attention(call_args: CallArgs, return_lse: bool) -> Any:
    """attention() with zeros up to a head_dim that a GPU serves."""
    q, v, out = call_args["q"], call_args["v"], call_args.get("out")
    dim = v.shape[-1]
    padding = dict(zip(("q", "k", "v"), padded(q, call_args["k"], v)))
    if "softmax_scale" not in call_args:
        padding["softmax_scale"] = q.shape[-1] ** -0.5
    if out is not None:
        padding["out"] = out.new_empty((*out.shape[:-1], out.shape[-1] + -dim % 8))
    result = attention({**call_args, **padding}, return_lse)
    whole, *lse = result if return_lse else (result,)
    whole = whole[..., :dim] if out is None else out.copy_(whole[..., :dim])
    return (whole, *lse) if return_lse else whole


def attention_heads_first(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """tandem.attention of q, k, v (batch, heads, seqlen, head_dim), as models have them, with neither packed sequences
    nor dropout; out is (batch, seqlen_q, heads_q, head_dim_v). Three transposes, which take as long as all the rest of
    a small call, are had for nothing here."""
    modified = "score_mod" in options or "mask_mod" in options or "block_mask" in options
    longer = _gradients.needs_padding(q, v) or modified
    if longer or torch.compiler.is_compiling() or torch.is_grad_enabled() or not _is_eager(q, k, v):
        return _api.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    batch, heads, seqlen, _ = q.shape
    out = q.new_empty((batch, seqlen, heads, v.shape[3]))
    call(HEADS_FIRST, {"q": q, "k": k, "v": v, **options, "out": out})
    return out


# ---- Merging --------------------------------------------------------------------------------------------------------


def _merged(outs: Sequence[Tensor], lses: Sequence[Tensor], float32: bool) -> tuple[Tensor, Tensor]:
    """out and lse of all parts, not filled."""
    out = torch.empty(outs[0].shape, dtype=torch.float32 if float32 else outs[0].dtype, device=outs[0].device)
    return out, new_lse(outs[0])


def _merge_kernel(outs: Sequence[Tensor], lses: Sequence[Tensor], float32: bool) -> tuple[Tensor, Tensor]:
    result = _merged(outs, lses, float32)
    merge_into([x.detach() for x in outs], [x.detach() for x in lses], *result)
    return result


def _save_parts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    outs, lses, _ = inputs
    ctx.save_for_backward(*output, *outs, *lses)
    ctx.set_materialize_grads(False)


def _part_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[list[Tensor], list[Tensor], None]:
    """Of out = sum exp(part_lse - lse) part_out and of lse. A part that weighs nothing may hold anything."""
    out, lse, *parts = ctx.saved_tensors
    count = len(parts) // 2
    dout = (torch.zeros_like(out) if dout is None else dout).to(lse.dtype)
    douts, dlses = [], []
    for part, part_lse in zip(parts[:count], parts[count:]):
        weight = torch.where(part_lse == -torch.inf, 0.0, torch.exp(part_lse - lse))
        column = weight.transpose(-1, -2).unsqueeze(-1)  # (..., seqlen, heads, 1)
        difference = torch.where(column == 0, 0.0, part.to(lse.dtype) - out.to(lse.dtype))
        share = (dout * difference).sum(-1).transpose(-1, -2)
        douts.append((column * dout).to(part.dtype))
        dlses.append(weight * (share if dlse is None else share + dlse))
    return douts, dlses, None


_library.define("merge(Tensor[] outs, Tensor[] lses, bool float32) -> (Tensor out, Tensor lse)")
for _device in ("CPU", "CUDA"):
    _library.impl("merge", _merge_kernel, _device)
torch.library.register_fake("tandem::merge", _merged, lib=_library)
torch.library.register_autograd("tandem::merge", _part_gradients, setup_context=_save_parts, lib=_library)


def merge(outs: Sequence[Any], lses: Sequence[Any], float32: bool) -> tuple[Tensor, Tensor]:
    """tandem.merge for torch tensors."""
    for name, tensors in (("outs", outs), ("lses", lses)):
        for n, x in enumerate(tensors):
            _check_tensor(x, f"{name}[{n}]")
    return torch.ops.tandem.merge(list(outs), list(lses), float32)
