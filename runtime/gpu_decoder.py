"""A checkpoint on a GPU: its weights, and the engine that decodes, kept from one text to the next where it fits."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.errors import GenerationError
from bitnest_format.kernels.operands import View
from bitnest_format.kernels.ops import Ops
from bitnest_format.kernels.prefill_tiles import SCRATCH_WEIGHTS
from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.runtime.device import current
from bitnest_format.runtime.device_sampling import DeviceSampling
from bitnest_format.runtime.engine import SLACK, Engine
from bitnest_format.runtime.forward import DraftKv, NestedForward, Place
from bitnest_format.runtime.gpu_limits import MemoryNeed, explain_out_of_memory, memory_needs
from bitnest_format.runtime.gpu_loop import GpuLoop
from bitnest_format.runtime.gpu_weights import attention_shape, load_weights
from bitnest_format.runtime.kv_cache import CAPACITY_STEP, KvSettings
from bitnest_format.runtime.memory import available_bytes
from bitnest_format.runtime.model import not_a_number
from bitnest_format.runtime.prefill import ROWS
from bitnest_format.runtime.sampling import SamplingSettings

OpenView = Literal["nested", "target", "draft"]

# Caches hold so many tokens, or twice, four times ... as many: most texts fit into the engine of the one before.
FIRST_CAPACITY = 512
# What compiled kernels, captured graphs and libraries take beside buffers.
RESERVE = 256 << 20


class GpuDecoder:
    """The weights of one checkpoint on a device, and at most one engine over them.

    `view`: what it was opened for, as in `NestedModel`. `ops`: the kernels; their twins make it run anywhere. Raises
    what `load_weights` raises, and `GenerationError` where the weights do not fit into the device's memory.
    """

    def __init__(self, checkpoint: Checkpoint, view: OpenView, device: torch.device, ops: Ops):
        self.architecture = read_architecture(checkpoint.config)
        self.views: tuple[View, ...] = ("draft", "target") if view == "nested" else (view,)
        self.device = device
        self._checkpoint, self._view, self._ops = checkpoint, view, ops
        self.engine: Engine | None = None
        self._settings: tuple[object, ...] = ()
        self._weight_bytes = 0
        smallest = self.capacity(1)
        self._check_memory(smallest)
        with self.explained(smallest), current(device):
            self.weights = load_weights(checkpoint, "draft" if view == "draft" else "target", device)
        self._weight_bytes = self.weights.nbytes()

    def loop(self, settings: SamplingSettings, kv: KvSettings, view: View, entries: int) -> GpuLoop:
        """A loop for one text of at most `entries` tokens. It ends the loop before it: both use the same buffers.

        Raises `GenerationError` where the text does not fit into the device's memory.
        """
        return GpuLoop(self._engine_for(settings, kv, view, entries), self._checkpoint)

    def logits(self, ids: Sequence[int], view: View) -> Tensor:
        """Logits of every position, float32 `[T, V]`, by the kernels that decode; both views read KV8."""
        rows, device = DECODE_ROWS, self.device
        # Always whole passes: kernels are compiled for each number of rows.
        room = -(-len(ids) // rows) * rows
        with self.explained(len(ids)), current(device):
            tokens = torch.zeros(room, dtype=torch.int32, device=device)
            tokens[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            position = torch.zeros(1, dtype=torch.int32, device=device)
            forward = self.passes(room)
            pieces = []
            for first in range(0, room, rows):
                place = Place(position.fill_(first), tokens[first : first + rows], 0, rows)
                forward.hidden(place, view)
                pieces.append(forward.all_logits(place, view)[: len(ids) - first].clone())
            return self.checked(torch.cat(pieces))

    def passes(self, entries: int) -> NestedForward:
        """Passes of up to 16 rows over a new cache of at least `entries` entries, which both views read at KV8."""
        capacity = -(-entries // CAPACITY_STEP) * CAPACITY_STEP
        return NestedForward(
            self.weights,
            self._ops,
            rows=DECODE_ROWS,
            capacity=capacity,
            draft_kv=DraftKv(switch=capacity, recent=0),
            device=self.device,
        )

    def checked(self, logits: Tensor) -> Tensor:
        """`logits`. Raises `GenerationError` where one is NaN."""
        if bool(logits.isnan().any()):
            raise not_a_number(self._checkpoint)
        return logits

    def capacity(self, entries: int) -> int:
        """The position of the last token in an engine for texts of `entries` tokens."""
        return next(size for size in self.capacities() if size >= min(entries, self.architecture.max_positions - 1))

    def capacities(self) -> list[int]:
        """Sizes that engines come in: powers of two, and the last position of the model's context."""
        sizes, last = [FIRST_CAPACITY], self.architecture.max_positions - 1
        while sizes[-1] < last:
            sizes.append(2 * sizes[-1])
        return [*sizes[:-1], last]

    @contextmanager
    def explained(self, entries: int) -> Iterator[None]:
        """Out of memory inside becomes a `GenerationError` that says what would fit; the engine is given up."""
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self.release()
            raise GenerationError(self._explanation(self.capacity(entries), failed=True)) from error

    def release(self) -> None:
        """Give up the engine and its memory."""
        self.engine = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _engine_for(self, settings: SamplingSettings, kv: KvSettings, view: View, entries: int) -> Engine:
        """The engine at hand where it does what is asked for and the text fits, otherwise a new one."""
        capacity = self.capacity(entries)
        wanted = (view == "draft", kv, replace(settings, seed=0))
        if self.engine is None or self._settings != wanted or self.engine.capacity < capacity:
            self.release()
            self._check_memory(capacity)
            with self.explained(entries), current(self.device):
                self.engine = self._build(settings, kv, view, capacity)
            self._settings = wanted
        if self.engine.sampling is not None:
            self.engine.sampling.restart(settings.seed)
        return self.engine

    def _build(self, settings: SamplingSettings, kv: KvSettings, view: View, capacity: int) -> Engine:
        sampling = None
        if settings.temperature > 0:
            sampling = DeviceSampling(settings, self.architecture.vocab_size, self.device)
        return Engine(
            self.weights,
            self._ops,
            mode="draft" if view == "draft" else "nested",
            capacity=capacity,
            kv=kv,
            sampling=sampling,
            device=self.device,
        )

    def _check_memory(self, capacity: int) -> None:
        """Raise `GenerationError` where an engine cannot fit."""
        if self._needs()[self._view].total(capacity) > self._free():
            raise GenerationError(self._explanation(capacity))

    def _explanation(self, capacity: int, *, failed: bool = False) -> str:
        needs, free = self._needs(), self._free()
        if failed:
            # By the estimate it might fit; it did not.
            free = min(free, needs[self._view].total(capacity) - 1)
        return explain_out_of_memory(needs, self._view, capacity, free, self.device, self.capacities())

    def _needs(self) -> dict[str, MemoryNeed]:
        return memory_needs(self._checkpoint, self.architecture, partial(workspace_bytes, self.architecture))

    def _free(self) -> int:
        """Bytes that decoding may take, those of the weights included."""
        if self.device.type == "cuda":
            return available_bytes(self.device) + torch.cuda.memory_reserved(self.device)
        return available_bytes(self.device) + self._weight_bytes


def workspace_bytes(architecture: Architecture, capacity: int) -> int:
    """About what buffers take beside weights and cache: those of a prompt's pass, of attention, and of sampling."""
    sizes, rows = architecture, min(ROWS, capacity)
    heads, hidden, intermediate = sizes.heads * sizes.head_dim, sizes.hidden_size, sizes.intermediate_size
    # Per token: stream, projections, queries, attended heads, both halves of the MLP and their product, in float32
    # but for the queries; int8 copies of what the products read.
    projections = heads + 2 * sizes.kv_heads * sizes.head_dim
    prompt = rows * (4 * (hidden + projections + heads + 4 * intermediate) + 3 * heads + hidden + intermediate)
    decoded = 4 * capacity * sizes.kv_heads * sizes.head_dim
    splits = attention_shape(sizes, 0).splits.count(capacity + SLACK)
    partials = 4 * DECODE_ROWS * splits * sizes.heads * (sizes.head_dim + 2)
    logits = 4 * 4 * DECODE_ROWS * sizes.vocab_size
    return RESERVE + 2 * SCRATCH_WEIGHTS + prompt + decoded + partials + logits


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Of torch's allocator, or of the driver, as when a graph is instantiated."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
