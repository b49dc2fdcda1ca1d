"""tandem.jax: options, gradients and transformations, on four devices of the CPU."""

import concurrent.futures
import functools
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_cases import (
    OPTIONS,
    SAME_LAYOUT,
    SINK,
    SLOPES,
    arrays,
    attention,
    close,
    f32,
    in_tandem,
    in_torch,
    loss,
    qkv,
    same,
    same_as_torch,
    with_gradients,
)

import reference
import tandem

# ---- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(17, 11), (3, 40)])
@pytest.mark.parametrize("name", OPTIONS)
def test_float64_reference(name, lengths):
    options = OPTIONS[name]
    q, k, v = qkv(sq=lengths[0], sk=lengths[1])
    dout, dlse = arrays(2, (2, lengths[0], 4, 24), (2, lengths[0], 4))
    sink = options.get("sink", np.zeros(0, f32))

    def function(q, k, v, sink):
        own = {**options, "sink": sink} if "sink" in options else options
        return attention(q, k, v, return_residual=True, **own)

    (out, lse), found = with_gradients(function, (q, k, v, jnp.asarray(sink)), (dout, dlse))
    own = in_tandem(options)
    if "diagonal_offset" in own:
        del own["alignment"]
    sums = [0, 0]
    for b in range(2):
        one = [np.asarray(x[b]) for x in (q, k, v)]
        exact, plain = (reference.forward(*one, dtype=dtype, **own) for dtype in (np.float64, f32))
        reference.hold(out[b], exact[0], plain[0], "out")
        reference.hold(lse[b].T, exact[1], plain[1], "lse")
        dl = np.asarray(dlse[b]).T
        exact, plain = (
            reference.backward(np.asarray(dout[b]), *one, dlse=dl, dtype=dtype, **own) for dtype in (np.float64, f32)
        )
        for what, x, y, z in zip(("dq", "dk", "dv"), found, exact, plain):
            reference.hold(x[b], y, z, what)
        if "sink" in options:
            sums = [sums[0] + exact[4], sums[1] + plain[4]]
    if "sink" in options:
        reference.hold(found[3], *sums, "dsink")


@pytest.mark.parametrize("shape", [(2, 4, 11, 17), (1, 4, 1, 17), (2, 1, 11, 1), (1, 1, 1, 1)])
def test_bias_and_its_gradient(shape):
    q, k, v = qkv()
    bias, dout = arrays(3, shape, (2, 11, 4, 24))
    mask = jnp.asarray(np.random.default_rng(4).random((2, 1, 11, 17)) < 0.8)

    def function(q, k, v, bias):
        return attention(q, k, v, bias, mask)

    out, found = with_gradients(function, (q, k, v, bias), dout)
    whole = np.broadcast_to(np.where(mask, bias, -np.inf), (2, 4, 11, 17)).astype(f32)
    dbias = [np.zeros((2, 4, 11, 17)), np.zeros((2, 4, 11, 17), f32)]
    for b in range(2):
        one = [np.asarray(x[b]) for x in (q, k, v)]
        exact, plain = (reference.forward(*one, bias=whole[b], dtype=d)[0] for d in (np.float64, f32))
        reference.hold(out[b], exact, plain, "out")
        for n, dtype in enumerate((np.float64, f32)):
            dbias[n][b] = reference.backward(np.asarray(dout[b]), *one, bias=whole[b], dtype=dtype)[3]
    over = tuple(d for d in range(4) if shape[d] == 1)
    reference.hold(found[3], *(x.sum(over, keepdims=True) for x in dbias), "dbias")


def test_float64():
    with jax.enable_x64(True):
        q, k, v = qkv(dtype=np.float64)
        out, found = with_gradients(lambda *x: attention(*x, is_causal=True), (q, k, v), jnp.ones((2, 11, 4, 24)))
        exact = reference.forward(*(np.asarray(x[0]) for x in (q, k, v)), causal=True, alignment="top_left")[0]
        assert out.dtype == np.float64 and found[0].dtype == np.float64
        np.testing.assert_allclose(out[0], exact, rtol=1e-12, atol=1e-12)


