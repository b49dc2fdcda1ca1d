#!/usr/bin/env python3
"""The Hopper forward kernel by itself: builds variants, holds them to float64, times them beside torch's kernels.

    python tools/gpu/forward.py --build variants/           # with nvcc; no GPU needed
    python tools/gpu/forward.py variants/ [--fa3 LIBRARY] [--seqlens 1024,4096,16384] [--rounds 5] [--ms 15]

Every round times each kernel in turn for --ms; a figure is the median of the rounds, in TFLOP/s (causal counted by
half). heads * head_dim is 2048 and batch * seqlen 16384. LIBRARY: FlashAttention-3 behind a C function fa3_fwd.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import pathlib
import statistics
import subprocess
import time

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels"
UNIT = """#include "sm90/forward.cuh"
constexpr ForwardTile kTile{{.head_dim = {d}, .head_dim_v = {d}, .warpgroups = {warpgroups}, .keys = {keys},
                            .stages = {stages}, .turns = {turns}, .f16 = false, .causal = {causal}}};
extern "C" __global__ void __launch_bounds__(kTile.threads(), 1) forward(const __grid_constant__ ForwardParams p) {{
  forward<kTile>(p);
}}
"""
# head_dim: (warpgroups, keys, stages, turns), the best known and the next best
TILES = {
    64: [(3, 112, 2, False), (3, 96, 2, False)],
    128: [(2, 128, 2, True), (3, 80, 2, False)],
    256: [(2, 64, 2, True), (2, 80, 2, True)],
}


def variants():
    for d, tiles in TILES.items():
        for warpgroups, keys, stages, turns in tiles:
            for causal in (False, True):
                name = f"d{d}_{'causal' if causal else 'full'}_{64 * warpgroups}x{keys}{'_turns' if turns else ''}"
                yield (
                    name,
                    dict(d=d, warpgroups=warpgroups, keys=keys, stages=stages, turns=int(turns), causal=int(causal)),
                )


def build(folder: pathlib.Path) -> None:
    """A cubin of each variant, and what they are in variants.json. Compiler's remarks on spills and waits are shown."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tile in variants():
        source = folder / f"{name}.cu"
        source.write_text(UNIT.format(**tile))
        command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++20", "--expt-relaxed-constexpr"]
        command += ["-Xptxas", "-v", f"-I{KERNELS}", "-cubin", "-o", str(folder / f"{name}.cubin"), str(source)]
        start = time.perf_counter()
        said = subprocess.run(command, capture_output=True, text=True)
        remarks = [
            s
            for s in said.stderr.splitlines()
            if "error" in s or "C75" in s or ("spill" in s and " 0 bytes spill" not in s)
        ]
        print(f"{name}: {time.perf_counter() - start:.1f} s", *remarks, sep="\n  ")
        said.check_returncode()
    (folder / "variants.json").write_text(json.dumps(dict(variants())))


