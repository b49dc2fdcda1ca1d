#!/usr/bin/env python3
"""Checks and times tandem.jax on the GPU of this machine, next to the same call under torch and to cuDNN's in JAX.

    tools/gpu/jax_on_gpu.py [--seqlens 4096,8192,16384] [--out jax.json] [--cpu]

The program needs jax with its CUDA plugin, torch with CUDA, and tandem installed. For each length, full and causal, in
bfloat16:
- out, dq, dk and dv must have the bits of the same call under torch. The error of out may be twice the error of
  standard attention by XLA;
- times of the forward, and of forward and backward: tandem.jax, tandem under torch, and
  jax.nn.dot_product_attention(implementation="cudnn"), in turns, the median of several rounds.
Options that cuDNN refuses (packed sequences, windows with a sink and a softcap) are compared with a CPU.
--cpu runs the same program on the CPU, without cuDNN, to try it. Prints one line a case; exits 1 if a number is wrong.
"""

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

HEADS, HEADS_K, HEAD_DIM, TOKENS = 16, 4, 128, 16384


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="4096,8192,16384", type=lambda x: [int(n) for n in x.split(",")])
    parser.add_argument("--out", help="file of the lines as JSON")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


arguments = parse()
if arguments.cpu:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import tandem  # noqa: E402
import tandem.jax  # noqa: E402

DEVICE = "cpu" if arguments.cpu else "cuda"
ROUNDS, CALLS = (1, 1) if arguments.cpu else (7, 10)


def inputs(seqlen: int) -> list[np.ndarray]:
    """q, k, v and dout in float32, each value exact in bfloat16."""
    random = np.random.default_rng(seqlen)
    batch = max(1, TOKENS // seqlen) if not arguments.cpu else 1
    shapes = [(batch, seqlen, heads, HEAD_DIM) for heads in (HEADS, HEADS_K, HEADS_K, HEADS)]
    found = [random.standard_normal(shape, np.float32) for shape in shapes]
    return [np.asarray(torch.from_numpy(x).bfloat16().float()) for x in found]


def in_jax(function):
    """The forward, and the forward with its gradients."""

    def both(q, k, v, dout):
        out, pull = jax.vjp(function, q, k, v)
        return (out, *pull(dout))

    return jax.jit(lambda q, k, v, _: (function(q, k, v),)), jax.jit(both)


def in_torch(causal: bool):
    def forward(q, k, v, _):
        with torch.no_grad():
            return (tandem.attention(q, k, v, causal=causal),)

    def both(q, k, v, dout):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = tandem.attention(*inputs, causal=causal)
        return (out.detach(), *torch.autograd.grad(out, inputs, dout))

    return forward, both


def wait(results) -> None:
    if isinstance(results[0], torch.Tensor):
        torch.cuda.synchronize() if DEVICE == "cuda" else None
    else:
        jax.block_until_ready(results)


def seconds(function, inputs) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        results = function(*inputs)
    wait(results)
    return (time.perf_counter() - start) / CALLS


def numbers(results) -> list[np.ndarray]:
    return [np.asarray(x.float().cpu() if isinstance(x, torch.Tensor) else x.astype(jnp.float32)) for x in results]


def check(seqlen: int, causal: bool, ours: list[np.ndarray], theirs: list[np.ndarray], raw: list[np.ndarray]) -> bool:
    """The bits of torch, and the 2x rule (docs/numerics.md) for the first sequence's first or last rows."""
    same = all(np.array_equal(x, y) for x, y in zip(ours, theirs))
    rows = slice(0, 512) if causal else slice(-512, None)
    q, k, v = (x[:1] for x in raw[:3])
    k, v = (x[:, rows] if causal else x for x in (k, v))
    run = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, is_causal=causal, implementation="xla"))
    exact, plain = (
        np.asarray(run(*(jnp.asarray(x, dtype) for x in (q[:, rows], k, v))).astype(jnp.float32))
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    error, allowed = (float(np.abs(x - exact).max()) for x in (ours[0][:1, rows], plain))
    print(f"  bits as under torch: {same}; largest error {error:.2e}, of standard attention {allowed:.2e}")
    return same and error <= 2 * allowed


def case(seqlen: int, causal: bool) -> dict:
    raw = inputs(seqlen)
    jax_inputs = [jnp.asarray(x, jnp.bfloat16) for x in raw]
    torch_inputs = [torch.from_numpy(x).to(DEVICE, torch.bfloat16) for x in raw]
    functions = {
        "tandem.jax": (in_jax(lambda q, k, v: tandem.jax.attention(q, k, v, is_causal=causal)), jax_inputs),
        "tandem.torch": (in_torch(causal), torch_inputs),
    }
    peer = "xla" if arguments.cpu else "cudnn"
    functions[f"jax.nn ({peer})"] = (
        in_jax(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=peer)),
        jax_inputs,
    )
    results = {}
    for name, ((_, both), own) in functions.items():
        results[name] = both(*own)
        wait(results[name])
    line = {"seqlen": seqlen, "causal": causal, "device": str(jax.devices()[0]), "right": True, "milliseconds": {}}
    print(f"seqlen {seqlen}, {'causal' if causal else 'full'}")
    line["right"] = check(seqlen, causal, numbers(results["tandem.jax"]), numbers(results["tandem.torch"]), raw)
    for pass_, which in (("forward", 0), ("forward and backward", 1)):
        rounds = {name: [] for name in functions}
        for _ in range(ROUNDS + 1):
            for name, (pair, own) in functions.items():
                rounds[name].append(1e3 * seconds(pair[which], own))
        rounds = {name: x[1:] for name, x in rounds.items()}  # without the first round, which warms up
        line["milliseconds"][pass_] = {name: statistics.median(x) for name, x in rounds.items()}
        print(f"  {pass_}: " + ", ".join(f"{name} {statistics.median(x):.3f} ms" for name, x in rounds.items()))
    return line


