"""Twins of `activation` in plain torch: RMSNorm and INT8 quantization of each token's row.

Symmetric quantization commutes with a norm's division: the codes of `x / root * gain` are those of `x * gain`, and only
the scale is divided by the root mean square. So it is defined here: `codes, step = quantize_activation(x * gain)`,
`scale = step / root`. Codes then depend on a maximum and on IEEE operations alone, and are the same to the bit on any
machine; scales and norms hold a sum over the row, whose order is free, and agree within a few units of the last place.
Against `quantize_activation(rms_norm(x))` a code may differ by one where the two roundings there meet a tie.

All functions write rows `0 .. rows - 1` of their outputs and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.kernels.operands import RUN, Activations
from bitnest_format.kernels.reference import (
    activation_codes,
    activation_scale,
    constant,
    quantize_activation,
    rms_norm,
    silu_mul,
)
from bitnest_format.nesting import SMALLEST_SCALE


def quantize(x: Tensor, acts: Activations, rows: int) -> None:
    """Quantize `rows` rows of `x` float32 `[R, I]`, contiguous, into `acts`."""
    quantize_by(x, activation_scale(x[:rows]), acts, rows)


def quantize_by(x: Tensor, scale: Tensor, acts: Activations, rows: int) -> None:
    """`quantize` by scales float32 `[rows]` that are given, as for rows of which `x` holds only some inputs."""
    _store(activation_codes(x[:rows], scale), scale, acts, rows)


def norm_quantize(stream: Tensor, gain: Tensor, epsilon: float, acts: Activations, rows: int) -> None:
    """RMSNorm and quantization: `stream` float32 `[R, H]`, `gain` float32 `[H]` -> `acts`."""
    x = stream[:rows]
    codes, step = quantize_activation(x * gain)
    squares = x * x
    mean = torch.stack([row.sum() for row in squares.unbind(0)]) / constant(x.shape[1], x.device)
    scale = step / (mean + constant(epsilon, x.device)).sqrt()
    _store(codes, scale.clamp_min(SMALLEST_SCALE[torch.float32]), acts, rows)


def embed_norm_quantize(
    tokens: Tensor,
    embedding: Tensor,
    gain: Tensor,
    epsilon: float,
    stream: Tensor,
    acts: Activations,
    rows: int,
    token_offset: int = 0,
) -> None:
    """Row `r` of `stream` becomes the embedding of `tokens[token_offset + r]`, then as `norm_quantize`.

    `tokens` int32, on the device; `embedding` `[V, H]` of float16, bfloat16 or float32. Token ids are not checked.
    """
    stream[:rows] = embedding[tokens[token_offset : token_offset + rows]]
    norm_quantize(stream, gain, epsilon, acts, rows)


def norm(stream: Tensor, gain: Tensor, epsilon: float, hidden: Tensor, rows: int) -> None:
    """RMSNorm: `stream` float32 or float16 `[R, H]`, `gain` float32 `[H]` -> `hidden` float32 `[R, H]`."""
    hidden[:rows] = rms_norm(stream[:rows].float(), gain, epsilon)


def norm_half(stream: Tensor, gain: Tensor, epsilon: float, out: Tensor, rows: int) -> None:
    """RMSNorm of the half-precision engine: `stream` float16 `[R, H]`, `gain` float32 `[H]` -> `out` float16."""
    out[:rows] = rms_norm(stream[:rows].float(), gain, epsilon)


def embed_norm_half(
    tokens: Tensor,
    embedding: Tensor,
    gain: Tensor,
    epsilon: float,
    stream: Tensor,
    out: Tensor,
    rows: int,
    token_offset: int = 0,
) -> None:
    """Row `r` of `stream` float16 becomes the embedding of `tokens[token_offset + r]`, `out` float16 its RMSNorm."""
    stream[:rows] = embedding[tokens[token_offset : token_offset + rows]]
    norm_half(stream, gain, epsilon, out, rows)


def silu_mul_half(gate_up: Tensor, out: Tensor, rows: int) -> None:
    """`silu(gate) * up`: `gate_up` float16 `[R, 2I]` holding gate and up side by side -> `out` float16 `[R, I]`."""
    out[:rows] = silu_mul(gate_up[:rows].float())


def _store(codes: Tensor, scale: Tensor, acts: Activations, rows: int) -> None:
    stored = codes if acts.permutation is None else codes.index_select(1, acts.permutation)
    acts.codes[:rows, 0] = stored[:, 0::2]
    acts.codes[:rows, 1] = stored[:, 1::2]
    acts.scale[:rows] = scale
    acts.sums[:rows] = stored.view(rows, -1, RUN).sum(dim=-1, dtype=torch.int32)
