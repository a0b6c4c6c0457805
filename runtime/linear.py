"""Linear layers of a checkpoint: quantized ones as weights of `kernels.reference_linear`, others as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitnest_format.checkpoint import Checkpoint, NestedWeight
from bitnest_format.kernels.reference import lm_head, quantize_activation
from bitnest_format.kernels.reference_linear import LinearWeight, View, nested_linear, prepare_linear


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A linear layer that the checkpoint leaves unquantized: `[O, I]` as stored, and its bias `[O]`."""

    weight: Tensor
    bias: Tensor | None

    @property
    def product_bytes(self) -> int:
        """Bytes that one product reads in float32."""
        return 4 * self.weight.numel()


class StackedLinear:
    """One or several linear layers that read the same input; their outputs are stacked in the given order.

    Quantized modules are joined into one product where they share group size and input permutation, as they nearly
    always do. Modules that the manifest does not list keep their plain weight and see the input unrounded.
    `plane_bytes`: bytes that a view reads of the stored planes, scales, weights, biases and permutations.
    `product_bytes`: bytes that the largest single product reads.
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
        weights = [_stored(checkpoint, name) for name in names]
        self.plane_bytes = {view: sum(_stored_bytes(weight, view) for weight in weights) for view in views}
        self.parts = [_prepare(joined, views, unpack, device) for joined in join(weights)]
        self.product_bytes = max(part.product_bytes for part in self.parts)

    def __call__(self, x: Tensor, view: View) -> Tensor:
        """float32 `[M, I]` -> float32 `[M, O]`; quantized modules see the input rounded to INT8 per token."""
        codes, scale = quantize_activation(x)
        outputs = [
            _plain_product(x, part) if isinstance(part, PlainWeight) else nested_linear(codes, scale, part, view)
            for part in self.parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _stored(checkpoint: Checkpoint, name: str) -> NestedWeight | PlainWeight:
    if name in checkpoint.manifest.modules:
        return checkpoint.weight(name)
    bias = f"{name}.bias"
    return PlainWeight(
        checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(bias) if bias in checkpoint.weight_map else None
    )


def _plain_product(x: Tensor, plain: PlainWeight) -> Tensor:
    """`x @ W.T + b` in float32; up to 16 rows do not depend on each other, as in the head."""
    output = lm_head(x, plain.weight)
    return output if plain.bias is None else output + plain.bias


def _prepare(
    weight: NestedWeight | PlainWeight, views: tuple[View, ...], unpack: Literal["load", "call"], device: torch.device
) -> LinearWeight | PlainWeight:
    if isinstance(weight, PlainWeight):
        kept = weight.weight.to(device)
        return PlainWeight(
            kept.float() if unpack == "load" else kept, None if weight.bias is None else weight.bias.to(device).float()
        )

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


def join(weights: Sequence[NestedWeight | PlainWeight]) -> list[NestedWeight | PlainWeight]:
    """Neighbours that can be one product, stacked along outputs."""
    joined: list[NestedWeight | PlainWeight] = []
    run: list[NestedWeight] = []
    for weight in weights:
        if isinstance(weight, NestedWeight) and (not run or _alike(run[0], weight)):
            run.append(weight)
            continue
        if run:
            joined.append(_stack(run))
        run = [weight] if isinstance(weight, NestedWeight) else []
        if isinstance(weight, PlainWeight):
            joined.append(weight)
    return [*joined, _stack(run)] if run else joined


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
        # Stays float16 where all parts are; torch.cat widens otherwise.
        scale=torch.cat([weight.scale for weight in weights]),
        refinement=torch.cat(refinements) if refinements else None,
        bias=torch.cat(biases) if biases else None,
        permutation=weights[0].permutation,
    )


def _stored_bytes(weight: NestedWeight | PlainWeight, view: View) -> int:
    if isinstance(weight, PlainWeight):
        return weight.weight.nbytes + (0 if weight.bias is None else weight.bias.nbytes)
    tensors = [weight.base, weight.scale, weight.bias, weight.permutation]
    if view == "target":
        tensors.append(weight.refinement)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
