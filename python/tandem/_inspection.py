"""tandem.check and tandem.prepare: the path of a call up to its execution."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from tandem import _api, _arrays, _score_mod
from tandem._api import attend, attention, use_torch
from tandem._binding import BACKWARD, CHECK, CHECK_DATA, FORWARD, PREPARE, SERVING, CallArgs, call

# _call_args_of() is attention() with an attend() that returns the arguments. A check thus reads them as a call does,
# and the call costs no more. Another function with attention()'s parameters would cost a call half a microsecond.
_call_args_of = FunctionType(attention.__code__, {**vars(_api), "attend": lambda call_args, return_lse: call_args})
_call_args_of.__kwdefaults__ = attention.__kwdefaults__


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
    if unknown := set(arguments) - set(attention.__kwdefaults__):
        raise TypeError(f"arguments ({sorted(unknown)}) must be arguments of tandem.attention: correct the names")
    call_args = _call_args_of(q, k, v, **arguments)
    if pass_ == "forward":
        attend(call_args, True, what)
    else:
        _inspect_backward(what, call_args)


def _inspect_backward(what: int, call_args: CallArgs) -> None:
    """Checks or prepares attention_backward() of a call's arguments."""
    for name in ("out", "max_scores"):
        call_args.pop(name, None)
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
    call_args["out"], call_args["lse"] = new(call_args["q"], call_args["v"], "float32_out" in call_args)
    if backward:
        call_args.update({"dout": call_args["out"], **{f"d{x}": like(call_args[x]) for x in ("q", "k", "v")}})
        for name in ("bias", "sink"):
            if _arrays.is_floating(x := call_args.get(name)):
                call_args["d" + name] = like(_arrays.view(x, name))
        if captured := _score_mod.tensors_of(call_args.get("score_mod")):
            places = [like(x) if _arrays.wants_gradient(x) else None for x in captured]
            call_args["score_mod"] = _score_mod.replaced(call_args["score_mod"], captured, places)
    call(what + (BACKWARD if backward else FORWARD), call_args)
