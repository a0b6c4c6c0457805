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

from bitnest_format.converters.hessian import InverseFactor
from bitnest_format.converters.replay import replayed
from bitnest_format.nesting import (
    BASE_MAX,
    BASE_MIN,
    REFINEMENT_MAX,
    STEPS_PER_BASE_STEP,
    refinement_floor,
    round_scale,
)

# Columns whose movements are applied one by one; beyond them they are gathered into one matrix product.
TILE = 32
SHRINK_FACTORS = tuple(round(0.6 + 0.02 * step, 2) for step in range(21))
SCALE_ERROR_NORM = 2.4


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
    base_part = STEPS_PER_BASE_STEP * base.T.contiguous().float()
    plane.scale = (scale / STEPS_PER_BASE_STEP).T.contiguous()
    plane.lowest = base_part + refinement_floor(base).T.contiguous()
    plane.highest = base_part + REFINEMENT_MAX
    plane.clipped = torch.zeros_like(goal[0])
    _walk(plane, factor)
    for _ in range(sweeps):
        _sweep(plane, factor.hessian)
    codes = (plane.codes - base_part).T.to(torch.int8).contiguous()
    return Refinement(codes, plane.clipped / goal.shape[0])


class _Plane:
    """Integer codes in the making, `[I, O]` float32, with one scale per group and the range of each code.

    `clipped` `[O]` counts each row's codes that met their limit in the latest pass, in planes that want it.
    """

    def __init__(self, goal: Tensor, group_size: int):
        self.goal = goal
        self.group_size = group_size
        self.codes = torch.zeros_like(goal)
        self.clipped: Tensor | None = None
        self.lowest = torch.full_like(goal, BASE_MIN)
        self.highest = torch.full_like(goal, BASE_MAX)
        self.scale = goal.new_empty(goal.shape[0] // group_size, goal.shape[1])

    def enter_group(self, start: int, moved: Tensor) -> None:
        """Called when the walk reaches a group, with its weights as moved so far."""

    def refit_group(self, start: int, pull: Tensor, hessian: Tensor) -> None:
        """Called when a sweep reaches a group: `pull` is its rows of `H E`, `hessian` its block of `H`."""

    def choose(self, rows: slice, values: Tensor) -> None:
        """Take the allowed codes nearest to `values` (in steps), which do not depend on each other."""
        self.codes[rows] = values.round().clamp_(self.lowest[rows], self.highest[rows])

    def count_clipped(self, rows: slice, values: Tensor) -> None:
        """Called with the values, in steps, that a tile's codes were chosen from."""
        if self.clipped is None:
            return
        if rows.start == 0:
            self.clipped.zero_()
        self.clipped += (values.round() != self.codes[rows]).sum(dim=0)

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
            plane.choose(group, steps)
            continue
        upper = factor.upper
        errors = torch.empty_like(steps)
        for tile in _tiles(group):
            here = slice(tile.start - group.start, tile.stop - group.start)
            block, tile_steps, tile_errors = upper[tile, tile], steps[here], errors[here]
            diagonal = block.diagonal().unsqueeze(1)
            later = (block / diagonal).triu_(1)
            _walk_tile(tile_steps, plane.lowest[tile], plane.highest[tile], later, plane.codes[tile], tile_errors)
            plane.count_clipped(tile, tile_steps)
            tile_errors /= diagonal
            steps[here.stop :].addmm_(upper[tile, tile.stop : group.stop].T, tile_errors, alpha=-1)
        moved[group.stop :].addmm_(upper[group, group.stop :].T, errors.mul_(scale), alpha=-1)


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
            later = (hessian[tile, tile] / diagonal).triu_(1)
            _sweep_tile(best, plane.lowest[tile], plane.highest[tile], later, plane.codes[tile], change)
            plane.count_clipped(tile, best)
            pull[here.stop :].addmm_(hessian[tile.stop : group.stop, tile], change, alpha=-1)
        error[group] = plane.goal[group] - plane.values(group)


@replayed(changes=(0, 4, 5))
def _walk_tile(steps: Tensor, lowest: Tensor, highest: Tensor, later: Tensor, codes: Tensor, errors: Tensor) -> None:
    """Choose a tile's codes one column after the other, each from `steps` as moved by those before it.

    All `[t, O]`, `later` `[t, t]`: row `j` says how far an error of one step in column `j` moves the later ones, and
    is zero up to `j`. `errors` become `steps - codes`.
    """
    columns = (steps, lowest, highest, later, codes, errors)
    for step, low, high, weights, code, error in zip(*(tensor.unbind() for tensor in columns), strict=True):
        torch.clamp(torch.round(step, out=code), low, high, out=code)
        torch.sub(step, code, out=error)
        steps.addr_(weights, error, alpha=-1)


@replayed(changes=(0, 4, 5))
def _sweep_tile(best: Tensor, lowest: Tensor, highest: Tensor, later: Tensor, codes: Tensor, change: Tensor) -> None:
    """Choose a tile's codes again, each nearest to `best` as moved by those before it; as in `_walk_tile`.

    `change` comes as the negated old codes and becomes the new codes less the old ones.
    """
    columns = (best, lowest, highest, later, codes, change)
    for value, low, high, weights, code, step in zip(*(tensor.unbind() for tensor in columns), strict=True):
        torch.clamp(torch.round(value, out=code), low, high, out=code)
        best.addr_(weights, step.add_(code), alpha=-1)


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
