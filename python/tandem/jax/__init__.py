"""Attention for JAX: ``tandem.jax.attention`` in the form of ``jax.nn.dot_product_attention`` (docs/jax.md)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(f"jax must be installed for tandem.jax ({error}): run 'pip install jax'") from error
import numpy as np

from tandem import _score_mod
from tandem._arrays import CUDA
from tandem._binding import blocks_of, check_mask, is_float32, window_of
from tandem.jax import _operation
from tandem.jax._check import check, device_type
from tandem.jax._gradients import differentiable
from tandem.jax._operation import Expression, Operation
from tandem.jax._segments import rows_of
from tandem.jax._sharding import in_explicit_mesh

__all__ = ["attention"]

_operation.register()


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    return_residual: bool = False,
    alignment: str = "top_left",
    diagonal_offset: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    segment_ids: Any = None,
    max_segments: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    batch_invariant: bool = False,
    out_dtype: Any = None,
) -> Any:
    """Exact attention, ``softmax(mask(bias + softcap(scale * q k^T))) v``, under jit, grad, vmap, remat and shard_map.

    The arguments before alignment are as in jax.nn.dot_product_attention, without implementation. The rest is as in
    tandem.attention.

    query : (batch, seqlen_q, heads_q, head_dim), (seqlen_q, heads_q, head_dim), or packed with cu_seqlens. The type is
        float32, bfloat16, float16 or, on a CPU, float64; on a GPU bfloat16 or float16.
    key, value : (batch, seqlen_k, heads_k, head_dim) and (batch, seqlen_k, heads_k, head_dim_v). heads_k divides
        heads_q.
    bias : (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), added to the scores.
    mask : booleans of such a shape: True where a query sees a key.
    scale : factor of the products q k^T; None: 1 / sqrt(head_dim).
    is_causal : query i sees no key beyond position i + offset. alignment defines offset.
    query_seq_lengths, key_value_seq_lengths : (batch) int32, used rows. Rows beyond these lengths give 0.
    local_window_size : (left, right) or one number for both; None is unbounded.
    return_residual : also return the logarithm of each softmax's sum, (batch, seqlen_q, heads_q) float32, which has
        gradients.
    alignment : "top_left": offset is 0, as in jax.nn. "bottom_right": offset is seqlen_k - seqlen_q.
    diagonal_offset : the offset itself, an integer or int32 (batch).
    softcap : scores become softcap * tanh(score / softcap); 0: off.
    sink : (heads_q), one more logit in each softmax, without a value.
    alibi_slopes : (heads_q) or (batch, heads_q) float32.
    score_mod, mask_mod : an expression (str) or a tandem.Mod (docs/score_mod.md). A Python number of a Mod is compiled
        in; an array without dimensions may change without a compilation and has a gradient.
    block_mask : a tandem.Blocks.
    segment_ids : (batch, seqlen) integers for packed batches, or (queries' ids, keys' ids). Each run of equal ids is
        one sequence, and a query sees only the keys of its sequence.
    max_segments : the most runs of one row. jax.jit needs it. A row with more runs gives NaN.
    cu_seqlens_q, cu_seqlens_k : (batch + 1) int32: begin and end of the sequences of packed arrays, in rows.
    max_seqlen_q, max_seqlen_k : at least the longest sequence of packed arrays; GPUs need it.
    dropout_p, seed : probability that an entry of the softmax is dropped, and the seed: an integer, a JAX key, or two
        uint32. The same seed as in tandem.attention drops the same entries.
    batch_invariant : a sequence's result does not depend on the rest of the batch.
    out_dtype : float32 gives a float32 result; None: query's type.

    Returns out, like query with head_dim_v, or (out, residual). A row that sees no key gives 0 and -inf.

    Raises ValueError, TypeError or tandem.Unsupported when the call is traced, before anything runs. Second derivatives
    and forward mode are refused.
    """
    check_mask(is_causal, alignment)
    arrays = {"q": query, "k": key, "v": value}
    arrays = {name: _array(x, argument) for (name, x), argument in zip(arrays.items(), ("query", "key", "value"))}
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    is_single = not is_packed and all(x.ndim == 3 for x in arrays.values())
    if is_single:
        arrays = {name: x[None] for name, x in arrays.items()}
    options: dict[str, Any] = {"causal": bool(is_causal), "alignment": alignment}
    bias = _bias_of(bias, mask)
    inputs = {
        "bias": bias, "sink": sink, "alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "seqused_q": query_seq_lengths, "seqused_k": key_value_seq_lengths,
    }  # fmt: skip
    if diagonal_offset is not None:
        inputs.update(_diagonal(diagonal_offset, options))
    if block_mask is not None:
        inputs.update(_blocks(block_mask, options))
    dropout_p = _real(dropout_p, "dropout_p")
    if dropout_p:
        inputs["seed"] = _seed_words(seed)
    arrays.update((name, _array(x, name)) for name, x in inputs.items() if x is not None)
    expressions = _expressions({"score_mod": score_mod, "mask_mod": mask_mod}, arrays)
    served = None
    if segment_ids is not None:
        served = _use_segments(segment_ids, max_segments, arrays, expressions)
        max_seqlen_q, max_seqlen_k = (arrays[name].shape[1] for name in ("q", "k"))
    elif max_segments is not None:
        raise ValueError("max_segments must be left out without segment_ids: pass both or neither")
    if local_window_size is not None:
        options["window"] = _window(local_window_size)
    if scale is not None:
        options["softmax_scale"] = _real(scale, "scale")
    numbers = {"softcap": _real(softcap, "softcap"), "dropout_p": dropout_p}
    options.update((name, x) for name, x in numbers.items() if x)
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    options.update((name, _integer(x, name)) for name, x in lengths.items() if x is not None)
    if batch_invariant:
        options["batch_invariant"] = True
    float32 = frozenset(["out"]) if is_float32(out_dtype) else frozenset()
    outputs = ("out", "lse") if return_residual else ("out",)
    out, *lse = _run(arrays, outputs, options, expressions, float32)
    return _result(out, lse[0] if lse else None, served, is_single)


def _run(
    arrays: dict[str, Any],
    outputs: tuple[str, ...],
    options: dict[str, Any],
    expressions: tuple[Expression, ...],
    float32: frozenset[str],
) -> tuple[Any, ...]:
    """The results of the call, which is checked first."""
    head_dim_v = arrays["v"].shape[-1] if arrays["v"].ndim else 0
    if device_type(list(arrays.values())) == CUDA:
        _pad_rows(arrays, options)
    operation = Operation(False, tuple(arrays), outputs, tuple(options.items()), expressions, float32)
    check(operation, list(arrays.values()))
    out, *lse = in_explicit_mesh(operation, differentiable(operation))(*_same_axes(list(arrays.values())))
    return (out[..., :head_dim_v], *lse)


def _pad_rows(arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """A GPU reads rows in units of 16 bytes. Zeros change no product."""
    head_dim = arrays["q"].shape[-1] if arrays["q"].ndim else 0
    for name in ("q", "k", "v"):
        x = arrays[name]
        if x.ndim >= 3 and x.shape[-1] % 8 != 0:
            arrays[name] = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -x.shape[-1] % 8)))
    if head_dim % 8 != 0:
        options.setdefault("softmax_scale", float(head_dim) ** -0.5)


def _same_axes(arrays: list[Any]) -> list[Any]:
    """Inside jax.shard_map all arrays of a custom call vary over the same axes."""
    axes = frozenset().union(*map(_operation.varying_axes, arrays))

    def varying(x: Any) -> Any:
        missing = tuple(axes - _operation.varying_axes(x))
        if not missing:
            return x
        return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)

    return [varying(x) for x in arrays] if axes else arrays


def _result(out: Any, lse: Any, served: Any, is_single: bool) -> Any:
    """The caller's form of the results. A sequence with too many segments gives NaN."""
    lse = lse if lse is None else jnp.swapaxes(lse, -1, -2)
    if served is not None:
        out = jnp.where(served[:, None, None, None], out, jnp.nan)
        lse = lse if lse is None else jnp.where(served[:, None, None], lse, jnp.nan)
    if is_single:
        out, lse = out[0], lse if lse is None else lse[0]
    return out if lse is None else (out, lse)


