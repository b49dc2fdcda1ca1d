"""Tandem as an attention implementation of Hugging Face transformers.

    import tandem.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tandem")

Importing this module registers the name "tandem" with transformers' AttentionInterface and AttentionMaskInterface. The
name then also works wherever transformers is used underneath, as in sentence-transformers
(``model_kwargs={"attn_implementation": "tandem"}``).

A mask made of causality, a window, padding and packed sequences is never built. Once per forward pass such a mask
becomes a few options of `tandem.attention`, which every layer then uses. Any other mask (prefix-LM, image tokens that
see each other, chunks) is served as the boolean array that transformers builds for scaled_dot_product_attention.

``model.generate_batch`` (continuous batching) keeps the name "tandem". The requests run as packed sequences, on keys
and values that transformers reads from its paged cache.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
import transformers
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, masking_utils
from transformers.utils import logging

import tandem
from tandem._torch_api import attention_heads_first
from tandem.compat import _transformers_dispatch
from tandem.compat._arguments import in_words, sink_for
from tandem.compat.flex import BlockMask, mask_of

__all__ = ["CompactMask", "tandem_attention", "tandem_mask"]

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 4):
    raise ImportError(
        f"transformers is {transformers.__version__} and must be 5.4 or later, whose mask functions have the queries' "
        "places: upgrade it with 'pip install -U transformers'"
    )

logger = logging.get_logger(__name__)

# Our arguments' names in this interface.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "bias": "attention_mask",
    "sink": "s_aux",
    "softmax_scale": "scaling",
    "dropout_p": "dropout",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k",
}

Options = dict[str, Any]  # keyword arguments of tandem.attention

_IS_OWN = "_is_mask_of_tandem"  # attribute of traced arrays of tandem_mask


class CompactMask(torch.Tensor):
    """A (batch, 1, seqlen_q, seqlen_k) boolean mask kept as options of `tandem.attention` instead of an array.

    All code except `tandem_attention` can use this mask as the array. The first torch operation builds the array, which
    then replaces the options.
    """

    options: Optional[Options]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape, device, options: Options, build: Callable[[], torch.Tensor]):
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.options, mask._build, mask._whole = options, build, None
        return mask

    def whole(self) -> torch.Tensor:
        """Returns the array, which the first call builds."""
        if self._whole is None:
            # The caller may write to the array, which the options then do not describe.
            self._whole, self.options = self._build(), None
        return self._whole

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self):
        return f"CompactMask({tuple(self.shape)}, {self.options})"


class _Pattern(NamedTuple):
    """Query i sees key j if i - left <= j <= i + right (None: unbounded) and both belong to one segment, if any."""

    left: Optional[int] = None
    right: Optional[int] = None
    segments: Optional[torch.Tensor] = None  # (batch, seqlen): one number per packed sequence


def _intersection(a: Optional[_Pattern], b: Optional[_Pattern]) -> Optional[_Pattern]:
    if a is None or b is None or (a.segments is not None and b.segments is not None):
        return None
    left = min((x for x in (a.left, b.left) if x is not None), default=None)
    right = min((x for x in (a.right, b.right) if x is not None), default=None)
    return _Pattern(left, right, b.segments if a.segments is None else a.segments)


def _pattern(mask_function: Callable) -> Optional[_Pattern]:
    """Returns the pattern of a mask function that transformers composed of its parts; None for other functions.

    A mask function is a closure without a description, so that its parts are recognised by their names and captured
    values. An unknown part costs an array and is never misread.
    """
    if not isinstance(mask_function, types.FunctionType) or mask_function.__module__ != masking_utils.__name__:
        return None
    if mask_function is masking_utils.causal_mask_function:
        return _Pattern(right=0)
    if mask_function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    part = mask_function.__qualname__.split(".")[0]
    cells = mask_function.__closure__ or ()
    captured = {name: cell.cell_contents for name, cell in zip(mask_function.__code__.co_freevars, cells)}
    try:
        if part == "and_masks":
            return functools.reduce(_intersection, map(_pattern, captured["mask_functions"]))
        if part == "sliding_window_overlay":
            return _Pattern(left=captured["sliding_window"] - 1)
        if part == "sliding_window_bidirectional_overlay":
            return _Pattern(left=captured["sliding_window"], right=captured["sliding_window"])
        if part == "packed_sequence_mask_function":
            return _Pattern(segments=captured["packed_sequence_mask"])
        if part == "remap_positions_for_packed_sequence":
            # Positions grow by one within a segment, so that distances equal the indices' distances.
            return _pattern(captured["mask_function"])
    except KeyError:  # the part has other captured names
        pass
    return None


def _packed(segments: torch.Tensor) -> Options:
    """Returns the lengths of the packed sequences of (batch, seqlen) tokens. The function reads from the device."""
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = first.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([segments.numel()])]).to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


_WINDOW = {"causal", "alignment", "window"}  # options without tensors
_known_positions = WeakIdKeyDictionary()  # by position_ids: version, batch, segments, options


def _segments(position_ids: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns (batch, seqlen) one number per packed sequence. A new one begins where positions do not grow by one."""
    breaks = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0))
    return breaks.cumsum(-1).expand(batch, -1)


