#!/usr/bin/env python3
"""The limits of this Hopper GPU: the tensor core in the shape of attention, and the units that feed it.

    python bench/limits/measure.py [--json limits.json]        # about 20 s; bench/gpu.py --limits reads the file

burst: the first 20 ms after a pause. sustained: 0.3 s after more than a second of the same load, when the GPU has
reached its power limit. The "of clock" column is work per SM and clock, which does not depend on the frequency. NVRTC
compiles limits.cuh.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from rig import nvrtc  # noqa: E402

# head_dim: (keys per iteration, warpgroups), like the forward kernel
SHAPES = {64: (112, 3), 128: (128, 2), 256: (80, 2)}
PART = 2 << 20  # random K and V; they stay in the L2 cache


class Args(c.Structure):
    _fields_ = [
        ("source", c.c_void_p),
        ("to", c.c_void_p),
        ("bytes", c.c_uint64),
        ("turns", c.c_uint64),
        ("records", c.c_void_p),
        ("zero", c.c_uint32),
    ]


def tensor_core_kernels():
    """(name, dim, declaration): queries in shared memory and in registers, K and V resident and streamed."""
    for dim, (keys, groups) in SHAPES.items():
        for registers in (False, True) if dim <= 128 else (False,):
            for streamed in (False, True):
                name = f"mma_d{dim}{'_registers' if registers else ''}{'_streamed' if streamed else ''}"
                shape = f"Shape<{dim}, {keys}, {groups}, {str(registers).lower()}>"
                body = f"tensor_core<{shape}, {str(streamed).lower()}>(a);"
                yield name, dim, entry(name, 128 * (groups + 1), body)


def entry(name: str, threads: int, body: str) -> str:
    signature = f"__launch_bounds__({threads}, 1) {name}(const __grid_constant__ Args a)"
    return f'extern "C" __global__ void {signature} {{ {body} }}\n'


OTHERS = {
    "only_exp2": 'arithmetic(a, [](float& x) { asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); });',
    "only_fma": "const float m = number(99) - 1, y = number(98); "
    'arithmetic(a, [=](float& x) { asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(m), "f"(y)); });',
    "shared_memory": "shared_reads(a);",
    "read": "memory_traffic<false>(a);",
    "copy": "memory_traffic<true>(a);",
}


def source() -> str:
    size = f"static_assert(sizeof(Args) == {c.sizeof(Args)});\n"
    kernels = [declared for _, _, declared in tensor_core_kernels()]
    kernels += [entry(name, 1024, body) for name, body in OTHERS.items()]
    return (HERE / "limits.cuh").read_text().replace("#pragma once\n", "") + size + "".join(kernels)


class Card:
    def __init__(self):
        import torch
        from rig import driver

        self.torch, self.driver = torch, driver
        properties = torch.cuda.get_device_properties(0)
        self.name, self.sms = properties.name, properties.multi_processor_count
        self.cubin = nvrtc.compile(source(), "limits.cu")
        self.numbers = torch.randn(PART, device="cuda").bfloat16()
        self.records = torch.zeros(self.sms, 2, dtype=torch.int64, device="cuda")

    def rates(self, name, threads, shared, work, turns, data=None, to=None, sustained=1.2) -> dict:
        """Returns work per second and per clock. work: per turn and block."""
        function = self.driver.Function(self.cubin, name, shared)
        data = self.numbers if data is None else data
        to = self.records if to is None else to
        size = data.numel() * data.element_size()
        args = Args(data.data_ptr(), to.data_ptr(), size, turns, self.records.data_ptr(), 0)

        def window(seconds):
            events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(max(1, round(seconds / once))):
                function.launch(self.sms, threads, c.addressof(args))
            events[1].record()
            events[1].synchronize()
            count = max(1, round(seconds / once))
            return work * turns * self.sms * count / (events[0].elapsed_time(events[1]) * 1e-3)

        once = 1.0
        window(0)
        once = work * turns * self.sms / window(0)  # seconds per launch
        time.sleep(0.5)
        found = {"burst": window(0.02)}
        if sustained:
            window(sustained)
            found["sustained"] = window(0.3)
        clocks, nanoseconds = self.records.double().mean(0).tolist()
        found.update(of_clock=work * turns / clocks, mhz=clocks / nanoseconds * 1e3)
        return found


def measure(card: Card) -> dict:
    torch, found = card.torch, {"device": card.name, "units": {}, "mma": {}}

    def show(name, unit, scale, rates):
        for key in ("burst", "sustained"):
            if key in rates:
                rates[key] *= scale
        found["units"][name] = rates
        sustained = f"{rates['sustained']:8.1f}" if "sustained" in rates else " " * 8
        print(
            f"{name:24}{rates['burst']:8.1f}{sustained} {unit:8}{rates['of_clock']:9.1f}{rates['mhz']:7.0f}", flush=True
        )

    print(f"{card.name}\n{'':24}{'burst':>8}{'sustained':>9}{'':8}{'of clock':>9}{'MHz':>6}")
    for name, dim, _ in tensor_core_kernels():
        keys, groups = SHAPES[dim]
        shared = 1024 + 2 * (groups * 64 * dim + 4 * keys * dim)
        work = 2 * groups * 2 * 2 * 64 * keys * dim  # two tiles, two products
        rates = card.rates(name, 128 * (groups + 1), shared, work, turns=int(2e-3 * 7e12 / work))
        show(name, "TFLOP/s", 1e-12, rates)
        if "streamed" in name:  # ceiling of a kernel: Q in its faster place
            best = found["mma"].setdefault(f"d{dim}", {"burst": 0.0, "sustained": 0.0})
            for key in best:
                best[key] = max(best[key], rates[key])
    operations = 1024 * 128  # per turn: kChains * kUnrolled per thread
    show("exp2", "T/s", 1e-12, card.rates("only_exp2", 1024, 0, operations, 256, sustained=0))
    show("fma", "T/s", 1e-12, card.rates("only_fma", 1024, 0, operations, 2048, sustained=0))
    show("shared memory", "TB/s", 1e-12, card.rates("shared_memory", 1024, 8 * 16384, 8 * 16 * 1024, 1024, sustained=0))
    part = 2 * card.sms * 65536  # equal parts per block; stays in the L2 cache
    small = torch.empty(part, dtype=torch.uint8, device="cuda")
    show("L2 read", "TB/s", 1e-12, card.rates("read", 1024, 0, part / card.sms, 200, small, sustained=0))
    large = [torch.empty(16 * card.sms << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    size = large[0].numel() / card.sms
    show("HBM copy, read + write", "TB/s", 1e-12, card.rates("copy", 1024, 0, 2 * size, 1, *large, sustained=0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("torch must find a Hopper GPU (compute capability 9.0): run this program on an H100 or H200")
    found = measure(Card())
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
