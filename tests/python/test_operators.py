"""Misuse of torch.ops.tandem.*: every operator refuses every wrong argument by one sentence, and writes nothing."""

import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flash_attn_cases import int32  # noqa: E402

import tandem  # noqa: E402, F401

OPS = torch.ops.tandem
SENTENCE = re.compile(r"[^\n]*(must|overlap|is not served|are not served|column \d+: )[^\n]*")
# torch refuses these arguments by an operator's schema, before the operator runs.
SCHEMA = re.compile(r"Expected a value of type|Expected a value|expected at most|missing value for argument|Overflow")


def dense(heads=4, heads_k=2):
    return [torch.randn(2, 5, h, 8) for h in (heads, heads_k, heads_k)]


def at(n, *tensors):
    """Returns q, k and v, with these tensors as the inputs from number n on."""
    return [*dense(), *[None] * (n - 3), *tensors]


def packed():
    lengths = int32(0, 4, 10)
    tensors = [torch.randn(10, h, 8) for h in (4, 2, 2)]
    return [*tensors, None, None, None, lengths, lengths.clone()], {"max_seqlen_q": 6, "max_seqlen_k": 6}


def paged():
    tensors = [torch.randn(2, 5, 4, 8), torch.randn(4, 8, 2, 8), torch.randn(4, 8, 2, 8)]
    return [*tensors, *[None] * 6, int32(5, 9), int32(0, 1, 2, 3).reshape(2, 2)], {}


def blocks():
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return at(13, *lists, lists[0] * 0, lists[1].clone()), {"mask_block_q": 128, "mask_block_k": 128}


def mods():
    options = {"score_mod": "score + w[head] * c", "score_mod_names": ["c", "w"], "score_mod_numbers": [0.5]}
    return at(17, [torch.randn(4)]), options


CALLS = {
    "dense": lambda: (dense(), {}),
    "bias": lambda: (at(3, torch.randn(2, 4, 5, 5), torch.randn(4), torch.rand(4)), {}),
    "packed": packed,
    "used": lambda: (at(8, int32(3, 5), int32(3, 5)), {}),
    "paged": paged,
    "dropout": lambda: (at(11, torch.tensor([1, 2])), {"dropout_p": 0.25}),
    "diagonals": lambda: (at(12, int32(0, 1)), {"alignment": "explicit", "causal": True}),
    "blocks": blocks,
    "mods": mods,
}


def backward(call):
    arguments, options = call()
    out, lse = OPS.forward(*arguments, **options)
    wanted = [True, True, True, *(len(arguments) > n and arguments[n] is not None for n in (3, 4))]
    return [torch.randn_like(out), torch.randn_like(lse), out, lse, *arguments], {**options, "wanted": wanted}


def merge():
    return [[torch.randn(2, 5, 4, 8) for _ in range(2)], [torch.randn(2, 4, 5) for _ in range(2)], False], {}


def append():
    new = [torch.randn(2, 1, 2, 8) for _ in range(2)]
    caches = [torch.zeros(2, 16, 2, 8) for _ in range(2)]
    rotary = [torch.randn(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), None, torch.randn(32, 4), torch.randn(32, 4)]
    return [*new, *caches, None, None, int32(3, 4), None, None, *rotary, None, None, False, False], {}


def cascade():
    own = [torch.randn(3, 4, 8), torch.randn(8, 16, 2, 8), torch.randn(8, 16, 2, 8), torch.randn(4)]
    tables = [int32(0, 1, 3), int32(5, 9), int32(0, 1).reshape(2, 1)]
    groups = [int32(0, 3), int32(2, 3).reshape(1, 2), int32(20)]
    options = {"max_seqlen_q": 2, "softmax_scale": None, "softcap": 0.0, "causal": True, "batch_invariant": False}
    return [*own, *tables, *groups, 3], options


CASES = [(name, call, make) for call, make in CALLS.items() for name in ("forward", "max_scores")]
CASES += [("backward", call, lambda make=make: backward(make)) for call, make in CALLS.items() if call != "paged"]
CASES += [("merge", "merge", merge), ("append_kv", "append", append), ("cascade", "cascade", cascade)]


def wrong(x):
    """Returns tensors in place of x that no operator accepts, by name."""
    yield "meta", x.to("meta")
    yield "complex", x.to(torch.complex64)
    yield "fp8", x.float().to(torch.float8_e4m3fn)
    yield "quantized", torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)
    yield "rank 9", x.reshape(*[1] * (9 - x.dim()), *x.shape)
    yield "sparse", x.to_sparse()
    yield "nested", torch.nested.nested_tensor([x.float(), x.float()])
    yield "jagged", torch.nested.nested_tensor([x, x], layout=torch.jagged)
    if x.dtype == torch.float32:
        yield "mkldnn", x.contiguous().to_mkldnn()
    yield "text", "x"


