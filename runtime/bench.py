"""Measures decoding on a GPU: fp16, W8A8 target-only and nested engines in one process, in turns.

Blocks of rounds are timed by events, one mode after the other and that several times over, so that a drifting clock
meets all of them alike; medians are reported and every block is kept. Bytes are those of the byte model, the ceiling is
a plain read in the same process.
"""

from __future__ import annotations

import datetime
import gc
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.errors import GenerationError, UsageError
from bitnest_format.runtime.byte_model import StepBytes, StepView, Storage, memory_bytes, step_bytes
from bitnest_format.runtime.gpu_limits import beyond_kernels
from bitnest_format.runtime.instruments import Instruments, versions
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.machines import WORKSPACE, Machine, predict
from bitnest_format.runtime.synthetic_acceptance import SyntheticAcceptance

DOCUMENT = "bitnest-format bench 1"
MODES = ("half", "target", "nested")
MODE_LABELS = {"half": "fp16", "target": "W8A8", "nested": "nested"}
BLOCK_SECONDS = 0.25
ENERGY_SECONDS = 1.0
WARM_UP_ROUNDS = 5
MOST_ROUNDS = 5000
# Tokens decoded from each prefix of a real text, and how far apart prefixes start.
TEXT_TOKENS = 256
TEXT_STRIDE = 509
# Observed tokens a round further than this from a stated rate's mean, in standard errors, are noted.
SUSPICIOUS_ERRORS = 5.0


class Engine(Protocol):
    """One mode of decoding, ready to replay."""

    @property
    def mode(self) -> str:
        """One of `MODES`."""

    @property
    def node_counts(self) -> Mapping[str, float]:
        """Graph nodes of a layer, as `draft_layer` and `verify_layer`, and around the layers, as `draft_tail`."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Weights, cache and other buffers."""

    def set_context(self, length: int) -> None:
        """Fill the cache with random entries up to `length` and let every round start there."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Start a real text: rounds continue it from here, each where the one before it ended."""

    def replay(self, rounds: int) -> None:
        """Enqueue whole rounds: of one step each where nothing is drafted."""

    def replay_phase(self, phase: str, times: int) -> None:
        """Enqueue `draft` (one draft step) or `verify` (a pass over gamma + 1 rows, over one where nothing is drafted)
        alone; the position stays.
        """

    def counters(self) -> Mapping[str, int]:
        """`rounds`, `committed`, `drafted`, `accepted` so far. Waits for the device."""


