"""Eager calls behave like torch's dispatcher for lazy negation, versions of written tensors, and other layouts."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tandem  # noqa: E402
from tandem import fa3, fa4  # noqa: E402
from tandem.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

Q = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0))
CU = torch.tensor([0, 4], dtype=torch.int32)


def heads_first(x):
    return x.transpose(1, 2)


def negated(x):
    """Returns -x as a lazily negated view."""
    result = torch._neg_view(x.clone())
    assert result.is_neg()
    return result


def gradients(x):
    """Returns the gradients of a call of x, from an incoming gradient that is negated lazily."""
    x = x.requires_grad_()
    out = tandem.attention(x, Q, Q)
    return torch.autograd.grad(out, x, negated(torch.ones_like(out)))[0]


def of_attention_backward(name):
    def call(x):
        out, lse = tandem.attention(Q, Q, Q, return_lse=True)
        arguments = {"dout": Q, "q": Q, "k": Q, "v": Q, "out": out, "lse": lse, name: x}
        return tandem.attention_backward(**arguments).dk

    return call


CASES = {
    "q": (Q, lambda x: tandem.attention(x, Q, Q)),
    "k": (Q, lambda x: tandem.attention(Q, x, Q, causal=True)),
    "v": (Q, lambda x: tandem.attention(Q, Q, x)),
    "gradients": (Q, gradients),
    "bias": (Q[..., :4].reshape(1, 4, 4, 2)[:, :2, :, :1].contiguous(), lambda x: tandem.attention(Q, Q, Q, bias=x)),
    "sink": (Q[0, 0, :, 0].contiguous(), lambda x: tandem.attention(Q, Q, Q, sink=x)),
    "alibi_slopes": (Q[0, 0, :, 0].contiguous(), lambda x: tandem.attention(Q, Q, Q, alibi_slopes=x)),
    "cu_seqlens": (
        -CU,
        lambda x: tandem.attention(Q[0], Q[0], Q[0], cu_seqlens_q=x, cu_seqlens_k=x, max_seqlen_q=4, max_seqlen_k=4),
    ),  # fmt: skip
    "seqused": (-CU[1:] // 2, lambda x: tandem.attention(Q, Q, Q, seqused_k=x)),
    "table of an expression": (
        Q[0, :, :, 0].contiguous(),
        lambda x: tandem.attention(Q, Q, Q, score_mod=tandem.Mod("score + t[q, head]", t=x)),
    ),
    "table of a mask": (
        -torch.tensor([0, 1, 1, 2]),
        lambda x: tandem.attention(Q, Q, Q, mask_mod=tandem.Mod("t[q] == t[k]", t=x)),
    ),
    "flex": (Q, lambda x: tandem.flex_attention(*(heads_first(x),) * 3, lambda s, b, h, i, j: s * x[0, i, 0, 0])),
    "sdpa": (Q, lambda x: tandem.sdpa(*(heads_first(x),) * 3)),
    "FA2": (Q, lambda x: flash_attn_func(x, x, x)),
    "packed": (Q, lambda x: flash_attn_qkvpacked_func(torch._neg_view(torch.stack([-x] * 3, 2)))),
    "FA3": (Q, lambda x: fa3.flash_attn_func(x, x, x)),
    "FA4": (Q, lambda x: fa4.flash_attn_func(x, x, x, learnable_sink=x[0, 0, :, 0])[0]),
    "without gradients": (Q, torch.no_grad()(lambda x: tandem.sdpa(*(heads_first(x),) * 3))),
    **{f"attention_backward, {name}": (Q, of_attention_backward(name)) for name in ("dout", "q", "k", "v")},
}


@pytest.mark.parametrize("name", CASES)
def test_lazily_negated_tensors_are_read_with_their_sign(name):
    x, call = CASES[name]
    torch.testing.assert_close(call(negated(x)), call(-x), rtol=0, atol=0)


def test_lazily_negated_outputs_are_refused():
    with pytest.raises(ValueError, match=r"out \(lazily negated\) must be a plain tensor"):
        tandem.attention(Q, Q, Q, out=negated(Q))
    out, lse = tandem.attention(Q, Q, Q, return_lse=True)
    with pytest.raises(ValueError, match=r"dk \(lazily negated\) must be a plain tensor"):
        tandem.attention_backward(Q, Q, Q, Q, out, lse, dk=negated(Q))


def test_writes_are_counted():
    out, lse = tandem.attention(Q, Q, Q, return_lse=True)
    table, bias, sink = torch.ones(4), torch.zeros(1, 2, 4, 4), torch.zeros(2)
    targets = {
        "out": (out.clone(), lambda x: tandem.attention(Q, Q, Q, out=x)),
        "out of inference": (out.clone(), torch.no_grad()(lambda x: tandem.attention(Q, Q, Q, out=x, return_lse=True))),
        "max_scores": (lse.clone(), lambda x: tandem.attention(Q, Q, Q, max_scores=x)),
        "max_scores with a gradient": (
            lse.clone(), lambda x: tandem.attention(Q.clone().requires_grad_(), Q, Q, max_scores=x)
        ),
    }  # fmt: skip
    more = {"bias": bias, "sink": sink, "score_mod": tandem.Mod("score + t[q]", t=table)}
    for name, x in (("dq", Q), ("dk", Q), ("dv", Q), ("dbias", bias), ("dsink", sink)):
        targets[name] = (
            torch.zeros_like(x),
            lambda x, name=name: tandem.attention_backward(Q, Q, Q, Q, out, lse, **more, **{name: x}),
        )
    targets["dscore_mod"] = (
        torch.zeros(4),
        lambda x: tandem.attention_backward(Q, Q, Q, Q, out, lse, **more, dscore_mod={"t": x}),
    )
    for name, (x, call) in targets.items():
        before = x._version
        call(x)
        assert x._version > before, name
    with torch.inference_mode():
        tandem.attention(Q, Q, Q, out=torch.empty_like(Q))


def test_a_backward_refuses_a_saved_tensor_that_was_written_over():
    w, buffer = Q.clone().requires_grad_(), Q.clone()
    y = (w * buffer).sum()
    with torch.no_grad():
        tandem.attention(Q, Q, Q, out=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("name", ["max_scores", "dq"])
def test_written_tensors_want_no_gradient(name):
    x = (torch.zeros(1, 2, 4) if name == "max_scores" else torch.zeros_like(Q)).requires_grad_()
    out, lse = tandem.attention(Q, Q, Q, return_lse=True)
    with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
        if name == "max_scores":
            tandem.attention(Q, Q, Q, max_scores=x)
        else:
            tandem.attention_backward(Q, Q, Q, Q, out, lse, dq=x)


JAGGED = torch.nested.nested_tensor([Q[0, :2], Q[0]], layout=torch.jagged)
with pytest.warns(UserWarning):
    NESTED = torch.nested.nested_tensor([Q[0, :2], Q[0]])
KINDS = {"jagged, nested": JAGGED, "nested": NESTED, "sparse_coo": Q.to_sparse(), "_mkldnn": Q.to_mkldnn()}
CALLS = {
    "attention": lambda x: tandem.attention(x, x, x),
    "k": lambda x: tandem.attention(Q, x, Q),
    "v": lambda x: tandem.attention(Q, Q, x),
    "sdpa": lambda x: tandem.sdpa(x, x, x),
    "flex": lambda x: tandem.flex_attention(x, x, x),
    "FA2": lambda x: flash_attn_func(x, x, x),
    "varlen": lambda x: flash_attn_varlen_func(x, x, x, CU, CU, 4, 4),
    "FA3": lambda x: fa3.flash_attn_func(x, x, x),
    "FA4": lambda x: fa4.flash_attn_func(x, x, x),
    "sink": lambda x: tandem.attention(Q, Q, Q, sink=x),
    "attention_backward": lambda x: tandem.attention_backward(x, Q, Q, Q, Q, Q[..., 0].transpose(1, 2)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_without_strides_are_refused_by_name(kind, call):
    with pytest.raises((TypeError, ValueError, tandem.Unsupported)) as error:
        CALLS[call](KINDS[kind])
    sentence = str(error.value)
    assert "must" in sentence or "not served" in sentence, sentence
    assert "Tandem" not in sentence and "\n" not in sentence and "aten" not in sentence, sentence


def test_zero_tensors_are_read_as_zeros_or_refused():
    zero = torch._efficientzerotensor(Q.shape)
    out = tandem.attention(Q.clone().requires_grad_(), Q, Q)
    torch.autograd.grad(out, out.grad_fn.next_functions[0][0].variable, zero)
    with pytest.raises((TypeError, ValueError)):
        tandem.attention(zero, Q, Q)


class Wrapper(torch.Tensor):
    """A tensor without memory, which torch's dispatcher would unwrap."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["bias", "sink", "out", "max_scores", "seqused_k", "dout", "lse"])
