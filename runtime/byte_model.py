"""How many bytes a decoding step has to read, and how many a model keeps: arithmetic on sizes alone.

Counted are what grows with the model or the text: codes and scales of the linear layers, the head, the cache. Left out
are activations, norm gains, biases and one row of the embedding, together below 0.1 % of a 7B model's step.
A draft step reads base planes, a target step both planes, a half step the same matrices in 16 bits, whatever its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitnest_format.architecture import Architecture

StepView = Literal["half", "draft", "target"]
HeadKind = Literal["half", "nested"]

HALF_BYTES = 2
KV_SCALE_BYTES = 4
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How nested weights are stored. `group_size` -1 is one group per row; elsewhere, where it does not divide a
    matrix's inputs, the largest of 64 and 32 that does is taken. `scale_bytes`: 2 or 4. `head`: what the head is.
    """

    group_size: int = GROUP_SIZES[0]
    scale_bytes: int = 2
    head: HeadKind = "half"

    def groups(self, inputs: int) -> int:
        """Groups of a row of `inputs` inputs."""
        if self.group_size == -1:
            return 1
        fitting = [size for size in (self.group_size, *GROUP_SIZES) if size <= self.group_size and inputs % size == 0]
        if not fitting:
            raise ValueError(f"no group size up to {self.group_size} divides {inputs} inputs")
        return inputs // fitting[0]

    def matrix_bytes(self, outputs: int, inputs: int, planes: int) -> int:
        """Codes in `planes` planes, and the scales, of a nested matrix."""
        return outputs * (planes * inputs // 2 + self.groups(inputs) * self.scale_bytes)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one forward pass reads."""

    linears: int
    head: int
    cache: int

    @property
    def total(self) -> int:
        return self.linears + self.head + self.cache


def step_bytes(
    architecture: Architecture, view: StepView, context: int, storage: Storage, *, fine_from: int = 0
) -> StepBytes:
    """Bytes of one pass over `context` cache entries; a draft reads those before `fine_from` at KV4, others at KV8."""
    planes = 1 if view == "draft" else 2
    return StepBytes(
        linears=linear_bytes(architecture, storage, half=view == "half", planes=planes),
        head=head_bytes(architecture, storage, half=view == "half", planes=planes),
        cache=cache_read_bytes(architecture, view, context, fine_from),
    )


def linear_bytes(architecture: Architecture, storage: Storage, *, half: bool, planes: int = 2) -> int:
    """All linear layers but the head, in 16 bits or nested."""
    shapes = [shape for _, shape in architecture.modules()]
    if half:
        return sum(HALF_BYTES * outputs * inputs for outputs, inputs in shapes)
    return sum(storage.matrix_bytes(outputs, inputs, planes) for outputs, inputs in shapes)


def head_bytes(architecture: Architecture, storage: Storage, *, half: bool, planes: int = 2) -> int:
    """The head; the half engine's is always 16 bits wide."""
    vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
    if half or storage.head == "half":
        return HALF_BYTES * vocabulary * hidden
    return storage.matrix_bytes(vocabulary, hidden, planes)


def cache_read_bytes(architecture: Architecture, view: StepView, context: int, fine_from: int = 0) -> int:
    """Keys and values of `context` entries over all layers, each within its attention window."""
    total = 0
    for window in architecture.sliding_windows:
        first = 0 if window is None else max(0, context - window)
        coarse = max(0, min(fine_from, context) - first) if view == "draft" else 0
        fine = context - first - coarse
        total += coarse * entry_bytes(architecture, "coarse") + fine * entry_bytes(
            architecture, "half" if view == "half" else "fine"
        )
    return total


def entry_bytes(architecture: Architecture, kind: Literal["half", "fine", "coarse"]) -> int:
    """Key and value of one token in one layer: 16-bit, KV8 or KV4 with one float32 scale a head."""
    per_head = {
        "half": HALF_BYTES * architecture.head_dim,
        "fine": architecture.head_dim + KV_SCALE_BYTES,
        "coarse": architecture.head_dim // 2 + KV_SCALE_BYTES,
    }[kind]
    return 2 * architecture.kv_heads * per_head


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Bytes that one engine keeps."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def memory_bytes(architecture: Architecture, capacity: int, storage: Storage, *, half: bool) -> MemoryBytes:
    """Weights with a 16-bit embedding, and a cache of `capacity` entries; the half engine's cache is 16 bits wide."""
    weights = linear_bytes(architecture, storage, half=half)
    weights += HALF_BYTES * architecture.vocab_size * architecture.hidden_size
    if not architecture.tied_embeddings or not (half or storage.head == "half"):
        weights += head_bytes(architecture, storage, half=half)
    entry = entry_bytes(architecture, "half" if half else "fine")
    return MemoryBytes(weights=weights, cache=architecture.layers * capacity * entry)
