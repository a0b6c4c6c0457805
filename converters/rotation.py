"""Rotations that leave a model's function unchanged, and how they are folded into its weights.

A decoder with RMS norms computes the same function when its residual stream is turned by an orthogonal matrix
R1, once the norm gains have been moved into the linear layers that follow; so does each attention layer when
the value heads are turned by an orthogonal R2 and the output projection turns them back (QuaRot, arXiv 2404.00456;
SpinQuant, arXiv 2405.16406). Turned weights have fewer outliers and quantize better. Nothing is left to do at run time.

Weights are `[outputs, inputs]`. Folding is done in the rotation's type, float64 in a conversion; the caller casts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.converters.orthogonal import hadamard_exists, random_hadamard, random_orthogonal
from bitnest_format.converters.rotation_file import read_rotation_file
from bitnest_format.errors import SourceError
from bitnest_format.families import ATTENTION_OUTPUT, VALUE


@dataclass(frozen=True, slots=True)
class Rotation:
    """R1 `[hidden, hidden]` and one R2 `[head_dim, head_dim]` per layer, float64, and where they came from.

    Folding computes in their type. `details`: further entries of the manifest's record.
    """

    kind: str
    r1: Tensor
    r2: Callable[[int], Tensor]
    seed: int | None = None
    sha256: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The manifest's `rotation` entry."""
        return {
            "kind": self.kind,
            "seed": self.seed,
            "sha256": self.sha256,
            "folded": ["R1", "R2"],
            "online": [],
            **self.details,
        }

    def to(self, device: str) -> Rotation:
        return replace(self, r1=self.r1.to(device), r2=lambda layer: self.r2(layer).to(device))


# The manifest's `rotation` entry of a source that came rotated. R1 shows in norm gains of one; R2 leaves no trace.
FOLDED_BEFORE: Mapping[str, Any] = {"kind": "folded", "seed": None, "sha256": None, "folded": ["R1"], "online": []}


def make_rotation(kind: str, file: Path | None, seed: int, architecture: Architecture) -> Rotation | None:
    """The rotation of a conversion; None for `none` and `folded`, where the weights stay as they are.

    Raises `SourceError` where the sizes do not allow it, or the file does not hold it.
    """
    if kind in ("none", "folded"):
        return None
    if file is not None:
        found = read_rotation_file(file, architecture)
        details = {"learning": found.learning} if found.learning else {}
        return Rotation(kind, found.r1, found.r2.__getitem__, sha256=found.sha256, details=details)
    build = {"random": random_orthogonal, "hadamard": random_hadamard}[kind]
    bad = sizes_without_hadamard(architecture) if kind == "hadamard" else []
    if bad:
        raise SourceError(f"--rotation hadamard: no Hadamard matrix at hand for {', '.join(bad)}; use random")

    r1, *r2 = (
        build(size, _generator(seed, stream))
        for stream, size in enumerate([architecture.hidden_size, *[architecture.head_dim] * architecture.layers])
    )
    # What can be sent to other ranks.
    return Rotation(kind, r1, r2.__getitem__, seed=seed)


def sizes_without_hadamard(architecture: Architecture) -> list[str]:
    """The sizes that R1 and R2 need and for which no Hadamard matrix is at hand, such as `head_dim 66`."""
    sizes = {"hidden_size": architecture.hidden_size, "head_dim": architecture.head_dim}
    return [f"{name} {size}" for name, size in sizes.items() if not hadamard_exists(size)]


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + stream)


def rotate_embedding(embedding: Tensor, rotation: Rotation) -> Tensor:
    """`E R1`, `[V, H]` in the type of R1."""
    return embedding.to(rotation.r1.dtype) @ rotation.r1


def rotate_outputs(tensor: Tensor, rotation: Rotation) -> Tensor:
    """`R1^T W` of a weight `[H, I]`, or of a bias or vector `[H]`, whose outputs enter the residual stream; float64."""
    return rotation.r1.T @ tensor.double()


def rotate_head(head: Tensor, final_gain: Tensor, rotation: Rotation) -> Tensor:
    """`W diag(gain) R1`, `[V, H]` in the type of R1: the head with the final norm's gain folded in."""
    return (head.to(rotation.r1.dtype) * final_gain.to(rotation.r1.dtype)) @ rotation.r1


def rotate_layer(
    tensors: Mapping[str, Tensor], layer: int, architecture: Architecture, rotation: Rotation
) -> Iterator[tuple[str, Tensor]]:
    """One decoder layer's tensors with gains, R1 and R2 folded in: names and tensors of R1's type, one by one.

    `tensors` holds the whole layer by full checkpoint name and is left as it is. Per-head query and key norms pass
    through unchanged.
    """
    prefix = architecture.layer_prefix(layer)
    readers, writers = architecture.stream_readers(layer), architecture.stream_writers(layer)
    r1, r2, offset = rotation.r1, rotation.r2(layer), architecture.family.norm_offset
    for name, tensor in tensors.items():
        linear, _, kind = name.removeprefix(prefix).rpartition(".")
        folded = tensor.to(r1.dtype)
        if name in architecture.norm_names(layer):
            folded = torch.ones_like(folded) - offset
        elif linear in readers and kind == "weight":
            folded = (folded * (tensors[readers[linear]].to(r1.dtype) + offset)) @ r1
        elif linear in writers:
            # A weight's rows and a bias alike: both are outputs into the residual stream.
            folded = r1.T @ folded
        if linear == VALUE:
            folded = _turn_rows(folded, r2)
        elif linear == ATTENTION_OUTPUT and kind == "weight":
            folded = (folded.unflatten(1, (-1, r2.shape[0])) @ r2).flatten(1)
        yield name, folded


def _turn_rows(outputs: Tensor, r2: Tensor) -> Tensor:
    """`R2^T` applied to every head's block of rows of a weight `[O, I]`, or of a bias `[O]`."""
    blocks = outputs.reshape(-1, r2.shape[0], outputs[0].numel())
    return (r2.T @ blocks).reshape(outputs.shape)
