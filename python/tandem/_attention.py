"""The native call, for every kind of array. torch tensors go on to _torch.py: gradients, operators, torch.compile."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem import _arrays
from tandem._library import BACKWARD, CHECK, FORWARD, PREPARE, call, options, seed_parts

_ndarray = np.ndarray
_torch_front: Any = None  # tandem._torch, once torch is loaded


class Gradients(NamedTuple):
    """What attention_backward returns; None where there is nothing or it was not wanted."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any


def use_torch() -> Any:
    """tandem._torch where torch is loaded, else None. From then on all calls run on torch's threads."""
    global _torch_front
    if _torch_front is None and hasattr(sys.modules.get("torch"), "library"):
        from tandem import _torch

        _torch_front = _torch
    return _torch_front


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Exact attention: ``softmax(mask(bias + softcap(softmax_scale * q k^T))) v``, never holding all scores.

    Arrays are numpy arrays, torch tensors, or of any kind that speaks DLPack; they are read where they lie, and the
    result is of q's kind. torch tensors may lie on a GPU, and the call then runs there, on torch's current stream
    (docs/python.md says what is served). torch tensors have gradients (q, k, v, bias, sink, also through the LSE) and
    may be traced by torch.compile; numpy's are had from :func:`attention_backward`.

    q : (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim) with cu_seqlens. float32, bfloat16,
        float16 or float64, on a GPU bfloat16 or float16; any strides with a contiguous last dimension (another is
        copied, which is said once).
    k, v : (batch, seqlen_k, heads_k, head_dim) and (batch, seqlen_k, heads_k, head_dim_v), or packed. heads_k divides
        heads_q: query head h reads key head h // (heads_q // heads_k).
    softmax_scale : what the products are multiplied by; None: 1 / sqrt(head_dim).
    causal : False; True: the last query meets the last key (bottom-right); "top_left": the first meets the first.
    window : (left, right), numbers of keys or None for unbounded: query i sees key j when
        i + offset - left <= j <= i + offset + right, where offset is seqlen_k - seqlen_q, or 0 with "top_left".
    softcap : scores become softcap * tanh(score / softcap); 0: off.
    alibi_slopes : (heads_q) or (batch, heads_q) float32; adds -slope * abs(i + offset - j).
    bias : (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1); of q's type or float32: added to the scores; boolean: True
        where a query sees a key. Not for packed calls.
    sink : (heads_q), q's type or float32: one more logit in each softmax, with no value (attention sinks, GPT-OSS).
    cu_seqlens_q, cu_seqlens_k : (batch + 1) int32: where the sequences of packed arrays begin and end.
    max_seqlen_q, max_seqlen_k : at least the longest sequence of packed arrays; needed on GPUs.
    seqused_q, seqused_k : (batch) int32: how much of each sequence is used; rows beyond give 0.
    page_table : (batch, pages) int32; k and v are then (pages, page_size, heads_k, ...). Not served yet.
    dropout_p : probability that an entry of the softmax is dropped, in [0, 1).
    seed : of the dropout: an integer, or for torch an int64 tensor (seed, offset). None: torch's generator, or the
        system's. Give it when you call attention_backward yourself.
    deterministic : the backward is reproducible bit for bit (on the CPU it always is).
    batch_invariant : a sequence's result depends on nothing else in the batch.
    num_splits : of long keys for few queries; None: chosen for the device.
    return_lse : also return the logarithm of each softmax's sum.
    out : array to write to, like the result.

    Returns out, like q with head_dim_v; with return_lse (out, lse): lse is float32 (float64 for float64), natural
    logarithm, (batch, heads_q, seqlen_q) or packed (heads_q, total_q). A row that sees no key gives 0 and -inf.

    Raises ValueError or TypeError for a call that contradicts itself, tandem.Unsupported for one that is not served;
    then nothing has been written.

    Method: FlashAttention-4 (arXiv 2603.05451), with FlashAttention-2's interface (arXiv 2307.08691).
    """
    if type(q) is not _ndarray or _torch_front is None:
        front = use_torch()
        if front is not None and isinstance(q, front.Tensor):
            return front.attention(
                q, k, v, bias, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, seed,
                max_seqlen_q, max_seqlen_k, softmax_scale, softcap, causal, window, dropout_p, deterministic,
                batch_invariant, num_splits, return_lse, out,
            )  # fmt: skip
    original = q
    if type(q) is not _ndarray or type(k) is not _ndarray or type(v) is not _ndarray:
        q, k, v = _arrays.view(q, "q"), _arrays.view(k, "k"), _arrays.view(v, "v")
    if dropout_p and seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    seed_numbers, seed_array = seed_parts(seed)
    result = np.empty(q.shape[:-1] + v.shape[-1:], q.dtype) if out is None else _arrays.view(out, "out")
    lse = _new_lse(q) if return_lse else None
    call(
        FORWARD,
        (
            q, k, v, result, lse, None, None, None, None, None, bias, None, sink, None, alibi_slopes, cu_seqlens_q,
            cu_seqlens_k, seqused_q, seqused_k, page_table, seed_array,
        ),
        options(
            softmax_scale, causal, window, softcap, max_seqlen_q, max_seqlen_k, dropout_p, seed_numbers, deterministic,
            batch_invariant, num_splits,
        ),
    )  # fmt: skip
    if type(original) is not _ndarray:
        result = out if out is not None else _arrays.like(original, result)
        lse = None if lse is None else _arrays.like(original, lse)
    elif out is not None:
        result = out
    return (result, lse) if return_lse else result


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    dsink: Any = None,
) -> Gradients:
    """The gradients of :func:`attention`, from its inputs, its out and lse, and the gradients of these.

    dout : like out. dlse : like lse; None: zero.
    dq, dk, dv, dbias, dsink : each an array like the input it belongs to, to write the gradient to; None: a new one;
        False: not wanted. dbias and dsink are there for a floating-point bias and a sink only.
    The other arguments are those of the forward call; with dropout, its seed.

    Returns Gradients(dq, dk, dv, dbias, dsink), of q's kind; None where there is nothing or it was not wanted.
    Raises as attention does. Deterministic on the CPU.
    """
    if dropout_p and seed is None:
        raise ValueError(
            "seed (None) must be that of the forward call: its dropout decides which entries have gradients"
        )
    seed_numbers, seed_array = seed_parts(seed)
    on_torch = _arrays.is_torch(q)
    new = use_torch().gradient_like if on_torch else _new_gradient
    views = [_arrays.view(x, n) for x, n in zip((q, k, v, out, lse, dout), ("q", "k", "v", "out", "lse", "dout"))]
    bias = None if bias is None else _arrays.view(bias, "bias")
    sink = None if sink is None else _arrays.view(sink, "sink")
    with_gradient = (*views[:3], bias if _is_floating(bias) else None, sink)
    given = (dq, dk, dv, dbias, dsink)
    rest = (alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, seed_array)
    opts = options(
        softmax_scale, causal, window, softcap, max_seqlen_q, max_seqlen_k, dropout_p, seed_numbers, deterministic,
        batch_invariant, None,
    )  # fmt: skip
    if on_torch and q.is_cuda:
        wanted = [x is not None and target is not False for x, target in zip(with_gradient, given)]
        found = use_torch().gradients_on_gpu(dout, dlse, out, lse, (q, k, v, bias, sink, *rest), opts, wanted)
        pairs = zip(found, given)
        return Gradients(*(x if target is None or x is None else target.copy_(x) for x, target in pairs))
    results: list[Any] = []
    for x, target, name in zip(with_gradient, given, Gradients._fields):
        if x is None or target is False:
            results.append(None)
        else:
            results.append(new(x) if target is None else _arrays.view(target, name))
    call(
        BACKWARD,
        (*views, dlse, results[0], results[1], results[2], bias, results[3], sink, results[4], *rest),
        opts,
    )
    if not on_torch:
        results = [_arrays.like(q, x) if x is not None and target is None else x for x, target in zip(results, given)]
    return Gradients(*(r if target is None or target is False else target for r, target in zip(results, given)))


def check(pass_: str, q: Any, k: Any, v: Any, **arguments: Any) -> None:
    """Raises what :func:`attention` ("forward") or :func:`attention_backward` ("backward") would raise for these arrays
    and options, and computes nothing. arguments: attention's."""
    _inspect(CHECK, pass_, q, k, v, arguments)


