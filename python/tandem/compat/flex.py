"""torch.nn.attention.flex_attention on tandem.attention: scores and masks are functions of the caller.

    from tandem import create_block_mask, flex_attention

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    out = flex_attention(query, key, value, score_mod=..., block_mask=create_block_mask(causal, None, None, L, S))

Names, layout (batch, heads, seqlen, head_dim), defaults and return values are torch's. A function is called once with
symbols in place of numbers and becomes an expression (docs/score_mod.md). The function needs no torch.compile, and has
a gradient, on CPUs too, also for the float tensors it captures. A function without an expression is refused with its
file and line.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

import tandem
from tandem import _api, _score_mod
from tandem._binding import blocks_of, number_of
from tandem._errors import renamed
from tandem._score_mod import Blocks, Mod, is_number, made_lists
from tandem._trace import trace
from tandem.compat._arguments import is_tensor, unit_stride

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}  # our arguments' names in this interface
_BLOCK_OF_GPUS = 128  # queries and keys: every GPU serves multiples of this
_BACKENDS = typing.get_args(getattr(torch.nn.attention.flex_attention, "_Backend", None)) or (
    "AUTO", "TRITON", "FLASH", "TRITON_DECODE"
)  # fmt: skip
_NO_BLOCKS = 1 << 30  # torch's block size where there is no mask
_MOST_ELEMENTS = 1 << 22  # evaluated at once in a mask


def flex_attention(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    """``softmax(mask(score_mod(scale * query key^T))) value``, with torch's arguments and rules.

    query : (batch, heads, L, E).
    key, value : (batch, heads_k, S, E) and (batch, heads_k, S, Ev). With a block_mask their batch may be 1.
    score_mod : a function (score, b, h, q_idx, kv_idx) that returns a number, an expression (str) or a tandem.Mod.
    block_mask : a BlockMask of create_block_mask or of torch. Blocks in neither list are hidden, and in partial blocks
        its mask_mod decides. The mask's lists are int32 or int64, for 1 or query's batch and heads.
    scale : factor of the products; None: 1 / sqrt(E).
    enable_gqa : heads is a multiple of heads_k.
    kernel_options : options of torch's kernels. These options are checked and have no effect.

    Returns (batch, heads, L, Ev), laid out in memory as query is. With return_lse the function also returns lse (batch,
    heads, L); with return_aux an AuxOutput of lse and max_scores, as requested. max_scores (batch, heads, L), float32,
    are the largest scores that each query sees, without a gradient. A GPU computes all scores again for them. A row
    that sees no key gives 0, and -inf for lse and max_scores.

    Raises ValueError or TypeError for wrong arguments, and tandem.Unsupported for functions without an expression and
    for second and forward-mode derivatives.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        is_tensor(x, name)
        if x.is_nested:
            raise tandem.Unsupported(
                f"{name} (nested) is not served: pass its values to tandem.attention as packed tensors with cu_seqlens"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} ({x.dim()} dimensions) must be (batch, heads, seqlen, head_dim): reshape it")
    _check_heads(query, key, enable_gqa)
    _check_options(kernel_options)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse must be False where return_aux is given: use AuxRequest(lse=True)")
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask ({type(block_mask).__name__}) must be a BlockMask: call create_block_mask")
    if key.shape[0] != query.shape[0]:
        key, value = _one_batch(query, key, value, block_mask)
    mods = {}
    if score_mod is not None:
        mods["score_mod"] = _expression_of(score_mod, "score_mod", query.device)
    if block_mask is not None:
        mods.update(mask_of(block_mask, query, key))
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    tensors = [unit_stride(x.transpose(1, 2), name) for x, name in zip((query, key, value), ("query", "key", "value"))]
    call_args = {**dict(zip("qkv", tensors)), "layout_of_q": True}
    if scale is not None:
        call_args["softmax_scale"] = number_of(scale, "scale")
    for argument in _score_mod.MODS:
        if argument in mods:
            call_args[argument] = _score_mod.bound(mods[argument], argument)
    if "block_mask" in mods:
        call_args.update(blocks_of(mods["block_mask"]))
    max_scores = None
    if return_aux is not None and return_aux.max_scores:
        max_scores = call_args["max_scores"] = _new_max_scores(query)
    result = _attend(call_args, mods, wants_lse)
    out, lse = result if wants_lse else (result, None)
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse, max_scores=max_scores)
    return (out, lse) if return_lse else out


