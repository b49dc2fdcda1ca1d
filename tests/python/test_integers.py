"""Whole numbers of every entry point: a number that a field in C cannot hold is refused by name, not shortened."""

import numpy as np
import pytest

import tandem
from tandem import _binding

Q = np.ones((1, 3, 2, 8), np.float32)
PAGES = np.ones((2, 4, 2, 8), np.float32)


def int32(*numbers):
    return np.array(numbers, np.int32)


def cascade(n):
    tables = {"page_table": int32(0)[None], "group_page_table": int32(1)[None]}
    lengths = {"cu_seqlens_q": int32(0, 3), "seqused_k": int32(3), "cu_seqlens_group": int32(0, 3)}
    return tandem.cascade_attention(Q[0], PAGES, PAGES, **tables, **lengths, group_seqused_k=int32(4), max_rows_group=n)


def plan(**options):
    return tandem.ContextPlan([7], **{"ranks": 1, **options})


CALLS = {
    "max_seqlen_q": lambda n: tandem.attention(Q, Q, Q, max_seqlen_q=n),
    "num_splits": lambda n: tandem.attention(Q, Q, Q, num_splits=n),
    "window": lambda n: tandem.attention(Q, Q, Q, window=(n, 0)),
    "BLOCK_SIZE": lambda n: tandem.Blocks.of("q >= k", 3, 3, BLOCK_SIZE=(n, 128)),
    "seqlen_q": lambda n: tandem.Blocks.of("q >= k", n, 3),
    "batch": lambda n: tandem.Blocks.of("q >= k", 3, 3, batch=n),
    "max_rows_group": cascade,
    "ranks": lambda n: plan(ranks=n),
    "chunk": lambda n: plan(chunk=n),
    "window of a plan": lambda n: plan(window=(n, 0)),
    "rank": lambda n: plan().rows(n),
    "q_rank": lambda n: plan().steps(n, 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [2**64 + 3, 3.5, "3"])
def test_numbers_are_not_shortened(name, number):
    with pytest.raises((TypeError, ValueError), match=rf"^{name.partition(' ')[0]}.*must be an integer of at most"):
        CALLS[name](number)


def test_numbers_are_not_shortened_through_ctypes(monkeypatch):
    from tandem import _ctypes

    monkeypatch.setattr(_binding, "binding", _ctypes)
    for name in CALLS:
        test_numbers_are_not_shortened(name, 2**64 + 3)
