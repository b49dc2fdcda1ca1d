"""Copies of context parallelism without GPUs: a driver whose memory is a file that processes share, and its cases.

Every call of this driver ends before it returns, as if all streams of a process were one.
"""

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from unittest import mock

import torch
from context_drop_ins import expect_error

import tandem
from tandem import _context_copies, _context_heads


class FileDriver:
    """Has the methods of CudaDriver for tensors of the CPU."""

    SECONDS = 60
    refused = ()  # names of methods that fail
    capturing = False

    def __init__(self, device, group):
        self._expect("create")
        self.device, self._maps, self._files = device, {}, {}
        self.copies, self.counts = 0, []

    def _expect(self, name):
        if name in self.refused:
            raise RuntimeError(f"{name} is refused")

    @classmethod
    def is_capturing(cls):
        return cls.capturing

    def host(self):
        return b"host" + (str(os.getpid()).encode() if "host" in self.refused else b"")

    on_device = staticmethod(contextlib.nullcontext)

    def synchronize(self):
        self._expect("synchronize")

    def _map(self, name, count):
        with open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address

    def allocate(self, count):
        self._expect("allocate")
        self.counts.append(count)
        file, name = tempfile.mkstemp(prefix="copies")
        os.ftruncate(file, count)
        os.close(file)
        self.files.add(name)
        address = self._map(name, count)
        self._files[address] = name
        return address

    def handle(self, address):
        return self._files[address].encode()

    def open(self, handle):
        self._expect("open")
        name = handle.rstrip(b"\0").decode()
        return self._map(name, os.path.getsize(name))

    def close(self, address):
        del self._maps[address]

    def free(self, address):
        self.files.remove(self._files[address])
        os.unlink(self._files.pop(address))
        del self._maps[address]

    def tensor(self, address, count):
        return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)

    def current_stream(self):
        return 0

    def copy_stream(self, peer):
        return peer

    def join(self):
        pass

    def mark(self):
        pass

    def copy(self, stream, to, strip):
        self._expect("copy")
        self.copies += 1
        address, pitch, width, height = strip
        for n in range(height):
            ctypes.memmove(to + n * width, address + n * pitch, width)

    def write(self, stream, address, value):
        self._expect("write")
        ctypes.c_uint32.from_address(address).value = value

    def wait(self, stream, address, value, equal):
        flag, end = ctypes.c_uint32.from_address(address), time.monotonic() + self.SECONDS
        while flag.value != value if equal else (flag.value - value) % 2**32 >= 2**31:
            if time.monotonic() > end:
                raise TimeoutError(f"a flag ({flag.value}) must become {value}")
            time.sleep(0)

    def remove_files(self):
        for address in [*self._files]:
            self.free(address)


def copies_of(group):
    return _context_copies._copies.get(group, {}).get(torch.device("cpu"))


@contextlib.contextmanager
def file_copies(group, refused=(), **constants):
    """Copies serve CPU tensors of the group. refused: methods that fail on this rank. Yields the driver's class."""

    class Driver(FileDriver):
        files = set()

    Driver.refused = refused
    _context_copies._copies.pop(group, None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(_context_copies.DRIVERS, {"cpu": Driver}))
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(_context_copies, name, value))
        try:
            yield Driver
        finally:
            found = copies_of(group)
            torch.distributed.barrier(group)
            if found is not None:
                found.driver.remove_files()
            assert not Driver.files
            _context_copies._copies.pop(group, None)


