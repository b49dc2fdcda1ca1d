"""The benchmark's data and its check (bench/rig), on the CPU: the data follow the arguments, and wrong results are
detected."""

import copy
import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import serving as serving_bench  # noqa: E402
from rig import compare, data, judge, judge_gradients, serving, shapes  # noqa: E402

Cell = shapes.Cell
PROBLEMS = {
    "causal": dict(heads=4, head_dim=64, heads_k=2, causal=True),
    "packed": dict(heads=2, head_dim=64, causal=True, lengths=(100, 400, 37)),
    "window, sink, softcap": dict(heads=2, head_dim=128, batch=2, causal=True, window=90, sink=True, softcap=50.0),
    "more keys": dict(heads=2, head_dim=64, causal=True, seqlen_k=530),
    "fewer keys": dict(heads=2, head_dim=64, causal=True, seqlen_k=300),  # the first 100 rows see no key
    "f16, head_dim_v": dict(heads=3, head_dim=192, head_dim_v=128, dtype="f16"),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(shapes, "DEVICE", "cpu")


def inputs(kind="normal", activations=None, **options):
    return shapes.Inputs(Cell("row", "column", 400, data=kind, **options), activations)


def scores(x, head=1, n=0):
    q, k = x.sequence(x.q, n)[:, head], x.sequence(x.k, n)[:, x.kv_head(head)]
    return judge.visible_scores(q, k, torch.arange(len(q)), x.cell, x.scale, torch.float32)


def exact(x, head_of_kv=None, dtype=torch.float32):
    """Returns (out, lse) of the whole problem. head_of_kv: a wrong key head."""
    outs, lses = [], []
    for n, length in enumerate(x.cell.sequences()):
        per_head = []
        for head in range(x.cell.heads):
            kv = x.kv_head(head) if head_of_kv is None else head_of_kv
            q, k, v = x.sequence(x.q, n)[:, head], x.sequence(x.k, n)[:, kv], x.sequence(x.v, n)[:, kv]
            sink = None if x.sink is None else x.sink[head]
            per_head.append(judge.attend(q, k, v, torch.arange(length), x.cell, x.scale, sink, dtype))
        outs.append(torch.stack([out for out, _ in per_head], 1))
        lses.append(torch.stack([lse for _, lse in per_head]))
    return (torch.cat(outs), torch.cat(lses, 1)) if x.cell.lengths else (torch.stack(outs), torch.stack(lses))


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("kind", [kind for kind in shapes.DATA if kind != "model"])
def test_what_is_right_passes_and_what_is_wrong_does_not(kind, options):
    x = inputs(kind, **options)
    out, lse = exact(x)
    judged = judge.Judge(x)
    assert judged((out.to(x.q.dtype), lse)).right
    assert judged(out.to(x.q.dtype)).lse_error is None
    assert not judged((out.to(x.q.dtype), lse + 0.01)).right
    late = out.clone()
    x.sequence(late, len(x.cell.sequences()) - 1)[-1] *= 1.1  # one row of the last sequence
    assert not judged(late).right
    assert not judged(torch.full_like(out, float("nan"))).right


def test_another_head_of_keys_is_wrong():
    x = inputs(**PROBLEMS["causal"])
    assert not all(judge.Judge(x)(exact(x, head_of_kv=kv)).right for kv in (0, 1))


@pytest.mark.parametrize("kind, key, nats", [("sink20", 0, 20), ("sink50", 0, 50), ("needle", 177, 50)])
def test_one_key_is_above_the_others(kind, key, nats):
    s = scores(inputs(kind, **PROBLEMS["causal"]))
    assert s[200:, key].sub(nats).abs().max() < 0.01 * nats
    s[:, key] = -torch.inf
    assert s[200:].amax() < 7


def test_large_logits_and_copies():
    assert scores(inputs("sigma10", heads=2, head_dim=64)).std() == pytest.approx(10, rel=0.1)
    s = scores(inputs("copy", **PROBLEMS["causal"]))
    assert (s[1:].argmax(1) == torch.arange(len(s) - 1)).all()
    assert s.diagonal(-1).mean() == pytest.approx(30, rel=0.1)


def test_activations_keep_their_scores(tmp_path):
    make = torch.Generator().manual_seed(3)
    saved = {name: torch.randn(6, 50, 32, generator=make).half() for name in "qkv"} | {"scale": 0.25}
    torch.save(saved, tmp_path / "activations.pt")
    x = inputs("model", str(tmp_path / "activations.pt"), heads=4, head_dim=64, heads_k=2)
    want = saved["q"][1].float() @ saved["k"][1].float().T * 0.25  # both heads are head 1 of the model
    s = scores(x, head=3)
    for rows in s[:50], s[50:100]:
        assert (rows[:, :50] - want).abs().max() < 0.2


@pytest.mark.parametrize("kind", ["normal", "sink20", "sink50"])
def test_how_often_a_softmax_must_rescale(kind):
    x = inputs(kind, heads=2, head_dim=64)
    found = judge.Judge(x).hardness()
    assert found["redone_tiles"] == 0  # a sink does not cause a retry
    assert (found["rescaled_steps"] > 0) == (kind != "normal")


def test_rules_of_rescaling():
    flat = torch.zeros(64, 512)
    assert data._walk(flat) == (4, 0, False)
    flat[3, :128] = 12  # 2^12 times 128 keys do not pass 2^24 in the last step
    assert data._walk(flat) == (4, 0, False)
    flat[3, :128] = 20
    assert data._walk(flat) == (4, 1, False)
    flat[3, 0] = 90
    assert data._walk(flat) == (4, 1, False)
    flat[3, 0] = 110
    assert data._walk(flat) == (4, 1, True)


def gradients(x, changed=lambda scores: scores):
    """dq, dk, dv by autograd of standard attention in float64."""
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    whole = copy.copy(x)
    whole.q, whole.k, whole.v = leaves
    out = exact(whole, dtype=torch.float64)[0]
    return [g.to(x.q.dtype) for g in torch.autograd.grad(out, leaves, changed(x.dout.double()))]


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("kind", ["sigma10"])
def test_gradients_that_are_right_pass_and_wrong_ones_do_not(kind, options):
    x = inputs(kind, backward=True, **options)
    judged = judge_gradients.GradientJudge(x)
    right = gradients(x)
    assert judged(right).right
    for n in range(3):
        late = [t.roll(1, -3) if m == n else t for m, t in enumerate(right)]
        assert not judged(late).right
    assert not judged(gradients(x, lambda dout: dout * 1.1)).right
    assert not judged([right[0], torch.full_like(right[1], float("nan")), right[2]]).right


def test_twice_the_errors_of_others_are_allowed():
    assert compare.is_right([0.02, 0.03], [0.01, 0.015]) and not compare.is_right([0.02, 0.04], [0.01, 0.015])
    # compared with the library that computes this gradient
    assert compare.is_right([0.02, 0.06], [0.01], [0.005, 0.03])
    assert compare.is_right([0.02, 0.03], [0.01]) and not compare.is_right([0.02, 0.04], [0.01])  # only the gradients
    assert compare.is_right([0.03]) and not compare.is_right([0.04]) and not compare.is_right([float("nan")], [0.01])


SERVING = {
    "decode": lambda: serving.Decode(2, 80, 4, 2, 16),
    "mixed": lambda: serving.Mixed({"heads": 4, "heads_k": 2, "head_dim": 16, "requests": [(1, 70), (9, 30), (3, 3)]}),
    "shared": lambda: serving.Shared(3, 64, 20, 4, 2, 16),
}


@pytest.mark.parametrize("problem", SERVING)
def test_serving_calls_are_right(monkeypatch, problem):
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    x = SERVING[problem]()
    exact = x.exact()
    for name, make in x.calls().items():
        error = (make()().double() - exact).abs().max() / exact.abs().max()
        assert error <= serving_bench.WRONG, name


def test_serving_figures():
    medians = {"bulk read": 8.0, "pages 16": 10.0, "pages 16, append": 11.0, "FA3 pages 16": 12.0}
    result = {"problem": "64 x 4k", "medians": medians, "best_peer": 12.0}
    lines = {(line["figure"], line["call"]): line for line in serving_bench.figures([result])}
    assert len(lines) == 3
    assert lines["decode, of the read limit", "pages 16"]["reached"] is None
    assert lines["decode, of the best peer", "pages 16"]["reached"] == "aim"
    assert lines["append and rotary", "pages 16, append"]["ratio"] == pytest.approx(10 / 11)


def test_serving_trace_is_drawn():
    trace = json.loads(serving_bench.TRACE.read_text())
    assert trace == json.loads(json.dumps(serving_bench.draw_trace(trace["seed"])))
