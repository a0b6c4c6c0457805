"""The solver against brute force, and what it does with Hessians that are of no use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.converters import gptq_solver
from bitnest_format.converters.hessian import LARGEST_DAMPING, HessianSum, InverseFactor, inverse_factor, shrunk
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.quantize import Together, quantize_together

F16 = torch.float16


def _problem(outputs: int, inputs: int, seed: int = 0, samples: int = 512) -> tuple[Tensor, Tensor]:
    """A weight and the mean `X^T X` of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + 0.5 * torch.eye(inputs)
    sums = HessianSum(inputs)
    sums.add(torch.randn(samples, inputs, generator=generator) @ mix)
    return weight, sums.mean()


def _error(weight: Tensor, rebuilt: Tensor, hessian: Tensor) -> float:
    difference = (weight - rebuilt).double()
    return float(((difference @ hessian.double()) * difference).sum())


def _factor(hessian: Tensor, damping: float = 0.01) -> InverseFactor:
    factor = inverse_factor(hessian, damping)
    assert factor is not None
    return factor


def test_hessian_sum_is_the_mean_outer_product() -> None:
    sums = HessianSum(3)
    sums.add(torch.tensor([[[1.0, 2.0, 0.0]], [[0.0, 1.0, 3.0]]]))
    assert sums.tokens == 2
    assert sums.mean().tolist() == [[0.5, 1.0, 0.0], [1.0, 2.5, 1.5], [0.0, 1.5, 4.5]]


def test_few_tokens_shrink_a_hessian_towards_the_identity() -> None:
    """Two eigenvalues in four dimensions, by hand: trace 10, sum of squares 50."""
    hessian = torch.diag(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    # (1/2 * 50 + 100) / ((9 + 1/2) * (50 - 25)) = 125 / 237.5
    share = 10 / 19
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]) * 5 * (1 - share) + share * 2.5)
    torch.testing.assert_close(shrunk(hessian.clone(), 9), expected)
    assert torch.equal(shrunk(hessian.clone(), 1), 2.5 * torch.eye(4))
    torch.testing.assert_close(shrunk(hessian.clone(), 10**9), hessian, rtol=0, atol=1e-7)
    assert torch.equal(shrunk(torch.zeros(4, 4), 3), torch.zeros(4, 4))


