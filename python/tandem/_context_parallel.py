"""Attention over the ranks of a torch process group, with gradients. The library executes the plan."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem import _arrays, _ctypes, _gradients, _options, _score_mod
from tandem._binding import number_of, seed_of, slopes_of
from tandem._context_choice import Shapes, chosen
from tandem._context_copies import is_served
from tandem._context_plan import ContextPlan
from tandem._context_torch_call import TorchCall
from tandem._context_transport import GroupTransport, TransportStruct, checked_group, transport_of
from tandem._derivatives import once_differentiable, refuse_forward, refuse_tangents
from tandem._errors import Unsupported, error_of
from tandem._padding import padded_qkv
from tandem._tensors import check_layout, check_tensor, resolved

EXECUTIONS = {"gather": 0, "ring": 1, "heads": 2}


class _Args(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_int64),
        ("plan", ctypes.c_void_p),
        ("transport", ctypes.POINTER(TransportStruct)),
        ("execution", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("attention", ctypes.POINTER(_ctypes._Args)),
    ]


_library = _ctypes.library()
_library.tandem_cp_forward.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Args)]
_library.tandem_cp_backward.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Args)]


class _Call:
    """The plan, the transport and the options of a call, for both passes. options: call_args of _binding.py."""

    def __init__(self, plan: ContextPlan, transport: GroupTransport, execution: str, options: dict[str, Any]) -> None:
        self.plan, self.transport, self.options = plan, transport, options
        self.execution = EXECUTIONS[execution]

    def run(self, function: Any, tensors: dict[str, Tensor | None]) -> None:
        attention = _ctypes._Args(size=ctypes.sizeof(_ctypes._Args))
        for name, x in {**self.options, **tensors}.items():
            if x is None:
                continue
            if name == "seed":
                if not _ctypes._set_seed(attention, x):
                    raise ValueError(f"seed (shape {tuple(x.shape)}) must be an integer or two int64: pass the seed")
            elif name in _score_mod.MODS:
                setattr(attention, name, ctypes.pointer(_ctypes._mod_of(x, name, True)))
            elif _options.KINDS[name] == "Tensor":
                setattr(attention, name, ctypes.pointer(_ctypes._tensor_of(_arrays.describe(x, name))))
            else:
                _ctypes._set_option(attention, name, x)
        args = _Args(ctypes.sizeof(_Args), self.plan.handle, ctypes.pointer(self.transport.struct), self.execution)
        args.attention = ctypes.pointer(attention)
        status = function(_ctypes._context(), args)
        failure = self.transport.take_failure()
        if status != 0:
            raise failure or self._error(status, tensors)

    def forward(self, tensors: dict[str, Any], sink: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns out, lse, and no further tensors that the backward needs. tensors: q, k, v and bias."""
        q, v = tensors["q"], tensors["v"]
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = torch.empty(q.shape[1::-1], dtype=torch.float32)
        self.run(_library.tandem_cp_forward, {**tensors, "sink": sink, "out": out, "lse": lse})
        return out, lse, []

    def backward(
        self, tensors: dict[str, Any], sink: Tensor | None, dbias: Tensor | None, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Returns the gradients of q, k, v, sink and the wanted tensors of score_mod, and fills in dbias. tensors: as
        forward(), and out, lse, dout and dlse.
        """
        gradients = [_gradients.like(tensors[name]) for name in ("q", "k", "v")]
        dsink = None if sink is None else torch.empty_like(sink)
        outputs = {**dict(zip(("dq", "dk", "dv"), gradients)), "sink": sink, "dsink": dsink, "dbias": dbias}
        captured = _score_mod.tensors_of(self.options.get("score_mod"))
        places = [_gradients.like(x) if w else None for x, w in zip(captured, wanted)]
        if captured:
            outputs["score_mod"] = _score_mod.replaced(self.options["score_mod"], captured, places)
        self.run(_library.tandem_cp_backward, {**tensors, **outputs})
        return [*gradients, dsink, *places]

    def _error(self, status: int, tensors: dict[str, Any]) -> Exception:
        sentence = _ctypes.last_error().replace("attention.", "")
        return error_of(status, sentence, {**tensors, **_score_mod.named(self.options)})


def _compact(x: Tensor | None) -> Tensor | None:
    """Returns x with a contiguous last dimension."""
    x = resolved(x)
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call | TorchCall, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """tensors: q, k, v, sink, bias and the tensors of score_mod, which the call's options have too."""
        q, k, v, sink, bias, *_ = tensors
        q, k, v, bias = (_compact(x) for x in (q, k, v, bias))
        out, lse, kept = call.forward({"q": q, "k": k, "v": v, "bias": bias}, sink)
        ctx.call, ctx.kept = call, len(kept)
        # autograd then refuses a backward after a write to one of the options, such as alibi_slopes.
        others = [x for x in call.options.values() if isinstance(x, Tensor)]
        others += [x for x in _score_mod.named(call.options).values() if isinstance(x, Tensor)]
        qkv = (None, None, None) if kept else (q, k, v)
        ctx.save_for_backward(*qkv, sink, bias, out, lse, *kept, *others)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, bias, out, lse, *kept = ctx.saved_tensors
        # Ranks must agree on the outputs of the call, so that every rank computes all gradients.
        dout = torch.zeros_like(out) if dout is None else _compact(dout)
        if dlse is not None or isinstance(ctx.call, _Call):
            dlse = torch.zeros_like(lse) if dlse is None else resolved(dlse)
        tensors = {"q": q, "k": k, "v": v, "bias": bias, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
        if ctx.kept:
            tensors["kept"] = kept[: ctx.kept]
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if ctx.needs_input_grad[5] else None
        gradients = ctx.call.backward(tensors, sink, dbias, ctx.needs_input_grad[6:])
        gradients.insert(4, dbias)
        captured = [x for x in _score_mod.tensors_of(ctx.call.options.get("score_mod")) if isinstance(x, Tensor)]
        sources = (q, k, v) if q is not None else ctx.call.sources
        return None, *once_differentiable(gradients, (*sources, sink, bias, *captured, dout, dlse))

    jvp = staticmethod(refuse_forward)


def _bound(mod: Any, name: str) -> _score_mod.Bound:
    bound = _score_mod.bound(mod, name)
    tensors = _score_mod.tensors_of(bound)
    if name == "mask_mod" and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise Unsupported("mask_mod's tensors must not require gradients in context_parallel: detach the tensors")
    return _score_mod.replaced(bound, [resolved(x) for x in tensors])


def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: ContextPlan,
    group: Any = None,
    execution: str = "gather",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention over all tokens of the plan, of which each rank of the group has a shard. All ranks call together.

    q, k, v : the rank's rows, (rows, heads, head_dim), as plan.shard() returns them: CPU tensors of float32, bfloat16
        or float16, or CUDA tensors of bfloat16 or float16. The mask is the plan's.
    group : a torch process group with a backend for the tensors' device, gloo or nccl; None: the default group.
    execution : "gather" receives all needed keys at once, "ring" the keys of one rank after the other, and "heads"
        exchanges tokens for heads. "auto" chooses the one with the shortest time that a model predicts for two H200.
        All ranks pass the same one.
    softmax_scale, softcap, alibi_slopes, sink : as :func:`tandem.attention`. alibi_slopes: (heads_q) or (documents,
        heads_q). sink is whole on every rank, and so is its gradient: do not sum it over the ranks again.
    bias : (heads_q or 1, rows, keys), float32, bool or q's dtype: the rows of the rank's queries, with a column for
        each position of a key in its document. All ranks pass equal numbers of columns, at least the longest
        document's keys. The gradient has the same shape; columns beyond a document's keys are 0.
    score_mod, mask_mod, dropout_p, seed : as :func:`tandem.attention`, with positions in the plan's documents. All
        ranks pass the same ones. With dropout seed is required, and the dropped entries are the same as on one rank.
        Tensors of expressions are whole on every rank, and so are the gradients of score_mod's tensors: do not sum them
        over the ranks again.
    return_lse : also return the logarithm of each softmax's sum, (heads_q, rows) float32.

    q, k, v, bias, sink and score_mod's tensors have gradients. All ranks run the backward, in the same order. The first
    call with a plan, shapes and options compares them between the ranks, and a difference is an error on all ranks. An
    error of the group, such as a lost rank, is raised as torch raises it.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan ({type(plan).__name__}) must be a tandem.ContextPlan: create one on every rank")
    if execution != "auto" and execution not in EXECUTIONS:
        raise ValueError(f"execution ({execution!r}) must be one of {', '.join(EXECUTIONS)}, auto: choose one of them")
    tensors = {"q": q, "k": k, "v": v, "sink": sink, "alibi_slopes": alibi_slopes, "bias": bias}
    _check_tensors(tensors)
    if execution == "auto":
        execution = _chosen(plan, group, tensors)
    refuse_tangents(tensors.values())
    if torch._C._are_functorch_transforms_active():
        raise Unsupported("context_parallel is not served under torch.func's transforms: call it outside of them")
    numbers = {"softcap": softcap, "softmax_scale": softmax_scale, "dropout_p": dropout_p}
    options: dict[str, Any] = {name: number_of(x, name) for name, x in numbers.items()}
    options["alibi_slopes"] = resolved(slopes_of(alibi_slopes))
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None:
            options[name] = _bound(mod, name)
    refuse_tangents(_score_mod.named(options).values())
    if dropout_p:
        if seed is None:
            raise ValueError("seed (None) must be an integer or two with dropout_p: pass the same seed on all ranks")
        options["seed"] = seed_of(seed, q)
    if q.is_cuda:
        out, lse = _on_tensors(plan, group, execution, options, tensors)
    else:
        call = _Call(plan, transport_of(group), execution, options)
        captured = _score_mod.tensors_of(options.get("score_mod"))
        out, lse = _ContextParallel.apply(call, q, k, v, resolved(sink), resolved(bias), *captured)
    return (out, lse) if return_lse else out


def _chosen(plan: ContextPlan, group: Any, tensors: dict[str, Any]) -> str:
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    if q.dim() != 3 or 0 in (q.shape[1], k.shape[1]) or q.shape[1] % k.shape[1] != 0:
        return "gather"  # refuses the call with a sentence
    has_copies = False
    if q.is_cuda and plan.chunk == 0 and tensors["bias"] is None and plan.blocks is None:
        has_copies = is_served(checked_group(group, "cuda"), q.device)
    shapes = Shapes(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())
    return chosen(plan, shapes, has_copies)


def _check_tensors(tensors: dict[str, Any]) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        check_tensor(x, name)
        check_layout(x, name)
        device = tensors["q"].device
        if x.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"{name} ({x.device}) must be on a CPU or a GPU of CUDA: move the tensor")
        if x.device != device:
            raise ValueError(f"{name} ({x.device}) must be on q's device, {device}: move the tensor")
        form = "(heads, rows, keys)" if name == "bias" else "(rows, heads, head_dim)"
        if name in ("q", "k", "v", "bias") and x.dim() != 3:
            raise ValueError(f"{name} ({x.dim()} dimensions) must be {form}: pass the rank's shard")


def _on_tensors(
    plan: ContextPlan, group: Any, execution: str, options: dict[str, Any], tensors: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Computes out and lse by calls of attention on torch tensors. Head dims are padded to multiples of 8."""
    for name in _score_mod.MODS:
        for x in _score_mod.tensors_of(options.get(name)):
            if x.device != tensors["q"].device:
                raise ValueError(f"{name}'s tensors ({x.device}) must be on q's device: move the tensors")
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    group = checked_group(group, q.device.type)
    if dist.get_world_size(group) != plan.ranks:
        raise ValueError(
            f"group ({dist.get_world_size(group)} ranks) must have the {plan.ranks} ranks of the plan: create the plan "
            "for this group"
        )
    if options["softmax_scale"] is None and q.shape[-1] > 0:
        options["softmax_scale"] = q.shape[-1] ** -0.5
    padded = padded_qkv(q, k, v) if q.is_cuda else (q, k, v)
    sink = resolved(tensors["sink"])
    call = TorchCall(plan, dist.get_rank(group), group if plan.ranks > 1 else None, execution, options)
    bias = resolved(tensors["bias"])
    inputs = dict(zip(("q", "k", "v"), padded), sink=sink, alibi_slopes=options["alibi_slopes"], bias=bias)
    captured = _score_mod.tensors_of(options.get("score_mod"))
    differentiable = [*inputs.values(), *captured]
    call.agree(inputs, torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable))
    if call.by_heads:
        # The backward then needs no q, k and v. These tensors without rows keep the connection to their graphs.
        call.sources = [x[:0].clone() for x in padded]
    out, lse = _ContextParallel.apply(call, *padded, sink, bias, *captured)
    return out[..., : v.shape[-1]], lse
