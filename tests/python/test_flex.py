"""tandem.flex_attention: functions traced to texts, outputs and gradients of the gallery, block masks, refusals."""

import inspect
import math

import numpy as np
import pytest

import reference
import tandem

torch = pytest.importorskip("torch")

import torch_reference  # noqa: E402
from torch._higher_order_ops.flex_attention import math_attention  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from tandem import flex  # noqa: E402
from tandem._trace import trace  # noqa: E402

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 36, 36, 16
CPU = torch.device("cpu")


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def plain(q, k, v, score_mod=None, mask_mod=None, scale=None):
    """The formula, whose functions are given whole tensors: out and lse."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = [x.expand(s.shape) for x in torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij")]
    if score_mod is not None:
        s = score_mod(s, *places)
    if mask_mod is not None:
        s = s.masked_fill(~mask_mod(*places), -torch.inf)
    empty = (s == -torch.inf).all(-1)
    s = s.masked_fill(empty[..., None], 0.0)
    p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
    return p @ v, s.logsumexp(-1).masked_fill(empty, -torch.inf)


# ---- Gallery --------------------------------------------------------------------------------------------------------

WINDOW, DOCUMENTS = 7, (torch.arange(BATCH * KEYS) % KEYS // 5).view(BATCH, KEYS)
LENGTHS, PREFIX, SIDE = torch.tensor([20, 36]), torch.tensor([3, 11]), 6


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


def prefix_lm(b, h, q_idx, kv_idx):
    return torch.logical_or(kv_idx < PREFIX[b], q_idx >= kv_idx)


def documents(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def neighbourhood(b, h, q_idx, kv_idx):
    def place(idx):
        return idx // SIDE, idx % SIDE

    (q_y, q_x), (kv_y, kv_x) = place(q_idx), place(kv_idx)
    y, x = q_y.clamp(1, SIDE - 2), torch.clamp(q_x, min=1, max=SIDE - 2)
    return ((y - kv_y).abs() <= 1) & (torch.abs(x - kv_x) <= 1)


def jagged(b, h, q_idx, kv_idx):
    return (q_idx < LENGTHS[b]) & (kv_idx < LENGTHS[b])


def dilated(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0) & ~(h == 1)


def alibi(slopes):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * slopes[h]

    return score_mod


def computed_alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(score / 2.0)


def relative(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, torch.clamp(q_idx - kv_idx + 8, 0, 16)]


def t5_bias(table):
    def bucket(distance):
        exact = 4
        far = exact + (torch.log((distance + 1).to(torch.float64) / exact) / math.log(8) * 4).to(torch.int64)
        return torch.where(distance < exact, distance, torch.minimum(far, torch.full_like(far, 7)))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[bucket(torch.maximum(q_idx - kv_idx, torch.zeros_like(q_idx))), h]

    return score_mod


def temperature(scale, bias):
    return lambda score, b, h, q_idx, kv_idx: score * scale[h] + torch.where(q_idx > kv_idx, bias, -0.5 * bias)


def hidden_by_score(score, b, h, q_idx, kv_idx):
    return torch.where((q_idx >= kv_idx) | (h == 0), score, -float("inf"))


GALLERY = {
    "causal": ((), lambda: None, causal),
    "sliding window": ((), lambda: None, sliding_window),
    "prefix-LM": ((), lambda: None, prefix_lm),
    "documents": ((), lambda: None, flex.and_masks(documents, causal)),
    "either": ((), lambda: None, flex.or_masks(documents, sliding_window)),
    "neighbourhood": ((), lambda: None, neighbourhood),
    "jagged": ((), lambda: None, jagged),
    "dilated": ((), lambda: None, dilated),
    "ALiBi": (((HEADS,),), alibi, causal),
    "computed ALiBi": ((), lambda: computed_alibi, causal),
    "softcap": ((), lambda: softcap, None),
    "relative": (((HEADS, 17),), relative, None),
    "T5": (((8, HEADS),), t5_bias, causal),
    "temperature": (((HEADS,), ()), temperature, documents),
    "hidden by score": ((), lambda: hidden_by_score, None),
    "nothing": ((), lambda: None, flex.noop_mask),
}


@pytest.mark.parametrize(("captured", "score_mod", "mask_mod"), GALLERY.values(), ids=GALLERY)
def test_gallery(captured, score_mod, mask_mod):
    inputs = tensors((BATCH, HEADS, QUERIES, DIM), *[(BATCH, 2, KEYS, DIM)] * 2, *captured)
    mask = None
    if mask_mod is not None:
        mask = tandem.create_block_mask(mask_mod, BATCH, HEADS, QUERIES, KEYS, device="cpu", BLOCK_SIZE=16)

    def ours(q, k, v, *tables):
        out, aux = tandem.flex_attention(
            q, k, v, score_mod(*tables), mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True)
        )
        return out, aux.lse

    torch_reference.hold(ours, lambda q, k, v, *tables: plain(q, k, v, score_mod(*tables), mask_mod), inputs, outputs=2)


@pytest.mark.parametrize(("captured", "score_mod", "mask_mod"), GALLERY.values(), ids=GALLERY)
def test_gallery_against_torch(captured, score_mod, mask_mod, monkeypatch):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    inputs = tensors((BATCH, HEADS, QUERIES, DIM), *[(BATCH, 2, KEYS, DIM)] * 2, *captured)
    mask = None
    if mask_mod is not None:
        mask = theirs.create_block_mask(mask_mod, BATCH, HEADS, QUERIES, KEYS, device="cpu", BLOCK_SIZE=16)

    def attend(function, dtype):
        q, k, v, *tables = (x.to(dtype) for x in inputs)
        return function(q, k, v, score_mod(*tables), mask, enable_gqa=True).numpy()

    exact, rounded = attend(theirs.flex_attention, torch.float64), attend(theirs.flex_attention, torch.float32)
    reference.hold(attend(tandem.flex_attention, torch.float32), exact, rounded)


# ---- Block masks ----------------------------------------------------------------------------------------------------


def blocks_of_any_kind(batch, heads, seed=3):
    """A BlockMask whose lists say more than its mask_mod, with rows that see nothing, in no order."""
    random = np.random.default_rng(seed)
    kind = torch.from_numpy(random.integers(0, 4, (batch, heads, 3, 5)))  # hidden, hidden, in part, whole
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
    """The mask with no block in its lists; data: so that no version counts it."""
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
    mask.mask_mod = within(30)  # shown of blocks that the first shows in part
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
    """The lists are of the first, and hide what the second would show beyond them."""
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


# ---- Tracing --------------------------------------------------------------------------------------------------------


def text(function, argument="score_mod"):
    return trace(function, argument, CPU).text


def test_texts_are_as_one_would_write_them():
    slopes, table, gain = torch.rand(HEADS), torch.rand(HEADS, 9), torch.tensor(2.0)
    assert text(alibi(slopes)) == "score + (k - q) * slopes[head]"
    assert text(softcap) == "2.0 * tanh(score / 2.0)"
    assert text(causal, "mask_mod") == "q >= k"
    assert text(sliding_window, "mask_mod") == "(q >= k) & (q - k <= WINDOW)"
    assert text(lambda s, b, h, q, k: s * gain + table[h][q // 2]) == "score * gain + table[head, q // 2]"
    assert text(lambda s, b, h, q, k: s + table[:, q % 9][h]) == "score + table[head, q % 9]"
    assert text(lambda s, b, h, q, k: s + table[..., 3][h] + table[h, -1]) == "score + tensor0[head] + table[head, 8]"
    assert text(lambda s, b, h, q, k: s) == "score"
    assert text(lambda b, h, q, k: ~(q < k), "mask_mod") == "~(q < k)"
    assert text(lambda s, b, h, q, k: -((q - k) ** 3) * s) == "t0 = q - k; -(t0 * t0 * t0) * score"
    assert text(lambda s, b, h, q, k: torch.relu(torch.rsqrt(s))) == "t0 = 1.0 / sqrt(score); select(t0 <= 0, 0, t0)"
    assert text(lambda s, b, h, q, k: s.where(q > k, gain)) == "select(q > k, score, gain)"
    assert text(lambda s, b, h, q, k: gain.where(q > k, s)) == "select(q > k, gain, score)"
    assert text(lambda s, b, h, q, k: s + torch.clamp(q - k, 0, 9)) == "score + min(max(q - k, 0), 9)"
    unused = trace(lambda s, b, h, q, k: (slopes[h], s)[1], "score_mod", CPU)
    assert (unused.text, unused.bindings) == ("score", {})


def test_a_changed_number_changes_no_text():
    def window(width, gain):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx < width, score * gain, score / 4)

        return trace(score_mod, "score_mod", CPU)

    one, other = window(9, 0.5), window(1000, 3.25)
    assert one.text == other.text == "select(q - k < width, score * gain, score / 4)"
    assert (one.bindings, other.bindings) == ({"width": 9, "gain": 0.5}, {"width": 1000, "gain": 3.25})
    wide = trace(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < WINDOW) | (kv_idx == 7), "mask_mod", CPU)
    assert wide.bindings == {"WINDOW": 7}  # also where it is a global one, equal to a literal
    assert window(4, 0.5).text != one.text  # the literal is the number that is captured: one name for both


def test_captured_things_are_looked_at_in_every_call():
    table = torch.zeros(HEADS)
    q, k, v = tensors(*[(1, HEADS, 5, 8)] * 3)
    function = alibi(table)
    before = tandem.flex_attention(q, k, v, function)
    table += 3
    assert not torch.equal(before, tandem.flex_attention(q, k, v, function))


def test_negative_indices_count_from_the_end():
    table = torch.randn(HEADS, 2 * KEYS, dtype=torch.float64)
    inputs = tensors((BATCH, HEADS, QUERIES, DIM), *[(BATCH, HEADS, KEYS, DIM)] * 2)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx - q_idx].to(score.dtype) + table[h, kv_idx % -KEYS].to(score.dtype)

    torch_reference.hold(lambda *x: tandem.flex_attention(*x, score_mod), lambda *x: plain(*x, score_mod)[0], inputs)


class Random:
    """Random functions, which take symbols as well as tensors."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.floats = tensors((HEADS, 7), dtype=torch.float64, seed=seed)[0]
        self.ints = torch.from_numpy(self.random.integers(-9, 9, (BATCH, 11)))
        self.bools = torch.from_numpy(self.random.integers(0, 2, 5) > 0)
        self.gain = torch.tensor(1.5, dtype=torch.float64)

    def pick(self, *choices):
        return choices[self.random.integers(len(choices))]

    def number(self, depth):
        if depth == 0:
            constant = float(self.random.normal())
            return self.pick(lambda e: e[0], lambda e: e[0], lambda e: constant * e[0], lambda e: self.gain - e[0])
        x, y, i, c = self.number(depth - 1), self.number(depth - 1), self.integer(depth - 1), self.condition(depth - 1)
        return self.pick(
            lambda e: x(e) + y(e),
            lambda e: x(e) - y(e) * 0.5,
            lambda e: torch.tanh(x(e)) * y(e),
            lambda e: x(e) / (1 + abs(y(e))),
            lambda e: torch.where(c(e), x(e), y(e)),
            lambda e: torch.minimum(x(e), y(e)) + torch.maximum(x(e), self.gain),
            lambda e: x(e).clamp(-1.0, 2) ** 2,
            lambda e: torch.sigmoid(x(e)) - torch.exp(-torch.abs(y(e))),
            lambda e: torch.sqrt(torch.abs(x(e))) * torch.sign(y(e)),
            lambda e: torch.floor(x(e)) + torch.remainder(y(e), 1.25),
            lambda e: x(e) + self.floats[e[2], i(e) % 7 - 7],
            lambda e: -x(e) + i(e) * 0.125,
            lambda e: torch.exp2(torch.clamp(x(e), max=3.0)),
            lambda e: (x(e) > y(e)).to(torch.float64) + torch.rsqrt(1.0 + x(e).square()),
        )

    def integer(self, depth):
        if depth == 0:
            constant = int(self.random.integers(-5, 40))
            return self.pick(lambda e: e[1], lambda e: e[2], lambda e: e[3], lambda e: e[4], lambda e: e[3] + constant)
        i, j, x, c = self.integer(depth - 1), self.integer(depth - 1), self.number(depth - 1), self.condition(depth - 1)
        return self.pick(
            lambda e: i(e) + j(e),
            lambda e: i(e) - 3 * j(e),
            lambda e: i(e) // (1 + abs(j(e))),
            lambda e: i(e) % 5 - j(e) % -4,
            lambda e: (i(e) & 7) | (j(e) ^ 2),
            lambda e: (i(e) >> 1) + ((j(e) & 3) << 2),
            lambda e: torch.where(c(e), i(e), -j(e)),
            lambda e: torch.minimum(i(e), j(e)) + torch.maximum(i(e), self.ints[0, 0]),
            lambda e: self.ints[e[1], i(e) % 11],
            lambda e: torch.clamp(i(e), -3, 9) + torch.div(j(e), 3, rounding_mode="trunc"),
            lambda e: torch.clamp(x(e), -50.0, 50.0).to(torch.int64) + ~i(e),
            lambda e: c(e) * 3 + c(e).long(),
        )

    def condition(self, depth):
        if depth == 0:
            return self.pick(lambda e: e[3] >= e[4], lambda e: self.bools[e[4] % 5], lambda e: e[0] > 0.5)
        a, b, i, x = (
            self.condition(depth - 1),
            self.condition(depth - 1),
            self.integer(depth - 1),
            self.number(depth - 1),
        )
        return self.pick(
            lambda e: a(e) & b(e),
            lambda e: a(e) | ~b(e),
            lambda e: torch.logical_xor(a(e), i(e)),
            lambda e: (i(e) < e[3]) == b(e),
            lambda e: (x(e) <= 0.25) != a(e),
            lambda e: torch.logical_not(torch.isfinite(x(e))) | (i(e) != 4),
        )


