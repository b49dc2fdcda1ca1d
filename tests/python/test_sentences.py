"""Error messages of the drop-in modules: the caller's argument names, names of types, and a remedy."""

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flash_attn_cases import int32  # noqa: E402

import tandem  # noqa: E402
import tandem.fa3 as fa3  # noqa: E402
import tandem.fa4 as fa4  # noqa: E402
import tandem.flash_attn as fa2  # noqa: E402
from tandem.sdpa import scaled_dot_product_attention as sdpa  # noqa: E402

Q, K, V = (torch.randn(2, n, h, 8, generator=torch.Generator().manual_seed(n)) for n, h in ((5, 4), (7, 2), (7, 2)))
ARRAYS = [x.numpy() for x in (Q, K, V)]
BHSD = [x.transpose(1, 2) for x in (Q, K.repeat_interleave(2, 2), V.repeat_interleave(2, 2))]
PAGES = torch.full((2, 1), 9, dtype=torch.int32)
CU = int32(0, 2, 5)

COMMON = {  # parameters of every flash_attn_func
    "numpy": (lambda f: f(*ARRAYS), TypeError, r"q \(ndarray\) must be a torch tensor"),
    "numpy v": (lambda f: f(Q, K, ARRAYS[2]), TypeError, r"v \(ndarray\) must be a torch tensor"),
    "a number": (lambda f: f(torch.tensor(1.0), K, V), ValueError, r"q.ndim \(0\) must be 4"),
    "window of one": (lambda f: f(Q, K, V, window_size=4), ValueError, r"window_size \(4\) must be \(left, right\)"),
    "window of three": (lambda f: f(Q, K, V, window_size=(1, 2, 3)), ValueError, r"window_size \(\(1, 2, 3\)\)"),
    "fractions": (lambda f: f(Q, K, V, window_size=(1.5, 2)), TypeError, r"window_size \(\(1.5, 2\)\) must be"),
    "flags": (lambda f: f(Q, K, V, window_size=(True, 2)), TypeError, r"window_size \(\(True, 2\)\) must be"),
    "words": (lambda f: f(Q, K, V, window_size=("a", 2)), TypeError, r"window_size \(\('a', 2\)\) must be"),
    "meta": (lambda f: f(*(x.to("meta") for x in (Q, K, V))), TypeError, "q is on meta.* must be on cpu or cuda"),
    "k on meta": (lambda f: f(Q, K.to("meta"), V), TypeError, "k is on meta.* must be on cpu or cuda"),
    "8 bits": (lambda f: f(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V))), ValueError, r"q.dtype \(float8_e4m3fn\)"),
    "complex": (lambda f: f(Q.to(torch.complex64), K, V), ValueError, r"q.dtype \(complex64\) must be"),
    "sparse": (lambda f: f(Q.to_sparse(), K, V), TypeError, r"q \(sparse_coo\) must be a plain tensor"),
    "nested": (lambda f: f(torch.nested.nested_tensor([Q[0]]), K, V), TypeError, r"q \(nested\) must be a plain"),
    "no head_dim": (lambda f: f(Q[..., :0], K[..., :0], V), ValueError, r"q.head_dim \(0\) must be 1 to 512"),
    "scale": (lambda f: f(Q, K, V, softmax_scale=float("inf")), ValueError, r"softmax_scale \(inf\) .*pass None for"),
    "word for a scale": (lambda f: f(Q, K, V, softmax_scale="a"), TypeError, r"softmax_scale \('a'\) must be a number"),
    "word for causal": (lambda f: f(Q, K, V, causal="yes"), ValueError, r"causal \('yes'\) must be True or False: "),
    "word for a cap": (lambda f: f(Q, K, V, softcap="a"), TypeError, r"softcap \('a'\) must be a number"),
}  # fmt: skip
FUNCTIONS = (fa2.flash_attn_func, fa3.flash_attn_func, fa4.flash_attn_func)

