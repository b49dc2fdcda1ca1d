"""Runs FlashAttention-4's kernels on the virtual GPU.

    pip install flash-attn-4 numpy                      # its wheels, with torch for the CPU; no GPU, no CUDA driver
    python flash_attention_4.py dump ptx                # compiles its kernels: ptx/sm_90a/fwd_d128.ptx, ...
    python flash_attention_4.py launch ptx/sm_90a/fwd_d128.ptx --seqlen-q 300 --seqlen-k 200 --out d128
    tandem vgpu check ptx/sm_90a/fwd_d128.ptx --launch d128/launch.json

`launch` writes the launch description, random inputs, and their attention in float64 with the allowed error. `launch`
also prints the command for `tandem vgpu`. bwd_d128.ptx has three kernels (.pre, none, .post) that pass results through
files. fwd_d128_varlen_causal.ptx needs the lengths of packed sequences, --lengths-q 100,0,257 --lengths-k 130,64,300.

The launcher of flash-attn-4 4.0.0b36 passes these parameters; another version may pass other ones.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import fa4_launches
import numpy as np
from fa4_formulas import Shape, allowed_error, attention, bf16_bits, gradients, to_bf16
from fa4_launches import MULTIPROCESSORS

# ---- Launches ----


class Folder:
    """The folder of launch descriptions and tensors."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def given(self, name, values, kind="bf16"):
        self.save(name, bf16_bits(values) if kind == "bf16" else values)
        return self.made(name, kind, f"{name}.npy")

    def save(self, name, values):
        np.save(self.path / f"{name}.npy", np.ascontiguousarray(values))

    def made(self, name, kind, file, read_only=True):
        return {"name": name, "type": kind, "file": file, "read_only": read_only}

    def result(self, name, exact, plain):
        self.save(f"{name}_expected", exact)
        expected = {"expected": f"{name}_expected.npy", "tolerance": allowed_error(plain, exact)}
        return {"name": name, "type": "bf16", "shape": list(exact.shape), **expected}

    def write(self, name, ptx, launch, buffers):
        entry = re.search(r"\.entry\s+(\w+)", ptx.read_text(errors="replace"))[1]
        path = self.path / f"{name}.json"
        path.write_text(json.dumps({"entry": entry, **launch, "buffers": buffers}, indent=1) + "\n")
        return f"{ptx} --launch {path}"


def normal(random, *shape):
    return to_bf16(random.standard_normal(shape, np.float32))


