"""Acceptance on the device: interpreted, against its twin and worked rounds."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType

import pytest
import torch

from bitnest_format.kernels import accept, plain_accept
from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.kernels.operands import Best

EITHER = pytest.mark.parametrize("module", [accept, plain_accept], ids=["kernel", "twin"])
FAR = 10_000
RING = 7
PENDING = 40


def _state(drafts: list[int], position: int = 100, committed: int = 0) -> DecodeState:
    state = DecodeState.empty(RING)
    state.position.fill_(position)
    state.committed.fill_(committed)
    state.tokens[: len(drafts) + 1] = torch.tensor([PENDING, *drafts])
    return state


def _best(choices: list[int], blocks: int = 5, seed: int = 0) -> Best:
    """Random blocks, the largest of each row holding its choice."""
    value = torch.randn(len(choices), blocks, generator=torch.Generator().manual_seed(seed))
    index = torch.arange(blocks, dtype=torch.int32).repeat(len(choices), 1) + 1000
    index[torch.arange(len(choices)), value.argmax(dim=1)] = torch.tensor(choices, dtype=torch.int32)
    return Best(value, index)


def _assert_same(found: DecodeState, expected: DecodeState) -> None:
    for field in fields(DecodeState):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name


@EITHER
def test_accept_greedy_keeps_the_drafts_that_agree(module: ModuleType) -> None:
    state = _state([11, 12, 13, 14], committed=5)
    module.accept_greedy(_best([11, 12, 99, 14, 15]), state, 4, FAR)
    assert state.tokens[:5].tolist() == [99, 11, 12, 13, 14]
    assert state.position.item() == 103
    assert state.committed.item() == 8
    assert state.ring.tolist() == [99, 0, 0, 0, 0, 11, 12]
    assert state.histogram.tolist() == [0, 0, 1, *[0] * 14]
    assert (state.rounds.item(), state.broken.item()) == (1, 0)


@EITHER
@pytest.mark.parametrize(
    ("choices", "kept"),
    [([11, 12, 13], 2), ([0, 12, 13], 0), ([11, 0, 13], 1)],
    ids=["all", "none", "one"],
)
def test_accept_greedy_counts_the_prefix(module: ModuleType, choices: list[int], kept: int) -> None:
    state = _state([11, 12])
    module.accept_greedy(_best(choices), state, 2, FAR)
    assert state.ring[: kept + 2].tolist() == [*[11, 12][:kept], choices[kept], 0]
    assert state.tokens[0].item() == choices[kept]
    assert state.position.item() == 101 + kept
    assert state.histogram.argmax().item() == kept


@EITHER
def test_accept_greedy_without_drafts_is_plain_decoding(module: ModuleType) -> None:
    state = _state([])
    module.accept_greedy(_best([21]), state, 0, FAR)
    assert (state.tokens[0].item(), state.ring[0].item(), state.position.item()) == (21, 21, 101)


@EITHER
@pytest.mark.parametrize(("limit", "taken"), [(104, 4), (103, 3), (101, 1), (100, 0), (90, 0)])
def test_position_stays_within_the_limit(module: ModuleType, limit: int, taken: int) -> None:
    state = _state([11, 12, 13])
    before = _state([11, 12, 13])
    module.accept_greedy(_best([11, 12, 13, 14]), state, 3, limit)
    if taken == 0:
        _assert_same(state, before)
        return
    assert state.position.item() == 100 + taken
    assert state.ring[: taken + 1].tolist() == [*[11, 12, 13, 14][:taken], 0]
    assert state.tokens[0].item() == 10 + taken
    assert state.histogram[taken - 1].item() == 1


@EITHER
def test_equal_logits_give_the_lowest_token(module: ModuleType) -> None:
    value = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -5.0, 0.0]])
    index = torch.tensor([[1, 30, 20, 2], [9, 8, 3, 10]], dtype=torch.int32)
    state = _state([20])
    module.accept_greedy(Best(value, index), state, 1, FAR)
    assert state.ring[:2].tolist() == [20, 8]


@EITHER
@pytest.mark.parametrize("row", [0, 2])
def test_nan_is_noted_for_good(module: ModuleType, row: int) -> None:
    best, state = _best([11, 12, 13]), _state([11, 12])
    best.value[row, 3] = -torch.nan
    module.accept_greedy(best, state, 2, FAR)
    assert state.broken.item() == 1
    module.accept_greedy(_best([11, 12, 13]), state, 2, FAR)
    assert state.broken.item() == 1
    state = _state([])
    module.stage_draft(best, state, 0)
    assert state.broken.item() == int(row == 0)


@EITHER
@pytest.mark.parametrize("step", [0, 1, 15])
def test_stage_draft_writes_its_place_alone(module: ModuleType, step: int) -> None:
    state = _state([11, 12])
    expected = state.tokens.clone()
    expected[step + 1] = 77
    module.stage_draft(_best([77, 5]), state, step)
    assert torch.equal(state.tokens, expected)
    assert state.position.item() == 100


@EITHER
def test_accept_synthetic_follows_the_uniform_numbers(module: ModuleType) -> None:
    uniforms = torch.full((40,), 0.9)
    uniforms[[0, 1, 3]] = 0.1  # round 0: two drafts stand, the fourth comes too late
    uniforms[16:20] = 0.1  # round 1: all four
    uniforms[33] = 0.1  # round 2 begins at 32: none
    uniforms[8:11] = 0.1  # round 3 begins at 48 % 40: three
    state = _state([11, 12, 13, 14])
    for kept in (2, 4, 0, 3):
        before = int(state.committed)
        module.accept_synthetic(_best([51, 52, 53, 54, 55]), state, 4, uniforms, 0.5, FAR)
        assert int(state.committed) - before == kept + 1
        assert state.tokens[0].item() == 51 + kept
    assert state.histogram[:5].tolist() == [1, 0, 1, 1, 1]
    assert state.position.item() == 100 + 13


@EITHER
def test_accept_synthetic_can_hold_its_position(module: ModuleType) -> None:
    state = _state([11, 12])
    module.accept_synthetic(_best([51, 52, 53]), state, 2, torch.zeros(3), 0.5, FAR, hold=True)
    assert (state.position.item(), state.committed.item(), state.rounds.item()) == (100, 3, 1)
    assert state.ring[:4].tolist() == [11, 12, 53, 0]


@pytest.mark.parametrize("blocks", [1, 64, 1500])
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_rounds_equal_the_twin(gamma: int, blocks: int) -> None:
    found, expected = _state([]), _state([])
    uniforms = torch.rand(29, generator=torch.Generator().manual_seed(1))
    for number in range(4):
        best = _best(list(range(10, 11 + gamma)), blocks, seed=number)
        drafts = torch.arange(10, 10 + gamma, dtype=torch.int32)
        drafts[number:] += 1
        for state, module in ((found, accept), (expected, plain_accept)):
            state.tokens[1 : gamma + 1] = drafts
            if number == 3:
                module.accept_synthetic(best, state, gamma, uniforms, 0.7, 120)
            else:
                module.accept_greedy(best, state, gamma, 120)
                module.stage_draft(best, state, number)
        _assert_same(found, expected)
