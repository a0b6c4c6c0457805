"""What every source of a model offers to the pipeline, whatever its files look like.

A source names its tensors as Hugging Face checkpoints of the same architecture do, and reads one at a time.
It converts nothing: rotation, quantization and writing belong to the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a model came from, as the manifest records it."""

    kind: str
    name: str | None = None
    revision: str | None = None
    license: str | None = None
    reference: Provenance | None = None
    """The full-precision model beside a quantized one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor of the source: its shape, and the type it keeps when it is stored unquantized."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The result of reading a source from end to end once."""

    problems: list[str]
    fingerprint: str
    reference_fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModule:
    """A linear layer that the source stores quantized: `(outputs, inputs)`, and the inputs that share one scale."""

    shape: tuple[int, int]
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBase:
    """A base plane as the source stores it, to be kept exactly.

    `codes`: int8 `[O, I]` in -8..7, in an order of columns in which groups are contiguous. `scale`: float16 or float32
    `[O, G]`, positive and finite. `permutation`: int64 `[I]`, stored column `j` belongs to input `permutation[j]`;
    None where the columns are in order.
    """

    codes: Tensor
    scale: Tensor
    permutation: Tensor | None = None


class Source(Protocol):
    """A model to convert. Opening one reads metadata only and raises `SourceError` where even that fails."""

    config: Mapping[str, Any]
    """The model's `config.json` content (for GGUF: the equal of it, built from its metadata)."""

    provenance: Provenance

    location: Path
    """The folder or file that is read; a conversion never writes inside it."""

    notes: list[str]
    """Remarks for the user that stop nothing: files that were ignored, tensors that were dropped."""

    tensors: Mapping[str, TensorInfo]
    """Every tensor that takes part in the model, by Hugging Face name; derived buffers are left out."""

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored type (dequantized to float32 where the source packs it)."""
        ...

    def inspect(self) -> Inspection:
        """Read every tensor once: NaN and Inf are problems, the fingerprint is a SHA-256 over all content.

        The fingerprint depends on the content alone: not on times, folders or the order of shards.
        """
        ...

    def write_side_files(self, folder: Path) -> list[str]:
        """Put tokenizer, chat template, generation config, licence and the like into `folder`.

        Files are copied byte for byte, each name returned (relative, with `/`). Never writes `config.json`,
        weights, weight indexes, or a model card.
        """
        ...


@runtime_checkable
class BaseSource(Source, Protocol):
    """A source whose model is quantized already: some modules bring their base planes.

    `read` of such a module's weight gives what its refinement has to reach where the source is `refinable`, otherwise
    the base itself, dequantized.
    """

    given: Mapping[str, GivenModule]
    """The modules that bring a base plane, by name."""

    refinable: bool
    """Whether the full-precision weights are there too; without them only a draft can be made."""

    def given_base(self, module: str) -> GivenBase:
        """The base plane of one of the `given` modules."""
        ...


def given_modules(source: Source) -> Mapping[str, GivenModule]:
    """The modules of a source that bring their base planes; none for an ordinary one."""
    return source.given if isinstance(source, BaseSource) else {}


def is_draft_only(source: Source) -> bool:
    """Whether nothing but a draft can be made: base planes are given, the weights they were made from are not."""
    return isinstance(source, BaseSource) and bool(source.given) and not source.refinable