@pytest.mark.parametrize("seed", range(40))
def test_random_functions(seed):
    """Every score by itself, and its gradients: the LSE of a query that sees one key is that key's score."""
    random = Random(seed)
    function = random.number(1 + seed % 4)
    q, k, v = tensors((BATCH, HEADS, 5, 8), *[(BATCH, HEADS, 6, 8)] * 2, dtype=torch.float64, seed=seed)
    inputs = [x.requires_grad_() for x in (q, k, random.floats, random.gain)]

    def score_mod(score, b, h, q_idx, kv_idx):
        return function((score, b, h, q_idx, kv_idx)) + 0 * random.gain * random.floats[0, 0] * score

    scores = q @ k.mT * 8**-0.5
    places = [x.expand(scores.shape) for x in torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")]
    wanted = score_mod(scores, *places)

    def only(key):
        mask = tandem.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx == key, None, None, 5, 6, "cpu", 8)
        return tandem.flex_attention(q, k, v, score_mod, mask, return_lse=True)[1]

    ours = torch.stack([only(key) for key in range(6)], -1)
    (weights,) = tensors(wanted.shape, dtype=torch.float64, seed=seed + 100)
    what = f"seed {seed}: {trace(score_mod, 'score_mod', CPU).text}"
    gradients = (torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, wanted))
    for got, want in zip((ours, *next(gradients)), (wanted, *next(gradients))):
        reference.hold(got.detach(), want.detach(), want.detach(), what)


