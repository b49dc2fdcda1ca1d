"""The native call on numpy arrays: every option, dense and packed, forward and backward."""

import numpy as np
import pytest

import reference
import tandem

f32 = np.float32


def arrays(seed, *shapes, dtype=f32):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


SINK, SLOPES = (x.astype(f32) for x in (np.array([0.3, -1, 2, 0]), np.array([0.5, 0.25, 0.1, 0])))

OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "no scale": {"softmax_scale": 0.0},
    "causal": {"causal": True},
    "top-left": {"causal": True, "alignment": "top_left"},
    "window": {"window": (5, 2)},
    "window left": {"window": (4, None)},
    "window right": {"window": (None, -1)},
    "causal window": {"causal": True, "window": (6, None)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": SINK},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "top-left window": {"alignment": "top_left", "window": (4, 2)},
    "explicit": {"causal": True, "diagonal_offset": 4},
    "explicit window": {"window": (4, 2), "diagonal_offset": -3, "alibi_slopes": SLOPES},
    "top-left alibi": {"alignment": "top_left", "alibi_slopes": SLOPES},
    "all": {
        "causal": True,
        "alignment": "top_left",
        "window": (9, None),
        "softcap": 2.0,
        "sink": SINK,
        "alibi_slopes": SLOPES,
    },
}


def check(sequences, ours, gradients, options, dlse=None):
    """sequences: (q, k, v, dout, options) each; ours: (out, lse) each; gradients: (dq, dk, dv) each, and dsink."""
    dsink, plain_dsink = 0, 0
    for n, ((q, k, v, dout, own), (out, lse)) in enumerate(zip(sequences, ours)):
        all_options = {**options, **own}
        exact, exact_lse = reference.forward(q, k, v, **all_options)
        plain, plain_lse = reference.forward(q, k, v, dtype=f32, **all_options)
        reference.hold(out, exact, plain, f"out {n}")
        reference.hold(lse, exact_lse, plain_lse, f"lse {n}")
        dl = None if dlse is None else dlse[n]
        exact_gradients = reference.backward(dout, q, k, v, dlse=dl, **all_options)
        plain_gradients = reference.backward(dout, q, k, v, dlse=dl, dtype=f32, **all_options)
        for name, got, want, other in zip(("dq", "dk", "dv"), gradients[n], exact_gradients, plain_gradients):
            reference.hold(got, want, other, f"{name} {n}")
        if options.get("sink") is not None:
            dsink, plain_dsink = dsink + exact_gradients[4], plain_dsink + plain_gradients[4]
    return dsink, plain_dsink


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(11, 17), (17, 11), (1, 40)])
def test_dense(name, lengths):
    options, (sq, sk) = OPTIONS[name], lengths
    q, k, v, dout, dlse = arrays(1, (2, sq, 4, 16), (2, sk, 2, 16), (2, sk, 2, 24), (2, sq, 4, 24), (2, 4, sq))
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    got = tandem.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    sequences = [(q[b], k[b], v[b], dout[b], {}) for b in range(2)]
    pairs = [(got.dq[b], got.dk[b], got.dv[b]) for b in range(2)]
    dsink, plain = check(sequences, zip(out, lse), pairs, options, dlse)
    assert got.dbias is None
    if "sink" in options:
        reference.hold(got.dsink, dsink, plain, "dsink")
    else:
        assert got.dsink is None


@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name):
    options = OPTIONS[name]
    cu_q, cu_k = (np.array(x, np.int32) for x in ([0, 5, 5, 19], [0, 9, 12, 20]))
    q, k, v, dout = arrays(2, (19, 4, 16), (20, 2, 16), (20, 2, 16), (19, 4, 16))
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 14, "max_seqlen_k": 9}
    out, lse = tandem.attention(q, k, v, return_lse=True, **packed, **options)
    got = tandem.attention_backward(dout, q, k, v, out, lse, **packed, **options)
    qs, ks = ([slice(a, b) for a, b in zip(cu, cu[1:])] for cu in (cu_q, cu_k))
    sequences = [(q[i], k[j], v[j], dout[i], {}) for i, j in zip(qs, ks)]
    check(
        sequences,
        [(out[i], lse[:, i]) for i in qs],
        [(got.dq[i], got.dk[j], got.dv[j]) for i, j in zip(qs, ks)],
        options,
    )


