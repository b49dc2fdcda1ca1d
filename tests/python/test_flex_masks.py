"""Block masks of tandem.flex_attention and of arrays: lists that kernels read, and lists that create_block_mask
returns.
"""

import numpy as np
import pytest

import tandem

torch = pytest.importorskip("torch")

import torch_reference  # noqa: E402
from flex_cases import BATCH, DIM, HEADS, KEYS, QUERIES, causal, dilated, documents, plain, tensors  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from tandem import flex  # noqa: E402


def blocks_of_any_kind(batch, heads, seed=3):
    """Returns a BlockMask whose lists hide more than its mask_mod, in random order. Some rows have no visible key."""
    random = np.random.default_rng(seed)
    kind = torch.from_numpy(random.integers(0, 4, (batch, heads, 3, 5)))  # hidden, hidden, partial, full
    kind[:, :, 1] *= random.integers(0, 2)
    lists = []
    for wanted in (2, 3):
        chosen = (kind == wanted).flip(-1)
        order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
        lists += [chosen.sum(-1, dtype=torch.int32), (4 - order).to(torch.int32)]
    return kind, lists


@pytest.mark.parametrize("mask_mod", [dilated, flex.noop_mask], ids=["mask_mod", "none"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (BATCH, 1), (BATCH, HEADS)])
def test_lists_of_blocks_say_what_is_seen(mask_mod, batch, heads):
    kind, lists = blocks_of_any_kind(batch, heads)
    mask = theirs.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(16, 8), mask_mod=mask_mod, seq_lengths=(QUERIES, KEYS))

    def seen(b, h, q_idx, kv_idx):
        block = kind[b if batch > 1 else 0, h if heads > 1 else 0, q_idx // 16, kv_idx // 8]
        return (block == 3) | ((block == 2) & mask_mod(b, h, q_idx, kv_idx))

    inputs = tensors((BATCH, HEADS, QUERIES, DIM), *[(BATCH, 2, KEYS, DIM)] * 2)
    torch_reference.hold(
        lambda *x: tandem.flex_attention(*x, block_mask=mask, enable_gqa=True),
        lambda *x: plain(*x, None, seen)[0],
        inputs,
    )


def within(width):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < width)


def window_mask(width=9):
    return tandem.create_block_mask(within(width), None, None, 40, 40, device="cpu", BLOCK_SIZE=(8, 8))


def through(mask):
    return tandem.flex_attention(*tensors(*[(1, 2, 40, 16)] * 3), block_mask=mask)


def empty(mask, data=False):
    """Empties the lists of the mask. data: writes through .data, so that the version does not change."""
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        (counts.data if data else counts).zero_()
    return mask


@pytest.mark.parametrize("compiled", [False, True])
def test_lists_of_a_window_that_we_have_made_are_not_read(compiled):
    mask = window_mask()
    call = torch.compile(through, backend="aot_eager") if compiled else through
    x = [x.transpose(1, 2) for x in tensors(*[(1, 2, 40, 16)] * 3)]
    wanted = tandem.attention(*x, causal=True, window=(8, 0)).transpose(1, 2)
    assert torch.equal(call(mask), wanted)
    assert torch.equal(call(empty(mask, data=True)), wanted)


def replaced(mask):
    mask.kv_num_blocks, mask.full_kv_num_blocks = map(torch.zeros_like, (mask.kv_num_blocks, mask.full_kv_num_blocks))
    return mask


def sliced(mask):
    part = mask[:]
    part.mask_mod = mask.mask_mod
    return empty(part, data=True)


def hand_made(mask):
    lists = [getattr(mask, name) for name in tandem.Blocks._fields[:4]]
    lists[::2] = map(torch.zeros_like, lists[::2])
    return theirs.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, seq_lengths=mask.seq_lengths
    )


@torch.inference_mode()
def without_versions(_):
    return empty(window_mask())


@pytest.mark.parametrize("spoil", [empty, replaced, sliced, hand_made, without_versions])
def test_lists_that_may_be_others_are_read(spoil):
    mask = window_mask()
    assert through(mask).any() and not through(spoil(mask)).any()


