"""The speculative loop: draft on the base plane, verify on both, keep what agrees, rewind.

The cache holds the entries of every committed token but the newest, the *pending* one, whose entry its round writes.
A round drafts gamma tokens from it, one by one; the target then computes the pending token and the drafts in one pass
of gamma + 1 rows, writing their entries again; the drafts that the target accepts are committed, and one token more
that is the target's own. With gamma 0 a round is plain decoding, and does the same arithmetic: that is why both give
the same text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bitnest_format.kernels.reference_linear import View
from bitnest_format.runtime.adaptive import GammaPolicy
from bitnest_format.runtime.kv_cache import KvCache, KvSettings
from bitnest_format.runtime.model import Decoder
from bitnest_format.runtime.sampling import Decider
from bitnest_format.runtime.threads import at_most

# Repeats of a pass of which the fastest counts; the first one also warms up.
PASSES_TIMED = 2


@dataclass(slots=True)
class Counters:
    """What a run did: counts, bytes by the format's byte model, and seconds by phase."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    bytes_read: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0})

    def count(self, gamma: int, accepted: int) -> None:
        """Add a round of `gamma` drafts of which `accepted` stood."""
        self.rounds += 1
        self.drafted += gamma
        self.accepted += accepted
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1


class SpeculativeLoop:
    """Decodes one sequence with a decoder and a cache; `view` is the one that decides the text.

    `cache.length` counts the valid entries after every call. Where `view` is `"draft"` the base plane alone writes
    the text and gamma must be 0.
    """

    def __init__(self, decoder: Decoder, decider: Decider, kv: KvSettings, view: View):
        self.decoder = decoder
        self.decider = decider
        self.kv = kv
        self.view = view
        self.cache: KvCache = decoder.new_cache()
        self.counters = Counters()

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> int:
        """Run the prompt and return the first new token, which is pending."""
        began = time.perf_counter()
        ids = torch.tensor(prompt, device=self.decoder.device)
        with at_most(self.decoder.threads(len(prompt))):
            logits = self.decoder.prefill(ids, self.cache, self.view)
        _, token = self.decider.accept((), (), logits.unsqueeze(0))
        self.counters.seconds["prefill"] += time.perf_counter() - began
        return token

    def block(self, pending: int, policy: GammaPolicy, room: int) -> list[int]:
        """`round` with as many drafts as `policy` says, and at most `room` tokens."""
        gamma = min(policy.choose(), room - 1)
        tokens = self.round(pending, gamma)
        policy.observe(gamma, len(tokens) - 1)
        return tokens

    @torch.inference_mode()
    def round(self, pending: int, gamma: int) -> list[int]:
        """Draft `gamma` tokens, verify, rewind; the committed tokens, of which the last is pending."""
        with at_most(self.decoder.threads(gamma + 1)):
            return self._round(pending, gamma)

    def _round(self, pending: int, gamma: int) -> list[int]:
        length = self.cache.length
        began = time.perf_counter()
        drafted, proposals = [], []
        token = pending
        for step in range(gamma):
            token, proposal = self.decider.propose(self._pass([token], length + step, "draft")[0])
            drafted.append(token)
            proposals.append(proposal)
        middle = time.perf_counter()
        logits = self._pass([pending, *drafted], length, self.view)
        count, following = self.decider.accept(drafted, proposals, logits)
        self.cache.truncate(length + count + 1)
        self.counters.count(gamma, count)
        self.counters.seconds["draft"] += middle - began
        self.counters.seconds["verify"] += time.perf_counter() - middle
        return [*drafted[:count], following]

    def _pass(self, tokens: list[int], position: int, view: View) -> torch.Tensor:
        stop = position + len(tokens)
        keep = self.cache.keep_decoded
        fine_from = self.kv.draft_fine_from(stop, keep_decoded=keep) if view == "draft" else 0
        self.counters.bytes_read += self.bytes_of_pass(stop, view, fine_from)
        ids = torch.tensor(tokens, device=self.decoder.device)
        return self.decoder.logits(self.decoder.forward(ids, position, self.cache, view, fine_from), view)

    def bytes_of_pass(self, stop: int, view: View, fine_from: int) -> int:
        """Bytes of the checkpoint and the cache that one pass must read, each once, whatever its rows share.

        Planes, scales and biases of the view, the head (a nested one by the view, another as stored), and for every
        layer the `stop` cache entries (or those inside its window): both planes and the scale from `fine_from` on, base
        plane and scale before. Norms and embedding rows (below a thousandth) and this runtime's float32 copies do not
        count.
        """
        total = self.decoder.view_bytes[view] + self.decoder.head_bytes[view]
        fine, coarse = self.cache.entry_bytes(fine=True), self.cache.entry_bytes(fine=False)
        for window in self.decoder.architecture.sliding_windows:
            start = 0 if window is None else max(0, stop - window)
            border = min(max(fine_from, start), stop)
            total += (border - start) * coarse + (stop - border) * fine
        return total

    def cache_bytes(self) -> int:
        """Bytes that the cache takes."""
        return self.cache.memory_bytes()

    @torch.inference_mode()
    def round_seconds(self, gammas: Sequence[int]) -> dict[int, float]:
        """How long rounds of each gamma take at the current length; nothing is committed or counted."""
        length, read = self.cache.length, self.counters.bytes_read

        def passes(rows: int, view: View) -> float:
            with at_most(self.decoder.threads(rows)):
                return min(self._timed_pass(rows, length, view) for _ in range(PASSES_TIMED))

        draft = passes(1, "draft") if any(gammas) else 0.0
        found = {gamma: gamma * draft + passes(gamma + 1, self.view) for gamma in gammas}
        self.cache.truncate(length)
        self.counters.bytes_read = read
        return found

    def _timed_pass(self, rows: int, position: int, view: View) -> float:
        began = time.perf_counter()
        self._pass([0] * rows, position, view)
        return time.perf_counter() - began
