"""The product of up to eight rows with a nested weight on tensor cores, without passing through shared memory.

`mma.sync.m16n8k32` takes 16 weight rows of 32 inputs from the registers of a warp: lane `4 r + t` holds four bytes of
row `r` and of row `r + 8`, and four more of each 16 inputs further on; its eight columns are tokens. Which input is
called the first is free as long as weights and activations agree. So a lane loads four neighbouring words of a row,
as they are stored, and the low (even) and high (odd) nibbles of word `j` are its bytes of the `j`-th product: 16 words
a row, one group of 128 inputs, are four products, whose int32 sums are exact. Activations are fetched the same way:
rows 0..7 of their tile are the tokens' even codes, rows 8..15 the odd ones.

Tiles are `[16 * WARPS, 16]` words: tile row `8 * (half * WARPS + warp) + r` is weight row `8 * half + r`, and each warp
has other groups of inputs. The registers of a lane are then the four words of tile row `r` and the four of row `r + 8`
of its warp; this is the layout that the compiler gives to 16-byte loads of such a tile, and `tests/kernels/
test_compilation.py` holds it to that.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from bitnest_format.kernels.primitives import release_dependents, wait_for_inputs

# Columns of a product, rows of a tile, words of a group.
TOKENS = 8
ROWS = 16
WORDS = 16
# Groups whose scales a lane holds in 16 bytes.
SCALES = 8

PLAIN, GATE_UP, ARGMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def _unpack_target(j: int) -> str:
    return f"""
    shl.b32 t, ${8 + j}, 4;
    lop3.b32 a0, t, ${16 + j}, 0xF0F0F0F0, 0xE4;
    shr.u32 t, ${16 + j}, 4;
    lop3.b32 a2, ${8 + j}, t, 0xF0F0F0F0, 0xE4;
    shl.b32 t, ${12 + j}, 4;
    lop3.b32 a1, t, ${20 + j}, 0xF0F0F0F0, 0xE4;
    shr.u32 t, ${20 + j}, 4;
    lop3.b32 a3, ${12 + j}, t, 0xF0F0F0F0, 0xE4;"""


def _unpack_draft(j: int) -> str:
    return f"""
    shl.b32 t, ${8 + j}, 4;
    and.b32 a0, t, 0xF0F0F0F0;
    and.b32 a2, ${8 + j}, 0xF0F0F0F0;
    shl.b32 t, ${12 + j}, 4;
    and.b32 a1, t, 0xF0F0F0F0;
    and.b32 a3, ${12 + j}, 0xF0F0F0F0;"""


def _step(target: bool, scale: int) -> str:
    """One group: `acc += scale * (weights x activations)`, for the scale of that number among the lane's eight.

    Operands: results 0..7, base words 8..15, refinement words 16..23, activations 24..31, scales 32..39, sums of codes
    40..47, `acc` 48..55; of eight, the first four belong to tile row r, the others to r + 8. Of four results or `acc`
    the first two count; of sums, four are the runs of one token.
    """
    lines = ["{ .reg .b32 t, k, a0, a1, a2, a3, c0, c1, c2, c3, d0, d1, d2, d3; .reg .b16 h, l; .reg .f32 s0, s1, f;"]
    # What the nibbles' offsets add to a code, times the sum of the codes it is multiplied with.
    offset = -136 if target else -128
    for accumulator, first in (("c0", 40), ("c1", 44)):
        lines.append(f"add.s32 t, ${first}, ${first + 1}; add.s32 k, ${first + 2}, ${first + 3}; add.s32 t, t, k;")
        lines.append(f"mul.lo.s32 {accumulator}, t, {offset};")
    lines.append("mov.b32 c2, c0; mov.b32 c3, c1; mov.b32 d0, 0; mov.b32 d1, 0; mov.b32 d2, 0; mov.b32 d3, 0;")
    # Two sums at a time, since each product waits for the one before it.
    for j in range(4):
        lines.append(_unpack_target(j) if target else _unpack_draft(j))
        sums = "{c0, c1, c2, c3}" if j % 2 == 0 else "{d0, d1, d2, d3}"
        lines.append(
            f"mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {sums}, {{a0, a1, a2, a3}}, "
            f"{{${24 + j}, ${28 + j}}}, {sums};"
        )
    chosen = "h" if scale % 2 else "l"
    for name, operand in (("s0", 32 + scale // 2), ("s1", 36 + scale // 2)):
        lines.append(f"mov.b32 {{l, h}}, ${operand}; cvt.f32.f16 {name}, {chosen};")
    for column, (result, of_row) in enumerate(((0, "s0"), (1, "s0"), (4, "s1"), (5, "s1"))):
        lines.append(f"add.s32 t, c{column}, d{column}; cvt.rn.f32.s32 f, t;")
        lines.append(f"fma.rn.f32 ${result}, f, {of_row}, ${48 + result};")
    lines += [f"mov.b32 ${result}, ${48 + result};" for result in (2, 3, 6, 7)]
    return "\n".join([*lines, "}"])


STEPS_TARGET = tl.constexpr(tuple(_step(True, scale) for scale in range(SCALES)))
STEPS_DRAFT = tl.constexpr(tuple(_step(False, scale) for scale in range(SCALES)))
CONSTRAINTS = tl.constexpr(",".join(["=f"] * 8 + ["r"] * 40 + ["f"] * 8))


@triton.jit
def dual_plane_mma_kernel(
    codes, act_scale, sums, base, refinement, scales, bias, out, index, outputs, out_stride,
    W: tl.constexpr, G: tl.constexpr, S: tl.constexpr, M: tl.constexpr, TARGET: tl.constexpr, EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, WARPS: tl.constexpr, BATCH: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: 16 weight rows times `M` activation rows. `scales` int32 `[O, S]`: pairs of float16, padded."""
    release_dependents(PDL)
    program = tl.program_id(0)
    place = tl.arange(0, 16 * WARPS)
    row_in_tile = (place // (8 * WARPS)) * 8 + place % 8
    warp = (place // 8) % WARPS
    # 32 bits hold every offset: `dual_plane` refuses planes of 2^31 words.
    rows = tl.minimum(program * 16 + row_in_tile, outputs - 1)
    token, parity = place % 8, place // (8 * WARPS)
    word = tl.arange(0, 16)
    p_base = base + rows[:, None] * W + word[None, :]
    p_refinement = refinement + rows[:, None] * W + word[None, :]
    p_codes = codes + (token * 2 + parity)[:, None] * W + word[None, :]
    p_scales = scales + rows[:, None] * S + (word % 4)[None, :]
    # Lane t of four needs the sums of tokens 2 t and 2 t + 1, whose products it will hold.
    summed = 2 * (word // 4)[None, :] + parity[:, None]
    p_sums = sums + summed * (W // 4) + (word % 4)[None, :]
    is_token = token[:, None] < M
    acc = tl.zeros((16 * WARPS, 16), tl.float32)
    STRIDE: tl.constexpr = WARPS * BATCH
    group = warp * BATCH
    b, r, s = _load_batch(p_base, p_refinement, p_scales, group, G, TARGET, BATCH)
    wait_for_inputs(PDL)
    for first in tl.range(0, G, STRIDE, num_stages=1):
        for step in tl.static_range(BATCH):
            inside = ((first + group + step) < G)[:, None] & is_token
            x = tl.load(p_codes + ((first + group + step) * 16)[:, None], mask=inside, other=0)
            of_runs = ((first + group + step) < G)[:, None] & (summed < M)
            z = tl.load(p_sums + ((first + group + step) * 4)[:, None], mask=of_runs, other=0)
            acc = mma_step(acc, b[step], r[step], x, s[step // 8], z, step % 8, TARGET, WARPS, ASM)
        if STRIDE < G:
            b, r, s = _load_batch(p_base, p_refinement, p_scales, first + STRIDE + group, G, TARGET, BATCH)
    # Warps are added in a fixed order; what is left is [16 weight rows, 4 lanes x (2 tokens, 2 unused)].
    y = tl.reshape(tl.sum(tl.reshape(acc, (2, WARPS, 8 * 16)), 1), (16, 16))
    row = program * 16 + tl.arange(0, 16)
    column = tl.arange(0, 16)
    of_token = (column // 4) * 2 + column % 4
    valid = (column % 4 < 2) & (of_token < M)
    y *= (tl.load(act_scale + of_token, mask=valid, other=0.0) * 0.0625)[None, :]
    if BIAS:
        y += tl.load(bias + row, mask=row < outputs, other=0.0)[:, None]
    if EPILOGUE == PLAIN:
        at = out + of_token[None, :] * out_stride + row[:, None]
        stored = valid[None, :] & (row < outputs)[:, None]
        if ADD:
            y += tl.load(at, mask=stored, other=0.0)
        tl.store(at, y, mask=stored)
    elif EPILOGUE == GATE_UP:
        gate, up = tl.split(tl.permute(tl.reshape(y, (8, 2, 16)), (0, 2, 1)))
        pair = program * 8 + tl.arange(0, 8)
        at = out + of_token[None, :] * out_stride + pair[:, None]
        tl.store(at, gate / (1.0 + tl.exp(-gate)) * up, mask=valid[None, :] & (2 * pair < outputs)[:, None])
    else:
        y = tl.where((row < outputs)[:, None], y, float("-inf"))
        # Two blocks of eight outputs, as many as a program of `dp4a` has.
        y = tl.reshape(y, (2, 8, 16))
        of_block = tl.reshape(row, (2, 8, 1))
        broken = tl.max((y != y).to(tl.int32), 1)
        y = tl.where(y != y, float("inf"), y)
        largest = tl.max(y, 1)
        first_of_equals = tl.min(tl.where(y == largest[:, None, :], of_block, outputs), 1)
        # A NaN must not be lost.
        largest = tl.where(broken != 0, float("nan"), largest)
        block = program * 2 + tl.arange(0, 2)
        at = of_token[None, :] * out_stride + block[:, None]
        stored = valid[None, :] & (block < out_stride)[:, None]
        tl.store(out + at, largest, mask=stored)
        tl.store(index + at, first_of_equals, mask=stored)


@triton.jit
def _load_batch(p_base, p_refinement, p_scales, group, G: tl.constexpr, TARGET: tl.constexpr, BATCH: tl.constexpr):
    """`BATCH` groups of both planes, and their scales, eight groups to a tile."""
    b = ()
    r = ()
    s = ()
    for step in tl.static_range(BATCH):
        inside = ((group + step) < G)[:, None]
        at = ((group + step) * 16)[:, None]
        words = tl.load(p_base + at, mask=inside, other=0, eviction_policy="evict_first")
        b = b + (words,)  # noqa: RUF005
        if TARGET:
            r = r + (tl.load(p_refinement + at, mask=inside, other=0, eviction_policy="evict_first"),)  # noqa: RUF005
        else:
            r = r + (words,)  # noqa: RUF005
    for eight in tl.static_range((BATCH + 7) // 8):
        at = ((group + 8 * eight) // 2)[:, None]
        s = s + (tl.load(p_scales + at, mask=((group + 8 * eight) < G)[:, None], other=0),)  # noqa: RUF005
    return b, r, s


@triton.jit
def mma_step(
    acc, b, r, x, s, z, SCALE: tl.constexpr, TARGET: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Add one group to the sums of a tile; see the module's text for where everything stands."""
    if ASM:
        if TARGET:
            return tl.inline_asm_elementwise(
                STEPS_TARGET[SCALE], CONSTRAINTS, [b, r, x, s, z, acc], dtype=tl.float32, is_pure=True, pack=8
            )
        else:
            return tl.inline_asm_elementwise(
                STEPS_DRAFT[SCALE], CONSTRAINTS, [b, b, x, s, z, acc], dtype=tl.float32, is_pure=True, pack=8
            )
    else:
        half: tl.constexpr = 2
        b4 = tl.reshape(b, (half, WARPS, 8, 16))
        r4 = tl.reshape(r, (half, WARPS, 8, 16))
        x4 = tl.reshape(x, (half, WARPS, 8, 16))
        s4 = tl.reshape(s, (half, WARPS, 8, 16))
        parity = tl.arange(0, half)[:, None, None, None]
        lane = tl.arange(0, 8)[None, None, :, None]
        column = tl.arange(0, 16)[None, None, None, :]
        pair = tl.sum(tl.where(column == SCALE // 2, s4, 0), 3)
        scale = ((pair >> (16 * (SCALE % 2))) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        added = tl.zeros((half, WARPS, 8, 16), tl.float32)
        for token in tl.static_range(8):
            of_token = tl.where(lane == token, x4, 0)
            even = tl.sum(tl.sum(tl.where(parity == 0, of_token, 0), 2), 0)[None, :, None, :]
            odd = tl.sum(tl.sum(tl.where(parity == 1, of_token, 0), 2), 0)[None, :, None, :]
            total = tl.zeros((half, WARPS, 8, 16), tl.int32)
            for byte in tl.static_range(4):
                low = ((b4 >> (8 * byte)) & 15) * 16 - 128
                high = ((b4 >> (8 * byte + 4)) & 15) * 16 - 128
                if TARGET:
                    low += ((r4 >> (8 * byte)) & 15) - 8
                    high += ((r4 >> (8 * byte + 4)) & 15) - 8
                total += low * ((even << (24 - 8 * byte)) >> 24) + high * ((odd << (24 - 8 * byte)) >> 24)
            product = tl.sum(total, 3).to(tl.float32) * scale
            here = column == (token // 2) * 4 + token % 2
            added += tl.where(here, product[:, :, :, None], 0.0)
        return acc + tl.reshape(added, (16 * WARPS, 16))
