"""Decoding on a GPU: a whole round, drafts, verification, acceptance, is one CUDA graph over static buffers.

A round reads where it stands from the device and leaves there where the next one stands, so rounds are enqueued one
after another without waiting: the host learns what was committed one round late. Target-only decoding is a round with
gamma 0 and runs through the same kernels with the same tiles, so its tokens are those of any other gamma.

The same engine runs without graphs on any device and with any `Ops`, which is how it is tested without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.kernels.operands import View
from bitnest_format.kernels.ops import Ops, triton_ops
from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.runtime.device_sampling import DeviceSampling
from bitnest_format.runtime.forward import NODES_PER_LAYER, DraftKv, Forward, HalfForward, NestedForward, Place
from bitnest_format.runtime.gpu_weights import (
    GpuWeights,
    half_from_nested,
    load_weights,
    random_half,
    random_nested,
)
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.prefill import half_prefill, nested_prefill

Mode = Literal["half", "target", "nested", "draft"]

# Committed tokens that stay readable on the device: more than a host that is a few rounds behind needs.
RING = 256
# Entries beyond those that may be committed: a round in flight writes drafts that nobody will keep.
SLACK = 2 * (DECODE_ROWS + 1)
# Cache entries up to which drafts read KV8. Reading KV4 costs some 1.3 % of a round's tokens; it makes rounds of
# LLaMA-3-8B and LLaMA-2-7B 0 and 1 % shorter at 2K, 2 and 7 % at 4K, 4 and 9 % at 8K (benchmarks/gpu-log.md).
SWITCH_LENGTH = 2048
# A norm, the head, and the choice of a token.
TAIL_NODES = 3
UNIFORMS = 1 << 16
ROUNDS_TIMED = 3


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Acceptance by chance, for random weights: every draft stands with probability `rate` while all before it do."""

    rate: float
    uniforms: Tensor
    hold: bool = True


