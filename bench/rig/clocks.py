"""Measures the multiprocessors' clock rate. The driver reports only averages over milliseconds."""

from __future__ import annotations

import ctypes as c
import functools

from rig import nvrtc

SHARED = 200 << 10  # bytes: forces one block per multiprocessor
SOURCE = """
extern "C" __global__ void look(unsigned long long* to) {
  unsigned sm;
  unsigned long long nanoseconds;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  to[2 * sm] = clock64();
  to[2 * sm + 1] = nanoseconds;
}
"""


@functools.lru_cache(None)
def _looking():
    import torch

    from rig import driver

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    function = driver.Function(nvrtc.compile(SOURCE, "megahertz.cu"), "look", SHARED)
    return sms, function


def look():
    """Reads clock and nanoseconds of each multiprocessor, in stream order."""
    import torch

    sms, function = _looking()
    seen = torch.zeros(sms, 2, dtype=torch.int64, device="cuda")
    to = c.c_void_p(seen.data_ptr())
    function.launch(sms, 1, c.addressof(to))
    return seen


class Clocked:
    """A clock.Timed that records the clock rate in MHz of the median multiprocessor for each window."""

    def __init__(self, timed):
        self.timed, self.megahertz = timed, []

    def window(self) -> float:
        before = look()
        seconds = self.timed.window()
        after = look()
        # a multiprocessor may be missing from a sample
        seen = (after - before)[(before[:, 0] > 0) & (after[:, 0] > 0)].double()
        self.megahertz.append((seen[:, 0] / seen[:, 1]).median().item() * 1e3)
        return seconds
