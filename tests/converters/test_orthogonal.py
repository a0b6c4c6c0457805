"""Hadamard and random orthogonal matrices."""

from __future__ import annotations

import pytest
import torch

from bitnest_format.converters import orthogonal

SIZES_WITH_HADAMARD = (1, 2, 4, 12, 20, 28, 36, 64, 76, 256, 576, 896, 1536, 2560, 3584, 4096, 5120)


@pytest.mark.parametrize("size", SIZES_WITH_HADAMARD)
def test_hadamard_is_orthogonal(size: int) -> None:
    assert orthogonal.hadamard_exists(size)
    matrix = orthogonal.hadamard(size)
    assert set(matrix.unique().tolist()) <= {-1, 1}
    # Sums of products of +-1 are exact in float32, up to 2^24 of them.
    product = matrix.float() @ matrix.float().T
    assert torch.equal(product, size * torch.eye(size))


def test_hadamard_of_order_4_is_the_known_one() -> None:
    # Sylvester's doubling of order 2 would give the same set of rows; Paley over GF(3) gives this matrix.
    assert orthogonal.hadamard(2).tolist() == [[1, 1], [1, -1]]
    assert orthogonal.hadamard(4).tolist() == [[1, 1, 1, 1], [-1, 1, -1, 1], [-1, 1, 1, -1], [-1, -1, 1, 1]]


@pytest.mark.parametrize("size", [3, 6, 13, 92, 13696 // 128])
def test_sizes_without_a_hadamard_matrix(size: int) -> None:
    assert not orthogonal.hadamard_exists(size)
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {size} at hand"):
        orthogonal.hadamard(size)


def test_nearest_orthogonal_is_the_polar_factor() -> None:
    """For `Q S` with `S` symmetric and positive it is `Q`, and nothing else is as near."""
    generator = torch.Generator().manual_seed(0)
    q = orthogonal.random_orthogonal(24, generator)
    noise = torch.randn(24, 24, dtype=torch.float64, generator=generator) * 0.01
    found = orthogonal.nearest_orthogonal(q @ (torch.eye(24, dtype=torch.float64) + noise + noise.T))
    torch.testing.assert_close(found, q, atol=1e-13, rtol=0)
    assert orthogonal.orthogonality_deviation(found) < 1e-14
    assert orthogonal.orthogonality_deviation(q + noise) > 1e-3
