"""A model's parameters as the kernels read them, from a checkpoint or at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import Checkpoint, NestedWeight
from bitnest_format.errors import UnsupportedModelError
from bitnest_format.families import ATTENTION_INPUTS, ATTENTION_OUTPUT, MLP_INPUTS, MLP_OUTPUT
from bitnest_format.kernels.operands import AttentionShape, DualPlaneWeight, Rope, View, scale_pairs
from bitnest_format.runtime.linear import join
from bitnest_format.runtime.model import check_module, checked_tensor, has_nested_head
from bitnest_format.runtime.rope import RopeTable

# The standard deviation of uniform base codes -8..7, by which random weights get that of trained ones.
CODE_DEVIATION = 4.6


@dataclass(frozen=True, slots=True)
class NestedLayer:
    """One decoder layer; `qkv` stacks its three projections, `gate_up` alternates rows of gate and up."""

    shape: AttentionShape
    input_norm: Tensor
    qkv: DualPlaneWeight
    head_norm: Tensor | None
    o: DualPlaneWeight
    mlp_norm: Tensor
    gate_up: DualPlaneWeight
    down: DualPlaneWeight

    def linears(self) -> tuple[DualPlaneWeight, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class HalfLayer:
    """One layer of the float16 baseline: weights `[O, I]`, `gate_up` holding gate, then up."""

    shape: AttentionShape
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All parameters of one model, of either kind of layer. `head`: `[V, H]`, or a nested weight."""

    architecture: Architecture
    embedding: Tensor
    layers: Sequence[NestedLayer] | Sequence[HalfLayer]
    final_norm: Tensor
    head: Tensor | DualPlaneWeight
    rope: RopeTable

    def rope_of(self, positions: int) -> Rope:
        """Cosines and sines of the first positions."""
        cosine, sine = self.rope.rows(0, positions)
        return Rope(cosine.squeeze(1).contiguous(), sine.squeeze(1).contiguous())

    def nbytes(self) -> int:
        """Bytes of all parameters, tensors that are used twice counted once."""
        seen = {tensor.data_ptr(): tensor.nbytes for tensor in self._tensors()}
        return sum(seen.values())

    def read_bytes(self, view: View) -> int:
        """Bytes that one pass of nested layers reads by a view: planes, scales, biases, permutations, the head."""
        products: list[Tensor | DualPlaneWeight] = [self.head]
        for layer in self.layers:
            products += layer.linears() if isinstance(layer, NestedLayer) else ()
        if view == "draft":
            products = [
                replace(product, refinement=None) if isinstance(product, DualPlaneWeight) else product
                for product in products
            ]
        return sum(tensor.nbytes for product in products for tensor in _tensors_of(product))

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.final_norm)
        yield from _tensors_of(self.head)
        for layer in self.layers:
            for name in layer.__slots__:
                yield from _tensors_of(getattr(layer, name))


def load_weights(checkpoint: Checkpoint, view: Literal["draft", "target"], device: torch.device) -> GpuWeights:
    """The parameters of a checkpoint; the refinement only where the target will be asked for.

    Raises `UnsupportedModelError` where a layer is not one nested product, which `gpu_limits.gpu_obstacles` tells
    before, and `CheckpointError` where a shape is not the one that config.json gives.
    """
    architecture = checkpoint.architecture()
    nested = checkpoint.manifest.modules
    shapes, module_shapes = architecture.tensors(), dict(architecture.modules(nested_head=True))

    def weight(names: Sequence[str], *, interleave: bool = False) -> DualPlaneWeight:
        plain = [name for name in names if name not in nested]
        for name in nested.keys() & names:
            check_module(checkpoint, name, module_shapes[name])
        parts = [] if plain else join([checkpoint.weight(name) for name in names])
        if len(parts) != 1 or not isinstance(parts[0], NestedWeight):
            what = f"{plain[0]} is not quantized" if plain else f"{', '.join(names)} differ in groups or permutation"
            raise UnsupportedModelError(f"the GPU runtime cannot run this checkpoint: {what}. Use --device cpu.")
        return dual_plane_weight(parts[0], device, interleave=interleave, refined=view == "target")

    def tensor(name: str) -> Tensor:
        return checked_tensor(checkpoint, name, shapes[name]).to(device)

    def layer(number: int) -> NestedLayer:
        prefix = architecture.layer_prefix(number)
        input_norm, mlp_norm = architecture.norm_names(number)
        return NestedLayer(
            shape=attention_shape(architecture, number),
            input_norm=tensor(input_norm).float(),
            qkv=weight([f"{prefix}{name}" for name in ATTENTION_INPUTS]),
            head_norm=_head_norm(architecture, [tensor(name) for name in architecture.head_norm_names(number)]),
            o=weight([f"{prefix}{ATTENTION_OUTPUT}"]),
            mlp_norm=tensor(mlp_norm).float(),
            gate_up=weight([f"{prefix}{name}" for name in MLP_INPUTS], interleave=True),
            down=weight([f"{prefix}{MLP_OUTPUT}"]),
        )

    embedding = tensor(architecture.embedding)
    head: Tensor | DualPlaneWeight
    if has_nested_head(checkpoint, architecture):
        head = weight([architecture.head_module])
    else:
        head = embedding if architecture.tied_embeddings else tensor(architecture.head)
    return GpuWeights(
        architecture=architecture,
        embedding=embedding,
        layers=[layer(number) for number in range(architecture.layers)],
        final_norm=tensor(architecture.final_norm).float(),
        head=head,
        rope=RopeTable(architecture, device),
    )


