"""Twins of `accept` in plain torch: which token comes next, which drafts stand, and the records of it.

The head leaves the best logit of every block of the vocabulary. Here the blocks of a row are merged: the largest logit
wins, the lowest token among equals. A NaN wins over any number and sets `state.broken`.

A round commits at most `limit - position` tokens, so that `position` never passes `limit`. A round that would pass it
keeps fewer drafts; they are the target's own choices, so the text is the same. At the limit a round changes nothing but
`broken`: rounds that were launched before the host knew are harmless. The passes of a round write cache entries up to
`position + gamma`, so there must be room for `limit + gamma + 1` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.kernels.operands import Best

# Uniform numbers that a round of synthetic acceptance steps over, whatever gamma is.
UNIFORMS_PER_ROUND = 16


def stage_draft(best: Best, state: DecodeState, step: int) -> None:
    """The best token of row 0 becomes draft `step`, counted from 0: `state.tokens[step + 1]`."""
    state.tokens[step + 1] = _merge(best, state, 1)[0]


def accept_greedy(best: Best, state: DecodeState, gamma: int, limit: int) -> None:
    """Keep the drafts that are the target's own choices, up to the first that is not, and the choice after them.

    Row `i` of `best` holds the target's choice after `tokens[i]`, of `gamma + 1` rows. The kept drafts and that choice
    are committed; the choice is the next pending token.
    """
    choices = _merge(best, state, gamma + 1)
    drafts = state.tokens[1 : gamma + 1].tolist()
    _commit(state, drafts, choices, [draft == choice for draft, choice in zip(drafts, choices, strict=False)], limit)


def accept_synthetic(
    best: Best, state: DecodeState, gamma: int, uniforms: Tensor, rate: float, limit: int, hold: bool = False
) -> None:
    """As `accept_greedy`, but chance decides: a benchmark of random weights with a stated rate of acceptance.

    Draft `i` of round `n` stands where `uniforms[(16 n + i) % N]`, float32 `[N]`, is below `rate` (and all drafts
    before it stand). With `hold` the position stays, so that every round has the same context length.
    """
    choices = _merge(best, state, gamma + 1)
    first = int(state.rounds) * UNIFORMS_PER_ROUND
    drawn = uniforms[(first + torch.arange(gamma, device=uniforms.device)) % uniforms.shape[0]]
    stands = (drawn < torch.tensor(rate, dtype=torch.float32, device=uniforms.device)).tolist()
    position = state.position.clone()
    _commit(state, state.tokens[1 : gamma + 1].tolist(), choices, stands, limit)
    if hold:
        state.position.copy_(position)


def _merge(best: Best, state: DecodeState, rows: int) -> list[int]:
    """The best token of each row; notes a NaN."""
    tokens = []
    for value, index in zip(best.value[:rows].unbind(0), best.index[:rows].unbind(0), strict=True):
        nan = value.isnan()
        if bool(nan.any()):
            state.broken.fill_(1)
        winners = nan if bool(nan.any()) else value == value.max()
        tokens.append(int(index[winners].min()))
    return tokens


def _commit(state: DecodeState, drafts: list[int], choices: list[int], stands: list[bool], limit: int) -> None:
    """Commit the drafts before the first that does not stand, and the choice that follows them."""
    count = [*stands, False].index(False)
    taken = min(count + 1, limit - int(state.position))
    if taken <= 0:
        return
    kept = taken - 1
    for token in (*drafts[:kept], choices[kept]):
        state.ring[int(state.committed) % state.ring.shape[0]] = token
        state.committed.add_(1)
    state.tokens[0] = choices[kept]
    state.position.add_(taken)
    state.histogram[kept] += 1
    state.rounds.add_(1)