def _packed_segments(position_ids: torch.Tensor, batch: int) -> tuple[Optional[torch.Tensor], Options]:
    """Returns the segments (None: one per row) and their options. Reads from the device once for all layers."""
    version = None if position_ids.is_inference() else position_ids._version
    known = _known_positions.get(position_ids) if version is not None else None
    if known is not None and known[:2] == (version, batch):
        return known[2:]
    segments = _segments(position_ids, batch)
    result = (segments, _packed(segments)) if segments[:, -1].any() else (None, {})
    if version is not None:
        _known_positions[position_ids] = version, batch, *result
    return result


def _same_segment(segments: torch.Tensor) -> torch.Tensor:
    return segments[:, None, :, None] == segments[:, None, None, :]


def _from_segment_begin(segments: torch.Tensor, first_place: Any, seqlen_k: int) -> torch.Tensor:
    """Returns (batch, 1, seqlen, seqlen_k): True for keys from the begin of a query's segment on.

    first_place: the place of the first query among the keys, an integer or (batch|1, 1, 1, 1). Keys before this place
    are a cache, which belongs to the first segment.
    """
    steps = torch.arange(segments.shape[1], device=segments.device)
    begins = torch.nn.functional.pad(segments.diff(dim=-1) != 0, (1, 0))
    begin = torch.where(begins, steps, 0).cummax(-1).values[:, None, :, None]  # a segment's first query
    return (begin == 0) | (torch.arange(seqlen_k, device=segments.device) >= first_place + begin)


