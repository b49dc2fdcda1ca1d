#!/usr/bin/env python3
"""Compares variants of the Hopper backward kernels with each other and with all peers.

    python bench/backward.py build/backward --build               # compiles ahead, on any machine with NVRTC and g++
    python bench/backward.py build/backward --fa3 libfa3_sm90.so  # on the GPU: checks, then times

A variant is a configuration (src/plan/fields.h), with optional edits of the kernel's text. Leaving a part out shows its
cost. Variants that compute gradients are checked against float32 and must give the same bits twice. Incomplete variants
are only timed ("... without ..."). Times include delta, the kernel and the conversion.

TFLOP/s: 2.5 times the forward's, half of that under a causal mask.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes as c
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile

from rig import nvrtc

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAR = 1 << 30  # an unbounded window
COMPUTE, LOAD = "sm90/backward/compute.cuh", "sm90/backward/load.cuh"
PRODUCTS, PROBABILITIES = "sm90/backward/products.cuh", "sm90/backward/probabilities.cuh"
ENTRIES = ("backward", "delta", "convert")
CROSS = ((2, 4096, 77, 16), (1, 8192, 256, 8), (1, 512, 512, 8), (16, 1, 4096, 16))  # batch, queries, keys, heads


@dataclasses.dataclass(frozen=True)
class Variant:
    name: str
    fields: dict[str, int]
    edits: tuple[tuple[str, str, str], ...] = ()  # file, text, replacement
    zeroed: bool = False  # dq_sums must be zeroed before

    @property
    def checked(self) -> bool:
        return " without " not in self.name


WAIT = "        while (load_acquire(ticket) < before) {\n        }\n"
NO_TICKETS = (
    (LOAD, WAIT, ""),
    (LOAD, "s.dq_is_first[part] = before == 0;", "s.dq_is_first[part] = 0;"),
    (LOAD, "if (before == 0) {", "if (before < 0) {"),
)
# (ptxas removes a product with an unused result.)
NO_ADDING = (
    *NO_TICKETS,
    (PRODUCTS, "      global_add(to + r", "      if (dq[r] == 1e30f) global_add(to + r"),
    (LOAD, "            bulk_add(sums,", "            if (p.scale == 1e30f) bulk_add(sums,"),
)
NO_EXP = (*NO_ADDING, (PROBABILITIES, "scores[r] = exp2_approx(fmaf(", "scores[r] = (fmaf("))
# The next iteration's scores only after dK is complete.
NO_SCORES_AHEAD = ((
    COMPUTE,
    "kScoresAhead = T.head_dim <= 64 || !(T.has_score_mod() || T.dropout);",
    "kScoresAhead = false;",
),)  # fmt: skip


def variants() -> list[Variant]:
    d128, d64 = dict(head_dim=128, head_dim_v=128), dict(head_dim=64, head_dim_v=64)
    d256 = dict(head_dim=256, head_dim_v=256, q_stages=2)
    both = [
        ("", (), False),
        (" unordered", NO_TICKETS, True),
        (" no scores ahead", NO_SCORES_AHEAD, False),
        (" without adding", NO_ADDING, True),
        (" without adding, exp", NO_EXP, True),
    ]
    found = [Variant("64x128" + name, d128, *rest) for name, *rest in both]
    found += [Variant("128x128" + name, dict(d64, tile_m=128, q_stages=2), *rest) for name, *rest in both]
    found.append(Variant("64x128", d64))
    found += [Variant("64x64", d256), Variant("64x64 without adding", d256, NO_ADDING, True)]
    # The iterations of an n_block split over CTAs: for problems with few keys.
    cuts = {"64x128": d128, "128x128": dict(d64, tile_m=128, q_stages=2), "64x64": d256}
    found += [Variant(f"{name} split", dict(fields, split=1)) for name, fields in cuts.items()]
    return found


# ---- Building ----


def facts(descriptions: list[str]) -> dict:
    """The output of rig/backward.cpp for these kernels."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise SystemExit("a C++20 compiler is needed to read kernels/shared/: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory() as folder:
        sources = [ROOT / "bench/rig/backward.cpp", ROOT / "src/plan/kernel.cpp"]
        command = [compiler, "-std=c++20", f"-I{ROOT}/src", f"-I{nvrtc.KERNELS}", "-o", f"{folder}/facts", *sources]
        subprocess.run(command, check=True)
        said = subprocess.run([f"{folder}/facts", *descriptions], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


def compile_one(job: tuple[str, str, tuple, pathlib.Path]) -> tuple[str, str]:
    """The cubin's name, and the reason if it is missing. The name is a hash of its inputs, so that it is built only
    once.
    """
    name, source, edits, to = job
    with tempfile.TemporaryDirectory() as folder:
        kernels = pathlib.Path(folder, "kernels")
        shutil.copytree(nvrtc.KERNELS, kernels)
        for file, old, new in edits:
            text = (kernels / file).read_text()
            if old not in text:
                return "", f"{file} has no: {old}"
            (kernels / file).write_text(text.replace(old, new))
        read = [path.read_bytes() for path in sorted(kernels.rglob("*.*h"))]
        cubin = hashlib.sha256(b"\0".join([*read, source.encode()])).hexdigest()[:16] + ".cubin"
        if not (to / cubin).exists():
            try:
                (to / cubin).write_bytes(nvrtc.compile(source, name, include=kernels))
            except nvrtc.CompileError as why:
                return "", str(why)
    return cubin, ""


def build(folder: pathlib.Path, jobs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [(v, right) for v in variants() for right in (0, 1)]
    said = facts([",".join(f"{k}={x}" for k, x in dict(v.fields, right=right).items()) for v, right in chosen])
    work = [(v.name, k.pop("source"), v.edits, folder) for (v, _), k in zip(chosen, said["kernels"])]
    kernels = []
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for (cubin, why), (v, right), kernel in zip(pool.map(compile_one, work), chosen, said["kernels"]):
            if why:
                print(f"{v.name} d{v.fields['head_dim']} {'causal' if right else 'full'}: {why}", flush=True)
            else:
                kernels.append(
                    dict(kernel, variant=v.name, cubin=cubin, head_dim=v.fields["head_dim"], zeroed=v.zeroed)
                )
    (folder / "facts.json").write_text(json.dumps(dict(said, kernels=kernels)))
    for old in folder.glob("*.cubin"):
        if old.name not in {k["cubin"] for k in kernels}:
            old.unlink()


# ---- On the GPU ----


class Kernel:
    def __init__(self, folder: pathlib.Path, said: dict, kernel: dict):
        from rig import driver

        self.driver, self.kernel, self.bytes = driver, kernel, said["bytes"]
        self.delta_threads = said["delta_threads"]
        self.offsets = {name: offset for name, (offset, _) in said["parameters"].items()}
        self.types = {name: getattr(c, kind) for name, (_, kind) in said["parameters"].items() if kind != "map"}
        cubin = (folder / kernel["cubin"]).read_bytes()
        self.entries = [driver.Function(cubin, name, kernel["shared"] if name == "backward" else 0) for name in ENTRIES]
        self.spilled = self.entries[0].attribute(driver.LOCAL_BYTES)
        self.registers = self.entries[0].attribute(driver.REGISTERS)

    def splits_of(self, x) -> int:
        """The number of CTAs that share the iterations of an n_block, as in src/plan/backward.cpp."""
        k = self.kernel
        tiles = -(-x.seqlen_k // k["tile_n"]) * x.batch * x.kv_heads
        steps = x.heads // x.kv_heads * -(-x.seqlen_q // k["tile_m"])
        return max(1, min(132 // tiles, steps // 2, 16)) if k["key_sums"] else 1

    def bind(self, x):
        """A call that returns dq, dk, dv of x (Inputs)."""
        import torch

        k, sms = self.kernel, torch.cuda.get_device_properties(0).multi_processor_count
        sequence_m_blocks, n_blocks = -(-x.seqlen_q // k["tile_m"]), -(-x.seqlen_k // k["tile_n"])
        m_blocks = x.batch * sequence_m_blocks
        device = dict(device="cuda")
        grads = [torch.full_like(t, math.nan) for t in (x.q, x.k, x.v)]
        blocks = x.heads * m_blocks
        zeros = functools.partial(torch.zeros, dtype=torch.int32, **device)
        counter, tickets = zeros(4), zeros(blocks * k["dq_tickets"])
        stats = torch.empty(blocks * 2 * k["tile_m"], **device)
        splits = self.splits_of(x)
        key_sums = torch.empty(n_blocks * x.batch * x.kv_heads * splits * k["key_floats"], **device)
        sums = torch.empty(blocks * k["dq_floats"], **device)
        memory = c.create_string_buffer(self.bytes + 64)
        address = -(-c.addressof(memory) // 64) * 64
        boxes = dict(q=k["tile_m"], dout=k["tile_m"], k=k["tile_n"], v=k["tile_n"], dk=64, dv=64)
        tensors = dict(q=x.q, k=x.k, v=x.v, dout=x.dout, dk=grads[1], dv=grads[2])
        for name, t in tensors.items():
            batch, seqlen, heads, dim = t.shape
            self.driver.encode_map(
                address + self.offsets[name], t, [dim, seqlen, heads, batch],
                [t.stride(1), t.stride(2), t.stride(0)], [64, boxes[name], 1, 1],
            )  # fmt: skip
        of_head = x.heads // x.kv_heads * x.seqlen_q * 8 * x.head_dim
        heads = x.batch * x.kv_heads
        steps = x.heads // x.kv_heads * sequence_m_blocks
        at_once = max(4, steps // (6 if x.causal else 2))  # as in src/plan/backward.cpp
        rows = {"out": x.out, "dout": x.dout, "dq": grads[0], "dk": grads[1], "dv": grads[2]}
        values = dict(
            lse=x.lse.data_ptr(), lse_batch=x.lse.stride(0), lse_head=x.lse.stride(1), lse_row=1,
            out_given=x.out.data_ptr(), dout_data=x.dout.data_ptr(), dq=grads[0].data_ptr(), counter=counter.data_ptr(),
            batch=x.batch, heads_q=x.heads, heads_k=x.kv_heads, seqlen_q=x.seqlen_q, seqlen_k=x.seqlen_k, pack_gqa=1,
            m_blocks=m_blocks, sequence_m_blocks=sequence_m_blocks, n_blocks=n_blocks, splits=splits,
            tiles=n_blocks * heads * splits, key_sums=key_sums.data_ptr(), dk_data=grads[1].data_ptr(),
            dv_data=grads[2].data_ptr(),
            bottom_right=1, window_left=FAR,
            l2_heads=min(max(1, (32 << 20) // of_head, -(-sms // at_once)), heads), window_right=0 if x.causal else FAR,
            scale=x.scale, scale_log2=x.scale * math.log2(math.e), head_dim=x.head_dim, head_dim_v=x.head_dim, has_dk=1,
            has_dv=1, stats=stats.data_ptr(), dq_sums=sums.data_ptr(), dq_tickets=tickets.data_ptr(),
        )  # fmt: skip
        for name, t in rows.items():
            values |= {f"{name}_batch": t.stride(0), f"{name}_row": t.stride(1), f"{name}_head": t.stride(2)}
        for name, value in values.items():
            self.types[name].from_address(address + self.offsets[name]).value = value
        main, delta, convert = self.entries
        grid = min(sms, n_blocks * heads * splits)
        converted = blocks + n_blocks * heads * k["key_sums"]

        def call(_alive=(x, memory, counter, tickets, stats, key_sums)):
            if k["zeroed"]:
                sums.zero_()
            delta.launch(blocks, self.delta_threads, address)
            main.launch(grid, k["threads"], address)
            convert.launch(converted, 128 * k["warpgroups"], address)
            return grads

        return call


class Inputs:
    def __init__(self, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, causal, f16=False):
        import torch

        self.batch, self.seqlen_q, self.seqlen_k, self.heads, self.kv_heads = batch, seqlen_q, seqlen_k, heads, kv_heads
        self.head_dim, self.causal, self.scale = head_dim, causal, 1 / math.sqrt(head_dim)
        torch.manual_seed(1)
        kind = dict(device="cuda", dtype=torch.float16 if f16 else torch.bfloat16)
        self.q = torch.randn(batch, seqlen_q, heads, head_dim, **kind)
        self.dout = torch.randn_like(self.q)
        self.k, self.v = (torch.randn(batch, seqlen_k, kv_heads, head_dim, **kind) for _ in range(2))
        out, lse = torch.ops.aten._flash_attention_forward(
            self.q, self.k, self.v, None, None, seqlen_q, seqlen_k, 0.0, causal, False, scale=self.scale
        )[:2]
        self.out, self.lse = out, lse[:, :, :seqlen_q].contiguous()

    def flops(self) -> float:
        pairs = self.batch * self.heads * self.seqlen_q * self.seqlen_k / (2 if self.causal else 1)
        return 2.5 * 4 * pairs * self.head_dim


def exact(x: Inputs):
    """The gradients in float32, by autograd of standard attention."""
    import torch

    q, k, v = (t.float().transpose(1, 2).detach().requires_grad_() for t in (x.q, x.k, x.v))
    group = x.heads // x.kv_heads
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * x.scale
    if x.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1 + x.seqlen_k - x.seqlen_q)
        scores = scores.masked_fill(hidden, -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return [g.transpose(1, 2) for g in torch.autograd.grad(out, (q, k, v), x.dout.float().transpose(1, 2))]


def check(name: str, kernel: Kernel, x: Inputs, expected) -> bool:
    import torch

    call = kernel.bind(x)
    first = [g.clone() for g in call()]
    same = True
    for _ in range(3):
        again = call()
        same = same and all(torch.equal(a, b) for a, b in zip(first, again))
    torch.cuda.synchronize()
    errors = [((g.float() - e).norm() / e.norm()).item() for g, e in zip(first, expected)]
    good = all(e < 1e-2 for e in errors)
    print(
        f"  {name:24} errors of dq, dk, dv {' '.join(f'{e:.1e}' for e in errors)}{'' if good else ' WRONG'}, "
        f"{'same bits' if same else 'other bits'}, {kernel.registers} registers, {kernel.spilled} bytes spilled",
        flush=True,
    )
    return good


def fa3(library: str, deterministic: bool):
    from rig.peers_backward import fa3_gradients

    of = fa3_gradients(library, deterministic)
    return lambda x: of(x.q, x.k, x.v, x.out, x.lse, x.dout, x.causal, x.scale)


def torch_peer(backend):
    import torch
    from torch.nn.attention import sdpa_kernel

    def bind(x):
        q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in (x.q, x.k, x.v))
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=x.causal, scale=x.scale, enable_gqa=x.heads != x.kv_heads
            )
        dout = x.dout.transpose(1, 2)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return bind


def run(folder: pathlib.Path, options: argparse.Namespace) -> None:
    import torch
    from rig import clock
    from torch.nn.attention import SDPBackend

    said = json.loads((folder / "facts.json").read_text())
    kernels = [Kernel(folder, said, k) for k in said["kernels"]]
    results, good = {}, {}
    print(torch.cuda.get_device_name(0), torch.__version__, flush=True)
    for head_dim in sorted({k["head_dim"] for k in said["kernels"]}):
        for causal in (False, True):
            for sizes in ((2, 300, 300, 4, 2), (1, 1000, 1300, 4, 4)):
                x = Inputs(*sizes, head_dim, causal)
                print(f"d{head_dim} {'causal' if causal else 'full'} {sizes}", flush=True)
                expected = exact(x)
                for kernel in kernels:
                    k = kernel.kernel
                    if k["head_dim"] != head_dim or k["right"] != causal or " without " in k["variant"]:
                        continue
                    key = (head_dim, causal, k["variant"])
                    good[key] = check(k["variant"], kernel, x, expected) and good.get(key, True)
    peers = {"cuDNN": torch_peer(SDPBackend.CUDNN_ATTENTION), "FA2": torch_peer(SDPBackend.FLASH_ATTENTION)}
    if options.fa3:
        peers |= {"FA3": fa3(options.fa3, False), "FA3 ordered": fa3(options.fa3, True)}
    for head_dim in sorted({k["head_dim"] for k in said["kernels"]}):
        for causal in (False, True):
            sizes = [(16384 // n, n, n, 2048 // head_dim) for n in options.seqlens]
            for batch, seqlen_q, seqlen_k, heads in [*sizes, *(() if causal else CROSS)]:
                x = Inputs(batch, seqlen_q, seqlen_k, heads, heads, head_dim, causal)
                calls, timed = {}, {}
                for kernel in kernels:
                    k = kernel.kernel
                    if k["head_dim"] == head_dim and k["right"] == causal:
                        if good.get((head_dim, causal, k["variant"]), True):
                            calls[k["variant"]] = kernel.bind(x)
                for name, bind in peers.items():
                    if head_dim > 128 and name == "FA3 ordered":  # no such kernel
                        continue
                    calls[name] = bind(x)
                for name, call in calls.items():
                    try:
                        timed[name] = clock.Timed(call, options.ms)
                    except Exception as why:  # any failure of a peer
                        print(f"{name}: {str(why).splitlines()[0]}", flush=True)
                times = clock.interleaved(timed, options.rounds)
                rates = {name: x.flops() / statistics.median(t) * 1e-12 for name, t in times.items()}
                cell = f"d{head_dim} {'causal' if causal else 'full'} {batch}x{heads} {seqlen_q}x{seqlen_k}"
                results[cell] = rates
                print(f"{cell}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), flush=True)
                del timed, calls, x
                torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the cubins are kept")
    parser.add_argument("--build", action="store_true", help="compile, and stop")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    parser.add_argument("--fa3", metavar="LIBRARY", help="shared library of FlashAttention-3")
    parser.add_argument("--seqlens", type=lambda s: [int(n) for n in s.split(",")], default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=20, help="a window's milliseconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all rates here")
    options = parser.parse_args()
    if options.build:
        build(options.folder, options.jobs)
    else:
        run(options.folder, options)


if __name__ == "__main__":
    main()
