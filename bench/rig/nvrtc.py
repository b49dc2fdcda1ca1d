"""Compiles kernels with NVRTC, for programs that use other configurations than the library."""

from __future__ import annotations

import ctypes as c
import functools
import glob
import os
import pathlib
import site

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels"


class CompileError(Exception):
    pass


def candidates() -> list[str]:
    """Returns candidate paths of the library, the most likely first, like src/jit."""
    if os.environ.get("TANDEM_NVRTC"):
        return [os.environ["TANDEM_NVRTC"]]
    found = []
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        for inside in ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib"):
            found += sorted(glob.glob(f"{folder}/{inside}/libnvrtc.so.1[0-9]"), reverse=True)
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        found += sorted(glob.glob(f"{home}/lib64/libnvrtc.so.1[0-9]"), reverse=True)
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


@functools.lru_cache(None)
def library() -> tuple[c.CDLL, str]:
    for path in candidates():
        try:
            nvrtc = c.CDLL(path)
        except OSError:
            continue
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*")):
            c.CDLL(builtins)  # NVRTC searches only the loader's path
        major, minor = c.c_int(), c.c_int()
        nvrtc.nvrtcVersion(c.byref(major), c.byref(minor))
        return nvrtc, f"{path} ({major.value}.{minor.value})"
    raise SystemExit("NVRTC must be installed: pip install nvidia-cuda-nvrtc, or set TANDEM_NVRTC to libnvrtc.so")


def compile(source: str, name: str, arch: str = "sm_90a", include: str | pathlib.Path = KERNELS) -> bytes:
    """Returns a cubin, or PTX for an arch like compute_90a.

    The source may include files from kernels/ or another folder.
    """
    nvrtc, _ = library()
    form = "PTX" if arch.startswith("compute_") else "CUBIN"
    program = c.c_void_p()
    arguments = [f"-arch={arch}", "-std=c++20", "--device-as-default-execution-space", f"-I{include}"]
    array = (c.c_char_p * len(arguments))(*(a.encode() for a in arguments))
    nvrtc.nvrtcCreateProgram(c.byref(program), source.encode(), name.encode(), 0, None, None)
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(arguments), array)
        size = c.c_size_t()
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, c.byref(size))
            log = c.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode(errors="replace"))
        getattr(nvrtc, f"nvrtcGet{form}Size")(program, c.byref(size))
        code = c.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{form}")(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(c.byref(program))
