"""Predicts decoding speed on machines that are not here, from bytes, bandwidth and launches.

A step takes `bytes / (bandwidth x share)`, summed over linear layers, head and cache, plus a launch cost for every node
of its graph. `bandwidth` is the datasheet's; a share is how much of it a kind of read reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitnest_format.architecture import Architecture
from bitnest_format.errors import UsageError
from bitnest_format.runtime.byte_model import StepBytes, StepView, Storage, memory_bytes, step_bytes

GIB = 1 << 30
# Nodes of the engine's graphs: per decoder layer, and around the layers of a pass.
NODES_PER_LAYER = 9
TAIL_NODES = 4
# Buffers beside weights and cache: the difference of the paper's 13.9 GiB peak and the sizes of its weights and cache.
WORKSPACE = int(0.35 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parts of the datasheet bandwidth that reads of each kind reach.

    `half`: 16-bit matrices and cache; `draft`: base planes; `target`, `verify`: both planes with one row and with
    several; `head`: a 16-bit or nested head; `cache`: nested entries.
    """

    half: float
    draft: float
    target: float
    verify: float
    head: float
    cache: float


# Well-tuned kernels on a GPU whose instruction rate suffices: 0.92 of the read ceiling for 16 bits, 0.88, 0.80 and 0.80
# for planes, 0.93 for the head, 0.75 for the cache, the ceiling itself 0.92 of the datasheet.
TUNED = Shares(half=0.85, draft=0.74, target=0.81, verify=0.74, head=0.86, cache=0.69)
# The kernels of arXiv 2610.02800 on an Orin, which unpacking limits, not memory. `target` is its 63 GB/s of 102.4
# (appendix A.6.3); the others are what its figures for LLaMA-2-7B and Qwen2.5-7B leave (tables 13 and 14, 2K context).
ORIN = Shares(half=0.87, draft=0.42, target=0.615, verify=0.615, head=0.42, cache=0.42)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`bandwidth` in bytes a second, `memory` in usable bytes, `launch` in seconds for each node of a graph."""

    name: str
    bandwidth: float
    memory: float
    launch: float
    shares: Shares
    origin: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bandwidth_bytes_per_second": self.bandwidth,
            "memory_bytes": int(self.memory),
            "launch_seconds": self.launch,
            "shares": {name: getattr(self.shares, name) for name in self.shares.__slots__},
            "origin": self.origin,
        }


FROM_PAPER = "shares of the kernels of arXiv 2610.02800 on Orin NX; launch cost assumed"
FROM_TUNED = "datasheet bandwidth; shares and launch cost assumed for well-tuned kernels"


def _orin(name: str, gigabytes_per_second: float, gib: float) -> Machine:
    return Machine(
        name=name,
        bandwidth=gigabytes_per_second * 1e9,
        memory=gib * GIB,
        launch=10e-6,
        shares=ORIN,
        origin=FROM_PAPER,
    )


def _discrete(name: str, gigabytes_per_second: float, gib: float, microseconds: float = 1.2) -> Machine:
    return Machine(
        name=name,
        bandwidth=gigabytes_per_second * 1e9,
        memory=gib * GIB,
        launch=microseconds * 1e-6,
        shares=TUNED,
        origin=FROM_TUNED,
    )


# On Jetson boards the system shares the memory: some 1.8 GiB less than the name says.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _orin("orin-nano-8", 68, 6.2),
        _orin("orin-nx-8", 102.4, 6.2),
        _orin("orin-nx-16", 102.4, 14.2),
        _orin("agx-orin-32", 204.8, 28.2),
        _orin("agx-orin-64", 204.8, 58.2),
        _discrete("l4", 300, 22),
        _discrete("rtx-4090", 1008, 23),
        _discrete("rtx-5090", 1792, 31),
        _discrete("rtx-a6000", 768, 47),
        _discrete("a100-80", 2039, 79),
        _discrete("h100", 3350, 79),
        _discrete("h200", 4800, 139),
    )
}

CUSTOM_FIELDS = ("bandwidth", "memory", "launch")


def find_machine(text: str) -> Machine:
    """A machine by name, or `bandwidth=GB/s,memory=GiB,launch=us` with the last two optional.

    Raises `UsageError` for what is neither.
    """
    if text in MACHINES:
        return MACHINES[text]
    if "=" not in text:
        raise UsageError(
            f"--simulate {text}: unknown machine; known are {', '.join(MACHINES)}, "
            "and others as bandwidth=GB/s,memory=GiB,launch=us"
        )
    values: dict[str, float] = {"memory": float("inf"), "launch": 1.2}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in CUSTOM_FIELDS or number < 0 or (name == "bandwidth" and number == 0):
            raise UsageError(
                f"--simulate {text}: {part!r} is not one of bandwidth=GB/s, memory=GiB, launch=us with a number"
            )
        values[name] = number
    if "bandwidth" not in values:
        raise UsageError(f"--simulate {text}: bandwidth=GB/s is missing")
    memory = min(values["memory"], float(1 << 20))
    return replace(
        _discrete(text, values["bandwidth"], memory, values["launch"]),
        origin="as given; shares assumed for tuned kernels",
    )


def pass_seconds(machine: Machine, architecture: Architecture, read: StepBytes, view: StepView, rows: int = 1) -> float:
    """The time of one forward pass."""
    shares = machine.shares
    linears = {"half": shares.half, "draft": shares.draft, "target": shares.target if rows == 1 else shares.verify}
    cache = shares.half if view == "half" else shares.cache
    weighted = read.linears / linears[view] + read.head / shares.head + read.cache / cache
    nodes = NODES_PER_LAYER * architecture.layers + TAIL_NODES
    return weighted / machine.bandwidth + nodes * machine.launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one mode would do at one context. `passes`: seconds and bytes of each kind of pass in a round."""

    context: int
    mode: str
    seconds_per_round: float
    tokens_per_round: float
    passes: Mapping[str, tuple[float, StepBytes]]
    memory: int
    fits: bool

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_round / self.seconds_per_round


def predict(
    machine: Machine,
    architecture: Architecture,
    storage: Storage,
    *,
    context: int,
    modes: Sequence[str],
    gamma: int,
    tokens_per_round: float,
    fine_from: int = 0,
) -> list[Prediction]:
    """Predict each of `modes`: `half`, `target`, `nested`. Drafts read cache entries before `fine_from` at KV4."""
    predictions = []
    for mode in modes:
        if mode == "nested":
            plan: dict[str, tuple[StepView, int, int]] = {
                "draft": ("draft", gamma, 1),
                "verify": ("target", 1, gamma + 1),
            }
        else:
            plan = {"step": ("half" if mode == "half" else "target", 1, 1)}
        passes, seconds = {}, 0.0
        for name, (view, count, rows) in plan.items():
            read = step_bytes(architecture, view, context, storage, fine_from=fine_from)
            one = pass_seconds(machine, architecture, read, view, rows)
            passes[name] = (one, read)
            seconds += count * one
        memory = memory_bytes(architecture, context, storage, half=mode == "half").total + WORKSPACE
        predictions.append(
            Prediction(
                context=context,
                mode=mode,
                seconds_per_round=seconds,
                tokens_per_round=tokens_per_round if mode == "nested" else 1.0,
                passes=passes,
                memory=memory,
                fits=memory <= machine.memory,
            )
        )
    return predictions
