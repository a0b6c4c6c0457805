"""From the options of `bench` to what is measured, and from there to the engines and kernels that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.errors import GenerationError, UsageError
from bitnest_format.runtime import engine
from bitnest_format.runtime.bench import Bench, Engine, describe, measure, simulate
from bitnest_format.runtime.byte_model import Storage
from bitnest_format.runtime.device import choose_device
from bitnest_format.runtime.instruments import GpuInstruments
from bitnest_format.runtime.kernel_bench import time_kernels
from bitnest_format.runtime.kv_cache import RECENT, KvSettings
from bitnest_format.runtime.machines import find_machine
from bitnest_format.runtime.shapes import shape_config
from bitnest_format.runtime.synthetic_acceptance import Definition, SyntheticAcceptance
from bitnest_format.runtime.tokenizer import Tokenizer

# The rate that random weights, which have no text, are given.
DEFAULT_ACCEPTANCE = 0.95
MORE_POSITIONS = 4096


def make_request(
    model: str,
    folder: Path | None,
    *,
    contexts: tuple[int, ...],
    modes: tuple[str, ...],
    gamma: int,
    acceptance: float | None,
    acceptance_of: Definition,
    text: str,
    quantized_head: bool,
    kv_switch: int | None,
    recent: int | None,
    repeats: int,
    stated: bool,
    command: Sequence[str],
) -> Bench:
    """What the options mean for a named shape (`folder` None) or the checkpoint in `folder`.

    Without a rate a checkpoint decodes `text`; a shape, and whatever is `stated` (a prediction), gets
    `DEFAULT_ACCEPTANCE`. Raises `UsageError` for values outside their range.
    """
    if acceptance is None and (folder is None or stated):
        acceptance = DEFAULT_ACCEPTANCE
    storage = Storage(head="nested" if quantized_head else "half")
    config: Mapping[str, Any]
    if folder is None:
        config = shape_config(model, max(contexts, default=0) + MORE_POSITIONS)
    else:
        if quantized_head:
            raise UsageError("--quantized-head is for shapes; a checkpoint's head is measured as it is stored")
        checkpoint = Checkpoint(folder)
        config, storage = checkpoint.config, storage_of(checkpoint)
    ids = Tokenizer(folder).encode(text) if acceptance is None and folder is not None else None
    return Bench(
        name=model,
        config=config,
        weights="random weights" if folder is None else "checkpoint",
        contexts=contexts,
        modes=modes,
        gamma=gamma,
        acceptance=None if acceptance is None else SyntheticAcceptance(acceptance, acceptance_of, gamma),
        text=ids,
        storage=storage,
        kv=KvSettings(
            draft_switch_length=engine.SWITCH_LENGTH if kv_switch is None else kv_switch,
            recent=RECENT if recent is None else recent,
        ),
        repeats=repeats,
        command=command,
    )


def storage_of(checkpoint: Checkpoint) -> Storage:
    """Group size, width of scales and kind of head of a checkpoint; its largest group size counts for all modules."""
    modules = checkpoint.manifest.modules
    sizes = {module.group_size for module in modules.values()}
    whole_rows = all(module.group_size == module.shape[1] for module in modules.values())
    scale = checkpoint.weight(next(iter(modules))).scale
    return Storage(
        group_size=-1 if whole_rows else max(sizes),
        scale_bytes=scale.element_size(),
        head="nested" if checkpoint.architecture().head_module in modules else "half",
    )


def simulate_on(bench: Bench, machine: str) -> dict[str, Any]:
    """A prediction for a machine by name or figures. Raises `UsageError` for an unknown one."""
    return simulate(bench, find_machine(machine))


def run(bench: Bench, folder: Path | None, device: str) -> dict[str, Any]:
    """Measure on a GPU. Raises `GenerationError` where there is none, or too little memory."""
    instruments = GpuInstruments(find_gpu(device))

    def build(capacity: int) -> Mapping[str, Engine]:
        acceptance = None if bench.acceptance is None else bench.acceptance.per_token
        common: dict[str, Any] = {
            "modes": bench.modes,
            "gamma": bench.gamma,
            "capacity": capacity,
            "acceptance": acceptance,
            "kv": bench.kv,
            "device": instruments.device,
        }
        if folder is not None:
            return engine.checkpoint_engines(folder, **common)
        return engine.random_engines(bench.config, quantized_head=bench.storage.head == "nested", **common)

    return measure(bench, build, instruments)


def run_kernels(bench: Bench, device: str) -> dict[str, Any]:
    """Time each kernel of the model's sizes alone."""
    instruments = GpuInstruments(find_gpu(device))
    from bitnest_format.runtime.kernel_cases import kernel_cases

    ceiling = instruments.read_ceiling()
    instruments.release()
    cases = kernel_cases(bench, instruments.device)
    timed = time_kernels(cases, instruments, ceiling["bytes_per_second"], bench.repeats)
    document = describe(bench, "measurement", instruments.machine(), instruments.notes())
    return document | {"read_ceiling": ceiling, "results": [], "kernels": timed}


def find_gpu(device: str) -> torch.device:
    """The GPU called `device`. Raises `GenerationError` saying why there is none."""
    choice = choose_device(device)
    if choice.device.type != "cuda":
        reason = choice.reason or f"--device is {device}"
        raise GenerationError(f"bench needs a GPU: {reason}. Use --simulate MACHINE for a prediction.")
    return choice.device