class Engine:
    """One sequence of one model: buffers, state and graphs. Not thread-safe.

    `mode`: `"nested"` drafts `gamma` tokens a round on the base plane and verifies them on both; `"target"` and
    `"draft"` decode plainly by one view; `"half"` is the float16 baseline. `capacity`: cache entries that tokens may
    fill. `sampling`: draws tokens instead of taking the best. `synthetic`: acceptance by chance, for benchmarks.
    `ring`: committed tokens that stay readable.
    """

    def __init__(
        self,
        weights: GpuWeights,
        ops: Ops,
        *,
        mode: Mode,
        capacity: int,
        gamma: int = 0,
        kv: KvSettings | None = None,
        sampling: DeviceSampling | None = None,
        synthetic: Synthetic | None = None,
        ring: int = RING,
        device: torch.device | str = "cuda",
    ):
        self.device = torch.device(device)
        self.weights, self.ops = weights, ops
        self.mode: Mode = mode
        self.gamma = gamma if mode == "nested" else 0
        self.capacity = capacity
        self.sampling, self.synthetic = sampling, synthetic
        self.view: View = "draft" if mode == "draft" else "target"
        room = -(-(capacity + SLACK) // 64) * 64
        self.forward: Forward
        if mode == "half":
            self.forward = HalfForward(weights, ops, rows=DECODE_ROWS, capacity=room, device=self.device)
        else:
            settings = kv or KvSettings()
            switch = SWITCH_LENGTH if settings.draft_switch_length is None else settings.draft_switch_length
            self.forward = NestedForward(
                weights,
                ops,
                rows=DECODE_ROWS,
                capacity=room,
                draft_kv=DraftKv(switch, settings.recent),
                device=self.device,
            )
        self.state = DecodeState.empty(ring, self.device)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._round_seconds: dict[int, float] = {}

    # Rounds

    def round(self, gamma: int | None = None) -> None:
        """Enqueue one round of `gamma` drafts, by default the engine's."""
        gamma = self.gamma if gamma is None else gamma
        if self.sampling is not None:
            self.sampling.draw(gamma)
        self._run(f"round {gamma}", lambda: self._round(gamma))

    def prepare(self, gamma: int) -> None:
        """Capture the graph of rounds of `gamma` drafts where that was not done yet; kernels are compiled for it."""
        self._prepare(f"round {gamma}", lambda: self._round(gamma))

    @torch.inference_mode()
    def round_seconds(self, gammas: Sequence[int]) -> dict[int, float]:
        """How long rounds of each gamma take, measured once, where the sequence then stands; it stays as it is.

        Waits for the device.
        """
        kept = [tensor.clone() for tensor in state_tensors(self.state)]
        for gamma in set(gammas) - self._round_seconds.keys():
            run = partial(self._run, f"round {gamma}", partial(self._round, gamma))
            run()
            self._wait()
            times = []
            for _ in range(ROUNDS_TIMED):
                began = time.perf_counter()
                run()
                self._wait()
                times.append(time.perf_counter() - began)
            self._round_seconds[gamma] = median(times)
            for tensor, before in zip(state_tensors(self.state), kept, strict=True):
                tensor.copy_(before)
        return {gamma: self._round_seconds[gamma] for gamma in gammas}

    def _round(self, gamma: int) -> None:
        for step in range(gamma):
            self._draft_step(step)
        place = self._place(0, gamma + 1)
        self.forward.hidden(place, self.view)
        if self.sampling is not None:
            self.sampling.accept(self.forward.all_logits(place, self.view), self.state, gamma, self.capacity)
            return
        self.forward.find_best(place, self.view)
        self._accept(gamma)

    def _draft_step(self, step: int) -> None:
        place = self._place(step, 1)
        self.forward.hidden(place, "draft")
        if self.sampling is not None:
            self.sampling.propose(self.forward.all_logits(place, "draft"), self.state, step)
            return
        self.forward.find_best(place, "draft")
        self.ops.accept.stage_draft(self.forward.best, self.state, step)

    def _accept(self, gamma: int) -> None:
        best, state, chance = self.forward.best, self.state, self.synthetic
        if chance is None:
            self.ops.accept.accept_greedy(best, state, gamma, self.capacity)
        else:
            self.ops.accept.accept_synthetic(
                best, state, gamma, chance.uniforms, chance.rate, self.capacity, chance.hold
            )

    def _place(self, offset: int, rows: int) -> Place:
        return Place(self.state.position, self.state.tokens, offset, rows)

    # Starting

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> None:
        """Run a prompt; its next token is then committed and pending. Whatever was decoded before is forgotten."""
        state = self.state
        for tensor in (state.tokens, state.committed, state.histogram, state.rounds, state.broken):
            tensor.zero_()
        if self.sampling is not None:
            self.sampling.draw(0)
        tokens = torch.tensor(ids, dtype=torch.int32).to(self.device)
        if isinstance(self.forward, HalfForward):
            half_prefill(self.forward, tokens)
        else:
            assert isinstance(self.forward, NestedForward)
            nested_prefill(self.forward, tokens, self.view)
        # The last token's hidden state stands in row 0, as after a pass of one row at its position.
        state.position.fill_(len(ids) - 1)
        if self.sampling is not None:
            logits = self.forward.all_logits(self._place(0, 1), self.view)
            self.sampling.accept(logits, state, 0, self.capacity)
        else:
            self.forward.find_best(self._place(0, 1), self.view)
            self.ops.accept.accept_greedy(self.forward.best, state, 0, self.capacity)
        for tensor in (state.histogram, state.rounds):
            tensor.zero_()

    @torch.inference_mode()
    def set_context(self, length: int) -> None:
        """Fill the cache with random entries up to `length`, and stand there."""
        generator = torch.Generator(self.device).manual_seed(0)
        forward = self.forward
        if isinstance(forward, NestedForward):
            # In pieces, so that random numbers take little memory beside the cache.
            for layer in forward.cache:
                layer.planes.random_(0, 256, generator=generator)
                layer.scale.uniform_(0.05, 0.15, generator=generator)
        else:
            assert isinstance(forward, HalfForward)
            for entries in forward.entries:
                entries.normal_(generator=generator)
        self.state.position.fill_(length)
        self.state.tokens.fill_(1)

    # What benchmarks ask for

    def replay(self, rounds: int) -> None:
        """Enqueue whole rounds."""
        for _ in range(rounds):
            self.round()

    def replay_phase(self, phase: str, times: int) -> None:
        """Enqueue `"draft"` (one step) or `"verify"` (one pass of gamma + 1 rows) alone; the position stays."""
        for _ in range(times):
            if phase == "draft":
                self._run("draft", lambda: self._draft_step(0))
            else:
                self._run("verify", self._verify)

    def forget_graphs(self) -> None:
        """Capture every graph anew at its next use."""
        self._graphs.clear()

    def use_ops(self, ops: Ops) -> None:
        """Take other operations from now on: a benchmark leaves some out."""
        self.ops = self.forward.ops = ops
        self.forget_graphs()

    def _verify(self) -> None:
        place = self._place(0, self.gamma + 1)
        self.forward.hidden(place, self.view)
        self.forward.find_best(place, self.view)

    def counters(self) -> dict[str, int]:
        """`rounds`, `committed`, `drafted`, `accepted` since the start. Waits for the device."""
        state = self.state
        rounds = int(state.rounds)
        accepted = sum(count * times for count, times in enumerate(state.histogram.tolist()))
        return {
            "rounds": rounds,
            "committed": rounds + accepted,
            "drafted": rounds * self.gamma,
            "accepted": accepted,
        }

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights (shared between engines of one model), cache and workspace."""
        return {"weights": self.weights.nbytes(), **self.forward.memory_bytes()}

    @property
    def node_counts(self) -> dict[str, float]:
        """Graph nodes of a layer and around the layers, counted where a graph of the phase was captured."""
        counts: dict[str, float] = {}
        layers = self.weights.architecture.layers
        for phase, tail in (("draft", TAIL_NODES), ("verify", TAIL_NODES - 1)):
            nodes = graph_nodes(self._graphs[phase]) if phase in self._graphs else None
            counts[f"{phase}_layer"] = NODES_PER_LAYER if nodes is None else round((nodes - tail) / layers, 2)
            counts[f"{phase}_tail"] = tail
        return counts

    # Graphs

    @torch.inference_mode()
    def _run(self, name: str, enqueue: Callable[[], None]) -> None:
        """Replay the graph of that name, captured at its first use; on a CPU run the operations themselves."""
        if self.device.type != "cuda":
            enqueue()
            return
        self._prepare(name, enqueue)
        with torch.cuda.device(self.device):
            self._graphs[name].replay()

    @torch.inference_mode()
    def _prepare(self, name: str, enqueue: Callable[[], None]) -> None:
        if self.device.type == "cuda" and name not in self._graphs:
            with torch.cuda.device(self.device):
                self._graphs[name] = self._capture(enqueue)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _capture(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run once, so that every kernel is compiled and the library has its workspaces, then capture."""
        state = self.state
        kept = [tensor.clone() for tensor in state_tensors(state)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            enqueue()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip(state_tensors(state), kept, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # A stream of this device: the one torch would choose stays on the device where it was first used.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            enqueue()
        graph.instantiate()
        return graph


def state_tensors(state: DecodeState) -> list[Tensor]:
    """All tensors of the state."""
    return [getattr(state, name) for name in state.__slots__]


def graph_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """How many nodes a graph has; None where the CUDA bindings are not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    status, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), 0)
    return int(count) if int(status) == 0 else None


def random_engines(
    config: Mapping[str, Any],
    *,
    modes: Sequence[str],
    gamma: int,
    capacity: int,
    acceptance: float | None,
    quantized_head: bool,
    kv: KvSettings,
    device: torch.device,
) -> dict[str, Engine]:
    """Engines over random weights of a model's shape; the nested ones share one set."""
    nested = None
    if any(mode != "half" for mode in modes):
        nested = random_nested(config, device, nested_head=quantized_head)
    half = random_half(config, device) if "half" in modes else None
    return _engines(nested, half, modes, gamma, capacity, acceptance, kv, device)


def checkpoint_engines(
    folder: Path,
    *,
    modes: Sequence[str],
    gamma: int,
    capacity: int,
    acceptance: float | None,
    kv: KvSettings,
    device: torch.device,
) -> dict[str, Engine]:
    """Engines over a checkpoint; the float16 baseline holds the target view's weights."""
    nested = load_weights(Checkpoint(folder, "target"), "target", device)
    half = half_from_nested(nested) if "half" in modes else None
    return _engines(nested, half, modes, gamma, capacity, acceptance, kv, device)


def _engines(
    nested: GpuWeights | None,
    half: GpuWeights | None,
    modes: Sequence[str],
    gamma: int,
    capacity: int,
    acceptance: float | None,
    kv: KvSettings,
    device: torch.device,
) -> dict[str, Engine]:
    ops = triton_ops()
    synthetic = None
    if acceptance is not None:
        generator = torch.Generator().manual_seed(0)
        synthetic = Synthetic(acceptance, torch.rand(UNIFORMS, generator=generator).to(device))
    engines = {}
    for mode in modes:
        weights = half if mode == "half" else nested
        assert weights is not None and mode in ("half", "target", "nested")
        engines[mode] = Engine(
            weights,
            ops,
            mode=mode,  # type: ignore[arg-type]
            capacity=capacity,
            gamma=gamma,
            kv=kv,
            synthetic=synthetic,
            device=device,
        )
    return engines
