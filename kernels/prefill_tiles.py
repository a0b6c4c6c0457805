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
# Streaming multiprocessors that tiles are spread over: an H100 or H200.
PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of the int8 kernel computes: `rows` tokens by `outputs` outputs.

    `warps` and `stages` are launch options. `clocks` estimates a step of 128 inputs on one processor that is kept busy
    with such tiles; only the ratios between tiles matter.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    clocks: int


# Each group of four warps takes 64 outputs; none spills registers (tests compile them).
TILES = (
    Tile(rows=128, outputs=128, warps=8, stages=4, clocks=680),
    Tile(rows=128, outputs=64, warps=4, stages=4, clocks=340),
    Tile(rows=64, outputs=128, warps=8, stages=4, clocks=480),
    Tile(rows=64, outputs=64, warps=4, stages=4, clocks=240),
    Tile(rows=32, outputs=128, warps=8, stages=4, clocks=420),
    Tile(rows=32, outputs=64, warps=4, stages=4, clocks=200),
)


def candidates(rows: int, outputs: int, inputs: int) -> list[Tile]:
    """The tiles worth timing for a product, best estimate first; the shape is `[rows, inputs] x [inputs, outputs]`.

    Tiles that would be more than half empty are left out, except the smallest.
    """
    fitting = [tile for tile in TILES if tile.rows < 2 * rows] or [TILES[-1]]
    return sorted(fitting, key=lambda tile: estimate(tile, rows, outputs, inputs))


def estimate(tile: Tile, rows: int, outputs: int, inputs: int) -> float:
    """Clocks of a product with a tile: the fullest processor's tiles, one after another."""
    tiles = -(-rows // tile.rows) * -(-outputs // tile.outputs)
    return -(-tiles // PROCESSORS) * tile.clocks * (inputs / LONGEST_STEP)


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