def test_tensors_without_memory_are_refused_by_name(name):
    out, lse = tandem.attention(Q, Q, Q, return_lse=True)
    shapes = {"bias": torch.zeros(1, 1, 4, 4), "sink": torch.zeros(2), "seqused_k": CU[1:], "max_scores": lse, "out": Q}
    with pytest.raises(TypeError, match=rf"{name} \(Wrapper\) must have memory: pass a tensor with values"):
        if name in shapes:
            tandem.attention(Q, Q, Q, **{name: Wrapper(shapes[name])})
        else:
            tandem.attention_backward(
                **{
                    "dout": Q,
                    "q": Q,
                    "k": Q,
                    "v": Q,
                    "out": out,
                    "lse": lse,
                    name: Wrapper(lse if name == "lse" else Q),
                }
            )


@pytest.mark.parametrize("name", ["cu_seqlens", "alibi_slopes"])
def test_packed_forms_refuse_a_backward_after_a_write_to_an_option(name):
    qkv = torch.randn(4, 3, 2, 8).requires_grad_()
    options = {"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32), "alibi_slopes": torch.rand(2)}
    out = flash_attn_varlen_qkvpacked_func(qkv, max_seqlen=4, **options)
    options[name].fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


FOREIGN = {
    "negated": (negated, ValueError, "lazily negated"),
    "gradient": (lambda x: x.clone().requires_grad_(), ValueError, "must not require a gradient"),
    "masked": (lambda x: np.ma.masked_array(x.numpy(), x.numpy() > 0), TypeError, "MaskedArray"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["k", "bias", "score_mod.w", "lse", "append", "merge", "blocks"])
def test_tensors_beside_arrays_of_numpy(kind, name):
    make, error, reason = FOREIGN[kind]
    q, cache = Q.numpy(), np.zeros((1, 8, 2, 8), np.float32)
    bias, w = torch.ones(1, 1, 4, 4), torch.ones(4)
    calls = {
        "k": lambda: tandem.attention(q, make(Q), q),
        "bias": lambda: tandem.attention(q, q, q, bias=make(bias)),
        "score_mod.w": lambda: tandem.attention(q, q, q, score_mod=tandem.Mod("score + w[k]", w=make(w))),
        "lse": lambda: tandem.attention_backward(q, q, q, q, q, make(torch.zeros(1, 2, 4))),
        "append": lambda: tandem.append_kv(q, make(Q), cache, cache.copy()),
        "merge": lambda: tandem.merge([q, make(Q)], [np.zeros((1, 2, 4), np.float32)] * 2),
        "blocks": lambda: tandem.Blocks.of(tandem.Mod("w[k] > 0", w=make(w)), 4, 4, device="cpu"),
    }
    if name == "blocks" and kind != "negated":
        pytest.skip("a mask has no gradient")
    with pytest.raises(error, match=reason):
        calls[name]()
    assert not cache.any()


def test_out_dtype_contradicts_no_out():
    q = Q.half()
    with pytest.raises(ValueError, match="out_dtype .float32. must be None or out's type .torch.float16."):
        tandem.attention(q, q, q, out=torch.empty_like(q), out_dtype=torch.float32)
    out = torch.empty_like(Q)
    assert tandem.attention(q, q, q, out=out, out_dtype="float32") is out
