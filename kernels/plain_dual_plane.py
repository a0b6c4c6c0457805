"""The twins of `dual_plane` in plain torch: same names, same signatures, `reference_linear` inside."""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.kernels import reference
from bitnest_format.kernels.operands import Activations, Best, DualPlaneWeight, View
from bitnest_format.kernels.reference_linear import nested_linear, prepare_linear

ARGMAX_ROWS = 8


def dual_plane_linear(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, *, add: bool = False
) -> None:
    """See `dual_plane.dual_plane_linear`."""
    product = _product(acts, weight, view, rows)
    out[:rows] = out[:rows] + product if add else product


def dual_plane_gate_up(acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int) -> None:
    """See `dual_plane.dual_plane_gate_up`."""
    product = _product(acts, weight, view, rows)
    out[:rows] = reference.silu_mul(torch.cat((product[:, 0::2], product[:, 1::2]), dim=1))


def dual_plane_argmax(acts: Activations, weight: DualPlaneWeight, view: View, best: Best, rows: int) -> None:
    """See `dual_plane.dual_plane_argmax`."""
    product = _product(acts, weight, view, rows)
    for block, piece in enumerate(product.split(ARGMAX_ROWS, dim=1)):
        value, _ = piece.max(dim=1)
        best.value[:rows, block] = value
        equal = (piece == value.unsqueeze(1)) | piece.isnan()
        best.index[:rows, block] = equal.int().argmax(dim=1).int() + block * ARGMAX_ROWS


def argmax_blocks(outputs: int) -> int:
    """See `dual_plane.argmax_blocks`."""
    return -(-outputs // ARGMAX_ROWS)


def _product(acts: Activations, weight: DualPlaneWeight, view: View, rows: int) -> Tensor:
    even, odd = acts.codes[:rows].unbind(1)
    codes = torch.stack((even, odd), dim=-1).flatten(1)
    prepared = prepare_linear(weight.base, weight.scale, weight.refinement, weight.bias, views=(view,), unpack="call")
    return nested_linear(codes, acts.scale[:rows], prepared, view)
