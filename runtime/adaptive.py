"""How many tokens a round drafts: a fixed number, or what has paid best of late.

A round with gamma drafts of which each stands with probability `a` while all before it do commits
`1 + a + ... + a^gamma` tokens (arXiv 2211.17192, equation 1). What a round costs is measured once, `a` is followed as
the text grows, and the gamma with the most tokens a second is taken. Where drafts stop paying, that is 0.

Two rules keep a text with bad drafts close to plain decoding. Every round with drafts is paid in advance, as if all of
them were to fall, out of an account of seconds that starts with `FIRST_ROUNDS` such rounds, grows by `LOSS` of the time
that plain decoding would have taken, and gets back what drafts saved. So the loss against plain decoding never exceeds
`LOSS` of its time and those first rounds, whatever the drafts do. And while plain decoding seems best, drafts are tried
so rarely that the trials cost no more than `LOSS`, until one pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

# What auto chooses from.
CANDIDATES = (0, 2, 3, 4, 5, 6)
LOSS = 0.015
FIRST_ROUNDS = 2
# The account holds no more than this many times what it starts with, so that a long good text cannot pay for a long
# bad one after it.
ACCOUNT_LIMIT = 4
# Weight of the past after each draft whose fate was seen: some twenty drafts count.
MEMORY = 0.95
# The acceptance that a text starts with, as if it had been seen in so many drafts.
FIRST_ACCEPTANCE = 0.85
FIRST_DRAFTS = 4


class GammaPolicy(Protocol):
    """Says how many drafts the next round shall have, and hears how many of them stood."""

    def choose(self) -> int:
        """Drafts of a round that is about to start. Called once a round."""

    def observe(self, gamma: int, accepted: int) -> None:
        """A round of `gamma` drafts is over, `accepted` of which stood. Some rounds may have started in between."""


class FixedGamma:
    """Always the same."""

    def __init__(self, gamma: int):
        self.gamma = gamma

    def choose(self) -> int:
        return self.gamma

    def observe(self, gamma: int, accepted: int) -> None:
        """Nothing to learn."""


class GammaChooser:
    """Follows acceptance and chooses by it. `seconds`: what a round takes, by gamma; 0 must be among them.

    `acceptance` is the current estimate: the probability that a draft stands while all before it in its round do.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self.seconds = dict(seconds)
        self._accepted, self._decided = FIRST_ACCEPTANCE * FIRST_DRAFTS, float(FIRST_DRAFTS)
        drafting = [gamma for gamma in self.seconds if gamma and self._pays(gamma, accepted=gamma)]
        self._trial = min(drafting, key=self._risk, default=0)
        self._until_trial = 0.0
        # Seconds; no round costs more than it holds.
        self._account = FIRST_ROUNDS * max(self._risk(self._best(self.seconds)), self._risk(self._trial))
        self._account_limit = ACCOUNT_LIMIT * self._account

    @property
    def acceptance(self) -> float:
        return self._accepted / self._decided

    def choose(self) -> int:
        affordable = [gamma for gamma in self.seconds if self._risk(gamma) <= self._account]
        gamma = self._best(affordable)
        if gamma == 0 and self._trial in affordable and self._until_trial <= 0:
            gamma = self._trial
            self._until_trial = self._risk(gamma) / LOSS
        self._account -= self._risk(gamma)
        return gamma

    def observe(self, gamma: int, accepted: int) -> None:
        plain = self.seconds[0]
        self._account += accepted * plain + LOSS * (accepted + 1) * plain
        self._account = min(self._account, self._account_limit)
        if gamma == 0:
            self._until_trial -= plain
            return
        if self._pays(gamma, accepted):
            self._until_trial = 0.0
        # Drafts after the first that fell were never judged.
        decided = min(accepted + 1, gamma)
        past = MEMORY**decided
        self._accepted = past * self._accepted + accepted
        self._decided = past * self._decided + decided

    def expected_tokens(self, gamma: int) -> float:
        """Tokens that a round of `gamma` drafts commits on average."""
        return sum(self.acceptance**step for step in range(gamma + 1))

    def _best(self, gammas: Iterable[int]) -> int:
        """The most tokens a second; the fewest drafts among equals."""
        return max(sorted(gammas), key=lambda gamma: self.expected_tokens(gamma) / self.seconds[gamma])

    def _risk(self, gamma: int) -> float:
        """Seconds lost against plain decoding where every draft falls."""
        return max(0.0, self.seconds[gamma] - self.seconds[0])

    def _pays(self, gamma: int, accepted: int) -> bool:
        """Whether plain decoding would have taken longer for what a round committed."""
        return self.seconds[gamma] < (accepted + 1) * self.seconds[0]
