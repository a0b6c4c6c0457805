"""Quantization with error feedback: GPTQ (arXiv 2210.17323) for the base plane, and again for the refinement.

Both planes minimise `tr(E^T H E)` with `E = W - Q` and `H` the damped mean outer product of the layer's inputs.

A *walk* visits the input columns once: a column is rounded, its error is divided by the matching diagonal entry of
the Cholesky factor of `H^-1`, and the columns that follow are moved to make up for it. *Sweeps* of coordinate
descent follow: every column is chosen again, given all others (QuantEase, arXiv 2309.01885, without its relaxations),
and the base's scales are refitted. For the base the codes are `q4`. For the refinement the base stays as it is, the
goal is the original weight, and the codes are `16 * q4 + qr` within the range that the base leaves open.

Weights are transposed here, `[I, O]`, so that a column of inputs is contiguous, and divided by the scale while a
group is worked on, so that a code is one rounding away. Nothing here touches files.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    if not bool(torch.isfinite(hessian).all()):
        return None
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal[~dead].double().mean() if bool((~dead).any()) else 1.0
    while damping <= LARGEST_DAMPING:
        damped = hessian.double()
        damped.diagonal()[dead] = 1.0
        damped.diagonal().add_(damping * mean)
        rounded = damped.float()
        # Handed over, so that no more than three matrices of float64 exist at a time.
        damped = damped.flip(0, 1)
        upper = _upper_inverse_factor(damped)
        if upper is not None:
            return InverseFactor(rounded, upper, damping)
        damping *= DAMPING_GROWTH
    return None


def _upper_inverse_factor(reversed_hessian: Tensor) -> Tensor | None:
    """`J L^-1 J` for `L L^T` of float64 `J H J`, which is overwritten: float32. None where it is not definite."""
    lower, failed = torch.linalg.cholesky_ex(reversed_hessian)
    if int(failed):
        return None
    identity = reversed_hessian.zero_()
    identity.diagonal().fill_(1.0)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.float().flip(0, 1) if bool(torch.isfinite(inverse).all()) else None


@dataclass(frozen=True, slots=True)
class Base:
    """`codes` int8 `[O, I]`, `scale` float32 `[O, G]` already rounded to its stored type."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Refinement:
    """`codes` int8 `[O, I]`; `clipped` float32 `[O]`, the share of each row's codes that met their limit."""

    codes: Tensor
    clipped: Tensor


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
    original weight and its code.
    """
    plane = _BasePlane(weight.T.contiguous(), group_size, scale_type, search, bound)
    _walk(plane, factor)
    if factor is not None:
        for _ in range(sweeps):
            _sweep(plane, factor.hessian)
    return Base(plane.codes.T.to(torch.int8).contiguous(), plane.scale.T.contiguous())


def solve_refinement(weight: Tensor, factor: InverseFactor, base: Tensor, scale: Tensor, sweeps: int = 0) -> Refinement:
    """The refinement plane by error feedback over a fixed base.

    `weight` float32 and `base` int8 `[O, I]`, `scale` float32 `[O, G]`.
    """
    goal = weight.T.contiguous()
    plane = _Plane(goal, goal.shape[0] // scale.shape[1])
    base_part = STEPS_PER_BASE_STEP * base.T.float()
    plane.scale = (scale / STEPS_PER_BASE_STEP).T.contiguous()
    plane.lowest = base_part + refinement_floor(base).T
    plane.highest = base_part + REFINEMENT_MAX
    plane.wanted = torch.zeros_like(goal)
    _walk(plane, factor)
    for _ in range(sweeps):
        _sweep(plane, factor.hessian)
    codes = (plane.codes - base_part).T.to(torch.int8).contiguous()
    return Refinement(codes, (plane.wanted != plane.codes).float().mean(dim=0))


class _Plane:
    """Integer codes in the making, `[I, O]` float32, with one scale per group and the range of each code.

    `wanted` is what a code would be without its range, in planes that keep it.
    """

    def __init__(self, goal: Tensor, group_size: int):
        self.goal = goal
        self.group_size = group_size
        self.codes = torch.zeros_like(goal)
        self.wanted = self.codes
        self.lowest = torch.full_like(goal, BASE_MIN)
        self.highest = torch.full_like(goal, BASE_MAX)
        self.scale = goal.new_empty(goal.shape[0] // group_size, goal.shape[1])

    def enter_group(self, start: int, moved: Tensor) -> None:
        """Called when the walk reaches a group, with its weights as moved so far."""

    def refit_group(self, start: int, pull: Tensor, hessian: Tensor) -> None:
        """Called when a sweep reaches a group: `pull` is its rows of `H E`, `hessian` its block of `H`."""

    def choose(self, column: int, value: Tensor) -> Tensor:
        """Give a column the allowed codes nearest to `value` (in steps) and return them."""
        wanted = torch.round(value, out=self.wanted[column])
        return torch.clamp(wanted, self.lowest[column], self.highest[column], out=self.codes[column])

    def values(self, rows: slice) -> Tensor:
        return self.codes[rows] * self.scale[rows.start // self.group_size]


class _BasePlane(_Plane):
    """The base: its scales are chosen here, and its codes stay within `bound` steps of the goal."""

    def __init__(self, goal: Tensor, group_size: int, scale_type: torch.dtype, search: bool, bound: float | None):
        super().__init__(goal, group_size)
        self.scale_type, self.search, self.bound = scale_type, search, bound

    def enter_group(self, start: int, moved: Tensor) -> None:
        self._set_scale(start, group_scales(moved, self.scale_type, self.search))

    def refit_group(self, start: int, pull: Tensor, hessian: Tensor) -> None:
        """Move the scale to where the error is least for the present codes: `s + c^T pull / (c^T H c)`."""
        codes = self.codes[start : start + self.group_size]
        curvature = (codes * (hessian @ codes)).sum(dim=0)
        step = torch.where(curvature > 0, (codes * pull).sum(dim=0) / curvature, 0.0)
        old = self.scale[start // self.group_size]
        # A step of half the scale means that the codes no longer fit it; the least-squares answer is left out there.
        self._set_scale(start, round_scale(torch.where(step.abs() < old / 2, old + step, old), self.scale_type))

    def _set_scale(self, start: int, scale: Tensor) -> None:
        self.scale[start // self.group_size] = scale
        if self.bound is not None:
            rows = slice(start, start + self.group_size)
            steps = self.goal[rows] / scale
            self.lowest[rows] = (steps - self.bound).ceil().clamp(BASE_MIN, BASE_MAX)
            self.highest[rows] = (steps + self.bound).floor().clamp(BASE_MIN, BASE_MAX)


def _blocks(plane: _Plane) -> Iterator[tuple[int, slice]]:
    """Runs of columns that are worked on together: `(start of their group, rows)`; none crosses a group."""
    inputs, size = plane.goal.shape[0], plane.group_size
    for start in range(0, inputs, size):
        for first in range(start, start + size, WALK_BLOCK):
            yield start, slice(first, min(first + WALK_BLOCK, start + size))


def _walk(plane: _Plane, factor: InverseFactor | None) -> None:
    """Choose every column once, in order, moving later ones to make up for errors.

    Movements reach the columns of the same block at once and later blocks when the block is done, so a group
    starts with all earlier movements applied.
    """
    moved = plane.goal.clone()
    for start, rows in _blocks(plane):
        if rows.start == start:
            plane.enter_group(start, moved[start : start + plane.group_size])
        scale = plane.scale[start // plane.group_size]
        steps = moved[rows] / scale
        if factor is None:
            for offset, column in enumerate(range(rows.start, rows.stop)):
                plane.choose(column, steps[offset])
            continue
        block = factor.upper[rows, rows]
        errors = torch.empty_like(steps)
        for offset, reciprocal in enumerate((1 / block.diagonal()).tolist()):
            codes = plane.choose(rows.start + offset, steps[offset])
            error = torch.sub(steps[offset], codes, out=errors[offset]).mul_(reciprocal)
            steps[offset + 1 :].addr_(block[offset, offset + 1 :], error, alpha=-1)
        moved[rows.stop :].addmm_(factor.upper[rows, rows.stop :].T, errors * scale, alpha=-1)


def _sweep(plane: _Plane, hessian: Tensor) -> None:
    """Choose every column again by coordinate descent; the error never grows while the scales stand still.

    With `P = H E`, column `j` alone would best become `Q[j] + P[j] / H[j, j]`. Scales are refitted at the start of a
    group where the group is one block.
    """
    error = torch.cat([plane.goal[rows] - plane.values(rows) for _, rows in _blocks(plane)])
    for start, rows in _blocks(plane):
        block = hessian[rows, rows]
        pull = hessian[rows] @ error
        if rows.stop - rows.start == plane.group_size:
            plane.refit_group(start, pull, block)
            refitted = plane.goal[rows] - plane.values(rows)
            pull.addmm_(block, refitted - error[rows])
        pull /= plane.scale[start // plane.group_size]
        codes = plane.codes[rows].clone()
        for offset, diagonal in enumerate(block.diagonal().tolist()):
            best = torch.add(codes[offset], pull[offset], alpha=1 / diagonal)
            change = plane.choose(rows.start + offset, best) - codes[offset]
            pull[offset + 1 :].addr_(block[offset, offset + 1 :], change, alpha=-1)
        error[rows] = plane.goal[rows] - plane.values(rows)


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