class Params(ctypes.Structure):
    """ForwardParams of kernels/sm90/forward.cuh."""

    _fields_ = [
        ("maps", ctypes.c_uint64 * 64),
        ("lse", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        *((n, ctypes.c_int) for n in "batch heads_q heads_k seqlen_q seqlen_k tiles_m tiles group".split()),
        ("scale", ctypes.c_float),
        ("scale_log2", ctypes.c_float),
    ]


class Kernel:
    def __init__(self, driver, folder, name, tile):
        self.driver, self.tile, self.name = driver, tile, name
        self.d, self.causal = tile["d"], tile["causal"]
        self.queries = 64 * tile["warpgroups"]
        apart = self.d <= 128
        self.shared = (
            2 * (self.queries * self.d * (2 if apart else 1) + tile["stages"] * tile["keys"] * 2 * self.d) + 1024
        )
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver.cuModuleLoadData(ctypes.byref(module), (folder / f"{name}.cubin").read_bytes()))
        check(driver.cuModuleGetFunction(ctypes.byref(self.function), module, b"forward"))
        check(driver.cuFuncSetAttribute(self.function, 8, self.shared))

    def _map(self, address, x, rows):
        batch, seqlen, heads, dim = x.shape
        sizes = (ctypes.c_uint64 * 4)(dim, seqlen, heads, batch)
        strides = (ctypes.c_uint64 * 3)(x.stride(1) * 2, x.stride(2) * 2, x.stride(0) * 2)
        box, ones = (ctypes.c_uint32 * 4)(64, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        data = ctypes.c_void_p(x.data_ptr())
        # bfloat16; interleave none, swizzle 128 bytes, L2 promotion 256 bytes, zeros outside
        check(
            self.driver.cuTensorMapEncodeTiled(
                ctypes.c_void_p(address), 9, 4, data, sizes, strides, box, ones, 0, 3, 3, 0
            )
        )

    def bind(self, q, k, v, out, lse):
        """A function of no arguments that launches the kernel on these tensors."""
        import torch

        memory = ctypes.create_string_buffer(ctypes.sizeof(Params) + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64
        p = Params.from_address(address)
        for n, (x, rows) in enumerate(((q, self.queries), (k, self.tile["keys"]), (v, self.tile["keys"]), (out, 64))):
            self._map(address + 128 * n, x, rows)
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        p.lse, p.counter = lse.data_ptr(), counter.data_ptr()
        p.batch, p.seqlen_q, p.heads_q, _ = q.shape
        p.seqlen_k, p.heads_k = k.shape[1:3]
        p.tiles_m = -(-p.seqlen_q // self.queries)
        heads = p.batch * p.heads_q
        p.tiles = p.tiles_m * heads
        # As many heads together as leave their keys and values in two thirds of the L2 cache, and no small last group.
        fit = p.seqlen_k * 2 * self.d * 2 * heads / 32e6
        p.group = -(-heads // max(1, round(fit))) if self.causal else 1
        p.scale = 1 / math.sqrt(self.d)
        p.scale_log2 = p.scale * math.log2(math.e)
        arguments = (ctypes.c_void_p * 1)(address)
        grid = min(torch.cuda.get_device_properties(0).multi_processor_count, p.tiles)
        threads = 128 * (self.tile["warpgroups"] + 1)

        def launch(_alive=(memory, counter, q, k, v, out, lse)):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            check(
                self.driver.cuLaunchKernel(
                    self.function, grid, 1, 1, threads, 1, 1, self.shared, stream, arguments, None
                )
            )

        return launch


def check(code):
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


def errors(kernel):
    """The largest errors of out and lse against float64, on ragged shapes, outputs poisoned."""
    import torch

    worst = [0.0, 0.0]
    for batch, sq, sk, heads, heads_k in (
        (1, 256, 256, 2, 2),
        (2, 300, 333, 4, 2),
        (1, 1000, 1000, 2, 1),
        (1, 64, 700, 1, 1),
    ):
        torch.manual_seed(sq)
        sizes = ((sq, heads), (sk, heads_k), (sk, heads_k))
        q, k, v = (torch.randn(batch, *x, kernel.d, device="cuda", dtype=torch.bfloat16) for x in sizes)
        out = torch.full_like(q, math.nan)
        lse = torch.full((batch, heads, sq), math.nan, device="cuda")
        kernel.bind(q, k, v, out, lse)()
        qd, kd, vd = (x.double().transpose(1, 2) for x in (q, k, v))
        kd, vd = (x.repeat_interleave(heads // heads_k, 1) for x in (kd, vd))
        s = qd @ kd.transpose(2, 3) / math.sqrt(kernel.d)
        if kernel.causal:
            s.masked_fill_(torch.ones(sq, sk, dtype=torch.bool, device="cuda").triu(1 + sk - sq), -math.inf)
        want = (s.softmax(-1) @ vd).transpose(1, 2)
        for n, error in enumerate((out.double() - want, lse.double() - s.logsumexp(-1))):
            worst[n] = max(worst[n], error.abs().nan_to_num(math.inf).max().item())
    return worst


def seconds(function, ms):
    import torch

    function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    count = max(1, min(400, int(ms / max(begin.elapsed_time(end), 1e-3))))
    begin.record()
    for _ in range(count):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count * 1e-3


def peers(q, k, v, out, lse, causal, fa3):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(*turned, is_causal=bool(causal))

    found = {"cuDNN": cudnn}
    if fa3:
        batch, seqlen, heads, dim = q.shape
        semaphore = torch.full((8,), 12345, dtype=torch.int32, device="cuda")
        one = torch.ones(1, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out, lse)]
        sizes = [ctypes.c_int(x) for x in (batch, seqlen, seqlen, heads, heads, dim, int(causal))]

        def flash_attention_3():
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            check(
                fa3.fa3_fwd(
                    *pointers, *sizes, ctypes.c_float(dim**-0.5), ctypes.c_int(sms),
                    ctypes.c_void_p(semaphore.data_ptr()), ctypes.c_int(0), ctypes.c_void_p(one.data_ptr()), stream,
                )
            )  # fmt: skip

        found["FA3"] = flash_attention_3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--build", action="store_true", help="build the variants into the folder, and stop")
    parser.add_argument("--fa3", help="shared library of FlashAttention-3")
    parser.add_argument("--seqlens", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=15)
    arguments = parser.parse_args()
    if arguments.build:
        return build(arguments.folder)

    import torch

    torch.zeros(1, device="cuda")  # makes the context
    driver = ctypes.CDLL("libcuda.so.1")
    fa3 = ctypes.CDLL(arguments.fa3) if arguments.fa3 else None
    kernels = []
    for name, tile in json.loads((arguments.folder / "variants.json").read_text()).items():
        kernel = Kernel(driver, arguments.folder, name, tile)
        print("{}: largest error of out {:.1e}, of lse {:.1e}".format(name, *errors(kernel)), flush=True)
        kernels.append(kernel)
    for d in TILES:
        for causal in (0, 1):
            for seqlen in map(int, arguments.seqlens.split(",")):
                batch, heads = max(1, 16384 // seqlen), 2048 // d
                torch.manual_seed(0)
                q, k, v = (torch.randn(batch, seqlen, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                out, lse = torch.empty_like(q), torch.empty(batch, heads, seqlen, device="cuda")
                calls = {x.name: x.bind(q, k, v, out, lse) for x in kernels if x.d == d and x.causal == causal}
                calls.update(peers(q, k, v, out, lse, causal, fa3))
                times = {name: [] for name in calls}
                for _ in range(arguments.rounds):
                    for name, call in calls.items():
                        times[name].append(seconds(call, arguments.ms))
                        time.sleep(0.02)
                flops = 4 * batch * heads * seqlen * seqlen * d * (0.5 if causal else 1)
                rates = sorted(((flops / statistics.median(t) / 1e12, n) for n, t in times.items()), reverse=True)
                shown = ", ".join(f"{n} {r:.0f}" for r, n in rates)
                print(f"d{d} {'causal' if causal else 'full'} {seqlen}: {shown}", flush=True)


if __name__ == "__main__":
    main()
