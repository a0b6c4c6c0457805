"""From logits to tokens, and which drafted tokens stand: pure functions, and the two deciders built on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """`temperature` 0 is greedy. `top_k` keeps the k likeliest tokens (and ties), `top_p` then the smallest set of
    likeliest tokens that holds at least that probability. Both views are filtered alike."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


class Decider(Protocol):
    """Chooses tokens. `propose` also returns what `accept` needs to know of the choice."""

    def propose(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """A token from logits `[V]`."""

    def accept(self, drafted: Sequence[int], proposals: Sequence[Tensor | None], logits: Tensor) -> tuple[int, int]:
        """How many of `k` drafted tokens stand, and the token after them; `logits` `[k + 1, V]` of the target."""


class Greedy:
    """The likeliest token; the first of equals."""

    def propose(self, logits: Tensor) -> tuple[int, Tensor | None]:
        return int(logits.argmax()), None

    def accept(self, drafted: Sequence[int], proposals: Sequence[Tensor | None], logits: Tensor) -> tuple[int, int]:
        return accept_greedy(drafted, [int(row.argmax()) for row in logits.unbind(0)])


class Sampling:
    """Draws with a seeded generator on the CPU: the same seed and calls give the same tokens."""

    def __init__(self, settings: SamplingSettings):
        self.settings = settings
        self.generator = torch.Generator().manual_seed(settings.seed)

    def propose(self, logits: Tensor) -> tuple[int, Tensor | None]:
        row = probabilities(logits, self.settings)
        return choose(row, float(self._uniforms(1)[0])), row

    def accept(self, drafted: Sequence[int], proposals: Sequence[Tensor | None], logits: Tensor) -> tuple[int, int]:
        drafts = [row for row in proposals if row is not None]
        targets = [probabilities(row, self.settings) for row in logits.unbind(0)]
        return accept_sampled(drafted, drafts, targets, self._uniforms(len(drafted) + 1).tolist())

    def _uniforms(self, count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64, generator=self.generator)


def decider(settings: SamplingSettings) -> Decider:
    """`Greedy` at temperature 0, otherwise `Sampling`."""
    return Greedy() if settings.temperature == 0 else Sampling(settings)


def accept_greedy(drafted: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
    """The longest prefix of `drafted` that the target would have chosen, and the target's own token after it.

    `drafted`: k tokens; `target`: k + 1, the target's choices at the same places and one further.
    """
    count = 0
    while count < len(drafted) and drafted[count] == target[count]:
        count += 1
    return count, target[count]


def accept_sampled(
    drafted: Sequence[int], drafts: Sequence[Tensor], targets: Sequence[Tensor], uniforms: Sequence[float]
) -> tuple[int, int]:
    """The rejection rule of speculative sampling (arXiv 2211.17192, algorithm 1): lossless for any draft.

    Drafted token x of row i stands with probability `min(1, p_i(x) / q_i(x))`; the first that falls is replaced by a
    draw from `max(p_i - q_i, 0)`, normalized; after k that stand comes a draw from `p_k`. `drafted`: k tokens, drawn
    from `drafts` q, k rows `[V]`; `targets` p: k + 1 rows `[V]`; `uniforms`: k + 1 numbers in [0, 1), one for each
    decision and one for the draw. Returns how many stand and the token after them.
    """
    for number, (token, q, p) in enumerate(zip(drafted, drafts, targets[:-1], strict=True)):
        if uniforms[number] * float(q[token]) >= float(p[token]):
            return number, choose(residual(p, q), uniforms[-1])
    return len(drafted), choose(targets[-1], uniforms[-1])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`max(p - q, 0)`, normalized; `p` itself where nothing is left (p = q up to rounding). `[V]`."""
    left = (p - q).clamp_min(0)
    total = left.sum()
    return left / total if float(total) > 0 else p


def choose(weights: Tensor, uniform: float) -> int:
    """The token at which the running sum of `weights` `[V]` passes `uniform` (in [0, 1)) times their total."""
    running = weights.double().cumsum(0)
    token = int(torch.searchsorted(running, float(running[-1]) * uniform, right=True))
    # Rounding may leave the last step out; tokens of weight 0 are never returned.
    return min(token, int(torch.searchsorted(running, running[-1])))


def probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Temperature, then top-k, then top-p: logits `[V]` -> float32 probabilities `[V]`, on the CPU."""
    logits = logits.float().cpu()
    # The largest becomes 0 before the division, so that a tiny temperature cannot overflow.
    logits = (logits - logits.max()) / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[0]:
        smallest = logits.topk(settings.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    row = logits.softmax(dim=-1)
    if settings.top_p is None or settings.top_p >= 1:
        return row
    ordered, places = row.sort(descending=True, stable=True)
    before = ordered.double().cumsum(0) - ordered
    kept = torch.zeros_like(row).scatter(0, places, ordered.masked_fill(before >= settings.top_p, 0.0))
    return kept / kept.sum()
