"""CUDA tensors on streams, in graphs, from threads."""

# Without a GPU, or torch, the file ends here.
from cuda_cases import captured, lengths, near, raises, run, tensors

# isort: split
import sys
import threading

import torch
import torch_reference

import tandem


def test_streams():
    q, k, v = tensors((1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4, 64))
    want = tandem.attention(q, k, v)
    (busy,) = tensors((4096, 4096))
    torch.cuda.synchronize()
    for _ in range(3):
        producer, stream = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(producer):
            for _ in range(20):
                busy @ busy  # all later work is delayed
            late = [x.clone() for x in (q, k, v)]
        stream.wait_stream(producer)
        with torch.cuda.stream(stream):
            late = [x * 1 for x in late]
            result = tandem.attention(*late)
            result = result + 0  # the same stream: no wait is needed
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(result, want)
        torch.cuda.synchronize()


def test_graphs():
    dense = tensors((2, 200, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    counts = (50, 120, 30)
    packed = tensors((200, 4, 64), (200, 2, 64), (200, 2, 64))
    cu = lengths(*counts)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 200, "max_seqlen_k": 200}
    for inputs, options in ((dense, {}), (packed, given)):
        tandem.prepare("forward", *inputs, causal=True, **options)
        graph, out = captured(tandem.attention, *inputs, causal=True, **options)
        for seed in (1, 2):
            for x, y in zip(inputs, tensors(*(x.shape for x in inputs), seed=seed)):
                x.copy_(y)
            if options:
                cu.copy_(lengths(*counts[:: seed * 2 - 3]))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, tandem.attention(*inputs, causal=True, **options))
    inputs = tensors((1, 33, 2, 88), (1, 33, 2, 88), (1, 33, 2, 88))

    def cold():
        raises(RuntimeError, "captured prepare", tandem.attention, *inputs, softcap=3.0)
        inputs[0].add(1)  # the capture continues

    captured(cold)


def test_gradients_in_a_graph():
    q, k, v = (x.requires_grad_() for x in tensors((1, 200, 2, 64), (1, 200, 2, 64), (1, 200, 2, 64)))

    def step():
        return torch.autograd.grad(tandem.attention(q, k, v, causal=True).float().square().sum(), (q, k, v))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, got = captured(step)
    graph.replay()
    for x, y in zip(got, want):
        near(x, y)  # dq is summed in any order


def test_threads():
    q, k, v = tensors((1, 128, 2, 96), (1, 128, 2, 96), (1, 128, 2, 96))
    want = torch_reference.dense(*(x.double() for x in (q, k, v)))[0]
    plain = torch_reference.dense(q, k, v)[0]
    allowed = 2 * (plain.double() - want).abs().max() + 2**-19
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    error = (tandem.attention(q, k, v).double() - want).abs().max()
                    assert error <= allowed, error
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


if __name__ == "__main__":
    sys.exit(run(globals()))
