#!/usr/bin/env python3
"""Decode on a GPU: pages, appending with rotation, batch_invariant, and other libraries, in CUDA graphs.

    python bench/serving.py                      # about a minute
    python bench/serving.py --shapes "8 x 32k" --rounds 9

Every request has one query. The time of a call is the median of rounds in which all calls alternate. "read" is the
share of the rate of a bulk read of the same bytes (torch.sum). "best peer" is the least time of a peer divided by the
call's time. "append" includes tandem.append_kv, which writes one key per request and rotates keys and queries.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics

import torch
from rig import clock
from rig.peers import first_line
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tandem

# batch, keys, heads, heads of keys, head_dim
SHAPES = {
    "64 x 4k": (64, 4096, 32, 8, 128),
    "1 x 8k": (1, 8192, 32, 8, 128),
    "1 x 131k": (1, 131072, 32, 8, 128),
    "8 x 32k, 128 heads on 1": (8, 32768, 128, 1, 128),
}
WRONG = 2**-6  # relative to the largest number


class Request:
    """The tensors of a shape: a cache, the same cache in pages of random order, and a new key per request."""

    def __init__(self, batch: int, keys: int, heads: int, heads_k: int, dim: int):
        generator = torch.Generator("cuda").manual_seed(1)
        draw = dict(device="cuda", dtype=torch.bfloat16, generator=generator)
        self.batch, self.keys, self.dim = batch, keys, dim
        self.q = torch.randn(batch, 1, heads, dim, **draw)
        self.new = [torch.randn(batch, 1, heads_k, dim, **draw) for _ in range(2)]
        self.cache = [torch.randn(batch, keys, heads_k, dim, **draw) for _ in range(2)]
        for cache, new in zip(self.cache, self.new):
            cache[:, -1:] = new
        self.used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        self.before = self.used - 1
        self.cos, self.sin = torch.ones(keys, dim // 2, device="cuda"), torch.zeros(keys, dim // 2, device="cuda")
        self.q_out = torch.empty_like(self.q)
        self.bytes = sum(x.numel() * x.element_size() for x in self.cache)

    def pages(self, size: int):
        """Returns (k, v, table) with the cache's contents in pages."""
        count = self.batch * self.keys // size
        order = torch.randperm(count, device="cuda")
        fused = torch.empty(count, 2, size, *self.cache[0].shape[2:], device="cuda", dtype=torch.bfloat16)
        for n, cache in enumerate(self.cache):
            fused[order, n] = cache.reshape(count, size, *cache.shape[2:])
        return fused[:, 0], fused[:, 1], order.int().reshape(self.batch, -1)


def ours(x: Request, size: int | None, appends: bool = False, **options):
    k, v, table = (*x.cache, None) if size is None else x.pages(size)
    rotation = dict(q=x.q, q_out=x.q_out, rotary_cos=x.cos, rotary_sin=x.sin)

    def call():
        q = x.q
        if appends:
            q = tandem.append_kv(*x.new, k, v, page_table=table, cache_seqlens=x.before, **rotation)
        return tandem.attention(q, k, v, page_table=table, seqused_k=x.used, **options)

    return call


def sdpa(x: Request, backend: SDPBackend):
    q, k, v = (t.transpose(1, 2) for t in (x.q, *x.cache))

    def call():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return call


def fa3(x: Request, size: int | None, appends: bool = False):
    from flash_attn_interface import flash_attn_with_kvcache

    k, v, table = (*x.cache, None) if size is None else x.pages(size)
    if appends:
        tables = dict(rotary_cos=x.cos.bfloat16(), rotary_sin=x.sin.bfloat16(), rotary_interleaved=False)
        return lambda: flash_attn_with_kvcache(x.q, k, v, *x.new, cache_seqlens=x.before, page_table=table, **tables)
    return lambda: flash_attn_with_kvcache(x.q, k, v, cache_seqlens=x.used, page_table=table)


