"""Several GPUs in one process: each call runs on its tensors' GPU, on the stream that is current there."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import BF16, F32, GPU, hold, int32, lengths, raises, run, tensors

# isort: split
import sys
import threading
import unittest

import torch
import torch_reference

import tandem


def both():
    if torch.cuda.device_count() < 2:
        raise unittest.SkipTest("it takes two GPUs")
    return GPU, torch.device("cuda", 1)


def cases():
    """Returns (inputs, options) on the first GPU."""
    cu = lengths(50, 120, 30)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 120, "max_seqlen_k": 120, "causal": True}
    return (
        (tensors((2, 300, 8, 128), (2, 300, 2, 128), (2, 300, 2, 128)), {"causal": True}),
        (tensors((200, 4, 64), (200, 2, 64), (200, 2, 64)), packed),
        (tensors((1, 333, 4, 256), (1, 600, 4, 256), (1, 600, 4, 256)), {"window": (200, 50)}),
    )


def moved(inputs, options, device):
    there = {name: x.to(device) if torch.is_tensor(x) else x for name, x in options.items()}
    return [x.to(device) for x in inputs], there


def test_two_gpus():
    _, other = both()
    q, k, v = tensors((1, 100, 4, 64), (1, 100, 2, 64), (1, 100, 2, 64))
    want = tandem.attention(q, k, v, causal=True)
    there = [x.to(other).requires_grad_() for x in (q, k, v)]
    out = tandem.attention(*there, causal=True)
    assert torch.cuda.current_device() == 0 and out.device == other and torch.equal(out.to(GPU), want)
    out.sum().backward()
    assert there[0].grad.device == other and there[0].grad.isfinite().all()
    raises(ValueError, "device", tandem.attention, q, there[1].detach(), v)


def test_each_holds_the_rule():
    for device in both():
        q, k, v = tensors((2, 70, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64), device=device)
        out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
        assert out.device == lse.device == device
        hold((out, lse), torch_reference.dense, q, k, v, causal=True, what=str(device))
        assert f"cuda:{device.index}, {torch.cuda.get_device_name(device)}" in tandem.description()


def test_in_turns():
    devices = both()
    for inputs, options in cases():
        want = tandem.attention(*inputs, **options, return_lse=True)
        there = [moved(inputs, options, device) for device in devices]
        results = [
            [tandem.attention(*x, **given, return_lse=True) for x, given in there] for _ in range(50)
        ]  # the call does not wait
        assert torch.cuda.current_device() == 0
        for result in results:
            for device, got in zip(devices, result):
                assert all(x.device == device and torch.equal(x.to(GPU), y) for x, y in zip(got, want))


def test_a_stream_of_each():
    devices = both()
    inputs, options = cases()[0]
    want = tandem.attention(*inputs, **options)
    busy = [torch.randn(4096, 4096, device=device).to(BF16) for device in devices]
    there = [moved(inputs, options, device)[0] for device in devices]
    for device in devices:
        torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for device in devices]
    results = []
    for device, stream, work, x in zip(devices, streams, busy, there):
        with torch.cuda.device(1 - device.index), torch.cuda.stream(stream):  # the stream's GPU becomes current
            for _ in range(20):
                work @ work  # all later work is delayed
            late = [y * 1 for y in x]
            results.append(tandem.attention(*late, **options) + 0)  # the same stream: no wait is needed
    for device, stream, result in zip(devices, streams, results):
        stream.synchronize()
        assert result.device == device and torch.equal(result.to(GPU), want)


def test_graphs_of_each():
    inputs, options = cases()[1]
    want = tandem.attention(*inputs, **options)
    for device in both():
        x, given = moved(inputs, options, device)
        with torch.cuda.device(device):
            tandem.prepare("forward", *x, **given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):  # torch's graph stays on one GPU
                out = tandem.attention(*x, **given)
            for _ in range(3):
                out.fill_(float("nan"))
                graph.replay()
                assert torch.equal(out.to(GPU), want), device


def test_threads_that_go_from_one_to_the_other():
    devices = both()
    prepared = []
    for inputs, options in cases():
        want = tandem.attention(*inputs, **options).cpu()
        prepared.append((want, [moved(inputs, options, device) for device in devices]))
    for device in devices:
        torch.cuda.synchronize(device)
    failures = []

    def work(n):
        want, there = prepared[n % len(prepared)]
        try:
            streams = [torch.cuda.Stream(device) for device in devices]
            for turn in range(30):
                d = (n + turn) % 2
                x, given = there[d]
                with torch.cuda.stream(streams[d]):
                    got = tandem.attention(*x, **given)
                    assert torch.equal(got.cpu(), want), f"thread {n}, turn {turn}, {devices[d]}"
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_tensors_of_both_are_refused():
    _, other = both()
    q, k, v = tensors((2, 60, 4, 64), (2, 60, 2, 64), (2, 60, 2, 64))
    out = torch.full_like(q, 7.0)
    for n, name in enumerate("qkv"):
        mixed = [x.to(other) if i == n else x for i, x in enumerate((q, k, v))]
        raises(ValueError, "device index 0 index 1", tandem.attention, *mixed, out=out)
        if n:
            raises(ValueError, f"{name}.device", tandem.attention, *mixed, out=out)
            raises(ValueError, f"{name}.device", tandem.check, "forward", *mixed)
    raises(ValueError, "out.device", tandem.attention, q, k, v, out=out.to(other))
    for name, value in (
        ("sink", torch.zeros(4, dtype=F32, device=other)),
        ("alibi_slopes", torch.ones(4, device=other)),
        ("seqused_k", int32(60, 30, device=other)),
    ):
        raises(ValueError, f"{name}.device", tandem.attention, q, k, v, out=out, **{name: value})
    cu = lengths(20, 100, device=other)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 100, "max_seqlen_k": 100}
    raises(ValueError, "cu_seqlens_q.device", tandem.attention, *(x.flatten(0, 1) for x in (q, k, v)), **given)
    torch.cuda.synchronize()
    assert (out == 7.0).all()


if __name__ == "__main__":
    sys.exit(run(globals()))
