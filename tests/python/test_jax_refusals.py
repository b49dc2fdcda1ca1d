"""tandem.jax refuses wrong calls with a sentence, before anything runs."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax_cases import attention, close, loss, qkv

import tandem

# ---- Refusals --------------------------------------------------------------------------------------------------------


def of(**changes):
    """A call of qkv() with other arguments."""
    q, k, v = qkv()
    inputs = {"query": q, "key": k, "value": v, **changes}
    return lambda: attention(**inputs)


Q, K, V = qkv()
REFUSED = {
    "head_dim": (of(key=K[..., :8]), ValueError, r"key\.head_dim \(8\) must equal query\.head_dim \(16\)"),
    "types": (of(value=V.astype(jnp.bfloat16)), ValueError, r"value\.dtype \(bfloat16\) must be float32"),
    "integers": (of(query=Q.astype(jnp.int32)), ValueError, r"query\.dtype \(int32\) must be float32"),
    "float8": (of(query=Q.astype(jnp.float8_e4m3fn)), TypeError, r"query\.dtype \(float8_e4m3fn\) must be"),
    "complex": (of(query=Q.astype(jnp.complex64)), TypeError, r"query\.dtype \(complex64\) must be"),
    "heads": (of(query=Q[:, :, :3]), ValueError, r"query\.heads \(3\) must be a multiple of key\.heads \(2\)"),
    "dimensions": (of(query=Q[0]), ValueError, "query"),
    "scalar": (of(query=jnp.float32(1)), ValueError, "query"),
    "list": (of(query=[1.0]), TypeError, r"query \(list\) must be an array"),
    "window": (of(local_window_size=(-5, 2)), ValueError, "the local_window_size has no keys"),
    "fraction": (of(local_window_size=(1.5, 2)), TypeError, r"local_window_size \(float\) must be an integer"),
    "softcap": (of(softcap=-1.0), ValueError, r"softcap \(-1\) must be"),
    "dropout": (of(dropout_p=0.5), ValueError, r"seed \(None\) must be an integer, a key of jax\.random"),
    "dropout_p": (of(dropout_p=1.0, seed=1), ValueError, r"dropout_p \(1\) must be"),
    "seed": (of(dropout_p=0.5, seed=jnp.zeros(3)), ValueError, r"seed \(float32 of shape \(3,\)\) must be"),
    "causal": (of(is_causal="yes"), ValueError, r"causal \('yes'\) must be True or False"),
    "alignment": (of(alignment="middle"), ValueError, r"alignment \('middle'\) must be"),
    "mask": (of(mask=jnp.zeros((1, 1, 11, 17))), TypeError, r"mask \(float32\) must be booleans"),
    "bias": (of(bias=jnp.zeros((1, 1, 11, 17), bool)), TypeError, r"bias \(bool\) must be numbers"),
    "bias shape": (of(bias=jnp.zeros((1, 3, 11, 17))), ValueError, "bias"),
    "sink": (of(sink=jnp.zeros(3)), ValueError, "sink"),
    "expression": (of(score_mod="score +"), ValueError, "score_mod: column 8"),
    "function": (of(score_mod=lambda s: s), TypeError, "score_mod .* must be an expression"),
    "name": (of(score_mod=tandem.Mod("score", x="a")), TypeError, r"score_mod\.x \(str\) must be an array"),
    "segments": (of(segment_ids=jnp.zeros((2, 11), int)), ValueError, r"segment_ids .* shape \(2, 17\)"),
    "segments and mask": (
        of(key=Q, value=Q, segment_ids=jnp.zeros((2, 11), int), mask=jnp.ones((1, 1, 11, 11), bool)),
        ValueError,
        "segment_ids must be passed without bias and mask",
    ),
    "segments and lengths": (
        of(key=Q, value=Q, segment_ids=jnp.zeros((2, 11), int), query_seq_lengths=jnp.full(2, 9)),
        ValueError,
        "segment_ids must be passed without query_seq_lengths",
    ),
    "no segments": (of(max_segments=3), ValueError, "max_segments must be left out"),
    "lengths": (of(query_seq_lengths=jnp.zeros(2)), ValueError, "query_seq_lengths"),
    "packed": (of(cu_seqlens_q=jnp.zeros(2, jnp.int32)), ValueError, "cu_seqlens"),
    "out_dtype": (of(out_dtype=jnp.float16), ValueError, "out_dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_come_before_anything_runs(name):
    function, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        jax.eval_shape(function)
    with pytest.raises(kind, match=message):
        function()


def test_traced_options_are_refused():
    q, k, v = qkv()
    for name in ("scale", "softcap", "max_seqlen_q", "dropout_p", "local_window_size"):
        with pytest.raises(TypeError, match=f"{name} .* must be .*: pass .* static argument"):
            jax.jit(lambda x, name=name: attention(q, k, v, **{name: x}))(2)
    with pytest.raises(ValueError, match=r"max_segments \(None\) must be a number inside jax.jit"):
        jax.jit(lambda ids: attention(q, q, q, segment_ids=ids))(jnp.zeros((2, 11), jnp.int32))


def test_second_derivatives_and_forward_mode_are_refused():
    q, k, v = qkv()

    def f(q):
        return loss(q, k, v)

    sentence = "second derivatives of tandem.jax.attention are not served"
    for function in (jax.grad(lambda q: jax.grad(f)(q).sum()), jax.hessian(f), jax.jacfwd(jax.grad(f))):
        with pytest.raises(tandem.Unsupported, match=sentence):
            function(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (q,), (q,))


def test_the_runtimes_values_are_refused_with_the_librarys_sentence():
    q, k, v = (x[0] for x in qkv())
    run = jax.jit(lambda cu: attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=jnp.array([0, 17], jnp.int32)))
    assert run(jnp.array([0, 11], jnp.int32)).shape == (11, 4, 24)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"INVALID_ARGUMENT: cu_seqlens_q\[1\] \(12\)"):
        run(jnp.array([0, 12], jnp.int32)).block_until_ready()


VIRTUAL_CUDA = pathlib.Path(__file__).parents[2] / "build/release/virtual_cuda/libcuda.so.1"


@pytest.mark.skipif(not VIRTUAL_CUDA.exists(), reason="the build has no virtual CUDA driver")
@pytest.mark.parametrize("binding", ["native", "ctypes"])
def test_calls_on_a_gpu_are_checked_when_traced(run_python, monkeypatch, binding):
    monkeypatch.setenv("TANDEM_PYTHON_BOUNDARY", binding)
    run_python(f"""
        import ctypes
        ctypes.CDLL({str(VIRTUAL_CUDA)!r})
        import jax
        import jax.numpy as jnp
        import tandem.jax
        from tandem.jax import _check

        tandem.jax.device_type = _check.device_type = lambda arrays: 2  # as for arrays on a GPU

        def loss(q):
            return tandem.jax.attention(q, q, q, is_causal=True).astype(jnp.float32).sum()

        q = jax.ShapeDtypeStruct((2, 33, 4, 20), jnp.bfloat16)
        assert jax.eval_shape(jax.grad(loss), q).shape == q.shape
        try:
            jax.eval_shape(loss, q.update(dtype=jnp.float32))
        except tandem.Unsupported as error:
            assert "query.dtype (float32) must be bfloat16 or float16 on a GPU" in str(error), error
        else:
            raise AssertionError
    """)


def test_rows_are_padded_on_a_gpu(monkeypatch):
    q, k, v = (x[..., :13] for x in qkv())
    expected = attention(q, k, v, is_causal=True)
    monkeypatch.setattr(tandem.jax, "device_type", lambda arrays: 2)
    text = str(jax.make_jaxpr(lambda *x: attention(*x, is_causal=True))(q, k, v))
    assert "f32[2,11,4,16]" in text and "f32[2,17,2,16]" in text
    close([attention(q, k, v, is_causal=True)], [expected])


def test_slopes_have_no_gradient():
    slopes = jnp.ones(4)
    with pytest.raises(tandem.Unsupported, match="alibi_slopes must not be differentiated"):
        jax.grad(lambda q, s: attention(q, K, V, alibi_slopes=s).sum(), argnums=(0, 1))(Q, slopes)
    jax.grad(lambda q: attention(q, K, V, alibi_slopes=slopes).sum())(Q)
