"""FlashAttention-4's own kernels on the virtual GPU.

    pip install flash-attn-4 numpy                      # its wheels, with torch for the CPU; no GPU, no CUDA driver
    python flash_attention_4.py dump ptx                # compiles its forward kernels: ptx/sm_90a/fwd_d128.ptx, ...
    python flash_attention_4.py launch ptx/sm_90a/fwd_d128.ptx --seqlen-q 300 --seqlen-k 200 --out d128
    tandem vgpu check ptx/sm_90a/fwd_d128.ptx --launch d128/launch.json

`launch` writes what `tandem vgpu` needs to run such a kernel: the description of its launch, random inputs, and the
attention of them in float64 with the error that is allowed. The parameters are those that the launcher of
flash-attn-4 4.0.0b36 passes; another version may pass others.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np

LOG2_E = 1.44269502162933349609375  # as float32
L2_BYTES = 50 * 1024 * 1024  # what FlashAttention-4's scheduler takes for the size of the L2 cache
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


# ---- Numbers ----


def to_bf16(x):
    """float32 values rounded to bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(x):
    return (to_bf16(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    distance: bool  # a score_mod adds abs(i - j) to each score

    @property
    def scale(self):
        return 1 / math.sqrt(self.head_dim)

    @property
    def group(self):
        return self.heads_q // self.heads_k


def attention(q, k, v, shape, round_p=False):
    """Of (batch, seqlen, heads, head_dim), in the type of the inputs; with P and the output in bfloat16 if asked."""
    k, v = (np.repeat(x, shape.group, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * np.asarray(shape.scale, q.dtype)
    rows, columns = np.arange(shape.seqlen_q)[:, None], np.arange(shape.seqlen_k)[None, :]
    if shape.distance:
        scores = scores + np.abs(rows - columns).astype(q.dtype)
    if shape.causal:  # aligned at the bottom right
        scores = np.where(columns <= rows + shape.seqlen_k - shape.seqlen_q, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = p.sum(axis=-1)
    p = to_bf16(p) if round_p else p
    out = np.einsum("bhij,bjhd->bihd", p, v)
    out = out / np.where(total == 0, 1, total).swapaxes(1, 2)[..., None]
    return to_bf16(out) if round_p else out


def allowed_error(plain, exact):
    """Twice the plain formula's error in bfloat16, and what rounding to float32 may add."""
    slack = 2 * np.abs((exact + 0.3 - 0.3) - exact).max()
    return float(2 * np.abs(plain - exact).max() + slack)


# ---- Launches ----


def fast_divisor(n):
    """What CuTe passes to divide by n: n, a multiplier and two shifts, in 12 bytes."""
    log = max(0, (n - 1).bit_length())
    multiplier = ((1 << 32) * ((1 << log) - n)) // n + 1
    return {
        "hex": (
            n.to_bytes(4, "little") + multiplier.to_bytes(4, "little") + bytes([min(log, 1), max(log - 1, 0), 0, 0])
        ).hex()
    }


def tensor_map(buffer, dims, strides, box):
    """strides: in elements, of all dimensions but the first."""
    strides = [2 * s for s in strides]
    fields = {"buffer": buffer, "dims": dims, "byte_strides": strides, "box": box, "swizzle": "128B"}
    return {"tensor_map": fields}


def map_of(buffer, shape, seqlen, heads, rows):
    d = shape.head_dim
    strides = [heads * d, d, seqlen * heads * d]
    return tensor_map(buffer, [d, seqlen, heads, shape.batch], strides, [64, rows, 1, 1])


def map_of_groups(buffer, shape, rows, arch):
    """Of q or out where the queries of a group of heads share tiles: heads before positions."""
    d, heads, batch = shape.head_dim, shape.heads_q, shape.seqlen_q * shape.heads_q * shape.head_dim
    box = [64, shape.group, rows // shape.group]
    if arch == "sm_90a":
        return tensor_map(buffer, [d, heads, shape.seqlen_q, shape.batch], [d, heads * d, batch], [*box, 1])
    dims = [d, shape.group, shape.seqlen_q, shape.heads_k, shape.batch]
    return tensor_map(buffer, dims, [d, heads * d, shape.group * d, batch], [*box, 1, 1])


def heads_at_a_time(shape):
    """So many heads' keys and values fit into the L2 cache: the scheduler's unit of work, a power of two."""
    bytes_of_head = shape.seqlen_k * 2 * shape.head_dim * 2
    return 1 << int(math.log2(max(1, L2_BYTES // bytes_of_head)))


def longest_first(shape, heads, blocks, splits):
    """Parameters of the scheduler of causal kernels; splits: the number of them, where it stands."""
    swizzle = heads_at_a_time(shape)
    numbers = [blocks * heads * shape.batch, *splits, blocks, heads, shape.batch, swizzle]
    remainder = max(1, heads * shape.batch % swizzle)
    parameters = [{"i32": n} for n in numbers]
    for n in (heads, swizzle, swizzle * blocks, remainder):
        parameters += [fast_divisor(n), {"i32": n}]
    return [*parameters, {"i32": heads * shape.batch // swizzle}, fast_divisor(1), {"i32": 1}]


def launch_of(shape, arch, entry):
    hopper, d, grouped = arch == "sm_90a", shape.head_dim, shape.group > 1
    paired = not hopper and d == 128 and not shape.causal  # two blocks share a product
    heads = shape.heads_k if grouped else shape.heads_q
    rows_of_map = 192 if hopper and d == 64 else 128
    rows_of_block = rows_of_map if hopper else 256
    blocks = -(-shape.seqlen_q * (shape.group if grouped else 1) // rows_of_block)
    if paired:
        blocks = -(-blocks // 2)
    tiles = blocks * heads * shape.batch

    sizes_q, sizes_k = ([s, d, heads, shape.batch] for s in (shape.seqlen_q, shape.seqlen_k))
    sizes_v = sizes_k if hopper else [d, shape.seqlen_k, heads, shape.batch]
    parameters = [{"i32": sizes} for sizes in (sizes_q, sizes_k, sizes_v, sizes_q)]

    def rows(name):
        if grouped:
            return map_of_groups(name, shape, rows_of_map, arch)
        return map_of(name, shape, shape.seqlen_q, shape.heads_q, rows_of_map)

    keys = map_of("k", shape, shape.seqlen_k, shape.heads_k, 64 if paired else 128)
    values = map_of("v", shape, shape.seqlen_k, shape.heads_k, 128)
    parameters += [rows("q"), keys, values, rows("out")]
    scale = np.float32(shape.scale)
    scales = [LOG2_E, scale] if shape.distance else [scale * np.float32(LOG2_E)]
    parameters += [{"f32": float(x)} for x in scales]
    products = 1 if hopper else 64 if paired else 32  # bytes of what says which products there are: all zero
    parameters += [{"hex": "00" * products}] * 2

    grid = [tiles]
    if shape.causal:
        parameters += longest_first(shape, heads, blocks, [] if hopper else [1])
        if not hopper:
            parameters.append({"i32": 1})
            parameters += [fast_divisor(shape.group), {"i32": shape.group}] if grouped else []
    elif hopper:
        grid = [blocks, heads, shape.batch]
        parameters += [{"i32": n} for n in grid] + [fast_divisor(1), {"i32": 1}]
    else:  # blocks that stay and take one tile after the other
        grid = [min(MULTIPROCESSORS[arch] // 2, tiles) * 2 if paired else min(MULTIPROCESSORS[arch], tiles)]
        for n in (blocks, heads):
            parameters += [fast_divisor(n), {"i32": n}]
        parameters += [{"i32": tiles}, {"i32": 1}]

    launch = {
        "entry": entry,
        "grid": grid,
        "block": [512 if d == 64 or not hopper else 384],
        "dynamic_shared_bytes": 232448 if not hopper else 91136 if d == 64 else 164864,
        "parameters": parameters,
    }
    return launch | ({"cluster": [2]} if paired else {})


def write_launch(arguments):
    ptx = pathlib.Path(arguments.ptx)
    text = ptx.read_text(errors="replace")
    arch = re.search(r"^\.target (\w+)", text, re.MULTILINE)[1]
    known = re.fullmatch(r"fwd_d(64|128)(_gqa)?(_causal|_scoremod)?", ptx.stem)
    if known is None or arch not in MULTIPROCESSORS:
        sys.exit(f"{ptx}: must be {', '.join(CASES)} for sm_90a or sm_100a: the launches of others are not known here")
    heads_k = arguments.heads // 4 if known[2] else arguments.heads
    shape = Shape(
        arguments.batch,
        arguments.seqlen_q,
        arguments.seqlen_k,
        arguments.heads,
        heads_k,
        int(known[1]),
        known[3] == "_causal",
        known[3] == "_scoremod",
    )
    if shape.heads_k * (4 if known[2] else 1) != shape.heads_q:
        sys.exit(f"--heads {arguments.heads}: must be a multiple of 4, as this kernel's queries share keys by four")

    random = np.random.default_rng(arguments.seed)
    q, k, v = (
        to_bf16(random.standard_normal((shape.batch, seqlen, heads, shape.head_dim), np.float32))
        for seqlen, heads in (
            (shape.seqlen_q, shape.heads_q),
            (shape.seqlen_k, shape.heads_k),
            (shape.seqlen_k, shape.heads_k),
        )
    )
    exact = attention(*(x.astype(np.float64) for x in (q, k, v)), shape)
    plain = attention(q, k, v, shape, round_p=True)

    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, values in (("q", q), ("k", k), ("v", v)):
        np.save(out / f"{name}.npy", bf16_bits(values))
    np.save(out / "expected.npy", exact)
    launch = launch_of(shape, arch, re.search(r"\.entry\s+(\w+)", text)[1])
    launch["buffers"] = [
        {"name": name, "type": "bf16", "file": f"{name}.npy", "read_only": True} for name in ("q", "k", "v")
    ] + [
        {
            "name": "out",
            "type": "bf16",
            "shape": list(q.shape),
            "expected": "expected.npy",
            "tolerance": allowed_error(plain, exact),
        }
    ]
    (out / "launch.json").write_text(json.dumps(launch, indent=1) + "\n")
    print(f"tandem vgpu check {ptx} --launch {out / 'launch.json'}")


# ---- The kernels ----

CASES = {  # name: head_dim, heads of keys for 16 of queries, causal
    "fwd_d64": (64, 16, False),
    "fwd_d64_causal": (64, 16, True),
    "fwd_d128": (128, 16, False),
    "fwd_d128_causal": (128, 16, True),
    "fwd_d128_gqa_causal": (128, 4, True),
    "fwd_d128_scoremod": (128, 16, False),
}


def compile_case(case, arch):
    """In a process of its own, with CUTE_DSL_KEEP and CUTE_DSL_DUMP_DIR set: nothing is launched, tensors are fakes."""
    import cutlass
    import cutlass.utils
    import cutlass.utils.hardware_info
    import torch
    from cutlass import cute
    from cutlass._mlir.dialects import math as mlir_math
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Hardware:  # there is no driver to ask
        def __init__(self, *_, **__):
            pass

        def get_device_multiprocessor_count(self):
            return MULTIPROCESSORS[arch]

        def get_max_active_clusters(self, cluster_size, stream=None):
            return MULTIPROCESSORS[arch] // cluster_size

    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = Hardware
    from flash_attn.cute.interface import flash_attn_func

    @cute.jit
    def add_distance(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx - kv_idx
        return score + cute.TensorSSA(mlir_math.absi(distance), distance.shape, distance.dtype).to(cutlass.Float32)

    head_dim, heads_k, causal = CASES[case]
    options = {"score_mod": add_distance} if case.endswith("scoremod") else {}
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, 4096, heads, head_dim, dtype=torch.bfloat16, device="cuda")
            for heads in (16, heads_k, heads_k)
        )
        flash_attn_func(q, k, v, causal=causal, **options)


def dump(arguments):
    for arch in MULTIPROCESSORS:
        for case in CASES:
            folder = pathlib.Path(arguments.folder, arch)
            kept = folder / "kept" / case
            kept.mkdir(parents=True, exist_ok=True)
            variables = {
                "CUTE_DSL_ARCH": arch,
                "CUTE_DSL_DISABLE_FILE_CACHING": "1",
                "CUTE_DSL_DUMP_DIR": str(kept),
                "CUTE_DSL_KEEP": "ptx",
                "FLASH_ATTENTION_ARCH": arch.rstrip("a"),
                "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
                "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[arch]),
                "PYTHONWARNINGS": "ignore",
            }
            subprocess.run([sys.executable, __file__, "compile", case, arch], env=os.environ | variables, check=True)
            (text,) = kept.glob("*.ptx")
            (folder / f"{case}.ptx").write_text(text.read_text(errors="replace").rstrip("\0"))
            print(f"wrote {folder / case}.ptx", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("dump", help="compile the kernels to PTX")
    one.add_argument("folder")
    one.set_defaults(run=dump)
    one = verbs.add_parser("compile", help="one of them, for dump")
    one.add_argument("case", choices=CASES)
    one.add_argument("arch", choices=MULTIPROCESSORS)
    one.set_defaults(run=lambda a: compile_case(a.case, a.arch))
    one = verbs.add_parser("launch", help="write the description of a kernel's launch, its inputs and the result")
    one.add_argument("ptx", help="a file of dump's")
    one.add_argument("--out", required=True, help="the folder for launch.json and the tensors")
    for flag, default in (("batch", 1), ("seqlen-q", 300), ("seqlen-k", 200), ("heads", 2), ("seed", 1)):
        one.add_argument(f"--{flag}", type=int, default=default)
    one.set_defaults(run=write_launch)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