def launch_forward(ptx, arch, shape, random, folder):
    q, k, v = (
        normal(random, shape.batch, seqlen, heads, shape.head_dim)
        for seqlen, heads in (
            (shape.seqlen_q, shape.heads_q),
            (shape.seqlen_k, shape.heads_k),
            (shape.seqlen_k, shape.heads_k),
        )
    )
    exact = attention(*(x.astype(np.float64) for x in (q, k, v)), shape)
    plain = attention(q, k, v, shape, round_p=True)
    buffers = [folder.given(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    buffers.append(folder.result("out", exact, plain))
    print("tandem vgpu check", folder.write("launch", ptx, fa4_launches.forward(shape, arch), buffers))


def launch_packed(ptx, arch, lengths, shape, random, folder):
    """lengths: of each sequence, a list for the queries and a list for the keys."""
    lengths_q, lengths_k = lengths
    starts_q, starts_k = (np.cumsum([0, *one]).astype(np.int32) for one in lengths)
    q, k, v = (normal(random, n, shape.heads_q, shape.head_dim) for n in (starts_q[-1], starts_k[-1], starts_k[-1]))

    def of_each(kind, round_p):
        outs = []
        for n, (i, j) in enumerate(zip(lengths_q, lengths_k)):
            rows, keys = (slice(starts[n], starts[n + 1]) for starts in (starts_q, starts_k))
            one = Shape(1, i, j, shape.heads_q, shape.heads_k, shape.head_dim, causal=True)
            outs.append(attention(*(x[None].astype(kind) for x in (q[rows], k[keys], v[keys])), one, round_p)[0])
        return np.concatenate(outs)

    buffers = [folder.given(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    buffers += [folder.given(name, x, "i32") for name, x in (("starts_q", starts_q), ("starts_k", starts_k))]
    buffers.append(folder.result("out", of_each(np.float64, False), of_each(np.float32, True)))
    launch = fa4_launches.packed(lengths_q, lengths_k, shape, arch)
    print("tandem vgpu check", folder.write("launch", ptx, launch, buffers))


def launch_backward(ptx, arch, shape, random, folder):
    """Each kernel reads the results that --out of the preceding kernel has written."""
    q, k, v, dout = (
        normal(random, shape.batch, seqlen, shape.heads_q, shape.head_dim)
        for seqlen in (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k, shape.seqlen_q)
    )
    exact = gradients(*(x.astype(np.float64) for x in (q, k, v, dout)), shape)
    plain = gradients(q, k, v, dout, shape, round_p=True)
    out, lse = exact[0].astype(np.float32), exact[1].astype(np.float32)
    dq, dk, dv = (folder.result(name, exact[n], plain[n]) for n, name in ((2, "dq"), (3, "dk"), (4, "dv")))
    given_dout = folder.given("dout", dout)

    rows = fa4_launches.rows_of_backward(shape, arch)
    padded = -(-shape.seqlen_q // rows) * rows
    sums = {"dpsum": padded, "lse_log2": padded, "dq_accum": padded * shape.head_dim}
    begun = [{"name": n, "type": "f32", "shape": [shape.batch, shape.heads_q, width]} for n, width in sums.items()]
    handed_on = [folder.made(n, "f32", f"pre/{n}.npy", read_only=n != "dq_accum") for n in sums]
    deterministic = "deterministic" in ptx.stem
    paired = arch == "sm_100a" and shape.head_dim == 128 and "one_cta" not in ptx.stem
    turns = {"type": "i32", "shape": [shape.batch, shape.heads_q, padded // rows, 1 + paired], "fill": "zeros"}
    buffers = {
        "pre": [folder.given("out", out), given_dout, folder.given("lse", lse, "f32"), *begun],
        "main": [folder.given("q", q), folder.given("k", k), folder.given("v", v), given_dout, *handed_on, dk, dv]
        + ([{"name": "turns"} | turns] if deterministic else []),
        "post": [folder.made("dq_accum", "f32", "main/dq_accum.npy"), dq],
    }
    for name, launch in fa4_launches.backward(shape, arch, paired, deterministic).items():
        kernel = ptx if name == "main" else ptx.with_suffix(f".{name}.ptx")
        print("tandem vgpu run", folder.write(name, kernel, launch, buffers[name]), "--out", folder.path / name)


def lengths_of(text):
    return [int(n) for n in text.split(",")]


def write_launch(arguments):
    ptx = pathlib.Path(arguments.ptx)
    arch = re.search(r"^\.target (\w+)", ptx.read_text(errors="replace"), re.MULTILINE)[1]
    if ptx.stem not in CASES or arch not in MULTIPROCESSORS:
        sys.exit(f"{ptx}: must be {', '.join(CASES)} for sm_90a or sm_100a: other kernels have no launch")
    head_dim, heads_k, causal = CASES[ptx.stem]
    group = 16 // heads_k
    if arguments.heads % group != 0:
        sys.exit(f"--heads {arguments.heads}: must be a multiple of {group}, as this kernel's queries share keys")
    packed = "varlen" in ptx.stem
    if packed != bool(arguments.lengths_q) or packed != bool(arguments.lengths_k):
        sys.exit(f"{ptx}: --lengths-q and --lengths-k are for the kernel of packed sequences, and it needs both")
    shape = Shape(
        1 if packed else arguments.batch,
        sum(arguments.lengths_q) if packed else arguments.seqlen_q,
        sum(arguments.lengths_k) if packed else arguments.seqlen_k,
        arguments.heads,
        arguments.heads // group,
        head_dim,
        causal,
        ptx.stem.endswith("scoremod"),
    )
    random, folder = np.random.default_rng(arguments.seed), Folder(arguments.out)
    if packed:
        launch_packed(ptx, arch, (arguments.lengths_q, arguments.lengths_k), shape, random, folder)
    elif ptx.stem.startswith("bwd"):
        launch_backward(ptx, arch, shape, random, folder)
    else:
        launch_forward(ptx, arch, shape, random, folder)


# ---- The kernels ----

CASES = {  # name: head_dim, heads of keys for 16 of queries, causal
    "fwd_d64": (64, 16, False),
    "fwd_d64_causal": (64, 16, True),
    "fwd_d128": (128, 16, False),
    "fwd_d128_causal": (128, 16, True),
    "fwd_d128_gqa_causal": (128, 4, True),
    "fwd_d128_scoremod": (128, 16, False),
    "fwd_d128_varlen_causal": (128, 16, True),
    "bwd_d128": (128, 16, False),
    "bwd_d128_causal": (128, 16, True),
}
# Only sm_100a has these forms.
FORMS = {64: ("", "_deterministic"), 128: ("_deterministic", "_one_cta", "_one_cta_deterministic")}
CASES |= {
    f"bwd_d{head_dim}{causal}{form}": (head_dim, 16, bool(causal))
    for head_dim, forms in FORMS.items()
    for causal in ("", "_causal")
    for form in forms
}


def is_for(case, arch):
    return arch == "sm_100a" or case in ("bwd_d128", "bwd_d128_causal") or not case.startswith("bwd")


PARTS = {"preprocess": ".pre", "": "", "postprocess": ".post"}


def compile_case(case, arch):
    """Compiles in a process with CUTE_DSL_KEEP and CUTE_DSL_DUMP_DIR set. No kernel is launched; tensors are fakes."""
    import cutlass
    import cutlass.utils
    import cutlass.utils.hardware_info
    import torch
    from cutlass import cute
    from cutlass._mlir.dialects import math as mlir_math
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Hardware:  # a replacement of the driver's properties
        def __init__(self, *_, **__):
            pass

        def get_device_multiprocessor_count(self):
            return MULTIPROCESSORS[arch]

        def get_max_active_clusters(self, cluster_size, stream=None):
            return MULTIPROCESSORS[arch] // cluster_size

    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = Hardware
    torch.cuda.current_device = lambda: 0  # the check of semaphores needs a device number
    from flash_attn.cute import interface

    @cute.jit
    def add_distance(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx - kv_idx
        return score + cute.TensorSSA(mlir_math.absi(distance), distance.shape, distance.dtype).to(cutlass.Float32)

    head_dim, heads_k, causal = CASES[case]
    packed, seqlen = "varlen" in case, 4096

    def tensor(heads):
        shape = (2 * seqlen, heads, head_dim) if packed else (2, seqlen, heads, head_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    with FakeTensorMode():
        q, k, v = tensor(16), tensor(heads_k), tensor(heads_k)
        if packed:
            starts = torch.empty(3, dtype=torch.int32, device="cuda")
            options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
            interface.flash_attn_varlen_func(q, k, v, causal=causal, **options)
        elif case.startswith("bwd"):
            lse = torch.empty(2, 16, seqlen, dtype=torch.float32, device="cuda")
            options = {"causal": causal, "deterministic": "deterministic" in case}
            interface._flash_attn_bwd(q, k, v, tensor(16), tensor(16), lse, **options)
        else:
            options = {"score_mod": add_distance} if case.endswith("scoremod") else {}
            interface.flash_attn_func(q, k, v, causal=causal, **options)


def dump(arguments):
    for arch in MULTIPROCESSORS:
        for case in (case for case in arguments.cases or CASES if is_for(case, arch)):
            folder = pathlib.Path(arguments.folder, arch)
            kept = folder / "kept" / case
            kept.mkdir(parents=True, exist_ok=True)
            variables = {
                "CUTE_DSL_ARCH": arch,
                "CUTE_DSL_DISABLE_FILE_CACHING": "1",
                "CUTE_DSL_DUMP_DIR": str(kept),
                "CUTE_DSL_KEEP": "ptx",
                "FA_DISABLE_2CTA": str(int("one_cta" in case)),
                "FLASH_ATTENTION_ARCH": arch.rstrip("a"),
                "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
                "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[arch]),
                "PYTHONWARNINGS": "ignore",
            }
            subprocess.run([sys.executable, __file__, "compile", case, arch], env=os.environ | variables, check=True)
            for kernel in kept.glob("*.ptx"):
                part = re.search("preprocess|postprocess|$", kernel.name)[0]
                path = folder / f"{case}{PARTS[part]}.ptx"
                path.write_text(kernel.read_text(errors="replace").rstrip("\0"))
                print(f"wrote {path}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("dump", help="compile the kernels to PTX")
    one.add_argument("folder")
    one.add_argument("cases", nargs="*", help=f"[all] {' '.join(CASES)}")
    one.set_defaults(run=dump)
    one = verbs.add_parser("compile", help="compile one kernel, which FlashAttention-4 then writes to a file")
    one.add_argument("case", choices=CASES)
    one.add_argument("arch", choices=MULTIPROCESSORS)
    one.set_defaults(run=lambda a: compile_case(a.case, a.arch))
    one = verbs.add_parser("launch", help="write the description of a kernel's launch, its inputs and the result")
    one.add_argument("ptx", help="a file of dump's")
    one.add_argument("--out", required=True, help="the folder for launch.json and the tensors")
    for flag, default in (("batch", 1), ("seqlen-q", 300), ("seqlen-k", 200), ("heads", 2), ("seed", 1)):
        one.add_argument(f"--{flag}", type=int, default=default)
    for flag in ("lengths-q", "lengths-k"):
        one.add_argument(f"--{flag}", type=lengths_of, help="of packed sequences: 100,0,257")
    one.set_defaults(run=write_launch)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
