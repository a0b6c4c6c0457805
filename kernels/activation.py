"""Kernels between the products: RMSNorm and INT8 quantization of each token's row.

A row's scale needs its largest magnitude, and a maximum is the same in any order. So a row is cut into slices, one
program each: every program reads the whole row for the maximum (a few KiB out of the L2 cache), then quantizes its own
slice. The sum of squares of a norm is added in the same order by each of them, and no number depends on the rows
beside it: programs of different rows share nothing.

Twins with the same names, arguments and results: `plain_activation`, which also says what is exact.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnest_format.kernels.launch import features
from bitnest_format.kernels.operands import RUN, Activations
from bitnest_format.kernels.primitives import divide, release_dependents, wait_for_inputs
from bitnest_format.kernels.reference import ACTIVATION_MAX
from bitnest_format.nesting import SMALLEST_SCALE

# Adding 1.5 * 2^23 to a float32 below 2^22 in magnitude rounds it to an integer, ties to even, and leaves that integer
# in the low bits: no conversion instruction, and the same in the interpreter.
_ROUNDING = tl.constexpr(12582912.0)
_ROUNDING_BITS = tl.constexpr(0x4B400000)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_LARGEST_CODE = tl.constexpr(float(ACTIVATION_MAX))
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE[torch.float32])
_RUN = tl.constexpr(RUN)


def quantize(x: Tensor, acts: Activations, rows: int) -> None:
    """Quantize `rows` rows of `x` float32 `[R, I]`, contiguous, into `acts`."""
    columns = acts.inputs
    warps = _warps(columns)
    slice_columns = _slice(warps)
    _quantize_kernel[(rows, triton.cdiv(columns, slice_columns))](
        x,
        acts.permutation,
        *_outputs(acts),
        COLUMNS=columns,
        TILE=min(triton.next_power_of_2(columns), 4 * slice_columns),
        SLICE=slice_columns,
        **_launch(x, warps),
    )


def norm_quantize(stream: Tensor, gain: Tensor, epsilon: float, acts: Activations, rows: int) -> None:
    """RMSNorm and quantization: `stream` float32 `[R, H]`, `gain` float32 `[H]` -> `acts`."""
    _norm_quantize(stream, None, 0, gain, epsilon, None, acts, rows)


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
    _norm_quantize(embedding, tokens, token_offset, gain, epsilon, stream, acts, rows)


def norm(stream: Tensor, gain: Tensor, epsilon: float, hidden: Tensor, rows: int) -> None:
    """RMSNorm: `stream` float32 or float16 `[R, H]`, `gain` float32 `[H]` -> `hidden` float32 `[R, H]`."""
    _norm(stream, None, 0, gain, epsilon, None, hidden, rows)


def norm_half(stream: Tensor, gain: Tensor, epsilon: float, out: Tensor, rows: int) -> None:
    """RMSNorm of the half-precision engine: `stream` float16 `[R, H]`, `gain` float32 `[H]` -> `out` float16."""
    _norm(stream, None, 0, gain, epsilon, None, out, rows)


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
    _norm(embedding, tokens, token_offset, gain, epsilon, stream, out, rows)


def silu_mul_half(gate_up: Tensor, out: Tensor, rows: int) -> None:
    """`silu(gate) * up`: `gate_up` float16 `[R, 2I]` holding gate and up side by side -> `out` float16 `[R, I]`."""
    columns = out.shape[1]
    block = 1024
    _silu_mul_kernel[(rows, triton.cdiv(columns, block))](
        gate_up, out, COLUMNS=columns, BLOCK=block, **_launch(out, warps=4)
    )


def _norm_quantize(
    source: Tensor,
    tokens: Tensor | None,
    token_offset: int,
    gain: Tensor,
    epsilon: float,
    stream: Tensor | None,
    acts: Activations,
    rows: int,
) -> None:
    columns = acts.inputs
    warps = _warps(columns)
    slice_columns = _slice(warps)
    _norm_quantize_kernel[(rows, triton.cdiv(columns, slice_columns))](
        source,
        tokens,
        token_offset,
        gain,
        epsilon,
        stream,
        acts.permutation,
        *_outputs(acts),
        COLUMNS=columns,
        BLOCK=triton.next_power_of_2(columns),
        SLICE=slice_columns,
        **_launch(stream if stream is not None else source, warps),
    )


def _norm(
    source: Tensor,
    tokens: Tensor | None,
    token_offset: int,
    gain: Tensor,
    epsilon: float,
    stream: Tensor | None,
    out: Tensor,
    rows: int,
) -> None:
    columns = out.shape[1]
    _norm_kernel[(rows,)](
        source,
        tokens,
        token_offset,
        gain,
        epsilon,
        stream,
        out,
        COLUMNS=columns,
        BLOCK=triton.next_power_of_2(columns),
        **_launch(out, _norm_warps(columns)),
    )


def _warps(columns: int) -> int:
    """Warps of a program that quantizes some of a row of so many columns."""
    return 1 if columns <= 512 else 4 if columns <= 2048 else 16


def _norm_warps(columns: int) -> int:
    """Warps of a program that norms a whole row."""
    return min(8, _warps(columns)) if columns <= 8192 else 16


def _slice(warps: int) -> int:
    """Columns that a program of so many warps quantizes: 8 a thread, one word of even and one of odd codes."""
    return 8 * 32 * warps


def _outputs(acts: Activations) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as words of four, scales, sums."""
    return acts.codes.view(torch.int32), acts.scale, acts.sums


