"""Fake quantization: the encoder's own values forward, the straight-through gradient backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.converters.fake_quant import COARSE_FACTORS, fake_quantize_activations, fake_quantize_weight


def _weight(rows: int = 6, inputs: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group_size", [8, 32, 64])
def test_weight_is_the_draft_that_the_encoder_makes(group_size: int) -> None:
    weight = _weight().float()
    scale = nesting.group_max_abs(weight, group_size) / nesting.BASE_MAX
    codes = nesting.encode_base(weight, scale)
    rounded = fake_quantize_weight(weight, group_size, search=False)
    assert torch.equal(rounded, nesting.draft_weight(codes, scale))


def test_searched_scale_is_the_best_of_all_factors() -> None:
    weight = _weight()
    errors = []
    for factor in COARSE_FACTORS:
        scale = weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 7 * factor
        groups = weight.unflatten(-1, (-1, 32))
        rounded = (groups / scale).round().clamp(-8, 7) * scale
        errors.append((rounded - groups).abs().pow(2.4).sum(-1))
    best = torch.stack(errors).amin(0)
    found = fake_quantize_weight(weight, 32, search=True)
    torch.testing.assert_close((found - weight).unflatten(-1, (-1, 32)).abs().pow(2.4).sum(-1), best)
    assert float(best.sum()) < float(errors[-1].sum())


def test_activations_are_symmetric_int8_per_token() -> None:
    values = _weight(5, 40).float().view(5, 1, 40)
    scale = values.abs().amax(-1, keepdim=True) / 127
    assert torch.equal(fake_quantize_activations(values), (values / scale).round() * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_stay_zero_with_a_gradient_of_one(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 16, dtype=dtype, requires_grad=True)
    for rounded in (fake_quantize_weight(zeros, 8, search=True), fake_quantize_activations(zeros)):
        assert torch.equal(rounded, zeros.detach())
        (gradient,) = torch.autograd.grad(rounded.sum(), zeros)
        assert torch.equal(gradient, torch.ones_like(zeros))


@pytest.mark.parametrize("search", [False, True])
def test_gradient_equals_the_formula(search: bool) -> None:
    """With `s = f max|w| / 7`: an unclipped value passes its own gradient; the largest feels `(q - w/s)` of all others.

    Written out from `q(w) s`, with `dq/dw = 1/s` inside the range and 0 outside of it.
    """
    weight = _weight(4, 32).requires_grad_()
    upstream = _weight(4, 32, seed=1)
    rounded = fake_quantize_weight(weight, 16, search=search)
    (gradient,) = torch.autograd.grad(rounded, weight, upstream)
    w, g = weight.detach().view(8, 16), upstream.view(8, 16)
    values = rounded.detach().view(8, 16)
    expected = torch.zeros_like(w)
    for row in range(8):
        place = int(w[row].abs().argmax())
        largest = w[row, place]
        # The factor that was chosen follows from any code that is not zero.
        candidates = [largest.abs() / 7 * factor for factor in COARSE_FACTORS]
        s = min(
            candidates, key=lambda s, row=row: float(((w[row] / s).round().clamp(-8, 7) * s - values[row]).abs().sum())
        )
        inside = (w[row] / s >= -8) & (w[row] / s <= 7)
        codes = values[row] / s
        expected[row] = g[row] * inside
        per_scale = (g[row] * torch.where(inside, codes - w[row] / s, codes)).sum()
        expected[row, place] += per_scale * s / largest.abs() * largest.sign()
    torch.testing.assert_close(gradient.view(8, 16), expected, atol=1e-12, rtol=0)


def test_gradient_of_the_largest_equals_finite_differences_where_it_is_smooth() -> None:
    """A group of codes that do not change: all move with the scale alone, in proportion to the largest value.

    The straight-through estimator counts the moving of `w/s` within a step as the moving of its code; a group that
    holds nothing but multiples of the scale has none of that, and there both derivatives of the largest value agree.
    """
    largest = 7.0
    weight = torch.tensor([[largest, 3.0, -2.0, 5.0, 0.0, 1.0, -6.0, 4.0]], dtype=torch.float64, requires_grad=True)
    upstream = _weight(1, 8, seed=3)

    def loss(values: Tensor) -> Tensor:
        return (fake_quantize_weight(values, 8, search=False) * upstream).sum()

    step = torch.zeros_like(weight)
    step[0, 0] = 1e-4
    numeric = float(loss(weight.detach() + step) - loss(weight.detach() - step)) / 2e-4
    (gradient,) = torch.autograd.grad(loss(weight), weight)
    codes = weight.detach()[0]
    # Straight through: the value itself; the true derivative: every code times the scale's.
    assert numeric == pytest.approx(float((codes * upstream[0]).sum()) / 7, abs=1e-9)
    assert float(gradient[0, 0]) == pytest.approx(float(upstream[0, 0]), abs=1e-9)
    alone = torch.zeros_like(upstream)
    alone[0, 0] = upstream[0, 0]
    only = (fake_quantize_weight(weight.detach() + step, 8, search=False) * alone).sum()
    below = (fake_quantize_weight(weight.detach() - step, 8, search=False) * alone).sum()
    assert float(gradient[0, 0]) == pytest.approx(float(only - below) / 2e-4, abs=1e-9)
