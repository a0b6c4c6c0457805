"""Sampling by tensor operations: the same decisions as on the host, and the same distribution as the target's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.runtime import sampling
from bitnest_format.runtime.device_sampling import DeviceSampling, choose, probabilities
from bitnest_format.runtime.sampling import Sampling, SamplingSettings

CPU = torch.device("cpu")
VOCABULARY = 37
LIMIT = 10_000
SETTINGS = [
    SamplingSettings(temperature=1.0, seed=3),
    SamplingSettings(temperature=0.7, top_k=5, seed=4),
    SamplingSettings(temperature=1.5, top_p=0.8, seed=5),
    SamplingSettings(temperature=1.0, top_k=20, top_p=0.9, seed=6),
]
IDS = ["plain", "top-k", "top-p", "both"]


def _logits(rows: int, seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def _committed(state: DecodeState, since: int = 0) -> list[int]:
    ring = state.ring.tolist()
    return [ring[number % len(ring)] for number in range(since, int(state.committed))]


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_equal_logits_and_seeds_give_the_tokens_of_the_host(gamma: int, settings: SamplingSettings) -> None:
    host, device = Sampling(settings), DeviceSampling(settings, VOCABULARY, CPU)
    state = DecodeState.empty(64)
    accepted = []
    for number in range(12):
        drafts = _logits(gamma, seed=number)
        # Near the drafts' own, so that some drafts stand.
        targets = torch.cat((drafts + 0.3 * _logits(gamma, seed=100 + number), _logits(1, seed=200 + number)))
        drafted, proposals = [], []
        device.draw(gamma)
        for step in range(gamma):
            token, proposal = host.propose(drafts[step])
            drafted.append(token)
            proposals.append(proposal)
            device.propose(drafts[step : step + 1], state, step)
        assert state.tokens[1 : gamma + 1].tolist() == drafted
        count, following = host.accept(drafted, proposals, targets)
        before = int(state.committed)
        device.accept(targets, state, gamma, LIMIT)
        assert _committed(state, before) == [*drafted[:count], following]
        assert int(state.tokens[0]) == following
        accepted.append(count)
    assert int(state.rounds) == 12
    assert int(state.position) == int(state.committed) == 12 + sum(accepted)
    assert state.histogram.tolist() == [accepted.count(count) for count in range(17)]
    assert int(state.broken) == 0
    if gamma == 8:
        assert 0 < sum(accepted) < 12 * gamma


def test_a_seed_starts_again() -> None:
    device = DeviceSampling(SETTINGS[0], VOCABULARY, CPU)

    def tokens(seed: int) -> list[int]:
        state = DecodeState.empty(64)
        device.restart(seed)
        for number in range(10):
            device.draw(0)
            device.accept(_logits(1, seed=number), state, 0, LIMIT)
        return _committed(state)

    assert tokens(1) == tokens(1) != tokens(2)


def test_sampled_tokens_are_distributed_as_the_target() -> None:
    """DC-3: p = [.6, .3, .1] from drafts of q = [.1, .3, .6]."""
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.1, 0.3, 0.6]])
    draws = 6000
    device = DeviceSampling(SamplingSettings(temperature=1.0, seed=1), 3, CPU)
    state = DecodeState.empty(16)
    targets = torch.cat((p, p)).log()
    counts, stood = [0, 0, 0], 0
    for _ in range(draws):
        before = int(state.committed)
        device.draw(1)
        device.propose(q.log(), state, 0)
        device.accept(targets, state, 1, LIMIT * 10)
        tokens = _committed(state, before)
        counts[tokens[0]] += 1
        stood += len(tokens) - 1
    for count, probability in zip(counts, p[0].tolist(), strict=True):
        assert abs(count - draws * probability) < 3 * math.sqrt(draws * probability * (1 - probability))
    assert abs(stood - draws / 2) < 3 * math.sqrt(draws / 4)


def test_the_token_after_a_fallen_draft_comes_from_the_rest() -> None:
    """DC-3: after token 2 fell the only token with p > q is 0."""
    device = DeviceSampling(SamplingSettings(temperature=1.0), 3, CPU)
    for number in range(20):
        state = DecodeState.empty(16)
        device.propose(torch.tensor([[0.1, 0.3, 0.6]]).log(), state, 0)
        state.tokens[1] = 2
        # The draft falls where its uniform times q(2) is p(2) or more: above 1 / 6.
        device.uniforms[1:3] = torch.tensor([0.17 + 0.04 * number, number / 20])
        device.accept(torch.tensor([[0.6, 0.3, 0.1]]).log().expand(2, -1), state, 1, LIMIT)
        assert _committed(state) == [0]


def test_equal_distributions_keep_every_draft() -> None:
    device = DeviceSampling(SETTINGS[3], VOCABULARY, CPU)
    state = DecodeState.empty(64)
    logits = _logits(5, seed=0)
    device.draw(4)
    for step in range(4):
        device.propose(logits[step : step + 1], state, step)
    device.accept(logits, state, 4, LIMIT)
    assert int(state.committed) == 5


def test_a_round_keeps_to_the_limit() -> None:
    device = DeviceSampling(SETTINGS[0], VOCABULARY, CPU)
    logits = _logits(5, seed=0)
    state = DecodeState.empty(64)
    state.position.fill_(7)
    for limit, expected in ((9, 2), (9, 2), (10, 3)):
        device.draw(4)
        for step in range(4):
            device.propose(logits[step : step + 1], state, step)
        drafts = state.tokens[1:].tolist()
        device.accept(logits, state, 4, limit)
        assert int(state.committed) == expected
        assert int(state.position) == 7 + expected
    assert int(state.tokens[0]) == drafts[0]
    assert int(state.rounds) == 2


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_not_a_number_is_noted_and_leaves_the_vocabulary_alone(settings: SamplingSettings) -> None:
    device = DeviceSampling(settings, VOCABULARY, CPU)
    broken = torch.full((2, VOCABULARY), float("nan"))
    for step in ("propose", "accept"):
        state = DecodeState.empty(16)
        device.draw(1)
        device.propose(broken[:1] if step == "propose" else _logits(1, 0), state, 0)
        device.accept(broken if step == "accept" else _logits(2, 1), state, 1, LIMIT)
        assert int(state.broken) == 1
        assert bool((state.tokens >= 0).all() and (state.tokens < VOCABULARY).all())


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_nothing_is_read_back(settings: SamplingSettings) -> None:
    """Tensors without memory refuse whatever would wait for a value."""
    meta = torch.device("meta")
    device = DeviceSampling(settings, VOCABULARY, meta)
    state = DecodeState.empty(16, meta)
    logits = torch.empty(16, VOCABULARY, device=meta)
    device.draw(2)
    for step in range(2):
        device.propose(logits, state, step)
    device.accept(logits, state, 2, LIMIT)


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_probabilities_of_rows_are_those_of_each_row(settings: SamplingSettings) -> None:
    logits = _logits(9, seed=2)
    logits[3] = logits[3, 0]
    rows = probabilities(logits, settings)
    for row, alone in zip(rows, logits, strict=True):
        torch.testing.assert_close(row, sampling.probabilities(alone, settings), rtol=1e-6, atol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.5, 0.99999999999])
def test_a_token_is_chosen_as_on_the_host(uniform: float) -> None:
    for weights in ([0.0, 1.0, 0.0, 3.0, 0.0], [1.0], [0.5, 0.5, 0.0]):
        row = torch.tensor(weights)
        assert int(choose(row, torch.tensor(uniform, dtype=torch.float64))) == sampling.choose(row, uniform)
