"""The gallery of bench/flex.py for FlashAttention-4: CuTe functions of vectors of one number if they read tensors, else
of two or four. Score functions have gradients. Import this module after rig.peers.fa4 has set the path of the packages.
"""

from __future__ import annotations

import cutlass
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func

SPARSE_BLOCK = 128


def absolute(x):
    return cute.where(x < 0, -x, x)


def read(tensor, *places):
    return utils.scalar_to_ssa(tensor[tuple(utils.ssa_to_scalar(place) for place in places)], tensor.element_type)


@cute.jit
def causal(b, h, q, k, lengths, tensors):
    return q >= k


def window(width):
    @cute.jit
    def mask(b, h, q, k, lengths, tensors):
        return (q >= k) & (q - k < width)

    return mask


def prefix_lm(length):
    @cute.jit
    def mask(b, h, q, k, lengths, tensors):
        return (k < length) | (q >= k)

    return mask


@cute.jit
def dilated(b, h, q, k, lengths, tensors):
    return (q >= k) & ((q - k) % 4 == 0)


def neighbourhood(image):
    @cute.jit
    def mask(b, h, q, k, lengths, tensors):
        return (absolute(q % image - k % image) <= 3) & (absolute(q // image - k // image) <= 3)

    return mask


def first_and_window(width):
    @cute.jit
    def mask(b, h, q, k, lengths, tensors):
        return (q >= k) & ((k < 4) | (q - k < width))

    return mask


@cute.jit
def same_document(b, h, q, k, lengths, tensors):
    return (read(tensors[0], q) == read(tensors[0], k)) & (q >= k)


@cute.jit
def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score - read(aux_tensors[0], h) * absolute(q_idx - kv_idx).to(cutlass.Float32)


@cute.jit
def relative(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    apart = q_idx - kv_idx + 32
    place = cute.where(apart < 0, 0, cute.where(apart > 64, 64, apart))
    return score + read(aux_tensors[0], h, place)


@cute.jit
def added(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Returns the gradient of a score_mod that adds to scores."""
    return grad


@cute.jit
def temperature(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score * read(aux_tensors[0], h)


@cute.jit
def temperature_gradient(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad * read(aux_tensors[0], h)


def dropped(q, k):
    x = (q * 7919 + k) * 31337
    shifted = cute.TensorSSA(x >> 15, x.shape, x.dtype)  # a shift's result loses its type
    return ((x ^ shifted) & 255) < 26


@cute.jit
def hash_dropout(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return cute.where(dropped(q_idx, kv_idx), cute.full_like(score, -cutlass.Float32.inf), score)


@cute.jit
def hash_gradient(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return cute.where(dropped(q_idx, kv_idx), cute.full_like(grad, 0), grad)


def softcap(cap):
    return dict(score_mod=utils.create_softcap_scoremod(cap), score_mod_bwd=utils.create_softcap_scoremod_bwd(cap))


def gallery(width: int, image: int, document, slope, table, scale) -> dict:
    """Returns the arguments of flash_attn_func for each name."""
    return {
        "causal": dict(mask_mod=causal),
        "window": dict(mask_mod=window(width)),
        "prefix-LM": dict(mask_mod=prefix_lm(1000)),
        "documents": dict(mask_mod=same_document, aux_tensors=[document]),
        "dilated": dict(mask_mod=dilated),
        "neighbourhood": dict(mask_mod=neighbourhood(image)),
        "first keys and window": dict(mask_mod=first_and_window(width)),
        "ALiBi, causal": dict(score_mod=alibi, score_mod_bwd=added, mask_mod=causal, aux_tensors=[slope]),
        "softcap, causal": dict(**softcap(30.0), mask_mod=causal),
        "relative table": dict(score_mod=relative, score_mod_bwd=added, aux_tensors=[table]),
        "temperature, causal": dict(
            score_mod=temperature, score_mod_bwd=temperature_gradient, mask_mod=causal, aux_tensors=[scale]
        ),
        "hash": dict(score_mod=hash_dropout, score_mod_bwd=hash_gradient),
    }


def sparse_blocks(mask) -> dict:
    """Converts torch's BlockMask to FlashAttention-4's: keys of each block of rows, rows of each block of keys."""
    _, _, *lists = mask.as_tuple()
    block_size = (SPARSE_BLOCK, SPARSE_BLOCK)
    return dict(
        block_sparse_tensors=BlockSparseTensorsTorch(*lists[:4], block_size=block_size),
        block_sparse_tensors_bwd=BlockSparseTensorsTorch(*lists[4:8], block_size=block_size),
    )


def function_of(mods: dict, mask=None):
    """Computes out of (q, k, v), heads first."""
    options = {**mods, **(sparse_blocks(mask) if mask is not None else {})}
    return lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)[0].transpose(1, 2)


def by_option(name: str, mods: dict, width: int):
    """Returns the function with an option in place of the mask_mod, or None without such an option."""
    option = dict(window_size=(width - 1, 0)) if name == "window" else dict(causal=True)
    served = name == "window" or name.endswith("causal")
    return function_of({**mods, "mask_mod": None, **option}) if served else None
