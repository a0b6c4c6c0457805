"""Chooses tiles and settings by what they do to whole passes of a model, on one GPU.

python benchmarks/gpu_tiles.py llama-3-8b --context 2048

One choice after another: how attention cuts the cache, the settings of the small kernels, then the tile of every
stacked matrix for each view. Each value is timed beside what was kept so far, in turns: a draft step, a target step and
a verify pass. It is kept where a round of gamma drafts and a verify pass becomes shorter. Random weights. Kernels of
tiles are compiled by several processes before anything is timed. A kernel alone is no measure: kernels overlap their
neighbours (`gpu-log.md`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bitnest_format.architecture import read_architecture
from bitnest_format.errors import BitnestError
from bitnest_format.kernels import activation, attention, dual_plane, operands
from bitnest_format.kernels.dual_plane import MmaTile, Tile
from bitnest_format.kernels.operands import Activations, DualPlaneWeight, Splits, View, scale_pairs
from bitnest_format.runtime.bench_request import find_gpu
from bitnest_format.runtime.engine import Engine, random_engines
from bitnest_format.runtime.kernel_cases import stacked_shapes
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.shapes import SHAPES, shape_config

Walk = Tile | MmaTile

DRAFT_WALKS: tuple[Walk, ...] = (
    Tile(4, 256, 1, True),
    Tile(4, 256, 2, True),
    Tile(8, 256, 2, True),
    Tile(4, 512, 2, True),
    Tile(4, 512, 4, True),
    Tile(8, 512, 4, True),
    Tile(4, 1024, 8, True),
)
TARGET_WALKS: tuple[Walk, ...] = (
    Tile(2, 256, 1, True),
    Tile(2, 256, 1, False),
    Tile(4, 512, 4, True),
    Tile(8, 512, 4, True),
    MmaTile(1, 8),
    MmaTile(2, 4),
    MmaTile(2, 8),
    MmaTile(4, 4),
    MmaTile(4, 8),
)
PHASES = ("draft", "target", "verify")
# A gain of a round below this is noise.
LEAST_GAIN = 0.002
ROOM, REPEATS, TIMES = 16, 4, 12
# Products that add to what stands in their output.
ADDED = ("o", "down")


@dataclass(frozen=True)
class Choice:
    """Something to choose: `key` is a module's attribute, or a matrix `(outputs, inputs)` and a view."""

    name: str
    key: tuple[Any, str]
    values: Sequence[Any]
    labels: Sequence[Any] = ()

    def label(self, number: int) -> str:
        return str((self.labels or self.values)[number])


def choices(matrices: Sequence[tuple[str, int, int]], only: str | None) -> Iterator[Choice]:
    """All choices, the coarse ones first."""
    if only != "tiles":
        cuts = (Splits(16, 128, 512), Splits(8, 256, 512), Splits(8, 256, 1280), Splits(4, 512, 1024))
        yield Choice("cut", (operands, "best_splits"), [_always(cut) for cut in cuts], cuts)
        counts = (2, 3, 4)
        yield Choice("stages of attention", (attention, "stages"), [_always(count) for count in counts], counts)
        yield Choice("registers of attention", (attention, "NARROW_REGISTERS"), (128, 168, 255))
        yield Choice("merging warps", (attention, "MERGING_WARPS"), (1, 2, 4, 8))
        yield Choice("splits merged at a step", (attention, "MERGED_SPLITS"), (8, 16, 32))
        rules = [_scaled(activation._warps, most) for most in (8, 16, 32)]
        yield Choice("quantizing warps", (activation, "_warps"), rules, (8, 16, 32))
    if only != "settings":
        for view, walks in (("draft", DRAFT_WALKS), ("target", TARGET_WALKS)):
            for name, outputs, inputs in matrices:
                yield Choice(f"{name}, {view}", ((outputs, inputs), view), walks)


def _always(value: Any) -> Callable[[int], Any]:
    """A rule of one number that does not look at it."""
    return lambda _: value