def prepare(pass_: str, q: Any, k: Any, v: Any, **arguments: Any) -> None:
    """Compiles ahead what such a call needs, so that it may come first inside a CUDA graph; nothing on the CPU. Takes
    what :func:`check` takes, and raises what it raises."""
    _inspect(PREPARE, pass_, q, k, v, arguments)


def _inspect(what: int, pass_: str, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> None:
    known: dict[str, Any] = dict(attention.__kwdefaults__ or {})
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_ ({pass_!r}) must be 'forward' or 'backward'")
    if unknown := set(arguments) - set(known):
        raise TypeError(f"{sorted(unknown)} are no arguments of tandem.attention")
    a = {**known, **arguments}
    q, k, v = _arrays.view(q, "q"), _arrays.view(k, "k"), _arrays.view(v, "v")
    backward = pass_ == "backward"
    seed_numbers, seed_array = seed_parts(a["seed"])
    rest = (
        a["alibi_slopes"], a["cu_seqlens_q"], a["cu_seqlens_k"], a["seqused_q"], a["seqused_k"], a["page_table"],
        seed_array,
    )  # fmt: skip
    opts = options(
        a["softmax_scale"], a["causal"], a["window"], a["softcap"], a["max_seqlen_q"], a["max_seqlen_k"],
        a["dropout_p"], seed_numbers, a["deterministic"], a["batch_invariant"], a["num_splits"],
    )  # fmt: skip
    new = _new_outputs
    if _arrays.is_torch(q):
        front = use_torch()
        new = front.new_outputs
        if q.is_cuda:
            if backward:  # served by another, where it is
                front.refuse_gradients_on_gpu((q, k, v, a["bias"], a["sink"], *rest), opts)
                backward = False
            q, k, v = front.padded(q, k, v)
    out, lse = new(q, v)
    gradients = (out, None, q, k, v) if backward else (None,) * 5
    call(
        what + (BACKWARD if backward else FORWARD),
        (q, k, v, out, lse, *gradients, a["bias"], None, a["sink"], None, *rest),
        opts,
    )


def _new_lse(q: np.ndarray) -> np.ndarray:
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    shape = q.shape
    if len(shape) == 4:
        return np.empty((shape[0], shape[2], shape[1]), dtype)
    return np.empty(shape[1::-1], dtype)


def _new_outputs(q: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(q.shape[:-1] + v.shape[-1:], q.dtype), _new_lse(q)


def _new_gradient(x: np.ndarray) -> np.ndarray:
    return np.empty(x.shape, x.dtype)


def _is_floating(x: Any) -> bool:
    if x is None:
        return False
    return x.is_floating_point() if _arrays.is_torch(x) else x.dtype.kind not in "b?iu"
