"""tandem.cascade_attention against standard attention in float64 to all keys of each request."""

import importlib

import numpy as np
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


def problem(random, dtype):
    """Returns the arguments of a call."""
    tables.free = torch.randperm(PAGES)
    k, v = random(PAGES, SIZE, HEADS_K, DIM).to(dtype), random(PAGES, SIZE, HEADS_K, DIM).to(dtype)
    rows = starts(NEW)
    return dict(
        q=random(sum(NEW), HEADS, DIM).to(dtype), k=k, v=v, cu_seqlens_q=rows, page_table=tables(random, OWN),
        seqused_k=int32(*OWN), cu_seqlens_group=rows[starts(GROUPS).long()], group_page_table=tables(random, SHARED),
        group_seqused_k=int32(*SHARED),
    )  # fmt: skip


def check(p, out, lse, **options):
    """Compares results with standard attention to the shared and own keys of each request."""
    first, rows = starts(GROUPS), p["cu_seqlens_q"]
    own, shared = p["page_table"], p["group_page_table"]
    for g, (begin, end) in enumerate(zip(first[:-1], first[1:])):
        for b in range(begin, end):
            keys, values = (
                torch.cat((read(x, shared[g], SHARED[g]), read(x, own[b], OWN[b]))) for x in (p["k"], p["v"])
            )
            at = slice(rows[b], rows[b + 1])
            exact = torch_reference.attend(p["q"][at].double(), keys, values, causal=True, **options)
            torch.testing.assert_close(out[at].double(), exact[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[:, at].double(), exact[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"softmax_scale": 0.4, "batch_invariant": True}, {"sink": torch.tensor([0.5, -1, 2, 0.0])}],
    ids=["plain", "softcap", "invariant", "sink"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("binding", ["native", "ctypes"])
def test_shared_keys(random, monkeypatch, options, dtype, binding):
    if binding == "ctypes":
        monkeypatch.setattr(tandem._binding, "binding", importlib.import_module("tandem._ctypes"))
    p = problem(random, dtype)
    options = {name: x.to(dtype) if name == "sink" else x for name, x in options.items()}
    out, lse = tandem.cascade_attention(**p, return_lse=True, **options)
    assert out.dtype == dtype
    check(p, out, lse, **reference_options(options))


def test_numpy(random):
    p = problem(random, torch.float32)
    arrays = {name: x.numpy() for name, x in p.items()}
    out, lse = tandem.cascade_attention(**arrays, return_lse=True)
    assert isinstance(out, np.ndarray)
    check(p, torch.from_numpy(out), torch.from_numpy(lse))


def test_compiled_and_under_autocast(random):
    p = problem(random, torch.float32)
    want = tandem.cascade_attention(**p)
    compiled = torch.compile(lambda: tandem.cascade_attention(**p), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), want)
    dynamic = torch.compile(tandem.cascade_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for bound in (None, 5, 8):
        assert torch.equal(dynamic(**p, max_seqlen_q=bound, max_rows_group=bound), want)
    with torch.autocast("cpu", torch.bfloat16):
        low = tandem.cascade_attention(**p)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), want, rtol=0.05, atol=0.05)


def test_refusals(random):
    p = problem(random, torch.float32)
    with pytest.raises(ValueError, match="cu_seqlens_group.* must be an entry of cu_seqlens_q"):
        tandem.cascade_attention(**{**p, "cu_seqlens_group": int32(0, 2, 7, 8)})
    with pytest.raises(TypeError, match="group_page_table .* must be a torch tensor"):
        tandem.cascade_attention(**{**p, "group_page_table": None})
    with pytest.raises(tandem.Unsupported, match="k must not require a gradient"):
        tandem.cascade_attention(**{**p, "k": p["k"].clone().requires_grad_()})
    for name, value, error in (
        ("q", torch.tensor(1.0), ValueError), ("max_seqlen_q", 3.5, TypeError),
        ("batch_invariant", "no", TypeError), ("batch_invariant", torch.tensor([1, 0]), TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name} .* must be"):
            tandem.cascade_attention(**{**p, name: value})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph(random):
    first, second = problem(random, torch.bfloat16), problem(random, torch.bfloat16)
    p = {name: x.cuda() for name, x in first.items()}
    wants = [tandem.cascade_attention(**{name: x.cuda() for name, x in each.items()}) for each in (first, second)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tandem.cascade_attention(**p)
    for each, want in zip((first, second), wants):
        for name, x in p.items():
            x.copy_(each[name])
        graph.replay()
        assert torch.equal(out, want)


def read(pages, table, length):
    places = torch.arange(length)
    return pages[table[places // SIZE].long(), places % SIZE].double()


def reference_options(options):
    names = {"softmax_scale": "scale", "softcap": "softcap", "sink": "sink"}
    found = {names[name]: x for name, x in options.items() if name in names}
    return {name: x.double() if name == "sink" else x for name, x in found.items()}