def check_bits(r, attend):
    """Copies have the bits of messages, while problems of several sizes alternate."""
    group, mask = torch.distributed.group.WORLD, {"causal": True, "window": (30, None)}
    problems = []
    for n, layout in enumerate(("balanced", "striped", "zigzag", "contiguous")):
        lengths = [41 + 20 * n, 0, 1, 26]
        heads, dims = ((24, 12), (16, 8)) if n % 2 else ((4, 2), (24, 16))
        plan = tandem.ContextPlan(lengths, r.ranks, layout=layout, **mask)
        options = {"execution": "heads", "attend": attend, "sink": r.random(heads[0]) if n % 2 else None}
        batch = r.batch(lengths, heads, dims)
        problems.append((plan, batch, options, r.run(plan, batch, **options)))
    with file_copies(group, LEAST_BYTES=1, LEAST_SECONDS=0):
        with torch.inference_mode():
            plan, batch, options, expected = problems[0]
            qkv = [plan.shard(x, r.rank) for x in batch[:3]]
            out = attend(*qkv, plan=plan, execution="heads", sink=options["sink"])[0]
            assert torch.equal(out, expected[0])
        for n in range(20):
            plan, batch, options, expected = problems[(n * 3 + n // 4) % 4]
            for narrow in (1, 4096):
                with mock.patch.object(_context_copies, "NARROW_BYTES", narrow):
                    results = r.run(plan, batch, **options)
                assert all(torch.equal(x, y) for x, y in zip(results, expected)), f"pass {n}, {plan!r}"
        copies = copies_of(group)
        assert copies.number == 1 + 2 * 2 * 20 and copies.driver.copies > 0
        # The memory of the flags, and of the regions before and after a larger problem.
        assert len(copies.driver.counts) > 2 and copies.capacity == copies.driver.counts[-1]
        assert len(copies.driver._files) == 2 and len(copies.driver._maps) == 2 * r.ranks
        _without_copies(r, problems[1], copies)
        _after_an_error(r, problems[1])


def _without_copies(r, problem, copies):
    """Passes that copies do not serve have the bits of messages."""
    plan, batch, options, expected = problem
    number = copies.number
    driver = mock.patch.object(type(copies.driver), "capturing", True)
    for patch in (
        driver,
        mock.patch.object(_context_copies, "MOST_BYTES", 64),
        mock.patch.object(_context_copies, "ENABLED", False),
    ):
        with patch:
            if patch is driver:
                found = _context_copies.copies_of(torch.distributed.group.WORLD, torch.device("cpu"))
                assert found is copies  # the same groups of heads
            assert all(torch.equal(x, y) for x, y in zip(r.run(plan, batch, **options), expected))
    # The backward has the groups of its forward.
    q, k, v, dout = (plan.shard(x, r.rank) for x in batch[:4])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = options["attend"](*inputs, plan=plan, execution="heads", sink=options["sink"], return_lse=True)
    with mock.patch.object(_context_copies, "ENABLED", False):
        loss = (out * dout).sum() + (lse * plan.shard(batch[4], r.rank, dim=1)).sum()
        gradients = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected[2:5]))
    assert copies.number == number + 1


def _after_an_error(r, problem):
    """A pass that ends by an error on all ranks does not change later passes."""
    plan, batch, options, expected = problem
    with mock.patch.object(_context_heads.Transfer, "wait", side_effect=MemoryError):
        expect_error(MemoryError, "", r.run, plan, batch, **options)
    assert all(torch.equal(x, y) for x, y in zip(r.run(plan, batch, **options), expected))


def check_refusals(r, attend):
    """If one rank does not serve copies, all ranks use messages."""
    group = torch.distributed.group.WORLD
    plan, batch = tandem.ContextPlan([41, 26], r.ranks, causal=True), r.batch([41, 26])
    options = {"execution": "heads", "attend": attend}
    expected = r.run(plan, batch, **options)
    for refused in ("create", "host", "allocate", "open", "write", "copy"):
        with file_copies(group, [refused] if r.rank == r.ranks - 1 else ()):
            assert all(torch.equal(x, y) for x, y in zip(r.run(plan, batch, **options), expected)), refused
            assert copies_of(group) is None
    for refused in ("allocate", "open"):  # after the flags are open
        with file_copies(group) as driver:
            assert _context_copies.copies_of(group, torch.device("cpu")).serves
            driver.refused = [refused] if r.rank == r.ranks - 1 else ()
            assert all(torch.equal(x, y) for x, y in zip(r.run(plan, batch, **options), expected)), refused
            assert not copies_of(group).serves
    with file_copies(group, MOST_RANKS=1):
        assert _context_copies.copies_of(group, torch.device("cpu")) is None