OWN = {
    "pages of FlashAttention-2": (
        lambda: fa2.flash_attn_varlen_func(Q[0], K, V, CU, int32(0, 7, 7), 3, 7, block_table=PAGES),
        ValueError, r"^block_table\[0, 0\] \(9\) must be at least 0 and below k.pages \(2\)",
    ),
    "cu_seqlens": (
        lambda: fa2.flash_attn_varlen_qkvpacked_func(torch.randn(5, 3, 2, 8), int32(0, 3, 7), 5),
        ValueError, r"^cu_seqlens\[2\] \(7\) must be at most qkv.total \(5\)",
    ),
    "array for gradients": (
        lambda: fa2.flash_attn_varlen_func(Q[0].clone().requires_grad_(), K[0], V[0], CU.numpy(), int32(0, 3, 7), 3, 4),
        TypeError, r"cu_seqlens_q \(ndarray\) must be a torch tensor",
    ),
    "packed array": (lambda: fa2.flash_attn_qkvpacked_func(ARRAYS[0]), TypeError, r"qkv \(ndarray\) must be a torch"),
    "packed by name": (
        lambda: fa2.flash_attn_kvpacked_func(Q, torch.randn(2, 7, 2, 3, 8)),
        ValueError, r"multiple of kv.heads \(3\).* heads of kv$",
    ),
    "sink": (lambda: fa4.flash_attn_func(Q, K, V, learnable_sink=torch.ones(3)), ValueError, r"learnable_sink.heads"),
    "sink as a list": (lambda: fa4.flash_attn_func(Q, K, V, learnable_sink=[1]), TypeError, r"learnable_sink \(list\)"),
    "plan": (lambda: fa3.get_scheduler_metadata(1, 1, 1, 1, 1, 64, [3]), TypeError, r"cache_seqlens \(list\)"),
    "parts": (lambda: fa3.flash_attn_combine(Q.int(), Q[..., 0]), ValueError, r"out_partial \(torch.int32"),
    "parts to a list": (lambda: fa3.flash_attn_combine(Q, Q[..., 0], out=[1]), TypeError, r"out \(list\) must be"),
    "sdpa numpy": (lambda: sdpa(*(x.numpy() for x in BHSD)), TypeError, r"query \(ndarray\) must be a torch tensor"),
    "sdpa mask": (
        lambda: sdpa(*BHSD, attn_mask=torch.ones(5, 7).bfloat16()),
        ValueError, r"attn_mask.dtype \(bfloat16\).*convert the attn_mask to one of these types",
    ),
    "sdpa mask as array": (lambda: sdpa(*BHSD, attn_mask=np.ones((5, 7))), TypeError, r"attn_mask \(ndarray\) must be"),
    "sdpa types": (lambda: sdpa(BHSD[0], BHSD[1].half(), BHSD[2]), ValueError, r"key.dtype \(float16\)"),
    "sdpa scale": (lambda: sdpa(*BHSD, scale=float("inf")), ValueError, r"^scale \(inf\) must be a finite"),
    "native bias": (lambda: tandem.attention(Q, K, V, bias=np.ones((1, 1, 5, 7))), TypeError, r"bias \(ndarray\)"),
    "native out": (lambda: tandem.attention(Q, K, V, out=ARRAYS[0]), TypeError, r"out \(ndarray\) must be a torch"),
    "native seed": (lambda: tandem.attention(Q, K, V, dropout_p=0.5, seed="x"), TypeError, r"seed \('x'\) must be"),
    "native seed pair": (
        lambda: tandem.attention(Q, K, V, dropout_p=0.5, seed=(1, 2.5)), TypeError, r"seed \(\(1, 2.5\)\) must be",
    ),
}  # fmt: skip

