"""Rounding to integer codes and back, with a gradient: what quantization does to a loss.

The forward pass is exact. In the backward pass a rounded value stands for the value itself as long as it is not clipped
(the straight-through estimator, Bengio et al., arXiv 1308.3432). The scale is not held fixed: the largest value of a
group, which sets it, feels what rounding and clipping cost the whole group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.converters.gptq_solver import SCALE_ERROR_NORM, SHRINK_FACTORS
from bitnest_format.nesting import BASE_MAX, BASE_MIN

ACTIVATION_MAX = 127
# Every fourth of the factors that a conversion tries: the loss cannot tell the difference.
COARSE_FACTORS = SHRINK_FACTORS[::4]


def fake_quantize_weight(weight: Tensor, group_size: int, *, search: bool) -> Tensor:
    """The draft weight of round-to-nearest base codes, `[O, I]` in its own type.

    Scales are `max|w| / 7` of each group, or with `search` the multiple of it in `COARSE_FACTORS` whose error is the
    smallest in the norm of the conversion's own search. They are not rounded to a stored type.
    """
    groups = weight.unflatten(-1, (-1, group_size))
    scale = _positive(groups.abs().amax(dim=-1, keepdim=True)) / BASE_MAX
    if search:
        scale = scale * _best_factor(groups, scale)
    return _rounded(groups, scale, BASE_MIN, BASE_MAX).flatten(-2)


def fake_quantize_activations(activations: Tensor) -> Tensor:
    """Each token's vector `[..., I]` rounded to symmetric INT8 with the scale `max|x| / 127`."""
    scale = _positive(activations.abs().amax(dim=-1, keepdim=True)) / ACTIVATION_MAX
    return _rounded(activations, scale, -ACTIVATION_MAX, ACTIVATION_MAX)


def _rounded(values: Tensor, scale: Tensor, smallest: int, largest: int) -> Tensor:
    # Divided by the scale rather than multiplied by its inverse, as the encoder does.
    steps = (values / scale).clamp(smallest, largest)
    # The difference is exactly zero; its gradient is that of the steps.
    codes = steps.detach().round() + (steps - steps.detach())
    return codes * scale


def _positive(largest: Tensor) -> Tensor:
    """Groups of zeros get a scale too, whose 127th part is still a normal number."""
    return largest.clamp_min(torch.finfo(largest.dtype).tiny * 256)


@torch.no_grad()
def _best_factor(groups: Tensor, scale: Tensor) -> Tensor:
    """The factor of `COARSE_FACTORS` that rounds each group best, `[..., 1]`."""
    best = torch.full_like(scale, float("inf"))
    chosen = torch.ones_like(scale)
    for factor in COARSE_FACTORS:
        error = (_rounded(groups, scale * factor, BASE_MIN, BASE_MAX) - groups).abs().pow_(SCALE_ERROR_NORM)
        total = error.sum(dim=-1, keepdim=True)
        better = total < best
        best, chosen = torch.where(better, total, best), torch.where(better, factor, chosen)
    return chosen
