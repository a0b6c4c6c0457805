"""The definitions of `prefill` in plain torch: same names, same arguments, same buffers."""

from __future__ import annotations

from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.kernels.operands import Activations, DualPlaneWeight, View
from bitnest_format.kernels.prefill_tiles import Tile, choose, chunk_outputs
from bitnest_format.kernels.reference import lm_head
from bitnest_format.kernels.reference_linear import nested_linear, prepare_linear

LARGEST_HALF = 65504.0


def dequantize(weight: DualPlaneWeight, view: View, first_row: int, out: Tensor) -> None:
    """Write outputs `first_row ..` of a view as float16 `[n, I]`, even stored inputs first, then odd ones."""
    rows = slice(first_row, first_row + out.shape[0])
    base = packing.unpack(weight.base[rows])
    if view == "draft":
        values = nesting.draft_weight(base, weight.scale[rows])
    else:
        assert weight.refinement is not None
        values = nesting.target_weight(base, packing.unpack(weight.refinement[rows]), weight.scale[rows])
    values = values.clamp(-LARGEST_HALF, LARGEST_HALF)
    half = weight.inputs // 2
    out[:, :half] = values[:, 0::2]
    out[:, half:] = values[:, 1::2]


def linear_by_dequantize(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, scratch: Tensor, *, add: bool
) -> None:
    """`out[:rows] = x W.T + b` (`+=` where `add`) with weights rounded to float16, sums in float32."""
    codes = acts.codes[:rows].view(rows, weight.inputs).float()
    room = scratch.view(-1)
    step = chunk_outputs(weight.outputs, weight.inputs, room.numel())
    for first in range(0, weight.outputs, step):
        count = min(step, weight.outputs - first)
        half = room[: count * weight.inputs].view(count, weight.inputs)
        dequantize(weight, view, first, half)
        value = lm_head(codes, half) * acts.scale[:rows].unsqueeze(1)
        columns = slice(first, first + count)
        if weight.bias is not None:
            value = value + weight.bias[columns]
        _write(out[:rows, columns], value, add)


def linear_int8(
    acts: Activations,
    weight: DualPlaneWeight,
    view: View,
    out: Tensor,
    rows: int,
    *,
    add: bool,
    tile: Tile | None = None,
) -> None:
    """`out[:rows] = x W.T + b` (`+=` where `add`), exact up to one rounding per group: `nested_linear`.

    `tile` changes nothing.
    """
    del tile
    in_order = acts.codes[:rows].transpose(1, 2).flatten(1)
    prepared = prepare_linear(weight.base, weight.scale, weight.refinement, weight.bias, views=(view,), unpack="call")
    _write(out[:rows], nested_linear(in_order, acts.scale[:rows], prepared, view), add)


def prefill_linear(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, scratch: Tensor, *, add: bool
) -> None:
    """`out[:rows] = x W.T + b` (`+=` where `add`) by the way that the kernels would take."""
    if choose(rows, weight.outputs, weight.inputs, weight.group_size) == "int8":
        linear_int8(acts, weight, view, out, rows, add=add)
    else:
        linear_by_dequantize(acts, weight, view, out, rows, scratch, add=add)


def _write(out: Tensor, value: Tensor, add: bool) -> None:
    if add:
        out += value
    else:
        out.copy_(value)
