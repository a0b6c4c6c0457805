"""The speculative loop around an engine: rounds are enqueued one ahead, and the host reads late.

While the device computes a round, the host reads what the round before it committed, from a small record that was
copied to pinned memory behind that round. So the device never waits for the host, and whatever a round in flight
commits after the text has ended is thrown away.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.operands import View
from bitnest_format.runtime.adaptive import GammaPolicy
from bitnest_format.runtime.byte_model import cache_read_bytes
from bitnest_format.runtime.device import current
from bitnest_format.runtime.engine import Engine
from bitnest_format.runtime.forward import NestedForward
from bitnest_format.runtime.model import not_a_number
from bitnest_format.runtime.speculative import Counters

# Rounds that are enqueued before the oldest of them is read.
IN_FLIGHT = 2
# Numbers of a record that stand before the ring: committed, position, broken.
HEADER = 3


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that was enqueued and not read: its drafts, and where its record arrives, and when."""

    gamma: int
    record: Tensor
    arrived: torch.cuda.Event | None


class GpuLoop:
    """Decodes one sequence on an engine, as `SpeculativeLoop` does with a decoder and a cache.

    `counters.seconds`: `setup`, compiling and capturing rounds that the engine did not have, and measuring them;
    `prefill`, which compiles its own kernels when a process first needs them; and `rounds`, wall time from the first of
    them to the last that was read, whatever the caller did meanwhile, since the device went on. Phases inside a round
    cannot be told apart: it is one graph. Tokens are counted that rounds committed, also those past the end of the text
    in the last block.
    """

    def __init__(self, engine: Engine, checkpoint: Checkpoint):
        self.engine = engine
        self.counters = Counters(seconds={"setup": 0.0, "prefill": 0.0, "rounds": 0.0})
        self._checkpoint = checkpoint
        views: tuple[View, ...] = ("draft", "target")
        self._weight_bytes = {view: engine.weights.read_bytes(view) for view in views}
        self._last_position = engine.weights.architecture.max_positions - 1
        self._flights: deque[Flight] = deque()
        self._committed = self._position = 0
        self._chosen: int | None = None
        self._began: float | None = None
        state = engine.state
        self._sources = (state.committed, state.position, state.broken, state.ring)
        on_gpu = engine.device.type == "cuda"
        length = HEADER + len(state.ring)
        self._gathered = torch.zeros(length, dtype=torch.int32, device=engine.device)
        self._records = [torch.zeros(length, dtype=torch.int32, pin_memory=on_gpu) for _ in range(IN_FLIGHT)]
        self._turn = 0

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> int:
        """Run the prompt and return the first new token. Raises `GenerationError` where a logit was NaN."""
        began = time.perf_counter()
        with current(self.engine.device):
            self.engine.prefill(prompt)
            self._committed, self._position = 0, len(prompt) - 1
            (token,) = self._read(self._send(gamma=0))
        self.counters.seconds["prefill"] += time.perf_counter() - began
        return token

    @torch.inference_mode()
    def block(self, pending: int, policy: GammaPolicy, room: int) -> list[int]:
        """The tokens of the next round, at least one; `room` more are wanted. The device knows the pending token.

        `policy` is asked for the gamma of a round when that is enqueued, and told what came of it when it is read. A
        round may commit more than `room` tokens; none is enqueued that surely would not be needed.
        """
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        setup = self.counters.seconds["setup"]
        with current(self.engine.device):
            while len(self._flights) < min(IN_FLIGHT, room):
                if self._chosen is None:
                    self._chosen = policy.choose()
                gamma = self._fitting(self._chosen)
                if gamma is None:
                    break
                self._chosen = None
                self._enqueue(gamma)
            flight = self._flights.popleft()
            position = self._position
            tokens = self._read(flight)
        self.counters.count(flight.gamma, len(tokens) - 1)
        self.counters.bytes_read += self._round_bytes(position, flight.gamma)
        policy.observe(flight.gamma, len(tokens) - 1)
        self._began += self.counters.seconds["setup"] - setup
        self.counters.seconds["rounds"] = time.perf_counter() - self._began
        return tokens

    @torch.inference_mode()
    def round_seconds(self, gammas: Sequence[int]) -> dict[int, float]:
        """How long rounds of each gamma take at the current length; nothing is committed."""
        began = time.perf_counter()
        with current(self.engine.device):
            found = self.engine.round_seconds(gammas)
        self.counters.seconds["setup"] += time.perf_counter() - began
        return found

    def cache_bytes(self) -> int:
        """Bytes that the cache takes."""
        return self.engine.memory_bytes["cache"]

    def _fitting(self, gamma: int) -> int | None:
        """The gamma of the next round, so that no position past the model's context is computed.

        0 near the end; None where that depends on rounds in flight, which must be read first.
        """
        reach = self._position + sum(flight.gamma + 1 for flight in self._flights)
        if reach + gamma <= self._last_position:
            return gamma
        if self._position + gamma > self._last_position and reach <= self._last_position:
            return 0
        return None

    def _enqueue(self, gamma: int) -> None:
        began = time.perf_counter()
        self.engine.prepare(gamma)
        self.counters.seconds["setup"] += time.perf_counter() - began
        self.engine.round(gamma)
        self._flights.append(self._send(gamma))

    def _send(self, gamma: int) -> Flight:
        """Copy the state as it is behind what was enqueued so far; does not wait."""
        record = self._records[self._turn]
        self._turn = (self._turn + 1) % IN_FLIGHT
        torch.cat(self._sources, out=self._gathered)
        record.copy_(self._gathered, non_blocking=True)
        arrived = None
        if self._gathered.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return Flight(gamma, record, arrived)

    def _read(self, flight: Flight) -> list[int]:
        """Wait for a record; the tokens that were committed since the one before."""
        if flight.arrived is not None:
            flight.arrived.synchronize()
        committed, self._position, broken, *ring = flight.record.tolist()
        if broken:
            raise not_a_number(self._checkpoint)
        tokens = [ring[number % len(ring)] for number in range(self._committed, committed)]
        self._committed = committed
        return tokens

    def _round_bytes(self, position: int, gamma: int) -> int:
        """Bytes that the passes of a round read, as `SpeculativeLoop.bytes_of_pass` counts them."""
        drafts = sum(self._pass_bytes(position + step + 1, "draft") for step in range(gamma))
        return drafts + self._pass_bytes(position + gamma + 1, self.engine.view)

    def _pass_bytes(self, stop: int, view: View) -> int:
        architecture, forward = self.engine.weights.architecture, self.engine.forward
        assert isinstance(forward, NestedForward)
        fine_from = forward.draft_kv.fine_from(stop) if view == "draft" else 0
        return self._weight_bytes[view] + cache_read_bytes(architecture, view, stop, fine_from)
