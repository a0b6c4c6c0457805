"""The Hessian of a linear layer: the mean outer product of its inputs, and the factor of its damped inverse.

Sums over calibration inputs are kept in float64 and every product that is added to them is one of float32. A sum of
at most a few thousand float32 numbers is then exact unless their sizes differ by more than 2^18, and where it is not,
its error lies some 2^29 below the last bit of the float32 result: the mean does not depend on the order in which
batches are added, nor on who adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STRIPS = 8
DAMPING_GROWTH = 10.0
LARGEST_DAMPING = 1.0
# Triangles of this many rows are inverted by the library, larger ones by halves.
TRIANGLE = 512


class HessianSum:
    """Accumulates `X^T X / N` over calibration inputs.

    The product is symmetric: it is kept in strips of rows, each from its own diagonal block on, and mirrored at the
    end, which leaves out nearly half of the multiplications and of the memory.
    """

    def __init__(self, inputs: int, device: str | torch.device = "cpu"):
        self.inputs = inputs
        self.tokens = 0
        step = -(-inputs // STRIPS)
        self.slices = [slice(first, min(first + step, inputs)) for first in range(0, inputs, step)]
        self.strips = [
            torch.zeros(rows.stop - rows.start, inputs - rows.start, dtype=torch.float64, device=device)
            for rows in self.slices
        ]

    def add(self, activations: Tensor) -> None:
        """Add inputs of any leading shape, `[..., I]`."""
        rows = activations.reshape(-1, activations.shape[-1]).float()
        for part, strip in zip(self.slices, self.strips, strict=True):
            strip.add_(rows[:, part].T @ rows[:, part.start :])
        self.tokens += rows.shape[0]

    def combine(self, add: Callable[[Tensor], None]) -> None:
        """Sum with others of the same size: `add` is given tensors in a fixed order, to replace them by their sums."""
        for strip in self.strips:
            add(strip)
        tokens = torch.tensor([self.tokens], device=self.strips[0].device)
        add(tokens)
        self.tokens = int(tokens)

    def mean(self) -> Tensor:
        """The mean so far, float32 `[I, I]`. Gives the sums up."""
        mean = torch.empty(self.inputs, self.inputs, device=self.strips[0].device)
        for part in reversed(self.slices):
            strip = (self.strips.pop() / max(self.tokens, 1)).float()
            block = strip[:, : strip.shape[0]]
            block.copy_(block.triu() + block.triu(1).T)
            mean[part, part.start :] = strip
            mean[part.start :, part] = strip.T
        return mean


def shrunk(hessian: Tensor, tokens: int) -> Tensor:
    """The mean outer product of few `tokens`, `[I, I]`, moved in place towards a multiple of the identity.

    The oracle approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010), eq. 23, which brings it closer to what
    more tokens would give. It goes the whole way where they do not tell the inputs' directions apart, and hardly a
    step where they do: `benchmarks/few_tokens.py`.
    """
    size = hessian.shape[0]
    trace = float(hessian.diagonal().sum(dtype=torch.float64))
    squares = float(hessian.square().sum(dtype=torch.float64))
    spread = (tokens + 1 - 2 / size) * (squares - trace * trace / size)
    noise = (1 - 2 / size) * squares + trace * trace
    share = noise / spread if spread > noise else 1.0
    hessian.mul_(1 - share)
    hessian.diagonal().add_(share * trace / size)
    return hessian


@dataclass(frozen=True, slots=True)
class InverseFactor:
    """The damped Hessian `H`, upper-triangular `U` with `U^T U = H^-1` (both float32 `[I, I]`), and the damping."""

    hessian: Tensor
    upper: Tensor
    damping: float


def inverse_factor(hessian: Tensor, damping: float) -> InverseFactor | None:
    """Factor the damped inverse Hessian; None where even the largest damping does not make it definite.

    Columns whose diagonal entry is zero never fire: they get 1 there, so they are rounded to nearest and move
    nothing. `damping` is a share of the mean diagonal and grows tenfold per failed attempt.

    With J the reversal of order, `J H J = L L^T` gives `U = J L^-1 J`: one factorization and one triangular
    inverse, in float64.
    """
    if not bool(torch.isfinite(hessian).all()):
        return None
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal[~dead].double().mean() if bool((~dead).any()) else 1.0
    while damping <= LARGEST_DAMPING:
        damped = diagonal.double()
        damped[dead] = 1.0
        damped += damping * mean
        # The only matrix of float64: factored and inverted in place.
        reversed_hessian = hessian.flip(0, 1).double()
        reversed_hessian.diagonal().copy_(damped.flip(0))
        upper = _upper_inverse_factor(reversed_hessian)
        if upper is not None:
            rounded = hessian.clone()
            rounded.diagonal().copy_(damped)
            return InverseFactor(rounded, upper, damping)
        damping *= DAMPING_GROWTH
    return None


def _upper_inverse_factor(reversed_hessian: Tensor) -> Tensor | None:
    """`J L^-1 J` for `L L^T` of float64 `J H J`, which is overwritten: float32. None where it is not definite."""
    failed = torch.empty(0, dtype=torch.int32, device=reversed_hessian.device)
    # A symmetric matrix is its own transpose, and LAPACK works in place on columns that lie in one piece.
    lower = reversed_hessian.mT
    torch.linalg.cholesky_ex(lower, out=(lower, failed))
    if int(failed):
        return None
    _invert_lower(lower)
    inverse = lower.float().flip(0, 1)
    return inverse.contiguous() if bool(torch.isfinite(inverse).all()) else None


def _invert_lower(lower: Tensor) -> None:
    """Replace a lower triangular matrix by its inverse: `[[A, 0], [B, C]]` by `[[A^-1, 0], [-C^-1 B A^-1, C^-1]]`."""
    size = lower.shape[0]
    if size <= TRIANGLE:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = size // 2
    first, second, below = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert_lower(first)
    _invert_lower(second)
    # Each product may overwrite what it read once it is whole.
    below.copy_(second @ below)
    below.copy_(below @ first).neg_()