def _attend(call_args: dict[str, Any], mods: dict[str, Any], return_lse: bool) -> Any:
    """The attention. The errors have flex_attention's argument names and the functions' places."""
    try:
        return _api.use_torch().attention(call_args, return_lse)
    except (TypeError, ValueError, tandem.Unsupported) as error:
        for argument in _score_mod.MODS:
            origin = getattr(mods.get(argument), "origin", "")
            if origin and str(error).startswith(f"{argument}: "):
                reason = str(error).partition(": ")[2]
                raise tandem.Unsupported(
                    f"{argument} ({origin}): no expression equals this function: {reason}"
                ) from None
        raise renamed(error, _NAMES) from None


def _new_max_scores(query: Tensor) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty(query.shape[:3], dtype=dtype, device=query.device)


def mask_of(block_mask: BlockMask, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Converts a BlockMask for these tensors (batch, heads, seqlen, head_dim) to tandem.attention's arguments.

    The mask's lists may hide more than its mask_mod. mask_mod alone suffices only if create_block_mask computed the
    lists from it. All other lists are passed on, or become a captured tensor if the device does not read their block
    size.
    """
    if block_mask.BLOCK_SIZE == (_NO_BLOCKS, _NO_BLOCKS) and block_mask.seq_lengths == (1, 1):
        return {}  # torch's mask without a mask function
    _check_lengths(block_mask, query, key)
    lists = _lists_of(block_mask, query, key)
    serves_lists = _serves_blocks(block_mask, query, key)
    if _is_noop(block_mask):
        return {"block_mask": lists} if serves_lists else _dense_mask(lists, query, key, None)
    mask_mod = _expression_of(block_mask.mask_mod, "mask_mod", query.device)
    is_as_made = _is_as_made(block_mask, mask_mod)
    if serves_lists:
        return {"block_mask": lists._replace(of_mask_mod=is_as_made), "mask_mod": mask_mod}
    if is_as_made:
        return {"mask_mod": mask_mod}
    return _dense_mask(lists, query, key, block_mask.mask_mod)


def _lists_of(block_mask: BlockMask, query: Tensor, key: Tensor) -> Blocks:
    """Returns its lists, checked, as int32."""
    batch, heads, seqlen_q, _ = query.shape
    rows = -(-seqlen_q // block_mask.BLOCK_SIZE[0])
    lists = []
    for name in Blocks._fields[:4]:
        x = getattr(block_mask, name)
        other = getattr(block_mask, name.replace("indices", "num_blocks"))
        if x is None:
            if other is not None or not name.startswith("full_"):
                raise ValueError(
                    f"block_mask's {name} (None) must be a tensor, because its counterpart is given or required: "
                    "create the mask with create_block_mask"
                )
            lists.append(None)
            continue
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"block_mask's {name} ({x.dtype}) must be int32 or int64: convert it with .to(torch.int32)")
        if x.device != query.device:
            raise ValueError(
                f"block_mask's {name} (on {x.device}) must be on query's device ({query.device}): "
                "move it with block_mask.to()"
            )
        dims = 4 if name.endswith("indices") else 3
        shape = tuple(x.shape)
        if len(shape) != dims or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != rows:
            wanted = (f"1 or {batch}", f"1 or {heads}", str(rows), "columns")[:dims]
            raise ValueError(
                f"block_mask's {name} (shape {shape}) must be ({', '.join(wanted)}), for query's batch, heads and "
                "blocks: create the mask for these tensors with create_block_mask"
            )
        lists.append(x if x.dtype == torch.int32 else x.to(torch.int32))
    return Blocks(*lists, block_mask.BLOCK_SIZE)


def _serves_blocks(block_mask: BlockMask, query: Tensor, key: Tensor) -> bool:
    """Returns True if query's device reads lists of this block size."""
    sizes = zip(block_mask.BLOCK_SIZE, (query.shape[2], key.shape[2]))
    return not query.is_cuda or all(size % _BLOCK_OF_GPUS == 0 or size >= length for size, length in sizes)


def _dense_mask(lists: Blocks, query: Tensor, key: Tensor, mask_mod: Any) -> dict[str, Any]:
    """Converts lists to a mask_mod that reads bools per block: the block is hidden, partial or full."""
    size_q, size_k = lists.BLOCK_SIZE
    columns = -(-key.shape[2] // size_k)
    partial = _dense_blocks(lists.kv_num_blocks, lists.kv_indices, columns)
    full = None
    if lists.full_kv_num_blocks is not None:
        full = _dense_blocks(lists.full_kv_num_blocks, lists.full_kv_indices, columns)
    if mask_mod is not None and not callable(mask_mod):
        raise tandem.Unsupported(
            f"block_mask ({size_q} x {size_k} blocks) must have a function as its mask_mod, or multiples of "
            f"{_BLOCK_OF_GPUS} as BLOCK_SIZE on this device: pass a function"
        )

    def blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        def seen(table: Tensor) -> Any:
            return table[
                b if table.shape[0] > 1 else 0, h if table.shape[1] > 1 else 0, q_idx // size_q, kv_idx // size_k
            ]

        result = seen(partial)
        if mask_mod is not None:
            result = result & mask_mod(b, h, q_idx, kv_idx)
        return result if full is None else result | seen(full)

    return {"mask_mod": trace(blocks, "mask_mod", query.device)}


def _dense_blocks(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Converts lists to bools (batch, heads, rows, columns)."""
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    batch, heads = (max(counts.shape[d], indices.shape[d]) for d in (0, 1))
    dense = torch.zeros(batch, heads, counts.shape[2], columns + 1, dtype=torch.bool, device=indices.device)
    places = torch.where(is_listed, indices, columns).long().expand(batch, heads, -1, -1)  # the last column is dropped
    return dense.scatter_(3, places, True)[..., :columns].contiguous()


class _Made(NamedTuple):
    """The state of a BlockMask when create_block_mask returned it. torch does not copy it with the mask."""

    expression: Mod
    sizes: tuple[Any, ...]
    lists: tuple[tuple[Tensor, int], ...]  # each tensor with its version, which counts writes

    @classmethod
    def of(cls, block_mask: BlockMask, text: Mod) -> _Made:
        lists = (getattr(block_mask, name) for name in Blocks._fields[:4])
        return cls(text, _sizes_of(block_mask), tuple((x, x._version) for x in lists))


def _sizes_of(block_mask: BlockMask) -> tuple[Any, ...]:
    return (*block_mask.seq_lengths, *block_mask.BLOCK_SIZE)


@torch.compiler.disable
def _is_as_made(block_mask: BlockMask, expression: Any) -> bool:
    """Returns True if create_block_mask computed the lists, they are unchanged, and mask_mod still has that expression.

    An expression with tensors is no window, and returns False, because only windows are served without lists.
    """
    made = getattr(block_mask, "_made_by_tandem", None)
    if made is None or not isinstance(expression, Mod) or expression.text != made.expression.text:
        return False
    numbers = [
        [(name, type(x), x) for name, x in mod.bindings.items() if is_number(x)]
        for mod in (expression, made.expression)
    ]
    return (
        numbers[0] == numbers[1]
        and len(numbers[0]) == len(expression.bindings)
        and _sizes_of(block_mask) == made.sizes
        and all(
            getattr(block_mask, name) is x and x._version == version
            for name, (x, version) in zip(Blocks._fields, made.lists)
        )
    )


def _is_noop(block_mask: BlockMask) -> bool:
    """Returns True if the blocks are the whole mask. torch may have copied noop_mask, so that its code decides."""
    return getattr(block_mask.mask_mod, "__code__", None) is noop_mask.__code__


def _check_lengths(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    *_, seqlen_q, seqlen_k = block_mask.shape
    lengths = query.shape[2], key.shape[2]
    if (seqlen_q, seqlen_k) != lengths:
        raise ValueError(
            f"block_mask ({seqlen_q} x {seqlen_k}) must be of query's and key's lengths ({lengths[0]} x {lengths[1]}): "
            "create the mask for these with create_block_mask"
        )


def _expression_of(mod: Any, argument: str, device: torch.device) -> Any:
    if isinstance(mod, (str, Mod)):
        return mod
    if not callable(mod):
        raise TypeError(
            f"{argument} ({type(mod).__name__}) must be a function, an expression (str) or a tandem.Mod: pass one"
        )
    return trace(mod, argument, device, torch.compiler.is_compiling())


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    heads, heads_k = query.shape[1], key.shape[1]
    if not enable_gqa and heads != heads_k:
        raise ValueError(
            f"key's heads ({heads_k}) must be as many as query's ({heads}): pass enable_gqa=True if query heads share "
            "key heads"
        )


def _check_options(kernel_options: Any) -> None:
    known = FlexKernelOptions.__annotations__
    backend = (kernel_options or {}).get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ValueError(
            f"kernel_options['BACKEND'] ({backend!r}) must be one of {', '.join(map(repr, _BACKENDS))}: pass one"
        )
    for name in kernel_options or ():
        if name not in known and name.removeprefix("fwd_").removeprefix("bwd_") not in known:
            raise ValueError(f"kernel_options ({name!r}) must have names of torch's FlexKernelOptions: omit this name")


def _one_batch(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> tuple[Tensor, Tensor]:
    """Returns key and value with query's batch, if they have one for all."""
    if key.shape[0] != 1 or block_mask is None:
        raise ValueError(
            f"key's batch ({key.shape[0]}) must be query's ({query.shape[0]}), or 1 where there is a block_mask: "
            "expand key and value"
        )
    return key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)


def create_block_mask(
    mask_mod,
    B,
    H,
    Q_LEN,
    KV_LEN,
    device=None,
    BLOCK_SIZE=128,
    _compile=False,
    separate_full_blocks=True,
    compute_dq_write_order=False,
    dq_kv_order=True,
):
    """Implements torch's create_block_mask without an array of the whole mask.

    mask_mod(b, h, q_idx, kv_idx) is True where a query sees a key. B, H: None if the mask is the same for all.
    BLOCK_SIZE: queries and keys of a block, one number or two. _compile has no effect.

    A function with an expression (docs/score_mod.md) is evaluated for whole blocks by interval arithmetic, and element
    by element where that is inconclusive. All other functions are evaluated on parts of the mask.
    If torch cannot evaluate the function either, raises the reason why it has no expression.
    """
    if compute_dq_write_order:
        raise tandem.Unsupported(
            "compute_dq_write_order (True) must be False, because only torch's kernels read the order: omit it"
        )
    device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    batch, heads = B or 1, H or 1
    size_q, size_k = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    blocks_q, blocks_k = -(-Q_LEN // size_q), -(-KV_LEN // size_k)
    sizes = (batch, heads, Q_LEN, KV_LEN, size_q, size_k)
    refusal = None
    if separate_full_blocks and device.type in ("cpu", "cuda"):
        try:
            return _made_of(mask_mod, sizes, device)
        except (tandem.Unsupported, TypeError, ValueError) as error:
            refusal = error
    counts = torch.zeros(batch, heads, blocks_q, blocks_k, dtype=torch.int64, device=device)
    step_k = max(1, min(blocks_k, _MOST_ELEMENTS // (batch * heads * size_q * size_k)))
    step_q = max(1, min(blocks_q, _MOST_ELEMENTS // (batch * heads * size_q * size_k * step_k)))
    for q in range(0, blocks_q, step_q):
        for k in range(0, blocks_k, step_k):
            rows, keys = (
                min(step * size, length - first * size)
                for first, step, size, length in ((q, step_q, size_q, Q_LEN), (k, step_k, size_k, KV_LEN))
            )
            try:
                part = create_mask(_shifted(mask_mod, q * size_q, k * size_k), batch, heads, rows, keys, device)
            except Exception as error:
                raise (error if refusal is None else refusal) from None
            counts[:, :, q : q + step_q, k : k + step_k] = _visible(part, size_q, size_k)
    full = counts == size_q * size_k
    partial = counts > 0
    if separate_full_blocks:
        partial = partial & ~full
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *(_ordered(full) if separate_full_blocks else (None, None)),
        BLOCK_SIZE=(size_q, size_k),
        mask_mod=mask_mod,
        seq_lengths=(Q_LEN, KV_LEN),
    )


def _made_of(mask_mod: Any, sizes: tuple[int, ...], device: torch.device) -> BlockMask:
    """Computes the mask by the library, including the lists for each block of keys, for which torch's from_kv_blocks
    needs a hundred operations. Raises where no expression equals mask_mod."""
    expression = _expression_of(mask_mod, "mask_mod", device)
    lists = made_lists(expression, sizes, device, by_keys=True)
    block_mask = BlockMask(seq_lengths=sizes[2:4], **lists, BLOCK_SIZE=sizes[4:], mask_mod=mask_mod)
    if isinstance(expression, Mod) and not lists["kv_indices"].is_inference():  # inference tensors have no versions
        block_mask._made_by_tandem = _Made.of(block_mask, expression)
    return block_mask


def _shifted(mask_mod: Callable[..., Any], first_q: int, first_k: int) -> Callable[..., Any]:
    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx + first_q, kv_idx + first_k)

    return shifted


def _visible(mask: Tensor, size_q: int, size_k: int) -> Tensor:
    """Returns the number of visible entries in each block of a mask (batch, heads, queries, keys)."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[3] % size_k, 0, -mask.shape[2] % size_q))
    blocks = padded.unflatten(3, (-1, size_k)).unflatten(2, (-1, size_q))
    return blocks.sum((3, 5))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of blocks in each row, and the row's indices with these blocks first."""
    count = blocks.sum(-1, dtype=torch.int32)
    return count, torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
