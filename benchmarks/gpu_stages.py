"""Where the time of a pass goes: it is timed again and again with one kind of node left out.

python benchmarks/gpu_stages.py llama-3-8b --context 2048

What leaving a stage out saves is not what it takes alone: nodes overlap, since each loads its weights while those
before it still run. What no stage accounts for is waiting between nodes. Random weights; needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from bitnest_format.errors import BitnestError
from bitnest_format.kernels.launch import without_pdl
from bitnest_format.runtime.bench_request import find_gpu
from bitnest_format.runtime.engine import Engine, random_engines
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.shapes import SHAPES, shape_config

# Stages by the family of operations and the functions that belong to them.
STAGES = {
    "norms": ("activation", ("norm_quantize",)),
    "quantize": ("activation", ("quantize",)),
    "attention": ("attention", ("attend",)),
    "merging of splits": ("attention", ("combine",)),
    "gate and up": ("dual_plane", ("dual_plane_gate_up",)),
    "other products": ("dual_plane", ("dual_plane_linear",)),
    "head": ("head", ("head_argmax",)),
    "nested head": ("dual_plane", ("dual_plane_argmax",)),
    "choice of the token": ("accept", ("stage_draft",)),
}
REPEATS, PASSES = 5, 20


class Without:
    """A module of operations of which some do nothing."""

    def __init__(self, module: Any, names: Sequence[str]):
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return _nothing if name in self._names else getattr(self._module, name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--quantized-head", action="store_true")
    options = parser.parse_args(arguments)
    device = find_gpu("cuda")
    engine = random_engines(
        shape_config(options.shape, options.context + 64),
        modes=("nested",),
        gamma=options.gamma,
        capacity=options.context + 64,
        acceptance=1.0,
        quantized_head=options.quantized_head,
        kv=KvSettings(),
        device=device,
    )["nested"]
    engine.set_context(options.context)
    print("| pass | all nodes | " + " | ".join(f"no {stage}" for stage in STAGES) + " | no overlap |")
    print("|---|" + "---|" * (len(STAGES) + 2))
    for phase in ("draft", "verify"):
        whole = seconds(engine, phase)
        saved = [whole - seconds_without(engine, phase, *STAGES[stage]) for stage in STAGES]
        with without_pdl():
            serial = seconds(engine, phase)
        cells = [f"-{microseconds(part)}" for part in saved]
        print(f"| {phase}, us | {microseconds(whole)} | " + " | ".join(cells) + f" | +{microseconds(serial - whole)} |")


def seconds(engine: Engine, phase: str) -> float:
    """The median time of one pass, captured anew."""
    engine.forget_graphs()
    engine.replay_phase(phase, PASSES)
    times = [timed(lambda: engine.replay_phase(phase, PASSES)) / PASSES for _ in range(REPEATS)]
    return median(times)


def seconds_without(engine: Engine, phase: str, family: str, names: Sequence[str]) -> float:
    """The same with some operations left out."""
    kept = engine.ops
    engine.use_ops(replace(kept, **{family: Without(getattr(kept, family), names)}))
    try:
        return seconds(engine, phase)
    finally:
        engine.use_ops(kept)


def timed(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def microseconds(value: float) -> int:
    return round(value * 1e6)


def _nothing(*_: object, **__: object) -> None:
    """Stands for an operation that is left out."""


if __name__ == "__main__":
    try:
        main()
    except BitnestError as error:
        sys.exit(f"Error: {error}")
