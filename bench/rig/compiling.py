"""Times what the first call of a kernel costs: a process of its own, since a compiler is loaded once.

    TANDEM_CACHE_DIR=folder python bench/rig/compiling.py     an empty folder: compiles; a second time: loads from disk

Prints JSON: name -> seconds. Runs on two cores, as small machines have them.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time


def variants():
    from rig.cells import Cell

    for d, dv in ((64, 64), (128, 128), (256, 256), (192, 128)):
        for causal in (False, True):
            yield Cell(f"d{d}/{dv}", "causal" if causal else "full", 4096, 8, d, dv, causal=causal)
    yield Cell("d64", "window and sink", 4096, 8, 64, causal=True, window=128, sink=True)
    yield Cell("d128", "softcap", 4096, 8, 128, causal=True, softcap=50.0)
    yield Cell("d128", "packed", 2048, 8, 128, causal=True, lengths=(2048, 1024))


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    from rig import tandem
    from rig.cells import Inputs

    context = tandem.Context()
    seconds = {}
    for cell in variants():
        try:
            forward = tandem.Forward(context, Inputs(cell))
            begin = time.perf_counter()
            forward.prepare()
            seconds[cell.name] = time.perf_counter() - begin
        except RuntimeError as why:
            print(f"{cell.name}: {why}", file=sys.stderr)
    print(json.dumps(seconds))


def measured() -> dict[str, dict[str, float]]:
    """{"compile": {variant: seconds}, "load": ...}, each in a process of its own, on a cache that begins empty."""
    with tempfile.TemporaryDirectory() as folder:
        # NVRTC keeps a cache of its own, with the driver's.
        environment = dict(os.environ, TANDEM_CACHE_DIR=os.path.join(folder, "cache"), CUDA_CACHE_DISABLE="1")
        environment.pop("TANDEM_CACHE", None)  # "off" would leave nothing to load
        found = {}
        for what in ("compile", "load"):
            said = subprocess.run(
                [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120
            )
            if said.returncode:
                raise RuntimeError(f"{what}: {said.stderr.strip().splitlines()[-1]}")
            found[what] = json.loads(said.stdout.splitlines()[-1])
        return found


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    main()