def replacements(arguments, required):
    """Returns (name, arguments) with one wrong tensor, or None for a required one."""
    for n, x in enumerate(arguments):
        if isinstance(x, list):
            for i, y in enumerate(x):
                for name, z in wrong(y):
                    yield f"{n}[{i}] {name}", [*arguments[:n], [*x[:i], z, *x[i + 1 :]], *arguments[n + 1 :]]
            yield f"{n} empty", [*arguments[:n], [], *arguments[n + 1 :]]
        elif isinstance(x, torch.Tensor):
            for name, y in wrong(x):
                yield f"{n} {name}", [*arguments[:n], y, *arguments[n + 1 :]]
            if n in required:
                yield f"{n} None", [*arguments[:n], None, *arguments[n + 1 :]]


REQUIRED = {"forward": (0, 1, 2), "max_scores": (0, 1, 2), "backward": (2, 3, 4, 5, 6), "cascade": (0, 1, 2, 4, 5, 6)}


def tensors_in(arguments):
    return [x for x in arguments if type(x) is torch.Tensor and x.layout is torch.strided and x.device.type == "cpu"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize(("op", "call", "make"), CASES, ids=[f"{op} {call}" for op, call, _ in CASES])
def test_wrong_tensors(op, call, make, inference):
    torch.manual_seed(0)
    arguments, options = make()
    kept = [x.clone() for x in tensors_in(arguments)]
    with torch.inference_mode(inference):
        for name, replaced in replacements(arguments, REQUIRED.get(op, ())):
            if inference and name.endswith("jagged"):
                continue  # this class refuses operators before they run
            if inference:
                replaced = [x.clone() if isinstance(x, torch.Tensor) and not x.is_nested else x for x in replaced]
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                getattr(OPS, op)(*replaced, **options)
            message = str(caught.value)
            assert SENTENCE.fullmatch(message) or SCHEMA.search(message), f"{op} {name}: {message}"
    for before, after in zip(kept, tensors_in(arguments)):
        assert torch.equal(before, after)
    getattr(OPS, op)(*arguments, **options)


@pytest.mark.parametrize("op", ["forward", "max_scores", "backward"])
def test_wrong_names_and_numbers_of_mods(op):
    arguments, options = mods() if op != "backward" else backward(mods)
    captured = arguments[-1]
    wrong_calls = [
        (arguments[:-1], options, "captured (0 tensors) must have 1"),
        ([*arguments[:-1], captured * 2], options, "captured (2 tensors) must have 1"),
        (arguments, {**options, "score_mod_numbers": [1, 2, 3]}, "score_mod_numbers (3 values) must have at most one"),
        (arguments, {**options, "score_mod": None}, "score_mod (None) must be an expression if score_mod_names"),
        (arguments, {**options, "mask_mod_names": ["x"]}, "mask_mod (None) must be an expression if mask_mod_names"),
    ]
    for args, named, sentence in wrong_calls:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            getattr(OPS, op)(*args, **named)


def test_wanted():
    arguments, options = backward(CALLS["dense"])
    for wanted, sentence in (
        ([True] * 4 + [False], "wanted[3] (True) must be False, because bias is None"),
        ([True], "wanted (1 values) must have 5"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            OPS.backward(*arguments, **{**options, "wanted": wanted})


def test_append_kv_refuses_gradients_and_lazy_caches():
    for n, change, sentence in (
        (0, lambda x: x.requires_grad_(), "k must not require a gradient"),
        (2, torch._neg_view, "k_cache (lazily negated) must be a plain tensor"),
        (10, torch._neg_view, "q_out (lazily negated) must be a plain tensor"),
        (2, lambda x: torch._efficientzerotensor(x.shape), "k_cache (a zero tensor without memory) must have memory"),
    ):
        for inference in (False, True):
            if inference and n == 0:
                continue
            arguments, _ = append()
            with torch.inference_mode(inference):
                arguments[n] = change(arguments[n].clone())
                with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(sentence)):
                    OPS.append_kv(*arguments)
            assert not arguments[3].any()


def test_compiled_calls_refuse_tensors_of_other_devices():
    q, k, v = dense()
    call = torch.compile(lambda q, k, v: OPS.forward(q, k, v)[0], backend="aot_eager")
    with pytest.raises(Exception, match=r"k \(on meta\) must be on the device of q \(cpu\): move it there"):
        call(q, k.to("meta"), v)
    torch.testing.assert_close(call(q, k, v), OPS.forward(q, k, v)[0])
