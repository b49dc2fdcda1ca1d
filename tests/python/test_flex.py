"""tandem.flex_attention: outputs and gradients of the gallery, what is returned, the interface."""

import inspect
import math

import numpy as np
import pytest

import reference
import tandem

torch = pytest.importorskip("torch")

import torch_reference  # noqa: E402
from flex_cases import (  # noqa: E402
    BATCH,
    DIM,
    GALLERY,
    HEADS,
    KEYS,
    MASK,
    QUERIES,
    TABLE,
    K,
    Q,
    V,
    causal,
    plain,
    relative,
    softcap,
    tensors,
)
from torch._higher_order_ops.flex_attention import math_attention  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from tandem import flex  # noqa: E402


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
    """Compares with torch's formula, which torch itself offers only on GPUs."""
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
