"""Derivatives that do not exist are refused on every path: second derivatives and forward mode."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.autograd.forward_ad as forward_ad  # noqa: E402

import tandem  # noqa: E402
from tandem import fa3, fa4  # noqa: E402
from tandem.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)

# torch's import of its forward-mode formulas warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")

CU = torch.tensor([0, 2, 5], dtype=torch.int32)
ENDS = torch.tensor([0, 5], dtype=torch.int32)
TABLE = torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(2, 5)


def heads_first(function):
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def under(context, function):
    def call(*arguments):
        with context():
            return function(*arguments)

    return call


def merged(q, k, v):
    parts = [tandem.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 2), slice(2, 5))]
    return tandem.merge(*zip(*parts))[0]


PATHS = {
    "attention": tandem.attention,
    "lse": lambda q, k, v: tandem.attention(q, k, v, return_lse=True)[1],
    "bias": lambda q, k, v: tandem.attention(q, k, v, bias=TABLE[:, :5].reshape(1, 2, 1, 5) * q.sum()),
    "sink": lambda q, k, v: tandem.attention(q, k, v, sink=q[0, 0, :, 0]),
    "operator": lambda q, k, v: torch.ops.tandem.forward(q, k, v)[0],
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16), tandem.attention),
    "torch.device": under(lambda: torch.device("cpu"), tandem.attention),
    "sdpa": heads_first(tandem.sdpa),
    "flex": heads_first(tandem.flex_attention),
    "flex, captured": heads_first(lambda *x: tandem.flex_attention(*x, lambda s, b, h, i, j: s * TABLE[h, i])),
    "FA2": flash_attn_func,
    "FA2, lse": lambda q, k, v: flash_attn_func(q, k, v, return_attn_probs=True)[1],
    "varlen": lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], CU, CU, 3, 3),
    "packed": lambda q, k, v: flash_attn_qkvpacked_func(torch.stack([q, k, v], 2)),
    "packed, lse": lambda q, k, v: flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), return_attn_probs=True)[1],
    "kv packed": lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack([k, v], 2)),
    "FA3": fa3.flash_attn_func,
    "FA4": lambda q, k, v: fa4.flash_attn_func(q, k, v, return_lse=True)[0],
    "merge": merged,
}
TRANSFORMED = {name: PATHS[name] for name in ("attention", "sdpa", "flex, captured", "packed", "merge")}


def inputs(**options):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 5, 2, 4, generator=generator, dtype=torch.float64, **options) for _ in range(3)]


@pytest.mark.parametrize("loss", ["linear", "quadratic"])
@pytest.mark.parametrize("name", PATHS)
def test_second_derivatives_are_refused_where_they_are_evaluated(name, loss):
    x, *_ = inputs(requires_grad=True)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    q, k, v = x * scale, x.flip(1) * scale, x.flip(3)
    out = PATHS[name](q, k, v)
    total = out.sum() if loss == "linear" else out.square().sum()
    (first,) = torch.autograd.grad(total, x, create_graph=True)  # a first derivative alone is legal
    (plain,) = torch.autograd.grad(PATHS[name](q, k, v).sum() if loss == "linear" else
                                   PATHS[name](q, k, v).square().sum(), x)  # fmt: skip
    assert torch.equal(first, plain)
    penalty = first.square().sum()
    for wanted in (x, scale):
        with pytest.raises(tandem.Unsupported, match="second derivative"):
            torch.autograd.grad(penalty, wanted, retain_graph=True)
    with pytest.raises(tandem.Unsupported, match="second derivative"):
        (total + penalty).backward()


@pytest.mark.parametrize("second", ["grad of grad", "jacrev twice", "hessian", "hvp", "vmap of grad of grad"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_second_derivatives_are_refused_under_transforms(name, second):
    q, k, v = inputs()

    def total(q):
        return TRANSFORMED[name](q, k, v).square().sum()

    grad, jacrev = torch.func.grad, torch.func.jacrev
    ways = {
        "grad of grad": lambda: grad(lambda q: grad(total)(q).square().sum())(q),
        "jacrev twice": lambda: jacrev(jacrev(total))(q),
        "hessian": lambda: torch.func.hessian(total)(q),
        "hvp": lambda: torch.autograd.functional.hvp(total, q, torch.ones_like(q)),
        "vmap of grad of grad": lambda: torch.vmap(grad(lambda q: grad(total)(q).square().sum()))(q[None]),
    }
    with pytest.raises(tandem.Unsupported, match="second derivative|forward-mode"):
        ways[second]()


@pytest.mark.parametrize("name", [*PATHS, "max_scores", "backward operator", "attention_backward"])
def test_forward_mode_is_refused(name):
    q, k, v = inputs()
    out, lse = tandem.attention(q, k, v, return_lse=True)
    paths = {
        **PATHS,
        "max_scores": lambda q, k, v: torch.ops.tandem.max_scores(q, k, v),
        "backward operator": lambda q, k, v: torch.ops.tandem.backward(out, None, out, lse, q, k, v, wanted=[True] * 5),
        "attention_backward": lambda q, k, v: tandem.attention_backward(out, q, k, v, out, lse),
    }
    for requires_grad in (False, True):
        with forward_ad.dual_level(), pytest.raises(tandem.Unsupported, match="forward-mode"):
            paths[name](forward_ad.make_dual(q.requires_grad_(requires_grad), torch.ones_like(q)), k, v)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_forward_mode_is_refused_under_transforms(name):
    q, k, v = inputs()
    with pytest.raises(tandem.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda q: TRANSFORMED[name](q, k, v), (q,), (q,))
    with pytest.raises(tandem.Unsupported, match="forward-mode"):
        torch.func.jacfwd(lambda q: TRANSFORMED[name](q, k, v))(q)


def test_a_dual_level_without_tangents_changes_nothing():
    q, k, v = inputs()
    with forward_ad.dual_level():
        assert torch.equal(tandem.attention(q, k, v), tandem.attention(*inputs()))


def test_forward_mode_of_a_captured_tensor_is_refused():
    q, k, v = (x.transpose(1, 2) for x in inputs())
    with forward_ad.dual_level():
        table = forward_ad.make_dual(TABLE, torch.ones_like(TABLE))
        with pytest.raises(tandem.Unsupported, match="forward-mode"):
            tandem.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i])


def test_gradients_of_attention_backward_are_refused():
    q, k, v = inputs(requires_grad=True)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    dq = tandem.attention_backward(torch.ones_like(out), q, k, v, out.detach(), lse.detach()).dq
    assert dq.requires_grad
    with pytest.raises(tandem.Unsupported, match="second derivative"):
        dq.sum().backward()
    with torch.no_grad():
        assert not tandem.attention_backward(torch.ones_like(out), q, k, v, out, lse).dq.requires_grad


def test_the_merge_of_tensors_has_second_derivatives():
    outs = [torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradgradcheck(lambda *x: tandem.merge(x[:2], x[2:]), (*outs, *lses))


def test_first_derivatives_under_transforms_are_those_of_autograd():
    q, k, v = inputs()
    table = TABLE.clone()

    def total(q, table, attention=tandem.flex_attention):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*heads, lambda s, b, h, i, j: s * table[h, i] + table[h, j]).square().sum()

    dq, dtable = torch.func.grad(total, argnums=(0, 1))(q, table)
    leaves = [x.clone().requires_grad_() for x in (q, table)]
    for got, want in zip((dq, dtable), torch.autograd.grad(total(*leaves), leaves)):
        torch.testing.assert_close(got, want)
    tables = torch.stack([table, 2 * table, -table])
    qs = torch.stack([q, -q, q + 1])
    batched = torch.vmap(torch.func.grad(total, argnums=(0, 1)))(qs, tables)
    for n in range(3):
        for got, want in zip(batched, torch.func.grad(total, argnums=(0, 1))(qs[n], tables[n])):
            torch.testing.assert_close(got[n], want)
    shared = torch.vmap(torch.func.grad(total, argnums=1), in_dims=(0, None))(qs, table)
    torch.testing.assert_close(shared[1], torch.func.grad(total, argnums=1)(qs[1], table))
    outs = [torch.stack([x.float(), 2 * x.float()]) for x in (q, k)]
    lses = [torch.randn(2, 1, 2, 5) for _ in outs]
    got = torch.vmap(lambda *x: tandem.merge(x[:2], x[2:])[0])(*outs, *lses)
    torch.testing.assert_close(got[1], tandem.merge([x[1] for x in outs], [x[1] for x in lses])[0])


@pytest.mark.parametrize("name", ["FA2", "varlen", "packed", "kv packed", "FA3", "fa3 packed", "FA4", "fa4 plain"])
def test_lse_has_its_gradient_under_every_name(name):
    q, k, v = inputs(requires_grad=True)

    def packed(x):
        return torch.stack(x, -3)

    ways = {
        "FA2": lambda: flash_attn_func(q, k, v, return_attn_probs=True),
        "varlen": lambda: flash_attn_varlen_func(q[0], k[0], v[0], ENDS, ENDS, 5, 5, return_attn_probs=True),
        "packed": lambda: flash_attn_qkvpacked_func(packed([q, k, v]), return_attn_probs=True),
        "kv packed": lambda: flash_attn_kvpacked_func(q, packed([k, v]), return_attn_probs=True),
        "FA3": lambda: fa3.flash_attn_func(q, k, v, return_attn_probs=True),
        "fa3 packed": lambda: fa3.flash_attn_qkvpacked_func(packed([q, k, v]), return_attn_probs=True),
        "FA4": lambda: fa4.flash_attn_func(q, k, v, return_lse=True),
        "fa4 plain": lambda: fa4.flash_attn_func(q, k, v),
    }

    def gradients(out, lse):
        return torch.autograd.grad(out.square().sum() + (lse.sin() * 3).sum(), (q, k, v))

    for got, want in zip(gradients(*ways[name]()[:2]), gradients(*tandem.attention(q, k, v, return_lse=True))):
        torch.testing.assert_close(got, want)
    only_lse = ways[name]()[1].sum()
    torch.testing.assert_close(
        torch.autograd.grad(only_lse, k)[0],
        torch.autograd.grad(tandem.attention(q, k, v, return_lse=True)[1].sum(), k)[0],
    )


def test_a_row_without_keys_gives_lse_no_gradient():
    q, k, v = (x[:, :n].detach().requires_grad_() for x, n in zip(inputs(), (5, 2, 2)))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert lse[0, 0, 0] == float("inf")
    dq = torch.autograd.grad(torch.where(lse.isinf(), 0.0, lse).sum() + out.sum(), q)[0]
    assert dq.isfinite().all() and (dq[:, :3] == 0).all()


SLOPES, NUMBER = torch.ones(2, requires_grad=True), torch.tensor(0.5, requires_grad=True)
WITHOUT_GRADIENT = {
    "slopes": ("alibi_slopes", lambda *x: tandem.attention(*x, alibi_slopes=SLOPES)),
    "slopes, operator": ("alibi_slopes", lambda *x: torch.ops.tandem.forward(*x, alibi_slopes=SLOPES)[0]),
    "slopes, compiled": (
        "alibi_slopes", lambda *x: torch.compile(tandem.attention, backend="eager")(*x, alibi_slopes=SLOPES)
    ),
    "slopes, torch.func": (
        "alibi_slopes",
        lambda *x: torch.func.grad(lambda s: tandem.attention(*x, alibi_slopes=s).sum())(torch.ones(2)),
    ),
    "slopes, FA2": ("alibi_slopes", lambda *x: flash_attn_func(*x, alibi_slopes=SLOPES)),
    "scale": ("softmax_scale", lambda *x: tandem.attention(*x, softmax_scale=NUMBER)),
    "scale, FA3": ("softmax_scale", lambda *x: fa3.flash_attn_func(*x, softmax_scale=NUMBER)),
    "scale, sdpa": ("scale", lambda *x: tandem.sdpa(*x, scale=NUMBER)),
    "scale, flex": ("scale", lambda *x: tandem.flex_attention(*x, scale=NUMBER)),
    "softcap": ("softcap", lambda *x: tandem.attention(*x, softcap=NUMBER)),
    "dropout": ("dropout_p", lambda *x: tandem.attention(*x, dropout_p=NUMBER)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_arguments_without_a_gradient_must_not_require_one(name):
    argument, call = WITHOUT_GRADIENT[name]
    tensors = [x.detach().float() for x in inputs()]
    with pytest.raises(RuntimeError, match=f"{argument} must not require a gradient"):
        call(*tensors)
    if "torch.func" not in name:
        with torch.no_grad():
            assert call(*tensors).isfinite().all()


def test_numbers_may_be_scalars_of_torch():
    tensors = [x.detach() for x in inputs()]
    got = tandem.attention(*tensors, softmax_scale=NUMBER.detach(), softcap=torch.tensor(2))
    assert torch.equal(got, tandem.attention(*tensors, softmax_scale=0.5, softcap=2.0))