def _launch(on: Tensor, warps: int) -> dict[str, Any]:
    """Launch options, and the constants that every kernel here has."""
    found = features(on.device)
    pdl = {"launch_pdl": True} if found.pdl else {}
    return {"PDL": found.pdl, "FUSED": found.asm, "num_warps": warps, **pdl}


@triton.jit
def _quantize_kernel(
    p_x,
    p_permutation,
    p_codes,
    p_scale,
    p_sums,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
    FUSED: tl.constexpr,
):
    release_dependents(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    low, high, m_slice = _slice_columns(p_permutation, part, COLUMNS, SLICE)
    wait_for_inputs(PDL)
    p_row = p_x + row.to(tl.int64) * COLUMNS
    o_tile = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.int32)
    for first in tl.static_range(0, COLUMNS, TILE):
        columns = first + o_tile
        b_x = tl.load(p_row + columns, mask=columns < COLUMNS, other=0.0)
        largest = tl.maximum(largest, _magnitude(b_x))
    b_low = tl.load(p_row + low, mask=m_slice, other=0.0)
    b_high = tl.load(p_row + high, mask=m_slice, other=0.0)
    step = _step(tl.max(largest, axis=0))
    _store_codes(p_codes, p_sums, b_low, b_high, step, row, part, COLUMNS, SLICE, FUSED)
    if part == 0:
        tl.store(p_scale + row, step)


@triton.jit(do_not_specialize=["token_offset"])
def _norm_quantize_kernel(
    p_source,
    p_tokens,
    token_offset,
    p_gain,
    epsilon,
    p_stream,
    p_permutation,
    p_codes,
    p_scale,
    p_sums,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
    FUSED: tl.constexpr,
):
    release_dependents(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    m_row = columns < COLUMNS
    b_gain = tl.load(p_gain + columns, mask=m_row, other=0.0)
    low, high, m_slice = _slice_columns(p_permutation, part, COLUMNS, SLICE)
    gain_low = tl.load(p_gain + low, mask=m_slice, other=0.0)
    gain_high = tl.load(p_gain + high, mask=m_slice, other=0.0)
    wait_for_inputs(PDL)
    p_row = _source_row(p_source, p_tokens, token_offset, row, COLUMNS)
    b_x = tl.load(p_row + columns, mask=m_row, other=0.0).to(tl.float32)
    b_low = tl.load(p_row + low, mask=m_slice, other=0.0).to(tl.float32)
    b_high = tl.load(p_row + high, mask=m_slice, other=0.0).to(tl.float32)
    total, largest = tl.reduce((b_x * b_x, _magnitude(b_x * b_gain)), 0, _add_and_maximum)
    step = _step(largest)
    if p_stream is not None:
        o_slice = part * SLICE + tl.arange(0, SLICE)
        m_stream = o_slice < COLUMNS
        b_stream = tl.load(p_row + o_slice, mask=m_stream, other=0.0)
        tl.store(p_stream + row.to(tl.int64) * COLUMNS + o_slice, b_stream.to(tl.float32), mask=m_stream)
    _store_codes(p_codes, p_sums, b_low * gain_low, b_high * gain_high, step, row, part, COLUMNS, SLICE, FUSED)
    if part == 0:
        scale = tl.div_rn(step, _root(total, epsilon, COLUMNS))
        tl.store(p_scale + row, tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale))