def flashinfer(x: Request, size: int):
    import flashinfer

    k, v, table = x.pages(size)
    starts = torch.arange(x.batch + 1, dtype=torch.int32, device="cuda") * (x.keys // size)
    last = torch.full((x.batch,), size, dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=table.flatten().clone(), paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    heads, heads_k = x.q.shape[2], k.shape[2]
    wrapper.plan(starts, table.flatten(), last, heads, heads_k, x.dim, size, q_data_type=x.q.dtype)
    return lambda: wrapper.run(x.q[:, 0], (k, v))[:, None]


OURS = {
    "contiguous": lambda x: ours(x, None),
    "pages 64": lambda x: ours(x, 64),
    "pages 16": lambda x: ours(x, 16),
    "contiguous, append": lambda x: ours(x, None, True),
    "pages 64, append": lambda x: ours(x, 64, True),
    "pages 16, append": lambda x: ours(x, 16, True),
    "contiguous, invariant": lambda x: ours(x, None, batch_invariant=True),
    "pages 64, invariant": lambda x: ours(x, 64, batch_invariant=True),
    "pages 64, append, invariant": lambda x: ours(x, 64, True, batch_invariant=True),
}
PEERS = {
    "SDPA cuDNN": lambda x: sdpa(x, SDPBackend.CUDNN_ATTENTION),
    "SDPA FlashAttention-2": lambda x: sdpa(x, SDPBackend.FLASH_ATTENTION),
    "FA3 contiguous": lambda x: fa3(x, None),
    "FA3 pages 64": lambda x: fa3(x, 64),
    "FA3 pages 16": lambda x: fa3(x, 16),
    "FA3 pages 64, append": lambda x: fa3(x, 64, True),
    "FlashInfer pages 64": lambda x: flashinfer(x, 64),
    "FlashInfer pages 16": lambda x: flashinfer(x, 16),
}


def timed_calls(x: Request, ms: float) -> dict[str, clock.Timed]:
    """Returns the calls that this machine has, after a comparison with float64."""
    exact, calls = exact_of(x), {}
    for name, make in {**OURS, **PEERS}.items():
        try:
            call = make(x)
            error = float((call().double() - exact).abs().max() / exact.abs().max())
            if error > WRONG:
                raise RuntimeError(f"the error is {error:.3g}")
            calls[name] = clock.Timed(call, ms)
        except Exception as why:  # a peer may be missing, or refuse a problem with any error
            print(f"  absent: {name}: {first_line(why)[:100]}")
            torch.cuda.synchronize()
            continue
        if not calls[name].captured:
            print(f"  {name} is timed without a graph")
    return calls


def exact_of(x: Request) -> torch.Tensor:
    outs = []
    for q, k, v in zip(x.q, *x.cache):
        group = q.shape[1] // k.shape[1]
        heads = []
        for h in range(k.shape[1]):
            scores = q[0, h * group : (h + 1) * group].double() @ k[:, h].double().T / math.sqrt(x.dim)
            heads.append(scores.softmax(-1) @ v[:, h].double())
        outs.append(torch.cat(heads)[None])
    return torch.stack(outs)


def run(name: str, rounds: int, ms: float) -> dict:
    x = Request(*SHAPES[name])
    print(f"{name}: {x.bytes / 1e6:.0f} MB of keys and values")
    words = [t.view(torch.int64) for t in x.cache]
    calls = {"bulk read": clock.Timed(lambda: [t.sum() for t in words], ms), **timed_calls(x, ms)}
    times = clock.interleaved(calls, rounds)
    medians = {call: statistics.median(rows) * 1e6 for call, rows in times.items()}
    best = min((time for call, time in medians.items() if call in PEERS), default=math.nan)
    print(f"  {'call':28} {'us':>9} {'read':>6} {'best peer':>10}")
    for call, time in medians.items():
        print(f"  {call:28} {time:9.1f} {medians['bulk read'] / time:6.2f} {best / time:10.2f}")
    for call, time in medians.items():
        for option in (", append", ", invariant"):
            base = call.replace(option, "")
            if base != call and base in medians:
                print(f"  {call} against {base}: {medians[base] / time:.3f}")
    return {"shape": name, "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name contains this text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ms", type=float, default=8, help="a window's milliseconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all rounds here")
    options = parser.parse_args()
    if options.rounds < 1 or options.ms <= 0:
        parser.error("--rounds must be at least 1 and --ms above 0: pass such numbers")
    if not torch.cuda.is_available():
        raise SystemExit("torch must find a CUDA device: run this benchmark on a GPU")
    clock.use_own_stream()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {tandem.description()}")
    results = [run(name, options.rounds, options.ms) for name in SHAPES if options.shapes in name]
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