def test_used_lengths():
    q, k, v, dout = arrays(3, (2, 9, 4, 8), (2, 12, 4, 8), (2, 12, 4, 8), (2, 9, 4, 8))
    used = {"seqused_q": np.array([7, 9], np.int32), "seqused_k": np.array([12, 5], np.int32)}
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True, **used)
    got = tandem.attention_backward(dout, q, k, v, out, lse, causal=True, **used)
    sequences = [
        (q[b], k[b], v[b], dout[b], {"sq_used": s, "sk_used": t}) for b, (s, t) in enumerate([(7, 12), (9, 5)])
    ]
    check(sequences, zip(out, lse), [(got.dq[b], got.dk[b], got.dv[b]) for b in range(2)], {"causal": True})


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 4, 7, 9), (2, 1, 1, 9), (1, 1, 7, 1)])
@pytest.mark.parametrize("boolean", [False, True])
def test_bias(shape, boolean):
    q, k, v, dout, bias = arrays(4, (2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 7, 4, 8), shape)
    if boolean:
        bias = bias > -0.5
    out, lse = tandem.attention(q, k, v, bias=bias, return_lse=True)
    got = tandem.attention_backward(dout, q, k, v, out, lse, bias=bias)
    full = np.broadcast_to(bias, (2, 4, 7, 9))
    sequences = [(q[b], k[b], v[b], dout[b], {"bias": full[b]}) for b in range(2)]
    check(sequences, zip(out, lse), [(got.dq[b], got.dk[b], got.dv[b]) for b in range(2)], {})
    if boolean:
        assert got.dbias is None
        return
    axes = tuple(i for i in range(4) if shape[i] == 1)
    wanted = [
        np.stack([reference.backward(do, a, b, c, dtype=t, **o)[3] for a, b, c, do, o in sequences]).sum(
            axes, keepdims=True
        )
        for t in (np.float64, f32)
    ]
    reference.hold(got.dbias, *wanted, "dbias")


def test_a_finite_bias_hides_no_key_from_a_row_that_it_fills():
    q, k, v = arrays(6, *[(1, 7, 2, 8)] * 3)
    for least in (np.finfo(f32).min, f32(-2.4e38)):
        out, lse = tandem.attention(q, k, v, bias=np.full((1, 1, 7, 7), least), return_lse=True)
        np.testing.assert_array_equal(lse, least)
        exact = v.astype(np.float64).mean(1, keepdims=True)
        reference.hold(
            out, np.broadcast_to(exact, out.shape), np.broadcast_to(v.mean(1, keepdims=True), out.shape), "out"
        )
    out, lse = tandem.attention(q, k, v, bias=np.full((1, 1, 7, 7), -np.inf, f32), return_lse=True)
    assert not out.any() and np.isneginf(lse).all()


def test_dropout_repeats_by_seed_and_has_its_gradient():
    q, k, v, dout = arrays(5, (1, 12, 2, 8), (1, 16, 2, 8), (1, 16, 2, 16), (1, 12, 2, 16))
    eye = np.broadcast_to(np.eye(16, dtype=f32)[None, :, None], (1, 16, 2, 16))
    options = {"dropout_p": 0.4, "seed": (7, 3)}
    p = tandem.attention(q, k, np.ascontiguousarray(eye)).transpose(0, 2, 1, 3)[0]
    z = tandem.attention(q, k, np.ascontiguousarray(eye), **options).transpose(0, 2, 1, 3)[0]
    kept = np.where(z != 0, 256 / (256 - 102), 0)  # 0.4 is rounded
    assert 0.4 < (kept > 0).mean() < 0.8
    np.testing.assert_allclose(z, p * kept, rtol=1e-5)
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    got = tandem.attention_backward(dout, q, k, v, out, lse, **options)
    check([(q[0], k[0], v[0], dout[0], {"kept": kept})], zip(out, lse), [(got.dq[0], got.dk[0], got.dv[0])], {})
    assert np.array_equal(out, tandem.attention(q, k, v, **options))
    assert not np.array_equal(out, tandem.attention(q, k, v, dropout_p=0.4, seed=8))
    assert not np.array_equal(tandem.attention(q, k, v, dropout_p=0.4), tandem.attention(q, k, v, dropout_p=0.4))
    with pytest.raises(ValueError, match="seed"):
        tandem.attention_backward(dout, q, k, v, out, lse, dropout_p=0.4)


@pytest.mark.parametrize("dtype", [np.float16, f32, np.float64])
def test_types(dtype):
    q, k, v = arrays(6, *[(1, 33, 2, 32)] * 3, dtype=dtype)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else f32)
    exact = reference.forward(q[0], k[0], v[0])[0]
    plain = reference.forward(q[0], k[0], v[0], dtype=f32)[0].astype(dtype)
    reference.hold(out[0], exact, plain)


