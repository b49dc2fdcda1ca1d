"""score_mod and mask_mod of tandem.attention: expressions with their names, gradients, and refusals."""

import numpy as np
import pytest

import reference
import tandem

f32 = np.float32
ALIBI = "score - slope[head] * abs(q - k)"


def arrays(*shapes, seed=0, dtype=f32):
    random = np.random.default_rng(seed)
    return [random.standard_normal(s).astype(dtype) for s in shapes]


Q, K, V = arrays((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 8))
(SLOPES,) = np.abs(arrays((4,), seed=1))


def both(options):
    """Computes standard attention of each sequence of the batch, in float64 and float32."""
    return (
        [np.stack(x) for x in zip(*(reference.forward(q, k, v, dtype=dtype, **options) for q, k, v in zip(Q, K, V)))]
        for dtype in (np.float64, np.float32)
    )


# A text, and the option that equals it.
SAME = {
    "ALiBi": ({"score_mod": tandem.Mod(ALIBI, slope=SLOPES)}, {"alibi_slopes": SLOPES, "alignment": "top_left"}),
    "softcap": ({"score_mod": tandem.Mod("cap * tanh(score / cap)", cap=0.5)}, {"softcap": 0.5}),
    "causal": ({"mask_mod": "k <= q"}, {"causal": True, "alignment": "top_left"}),
    "window": (
        {"mask_mod": tandem.Mod("-right <= q - k <= left", left=np.int32(3), right=1)},
        {"window": (3, 1), "alignment": "top_left"},
    ),
    "bottom-right": ({"mask_mod": "k - seqlen_k <= q - seqlen_q"}, {"causal": True}),
    "bias": ({"score_mod": tandem.Mod("score + table[q, k]", table=np.eye(9, 12))}, {"bias": np.eye(9, 12, dtype=f32)}),
    "both": (
        {"score_mod": tandem.Mod(ALIBI, slope=SLOPES), "mask_mod": "k <= q"},
        {"alibi_slopes": SLOPES, "causal": True, "alignment": "top_left"},
    ),
    "number as an array": ({"score_mod": tandem.Mod("score * x", x=np.float64(1.5) * np.ones(()))}, {}),
}


@pytest.mark.parametrize(("mods", "option"), SAME.values(), ids=SAME)
def test_a_text_is_the_option_that_it_says(mods, option):
    if not option:  # scores times 1.5
        option = {"softmax_scale": 1.5 * Q.shape[-1] ** -0.5}
    ours = tandem.attention(Q, K, V, return_lse=True, **mods)
    for got, *wanted in zip(ours, *both(option)):
        reference.hold(got, *wanted)


def bits(*, packed, **options):
    """Computes out, lse, dq, dk and dv of dense or packed tensors."""
    q, k, v = Q, K, V
    if packed:
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (Q, K, V))
        options |= {"cu_seqlens_q": np.array([0, 4, 18], np.int32), "cu_seqlens_k": np.array([0, 15, 24], np.int32)}
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    wanted = {"dscore_mod": False} if "score_mod" in options else {}
    gradients = tandem.attention_backward(np.cos(out), q, k, v, out, lse, **options, **wanted)
    return out, lse, gradients.dq, gradients.dk, gradients.dv


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("mods", "option"), [x for x in SAME.values() if x[1] and "bias" not in x[1]])
def test_a_text_has_the_bits_of_the_option(mods, option, packed):
    for ours, wanted in zip(bits(packed=packed, **mods), bits(packed=packed, **option)):
        np.testing.assert_array_equal(ours, wanted)


