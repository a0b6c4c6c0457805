"""Orthogonal matrices: random ones, Hadamard matrices, and how far a given one is from being orthogonal."""

from __future__ import annotations

import torch
from torch import Tensor


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


def orthogonality_deviation(matrix: Tensor) -> float:
    """The largest magnitude in `R^T R - I`, computed in float64; NaN where R is not finite."""
    square = matrix.double()
    return float((square.T @ square - torch.eye(square.shape[0], dtype=torch.float64)).abs().max())


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix closest to `matrix` in Frobenius norm (its polar factor), float64."""
    left, _, right = torch.linalg.svd(matrix.double())
    return left @ right