def test_agrees_with_jax_nn():
    q, k, v = qkv(sq=17)
    v = v[..., :16]
    used = jnp.array([17, 9], jnp.int32)
    for options in (
        {"is_causal": True, "local_window_size": (3, 2)},
        {"local_window_size": 4, "scale": 0.2},
        {"query_seq_lengths": used, "key_value_seq_lengths": used},
        {"bias": arrays(5, (1, 4, 17, 17))[0], "is_causal": True},
        {"bias": arrays(5, (4, 1, 17))[0], "mask": np.tri(17, dtype=bool)},
    ):

        def run(f, own=options):
            return jax.jit(lambda q, k, v: f(q, k, v, return_residual=True, **own))(q, k, v)

        both = [run(f) for f in (attention, jax.nn.dot_product_attention)]
        seen = np.asarray(both[0][1]) > -np.inf
        np.testing.assert_allclose(both[0][0], both[1][0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(both[0][1][seen], both[1][1][seen], rtol=1e-5, atol=1e-5)
    close([attention(q[0], k[0], v[0])], [jax.nn.dot_product_attention(q[0], k[0], v[0])])


# ---- The same bits as under torch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_torch(name):
    same_as_torch(*qkv(), OPTIONS[name])


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_bits_of_torch_in_16_bits(dtype):
    for name in ("plain", "all"):
        same_as_torch(*qkv(dtype=dtype), OPTIONS[name])


EXPRESSIONS = {
    "slopes": {"score_mod": tandem.Mod("score - slope[head] * abs(q - k)", slope=SLOPES)},
    "numbers": {"score_mod": tandem.Mod("a * tanh(score / a) if on else score + n", a=2.5, on=True, n=3)},
    "scalar array": {"score_mod": tandem.Mod("score * x + batch", x=np.array(0.5, f32))},
    "table": {"score_mod": tandem.Mod("score + t[batch][k]", t=arrays(6, (2, 17))[0])},
    "mask": {"mask_mod": tandem.Mod("k <= q + w || k < n", w=2, n=np.array(3, np.int32))},
    "both": {"score_mod": "score * 0.5", "mask_mod": "q != k", "softcap": 3.0},
    "bool table": {"mask_mod": tandem.Mod("t[k]", t=np.arange(17) % 3 > 0)},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name):
    same_as_torch(*qkv(), EXPRESSIONS[name])


def test_other_inputs_with_the_bits_of_torch():
    used = {"query_seq_lengths": jnp.array([4, 11], jnp.int32), "key_value_seq_lengths": jnp.array([0, 16], jnp.int32)}
    same_as_torch(*qkv(), {**used, "is_causal": True, "alignment": "bottom_right"})
    same_as_torch(*qkv(), {"diagonal_offset": jnp.array([3, -5], jnp.int32), "is_causal": True})
    same_as_torch(*qkv(), {"dropout_p": 0.3, "seed": 2**40 + 17})
    same_as_torch(*qkv(), {"dropout_p": 0.3, "seed": -1, "batch_invariant": True})
    cu_q, cu_k = jnp.array([0, 4, 4, 11], jnp.int32), jnp.array([0, 6, 9, 17], jnp.int32)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 7, "max_seqlen_k": 8}
    same_as_torch(*(x[0] for x in qkv()), {**packed, "is_causal": True, "sink": SINK})
    mask = "k <= q || k < 3"
    blocks = tandem.Blocks.of(mask, 33, 40, BLOCK_SIZE=(8, 8))
    same_as_torch(*qkv(sq=33, sk=40), {"mask_mod": mask, "block_mask": blocks})


@pytest.mark.parametrize("seed", range(16))
def test_random_calls_with_the_bits_of_torch(seed):
    random = np.random.default_rng(seed)

    def pick(*choices):
        return choices[random.integers(len(choices))]

    heads_k, dtype = pick(1, 2, 3), pick(f32, np.float16, jnp.bfloat16)
    heads = heads_k * pick(1, 2, 5)
    sq, sk = (int(x) for x in random.integers(1, 90, 2))
    dim, dim_v = pick(8, 20, 33, 64), pick(8, 24, 40)
    batch = pick(1, 3)
    q, k, v = arrays(seed, (batch, sq, heads, dim), (batch, sk, heads_k, dim), (batch, sk, heads_k, dim_v), dtype=dtype)
    sides = [None if random.random() < 0.3 else int(x) for x in random.integers(0, 30, 2)]
    choices = {
        "is_causal": True,
        "local_window_size": tuple(sides),
        "softcap": 2.0,
        "scale": 0.17,
        "alignment": "bottom_right",
        "sink": arrays(seed + 1, (heads,))[0],
        "alibi_slopes": abs(arrays(seed + 2, pick((heads,), (batch, heads)))[0]),
        "bias": arrays(seed + 3, (pick(1, batch), pick(1, heads), pick(1, sq), pick(1, sk)))[0],
        "query_seq_lengths": jnp.asarray(random.integers(0, sq + 1, batch), jnp.int32),
        "key_value_seq_lengths": jnp.asarray(random.integers(0, sk + 1, batch), jnp.int32),
        "score_mod": "score * 0.75 + 0.01 * (q - k)",
        "mask_mod": tandem.Mod("(q + k) % m != 0", m=int(random.integers(2, 5))),
    }
    same_as_torch(q, k, v, {name: x for name, x in choices.items() if random.random() < 0.4})


def test_float32_results():
    q, k, v = qkv(dtype=jnp.bfloat16)
    out, found = with_gradients(lambda *x: attention(*x, out_dtype=jnp.float32), (q, k, v), jnp.ones((2, 11, 4, 24)))
    theirs = tandem.attention(*map(in_torch, (q, k, v)), out_dtype=torch.float32)
    assert out.dtype == f32 and found[0].dtype == jnp.bfloat16
    same([out], [theirs])


# ---- Segments --------------------------------------------------------------------------------------------------------


def test_segments_are_sequences():
    q, k, v = qkv(sq=17)
    v = v[..., :16]
    ids = jnp.array([[0] * 5 + [1] * 11 + [0], [7] * 17], jnp.int32)
    apart = jnp.asarray(np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1))
    mask = apart[:, None, :, None] == apart[:, None, None, :]
    dout = arrays(2, q.shape)[0]
    for options in ({"is_causal": True}, {"local_window_size": (3, 1)}):
        run = functools.partial(attention, segment_ids=ids, **options)
        masked = functools.partial(jax.nn.dot_product_attention, mask=mask, **options)

        out, found = with_gradients(run, (q, k, v), dout)
        expected, gradients = jax.jit(lambda *x, f=masked: with_gradients(f, x, dout))(q, k, v)
        close([out, *found], [expected, *gradients])
        limited = functools.partial(attention, max_segments=4, **options)
        traced = jax.jit(lambda q, k, v, ids, f=limited: f(q, k, v, segment_ids=ids))
        same([out], [traced(q, k, v, ids)])
    out, lse = attention(q, k, v, segment_ids=(ids, ids), max_segments=17, return_residual=True, is_causal=True)
    packed = [x.reshape(34, *x.shape[2:]) for x in (q, k, v)]
    cu = jnp.array([0, 5, 16, 17, 34], jnp.int32)
    theirs = attention(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, return_residual=True, is_causal=True)
    same([out, lse], [x.reshape(y.shape) for x, y in zip(theirs, (out, lse))])