# ---- What cannot be said --------------------------------------------------------------------------------------------

TABLE = torch.zeros(HEADS, 9)


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def asks(score, b, h, q_idx, kv_idx):
    return score * h.item()


def by_numpy(score, b, h, q_idx, kv_idx):
    return score + np.exp(score)


def by_math(score, b, h, q_idx, kv_idx):
    return score + math.exp(score)


def of_a_list(score, b, h, q_idx, kv_idx):
    return score + [1.0, 2.0][h]


def of_an_array(score, b, h, q_idx, kv_idx):
    return score + np.ones(4)[h]


def by_sin(score, b, h, q_idx, kv_idx):
    return score + torch.sin(score)


def without_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h]


def by_a_float(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, score]


def too_many(score, b, h, q_idx, kv_idx):
    return score + TABLE[b, h, q_idx]


def out_of_bounds(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, 9]


def of_64_bits(score, b, h, q_idx, kv_idx):
    return score + q_idx * 0x9E3779B1


def minimum(score, b, h, q_idx, kv_idx):
    return min(score, 3.0)


def by_floats(score, b, h, q_idx, kv_idx):
    return score + (score & 1)


def stacked(score, b, h, q_idx, kv_idx):
    return torch.stack([score, score])[0]


def of_none(score, b, h, q_idx, kv_idx):
    return score + TABLE[None, h, q_idx]