def test_lists_that_are_not_of_the_mask_mod_say_what_they_say():
    """Lists without a block hide all keys, unless the caller declares that they equal mask_mod."""
    blocks = tandem.Blocks(np.zeros((1, 1, 1), np.int32), np.zeros((1, 1, 1, 1), np.int32))
    assert not tandem.attention(Q, K, V, mask_mod="k <= q", block_mask=blocks).any()
    of_mask_mod = blocks._replace(of_mask_mod=True)
    wanted = tandem.attention(Q, K, V, causal=True, alignment="top_left")
    np.testing.assert_array_equal(tandem.attention(Q, K, V, mask_mod="k <= q", block_mask=of_mask_mod), wanted)
    with pytest.raises(ValueError, match=r"blocks_of_mask_mod \(1\) must be 0 without mask_mod"):
        tandem.attention(Q, K, V, block_mask=of_mask_mod)


def test_gradients_are_written_where_they_are_wanted():
    dout, mod = arrays((2, 9, 4, 8), seed=2)[0], tandem.Mod(ALIBI, slope=SLOPES)
    out, lse = tandem.attention(Q, K, V, score_mod=mod, return_lse=True)
    exact, plain = ([], []), ([], [])
    for into, dtype in ((exact, np.float64), (plain, f32)):
        for b in range(2):
            dq, _, _, ds, _ = reference.backward(
                dout[b], Q[b], K[b], V[b], dtype=dtype, alibi_slopes=SLOPES, alignment="top_left"
            )
            distance = np.abs(np.arange(9)[:, None] - np.arange(12))
            into[0].append(-(ds * distance).sum((1, 2)))
            into[1].append(dq)
    whole = tandem.attention_backward(dout, Q, K, V, out, lse, score_mod=mod)
    reference.hold(whole.dscore_mod["slope"], sum(exact[0]), sum(plain[0]))

    mine = np.full(4, 3, f32)
    into = tandem.attention_backward(
        dout, Q, K, V, out, lse, score_mod=mod, dscore_mod={"slope": mine}, dq=False, accumulate=True
    )
    assert into.dscore_mod["slope"] is mine and into.dq is None
    np.testing.assert_allclose(mine, 3 + whole.dscore_mod["slope"], rtol=1e-5)
    none = tandem.attention_backward(dout, Q, K, V, out, lse, score_mod=mod, dscore_mod=False)
    assert none.dscore_mod == {"slope": None}
    for dq in (whole.dq, none.dq):  # once by the text, once by the equal option
        reference.hold(dq, np.stack(exact[1]), np.stack(plain[1]))
    assert tandem.attention_backward(dout, Q, K, V, out, lse).dscore_mod is None


def test_ints_and_bools_have_no_gradient():
    doc = np.arange(24).reshape(2, 12)
    seen = doc[0] != 5
    mods = {"score_mod": tandem.Mod("score + doc[batch, k]", doc=doc), "mask_mod": tandem.Mod("seen[k]", seen=seen)}
    out, lse = tandem.attention(Q, K, V, return_lse=True, **mods)
    got = tandem.attention_backward(out, Q, K, V, out, lse, **mods)
    assert got.dscore_mod == {"doc": None}
    floats = tandem.Mod("score + doc[batch, k]", doc=doc.astype(f32))
    bias = np.broadcast_to(seen, (1, 1, 9, 12))
    np.testing.assert_array_equal(out, tandem.attention(Q, K, V, score_mod=floats, bias=bias))


def test_packed_sequences_count_from_their_own_first_position():
    cu_q, cu_k = np.array([0, 9, 14], np.int32), np.array([0, 12, 19], np.int32)
    q, k, v = np.concatenate([Q[0], Q[1, :5]]), np.concatenate([K[0], K[1, :7]]), np.concatenate([V[0], V[1, :7]])
    mods = {"score_mod": "score + batch * 3 * k", "mask_mod": "k <= q"}
    out = tandem.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **mods)
    one = tandem.attention(Q[:1], K[:1], V[:1], mask_mod="k <= q")[0]
    two = tandem.attention(Q[1:, :5], K[1:, :7], V[1:, :7], score_mod="score + 3 * k", mask_mod="k <= q")[0]
    np.testing.assert_allclose(out, np.concatenate([one, two]), atol=1e-6)


