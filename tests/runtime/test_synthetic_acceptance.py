"""The two definitions of an acceptance rate."""

from __future__ import annotations

import pytest

from bitnest_format.errors import UsageError
from bitnest_format.runtime.synthetic_acceptance import (
    SyntheticAcceptance,
    accepted_share,
    per_token_rate,
    tokens_per_round,
)


@pytest.mark.parametrize(("rate", "gamma"), [(0.95, 4), (0.5, 1), (0.8, 8)])
def test_tokens_per_round_is_the_geometric_sum(rate, gamma):
    assert tokens_per_round(rate, gamma) == pytest.approx((1 - rate ** (gamma + 1)) / (1 - rate))
    assert accepted_share(rate, gamma) * gamma + 1 == pytest.approx(tokens_per_round(rate, gamma))


def test_ends():
    assert tokens_per_round(0.0, 4) == 1
    assert tokens_per_round(1.0, 4) == 5
    assert accepted_share(1.0, 4) == 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.875, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_per_token_rate_inverts_the_share(share, gamma):
    assert accepted_share(per_token_rate(share, gamma), gamma) == pytest.approx(share, abs=1e-9)


def test_the_papers_rate_gives_4_8_tokens_a_round():
    stated = SyntheticAcceptance(given=0.95, of="drafts", gamma=4)
    assert stated.tokens_per_round == pytest.approx(4.8)
    assert stated.per_token == pytest.approx(0.97959, abs=1e-5)
    assert stated.label == (
        "synthetic acceptance: accepted / drafted 0.95, as 0.9796 per token; 4.80 tokens a round at gamma 4"
    )


def test_per_token_label_and_document():
    stated = SyntheticAcceptance(given=0.95, of="tokens", gamma=4)
    assert stated.label == (
        "synthetic acceptance: each draft accepted with probability 0.95; 4.52 tokens a round at gamma 4"
    )
    document = stated.to_dict()
    assert document["kind"] == "synthetic"
    assert document["tokens_per_round"] == pytest.approx(4.5244, abs=1e-4)
    assert document["accepted_share"] == pytest.approx(0.8811, abs=1e-4)


def test_rates_outside_0_and_1_are_refused():
    with pytest.raises(UsageError) as caught:
        SyntheticAcceptance(given=1.5, of="tokens", gamma=4)
    assert str(caught.value) == "--acceptance is 1.5, expected a rate from 0 to 1"
