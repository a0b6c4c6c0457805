"""Quantized modules of a checkpoint as weights of `kernels.reference_linear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bitnest_format.checkpoint import Checkpoint, NestedWeight
from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.kernels.reference_linear import LinearWeight, View, nested_linear, prepare_linear


class NestedLinear:
    """One or several quantized modules that read the same input; their outputs are stacked in the given order.

    Modules are joined into one product where they share group size and input permutation, as they nearly always do.
    `plane_bytes`: bytes that a view reads of the stored planes, scales, biases and permutations. `product_bytes`: bytes
    of codes that the largest single product reads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        *,
        views: tuple[View, ...],
        unpack: Literal["load", "call"],
        device: torch.device,
    ):
        weights = [checkpoint.weight(name) for name in names]
        self.plane_bytes = {view: sum(_stored_bytes(weight, view) for weight in weights) for view in views}
        self.parts = [_prepare(joined, views, unpack, device) for joined in _join(weights)]
        self.product_bytes = max(part.product_bytes for part in self.parts)

    def __call__(self, x: Tensor, view: View) -> Tensor:
        """float32 `[M, I]` -> float32 `[M, O]`; the input is quantized per token."""
        codes, scale = quantize_activation(x)
        outputs = [nested_linear(codes, scale, part, view) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _prepare(
    weight: NestedWeight, views: tuple[View, ...], unpack: Literal["load", "call"], device: torch.device
) -> LinearWeight:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return prepare_linear(
        weight.base.to(device),
        weight.scale.to(device),
        moved(weight.refinement),
        moved(weight.bias),
        moved(weight.permutation),
        views=views,
        unpack=unpack,
    )


def _join(weights: Sequence[NestedWeight]) -> list[NestedWeight]:
    """Neighbours that can be one product, stacked along outputs."""
    runs: list[list[NestedWeight]] = []
    for weight in weights:
        if runs and _alike(runs[-1][0], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_stack(run) for run in runs]


def _alike(first: NestedWeight, second: NestedWeight) -> bool:
    if first.scale.shape[1] != second.scale.shape[1] or (first.bias is None) != (second.bias is None):
        return False
    if first.permutation is None or second.permutation is None:
        return first.permutation is second.permutation
    return torch.equal(first.permutation, second.permutation)


def _stack(weights: list[NestedWeight]) -> NestedWeight:
    if len(weights) == 1:
        return weights[0]
    refinements = [weight.refinement for weight in weights if weight.refinement is not None]
    biases = [weight.bias.float() for weight in weights if weight.bias is not None]
    return NestedWeight(
        base=torch.cat([weight.base for weight in weights]),
        scale=torch.cat([weight.scale.float() for weight in weights]),
        refinement=torch.cat(refinements) if refinements else None,
        bias=torch.cat(biases) if biases else None,
        permutation=weights[0].permutation,
    )


def _stored_bytes(weight: NestedWeight, view: View) -> int:
    tensors = [weight.base, weight.scale, weight.bias, weight.permutation]
    if view == "target":
        tensors.append(weight.refinement)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
