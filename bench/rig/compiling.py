"""Times the first call of a kernel, in a separate process, because a compiler is loaded once.

    TANDEM_CACHE_DIR=folder python bench/rig/compiling.py     an empty folder: compiles; a second time: loads from disk

Prints JSON: name -> seconds. Runs on two cores, like small machines.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

# head_dim, head_dim_v, seqlen: one for each entry of the library's table of tiles.
TILES = (
    (64, 64, 4096), (64, 64, 64), (128, 128, 4096), (192, 128, 512), (192, 128, 4096), (192, 128, 32768),
    (192, 192, 4096), (256, 256, 4096),
)  # fmt: skip
WARM = 1e-4  # maximum seconds to find a loaded kernel
OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=128),
    "packed": dict(causal=True, lengths=(64,)),
    "window, softcap": dict(causal=True, window=128, softcap=50.0),
    "window, softcap, packed": dict(causal=True, window=128, softcap=50.0, lengths=(64,)),
}


def variants():
    from rig.shapes import Cell

    for d, dv, seqlen in TILES:
        for what, options in OPTIONS.items():
            if "lengths" in options:
                options = dict(options, lengths=(seqlen,))
            yield Cell(f"d{d}/{dv} {seqlen}", what, seqlen, 8, d, dv, **options)


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    from rig import tandem
    from rig.shapes import Inputs

    context = tandem.Context()
    seconds = {}
    for cell in variants():
        try:
            forward = tandem.Forward(context, Inputs(cell))
            begin = time.perf_counter()
            forward.prepare()
            taken = time.perf_counter() - begin
            if taken > WARM:  # otherwise another problem has the same kernel
                seconds[cell.name] = taken
        except RuntimeError as why:
            print(f"{cell.name}: {why}", file=sys.stderr)
    print(json.dumps(seconds))


def measured() -> dict[str, dict[str, float]]:
    """Returns {"compile": {variant: seconds}, "load": ...}.

    Each variant runs in a separate process with an empty cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        # NVRTC has a separate cache, together with the driver's.
        environment = dict(os.environ, TANDEM_CACHE_DIR=os.path.join(folder, "cache"), CUDA_CACHE_DISABLE="1")
        environment.pop("TANDEM_CACHE", None)  # "off" would disable loading
        found = {}
        for what in ("compile", "load"):
            said = subprocess.run(
                [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
            )
            if said.returncode:
                raise RuntimeError(f"{what}: {said.stderr.strip().splitlines()[-1]}")
            found[what] = json.loads(said.stdout.splitlines()[-1])
        return found


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    main()