def test_a_row_with_too_many_segments_is_nan():
    q, k, v = qkv(sq=17)
    ids = jnp.array([[0] * 5 + [1] * 12, [0] * 5 + [1] * 5 + [2] * 7], jnp.int32)
    run = jax.jit(lambda ids, other: attention(q, k, v, segment_ids=(ids, other), max_segments=2, return_residual=True))
    out, lse = run(ids, ids)
    assert not np.isnan(out[0]).any() and np.isnan(out[1]).all() and np.isnan(lse[1]).all()
    assert np.isnan(run(ids, ids.at[0, 0].set(5))[0]).all()  # other ids, or another number of them
    with pytest.raises(ValueError, match="segment_ids must have at most max_segments"):
        attention(q, k, v, segment_ids=ids, max_segments=2)


# ---- Adversarial -----------------------------------------------------------------------------------------------------


def test_extreme_inputs():
    q, k, v = qkv()
    hidden = jnp.zeros((1, 1, 11, 17), bool)
    out, lse = attention(q, k, v, mask=hidden, return_residual=True)
    assert not np.asarray(out).any() and np.all(np.asarray(lse) == -np.inf)
    gradient = jax.grad(lambda q: attention(q, k, v, mask=hidden).sum())(q)
    assert not np.asarray(gradient).any()
    same_as_torch(q * 1e4, k * 1e4, v, {"is_causal": True})
    subnormal = jnp.asarray(np.asarray(v) * f32(1e-39))  # XLA's own products flush these to 0
    same_as_torch(q, k, subnormal, {"softcap": 2.0})
    assert np.asarray(attention(q, k, subnormal)).any()
    same_as_torch(q, k.at[0, 3].set(-jnp.inf), v, {"is_causal": True})
    same_as_torch(q.at[1, 2, 0, 0].set(jnp.nan), k, v, {})
    same_as_torch(q, k, v.at[0, 16].set(jnp.nan), {"key_value_seq_lengths": jnp.array([16, 3], jnp.int32)})


