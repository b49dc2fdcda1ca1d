"""Attention of every kind of array. torch tensors go on to _torch_api.py: gradients, operators, torch.compile."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem import _arrays, _score_mod
from tandem._arrays import flag_of
from tandem._binding import (
    BACKWARD,
    FORWARD,
    CallArgs,
    blocks_of,
    call,
    check_mask,
    check_parts,
    diagonal_of,
    is_float32,
    number_of,
    seed_of,
    slopes_of,
    window_of,
)
from tandem._binding import merge as merge_into

_ndarray = np.ndarray
_torch_front: Any = None  # tandem._torch_api, once torch is loaded


class Gradients(NamedTuple):
    """The result of attention_backward.

    A gradient is None if its input is missing or the caller passed False for it.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any
    dscore_mod: dict[str, Any] | None = None  # by name


def use_torch() -> Any:
    """Returns tandem._torch_api if torch is loaded, else None. After that all calls run on torch's threads."""
    global _torch_front
    if _torch_front is None and hasattr(sys.modules.get("torch"), "library"):
        from tandem import _torch_api

        _torch_front = _torch_api
    return _torch_front


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    diagonal_offset: Any = None,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
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
    out_dtype: Any = None,
    max_scores: Any = None,
) -> Any:
    """Exact attention: ``softmax(mask(bias + softcap(softmax_scale * q k^T))) v``. No array holds all scores.

    Arrays are numpy arrays, torch tensors, or any other arrays with ``__dlpack__``. The arrays are read in place, and
    the result has q's kind. torch tensors may lie on a GPU: the call then runs on torch's current stream
    (docs/python.md lists what GPUs serve). torch.compile traces torch tensors. q, k, v, bias, sink and score_mod's
    tensors have gradients on CPUs and GPUs, also through lse. :func:`attention_backward` computes the
    gradients of other arrays.

    q : (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim) with cu_seqlens. The type is
        float32, bfloat16, float16 or float64; on a GPU bfloat16 or float16. A last dimension that is not contiguous is
        copied, with one warning.
    k, v : (batch, seqlen_k, heads_k, head_dim) and (batch, seqlen_k, heads_k, head_dim_v), or packed. heads_k divides
        heads_q: query head h reads key head h // (heads_q // heads_k).
    softmax_scale : factor of the products q k^T; None: 1 / sqrt(head_dim).
    causal : query i sees no key beyond position i + offset.
    alignment : position of the diagonal of causal, window and alibi_slopes. "bottom_right": offset is seqlen_k -
        seqlen_q (the used lengths), and the last query matches the last key. "top_left": offset is 0, and the first
        query matches the first key.
    diagonal_offset : the offset itself, in place of alignment: an integer, or int32 (batch). The offset serves queries
        and keys that are parts of longer sequences: it is the position of the first query minus that of the first key.
    window : (left, right), numbers of keys or None for unbounded: query i sees key j when i + offset - left <= j <= i
        + offset + right.
    softcap : scores become softcap * tanh(score / softcap); 0: off.
    alibi_slopes : (heads_q) or (batch, heads_q) float32; adds -slope * abs(i + offset - j).
    bias : (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1). A floating-point bias, of q's type or float32, is added to the
        scores. A boolean bias is True where a query sees a key. Packed calls accept no bias.
    sink : (heads_q), q's type or float32: one more logit in each softmax, without a value (attention sinks, GPT-OSS).
    score_mod : an expression (str), or a :class:`Mod` with the names it uses, that gives every score a new value, such
        as "30 * tanh(score / 30)". The score_mod applies after softcap, ALiBi and bias; -inf hides a key. Positions
        count from 0 in their sequence.
    mask_mod : an expression or Mod of a bool, such as "k <= q or k < 16": True where a query sees a key. The mask_mod
        hides in addition to causal, window and a boolean bias.
    block_mask : a :class:`Blocks`, or torch's BlockMask, of which only the lists are read: the blocks of queries and
        keys that are visible, in part (as mask_mod shows) or whole. All other blocks are hidden.
    cu_seqlens_q, cu_seqlens_k : (batch + 1) int32: begin and end of the sequences of packed arrays, in rows.
    max_seqlen_q, max_seqlen_k : at least the longest sequence of packed arrays, in rows; GPUs need it.
    seqused_q, seqused_k : (batch) int32: used rows of each sequence; rows beyond give 0.
    page_table : (batch, pages) int32; k and v are then (pages, page_size, heads_k, ...). Forward only.
    dropout_p : probability that an entry of the softmax is dropped, in [0, 1), rounded to a multiple of 1/256, but not
        to 0 or 1. Kept entries are scaled by 1 / (1 - dropout_p).
    seed : seed of the dropout: an integer, or for torch an int64 tensor (seed, offset). None: torch's generator, or
        the system's. attention_backward needs the same seed.
    deterministic : changes nothing in Tandem, whose gradients have the same bits on every run. torch's backward reads
        it if it computes the gradients (docs/python.md).
    batch_invariant : a sequence's result does not depend on the rest of the batch.
    num_splits : splits of the keys that the forward on a GPU computes in parallel and merges in order, at most 1024.
        None or 0: chosen by the sizes. The CPU and the backward do not read it.
    return_lse : also return the logarithm of each softmax's sum.
    out : array to write to, like the result; of q's type or float32.
    out_dtype : float32 gives a float32 result, which :func:`merge` should get; None: q's type.
    max_scores : array to write to, like lse: the largest score that each query sees, as the softmax takes it, without
        the sink; -inf where it sees none. A GPU computes all scores a second time for it.

    Returns out, like q with head_dim_v, or with return_lse (out, lse). lse is a natural logarithm, float32 (float64 for
    float64), (batch, heads_q, seqlen_q) or packed (heads_q, total_q). A row that sees no key gives 0 and -inf.

    Raises ValueError or TypeError for arguments that contradict each other, and tandem.Unsupported for a call that is
    not served, second derivatives and forward-mode derivatives included. Then nothing has been written.

    Method: FlashAttention-4 (arXiv 2603.05451), with FlashAttention-2's interface (arXiv 2307.08691).
    """
    if (causal is not True and causal is not False) or alignment != "bottom_right":
        check_mask(causal, alignment)
    call_args: CallArgs = {"q": q, "k": k, "v": v}
    softcap, dropout_p = number_of(softcap, "softcap"), number_of(dropout_p, "dropout_p")
    # Options with their defaults are omitted, because storing all of them would take half as long as a small call.
    if softmax_scale is not None:
        call_args["softmax_scale"] = number_of(softmax_scale, "softmax_scale")
    if causal:
        call_args["causal"] = causal
    if alignment != "bottom_right":
        call_args["alignment"] = alignment
    if diagonal_offset is not None:
        call_args.update(diagonal_of(diagonal_offset, alignment))
    if window is not None:
        call_args["window"] = window_of(window)
    if softcap:
        call_args["softcap"] = softcap
    if not (bias is sink is alibi_slopes is None):
        call_args.update(_given(bias=bias, sink=sink, alibi_slopes=slopes_of(alibi_slopes)))
    if score_mod is not None:
        call_args["score_mod"] = _score_mod.bound(score_mod, "score_mod")
    if mask_mod is not None:
        call_args["mask_mod"] = _score_mod.bound(mask_mod, "mask_mod")
    if block_mask is not None:
        call_args.update(blocks_of(block_mask))
    if not (cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None):
        call_args |= _given(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        call_args |= _given(seqused_q=seqused_q, seqused_k=seqused_k)
    if not (page_table is max_seqlen_q is max_seqlen_k is None):
        call_args.update(_given(page_table=page_table, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k))
    if dropout_p:
        call_args["dropout_p"] = dropout_p
    if seed is not None:
        call_args["seed"] = seed_of(seed, q)
    if deterministic is not False or batch_invariant is not False:
        call_args["deterministic"] = flag_of(deterministic, "deterministic")
        call_args["batch_invariant"] = flag_of(batch_invariant, "batch_invariant")
    if not (num_splits is max_scores is out is None):
        call_args.update(_given(num_splits=num_splits, max_scores=max_scores, out=out))
    if out_dtype is not None and is_float32(out_dtype, out):
        call_args["float32_out"] = True
    return attend(call_args, return_lse)


def attend(call_args: CallArgs, return_lse: bool, what: int = FORWARD) -> Any:
    """Computes attention() of call_args. Another pass than FORWARD only checks or prepares this call."""
    if type(call_args["q"]) is not _ndarray or _torch_front is None:
        front = use_torch()
        if front is not None and isinstance(call_args["q"], front.Tensor):
            return front.attention(call_args, return_lse, what)
    return _attention_numpy(call_args, return_lse, what)


def _given(**options: Any) -> dict[str, Any]:
    return {name: option for name, option in options.items() if option is not None}


def _attention_numpy(call_args: CallArgs, return_lse: bool, what: int) -> Any:
    """Computes attention() of arrays that are not torch tensors."""
    _arrays.check_foreign((*call_args.items(), *_score_mod.named(call_args).items()))
    given, out = call_args["q"], call_args.get("out")
    q, k, v = given, call_args["k"], call_args["v"]
    if type(q) is not _ndarray or type(k) is not _ndarray or type(v) is not _ndarray:
        q = call_args["q"] = _arrays.view(q, "q")
        call_args["k"] = _arrays.view(k, "k")
        v = call_args["v"] = _arrays.view(v, "v")
    if "dropout_p" in call_args and "seed" not in call_args:
        call_args["seed"] = int.from_bytes(os.urandom(8), "little")
    if out is None:
        result = call_args["out"] = np.empty(
            q.shape[:-1] + v.shape[-1:], np.float32 if call_args.get("float32_out") else q.dtype
        )
    else:
        result = out
        if type(out) is not _ndarray:
            call_args["out"] = _arrays.view(out, "out")
    if "max_scores" in call_args:
        call_args["max_scores"] = _arrays.view(call_args["max_scores"], "max_scores")
    lse = None
    if return_lse:
        lse = call_args["lse"] = _arrays.new_lse(q)
    call(what, call_args)
    if q is not given:
        result = result if out is not None else _arrays.like(given, result)
        lse = lse if lse is None else _arrays.like(given, lse)
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
    causal: bool = False,
    alignment: str = "bottom_right",
    diagonal_offset: Any = None,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
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
    dscore_mod: Any = None,
    accumulate: bool = False,
) -> Gradients:
    """The gradients of :func:`attention`, from its inputs, its out and lse, and the gradients of these.

    dout : like out. dlse : like lse; None: zero.
    dq, dk, dv, dbias, dsink : arrays like the inputs they belong to, of the input's type or float32, to write the
        gradients to. None: a new array. False: the gradient is not computed. Only a floating-point bias and a sink
        have dbias and dsink.
    dscore_mod : a dict by name of arrays, None or False, for the float arrays that score_mod names.
    accumulate : gradients are added in float32 to the arrays given for them, and rounded once.

    All other arguments repeat the forward call's; with dropout, also its seed.

    Returns Gradients(dq, dk, dv, dbias, dsink, dscore_mod), of q's kind; dscore_mod is a dict by name.
    Raises as attention does. A gradient that autograd tracks has no derivative: evaluating it raises
    tandem.Unsupported.
    """
    check_mask(causal, alignment)
    dropout_p = number_of(dropout_p, "dropout_p")
    if dropout_p and seed is None:
        raise ValueError("seed (None) must be the forward call's seed, so that dropout hides the same scores: pass it")
    call_args: CallArgs = {
        "q": _arrays.view(q, "q"),
        "k": _arrays.view(k, "k"),
        "v": _arrays.view(v, "v"),
        "bias": bias if bias is None else _arrays.view(bias, "bias"),
        "sink": sink if sink is None else _arrays.view(sink, "sink"),
        "alibi_slopes": alibi_slopes,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "page_table": page_table,
        "seed": seed if seed is None else seed_of(seed, q),
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": number_of(softmax_scale, "softmax_scale"),
        "softcap": number_of(softcap, "softcap"),
        "causal": causal,
        "alignment": alignment,
        "window": window if window is None else window_of(window),
        "dropout_p": dropout_p,
        "deterministic": flag_of(deterministic, "deterministic"),
        "batch_invariant": flag_of(batch_invariant, "batch_invariant"),
        "out": _arrays.view(out, "out"),
        "lse": _arrays.view(lse, "lse"),
        "dout": _arrays.view(dout, "dout"),
        "dlse": dlse,
        "score_mod": score_mod if score_mod is None else _score_mod.bound(score_mod, "score_mod"),
        "mask_mod": mask_mod if mask_mod is None else _score_mod.bound(mask_mod, "mask_mod"),
    }
    if diagonal_offset is not None:
        call_args.update(diagonal_of(diagonal_offset, alignment))
    if block_mask is not None:
        call_args.update(blocks_of(block_mask))
    targets = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsink": dsink}
    return _backward(call_args, targets, dscore_mod, accumulate)


