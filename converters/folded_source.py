"""A full-precision source as a nested checkpoint with a given rotation would hold it: folded, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
)
from bitnest_format.errors import SourceError
from bitnest_format.manifest import Manifest
from bitnest_format.shards import file_sha256

FOLD_ROWS = 2048
SEEDED = ("random", "hadamard")

# The rows of a tensor in order, float32, some at a time.
Pieces = Callable[[], Iterator[Tensor]]


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
    """The tensors of `source` with `rotation` folded in, in forward order, as a conversion stores or quantizes them.

    One layer in float64 is held at a time, and one embedding matrix in its stored type.
    """

    def __init__(self, source: Source, architecture: Architecture, rotation: Rotation | None):
        self.source = source
        self.architecture = architecture
        self.rotation = rotation

    def tensors(self) -> Iterator[tuple[str, Pieces]]:
        """Every tensor by name; a tied model has a head of its own all the same, since a checkpoint may have one."""
        architecture = self.architecture
        yield architecture.embedding, self._rows(architecture.embedding, rotate_embedding)
        for layer in range(architecture.layers):
            for name, tensor in self._layer(layer):
                yield name, whole(tensor)
        norm = self.source.read(architecture.final_norm)
        stored_norm = norm.float() if self.rotation is None else norm.new_ones(norm.shape).float()
        yield architecture.final_norm, whole(stored_norm)
        name = architecture.embedding if architecture.tied_embeddings else architecture.head
        yield architecture.head, self._rows(name, lambda rows, rotation: rotate_head(rows, norm, rotation))

    def _layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        tensors = {name: self.source.read(name) for name in self.architecture.layer_tensors(layer)}
        if self.rotation is None:
            yield from ((name, tensor.float()) for name, tensor in tensors.items())
        else:
            folded = rotate_layer(tensors, layer, self.architecture, self.rotation)
            yield from ((name, tensor.float()) for name, tensor in folded)

    def _rows(self, name: str, fold: Callable[[Tensor, Rotation], Tensor]) -> Pieces:
        def pieces() -> Iterator[Tensor]:
            for rows in self.source.read(name).split(FOLD_ROWS):
                yield rows.float() if self.rotation is None else fold(rows, self.rotation).float()

        return pieces