def test_lists_of_another_mask_mod_are_read():
    mask = window_mask()
    mask.mask_mod = within(30)  # evaluated in the partial blocks of the first mask
    seen = mask.to_dense().bool().repeat_interleave(8, 2).repeat_interleave(8, 3)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    x = tensors(*[(1, 2, 40, 16)] * 3)
    wanted = torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=seen & (distance >= 0) & (distance < 30))
    torch.testing.assert_close(through(mask), wanted)


def test_lists_of_blocks_of_another_size_are_read():
    mask = window_mask()
    before = through(mask)
    mask.BLOCK_SIZE = (8, 4)
    assert not torch.equal(through(mask), before)


def test_a_number_that_a_mask_captured_may_change():
    """The first mask has the lists. The lists hide keys that the second mask_mod would show."""
    width = 9

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < width)

    mask = tandem.create_block_mask(window, None, None, 40, 40, device="cpu", BLOCK_SIZE=(8, 8))
    first = through(mask)
    width = 40
    again, whole = through(mask), through(window_mask(40))
    assert not torch.equal(again, first) and not torch.equal(again, whole)
    width = 9
    assert torch.equal(through(mask), first)


def test_blocks_of_arrays():
    kind, lists = blocks_of_any_kind(BATCH, 1)
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(*[(BATCH, HEADS, QUERIES, DIM)] * 3))
    blocks = tandem.Blocks(*lists, BLOCK_SIZE=(16, 8))
    out, lse = tandem.attention(q, k, v, block_mask=blocks, return_lse=True)
    assert torch.equal(out, torch.compile(tandem.attention, backend="eager")(q, k, v, block_mask=blocks))
    arrays = [x.numpy() for x in (q, k, v)]
    of_arrays = tandem.Blocks(*(x.numpy() for x in lists), BLOCK_SIZE=(16, 8))
    assert np.array_equal(out.numpy(), tandem.attention(*arrays, block_mask=of_arrays))
    found = tandem.attention_backward(arrays[0], *arrays, out.numpy(), lse.numpy(), block_mask=of_arrays)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(tandem.attention(q, k, v, block_mask=blocks), inputs, q.detach())
    assert all(np.array_equal(x, y.numpy()) for x, y in zip(found, wanted))
    with pytest.raises(ValueError, match=r"kv_num_blocks.blocks \(3\) must be 2"):
        tandem.attention(*arrays, block_mask=of_arrays._replace(BLOCK_SIZE=(32, 8)))
    with pytest.raises(TypeError, match=r"block_mask \(list\) must be a tandem.Blocks"):
        tandem.attention(*arrays, block_mask=[])


# ---- Creation --------------------------------------------------------------------------------------------------------


def test_blocks_of_texts():
    doc = np.array([0] * 300 + [1] * 260 + [2] * 40, np.int32)
    text = tandem.Mod("k <= q and doc[q] == doc[k] and head * width >= 0", doc=doc, width=3)
    blocks = tandem.Blocks.of(text, 600, 600, heads=2, BLOCK_SIZE=(128, 64))
    seen = (np.arange(600)[:, None] >= np.arange(600)) & (doc[:, None] == doc)
    counts = np.zeros((640, 640), np.int64)
    counts[:600, :600] = seen
    counts = counts.reshape(5, 128, 10, 64).sum((1, 3))
    for head in range(2):
        for listed, count, index in (
            ((counts > 0) & (counts < 128 * 64), blocks.kv_num_blocks, blocks.kv_indices),
            (counts == 128 * 64, blocks.full_kv_num_blocks, blocks.full_kv_indices),
        ):
            assert (count[0, head] == listed.sum(1)).all() and count.shape == (1, 2, 5)
            for row in range(5):
                assert index[0, head, row].tolist() == [*np.flatnonzero(listed[row]), *np.flatnonzero(~listed[row])]
    q = np.random.default_rng(3).standard_normal((1, 600, 2, 16)).astype(np.float32)
    with_blocks = tandem.attention(q, q, q, mask_mod=text, block_mask=blocks)
    assert np.array_equal(with_blocks, tandem.attention(q, q, q, mask_mod=text))


