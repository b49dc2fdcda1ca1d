"""Functions without an expression and calls that tandem.flex_attention refuses."""

import math

import numpy as np
import pytest

import tandem

torch = pytest.importorskip("torch")

from flex_cases import HEADS, MASK, TABLE, K, Q, V, causal, tensors  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from tandem import flex  # noqa: E402

LONG = torch.zeros(4, 300)


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def reads(score, b, h, q_idx, kv_idx):
    return score * h.item()


def by_numpy(score, b, h, q_idx, kv_idx):
    return score + np.exp(score)


def by_math(score, b, h, q_idx, kv_idx):
    return score + math.exp(score)


def of_a_list(score, b, h, q_idx, kv_idx):
    return score + [1.0, 2.0][h]


def of_an_array(score, b, h, q_idx, kv_idx):
    return score + np.ones(4)[h]


def by_lgamma(score, b, h, q_idx, kv_idx):
    return score + torch.lgamma(score)


def without_index(score, b, h, q_idx, kv_idx):
    return score + LONG[h]


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


def sorted_row(score, b, h, q_idx, kv_idx):
    return torch.stack([score, score + 1]).sort()[0]


def of_none(score, b, h, q_idx, kv_idx):
    return score + TABLE[None, h, q_idx]


def of_a_part(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, 1:][q_idx]


def whole(score, b, h, q_idx, kv_idx):
    return score + TABLE.sum(0)[h].sum(q_idx)


REFUSED = {
    branches: (tandem.Unsupported, "if, and, or, not.* use torch.where"),
    reads: (tandem.Unsupported, r"item\(\) needs a value"),
    by_numpy: (tandem.Unsupported, "numpy needs values"),
    by_math: (tandem.Unsupported, r"float\(\) and functions of math need a value"),
    of_a_list: (tandem.Unsupported, "an index of anything but a tensor needs a value"),
    of_an_array: (tandem.Unsupported, "numpy needs values"),
    by_lgamma: (tandem.Unsupported, "no expression has torch's lgamma"),
    without_index: (tandem.Unsupported, r"a tensor of shape \(300,\) is combined with one score"),
    by_a_float: (tandem.Unsupported, "an index must be an int, not a float"),
    too_many: (IndexError, r"3 indices are too many for a tensor of \(4, 9\)"),
    out_of_bounds: (IndexError, r"index \(9\) must be from -9 to 8: correct it"),
    of_64_bits: (tandem.Unsupported, "the number 2654435761 has more than int's 32 bits"),
    minimum: (tandem.Unsupported, r"min\(\) and max\(\) need a value"),
    by_floats: (tandem.Unsupported, "'&' must have bools or ints, not a float"),
    sorted_row: (tandem.Unsupported, "no expression has torch's sort"),
    of_none: (tandem.Unsupported, "an index must not be None"),
    of_a_part: (tandem.Unsupported, "an index must be a number, not a slice"),
    whole: (tandem.Unsupported, r"no expression has torch's sum with these arguments \(dim must be a literal int"),
}


@pytest.mark.parametrize(("function", "refused"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_functions_without_an_expression_are_refused_with_their_line(function, refused):
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


CALLS = {
    "heads": (lambda f: f(Q, K, V), ValueError, r"key's heads \(2\) must be as many as query's \(4\): pass en"),
    "dimensions": (lambda f: f(Q[0], K[0], V[0]), ValueError, r"query \(3 dimensions\) must be \(batch, h"),
    "numpy": (lambda f: f(Q.numpy(), K, V), TypeError, r"query \(ndarray\) must be a torch tensor"),
    "head_dim": (lambda f: f(Q, K[..., :4], V, enable_gqa=True), ValueError, "key.head_dim"),
    "types": (lambda f: f(Q, K.double(), V, enable_gqa=True), ValueError, "key.dtype"),
    "no function": (lambda f: f(Q, K, V, 3, enable_gqa=True), TypeError, r"score_mod \(int\) must be a function"),
    "text": (
        lambda f: f(Q, K, V, "scor", enable_gqa=True),
        ValueError,
        "score_mod: column 1: 'scor' is not a known name",
    ),
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
