"""torch operators in the tandem:: namespace, with gradients, fake tensors, autocast and vmap rules.

torch.compile, functorch, fake tensors, autocast, subclasses and modes see these operators. Eager calls of plain tensors
skip them (_torch_api.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(
        f"torch is {torch.__version__} and must be 2.10 or later: upgrade torch with 'pip install -U torch'"
    )

from tandem import _gradients, _score_mod, _vmap
from tandem._autocast import register_autocast
from tandem._binding import FORWARD, CallArgs, binding, call, check_parts, refuse_gradient
from tandem._binding import merge as merge_into
from tandem._derivatives import once_differentiable, refuse_forward, refuse_second, refuse_tangents
from tandem._errors import Unsupported
from tandem._operands import DEVICES, check_mods, check_wanted, checked
from tandem._options import INPUTS, KINDS, OPTIONS, SCHEMA
from tandem._tensors import PLAIN

# Tandem and torch share one set of threads. Without torch's OpenMP, Tandem starts separate threads.
binding.use_openmp_of(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


def new_outputs(
    q: Tensor, v: Tensor, float32: bool | None = False, layout_of_q: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Allocates out and lse."""
    return new_out(q, v, float32, layout_of_q), new_lse(q)


def new_out(q: Tensor, v: Tensor, float32: bool | None = False, layout_of_q: bool | None = False) -> Tensor:
    """layout_of_q: the dimensions have the memory order of q's, the last one innermost."""
    shape = q.shape
    if layout_of_q and len(shape) == 4:
        order = [*sorted(range(3), key=lambda d: -q.stride(d)), 3]
        dtype = torch.float32 if float32 else q.dtype
        return torch.empty_permuted((*shape[:-1], v.shape[-1]), order, dtype=dtype, device=q.device)
    if float32 and shape and v.dim():
        return torch.empty((*shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
    if not shape or v.dim() == 0:
        return q.new_empty(0)  # the call will be refused
    if shape[-1] == v.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # takes two thirds of new_empty's time
    return q.new_empty((*shape[:-1], v.shape[-1]))


def outputs_of(call_args: CallArgs) -> tuple[Tensor, Tensor]:
    """Allocates out and lse of a call."""
    return new_outputs(call_args["q"], call_args["v"], call_args.get("float32_out"), call_args.get("layout_of_q"))


def new_lse(q: Tensor) -> Tensor:
    sizes = q.shape
    shape = (sizes[0], sizes[2], sizes[1]) if len(sizes) == 4 else sizes[1::-1]
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return q.new_empty(shape)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


# ---- Schemas -------------------------------------------------------------------------------------------------------

# An operator has INPUTS by position and the options by name. Rows of options.def keep their order, so that positions do
# not change.
_SEED = INPUTS.index("seed")
SINK = INPUTS.index("sink")  # autocast casts the inputs before sink
DIFFERENTIABLE = SINK + 1  # the number of inputs with gradients, which come first
_parameters = ", ".join(("Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}=None" for name in INPUTS[3:])))
_parameters += ", Tensor[]? captured=None"  # the tensors that score_mod names, then mask_mod names
_parameters += ", *, " + ", ".join(SCHEMA)
library = torch.library.Library("tandem", "DEF")
library.define(f"forward({_parameters}) -> (Tensor out, Tensor lse)")
library.define(f"max_scores({_parameters}) -> Tensor")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_parameters}, bool[5] wanted, "
    "bool[]? wanted_captured=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink, Tensor[] dcaptured)"
)
library.define("merge(Tensor[] outs, Tensor[] lses, bool float32) -> (Tensor out, Tensor lse)")
forward_op = torch.ops.tandem.forward.default
_backward_op = torch.ops.tandem.backward.default
_max_scores_op = torch.ops.tandem.max_scores.default
_merge_op = torch.ops.tandem.merge.default


def to_op_args(call_args: CallArgs) -> tuple[list[Any], dict[str, Any]]:
    """Converts a call's arguments to the operator's: inputs by position and options by name."""
    inputs = [call_args.get(name) for name in INPUTS]
    seed = inputs[_SEED]
    if seed is not None and not isinstance(seed, Tensor):
        pair = seed if isinstance(seed, tuple) else (seed, 0)
        signed = [(x + 2**63) % 2**64 - 2**63 for x in pair]
        inputs[_SEED] = torch.tensor(signed, dtype=torch.int64, device=call_args["q"].device)
    options = {name: call_args[name] for name in OPTIONS if call_args.get(name) is not None}
    options.update((name, bool(x)) for name, x in options.items() if KINDS[name] in ("Flag", "OutputOnly"))
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
    """Returns an operator's inputs, followed by the tensors that score_mod and mask_mod name."""
    return [*inputs, list(captured)] if captured else list(inputs)


