"""Runs cuDNN's open attention kernels, which the repository cudnn-frontend has for NVRTC, on the virtual GPU.

    pip install numpy nvidia-cuda-nvrtc
    git clone https://github.com/NVIDIA/cudnn-frontend
    python cudnn_open_kernels.py cudnn-frontend --arch sm_90a --head-dim 128 --out d128
    tandem vgpu check d128/kernel.ptx --launch d128/launch.json

The script extracts the kernel and its flags from the header and compiles the kernel to PTX. The script also writes the
launch description of cuDNN's engine (sm90_sdpa_prefill_engine.h, sm100_...), random inputs, and their attention in
float64.
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import re
import site as site_packages

import numpy as np
from fa4_formulas import Shape, attention, bf16_bits, softmax, to_bf16

SHARED = {("sm_90a", 128): 232448, ("sm_90a", 64): 122880, ("sm_100a", 128): 232448, ("sm_100a", 64): 232448}


def kernel_of(checkout, arch, head_dim):
    """Extracts the source and the flags for NVRTC, which are raw strings in the header."""
    folder = checkout / "include/cudnn_frontend/generated/sdpa" / arch[:-1].replace("_", "") / "prefill/full_seqlens"
    text = (folder / f"d{head_dim}_fprop_kernel.h").read_text()
    source = "".join(re.findall(r'R"KERNEL\((.*?)\)KERNEL"', text, re.DOTALL))
    return source, re.search(r'R"FLAGS\((.*?)\)FLAGS"', text, re.DOTALL)[1].split()


def compile_ptx(source, flags):
    folders = [pathlib.Path(site, "nvidia/cu13/lib") for site in site_packages.getsitepackages()]
    library = pathlib.Path(os.environ.get("TANDEM_NVRTC", next((f for f in folders if f.exists()), ".")))
    library = library / "libnvrtc.so.13" if library.is_dir() else library
    for builtins in library.parent.glob("libnvrtc-builtins.so.13*"):  # otherwise NVRTC searches system folders only
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library) if library.exists() else library.name)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text_of(what):
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, text)
        return text.value.decode()

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    if nvrtc.nvrtcCompileProgram(program, len(flags), options) != 0:
        raise SystemExit(text_of("ProgramLog"))
    return text_of("PTX")


def divisor(n):
    """Returns the divisor, shift and multiplier with which the kernels divide by n."""
    shift = math.ceil(math.log2(n))
    return {"u32": [n, shift, -(-(1 << (31 + shift)) // n)]}


def described(*sizes):
    """Packs the kernels' tensor_descriptor: the number of dimensions, 12 sizes and 12 strides."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    room = [0] * (12 - len(sizes))
    return {"i64": [len(sizes), *sizes, *room, *strides, *room]}


def tensor_map(name, seqlen, heads, shape, rows):
    row = 2 * heads * shape.head_dim  # bytes; tensors are (batch, seqlen, heads, head_dim)
    sizes = {
        "dims": [shape.head_dim, seqlen, heads, shape.batch],
        "byte_strides": [row, 2 * shape.head_dim, row * seqlen],
    }
    box = {"box": [64, rows, 1, 1], "swizzle": "128B", "out_of_bounds": "nan"}
    return {"tensor_map": {"buffer": name, **sizes, **box}}


