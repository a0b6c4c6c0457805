"""A product with a nested weight as operators of torch, for engines that compile models or record graphs.

Such an engine cannot look into a walk over groups or into a kernel's launch, so it sees one opaque operator with its
shapes. On the CPU that is `kernels.reference_linear`; on a GPU the Triton kernels, those of decoding for few rows and
those of a prompt for many.

Letters: `M` rows, `O` outputs, `I` inputs, `G` groups of `g` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.checkpoint import NestedWeight, View
from bitnest_format.kernels.operands import Activations, DualPlaneWeight, scale_pairs
from bitnest_format.kernels.ops import Ops, plain_ops, triton_ops
from bitnest_format.kernels.prefill_tiles import SCRATCH_WEIGHTS
from bitnest_format.kernels.reference import DECODE_ROWS, activation_codes, activation_scale
from bitnest_format.kernels.reference_linear import LinearWeight, nested_linear, packed_linear, prepare_linear


@dataclass(frozen=True, slots=True)
class NestedProduct:
    """`y = x @ W.T + b` where W is the weight of `view`.

    `weight`: the stored tensors, or on a CPU the codes of that one view, unpacked. `pairs`: the scales as tensor cores
    take them, on a GPU.
    """

    view: View
    weight: NestedWeight | LinearWeight
    pairs: Tensor | None = None

    @classmethod
    def of(cls, weight: NestedWeight, view: View, unpack: Literal["load", "call"]) -> NestedProduct:
        """For stored tensors on their own device. `unpack="load"`, on a CPU alone, keeps codes instead of words."""
        if unpack == "call":
            group_inputs = packing.CODES_PER_WORD * weight.base.shape[1] // weight.scale.shape[1]
            pairs = scale_pairs(weight.scale, group_inputs) if weight.scale.is_cuda else None
            return cls(view, weight, pairs)
        prepared = prepare_linear(
            weight.base, weight.scale, weight.refinement, None, weight.permutation, views=(view,), unpack="load"
        )
        return cls(view, prepared)

    @property
    def outputs(self) -> int:
        return self.weight.outputs if isinstance(self.weight, LinearWeight) else self.weight.base.shape[0]

    def __call__(self, x: Tensor, step: Tensor | None, bias: Tensor | None) -> Tensor:
        """`x` `[M, I]` of any float type, `bias` `[O]` or None -> float32 `[M, O]`.

        `step` float32 `[M]`: the scale by which rows are rounded to INT8, where `x` holds only some of a row's inputs;
        None for the scale that the rows themselves give.
        """
        if isinstance(self.weight, LinearWeight):
            codes = self.weight.draft if self.view == "draft" else self.weight.target
            assert codes is not None
            return unpacked_product(x, step, codes, self.weight.scale, bias, self.weight.permutation, self.view)
        weight = self.weight
        planes = (weight.base, weight.refinement, weight.scale, self.pairs)
        return packed_product(x, step, *planes, bias, weight.permutation, self.view)


@torch.library.custom_op("bitnest::unpacked_product", mutates_args=())
def unpacked_product(
    x: Tensor,
    step: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    permutation: Tensor | None,
    view: str,
) -> Tensor:
    """The product with `codes` `[G, O, g]` and float32 `scale` `[G, 1, O]`, as `prepare_linear` keeps them."""
    rows = x.float()
    step = activation_scale(rows) if step is None else step
    weight = LinearWeight(
        outputs=codes.shape[1],
        group_inputs=codes.shape[2],
        code_type=codes.dtype,
        scale=scale,
        draft=codes if view == "draft" else None,
        target=codes if view == "target" else None,
        bias=None if bias is None else bias.float(),
        permutation=permutation,
    )
    return nested_linear(activation_codes(rows, step), step, weight, "draft" if view == "draft" else "target")


@unpacked_product.register_fake
def _(x: Tensor, step: Tensor | None, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1], dtype=torch.float32)


@torch.library.custom_op("bitnest::packed_product", mutates_args=())
def packed_product(
    x: Tensor,
    step: Tensor | None,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    pairs: Tensor | None,
    bias: Tensor | None,
    permutation: Tensor | None,
    view: str,
) -> Tensor:
    """The product with int32 words `[O, I / 8]` and `scale` `[O, G]` as stored; `permutation` int32 `[I]`.

    `pairs`: what `operands.scale_pairs` makes of `scale`, or None; only a GPU takes them.
    """
    chosen: View = "draft" if view == "draft" else "target"
    rows = x.float()
    if x.is_cuda:
        weight = DualPlaneWeight(
            base=base,
            refinement=refinement if chosen == "target" else None,
            scale=scale,
            bias=None if bias is None else bias.float(),
            permutation=permutation,
            scale_pairs=pairs,
        )
        return kernel_product(triton_ops(), rows.contiguous(), step, weight, chosen)
    step = activation_scale(rows) if step is None else step
    packed = packed_linear(base, scale, refinement, bias, permutation)
    return nested_linear(activation_codes(rows, step), step, packed, chosen)


@packed_product.register_fake
def _(x: Tensor, step: Tensor | None, base: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], base.shape[0], dtype=torch.float32)


def kernel_product(ops: Ops, x: Tensor, step: Tensor | None, weight: DualPlaneWeight, view: View) -> Tensor:
    """The product by kernels or by their twins: float32 `x` `[M, I]`, contiguous -> `[M, O]`; `step` as above.

    Up to 16 rows take the kernels of decoding, whose rows do not depend on each other. The kernels find a row's scale
    themselves; a scale that is given is applied in plain torch.
    """
    rows = x.shape[0]
    acts = Activations.empty(rows, x.shape[1], x.device, weight.permutation)
    if step is None:
        ops.activation.quantize(x, acts, rows)
    else:
        plain_ops().activation.quantize_by(x, step, acts, rows)
    out = torch.empty(rows, weight.outputs, dtype=torch.float32, device=x.device)
    if rows <= DECODE_ROWS:
        ops.dual_plane.dual_plane_linear(acts, weight, view, out, rows)
    else:
        scratch = torch.empty(SCRATCH_WEIGHTS, dtype=torch.float16, device=x.device)
        ops.prefill.prefill_linear(acts, weight, view, out, rows, scratch, add=False)
    return out
