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
from typing import NamedTuple

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

HESSIAN_STRIPS = 8
# Columns whose movements are applied one by one; beyond them they are gathered into one matrix product.
TILE = 32
DAMPING_GROWTH = 10.0
LARGEST_DAMPING = 1.0
SHRINK_FACTORS = tuple(round(0.6 + 0.02 * step, 2) for step in range(21))
SCALE_ERROR_NORM = 2.4


class HessianSum:
    """Accumulates `X^T X / N` over calibration inputs, float32 `[I, I]`.

    The product is symmetric: it is summed in strips of rows, each from its own diagonal block on, and mirrored at the
    end, which leaves out nearly half of the multiplications.
    """

    def __init__(self, inputs: int, device: str = "cpu"):
        self.total = torch.zeros(inputs, inputs, device=device)
        self.tokens = 0
        step = -(-inputs // HESSIAN_STRIPS)
        self.strips = [slice(first, min(first + step, inputs)) for first in range(0, inputs, step)]

    def add(self, activations: Tensor) -> None:
        """Add inputs of any leading shape, `[..., I]`."""
        rows = activations.reshape(-1, activations.shape[-1]).float()
        for strip in self.strips:
            self.total[strip, strip.start :].addmm_(rows[:, strip].T, rows[:, strip.start :])
        self.tokens += rows.shape[0]

    def mean(self) -> Tensor:
        upper = self.total.triu()
        return (upper + upper.triu(1).T) / max(self.tokens, 1)


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


class _Column(NamedTuple):
    """One column of a plane, `[O]` each."""

    wanted: Tensor
    codes: Tensor
    lowest: Tensor
    highest: Tensor

    def choose(self, value: Tensor) -> Tensor:
        """Take the allowed codes nearest to `value` (in steps) and return them."""
        wanted = torch.round(value, out=self.wanted)
        return torch.clamp(wanted, self.lowest, self.highest, out=self.codes)


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

    def columns(self, tile: slice) -> Iterator[_Column]:
        """The columns of a tile one by one; views, made at once because indexing costs as much as arithmetic here."""
        return map(
            _Column,
            self.wanted[tile].unbind(),
            self.codes[tile].unbind(),
            self.lowest[tile].unbind(),
            self.highest[tile].unbind(),
        )

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


def _groups(plane: _Plane) -> Iterator[slice]:
    for start in range(0, plane.goal.shape[0], plane.group_size):
        yield slice(start, start + plane.group_size)


def _tiles(rows: slice) -> Iterator[slice]:
    for first in range(rows.start, rows.stop, TILE):
        yield slice(first, min(first + TILE, rows.stop))


def _walk(plane: _Plane, factor: InverseFactor | None) -> None:
    """Choose every column once, in order, moving later ones to make up for errors.

    Movements reach the columns of the same tile at once, those of the same group when the tile is done, and later
    groups when the group is done, so a group starts with all earlier movements applied.
    """
    moved = plane.goal.clone()
    for group in _groups(plane):
        plane.enter_group(group.start, moved[group])
        scale = plane.scale[group.start // plane.group_size]
        steps = moved[group] / scale
        if factor is None:
            for column, step in zip(plane.columns(group), steps.unbind(), strict=True):
                column.choose(step)
            continue
        upper = factor.upper
        errors = torch.empty_like(steps)
        for tile in _tiles(group):
            here = slice(tile.start - group.start, tile.stop - group.start)
            block, tile_steps, tile_errors = upper[tile, tile], steps[here], errors[here]
            later = block.triu(1).unbind()
            reciprocals = (1 / block.diagonal()).tolist()
            rows = zip(plane.columns(tile), tile_steps.unbind(), tile_errors.unbind(), later, reciprocals, strict=True)
            for column, step, error, weights, reciprocal in rows:
                torch.sub(step, column.choose(step), out=error).mul_(reciprocal)
                tile_steps.addr_(weights, error, alpha=-1)
            steps[here.stop :].addmm_(upper[tile, tile.stop : group.stop].T, tile_errors, alpha=-1)
        moved[group.stop :].addmm_(upper[group, group.stop :].T, errors * scale, alpha=-1)


def _sweep(plane: _Plane, hessian: Tensor) -> None:
    """Choose every column again by coordinate descent; the error never grows while the scales stand still.

    With `P = H E`, column `j` alone would best become `Q[j] + P[j] / H[j, j]`. A group's scale is refitted before its
    columns.
    """
    error = torch.cat([plane.goal[group] - plane.values(group) for group in _groups(plane)])
    for group in _groups(plane):
        pull = hessian[group] @ error
        plane.refit_group(group.start, pull, hessian[group, group])
        refitted = plane.goal[group] - plane.values(group)
        pull.addmm_(hessian[group, group], refitted - error[group])
        pull /= plane.scale[group.start // plane.group_size]
        for tile in _tiles(group):
            here = slice(tile.start - group.start, tile.stop - group.start)
            diagonal = hessian.diagonal()[tile]
            best = pull[here] / diagonal.unsqueeze(1) + plane.codes[tile]
            change = plane.codes[tile].neg()
            later = (hessian[tile, tile] / diagonal).triu(1).unbind()
            rows = zip(plane.columns(tile), best.unbind(), change.unbind(), later, strict=True)
            for column, value, step, weights in rows:
                best.addr_(weights, step.add_(column.choose(value)), alpha=-1)
            pull[here.stop :].addmm_(hessian[tile.stop : group.stop, tile], change, alpha=-1)
        error[group] = plane.goal[group] - plane.values(group)


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
