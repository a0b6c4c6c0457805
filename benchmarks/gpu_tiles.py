"""Times the products' tiles on one GPU, over weights that rotate through memory, inside graphs as decoding runs them.

python benchmarks/gpu_tiles.py --shape llama-3-8b

For every stacked matrix of a shape: microseconds and share of the plain read's speed, for a draft's row, a target's row
and a verify pass, the fastest tiles first. The chosen ones stand in `dual_plane.tile`. Kernels are compiled by several
processes before anything is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from bitnest_format.architecture import read_architecture
from bitnest_format.errors import BitnestError
from bitnest_format.kernels import dual_plane
from bitnest_format.kernels.dual_plane import MmaTile, Tile
from bitnest_format.kernels.operands import Activations, DualPlaneWeight, View, scale_pairs
from bitnest_format.runtime.bench_request import find_gpu
from bitnest_format.runtime.instruments import GpuInstruments
from bitnest_format.runtime.kernel_cases import stacked_shapes
from bitnest_format.runtime.shapes import SHAPES, shape_config

WALKS: tuple[Tile | MmaTile, ...] = (
    Tile(4, 128, 1, True),
    Tile(2, 256, 1, True),
    Tile(2, 256, 1, False),
    Tile(4, 256, 1, True),
    Tile(4, 256, 2, True),
    Tile(4, 512, 1, True),
    Tile(4, 512, 2, True),
    Tile(4, 512, 4, True),
    Tile(8, 512, 4, True),
    Tile(4, 1024, 8, True),
    MmaTile(2, 8),
    MmaTile(4, 8),
    MmaTile(4, 4),
    MmaTile(2, 4),
)
ROOM, ROTATION, REPEATS, REPLAYS = 16, 512 << 20, 5, 5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: %(default)s)")
    options = parser.parse_args(arguments)
    device = find_gpu("cuda")
    shapes = stacked_shapes(read_architecture(shape_config(options.shape)))
    passes: list[tuple[View, int]] = [("draft", 1), ("target", 1), ("target", options.gamma + 1)]
    jobs = [(matrix, view, rows, walk) for matrix in shapes for view, rows in passes for walk in WALKS]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    ceiling = GpuInstruments(device).read_ceiling()["bytes_per_second"]
    print(f"read ceiling {ceiling / 1e12:.2f} TB/s")
    for name, outputs, inputs in shapes:
        weights = [random_weight(outputs, inputs) for _ in range(-(-ROTATION // (outputs * inputs // 2)))]
        for view, rows in passes:
            read = weights[0].base.nbytes * (1 if view == "draft" else 2) + weights[0].scale.nbytes
            found = sorted(((time_walk(weights, view, rows, walk), walk) for walk in WALKS), key=lambda pair: pair[0])
            cells = [f"{walk} {1e6 * taken:.1f} us ({read / taken / ceiling:.0%})" for taken, walk in found[:5]]
            print(f"{name}, {view}, {rows} rows: " + "; ".join(cells), flush=True)


def compile_one(job: tuple[tuple[str, int, int], View, int, Tile | MmaTile]) -> None:
    """Compile a kernel by launching it on a few rows; the result lands in Triton's cache."""
    (_, _, inputs), view, rows, walk = job
    launch([random_weight(64, inputs)], view, rows, walk, *operands(64, inputs))
    torch.cuda.synchronize()


def time_walk(weights: Sequence[DualPlaneWeight], view: View, rows: int, walk: Tile | MmaTile) -> float:
    """Seconds of one product, from a graph of one for every weight."""
    acts, out = operands(weights[0].outputs, weights[0].inputs)
    replay = captured(lambda: launch(weights, view, rows, walk, acts, out))
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / REPLAYS / len(weights))
    return median(times)


def launch(
    weights: Sequence[DualPlaneWeight], view: View, rows: int, walk: Tile | MmaTile, acts: Activations, out: Tensor
) -> None:
    """Enqueue the product with every weight, by one walk."""
    for weight in weights:
        dual_plane.launch_linear(acts, weight, view, out, rows, walk)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """`work` as a graph, run once before so that nothing is compiled while it is captured."""
    return GpuInstruments(torch.device("cuda")).captured(work)


def operands(outputs: int, inputs: int) -> tuple[Activations, Tensor]:
    acts = Activations.empty(ROOM, inputs, "cuda")
    acts.codes.random_(-127, 128)
    acts.scale.uniform_(0.001, 0.01)
    acts.sums.copy_(acts.codes.transpose(1, 2).reshape(ROOM, -1, 32).sum(dim=-1, dtype=torch.int32))
    return acts, torch.zeros(ROOM, outputs, device="cuda")


def random_weight(outputs: int, inputs: int, group_size: int = 128) -> DualPlaneWeight:
    planes = torch.randint(-(2**31), 2**31, (2, outputs, inputs // 8), dtype=torch.int32, device="cuda")
    scale = (torch.rand(outputs, inputs // group_size, device="cuda") * 0.01 + 0.001).half()
    return DualPlaneWeight(planes[0], planes[1], scale, scale_pairs=scale_pairs(scale, group_size))


if __name__ == "__main__":
    try:
        main()
    except BitnestError as error:
        sys.exit(f"Error: {error}")
