"""The unquantized output head for 1 to 16 rows: a stream of weights, read once for all rows.

A program takes 16 tokens. Its threads hold the columns of a row between them, 16 bytes of weights each at a time, and
every thread adds its products in one chain of fused multiply-adds per token and row; the 32 sums of a warp's lanes are
added at the end. Neither depends on how many rows are computed, so a logit does not either, to the bit. The first
weights are fetched before the wait for the hidden row.

Twins with the same names, arguments and results: `plain_head`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bitnest_format.kernels.launch import features
from bitnest_format.kernels.operands import Best
from bitnest_format.kernels.plain_head import BLOCK_TOKENS, head_blocks
from bitnest_format.kernels.primitives import release_dependents, wait_for_inputs
from bitnest_format.kernels.ranking import rank, ranked_token, ranked_value

__all__ = ["BLOCK_TOKENS", "head_argmax", "head_blocks", "head_logits"]

_LANES = tl.constexpr(32)


def head_argmax(hidden: Tensor, weight: Tensor, best: Best, rows: int) -> None:
    """The largest logit of every block and its token, for `rows` rows of `hidden`.

    `hidden` float32 `[R, H]`, `weight` `[V, H]` of float16, bfloat16 or float32 -> `best` `[R, head_blocks(V)]`.
    """
    vocabulary, columns = weight.shape
    _head_kernel[(head_blocks(vocabulary),)](
        hidden,
        weight,
        best.value,
        best.index,
        None,
        vocabulary,
        best.value.shape[1],
        COLUMNS=columns,
        **_launch(weight, rows),
    )


def head_logits(hidden: Tensor, weight: Tensor, logits: Tensor, rows: int) -> None:
    """All logits: `hidden` float32 `[R, H]`, `weight` `[V, H]` of any float type -> `logits` float32 `[R, V]`."""
    vocabulary, columns = weight.shape
    _head_kernel[(head_blocks(vocabulary),)](
        hidden, weight, None, None, logits, vocabulary, 0, COLUMNS=columns, **_launch(weight, rows)
    )


def _launch(weight: Tensor, rows: int) -> dict[str, Any]:
    """Launch options and constants. How many warps share a block changes no number: each has tokens of its own."""
    warps = 4
    found = features(weight.device)
    return {
        "ROWS": rows,
        "ROWS_ROOM": triton.next_power_of_2(rows),
        "TOKENS": BLOCK_TOKENS,
        "WARPS": warps,
        "VECTOR": 16 // weight.element_size(),
        "PDL": found.pdl,
        "num_warps": warps,
        **({"launch_pdl": True} if found.pdl else {}),
    }


@triton.jit(do_not_specialize=["vocabulary", "best_stride"])
def _head_kernel(
    p_hidden,
    p_weight,
    p_value,
    p_index,
    p_logits,
    vocabulary,
    best_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_ROOM: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shapes: tokens of a thread `T`, warps `W`, lanes `L` of a warp, numbers `N` in 16 bytes.

    Loads are two-dimensional, where Triton gives lanes neighbouring columns and warps rows of their own.
    """
    release_dependents(PDL)
    STEP: tl.constexpr = _LANES * VECTOR
    PER_THREAD: tl.constexpr = TOKENS // WARPS
    block = tl.program_id(0)
    o_column = tl.arange(0, STEP)
    # Tokens past the vocabulary read its last row again.
    o_row = tl.minimum(block * TOKENS + tl.arange(0, TOKENS), vocabulary - 1).to(tl.int64) * COLUMNS
    p_rows = p_weight + o_row[:, None] + o_column[None, :]
    even = _load_step(p_rows, o_column, 0, COLUMNS)
    odd = _load_step(p_rows, o_column, STEP, COLUMNS)
    wait_for_inputs(PDL)
    # One copy of the hidden numbers for each warp, so that no thread fetches them from another.
    p_x = p_hidden + tl.zeros([WARPS, 1], tl.int32)
    sums = _zeros(ROWS, PER_THREAD, WARPS)
    # Two steps at once: each one's registers are filled again as soon as they were used, two steps ahead. A step past
    # the last column adds zeros.
    for first in range(0, COLUMNS, 2 * STEP):
        sums = _accumulate(sums, even, p_x, first, COLUMNS, ROWS, PER_THREAD, WARPS, VECTOR)
        even = _load_step(p_rows, o_column, first + 2 * STEP, COLUMNS)
        sums = _accumulate(sums, odd, p_x, first + STEP, COLUMNS, ROWS, PER_THREAD, WARPS, VECTOR)
        odd = _load_step(p_rows, o_column, first + 3 * STEP, COLUMNS)
    o_token = block * TOKENS + tl.arange(0, PER_THREAD)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
    inside = o_token < vocabulary
    if p_logits is not None:
        for row in tl.static_range(ROWS):
            tl.store(p_logits + row * vocabulary.to(tl.int64) + o_token, tl.sum(sums[row], axis=2), mask=inside)
    else:
        # The rows side by side: lane r of every warp takes row r, and the warps meet once for all rows.
        o_best = tl.arange(0, ROWS_ROOM)
        values = tl.full([TOKENS // WARPS, WARPS, ROWS_ROOM], float("-inf"), tl.float32)
        for row in tl.static_range(ROWS):
            logits = tl.where(inside, tl.sum(sums[row], axis=2), float("-inf"))
            values = tl.where((o_best == row)[None, None, :], logits[:, :, None], values)
        best = tl.max(tl.max(rank(values, o_token[:, :, None]), axis=0), axis=0)
        p_best = o_best.to(tl.int64) * best_stride + block
        tl.store(p_value + p_best, ranked_value(best), mask=o_best < ROWS)
        tl.store(p_index + p_best, ranked_token(best), mask=o_best < ROWS)


@triton.jit
def _load_step(p_rows, o_column, first, COLUMNS: tl.constexpr):
    """Weights of all tokens from column `first` on, read once and not kept in the caches; zeros past the end."""
    mask = (o_column + first < COLUMNS)[None, :]
    return tl.load(p_rows + first, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _zeros(ROWS, TOKENS, WARPS):
    """A sum of zero for each row, of every thread and token."""
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([TOKENS, WARPS, _LANES], tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def _accumulate(
    sums,
    weight,
    p_x,
    first,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Add the products of one step's weights `[T * W, L * N]`, column after column, to the sums of every row."""
    weight = weight.to(tl.float32)
    if VECTOR == 8:
        halves = tl.permute(tl.reshape(weight, [TOKENS, WARPS, _LANES, 2, 4]), (0, 1, 2, 4, 3))
        low, high = tl.split(halves)
        sums = _accumulate_four(sums, low, p_x, first, 8, COLUMNS, ROWS, TOKENS, WARPS)
        sums = _accumulate_four(sums, high, p_x, first + 4, 8, COLUMNS, ROWS, TOKENS, WARPS)
    else:
        fours = tl.reshape(weight, [TOKENS, WARPS, _LANES, 4])
        sums = _accumulate_four(sums, fours, p_x, first, 4, COLUMNS, ROWS, TOKENS, WARPS)
    return sums


@triton.jit
def _accumulate_four(sums, weight, p_x, first, LANE_COLUMNS, COLUMNS, ROWS, TOKENS, WARPS):
    """The same for four columns of each lane, `weight` `[T, W, L, 4]`."""
    even, odd = tl.split(tl.reshape(weight, [TOKENS, WARPS, _LANES, 2, 2]))
    weight0, weight2 = tl.split(even)
    weight1, weight3 = tl.split(odd)
    o_four = tl.arange(0, _LANES * 4)
    o_column = ((o_four // 4) * LANE_COLUMNS + o_four % 4 + first)[None, :]
    added = ()
    for row in tl.static_range(ROWS):
        x = tl.load(p_x + row * COLUMNS + o_column, mask=o_column < COLUMNS, other=0.0)
        x_even, x_odd = tl.split(tl.reshape(x, [WARPS, _LANES, 2, 2]))
        x0, x2 = tl.split(x_even)
        x1, x3 = tl.split(x_odd)
        total = tl.fma(weight0, x0[None], sums[row])
        total = tl.fma(weight1, x1[None], total)
        total = tl.fma(weight2, x2[None], total)
        added = added + (tl.fma(weight3, x3[None], total),)  # noqa: RUF005
    return added
