"""A quantized model beside the full-precision model it was made from, as one source.

The quantized model gives everything that a draft needs: base planes, embedding, norms, head, biases. The reference
gives the weights that the refinement has to reach. Both must be the same model: a refinement towards another revision,
or towards weights that are rotated differently, would be worthless and look like any other. So all tensors that both
store are compared, and for each quantized module the residual is measured, before any work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.converters.base import (
    BaseSource,
    GivenBase,
    Inspection,
    Source,
    given_modules,
)
from bitnest_format.converters.packed import listed
from bitnest_format.errors import SourceError, UsageError

# |W - q4 s4| / |q4 s4| over a module, Frobenius norms. Base planes of the right weights give 0.09 to 0.40 by six
# methods, wrong weights (rotated, or of another layer) 1 and more: `benchmarks/reference_residuals.py`.
LARGEST_RESIDUAL = 0.6
# Two roundings to bfloat16 or float16 of the same value differ by less, relative to it or absolutely.
ROUNDING = 2.0**-7
SMALLEST_VALUE = 2.0**-24
ROWS_AT_ONCE = 1 << 22
# What a config may state differently: settings of its own use, not of the weights.
FREE_FIELDS = ("tied_embeddings", "max_positions", "sliding_windows", "rope", "family")


def with_reference(source: Source, reference: Source) -> ReferencedSource:
    """Both as one source. Raises `UsageError` or `SourceError` where they cannot be the same model."""
    if not isinstance(source, BaseSource) or not source.given:
        raise UsageError(
            f"--reference: {source.location} is not quantized; a reference is for GPTQ and compressed-tensors models. "
            "Leave it out."
        )
    if given_modules(reference):
        raise SourceError(
            f"--reference: {reference.location} is quantized itself, expected the full-precision model that "
            f"{source.location} was made from"
        )
    return ReferencedSource(source, reference)


class ReferencedSource:
    """See `with_reference`; the attributes are those of `BaseSource`."""

    def __init__(self, quantized: BaseSource, reference: Source):
        self.quantized = quantized
        self.reference = reference
        self.config: Mapping[str, Any] = quantized.config
        self.architecture = read_architecture(quantized.config, quantized.tensors)
        self.provenance = replace(quantized.provenance, reference=reference.provenance)
        self.location = quantized.location
        self.tensors = quantized.tensors
        self.given = quantized.given
        self.refinable = True
        self.notes = [*quantized.notes, *(f"reference: {note}" for note in reference.notes)]
        theirs = read_architecture(reference.config, reference.tensors)
        problems = [*_config_problems(self.architecture, theirs), *self._missing()]
        if problems:
            raise SourceError(problems)

    def _missing(self) -> Iterator[str]:
        names = dict.fromkeys([*self.tensors, *(f"{module}.weight" for module in self.given)])
        absent = [name for name in names if self._counterpart(name) not in self.reference.tensors]
        if absent:
            yield f"--reference: {self.reference.location} lacks {listed(absent)}, which the quantized model has"

    def _counterpart(self, name: str) -> str:
        """The reference's name of a tensor: a head that it ties is its embedding."""
        tied = name == self.architecture.head and name not in self.reference.tensors
        return self.architecture.embedding if tied else name

    def read(self, name: str) -> Tensor:
        """Weights of given modules from the reference, everything else from the quantized model."""
        if name.removesuffix(".weight") in self.given:
            return self.reference.read(self._counterpart(name))
        return self.quantized.read(name)

    def given_base(self, module: str) -> GivenBase:
        """The quantized model's base plane."""
        return self.quantized.given_base(module)

    def inspect(self) -> Inspection:
        """Both sources' findings, and whether they are the same model."""
        quantized, reference = self.quantized.inspect(), self.reference.inspect()
        self.notes[:] = dict.fromkeys(
            [*self.quantized.notes, *(f"reference: {note}" for note in self.reference.notes), *self.notes]
        )
        problems = [*quantized.problems, *(f"reference: {problem}" for problem in reference.problems)]
        if not problems:
            problems += [*self._differences(), *self._residuals()]
        return Inspection(
            problems=problems, fingerprint=quantized.fingerprint, reference_fingerprint=reference.fingerprint
        )

    def _differences(self) -> Iterator[str]:
        """Tensors that both models store, and that differ by more than a rounding to 16 bits."""
        found = []
        for name in self.tensors:
            if name.removesuffix(".weight") not in self.given:
                ours, theirs = self.quantized.read(name), self.reference.read(self._counterpart(name))
                if ours.shape != theirs.shape:
                    found.append(f"{name} (shapes {list(ours.shape)} and {list(theirs.shape)})")
                elif share := _share_that_differs(ours, theirs):
                    found.append(f"{name} ({share:.1%} of its values)")
        if found:
            yield (
                f"--reference: {self.reference.location} is another model than {self.location} was made from: both "
                f"store {listed(found)}, and they differ by more than rounding. Give the revision that was quantized."
            )

    def _residuals(self) -> Iterator[str]:
        """Modules whose reference lies too far from their base."""
        found = []
        for module, given in self.given.items():
            weight = self.reference.read(self._counterpart(f"{module}.weight"))
            if tuple(weight.shape) != given.shape:
                found.append(f"{module} (shape {list(weight.shape)}, expected {list(given.shape)})")
            elif not (residual := relative_residual(weight, self.given_base(module))) <= LARGEST_RESIDUAL:
                found.append(f"{module} ({residual:.2f})")
        if found:
            yield (
                f"--reference: the weights of {self.reference.location} are not those that {self.location} was "
                f"quantized from: relative distances to the base of {listed(found)}, expected at most "
                f"{LARGEST_RESIDUAL}; another model, another revision, or weights that were rotated first. Give the "
                "model that was quantized, or leave --reference out for a draft-only checkpoint."
            )

    def write_side_files(self, folder: Any) -> list[str]:
        """Those of the quantized model."""
        return self.quantized.write_side_files(folder)