@pytest.mark.parametrize("empty", ["batch", "sq", "sk"])
def test_empty_dimensions(empty):
    q, k, v = qkv(**{empty: 0})
    out, found = with_gradients(lambda *x: attention(*x), (q, k, v), jnp.ones((*q.shape[:3], 24)))
    assert not np.asarray(out).any() and out.shape == (*q.shape[:3], 24)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


def test_transposed_inputs_are_read_in_their_order():
    q, k, v = qkv()
    heads_first = jax.jit(lambda q, k, v: attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True))
    same([heads_first(*(x.swapaxes(1, 2) for x in (q, k, v)))], [attention(q, k, v, is_causal=True)])


def test_many_threads():
    q, k, v = qkv(sq=64, sk=64)
    run = jax.jit(jax.grad(lambda q, s: (attention(q, k, v, is_causal=True) * s).sum()))
    expected = [np.asarray(run(q, f32(n))) for n in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: np.asarray(run(q, f32(n % 4))), range(64)))
    same(found, [expected[n % 4] for n in range(64)])


# ---- Transformations -------------------------------------------------------------------------------------------------


def test_jit_grad_remat_and_scan():
    q, k, v = qkv()

    def f(q, k, v):
        return loss(q, k, v, is_causal=True)

    expected = jax.grad(f, argnums=(0, 1, 2))(q, k, v)
    same(jax.jit(jax.grad(jax.checkpoint(f), argnums=(0, 1, 2)))(q, k, v), expected)
    same(jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v)[1], expected)
    v = v[..., :16]

    def layers(q, wrap):
        body = wrap(lambda x, _: (attention(x, k, v, is_causal=True), None))
        return (jax.lax.scan(body, q, None, length=3)[0] ** 2).sum()

    def one_by_one(q):
        return (attention(attention(attention(q, k, v, is_causal=True), k, v, is_causal=True), k, v,
                                          is_causal=True) ** 2).sum()  # fmt: skip

    for wrap in (lambda x: x, jax.checkpoint):
        close([jax.jit(jax.grad(lambda q, wrap=wrap: layers(q, wrap)))(q)], [jax.grad(one_by_one)(q)], 1e-6)


def test_only_the_wanted_gradients_are_computed():
    q, k, v = qkv()
    bias, sink = arrays(3, (1, 4, 11, 17), (4,))
    text = str(jax.make_jaxpr(jax.grad(lambda v: loss(q, k, v, bias, sink)))(v))
    assert "outputs" in text and "dbias" not in text and "dq" not in text and "dv" in text
    assert "dbias" in str(jax.make_jaxpr(jax.grad(lambda b: loss(q, k, v, b, sink)))(bias))


IN_AXES = {
    "all": (0, 0, 0, 0, None),
    "queries": (0, None, None, None, None),
    "keys": (None, 0, 0, None, None),
    "shared bias": (0, 0, 0, None, None),
    "sink": (0, 0, 0, None, 0),
    "other axes": (1, 2, 0, 3, None),
}


@pytest.mark.parametrize("name", IN_AXES)
def test_vmap(name):
    axes = IN_AXES[name]
    whole = [*qkv(), *arrays(3, (1, 4, 11, 17), (4,))]
    size = 3
    inputs = [x if a is None else jnp.stack([x * (1 + n / 4) for n in range(size)], a) for x, a in zip(whole, axes)]

    def f(*x):
        return loss(*x, is_causal=True)

    gradients = jax.grad(f, argnums=(0, 1, 2, 3, 4))
    each = [gradients(*(x if a is None else jnp.take(x, n, a) for x, a in zip(inputs, axes))) for n in range(size)]
    found = jax.jit(jax.vmap(gradients, axes))(*inputs)
    same(found, [jnp.stack(x) for x in zip(*each)])
    total = jax.grad(lambda *x: jax.vmap(f, axes)(*x).sum(), argnums=(0, 1, 2, 3, 4))(*inputs)
    close(total, [sum(x) if a is None else jnp.stack(x, a) for x, a in zip(zip(*each), axes)])