def test_bfloat16_of_ml_dtypes():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = arrays(6, *[(1, 33, 2, 32)] * 3, dtype=bfloat16)
    out = tandem.attention(q, k, v)
    assert out.dtype == bfloat16
    exact = reference.forward(q[0], k[0], v[0])[0]
    reference.hold(out[0], exact, reference.forward(q[0], k[0], v[0], dtype=f32)[0].astype(bfloat16))


def test_strides_are_free_but_the_last():
    x = arrays(7, (3, 10, 2, 2, 8))[0]
    q, k, v = x[0].transpose(1, 0, 2, 3), x[1, :, ::2][:, [0, 0]].transpose(1, 0, 2, 3), x[2].transpose(1, 0, 2, 3)
    assert not q.flags.c_contiguous
    np.testing.assert_array_equal(
        tandem.attention(q, k, v), tandem.attention(*(np.ascontiguousarray(a) for a in (q, k, v)))
    )


def test_another_last_dimension_is_copied_and_said_once(monkeypatch):
    monkeypatch.setattr(tandem._binding, "_said_that_copies_are_made", False)
    q, k, v = arrays(8, (1, 6, 2, 8), (1, 6, 2, 8), (1, 8, 2, 6))
    v = v.transpose(0, 3, 2, 1)
    with pytest.warns(UserWarning, match="v: the last dimension is not contiguous"):
        out = tandem.attention(q, k, v)
    np.testing.assert_array_equal(out, tandem.attention(q, k, np.ascontiguousarray(v)))  # no second warning


def test_out_is_written_in_place():
    q, k, v = arrays(9, *[(1, 6, 2, 8)] * 3)
    buffer = np.full((1, 6, 4, 8), np.nan, f32)
    out = buffer[:, :, 1:3]
    assert tandem.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, tandem.attention(q, k, v))
    assert np.isnan(buffer[:, :, [0, 3]]).all()


def test_strides_may_be_negative():
    q, k, v = arrays(14, *[(2, 6, 2, 8)] * 3)
    out = np.full_like(q, np.nan)
    tandem.attention(q[:, ::-1], k[::-1], v[:, :, ::-1], out=out[:, ::-1])
    want = tandem.attention(*(np.ascontiguousarray(x) for x in (q[:, ::-1], k[::-1], v[:, :, ::-1])))
    np.testing.assert_array_equal(out[:, ::-1], want)


def test_gradients_are_written_where_wanted():
    q, k, v, dout = arrays(10, *[(1, 6, 2, 8)] * 4)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    every = tandem.attention_backward(dout, q, k, v, out, lse)
    buffer = np.zeros((1, 6, 3, 2, 8), f32)
    some = tandem.attention_backward(dout, q, k, v, out, lse, dq=buffer[:, :, 0], dk=False, dv=buffer[:, :, 2])
    assert some.dk is None and some.dq.base is buffer
    np.testing.assert_array_equal(buffer[:, :, 0], every.dq)
    np.testing.assert_array_equal(buffer[:, :, 2], every.dv)
    assert not buffer[:, :, 1].any()


@pytest.mark.parametrize(
    "shapes", [((0, 5, 2, 8), (0, 5, 2, 8)), ((2, 0, 2, 8), (2, 5, 2, 8)), ((2, 5, 2, 8), (2, 0, 2, 8))]
)
def test_zero_sizes(shapes):
    q, k = arrays(11, *shapes)
    out, lse = tandem.attention(q, k, k, return_lse=True)
    assert out.shape == q.shape and not out.any() and np.isneginf(lse).all()
    got = tandem.attention_backward(out, q, k, k, out, lse)
    assert got.dq.shape == q.shape and got.dk.shape == k.shape and not got.dq.any() and not got.dk.any()


class Producer:
    """An array that supports only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_any_producer_of_dlpack():
    q, k, v, dout = arrays(12, *[(1, 6, 2, 8)] * 4)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    got = tandem.attention(*(Producer(x) for x in (q, k, v)), return_lse=True)
    np.testing.assert_array_equal(got[0], out)
    gradients = tandem.attention_backward(*(Producer(x) for x in (dout, q, k, v, out, lse)))
    np.testing.assert_array_equal(gradients.dk, tandem.attention_backward(dout, q, k, v, out, lse).dk)


def test_results_are_of_the_callers_kind():
    strict = pytest.importorskip("array_api_strict")
    q, k, v = arrays(13, *[(1, 6, 2, 8)] * 3)
    out = tandem.attention(*(strict.asarray(x) for x in (q, k, v)))
    assert type(out) is type(strict.asarray(q))
    np.testing.assert_array_equal(np.from_dlpack(out), tandem.attention(q, k, v))
