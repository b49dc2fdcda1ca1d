"""The transport of context parallelism over a torch ProcessGroup: the callbacks of tandem_cp_transport."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

_int32, _int64 = ctypes.c_int32, ctypes.c_int64


class _Message(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", _int64), ("peer", _int32), ("reserved", _int32)]


_messages = ctypes.POINTER(_Message)
_Exchange = ctypes.CFUNCTYPE(
    _int32, ctypes.c_void_p, _messages, _int64, _messages, _int64, ctypes.POINTER(ctypes.c_void_p)
)
_Wait = ctypes.CFUNCTYPE(_int32, ctypes.c_void_p, ctypes.c_void_p)
_AllGather = ctypes.CFUNCTYPE(_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, _int64)


class TransportStruct(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("rank", _int32),
        ("ranks", _int32),
        ("user_data", ctypes.c_void_p),
        ("exchange", _Exchange),
        ("wait", _Wait),
        ("all_gather", _AllGather),
        ("last_error", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


def _bytes_at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


class GroupTransport:
    """One rank's connection to a group. An exception of torch is kept, so that the call can raise it."""

    _numbers = itertools.count(1)

    def __init__(self, group: Any) -> None:
        self.group, self.failure = group, None
        self._requests: dict[int, tuple[Any, Any]] = {}
        self._request = itertools.count(1)
        self.struct = TransportStruct(
            ctypes.sizeof(TransportStruct),
            dist.get_rank(group),
            dist.get_world_size(group),
            next(self._numbers),  # the library distinguishes groups by this number
            _Exchange(self._guarded(self._exchange)),
            _Wait(self._guarded(self._wait)),
            _AllGather(self._guarded(self._all_gather)),
        )

    def _guarded(self, function: Any) -> Any:
        def call(_: Any, *arguments: Any) -> int:
            try:
                function(*arguments)
                return 0
            except BaseException as error:  # an exception must not pass through the library
                self.failure = error
                return 1

        return call

    def _exchange(self, sends: Any, send_count: int, receives: Any, receive_count: int, request: Any) -> None:
        # The library releases its buffers when a call fails, and messages may still be in flight then. Therefore
        # torch's tensors hold the messages.
        arriving = [(torch.empty(m.bytes, dtype=torch.uint8), m.data, m.peer) for m in receives[:receive_count]]
        operations = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for x, _, peer in arriving]
        for m in sends[:send_count]:
            x = _bytes_at(m.data, m.bytes).clone()
            operations.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=m.peer))
        number = next(self._request)
        self._requests[number] = dist.batch_isend_irecv(operations), arriving
        request[0] = number

    def _wait(self, request: int) -> None:
        works, arriving = self._requests.pop(request)
        for work in works:
            work.wait()
        for x, address, _ in arriving:
            ctypes.memmove(address, x.data_ptr(), x.numel())

    def _all_gather(self, send: int, receive: int, count: int) -> None:
        parts = [torch.empty(count, dtype=torch.uint8) for _ in range(self.struct.ranks)]
        dist.all_gather(parts, _bytes_at(send, count).clone(), group=self.group)
        for rank, x in enumerate(parts):
            ctypes.memmove(receive + rank * count, x.data_ptr(), count)

    def take_failure(self) -> Any:
        failure, self.failure = self.failure, None
        return failure


class Messages:
    """Tensors on their way between the ranks of a group, in the order of the lists for each pair of ranks. Tensors
    without elements do not travel. With NCCL nothing waits on the host.
    """

    def __init__(
        self, group: Any, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
    ) -> None:
        self._tensors = sends, receives  # alive until they have arrived
        operations = [
            dist.P2POp(function, x, group=group, group_peer=peer)
            for function, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, x in messages
            if x.numel() > 0
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []
        self.on_gpu = bool(operations) and operations[0].tensor.is_cuda

    def wait(self) -> None:
        """With NCCL the current stream waits, else the host."""
        for work in self._works:
            work.wait()


def all_gathered(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Returns the tensors x of all ranks, which have one shape. group None: there is one rank."""
    if group is None:
        return [x]
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def collect(x: torch.Tensor, rows: list[int], dim: int, group: Any) -> list[torch.Tensor]:
    """Returns the shards of all ranks, which have these numbers of rows."""
    padded = x.detach().movedim(dim, 0)
    padded = torch.cat((padded, padded.new_zeros((max(rows) - padded.shape[0], *padded.shape[1:]))))
    return [part[:count].movedim(0, dim) for part, count in zip(all_gathered(padded, group), rows)]


_transports: Any = weakref.WeakKeyDictionary()


def checked_group(group: Any, device: str) -> Any:
    """Returns the group. None: torch's default group. Raises if it does not serve the rank or tensors of the device."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group (without torch.distributed's initialization) must be a process group: call "
            "torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain this process: call context_parallel only on the ranks of the group")
    if torch.device(device) not in group._device_types:
        kind, backend = ("CPU", "gloo") if device == "cpu" else (device.upper(), "nccl")
        raise ValueError(
            f"group ({dist.get_backend(group)}) must have a backend for {kind} tensors: create it with {backend!r}, or "
            "with 'cpu:gloo,cuda:nccl'"
        )
    return group


def transport_of(group: Any) -> GroupTransport:
    """Returns the transport of a group for CPU tensors, which is created once. None: torch's default group."""
    group = checked_group(group, "cpu")
    found = _transports.get(group)
    if found is None:
        found = _transports[group] = GroupTransport(group)
    return found
