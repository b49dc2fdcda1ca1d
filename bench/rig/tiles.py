"""Forward kernels cut in every way: which there are, their cubins, and launching one by itself.

Sizes and offsets come from the headers that kernels and library share, by way of the C++ compiler: nothing is written
down twice.
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
import shutil
import subprocess
import tempfile

from rig import nvrtc

ROOT = nvrtc.KERNELS.parent


@dataclasses.dataclass(frozen=True)
class Tile:
    head_dim: int
    head_dim_v: int
    warpgroups: int
    keys: int
    stages: int
    turns: bool

    def name(self, causal: bool) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        shape = f"{64 * self.warpgroups}x{self.keys}x{self.stages}{'_turns' if self.turns else ''}"
        return f"{dims}_{shape}_{'causal' if causal else 'full'}"

    def fields(self, causal: bool) -> str:
        members = {**dataclasses.asdict(self), "turns": str(self.turns).lower()}
        text = ", ".join(f".{name} = {value}" for name, value in members.items())
        return f"{{{text}{', .right = true' if causal else ''}}}"


# What is set of ForwardParams; the rest stays zero.
FIELDS = {
    **{name: c.c_void_p for name in ("lse", "counter")},
    **{name: c.c_longlong for name in ("lse_batch", "lse_row", "lse_head")},
    **{name: c.c_int for name in "batch heads_q heads_k seqlen_q seqlen_k together tiles_m tiles group".split()},
    **{name: c.c_int for name in ("bottom_right", "window_left", "window_right", "head_dim_v")},
    **{name: c.c_float for name in ("scale", "scale_log2")},
}
MAPS = ("q", "k", "v", "out")
MAP_BYTES = 128
FAR = 1 << 30  # a window's bound that bounds nothing


class Layout:
    """What the shared headers say: offsets of ForwardParams, sizes of tiles and whether they fit."""

    def __init__(self, tiles: list[Tile]):
        said = json.loads(_run_cpp(_facts_program(tiles)))
        self.bytes, self.heads_together = said["bytes"], said["heads_together"]
        self.offsets = {name: offset for name, (offset, _) in said["fields"].items()}
        for name, (_, size) in said["fields"].items():
            expected = MAP_BYTES if name in MAPS else c.sizeof(FIELDS[name])
            if size != expected:
                raise SystemExit(f"ForwardParams.{name} has {size} bytes, not {expected}: mend FIELDS in {__file__}")
        self.tiles = {tile: facts for tile, facts in zip(tiles, said["tiles"]) if facts["fits"]}

    def unit(self, tile: Tile, causal: bool) -> str:
        return (
            f'#include "sm90/forward.cuh"\nstatic_assert(sizeof(ForwardParams) == {self.bytes});\n'
            f"constexpr ForwardTile kTile{tile.fields(causal)};\n"
            'extern "C" __global__ void __launch_bounds__(kTile.threads(), 1) '
            "forward(const __grid_constant__ ForwardParams p) { forward<kTile>(p); }\n"
        )


def _facts_program(tiles: list[Tile]) -> str:
    fields = [f'{{"{n}", offsetof(ForwardParams, {n}), sizeof(ForwardParams::{n})}}' for n in (*MAPS, *FIELDS)]
    values = ",\n".join(tile.fields(False) for tile in tiles)
    return f"""#include <cstddef>
