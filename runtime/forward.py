"""The nodes of one forward pass over static buffers: ten a layer, and two for the head.

Nothing here waits for the device or reads from it, so a pass can be captured into a graph. Two passes are written out:
that of the nested model by either view, and that of its float16 baseline, whose products are the library's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bitnest_format.kernels.operands import Activations, Best, DualPlaneWeight, KvPlanes, Partials, View
from bitnest_format.kernels.ops import Ops
from bitnest_format.runtime.gpu_weights import GpuWeights, HalfLayer, NestedLayer

# Nodes of a layer, by design; `graph_nodes` of an engine counts those that were captured.
NODES_PER_LAYER = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pass stands: row `r` is token `tokens[offset + r]` at position `position + offset + r`.

    `position` int32 `[1]` and `tokens` int32 `[n]` lie on the device; `offset` and `rows` are part of the graph.
    """

    position: Tensor
    tokens: Tensor
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class DraftKv:
    """Up to `switch` entries drafts read KV8, beyond them KV4 but for the `recent` newest."""

    switch: int
    recent: int

    def fine_from(self, stop: int) -> int:
        """The first of `stop` entries that a draft reads at KV8."""
        return max(0, stop - self.recent) if stop > self.switch else 0


class Forward(Protocol):
    """A pass with its buffers."""

    ops: Ops
    best: Best
    logits: Tensor | None

    def hidden(self, place: Place, view: View) -> None:
        """Enqueue all layers."""

    def find_best(self, place: Place, view: View) -> None:
        """Enqueue the head: per block of the vocabulary the best token."""

    def all_logits(self, place: Place, view: View) -> Tensor:
        """Enqueue the head: float32 logits `[R, V]`, of which the first `rows` rows count."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the cache and of all other buffers."""


