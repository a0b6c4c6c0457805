"""The arithmetic of nested codes (arXiv 2610.02800, Eqs. 5-14): pure functions on tensors.

A weight is stored as two signed 4-bit codes and one scale per group of inputs. The *base* code `q4` with
the scale `s4` alone is the draft weight `q4 * s4`. The *refinement* code `qr` counts sixteenths of a base
step, so the target weight is `(16 * q4 + qr) * (s4 / 16)`: an 8-bit code that contains the draft unchanged.
`qr` is never negative where `q4 = -8`; composed codes therefore span -128..119 and fit in int8.

KV entries use the same two codes with one scale per token and KV head, without the rule for -8.

Shapes: `O` outputs, `I` inputs, `G` groups of `I // G` inputs. Codes are int8, weights and scales float32.
Rounding is to nearest, ties to even, everywhere. Scales are rounded to their stored type *before* any code
is computed, so both views rebuild exactly what the encoder saw.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE_MIN, BASE_MAX = -8, 7
REFINEMENT_MIN, REFINEMENT_MAX = -8, 7
STEPS_PER_BASE_STEP = 16
COMPOSED_MIN, COMPOSED_MAX = -128, 119

# The smallest scale that is ever written, by stored type: a normal number whose sixteenth is normal in float32.
SMALLEST_SCALE = {torch.float16: 2.0**-14, torch.float32: 2.0**-120}


def stored_scale_type(max_abs: Tensor) -> torch.dtype:
    """float16 where it holds every group's `max|w| / 7` as a normal number, otherwise float32.

    `max_abs` `[..., G]`: the largest magnitude of each group; groups of zeros do not count.
    """
    scale = max_abs.float() / BASE_MAX
    scale = scale[scale > 0]
    fits = (scale >= SMALLEST_SCALE[torch.float16]) & (scale <= torch.finfo(torch.float16).max / 2)
    return torch.float16 if bool(fits.all()) else torch.float32


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` rounded to its stored type and returned as float32; never zero, so codes can be computed.

    Raises `OverflowError` where `dtype` cannot hold a scale.
    """
    rounded = scale.to(dtype).float()
    if not bool(torch.isfinite(rounded).all()):
        raise OverflowError(f"a group's scale does not fit {dtype}: {float(scale.max()):g}")
    return rounded.clamp_min(SMALLEST_SCALE[dtype])


def group_max_abs(weight: Tensor, group_size: int) -> Tensor:
    """The largest magnitude of every group: `[O, I]` -> float32 `[O, I / group_size]`."""
    return weight.float().unflatten(-1, (-1, group_size)).abs().amax(dim=-1)


def expand_groups(scale: Tensor, inputs: int) -> Tensor:
    """`[..., G]` to `[..., inputs]`: every input gets its group's value."""
    return scale.repeat_interleave(inputs // scale.shape[-1], dim=-1)


def encode_base(weight: Tensor, scale: Tensor) -> Tensor:
    """Round-to-nearest base codes (Eq. 5 without error feedback).

    `weight` `[O, I]`, `scale` `[O, G]` -> int8 `[O, I]` in -8..7.
    """
    steps = weight.float() / expand_groups(scale.float(), weight.shape[-1])
    return steps.round().clamp(BASE_MIN, BASE_MAX).to(torch.int8)


def refinement_floor(base: Tensor) -> Tensor:
    """The smallest refinement code allowed beside each base code: 0 beside -8, otherwise -8; int8."""
    return torch.where(base == BASE_MIN, 0, REFINEMENT_MIN).to(torch.int8)


def encode_refinement(weight: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """The closed-form refinement (Eqs. 7-9): what the base left over, in sixteenths of a step, clipped.

    `weight` and int8 `base` `[O, I]`, `scale` `[O, G]` -> int8 `[O, I]`.
    """
    fine = _residual_in_fine_steps(weight, base, scale).round()
    return torch.maximum(fine, refinement_floor(base)).clamp_max(REFINEMENT_MAX).to(torch.int8)


def saturated(weight: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """Where the rounded residual lies outside the range of its refinement code: bool `[O, I]`."""
    fine = _residual_in_fine_steps(weight, base, scale).round()
    return (fine < refinement_floor(base)) | (fine > REFINEMENT_MAX)


def saturation(weight: Tensor, base: Tensor, scale: Tensor) -> float:
    """The share of weights that are `saturated`, 0..1."""
    return float(saturated(weight, base, scale).float().mean())


def compose(base: Tensor, refinement: Tensor) -> Tensor:
    """`16 * base + refinement` as int8: the target's code. Raises `ValueError` on the forbidden pair."""
    if bool(forbidden_pairs(base, refinement).any()):
        raise ValueError("a base code of -8 stands beside a negative refinement code")
    return (STEPS_PER_BASE_STEP * base.to(torch.int16) + refinement.to(torch.int16)).to(torch.int8)


def forbidden_pairs(base: Tensor, refinement: Tensor) -> Tensor:
    """True where the composed code would fall below -128: `q4 = -8` with `qr < 0`."""
    return (base == BASE_MIN) & (refinement < 0)


def draft_weight(base: Tensor, scale: Tensor) -> Tensor:
    """Eq. 6, `q4 * s4`: int8 `[O, I]` and `[O, G]` -> float32 `[O, I]`, exact for float16 scales."""
    return base.float() * expand_groups(scale.float(), base.shape[-1])


def target_weight(base: Tensor, refinement: Tensor, scale: Tensor) -> Tensor:
    """Eq. 10, `(16 * q4 + qr) * (s4 / 16)`: float32 `[O, I]`, exact for float16 scales.

    `s4 / 16` is formed in float32: in float16 it would lose bits below 2^-10 and vanish at 2^-21.
    """
    fine_scale = scale.float() / STEPS_PER_BASE_STEP
    return compose(base, refinement).float() * expand_groups(fine_scale, base.shape[-1])


def encode_kv(entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nested codes of keys or values (Eqs. 11 and 13), one scale per vector.

    `entries` `[..., D]` float -> int8 base `[..., D]`, int8 refinement `[..., D]`, float32 scale `[...]`.
    A vector of zeros gets codes 0 and the smallest scale.
    """
    entries = entries.float()
    scale = round_scale(entries.abs().amax(dim=-1) / BASE_MAX, torch.float32)
    steps = scale.unsqueeze(-1)
    base = (entries / steps).round().clamp(BASE_MIN, BASE_MAX)
    residual = (entries - base * steps) / (steps / STEPS_PER_BASE_STEP)
    refinement = residual.round().clamp(REFINEMENT_MIN, REFINEMENT_MAX)
    return base.to(torch.int8), refinement.to(torch.int8), scale


def draft_kv(base: Tensor, scale: Tensor) -> Tensor:
    """Eq. 12, `q4 * s`: the KV4 view, float32 `[..., D]`."""
    return base.float() * scale.unsqueeze(-1)


def target_kv(base: Tensor, refinement: Tensor, scale: Tensor) -> Tensor:
    """Eq. 14, `(16 * q4 + qr) * s / 16`: the KV8 view, float32 `[..., D]`."""
    codes = base.float() * STEPS_PER_BASE_STEP + refinement.float()
    return codes * (scale / STEPS_PER_BASE_STEP).unsqueeze(-1)


def _residual_in_fine_steps(weight: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    step = expand_groups(scale.float(), weight.shape[-1])
    return (weight.float() - base.float() * step) / (step / STEPS_PER_BASE_STEP)