def of_a_part(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, 1:][q_idx]


def whole(score, b, h, q_idx, kv_idx):
    return score + TABLE.sum(0)[h].sum(q_idx)


REFUSED = {
    branches: (tandem.Unsupported, "if, and, or, not.* use torch.where"),
    asks: (tandem.Unsupported, r"item\(\) asks for a value"),
    by_numpy: (tandem.Unsupported, "numpy asks for values"),
    by_math: (tandem.Unsupported, r"float\(\) and functions of math ask for a value"),
    of_a_list: (tandem.Unsupported, "an index of what is no tensor asks for a value"),
    of_an_array: (tandem.Unsupported, "numpy asks for values"),
    by_sin: (tandem.Unsupported, "torch's sin is not among what a text can say"),
    without_index: (tandem.Unsupported, r"a tensor of shape \(9,\) meets one score: index it"),
    by_a_float: (tandem.Unsupported, "an index is an int, and this is a float"),
    too_many: (IndexError, r"3 indices are given to a tensor of shape \(4, 9\)"),
    out_of_bounds: (IndexError, "index 9 is out of bounds for a dimension of 9"),
    of_64_bits: (tandem.Unsupported, "the number 2654435761 has more than int's 32 bits"),
    minimum: (tandem.Unsupported, r"min\(\) and max\(\) ask for a value"),
    by_floats: (tandem.Unsupported, "'&' takes bools or ints, and one side is a float"),
    stacked: (tandem.Unsupported, "torch's stack is not among"),
    of_none: (tandem.Unsupported, "None adds a dimension"),
    of_a_part: (tandem.Unsupported, "an index is a number, and this is a slice"),
    whole: (tandem.Unsupported, "a tensor's sum is not among"),
}