def relative_residual(weight: Tensor, base: GivenBase) -> float:
    """`|W - q4 s4| / |q4 s4|`, Frobenius norms, of a weight `[O, I]` in the order of inputs.

    Infinite beside a base of zeros.
    """
    if base.permutation is not None:
        weight = weight.index_select(1, base.permutation)
    rows = max(1, ROWS_AT_ONCE // weight.shape[1])
    distance = size = 0.0
    parts = zip(weight.split(rows), base.codes.split(rows), base.scale.split(rows), strict=True)
    for goal, codes, scale in parts:
        draft = nesting.draft_weight(codes, scale)
        distance += float((goal.float() - draft).square().sum(dtype=torch.float64))
        size += float(draft.square().sum(dtype=torch.float64))
    if size == 0:
        return 0.0 if distance == 0 else float("inf")
    return (distance / size) ** 0.5


def _share_that_differs(ours: Tensor, theirs: Tensor) -> float:
    """The share of values that are not roundings of each other."""
    differing = 0
    rows = max(1, ROWS_AT_ONCE // max(1, ours[0].numel()))
    for one, other in zip(ours.split(rows), theirs.split(rows), strict=True):
        one, other = one.float(), other.float()
        allowed = torch.maximum(one.abs(), other.abs()).mul_(ROUNDING).clamp_min_(SMALLEST_VALUE)
        differing += int(((one - other).abs() > allowed).sum())
    return differing / ours.numel()


def _config_problems(ours: Architecture, theirs: Architecture) -> Iterator[str]:
    """Where the two configs describe different models."""
    different = [
        f"{field.name} {getattr(ours, field.name)} and {getattr(theirs, field.name)}"
        for field in fields(ours)
        if field.name not in FREE_FIELDS and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if different:
        yield (
            f"--reference: config.json of the quantized model and of the reference describe different models: "
            f"{', '.join(different)}. Give the model that was quantized."
        )
