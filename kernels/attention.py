"""Split-KV attention of decoding over the nested cache, and the cache's encoder.

A program takes one KV head, one split of the cache and up to 8 rows, a row being a query head of a token. First it
turns its queries, and encodes and stores those new entries that its split holds; after a barrier every entry, new or
old, is read back from the cache by one loop, so that an entry counts the same whichever launch wrote it. Programs of
other rows of the same split store the same bytes, so that none waits for another.

The loop keeps codes packed until they are in registers. Planes are read as 16-bit units of four codes, straight into
the operand layout of the tensor cores (16 entries or units as rows, 8 attention rows as columns). Masks and shifts put
each code, offset as it is stored, into the low bits of a float16, which is then the subnormal number code * 2^-24: no
conversion at all. Products are exact; what the offset adds is subtracted, from scores by where their sums start, from
values by the sum of weights. An entry's key scale multiplies its score, and its value scale joins the exponent: weights
`2^(score + log2(scale) - high)` never leave float16's range, whatever the scales. Each of the four warps walks entries
of its own (a batched product, one batch a warp) and the four meet at the end.

Rows do not depend on each other: tensor cores add along entries and elements in an order that the tile's other
columns do not change, sums over lanes follow a fixed tree, maxima are the same in any order, and masked entries add
exact zeros. Multiplications are not contracted with additions, so that codes equal `reference_attention.kv_encode`.

Twins with the same names, arguments and results: `plain_attention`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.kernels.launch import features
from bitnest_format.kernels.operands import (
    AttentionShape,
    KvPlanes,
    Partials,
    Rope,
)
from bitnest_format.kernels.primitives import divide, release_dependents, wait_for_inputs

# Warps of a program, and entries that each of them reads at a step. Both decide the order of sums.
WARPS = 4
NESTED_ENTRIES = 16
HALF_ENTRIES = 16
HALF_STAGES = 3
# Attention rows of a program where one token has no more: one column tile of the tensor cores. Of 16 rows a program
# needs 250 registers a thread, and two programs of 8 take about as many instructions.
MOST_COLUMNS = 8
# Registers of a thread of a program of 8 rows: three such programs fit into a processor.
NARROW_REGISTERS = 168
# Splits that the merge reads at a step.
MERGED_SPLITS = 16
# Warps of a program that merges one head of a token: best in the whole pass, though fewer are faster alone.
MERGING_WARPS = 4
HALF_MERGING_WARPS = 2
# Tokens that a program encodes, and entries that one decodes.
STORED_TOKENS = 16
LOADED_ENTRIES = 64

# Entries that all warps read at a step of the wider walk: where a walk may start, and what is fetched ahead of it.
_BLOCK = tl.constexpr(WARPS * 2 * NESTED_ENTRIES)
_WARPS = tl.constexpr(WARPS)
_SMALLEST_SCALE = tl.constexpr(nesting.SMALLEST_SCALE[torch.float32])
_BASE_MAX = tl.constexpr(float(nesting.BASE_MAX))
# Codes are multiplied as they are stored, offset, in units of 2^-24; these are the offsets in those units.
_CODE_UNITS = tl.constexpr(2.0**24)
_BASE_ZERO = tl.constexpr(8 * 2.0**-24)
_COMPOSED_ZERO = tl.constexpr(136 * 2.0**-24)
# Adding and subtracting 1.5 * 2^23 rounds a small float32 to an integer, ties to even.
_ROUNDING = tl.constexpr(12582912.0)


def stages(kv_heads: int) -> int:
    """Steps of the loop over a split that are on their way or in use at a time; measured as `best_splits`."""
    return 3 if kv_heads > 8 else 2


def attend(
    qkv: Tensor,
    head_norm: Tensor | None,
    rope: Rope,
    position: Tensor,
    offset: int,
    cache: KvPlanes,
    shape: AttentionShape,
    partials: Partials,
    rows: int,
    *,
    draft: bool,
    kv_switch: int,
    kv_recent: int,
) -> None:
    """Append the entries of `rows` new tokens and attend over all entries, split by split, into `partials`.

    `qkv` float32 `[R, (Q + 2K) * D]`: query, key and value heads of the tokens at `position + offset + r`; `position`
    int32 `[1]` on the device. `head_norm`: float32 `[Q + K, D]`, gains of query and key heads, or None. The target
    reads KV8. A draft reads KV8 while no more than `kv_switch` entries exist, then KV4 apart from the newest
    `kv_recent`: the refinement plane is read from the start of the block that holds the first of these.
    """
    columns, tokens = _columns(shape, rows)
    _attend_kernel[_attend_grid(shape, partials, rows, tokens)](
        qkv,
        head_norm,
        rope.cosine,
        rope.sine,
        position,
        *_cache_arguments(cache),
        partials.accumulator,
        partials.peak,
        partials.total,
        partials.peak.shape[2],
        offset,
        kv_switch,
        kv_recent,
        **_shape_constants(shape),
        **_split_constants(shape),
        EPSILON=shape.norm_epsilon,
        ROWS=rows,
        TOKENS=tokens,
        COLUMNS=columns,
        NEW=triton.next_power_of_2(rows),
        ENTRIES=NESTED_ENTRIES,
        STAGES=stages(shape.kv_heads),
        DRAFT=draft,
        **_launch(qkv),
        **({"maxnreg": NARROW_REGISTERS} if columns == 8 else {}),
    )


def attend_half(
    qkv: Tensor,
    rope: Rope,
    position: Tensor,
    offset: int,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    partials: Partials,
    rows: int,
    head_norm: Tensor | None = None,
) -> None:
    """`attend` of the half-precision engine: `qkv` float16, cache `keys` and `values` float16 `[K, C, D]`."""
    columns, tokens = _columns(shape, rows)
    _attend_half_kernel[_attend_grid(shape, partials, rows, tokens)](
        qkv,
        head_norm,
        rope.cosine,
        rope.sine,
        position,
        keys,
        values,
        keys.stride(0),
        partials.accumulator,
        partials.peak,
        partials.total,
        partials.peak.shape[2],
        offset,
        **_shape_constants(shape),
        **_split_constants(shape),
        EPSILON=shape.norm_epsilon,
        ROWS=rows,
        TOKENS=tokens,
        COLUMNS=columns,
        NEW=triton.next_power_of_2(rows),
        ENTRIES=HALF_ENTRIES,
        STAGES=HALF_STAGES,
        **_launch(qkv),
    )


def combine(partials: Partials, position: Tensor, offset: int, shape: AttentionShape, out: Tensor, rows: int) -> None:
    """Merge the splits of each token: `out` float32 `[R, Q * D]`."""
    _combine(partials, position, offset, shape, out, rows, MERGING_WARPS)


def combine_half(
    partials: Partials, position: Tensor, offset: int, shape: AttentionShape, out: Tensor, rows: int
) -> None:
    """Merge the splits of each token: `out` float16 `[R, Q * D]`."""
    _combine(partials, position, offset, shape, out, rows, HALF_MERGING_WARPS)


def kv_store(
    qkv: Tensor,
    head_norm: Tensor | None,
    rope: Rope,
    start: int,
    cache: KvPlanes,
    shape: AttentionShape,
    queries: Tensor,
    rows: int,
) -> None:
    """Turn the heads of `rows` tokens from position `start` on, and store their entries.

    `qkv` float32 `[T, (Q + 2K) * D]`, `head_norm` as in `attend`; writes `queries` float16 `[Q, T, D]`, contiguous, and
    entries `start .. start + rows - 1` of the cache.
    """
    _kv_store_kernel[(triton.cdiv(rows, STORED_TOKENS), shape.heads + 2 * shape.kv_heads)](
        qkv,
        head_norm,
        rope.cosine,
        rope.sine,
        *_cache_arguments(cache),
        queries,
        queries.stride(0),
        start,
        rows,
        **_shape_constants(shape),
        EPSILON=shape.norm_epsilon,
        TOKENS=STORED_TOKENS,
        **_launch(qkv),
    )


def kv_load(cache: KvPlanes, shape: AttentionShape, stop: int, keys: Tensor, values: Tensor) -> None:
    """Decode entries `0 .. stop - 1` at KV8 into `keys` and `values` float16 `[K, n, D]`, `n >= stop`."""
    _kv_load_kernel[(triton.cdiv(stop, LOADED_ENTRIES), shape.kv_heads, 2)](
        *_cache_arguments(cache),
        keys,
        values,
        keys.stride(0),
        stop,
        D=shape.head_dim,
        UNITS=triton.next_power_of_2(shape.head_dim // 4),
        ENTRIES=LOADED_ENTRIES,
        **_launch(keys),
    )


def _columns(shape: AttentionShape, rows: int) -> tuple[int, int]:
    """Attention rows that a program has room for, a power of two, and the whole tokens it takes."""
    blocks = -(-rows // max(1, MOST_COLUMNS // shape.group))
    tokens = -(-rows // blocks)
    return max(8, triton.next_power_of_2(tokens * shape.group)), tokens


def _attend_grid(shape: AttentionShape, partials: Partials, rows: int, tokens: int) -> tuple[int, int, int]:
    return shape.kv_heads, -(-rows // tokens), partials.peak.shape[2]


def _cache_arguments(cache: KvPlanes) -> tuple[Any, ...]:
    """Planes as 16-bit units, scales, and the strides of both."""
    units = cache.planes.view(torch.int16)
    return units, cache.scale, *units.stride()[:3], *cache.scale.stride()[:2]


def _split_constants(shape: AttentionShape) -> dict[str, Any]:
    return {"SHORTS": shape.splits.shorts, "SHORT": shape.splits.short, "LONG": shape.splits.long}


def _shape_constants(shape: AttentionShape) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "D": shape.head_dim,
        # A product of the tensor cores has 16 inputs at least.
        "UNITS": max(16, triton.next_power_of_2(shape.head_dim // 4)),
        "WINDOW": shape.window,
    }


def _merge_constants(shape: AttentionShape) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "D": shape.head_dim,
        "BLOCK": triton.next_power_of_2(shape.head_dim),
        "SPLITS": MERGED_SPLITS,
        "WINDOW": shape.window,
    }


def _combine(
    partials: Partials, position: Tensor, offset: int, shape: AttentionShape, out: Tensor, rows: int, warps: int
) -> None:
    _combine_kernel[(shape.heads, rows)](
        partials.accumulator,
        partials.peak,
        partials.total,
        partials.peak.shape[2],
        position,
        offset,
        out,
        **_merge_constants(shape),
        **_split_constants(shape),
        **_launch(out, warps),
    )


def _launch(on: Tensor, warps: int = WARPS) -> dict[str, Any]:
    """Launch options, and the constants that every kernel here has."""
    found = features(on.device)
    pdl = {"launch_pdl": True} if found.pdl else {}
    return {"PDL": found.pdl, "ASM": found.asm, "num_warps": warps, "enable_fp_fusion": False, **pdl}


@triton.jit(do_not_specialize=["offset", "kv_switch", "kv_recent", "splits"])
def _attend_kernel(
    p_qkv,
    p_gain,
    p_cosine,
    p_sine,
    p_position,
    p_units,
    p_scale,
    plane_stride,
    kind_stride,
    head_stride,
    scale_kind_stride,
    scale_head_stride,
    p_accumulator,
    p_peak,
    p_total,
    splits,
    offset,
    kv_switch,
    kv_recent,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORTS: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEW: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
    DRAFT: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    release_dependents(PDL)
    kv_head = tl.program_id(0)
    # The newest entries come last and cost most: start with them.
    split = splits - 1 - tl.program_id(2)
    token = tl.program_id(1) * TOKENS
    p_units += kv_head.to(tl.int64) * head_stride
    p_scale += kv_head.to(tl.int64) * scale_head_stride
    start, stop = _split_bounds(split, SHORTS, SHORT, LONG)
    if PDL and ASM:
        # Whatever the position is by now, it is near enough to bring a split's first entries into the L2 cache.
        near = tl.load(p_position, cache_modifier=".cg") + offset
        if (start <= near) & (token == 0):
            coarse = DRAFT and (near >= kv_switch) & (start + _BLOCK <= near - kv_recent)
            _prefetch(
                p_units, p_scale, plane_stride, kind_stride, scale_kind_stride, start, near, 1 if coarse else 2, D
            )
    wait_for_inputs(PDL)
    position = tl.load(p_position) + offset
    # Entries that a token of this program sees: no more than `[first, end)`.
    end = position + tl.minimum(token + TOKENS, ROWS)
    first = _first_seen(position + token, WINDOW)
    stop = tl.minimum(stop, end)
    start = tl.maximum(start, first // _BLOCK * _BLOCK)
    if start >= stop:
        return

    if stop > position:
        _append(
            p_qkv,
            p_gain,
            p_cosine,
            p_sine,
            p_units,
            p_scale,
            plane_stride,
            kind_stride,
            scale_kind_stride,
            kv_head,
            position,
            start,
            stop,
            HEADS,
            KV_HEADS,
            D,
            UNITS,
            EPSILON,
            NEW,
            ASM,
        )
        tl.debug_barrier()
    # Column c is query head `c % G` of the group, of token `token + c // G`.
    group: tl.constexpr = HEADS // KV_HEADS
    o_column = tl.arange(0, COLUMNS)
    o_token = token + o_column // group
    m_column = (o_column < TOKENS * group) & (o_token < ROWS)
    head = kv_head * group + o_column % group
    o_unit = tl.arange(0, UNITS)
    m_query = (o_unit < D // 4)[:, None] & m_column[None, :]
    p_row = p_qkv + (o_token * ((HEADS + 2 * KV_HEADS) * D) + head * D)[None, :]
    p_head_gain = None if p_gain is None else p_gain + (head * D)[None, :]
    o_angle = ((position + o_token) * (D // 2))[None, :]
    q0, q1, q2, q3 = _turned(
        p_row, p_head_gain, p_cosine + o_angle, p_sine + o_angle, o_unit[:, None], m_query, D, EPSILON, 0
    )
    q0 = _query(q0, D, UNITS, COLUMNS)
    q1 = _query(q1, D, UNITS, COLUMNS)
    q2 = _query(q2, D, UNITS, COLUMNS)
    q3 = _query(q3, D, UNITS, COLUMNS)
    # Entries `[o_first, o_last]` are those that a column sees.
    o_last = tl.where(m_column, position + o_token, -1)[None, None, :]
    o_first = _first_seen(o_last, WINDOW)

    peak = tl.full([_WARPS, 1, COLUMNS], float("-inf"), tl.float32)
    high = peak
    # The base plane alone is half the bytes: twice the entries at a step.
    wide: tl.constexpr = 2 * ENTRIES if DRAFT else ENTRIES
    total = tl.zeros([_WARPS, wide, COLUMNS], tl.float32)
    mass = tl.zeros([_WARPS, 16, COLUMNS], tl.float32)
    a0 = tl.zeros([_WARPS, UNITS, COLUMNS], tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    fine_start = start
    if DRAFT:
        # The block that holds the border is walked twice, for what lies below and for what lies above.
        fine_from = tl.where(end <= kv_switch, 0, tl.maximum(end - kv_recent, 0))
        coarse_stop = tl.minimum(stop, fine_from)
        o_coarse_last = tl.minimum(o_last, coarse_stop - 1)
        sixteenth1 = (q1 * 0.0625).to(tl.float16)
        sixteenth3 = (q3 * 0.0625).to(tl.float16)
        zero = _zero(q0, q1, q2, q3, _BASE_ZERO, wide, UNITS)
        for block in tl.range(start, coarse_stop, _WARPS * wide, num_stages=STAGES):
            peak, high, total, mass, a0, a1, a2, a3 = _step(
                p_units,
                p_scale,
                plane_stride,
                kind_stride,
                scale_kind_stride,
                block,
                coarse_stop,
                o_first,
                o_coarse_last,
                q0,
                sixteenth1,
                q2,
                sixteenth3,
                zero,
                peak,
                high,
                total,
                mass,
                a0,
                a1,
                a2,
                a3,
                D,
                UNITS,
                wide,
                WINDOW is not None,
                False,
                ASM,
            )
        zero_sum = tl.max(mass, axis=1, keep_dims=True) * _BASE_ZERO
        a0 = a0 - zero_sum
        a1 = a1 * 0.0625 - zero_sum
        a2 = a2 - zero_sum
        a3 = a3 * 0.0625 - zero_sum
        mass = tl.zeros([_WARPS, 16, COLUMNS], tl.float32)
        total = tl.permute(tl.reshape(total, (_WARPS, 2, ENTRIES, COLUMNS)), (0, 2, 3, 1))
        low, high_half = tl.split(total)
        total = low + high_half
        o_first = tl.maximum(o_first, fine_from)
        fine_start = tl.maximum(start, fine_from // _BLOCK * _BLOCK)
        fine_start = tl.where(fine_from < stop, fine_start, stop)
    zero = _zero(q0, q1, q2, q3, _COMPOSED_ZERO, ENTRIES, UNITS)
    for block in tl.range(fine_start, stop, _WARPS * ENTRIES, num_stages=STAGES):
        peak, high, total, mass, a0, a1, a2, a3 = _step(
            p_units,
            p_scale,
            plane_stride,
            kind_stride,
            scale_kind_stride,
            block,
            stop,
            o_first,
            o_last,
            q0,
            q1,
            q2,
            q3,
            zero,
            peak,
            high,
            total,
            mass,
            a0,
            a1,
            a2,
            a3,
            D,
            UNITS,
            ENTRIES,
            WINDOW is not None or DRAFT,
            True,
            ASM,
        )

    zero_sum = tl.max(mass, axis=1, keep_dims=True) * _COMPOSED_ZERO
    top = tl.max(peak, axis=0, keep_dims=True)
    safe = _finite(top)
    total = total * _exp2(peak - safe, ASM)
    total = _tree_sum(tl.reshape(tl.permute(total, (2, 0, 1)), (COLUMNS, _WARPS * ENTRIES)))
    share = _exp2(high - safe, ASM) * _CODE_UNITS
    a0 = _sum_warps((a0 - zero_sum) * share)
    a1 = _sum_warps((a1 - zero_sum) * share)
    a2 = _sum_warps((a2 - zero_sum) * share)
    a3 = _sum_warps((a3 - zero_sum) * share)
    p_partial = (o_token * HEADS + head).to(tl.int64) * splits + split
    tl.store(p_peak + p_partial, tl.reshape(top, (COLUMNS,)), mask=m_column)
    tl.store(p_total + p_partial, total, mask=m_column)
    _store_fours(p_accumulator + (p_partial * D)[None, :], a0, a1, a2, a3, o_unit[:, None], m_query, UNITS, COLUMNS)


@triton.jit
def _prefetch(
    p_units,
    p_scale,
    plane_stride,
    kind_stride,
    scale_kind_stride,
    start,
    last,
    planes,
    D: tl.constexpr,
):
    """Fetch the first entries of a split, none after `last`, into the L2 cache: nothing depends on it."""
    o_entry = tl.minimum(start + tl.arange(0, _BLOCK), last)[None, :]
    o_kind = tl.arange(0, 2)[:, None]
    p_entry = p_units + o_kind * kind_stride + o_entry * (D // 4)
    _prefetch_lines(p_scale + o_kind * scale_kind_stride + o_entry)
    _prefetch_lines(p_entry)
    if planes == 2:
        _prefetch_lines(p_entry + plane_stride)


@triton.jit
def _prefetch_lines(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _zero(q0, q1, q2, q3, zero: tl.constexpr, ENTRIES: tl.constexpr, UNITS: tl.constexpr):
    """Minus the score of an entry whose codes are all zero, which every product of offset codes starts from."""
    codes = tl.full([_WARPS, ENTRIES, UNITS], -zero, tl.float16)
    score = tl.dot(codes, q0)
    score = tl.dot(codes, q1, score)
    score = tl.dot(codes, q2, score)
    return tl.dot(codes, q3, score)


@triton.jit
def _step(
    p_units,
    p_scale,
    plane_stride,
    kind_stride,
    scale_kind_stride,
    block,
    stop,
    o_first,
    o_last,
    q0,
    q1,
    q2,
    q3,
    zero,
    peak,
    high,
    total,
    mass,
    a0,
    a1,
    a2,
    a3,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BOUNDED: tl.constexpr,
    FINE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One block of entries, `ENTRIES` a warp, at KV8 if `FINE`; `BOUNDED` where some may lie before `o_first`."""
    o_warp = block + tl.arange(0, _WARPS)[:, None, None] * ENTRIES
    o_unit = tl.arange(0, UNITS)
    # Keys lie with entries as rows, values with units as rows: the dimension that is summed comes last.
    o_key = o_warp + tl.arange(0, ENTRIES)[None, :, None]
    o_value = o_warp + tl.arange(0, ENTRIES)[None, None, :]
    m_key = o_key < stop
    m_keys = m_key
    m_values = o_value < stop
    if UNITS != D // 4:
        m_keys = m_keys & (o_unit < D // 4)[None, None, :]
        m_values = m_values & (o_unit < D // 4)[None, :, None]
    p_keys = p_units + o_key * (D // 4) + o_unit[None, None, :]
    p_values = p_units + kind_stride + o_value * (D // 4) + o_unit[None, :, None]
    b_keys = tl.load(p_keys, mask=m_keys, other=0)
    b_values = tl.load(p_values, mask=m_values, other=0)
    key_scale = tl.load(p_scale + o_key, mask=m_key, other=0.0)
    value_scale = tl.load(p_scale + scale_kind_stride + o_key, mask=m_key, other=1.0)
    if FINE:
        fine_keys = tl.load(p_keys + plane_stride, mask=m_keys, other=0)
        fine_values = tl.load(p_values + plane_stride, mask=m_values, other=0)
        k0, k1, k2, k3 = _both_planes(b_keys, fine_keys, ASM)
        key_scale = key_scale * (0.0625 * _CODE_UNITS)
        value_scale = value_scale * 0.0625
    else:
        k0, k1, k2, k3 = _base_plane(b_keys, ASM)
        key_scale = key_scale * _CODE_UNITS
    score = tl.dot(k0, q0, zero)
    score = tl.dot(k1, q1, score)
    score = tl.dot(k2, q2, score)
    score = tl.dot(k3, q3, score)
    m_seen = o_key <= o_last
    if BOUNDED:
        m_seen = m_seen & (o_key >= o_first)
    score = tl.where(m_seen, score * key_scale, float("-inf"))
    weighty = score + _log2(value_scale, ASM)

    above = tl.maximum(peak, tl.max(score, axis=1, keep_dims=True))
    safe = _finite(above)
    total = total * _exp2(peak - safe, ASM) + _exp2(score - safe, ASM)
    higher = tl.maximum(high, tl.max(weighty, axis=1, keep_dims=True))
    safe = _finite(higher)
    shrink = _exp2(high - safe, ASM)
    weight = _exp2(weighty - safe, ASM).to(tl.float16)
    if FINE:
        v0, v1, v2, v3 = _both_planes(b_values, fine_values, ASM)
    else:
        v0, v1, v2, v3 = _base_plane(b_values, ASM)
    mass = tl.dot(tl.full([_WARPS, 16, ENTRIES], 1.0, tl.float16), weight, mass * shrink)
    a0 = tl.dot(v0, weight, a0 * shrink)
    a1 = tl.dot(v1, weight, a1 * shrink)
    a2 = tl.dot(v2, weight, a2 * shrink)
    a3 = tl.dot(v3, weight, a3 * shrink)
    return above, higher, total, mass, a0, a1, a2, a3


@triton.jit
def _append(
    p_qkv,
    p_gain,
    p_cosine,
    p_sine,
    p_units,
    p_scale,
    plane_stride,
    kind_stride,
    scale_kind_stride,
    kv_head,
    position,
    start,
    stop,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    EPSILON: tl.constexpr,
    NEW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Store the new entries of a KV head that lie in `[start, stop)`. Programs of other rows write the same bytes."""
    o_token = tl.arange(0, NEW)
    o_entry = position + o_token
    m_entry = (o_entry >= start) & (o_entry < stop)
    o_unit = tl.arange(0, UNITS)[None, :]
    m_unit = m_entry[:, None] & (o_unit < D // 4)
    key_head = HEADS + kv_head
    p_key = p_qkv + (o_token * ((HEADS + 2 * KV_HEADS) * D) + key_head * D)[:, None]
    p_head_gain = None if p_gain is None else p_gain + (o_token * 0 + key_head * D)[:, None]
    o_angle = (o_entry * (D // 2))[:, None]
    x0, x1, x2, x3 = _turned(p_key, p_head_gain, p_cosine + o_angle, p_sine + o_angle, o_unit, m_unit, D, EPSILON, 1)
    _store_entries(x0, x1, x2, x3, p_units, p_scale, plane_stride, o_entry, o_unit, m_entry, m_unit, D, ASM)
    x0, x1, x2, x3 = _fours(p_key + KV_HEADS * D, o_unit, m_unit)
    p_units += kind_stride
    p_scale += scale_kind_stride
    _store_entries(x0, x1, x2, x3, p_units, p_scale, plane_stride, o_entry, o_unit, m_entry, m_unit, D, ASM)


@triton.jit
def _store_entries(
    x0,
    x1,
    x2,
    x3,
    p_units,
    p_scale,
    plane_stride,
    o_entry,
    o_unit,
    m_entry,
    m_unit,
    D: tl.constexpr,
    ASM: tl.constexpr,
):
    """Encode vectors `[N, UNITS]` of every fourth element and store both planes and the scale (Eqs. 11-14)."""
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=1), _BASE_MAX), _SMALLEST_SCALE)
    tl.store(p_scale + o_entry, scale, mask=m_entry)
    scale = scale[:, None]
    base0, fine0 = _nibbles(x0, scale, ASM)
    base1, fine1 = _nibbles(x1, scale, ASM)
    base2, fine2 = _nibbles(x2, scale, ASM)
    base3, fine3 = _nibbles(x3, scale, ASM)
    p_entry = p_units + (o_entry * (D // 4))[:, None] + o_unit
    base = base0 | (base1 << 4) | (base2 << 8) | (base3 << 12)
    fine = fine0 | (fine1 << 4) | (fine2 << 8) | (fine3 << 12)
    tl.store(p_entry, base.to(tl.int16), mask=m_unit)
    tl.store(p_entry + plane_stride, fine.to(tl.int16), mask=m_unit)


@triton.jit
def _nibbles(x, scale, ASM: tl.constexpr):
    """Base and refinement codes of elements, each plus 8."""
    base = _clamp(_round(divide(x, scale, ASM)))
    fine = _clamp(_round(divide(x - base * scale, scale * 0.0625, ASM)))
    return base.to(tl.int32) + 8, fine.to(tl.int32) + 8


@triton.jit
def _round(x):
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def _clamp(code):
    return tl.minimum(tl.maximum(code, -8.0), 7.0)


@triton.jit
def _fours(p_x, o_unit, m_unit):
    """Elements 0, 1, 2 and 3 of each unit, float32."""
    p_x = p_x + o_unit * 4
    x0 = tl.load(p_x, mask=m_unit, other=0.0).to(tl.float32)
    x1 = tl.load(p_x + 1, mask=m_unit, other=0.0).to(tl.float32)
    x2 = tl.load(p_x + 2, mask=m_unit, other=0.0).to(tl.float32)
    x3 = tl.load(p_x + 3, mask=m_unit, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _turned(p_x, p_gain, p_cosine, p_sine, o_unit, m_unit, D: tl.constexpr, EPSILON: tl.constexpr, AXIS: tl.constexpr):
    """Every fourth element of heads after their norm, if there is one, and RoPE; units lie along `AXIS`."""
    spread = 0.0
    if p_gain is not None:
        x0, x1, x2, x3 = _fours(p_x, o_unit, m_unit)
        squares = (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)
        if AXIS == 0:
            squares = tl.trans(squares)
        mean = tl.div_rn(_tree_sum(squares), 1.0 * D)
        spread = tl.expand_dims(tl.sqrt_rn(mean + EPSILON), AXIS)
    x0 = _turned_element(p_x, p_gain, p_cosine, p_sine, spread, o_unit * 4, m_unit, D)
    x1 = _turned_element(p_x, p_gain, p_cosine, p_sine, spread, o_unit * 4 + 1, m_unit, D)
    x2 = _turned_element(p_x, p_gain, p_cosine, p_sine, spread, o_unit * 4 + 2, m_unit, D)
    x3 = _turned_element(p_x, p_gain, p_cosine, p_sine, spread, o_unit * 4 + 3, m_unit, D)
    return x0, x1, x2, x3


@triton.jit
def _turned_element(p_x, p_gain, p_cosine, p_sine, spread, element, m_unit, D: tl.constexpr):
    """`reference.apply_rope` of one element, with the one half a head away from it."""
    half: tl.constexpr = D // 2
    low = element < half
    angle = tl.where(low, element, element - half)
    partner = tl.where(low, element + half, angle)
    x = tl.load(p_x + element, mask=m_unit, other=0.0).to(tl.float32)
    y = tl.load(p_x + partner, mask=m_unit, other=0.0).to(tl.float32)
    if p_gain is not None:
        x = tl.div_rn(x, spread) * tl.load(p_gain + element, mask=m_unit, other=0.0)
        y = tl.div_rn(y, spread) * tl.load(p_gain + partner, mask=m_unit, other=0.0)
    cosine = tl.load(p_cosine + angle, mask=m_unit, other=0.0)
    sine = tl.load(p_sine + angle, mask=m_unit, other=0.0)
    return x * cosine + tl.where(low, -y, y) * sine


@triton.jit
def _query(x, D: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Queries as all warps multiply them: scaled so that scores are exponents of 2, in float16."""
    scaled = (x * (1.4426950408889634 / D**0.5)).to(tl.float16)
    return tl.broadcast_to(scaled[None, :, :], (_WARPS, UNITS, COLUMNS))


@triton.jit
def _base_plane(base, ASM: tl.constexpr):
    """Offset base codes 0 to 3 of 16-bit units, each as the float16 of that bit pattern: `2^-24 * (q4 + 8)`, exactly.

    Codes 1 and 3 are left where they stand, which makes them 16-fold.
    """
    if ASM:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shr.u32 t, $4, 8;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, $4, 0x00F000F0;
            and.b32 $2, t, 0x000F000F;
            and.b32 $3, t, 0x00F000F0;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [base],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        c0 = _tiny(base & 15)
        c1 = _tiny(base & 240)
        c2 = _tiny((base >> 8) & 15)
        c3 = _tiny((base >> 8) & 240)
    return c0, c1, c2, c3


@triton.jit
def _both_planes(base, fine, ASM: tl.constexpr):
    """Offset composed codes 0 to 3 of 16-bit units as `2^-24 * (16 * q4 + qr + 136)`: base nibbles above the others."""
    if ASM:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd, t;
            shl.b32 t, $4, 4;
            lop3.b32 even, t, $5, 0xF0F0F0F0, 0xE4;
            shr.u32 t, $5, 4;
            lop3.b32 odd, $4, t, 0xF0F0F0F0, 0xE4;
            and.b32 $0, even, 0x00FF00FF;
            and.b32 $1, odd, 0x00FF00FF;
            prmt.b32 $2, even, 0, 0x4341;
            prmt.b32 $3, odd, 0, 0x4341;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [base, fine],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        c0 = _tiny((base & 15) * 16 + (fine & 15))
        c1 = _tiny((base & 240) + ((fine >> 4) & 15))
        c2 = _tiny(((base >> 8) & 15) * 16 + ((fine >> 8) & 15))
        c3 = _tiny(((base >> 8) & 240) + ((fine >> 12) & 15))
    return c0, c1, c2, c3


@triton.jit
def _tiny(code):
    """A small integer as the float16 of the same bits, which is subnormal: the integer times 2^-24."""
    return code.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _store_fours(p_x, x0, x1, x2, x3, o_unit, m_unit, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Store every fourth element `[FIRST, SECOND]` of vectors, four neighbours at once."""
    fours = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (FIRST, SECOND, 4)).to(p_x.dtype.element_ty)
    p_fours = tl.expand_dims(p_x + o_unit * 4, 2) + tl.arange(0, 4)[None, None, :]
    tl.store(p_fours, fours, mask=tl.broadcast_to(tl.expand_dims(m_unit, 2), (FIRST, SECOND, 4)))


@triton.jit
def _sum_warps(x):
    """The sum over the first axis of four, `(0 + 1) + (2 + 3)`."""
    rows: tl.constexpr = x.shape[1]
    columns: tl.constexpr = x.shape[2]
    low, high = tl.split(tl.reshape(tl.permute(x, (1, 2, 0)), (rows, columns, 2, 2)))
    low, high = tl.split(low + high)
    return low + high


@triton.jit
def _tree_sum(x):
    """The sum over the last of two axes, by neighbours: an order that no layout changes. `[N, L]` -> `[N]`."""
    rows: tl.constexpr = x.shape[0]
    length: tl.constexpr = x.shape[1]
    if length == 1:
        return tl.reshape(x, (rows,))
    else:
        low, high = tl.split(tl.reshape(x, (rows, length // 2, 2)))
        return _tree_sum(low + high)


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    """`2^x` without the instructions that save results below 2^-126."""
    if ASM:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _log2(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _finite(peak):
    """Zero instead of minus infinity, which stands where nothing was seen."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _split_bounds(split, SHORTS: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    """`Splits.start` of a split and of the next."""
    start = tl.minimum(split, SHORTS) * SHORT + tl.maximum(split - SHORTS, 0) * LONG
    return start, start + tl.where(split < SHORTS, SHORT, LONG)


@triton.jit
def _split_of(entry, SHORTS: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    """The split that holds an entry."""
    short = entry // SHORT
    return tl.where(short < SHORTS, short, SHORTS + (entry - SHORTS * SHORT) // LONG)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first entry that the token at a position sees."""
    if WINDOW is None:
        return position * 0
    else:
        return tl.maximum(position - WINDOW + 1, 0)


@triton.jit(do_not_specialize=["offset", "splits"])
def _attend_half_kernel(
    p_qkv,
    p_gain,
    p_cosine,
    p_sine,
    p_position,
    p_keys,
    p_values,
    head_stride,
    p_accumulator,
    p_peak,
    p_total,
    splits,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORTS: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEW: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    release_dependents(PDL)
    kv_head = tl.program_id(0)
    split = splits - 1 - tl.program_id(2)
    token = tl.program_id(1) * TOKENS
    p_keys += kv_head.to(tl.int64) * head_stride
    p_values += kv_head.to(tl.int64) * head_stride
    start, stop = _split_bounds(split, SHORTS, SHORT, LONG)
    if PDL and ASM:
        near = tl.load(p_position, cache_modifier=".cg") + offset
        if (start <= near) & (token == 0):
            o_near = tl.minimum(start + tl.arange(0, _BLOCK), near)[:, None] * D
            # A line holds 64 elements.
            o_line = tl.arange(0, triton.cdiv(4 * UNITS, 64))[None, :] * 64
            _prefetch_lines(p_keys + o_near + o_line)
            _prefetch_lines(p_values + o_near + o_line)
    wait_for_inputs(PDL)
    position = tl.load(p_position) + offset
    end = position + tl.minimum(token + TOKENS, ROWS)
    first = _first_seen(position + token, WINDOW)
    stop = tl.minimum(stop, end)
    start = tl.maximum(start, first // _BLOCK * _BLOCK)
    if start >= stop:
        return

    o_element = tl.arange(0, 4 * UNITS)
    m_element = o_element < D
    group: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    if stop > position:
        o_new = tl.arange(0, NEW)
        o_entry = position + o_new
        m_new = ((o_entry >= start) & (o_entry < stop))[:, None] & m_element[None, :]
        p_key = p_qkv + (o_new * width + (HEADS + kv_head) * D)[:, None]
        p_head_gain = None if p_gain is None else p_gain + (o_new * 0 + (HEADS + kv_head) * D)[:, None]
        o_angle = (o_entry * (D // 2))[:, None]
        spread = _spread(p_key, p_head_gain, o_element[None, :], m_new, D, EPSILON, 1)
        b_key = _turned_element(
            p_key, p_head_gain, p_cosine + o_angle, p_sine + o_angle, spread, o_element[None, :], m_new, D
        )
        b_value = tl.load(p_key + KV_HEADS * D + o_element[None, :], mask=m_new, other=0.0)
        o_stored = (o_entry * D)[:, None] + o_element[None, :]
        tl.store(p_keys + o_stored, b_key.to(tl.float16), mask=m_new)
        tl.store(p_values + o_stored, b_value, mask=m_new)
        tl.debug_barrier()

    o_column = tl.arange(0, COLUMNS)
    o_token = token + o_column // group
    m_column = (o_column < TOKENS * group) & (o_token < ROWS)
    head = kv_head * group + o_column % group
    m_query = m_element[:, None] & m_column[None, :]
    p_row = p_qkv + (o_token * width + head * D)[None, :]
    p_head_gain = None if p_gain is None else p_gain + (head * D)[None, :]
    o_angle = ((position + o_token) * (D // 2))[None, :]
    spread = _spread(p_row, p_head_gain, o_element[:, None], m_query, D, EPSILON, 0)
    query = _turned_element(
        p_row, p_head_gain, p_cosine + o_angle, p_sine + o_angle, spread, o_element[:, None], m_query, D
    )
    query = _query(query, D, 4 * UNITS, COLUMNS)
    o_last = tl.where(m_column, position + o_token, -1)[None, None, :]
    o_first = _first_seen(o_last, WINDOW)

    peak = tl.full([_WARPS, 1, COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([_WARPS, ENTRIES, COLUMNS], tl.float32)
    accumulator = tl.zeros([_WARPS, 4 * UNITS, COLUMNS], tl.float32)
    for block in tl.range(start, stop, _WARPS * ENTRIES, num_stages=STAGES):
        o_warp = block + tl.arange(0, _WARPS)[:, None, None] * ENTRIES
        o_key = o_warp + tl.arange(0, ENTRIES)[None, :, None]
        o_value = o_warp + tl.arange(0, ENTRIES)[None, None, :]
        m_keys = o_key < stop
        m_values = o_value < stop
        if 4 * UNITS != D:
            m_keys = m_keys & m_element[None, None, :]
            m_values = m_values & m_element[None, :, None]
        b_keys = tl.load(p_keys + o_key * D + o_element[None, None, :], mask=m_keys, other=0.0)
        b_values = tl.load(p_values + o_value * D + o_element[None, :, None], mask=m_values, other=0.0)
        score = tl.dot(b_keys, query)
        m_seen = o_key <= o_last
        if WINDOW is not None:
            m_seen = m_seen & (o_key >= o_first)
        score = tl.where(m_seen, score, float("-inf"))
        above = tl.maximum(peak, tl.max(score, axis=1, keep_dims=True))
        safe = _finite(above)
        shrink = _exp2(peak - safe, ASM)
        weight = _exp2(score - safe, ASM)
        total = total * shrink + weight
        peak = above
        accumulator = tl.dot(b_values, weight.to(tl.float16), accumulator * shrink)

    top = tl.max(peak, axis=0, keep_dims=True)
    share = _exp2(peak - _finite(top), ASM)
    total = _tree_sum(tl.reshape(tl.permute(total * share, (2, 0, 1)), (COLUMNS, _WARPS * ENTRIES)))
    p_partial = (o_token * HEADS + head).to(tl.int64) * splits + split
    tl.store(p_peak + p_partial, tl.reshape(top, (COLUMNS,)), mask=m_column)
    tl.store(p_total + p_partial, total, mask=m_column)
    p_parts = p_accumulator + (p_partial * D)[None, :] + o_element[:, None]
    tl.store(p_parts, _sum_warps(accumulator * share), mask=m_query)


@triton.jit
def _spread(p_x, p_gain, element, m_element, D: tl.constexpr, EPSILON: tl.constexpr, AXIS: tl.constexpr):
    """The root mean square of heads that are normed, elements along `AXIS`."""
    if p_gain is None:
        return 0.0
    else:
        x = tl.load(p_x + element, mask=m_element, other=0.0).to(tl.float32)
        squares = x * x
        if AXIS == 0:
            squares = tl.trans(squares)
        mean = tl.div_rn(_tree_sum(squares), 1.0 * D)
        return tl.expand_dims(tl.sqrt_rn(mean + EPSILON), AXIS)


@triton.jit(do_not_specialize=["offset", "splits"])
def _combine_kernel(
    p_accumulator,
    p_peak,
    p_total,
    splits,
    p_position,
    offset,
    p_out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORTS: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    release_dependents(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1)
    wait_for_inputs(PDL)
    position = tl.load(p_position) + offset + row
    p_row = (row * HEADS + head).to(tl.int64)
    merged = _merge(
        p_accumulator, p_peak, p_total, p_row * splits, position, D, BLOCK, SPLITS, WINDOW, SHORTS, SHORT, LONG, ASM
    )
    o_element = tl.arange(0, BLOCK)
    tl.store(p_out + p_row * D + o_element, merged.to(p_out.dtype.element_ty), mask=o_element < D)


@triton.jit
def _merge(
    p_accumulator,
    p_peak,
    p_total,
    first_partial,
    position,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORTS: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    ASM: tl.constexpr,
):
    """One head of the token at `position` from its splits, in their order: float32 `[BLOCK]`."""
    first = _split_of(_first_seen(position, WINDOW), SHORTS, SHORT, LONG)
    last = _split_of(position, SHORTS, SHORT, LONG)
    o_element = tl.arange(0, BLOCK)
    peak = position * 0 + float("-inf")
    total = position * 0.0
    accumulator = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(first // SPLITS * SPLITS, last + 1, SPLITS, num_stages=4):
        o_split = block + tl.arange(0, SPLITS)
        m_split = (o_split >= first) & (o_split <= last)
        p_partial = first_partial + o_split
        b_peak = tl.load(p_peak + p_partial, mask=m_split, other=float("-inf"))
        b_total = tl.load(p_total + p_partial, mask=m_split, other=0.0)
        p_parts = p_accumulator + (p_partial * D)[:, None] + o_element[None, :]
        b_parts = tl.load(p_parts, mask=m_split[:, None] & (o_element < D)[None, :], other=0.0)
        above = tl.maximum(peak, tl.max(b_peak, axis=0))
        safe = _finite(above)
        shrink = _exp2(peak - safe, ASM)
        share = _exp2(b_peak - safe, ASM)
        total = total * shrink + tl.sum(b_total * share, axis=0)
        accumulator = accumulator * shrink + tl.sum(b_parts * share[:, None], axis=0)
        peak = above
    return tl.div_rn(accumulator, total)


@triton.jit(do_not_specialize=["start", "rows"])
def _kv_store_kernel(
    p_qkv,
    p_gain,
    p_cosine,
    p_sine,
    p_units,
    p_scale,
    plane_stride,
    kind_stride,
    head_stride,
    scale_kind_stride,
    scale_head_stride,
    p_queries,
    query_stride,
    start,
    rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    WINDOW: tl.constexpr,
    EPSILON: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    release_dependents(PDL)
    head = tl.program_id(1)
    o_token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    o_entry = start + o_token
    m_token = o_token < rows
    o_unit = tl.arange(0, UNITS)[None, :]
    m_unit = m_token[:, None] & (o_unit < D // 4)
    p_x = p_qkv + (o_token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D) + head * D)[:, None]
    o_angle = (o_entry * (D // 2))[:, None]
    wait_for_inputs(PDL)
    if head < HEADS + KV_HEADS:
        p_head_gain = None if p_gain is None else p_gain + (o_token * 0 + head * D)[:, None]
        x0, x1, x2, x3 = _turned(p_x, p_head_gain, p_cosine + o_angle, p_sine + o_angle, o_unit, m_unit, D, EPSILON, 1)
        if head < HEADS:
            p_turned = p_queries + head.to(tl.int64) * query_stride + (o_token * D)[:, None]
            _store_fours(p_turned, x0, x1, x2, x3, o_unit, m_unit, TOKENS, UNITS)
        else:
            kv_head = (head - HEADS).to(tl.int64)
            p_units += kv_head * head_stride
            p_scale += kv_head * scale_head_stride
            _store_entries(x0, x1, x2, x3, p_units, p_scale, plane_stride, o_entry, o_unit, m_token, m_unit, D, ASM)
    else:
        v0, v1, v2, v3 = _fours(p_x, o_unit, m_unit)
        value_head = (head - HEADS - KV_HEADS).to(tl.int64)
        p_units += value_head * head_stride + kind_stride
        p_scale += value_head * scale_head_stride + scale_kind_stride
        _store_entries(v0, v1, v2, v3, p_units, p_scale, plane_stride, o_entry, o_unit, m_token, m_unit, D, ASM)


@triton.jit(do_not_specialize=["stop"])
def _kv_load_kernel(
    p_units,
    p_scale,
    plane_stride,
    kind_stride,
    head_stride,
    scale_kind_stride,
    scale_head_stride,
    p_keys,
    p_values,
    out_stride,
    stop,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    release_dependents(PDL)
    kv_head = tl.program_id(1).to(tl.int64)
    kind = tl.program_id(2)
    o_entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    m_entry = o_entry < stop
    o_unit = tl.arange(0, UNITS)[None, :]
    m_unit = m_entry[:, None] & (o_unit < D // 4)
    p_entry = p_units + kv_head * head_stride + kind * kind_stride + (o_entry * (D // 4))[:, None] + o_unit
    p_scale += kv_head * scale_head_stride + kind * scale_kind_stride
    wait_for_inputs(PDL)
    base = tl.load(p_entry, mask=m_unit, other=0)
    fine = tl.load(p_entry + plane_stride, mask=m_unit, other=0)
    scale = tl.load(p_scale + o_entry, mask=m_entry, other=0.0)[:, None] * 0.0625
    c0, c1, c2, c3 = _both_planes(base, fine, ASM)
    x0 = ((c0.to(tl.float32) * _CODE_UNITS - 136.0) * scale).to(tl.float16)
    x1 = ((c1.to(tl.float32) * _CODE_UNITS - 136.0) * scale).to(tl.float16)
    x2 = ((c2.to(tl.float32) * _CODE_UNITS - 136.0) * scale).to(tl.float16)
    x3 = ((c3.to(tl.float32) * _CODE_UNITS - 136.0) * scale).to(tl.float16)
    p_out = tl.where(kind == 0, p_keys, p_values) + kv_head * out_stride + (o_entry * D)[:, None]
    _store_fours(p_out, x0, x1, x2, x3, o_unit, m_unit, ENTRIES, UNITS)
