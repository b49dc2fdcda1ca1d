#!/usr/bin/env python3
"""Checks forward and backward on random large shapes, on the GPU of this machine.

    tools/gpu/large_shapes.py [--seed 1] [--count 300] [--shape 16,768,768,6,3,256,causal] [--bounds-only]

A shape is batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim and "causal" (bottom-right) or "full". Random shapes
take up to 1 TFLOP forward, with few or many heads and equal or unequal lengths. For each shape:
- every output and the workspace lie between guard bands of 16 MiB, which must not change;
- every element of every output must be finite, and a second run must give the same bits;
- out, lse, dq, dk and dv of two key heads are compared with float64. The error may be twice the error of standard
  attention in bfloat16 operands with float32 sums (docs/numerics.md), plus the rounding of the result.
--bounds-only leaves out the comparison, for a run under compute-sanitizer. The program needs torch; TANDEM_LIBRARY
names the library. Prints one line a shape and exits 1 if any shape fails.
"""

import argparse
import ctypes as c
import dataclasses
import math
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import tandem_c as api
import torch
from rig.tandem import BACKWARD, FORWARD, Context, view

GUARD = 16 << 20  # bytes
PATTERN = 0xFF  # NaN in every type
ROWS_TOGETHER = 32  # rows that share one error bound
SCORES_AT_ONCE = 1 << 26


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        return ",".join(map(str, dataclasses.astuple(self)[:-1])) + (",causal" if self.causal else ",full")

    @property
    def flops(self) -> float:
        """Returns the operations of the forward."""
        return 4.0 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_k * self.head_dim / (1 + self.causal)


def parse_shape(text: str) -> Shape:
    *sizes, mask = text.split(",")
    if len(sizes) != 6 or mask not in ("causal", "full"):
        raise argparse.ArgumentTypeError(
            f"'{text}' must be six sizes and causal or full: pass a shape such as 16,768,768,6,3,256,causal"
        )
    return Shape(*map(int, sizes), mask == "causal")


