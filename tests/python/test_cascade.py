"""tandem.cascade_attention against standard attention in float64 to all keys of each request."""

import pytest

import tandem

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference  # noqa: E402
from flash_attn_cases import int32  # noqa: E402

HEADS, HEADS_K, DIM, PAGES, SIZE = 4, 2, 16, 40, 16
NEW, OWN = (1, 3, 1, 2, 1), (1, 20, 35, 2, 16)  # queries and own keys of each request
GROUPS, SHARED = (3, 1, 1), (40, 0, 17)  # requests and shared keys of each group


def starts(counts):
    return torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)).int()


def tables(random, lengths):
    """Returns a table whose unused entries are no pages; each call uses other pages."""
    columns = -(-max(lengths) // SIZE)
    order = tables.free[: len(lengths) * columns]
    tables.free = tables.free[len(order) :]
    table = order.int().reshape(len(lengths), columns).clone()
    for row, length in zip(table, lengths):
        row[-(-length // SIZE) :] = 10**9
    return table


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"softmax_scale": 0.4, "batch_invariant": True}, {"sink": torch.tensor([0.5, -1, 2, 0.0])}],
    ids=["plain", "softcap", "invariant", "sink"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_keys(random, options, dtype):
    tables.free = torch.randperm(PAGES)
    k, v = random(PAGES, SIZE, HEADS_K, DIM).to(dtype), random(PAGES, SIZE, HEADS_K, DIM).to(dtype)
    q, rows, first = random(sum(NEW), HEADS, DIM).to(dtype), starts(NEW), starts(GROUPS)
    own, shared = tables(random, OWN), tables(random, SHARED)
    options = {name: x.to(dtype) if name == "sink" else x for name, x in options.items()}
    out, lse = tandem.cascade_attention(
        q, k, v, cu_seqlens_q=rows, page_table=own, seqused_k=int32(*OWN), cu_seqlens_group=rows[first.long()],
        group_page_table=shared, group_seqused_k=int32(*SHARED), return_lse=True, **options,
    )  # fmt: skip
    assert out.dtype == dtype
    for g, (begin, end) in enumerate(zip(first[:-1], first[1:])):
        for b in range(begin, end):
            keys, values = (torch.cat((read(x, shared[g], SHARED[g]), read(x, own[b], OWN[b]))) for x in (k, v))
            at = slice(rows[b], rows[b + 1])
            exact = torch_reference.attend(q[at].double(), keys, values, causal=True, **reference_options(options))
            torch.testing.assert_close(out[at].double(), exact[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[:, at].double(), exact[1], rtol=1e-4, atol=1e-5)


def read(pages, table, length):
    places = torch.arange(length)
    return pages[table[places // SIZE].long(), places % SIZE].double()


def reference_options(options):
    names = {"softmax_scale": "scale", "softcap": "softcap", "sink": "sink"}
    found = {names[name]: x for name, x in options.items() if name in names}
    return {name: x.double() if name == "sink" else x for name, x in found.items()}