CACHE = {  # flash_attn_with_kvcache
    "q as array": ({"q": ARRAYS[0]}, TypeError, r"q \(ndarray\) must be a torch tensor"),
    "cache as array": ({"v_cache": ARRAYS[2]}, TypeError, r"v_cache \(ndarray\) must be a torch tensor"),
    "new keys as array": ({"k": ARRAYS[1], "v": V}, TypeError, r"k \(ndarray\) must be a torch tensor"),
    "fraction of a length": ({"cache_seqlens": 3.5}, TypeError, r"cache_seqlens \(float\) must be an int"),
    "list of lengths": ({"cache_seqlens": [3, 4]}, TypeError, r"cache_seqlens \(list\) must be an int"),
    "list of rows": ({"cache_batch_idx": [0, 1]}, TypeError, r"cache_batch_idx \(list\) must be a torch tensor"),
    "head_dim": ({"k_cache": K[..., :4]}, ValueError, r"k_cache.head_dim \(4\) must equal q.head_dim \(8\)"),
    "type": ({"q": Q.half()}, ValueError, r"k_cache.dtype \(float32\) must be float16: q, k_cache and v_cache share"),
    "meta": ({"q": Q.to("meta")}, ValueError, "q, k_cache and v_cache .on meta, cpu and cpu. must be on one device"),
    "window": ({"window_size": 4}, ValueError, r"window_size \(4\) must be \(left, right\)"),
    "rotary": (
        {"k": K[:, :2], "v": V[:, :2], "rotary_cos": ARRAYS[0], "rotary_sin": ARRAYS[0], "cache_seqlens": 2},
        TypeError, r"rotary_cos \(ndarray\) must be a torch tensor",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", FUNCTIONS, ids=("fa2", "fa3", "fa4"))
@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("binding", ["_native", "_ctypes"])
def test_functions(name, function, binding, monkeypatch):
    monkeypatch.setattr(tandem._binding, "binding", importlib.import_module(f"tandem.{binding}"))
    call, kind, words = COMMON[name]
    with pytest.raises(kind, match=words) as raised:
        call(function)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", OWN)
def test_own_words(name):
    call, kind, words = OWN[name]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("module", [fa2, fa3], ids=("fa2", "fa3"))
@pytest.mark.parametrize("name", CACHE)
def test_caches(name, module):
    change, kind, words = CACHE[name]
    k_cache, v_cache = K.clone(), V.clone()
    with pytest.raises(kind, match=words):
        module.flash_attn_with_kvcache(**{"q": Q, "k_cache": k_cache, "v_cache": v_cache, **change})
    assert torch.equal(k_cache, K) and torch.equal(v_cache, V)


@pytest.mark.parametrize("module", [fa2, fa3], ids=("fa2", "fa3"))
def test_a_cache_takes_none_for_no_bound(module):
    plain = module.flash_attn_with_kvcache(Q, K, V, cache_seqlens=4)
    given = module.flash_attn_with_kvcache(Q, K, V, cache_seqlens=4, window_size=(None, None), num_splits=None)
    assert torch.equal(plain, given)


def test_unknown_values_of_the_environment(monkeypatch, run_python):
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "yes")
    for function in (fa2.flash_attn_func, fa3.flash_attn_func):
        with pytest.raises(ValueError, match=r"FLASH_ATTENTION_DETERMINISTIC \('yes'\) must be 0 or 1"):
            function(Q, K, V)
    run_python("""
        import os
        os.environ["TANDEM_PYTHON_BOUNDARY"] = "cython"
        try:
            import tandem
        except ImportError as error:
            assert "TANDEM_PYTHON_BOUNDARY ('cython') must be 'native', 'ctypes' or unset" in str(error), error
        else:
            raise AssertionError("it was accepted")
    """)


def test_a_torch_that_is_too_old(run_python):
    run_python("""
        import torch
        torch.__version__ = "2.9.1+cpu"
        try:
            import tandem
        except ImportError as error:
            assert "torch is 2.9.1+cpu and must be 2.10 or later" in str(error), error
        else:
            raise AssertionError("it was accepted")
    """)


def test_transformers_own_names():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tandem.transformers import tandem_attention

    module = torch.nn.Module()
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    for arguments, words in (
        ((q, k.half(), v, None), r"key.dtype \(float16\) must be float32: query, key and value"),
        ((q, k, v, torch.ones(1, 1, 5, 6)), r"attention_mask.seqlen_k \(6\)"),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=words):
            tandem_attention(module, *arguments)
    with pytest.raises(ValueError, match=r"scaling \(inf\)"):
        tandem_attention(module, q, k, v, None, scaling=float("inf"))
    plain = tandem_attention(module, q, k, v, None, s_aux=torch.ones(4))[0]
    assert torch.equal(plain, tandem_attention(module, q, k, v, None, s_aux=torch.ones(4).half())[0])