def test_the_ctypes_binding_takes_them_too(run_python):
    run_python(
        """
        import os
        os.environ["TANDEM_PYTHON_BOUNDARY"] = "ctypes"
        import numpy as np
        import tandem
        x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
        slope = np.ones(2, np.float32)
        mods = {"score_mod": tandem.Mod("score - slope[head] * abs(q - k) * one", slope=slope, one=1),
                "mask_mod": tandem.Mod("k <= q and on", on=True)}
        out, lse = tandem.attention(x, x, x, return_lse=True, **mods)
        same = tandem.attention(x, x, x, alibi_slopes=slope, causal=True)
        np.testing.assert_allclose(out, same, atol=1e-6)
        assert tandem.attention_backward(x, x, x, x, out, lse, **mods).dscore_mod["slope"].shape == (2,)
        slope.flags.writeable = False
        try:
            tandem.attention_backward(x, x, x, x, out, lse, dscore_mod={"slope": slope}, **mods)
        except ValueError as error:
            assert "a gradient of score_mod must be writable" in str(error), error
        else:
            raise AssertionError("written")
        """
    )


READ_ONLY = SLOPES.copy()
READ_ONLY.flags.writeable = False
BAD = {
    "a name": ({"score_mod": "score - slpoe[head]"}, ValueError, "^score_mod: column 9: 'slpoe' is not a known name"),
    "a mask of numbers": ({"mask_mod": "q - k"}, ValueError, "^mask_mod: column 1: a mask_mod must return a bool"),
    "no text": ({"score_mod": 3}, TypeError, r"score_mod \(int\) must be an expression"),
    "a function": (
        {"mask_mod": lambda *x: x},
        TypeError,
        r"mask_mod \(function\) .*a function to tandem.flex_attention",
    ),
    "a list": ({"score_mod": tandem.Mod("score + x[head]", x=[1, 2])}, TypeError, r"score_mod.x \(list\) must be"),
    "nothing": ({"score_mod": tandem.Mod("score + x", x=None)}, TypeError, r"score_mod.x \(NoneType\) must be"),
    "bytes": (
        {"score_mod": tandem.Mod("score + x[0]", x=np.zeros(3, np.int8))},
        ValueError,
        r"score_mod.x.dtype \(int8",
    ),
    "dimensions": (
        {"score_mod": tandem.Mod("score + x[0]", x=np.zeros((1,) * 5))},
        ValueError,
        r"score_mod.x.ndim \(5",
    ),
    "bits": ({"mask_mod": tandem.Mod("k < n", n=2**40)}, ValueError, r"mask_mod: 'n' .* must be an integer of 32 bits"),
    "a word": ({"mask_mod": tandem.Mod("k < max", max=3)}, ValueError, "'max' must not be a word"),
}


@pytest.mark.parametrize(("mods", "kind", "sentence"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_said(mods, kind, sentence):
    for call in (tandem.attention, lambda *x, **y: tandem.check("backward", *x, **y)):
        with pytest.raises(kind, match=sentence):
            call(Q, K, V, **mods)


def test_texts_and_targets_that_are_none():
    for text in (3, "score\0"):
        with pytest.raises(TypeError, match="must be a str"):
            tandem.Mod(text)
    mod = tandem.Mod(ALIBI, slope=SLOPES)
    assert (
        repr(mod) == f"Mod({ALIBI!r}, slope=ndarray of (4,))" and repr(tandem.Mod("q < n", n=3)) == "Mod('q < n', n=3)"
    )
    out, lse = tandem.attention(Q, K, V, score_mod=mod, return_lse=True)
    for target, sentence in (
        ({"slop": SLOPES}, "dscore_mod .'slop'. must have names of score_mod's float arrays"),
        ({"slope": SLOPES[:3]}, r"score_mod.slope.gradient.dim0 .3. must equal"),
        ({"slope": READ_ONLY}, "a gradient of score_mod must be writable"),
    ):
        with pytest.raises(ValueError, match=sentence):
            tandem.attention_backward(out, Q, K, V, out, lse, score_mod=mod, dscore_mod=target)
