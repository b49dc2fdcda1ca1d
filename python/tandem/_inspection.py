"""tandem.check and tandem.prepare: the path of a call up to its execution."""

from __future__ import annotations

from typing import Any

from tandem import _arrays, _score_mod
from tandem._api import attend, attention, use_torch
from tandem._arrays import flag_of
from tandem._binding import (
    BACKWARD,
    CHECK,
    CHECK_DATA,
    FORWARD,
    PREPARE,
    SERVING,
    CallArgs,
    blocks_of,
    call,
    check_mask,
    diagonal_of,
    is_float32,
    number_of,
    seed_of,
    slopes_of,
    window_of,
)
from tandem._options import KINDS, OPTIONS, TENSORS


def check(pass_: str, q: Any, k: Any, v: Any, **arguments: Any) -> None:
    """Raises the error that :func:`attention` (pass_ is "forward") or :func:`attention_backward` ("backward") would
    raise for these arrays and options. Computes nothing. arguments: attention's.
    """
    _inspect(CHECK if _arrays.is_fake(q) else CHECK_DATA, pass_, q, k, v, arguments)


def prepare(pass_: str, q: Any, k: Any, v: Any, *, serving: bool = False, **arguments: Any) -> None:
    """Compiles the kernels of a call ahead, so that its first run may be inside a CUDA graph. Does nothing on the CPU.
    Accepts the arguments of :func:`check`, and raises the same errors, but reads no data.

    serving : compiles every kernel that forwards with these options can choose for any lengths up to the arguments'
        lengths, and the kernel of :func:`append_kv`. Processes that share a cache on disk compile each kernel once.
    """
    if serving and pass_ != "forward":
        raise ValueError(f"pass_ ({pass_!r}) must be 'forward' with serving: pass 'forward'")
    _inspect(SERVING if serving else PREPARE, pass_, q, k, v, arguments)


def _inspect(what: int, pass_: str, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> None:
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_ ({pass_!r}) must be 'forward' or 'backward': pass one of them")
    known = dict(attention.__kwdefaults__ or {})
    if unknown := set(arguments) - set(known):
        raise TypeError(f"arguments ({sorted(unknown)}) must be arguments of tandem.attention: correct the names")
    given = {**known, **arguments, "q": q, "k": k, "v": v}
    offset, out_dtype = given.pop("diagonal_offset"), given.pop("out_dtype")
    call_args: CallArgs = {name: given.get(name) for name in (*TENSORS, "seed", *OPTIONS)}
    call_args.update((name, _score_mod.bound(given[name], name)) for name in _score_mod.MODS if given[name] is not None)
    call_args.update((name, number_of(given[name], name)) for name in ("softmax_scale", "softcap", "dropout_p"))
    call_args["alibi_slopes"] = slopes_of(given["alibi_slopes"])
    call_args.update((name, flag_of(call_args[name], name)) for name in ("deterministic", "batch_invariant"))
    check_mask(call_args["causal"], call_args["alignment"])
    if offset is not None:
        call_args.update(diagonal_of(offset, call_args["alignment"]))
    if given["block_mask"] is not None:
        call_args.update(blocks_of(given["block_mask"]))
    call_args["float32_out"] = is_float32(out_dtype, given["out"])
    if call_args["seed"] is not None:
        call_args["seed"] = seed_of(call_args["seed"], q)
    if call_args["window"] is not None:
        call_args["window"] = window_of(call_args["window"])
    if pass_ == "forward":
        call_args.update((name, given[name]) for name in ("out", "max_scores"))
        attend({name: x for name, x in call_args.items() if not _is_default(name, x)}, True, what)
    else:
        _inspect_backward(what, call_args)


def _is_default(name: str, x: Any) -> bool:
    if KINDS[name] in ("Flag", "OutputOnly", "Real"):
        return not x
    return x is None or (name == "alignment" and x == "bottom_right")


def _inspect_backward(what: int, call_args: CallArgs) -> None:
    """Checks or prepares attention_backward() of a call's arguments."""
    call_args.update((name, _arrays.view(call_args[name], name)) for name in ("q", "k", "v"))
    new, like, backward = _arrays.new_outputs, _arrays.new_gradient, True
    if not _arrays.is_torch(call_args["q"]):
        _arrays.check_foreign((*call_args.items(), *_score_mod.named(call_args).items()))
    else:
        front = use_torch()
        new, like = front.new_outputs, front.new_gradient
        front.prepare_backward(call_args)
        if call_args["q"].is_cuda:
            if not front.serves_backward(call_args):  # by torch's operator, if that serves the call
                front.refuse_other_gradients(call_args)
                backward = False
            call_args.update(zip(("q", "k", "v"), front.padded_qkv(*(call_args[x] for x in ("q", "k", "v")))))
    call_args["out"], call_args["lse"] = new(call_args["q"], call_args["v"], call_args["float32_out"])
    if backward:
        call_args.update({"dout": call_args["out"], **{f"d{x}": like(call_args[x]) for x in ("q", "k", "v")}})
        for name in ("bias", "sink"):
            if _arrays.is_floating(call_args[name]):
                call_args["d" + name] = like(_arrays.view(call_args[name], name))
        if captured := _score_mod.tensors_of(call_args.get("score_mod")):
            places = [like(x) if _arrays.wants_gradient(x) else None for x in captured]
            call_args["score_mod"] = _score_mod.replaced(call_args["score_mod"], captured, places)
    call(what + (BACKWARD if backward else FORWARD), call_args)
