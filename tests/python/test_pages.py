"""The Python examples of the pages run as they are written, on CPU tensors."""

import pathlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tandem  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
BATCH, SEQLEN, HEADS, DIM = 2, 96, 4, 16


def examples(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def names(**others):
    """The names that the examples leave to the reader."""
    q, k, v = torch.randn(3, BATCH, SEQLEN, HEADS, DIM).requires_grad_()
    found = {"np": np, "torch": torch, "tandem": tandem, "q": q, "k": k, "v": v}
    found |= dict(zip(("query", "key", "value"), (x.transpose(1, 2) for x in (q, k, v))))
    found |= {"B": BATCH, "H": HEADS, "L": SEQLEN, "S": SEQLEN, "Q_LEN": SEQLEN, "KV_LEN": SEQLEN}
    return {**found, **others}


def run(text, **others):
    found = names(**others)
    exec(compile(text, "a page", "exec"), found)
    return found


def test_the_native_call():
    native, parts, bias, *_ = examples("docs/python.md")
    table = torch.randn(HEADS, SEQLEN, requires_grad=True)
    cu = torch.tensor([0, 30, SEQLEN], dtype=torch.int32)
    packed = "cu_seqlens_q"
    for line in native.splitlines():
        sequences = {name: names()[name][0] for name in ("q", "k", "v")} if packed in line else {}
        found = run(line, table=table, sink=torch.zeros(HEADS), cu=cu, n=66, **sequences)
        assert "out" not in found or found["out"].isfinite().all()
    found["out"].sum().backward()
    assert packed in native and table.grad.any()
    q, k, v = (names()[name] for name in ("q", "k", "v"))
    half = SEQLEN // 2
    ring = [(k[:, begin : begin + half], v[:, begin : begin + half], begin) for begin in (0, half)]
    merged = run(parts, q=q, ring=ring, q_begin=0)["out"]
    torch.testing.assert_close(merged, tandem.attention(q, k, v, causal=True))
    scores = torch.zeros(1, HEADS, SEQLEN, SEQLEN, requires_grad=True)
    run(bias, bias=scores)
    assert scores.grad.any()


def test_context_parallel(tmp_path):
    """A group of one process has the whole batch."""
    (text,) = (x for x in examples("docs/python.md") if "ContextPlan" in x)
    assert "ranks=4" in text
    q, k, v = torch.randn(3, SEQLEN, HEADS, DIM)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        found = run(
            text.replace("ranks=4", "ranks=1"), q=q, k=k, v=v, seqlens=[60, 36], rank=0, group=None,
            batch=torch.randn(SEQLEN, 8), sink=torch.zeros(HEADS),
        )  # fmt: skip
    finally:
        torch.distributed.destroy_process_group()
    cu = torch.tensor([0, 60, SEQLEN], dtype=torch.int32)
    want = tandem.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, sink=torch.zeros(HEADS))
    torch.testing.assert_close(found["whole"], want)
    assert found["x"].shape == (SEQLEN, 8) and len(found["positions"]) == SEQLEN


def test_flex_attention():
    (text,) = (x for x in examples("docs/python.md") if "def documents" in x)
    table = torch.randn(HEADS, 65, requires_grad=True)
    doc = torch.arange(SEQLEN).div(40, rounding_mode="floor").expand(BATCH, SEQLEN)
    run(text, doc=doc, table=table)["out"].sum().backward()
    assert table.grad.any()


def test_torchs_own_function_needs_a_build_for_gpus():
    (text,) = (x for x in examples("docs/python.md") if "activate_flash_attention_impl" in x)
    if torch.backends.cuda.is_built():
        pytest.skip("the example changes torch for all later tests")
    with pytest.raises(tandem.Unsupported, match="install a torch built with CUDA"):
        run(text)


def test_score_mods():
    numpy, flex, blocks = examples("docs/score_mod.md")
    assert run(numpy)["out"].shape == (2, 512, 8, 64)
    assert run(flex, slope=torch.ones(HEADS))["out"].isfinite().all()
    doc = np.arange(SEQLEN, dtype=np.int32) // 40
    found = run(blocks, doc=doc, seqlen_q=SEQLEN, seqlen_k=SEQLEN, function=lambda b, h, q, k: q >= k)
    assert isinstance(found["blocks"], tandem.Blocks)


def test_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    first, scalar = examples("docs/jax.md")
    q, k, v = (jax.numpy.asarray(np.random.default_rng(0).standard_normal((2, 32, 4, 16)), np.float32) for _ in "qkv")
    ids = jax.numpy.arange(64).reshape(2, 32) // 5
    arrays = {"q": q, "k": k, "v": v, "jax": jax, "jnp": jax.numpy}
    assert run(first, **arrays, sink=jax.numpy.zeros(4), ids=ids)["step"](q).shape == q.shape
    run(scalar, **arrays, slopes=jax.numpy.ones(4))
