"""A source's tensors as a nested checkpoint holds them: rotated, in the types of the source.

A conversion reads, calibrates on and stores what comes from here; `diff` compares a checkpoint with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.converters.base import Source
from bitnest_format.converters.rotation import (
    FOLDED_BEFORE,
    Rotation,
    make_rotation,
    rotate_embedding,
    rotate_head,
    rotate_layer,
    rotate_outputs,
)
from bitnest_format.errors import SourceError
from bitnest_format.manifest import Manifest
from bitnest_format.shards import DTYPE_NAMES, Pending, file_sha256, tensor_bytes

FOLD_ROWS = 2048
SEEDED = ("random", "hadamard")

# The rows of a tensor in order, float32, some at a time.
Pieces = Callable[[], Iterator[Tensor]]
# Rotates some rows of the embedding or the head.
Fold = Callable[[Tensor, Rotation], Tensor]


def recorded_rotation(manifest: Manifest, file: Path | None, architecture: Architecture) -> tuple[Rotation | None, str]:
    """The rotation that a conversion folded in, and an empty text; or None and why it cannot be had.

    `random` and `hadamard` are made again from their seed. Other kinds need the `file` they were read from or saved to,
    whose SHA-256 the manifest holds. None with an empty text: the conversion turned nothing.

    Raises `SourceError` for a file that is not the recorded one or not needed, or a rotation that does not fit.
    """
    record = manifest.rotation
    kind = record.get("kind") if record else None
    turned = record is not None and kind != FOLDED_BEFORE["kind"]
    if not turned or kind in SEEDED:
        if file is not None:
            needless = f"the checkpoint's rotation is {kind or 'none'!r}, which needs no file. Leave it out."
            raise SourceError(f"--rotation-file {file}: {needless}")
        seed = record.get("seed") if record and turned else None
        if not turned:
            return None, ""
        if isinstance(seed, int):
            return make_rotation(str(kind), None, seed, architecture), ""
    if file is None:
        return None, (
            f"the checkpoint is rotated by {kind!r}, which cannot be made again from the manifest; give its file with "
            "--rotation-file to compare weights"
        )
    digest, found = str(record.get("sha256") if record else None), file_sha256(file)
    if found != digest:
        raise SourceError(
            f"--rotation-file {file}: SHA-256 is {found[:12]}..., the checkpoint was made with {digest[:12]}...; "
            "give the file it was made with"
        )
    return make_rotation("spinquant", file, 0, architecture), ""


def whole(tensor: Tensor) -> Pieces:
    """A tensor in memory, in one piece."""
    return lambda: iter((tensor,))


class FoldedSource:
    """The tensors of `source` with `rotation` folded in, computed on `device` in float64.

    Holds one embedding or head as the source stores it at a time (`matrix`), until `release`.
    """

    def __init__(self, source: Source, architecture: Architecture, rotation: Rotation | None, device: str = "cpu"):
        self.source = source
        self.architecture = architecture
        self.rotation = rotation.to(device) if rotation else None
        self.device = device
        self.held: dict[str, Tensor] = {}

    # Layers

    def fold_layer(self, layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A layer's `tensors`, by full name and as the source stores them: rotated, float32 on the device."""
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        if self.rotation is None:
            return {name: tensor.float() for name, tensor in tensors.items()}
        folded = rotate_layer(tensors, layer, self.architecture, self.rotation)
        return {name: tensor.float() for name, tensor in folded}

    # Around the layers

    @property
    def head_matrix(self) -> str:
        """The source's tensor that the head is made of."""
        return self.architecture.embedding if self.architecture.tied_embeddings else self.architecture.head

    def head(self) -> tuple[str, Fold]:
        """That tensor, and how its rows are rotated."""
        gain = self.source.read(self.architecture.final_norm).to(self.device).double()
        gain += self.architecture.family.norm_offset
        return self.head_matrix, lambda rows, rotation: rotate_head(rows, gain, rotation)

    def final_norm(self) -> Tensor:
        """The final norm's gains as they are to be stored, on the device."""
        gain = self.source.read(self.architecture.final_norm).to(self.device)
        return gain if self.rotation is None else torch.ones_like(gain) - self.architecture.family.norm_offset

    def matrix(self, name: str) -> Tensor:
        """The embedding or the head as the source stores it. The latest one is kept until `release`."""
        if name not in self.held:
            self.release()
            self.held = {name: self.source.read(name)}
        return self.held[name]

    def release(self) -> None:
        self.held = {}

    def fold_rows(self, rows: Tensor, fold: Fold) -> Tensor:
        """Some rows of the embedding or the head, float32 on the device."""
        rows = rows.to(self.device)
        return rows.float() if self.rotation is None else fold(rows, self.rotation).float()

    def folded(self, name: str, fold: Fold) -> Iterator[Tensor]:
        """All rows of such a matrix, some at a time."""
        return (self.fold_rows(rows, fold) for rows in self.matrix(name).split(FOLD_ROWS))

    def embedding_rows(self, ids: Tensor) -> Tensor:
        """The rows of some token ids `[n]`: float32 `[n, H]`."""
        rows = self.matrix(self.architecture.embedding)[ids]
        return torch.cat([self.fold_rows(some, rotate_embedding) for some in rows.split(FOLD_ROWS)])

    def names_beside(self) -> list[str]:
        """The tensors that belong to the model but not to its language model."""
        return [name for name in self.source.tensors if self.architecture.is_beside(name)]

    def turned(self) -> list[str]:
        """Those of them that are rotated with it."""
        if self.rotation is None:
            return []
        return [name for name in self.names_beside() if self.architecture.enters_stream(name)]

    # What is stored

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        """An unquantized tensor in its source type, on the CPU. Raises `SourceError` where it does not fit."""
        dtype = self.source.tensors[name].dtype
        kept = tensor.to(dtype)
        if not bool(torch.isfinite(kept).all()):
            raise SourceError(
                f"{name}: its largest magnitude, {float(tensor.abs().max()):g}, does not fit {dtype}; "
                "convert a bfloat16 or float32 copy of the model"
            )
        return kept.cpu()

    def pending_matrix(self, name: str, fold: Fold) -> Pending:
        """A big matrix that is folded piecewise as it is written, so that only the source's copy is ever whole."""

        def chunks() -> Iterator[memoryview]:
            for rows in self.folded(name, fold):
                yield tensor_bytes(self.kept(name, rows))

        return self._pending(name, chunks)

    def pending_beside(self, name: str) -> Pending:
        """A tensor beside the language model as it is, or turned where its outputs enter the residual stream."""
        rotation = self.rotation if self.architecture.enters_stream(name) else None

        def chunks() -> Iterator[memoryview]:
            tensor = self.source.read(name)
            if rotation is not None:
                tensor = self.kept(name, rotate_outputs(tensor.to(self.device), rotation).float())
            yield tensor_bytes(tensor)

        return self._pending(name, chunks)

    def _pending(self, name: str, chunks: Callable[[], Iterator[memoryview]]) -> Pending:
        info = self.source.tensors[name]
        return Pending(DTYPE_NAMES[info.dtype], info.shape, info.dtype.itemsize * math.prod(info.shape), chunks)

    # What is compared

    def tensors(self) -> Iterator[tuple[str, Pieces]]:
        """Every tensor of the language model by name, in forward order.

        A tied model has a head of its own all the same, since a checkpoint may have one.
        """
        architecture = self.architecture
        yield architecture.embedding, lambda: self.folded(architecture.embedding, rotate_embedding)
        self.release()
        for layer in range(architecture.layers):
            tensors = {name: self.source.read(name) for name in architecture.layer_tensors(layer)}
            for name, tensor in self.fold_layer(layer, tensors).items():
                yield name, whole(tensor)
        yield architecture.final_norm, whole(self.final_norm().float())
        yield architecture.head, lambda: self.folded(*self.head())