def check_options() -> bool:
    """Options that cuDNN refuses, against float64 on a CPU."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 384, heads, 64), np.float32) for heads in (8, 2, 2))
    q, k, v = (np.asarray(torch.from_numpy(x).bfloat16().float()) for x in (q, k, v))
    sink = random.standard_normal(8).astype(np.float32)
    ids = np.repeat(np.array([[0, 1, 2], [0, 0, 1]]), 128, axis=1)
    hidden = ids[:, None, :, None] != ids[:, None, None, :]
    cases = {
        "packed": ({"segment_ids": ids, "is_causal": True}, {"bias": ~hidden, "causal": True}),
        "window, sink, softcap": (
            {"local_window_size": (100, 0), "sink": sink, "softcap": 5.0},
            {"window": (100, 0), "sink": sink.astype(np.float64), "softcap": 5.0},
        ),
    }
    right = True
    for name, (options, exact_options) in cases.items():
        ours = tandem.jax.attention(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), **options)
        exact = tandem.attention(*(x.astype(np.float64) for x in (q, k, v)), alignment="top_left", **exact_options)
        units = np.abs(np.asarray(ours.astype(jnp.float32)) - exact) / np.maximum(np.abs(exact), 1) * 2**8
        print(f"{name}: largest error against float64 {units.max():.2f} units of bfloat16")
        right = right and bool(units.max() <= 4)
    return right


def main() -> int:
    print(f"jax {jax.__version__} on {jax.devices()[0]}, torch {torch.__version__}, tandem {tandem.__version__}")
    right = check_options()
    lines = [case(seqlen, causal) for seqlen in arguments.seqlens for causal in (False, True)]
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(lines, file, indent=1)
    return int(not (right and all(line["right"] for line in lines)))


if __name__ == "__main__":
    sys.exit(main())
