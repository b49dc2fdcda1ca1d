"""Bad input: each call raises one clear error of the right type and writes nothing. No call crashes, hangs or leaks."""

import numpy as np
import pytest

import tandem

f32 = np.float32


def arrays(*shapes, dtype=f32):
    random = np.random.default_rng(0)
    return [random.standard_normal(s).astype(dtype) for s in shapes]


Q, K, V = arrays((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
CU = np.array([0, 3, 5], np.int32)

BAD = {
    "no array": ({"q": [1, 2]}, TypeError, "q .list. must be an array"),
    "a number for k": ({"k": 3.0}, TypeError, "k .float. must be an array"),
    "heads": ({"k": K[:, :, :1].repeat(3, 2), "v": V[:, :, :1].repeat(3, 2)}, ValueError, "heads"),
    "head_dim": ({"k": K[..., :4].copy()}, ValueError, "head_dim"),
    "batch": ({"k": K[:1]}, ValueError, "batch"),
    "rank": ({"q": Q[0]}, ValueError, "q"),
    "nine dimensions": ({"bias": np.zeros((1,) * 9, f32)}, ValueError, "bias .9 dimensions. must have at most 8"),
    "types differ": ({"k": K.astype(np.float16)}, ValueError, "dtype"),
    "integers": ({"q": Q.astype(np.int32)}, ValueError, "q.dtype"),
    "strings": ({"q": np.full(Q.shape, "a")}, TypeError, "q.dtype"),
    "objects": ({"q": np.full(Q.shape, None)}, TypeError, "q.dtype"),
    "complex": ({"q": Q.astype(np.complex64)}, TypeError, "q.dtype"),
    "big-endian": ({"q": Q.astype(">f4")}, TypeError, "q.dtype"),
    "between elements": (
        {"q": np.ndarray(Q.shape, f32, buffer=bytearray(2 * Q.nbytes + 2), strides=(643, 128, 32, 4))}, ValueError, "q",
    ),
    "causal": ({"causal": "top_left"}, ValueError, "causal .'top_left'. must be True or False.*alignment"),
    "causal of several": ({"causal": np.array([True, False])}, TypeError, "causal .ndarray. must be True or False"),
    "alignment": ({"alignment": "top-left"}, ValueError, "alignment .'top-left'. must be 'bottom_right'"),
    "no alignment": ({"alignment": None}, ValueError, "alignment .None. must be"),
    "window of one": ({"window": (3,)}, ValueError, r"window \(\(3,\)\) must be None or .left, right."),
    "window of a number": ({"window": 4}, ValueError, r"window \(4\) must be None or .left, right."),
    "window of fractions": ({"window": (2.5, None)}, TypeError, r"window\[0\] \(2.5\) must be an integer"),
    "window of words": ({"window": (None, "all")}, TypeError, r"window\[1\] \('all'\) must be an integer"),
    "window of many bits": ({"window": (2**64, 0)}, ValueError, r"window\[0\] \(18446744073709551616\) must be an int"),
    "splits of many bits": ({"num_splits": 2**32 + 1}, ValueError, r"num_splits \(4294967297\) must be an integer"),
    "a fraction of a length": ({"max_seqlen_q": 3.0}, TypeError, r"max_seqlen_q \(3.0\) must be an integer"),
    "a word for a flag": ({"deterministic": "no"}, TypeError, r"deterministic \('no'\) must be True or False"),
    "several flags": ({"batch_invariant": np.ones(2)}, TypeError, r"batch_invariant \(ndarray\) must be True or False"),
    "window of flags": ({"window": (True, False)}, TypeError, r"window\[0\] \(True\) must be an integer"),
    "window of an array of flags": ({"window": np.array([True, False])}, TypeError, r"window\[0\] \(True\) must be"),
    "window backwards": ({"window": (-3, 2)}, ValueError, "window"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap"),
    "scale": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
    "infinite scale": ({"softmax_scale": float("inf")}, ValueError, r"softmax_scale \(inf\) must be a finite"),
    "scale of an array": ({"softmax_scale": np.ones(2)}, TypeError, r"softmax_scale \(ndarray\) must be a number"),
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p"),
    "text for a number": ({"softcap": "much"}, TypeError, r"softcap \('much'\) must be a number"),
    "no text for a number": ({"softcap": ""}, TypeError, r"softcap \(''\) must be a number"),
    "no numbers": ({"dropout_p": []}, TypeError, r"dropout_p \(list\) must be a number"),
    "cap of an array": ({"softcap": np.ones(2)}, TypeError, r"softcap \(ndarray\) must be a number"),
    "bias shape": ({"bias": arrays((2, 4, 5, 8))[0]}, ValueError, "bias"),
    "sink shape": ({"sink": arrays((3,))[0]}, ValueError, "sink"),
    "slopes type": ({"alibi_slopes": np.ones(4)}, ValueError, "alibi_slopes"),
    "cu_seqlens of dense": ({"cu_seqlens_q": CU, "cu_seqlens_k": CU}, ValueError, "cu_seqlens|q"),
    "used lengths too long": ({"seqused_k": np.array([3, 8], np.int32)}, ValueError, "seqused_k"),
    "used lengths in int64": ({"seqused_k": np.array([3, 7])}, ValueError, "seqused_k"),
    "pages": ({"page_table": np.full((2, 1), 9, np.int32)}, ValueError, r"page_table\[0, 0\] \(9\) must be"),
    "seed of many bits": ({"dropout_p": 0.5, "seed": 2**64}, ValueError, r"seed \(18446744073709551616\) must be"),
    "seed below 64 bits": ({"dropout_p": 0.5, "seed": -(2**63) - 1}, ValueError, r"seed \(-9223372036854775809\) must"),
    "offset of many bits": ({"dropout_p": 0.5, "seed": (1, 2**64)}, ValueError, r"seed \(18446744073709551616\) must"),
    "seed of a flag": ({"dropout_p": 0.5, "seed": True}, TypeError, r"seed \(True\) must be an integer"),
    "seed of three": ({"dropout_p": 0.5, "seed": np.arange(3)}, ValueError, "seed"),
    "out too small": ({"out": np.empty((2, 5, 4, 7), f32)}, ValueError, "out"),
    "out of another type": ({"out": np.empty((2, 5, 4, 8), np.float16)}, ValueError, "out"),
    "out that is an input": ({"out": Q}, ValueError, "out"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("binding", ["native", "ctypes"])
def test_sentences_and_no_writes(name, binding, monkeypatch):
    if binding == "ctypes":
        monkeypatch.setattr(tandem._binding, "binding", __import__("tandem._ctypes")._ctypes)
    change, kind, words = BAD[name]
    out = change.get("out", np.full((2, 5, 4, 8), np.nan, f32))
    arguments = {"q": Q, "k": K, "v": V, "out": out, **change}
    before = out.tobytes()
    with pytest.raises(kind, match=words) as raised:
        tandem.attention(**arguments)
    assert out.tobytes() == before
    assert "\n" not in str(raised.value)


def test_read_only_results_are_refused():
    out = np.zeros((2, 5, 4, 8), f32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        tandem.attention(Q, K, V, out=out)
    assert not out.any()
    q = Q.copy()
    q.flags.writeable = False
    assert tandem.attention(q, K, V).shape == Q.shape  # only outputs must be writable


def test_packed_lengths_are_checked():
    q, k, v = arrays((5, 2, 8), (5, 2, 8), (5, 2, 8))
    for cu in ([0, 3, 6], [1, 3, 5], [0, 4, 3, 5], [0]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            tandem.attention(q, k, v, cu_seqlens_q=np.array(cu, np.int32), cu_seqlens_k=CU)


def test_check_answers_beforehand():
    tandem.check("forward", Q, K, V, causal=True)
    tandem.check("backward", Q, K, V, window=(3, 3))
    with pytest.raises(tandem.Unsupported, match="page_table must be None in the backward"):
        tandem.check("backward", Q, K, V, page_table=np.zeros((2, 1), np.int32))
    with pytest.raises(ValueError, match="bias"):
        tandem.check("backward", Q, K, V, bias=np.zeros((3, 4, 5, 7), f32))
    with pytest.raises(TypeError, match="softcup"):
        tandem.check("forward", Q, K, V, softcup=1.0)
    for call in (tandem.attention, lambda *x, **y: tandem.check("forward", *x, **y)):  # the first of several errors
        with pytest.raises(ValueError, match="alignment"):
            call(Q, K, V, alignment="left", deterministic="no")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_gradients_of_absent_inputs_are_refused(kind):
    array = np.asarray if kind == "numpy" else pytest.importorskip("torch").from_numpy
    q, k, v = (array(x.copy()) for x in (Q, K, V))
    out, lse = tandem.attention(q, k, v, return_lse=True)
    dq, dbias, dsink = (array(np.full(shape, np.nan, f32)) for shape in (Q.shape, (1, 1, 5, 7), (4,)))
    mask = array(np.ones((1, 1, 5, 7), bool))
    for options, words in (
        ({"dbias": dbias}, "dbias must be None without a floating-point bias: omit dbias"),
        ({"dbias": dbias, "bias": mask}, "dbias must be None without a floating-point bias"),
        ({"dsink": dsink}, "dsink must be None without a sink: omit dsink"),
    ):
        with pytest.raises(ValueError, match=words):
            tandem.attention_backward(out, q, k, v, out, lse, dq=dq, **options)
    assert all(np.isnan(np.asarray(x)).all() for x in (dq, dbias, dsink))
    assert tandem.attention_backward(out, q, k, v, out, lse, dbias=False, dsink=False).dbias is None


def test_torch_bad_input():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.copy()) for x in (Q, K, V))
    for change, kind in (
        ({"k": k.half()}, ValueError),
        ({"q": q.to_sparse()}, (TypeError, RuntimeError)),
        ({"q": q.to("meta")}, (ValueError, TypeError, RuntimeError)),
        ({"k": k[:, :, :, :4]}, ValueError),
        ({"q": q.to(torch.complex64)}, (TypeError, ValueError)),
        ({"page_table": torch.full((2, 1), -1, dtype=torch.int32)}, ValueError),
    ):
        with pytest.raises(kind):
            tandem.attention(**{"q": q, "k": k, "v": v, **change})


def test_memory_freed_while_a_call_runs(run_python):
    """The call owns the arrays that it reads, and uses the shapes at the time of the call."""
    pytest.importorskip("torch")
    run_python("""
        import threading, time, torch, tandem
        torch.set_num_threads(1)
        q, k, v = (torch.randn(1, 1500, 2, 64) for _ in range(3))
        want = tandem.attention(q, k, v)
        for kind in (torch.Tensor.clone, lambda x: x.numpy().copy()):
            tensors = [kind(q), kind(k), kind(v)]
            result = []
            thread = threading.Thread(target=lambda: result.append(tandem.attention(*tensors)))
            thread.start()
            time.sleep(0.002)
            tensors.clear()
            while thread.is_alive():
                kind(torch.randn(1, 1500, 2, 64))
            thread.join()
            assert torch.equal(torch.as_tensor(result[0]), want)
    """)


def test_forked_process_without_torch(run_python):
    run_python("""
        import os, signal, sys
        import numpy as np, tandem
        assert "torch" not in sys.modules
        q = np.random.default_rng(0).standard_normal((1, 1024, 4, 32), np.float32)
        want = tandem.attention(q, q, q)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if np.array_equal(tandem.attention(q, q, q), want) else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_clean_in_development_mode(run_python):
    run_python(
        """
        import numpy as np, tandem
        q = np.ones((1, 4, 2, 8), np.float32)
        out, lse = tandem.attention(q, q, q, return_lse=True)
        tandem.attention_backward(out, q, q, q, out, lse)
        try:
            tandem.attention(q, q, q, softcap=-1)
        except ValueError:
            pass
        """,
        "-X",
        "dev",
    )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_hundred_thousand_calls_grow_no_memory(kind, run_python):
    if kind == "torch":
        pytest.importorskip("torch")
    run_python(f"""
        import resource, numpy as np
        if {kind == "torch"}:
            import torch
            torch.set_num_threads(1)
        import tandem
        q = np.ones((1, 2, 1, 8), np.float32)
        bad = q[..., :4]
        if {kind == "torch"}:
            q, bad = torch.from_numpy(q), torch.from_numpy(bad)
        def calls(n):
            for i in range(n):
                tandem.attention(q, q, q, return_lse=True)
                if i % 10 == 0:
                    try:
                        tandem.attention(q, bad, q)
                    except ValueError:
                        pass
        calls(5000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        calls(100_000)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 1024, f"{{grown}} KiB more"
    """)
