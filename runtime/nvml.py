"""Energy and driver version from NVML, the library that comes with the driver, without a package for it."""

from __future__ import annotations

import ctypes

LIBRARY = "libnvidia-ml.so.1"
VERSION_LENGTH = 80


class NvmlError(Exception):
    """NVML is not there or refuses; the message says which."""


class Nvml:
    """The device whose UUID is `uuid` (without the prefix `GPU-`). Raises `NvmlError` where it cannot be read."""

    def __init__(self, uuid: str):
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NvmlError(f"the driver's {LIBRARY} is not there") from None
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(f"GPU-{uuid}".encode()), ctypes.byref(self._handle))

    def joules(self) -> float:
        """Energy the device has taken since the driver was loaded. Raises `NvmlError` where it does not count."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(VERSION_LENGTH)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(VERSION_LENGTH))
        return text.value.decode()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NvmlError(f"{name} failed with status {status}")