@triton.jit(do_not_specialize=["token_offset"])
def _norm_kernel(
    p_source,
    p_tokens,
    token_offset,
    p_gain,
    epsilon,
    p_stream,
    p_out,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    FUSED: tl.constexpr,
):
    release_dependents(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    m_row = columns < COLUMNS
    b_gain = tl.load(p_gain + columns, mask=m_row, other=0.0)
    wait_for_inputs(PDL)
    p_row = _source_row(p_source, p_tokens, token_offset, row, COLUMNS)
    b_x = tl.load(p_row + columns, mask=m_row, other=0.0)
    o_out = row.to(tl.int64) * COLUMNS + columns
    if p_stream is not None:
        b_x = b_x.to(p_stream.dtype.element_ty)
        tl.store(p_stream + o_out, b_x, mask=m_row)
    b_x = b_x.to(tl.float32)
    root = _root(tl.sum(b_x * b_x, axis=0), epsilon, COLUMNS)
    tl.store(p_out + o_out, (divide(b_x, root, FUSED) * b_gain).to(p_out.dtype.element_ty), mask=m_row)


@triton.jit
def _silu_mul_kernel(
    p_gate_up, p_out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, FUSED: tl.constexpr
):
    release_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_block = columns < COLUMNS
    wait_for_inputs(PDL)
    p_gate = p_gate_up + row * (2 * COLUMNS) + columns
    gate = tl.load(p_gate, mask=m_block, other=0.0).to(tl.float32)
    up = tl.load(p_gate + COLUMNS, mask=m_block, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(p_out + row * COLUMNS + columns, out.to(p_out.dtype.element_ty), mask=m_block)


@triton.jit
def _source_row(p_source, p_tokens, token_offset, row, COLUMNS: tl.constexpr):
    """The row itself, or the one that its token names."""
    number = row if p_tokens is None else tl.load(p_tokens + token_offset + row)
    return p_source + number.to(tl.int64) * COLUMNS


@triton.jit
def _slice_columns(p_permutation, part, COLUMNS: tl.constexpr, SLICE: tl.constexpr):
    """The inputs of a slice's stored columns `[SLICE / 8, 4]`: of each eight the first four and the last four.

    The mask is of the same shape: rows are multiples of 32 columns, so it never cuts through a four.
    """
    eights = part * SLICE + 8 * tl.arange(0, SLICE // 8)
    low = eights[:, None] + tl.arange(0, 4)[None, :]
    high = low + 4
    m_slice = low < COLUMNS
    if p_permutation is not None:
        low = tl.load(p_permutation + low, mask=m_slice, other=0)
        high = tl.load(p_permutation + high, mask=m_slice, other=0)
    return low, high, m_slice


@triton.jit
def _magnitude(x):
    """`|x|` as bits, which order as the numbers do, NaN above all of them."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS


@triton.jit
def _step(magnitude):
    """`max|x| / 127` from the largest magnitude's bits, not below the smallest scale; NaN stays NaN."""
    step = tl.div_rn(magnitude.to(tl.float32, bitcast=True), _LARGEST_CODE)
    return tl.where(step < _SMALLEST_SCALE, _SMALLEST_SCALE, step)


@triton.jit
def _root(total, epsilon, COLUMNS: tl.constexpr):
    """`sqrt(mean + epsilon)` of a sum of squares."""
    return tl.sqrt_rn(tl.div_rn(total, COLUMNS * 1.0) + epsilon)


@triton.jit
def _add_and_maximum(total, largest, other_total, other_largest):
    return total + other_total, tl.maximum(largest, other_largest)


@triton.jit
def _round(x):
    return (x + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS


@triton.jit
def _store_codes(
    p_codes,
    p_sums,
    b_low,
    b_high,
    step,
    row,
    part,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Quantize a slice given as fours `[SLICE / 8, 4]`; store words of even and of odd codes, and sums of each run."""
    low = tl.reshape(_round(divide(b_low, step, FUSED)), [SLICE // 8, 2, 2])
    high = tl.reshape(_round(divide(b_high, step, FUSED)), [SLICE // 8, 2, 2])
    low_even, low_odd = tl.split(low)
    high_even, high_odd = tl.split(high)
    even0, even1 = tl.split(low_even)
    even2, even3 = tl.split(high_even)
    odd0, odd1 = tl.split(low_odd)
    odd2, odd3 = tl.split(high_odd)
    words = part * (SLICE // 8) + tl.arange(0, SLICE // 8)
    m_words = words < COLUMNS // 8
    p_words = p_codes + row.to(tl.int64) * (COLUMNS // 4) + words
    tl.store(p_words, _word(even0, even1, even2, even3), mask=m_words)
    tl.store(p_words + COLUMNS // 8, _word(odd0, odd1, odd2, odd3), mask=m_words)
    sums = ((even0 + odd0) + (even1 + odd1)) + ((even2 + odd2) + (even3 + odd3))
    runs = part * (SLICE // _RUN) + tl.arange(0, SLICE // _RUN)
    run_sums = tl.sum(tl.reshape(sums, [SLICE // _RUN, _RUN // 8]), axis=1)
    tl.store(p_sums + row.to(tl.int64) * (COLUMNS // _RUN) + runs, run_sums, mask=runs < COLUMNS // _RUN)


@triton.jit
def _word(code0, code1, code2, code3):
    """Four codes in the bytes of a word, the first in the lowest."""
    return (code0 & 0xFF) | ((code1 & 0xFF) << 8) | ((code2 & 0xFF) << 16) | (code3 << 24)