# ---- The caller's arguments ----------------------------------------------------------------------------------------


def _array(x: Any, name: str) -> jax.Array:
    if isinstance(x, jax.Array):
        return x
    if not hasattr(x, "__array__"):
        raise TypeError(f"{name} ({type(x).__name__}) must be an array of JAX or numpy: convert it")
    return jnp.asarray(x)


def _bias_of(bias: Any, mask: Any) -> Any:
    """One bias for both arguments. A boolean bias is a mask."""
    given = {"bias": bias, "mask": mask}
    arrays = {name: _array(x, name) for name, x in given.items() if x is not None}
    for name, x in arrays.items():
        if (x.dtype == jnp.bool_) != (name == "mask"):
            kind = "booleans: pass numbers as bias" if name == "mask" else "numbers: pass booleans as mask"
            raise TypeError(f"{name} ({x.dtype.name}) must be {kind}")
        arrays[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if len(arrays) == 2:
        return jnp.where(arrays["mask"], arrays["bias"], -jnp.inf)
    return next(iter(arrays.values()), None)


def _diagonal(diagonal_offset: Any, options: dict[str, Any]) -> dict[str, Any]:
    if options["alignment"] not in ("top_left", "explicit"):
        raise ValueError(
            f"alignment ({options['alignment']!r}) must be left out where diagonal_offset is given: pass only one of "
            "the two"
        )
    options["alignment"] = "explicit"
    if hasattr(diagonal_offset, "shape"):
        return {"diagonal_offsets": diagonal_offset}
    options["diagonal_offset"] = _integer(diagonal_offset, "diagonal_offset")
    return {}


def _blocks(block_mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    found = blocks_of(block_mask)
    options.update((name, found.pop(name)) for name in ("mask_block_q", "mask_block_k"))
    options.update((name, found.pop(name)) for name in ("blocks_of_mask_mod",) if name in found)
    return found


def _seed_words(seed: Any) -> Any:
    """The seed as uint32: two words, or four with the offset."""
    if isinstance(seed, (int, np.integer)):
        number = int(seed) % 2**64
        return np.array([number % 2**32, number >> 32], np.uint32)
    if not hasattr(seed, "dtype"):
        raise ValueError(f"seed ({seed!r}) must be an integer, a key of jax.random, or two uint32: pass one of these")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        low = seed.astype(jnp.uint32)
        return jnp.stack([low, jnp.where(seed < 0, jnp.uint32(2**32 - 1), jnp.uint32(0))])
    if seed.dtype != jnp.uint32 or seed.shape not in ((2,), (4,)):
        raise ValueError(
            f"seed ({seed.dtype} of shape {seed.shape}) must be an integer, a key, or two uint32: convert it"
        )
    return seed


def _expressions(mods: dict[str, Any], arrays: dict[str, Any]) -> tuple[Expression, ...]:
    """The expressions of a call. The arrays of the expressions are added to `arrays`."""
    made = []
    for argument, mod in mods.items():
        if mod is None:
            continue
        if isinstance(mod, str):
            mod = _score_mod.Mod(mod)
        if not isinstance(mod, _score_mod.Mod):
            _score_mod.bound(mod, argument)  # raises
        values = {name: x.item() if isinstance(x, np.generic) else x for name, x in mod.bindings.items()}
        numbers = tuple((name, type(x), x) for name, x in values.items() if _score_mod.is_number(x))
        for name, x in values.items():
            if not _score_mod.is_number(x):
                arrays[f"{argument}.{name}"] = _array(x, f"{argument}.{name}")
        made.append(Expression(argument, mod.text, numbers))
    return tuple(made)


def _use_segments(
    segment_ids: Any, max_segments: Any, arrays: dict[str, Any], expressions: Sequence[Expression]
) -> Any:
    """Adds the rows of the segments to the arrays; see rows_of."""
    excluded = {
        "bias": "bias and mask", "seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths",
        "cu_seqlens_q": "cu_seqlens_q", "cu_seqlens_k": "cu_seqlens_k", "diagonal_offsets": "diagonal_offset",
        "kv_num_blocks": "block_mask",
    }  # fmt: skip
    others = [argument for name, argument in excluded.items() if name in arrays]
    if others:
        raise ValueError(
            f"segment_ids must be passed without {others[0]}, because segments are separate sequences: omit one of them"
        )
    if "alibi_slopes" in arrays and arrays["alibi_slopes"].ndim != 1:
        raise ValueError("alibi_slopes must be (heads_q) with segment_ids: pass the same slopes for all sequences")
    if any(Operation(False, (), (), (), (x,)).mentions("batch") for x in expressions):
        raise ValueError(
            "score_mod and mask_mod must not read batch with segment_ids, because a segment has no batch: omit batch"
        )
    if any(arrays[name].ndim != 4 for name in ("q", "k", "v")):
        raise ValueError("query, key and value must have a batch with segment_ids: add a dimension of 1")
    arrays["rows_q"], arrays["rows_k"], served = rows_of(segment_ids, max_segments, arrays["q"], arrays["k"])
    return served


def _window(local_window_size: Any) -> tuple[int | None, int | None]:
    if isinstance(local_window_size, jax.core.Tracer):
        raise TypeError("local_window_size (an array) must be one or two Python numbers: pass it as a static argument")
    if isinstance(local_window_size, (int, np.integer)):
        return int(local_window_size), int(local_window_size)
    left, right = window_of(local_window_size)
    return tuple(x if x is None else _integer(x, "local_window_size") for x in (left, right))


def _real(x: Any, name: str) -> float:
    if isinstance(x, (str, jax.core.Tracer)) or not hasattr(x, "__float__"):
        raise TypeError(f"{name} ({type(x).__name__}) must be a Python number: pass a number or a static argument")
    return float(x)


def _integer(x: Any, name: str) -> int:
    if isinstance(x, (bool, jax.core.Tracer)) or not hasattr(x, "__index__"):
        raise TypeError(
            f"{name} ({type(x).__name__}) must be an integer of Python: pass an integer or a static argument"
        )
    return operator.index(x)
