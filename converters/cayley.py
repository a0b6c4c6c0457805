"""Descent over orthogonal matrices along Cayley transforms, with momentum.

An orthogonal `R` with the Euclidean gradient `G` of a loss moves along `(I + a/2 W)^-1 (I - a/2 W) R`. `W` is the
skew-symmetric part of `G R^T` that turns `R` against the gradient within the orthogonal matrices:

    V = G R^T - 1/2 R R^T G R^T        W = V - V^T

(Li et al., "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform", arXiv 2002.01113;
SpinQuant, arXiv 2405.16406, learns rotations this way.) The paper approximates the inverse by fixed-point iterations;
here the system is solved in float64, so `R` stays orthogonal to rounding whatever the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = 0.9
# The longest way of one step, as the Frobenius norm of `a W`: what a gradient of surprising size can do at most.
LONGEST_STEP = 1.0


class CayleyDescent:
    """Steps several orthogonal matrices, each float64 `[..., N, N]`, against their gradients.

    `matrices` are new tensors after every step; the ones that were given stay as they are.
    """

    def __init__(self, matrices: Sequence[Tensor], momentum: float = MOMENTUM):
        self.matrices = [matrix.double() for matrix in matrices]
        self.momentum = momentum
        self._moving = [torch.zeros_like(matrix) for matrix in self.matrices]

    def step(self, gradients: Sequence[Tensor], rate: float, share: float = 1.0) -> None:
        """Move every matrix along its smoothed gradient: `share` of `rate`, or of `LONGEST_STEP` where that is less."""
        for index, (matrix, gradient) in enumerate(zip(self.matrices, gradients, strict=True)):
            moving = self.momentum * self._moving[index] + gradient.double()
            skew = tangent(matrix, moving)
            # Kept as a tangent of this point, so that what leads off the orthogonal matrices does not pile up.
            self._moving[index] = skew @ matrix
            longest = LONGEST_STEP / torch.linalg.matrix_norm(skew, keepdim=True).clamp_min(1e-30)
            self.matrices[index] = cayley(matrix, share * longest.clamp_max(rate) * skew)


def tangent(matrix: Tensor, gradient: Tensor) -> Tensor:
    """The skew-symmetric `W` for an orthogonal matrix and a gradient, both `[..., N, N]`."""
    turned = gradient @ matrix.mT
    half = turned - 0.5 * matrix @ (matrix.mT @ turned)
    return half - half.mT


def cayley(matrix: Tensor, skew: Tensor) -> Tensor:
    """`(I + W/2)^-1 (I - W/2) R` for skew-symmetric `W`, both `[..., N, N]`. `I + W/2` is never singular."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve(identity + skew / 2, matrix - skew @ matrix / 2)