def random_nested(
    config: Mapping[str, Any],
    device: torch.device,
    *,
    group_size: int = 128,
    scale_type: torch.dtype = torch.float16,
    nested_head: bool = False,
    seed: int = 0,
) -> GpuWeights:
    """Random codes in the shapes of a model, for measuring: every code equally often, scales as of trained weights."""
    generator = torch.Generator(device).manual_seed(seed)

    def plane(outputs: int, inputs: int) -> Tensor:
        shape = (outputs, inputs // packing.CODES_PER_WORD)
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator)

    def weight(outputs: int, inputs: int, bias: bool = False) -> DualPlaneWeight:
        groups = 1 if group_size == -1 else inputs // group_size
        scale = torch.rand(outputs, groups, device=device, generator=generator) + 0.5
        scale = (scale / (CODE_DEVIATION * inputs**0.5)).to(scale_type)
        base = plane(outputs, inputs)
        # Where a base code is -8 (a nibble of zeros), the refinement's highest bit makes its code 0 or more.
        lowest = ~(base | base >> 1 | base >> 2 | base >> 3) & 0x11111111
        return DualPlaneWeight(
            base=base,
            refinement=plane(outputs, inputs) | lowest << 3,
            scale=scale,
            bias=torch.zeros(outputs, device=device) if bias else None,
            scale_pairs=scale_pairs(scale, inputs // groups),
        )

    sizes = read_architecture(config)

    def layer(number: int) -> NestedLayer:
        ones, head_norm = _norms(sizes, device)
        return NestedLayer(
            shape=attention_shape(sizes, number),
            input_norm=ones,
            qkv=weight(*_stacked_shape(sizes, ATTENTION_INPUTS), bias=sizes.attention_bias),
            head_norm=head_norm,
            o=weight(*_stacked_shape(sizes, (ATTENTION_OUTPUT,))),
            mlp_norm=ones,
            gate_up=weight(*_stacked_shape(sizes, MLP_INPUTS)),
            down=weight(*_stacked_shape(sizes, (MLP_OUTPUT,))),
        )

    embedding = _random_half(sizes.head_shape, device, generator)
    head: Tensor | DualPlaneWeight = _random_half(sizes.head_shape, device, generator)
    return GpuWeights(
        architecture=sizes,
        embedding=embedding,
        layers=[layer(number) for number in range(sizes.layers)],
        final_norm=torch.ones(sizes.hidden_size, device=device),
        head=weight(*sizes.head_shape) if nested_head else head,
        rope=RopeTable(sizes, device),
    )


def random_half(config: Mapping[str, Any], device: torch.device, *, seed: int = 0) -> GpuWeights:
    """Random float16 weights in the shapes of a model: the baseline."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = read_architecture(config)

    def layer(number: int) -> HalfLayer:
        ones, head_norm = _norms(sizes, device)
        qkv = _stacked_shape(sizes, ATTENTION_INPUTS)
        return HalfLayer(
            shape=attention_shape(sizes, number),
            input_norm=ones,
            qkv=_random_half(qkv, device, generator),
            qkv_bias=torch.zeros(qkv[0], dtype=torch.float16, device=device) if sizes.attention_bias else None,
            head_norm=head_norm,
            o=_random_half(_stacked_shape(sizes, (ATTENTION_OUTPUT,)), device, generator),
            mlp_norm=ones,
            gate_up=_random_half(_stacked_shape(sizes, MLP_INPUTS), device, generator),
            down=_random_half(_stacked_shape(sizes, (MLP_OUTPUT,)), device, generator),
        )

    return GpuWeights(
        architecture=sizes,
        embedding=_random_half(sizes.head_shape, device, generator),
        layers=[layer(number) for number in range(sizes.layers)],
        final_norm=torch.ones(sizes.hidden_size, device=device),
        head=_random_half(sizes.head_shape, device, generator),
        rope=RopeTable(sizes, device),
    )


def half_from_nested(nested: GpuWeights) -> GpuWeights:
    """The target view of nested weights in float16: the baseline of a checkpoint, its text the same up to rounding."""
    layers = []
    for layer in nested.layers:
        assert isinstance(layer, NestedLayer)
        gate_up = _dequantized(layer.gate_up)
        layers.append(
            HalfLayer(
                shape=layer.shape,
                input_norm=layer.input_norm,
                qkv=_dequantized(layer.qkv),
                qkv_bias=None if layer.qkv.bias is None else layer.qkv.bias.half(),
                head_norm=layer.head_norm,
                o=_dequantized(layer.o),
                mlp_norm=layer.mlp_norm,
                gate_up=torch.cat((gate_up[0::2], gate_up[1::2])),
                down=_dequantized(layer.down),
            )
        )
    head = nested.head if isinstance(nested.head, Tensor) else _dequantized(nested.head)
    return GpuWeights(nested.architecture, nested.embedding, layers, nested.final_norm, head, nested.rope)


def attention_shape(architecture: Architecture, layer: int) -> AttentionShape:
    """What attention needs to know of one layer."""
    return AttentionShape(
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        window=architecture.sliding_windows[layer],
        norm_epsilon=architecture.norm_epsilon,
    )


def dual_plane_weight(
    weight: NestedWeight, device: torch.device, *, interleave: bool = False, refined: bool = True
) -> DualPlaneWeight:
    """Stored tensors on the device as they are; with `interleave`, rows of the first and second half alternate."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.to(device)
        return torch.stack(tensor.chunk(2), dim=1).flatten(0, 1).contiguous() if interleave else tensor.contiguous()

    base, scale = moved(weight.base), moved(weight.scale)
    bias = moved(weight.bias)
    assert base is not None and scale is not None
    scale = scale if scale.dtype == torch.float16 else scale.float()
    return DualPlaneWeight(
        base=base,
        refinement=moved(weight.refinement) if refined else None,
        scale=scale,
        bias=None if bias is None else bias.float(),
        permutation=None if weight.permutation is None else weight.permutation.to(device, torch.int32),
        scale_pairs=scale_pairs(scale, packing.CODES_PER_WORD * base.shape[1] // scale.shape[1]),
    )


def _dequantized(weight: DualPlaneWeight) -> Tensor:
    """The target view as float16 `[O, I]`, in the order of inputs."""
    assert weight.refinement is not None
    codes = 16 * packing.unpack(weight.base).float() + packing.unpack(weight.refinement).float()
    dense = codes * (weight.scale.float() / 16).repeat_interleave(weight.group_size, dim=1)
    if weight.permutation is not None:
        dense = torch.empty_like(dense).index_copy_(1, weight.permutation.long(), dense)
    return dense.half()


def _head_norm(architecture: Architecture, gains: Sequence[Tensor]) -> Tensor | None:
    if not gains:
        return None
    query, key = (gain.float() for gain in gains)
    return torch.cat((query.expand(architecture.heads, -1), key.expand(architecture.kv_heads, -1))).contiguous()


def _norms(sizes: Architecture, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Gains of one for a layer's norms and, where there are such, its head norms."""
    heads = torch.ones(sizes.heads + sizes.kv_heads, sizes.head_dim, device=device) if sizes.family.head_norms else None
    return torch.ones(sizes.hidden_size, device=device), heads


def _stacked_shape(sizes: Architecture, linears: Sequence[str]) -> tuple[int, int]:
    shapes = [sizes.linear_shape(linear) for linear in linears]
    return sum(outputs for outputs, _ in shapes), shapes[0][1]


def _random_half(shape: tuple[int, int], device: torch.device, generator: torch.Generator) -> Tensor:
    dense = torch.empty(shape, dtype=torch.float16, device=device)
    return dense.normal_(0.0, shape[1] ** -0.5, generator=generator)


def _tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, DualPlaneWeight):
        for tensor in (value.base, value.refinement, value.scale, value.bias, value.permutation):
            if tensor is not None:
                yield tensor
