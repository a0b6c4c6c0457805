"""Choosing tokens and the rejection rule, as pure functions."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from bitnest_format.runtime.sampling import (
    Greedy,
    Sampling,
    SamplingSettings,
    accept_greedy,
    accept_sampled,
    choose,
    decider,
    probabilities,
    residual,
)

P = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)


@pytest.mark.parametrize(
    ("drafted", "target", "expected"),
    [
        ([], [7], (0, 7)),
        ([1, 2], [1, 2, 3], (2, 3)),
        ([1, 2], [1, 5, 3], (1, 5)),
        ([1, 2], [4, 2, 3], (0, 4)),
    ],
)
def test_accept_greedy(drafted: list[int], target: list[int], expected: tuple[int, int]) -> None:
    assert accept_greedy(drafted, target) == expected


def test_residual_after_rejection_of_the_last_token() -> None:
    assert residual(P, Q).tolist() == [1.0, 0.0, 0.0]


def test_residual_of_equal_distributions_is_the_distribution() -> None:
    assert torch.equal(residual(P, P), P)


def test_accept_sampled_draws_from_the_target() -> None:
    """p = [.6, .3, .1], q = [.1, .3, .6]: 20000 draws, within 3 sigma; accepted with sum of min(p, q) = 0.5."""
    draws = 20000
    uniforms = torch.rand(draws, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    counts: Counter[int] = Counter()
    accepted = 0
    for draft, decide, redraw in uniforms:
        token = choose(Q, draft)
        count, following = accept_sampled([token], [Q], [P, P], [decide, redraw])
        accepted += count
        counts[token if count else following] += 1
    for token, probability in enumerate(P.tolist()):
        sigma = (draws * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - draws * probability) <= 3 * sigma
    assert abs(accepted - 0.5 * draws) <= 3 * (draws * 0.25) ** 0.5


def test_accept_sampled_decides_exactly() -> None:
    # Token 2: p / q = 1/6. Token 0: p > q, so it always stands. Token 1: p = q.
    assert accept_sampled([2], [Q], [P, P], [0.16, 0.0]) == (1, 0)
    assert accept_sampled([2], [Q], [P, P], [0.17, 0.999]) == (0, 0)
    assert accept_sampled([0], [Q], [P, P], [0.999999, 0.95]) == (1, 2)
    assert accept_sampled([1], [Q], [P, P], [0.999999, 0.7]) == (1, 1)


def test_accept_sampled_stops_at_the_first_rejection() -> None:
    assert accept_sampled([0, 2, 0], [Q] * 3, [P] * 4, [0.5, 0.5, 0.0, 0.5]) == (1, 0)


def test_accept_sampled_rejects_what_the_target_excludes() -> None:
    p = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert accept_sampled([2], [Q], [p, p], [0.0, 0.3]) == (0, 0)


def test_accept_sampled_without_drafts_draws_from_the_target() -> None:
    assert accept_sampled([], [], [P], [0.65]) == (0, 1)


def test_choose_never_returns_a_token_without_weight() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert choose(weights, 0.0) == 1
    assert choose(weights, 0.2499) == 1
    assert choose(weights, 0.25) == 3
    assert choose(weights, 1 - 2**-53) == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_probabilities_apply_the_temperature(temperature: float) -> None:
    logits = torch.tensor([1.0, 2.0, -1.0])
    row = probabilities(logits, SamplingSettings(temperature=temperature))
    torch.testing.assert_close(row, (logits / temperature).softmax(0))


def test_probabilities_at_a_tiny_temperature_are_greedy() -> None:
    row = probabilities(torch.tensor([30.0, 31.0, -50.0]), SamplingSettings(temperature=1e-40))
    assert row.tolist() == [0.0, 1.0, 0.0]


def test_probabilities_keep_the_k_likeliest_and_ties() -> None:
    row = probabilities(torch.tensor([3.0, 1.0, 2.0, 1.0]), SamplingSettings(temperature=1.0, top_k=3))
    assert [float(value) > 0 for value in row] == [True, True, True, True]
    row = probabilities(torch.tensor([3.0, 1.0, 2.0, 0.5]), SamplingSettings(temperature=1.0, top_k=2))
    torch.testing.assert_close(row[[0, 2]], torch.tensor([3.0, 2.0]).softmax(0))
    assert row[[1, 3]].tolist() == [0.0, 0.0]


def test_probabilities_keep_the_smallest_set_above_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = probabilities(logits, SamplingSettings(temperature=1.0, top_p=0.75))
    torch.testing.assert_close(kept, torch.tensor([0.625, 0.375, 0.0, 0.0]))
    one = probabilities(logits, SamplingSettings(temperature=1.0, top_p=1e-9))
    assert one.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_decider_by_temperature() -> None:
    assert isinstance(decider(SamplingSettings()), Greedy)
    assert isinstance(decider(SamplingSettings(temperature=0.7)), Sampling)


def test_greedy_takes_the_first_of_equals() -> None:
    assert Greedy().propose(torch.tensor([1.0, 5.0, 5.0])) == (1, None)


def test_a_seed_repeats_its_draws() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    runs = []
    for seed in (3, 3, 4):
        sampler = Sampling(SamplingSettings(temperature=1.0, seed=seed))
        runs.append([sampler.propose(logits)[0] for _ in range(30)])
    assert runs[0] == runs[1] != runs[2]


def test_blocks_of_drafts_follow_the_targets_distribution() -> None:
    """Three tokens from a Markov chain, drafted by another one: all 27 triples, chi-square below its 99.9 % point."""
    generator = torch.Generator().manual_seed(5)
    target = torch.rand(3, 3, generator=generator, dtype=torch.float64) + 0.05
    draft = torch.rand(3, 3, generator=generator, dtype=torch.float64) + 0.05
    target, draft = target / target.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True)
    draws = 6000
    uniforms = torch.rand(draws * 8, dtype=torch.float64, generator=generator).tolist()
    stream = iter(uniforms)
    counts = Counter(_triple(target, draft, stream) for _ in range(draws))
    chi_square = 0.0
    for first, second, third in itertools.product(range(3), repeat=3):
        expected = draws * float(target[0, first] * target[first, second] * target[second, third])
        chi_square += (counts[first, second, third] - expected) ** 2 / expected
    assert chi_square < 54.05  # 26 degrees of freedom


def _triple(target: Tensor, draft: Tensor, uniforms: itertools.chain[float] | object) -> tuple[int, int, int]:
    """Two drafts from token 0 on; the rest of the triple, if any, from the target."""
    draw = iter(uniforms)  # type: ignore[call-overload]
    drafted, state = [], 0
    for _ in range(2):
        state_row = draft[state]
        state = choose(state_row, next(draw))
        drafted.append(state)
    states = [0, *drafted]
    count, following = accept_sampled(
        drafted, [draft[s] for s in states[:-1]], [target[s] for s in states], [next(draw) for _ in range(3)]
    )
    tokens = [*drafted[:count], following]
    while len(tokens) < 3:
        tokens.append(choose(target[tokens[-1]], next(draw)))
    return tokens[0], tokens[1], tokens[2]
