"""What an acceptance rate means: two definitions, and the tokens a round that follow from each.

`per_token`: every draft is accepted with probability p as long as all before it were, so that a round of gamma drafts
gives `1 + p + ... + p**gamma` tokens on average. `accepted / drafted`: the share of all drafted tokens that is kept
(the draft-slot rate of arXiv 2610.02800), so that a round gives `1 + rate * gamma` tokens. An engine without a real
text plays the first rule; a rate of the second kind is turned into the p that has it as its mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bitnest_format.errors import UsageError

Definition = Literal["tokens", "drafts"]

BISECTIONS = 60


def tokens_per_round(per_token: float, gamma: int) -> float:
    """`(1 - p**(gamma + 1)) / (1 - p)`, the mean number of tokens a round commits."""
    return sum(per_token**length for length in range(gamma + 1))


def accepted_share(per_token: float, gamma: int) -> float:
    """The mean of accepted / drafted under the per-token rule; gamma is 1 or more."""
    return (tokens_per_round(per_token, gamma) - 1) / gamma


def per_token_rate(share: float, gamma: int) -> float:
    """The p whose mean accepted / drafted is `share`: the inverse of `accepted_share`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_share(middle, gamma) < share else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """A stated rate. `of`: whether `given` is the per-token probability or the accepted share of drafts."""

    given: float
    of: Definition
    gamma: int

    def __post_init__(self) -> None:
        if not 0 <= self.given <= 1:
            raise UsageError(f"--acceptance is {self.given:g}, expected a rate from 0 to 1")
        if self.gamma < 1:
            raise UsageError(f"gamma is {self.gamma}, expected 1 or more")

    @property
    def per_token(self) -> float:
        return self.given if self.of == "tokens" else per_token_rate(self.given, self.gamma)

    @property
    def tokens_per_round(self) -> float:
        return tokens_per_round(self.per_token, self.gamma)

    @property
    def label(self) -> str:
        """One phrase for every output: the rate was stated, not measured."""
        if self.of == "tokens":
            rule = f"each draft accepted with probability {self.given:g}"
        else:
            rule = f"accepted / drafted {self.given:g}, as {self.per_token:.4f} per token"
        return f"synthetic acceptance: {rule}; {self.tokens_per_round:.2f} tokens a round at gamma {self.gamma}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            "given": self.given,
            "definition": "per token" if self.of == "tokens" else "accepted / drafted",
            "per_token": self.per_token,
            "accepted_share": accepted_share(self.per_token, self.gamma),
            "tokens_per_round": self.tokens_per_round,
            "label": self.label,
        }