def _scaled(warps: Callable[[int], int], most: int) -> Callable[[int], int]:
    """A rule for warps whose largest number is 16, with another largest number."""
    return lambda columns: max(1, min(32, warps(columns) * most // 16))


@contextmanager
def applied(setup: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Put chosen values in place for the length of a block."""
    walks = {key: value for key, value in setup.items() if isinstance(key[0], tuple)}
    usual = dual_plane.tile

    def tile(weight: DualPlaneWeight, view: View) -> Walk:
        return walks.get(((weight.outputs, weight.inputs), view)) or usual(weight, view)

    changes = [(*key, value) for key, value in setup.items() if key not in walks] + [(dual_plane, "tile", tile)]
    kept = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


class Trial:
    """Two pairs of engines over the same weights: one as it was kept, one in which something is tried."""

    def __init__(self, shape: str, context: int, gamma: int, device: torch.device):
        self.context, self.gamma, self.device = context, gamma, device
        made = random_engines(
            shape_config(shape, context + 64),
            modes=("nested",),
            gamma=gamma,
            capacity=context + 64,
            acceptance=1.0,
            quantized_head=False,
            kv=KvSettings(),
            device=device,
        )["nested"]
        self.weights, self.ops = made.weights, made.ops
        del made
        self.keep()

    def keep(self) -> None:
        """What is in place now is what others are compared with."""
        self.kept = self._engines()

    def _engines(self) -> dict[str, Engine]:
        """New engines, for buffers depend on settings too; a target engine verifies one row, which is its step."""
        found = {
            mode: Engine(
                self.weights,
                self.ops,
                mode=mode,  # type: ignore[arg-type]
                capacity=self.context + 64,
                gamma=self.gamma,
                device=self.device,
            )
            for mode in ("nested", "target")
        }
        for engine in found.values():
            engine.set_context(self.context)
        for phase in PHASES:
            _replay(found, phase, 1)
        return found

    def compare(self) -> dict[str, tuple[float, float]]:
        """Seconds of each pass as it was kept, and as it is with what is in place now."""
        tried = self._engines()
        found = {}
        for phase in PHASES:
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(REPEATS):
                for seconds, side in zip(times, (self.kept, tried), strict=True):
                    seconds.append(_timed(partial(_replay, side, phase, TIMES)) / TIMES)
            found[phase] = (median(times[0]), median(times[1]))
        return found


def _replay(side: Mapping[str, Engine], phase: str, times: int) -> None:
    # A target engine verifies one row: that is its step.
    side["target" if phase == "target" else "nested"].replay_phase("draft" if phase == "draft" else "verify", times)


def _timed(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: %(default)s)")
    parser.add_argument("--only", choices=("tiles", "settings"), help="choose these alone")
    parser.add_argument("--json", type=Path, help="write every figure here, after each")
    options = parser.parse_args(arguments)
    device = find_gpu("cuda")
    matrices = stacked_shapes(read_architecture(shape_config(options.shape)))
    if options.only != "settings":
        _compile_all(matrices, options.gamma + 1, options.processes)
    trial = Trial(options.shape, options.context, options.gamma, device)
    rows: list[dict[str, Any]] = []

    def measured(name: str, setup: Mapping[tuple[Any, str], Any]) -> float:
        """How long a round takes with a setup, as a share of what it takes with what was kept."""
        with applied(setup):
            found = trial.compare()
        rows.append({"name": name} | {phase: [round(1e6 * value, 1) for value in found[phase]] for phase in PHASES})
        before, after = (options.gamma * found["draft"][side] + found["verify"][side] for side in (0, 1))
        rows[-1]["round"] = [round(1e6 * before, 1), round(1e6 * after, 1)]
        print(_line(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return after / before

    print(TITLE)
    kept: dict[tuple[Any, str], Any] = {}
    labels: dict[str, str] = {}
    for choice in choices(matrices, options.only):
        shares = [
            measured(f"{choice.name}: {choice.label(number)}", {**kept, choice.key: value})
            for number, value in enumerate(choice.values)
        ]
        best = min(range(len(shares)), key=shares.__getitem__)
        if shares[best] < 1 - LEAST_GAIN:
            kept[choice.key], labels[choice.name] = choice.values[best], choice.label(best)
            with applied(kept):
                trial.keep()
    trial.keep()
    measured("all that was kept", kept)
    print("\n".join(f"{name}: {label}" for name, label in labels.items()))


TITLE = "| tried | draft, us | target, us | verify, us | round, us |\n|---|---|---|---|---|"


def _line(row: Mapping[str, Any]) -> str:
    cells = (
        f"{after:.0f} ({after / before - 1:+.1%})" for before, after in (row[phase] for phase in (*PHASES, "round"))
    )
    return f"| {row['name']} | {' | '.join(cells)} |"


def _compile_all(matrices: Sequence[tuple[str, int, int]], rows: int, processes: int) -> None:
    jobs: list[tuple[str, int, View, int, Walk]] = []
    for name, _, inputs in matrices:
        jobs += [(name, inputs, "draft", 1, walk) for walk in DRAFT_WALKS]
        jobs += [(name, inputs, "target", count, walk) for walk in TARGET_WALKS for count in (1, rows)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def compile_one(job: tuple[str, int, View, int, Walk]) -> None:
    """Compile a kernel by launching it on a few rows; the result lands in Triton's cache."""
    name, inputs, view, rows, walk = job
    weight = random_weight(64, inputs)
    dual_plane.tile = lambda *_: walk
    acts = Activations.empty(ROOM, inputs, "cuda")
    for tensor in (acts.codes, acts.scale, acts.sums):
        tensor.zero_()
    out = torch.zeros(ROOM, 64, device="cuda")
    if name == "gate_up":
        dual_plane.dual_plane_gate_up(acts, weight, view, out[:, :32].contiguous(), rows)
    else:
        dual_plane.dual_plane_linear(acts, weight, view, out, rows, add=name in ADDED)
    torch.cuda.synchronize()


def random_weight(outputs: int, inputs: int, group_size: int = 128) -> DualPlaneWeight:
    planes = torch.randint(-(2**31), 2**31, (2, outputs, inputs // 8), dtype=torch.int32, device="cuda")
    scale = (torch.rand(outputs, inputs // group_size, device="cuda") * 0.01 + 0.001).half()
    return DualPlaneWeight(planes[0], planes[1], scale, scale_pairs=scale_pairs(scale, group_size))


if __name__ == "__main__":
    try:
        main()
    except BitnestError as error:
        sys.exit(f"Error: {error}")