def parameters(arch, shape):
    q, k = (shape.seqlen_q, shape.heads_q), (shape.seqlen_k, shape.heads_k)
    sizes = [shape.batch, shape.heads_q, shape.heads_k, shape.heads_k, shape.seqlen_q, shape.seqlen_k]
    group = {"u16": [shape.group] * 3}
    descriptor = {"struct": [{"u32": [*sizes, shape.head_dim, shape.head_dim]}, group]}
    rows = described(shape.batch, shape.heads_q, shape.seqlen_q)
    # The bytes "0000 80ff" are minus infinity.
    tail = [{"f32": shape.scale}, {"hex": "0000 80ff"}, {"pointer": "largest"}, rows, {"pointer": "sums"}, rows]
    if arch == "sm_90a":
        tiles = -(-shape.seqlen_q // 128)
        count = shape.batch * shape.heads_q * tiles
        head = [descriptor, {"i32": count}, divisor(shape.heads_q * tiles), divisor(tiles), {"pointer": "next_tile"}]
        rows_of = {"q": 128, "k": 128, "o": 16}
        grid, block = min(count, 132), 384
    else:
        blocks, heads = -(-shape.seqlen_q // 256), shape.batch * shape.heads_q
        keys = 4 * shape.seqlen_k * shape.head_dim  # bytes of a head's keys and values
        swizzle = max(1, min(1 << int(math.log2(50 * 2**20 / keys)), heads))
        head = [descriptor, divisor(shape.heads_q), divisor(swizzle), divisor(swizzle * blocks)]
        head += [divisor(max(1, heads % swizzle)), {"i32": heads // swizzle}, {"i32": blocks}, {"i32": blocks * heads}]
        rows_of = {"q": 128, "k": 128, "o": 128}
        grid, block = blocks * heads, 512
    maps = [tensor_map("q", *q, shape, rows_of["q"]), tensor_map("k", *k, shape, rows_of["k"])]
    maps_behind = [tensor_map("v", *k, shape, rows_of["k"]), tensor_map("o", *q, shape, rows_of["o"])]
    return {"grid": [grid], "block": [block], "parameters": [*head, *maps, *tail, *maps_behind]}


def write_launch(folder, ptx, arch, shape, seed):
    random = np.random.default_rng(seed)
    buffers = []
    tensors = {}
    for name, seqlen, heads in (
        ("q", shape.seqlen_q, shape.heads_q),
        ("k", shape.seqlen_k, shape.heads_k),
        ("v", shape.seqlen_k, shape.heads_k),
    ):
        x = to_bf16(random.standard_normal((shape.batch, seqlen, heads, shape.head_dim), np.float32))
        tensors[name] = x.astype(np.float64)
        np.save(folder / f"{name}.npy", bf16_bits(x))
        buffers.append({"name": name, "type": "bf16", "file": f"{name}.npy", "read_only": True})
    k = np.repeat(tensors["k"], shape.group, axis=2)
    _, sums, largest = softmax(tensors["q"], k, shape)
    np.save(folder / "o_expected.npy", attention(*tensors.values(), shape))
    np.save(folder / "sums_expected.npy", np.ascontiguousarray(sums))
    np.save(folder / "largest_expected.npy", np.ascontiguousarray(largest))
    o_shape = [shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim]
    expected = {"expected": "o_expected.npy", "tolerance": 2e-2}
    buffers.append({"name": "o", "type": "bf16", "shape": o_shape, **expected})
    for name, tolerance in (("sums", 1e-2), ("largest", 1e-3)):
        of_rows = {"type": "f32", "shape": list(sums.shape), "expected": f"{name}_expected.npy"}
        buffers.append({"name": name, **of_rows, "tolerance": tolerance})
    buffers.append({"name": "next_tile", "type": "i32", "shape": [4], "fill": "zeros"})
    entry = re.search(r"\.entry\s+(\w+)", ptx)[1]
    launch = {"entry": entry, "dynamic_shared_bytes": SHARED[arch, shape.head_dim], **parameters(arch, shape)}
    (folder / "launch.json").write_text(json.dumps({**launch, "buffers": buffers}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--arch", choices=("sm_90a", "sm_100a"), default="sm_90a")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    for flag, default in (("batch", 1), ("seqlen", 300), ("heads-q", 2), ("heads-k", 1), ("seed", 1)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="the folder for the kernel, launch.json and tensors"
    )
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    shape = Shape(a.batch, a.seqlen, a.seqlen, a.heads_q, a.heads_k, a.head_dim, causal=True)  # the kernels' only mask
    ptx = compile_ptx(*kernel_of(a.checkout, a.arch, a.head_dim))
    (a.out / "kernel.ptx").write_text(ptx)
    write_launch(a.out, ptx, a.arch, shape, a.seed)
    print("tandem vgpu check", a.out / "kernel.ptx", "--launch", a.out / "launch.json")


if __name__ == "__main__":
    main()