@pytest.mark.parametrize(("steepness", "plain", "best"), [(0.0, (1.5, 4.0), 1.15), (2.0, (0.0, 0.7), 0.5)])
def test_a_shrunk_hessian_of_few_tokens_does_little_harm(
    steepness: float, plain: tuple[float, float], best: float
) -> None:
    """Errors of the target's outputs over those of rounding, on the distribution of the tokens."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    spectrum = torch.arange(1, 257) ** -steepness
    root = (spectrum / spectrum.mean()).sqrt()[:, None] * torch.linalg.qr(torch.randn(256, 256, generator=generator))[0]
    tokens = torch.randn(64, 256, generator=generator) @ root
    hessian = tokens.T @ tokens / 64

    def error(hessian: Tensor | None) -> float:
        ((found, _),) = quantize_together([Together({"matrix": weight}, hessian, 64)], ConvertOptions())
        codes = found["matrix"]
        assert codes.refinement is not None
        target = nesting.target_weight(codes.base, codes.refinement, codes.scale)
        return float(((weight - target) @ root.T).norm())

    rounded = error(None)
    assert plain[0] < error(hessian) / rounded < plain[1]
    assert error(shrunk(hessian.clone(), 64)) / rounded < best


@pytest.mark.parametrize("inputs", [1, 8, 63])
def test_inverse_factor_factors_the_damped_inverse(inputs: int) -> None:
    _, hessian = _problem(1, inputs)
    factor = _factor(hessian)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(inputs)
    upper = factor.upper.double()
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(damped), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(factor.hessian.double(), damped, rtol=1e-6, atol=0)


def _brute_force(weight: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    """GPTQ from its definition: after each column, the best move of the others by an explicit inverse."""
    moved, codes = weight.double().clone(), torch.empty_like(weight)
    inputs = weight.shape[1]
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(inputs)
    for column in range(inputs):
        step = scale[:, column * scale.shape[1] // inputs].double()
        codes[:, column] = (moved[:, column] / step).round().clamp(-8, 7)
        inverse = torch.linalg.inv(damped[column:, column:])
        error = (moved[:, column] - codes[:, column] * step) / inverse[0, 0]
        moved[:, column:] -= error.unsqueeze(1) * inverse[0].unsqueeze(0)
    return codes.to(torch.int8)


@pytest.mark.parametrize(("inputs", "group_size"), [(16, 16), (64, 16), (160, 160), (256, 64)])
def test_base_codes_equal_brute_force(inputs: int, group_size: int) -> None:
    weight, hessian = _problem(5, inputs)
    base = gptq_solver.solve_base(weight, _factor(hessian), group_size=group_size, scale_type=F16)
    expected = _brute_force(weight, hessian, base.scale)
    # float32 against float64: a code may differ where a weight falls on a tie, which random weights do not.
    assert torch.equal(base.codes, expected)


def test_gptq_beats_round_to_nearest_and_keeps_codes_in_range() -> None:
    weight, hessian = _problem(16, 256)
    factor = _factor(hessian)
    solved, nearest = (gptq_solver.solve_base(weight, use, group_size=128, scale_type=F16) for use in (factor, None))
    errors = []
    for base in (solved, nearest):
        assert base.codes.dtype == torch.int8 and int(base.codes.min()) >= -8 and int(base.codes.max()) <= 7
        assert torch.equal(base.scale, base.scale.half().float())
        errors.append(_error(weight, nesting.draft_weight(base.codes, base.scale), hessian))
    assert errors[0] < 0.8 * errors[1]


def test_round_to_nearest_is_the_plain_encoding() -> None:
    weight, _ = _problem(7, 128)
    base = gptq_solver.solve_base(weight, None, group_size=32, scale_type=F16, search=False)
    scale = nesting.round_scale(nesting.group_max_abs(weight, 32) / 7, F16)
    assert torch.equal(base.scale, scale)
    assert torch.equal(base.codes, nesting.encode_base(weight, scale))


def test_searched_scales_are_the_best_of_all_shrink_factors() -> None:
    weight, _ = _problem(4, 64)
    scales = gptq_solver.group_scales(weight.T.contiguous(), F16, True)
    for row in range(4):
        errors = {}
        for shrink in gptq_solver.SHRINK_FACTORS:
            scale = float((weight[row].abs().max() / 7 * shrink).half())
            codes = (weight[row] / scale).round().clamp(-8, 7)
            errors[scale] = float(((weight[row] - codes * scale).abs() ** 2.4).sum())
        assert errors[float(scales[row])] == pytest.approx(min(errors.values()), rel=1e-5)


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("bound", [0.5, 2 / 3, 0.8])
def test_bound_limits_the_distance_to_the_original(bound: float, sweeps: int) -> None:
    weight, hessian = _problem(8, 192)
    base = gptq_solver.solve_base(weight, _factor(hessian), group_size=64, scale_type=F16, bound=bound, sweeps=sweeps)
    steps = weight / nesting.expand_groups(base.scale, 192)
    distance = (steps - base.codes).abs()
    inside = (steps > -8) & (steps < 7)
    assert float(distance[inside].max()) <= bound + 1e-5
    assert bool((base.codes[steps >= 7 + bound] == 7).all()) and bool((base.codes[steps <= -8 - bound] == -8).all())


def test_sweeps_lower_the_error_of_the_base() -> None:
    weight, hessian = _problem(16, 256)
    factor = _factor(hessian)
    errors = []
    for sweeps in (0, 1, 3):
        base = gptq_solver.solve_base(weight, factor, group_size=64, scale_type=F16, sweeps=sweeps)
        assert torch.equal(base.scale, base.scale.half().float()) and bool((base.scale > 0).all())
        errors.append(_error(weight, nesting.draft_weight(base.codes, base.scale), factor.hessian))
    assert errors[0] > errors[1] > errors[2]


def test_refinement_feedback_and_sweeps_lower_the_error_of_the_target() -> None:
    weight, hessian = _problem(16, 256)
    factor = _factor(hessian)
    base = gptq_solver.solve_base(weight, factor, group_size=64, scale_type=F16)
    refinements = [nesting.encode_refinement(weight, base.codes, base.scale)]
    refinements += [
        gptq_solver.solve_refinement(weight, factor, base.codes, base.scale, sweeps).codes for sweeps in (0, 1, 3)
    ]
    errors = [
        _error(weight, nesting.target_weight(base.codes, codes, base.scale), factor.hessian) for codes in refinements
    ]
    assert errors[0] > errors[1] > errors[2] > errors[3]


def test_sweeps_reach_the_optimum_of_a_small_problem() -> None:
    """Two inputs, all 16 x 16 refinements tried: descent ends where no single code can be improved."""
    weight = torch.tensor([[0.31, -0.27]])
    hessian = torch.tensor([[1.0, 0.6], [0.6, 1.0]])
    factor = _factor(hessian)
    base, scale = torch.tensor([[2, -3]], dtype=torch.int8), torch.tensor([[0.125]])
    found = gptq_solver.solve_refinement(weight, factor, base, scale, sweeps=4).codes

    def error(codes: Tensor) -> float:
        return _error(weight, nesting.target_weight(base, codes, scale), factor.hessian)

    for column in range(2):
        for code in range(-8, 8):
            other = found.clone()
            other[0, column] = code
            assert error(found) <= error(other) + 1e-9


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 5), groups=st.integers(1, 3), size=st.sampled_from([8, 24, 136]), seed=st.integers(0, 999)
)
def test_refinement_never_changes_or_leaves_the_base(outputs: int, groups: int, size: int, seed: int) -> None:
    weight, hessian = _problem(outputs, groups * size, seed, samples=64)
    weight[0, : size // 2] *= 8
    factor = _factor(hessian, 0.1)
    base = gptq_solver.solve_base(weight, factor, group_size=size, scale_type=F16, sweeps=1)
    kept = base.codes.clone()
    solved = gptq_solver.solve_refinement(weight, factor, base.codes, base.scale, sweeps=1)
    refinement = solved.codes
    assert torch.equal(base.codes, kept)
    assert solved.clipped.shape == (outputs,) and bool(((solved.clipped >= 0) & (solved.clipped <= 1)).all())
    assert not bool(nesting.forbidden_pairs(base.codes, refinement).any())
    assert int(refinement.min()) >= -8 and int(refinement.max()) <= 7
    assert bool(((16 * base.codes.int() + refinement) // 16 >= base.codes.int() - 1).all())


def test_zero_groups_and_zero_rows_come_back_as_exact_zeros() -> None:
    weight, hessian = _problem(4, 256)
    weight[1] = 0
    weight[2, 128:] = 0
    for factor in (_factor(hessian), None):
        base = gptq_solver.solve_base(weight, factor, group_size=128, scale_type=F16, bound=0.8)
        assert bool(torch.isfinite(base.scale).all()) and bool((base.scale > 0).all())
        assert bool((base.codes[1] == 0).all())
        draft = nesting.draft_weight(base.codes, base.scale)
        assert bool(torch.isfinite(draft).all())
        refinement = nesting.encode_refinement(weight, base.codes, base.scale)
        assert float(nesting.target_weight(base.codes, refinement, base.scale)[1].abs().max()) == 0


def test_rank_one_hessian_is_damped_not_failed() -> None:
    token = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    sums = HessianSum(256)
    sums.add(token.expand(64, -1))
    weight, _ = _problem(4, 256)
    factor = inverse_factor(sums.mean(), 0.01)
    assert factor is not None and factor.damping <= LARGEST_DAMPING
    base = gptq_solver.solve_base(weight, factor, group_size=128, scale_type=F16, sweeps=1)
    assert bool(torch.isfinite(nesting.draft_weight(base.codes, base.scale)).all())


def test_indefinite_hessian_raises_the_damping_and_gives_up_at_the_bound() -> None:
    hessian = torch.eye(8)
    hessian[0, 1] = hessian[1, 0] = 1.05
    factor = inverse_factor(hessian, 0.01)
    assert factor is not None and factor.damping == pytest.approx(0.1)
    hessian[0, 1] = hessian[1, 0] = 5.0
    assert inverse_factor(hessian, 0.01) is None
    hessian[0, 0] = torch.nan
    assert inverse_factor(hessian, 0.01) is None


def test_dead_columns_are_rounded_to_nearest() -> None:
    weight, hessian = _problem(6, 128)
    for column in (5, 70):
        hessian[column] = 0
        hessian[:, column] = 0
    factor = _factor(hessian)
    base = gptq_solver.solve_base(weight, factor, group_size=128, scale_type=F16)
    refinement = gptq_solver.solve_refinement(weight, factor, base.codes, base.scale).codes
    target = nesting.target_weight(base.codes, refinement, base.scale)
    for column in (5, 70):
        assert torch.equal(base.codes[:, column], nesting.encode_base(weight, base.scale)[:, column])
        assert float(((target - weight)[:, column].abs() / base.scale[:, 0]).max()) <= 1 / 16


def test_all_zero_hessian_is_round_to_nearest() -> None:
    weight, _ = _problem(6, 128)
    factor = _factor(torch.zeros(128, 128))
    solved = gptq_solver.solve_base(weight, factor, group_size=64, scale_type=F16)
    nearest = gptq_solver.solve_base(weight, None, group_size=64, scale_type=F16)
    assert torch.equal(solved.codes, nearest.codes) and bool((solved.codes != 0).any())
    assert torch.equal(solved.scale, nearest.scale)


def test_target_error_is_bounded_where_the_base_is_within_half_a_step() -> None:
    weight, hessian = _problem(8, 256)
    base = gptq_solver.solve_base(weight, _factor(hessian), group_size=128, scale_type=F16)
    refinement = nesting.encode_refinement(weight, base.codes, base.scale)
    step = nesting.expand_groups(base.scale, 256)
    target = nesting.target_weight(base.codes, refinement, base.scale)
    near = ((weight - base.codes * step).abs() <= step / 2) & (base.codes > -8)
    assert float(((target - weight).abs() / step)[near].max()) <= 1 / 16 + 1e-6
