"""Measures how much longer the virtual GPU takes for simple kernels when it checks them.

    python bench/virtual_gpu.py [build/release] [--most 4]

A line for each kernel of plain_kernels.cu: CPU time unchecked, checked, and the ratio. Exit code 1 if a ratio is above
--most. The program needs NVRTC and no GPU.
"""

from __future__ import annotations

import argparse
import ctypes as c
import os
import pathlib
import subprocess
import sys
import time

from rig import nvrtc

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = "saxpy stencil strided bytes vectors transpose reduction histogram product".split()
COUNT, THREADS, BLOCKS = 1 << 18, 256, {"vectors": (1 << 18) // 1024, "product": 256}


def must(result: int) -> None:
    if result != 0:
        raise SystemExit(f"the virtual GPU's driver must return 0, not {result}: build the driver again")


def best_times(library: str, ptx: bytes, repeats: int) -> dict[str, float]:
    """Returns the minimum CPU time of a launch of each kernel, in this process."""
    cuda = c.CDLL(library)
    context, module = c.c_void_p(), c.c_void_p()
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))
    must(cuda.cuModuleLoadData(c.byref(module), ptx))
    buffers = [c.c_uint64() for _ in range(2)]
    for number, buffer in enumerate(buffers):
        must(cuda.cuMemAlloc_v2(c.byref(buffer), c.c_size_t(4 * COUNT)))
        numbers = bytes(i * 7 % 251 for i in range(1 << 16)) * (4 * COUNT >> 16) if number == 0 else bytes(4 * COUNT)
        must(cuda.cuMemcpyHtoD_v2(buffer, numbers, c.c_size_t(4 * COUNT)))
    count = c.c_int(COUNT)
    parameters = (c.c_void_p * 3)(*(c.addressof(x) for x in (count, *buffers)))
    times = {}
    for name in KERNELS:
        function = c.c_void_p()
        must(cuda.cuModuleGetFunction(c.byref(function), module, name.encode()))
        for _ in range(repeats):
            start = time.process_time()
            blocks = BLOCKS.get(name, COUNT // THREADS)
            must(cuda.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, None, parameters, None))
            took = time.process_time() - start
            times[name] = min(times.get(name, took), took)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default="build/release")
    parser.add_argument("--most", type=float, default=4.0, help="times as long as unchecked [4]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # for a separate process: a file of PTX
    options = parser.parse_args()
    library = str(pathlib.Path(options.build).resolve() / "virtual_cuda" / "libcuda.so.1")
    if options.measure:
        for name, took in best_times(library, pathlib.Path(options.measure).read_bytes(), options.repeats).items():
            print(name, took)
        return 0
    ptx = pathlib.Path(options.build).resolve() / "plain_kernels.ptx"
    ptx.write_bytes(nvrtc.compile((HERE / "plain_kernels.cu").read_text(), "plain_kernels.cu", "compute_90a") + b"\0")
    times: dict[str, dict[str, float]] = {}
    for check in ("off", "on"):
        command = [sys.executable, __file__, options.build, "--measure", str(ptx), "--repeats", str(options.repeats)]
        environment = {**os.environ, "TANDEM_VGPU_CHECK": check, "TANDEM_VGPU_THREADS": "1"}
        ran = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
        times[check] = {name: float(took) for name, took in map(str.split, ran.stdout.splitlines())}
    slow = 0
    for name in KERNELS:
        off, on = times["off"][name], times["on"][name]
        slow += on > options.most * off
        print(f"{name:12} {1e3 * off:8.2f} ms unchecked {1e3 * on:8.2f} ms checked {on / off:6.2f} times")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
