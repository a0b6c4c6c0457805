"""Quantization with error feedback: GPTQ (arXiv 2210.17323) for the base plane, and again for the refinement.

Both planes are found by one walk over the input columns. A column is rounded, its error is divided by the
matching diagonal entry of the Cholesky factor of the inverse Hessian, and the columns that follow are moved to
make up for it. For the base the walk chooses `q4` and a scale per group. For the refinement the base stays as
it is, the goal is the original weight, and the walk chooses `16 * q4 + qr` within the range the base leaves open.

Works on transposed weights `[I, O]`, so that a column of inputs is contiguous. Nothing here touches files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format.nesting import (
    BASE_MAX,
    BASE_MIN,
    REFINEMENT_MAX,
    STEPS_PER_BASE_STEP,
    refinement_floor,
    round_scale,
)

WALK_BLOCK = 128
DAMPING_GROWTH = 10.0
LARGEST_DAMPING = 1.0
SHRINK_FACTORS = tuple(round(0.6 + 0.02 * step, 2) for step in range(21))
SCALE_ERROR_NORM = 2.4


class HessianSum:
    """Accumulates `X^T X / N` over calibration inputs, float32 `[I, I]`."""

    def __init__(self, inputs: int, device: str = "cpu"):
        self.total = torch.zeros(inputs, inputs, device=device)
        self.tokens = 0

    def add(self, activations: Tensor) -> None:
        """Add inputs of any leading shape, `[..., I]`."""
        rows = activations.reshape(-1, activations.shape[-1]).float()
        self.total.addmm_(rows.T, rows)
        self.tokens += rows.shape[0]

    def mean(self) -> Tensor:
        return self.total / max(self.tokens, 1)


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
    damped = hessian.double().clone()
    diagonal = damped.diagonal()
    if not bool(torch.isfinite(damped).all()):
        return None
    dead = diagonal <= 0
    diagonal[dead] = 1.0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    added = 0.0
    while damping <= LARGEST_DAMPING:
        diagonal += (damping - added) * mean
        added = damping
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if int(failed) == 0:
            identity = torch.eye(damped.shape[0], dtype=damped.dtype, device=damped.device)
            upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
            if bool(torch.isfinite(upper).all()):
                return InverseFactor(damped.float(), upper.float().contiguous(), damping)
        damping *= DAMPING_GROWTH
    return None


@dataclass(frozen=True, slots=True)
class Base:
    """`codes` int8 `[O, I]`, `scale` float32 `[O, G]` already rounded to its stored type."""

    codes: Tensor
    scale: Tensor


def solve_base(
    weight: Tensor,
    factor: InverseFactor | None,
    *,
    group_size: int,
    scale_type: torch.dtype,
    search: bool = True,
    bound: float | None = None,
    sweeps: int = 0,
) -> Base:
    """The base plane of `weight` float32 `[O, I]`; round-to-nearest where there is no factor.

    A group's scale is chosen when the walk reaches the group, from the weights as moved so far (`search`: the
    best of `SHRINK_FACTORS`, otherwise `max|w| / 7`). `bound` limits the distance, in steps, between the
    original weight and its code. `sweeps` passes of coordinate descent follow, each of which also refits the
    scales.
    """
    plane = _BasePlane(weight, group_size, scale_type, search, bound)
    _walk(plane.goal, factor, group_size, plane.enter_group, plane.choose)
    if factor is not None:
        for _ in range(sweeps):
            _sweep(plane.goal, plane.values(), factor.hessian, group_size, plane.refit_group, plane.choose)
    return Base(plane.codes.T.to(torch.int8).contiguous(), plane.scale.T.contiguous())


class _BasePlane:
    """Codes `[I, O]` and scales `[G, O]` in the making, with the range that each code may take."""

    def __init__(self, weight: Tensor, group_size: int, scale_type: torch.dtype, search: bool, bound: float | None):
        self.goal = weight.T.contiguous()
        self.group_size, self.scale_type, self.search, self.bound = group_size, scale_type, search, bound
        self.codes = torch.empty_like(self.goal)
        self.scale = self.goal.new_empty(self.goal.shape[0] // group_size, self.goal.shape[1])
        self.lowest = torch.full_like(self.goal, BASE_MIN)
        self.highest = torch.full_like(self.goal, BASE_MAX)

    def enter_group(self, start: int, moved: Tensor) -> None:
        self._set_scale(start, group_scales(moved, self.scale_type, self.search))

    def refit_group(self, start: int, pull: Tensor, hessian: Tensor) -> Tensor:
        """Move a group's scale to where the weighted error is least for its present codes; returns its values.

        `pull` is the group's rows of `H (W - Q)`, `hessian` its block of `H`. The least-squares scale is
        `s + c^T pull / (c^T H c)`.
        """
        group = start // self.group_size
        codes = self.codes[start : start + self.group_size]
        curvature = (codes * (hessian @ codes)).sum(dim=0)
        step = torch.where(curvature > 0, (codes * pull).sum(dim=0) / curvature, 0.0)
        old = self.scale[group]
        # A scale far from the old one means that the codes no longer fit it; such steps are left out.
        moved = torch.where((step.abs() < 0.5 * old), old + step, old)
        self._set_scale(start, round_scale(moved, self.scale_type))
        return codes * self.scale[group]

    def _set_scale(self, start: int, scale: Tensor) -> None:
        self.scale[start // self.group_size] = scale
        if self.bound is not None:
            rows = slice(start, start + self.group_size)
            steps = self.goal[rows] / scale
            self.lowest[rows] = (steps - self.bound).ceil().clamp(BASE_MIN, BASE_MAX)
            self.highest[rows] = (steps + self.bound).floor().clamp(BASE_MIN, BASE_MAX)

    def choose(self, column: int, wanted: Tensor) -> Tensor:
        step = self.scale[column // self.group_size]
        code = self.codes[column]
        torch.div(wanted, step, out=code).round_()
        torch.minimum(torch.maximum(code, self.lowest[column], out=code), self.highest[column], out=code)
        return code * step

    def values(self) -> Tensor:
        return self.codes * self.scale.repeat_interleave(self.group_size, dim=0)


def solve_refinement(
    weight: Tensor, factor: InverseFactor, base: Tensor, scale: Tensor, sweeps: int = 0
) -> tuple[Tensor, float]:
    """The refinement plane by error feedback over a fixed base.

    `weight` float32 and `base` int8 `[O, I]`, `scale` float32 `[O, G]` -> int8 `[O, I]` and the share of codes
    that had to be clipped. `sweeps` passes of coordinate descent follow the walk.
    """
    goal = weight.T.contiguous()
    group_size = goal.shape[0] // scale.shape[1]
    fine = (scale / STEPS_PER_BASE_STEP).T.contiguous()
    base_part = STEPS_PER_BASE_STEP * base.T.float()
    lowest = base_part + refinement_floor(base).T
    highest = base_part + REFINEMENT_MAX
    codes = torch.empty_like(goal)
    clipped = torch.empty_like(goal, dtype=torch.bool)

    def choose(column: int, wanted: Tensor) -> Tensor:
        step = fine[column // group_size]
        code = torch.div(wanted, step).round_()
        codes[column] = torch.minimum(torch.maximum(code, lowest[column]), highest[column])
        clipped[column] = code != codes[column]
        return codes[column] * step

    def values() -> Tensor:
        return codes * fine.repeat_interleave(group_size, dim=0)

    _walk(goal, factor, group_size, lambda start, moved: None, choose)
    for _ in range(sweeps):
        _sweep(goal, values(), factor.hessian, group_size, None, choose)
    refinement = (codes - base_part).T.to(torch.int8).contiguous()
    return refinement, float(clipped.float().mean())


def group_scales(moved: Tensor, scale_type: torch.dtype, search: bool) -> Tensor:
    """One scale per output for a group of weights `[g, O]`, rounded to its stored type: float32 `[O]`.

    `search` takes the shrink factor with the smallest sum of `|error|^2.4` over the group.
    """
    largest = moved.abs().amax(dim=0) / BASE_MAX
    if not search:
        return round_scale(largest, scale_type)
    best = round_scale(largest, scale_type)
    best_error = torch.full_like(largest, torch.inf)
    for shrink in SHRINK_FACTORS:
        scale = round_scale(largest * shrink, scale_type)
        error = moved / scale
        error.sub_(error.round().clamp_(BASE_MIN, BASE_MAX)).mul_(scale)
        error = error.abs_().pow_(SCALE_ERROR_NORM).sum(dim=0)
        better = error < best_error
        best = torch.where(better, scale, best)
        best_error = torch.where(better, error, best_error)
    return best


def _walk(
    weight: Tensor,
    factor: InverseFactor | None,
    group_size: int,
    enter_group: Callable[[int, Tensor], None],
    choose: Callable[[int, Tensor], Tensor],
) -> None:
    """Visit the columns of transposed `weight` `[I, O]` in order, moving later ones to make up for errors.

    `choose(column, moved)` returns the value that the column gets. Movements reach the columns of the same
    block at once and later blocks when the block is done; a group starts with all earlier movements applied.
    """
    moved = weight.clone()
    inputs = weight.shape[0]
    for start in range(0, inputs, group_size):
        enter_group(start, moved[start : start + group_size])
        for first in range(start, start + group_size, WALK_BLOCK):
            last = min(first + WALK_BLOCK, start + group_size)
            _walk_block(moved, first, last, factor.upper if factor else None, choose)


def _walk_block(
    moved: Tensor, first: int, last: int, upper: Tensor | None, choose: Callable[[int, Tensor], Tensor]
) -> None:
    if upper is None:
        for column in range(first, last):
            choose(column, moved[column])
        return
    errors = torch.empty_like(moved[first:last])
    diagonal = upper.diagonal()[first:last].tolist()
    for offset, column in enumerate(range(first, last)):
        value = choose(column, moved[column])
        error = torch.sub(moved[column], value, out=errors[offset]).div_(diagonal[offset])
        moved[column + 1 : last].addr_(upper[column, column + 1 : last], error, alpha=-1)
    moved[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)


def _sweep(
    goal: Tensor,
    values: Tensor,
    hessian: Tensor,
    group_size: int,
    refit_group: Callable[[int, Tensor, Tensor], Tensor] | None,
    choose: Callable[[int, Tensor], Tensor],
) -> None:
    """One pass of coordinate descent on `tr(E^T H E)`, `E = goal - values`: every column is chosen again.

    With `P = H E`, column `j` alone would best become `values[j] + P[j] / H[j, j]`; it gets the nearest value
    that `choose` allows, so the error never grows (QuantEase, arXiv 2309.01885, without its relaxations).
    `refit_group(start, P rows, H block)` may change a group's scale first and returns the group's new values.
    """
    error = goal - values
    diagonal = hessian.diagonal().tolist()
    for start in range(0, goal.shape[0], group_size):
        for first in range(start, start + group_size, WALK_BLOCK):
            rows = slice(first, min(first + WALK_BLOCK, start + group_size))
            block = hessian[rows, rows]
            pull = hessian[rows] @ error
            if refit_group is not None and group_size <= WALK_BLOCK:
                refitted = goal[rows] - refit_group(start, pull, block)
                pull += block @ (refitted - error[rows])
                error[rows] = refitted
            for offset, column in enumerate(range(rows.start, rows.stop)):
                old = goal[column] - error[column]
                new = choose(column, old + pull[offset] / diagonal[column])
                error[column] = goal[column] - new
                pull.addr_(block[offset], new - old, alpha=-1)