class NestedForward:
    """The nested model: `rows` rows at most, a cache of `capacity` entries."""

    def __init__(
        self, weights: GpuWeights, ops: Ops, *, rows: int, capacity: int, draft_kv: DraftKv, device: torch.device
    ):
        sizes = weights.architecture
        self.weights, self.ops, self.draft_kv = weights, ops, draft_kv
        self.layers: list[NestedLayer] = [layer for layer in weights.layers if isinstance(layer, NestedLayer)]
        self.rope = weights.rope_of(capacity)
        # Where no text can get past the switch, drafts read as the target does, with its simpler kernel.
        self.may_switch = capacity > draft_kv.switch
        # Zeros rather than whatever was there: a masked entry is multiplied by zero, and NaN would stay NaN.
        heads, size = sizes.kv_heads, sizes.head_dim
        self.planes = torch.zeros(sizes.layers, 2, 2, heads, capacity, size // 2, dtype=torch.uint8, device=device)
        self.scale = torch.zeros(sizes.layers, 2, heads, capacity, dtype=torch.float32, device=device)
        self.cache = [KvPlanes(planes, scale) for planes, scale in zip(self.planes, self.scale, strict=True)]

        def buffer(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.float32, device=device)

        self.stream, self.final = buffer(sizes.hidden_size), buffer(sizes.hidden_size)
        self.qkv, self.mlp = buffer(self.layers[0].shape.projections), buffer(sizes.intermediate_size)
        self.hidden_acts = Activations.empty(rows, sizes.hidden_size, device)
        self.attention_acts = Activations.empty(rows, sizes.heads * size, device)
        self.mlp_acts = Activations.empty(rows, sizes.intermediate_size, device)
        self.partials = Partials.empty(rows, self.layers[0].shape, capacity, device)
        self.best = empty_best(weights, ops, rows, device)
        self.logits: Tensor | None = None

    def hidden(self, place: Place, view: View) -> None:
        """Enqueue all layers; the stream then holds each row's hidden state before the final norm."""
        activation, attention, product = self.ops.activation, self.ops.attention, self.ops.dual_plane
        rows, epsilon = place.rows, self.weights.architecture.norm_epsilon
        for number, layer in enumerate(self.layers):
            acts = self.hidden_acts.ordered_for(layer.qkv)
            if number == 0:
                activation.embed_norm_quantize(
                    place.tokens, self.weights.embedding, layer.input_norm, epsilon, self.stream, acts, rows,
                    place.offset,
                )  # fmt: skip
            else:
                activation.norm_quantize(self.stream, layer.input_norm, epsilon, acts, rows)
            product.dual_plane_linear(acts, layer.qkv, view, self.qkv, rows)
            attention.attend(
                self.qkv, layer.head_norm, self.rope, place.position, place.offset, self.cache[number], layer.shape,
                self.partials, rows, draft=view == "draft" and self.may_switch, kv_switch=self.draft_kv.switch,
                kv_recent=self.draft_kv.recent,
            )  # fmt: skip
            acts = self.attention_acts.ordered_for(layer.o)
            # Two nodes: one whose last program quantizes the row waits for that program longer (benchmarks/gpu-log.md).
            merged = self.partials.merged
            attention.combine(self.partials, place.position, place.offset, layer.shape, merged, rows)
            activation.quantize(merged, acts, rows)
            product.dual_plane_linear(acts, layer.o, view, self.stream, rows, add=True)
            acts = self.hidden_acts.ordered_for(layer.gate_up)
            activation.norm_quantize(self.stream, layer.mlp_norm, epsilon, acts, rows)
            product.dual_plane_gate_up(acts, layer.gate_up, view, self.mlp, rows)
            acts = self.mlp_acts.ordered_for(layer.down)
            activation.quantize(self.mlp, acts, rows)
            product.dual_plane_linear(acts, layer.down, view, self.stream, rows, add=True)

    def find_best(self, place: Place, view: View) -> None:
        """Enqueue the final norm and the head: the best token of every block, into `best`."""
        head = self.weights.head
        self._final_norm(place.rows)
        if isinstance(head, DualPlaneWeight):
            self.ops.dual_plane.dual_plane_argmax(self.hidden_acts.ordered_for(head), head, view, self.best, place.rows)
        else:
            self.ops.head.head_argmax(self.final, head, self.best, place.rows)

    def all_logits(self, place: Place, view: View) -> Tensor:
        """Enqueue the final norm and the head: all logits."""
        head = self.weights.head
        if self.logits is None:
            shape = (self.stream.shape[0], self.weights.architecture.vocab_size)
            self.logits = torch.empty(shape, dtype=torch.float32, device=self.stream.device)
        self._final_norm(place.rows)
        if isinstance(head, DualPlaneWeight):
            acts = self.hidden_acts.ordered_for(head)
            self.ops.dual_plane.dual_plane_linear(acts, head, view, self.logits, place.rows)
        else:
            self.ops.head.head_logits(self.final, head, self.logits, place.rows)
        return self.logits

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the cache and of all other buffers."""
        return {"cache": self.planes.nbytes + self.scale.nbytes, "workspace": _bytes_of(self)}

    def _final_norm(self, rows: int) -> None:
        norm, epsilon = self.weights.final_norm, self.weights.architecture.norm_epsilon
        head = self.weights.head
        if isinstance(head, DualPlaneWeight):
            self.ops.activation.norm_quantize(self.stream, norm, epsilon, self.hidden_acts.ordered_for(head), rows)
        else:
            self.ops.activation.norm(self.stream, norm, epsilon, self.final, rows)


class HalfForward:
    """The float16 baseline: cuBLAS products, and the same small kernels around them as the nested model has."""

    def __init__(self, weights: GpuWeights, ops: Ops, *, rows: int, capacity: int, device: torch.device):
        sizes = weights.architecture
        self.weights, self.ops = weights, ops
        self.layers: list[HalfLayer] = [layer for layer in weights.layers if isinstance(layer, HalfLayer)]
        self.rope = weights.rope_of(capacity)
        self.entries = torch.zeros(
            sizes.layers, 2, sizes.kv_heads, capacity, sizes.head_dim, dtype=torch.float16, device=device
        )

        def buffer(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.float16, device=device)

        self.stream, self.normed = buffer(sizes.hidden_size), buffer(sizes.hidden_size)
        self.qkv, self.attended = buffer(self.layers[0].shape.projections), buffer(sizes.heads * sizes.head_dim)
        self.gate_up, self.mlp = buffer(2 * sizes.intermediate_size), buffer(sizes.intermediate_size)
        self.final = torch.zeros(rows, sizes.hidden_size, dtype=torch.float32, device=device)
        self.partials = Partials.empty(rows, self.layers[0].shape, capacity, device)
        self.best = empty_best(weights, ops, rows, device)
        self.logits: Tensor | None = None

    def hidden(self, place: Place, view: View) -> None:
        """Enqueue all layers; there is one view only."""
        activation, attention = self.ops.activation, self.ops.attention
        rows, epsilon = place.rows, self.weights.architecture.norm_epsilon
        stream, normed, qkv = self.stream[:rows], self.normed[:rows], self.qkv[:rows]
        for number, layer in enumerate(self.layers):
            if number == 0:
                activation.embed_norm_half(
                    place.tokens, self.weights.embedding, layer.input_norm, epsilon, self.stream, self.normed, rows,
                    place.offset,
                )  # fmt: skip
            else:
                activation.norm_half(self.stream, layer.input_norm, epsilon, self.normed, rows)
            if layer.qkv_bias is None:
                torch.mm(normed, layer.qkv.T, out=qkv)
            else:
                torch.addmm(layer.qkv_bias, normed, layer.qkv.T, out=qkv)
            keys, values = self.entries[number]
            attention.attend_half(
                self.qkv, self.rope, place.position, place.offset, keys, values, layer.shape, self.partials, rows,
                layer.head_norm,
            )  # fmt: skip
            attention.combine_half(self.partials, place.position, place.offset, layer.shape, self.attended, rows)
            stream.addmm_(self.attended[:rows], layer.o.T)
            activation.norm_half(self.stream, layer.mlp_norm, epsilon, self.normed, rows)
            torch.mm(normed, layer.gate_up.T, out=self.gate_up[:rows])
            activation.silu_mul_half(self.gate_up, self.mlp, rows)
            stream.addmm_(self.mlp[:rows], layer.down.T)

    def find_best(self, place: Place, view: View) -> None:
        """Enqueue the final norm and the head; the head's kernel is the nested model's, which beats cuBLAS + argmax."""
        epsilon = self.weights.architecture.norm_epsilon
        self.ops.activation.norm(self.stream, self.weights.final_norm, epsilon, self.final, place.rows)
        self.ops.head.head_argmax(self.final, self.weights.head, self.best, place.rows)

    def all_logits(self, place: Place, view: View) -> Tensor:
        """Not needed: the baseline is measured by greedy decoding."""
        raise NotImplementedError

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the cache and of all other buffers."""
        return {"cache": self.entries.nbytes, "workspace": _bytes_of(self) - self.entries.nbytes}


def empty_best(weights: GpuWeights, ops: Ops, rows: int, device: torch.device) -> Best:
    """Room for what the head finds, by either view."""
    head = weights.head
    if isinstance(head, DualPlaneWeight):
        blocks = ops.dual_plane.argmax_blocks(head.outputs)
    else:
        blocks = ops.head.head_blocks(head.shape[0])
    return Best(
        value=torch.zeros(rows, blocks, dtype=torch.float32, device=device),
        index=torch.zeros(rows, blocks, dtype=torch.int32, device=device),
    )


def _bytes_of(forward: object) -> int:
    """Bytes of the tensors and groups of tensors that are attributes of a pass, weights and the nested cache apart."""
    total = 0
    for name, value in vars(forward).items():
        if name in ("planes", "scale", "weights"):
            continue
        parts = [value, *(getattr(value, slot) for slot in getattr(value, "__slots__", ()) if slot != "rope")]
        total += sum(part.nbytes for part in parts if isinstance(part, Tensor))
    return total