def _separated(mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns a mask (batch|1, 1, seqlen, seqlen_k) that also separates segments, without branches on values.

    As in eager mode, only masks of causality and a window are changed. All diagonals of these masks are constant.
    """
    seqlen, seqlen_k = mask.shape[-2:]
    is_plain = (mask[..., 1:, 1:] == mask[..., :-1, :-1]).all()
    if seqlen == seqlen_k:
        return mask & (_same_segment(segments) | ~is_plain)
    last = torch.where(mask[:, :, :1], torch.arange(seqlen_k, device=mask.device), 0).amax(-1, keepdim=True)
    is_causal = is_plain & (last.amax() + seqlen <= seqlen_k)
    return mask & (_from_segment_begin(segments, last, seqlen_k) | ~is_causal)


def _with_positions(
    module: torch.nn.Module, position_ids: Any, query: torch.Tensor, key: torch.Tensor, options: Options, is_own: bool
) -> Options:
    """Returns the options of a mask, which then also separate packed sequences. is_own: tandem_mask built the mask.

    The rule equals transformers' causal masks. The masks of encoders, some decoders, and calls with a cache do not
    apply the rule.
    """
    batch, _, seqlen, _ = query.shape
    seqlen_k = key.shape[2]
    if seqlen < 2:
        return options
    is_cross = getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower()
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or is_cross:
        return options
    if position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != seqlen:
        return options
    traced = _is_traced(position_ids, query.device)
    if traced and is_own and "bias" in options:
        return {**options, "bias": _separated(options["bias"], _segments(position_ids, batch))}
    causal = bool(options.get("causal")) or options.get("window", (None, None))[1] == 0
    whole = seqlen == seqlen_k and "seqused_k" not in options
    if not options.keys() <= _WINDOW | {"seqused_k"} or not (whole or causal):
        return options
    segments, packed = (_segments(position_ids, batch), {}) if traced else _packed_segments(position_ids, batch)
    if segments is None:
        return options
    if whole:
        return {**options, **({"bias": _same_segment(segments)} if traced else packed)}
    used = options["seqused_k"][:, None, None, None] if "seqused_k" in options else seqlen_k
    first_place = 0 if options.get("alignment") == "top_left" else used - seqlen
    return {**options, "bias": _from_segment_begin(segments, first_place, seqlen_k)}


def _options(pattern, batch, q_length, kv_length, q_offset, kv_offset, padding, device) -> Optional[Options]:
    """Returns the options of `tandem.attention` that equal a mask; None if no options do."""
    left, right, segments = pattern
    shift = q_offset - kv_offset  # query i has the place of key i + shift
    used = q_length + shift  # keys up to the last query's key
    # A bound as wide as the longest distance hides no key.
    left = None if left is not None and left >= used - 1 else left
    right = None if right is not None and right >= kv_length - 1 - shift else right

    options: Options = {}
    if right == 0:
        options["causal"] = True
    if left is not None or right not in (None, 0):
        options["window"] = (left, right)
    if options and used != kv_length:
        # A static cache is longer than its contents; the diagonal ends at the used length.
        if right != 0 or used > kv_length:
            return None
        options["seqused_k"] = torch.full((batch,), used, dtype=torch.int32, device=device)
    if segments is not None:
        if padding is not None or q_length != kv_length:
            return None
        options.update(_packed(segments))
    if padding is None:
        return options

    visible = padding
    if padding.shape[1] != kv_length or kv_offset:
        visible = masking_utils.prepare_padding_mask(padding, kv_length, kv_offset)
        visible = visible[:, kv_offset : kv_offset + kv_length]
    reachable = visible[:, :used] if "seqused_k" in options else visible
    if reachable.all():
        return options
    at_the_end = bool((reachable[:, :-1] >= reachable[:, 1:]).all())
    if at_the_end and not options:
        options["seqused_k"] = visible.sum(-1, dtype=torch.int32)
    elif at_the_end and right == 0 and shift == 0 and q_length == kv_length:
        options["seqused_q"] = options["seqused_k"] = visible.sum(-1, dtype=torch.int32)
    else:
        options["bias"] = visible[:, None, None, :]
    return options


def _is_traced(mask: Optional[torch.Tensor], device: Union[torch.device, str]) -> bool:
    if (mask is None or type(mask) is torch.Tensor) and torch.device(device).type == "cpu":
        # This test takes a third of the time of masking_utils.is_tracing, which takes as long as the rest of a mask.
        return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return masking_utils.is_tracing(mask)


def tandem_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Union[int, torch.Tensor] = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Union[torch.device, str] = "cpu",
    **kwargs,
) -> Optional[torch.Tensor]:
    """The mask function of "tandem": transformers calls it once per forward pass for each kind of layer.

    The arguments and results equal ``transformers.masking_utils.sdpa_mask``'s. Returns None if only the layer's
    causality hides keys. Else the function returns a (batch_size, 1, q_length, kv_length) boolean mask, True where
    visible. The result is a `CompactMask` if causality, a window, padding or packed sequences are its only parts.

    The outputs of padded queries are meaningless, but finite.
    """
    build = functools.partial(
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **kwargs,
    )
    # A traced graph may neither read from the device nor inspect closures.
    pattern = None if _is_traced(attention_mask, device) else _pattern(mask_function)
    if pattern is None:
        mask = build(allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
        if mask is not None and _is_traced(attention_mask, device):
            setattr(mask, _IS_OWN, True)
        return mask
    # A static cache counts its tokens on the device, in place. The count is read here instead of in every layer.
    q_offset = int(q_offset)
    build = functools.partial(build, q_offset=q_offset, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    options = _options(
        pattern, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, torch.device(device)
    )
    if options is None:
        return build()
    if not options and (allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)):
        return None
    if options == {"causal": True} and allow_is_causal_skip and q_length == kv_length:
        return None
    return CompactMask((batch_size, 1, q_length, kv_length), torch.device(device), options, build)


def _options_of_paged_cache(module: torch.nn.Module, is_causal: Optional[bool], kwargs: dict[str, Any]) -> Options:
    """Returns the options of continuous batching, whose sequences are cut by cu_seq_lens. The last query of a sequence
    matches the last key. A mask is not read, because it does not describe the keys of the cache.
    """
    if kwargs.get("block_table") is not None:
        raise tandem.Unsupported("block_table is not served: set max_blocks_per_request=0 in ContinuousBatchingConfig")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: Options = {"causal": bool(causal)}
    if kwargs.get("sliding_window"):
        options["window"] = (kwargs["sliding_window"] - 1, 0)
    return options


def _with_position_bias(options: Options, mask: Optional[torch.Tensor], position_bias: torch.Tensor) -> Options:
    """Adds a float bias (batch|1, heads|1, seqlen_q|1, seqlen_k), such as T5's, to the options of a mask."""
    if "cu_seqlens_q" in options:  # a packed call accepts no bias
        options = {"bias": mask.whole()}
    bias = options.get("bias")
    if bias is None:
        bias = position_bias
    elif bias.dtype == torch.bool:
        bias = torch.where(bias, position_bias, -torch.inf)
    else:
        bias = bias + position_bias
    return {**options, "bias": bias.contiguous()}


def tandem_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Union[torch.Tensor, BlockMask, None],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    is_causal: Optional[bool] = None,
    position_bias: Optional[torch.Tensor] = None,
    cu_seq_lens_q: Optional[torch.Tensor] = None,
    cu_seq_lens_k: Optional[torch.Tensor] = None,
    max_length_q: Optional[int] = None,
    max_length_k: Optional[int] = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function of "tandem": `tandem.attention` with transformers' arguments.

    query (batch, heads_q, seqlen_q, head_dim), key and value (batch, heads_k, seqlen_k, ...), not repeated.
    attention_mask is what `tandem_mask` returned, or an array (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), boolean
    (True: visible) or additive, or a BlockMask, torch's or Tandem's. attention_mask includes
    the window, so ``sliding_window`` is read only for a paged cache. Without attention_mask, is_causal decides, or else
    the module's is_causal. s_aux (heads_q) is the sink. cu_seq_lens_* (sequences + 1) cut the tokens of one row into
    sequences, unless the mask already separates the sequences.

    Returns (batch, seqlen_q, heads_q, head_dim_v), and None in place of the weights, which are never stored.
    """
    if kwargs.get("cache") is not None:
        raise tandem.Unsupported(
            "cache is paged, and this version of transformers passes it to the attention function, which is not "
            'served: upgrade transformers, or use attn_implementation="sdpa"'
        )
    if kwargs.get("output_attentions"):
        logger.warning_once(
            '`attn_implementation="tandem"` stores no attention weights, so `output_attentions=True` has no effect: '
            'set attn_implementation to "eager" for the weights.'
        )

    if kwargs.get("read_index") is not None:
        options = _options_of_paged_cache(module, is_causal, kwargs)
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # As in scaled_dot_product_attention, one query sees all keys, and the first of several queries matches the
        # first key.
        options: Options = {"causal": True, "alignment": "top_left"} if causal and query.shape[2] > 1 else {}
    elif (
        isinstance(attention_mask, CompactMask)
        and attention_mask.options is not None
        and attention_mask.shape[2:] == (query.shape[2], key.shape[2])
    ):
        options = attention_mask.options
    elif isinstance(attention_mask, BlockMask):
        options = mask_of(attention_mask, query, key)
    else:
        whole = attention_mask.whole() if isinstance(attention_mask, CompactMask) else attention_mask
        options = {"bias": whole}
    by_positions = False
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and options.keys() <= _WINDOW:
        options = {
            **options,
            "cu_seqlens_q": cu_seq_lens_q.to(torch.int32),
            "cu_seqlens_k": cu_seq_lens_k.to(torch.int32),
            "max_seqlen_q": query.shape[0] * query.shape[2] if max_length_q is None else int(max_length_q),
            "max_seqlen_k": key.shape[0] * key.shape[2] if max_length_k is None else int(max_length_k),
        }
    elif not isinstance(attention_mask, BlockMask) and kwargs.get("read_index") is None:
        is_own = getattr(attention_mask, _IS_OWN, False)
        found = _with_positions(module, kwargs.get("position_ids"), query, key, options, is_own)
        options, by_positions = found, found is not options
    if position_bias is not None and (attention_mask is None or by_positions) and "cu_seqlens_q" in options:
        raise tandem.Unsupported(
            "position_bias cannot be combined with packed sequences (cu_seq_lens_q or position_ids), because packed "
            "calls take no bias: pass an attention_mask instead"
        )
    if position_bias is not None:
        options = _with_position_bias(options, attention_mask, position_bias)

    sink = sink_for(query, s_aux, "s_aux")
    options = {**options, "softmax_scale": scaling, "softcap": softcap or 0.0, "sink": sink}
    if dropout or "cu_seqlens_q" in options:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        packed = "cu_seqlens_q" in options
        if packed:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out = in_words(_NAMES, tandem.attention, q, k, v, **options, dropout_p=dropout)
        return out.unflatten(0, (query.shape[0], query.shape[2])) if packed else out, None
    return in_words(_NAMES, attention_heads_first, query, key, value, **options), None


AttentionInterface.register("tandem", tandem_attention)
masking_utils.AttentionMaskInterface.register("tandem", tandem_mask)
_transformers_dispatch.install("tandem")
_transformers_dispatch.serve_continuous_batching("tandem")
