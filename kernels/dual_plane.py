"""Products of a few INT8 rows with a nested weight: one plane for a draft, both for a target.

The planes are read as they are stored, eight offset nibbles `u = q + 8` to a word. One mask turns the four low (even)
nibbles of a base word, or the four high (odd) ones, into bytes `16 * u4`; OR-ing in the refinement's nibbles gives
`16 * u4 + ur = composed + 136`, still an unsigned byte. `dp4a` multiplies four such bytes by four activation codes, so
a word costs two of them a row, and what the offset added is subtracted with the published sum of each run's codes.
Sums over 32 inputs are exact integers; each is converted once, multiplied by its group's scale, and added in float32 in
one order that the tile alone decides. The number of rows only repeats that, so a row's result never depends on it.

Letters: `M` rows, `O` outputs, `W` words a row and plane, `G` groups, `C` runs of four words (32 inputs).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code=assignment

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnest_format.kernels.dual_plane_mma import ARGMAX, GATE_UP, PLAIN, ROWS, TOKENS, dual_plane_mma_kernel
from bitnest_format.kernels.launch import features
from bitnest_format.kernels.operands import RUN, Activations, Best, DualPlaneWeight, View
from bitnest_format.kernels.primitives import release_dependents, wait_for_inputs

WORDS_PER_RUN = RUN // 8
# What the offsets of the nibbles add to a code: 16 * 8 for the base plane, 8 more for the refinement.
DRAFT_OFFSET = tl.constexpr(128)
TARGET_OFFSET = tl.constexpr(136)

# Words that one warp loads at a time, 16 bytes a thread.
LEAST_WORDS = 128
LONG_ROW = 1024
ARGMAX_ROWS = 8
MANY_OUTPUTS = 12288


@dataclass(frozen=True, slots=True)
class Tile:
    """How `dp4a` walks: weight rows and words a program handles at a time, its warps, its loads in flight.

    `ahead`: the next words are loaded while the present ones are multiplied. All of it decides the order of float
    additions, so the tiles of the target belong to what a version of this package computes.
    """

    rows: int
    words: int
    warps: int
    ahead: bool


@dataclass(frozen=True, slots=True)
class MmaTile:
    """How tensor cores walk: warps that share 16 weight rows, groups that each fetches at a time."""

    warps: int
    batch: int


def tile(weight: DualPlaneWeight, view: View) -> Tile | MmaTile:
    """The way a weight is walked; never a question of how many rows it is multiplied with.

    Tensor cores take the target's large weights, where verification gains more than decoding by single rows loses.
    Measured in whole passes by benchmarks/gpu_tiles.py; see benchmarks/gpu-log.md.
    """
    outputs, words = weight.base.shape
    many, long = outputs > MANY_OUTPUTS, words >= LONG_ROW
    if view == "target":
        if weight.scale_pairs is not None and (many or long):
            return MmaTile(4, 8) if long else MmaTile(2, 8)
        chosen = Tile(2, 256, 1, False) if long else Tile(8, 512, 4, True)
    elif long:
        chosen = Tile(8, 512, 4, True)
    else:
        chosen = Tile(4, 256, 2, True) if many else Tile(4, 512, 4, True)
    used = min(chosen.words, max(LEAST_WORDS, 1 << (words - 1).bit_length()))
    return replace(chosen, words=used, warps=min(chosen.warps, used // LEAST_WORDS))


def dual_plane_linear(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, *, add: bool = False
) -> None:
    """`out[:rows] = (codes * scale) @ W.T + bias`, added to what stands there where `add`.

    `out` float32 `[R, O]`. Products are those of `reference_linear.nested_linear`; groups are added in another order.
    """
    _launch(acts, weight, view, rows, PLAIN.value, out, None, add=add)


def dual_plane_gate_up(acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int) -> None:
    """`out[:rows] = silu(gate) * up` for a weight whose rows alternate gate and up: `out` float32 `[R, O / 2]`."""
    _launch(acts, weight, view, rows, GATE_UP.value, out, None)


def dual_plane_argmax(acts: Activations, weight: DualPlaneWeight, view: View, best: Best, rows: int) -> None:
    """The largest output of every block of outputs and its index, the first of equals."""
    _launch(acts, weight, view, rows, ARGMAX.value, best.value, best.index)


def launch_linear(
    acts: Activations, weight: DualPlaneWeight, view: View, out: Tensor, rows: int, walk: Tile | MmaTile
) -> None:
    """`dual_plane_linear` by a walk that the caller chooses, to measure or to test it."""
    _launch(acts, weight, view, rows, PLAIN.value, out, None, chosen=walk)


def argmax_blocks(outputs: int) -> int:
    """Blocks of the outputs: the second size of the `Best` that `dual_plane_argmax` writes, for either view."""
    return -(-outputs // ARGMAX_ROWS)


def _launch(
    acts: Activations,
    weight: DualPlaneWeight,
    view: View,
    rows: int,
    epilogue: int,
    out: Tensor,
    index: Tensor | None,
    *,
    add: bool = False,
    chosen: Tile | MmaTile | None = None,
) -> None:
    """Multiply and finish by an epilogue; `index` belongs to `ARGMAX`, `add` to `PLAIN`."""
    if weight.base.numel() >= 1 << 31:
        raise ValueError(f"a weight of {weight.outputs} x {weight.inputs}: its planes have 2^31 words or more")
    walk = chosen or tile(weight, view)
    use = features(weight.base.device)
    if epilogue == ARGMAX.value and isinstance(walk, Tile):
        # Blocks are the same for both views: one must not leave results that the other does not overwrite.
        walk = replace(walk, rows=ARGMAX_ROWS)
    planes = (weight.base, weight.refinement if view == "target" else weight.base)
    bias = weight.bias if weight.bias is not None else weight.scale
    options: dict[str, Any] = {
        "W": weight.base.shape[1],
        "G": weight.scale.shape[1],
        "TARGET": view == "target",
        "EPILOGUE": epilogue,
        "BIAS": weight.bias is not None,
        "ADD": add,
        "ASM": use.asm,
        "PDL": use.pdl,
        "num_warps": walk.warps,
        **({"launch_pdl": True} if use.pdl else {}),
    }
    # Tensor cores have eight columns, one for each row; `dp4a` takes any number.
    most = rows if isinstance(walk, Tile) else TOKENS
    for first in range(0, rows, most):
        some = slice(first, first + most)
        operands = (acts.codes[some].view(torch.int32), acts.scale[some], acts.sums[some], *planes)
        results = (out[some], out[some] if index is None else index[some], weight.outputs, out.shape[1])
        options["M"] = min(most, rows - first)
        if isinstance(walk, Tile):
            dual_plane_kernel[(triton.cdiv(weight.outputs, walk.rows),)](
                *operands,
                weight.scale,
                bias,
                *results,
                BLOCK_O=walk.rows,
                BLOCK_W=walk.words,
                AHEAD=walk.ahead,
                **options,
            )
        else:
            assert weight.scale_pairs is not None
            dual_plane_mma_kernel[(triton.cdiv(weight.outputs, ROWS),)](
                *operands,
                weight.scale_pairs,
                bias,
                *results,
                S=weight.scale_pairs.shape[1],
                WARPS=walk.warps,
                BATCH=walk.batch,
                **options,
            )


@triton.jit
def dual_plane_kernel(
    codes, act_scale, sums, base, refinement, weight_scale, bias, out, index, outputs, out_stride,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, TARGET: tl.constexpr, EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_W: tl.constexpr, AHEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK_O` weight rows times `M` activation rows, over all words."""
    release_dependents(PDL)
    program = tl.program_id(0)
    places = program * BLOCK_O + tl.arange(0, BLOCK_O)
    # Rows past the last are computed as the last one again and not stored.
    rows = tl.minimum(places, outputs - 1)
    C: tl.constexpr = BLOCK_W // 4
    sums_by_run = ()
    for _ in tl.static_range(M):
        sums_by_run = sums_by_run + (tl.zeros((BLOCK_O, C), tl.float32),)  # noqa: RUF005
    if AHEAD:
        # Weights never change, so the first of them need not wait for the kernels before.
        b, r, s = _load_weights(base, refinement, weight_scale, rows, 0, W, G, TARGET, BLOCK_W)
        wait_for_inputs(PDL)
        for first in tl.range(0, W, BLOCK_W, num_stages=1):
            next_b, next_r, next_s = b, r, s
            if BLOCK_W < W:
                # Past the end the load is masked away.
                next_b, next_r, next_s = _load_weights(
                    base, refinement, weight_scale, rows, first + BLOCK_W, W, G, TARGET, BLOCK_W
                )
            sums_by_run = _accumulate(sums_by_run, codes, sums, b, r, s, first, W, M, TARGET, BLOCK_O, BLOCK_W, ASM)
            b, r, s = next_b, next_r, next_s
    else:
        wait_for_inputs(PDL)
        for first in tl.range(0, W, BLOCK_W, num_stages=1):
            b, r, s = _load_weights(base, refinement, weight_scale, rows, first, W, G, TARGET, BLOCK_W)
            sums_by_run = _accumulate(sums_by_run, codes, sums, b, r, s, first, W, M, TARGET, BLOCK_O, BLOCK_W, ASM)
    for m in tl.static_range(M):
        # The target's factor 1/16, and the draft's for its codes times 16, is exact.
        y = tl.sum(sums_by_run[m], 1) * (tl.load(act_scale + m) * 0.0625)
        if BIAS:
            y += tl.load(bias + rows)
        if EPILOGUE == PLAIN:
            at = out + m * out_stride + places
            if ADD:
                y += tl.load(at, mask=places < outputs, other=0.0)
            tl.store(at, y, mask=places < outputs)
        elif EPILOGUE == GATE_UP:
            gate, up = tl.split(tl.reshape(y, (BLOCK_O // 2, 2)))
            half = program * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
            tl.store(out + m * out_stride + half, gate / (1.0 + tl.exp(-gate)) * up, mask=2 * half < outputs)
        else:
            y = tl.where(places < outputs, y, float("-inf"))
            broken = tl.max((y != y).to(tl.int32), 0)
            y = tl.where(y != y, float("inf"), y)
            largest = tl.max(y, 0)
            first_of_equals = tl.min(tl.where(y == largest, places, outputs), 0)
            # A NaN must not be lost.
            largest = tl.where(broken != 0, float("nan"), largest)
            tl.store(out + m * out_stride + program, largest)
            tl.store(index + m * out_stride + program, first_of_equals)


@triton.jit
def _load_weights(
    base, refinement, weight_scale, rows, first, W: tl.constexpr, G: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Words `[BLOCK_O, BLOCK_W]` of both planes and the scale of every run `[BLOCK_O, BLOCK_W / 4]`."""
    RUNS_PER_GROUP: tl.constexpr = W // 4 // G
    words = first + tl.arange(0, BLOCK_W)
    runs = first // 4 + tl.arange(0, BLOCK_W // 4)
    at = rows[:, None] * W + words[None, :]
    inside = (words < W)[None, :]
    b = tl.load(base + at, mask=inside, other=0, eviction_policy="evict_first")
    r = b
    if TARGET:
        r = tl.load(refinement + at, mask=inside, other=0, eviction_policy="evict_first")
    s = tl.load(
        weight_scale + rows[:, None] * G + (runs // RUNS_PER_GROUP)[None, :], mask=(runs < W // 4)[None, :], other=0.0
    )
    return b, r, s.to(tl.float32)


@triton.jit
def _accumulate(
    sums_by_run, codes, sums, b, r, s, first, W: tl.constexpr, M: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add `scale * (exact sum of a run)` to the float sums of each row and run."""
    words = first + tl.arange(0, BLOCK_W)
    runs = first // 4 + tl.arange(0, BLOCK_W // 4)
    grown = ()
    for m in tl.static_range(M):
        even = tl.load(codes + m * 2 * W + words, mask=words < W, other=0)
        odd = tl.load(codes + m * 2 * W + W + words, mask=words < W, other=0)
        run_sum = tl.load(sums + m * (W // 4) + runs, mask=runs < W // 4, other=0)
        if TARGET:
            product = dot_target(b, r, even[None, :], odd[None, :], ASM)
            offset = TARGET_OFFSET * run_sum
        else:
            product = dot_draft(b, even[None, :], odd[None, :], ASM)
            offset = DRAFT_OFFSET * run_sum
        exact = tl.sum(tl.reshape(product, (BLOCK_O, BLOCK_W // 4, 4)), 2) - offset[None, :]
        grown = grown + (sums_by_run[m] + exact.to(tl.float32) * s,)  # noqa: RUF005
    return grown


@triton.jit
def dot_target(b, r, even, odd, ASM: tl.constexpr):
    """Per element: the eight weights `16 * u4 + ur` of a word pair times eight codes, summed to int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, low, high;
            shl.b32 t, $1, 4;
            lop3.b32 low, t, $2, 0xF0F0F0F0, 0xE4;
            shr.u32 t, $2, 4;
            lop3.b32 high, $1, t, 0xF0F0F0F0, 0xE4;
            mov.b32 t, 0;
            dp4a.u32.s32 t, low, $3, t;
            dp4a.u32.s32 $0, high, $4, t;
            }""",
            "=r,r,r,r,r", [b, r, even, odd], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = b * 0 + even * 0
        for byte in tl.static_range(4):
            low = ((b >> (8 * byte)) & 15) * 16 + ((r >> (8 * byte)) & 15)
            high = ((b >> (8 * byte + 4)) & 15) * 16 + ((r >> (8 * byte + 4)) & 15)
            total += low * ((even << (24 - 8 * byte)) >> 24) + high * ((odd << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def dot_draft(b, even, odd, ASM: tl.constexpr):
    """Per element: the eight weights `16 * u4` of a base word times eight codes, summed to int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, low, high;
            shl.b32 t, $1, 4;
            and.b32 low, t, 0xF0F0F0F0;
            and.b32 high, $1, 0xF0F0F0F0;
            mov.b32 t, 0;
            dp4a.u32.s32 t, low, $2, t;
            dp4a.u32.s32 $0, high, $3, t;
            }""",
            "=r,r,r,r", [b, even, odd], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return dot_target(b, b * 0, even, odd, ASM)
