"""Times decode attention on one GPU for several ways to cut the cache into splits, merging included.

python benchmarks/gpu_attention.py --contexts 2048 8192 32768

For every number of KV heads, context and pass: microseconds of one layer's `attend` and of `attend` with `combine`,
from graphs over distinct caches, for each candidate. The chosen ones stand in `kernels.operands`. Kernels are compiled
by several processes before anything is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bitnest_format.errors import BitnestError
from bitnest_format.kernels import attention
from bitnest_format.kernels.operands import AttentionShape, KvPlanes, Partials, Rope, Splits
from bitnest_format.runtime.bench_request import find_gpu
from bitnest_format.runtime.instruments import GpuInstruments
from bitnest_format.runtime.kernel_bench import TimedKernel, time_kernels

CANDIDATES = (
    Splits(16, 128, 512),
    Splits(16, 128, 1024),
    Splits(8, 256, 512),
    Splits(8, 256, 1024),
    Splits(8, 256, 1280),
    Splits(8, 256, 2048),
    Splits(4, 512, 1024),
)
# Query heads of each number of KV heads, all of 128 elements.
HEADS = {32: 32, 8: 32}
SIZE, ROOM, LAYERS = 128, 5, 8


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to time: `kind` is `draft`, `target` or `half`."""

    kv_heads: int
    kind: str
    rows: int
    splits: Splits

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(HEADS[self.kv_heads], self.kv_heads, SIZE, cut=self.splits)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device = find_gpu("cuda")
    passes = (("draft", 1), ("target", 1), ("target", ROOM), ("half", 1))
    jobs = [Job(heads, kind, rows, cut) for heads in HEADS for kind, rows in passes for cut in CANDIDATES]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    for length in options.contexts:
        for kv_heads in HEADS:
            for kind, rows in passes:
                print(f"{kv_heads} KV heads, {length} entries, {kind}, {rows} rows:", flush=True)
                for cut in CANDIDATES:
                    alone, merged = seconds(Job(kv_heads, kind, rows, cut), length, device, options.repeats)
                    print(f"  {cut.shorts} x {cut.short}, {cut.long}: {1e6 * alone:.1f} us, {1e6 * merged:.1f} merged")


def compile_one(job: Job) -> None:
    """Compile a kernel by launching it over a short cache; the result lands in Triton's cache."""
    attend, combine = launches(job, 256, torch.device("cuda"), layers=1)
    attend(0)
    combine()
    torch.cuda.synchronize()


def seconds(job: Job, length: int, device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds of `attend` and of `attend` and `combine`."""
    attend, combine = launches(job, length, device, LAYERS)

    def both(layer: int) -> None:
        attend(layer)
        combine()

    kernels = [TimedKernel("attend", 1, LAYERS, attend), TimedKernel("merged", 1, LAYERS, both)]
    alone, merged = time_kernels(kernels, GpuInstruments(device), 1.0, repeats)
    return alone["seconds"], merged["seconds"]


def launches(
    job: Job, length: int, device: torch.device, layers: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Functions that enqueue attention over the cache of a layer, and the merging of its splits."""
    shape, rows = job.shape, job.rows
    capacity = length + ROOM
    position = torch.tensor([length - 1], dtype=torch.int32, device=device)
    rope = Rope(*(torch.rand(capacity, SIZE // 2, device=device) for _ in range(2)))
    partials = Partials.empty(rows, shape, capacity, device)
    if job.kind == "half":
        qkv = torch.randn(rows, shape.projections, device=device).half()
        halves = [torch.randn(2, shape.kv_heads, capacity, SIZE, device=device).half() for _ in range(layers)]
        out = torch.empty(rows, shape.heads * SIZE, dtype=torch.float16, device=device)

        def attend_half(layer: int) -> None:
            attention.attend_half(qkv, rope, position, 0, *halves[layer], shape, partials, rows)

        return attend_half, lambda: attention.combine_half(partials, position, 0, shape, out, rows)
    qkv = torch.randn(rows, shape.projections, device=device)
    caches = [
        KvPlanes(
            torch.randint(0, 256, (2, 2, shape.kv_heads, capacity, SIZE // 2), dtype=torch.uint8, device=device),
            torch.rand(2, shape.kv_heads, capacity, device=device),
        )
        for _ in range(layers)
    ]

    def attend(layer: int) -> None:
        attention.attend(
            qkv, None, rope, position, 0, caches[layer], shape, partials, rows,
            draft=job.kind == "draft", kv_switch=0, kv_recent=128,
        )  # fmt: skip

    return attend, lambda: attention.combine(partials, position, 0, shape, partials.merged, rows)


if __name__ == "__main__":
    try:
        main()
    except BitnestError as error:
        sys.exit(f"Error: {error}")
