"""The product of INT8 activations and a nested weight, exact up to one rounding per group.

Within a group of inputs all numbers are integers: activation codes of at most 127 and weight codes of at most 128 in
magnitude. Their sums are computed exactly, by an integer product where the processor has one for bytes, otherwise by a
float32 product: sums over up to 1024 inputs stay below 2^24, where float32 holds every integer, in whatever order the
library adds. Each sum is then multiplied by its group's scale, and the groups are added pairwise in one fixed order,
elementwise. The result of a row therefore depends neither on the number of rows nor on the product that was used.

Letters: `M` rows, `O` outputs, `I` inputs, `G` groups of `g = I / G` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.kernels.reference import ACTIVATION_MAX, constant

View = Literal["draft", "target"]

# The longest run of inputs whose integer sum float32 holds exactly.
EXACT_INPUTS = 1024
assert EXACT_INPUTS * ACTIVATION_MAX * -nesting.COMPOSED_MIN < 2**24

# Group sums held at a time, and weights unpacked at a time where they are kept packed.
BLOCK_SUMS = 1 << 23
BLOCK_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A nested weight ready for `nested_linear`.

    `base` and `refinement`: int32 words `[O, I / 8]`, kept where they are unpacked at each call; `draft` and `target`:
    the codes of a view `[G, O, g]` in `code_type`, kept where they were unpacked once. `scale`: float32 `[G, 1, O]`,
    the base scale of every walked group. `bias`: float32 `[O]`. `permutation`: int64 `[I]`, the input that each stored
    column belongs to.
    """

    outputs: int
    group_inputs: int
    code_type: torch.dtype
    scale: Tensor
    base: Tensor | None = None
    refinement: Tensor | None = None
    draft: Tensor | None = None
    target: Tensor | None = None
    bias: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def product_bytes(self) -> int:
        """Bytes of codes that one product reads: one group in int8, all of them at once in float32."""
        groups = 1 if self.code_type == torch.int8 else self.scale.shape[0]
        return groups * self.outputs * self.group_inputs * self.code_type.itemsize


def code_type(device: torch.device) -> torch.dtype:
    """The type in which codes are multiplied: int8 where the CPU multiplies bytes exactly, otherwise float32.

    Without VNNI the library's byte products may saturate; on a GPU they do not take small numbers of rows.
    """
    vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    exact = device.type == "cpu" and torch.backends.mkldnn.is_available() and vnni is not None and bool(vnni())
    return torch.int8 if exact else torch.float32


def prepare_linear(
    base: Tensor,
    scale: Tensor,
    refinement: Tensor | None = None,
    bias: Tensor | None = None,
    permutation: Tensor | None = None,
    *,
    views: tuple[View, ...],
    unpack: Literal["load", "call"],
    codes_in: torch.dtype | None = None,
) -> LinearWeight:
    """Bring stored tensors into the form that `nested_linear` walks, on their own device.

    `base`, `refinement`: int32 words `[O, I / 8]`; `scale`: `[O, G]` of any float type; `views`: those that will be
    asked for. `unpack="load"` keeps codes (1 byte a weight and view in int8, 4 in float32), `"call"` keeps the words
    (half a byte a weight and plane) and unpacks at every call. `codes_in`: int8 or float32 instead of what `code_type`
    finds. Groups of more than 1024 inputs are walked in equal parts.
    Raises `ValueError` where a base code of -8 stands beside a negative refinement code.
    """
    if "target" in views and refinement is None:
        raise ValueError("the target view needs the refinement plane")
    if "target" not in views:
        refinement = None
    if refinement is not None and packing.any_forbidden_pair(base, refinement):
        raise ValueError("a base code of -8 stands beside a negative refinement code")
    weight = packed_linear(base, scale, refinement, bias, permutation, codes_in=codes_in)
    if unpack == "call":
        return weight
    groups = weight.scale.shape[0]
    codes = {view: _by_group(_unpack(base, refinement, view), groups, weight.code_type) for view in views}
    return replace(weight, base=None, refinement=None, draft=codes.get("draft"), target=codes.get("target"))