def random_shape(seed: int) -> Shape:
    draw = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    def length() -> int:
        n = log_uniform(64, 20000)
        return n if draw.random() < 0.4 else max(64, n // 64 * 64)

    while True:
        heads_k = log_uniform(1, 16)
        seqlen_q = length()
        shape = Shape(
            batch=log_uniform(1, 64),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_q if draw.random() < 0.75 else length(),
            heads_q=heads_k * draw.choice((1, 1, 2, 4, 8)),
            heads_k=heads_k,
            head_dim=draw.choice((64, 128, 256, 96, 80, 192)),
            causal=draw.random() < 0.6,
        )
        if 3e9 < shape.flops < 1e12:
            return shape


class Guarded:
    """A tensor between guard bands."""

    def __init__(self, shape: tuple, dtype: torch.dtype):
        bytes_ = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        self.buffer = torch.full((GUARD + bytes_ + GUARD,), PATTERN, dtype=torch.uint8, device="cuda")
        self.bytes = bytes_
        self.tensor = self.buffer[GUARD : GUARD + bytes_].view(dtype).view(shape)

    def intact(self) -> bool:
        guards = self.buffer[:GUARD], self.buffer[GUARD + self.bytes :]
        return all(bool((guard == PATTERN).all()) for guard in guards)

    def clear(self) -> None:
        self.buffer.fill_(PATTERN)


class Call:
    """One pass with its arguments."""

    def __init__(self, context: c.c_void_p, which: int, causal: bool, tensors: dict):
        self.context, self.which, self.alive = context, which, []
        self.args = api._Args(size=c.sizeof(api._Args), causal=int(causal))
        for name, tensor in tensors.items():
            setattr(self.args, name, view(tensor, self.alive))
        size = c.c_size_t()
        api._check(api._lib.tandem_workspace_size(context, which, c.byref(self.args), c.byref(size)))
        self.workspace = Guarded((size.value,), torch.uint8)

    def run(self) -> None:
        run = api._lib.tandem_backward if self.which == BACKWARD else api._lib.tandem_forward
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointer = self.workspace.tensor.data_ptr()
        api._check(run(self.context, c.byref(self.args), pointer, self.workspace.bytes, stream))
        torch.cuda.synchronize()


def standard_attention(q, k, v, dout, causal: bool, types):
    """Computes out, lse, dq, dk and dv of one key head, from q and dout (heads, rows, dim).

    types: the type of the computation, and the type of P, dS and the results (or None).
    """
    dtype, rounded = types
    lost = (lambda t: t.to(rounded).to(dtype)) if rounded else (lambda t: t)
    heads, rows, dim = q.shape
    wide_k, wide_v, scale = k.to(dtype), v.to(dtype), 1 / math.sqrt(dim)
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    out, dq = (torch.empty(q.shape, dtype=dtype, device=q.device) for _ in range(2))
    lse = torch.empty(heads, rows, dtype=dtype, device=q.device)
    keys = torch.arange(len(k), device=q.device)
    for head in range(heads):
        for part in torch.arange(rows, device=q.device).split(max(1, SCORES_AT_ONCE // len(k))):
            q_rows, dout_rows = q[head, part].to(dtype), dout[head, part].to(dtype)
            s = q_rows @ wide_k.T * scale
            if causal:
                s.masked_fill_(keys > part[:, None] + len(k) - rows, -math.inf)
            total = torch.logsumexp(s, 1, keepdim=True)
            p = (s - total).exp().nan_to_num(0.0)  # a row without keys
            o = lost(p) @ wide_v
            ds = lost(p * (dout_rows @ wide_v.T - (o * dout_rows).sum(1, keepdim=True)))
            out[head, part], lse[head, part], dq[head, part] = o, total[:, 0], ds @ wide_k * scale
            dk += ds.T @ q_rows * scale
            dv += lost(p).T @ dout_rows
    return {"out": lost(out), "lse": lse, "dq": lost(dq), "dk": lost(dk), "dv": lost(dv)}


def share_of_bound(got, want, plain) -> float:
    """Returns the largest error as a share of its bound."""
    near = want.to(got.dtype)
    slack = (near + 0.3 - 0.3 - near).abs().double()
    error = (got.double() - want).abs().nan_to_num(math.inf)
    plain_error = (plain.double() - want).abs()
    worst = 0.0
    for e, q, s in zip(*(t.flatten(0, -2).split(ROWS_TOGETHER) for t in (error, plain_error, slack))):
        worst = max(worst, float(e.max() / (2 * (q.max() + s.max())).clamp_min(1e-30)))
    return worst


class Problem:
    def __init__(self, context: c.c_void_p, shape: Shape, seed: int):
        self.shape = s = shape
        make = torch.Generator("cuda").manual_seed(seed)

        def normal(rows: int, heads: int):
            return torch.randn(s.batch, rows, heads, s.head_dim, device="cuda", dtype=torch.bfloat16, generator=make)

        self.q, self.dout = normal(s.seqlen_q, s.heads_q), normal(s.seqlen_q, s.heads_q)
        self.k, self.v = normal(s.seqlen_k, s.heads_k), normal(s.seqlen_k, s.heads_k)
        self.results = {
            "out": Guarded(tuple(self.q.shape), torch.bfloat16),
            "lse": Guarded((s.batch, s.heads_q, s.seqlen_q), torch.float32),
            "dq": Guarded(tuple(self.q.shape), torch.bfloat16),
            "dk": Guarded(tuple(self.k.shape), torch.bfloat16),
            "dv": Guarded(tuple(self.v.shape), torch.bfloat16),
        }
        tensors = {name: result.tensor for name, result in self.results.items()}
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        forward = inputs | {name: tensors[name] for name in ("out", "lse")}
        self.calls = [
            Call(context, FORWARD, s.causal, forward),
            Call(context, BACKWARD, s.causal, inputs | tensors | {"dout": self.dout}),
        ]

    def run(self) -> list[torch.Tensor]:
        for guarded in self.guarded():
            guarded.clear()
        for call in self.calls:
            call.run()
        return [result.tensor.clone() for result in self.results.values()]

    def guarded(self) -> list[Guarded]:
        return [*self.results.values(), *(call.workspace for call in self.calls)]

    def failures(self, with_reference: bool) -> list[str]:
        first = self.run()
        found = []
        names = [*self.results, "forward's workspace", "backward's workspace"]
        found += [f"wrote outside {n}" for n, g in zip(names, self.guarded()) if not g.intact()]
        # rows without keys have an lse of -inf
        empty_rows = self.shape.causal and self.shape.seqlen_q > self.shape.seqlen_k
        for name, tensor in zip(self.results, first):
            finite = (
                torch.isfinite(tensor) | (tensor == -math.inf) if name == "lse" and empty_rows else tensor.isfinite()
            )
            if not bool(finite.all()):
                found.append(f"{name} has elements that are not finite")
        if any(not torch.equal(a, b) for a, b in zip(first, self.run())):
            found.append("a second run gives other bits")
        return found + (self.wrong() if with_reference else [])

    def wrong(self) -> list[str]:
        s, group, found = self.shape, self.shape.heads_q // self.shape.heads_k, []
        draw = random.Random(1)
        for batch, head in {(s.batch - 1, s.heads_k - 1), (draw.randrange(s.batch), draw.randrange(s.heads_k))}:
            heads = slice(head * group, (head + 1) * group)
            q, dout = (t[batch, :, heads].transpose(0, 1) for t in (self.q, self.dout))
            k, v = self.k[batch, :, head], self.v[batch, :, head]
            want = standard_attention(q, k, v, dout, s.causal, (torch.float64, None))
            plain = standard_attention(q, k, v, dout, s.causal, (torch.float32, torch.bfloat16))
            got = {n: r.tensor for n, r in self.results.items()}
            got = {
                "out": got["out"][batch, :, heads].transpose(0, 1),
                "dq": got["dq"][batch, :, heads].transpose(0, 1),
                "dk": got["dk"][batch, :, head],
                "dv": got["dv"][batch, :, head],
            }
            for name, tensor in got.items():
                share = share_of_bound(tensor, want[name], plain[name])
                self.largest = max(getattr(self, "largest", 0.0), share)
                if share > 1:
                    found.append(f"{name} of batch {batch}, key head {head}: {share:.2f} times the allowed error")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first random shape")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--shape", type=parse_shape, action="append", default=[], help="this shape, no random ones")
    parser.add_argument("--bounds-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this many")
    options = parser.parse_args()
    shapes = list(enumerate(options.shape)) or [
        (seed, random_shape(seed)) for seed in range(options.seed, options.seed + options.count)
    ]
    context, start, failed, done, largest = Context().handle, time.monotonic(), 0, 0, 0.0
    for seed, shape in shapes:
        if time.monotonic() - start > options.seconds:
            break
        problem = Problem(context, shape, seed)
        failures = problem.failures(not options.bounds_only)
        largest = max(largest, getattr(problem, "largest", 0.0))
        print(f"{seed:6} {shape!s:40} {'; '.join(failures) or 'ok'}", flush=True)
        failed += bool(failures)
        done += 1
    print(f"{done} of {len(shapes)} shapes, {failed} failed; largest share of the allowed error {largest:.2f}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