def _backward(call_args: CallArgs, targets: dict[str, Any], dscore_mod: Any, accumulate: bool) -> Gradients:
    """attention_backward() of a call's arguments, with out, lse and dout. targets: the caller's argument for each
    gradient."""
    front = use_torch() if _arrays.is_torch(call_args["q"]) else None
    if front is not None:
        front.prepare_backward(call_args)
    else:
        _arrays.check_foreign((*call_args.items(), *targets.items(), *_score_mod.named(call_args).items()))
    # A mask has no gradient.
    inputs = {name: call_args[name[1:]] for name in targets}
    captured = {name: x for name, x in _score_mod.named(call_args).items() if name.startswith("score_mod.")}
    inputs.update(captured)
    targets = {**targets, **_captured_targets(dscore_mod, captured)}
    for name in ("dbias", *captured):
        if not _arrays.is_floating(inputs[name]):
            inputs[name] = None
    for name, needed in (("dbias", "a floating-point bias"), ("dsink", "a sink")):
        if inputs[name] is None and targets[name] is not None and targets[name] is not False:
            raise ValueError(f"{name} must be None without {needed}: omit {name}, or pass {needed}")
    wanted = {name: x is not None and targets[name] is not False for name, x in inputs.items()}
    if front is not None:
        front.check_targets((name, targets[name]) for name, w in wanted.items() if w)
    if front is not None and not front.serves_backward(call_args):
        results = front.other_gradients(call_args, list(wanted.values()), list(targets.values()), accumulate)
        return _gradients_of(results, captured)
    new = _arrays.new_gradient if front is None else front.new_gradient
    written = dict.fromkeys(targets)
    for name, x in inputs.items():
        if wanted[name]:
            written[name] = new(x) if targets[name] is None else _arrays.view(targets[name], name)
            if accumulate and targets[name] is None:
                written[name][...] = 0
            if name not in captured:
                call_args[name] = written[name]
    if captured:
        places = [written[name] for name in captured]
        call_args["score_mod"] = _score_mod.replaced(call_args["score_mod"], list(captured.values()), places)
    call_args["accumulate"] = accumulate
    call(BACKWARD, call_args)
    results = [_gradient(written[name], target, call_args["q"]) for name, target in targets.items()]
    if front is not None:
        results = front.finish_backward(call_args, list(captured.values()), results, list(targets.values()))
    return _gradients_of(results, captured)


