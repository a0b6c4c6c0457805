"""Token bookkeeping on the device, so that rounds follow each other without the host.

One program each: it merges the head's blocks for all rows at once, then every thread holds the few numbers that decide.
Twins with the same names, arguments and results, which define them: `plain_accept`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bitnest_format.kernels import plain_accept
from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.kernels.launch import features
from bitnest_format.kernels.operands import Best
from bitnest_format.kernels.primitives import release_dependents, wait_for_inputs
from bitnest_format.kernels.ranking import LOWEST, rank, ranked_token, ranked_value

_UNIFORMS_PER_ROUND = tl.constexpr(plain_accept.UNIFORMS_PER_ROUND)


def stage_draft(best: Best, state: DecodeState, step: int) -> None:
    """The best token of row 0 becomes draft `step`, counted from 0: `state.tokens[step + 1]`."""
    _stage_kernel[(1,)](best.value, best.index, state.tokens, state.broken, step, **_launch(best, rows=1))


def accept_greedy(best: Best, state: DecodeState, gamma: int, limit: int) -> None:
    """Keep the drafts that are the target's own choices, up to the first that is not, and the choice after them.

    Row `i` of `best` holds the target's choice after `tokens[i]`, of `gamma + 1` rows. The kept drafts and that choice
    are committed; the choice is the next pending token.
    """
    _accept(best, state, gamma, None, 0.0, limit, hold=False)


def accept_synthetic(
    best: Best, state: DecodeState, gamma: int, uniforms: Tensor, rate: float, limit: int, hold: bool = False
) -> None:
    """As `accept_greedy`, but chance decides: a benchmark of random weights with a stated rate of acceptance.

    Draft `i` of round `n` stands where `uniforms[(16 n + i) % N]`, float32 `[N]`, is below `rate` (and all drafts
    before it stand). With `hold` the position stays, so that every round has the same context length.
    """
    _accept(best, state, gamma, uniforms, rate, limit, hold)


def _accept(
    best: Best, state: DecodeState, gamma: int, uniforms: Tensor | None, rate: float, limit: int, hold: bool
) -> None:
    _accept_kernel[(1,)](
        best.value,
        best.index,
        state.position,
        state.tokens,
        state.ring,
        state.committed,
        state.histogram,
        state.rounds,
        state.broken,
        uniforms,
        rate,
        limit,
        GAMMA=gamma,
        RING=state.ring.shape[0],
        UNIFORMS=1 if uniforms is None else uniforms.shape[0],
        HOLD=hold,
        **_launch(best, gamma + 1),
    )


def _launch(best: Best, rows: int) -> dict[str, Any]:
    """Launch options and the merge's constants: a tile is four blocks a thread, for every row.

    Tiles of more than nine rows would not fit into the registers of 16 warps.
    """
    blocks = best.value.shape[1]
    warps = 16 if rows <= 9 else 8
    found = features(best.value.device)
    return {
        "BLOCKS": blocks,
        "ROWS": rows,
        "ROOM": triton.next_power_of_2(rows),
        "TILE": min(triton.next_power_of_2(blocks), 4 * 32 * warps),
        "PDL": found.pdl,
        "num_warps": warps,
        **({"launch_pdl": True} if found.pdl else {}),
    }


@triton.jit(do_not_specialize=["step"])
def _stage_kernel(
    p_value,
    p_index,
    p_tokens,
    p_broken,
    step,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    choices, broken = _merge(p_value, p_index, BLOCKS, ROWS, ROOM, TILE)
    tl.store(p_tokens + step + 1, tl.max(choices, axis=0))
    tl.store(p_broken, 1, mask=broken)


@triton.jit(do_not_specialize=["limit"])
def _accept_kernel(
    p_value,
    p_index,
    p_position,
    p_tokens,
    p_ring,
    p_committed,
    p_histogram,
    p_rounds,
    p_broken,
    p_uniforms,
    rate,
    limit,
    GAMMA: tl.constexpr,
    RING: tl.constexpr,
    UNIFORMS: tl.constexpr,
    HOLD: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    o_row = tl.arange(0, ROOM)
    m_draft = o_row < GAMMA
    # Read before the merge, whose barrier keeps every thread's reads before any thread's writes.
    position = tl.load(p_position)
    committed = tl.load(p_committed)
    rounds = tl.load(p_rounds)
    drafts = tl.load(p_tokens + 1 + o_row, mask=m_draft, other=0)
    choices, broken = _merge(p_value, p_index, BLOCKS, ROWS, ROOM, TILE)
    if p_uniforms is None:
        stands = m_draft & (drafts == choices)
    else:
        o_uniform = (rounds * _UNIFORMS_PER_ROUND + o_row) % UNIFORMS
        stands = m_draft & (tl.load(p_uniforms + o_uniform, mask=m_draft, other=1.0) < rate)
    count = tl.min(tl.where(stands, ROOM, o_row), axis=0)
    taken = tl.minimum(count + 1, limit - position)
    advances = taken > 0
    kept = tl.maximum(taken - 1, 0)
    following = tl.max(tl.where(o_row == kept, choices, -1), axis=0)
    text = tl.where(o_row < kept, drafts, choices)
    # Where a round commits more than the ring holds, only the newest are written, each slot once.
    tl.store(p_ring + (committed + o_row) % RING, text, mask=(o_row < taken) & (o_row >= taken - RING))
    tl.store(p_tokens, following, mask=advances)
    tl.store(p_committed, committed + taken, mask=advances)
    tl.store(p_histogram + kept, tl.load(p_histogram + kept) + 1, mask=advances)
    tl.store(p_rounds, rounds + 1, mask=advances)
    if not HOLD:
        tl.store(p_position, position + taken, mask=advances)
    tl.store(p_broken, 1, mask=broken)


@triton.jit
def _merge(p_value, p_index, BLOCKS: tl.constexpr, ROWS: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr):
    """The best token of each row `[ROOM]`, -1 past `ROWS`, and whether any of them is NaN."""
    o_row = tl.arange(0, ROOM)
    o_block = tl.arange(0, TILE)
    best = tl.full([ROOM, TILE], LOWEST, tl.int64)
    for first in range(0, BLOCKS, TILE):
        m_blocks = (o_row < ROWS)[:, None] & (first + o_block < BLOCKS)[None, :]
        o_best = o_row[:, None] * BLOCKS + first + o_block[None, :]
        value = tl.load(p_value + o_best, mask=m_blocks, other=0.0)
        token = tl.load(p_index + o_best, mask=m_blocks, other=0)
        best = tl.maximum(best, tl.where(m_blocks, rank(value, token), LOWEST))
    best = tl.max(best, axis=1)
    value = ranked_value(best)
    inside = o_row < ROWS
    broken = tl.max((inside & (value != value)).to(tl.int32), axis=0) > 0
    return tl.where(inside, ranked_token(best), -1), broken