def captured_of(inputs: Sequence[Any]) -> Sequence[Tensor]:
    return inputs[len(INPUTS)] or () if len(inputs) > len(INPUTS) else ()


def from_op_args(inputs: Sequence[Any], options: dict[str, Any]) -> CallArgs:
    """Converts the operator's arguments to the call's; arguments with default values may be missing."""
    call_args = dict(zip(INPUTS, inputs))
    call_args.update(options)
    check_mods(call_args, captured_of(inputs))
    call_args["window"] = (call_args.pop("window_left", None), call_args.pop("window_right", None))
    for argument in _score_mod.MODS:
        names, numbers = (call_args.pop(f"{argument}_{part}", None) or () for part in ("names", "numbers"))
        if call_args.get(argument) is not None:
            values = (*numbers, *(None,) * (len(names) - len(numbers)))
            call_args[argument] = call_args[argument], tuple((name, x, None) for name, x in zip(names, values))
    _score_mod.put_back(call_args, captured_of(inputs))
    return call_args


# ---- Kernels -------------------------------------------------------------------------------------------------------

# The names of the operators' arguments by position, and the arguments that may not be None.
_CALL = (*INPUTS, "captured")
_NAMES = {
    "forward": (_CALL, ("q", "k", "v")),
    "max_scores": (_CALL, ("q", "k", "v")),
    "backward": (("dout", "dlse", "out", "lse", *_CALL), ("out", "lse", "q", "k", "v")),
    "merge": (("outs", "lses"), ()),
}


