"""Reads the state of a GPU from NVML (pip install nvidia-ml-py): the clock of its SMs and its power."""

from __future__ import annotations


class Card:
    """Samples the state and records it by name. Without NVML this class records nothing, and `absent` has the
    reason."""

    def __init__(self, uuid: str):
        self.absent, self.mhz, self.watts = None, {}, {}
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self.look("")
        except Exception as why:  # the package, the library or the permission is missing
            self.absent = f"{type(why).__name__}: {why}"
        self.forget()

    def forget(self) -> None:
        self.mhz, self.watts = {}, {}

    def look(self, name: str) -> None:
        if self.absent:
            return
        nvml = self._nvml
        self.mhz.setdefault(name, []).append(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        self.watts.setdefault(name, []).append(self._power())

    def _power(self) -> float:
        """Returns the present value if the GPU reports it, else its average over the last second."""
        nvml = self._nvml
        field = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if field.nvmlReturn == nvml.NVML_SUCCESS:
            return field.value.uiVal * 1e-3
        return nvml.nvmlDeviceGetPowerUsage(self._handle) * 1e-3
