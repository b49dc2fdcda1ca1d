"""The expressions of functions that tandem.flex_attention traces."""

import numpy as np
import pytest

import reference
import tandem

torch = pytest.importorskip("torch")

import torch_reference  # noqa: E402
from flex_cases import BATCH, DIM, HEADS, KEYS, QUERIES, WINDOW, alibi, causal, plain, sliding_window, softcap, tensors  # noqa: E402

from tandem._trace import trace  # noqa: E402

CPU = torch.device("cpu")


def text(function, argument="score_mod"):
    return trace(function, argument, CPU).text


def test_texts_are_as_one_would_write_them():
    slopes, table, gain = torch.rand(HEADS), torch.rand(HEADS, 9), torch.tensor(2.0)
    assert text(alibi(slopes)) == "score + (k - q) * slopes[head]"
    assert text(softcap) == "tanh(score / 2.0) * 2.0"
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
    assert wide.bindings == {"WINDOW": 7}  # also if the literal equals a global variable
    assert window(4, 0.5).text != one.text  # the literal equals the captured number and shares its name


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
    """Random functions, which accept symbols as well as tensors."""

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
    """Checks every score separately, and its gradients: the LSE of a query with one visible key is that key's score."""
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
