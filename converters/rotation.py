"""Rotations that leave a model's function unchanged, and how they are folded into its weights.

A decoder with RMS norms computes the same function when its residual stream is turned by an orthogonal matrix
R1, once the norm gains have been moved into the linear layers that follow; so does each attention layer when
the value heads are turned by an orthogonal R2 and the output projection turns them back (QuaRot, arXiv 2404.00456;
SpinQuant, arXiv 2405.16406). Turned weights have fewer outliers and quantize better. Nothing is left to do at run time.

Weights are `[outputs, inputs]`. All folding is done in float64; the caller casts once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.errors import SourceError
from bitnest_format.families import ATTENTION_OUTPUT, VALUE
from bitnest_format.shards import file_sha256

# How far R^T R may lie from the identity before a given matrix is refused; below it (bf16 rounding of an
# orthogonal matrix stays there) the nearest orthogonal matrix is taken.
ORTHOGONALITY_BOUND = 3e-3
EXACT_ENOUGH = 1e-12


@dataclass(frozen=True, slots=True)
class Rotation:
    """R1 `[hidden, hidden]` and one R2 `[head_dim, head_dim]` per layer, float64, and where they came from."""

    kind: str
    r1: Tensor
    r2: Callable[[int], Tensor]
    seed: int | None = None
    sha256: str | None = None

    def record(self) -> dict[str, Any]:
        """The manifest's `rotation` entry."""
        return {
            "kind": self.kind,
            "seed": self.seed,
            "sha256": self.sha256,
            "folded": ["R1", "R2"],
            "online": [],
        }

    def to(self, device: str) -> Rotation:
        return Rotation(self.kind, self.r1.to(device), lambda layer: self.r2(layer).to(device), self.seed, self.sha256)


def make_rotation(kind: str, file: Path | None, seed: int, architecture: Architecture) -> Rotation | None:
    """The rotation of a conversion; None for `none`. Raises `SourceError` where the sizes do not allow it."""
    if kind == "none":
        return None
    if kind == "spinquant":
        assert file is not None
        return load_spinquant(file, architecture)
    build = random_orthogonal if kind == "random" else random_hadamard
    sizes = {"hidden_size": architecture.hidden_size, "head_dim": architecture.head_dim}
    if kind == "hadamard":
        bad = [f"{name} {size}" for name, size in sizes.items() if not hadamard_exists(size)]
        if bad:
            raise SourceError(f"--rotation hadamard: no Hadamard matrix at hand for {', '.join(bad)}; use random")

    def r2(layer: int) -> Tensor:
        return build(architecture.head_dim, _generator(seed, layer + 1))

    return Rotation(kind, build(architecture.hidden_size, _generator(seed, 0)), r2, seed=seed)


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + stream)


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A Haar-distributed orthogonal matrix: QR of a Gaussian matrix, signs fixed; float64."""
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return q * torch.sign(torch.diagonal(r))


def random_hadamard(size: int, generator: torch.Generator) -> Tensor:
    """`diag(random signs) H / sqrt(size)`, float64. Raises `ValueError` where no H is at hand."""
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1
    return signs.double() * hadamard(size).double() / size**0.5


def hadamard(size: int) -> Tensor:
    """A Hadamard matrix by Sylvester's doubling of a Paley matrix, int8 of +-1."""
    core = size
    while (matrix := _paley(core)) is None:
        if core % 2:
            raise ValueError(f"no Hadamard matrix of order {size} at hand")
        core //= 2
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hadamard_exists(size: int) -> bool:
    """Whether `hadamard(size)` can build one."""
    while size > 2 and size % 2 == 0 and not _paley_kind(size):
        size //= 2
    return bool(_paley_kind(size))


def _paley_kind(order: int) -> int:
    """1 or 2 for Paley's first or second construction, 3 for the trivial orders 1 and 2, otherwise 0."""
    if order in (1, 2):
        return 3
    if order % 4 == 0:
        if _is_prime(order - 1):
            return 1
        if _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
            return 2
    return 0


