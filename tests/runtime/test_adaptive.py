"""Choosing how many tokens to draft, over simulated rounds whose costs and acceptance are given."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from bitnest_format.runtime.adaptive import CANDIDATES, LOSS, FixedGamma, GammaChooser

Acceptance = Callable[[int], float]

# Seconds of a round by gamma: drafts at 0.6 and a verification at 1.0 to 1.4 of a plain step, as of an 8B model on a
# GPU; cheap drafts; and drafts that can never pay, as on a CPU that computes rows one after another.
TYPICAL = {gamma: 1e-3 * (2.0 + 0.14 * gamma + 1.2 * gamma) for gamma in CANDIDATES}
CHEAP = {gamma: 1e-3 * (2.0 + 0.05 * gamma + 0.4 * gamma) for gamma in CANDIDATES}
HOPELESS = {gamma: 1e-3 * (2.0 + 2.0 * gamma + 0.5 * gamma) for gamma in CANDIDATES}
COSTS = {"typical": TYPICAL, "cheap": CHEAP, "hopeless": HOPELESS}


class Run:
    """Rounds as a loop does them: one is enqueued before the result of the one before it is known."""

    def __init__(self, seconds: dict[int, float], acceptance: Acceptance, tokens: int, seed: int = 0):
        self.chooser = GammaChooser(seconds)
        self.gammas: list[int] = []
        self.tokens, self.seconds = 0, 0.0
        self.times: list[tuple[int, float]] = []
        chance = random.Random(seed)
        flights: deque[int] = deque()
        while self.tokens < tokens:
            while len(flights) < 2:
                flights.append(self.chooser.choose())
            gamma = flights.popleft()
            accepted = 0
            while accepted < gamma and chance.random() < acceptance(self.tokens):
                accepted += 1
            self.chooser.observe(gamma, accepted)
            self.tokens += accepted + 1
            self.seconds += seconds[gamma]
            self.gammas.append(gamma)
            self.times.append((self.tokens, self.seconds))
        self.loss = self.seconds / (self.tokens * seconds[0]) - 1

    def pace(self, first: int, last: int) -> float:
        """Seconds a token between two numbers of tokens."""
        inside = [(tokens, seconds) for tokens, seconds in self.times if first <= tokens <= last]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def _pace(seconds: dict[int, float], gamma: int, acceptance: float) -> float:
    return seconds[gamma] / sum(acceptance**step for step in range(gamma + 1))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8])
def test_drafts_that_do_not_pay_cost_three_percent_at_most(acceptance: float, cost: str) -> None:
    for seed in range(8):
        for tokens in (384, 1000, 4000):
            run = Run(COSTS[cost], lambda _: acceptance, tokens, seed)
            assert run.loss <= 0.03, f"seed {seed}, {tokens} tokens"


@pytest.mark.parametrize("cost", COSTS)
def test_a_malicious_text_costs_three_percent_at_most(cost: str) -> None:
    """Drafts stand just long enough to be trusted, then all fall, again and again."""
    for period in (10, 40, 150, 400):
        run = Run(COSTS[cost], lambda place, period=period: float(place // period % 2 == 0), 4000)
        assert run.loss <= 0.03, f"period {period}"
    falls_when_tried = GammaChooser(COSTS[cost])
    seconds, tokens = 0.0, 0
    while tokens < 1000:
        gamma = falls_when_tried.choose()
        falls_when_tried.observe(gamma, 0)
        seconds += COSTS[cost][gamma]
        tokens += 1
        assert seconds - tokens * COSTS[cost][0] <= LOSS * tokens * COSTS[cost][0] + _first_rounds(COSTS[cost])


def _first_rounds(seconds: dict[int, float]) -> float:
    return 2 * max(seconds.values())


def test_a_collapse_after_a_good_stretch_is_noticed() -> None:
    run = Run(TYPICAL, lambda place: 0.95 if place < 1500 else 0.0, 3000)
    assert run.pace(100, 1500) < 0.85 * TYPICAL[0]
    assert run.pace(1600, 3000) < 1.02 * TYPICAL[0]


def test_drafting_comes_back_with_acceptance() -> None:
    for seed in range(5):
        run = Run(TYPICAL, lambda place: 0.0 if place < 1000 else 0.95, 3000, seed)
        assert run.pace(1, 1000) < 1.03 * TYPICAL[0]
        best = min(_pace(TYPICAL, gamma, 0.95) for gamma in CANDIDATES)
        assert run.pace(1300, 3000) < 1.12 * best


@pytest.mark.parametrize("cost", ["typical", "cheap"])
@pytest.mark.parametrize("acceptance", [0.85, 0.9, 0.95, 0.99])
def test_good_drafts_come_near_the_best_fixed_gamma(acceptance: float, cost: str) -> None:
    seconds = COSTS[cost]
    best = min(_pace(seconds, gamma, acceptance) for gamma in CANDIDATES)
    paces = [Run(seconds, lambda _: acceptance, 4000, seed).pace(1, 4000) for seed in range(5)]
    assert sum(paces) / len(paces) < 1.06 * best


def test_drafts_that_can_never_pay_are_not_tried() -> None:
    assert set(Run(HOPELESS, lambda _: 1.0, 500).gammas) == {0}


def test_more_acceptance_means_longer_drafts() -> None:
    last = [Run(CHEAP, lambda _, rate=rate: rate, 2000).gammas[-50:] for rate in (0.6, 0.8, 0.97)]
    means = [sum(gammas) / len(gammas) for gammas in last]
    assert means == sorted(means)
    assert means[0] < 3.5
    assert means[2] > 5


def test_the_estimate_counts_drafts_whose_fate_was_seen() -> None:
    chooser = GammaChooser(CHEAP)
    for _ in range(200):
        chooser.choose()
        chooser.observe(4, 4)
    assert chooser.acceptance > 0.99
    for _ in range(200):
        chooser.choose()
        chooser.observe(4, 1)
    assert chooser.acceptance == pytest.approx(0.5, abs=0.01)
    assert chooser.expected_tokens(2) == pytest.approx(1 + chooser.acceptance + chooser.acceptance**2)


def test_a_fixed_gamma_stays() -> None:
    policy = FixedGamma(3)
    policy.observe(3, 0)
    assert [policy.choose() for _ in range(3)] == [3, 3, 3]
