"""A quantized module as an export writes it: one of the checkpoint, or several that others know as one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bitnest_format.checkpoint import Checkpoint, NestedWeight
from bitnest_format.errors import CheckpointError
from bitnest_format.manifest import Module, Plane
from bitnest_format.shards import tensor_sha256


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """One module of the export, each plane compared with the manifest's digest as it is read.

    `parts`: the modules of the checkpoint whose rows it consists of, by name; nearly always one.
    """

    checkpoint: Checkpoint
    name: str
    parts: Mapping[str, Module]

    @property
    def module(self) -> Module:
        """The record of all parts together; its planes are those of the first."""
        first = next(iter(self.parts.values()))
        return replace(first, shape=(sum(part.shape[0] for part in self.parts.values()), first.shape[1]))

    def weight(self) -> NestedWeight:
        weights = [self._weight(name, module) for name, module in self.parts.items()]
        if len(weights) == 1:
            return weights[0]
        refinements = [weight.refinement for weight in weights if weight.refinement is not None]
        return NestedWeight(
            base=torch.cat([weight.base for weight in weights]),
            scale=torch.cat([weight.scale for weight in weights]),
            refinement=torch.cat(refinements) if refinements else None,
            permutation=weights[0].permutation,
        )

    def scale(self) -> Tensor:
        scales = []
        for name, module in self.parts.items():
            scales.append(self.checkpoint.scale(name))
            self._check(module.scale, scales[-1])
        # Exact where types differ: the wider one.
        return torch.cat(scales)

    def permutation(self) -> Tensor | None:
        return self.checkpoint.permutation(next(iter(self.parts)))

    def one_permutation(self) -> bool:
        """Whether all parts read their inputs in the same order."""
        if len(self.parts) == 1 or not any(part.permutation for part in self.parts.values()):
            return True
        orders = [self.checkpoint.permutation(name) for name in self.parts]
        first = orders[0]
        return first is not None and all(order is not None and torch.equal(order, first) for order in orders)

    def _weight(self, name: str, module: Module) -> NestedWeight:
        weight = self.checkpoint.weight(name)
        self._check(module.base, weight.base)
        self._check(module.scale, weight.scale)
        if weight.refinement is not None and module.refinement is not None:
            self._check(module.refinement, weight.refinement)
        return weight

    def _check(self, plane: Plane, tensor: Tensor) -> None:
        if (found := tensor_sha256(tensor)) != plane.sha256:
            raise CheckpointError(
                f"{self.checkpoint.weight_map[plane.name]}: {plane.name}: SHA-256 is {found[:12]}..., expected "
                f"{plane.sha256[:12]}... as in the manifest. Restore the shard, or download the checkpoint again."
            )