def _paley(order: int) -> Tensor | None:
    """Paley's constructions over prime fields (Paley, 1933), or None."""
    kind = _paley_kind(order)
    if kind == 3:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)[:order, :order]
    if kind == 0:
        return None
    prime = order - 1 if kind == 1 else order // 2 - 1
    squares = {i * i % prime for i in range(1, prime)}
    character = torch.tensor([0] + [1 if i in squares else -1 for i in range(1, prime)], dtype=torch.int8)
    difference = (torch.arange(prime).unsqueeze(1) - torch.arange(prime)) % prime
    jacobsthal = character[difference]
    bordered = torch.ones(prime + 1, prime + 1, dtype=torch.int8)
    bordered[0, 0] = 0
    bordered[1:, 1:] = jacobsthal
    identity = torch.eye(prime + 1, dtype=torch.int8)
    if kind == 1:
        bordered[1:, 0] = -1
        return bordered + identity
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(bordered, plus) + torch.kron(identity, minus)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def load_spinquant(path: Path, architecture: Architecture) -> Rotation:
    """SpinQuant's `R.bin`: `R1` and `model.layers.{i}.self_attn.R2`, read without running any code in it.

    Raises `SourceError` listing matrices that are missing, of the wrong size, or not orthogonal within
    `ORTHOGONALITY_BOUND` (largest entry of `R^T R - I`); closer ones are made orthogonal in float64.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SourceError(f"{path}: no such rotation file") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{path}: cannot be read as a dictionary of tensors ({reason})") from error
    if not isinstance(stored, Mapping):
        raise SourceError(f"{path}: holds a {type(stored).__name__}, expected a dictionary of tensors")
    sizes = {"R1": architecture.hidden_size}
    sizes |= {_r2_name(layer): architecture.head_dim for layer in range(architecture.layers)}
    problems: list[str] = []
    matrices: dict[str, Tensor] = {}
    for name, size in sizes.items():
        matrix = stored.get(name)
        if not isinstance(matrix, Tensor):
            problems.append(f"{path.name}: {name}: missing")
        elif tuple(matrix.shape) != (size, size):
            problems.append(
                f"{path.name}: {name}: is {' x '.join(map(str, matrix.shape))}, expected {size} x {size} for this model"
            )
        else:
            deviation = orthogonality_deviation(matrix)
            if not deviation <= ORTHOGONALITY_BOUND:
                problems.append(
                    f"{path.name}: {name}: is not orthogonal: R^T R differs from the identity by {deviation:.2g}, "
                    f"at most {ORTHOGONALITY_BOUND:g} can be repaired"
                )
            else:
                matrices[name] = nearest_orthogonal(matrix) if deviation > EXACT_ENOUGH else matrix.double()
    if problems:
        raise SourceError(problems)
    return Rotation("spinquant", matrices["R1"], lambda layer: matrices[_r2_name(layer)], sha256=file_sha256(path))


def _r2_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.R2"


def orthogonality_deviation(matrix: Tensor) -> float:
    """The largest magnitude in `R^T R - I`, computed in float64; NaN where R is not finite."""
    square = matrix.double()
    return float((square.T @ square - torch.eye(square.shape[0], dtype=torch.float64)).abs().max())


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix closest to `matrix` in Frobenius norm (its polar factor), float64."""
    left, _, right = torch.linalg.svd(matrix.double())
    return left @ right


def rotate_embedding(embedding: Tensor, rotation: Rotation) -> Tensor:
    """`E R1`, float64 `[V, H]`."""
    return embedding.double() @ rotation.r1


def rotate_head(head: Tensor, final_gain: Tensor, rotation: Rotation) -> Tensor:
    """`W diag(gain) R1`, float64 `[V, H]`: the head with the final norm's gain folded in."""
    return (head.double() * final_gain.double()) @ rotation.r1


def rotate_layer(
    tensors: Mapping[str, Tensor], layer: int, architecture: Architecture, rotation: Rotation
) -> Iterator[tuple[str, Tensor]]:
    """One decoder layer's tensors with gains, R1 and R2 folded in: names and float64 tensors, one at a time.

    `tensors` holds the whole layer by full checkpoint name and is left as it is. Per-head query and key norms pass
    through unchanged.
    """
    prefix = architecture.layer_prefix(layer)
    readers, writers = architecture.stream_readers(layer), architecture.stream_writers(layer)
    r1, r2 = rotation.r1, rotation.r2(layer)
    for name, tensor in tensors.items():
        linear, _, kind = name.removeprefix(prefix).rpartition(".")
        folded = tensor.double()
        if name in architecture.norm_names(layer):
            folded = torch.ones_like(folded)
        elif linear in readers and kind == "weight":
            folded = (folded * tensors[readers[linear]].double()) @ r1
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