def test_vmap_folds_into_the_batch():
    inputs = [jnp.stack([x, x, x]) for x in qkv()]
    f = jax.vmap(lambda q, k, v: attention(q, k, v, is_causal=True))
    text = jax.jit(f).lower(*inputs).compile().as_text()
    assert "f32[6,11,4,16]" in text and "while" not in text
    twice = jax.vmap(f)
    nested = [jnp.stack([x, x * 2]) for x in inputs]
    same([twice(*nested)], [jnp.stack([f(*(x[n] for x in nested)) for n in range(2)])])


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.4, "seed": 3},
        {"score_mod": tandem.Mod("score + 0.3 * batch")},
        {"score_mod": tandem.Mod("score - slope[head]", slope=SLOPES)},
        {"segment_ids": np.array([[0] * 5 + [1] * 6] * 2), "max_segments": 2},
        {"query_seq_lengths": np.array([3, 11], np.int32), "alibi_slopes": SLOPES},
    ],
    ids=["dropout", "batch", "slopes", "segments", "lengths"],
)
def test_vmap_of_options(options):
    inputs = [jnp.stack([x, x * 2, x * 3]) for x in qkv(sk=11)]
    f = jax.value_and_grad(lambda q, k, v: loss(q, k, v, is_causal=True, **options), argnums=(0, 1, 2))
    values, gradients = jax.vmap(f)(*inputs)
    each = [f(*(x[n] for x in inputs)) for n in range(3)]
    same(gradients, [jnp.stack(x) for x in zip(*(g for _, g in each))])
    close([values], [jnp.stack([x for x, _ in each])])


def test_vmap_of_packed_calls_and_slopes():
    q, k, v = (x[0] for x in qkv())
    cu_q, cu_k = jnp.array([[0, 4, 11], [0, 7, 11]], jnp.int32), jnp.array([[0, 9, 17], [0, 1, 17]], jnp.int32)

    def f(a, b):
        return attention(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, is_causal=True)

    same([jax.vmap(f)(cu_q, cu_k)], [jnp.stack([f(a, b) for a, b in zip(cu_q, cu_k)])])
    slopes = jnp.stack([jnp.asarray(SLOPES), jnp.asarray(SLOPES * 2)])

    def f(s):
        return attention(*qkv(), alibi_slopes=s)

    same([jax.vmap(f)(slopes)], [jnp.stack([f(s) for s in slopes])])


# ---- Several devices -------------------------------------------------------------------------------------------------

P = jax.sharding.PartitionSpec


def mesh(explicit=False):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def placed(mesh, x, *spec):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))


def collectives(function, *inputs):
    text = jax.jit(function).lower(*inputs).compile().as_text()
    return {name for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if f" {name}(" in text}


def test_batch_and_heads_are_partitioned():
    on = mesh()
    q, k, v = qkv(batch=4)
    bias = arrays(3, (1, 4, 11, 17))[0]

    def f(q, k, v, b, s):
        return loss(q, k, v, b, s, is_causal=True)

    gradients = jax.grad(f, argnums=(0, 1, 2))
    all_gradients = jax.grad(f, argnums=(0, 1, 2, 3, 4))
    sharded = [placed(on, x, "data", None, "model") for x in (q, k, v)]
    sharded += [placed(on, bias, None, "model"), placed(on, SINK, "model")]

    def run(*x):
        return attention(*x[:4], sink=x[4], is_causal=True)

    out = jax.jit(run)(*sharded)
    assert out.sharding.spec == P("data", None, "model")
    same([out], [run(q, k, v, bias, SINK)])
    assert collectives(run, *sharded) == set() == collectives(gradients, *sharded)
    same(jax.jit(gradients)(*sharded), gradients(q, k, v, bias, SINK))
    assert collectives(all_gradients, *sharded) == {"all-reduce"}  # sums dbias and dsink
    close(jax.jit(all_gradients)(*sharded), all_gradients(q, k, v, bias, SINK))


