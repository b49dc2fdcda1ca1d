"""The functions of CUDA's driver for copies between processes: memory, handles, copies, and flags in memory.

Memory is the driver's own, because torch's expandable segments have no handles for cuIpcOpenMemHandle.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_BLOCK = 2 << 20  # CUDA recommends to share allocations of multiples of 2 MiB
_CAN_FLUSH_REMOTE_WRITES = 98  # CUdevice_attribute
_WAIT_EQUAL, _WAIT_FLUSH = 1, 1 << 30  # CUstreamWaitValue_flags; 0 is greater or equal, modulo 2^32
_LAZY_ENABLE_PEER_ACCESS = 1
_UNIFIED = 4  # CUmemorytype
_NO_TIMES = 2  # CU_EVENT_DISABLE_TIMING

_uint32, _size, _pointer, _address = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D"""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("x", _size),
            ("y", _size),
            ("type", _uint32),
            ("host", _pointer),
            ("device", _address),
            ("array", _pointer),
            ("pitch", _size),
        )
    ] + [("width", _size), ("height", _size)]


_ARGUMENTS = {
    "cuDeviceGet": [_pointer, ctypes.c_int],
    "cuDeviceGetAttribute": [_pointer, ctypes.c_int, ctypes.c_int],
    "cuCtxGetCurrent": [_pointer],
    "cuCtxSetCurrent": [_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemFree_v2": [_address],
    "cuMemsetD8_v2": [_address, ctypes.c_ubyte, _size],
    "cuIpcGetMemHandle": [_pointer, _address],
    "cuIpcOpenMemHandle_v2": [_pointer, _Handle, _uint32],
    "cuIpcCloseMemHandle": [_address],
    "cuEventCreate": [_pointer, _uint32],
    "cuEventRecord": [_pointer, _pointer],
    "cuStreamWaitEvent": [_pointer, _pointer, _uint32],
    "cuMemcpyAsync": [_address, _address, _size, _pointer],
    "cuMemcpy2DAsync_v2": [_pointer, _pointer],
    "cuStreamWriteValue32_v2": [_pointer, _address, _uint32, _uint32],
    "cuStreamWaitValue32_v2": [_pointer, _address, _uint32, _uint32],
}


class _Memory:
    """Memory as torch.as_tensor() reads it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


class Strip(NamedTuple):
    """Rows of some bytes in memory: the address of the first one, and the distance of two."""

    address: int
    pitch: int
    width: int
    height: int


class CudaDriver:
    """The driver on one device. Streams are the driver's handles."""

    def __init__(self, device: torch.device, group: Any) -> None:
        if not _ends_lost_ranks(group):
            raise RuntimeError("the group must be NCCL's, whose watchdog ends the process if a rank is lost")
        self.device, self._library = device, ctypes.CDLL("libcuda.so.1")
        self._bind()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the context
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
            number, flushes = ctypes.c_int(), ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(number), torch.cuda.current_device())
            self._call("cuDeviceGetAttribute", ctypes.byref(flushes), _CAN_FLUSH_REMOTE_WRITES, number.value)
            self._call("cuEventCreate", ctypes.byref(self._event), _NO_TIMES)
        self._flush = _WAIT_FLUSH if flushes.value else 0

    def _bind(self) -> None:
        for name, arguments in _ARGUMENTS.items():
            getattr(self._library, name).argtypes = arguments
        self._context, self._found, self._event = _pointer(), _pointer(), _pointer()
        self._streams: dict[int, tuple[torch.cuda.Stream, int]] = {}
        # The arguments of a copy of rows, which the driver reads before it returns.
        self._rows = _Copy2D(src_type=_UNIFIED, dst_type=_UNIFIED)
        self._reference = ctypes.byref(self._rows)

    @staticmethod
    def is_capturing() -> bool:
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def host() -> bytes:
        """Returns a name of the host, which its containers share."""
        try:
            with open("/proc/sys/kernel/random/boot_id", "rb") as file:
                return file.read().strip()
        except OSError:
            return os.uname().nodename.encode()[:36]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} ({status}) must return CUDA_SUCCESS: cuda.h has the meaning of the number")

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Makes the device's context current, which a thread of autograd may lack."""
        is_other = torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if is_other else contextlib.nullcontext():
            self._call("cuCtxGetCurrent", ctypes.byref(self._found))
            if self._found.value is None:
                self._call("cuCtxSetCurrent", self._context)
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocate(self, count: int) -> int:
        """Returns the address of zeros."""
        count, address = -(-count // _BLOCK) * _BLOCK, _address()
        with self.on_device():
            try:
                self._call("cuMemAlloc_v2", ctypes.byref(address), count)
            except RuntimeError:
                torch.cuda.empty_cache()
                self._call("cuMemAlloc_v2", ctypes.byref(address), count)
            self._call("cuMemsetD8_v2", address, 0, count)
            self.synchronize()
        return address.value

    def free(self, address: int) -> None:
        with self.on_device():
            self._call("cuMemFree_v2", address)

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        with self.on_device():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        address = _address()
        with self.on_device():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return address.value

    def close(self, address: int) -> None:
        with self.on_device():
            self._call("cuIpcCloseMemHandle", address)

    def tensor(self, address: int, count: int) -> Tensor:
        return torch.as_tensor(_Memory(address, count), device=self.device)

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def mark(self) -> None:
        """Streams of copies follow what the current stream has now."""
        self._call("cuEventRecord", self._event, self.current_stream())

    def copy_stream(self, peer: int) -> int:
        """Returns the stream of copies to a peer, which follows the last mark."""
        found = self._streams.get(peer)
        if found is None:
            stream = torch.cuda.Stream(self.device, priority=-1)
            found = self._streams[peer] = stream, stream.cuda_stream
        self._call("cuStreamWaitEvent", found[1], self._event, 0)
        return found[1]

    def join(self) -> None:
        """The current stream follows the copies."""
        current = self.current_stream()
        for _, stream in self._streams.values():
            self._call("cuEventRecord", self._event, stream)
            self._call("cuStreamWaitEvent", current, self._event, 0)

    def copy(self, stream: int, to: int, strip: Strip) -> None:
        """Copies rows one after the other."""
        address, pitch, width, height = strip
        if pitch == width or height == 1:
            self._call("cuMemcpyAsync", to, address, width * height, stream)
            return
        copy = self._rows
        copy.src_device, copy.src_pitch, copy.dst_device, copy.dst_pitch = address, pitch, to, width
        copy.width, copy.height = width, height
        self._call("cuMemcpy2DAsync_v2", self._reference, stream)

    def write(self, stream: int, address: int, value: int) -> None:
        """Writes a flag after all earlier writes of the stream are visible: the default has a memory fence."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait(self, stream: int, address: int, value: int, equal: bool) -> None:
        """The stream waits until a flag of this device is equal, or is not below."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, (_WAIT_EQUAL if equal else 0) | self._flush)


def _ends_lost_ranks(group: Any) -> bool:
    """Returns whether torch ends the process if a rank is lost (ErrorHandlingMode in ProcessGroupNCCL.hpp)."""
    names = "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT"
    handling, blocking = (os.environ.get(f"TORCH_NCCL_{x}", os.environ.get(f"NCCL_{x}", "")) for x in names)
    return "cuda:nccl" in dist.get_backend_config(group) and handling not in ("0", "2") and blocking in ("", "0")
