"""How products of many rows are cut up, as pure functions of their shape; nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitnest_format.kernels.operands import RUN

Path = Literal["int8", "dequantize"]

# Weights in float16 that are multiplied while they still lie in a GPU's second-level cache: 16 MiB.
SCRATCH_WEIGHTS = 8 << 20
# Chunks of outputs are whole tiles of a library product.
CHUNK_OUTPUTS = 128
# The longest run of inputs summed in integers before the group's scale is applied.
LONGEST_STEP = 128
# Multiprocessors that tiles are spread over: an H100 or H200.
PROCESSORS = 132


# What fills no whole tile of rows goes to a narrower one, of at least this many.
SMALLEST_ROWS = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of the int8 kernel computes: `rows` tokens by `outputs` outputs, by `warps` warps.

    `stages`: how many steps' operands are on their way or in use at a time.
    """

    rows: int
    outputs: int
    warps: int
    stages: int


# Every four warps take 64 outputs, which is what one instruction takes. None spills registers.
TILES = (
    Tile(rows=128, outputs=64, warps=4, stages=3),
    Tile(rows=128, outputs=128, warps=8, stages=4),
    Tile(rows=64, outputs=64, warps=4, stages=4),
    Tile(rows=64, outputs=128, warps=8, stages=3),
    Tile(rows=32, outputs=64, warps=4, stages=4),
    Tile(rows=32, outputs=128, warps=8, stages=3),
)


def tail_rows(tile: Tile, rows: int) -> int:
    """The rows of the last tile where it is narrower than the others: a power of two that holds the rest; else 0."""
    rest = rows % tile.rows
    tail = max(SMALLEST_ROWS, 1 << (rest - 1).bit_length()) if rest else 0
    return tail if tail < tile.rows else 0


def candidates(rows: int, outputs: int, inputs: int) -> list[Tile]:
    """The tiles worth timing for a product, best estimate first; the shape is `[rows, inputs] x [inputs, outputs]`.

    Tiles that not even one of would be filled are left out, except the smallest.
    """
    fitting = [tile for tile in TILES if tile.rows <= max(rows, SMALLEST_ROWS)]
    return sorted(fitting, key=lambda tile: estimate(tile, rows, outputs, inputs))


def estimate(tile: Tile, rows: int, outputs: int, inputs: int) -> float:
    """Clocks of a product: the instructions of all tiles spread over the processors, and half a tile of unevenness."""
    whole = _clocks(tile.rows, tile.outputs)
    tail = tail_rows(tile, rows)
    column = -(-rows // tile.rows) * whole - (whole - _clocks(tail, tile.outputs) if tail else 0)
    work = -(-outputs // tile.outputs) * column / PROCESSORS
    return (work + whole / 2) * inputs / LONGEST_STEP


def _clocks(rows: int, outputs: int) -> float:
    """Clocks in which four schedulers issue one step of a tile, counted in machine code: unpacking, then scaling."""
    return outputs / 64 * (130 + 1.2 * rows)


def choose(rows: int, outputs: int, inputs: int, group_size: int = LONGEST_STEP) -> Path:
    """The faster way to a product of `rows` rows: planes multiplied as int8, or dequantized and left to the library.

    Groups that are no multiple of 64 inputs are rescaled too often for integers to pay.
    """
    del rows, outputs, inputs
    return "int8" if step_inputs(group_size) >= 2 * RUN else "dequantize"


def step_inputs(group_size: int) -> int:
    """Inputs summed in integers at a time: the largest power of two that divides a group, 32 to 128.

    Raises `ValueError` where a group is no multiple of 32.
    """
    if group_size % RUN:
        raise ValueError(f"groups of {group_size} inputs: not a multiple of {RUN}")
    return min(group_size & -group_size, LONGEST_STEP)


def chunk_outputs(outputs: int, inputs: int, scratch: int) -> int:
    """Outputs dequantized at a time into `scratch` weights of room: chunks of nearly equal size.

    Raises `ValueError` where the room does not hold one output.
    """
    room = scratch // inputs
    if not room:
        raise ValueError(f"scratch of {scratch} weights does not hold one output of {inputs} inputs")
    if room > CHUNK_OUTPUTS:
        room -= room % CHUNK_OUTPUTS
    chunks = -(-outputs // room)
    even = -(-outputs // chunks)
    return min(room, -(-even // CHUNK_OUTPUTS) * CHUNK_OUTPUTS)