def _forward_kernel(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    call_args = from_op_args(inputs, options)
    call_args["out"], call_args["lse"] = result = outputs_of(call_args)
    call(FORWARD, call_args)
    return result


def _max_scores_kernel(*inputs: Any, **options: Any) -> Tensor:
    call_args = from_op_args(inputs, options)
    call_args["out"] = outputs_of(call_args)[0]
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
    check_wanted(call_args, INPUTS[:DIFFERENTIABLE], wanted)
    captured = _score_mod.tensors_of(call_args.get("score_mod"))
    wanted_captured = wanted_captured or ()
    gradients = _gradients.gradients(call_args, [*wanted, *wanted_captured[: len(captured)]])
    inputs = (*(call_args.get(name) for name in INPUTS[:DIFFERENTIABLE]), *captured)
    results = [out.new_empty(0) if g is None else _laid_out(g, x) for g, x in zip(gradients, inputs)]
    results += [out.new_empty(0) for _ in wanted_captured[len(captured) :]]
    return (*results[:DIFFERENTIABLE], results[DIFFERENTIABLE:])


def _laid_out(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x in the layout that the fake kernel promises, which torch's backward need not return."""
    if not gradient.is_cuda or gradient.stride() == _gradients.like(x.detach().to("meta")).stride():
        return gradient
    return _gradients.like(x).copy_(gradient)


def _new_merged(outs: Sequence[Tensor], lses: Sequence[Tensor], float32: bool) -> tuple[Tensor, Tensor]:
    """Allocates out and lse of all parts."""
    check_parts(outs, lses)
    out = torch.empty(outs[0].shape, dtype=torch.float32 if float32 else outs[0].dtype, device=outs[0].device)
    return out, new_lse(outs[0])


def _merge_kernel(outs: Sequence[Tensor], lses: Sequence[Tensor], float32: bool) -> tuple[Tensor, Tensor]:
    result = _new_merged(outs, lses, float32)
    merge_into([x.detach() for x in outs], [x.detach() for x in lses], *result)
    return result


_KERNELS = {
    "forward": _forward_kernel,
    "max_scores": _max_scores_kernel,
    "backward": _backward_kernel,
    "merge": _merge_kernel,
}
for _name, _kernel in _KERNELS.items():
    for _device in DEVICES:
        library.impl(_name, checked(*_NAMES[_name])(_kernel), _device)


@torch.library.register_fake("tandem::forward", lib=library)
@checked(*_NAMES["forward"])
def _(
    q: Tensor, k: Tensor, v: Tensor, *_: Any, float32_out: bool = False, layout_of_q: bool = False, **__: Any
) -> tuple[Tensor, Tensor]:
    return new_outputs(q, v, float32_out, layout_of_q)


@torch.library.register_fake("tandem::max_scores", lib=library)
@checked(*_NAMES["max_scores"])
def _(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return new_lse(q)


@torch.library.register_fake("tandem::backward", lib=library)
@checked(*_NAMES["backward"])
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

    inputs += (None,) * (DIFFERENTIABLE - len(inputs))
    return (*results(inputs, wanted), results(captured_of(inputs), wanted_captured or ()))


torch.library.register_fake("tandem::merge", checked(*_NAMES["merge"])(_new_merged), lib=library)
torch.library.register_vmap("tandem::forward", _vmap.Rule(forward_op, INPUTS, before=0), lib=library)
torch.library.register_vmap("tandem::backward", _vmap.Rule(_backward_op, INPUTS, before=4), lib=library)


# ---- Gradients -----------------------------------------------------------------------------------------------------


def save(ctx: Any, inputs: Sequence[Any], captured: Sequence[Any], options: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*output, *inputs, *captured)
    ctx.inputs = len(inputs)
    ctx.options = options
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> tuple[Any, ...]:
    """Returns out, lse, the inputs, and the captured tensors."""
    out, lse, *tensors = ctx.saved_tensors
    return out, lse, tensors[: ctx.inputs], tensors[ctx.inputs :]


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, wanted_captured: Sequence[bool], backward: Any
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Returns the gradients of q, k, v, bias and sink, and of the captured tensors, by backward(dout, dlse, ...,
    wanted=).
    """
    if dout is None and dlse is None:
        return (None,) * DIFFERENTIABLE, (None,) * len(wanted_captured)
    out, lse, inputs, captured = saved(ctx)
    wanted, options = list(ctx.needs_input_grad[:DIFFERENTIABLE]), ctx.options
    if captured:
        names, numbers = (options.get(f"score_mod_{part}") or () for part in ("names", "numbers"))
        of_score_mod = len(names) - len(numbers)  # score_mod's tensors come first; a mask has no gradient
        wanted_captured = [w and n < of_score_mod for n, w in enumerate(wanted_captured)]
        options = {**options, "wanted_captured": wanted_captured}
    *gradients, others = backward(dout, dlse, out, lse, *append_captured(inputs, captured), wanted=wanted, **options)
    return tuple(g if w else None for g, w in zip(gradients, wanted)), tuple(
        g if w else None for g, w in zip(others, wanted_captured)
    )


def _redispatch(op: Any, keyset: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """The operator's kernel below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **options)


class _Operator(torch.autograd.Function):
    """The operator's gradient. torch.library.register_autograd would take 160 us more a call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        others, options, keyset, *captured = arguments[DIFFERENTIABLE:]
        inputs = (*arguments[:DIFFERENTIABLE], *others)
        result = _redispatch(forward_op, keyset, append_captured(inputs, captured), options)
        save(ctx, inputs, captured, options, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        gradients, captured = _differentiate(ctx, dout, dlse, ctx.needs_input_grad[DIFFERENTIABLE + 3 :], _backward_op)
        return (*gradients, None, None, None, *captured)

    jvp = staticmethod(refuse_forward)


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise Unsupported(
            "torch.ops.tandem has no gradients under torch.func's transforms: call tandem.attention or tandem.merge"
        )


def _forward_autograd(keyset: Any, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents(inputs)
    inputs += (None,) * (DIFFERENTIABLE - len(inputs))
    differentiable, others = inputs[:DIFFERENTIABLE], inputs[DIFFERENTIABLE : len(INPUTS)]
    for name, x in zip(INPUTS[DIFFERENTIABLE:], others):
        refuse_gradient(x, name, "compute the scores with score_mod")
    captured = captured_of(inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*differentiable, *captured):
        _refuse_transforms()
        if type(inputs[0]) in PLAIN and inputs[0].is_cuda:  # C code cannot read a fake tensor's shapes
            call_args = from_op_args(inputs, options)
            call_args["out"], call_args["lse"] = outputs_of(call_args)
            _gradients.refuse_early(call_args)
        return _Operator.apply(*differentiable, others, options, keyset, *captured)
    return _redispatch(forward_op, keyset, inputs, options)


def _max_scores_autograd(keyset: Any, *inputs: Any, **options: Any) -> Tensor:
    refuse_tangents(inputs)
    return _redispatch(_max_scores_op, keyset, inputs, options)


def _backward_autograd(keyset: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    refuse_tangents(arguments)
    *gradients, captured = _redispatch(_backward_op, keyset, arguments, options)
    sources = [*arguments, *captured_of(arguments[4:])]
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in sources):
        return (*gradients, captured)
    _refuse_transforms()
    results = once_differentiable([*gradients, *captured], sources)
    return (*results[:DIFFERENTIABLE], results[DIFFERENTIABLE:])


class _Merge(torch.autograd.Function):
    """Gradients of out = sum exp(part_lse - lse) part_out and of lse, by torch's operations, which have derivatives."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, float32: bool, *parts: Tensor) -> tuple[Tensor, Tensor]:
        half = len(parts) // 2
        result = _redispatch(_merge_op, keyset, (parts[:half], parts[half:], float32), {})
        ctx.save_for_backward(*result, *parts)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *parts = ctx.saved_tensors
        half = len(parts) // 2
        dout = (torch.zeros_like(out) if dout is None else dout).to(lse.dtype)
        douts, dlses = [], []
        for part, part_lse in zip(parts[:half], parts[half:]):
            # A part of weight 0 may have any contents.
            weight = torch.where(part_lse == -torch.inf, 0.0, torch.exp(part_lse - lse))
            column = weight.transpose(-1, -2).unsqueeze(-1)  # (..., seqlen, heads, 1)
            difference = torch.where(column == 0, 0.0, part.to(lse.dtype) - out.to(lse.dtype))
            share = (dout * difference).sum(-1).transpose(-1, -2)
            douts.append((column * dout).to(part.dtype))
            dlses.append(weight * (share if dlse is None else share + dlse))
        return None, None, *douts, *dlses

    jvp = staticmethod(refuse_forward)


def _merge_autograd(keyset: Any, outs: Sequence[Tensor], lses: Sequence[Tensor], float32: bool) -> Any:
    refuse_tangents((outs, lses))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*outs, *lses):
        _refuse_transforms()
        return _Merge.apply(keyset, float32, *outs, *lses)
    return _redispatch(_merge_op, keyset, (outs, lses, float32), {})


library.impl("forward", _forward_autograd, "Autograd", with_keyset=True)
library.impl("max_scores", _max_scores_autograd, "Autograd", with_keyset=True)
library.impl("backward", _backward_autograd, "Autograd", with_keyset=True)
library.impl("merge", _merge_autograd, "Autograd", with_keyset=True)


class Transformed(torch.autograd.Function):
    """The operator under functorch (torch.func.grad, vmap), which the dispatcher's autograd kernels do not serve."""

    generate_vmap_rule = True  # derived from the operators' rules

    @staticmethod
    def forward(options: dict[str, Any], *arguments: Any) -> tuple[Tensor, Tensor]:
        return forward_op(*append_captured(arguments[: len(INPUTS)], arguments[len(INPUTS) :]), **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        options, *arguments = inputs
        save(ctx, arguments[: len(INPUTS)], arguments[len(INPUTS) :], options, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]

        class Context:  # without the options, which are first
            saved_tensors, inputs, options = ctx.saved_tensors, ctx.inputs, ctx.options
            needs_input_grad = needed

        gradients, captured = _differentiate(Context, dout, dlse, needed[len(INPUTS) :], _transformed_backward)
        return (None, *gradients, *(None,) * (len(INPUTS) - DIFFERENTIABLE), *captured)

    jvp = staticmethod(refuse_forward)


class _TransformedBackward(torch.autograd.Function):
    """The operator's backward under functorch. The derivative of the backward is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(options: dict[str, Any], *arguments: Any) -> tuple[Tensor, ...]:
        count = 4 + len(INPUTS)
        inputs = append_captured(arguments[:count], arguments[count:])
        *gradients, captured = _backward_op(*inputs, **options)
        return (*gradients, *captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second()

    jvp = staticmethod(refuse_forward)


def _transformed_backward(*arguments: Any, **options: Any) -> tuple[Any, ...]:
    *arguments, last = arguments
    flat = [*arguments, *last] if isinstance(last, list) else [*arguments, last]
    results = _TransformedBackward.apply(options, *flat)
    return (*results[:DIFFERENTIABLE], results[DIFFERENTIABLE:])


for _name in ("forward", "max_scores"):
    register_autocast(library, _name, casts=SINK)