Build = Callable[[int], Mapping[str, Engine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What to measure or to predict. `text`: token ids to decode from, None where `acceptance` is stated instead.

    `weights` says what they are: random, or a checkpoint's. Raises `UsageError` for what cannot be meant.
    """

    name: str
    config: Mapping[str, Any]
    weights: str
    contexts: tuple[int, ...]
    modes: tuple[str, ...] = MODES
    gamma: int = 4
    acceptance: SyntheticAcceptance | None
    text: Sequence[int] | None = None
    storage: Storage = field(default_factory=Storage)
    kv: KvSettings = field(default_factory=KvSettings)
    repeats: int = 5
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.modes or set(self.modes) - set(MODES):
            raise UsageError(f"--modes is {','.join(self.modes)!r}, expected some of {', '.join(MODES)}")
        if not self.contexts or min(self.contexts) < 1:
            raise UsageError("--context must be 1 or more")
        if self.gamma < 1:
            raise UsageError(f"--gamma is {self.gamma}, expected 1 or more")
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}, expected 1 or more")
        if (self.acceptance is None) == (self.text is None):
            raise UsageError("give either a stated --acceptance or a text to decode")
        beyond = ", ".join(beyond_kernels(self.architecture))
        if beyond:
            raise UsageError(f"{self.name}: {beyond}: the GPU kernels, which bench is about, do not run such a model")
        needed = max(self.contexts) + TEXT_STRIDE * (self.repeats - 1)
        if self.text is not None and len(self.text) < needed:
            raise UsageError(
                f"the text has {len(self.text)} tokens; {self.repeats} prefixes of {max(self.contexts)} need {needed}. "
                "Give a longer --text or a smaller --context."
            )

    @property
    def architecture(self) -> Architecture:
        return read_architecture(self.config)

    def fine_from(self, context: int) -> int:
        """The first cache entry that drafts read at KV8, in the first draft step of a round."""
        return self.kv.draft_fine_from(context + 1, keep_decoded=False)

    def capacity(self, context: int) -> int:
        """Cache entries that engines need at a context."""
        room = self.gamma + 1
        return context + room + (0 if self.text is None else TEXT_TOKENS + room)

    def views(self, mode: str) -> dict[str, StepView]:
        """The passes of one mode's round, by name: what each reads."""
        if mode == "nested":
            return {"draft": "draft", "verify": "target"}
        return {"step": "half" if mode == "half" else "target"}

    def pass_bytes(self, mode: str, context: int) -> dict[str, StepBytes]:
        """Bytes of one pass of each kind in a round."""
        architecture, fine_from = self.architecture, self.fine_from(context)
        return {
            name: step_bytes(architecture, view, context, self.storage, fine_from=fine_from)
            for name, view in self.views(mode).items()
        }

    def round_bytes(self, mode: str, context: int) -> int:
        """Bytes of a whole round."""
        return sum(
            read.total * (self.gamma if name == "draft" else 1) for name, read in self.pass_bytes(mode, context).items()
        )

    def memory(self, modes: Sequence[str], context: int) -> int:
        """Bytes that engines of `modes` need together; nested weights are kept once, caches for each."""
        total, seen = 0, set()
        for mode in modes:
            half = mode == "half"
            kept = memory_bytes(self.architecture, self.capacity(context), self.storage, half=half)
            total += kept.cache + WORKSPACE + (0 if half in seen else kept.weights)
            seen.add(half)
        return total


def measure(bench: Bench, build: Build, instruments: Instruments) -> dict[str, Any]:
    """Run every context and mode; the result document. `build(capacity)` makes the engines, by mode.

    Raises `GenerationError` before any work where the engines cannot fit into memory, saying what would.
    """
    free = instruments.free_bytes()
    check_memory(bench, free)
    ceiling = instruments.read_ceiling()
    instruments.release()
    notes = list(instruments.notes())
    results = []
    for context in bench.contexts:
        instruments.start_peak()
        try:
            engines = build(bench.capacity(context))
            rows = _measure_context(bench, engines, instruments, context, ceiling["bytes_per_second"], notes)
        except torch.OutOfMemoryError as error:
            raise GenerationError(_ran_out(bench, context, free)) from error
        peak = instruments.peak_bytes()
        results += [row | {"process_peak_bytes": peak} for row in rows]
        del engines
        gc.collect()
        instruments.release()
    document = describe(bench, "measurement", instruments.machine(), notes)
    return document | {"read_ceiling": ceiling, "results": with_speedups(results)}


def simulate(bench: Bench, machine: Machine) -> dict[str, Any]:
    """The same document from the byte model alone, marked as a prediction."""
    if bench.acceptance is None:
        raise UsageError("--simulate needs a stated --acceptance")
    results = []
    for context in bench.contexts:
        predictions = predict(
            machine,
            bench.architecture,
            bench.storage,
            context=context,
            modes=bench.modes,
            gamma=bench.gamma,
            tokens_per_round=bench.acceptance.tokens_per_round,
            fine_from=bench.fine_from(context),
        )
        for found in predictions:
            phases = {
                name: rate(read.total, seconds, machine.bandwidth) | {"seconds": seconds, "bytes": byte_parts(read)}
                for name, (seconds, read) in found.passes.items()
            }
            row = {
                "context": context,
                "mode": found.mode,
                "tokens_per_second": found.tokens_per_second,
                "tokens_per_round": found.tokens_per_round,
                "seconds_per_round": found.seconds_per_round,
                "bytes_per_round": bench.round_bytes(found.mode, context),
                **rate(bench.round_bytes(found.mode, context), found.seconds_per_round, machine.bandwidth),
                "phases": phases,
                "memory_bytes": {"total": found.memory},
                "fits": found.fits,
                "joules_per_token": None,
            }
            results.append(row)
    notes = [f"a prediction from bytes and bandwidth, not a measurement: {machine.origin}"]
    document = describe(bench, "prediction", machine.to_dict(), notes)
    return document | {"read_ceiling": None, "results": with_speedups(results)}


def describe(bench: Bench, kind: str, machine: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """The head of a result document."""
    if bench.acceptance is not None:
        acceptance = bench.acceptance.to_dict()
    else:
        label = "acceptance of a real text, greedy; accepted / drafted"
        acceptance = {"kind": "real text", "definition": "accepted / drafted", "label": label}
    architecture = bench.architecture
    return {
        "document": DOCUMENT,
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(bench.command),
        "machine": dict(machine),
        "versions": versions(),
        "model": {
            "name": bench.name,
            "weights": "sizes alone" if kind == "prediction" else bench.weights,
            "layers": architecture.layers,
            "hidden_size": architecture.hidden_size,
            "kv_heads": architecture.kv_heads,
            "vocab_size": architecture.vocab_size,
        },
        "settings": {
            "contexts": list(bench.contexts),
            "modes": list(bench.modes),
            "gamma": bench.gamma,
            "head": bench.storage.head,
            "group_size": bench.storage.group_size,
            "scale_bytes": bench.storage.scale_bytes,
            "draft_reads_kv8_from": {str(context): bench.fine_from(context) for context in bench.contexts},
            "repeats": bench.repeats,
        },
        "acceptance": acceptance,
        "notes": list(notes),
    }


def check_memory(bench: Bench, free: int) -> None:
    """Raise `GenerationError` for the first context whose engines need more than `free` bytes."""
    for context in bench.contexts:
        if bench.memory(bench.modes, context) > free:
            raise GenerationError(_does_not_fit(bench, context, free))


def _does_not_fit(bench: Bench, context: int, free: int) -> str:
    """What was asked for, and which smaller request would fit."""
    needed = bench.memory(bench.modes, context)
    advice = []
    largest = _largest_context(bench, context, free)
    if largest:
        advice.append(f"--context {largest}")
    fewer = [modes for modes in _smaller(bench.modes) if bench.memory(modes, context) <= free]
    if fewer:
        advice.append(f"--modes {','.join(fewer[0])}")
    way = f"What would fit: {' or '.join(advice)}." if advice else "No mode of this model fits."
    return (
        f"{bench.name}: {', '.join(bench.modes)} with {context} tokens of context need about {needed / 2**30:.1f} GiB; "
        f"{free / 2**30:.1f} GiB of GPU memory are free. {way}"
    )


def _ran_out(bench: Bench, context: int, free: int) -> str:
    """The estimate was too small: say so, and which way is down."""
    needed = bench.memory(bench.modes, context)
    ways = ["a smaller --context", *(["fewer --modes"] if len(bench.modes) > 1 else [])]
    return (
        f"{bench.name}: GPU memory ran out with {context} tokens of context; about {needed / 2**30:.1f} GiB were "
        f"expected and {free / 2**30:.1f} GiB free. Take {' or '.join(ways)}."
    )


def _largest_context(bench: Bench, below: int, free: int) -> int:
    """The largest whole number of 256 tokens under `below` that all modes fit with; 0 if none does."""
    low, high = 0, (below - 1) // 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bench.memory(bench.modes, 256 * middle) <= free else (low, middle - 1)
    return 256 * low


def _smaller(modes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Selections of fewer modes, the quantized ones first."""
    for kept in (("target", "nested"), ("nested",), ("target",), ("half",)):
        if set(kept) < set(modes):
            yield kept


def _measure_context(
    bench: Bench,
    engines: Mapping[str, Engine],
    instruments: Instruments,
    context: int,
    ceiling: float,
    notes: list[str],
) -> list[dict[str, Any]]:
    runs = [_Run(bench, engines[mode], instruments, context) for mode in bench.modes]
    for run in runs:
        run.warm_up()
    for repeat in range(bench.repeats):
        for run in runs:
            run.time_block(repeat)
    for _ in range(bench.repeats):
        for run in runs:
            run.time_phases()
    for run in runs:
        run.weigh()
    return [run.result(ceiling, notes) for run in runs]


class _Run:
    """One mode at one context: its timings as they come in."""

    def __init__(self, bench: Bench, engine: Engine, instruments: Instruments, context: int):
        self.bench, self.engine, self.instruments, self.context = bench, engine, instruments, context
        self.nested = engine.mode == "nested"
        self.rounds = WARM_UP_ROUNDS
        self.blocks: list[dict[str, float]] = []
        self.phases: dict[str, list[float]] = {"draft": [], "verify": []} if self.nested else {}
        self.counted = {"rounds": 0, "committed": 0, "drafted": 0, "accepted": 0}
        self.joules_per_token: float | None = None

    def start(self, repeat: int = 0) -> None:
        """Bring the engine to the context."""
        if self.bench.text is None:
            self.engine.set_context(self.context)
        else:
            first = repeat * TEXT_STRIDE
            self.engine.prefill(self.bench.text[first : first + self.context])

    def warm_up(self) -> None:
        """Run a little, then choose how many rounds fill a block."""
        self.start()
        self._replay(WARM_UP_ROUNDS)
        for phase in self.phases or ("verify",):
            # Captured here, so that its nodes are counted and its first replay is not timed.
            self.engine.replay_phase(phase, 1)
        per_round = self._replay(WARM_UP_ROUNDS) / WARM_UP_ROUNDS
        if self.bench.text is None:
            self.rounds = min(max(WARM_UP_ROUNDS, math.ceil(BLOCK_SECONDS / per_round)), MOST_ROUNDS)
        else:
            self.rounds = math.ceil(TEXT_TOKENS / (self.bench.gamma + 1)) if self.nested else TEXT_TOKENS

    def time_block(self, repeat: int) -> None:
        if self.bench.text is not None:
            self.start(repeat)
        before = self.engine.counters()
        seconds = self._replay(self.rounds)
        after = self.engine.counters()
        counted = {name: after[name] - before[name] for name in self.counted}
        for name, value in counted.items():
            self.counted[name] += value
        self.blocks.append({"seconds": seconds, **counted})

    def time_phases(self) -> None:
        """One block of each phase alone, of about the length of a block of rounds."""
        if self.bench.text is not None and self.phases:
            self.start()
        for phase, times in self.phases.items():
            count = self.rounds
            seconds = self.instruments.seconds(partial(self.engine.replay_phase, phase, count))
            times.append(seconds / count)

    def weigh(self) -> None:
        """Energy of at least `ENERGY_SECONDS` of rounds, or of one prefix's text."""
        rounds = self.rounds
        if self.bench.text is None:
            rounds = max(rounds, math.ceil(ENERGY_SECONDS / self.seconds_per_round()))
        else:
            self.start()
        before = self.engine.counters()["committed"]
        joules = self.instruments.joules(lambda: self.engine.replay(rounds))
        tokens = self.engine.counters()["committed"] - before
        if joules is not None and tokens:
            self.joules_per_token = joules / tokens

    def seconds_per_round(self) -> float:
        return median(block["seconds"] / block["rounds"] for block in self.blocks)

    def result(self, ceiling: float, notes: list[str]) -> dict[str, Any]:
        bench, mode = self.bench, self.engine.mode
        seconds = self.seconds_per_round()
        observed = self.counted["committed"] / self.counted["rounds"]
        tokens = observed
        if bench.acceptance is not None:
            tokens = bench.acceptance.tokens_per_round if self.nested else 1.0
            self._compare(observed, tokens, notes)
        reads = bench.pass_bytes(mode, self.context)
        total = bench.round_bytes(mode, self.context)
        timed = {name: median(times) for name, times in self.phases.items()} if self.nested else {"step": seconds}
        phases = {
            name: rate(reads[name].total, taken, ceiling)
            | {"seconds": taken, "bytes": byte_parts(reads[name]), "blocks": self.phases.get(name, [])}
            for name, taken in timed.items()
        }
        return {
            "context": self.context,
            "mode": mode,
            "tokens_per_second": tokens / seconds,
            "tokens_per_round": tokens,
            "tokens_per_round_observed": observed,
            "acceptance_observed": self.counted["accepted"] / self.counted["drafted"]
            if self.counted["drafted"]
            else None,
            "seconds_per_round": seconds,
            "seconds_per_round_range": [
                pick(block["seconds"] / block["rounds"] for block in self.blocks) for pick in (min, max)
            ],
            "bytes_per_round": total,
            **rate(total, seconds, ceiling),
            "phases": phases,
            "memory_bytes": {**self.engine.memory_bytes, "total": sum(self.engine.memory_bytes.values())},
            "fits": True,
            "joules_per_token": self.joules_per_token,
            "node_counts": dict(self.engine.node_counts),
            "blocks": self.blocks,
        }

    def _replay(self, rounds: int) -> float:
        return self.instruments.seconds(lambda: self.engine.replay(rounds))

    def _compare(self, observed: float, expected: float, notes: list[str]) -> None:
        """Note a synthetic run whose accept step does not play the stated rate."""
        error = self.bench.gamma / 2 / math.sqrt(self.counted["rounds"]) if self.nested else 0.0
        if abs(observed - expected) > SUSPICIOUS_ERRORS * error + 1e-9:
            notes.append(
                f"{self.engine.mode} at {self.context}: {observed:.3f} tokens a round were committed, "
                f"{expected:.3f} stated"
            )


def rate(moved: float, seconds: float, ceiling: float) -> dict[str, float]:
    """Bytes a second, and their share of what a plain read reaches."""
    return {"bytes_per_second": moved / seconds, "share_of_read_ceiling": moved / seconds / ceiling}


def byte_parts(read: StepBytes) -> dict[str, int]:
    return {"linears": read.linears, "head": read.head, "cache": read.cache, "total": read.total}


def with_speedups(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with how much faster it is than fp16 and W8A8 at the same context; None where those do not run."""
    speeds = {(row["context"], row["mode"]): row["tokens_per_second"] for row in results if row["fits"]}
    rows = []
    for row in results:
        speedups = {}
        for other in ("half", "target"):
            base = speeds.get((row["context"], other))
            speedups[f"over_{other}"] = None if base is None else row["tokens_per_second"] / base
        rows.append(row | {"speedup": speedups})
    return rows
