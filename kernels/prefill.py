"""Products of many rows with a nested weight: a prompt's chunk, where arithmetic and not memory is the limit.

Two ways, of which `prefill_tiles.choose` takes the faster:

- `linear_int8` multiplies the planes themselves on the tensor cores. Weights are the left operand, `out.T = W x.T`: on
  compute capability 9.0 that operand may come from registers, so packed bytes go from shared memory into registers in
  the order that the instruction wants, are unpacked there at one instruction a weight, and never return to shared
  memory. A step takes the even inputs of some bytes, then their odd ones, as activations lie.
- `linear_by_dequantize` turns some outputs at a time into float16 and leaves the product to the library. The chunk is
  read again while it lies in the second-level cache, so memory sees the planes once and nothing else.

Letters: `M` rows (tokens), `O` outputs, `I` inputs, `G` groups.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnest_format.kernels.launch import features
from bitnest_format.kernels.operands import Activations, DualPlaneWeight, View
from bitnest_format.kernels.prefill_tiles import Tile, candidates, choose, chunk_outputs, step_inputs, tail_rows
from bitnest_format.kernels.primitives import release_dependents, wait_for_inputs

# Weights of one program.
DEQUANTIZE_BLOCK = 8192
FINISH_BLOCK = 1024
LARGEST_HALF = tl.constexpr(65504.0)


def dequantize(weight: DualPlaneWeight, view: View, first_row: int, out: Tensor) -> None:
    """Write outputs `first_row ..` of a view as float16, even stored inputs first, then odd ones.

    `out` float16 `[n, I]`, contiguous. Its columns stand as those of `Activations.codes.view(R, I)`, so that
    `codes @ out.T` is the product. A value is the float32 product of code and scale, exact for float16 scales, rounded
    once; it saturates at 65504.
    """
    count, inputs = out.shape
    words = inputs // 8
    block = min(triton.next_power_of_2(words), DEQUANTIZE_BLOCK // 8)
    outputs = DEQUANTIZE_BLOCK // 8 // block
    _dequantize_kernel[(triton.cdiv(count, outputs), triton.cdiv(words, block))](
        weight.base,
        weight.base if view == "draft" else _refinement(weight),
        weight.scale,
        out,
        first_row,
        count,
        INPUTS=inputs,
        GROUPS=weight.scale.shape[1],
        FINE=view == "target",
        BLOCK_N=outputs,
        BLOCK_W=block,
        num_warps=4,
    )


def linear_by_dequantize(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, scratch: Tensor, *, add: bool
) -> None:
    """`out[:rows] = x W.T + b` (`+=` where `add`) through float16 weights: float32 `[R, O]`.

    `scratch` float16 of any shape: room for the weights that are multiplied at a time, `prefill_tiles.SCRATCH_WEIGHTS`
    where memory allows. Activation codes are exact in float16; they, and not activations, are multiplied, and sums are
    formed and written in float32, because a sum of codes may exceed what float16 holds. The one thing that is rounded
    is the weight: an output is off by at most `2^-11 * sum |x w|`, beside float32 rounding. Not the same bits for every
    number of rows. Raises `ValueError` where `scratch` does not hold one output.
    """
    codes = acts.codes[:rows].view(rows, weight.inputs).half()
    room = scratch.view(-1)
    step = chunk_outputs(weight.outputs, weight.inputs, room.numel())
    for first in range(0, weight.outputs, step):
        count = min(step, weight.outputs - first)
        half = room[: count * weight.inputs].view(count, weight.inputs)
        dequantize(weight, view, first, half)
        sums = _half_product(codes, half)
        _finish_kernel[(triton.cdiv(count, FINISH_BLOCK), rows)](
            sums,
            acts.scale,
            weight.base if weight.bias is None else weight.bias,
            out,
            first,
            count,
            weight.outputs,
            BIAS=weight.bias is not None,
            ADD=add,
            BLOCK=FINISH_BLOCK,
            num_warps=4,
        )


def linear_int8(
    acts: Activations,
    weight: DualPlaneWeight,
    view: View,
    out: Tensor,
    rows: int,
    *,
    add: bool,
    tile: Tile | None = None,
) -> None:
    """`out[:rows] = x W.T + b` (`+=` where `add`) in int8 on tensor cores: float32 `[R, O]`.

    Equals `reference_linear.nested_linear` but for the order of float additions: the integer sum of each group (of each
    128 inputs of a longer one) is exact, is multiplied by its scale and added in the order of groups in one rounding,
    then the token's scale and the bias follow. A row has the same bits whatever `rows` and `tile` are. `tile`: one of
    `prefill_tiles.candidates`, None for the best estimate. A base code of -8 must not stand beside a negative
    refinement code. Raises `ValueError` where groups are no multiple of 32 inputs.
    """
    tile = tile or candidates(rows, weight.outputs, weight.inputs)[0]
    use = features(out.device)
    step = step_inputs(weight.group_size)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(weight.outputs, tile.outputs),)
    base = weight.base.view(torch.uint8)
    _int8_kernel[grid](
        acts.codes,
        acts.scale,
        base,
        base if view == "draft" else _refinement(weight).view(torch.uint8),
        weight.scale,
        base if weight.bias is None else weight.bias,
        out,
        rows,
        weight.outputs,
        INPUTS=weight.inputs,
        GROUPS=weight.scale.shape[1],
        STEP=step,
        FINE=view == "target",
        BIAS=weight.bias is not None,
        ADD=add,
        BLOCK_M=tile.rows,
        TAIL=tail_rows(tile, rows),
        BLOCK_N=tile.outputs,
        # Half a step of 32 is too short for a product.
        JOIN=step < 64 or _joins(),
        ASM=use.asm,
        PDL=use.pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"launch_pdl": True} if use.pdl else {}),
    )


def prefill_linear(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, scratch: Tensor, *, add: bool
) -> None:
    """`out[:rows] = x W.T + b` (`+=` where `add`) by the faster way for the shape; operands as in the two above."""
    if choose(rows, weight.outputs, weight.inputs, weight.group_size) == "int8":
        linear_int8(acts, weight, view, out, rows, add=add)
    else:
        linear_by_dequantize(acts, weight, view, out, rows, scratch, add=add)


def _refinement(weight: DualPlaneWeight) -> Tensor:
    if weight.refinement is None:
        raise ValueError("the target view needs the refinement plane")
    return weight.refinement


def _joins() -> bool:
    """Whether even and odd inputs are best one product.

    So it is where that product takes weights from registers as they are (compute capability 9.x). Elsewhere Triton
    takes a joined operand for one of 4-bit numbers and shuffles bytes; two products add to the same integers.
    """
    target = tl.target_info.current_target()
    return target is not None and target.arch // 10 == 9


def _half_product(codes: Tensor, weights: Tensor) -> Tensor:
    """float16 `[M, I]` and `[n, I]` -> float32 `[M, n]`, summed in float32."""
    if codes.is_cuda:
        return torch.mm(codes, weights.T, out_dtype=torch.float32)
    # The library has no such product on a CPU, where this is only interpreted.
    return codes.float() @ weights.T.float()


@triton.jit(do_not_specialize=["first_row", "count"])
def _dequantize_kernel(
    p_base,
    p_refinement,
    p_scale,
    p_out,
    first_row,
    count,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Words `[BLOCK_N, BLOCK_W]` of both planes -> four even and four odd inputs of each."""
    WORDS: tl.constexpr = INPUTS // 8
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_w = (o_n < count)[:, None] & (o_w < WORDS)[None, :]
    stored = (first_row + o_n).to(tl.int64)[:, None]
    b_base = tl.load(p_base + stored * WORDS + o_w[None, :], mask=m_w, other=0)
    b_scale = tl.load(p_scale + stored * GROUPS + (o_w // (WORDS // GROUPS))[None, :], mask=m_w, other=0.0)
    b_scale = b_scale.to(tl.float32) * 0.0625
    # One byte to a weight, 16 * q4 + qr + 136. Without refinement its nibble is 8, the code 0.
    if FINE:
        b_refinement = tl.load(p_refinement + stored * WORDS + o_w[None, :], mask=m_w, other=0)
        low = b_refinement & 0x0F0F0F0F
        high = (b_refinement >> 4) & 0x0F0F0F0F
    else:
        low = 0x08080808
        high = 0x08080808
    even = _four_halves(((b_base & 0x0F0F0F0F) << 4) | low, b_scale, BLOCK_N, BLOCK_W)
    odd = _four_halves((b_base & -0x0F0F0F10) | high, b_scale, BLOCK_N, BLOCK_W)
    o_i = tl.program_id(1) * BLOCK_W * 4 + tl.arange(0, BLOCK_W * 4)
    m_i = (o_n < count)[:, None] & (o_i < INPUTS // 2)[None, :]
    p_row = p_out + o_n.to(tl.int64)[:, None] * INPUTS + o_i[None, :]
    tl.store(p_row, even, mask=m_i)
    tl.store(p_row + INPUTS // 2, odd, mask=m_i)


@triton.jit
def _four_halves(words, scale, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    """The four bytes of each word `[BLOCK_N, BLOCK_W]` -> scaled float16 `[BLOCK_N, 4 * BLOCK_W]`, in order."""
    first = tl.join(_half_of_byte(words, scale, 0), _half_of_byte(words, scale, 16))
    second = tl.join(_half_of_byte(words, scale, 8), _half_of_byte(words, scale, 24))
    return tl.reshape(tl.join(first, second), [BLOCK_N, 4 * BLOCK_W])


@triton.jit
def _half_of_byte(words, scale, SHIFT: tl.constexpr):
    # 0x4B000000 is 2^23, whose last bit counts ones: the byte's bits become a float without a conversion.
    bits = ((words >> SHIFT) & 0xFF) | 0x4B000000
    code = bits.to(tl.float32, bitcast=True) - (8388608.0 + 136.0)
    return tl.clamp(code * scale, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)


@triton.jit(do_not_specialize=["first", "count"])
def _finish_kernel(
    p_sums,
    p_token_scale,
    p_bias,
    p_out,
    first,
    count,
    outputs,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums `[M, count]` times the token's scale, with bias, into columns `first ..` of the output."""
    row = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < count
    value = tl.load(p_sums + row * count + o_n, mask=m_n) * tl.load(p_token_scale + row)
    if BIAS:
        value += tl.load(p_bias + first + o_n, mask=m_n)
    p_value = p_out + row * outputs + first + o_n
    if ADD:
        value += tl.load(p_value, mask=m_n)
    tl.store(p_value, value, mask=m_n)


@triton.jit(do_not_specialize=["rows"])
def _int8_kernel(
    p_codes,
    p_token_scale,
    p_base,
    p_refinement,
    p_scale,
    p_bias,
    p_out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    FINE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOIN: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs that share weights are neighbours; the last of them takes the `TAIL` rows that fill no whole tile."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    tiles = tl.cdiv(rows, BLOCK_M)
    number = tl.program_id(0) % tiles
    o_n = (tl.program_id(0) // tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    if TAIL:  # noqa: SIM102, a choice of the compiler around one of the program
        if number == tiles - 1:
            o_m = number * BLOCK_M + tl.arange(0, TAIL)
            _int8_tile(
                p_codes,
                p_token_scale,
                p_base,
                p_refinement,
                p_scale,
                p_bias,
                p_out,
                rows,
                outputs,
                o_m,
                o_n,
                INPUTS,
                GROUPS,
                STEP,
                FINE,
                BIAS,
                ADD,
                TAIL,
                BLOCK_N,
                JOIN,
                ASM,
            )
            return
    o_m = number * BLOCK_M + tl.arange(0, BLOCK_M)
    _int8_tile(
        p_codes,
        p_token_scale,
        p_base,
        p_refinement,
        p_scale,
        p_bias,
        p_out,
        rows,
        outputs,
        o_m,
        o_n,
        INPUTS,
        GROUPS,
        STEP,
        FINE,
        BIAS,
        ADD,
        BLOCK_M,
        BLOCK_N,
        JOIN,
        ASM,
    )


@triton.jit
def _int8_tile(
    p_codes,
    p_token_scale,
    p_base,
    p_refinement,
    p_scale,
    p_bias,
    p_out,
    rows,
    outputs,
    o_m,
    o_n,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    FINE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOIN: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows `o_m` `[BLOCK_M]` of outputs `o_n` `[BLOCK_N]`, summed as `[BLOCK_N, BLOCK_M]`."""
    HALF: tl.constexpr = INPUTS // 2
    BYTES: tl.constexpr = STEP // 2
    STEPS: tl.constexpr = INPUTS // STEP
    STEPS_PER_GROUP: tl.constexpr = STEPS // GROUPS

    # Rows past the end repeat the last one: a clamp before the loop instead of masks inside.
    row = tl.minimum(o_m, rows - 1).to(tl.int64)
    output = tl.minimum(o_n, outputs - 1).to(tl.int64)
    o_k = tl.arange(0, BYTES)
    if JOIN:
        o_i = tl.arange(0, STEP)
        o_codes = o_i % BYTES + (o_i // BYTES) * HALF
    else:
        o_codes = o_k
    p_codes += (row * INPUTS)[None, :] + o_codes[:, None]  # [STEP or BYTES, BLOCK_M]
    o_weight = (output * HALF)[:, None] + o_k[None, :]  # [BLOCK_N, BYTES]
    p_base += o_weight
    p_refinement += o_weight
    p_scale += output * GROUPS

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Loaded a step ahead: the compiler does not prefetch what feeds no product.
    scale = tl.load(p_scale).to(tl.float32)
    for step in range(STEPS):
        base = tl.load(p_base)
        refinement = tl.load(p_refinement) if FINE else base
        next_scale = tl.load(p_scale + tl.minimum((step + 1) // STEPS_PER_GROUP, GROUPS - 1)).to(tl.float32)
        even = _low(base, refinement, FINE, ASM)
        odd = _high(base, refinement, FINE, ASM)
        if JOIN:
            # Even inputs, then odd ones: in registers only the numbering of what a thread holds.
            codes = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [BLOCK_N, STEP])
            sums = tl.dot(codes, tl.load(p_codes), out_dtype=tl.int32)
        else:
            sums = tl.dot(even, tl.load(p_codes), out_dtype=tl.int32)
            sums = tl.dot(odd, tl.load(p_codes + HALF), acc=sums, out_dtype=tl.int32)
        total = tl.fma(sums.to(tl.float32), tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_M]), total)
        scale = next_scale
        p_base += BYTES
        p_refinement += BYTES
        p_codes += BYTES

    # Codes were 16 * q4 (+ qr), so the scale is a sixteenth; a power of two changes no digit.
    m_m, m_n = o_m < rows, o_n < outputs
    value = tl.trans(total) * (tl.load(p_token_scale + o_m, mask=m_m) * 0.0625)[:, None]
    if BIAS:
        value += tl.load(p_bias + o_n, mask=m_n)[None, :]
    p_value = p_out + o_m.to(tl.int64)[:, None] * outputs + o_n[None, :]
    m_value = m_m[:, None] & m_n[None, :]
    if ADD:
        value += tl.load(p_value, mask=m_value)
    tl.store(p_value, value, mask=m_value)


# Unpacking. With offset nibbles the byte `base << 4 | refinement` is `16 * q4 + qr + 136`, at least 8 because no -8
# stands beside a negative refinement. So 8 can be taken from four bytes at once without a borrow, and turning over the
# highest bits takes the other 128: signed codes, and no correction of the sums. Without refinement the turn alone
# leaves `16 * q4`.


@triton.jit
def _low(base, refinement, FINE: tl.constexpr, ASM: tl.constexpr):
    """uint8 bytes of the planes -> int8 codes `16 * q4 + qr`, or `16 * q4`, of their low nibbles: even inputs."""
    if not ASM:
        return _compose(base & 15, refinement & 15, FINE)
    if FINE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, mask;
            mov.b32 mask, 0xF0F0F0F0;
            shl.b32 t, $1, 4;
            lop3.b32 t, mask, t, $2, 0xCA;
            sub.u32 t, t, 0x08080808;
            xor.b32 $0, t, 0x80808080;
            }""",
            "=r,r,r",
            [base, refinement],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        shl.b32 t, $1, 4;
        lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;
        }""",
        "=r,r",
        [base],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _high(base, refinement, FINE: tl.constexpr, ASM: tl.constexpr):
    """The same of the high nibbles: odd inputs."""
    if not ASM:
        return _compose(base >> 4, refinement >> 4, FINE)
    if FINE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, mask;
            mov.b32 mask, 0xF0F0F0F0;
            shr.u32 t, $2, 4;
            lop3.b32 t, mask, $1, t, 0xCA;
            sub.u32 t, t, 0x08080808;
            xor.b32 $0, t, 0x80808080;
            }""",
            "=r,r,r",
            [base, refinement],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;",
        "=r,r",
        [base],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _compose(base, refinement, FINE: tl.constexpr):
    """What the inline assembly computes, for the interpreter: nibbles -> int8 codes."""
    code = base.to(tl.int32) * 16 - 128
    if FINE:
        code += refinement.to(tl.int32) - 8
    return code.to(tl.int8)
