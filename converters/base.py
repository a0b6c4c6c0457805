"""What every source of a model offers to the pipeline, whatever its files look like.

A source names its tensors as Hugging Face checkpoints of the same architecture do, and reads one at a time.
It converts nothing: rotation, quantization and writing belong to the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a model came from, as the manifest records it."""

    kind: str
    name: str | None = None
    revision: str | None = None
    license: str | None = None


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