def packed_linear(
    base: Tensor,
    scale: Tensor,
    refinement: Tensor | None = None,
    bias: Tensor | None = None,
    permutation: Tensor | None = None,
    *,
    codes_in: torch.dtype | None = None,
) -> LinearWeight:
    """Stored tensors, as `prepare_linear` takes them, for a single call: words are not copied, and not checked."""
    outputs, words = base.shape
    parts = _parts(words * packing.CODES_PER_WORD // scale.shape[1])
    group_scale = scale.float().repeat_interleave(parts, dim=1).T.unsqueeze(1).contiguous()
    return LinearWeight(
        outputs=outputs,
        group_inputs=words * packing.CODES_PER_WORD // group_scale.shape[0],
        code_type=codes_in or code_type(base.device),
        scale=group_scale,
        base=base,
        refinement=refinement,
        bias=None if bias is None else bias.float(),
        permutation=None if permutation is None else permutation.long(),
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
    operand = codes.view(codes.shape[0], groups, weight.group_inputs).transpose(0, 1).to(weight.code_type)
    kept = weight.draft if view == "draft" else weight.target
    sums = _walk_packed(weight, operand, view) if kept is None else _walk(kept, operand, weight.scale)
    if view == "target":
        scale = scale / constant(nesting.STEPS_PER_BASE_STEP, scale.device)
    output = sums * scale.unsqueeze(-1)
    return output if weight.bias is None else output + weight.bias


def _walk(codes: Tensor, operand: Tensor, scale: Tensor) -> Tensor:
    """Activations `[G, M, g]` times codes `[G, O, g]`, scaled and added up over the groups: float32 `[M, O]`."""
    block = max(1, BLOCK_SUMS // (codes.shape[0] * codes.shape[1]))
    if operand.shape[1] <= block:
        return _add_groups(_group_sums(codes, operand).float().mul_(scale))
    return torch.cat([_walk(codes, rows, scale) for rows in operand.split(block, dim=1)])


def _walk_packed(weight: LinearWeight, operand: Tensor, view: View) -> Tensor:
    """The same from packed words, unpacked some outputs at a time."""
    assert weight.base is not None
    groups = weight.scale.shape[0]
    step = max(1, BLOCK_WEIGHTS // (weight.base.shape[1] * packing.CODES_PER_WORD))
    pieces = []
    for first in range(0, weight.outputs, step):
        rows = slice(first, first + step)
        codes = _unpack(weight.base[rows], None if weight.refinement is None else weight.refinement[rows], view)
        pieces.append(_walk(_by_group(codes, groups, weight.code_type), operand, weight.scale[..., rows]))
    return torch.cat(pieces, dim=1)


def _group_sums(codes: Tensor, operand: Tensor) -> Tensor:
    """The integer sums of every group `[G, M, O]`: int32, or float32 holding the same numbers."""
    by_input = codes.transpose(1, 2)
    if codes.dtype != torch.int8:
        return torch.bmm(operand, by_input)
    sums = torch.empty(codes.shape[0], operand.shape[1], codes.shape[1], dtype=torch.int32)
    for inputs, weights, out in zip(operand.unbind(0), by_input.unbind(0), sums.unbind(0), strict=True):
        torch._int_mm(inputs, weights, out=out)
    return sums


def _add_groups(sums: Tensor) -> Tensor:
    """The sum over the first axis, halving it until one is left; overwrites `sums`."""
    groups = sums.shape[0]
    while groups > 1:
        half = (groups + 1) // 2
        sums[: groups - half] += sums[half:groups]
        groups = half
    return sums[0]


def _unpack(base: Tensor, refinement: Tensor | None, view: View) -> Tensor:
    """The codes of a view from words: int8 `[O, I]`."""
    codes = packing.unpack(base)
    if view == "draft":
        return codes
    assert refinement is not None
    # Never outside int8: `prepare_linear` has refused the pairs that would be.
    return codes * nesting.STEPS_PER_BASE_STEP + packing.unpack(refinement)


def _by_group(codes: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """int8 `[O, I]` -> `[G, O, g]`, contiguous, of a type."""
    grouped = codes.view(codes.shape[0], groups, -1).transpose(0, 1)
    return grouped.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _parts(group_size: int) -> int:
    """Into how many equal parts a group is cut so that each sums exactly."""
    parts = -(-group_size // EXACT_INPUTS)
    while group_size % parts:
        parts += 1
    return parts
