"""Forward kernels in every configuration: the list, their cubins, and direct launches.

Sizes and offsets come from the headers that kernels and library share, through the C++ compiler, so that each is
defined once.
"""

from __future__ import annotations

import concurrent.futures
import ctypes as c
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable

from rig import nvrtc

ROOT = nvrtc.KERNELS.parent


@dataclasses.dataclass(frozen=True)
class Tile:
    """A kernel's configuration without options, as in src/plan/fields.h."""

    name: str
    fields: dict[str, int] = dataclasses.field(compare=False)
    columns: str = dataclasses.field(compare=False)  # columns of the table of configurations
    kernels: dict[bool, tuple[str, str]] = dataclasses.field(compare=False)  # by causal: name and source
    facts: dict = dataclasses.field(compare=False)

    @property
    def dims(self) -> tuple[int, int]:
        return self.fields["head_dim"], self.fields["head_dim_v"]

    def kernel(self, causal: bool) -> str:
        return self.kernels[causal][0]


MAPS = ("q", "k", "v", "out")
FAR = 1 << 30  # an unbounded window


class Layout:
    """Returns data from the shared headers: offsets of ForwardParams, and all fitting tiles with a matching name."""

    def __init__(self, dims: list[tuple[int, int]], tried: dict[str, Iterable[int]], only: re.Pattern):
        arguments = [",".join(f"{d}/{v}" for d, v in dims)]
        arguments += [f"{name}={','.join(map(str, map(int, values)))}" for name, values in tried.items()]
        said = json.loads(_facts(arguments))
        self.bytes, self.l2_heads = said["bytes"], said["l2_heads"]
        self.offsets = {name: offset for name, (offset, _) in said["parameters"].items()}
        self.types = {name: getattr(c, kind) for name, (_, kind) in said["parameters"].items() if kind != "map"}
        every = [
            Tile(
                t["full"][0], t["fields"], t["columns"], {False: tuple(t["full"]), True: tuple(t["causal"])},
                {name: t[name] for name in ("shared", "threads", "rows", "boxes")},
            )
            for t in said["tiles"]
        ]  # fmt: skip
        self.tiles = [tile for tile in every if only.search(tile.name)]