@pytest.mark.parametrize(("function", "refused"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_what_no_text_says_is_refused_with_its_line(function, refused):
    kind, sentence = refused
    q, k, v = tensors(*[(1, HEADS, 4, 8)] * 3)
    where = rf'^score_mod \("{__file__}", line {function.__code__.co_firstlineno + 1}, in {function.__name__}\): '
    with pytest.raises(kind, match=where + ".*" + sentence):
        tandem.flex_attention(q, k, v, function)


def test_results_of_the_wrong_kind():
    q, k, v = tensors(*[(1, HEADS, 4, 8)] * 3)
    for function, given in ((lambda s, *x: x[0] == 0, "a bool"), (lambda s, *x: None, "NoneType"),
                            (lambda s, *x: TABLE[x[1]], r"a tensor of shape \(9,\)")):  # fmt: skip
        with pytest.raises(TypeError, match=f"score_mod .*must return a number for each score, and returns {given}"):
            tandem.flex_attention(q, k, v, function)
    mask = theirs.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        mask_mod=lambda b, h, i, j: i - j, seq_lengths=(4, 4),
    )  # fmt: skip
    with pytest.raises(TypeError, match="mask_mod .*must return a bool for each score, and returns an int"):
        tandem.flex_attention(q, k, v, block_mask=mask)


Q, K, V = tensors((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))
MASK = tandem.create_block_mask(causal, None, None, 5, 6, device="cpu")
CALLS = {
    "heads": (lambda f: f(Q, K, V), ValueError, r"key's heads \(2\) must be as many as query's \(4\) unless en"),
    "dimensions": (lambda f: f(Q[0], K[0], V[0]), ValueError, r"query \(3 dimensions\) must have 4"),
    "numpy": (lambda f: f(Q.numpy(), K, V), TypeError, r"query \(ndarray\) must be a torch tensor"),
    "head_dim": (lambda f: f(Q, K[..., :4], V, enable_gqa=True), ValueError, "key.head_dim"),
    "types": (lambda f: f(Q, K.double(), V, enable_gqa=True), ValueError, "key.dtype"),
    "no function": (lambda f: f(Q, K, V, 3, enable_gqa=True), TypeError, r"score_mod \(int\) must be a function"),
    "text": (lambda f: f(Q, K, V, "scor", enable_gqa=True), ValueError, "score_mod: column 1: 'scor' means nothing"),
    "options": (
        lambda f: f(Q, K, V, enable_gqa=True, kernel_options={"BLOCK_M": 64, "BLOCK_X": 3}),
        ValueError, r"kernel_options \('BLOCK_X'\) must have names",
    ),
    "both": (
        lambda f: f(Q, K, V, enable_gqa=True, return_lse=True, return_aux=flex.AuxRequest()),
        ValueError, "return_lse must be False where return_aux is given",
    ),
    "no mask": (lambda f: f(Q, K, V, None, causal, enable_gqa=True), TypeError, r"block_mask \(function\) must be a"),
    "lengths": (
        lambda f: f(Q, K[:, :, :5], V[:, :, :5], None, MASK, enable_gqa=True),
        ValueError, r"block_mask \(5 x 6\) must be of query's and key's lengths \(5 x 5\)",
    ),
    "nested": (
        lambda f: f(torch.nested.nested_tensor([Q[0]], layout=torch.jagged), K, V),
        tandem.Unsupported, r"query \(nested\) is not served",
    ),
    "batch": (lambda f: f(Q, K[:1], V[:1], enable_gqa=True), ValueError, r"key's batch \(1\) must be query's \(2\)"),
    "a slice": (
        lambda f: f(Q, K, V, None, MASK[:, :, :1], enable_gqa=True),
        RuntimeError, "Cannot use mask_mod from a sliced BlockMask",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "sentence"), CALLS.values(), ids=CALLS)
def test_calls_that_are_refused(call, kind, sentence):
    with pytest.raises(kind, match=sentence):
        call(tandem.flex_attention)


# ---- Interface ------------------------------------------------------------------------------------------------------


def test_what_is_returned():
    out = tandem.flex_attention(
        Q, K, V[..., :3], enable_gqa=True, kernel_options={"fwd_BLOCK_M": 64, "BACKEND": "AUTO"}
    )
    assert out.shape == (2, 4, 5, 3)
    again, lse = tandem.flex_attention(Q, K, V[..., :3], enable_gqa=True, return_lse=True)
    assert torch.equal(out, again) and lse.shape == (2, 4, 5)
    again, aux = tandem.flex_attention(Q, K, V[..., :3], enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    assert torch.equal(aux.lse, lse) and aux.max_scores is None
    one, two = (
        tandem.flex_attention(Q, x, x, None, MASK, enable_gqa=True) for x in (K[:1], K[:1].expand(2, -1, -1, -1))
    )
    assert torch.equal(one, two)
    scaled = tandem.flex_attention(Q, K, V, scale=0.25, enable_gqa=True)
    reference.hold(
        scaled, *(plain(*(x.to(t) for x in (Q, K, V)), scale=0.25)[0] for t in (torch.float64, torch.float32))
    )


def largest_scores(score_mod, block_mask, q, k, dtype=torch.float64):
    """By torch's formula, which its own call has for GPUs alone."""
    q, k = (x.detach().to(dtype) for x in (q, k))
    score_mod = score_mod or (lambda score, b, h, q_idx, kv_idx: score)
    blocks = block_mask.as_tuple() if hasattr(block_mask, "as_tuple") else block_mask
    return math_attention(q, k, k, score_mod, blocks, q.shape[-1] ** -0.5, {})[2] * math.log(2)


def nothing_early(b, h, q_idx, kv_idx):
    return (q_idx > 1) & (kv_idx <= q_idx)


@pytest.mark.parametrize("how", ["eager", "gradient", "compiled"])
def test_largest_scores(how):
    def distance(score, b, h, q_idx, kv_idx):
        return score * 3 - (q_idx - kv_idx).abs() * 0.25

    mask = tandem.create_block_mask(nothing_early, None, None, 5, 6, device="cpu")
    q = Q.clone().requires_grad_(how == "gradient")
    attend = torch.compile(tandem.flex_attention, backend="aot_eager") if how == "compiled" else tandem.flex_attention
    request = flex.AuxRequest(lse=True, max_scores=True)
    out, aux = attend(q, K, V, distance, mask, enable_gqa=True, return_aux=request)
    again, lse = tandem.flex_attention(q, K, V, distance, mask, enable_gqa=True, return_lse=True)
    assert torch.equal(out, again) and torch.equal(aux.lse, lse) and not aux.max_scores.requires_grad
    assert aux.max_scores.dtype == torch.float32 and (aux.max_scores[:, :, :2] == -torch.inf).all()
    torch.testing.assert_close(aux.max_scores, largest_scores(distance, mask, Q, K).float())
    if how == "gradient":
        out.sum().backward()
        assert q.grad is not None


def test_largest_scores_of_arrays():
    found = np.full((2, 4, 5), np.nan, np.float32)
    q, k, v = (x.transpose(1, 2).contiguous().numpy() for x in (Q, K, V))
    tandem.attention(q, k, v, mask_mod="k <= q", max_scores=found)
    mask = tandem.create_block_mask(causal, None, None, 5, 6, device="cpu")
    exact, plainly = (largest_scores(None, mask, Q, K, x) for x in (torch.float64, torch.float32))
    reference.hold(torch.from_numpy(found), exact, plainly)


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
    with pytest.raises(ValueError, match="mask_mod: column 1: a mask_mod gives a bool"):
        tandem.Blocks.of("k - q", 8, 8)
    with pytest.raises(ValueError, match=r"mask_block_k \(0\) must be at least 1"):
        tandem.Blocks.of("k <= q", 8, 8, BLOCK_SIZE=(8, 0))
    with pytest.raises(ValueError, match=r"seqlen_q \(-8\) must be 0 to"):
        tandem.Blocks.of("k <= q", -8, 8)
    with pytest.raises(TypeError, match="must be a text or a tandem.Mod"):
        tandem.Blocks.of(causal, 8, 8)


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize("shape", [(None, None, 300, 260), (2, 3, 130, 256), (None, 3, 1, 128), (1, 1, 128, 1)])
def test_block_masks_of_functions_are_torchs(by_text, shape):
    doc = torch.arange(300).clamp(max=290) // 97

    def documents(b, h, q_idx, kv_idx):
        return (doc[q_idx] == doc[kv_idx]) & (q_idx * (h + 1) >= kv_idx - b)

    def beyond_texts(b, h, q_idx, kv_idx):
        return documents(b, h, q_idx, kv_idx) & ~(torch.sin(q_idx * 1.0) > 2)

    function = documents if by_text else beyond_texts
    assert (flex._made_of(function, (1, 1, 8, 8, 8, 8), torch.device("cpu")) is not None) == by_text
    made, wanted = (x.create_block_mask(function, *shape, device="cpu") for x in (tandem, theirs))
    of_queries = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    for name in (*of_queries, *(name.replace("kv_", "q_") for name in of_queries)):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name


def test_texts_take_the_place_of_functions():
    mod = tandem.Mod("score - slope[head] * abs(q - k)", slope=torch.ones(4))
    function = tandem.flex_attention(Q, K, V, lambda s, b, h, q, k: s - TABLE[h, 0] - abs(q - k), enable_gqa=True)
    reference.hold(tandem.flex_attention(Q, K, V, mod, enable_gqa=True), function.double(), function)


def test_signatures_are_torchs():
    for name in ("flex_attention", "create_block_mask"):
        ours, wanted = (inspect.signature(getattr(x, name)).parameters for x in (tandem, theirs))
        defaults = [{n: (p.default, p.kind) for n, p in x.items()} for x in (ours, wanted)]
        assert defaults[0] == defaults[1]


def test_names_of_the_package():
    assert tandem.BlockMask is theirs.BlockMask and tandem.and_masks is theirs.and_masks
    assert tandem.noop_mask is theirs.noop_mask and tandem.flex_attention is flex.flex_attention


@pytest.mark.parametrize("backward", [False, True])
def test_compiled_as_torchs_documentation_does(backward):
    attend = torch.compile(tandem.flex_attention, backend="aot_eager")
    table = TABLE.clone().requires_grad_()
    q = Q.clone().requires_grad_(backward)
    function = relative(table) if backward else softcap
    out = attend(q, K, V, function, MASK, enable_gqa=True)
    eager = tandem.flex_attention(q, K, V, function, MASK, enable_gqa=True)
    assert torch.equal(out, eager)
    if backward:
        gradients = (torch.autograd.grad(x.sum(), (q, table)) for x in (out, eager))
        assert all(torch.equal(x, y) for x, y in zip(*gradients))


# ---- Block masks ----------------------------------------------------------------------------------------------------

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