@pytest.mark.parametrize(
    ("heads_k", "options", "shard"),
    [
        (1, {}, (2, 2)),
        (2, {"alibi_slopes": SLOPES}, (2, 2)),
        (4, {"mask_mod": "k <= q + head"}, (2, 4)),
        (2, {"score_mod": "score * (batch + 1)"}, (4, 2)),
        (2, {"dropout_p": 0.3, "seed": 5}, (4, 4)),
        (2, {"query_seq_lengths": np.array([3, 11, 0, 5], np.int32)}, (2, 2)),
        (2, {"segment_ids": np.array([[0] * 5 + [1] * 6] * 4), "max_segments": 2}, (2, 2)),
    ],
    ids=["one key head", "slopes", "head", "batch", "dropout", "lengths", "segments"],
)
def test_partitioned_options(heads_k, options, shard):
    """shard: sequences and query heads of one custom call."""
    on = mesh()
    inputs = qkv(batch=4, sk=11, heads_k=heads_k)
    heads = "model" if heads_k > 1 else None
    sharded = [placed(on, inputs[0], "data", None, "model"), *(placed(on, x, "data", None, heads) for x in inputs[1:])]
    f = jax.jit(jax.value_and_grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2)))
    compiled = f.lower(*sharded).compile()
    batch, n = shard
    q = f"{batch * 11},{n},16" if "segment_ids" in options else f"{batch},11,{n},16"
    assert len(re.findall(rf"tandem_\w+\", operand_layout_constraints={{f32\[{q}\]", compiled.as_text())) == 2
    _, found = compiled(*sharded)
    _, expected = f(*inputs)
    same(found[:1], expected[:1])
    (same if heads_k > 1 else close)(found[1:], expected[1:])  # a sum over the devices of one key head


def test_other_shardings_are_gathered():
    on = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = qkv(batch=4, sq=16, sk=16)
    run = jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True))
    expected = run(q, k, v)
    for spec in ((None, "x"), (None, None, None, "x"), (None, None, "x")):  # two key heads on four devices, last
        own = [placed(on, q, *spec), *(placed(on, x, *spec) if len(spec) != 3 else x for x in (k, v))]
        same([run(*own)], [expected])


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    q, k, v = qkv(batch=4)

    def f(q, k, v, s):
        return attention(q, k, v, sink=s, is_causal=True)

    spec = P("data", None, "model")
    sharded = jax.shard_map(
        f, mesh=mesh(), in_specs=(spec, spec, spec, P("model")), out_specs=spec, check_vma=check_vma
    )
    same([jax.jit(sharded)(q, k, v, SINK)], [f(q, k, v, SINK)])

    def gradients(f):
        return jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2, 3))

    found, expected = jax.jit(gradients(sharded))(q, k, v, SINK), gradients(f)(q, k, v, SINK)
    same(found[:3], expected[:3])
    close(found[3:], expected[3:])
    partly = jax.shard_map(
        lambda q, k, v: attention(q, k, v), mesh=mesh(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    same([jax.jit(partly)(q, k, v)], [attention(q, k, v)])


def test_explicit_axes():
    q, k, v = qkv(batch=4)

    def f(q, k, v):
        return attention(q, k, v, is_causal=True, return_residual=True)

    gradients = jax.grad(lambda *x: (f(*x)[0] ** 2).sum(), argnums=(0, 1, 2))
    expected, expected_gradients = f(q, k, v), gradients(q, k, v)
    on = mesh(explicit=True)
    with jax.set_mesh(on):
        sharded = [placed(on, x, "data", None, "model") for x in (q, k, v)]
        found = jax.jit(f)(*sharded)
        assert [jax.typeof(x).sharding.spec[:3] for x in found] == [("data", None, "model")] * 2
        same([*found, *jax.jit(gradients)(*sharded)], [*expected, *expected_gradients])


# ---- Others ----------------------------------------------------------------------------------------------------------


def test_keys_of_jax_random_are_seeds():
    q, k, v = qkv()

    def run(seed):
        return attention(q, k, v, dropout_p=0.5, seed=seed)

    words = jax.random.key_data(jax.random.key(3))
    expected = run(words)
    same([run(jax.random.key(3))], [expected])
    same([run(int(words[0]) + (int(words[1]) << 32))], [expected])
    for seed in (5, -5):
        same([jax.jit(run)(jnp.int32(seed))], [run(seed)])
    assert (np.asarray(run(1)) != np.asarray(run(2))).any()


def test_the_structs_are_those_of_jaxlib(tmp_path):
    source = tmp_path / "layout.c"
    source.write_text(SAME_LAYOUT)
    folders = ("-I", jax.ffi.include_dir(), "-I", str(pathlib.Path(__file__).parents[2] / "src"))
    made = subprocess.run(["cc", "-std=c11", "-fsyntax-only", *folders, source], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_jax_is_needed(run_python):
    run_python("""
        import sys
        sys.modules["jax"] = None
        import tandem
        try:
            tandem.jax
        except ImportError as error:
            assert "jax must be installed for tandem.jax" in str(error), error
        else:
            raise AssertionError
    """)