def test_blocks_of_texts_that_are_refused():
    with pytest.raises(ValueError, match="mask_mod: column 1: a mask_mod must return a bool"):
        tandem.Blocks.of("k - q", 8, 8)
    with pytest.raises(ValueError, match=r"mask_block_k \(0\) must be at least 1"):
        tandem.Blocks.of("k <= q", 8, 8, BLOCK_SIZE=(8, 0))
    with pytest.raises(ValueError, match=r"seqlen_q \(-8\) must be 0 to"):
        tandem.Blocks.of("k <= q", -8, 8)
    with pytest.raises(TypeError, match=r"must be an expression \(str\) or a tandem.Mod"):
        tandem.Blocks.of(causal, 8, 8)


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize("shape", [(None, None, 300, 260), (2, 3, 130, 256), (None, 3, 1, 128), (1, 1, 128, 1)])
def test_block_masks_of_functions_are_torchs(by_text, shape):
    doc = torch.arange(300).clamp(max=290) // 97

    def documents(b, h, q_idx, kv_idx):
        return (doc[q_idx] == doc[kv_idx]) & (q_idx * (h + 1) >= kv_idx - b)

    def beyond_expressions(b, h, q_idx, kv_idx):
        return documents(b, h, q_idx, kv_idx) & ~(torch.lgamma(q_idx + 1.0) < -2)

    function = documents if by_text else beyond_expressions
    if not by_text:
        with pytest.raises(tandem.Unsupported, match="lgamma"):
            flex._made_of(function, (1, 1, 8, 8, 8, 8), torch.device("cpu"))
    made, wanted = (x.create_block_mask(function, *shape, device="cpu") for x in (tandem, theirs))
    of_queries = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    for name in (*of_queries, *(name.replace("kv_", "q_") for name in of_queries)):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name


MASKS = {
    "causal": (causal, None, None, 40, 56, 16),
    "documents": (documents, 2, None, 36, 36, (8, 12)),
    "dilated": (dilated, None, 3, 17, 70, (128, 16)),
    "all": (flex.noop_mask, 1, 1, 64, 64, 32),
}


@pytest.mark.parametrize("most", [1, 1 << 10, 1 << 22])
@pytest.mark.parametrize("arguments", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("separate", [True, False])
def test_block_masks_are_torchs(arguments, most, separate, monkeypatch):
    monkeypatch.setattr(flex, "_MOST_ELEMENTS", most)
    *others, size = arguments
    ours, wanted = (
        function(*others, device="cpu", BLOCK_SIZE=size, separate_full_blocks=separate)
        for function in (tandem.create_block_mask, theirs.create_block_mask)
    )
    for got, want in zip(ours.as_tuple(), wanted.as_tuple()):
        assert torch.equal(got, want) and got.dtype == want.dtype if isinstance(got, torch.Tensor) else got == want
    assert ours.shape == wanted.shape and ours.sparsity() == wanted.sparsity() and ours.numel() == wanted.numel()
    assert torch.equal(ours.to_dense(), wanted.to_dense()) and ours.to_string() == wanted.to_string()
    assert ours.mask_mod is others[0]
    with pytest.raises(tandem.Unsupported, match="compute_dq_write_order"):
        tandem.create_block_mask(*others, device="cpu", compute_dq_write_order=True)


def test_a_mask_of_blocks_alone():
    dense = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.int32)
    count, order = dense.sum(-1), torch.argsort(dense, dim=-1, descending=True, stable=True).int()
    mask = tandem.BlockMask.from_kv_blocks(
        count[None, None].int(), order[None, None], BLOCK_SIZE=16, seq_lengths=(40, 44)
    )
    q, k, v = tensors((2, 2, 40, 8), (2, 2, 44, 8), (2, 2, 44, 8))
    blocks = dense.bool()
    torch_reference.hold(
        lambda *x: tandem.flex_attention(*x, block_mask=mask.to("cpu")),
        lambda *x: plain(*x, mask_mod=lambda b, h, i, j: blocks[i // 16, j // 16])[0],
        (q, k, v),
    )
