"""tandem.attention for torch tensors. Eager calls of plain tensors skip the operators of _torch_ops.py."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _api, _gradients, _padding, _score_mod, _torch_append, _torch_ops  # noqa: F401 (an operator)
from tandem._autocast import autocast_inputs
from tandem._binding import (
    FORWARD,
    HEADS_FIRST,
    WRITTEN_BY_APPEND,
    CallArgs,
    call,
    refuse_gradient,
)
from tandem._derivatives import once_differentiable, refuse_forward, refuse_tangents
from tandem._errors import Unsupported
from tandem._options import OPTIONS, TENSORS
from tandem._padding import needs_padding, padded_attention
from tandem._tensors import (
    PLAIN,
    check_layout,
    check_layouts,
    check_result,
    check_tensor,
    check_writable,
    count_write,
    resolved,
)
from tandem._torch_cascade import cascade as cascade  # for _cascade.py
from tandem._torch_ops import DIFFERENTIABLE, INPUTS, Transformed, new_lse, new_out, to_op_args

# The names of this module that _api.py reads.
new_outputs, padded_qkv, new_gradient = _torch_ops.new_outputs, _padding.padded_qkv, _gradients.like

_WITHOUT_GRADIENT = frozenset(TENSORS[DIFFERENTIABLE:])
_WITHOUT_TENSORS = frozenset(("q", "k", "v", *OPTIONS))
_WRITTEN = ("out", "max_scores")


class _Attention(torch.autograd.Function):
    """The gradient of an eager call. The call's arguments are q, k, v, bias, sink, call_args, return_lse, and the
    tensors that score_mod names. call_args is one argument, because each argument costs time."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        call_args, return_lse = arguments[DIFFERENTIABLE : DIFFERENTIABLE + 2]
        call_args["out"], call_args["lse"] = result = _torch_ops.outputs_of(call_args)
        if result[0].is_cuda:
            _gradients.refuse_early(call_args)
        call(FORWARD, call_args)
        # save_for_backward keeps the tensors, because autograd then knows when the tensors change and when they can be
        # freed.
        del call_args["out"], call_args["lse"]
        call_args.pop("max_scores", None)
        kept = None if isinstance(call_args.get("seed"), Tensor) else "seed"
        captured = _score_mod.take_out(call_args)
        inputs = [None if name == kept else call_args.pop(name, None) for name in INPUTS]
        _torch_ops.save(ctx, inputs, captured, call_args, result)
        return result if return_lse else result[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, inputs, captured = _torch_ops.saved(ctx)
        call_args = {**dict(zip(INPUTS, inputs)), **ctx.options, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
        _score_mod.put_back(call_args, captured)
        needed = ctx.needs_input_grad
        wanted = needed[:DIFFERENTIABLE] + needed[DIFFERENTIABLE + 2 :]
        if torch.is_grad_enabled():  # create_graph=True
            sources = (dout, dlse, out, lse, *inputs, *captured)
            refuse_tangents(sources)
            with torch.no_grad():
                gradients = _gradients.gradients(call_args, wanted)
            gradients = once_differentiable(gradients, sources)
        else:
            gradients = _gradients.gradients(call_args, wanted)
        return (*gradients[:DIFFERENTIABLE], None, None, *gradients[DIFFERENTIABLE:])

    jvp = staticmethod(refuse_forward)


_apply = super(torch.autograd.Function, _Attention).apply  # without functorch's part, which is_eager() excludes


def is_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns True if only autograd's reverse mode observes these tensors."""
    return (
        type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._get_tracing_state()
    )


def attention(call_args: CallArgs, return_lse: bool, what: int = FORWARD) -> Any:
    """Computes tandem.attention for torch tensors. call_args: its arguments. attend() explains what."""
    if torch.compiler.is_compiling():  # the dispatcher then resolves lazy negations
        return _attention(call_args, return_lse, True, what)
    try:
        return _attention(call_args, return_lse, False, what)
    except RuntimeError as error:
        if not isinstance(error, Unsupported):  # torch's error: a layout without strides may be the reason
            check_layouts(call_args.items())
        raise


def _attention(call_args: CallArgs, return_lse: bool, compiling: bool, what: int) -> Any:
    q, k, v = call_args["q"], call_args["k"], call_args["v"]
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_tensor(k, "k")
        check_tensor(v, "v")
    if not compiling and (q.is_neg() or k.is_neg() or v.is_neg()):
        q, k, v = (resolved(x) for x in (q, k, v))
        call_args.update(q=q, k=k, v=v)
    captured, bias, sink, out = (), None, None, None
    if len(call_args) > 3 and not _WITHOUT_TENSORS.issuperset(call_args):
        captured = _check_options(call_args)
        bias, sink, out = call_args.get("bias"), call_args.get("sink"), call_args.get("out")
    if needs_padding(q, v) and q.shape[-1] == k.shape[-1]:
        return padded_attention(functools.partial(attention, what=what), call_args, return_lse)
    if "dropout_p" in call_args and "seed" not in call_args:
        call_args["seed"] = 0 if what else torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    if compiling or not is_eager(q, k, v):
        return _traced(call_args, return_lse, what)
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
                "out must be None if a gradient is required, and must not require a gradient: omit out, or call "
                "under torch.no_grad() with detached tensors"
            )
    elif wants_gradient:
        if not _WITHOUT_GRADIENT.isdisjoint(call_args):
            for name in _WITHOUT_GRADIENT.intersection(call_args):
                check_tensor(call_args[name], name)
        if not what:
            max_scores = call_args.get("max_scores")
            result = _apply(q, k, v, bias, sink, call_args, return_lse, *captured)
            count_write(max_scores)
            return result
    if out is None:
        result = new_out(q, v, call_args.get("float32_out"), call_args.get("layout_of_q"))
        call_args["out"] = result
    else:
        result = out
    lse = None
    if return_lse:
        lse = call_args["lse"] = new_lse(q)
    if what:
        _inspect(call_args, what, wants_gradient)
        return None
    call(FORWARD, call_args)
    if out is not None:
        count_write(out)
    if "max_scores" in call_args:
        count_write(call_args["max_scores"])
    return (result, lse) if return_lse else result


def _inspect(call_args: CallArgs, what: int, wants_gradient: bool) -> None:
    """Checks or prepares a call whose arguments have passed the checks of _attention()."""
    if wants_gradient and call_args["q"].is_cuda:
        _gradients.refuse_early(call_args)
    call(what, call_args)


def _check_options(call_args: CallArgs) -> list[Tensor]:
    """Checks the optional tensors and resolves lazy negations. Returns the tensors that score_mod names."""
    for name in ("bias", "sink", *_WRITTEN):
        if name in call_args:
            check_tensor(call_args[name], name)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        for name in _WRITTEN:
            if name in call_args and (name != "out" or call_args[name].is_neg()):
                check_writable(call_args[name], name)
        call_args.update(
            [(name, x.resolve_neg()) for name, x in call_args.items() if isinstance(x, Tensor) and x.is_neg()]
        )
    if "score_mod" not in call_args and "mask_mod" not in call_args:
        return []
    for name, x in _score_mod.named(call_args).items():
        check_tensor(x, name)
    if not compiling:
        for argument in _score_mod.MODS:
            if (mod := call_args.get(argument)) is not None:
                call_args[argument] = _score_mod.replaced(mod, [resolved(x) for x in _score_mod.tensors_of(mod)])
    return _score_mod.tensors_of(call_args.get("score_mod"))


def _traced(call_args: CallArgs, return_lse: bool, what: int) -> Any:
    """Computes attention() by the operator, for tracing and transforms."""
    if what and (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
        raise Unsupported("tandem.check and tandem.prepare are not served in transforms: call them outside")
    if "out" in call_args:
        raise ValueError("out must be None under torch.compile, autocast and transforms: omit out and use the result")
    max_scores = call_args.get("max_scores")
    inputs, options = to_op_args(call_args)
    if not torch.compiler.is_compiling():
        refuse_tangents(inputs)
        check_layouts(zip(INPUTS, inputs))
    if max_scores is not None:
        like_lse = _torch_ops.new_lse(call_args["q"].detach())
        check_result(max_scores, "max_scores", like_lse.shape, (like_lse.dtype, torch.float32))
        # Operators write none of their arguments, so that max_scores is the result of a second operator.
        if not what:
            _write(max_scores, torch.ops.tandem.max_scores(*_detached(inputs), **options))
    if what:
        call_args = _torch_ops.from_op_args(autocast_inputs(_detached(inputs), _torch_ops.SINK), options)
        call_args["out"], call_args["lse"] = _torch_ops.outputs_of(call_args)
        return _inspect(call_args, what, False)
    if torch._C._are_functorch_transforms_active():
        captured = _torch_ops.captured_of(inputs)
        result = Transformed.apply(options, *inputs[: len(INPUTS)], *captured)
    else:
        result = _torch_ops.forward_op(*inputs, **options)
    return result if return_lse else result[0]


def _write(max_scores: Tensor, found: Tensor) -> None:
    if torch._C._are_functorch_transforms_active() and not _is_batched(max_scores) and _is_batched(found):
        raise ValueError(
            "max_scores must be an argument of the function under vmap, because each example writes it: pass one with "
            "the examples' dimension"
        )
    with torch.inference_mode(max_scores.is_inference() or torch.is_inference_mode_enabled()):
        max_scores.copy_(found)


def _is_batched(x: Tensor) -> bool:
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return torch._C._functorch.is_batchedtensor(x)


def _detached(inputs: Sequence[Any]) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else _detached(x) if isinstance(x, list) else x for x in inputs]


def attention_heads_first(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Computes tandem.attention of q, k and v (batch, heads, seqlen, head_dim), with neither packed sequences nor
    dropout.

    Returns (batch, seqlen_q, heads_q, head_dim_v). Without gradients this function avoids the three transposes, which
    take as long as the rest of a small call.
    """
    modified = "score_mod" in options or "mask_mod" in options or "block_mask" in options
    longer = modified or torch.compiler.is_compiling() or torch.is_grad_enabled() or needs_padding(q, v)
    if (
        longer
        or not is_eager(q, k, v)
        or any(x.is_neg() for x in (q, k, v, options.get("bias"), options.get("sink")) if x is not None)
    ):
        return _api.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    batch, heads, seqlen, _ = q.shape
    out = q.new_empty((batch, seqlen, heads, v.shape[3]))
    call(HEADS_FIRST, {"q": q, "k": k, "v": v, **options, "out": out})
    return out


def merge(outs: Sequence[Any], lses: Sequence[Any], float32: bool) -> tuple[Tensor, Tensor]:
    """Computes tandem.merge for torch tensors."""
    for name, tensors in (("outs", outs), ("lses", lses)):
        for n, x in enumerate(tensors):
            check_tensor(x, f"{name}[{n}]")
    if torch._C._are_functorch_transforms_active():
        return _merge_in_torch(outs, lses, float32)
    return torch.ops.tandem.merge(list(outs), list(lses), float32)


def append_kv(arrays: dict[str, Any], flags: tuple[bool, bool]) -> None:
    """Computes tandem.append_kv for torch tensors, by name in the order of the operator."""
    if torch._C._are_functorch_transforms_active():
        raise Unsupported("append_kv is not served under torch.func's transforms: call it outside of them")
    for name, x in arrays.items():
        if x is None:
            continue
        check_tensor(x, name)
        if not torch.compiler.is_compiling():
            check_layout(x, name)
            if name in WRITTEN_BY_APPEND:
                check_writable(x, name)
        refuse_gradient(x, name, "call under torch.no_grad()")
    refuse_tangents(arrays.values())
    with torch.no_grad():
        torch.ops.tandem.append_kv(*arrays.values(), *flags)


def _merge_in_torch(outs: Sequence[Tensor], lses: Sequence[Tensor], float32: bool) -> tuple[Tensor, Tensor]:
    """Merges by torch's operations, which torch.func transforms."""
    largest = torch.stack([x.detach() for x in lses]).amax(0)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = [torch.exp(x - largest) for x in lses]
    total = sum(weights)
    sees_none = total == 0
    total = torch.where(sees_none, 1.0, total)
    out = 0
    for x, weight in zip(outs, weights):
        column = (weight / total).transpose(-1, -2).unsqueeze(-1)  # (..., seqlen, heads, 1)
        out = out + torch.where(column == 0, 0.0, column * x.to(weight.dtype))
    lse = torch.where(sees_none, -torch.inf, torch.log(total) + largest)
    return out.to(torch.float32 if float32 else outs[0].dtype), lse


# ---- attention_backward ----------------------------------------------------------------------------------------------


def prepare_backward(call_args: CallArgs) -> None:
    """Refuses tensors that attention_backward cannot differentiate, and resolves lazy negations."""
    check_layouts(call_args.items())
    if torch._C._are_functorch_transforms_active():
        raise Unsupported(
            "attention_backward is not served under torch.func's transforms: differentiate tandem.attention there"
        )
    refuse_tangents(call_args.values())
    call_args.update((name, resolved(x)) for name, x in call_args.items() if isinstance(x, Tensor))
    for argument in _score_mod.MODS:
        if (mod := call_args.get(argument)) is not None:
            call_args[argument] = _score_mod.replaced(mod, [resolved(x) for x in _score_mod.tensors_of(mod)])


def check_targets(targets: Iterable[tuple[str, Any]]) -> None:
    for name, x in targets:
        if isinstance(x, Tensor):
            check_writable(x, name)


def serves_backward(call_args: CallArgs) -> bool:
    """Returns True if the C interface computes these gradients without help."""
    q, v = call_args["q"], call_args["v"]
    return _gradients.is_own(q) and not needs_padding(q, v)


def refuse_other_gradients(call_args: CallArgs) -> None:
    if not _gradients.is_own(call_args["q"]):
        _gradients.refuse(call_args)


def other_gradients(
    call_args: CallArgs, wanted: Sequence[bool], targets: Sequence[Any], accumulate: bool
) -> list[Tensor | None]:
    """Computes gradients by torch's operator or with padded tensors, and copies them to the targets."""
    results = []
    for x, target in zip(_gradients.gradients(call_args, wanted), targets):
        if target is None or target is False or x is None:
            results.append(x)
        else:
            results.append(target.add_(x) if accumulate else target.copy_(x))
    return results


def finish_backward(
    call_args: CallArgs, captured: Sequence[Tensor], results: Sequence[Any], targets: Sequence[Any]
) -> list[Any]:
    """Counts the writes to the targets, and refuses second derivatives of new tensors."""
    sources = [x for name, x in call_args.items() if name in (*INPUTS, "out", "lse", "dout", "dlse")]
    sources += captured
    new = [x if target is None else None for x, target in zip(results, targets)]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in sources):
        new = once_differentiable(new, sources)
    for target in targets:
        if isinstance(target, Tensor):
            count_write(target)
    return [x if target is None else y for x, y, target in zip(new, results, targets)]
