"""Times kernels one by one, inside a graph and over buffers that no cache can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from bitnest_format.runtime.bench import rate
from bitnest_format.runtime.instruments import Instruments

# Copies of a kernel's inputs together are at least this large: several times the level-2 cache of an H200.
ROTATION_BYTES = 256 << 20
LEAST_LAUNCHES = 64
BLOCK_SECONDS = 0.02
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A kernel with inputs. `bytes` that one launch reads, `copies` of its large inputs, `launch(copy)` enqueues it."""

    name: str
    bytes: int
    copies: int
    launch: Callable[[int], None]


def time_kernels(
    kernels: Iterable[TimedKernel], instruments: Instruments, ceiling: float, repeats: int
) -> list[dict[str, Any]]:
    """Seconds of one launch of each kernel, and the share of the read ceiling that it reaches.

    Kernels are made one at a time, so `kernels` may be a generator that frees what it made before.
    """
    return [_time(kernel, instruments, ceiling, repeats) for kernel in kernels]


def _time(kernel: TimedKernel, instruments: Instruments, ceiling: float, repeats: int) -> dict[str, Any]:
    launches = kernel.copies * max(1, -(-LEAST_LAUNCHES // kernel.copies))

    def rounds() -> None:
        for number in range(launches):
            kernel.launch(number % kernel.copies)

    replay = instruments.captured(rounds)
    once = max(instruments.seconds(replay) for _ in range(WARM_UPS))
    replays = max(1, int(BLOCK_SECONDS / once))

    def block() -> None:
        for _ in range(replays):
            replay()

    times = [instruments.seconds(block) / (replays * launches) for _ in range(repeats)]
    seconds = median(times)
    return {
        "name": kernel.name,
        "seconds": seconds,
        "bytes": kernel.bytes,
        **rate(kernel.bytes, seconds, ceiling),
        "copies": kernel.copies,
        "blocks": times,
    }
