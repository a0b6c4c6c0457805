"""A linear layer of a transformers model whose weight stays nested: both planes as they lie on disk.

The arithmetic is that of `kernels.reference_linear` on every device: activations rounded to INT8 per token, integer
sums per group, then scales. On a CPU that is this project's own runtime, to the bit. On a GPU the integer sums are
float32 products in plain torch, exact too, but not fast: the Triton kernels are for `bitnest_format.load`. Words are
unpacked at every call, some outputs at a time, so a layer takes the memory that it takes on disk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bitnest_format import packing
from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.kernels.reference_linear import View, nested_linear, packed_linear

INTEGERS = {2: torch.int16, 4: torch.int32}


class NestedLinear(nn.Module):
    """`y = x @ W.T + b` where W is the weight of `view`, from parameters named and typed as in a checkpoint.

    `weight_packed`, `weight_refinement` int32 `[O, I / 8]`; `weight_scale` float16 or float32 `[O, G]`; `bias` `[O]`
    and `weight_perm` int32 `[I]` where there are such. Any but `weight_packed` and `weight_scale` may be None. The
    input may have any float type; the output has the same. Parameters take no part in training.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_refinement: Tensor | None
    bias: Tensor | None
    weight_perm: Tensor | None

    def __init__(
        self,
        view: View,
        *,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_refinement: Tensor | None = None,
        bias: Tensor | None = None,
        weight_perm: Tensor | None = None,
    ):
        super().__init__()
        self.view = view
        self.out_features = weight_packed.shape[0]
        self.in_features = weight_packed.shape[1] * packing.CODES_PER_WORD
        self.register_parameter("weight_packed", _parameter(weight_packed))
        self.register_parameter("weight_scale", _parameter(weight_scale))
        self.register_parameter("weight_refinement", _parameter(weight_refinement))
        self.register_parameter("bias", _parameter(bias))
        self.register_parameter("weight_perm", _parameter(weight_perm))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """`[..., I]` -> `[..., O]` of the type of `x`. Rows do not depend on each other."""
        # Autocast would round the group sums.
        with torch.autocast(x.device.type, enabled=False):
            codes, scale = quantize_activation(x.reshape(-1, self.in_features).float())
            weight = packed_linear(
                self.weight_packed, self.weight_scale, self.weight_refinement, self.bias, self.weight_perm
            )
            output = nested_linear(codes, scale, weight, self.view)
        return output.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"groups={self.weight_scale.shape[1]}, view={self.view!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NestedLinear:
        """Moves reach what is stored, casts do not: scales keep every digit whatever the model computes in."""

        def uncast(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return fn(tensor)
            return fn(tensor.view(INTEGERS[tensor.itemsize])).view(tensor.dtype)

        super()._apply(uncast, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self


def _parameter(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