def _facts(arguments: list[str]) -> str:
    """Returns the output of tiles.cpp."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise SystemExit(
            "a C++20 compiler must be installed for kernels/config/: install g++, or name a compiler in CXX"
        )
    with tempfile.TemporaryDirectory() as folder:
        sources = [pathlib.Path(__file__).with_suffix(".cpp"), ROOT / "src/plan/kernel.cpp"]
        command = [compiler, "-std=c++20", f"-I{ROOT}/src", f"-I{nvrtc.KERNELS}", "-o", f"{folder}/facts", *sources]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise SystemExit(f"{sources[0]} must compile with the shared headers: correct it\n{built.stderr}")
        said = subprocess.run([f"{folder}/facts", *arguments], capture_output=True, text=True)
        if said.returncode:
            raise SystemExit(f"{sources[0]}: {said.stderr}")
        return said.stdout


def _build_one(job: tuple[str, str, str]) -> tuple[str, str]:
    name, source, path = job
    try:
        cubin = nvrtc.compile(source, name)
    except nvrtc.CompileError as why:
        return name, next((line for line in str(why).splitlines() if "error" in line), str(why))
    pathlib.Path(path).write_bytes(cubin)
    return name, ""


def build(folder: pathlib.Path, layout: Layout, jobs: int) -> pathlib.Path:
    """Compiles missing cubins in parallel. The folder's name is a hash of the compiler's inputs."""
    texts = [path.read_bytes() for path in sorted(nvrtc.KERNELS.rglob("*.*h"))]
    digest = hashlib.sha256(b"\0".join([*texts, nvrtc.library()[1].encode()]))
    folder = folder / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    wanted = []
    for tile in layout.tiles:
        for causal in (False, True):
            name, source = tile.kernels[causal]
            path = folder / f"{name}.cubin"
            if not path.exists():
                wanted.append((name, source, str(path)))
    print(f"{len(wanted)} of {2 * len(layout.tiles)} kernels to compile, by {nvrtc.library()[1]}", flush=True)
    failed = {}
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for name, why in pool.map(_build_one, wanted):
            if why:
                failed[name] = why
    for name, why in failed.items():
        print(f"{name}: {why}")
    if wanted and len(failed) == len(wanted):
        raise SystemExit("a kernel must compile: read the errors above")
    return folder


class Kernel:
    """A kernel on the GPU."""

    def __init__(self, folder: pathlib.Path, layout: Layout, tile: Tile, causal: bool):
        from rig import driver

        self.layout, self.tile, self.causal, self.driver = layout, tile, causal, driver
        self.name, self.facts = tile.kernel(causal), tile.facts
        cubin = (folder / f"{self.name}.cubin").read_bytes()
        self.function = driver.Function(cubin, "forward", self.facts["shared"])
        self.spilled = self.function.attribute(driver.LOCAL_BYTES)

    def _map(self, address: int, x, box_rows: int, rows: bool) -> None:
        batch, seqlen, heads, dim = x.shape
        sizes, strides, box = [dim, seqlen, heads, batch], [x.stride(1), x.stride(2), x.stride(0)], [64, box_rows, 1, 1]
        if rows:  # q and out: heads of a tile (one) before queries
            sizes, strides, box = [dim, 1, *sizes[1:]], [dim, *strides], [64, 1, *box[1:]]
        self.driver.encode_map(address, x, sizes, strides, box)

    def bind(self, x):
        """Returns a call that launches the kernel on a problem's dense inputs, with src/plan's parameters."""
        import torch

        cell, rows = x.cell, self.facts["rows"]
        out = torch.full((*x.q.shape[:-1], cell.dim_v), math.nan, dtype=x.q.dtype, device=x.q.device)
        lse = torch.full((cell.batch, cell.heads, cell.seqlen), math.nan, device=x.q.device)
        counter = torch.zeros(2, dtype=torch.int32, device=x.q.device)
        memory = c.create_string_buffer(self.layout.bytes + 64)
        address = -(-c.addressof(memory) // 64) * 64
        offsets = self.layout.offsets
        for name, tensor, box_rows in zip(MAPS, (x.q, x.k, x.v, out), self.facts["boxes"]):
            self._map(address + offsets[name], tensor, box_rows, name in ("q", "out"))
        heads = cell.batch * cell.heads
        m_blocks = -(-cell.seqlen // rows)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        counted = self.causal and m_blocks * heads > sms
        l2_heads = self.layout.l2_heads * (2 if cell.head_dim <= 64 else 1) * math.sqrt(16384 / cell.seqlen)
        groups = min(max(1, round(heads / l2_heads)), heads) if self.causal else heads
        values = dict(
            lse=lse.data_ptr(), lse_batch=lse.stride(0), lse_head=lse.stride(1), lse_row=1,
            counter=counter.data_ptr() if counted else None, batch=cell.batch, heads_q=cell.heads,
            heads_k=cell.kv_heads, seqlen_q=cell.seqlen, seqlen_k=cell.seqlen, pack_gqa=1, m_blocks=m_blocks,
            tiles=m_blocks * heads, l2_heads=-(-heads // groups), bottom_right=1, window_left=FAR,
            window_right=0 if self.causal else FAR, head_dim_v=cell.dim_v, scale=x.scale,
            scale_log2=x.scale * math.log2(math.e),
        )  # fmt: skip
        for name, value in values.items():
            self.layout.types[name].from_address(address + offsets[name]).value = value
        grid = min(sms, m_blocks * heads)

        def call(_alive=(x, memory, lse)):
            if counted:
                stream = self.driver.stream()
                self.driver.check(
                    self.driver.library().cuMemsetD8Async(c.c_uint64(counter.data_ptr()), 0, c.c_size_t(8), stream)
                )
            self.function.launch(grid, self.facts["threads"], address)
            return out

        return call
