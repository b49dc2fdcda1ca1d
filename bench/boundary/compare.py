"""Ways from Python into the same C call: what each costs, and what it asks of those who install it.

    pip install . torch numpy apache-tvm-ffi nanobind     # the last two: what is missing is left out
    python bench/boundary/compare.py

One query and one key of 8 numbers, four tensors and five options, so that the boundary is nearly all there is. The ways
take turns; each figure is the least of many rounds less the call itself, which is measured in C.
"""

from __future__ import annotations

import ctypes
import importlib
import pathlib
import subprocess
import sys
import sysconfig
import timeit
from importlib.metadata import files

import numpy as np
import torch

import tandem._ctypes as tc
from tandem import _binding

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "boundary"
PACKAGE = pathlib.Path(tc.__file__).parent
PYTHON = f"-I{sysconfig.get_path('include')}"
CALL = "f(q, k, v, out, 0.0, 0.0, 0, -1, -1)"  # softmax_scale, softcap, causal, window


def build(source: str, output: str, *flags: str) -> pathlib.Path:
    """Compiles bench/boundary/source to build/boundary/output, with the package's libtandem."""
    BUILD.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-std=c++17"] if source.endswith(".cpp") else ["cc", "-std=c11"]
    command += ["-O3", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-s"]
    command += [f"-I{ROOT / 'include'}", f"-I{ROOT / 'third_party'}", str(HERE / source), *flags, "-Wl,--gc-sections"]
    subprocess.run([*command, PACKAGE / "libtandem.so.0", f"-Wl,-rpath,{PACKAGE}", "-o", BUILD / output], check=True)
    return BUILD / output


def c_call(backward: bool = False):
    """A function: nanoseconds of the call in C, the mean of a thousand; or of the forward and the backward call."""
    function = ctypes.CDLL(str(build("c_loop.c", "c_loop.so"))).boundary_nanoseconds
    function.restype = ctypes.c_double
    if function(1, int(backward)) < 0:
        raise RuntimeError(tc.last_error())
    return lambda: function(1000, int(backward))


def timed(statement: str, names: dict, calls: int = 1000):
    """A function: nanoseconds of the statement, the mean of so many."""
    timer = timeit.Timer(statement, globals=names)
    return lambda: timer.timeit(calls) / calls * 1e9


def least(functions: dict, rounds: int = 100) -> dict:
    """The least result of each function, the functions taking turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            best[name] = min(best[name], function())
    return best


def with_tvm_ffi():
    import tvm_ffi

    runtime = pathlib.Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    flags = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    path = build("with_tvm_ffi.cpp", "with_tvm_ffi.so", *flags, f"-L{runtime}", "-ltvm_ffi", f"-Wl,-rpath,{runtime}")
    return tvm_ffi.load_module(str(path)).forward


def with_nanobind():
    import nanobind

    package = pathlib.Path(nanobind.__file__).parent
    flags = [PYTHON, f"-I{package / 'include'}", f"-I{package / 'ext/robin_map/include'}", "-fno-strict-aliasing"]
    build("with_nanobind.cpp", "with_nanobind.so", *flags, str(package / "src/nb_combined.cpp"))
    return importlib.import_module("with_nanobind").forward


def with_c():
    build("with_c.c", "with_c.abi3.so", PYTHON)
    return importlib.import_module("with_c").forward


def with_ctypes():
    arrays, size, forward = ctypes.c_int64 * 4, ctypes.sizeof(tc._Args), tc._binding.tandem_forward
    workspace = ctypes.create_string_buffer(1 << 24)

    def view(x):
        if type(x) is np.ndarray:
            address, strides = x.__array_interface__["data"][0], [stride // x.itemsize for stride in x.strides]
        else:
            address, strides = x.data_ptr(), x.stride()
        return ctypes.pointer(tc._Tensor(address, 1, 0, 4, 2, 32, 1, arrays(*x.shape), arrays(*strides), 0))

    def call(q, k, v, out, softmax_scale, softcap, causal, left, right):
        a = tc._Args(size, view(q), view(k), view(v), view(out))
        a.softmax_scale, a.softcap, a.causal = softmax_scale, softcap, causal
        a.window, a.window_left, a.window_right = (left >= 0) | (right >= 0) << 1, max(left, 0), max(right, 0)
        return forward(None, a, workspace, 1 << 24, None)

    return call


def through(run):
    """The package's own boundary: a record with every tensor and option there is, and the workspace its own affair."""
    absent = dict.fromkeys((*_binding.TENSORS[3:], *_binding.OPTIONS))
    return lambda q, k, v, out, *_: run(0, {"q": q, "k": k, "v": v, **absent, "out": out})


# way; what makes it; what is shipped beside libtandem; needed at run time; one wheel for every CPython from 3.9 on?
WAYS = (
    ("apache-tvm-ffi", with_tvm_ffi, BUILD / "with_tvm_ffi.so", "apache-tvm-ffi", "yes, for one 0.x; its own: no"),
    ("nanobind", with_nanobind, BUILD / "with_nanobind.so", None, "no: 3.10, 3.11 and 3.12 on"),
    ("C for the stable ABI", with_c, BUILD / "with_c.abi3.so", None, "yes, but free-threaded ones"),
    ("ctypes", with_ctypes, None, None, "yes"),
    ("tandem._native", lambda: through(_binding.binding.run), PACKAGE / "_native.abi3.so", None, "yes, as above"),
    ("tandem._ctypes", lambda: through(tc.run), None, None, "yes"),
)  # fmt: skip


def size_of(shipped, needed) -> str:
    text = f"{shipped.stat().st_size / 1e3:.0f} kB" if shipped else "-"
    if needed:
        code = [f.locate() for f in files(needed) if f.suffix in (".so", ".py") and "testing" not in f.name]
        text += f" + {sum(path.stat().st_size for path in code) / 1e6:.1f} MB"
    return text


def main() -> None:
    sys.path.insert(0, str(BUILD))
    functions, rows = {"C": c_call()}, []
    q, k, v = (np.random.rand(1, 1, 1, 8).astype(np.float32) for _ in range(3))
    for name, make, *columns in WAYS:
        try:
            f = make()
        except ImportError:
            print(f"{name} is left out: pip install {name}")
            continue
        rows.append((name, *columns))
        for convert in (np.array, torch.tensor):
            names = {"f": f, "q": convert(q), "k": convert(k), "v": convert(v), "out": convert(np.zeros_like(v))}
            if eval(CALL, names) != 0 or not np.array_equal(names["out"], v):  # one key: its value is the result
                raise RuntimeError(f"{name}: {tc.last_error()}")
            functions[name, convert] = timed(CALL, names)
    best = least(functions)
    versions = f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}"
    print(f"The call in C: {best['C']:.0f} ns. {_binding.binding.description()}; {versions}\n")
    print("| way | numpy, ns | torch, ns | beside libtandem | needs at run time | one wheel for CPython >= 3.9 |")
    print("|---|---|---|---|---|---|")
    for name, shipped, needed, wheel in rows:
        times = " | ".join(f"{best[name, kind] - best['C']:.0f}" for kind in (np.array, torch.tensor))
        print(f"| {name} | {times} | {size_of(shipped, needed)} | {needed or '-'} | {wheel} |")


if __name__ == "__main__":
    main()
