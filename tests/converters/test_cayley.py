"""Cayley steps against the plain formula, and that they stay orthogonal and go down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnest_format.converters.cayley import LONGEST_STEP, CayleyDescent, cayley, tangent
from bitnest_format.converters.orthogonal import orthogonality_deviation, random_orthogonal


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _orthogonal(seed: int, size: int) -> Tensor:
    return random_orthogonal(size, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_step_equals_the_formula(size: int) -> None:
    """One step from rest: `(I + a/2 W)^-1 (I - a/2 W) R` with every product written out."""
    r, g, rate = _orthogonal(1, size), _random(2, size, size) / size, 0.05
    hat = g @ r.T - 0.5 * r @ r.T @ g @ r.T
    w = hat - hat.T
    assert float(w.norm()) * rate <= LONGEST_STEP
    identity = torch.eye(size, dtype=torch.float64)
    expected = torch.linalg.inv(identity + rate / 2 * w) @ (identity - rate / 2 * w) @ r
    descent = CayleyDescent([r])
    descent.step([g], rate)
    torch.testing.assert_close(descent.matrices[0], expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(tangent(r, g), w, atol=1e-13, rtol=0)


def test_step_equals_the_fixed_point_of_the_paper() -> None:
    """Li et al. iterate `Y <- R - a/2 W (R + Y)`; its fixed point is the Cayley transform."""
    r, rate = _orthogonal(3, 16), 0.1
    w = tangent(r, _random(4, 16, 16) / 16)
    y = r - rate * w @ r
    for _ in range(40):
        y = r - rate / 2 * w @ (r + y)
    torch.testing.assert_close(cayley(r, rate * w), y, atol=1e-13, rtol=0)


def test_momentum_is_the_tangent_of_what_moved_before() -> None:
    r, first, second, rate = _orthogonal(5, 8), _random(6, 8, 8) / 8, _random(7, 8, 8) / 8, 0.1
    descent = CayleyDescent([r], momentum=0.5)
    descent.step([first], rate)
    descent.step([second], rate)
    w1 = tangent(r, first)
    r1 = cayley(r, rate * w1)
    expected = cayley(r1, rate * tangent(r1, 0.5 * w1 @ r + second))
    torch.testing.assert_close(descent.matrices[0], expected, atol=1e-13, rtol=0)


def test_batches_are_steps_of_their_own() -> None:
    matrices = torch.stack([_orthogonal(seed, 6) for seed in range(3)])
    gradients = _random(9, 3, 6, 6)
    together = CayleyDescent([matrices])
    together.step([gradients], 0.3)
    for index in range(3):
        alone = CayleyDescent([matrices[index]])
        alone.step([gradients[index]], 0.3)
        torch.testing.assert_close(together.matrices[0][index], alone.matrices[0], atol=1e-14, rtol=0)


def test_huge_and_missing_gradients() -> None:
    r = _orthogonal(1, 8)
    descent = CayleyDescent([r])
    descent.step([torch.zeros(8, 8)], 1.0)
    torch.testing.assert_close(descent.matrices[0], r, atol=1e-14, rtol=0)
    descent.step([1e20 * _random(2, 8, 8)], 1.0)
    assert orthogonality_deviation(descent.matrices[0]) < 1e-13
    # The turn is no longer than its generator.
    assert 0.5 < float((descent.matrices[0] - r).norm()) <= LONGEST_STEP


def test_descent_finds_the_nearest_rotation_and_stays_orthogonal() -> None:
    """`|R - Q|^2` falls to nothing where Q can be reached, and R is orthogonal within 1e-5 all the way."""
    r = _orthogonal(1, 32)
    goal = cayley(r, tangent(r, _random(2, 32, 32) / 16))
    descent = CayleyDescent([r])
    for step in range(300):
        assert orthogonality_deviation(descent.matrices[0]) < 1e-5
        descent.step([descent.matrices[0] - goal], 0.2, 1 - step / 300)
    assert float((r - goal).norm()) > 1
    torch.testing.assert_close(descent.matrices[0], goal, atol=1e-6, rtol=0)
    assert orthogonality_deviation(descent.matrices[0]) < 1e-12
