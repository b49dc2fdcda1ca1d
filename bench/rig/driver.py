"""The CUDA driver through ctypes: modules, launches, tensor maps. Torch creates the context, memory and streams."""

from __future__ import annotations

import ctypes as c
import functools

import torch

MAX_DYNAMIC_SHARED, LOCAL_BYTES, REGISTERS = 8, 3, 4  # CUfunction_attribute


@functools.lru_cache(None)
def library() -> c.CDLL:
    torch.zeros(1, device="cuda")
    return c.CDLL("libcuda.so.1")


def check(code: int) -> None:
    if code:
        text = c.c_char_p()
        library().cuGetErrorString(code, c.byref(text))
        raise RuntimeError(f"CUDA driver error {code}: {(text.value or b'unknown').decode()}")


def stream() -> c.c_void_p:
    return c.c_void_p(torch.cuda.current_stream().cuda_stream)


class Function:
    """An entry point of a cubin. shared: bytes of shared memory for every launch."""

    def __init__(self, cubin: bytes, name: str, shared: int = 0):
        module, self.handle, self.shared = c.c_void_p(), c.c_void_p(), shared
        check(library().cuModuleLoadData(c.byref(module), cubin))
        check(library().cuModuleGetFunction(c.byref(self.handle), module, name.encode()))
        check(library().cuFuncSetAttribute(self.handle, MAX_DYNAMIC_SHARED, shared))

    def attribute(self, which: int) -> int:
        value = c.c_int()
        check(library().cuFuncGetAttribute(c.byref(value), which, self.handle))
        return value.value

    def launch(self, grid: int, threads: int, parameter: int) -> None:
        """Launches on the current stream; parameter: the address of the kernel's only parameter."""
        arguments = (c.c_void_p * 1)(parameter)
        check(library().cuLaunchKernel(self.handle, grid, 1, 1, threads, 1, 1, self.shared, stream(), arguments, None))


def encode_map(address: int, x: torch.Tensor, sizes, strides, box) -> None:
    """A tensor map of 16-bit elements at this address: the first dimension is contiguous, the strides of the remaining
    dimensions are in elements.
    """
    rank = len(sizes)
    long, word = c.c_uint64 * rank, c.c_uint32 * rank
    steps = (c.c_uint64 * (rank - 1))(*(s * x.element_size() for s in strides))
    kind = 6 if x.dtype == torch.float16 else 9  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, BFLOAT16
    # The enumerators mean no interleave, 128-byte swizzle, L2 promotion of 256 bytes, and zeros outside.
    check(
        library().cuTensorMapEncodeTiled(
            c.c_void_p(address), kind, rank, c.c_void_p(x.data_ptr()), long(*sizes), steps, word(*box),
            word(*[1] * rank), 0, 3, 3, 0,
        )
    )  # fmt: skip
