"""The operations around the matrix products, in plain torch: the definition that faster kernels are held to.

Greedy speculative decoding gives the target's own text token for token only if a token's numbers do not depend on how
many tokens are computed beside it. Everything here keeps that, bit for bit, for up to `DECODE_ROWS` rows:
elementwise IEEE operations (multiply, add, divide, square root, round) are the same for any shape; whatever sums along
a row or calls a transcendental function (whose vector and tail versions differ) is called once per row, with a shape
that only the row itself decides. More rows than that are a prefill, which takes the faster batched form.

Letters: `M` rows (tokens), `H` hidden size, `I` inputs, `V` vocabulary, `D` head size. All floats are float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bitnest_format.nesting import SMALLEST_SCALE

DECODE_ROWS = 16
ACTIVATION_MAX = 127
# A piece of the head that stays in a core's cache while every row is multiplied by it.
HEAD_CHUNK_BYTES = 1 << 20


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token symmetric INT8: `scale = max|x| / 127`, `codes = round(x / scale)`.

    `x` `[M, I]` -> int8 codes `[M, I]` in -127..127, float32 scale `[M]`. A row of zeros gets codes 0 and the
    smallest scale. Rounding is to nearest, ties to even.
    """
    scale = activation_scale(x)
    return activation_codes(x, scale), scale


def activation_scale(x: Tensor) -> Tensor:
    """The scale by which `quantize_activation` rounds each row: `[M, I]` -> `[M]`.

    That of a row cut into parts is the largest of its parts' scales.
    """
    return (x.abs().amax(dim=-1) / constant(ACTIVATION_MAX, x.device)).clamp_min(SMALLEST_SCALE[torch.float32])


def activation_codes(x: Tensor, scale: Tensor) -> Tensor:
    """int8 codes `[M, I]` of rows `[M, I]` by scales `[M]`, none smaller than `activation_scale` gives."""
    return (x / scale.unsqueeze(-1)).round().to(torch.int8)


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * gain` over the last axis.

    `x` `[M, H]` or, for norms per head, `[M, heads, D]`; `gain` broadcasts to a row. Returns the shape of `x`.
    """
    squares = x * x
    if x.shape[0] <= DECODE_ROWS:
        total = torch.stack([row.sum(dim=-1, keepdim=True) for row in squares.unbind(0)])
    else:
        total = squares.sum(dim=-1, keepdim=True)
    mean = total / constant(x.shape[-1], x.device)
    return x / (mean + constant(epsilon, x.device)).sqrt() * gain


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `[M, 2I]` holding gate and up side by side -> `[M, I]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = torch.nn.functional.silu
    if gate.shape[0] <= DECODE_ROWS:
        return torch.stack([silu(row) for row in gate.unbind(0)]) * up
    return silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, GELU in its tanh form, for `[M, 2I]` holding gate and up side by side -> `[M, I]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.shape[0] <= DECODE_ROWS:
        return torch.stack([torch.nn.functional.gelu(row, approximate="tanh") for row in gate.unbind(0)]) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` of float32 `[M, ...]`."""
    scaled = x / constant(cap, x.device)
    bounded = torch.stack([row.tanh() for row in scaled.unbind(0)]) if x.shape[0] <= DECODE_ROWS else scaled.tanh()
    return bounded * constant(cap, x.device)


def apply_rope(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding with halves as pairs (element `i` with `i + D/2`), as Llama checkpoints store it.

    `heads` `[M, heads, D]`, `cosine` and `sine` `[M, 1, D / 2]` of each row's position -> `[M, heads, D]`.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden @ weight.T` in float32: `[M, H]` and `[V, H]` of any float type -> `[M, V]`.

    A weight that is not float32 is widened chunk by chunk.
    """
    outputs = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
    # Rows of their own, so that all of them are aligned alike.
    rows = [row.clone() for row in hidden.unbind(0)] if hidden.shape[0] <= DECODE_ROWS else None
    first = 0
    for chunk in weight.split(max(1, HEAD_CHUNK_BYTES // (4 * weight.shape[1]))):
        chunk = chunk.float()
        columns = slice(first, first + chunk.shape[0])
        first += chunk.shape[0]
        if rows is None:
            outputs[:, columns] = hidden @ chunk.T
        else:
            for number, row in enumerate(rows):
                torch.mv(chunk, row, out=outputs[number, columns])
    return outputs


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """A float32 number as a tensor without dimensions.

    Dividing by a Python number costs a conversion at every call, and on a GPU multiplies by a rounded reciprocal.
    """
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)
