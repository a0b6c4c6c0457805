"""The product of INT8 activations and a nested weight, exact up to one rounding per group.

Within a group of inputs all numbers are integers: activation codes of at most 127 and weight codes of at most 128 in
magnitude. Their sum over up to 1024 inputs stays below 2^24, where float32 holds every integer; so a float32 matrix
product over one group *is* the integer sum, in whatever order the library adds. Each sum is then multiplied by its
group's scale, and the groups are added pairwise in one fixed order, elementwise. The result of a row therefore does
not depend on the number of rows.

Letters: `M` rows, `O` outputs, `I` inputs, `G` groups of `g = I / G` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.kernels.reference import ACTIVATION_MAX

View = Literal["draft", "target"]

# The longest run of inputs whose integer sum float32 holds exactly.
EXACT_INPUTS = 1024
assert EXACT_INPUTS * ACTIVATION_MAX * -nesting.COMPOSED_MIN < 2**24

# Group sums held at a time (float32 elements), and weights unpacked at a time where they are kept packed.
BLOCK_SUMS = 1 << 23
BLOCK_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A nested weight ready for `nested_linear`.

    `base` and `refinement`: int32 words `[O, I / 8]`, kept where they are unpacked at each call; `draft` and `target`:
    the codes of a view as float32 `[G, O, g]`, kept where they were unpacked once (4 bytes a weight and view).
    `scale`: float32 `[G, O, 1]`, the base scale of every walked group. `bias`: float32 `[O]`. `permutation`: int64
    `[I]`, the input that each stored column belongs to.
    """

    outputs: int
    scale: Tensor
    base: Tensor | None = None
    refinement: Tensor | None = None
    draft: Tensor | None = None
    target: Tensor | None = None
    bias: Tensor | None = None
    permutation: Tensor | None = None


def prepare_linear(
    base: Tensor,
    scale: Tensor,
    refinement: Tensor | None = None,
    bias: Tensor | None = None,
    permutation: Tensor | None = None,
    *,
    views: tuple[View, ...],
    unpack: Literal["load", "call"],
) -> LinearWeight:
    """Bring stored tensors into the form that `nested_linear` walks, on their own device.

    `base`, `refinement`: int32 words `[O, I / 8]`; `scale`: `[O, G]` of any float type; `views`: those that will be
    asked for. `unpack="load"` keeps float32 codes (4 bytes a weight for each view), `"call"` keeps the words (half a
    byte a weight and plane) and unpacks at every call. Groups of more than 1024 inputs are walked in equal parts.
    Raises `ValueError` where a base code of -8 stands beside a negative refinement code.
    """
    outputs, words = base.shape
    inputs = words * packing.CODES_PER_WORD
    if "target" in views and refinement is None:
        raise ValueError("the target view needs the refinement plane")
    parts = _parts(inputs // scale.shape[1])
    group_scale = scale.float().repeat_interleave(parts, dim=1).T.unsqueeze(-1).contiguous()
    groups = group_scale.shape[0]
    composed = None
    if refinement is not None and "target" in views:
        composed = nesting.compose(packing.unpack(base), packing.unpack(refinement))
    kept: dict[str, Tensor | None] = {"base": base, "refinement": refinement if "target" in views else None}
    if unpack == "load":
        kept = {
            "draft": _by_group(packing.unpack(base), groups) if "draft" in views else None,
            "target": None if composed is None else _by_group(composed, groups),
        }
    return LinearWeight(
        outputs=outputs,
        scale=group_scale,
        bias=None if bias is None else bias.float(),
        permutation=None if permutation is None else permutation.long(),
        **kept,
    )


def nested_linear(codes: Tensor, scale: Tensor, weight: LinearWeight, view: View) -> Tensor:
    """`(codes * scale) @ W.T + bias`, where W is `q4 * s4` (draft) or `(16 * q4 + qr) * s4 / 16` (target).

    int8 `codes` `[M, I]` and float32 `scale` `[M]` as `quantize_activation` gives them -> float32 `[M, O]`. Equals
    `sum over g of float(integer sum of group g) * s[g]`, then the token's scale, then the bias. The target's factor
    1/16 is applied to the token's scale: a power of two changes no digit.
    """
    groups = weight.scale.shape[0]
    if weight.permutation is not None:
        codes = codes.index_select(1, weight.permutation)
    operand = codes.float().view(codes.shape[0], groups, -1).permute(1, 2, 0)
    kept = weight.draft if view == "draft" else weight.target
    sums = _walk_packed(weight, operand, view) if kept is None else _walk(kept, operand, weight.scale)
    if view == "target":
        scale = scale / nesting.STEPS_PER_BASE_STEP
    output = sums.T.contiguous() * scale.unsqueeze(-1)
    return output if weight.bias is None else output + weight.bias


def _walk(codes: Tensor, operand: Tensor, scale: Tensor) -> Tensor:
    """`[G, O, g]` codes times `[G, g, M]` activations, scaled and added up over the groups: `[O, M]`."""
    block = max(1, BLOCK_SUMS // (codes.shape[0] * codes.shape[1]))
    if operand.shape[2] <= block:
        return _add_groups(torch.bmm(codes, operand).mul_(scale))
    return torch.cat([_walk(codes, rows, scale) for rows in operand.split(block, dim=2)], dim=1)


def _walk_packed(weight: LinearWeight, operand: Tensor, view: View) -> Tensor:
    """The same from packed words, unpacked some outputs at a time."""
    assert weight.base is not None
    groups = weight.scale.shape[0]
    step = max(1, BLOCK_WEIGHTS // (weight.base.shape[1] * packing.CODES_PER_WORD))
    pieces = []
    for first in range(0, weight.outputs, step):
        rows = slice(first, first + step)
        codes = packing.unpack(weight.base[rows])
        if view == "target":
            assert weight.refinement is not None
            # Never outside int8: `prepare_linear` has refused the pairs that would be.
            codes = codes * nesting.STEPS_PER_BASE_STEP + packing.unpack(weight.refinement[rows])
        pieces.append(_walk(_by_group(codes, groups), operand, weight.scale[:, rows]))
    return torch.cat(pieces)


def _add_groups(sums: Tensor) -> Tensor:
    """The sum over the first axis, halving it until one is left; overwrites `sums`."""
    groups = sums.shape[0]
    while groups > 1:
        half = (groups + 1) // 2
        sums[: groups - half] += sums[half:groups]
        groups = half
    return sums[0]


def _by_group(codes: Tensor, groups: int) -> Tensor:
    """int8 `[O, I]` -> float32 `[G, O, g]`."""
    return (
        codes.view(codes.shape[0], groups, -1).transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    )


def _parts(group_size: int) -> int:
    """Into how many equal parts a group is cut so that each sums exactly."""
    parts = -(-group_size // EXACT_INPUTS)
    while group_size % parts:
        parts += 1
    return parts
