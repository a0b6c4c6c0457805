"""What a measurement on a GPU needs besides the work itself: events, energy, memory, and what the machine is."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, Protocol

import torch

from bitnest_format import __version__
from bitnest_format.runtime.nvml import Nvml, NvmlError

Work = Callable[[], None]

# Far more than any level-2 cache, and a whole number of every piece below.
READ_BYTES = 1 << 31
READ_REPEATS = 7
READS = 4
# Words a block, blocks a program, warps: the fastest counts.
READ_TILES = ((4096, 4, 8), (4096, 8, 8), (8192, 2, 8), (2048, 4, 4))


class Instruments(Protocol):
    """Times and weighs work; a measurement is written against this, so that it can be rehearsed without a GPU."""

    def seconds(self, work: Work) -> float:
        """How long the device takes for what `work` enqueues."""

    def joules(self, work: Work) -> float | None:
        """Energy the device takes from the call of `work` until it is done; None where that cannot be read."""

    def captured(self, work: Work) -> Work:
        """`work` as one graph that can be replayed."""

    def read_ceiling(self) -> dict[str, Any]:
        """`bytes_per_second` of a plain read, and how it was found."""

    def free_bytes(self) -> int:
        """Memory that can be allocated now."""

    def release(self) -> None:
        """Give memory that nothing refers to back to the device."""

    def start_peak(self) -> None:
        """Forget the peak of memory so far."""

    def peak_bytes(self) -> int:
        """The most memory allocated since `start_peak`."""

    def machine(self) -> dict[str, Any]:
        """Names and sizes of the device and its driver."""

    def notes(self) -> list[str]:
        """What could not be measured, and why."""


class GpuInstruments:
    """Instruments of one CUDA device, which becomes the current one."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.set_device(device)
        self._nvml: Nvml | None = None
        self._notes: list[str] = []
        try:
            self._nvml = Nvml(str(torch.cuda.get_device_properties(self.device).uuid))
            self._nvml.joules()
        except NvmlError as error:
            self._notes.append(f"no energy figures: {error}")

    def seconds(self, work: Work) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def joules(self, work: Work) -> float | None:
        if self._nvml is None or self._notes:
            return None
        torch.cuda.synchronize(self.device)
        before = self._nvml.joules()
        work()
        torch.cuda.synchronize(self.device)
        return self._nvml.joules() - before

    def captured(self, work: Work) -> Work:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def read_ceiling(self) -> dict[str, Any]:
        from bitnest_format.kernels.read_ceiling import read_sums

        words = READ_BYTES // 4
        source = torch.zeros(words, dtype=torch.int32, device=self.device)
        best: dict[str, Any] = {"bytes_per_second": 0.0}
        for block, blocks, warps in READ_TILES:
            sums = torch.empty(words // (block * blocks), dtype=torch.int32, device=self.device)

            def read(sums: torch.Tensor = sums, block: int = block, blocks: int = blocks, warps: int = warps) -> None:
                for _ in range(READS):
                    read_sums(source, sums, block=block, blocks=blocks, warps=warps)

            read()
            times = [self.seconds(read) for _ in range(READ_REPEATS)]
            rate = READS * READ_BYTES / median(times)
            if rate > best["bytes_per_second"]:
                tile = f"{blocks} x {block} words a program, {warps} warps"
                best = {"bytes_per_second": rate, "buffer_bytes": READ_BYTES, "tile": tile, "seconds": times}
        return best

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def machine(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": None if self._nvml is None else self._nvml.driver(),
            "system": platform.platform(),
        }

    def notes(self) -> list[str]:
        return self._notes


def versions() -> dict[str, str | None]:
    """Of everything that a figure depends on; None for what is not installed."""
    found: dict[str, str | None] = {"bitnest-format": __version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found
