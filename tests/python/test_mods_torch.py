"""score_mod and mask_mod of torch tensors: gradients of the tensors that they name, the operators, torch.compile."""

import numpy as np
import pytest

import tandem

torch = pytest.importorskip("torch")

ALIBI = "score - slope[head] * abs(q - k) * strength"


def tensors(*shapes, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def attend(q, k, v, slope, table, **options):
    """Uses everything at once: float tensors in both (a mask has no gradient, but may read a tensor that needs one), a
    number, ints, bools.
    """
    seen = torch.arange(k.shape[1], device=q.device) != 2
    text = "score = score - slope[head] * abs(q - k) * strength; score + table[q, k // 2]"
    return tandem.attention(
        q,
        k,
        v,
        score_mod=tandem.Mod(text, slope=slope, strength=0.5, table=table),
        mask_mod=tandem.Mod("seen[k] and (k <= q + n or limit[head] > 0)", n=2, seen=seen, limit=slope),
        **options,
    )


SHAPES = ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 4), (4,), (5, 3))


def test_gradcheck():
    arguments = tensors(*SHAPES, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, return_lse=True), arguments)


def test_gradients_are_those_of_the_numpy_call():
    q, k, v, slope = tensors((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (4,))
    out, lse = tandem.attention(q, k, v, score_mod=tandem.Mod(ALIBI, slope=slope, strength=2), return_lse=True)
    dout, dlse = tensors(out.shape, lse.shape, seed=1, grad=False)
    torch.autograd.backward((out, lse), (dout, dlse))
    mod = tandem.Mod(ALIBI, slope=slope.detach().numpy(), strength=2)
    n = [x.detach().numpy() for x in (dout, q, k, v, out, lse)]
    wanted = tandem.attention_backward(*n, dlse=dlse.numpy(), score_mod=mod)
    for x, want in zip((q, k, v, slope), (*wanted[:3], wanted.dscore_mod["slope"])):
        np.testing.assert_array_equal(x.grad.numpy(), want)
    again = tandem.attention_backward(
        dout,
        *(x.detach() for x in (q, k, v, out, lse)),
        dlse=dlse,
        score_mod=tandem.Mod(ALIBI, slope=slope, strength=2),
    )
    assert torch.equal(again.dscore_mod["slope"], slope.grad)


def test_only_wanted_gradients_are_computed():
    q, k, v, slope, table = tensors(*SHAPES)
    out = attend(q.detach(), k.detach(), v.detach(), slope.detach(), table)
    out.sum().backward()
    assert table.grad.abs().max() > 0 and slope.grad is None and q.grad is None
    with torch.no_grad():
        assert not attend(q, k, v, slope, table).requires_grad


def test_what_a_text_reads_must_not_change_before_the_backward():
    q, k, v, slope, table = tensors(*SHAPES)
    out = attend(q, k, v, slope, table)
    with torch.no_grad():
        table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_broadcast_tensors_and_16_bits():
    q, k, v, slope = tensors((1, 5, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), (1,), dtype=torch.bfloat16)
    mod = tandem.Mod("score + x[head, q]", x=slope.expand(2, 5))
    (ours,) = torch.autograd.grad(tandem.attention(q, k, v, score_mod=mod).float().square().sum(), slope)
    assert ours.shape == (1,) and ours.dtype == torch.bfloat16


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_whole(dynamic):
    inputs = tensors(*SHAPES)
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    ours, eager = compiled(*inputs), attend(*inputs)
    assert torch.equal(ours, eager)
    for got, want in zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(eager.sum(), inputs)):
        assert torch.equal(got, want)


def test_autocast_leaves_what_a_text_reads():
    q, k, v, slope, table = tensors(*SHAPES)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, slope, table)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert table.grad.dtype == slope.grad.dtype == torch.float32


def call():
    q, k, v, slope, table = tensors(*SHAPES, dtype=torch.float64)
    seen = torch.ones(6, dtype=torch.bool)
    options = {
        "score_mod": "score - slope[head] * strength + table[q, k // 2]",
        "score_mod_names": ["strength", "slope", "table"],
        "score_mod_numbers": [2],
        "mask_mod": "seen[k]",
        "mask_mod_names": ["seen"],
    }
    return (q, k, v, *[None] * 14, [slope, table, seen]), options


def test_opcheck():
    inputs, options = call()
    torch.library.opcheck(torch.ops.tandem.forward.default, inputs, options)
    inputs = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
    inputs = (*inputs[:-1], [x.detach() for x in inputs[-1]])
    out, lse = torch.ops.tandem.forward(*inputs, **options)
    wanted = {"wanted": [True, False, True, False, False], "wanted_captured": [True, False, False]}
    for dlse in (None, torch.randn_like(lse)):
        arguments = (torch.randn_like(out), dlse, out, lse, *inputs)
        torch.library.opcheck(torch.ops.tandem.backward.default, arguments, {**options, **wanted})


def test_transforms_take_expressions():
    q, k, v = tensors((3, 2, 5, 2, 8), (3, 2, 5, 2, 8), (3, 2, 5, 2, 8), grad=False)
    mods = {"score_mod": tandem.Mod("score + batch * x * k", x=0.5), "mask_mod": "k <= q"}
    mapped = torch.func.vmap(lambda *x: tandem.attention(*x, **mods))(q, k, v)
    assert torch.equal(mapped, torch.stack([tandem.attention(*x, **mods) for x in zip(q, k, v)]))
    mods = {"score_mod": tandem.Mod("score + x[k]", x=torch.linspace(-1, 1, 5))}
    mapped = torch.func.vmap(lambda *x: tandem.attention(*x, **mods))(q, k, v)
    assert torch.equal(mapped, torch.stack([tandem.attention(*x, **mods) for x in zip(q, k, v)]))


def test_arrays_must_be_tensors():
    q, k, v = tensors(*SHAPES[:3], grad=False)
    for name in ("score_mod", "mask_mod"):
        with pytest.raises(TypeError, match=rf"{name}.x \(ndarray\) must be a torch tensor"):
            tandem.attention(q, k, v, **{name: tandem.Mod("x[k]", x=np.ones(3, np.float32))})
    with pytest.raises(TypeError, match="score_mod.x is on meta"):
        tandem.attention(q, k, v, score_mod=tandem.Mod("score + x[k]", x=torch.ones(3, device="meta")))