#include <cstdio>
#include "plan/tile.h"
#include "plan/tiles.h"
int main() {{
  const struct {{ const char* name; size_t offset, size; }} fields[] = {{{", ".join(fields)}}};
  const ForwardTile tiles[] = {{{values}}};
  std::printf("{{\\"bytes\\": %zu, \\"heads_together\\": %.0f", sizeof(ForwardParams), tandem::plan::kHeadsTogether);
  const char* separator = ", \\"fields\\": {{";
  for (const auto& f : fields) {{
    std::printf("%s\\"%s\\": [%zu, %zu]", separator, f.name, f.offset, f.size);
    separator = ", ";
  }}
  separator = "}}, \\"tiles\\": [";
  for (const ForwardTile& t : tiles) {{
    const auto [q, k, v, out] = tandem::plan::Tile(t).boxes;
    std::printf("%s{{\\"fits\\": %d, \\"shared\\": %d, \\"threads\\": %d, \\"rows\\": %d, ", separator,
                tandem::plan::fits(t), t.shared_bytes(), t.threads(), t.rows());
    std::printf("\\"boxes\\": [%d, %d, %d, %d]}}", q, k, v, out);
    separator = ", ";
  }}
  std::printf("]}}");
}}
"""


def _run_cpp(program: str) -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise SystemExit("a C++20 compiler is needed to read kernels/shared/forward.h: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "facts.cpp")
        source.write_text(program)
        command = [compiler, "-std=c++20", f"-I{ROOT}/src", f"-I{nvrtc.KERNELS}", "-o", f"{folder}/facts", source]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise SystemExit(f"the shared headers and {__file__} disagree:\n{built.stderr}")
        return subprocess.run([f"{folder}/facts"], capture_output=True, text=True, check=True).stdout


def _build_one(job: tuple[str, str, str]) -> tuple[str, str]:
    name, source, path = job
    try:
        cubin = nvrtc.compile(source, name)
    except nvrtc.CompileError as why:
        return name, next((line for line in str(why).splitlines() if "error" in line), str(why))
    pathlib.Path(path).write_bytes(cubin)
    return name, ""


def build(folder: pathlib.Path, layout: Layout, jobs: int) -> pathlib.Path:
    """Compiles what is missing, many at once. The cubins lie in a folder by what the compiler reads."""
    texts = [path.read_bytes() for path in sorted(nvrtc.KERNELS.rglob("*.*h"))]
    digest = hashlib.sha256(b"\0".join([*texts, nvrtc.library()[1].encode()]))
    folder = folder / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    wanted = []
    for tile in layout.tiles:
        for causal in (False, True):
            path = folder / f"{tile.name(causal)}.cubin"
            if not path.exists():
                wanted.append((tile.name(causal), layout.unit(tile, causal), str(path)))
    print(f"{len(wanted)} of {2 * len(layout.tiles)} kernels to compile, by {nvrtc.library()[1]}", flush=True)
    failed = {}
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for name, why in pool.map(_build_one, wanted):
            if why:
                failed[name] = why
    for name, why in failed.items():
        print(f"{name}: {why}")
    if wanted and len(failed) == len(wanted):
        raise SystemExit("no kernel compiles")
    return folder


class Kernel:
    """A kernel on the GPU."""

    def __init__(self, folder: pathlib.Path, layout: Layout, tile: Tile, causal: bool):
        from rig import driver

        self.layout, self.tile, self.causal, self.driver = layout, tile, causal, driver
        self.name, self.facts = tile.name(causal), layout.tiles[tile]
        cubin = (folder / f"{self.name}.cubin").read_bytes()
        self.function = driver.Function(cubin, "forward", self.facts["shared"])
        self.spilled = self.function.attribute(driver.LOCAL_BYTES)

    def _map(self, address: int, x, box_rows: int, rows: bool) -> None:
        batch, seqlen, heads, dim = x.shape
        sizes, strides, box = [dim, seqlen, heads, batch], [x.stride(1), x.stride(2), x.stride(0)], [64, box_rows, 1, 1]
        if rows:  # of q and out: the heads of a tile, here one, come before the queries
            sizes, strides, box = [dim, 1, *sizes[1:]], [dim, *strides], [64, 1, *box[1:]]
        self.driver.encode_map(address, x, sizes, strides, box)

    def bind(self, x):
        """A call of no arguments that launches the kernel on a cell's dense inputs, as src/plan would have it."""
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
        tiles_m = -(-cell.seqlen // rows)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        counted = self.causal and tiles_m * heads > sms
        together = self.layout.heads_together * (2 if cell.head_dim <= 64 else 1) * math.sqrt(16384 / cell.seqlen)
        groups = min(max(1, round(heads / together)), heads) if self.causal else heads
        values = dict(
            lse=lse.data_ptr(), lse_batch=lse.stride(0), lse_head=lse.stride(1), lse_row=1,
            counter=counter.data_ptr() if counted else None, batch=cell.batch, heads_q=cell.heads,
            heads_k=cell.kv_heads, seqlen_q=cell.seqlen, seqlen_k=cell.seqlen, together=1, tiles_m=tiles_m,
            tiles=tiles_m * heads, group=-(-heads // groups), bottom_right=1, window_left=FAR,
            window_right=0 if self.causal else FAR, head_dim_v=cell.dim_v, scale=x.scale,
            scale_log2=x.scale * math.log2(math.e),
        )  # fmt: skip
        for name, value in values.items():
            FIELDS[name].from_address(address + offsets[name]).value = value
        grid = min(sms, tiles_m * heads)

        def call(_alive=(x, memory, lse)):
            if counted:
                stream = self.driver.stream()
                self.driver.check(
                    self.driver.library().cuMemsetD8Async(c.c_uint64(counter.data_ptr()), 0, c.c_size_t(8), stream)
                )
            self.function.launch(grid, self.facts["threads"], address)
            return out

        return call