def _captured_targets(dscore_mod: Any, captured: dict[str, Any]) -> dict[str, Any]:
    """Returns the caller's target for the gradient of every tensor of score_mod."""
    if dscore_mod is None or dscore_mod is False:
        return dict.fromkeys(captured, dscore_mod)
    targets = {f"score_mod.{name}": target for name, target in dscore_mod.items()}
    for name in targets:
        if not _arrays.is_floating(captured.get(name)):
            raise ValueError(
                f"dscore_mod ({name.partition('.')[2]!r}) must have names of score_mod's float arrays: omit this name"
            )
    return {name: targets.get(name) for name in captured}


def _gradients_of(found: Sequence[Any], captured: dict[str, Any]) -> Gradients:
    """found: gradients of q, k, v, bias and sink, then of the tensors that score_mod names."""
    names = (name.partition(".")[2] for name in captured)
    return Gradients(*found[:5], dict(zip(names, found[5:])) if captured else None)


def _gradient(result: Any, target: Any, q: Any) -> Any:
    """Returns the gradient: the caller's array, or an array of q's kind."""
    if target is not None and target is not False:
        return target
    return result if result is None or _arrays.is_torch(result) else _arrays.like(q, result)


def merge(outs: Sequence[Any], lses: Sequence[Any], *, out_dtype: Any = None) -> Any:
    """Attention to all keys from attention to parts of them, with its lse.

    outs, lses : results of :func:`attention` with return_lse, for the same queries and each part of the keys. An out
        is (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim), of float32, bfloat16 or float16 (or all
        of float64); float32 is best (out_dtype of :func:`attention`). An lse is (batch, heads, seqlen) or packed
        (heads, total).
    out_dtype : float32, or None for the type of the first of outs.

    Returns (out, lse). A part whose lse is -inf weighs nothing. A sink belongs to the whole softmax: pass it to the
    attention of one part only. torch tensors have gradients.

    Raises ValueError or TypeError for parts that do not belong together.
    """
    check_parts(outs, lses)
    float32 = is_float32(out_dtype)
    front = use_torch()
    if front is not None and isinstance(outs[0], front.Tensor):
        return front.merge(outs, lses, float32)
    _arrays.check_foreign((f"outs[{n}]", x) for n, x in enumerate(outs))
    _arrays.check_foreign((f"lses[{n}]", x) for n, x in enumerate(lses))
    views = [_arrays.view(x, f"outs[{n}]") for n, x in enumerate(outs)]
    lse_views = [_arrays.view(x, f"lses[{n}]") for n, x in enumerate(lses)]
    out = np.empty(views[0].shape, np.float32 if float32 else views[0].dtype)
    lse = _arrays.new_lse(views[0])
    merge_into(views, lse_views, out, lse)
    return _arrays.like(outs[0], out), _arrays.like(lses[0], lse)
