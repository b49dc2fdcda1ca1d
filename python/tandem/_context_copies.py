"""Messages between the GPUs of one host, by copies to memory that the ranks share.

Each message of a pass has a region in its receiver's memory and a flag. The sender copies rows to the region and then
writes the pass's number to the flag. The receiver's stream waits for this number before it reads the region.
Every rank issues the writes of a message before waits that follow it, so streams of one hardware queue cannot block
each other. The receiver also writes the number to a flag of each sender after its last read of a pass.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem._context_copies_cuda import CudaDriver, Strip
from tandem._context_transport import all_gathered

# False: messages of the group carry everything. All ranks must have the same value.
ENABLED = True
# The most bytes of a rank's regions. Passes with more use messages of the group.
MOST_BYTES = 2 << 30
MOST_RANKS = 16
# Rows of fewer bytes that are not contiguous are packed first. On H200s rows of 256 bytes are as fast as whole tensors.
NARROW_BYTES = 256
# Parts of the heads in each group. Ranks with fewer bytes of queries for each peer or less attention have one group,
# because the host needs about 4 ms for a group.
PARTS, LEAST_BYTES, LEAST_SECONDS = (1, 2, 1), 64 << 20, 0.02

DRIVERS: dict[str, Any] = {"cuda": CudaDriver}  # by type of device
_ALIGNMENT = 256
_FLAG = 4  # bytes
_FLAGS_BYTES = 1 << 16
_HANDLE_BYTES = 64
_HOST_BYTES = 36


class Layout:
    """The places of a pass's messages in the memory of the receivers, which all ranks compute.

    sizes[message][sender][receiver]: bytes. places: the same. bytes: of the rank with the most.
    """

    def __init__(self, sizes: list[list[list[int]]]) -> None:
        self.sizes, self.places = sizes, []
        ends = [0] * (len(sizes[0]) if sizes else 0)
        for message in sizes:
            self.places.append([])
            for row in message:
                self.places[-1].append(list(ends))
                ends = [end + -(-count // _ALIGNMENT) * _ALIGNMENT for end, count in zip(ends, row)]
        self.bytes = max(ends, default=0)
        # The tensors that arrive at a rank with its memory, which are the same in each pass.
        self.arriving: dict[Any, tuple[Tensor, list[Tensor]]] = {}


def strip_of(x: Tensor, heads: slice) -> Strip | None:
    """Returns heads of all rows of x, (rows, heads, ...). None: an engine would not copy these rows fast."""
    size, strides, inner = x.element_size(), x.stride(), math.prod(x.shape[2:])
    is_compact = strides[1] == inner and (x.dim() == 2 or (strides[2] == 1 and x.dim() == 3))
    width, pitch = (heads.stop - heads.start) * inner * size, strides[0] * size
    if not is_compact or pitch < width or (NARROW_BYTES > width != pitch):
        return None
    return Strip(x.data_ptr() + heads.start * inner * size, pitch, width, x.shape[0])


class Copies:
    """The memory of the ranks of a group on one device. All ranks call the same methods in the same order."""

    def __init__(self, group: Any, driver: Any) -> None:
        self.driver = driver
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [peer for peer in range(self.ranks) if peer != self.rank]
        self.memory: list[int] = []  # addresses by rank
        self.own = torch.empty(0)  # the bytes of this rank's memory
        self.capacity, self.number = 0, 0
        self.current: Pass | None = None
        self.works: deque[Any] = deque()
        self.beat = torch.zeros(1, dtype=torch.int32, device=driver.device)
        self.flags = self._share(group, _FLAGS_BYTES)
        self.serves = self.flags is not None and self._reaches_peers(group)

    @classmethod
    @torch.inference_mode(False)  # calls of all modes write to its tensors
    def opened(cls, group: Any, device: torch.device) -> Copies | None:
        """Returns None on all ranks if a rank does not serve copies."""
        driver = _attempt(DRIVERS[device.type], device, group)
        if not _all(group, device, driver is not None):
            return None
        copies = cls(group, driver)
        if not copies.serves and copies.flags is not None:
            copies._release(group, copies.flags)
        return copies if copies.serves else None

    def _reaches_peers(self, group: Any) -> bool:
        """Tries a flag and a copy to each peer, and clears the flags. Returns the same value on all ranks."""
        driver, (own, expected) = self.driver, (self.flags[self.rank], self.rank + 1)
        source = torch.full((1,), expected, dtype=torch.int32, device=driver.device)

        def write() -> bool:
            with driver.on_device():
                driver.mark()
                for peer in self.peers:
                    stream = driver.copy_stream(peer)
                    driver.write(stream, self.flags[peer] + _FLAG * self.rank, expected)
                    row = Strip(source.data_ptr(), _FLAG, _FLAG, 1)
                    driver.copy(stream, self.flags[peer] + _FLAG * (self.ranks + self.rank), row)
                driver.synchronize()
            return True

        written = _attempt(write) is not None
        if not _all(group, driver.device, written):
            return False
        flags = driver.tensor(own, _FLAGS_BYTES).view(torch.int32)
        numbers = [n + 1 if n != self.rank else 0 for n in range(self.ranks)]
        right = flags[: 2 * self.ranks].tolist() == 2 * numbers
        flags.zero_()
        driver.synchronize()
        return _all(group, driver.device, right)

    def _share(self, group: Any, count: int) -> list[int] | None:
        """Returns the addresses of new memory of all ranks, or None on all ranks."""
        driver = self.driver
        own = _attempt(driver.allocate, count)
        handle = b"" if own is None else _attempt(driver.handle, own) or b""
        text = driver.host().ljust(_HOST_BYTES, b"\0") + handle.ljust(_HANDLE_BYTES, b"\0")
        words = torch.tensor(list(text), dtype=torch.uint8, device=driver.device)
        texts = [bytes(x.tolist()) for x in all_gathered(words, group)]
        hosts, handles = {x[:_HOST_BYTES] for x in texts}, [x[_HOST_BYTES:] for x in texts]
        addresses: list[int | None] = [None] * self.ranks
        if len(hosts) == 1 and all(any(x) for x in handles):
            addresses = [own if n == self.rank else _attempt(driver.open, x) for n, x in enumerate(handles)]
        if _all(group, driver.device, None not in addresses):
            return addresses
        addresses[self.rank] = own
        self._release(group, addresses)
        return None

    def _release(self, group: Any, addresses: list[int | None]) -> None:
        """Frees memory after all ranks have closed it."""
        for peer in self.peers:
            if addresses[peer] is not None:
                _attempt(self.driver.close, addresses[peer])
        _all(group, self.driver.device, True)
        if addresses[self.rank] is not None:
            _attempt(self.driver.free, addresses[self.rank])

    @torch.inference_mode(False)
    def _grow(self, group: Any, count: int) -> None:
        """Waits for the GPU, because peers still write and this rank still reads the old memory."""
        self.driver.synchronize()
        if self.memory:
            self.own = torch.empty(0)
            self._release(group, self.memory)
        capacity = max(count, min(MOST_BYTES, self.capacity * 5 // 4))
        self.memory = self._share(group, capacity) or []
        self.capacity = capacity if self.memory else 0
        if self.memory:
            self.own = self.driver.tensor(self.memory[self.rank], capacity)
        self.serves = bool(self.memory)

    def begin(self, group: Any, layout: Layout) -> Pass | None:
        """Returns None on all ranks if the messages of the pass are too large or too many, or captured in a graph."""
        if self.current is not None:  # an exception ended the call
            self.current.end()
        flags = (len(layout.sizes) + 1) * self.ranks
        if not self.serves or layout.bytes > MOST_BYTES or flags * _FLAG > _FLAGS_BYTES:
            return None
        if self.driver.is_capturing():
            return None
        if layout.bytes > self.capacity:
            self._grow(group, layout.bytes)
            if not self.serves:
                return None
        self.number = (self.number + 1) % 2**32
        self.current = Pass(self, group, layout)
        return self.current


class Pass:
    """The messages of one pass. The flags of a rank have the order of messages and senders; then follow the flags of
    the peers that have read this rank's messages.
    """

    def __init__(self, copies: Copies, group: Any, layout: Layout) -> None:
        self.copies, self.group, self.layout = copies, group, layout
        self.driver, self.rank, self.number = copies.driver, copies.rank, copies.number
        self._sources: list[Any] = []  # alive until the copies have read them
        self._sent: set[int] = set()

    def _flag(self, owner: int, message: int, sender: int) -> int:
        return self.copies.flags[owner] + _FLAG * (message * self.copies.ranks + sender)

    def _has_read(self, owner: int, reader: int) -> int:
        return self.copies.flags[owner] + _FLAGS_BYTES - _FLAG * (reader + 1)

    def send(self, message: int, sends: list[tuple[int, int, list[tuple[int, Strip]]]], tensors: list[Tensor]) -> None:
        """Copies rows of tensors to the peers. sends: peer, bytes, and strips with the places of their first rows."""
        driver, layout = self.driver, self.layout
        self._sources.append(tensors)
        with driver.on_device():
            driver.mark()
            for peer, count, strips in sends:
                if count != layout.sizes[message][self.rank][peer]:
                    raise RuntimeError(f"message {message} ({count} bytes) must have the size of the pass's layout")
                if count == 0:
                    continue
                stream = driver.copy_stream(peer)
                if peer not in self._sent:
                    driver.wait(stream, self._has_read(self.rank, peer), (self.number - 1) % 2**32, False)
                    self._sent.add(peer)
                region = self.copies.memory[peer] + layout.places[message][self.rank][peer]
                for place, strip in strips:
                    if strip.width * strip.height > 0:
                        driver.copy(stream, region + place, strip)
                driver.write(stream, self._flag(peer, message, self.rank), self.number)

    def arriving(self, message: int, sender: int, views: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Returns the tensors of a message that arrives. views(bytes): the tensors in the bytes of the message."""
        key, own = (message, sender, self.rank), self.copies.own
        found = self.layout.arriving.get(key)
        if found is None or found[0] is not own:
            place = self.layout.places[message][sender][self.rank]
            count = self.layout.sizes[message][sender][self.rank]
            with torch.inference_mode(False):
                found = self.layout.arriving[key] = own, views(own[place : place + count])
        return found[1]

    def wait(self, message: int) -> None:
        """The current stream waits for a message of all peers."""
        with self.driver.on_device():
            stream = self.driver.current_stream()
            for peer in self.copies.peers:
                if self.layout.sizes[message][peer][self.rank] > 0:
                    self.driver.wait(stream, self._flag(self.rank, message, peer), self.number, True)

    def end(self) -> None:
        """Follows the last read of the regions.

        torch watches the collective: if a rank is lost, the collective does not end and torch ends the process after
        the group's timeout. No wait of this module lasts longer.
        """
        copies = self.copies
        with self.driver.on_device():
            stream = self.driver.current_stream()
            for peer in copies.peers:
                self.driver.write(stream, self._has_read(peer, self.rank), self.number)
            self.driver.join()
        self._sources.clear()
        copies.works.append(dist.all_reduce(copies.beat, group=self.group, async_op=True))
        if len(copies.works) > 2:
            copies.works.popleft().wait()
        copies.current = None


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns None if the driver refuses."""
    try:
        return function(*arguments)
    except (RuntimeError, OSError, AttributeError):  # AttributeError: an old driver lacks a function
        return None


def _all(group: Any, device: torch.device, value: bool) -> bool:
    """Returns whether the value is True on all ranks. All ranks have then called this."""
    own = torch.tensor([int(value)], device=device)
    return all(x.item() for x in all_gathered(own, group))


# Copies or None by device, for each group. Memory that peers have opened lives as long as the process.
_copies: Any = weakref.WeakKeyDictionary()


def copies_of(group: Any, device: torch.device) -> Copies | None:
    """Returns the copies of a group, which are opened once. None on all ranks: messages of the group carry everything.
    A captured call opens no copies, and it has the groups of heads of a call that copies serve.
    """
    if not _may_serve(group, device):
        return None
    opened = _copies.setdefault(group, {})
    if device not in opened:
        if DRIVERS[device.type].is_capturing():
            return None
        opened[device] = Copies.opened(group, device)
    found = opened[device]
    return found if found is not None and found.serves else None


def _may_serve(group: Any, device: torch.device) -> bool:
    return ENABLED and device.type in DRIVERS and dist.get_world_size(group) <= MOST_RANKS


def is_served(group: Any, device: torch.device) -> bool:
    """Returns whether copies serve the group, equally on all ranks. Before they are opened, one host is assumed."""
    if not _may_serve(group, device):
        return False
    opened = _copies.get(group, {})
    return device not in opened or (opened[device] is not None and opened[device].serves)


def parts_of(count: float, seconds: float, key_heads: int) -> tuple[int, ...]:
    """Returns the parts of a rank's heads in each group. count: bytes of the rank's queries for each peer. seconds: of
    the rank's attention in both passes.
    """
    is_large = count >= LEAST_BYTES and seconds >= LEAST_SECONDS
    return PARTS if is_large and key_heads >= sum(PARTS) else (1,)
