"""How likely a given text is: what evaluations ask for.

A context is read as `generate` reads a prompt, in pieces of many tokens that begin at the same places in every text. So
the pieces that a text has in common with the one before are computed once, and its numbers do not depend on what was
read before it. What follows a context is read in passes of at most 16 tokens, whose rows do not depend on each other:
these are, bit for bit, the logits that `generate` would have decided by. Only a long continuation, as of a text whose
perplexity is wanted, is read in the larger pieces on the CPU: that is faster, and differs in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.kernels.reference_linear import View
from bitnest_format.runtime.model import PREFILL_ROWS, Decoder
from bitnest_format.runtime.threads import at_most

# Continuations of more tokens are read like prompts. Answers that are told apart, or looked for, are shorter.
LONGEST_EXACT = 64


@dataclass(frozen=True, slots=True)
class Score:
    """Of a continuation: the sum of its tokens' log-probabilities (nats), and whether greedy decoding writes it."""

    logprob: float
    greedy: bool


class Reader(Protocol):
    """Reads one text after another by one view. Not thread-safe."""

    def logits(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[Tensor]:
        """float32 `[m, V]` one after another, in all a row for each token of `continuation`: of what may stand there.

        Both hold at least one token; the last one's own entry is not needed, so both together may be one token longer
        than the model's context. To be read before the next call. Raises `GenerationError` where a logit is NaN.
        """


class TextReader:
    """A `Reader` over a decoder: the CPU path. Both views read their cache at KV8. Memory: one cache."""

    def __init__(self, decoder: Decoder, view: View):
        self.decoder = decoder
        self.view = view
        self.cache = decoder.new_cache()
        self._prompt: list[int] = []
        # The logits after the last token of `_prompt`, where that was read to its end.
        self._last: Tensor | None = None

    @torch.inference_mode()
    def logits(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[Tensor]:
        """See `Reader`."""
        text, first = [*context, *continuation[:-1]], len(context) - 1
        prompt = text[: len(context)] if len(continuation) <= LONGEST_EXACT else text
        yield from self._read_prompt(prompt, first)
        for start in range(len(prompt), len(text), DECODE_ROWS):
            yield self._pass(text[start : start + DECODE_ROWS], start, 0)

    def _read_prompt(self, prompt: list[int], first: int) -> Iterator[Tensor]:
        """The logits of tokens `first` on, reading what the cache does not hold."""
        if prompt == self._prompt and self._last is not None and first == len(prompt) - 1:
            yield self._last
            return
        begin = min(common_length(prompt, self._prompt), first) // PREFILL_ROWS * PREFILL_ROWS
        self._last = None
        self._prompt = prompt[:begin]
        for start in range(begin, len(prompt), PREFILL_ROWS):
            piece = prompt[start : start + PREFILL_ROWS]
            logits = self._pass(piece, start, max(first - start, 0))
            self._prompt = prompt[: start + len(piece)]
            self._last = logits[-1:] if len(self._prompt) == len(prompt) else None
            if logits.shape[0]:
                yield logits

    def _pass(self, tokens: list[int], position: int, first: int) -> Tensor:
        """One pass; the logits `[m, V]` of its tokens from `first` on."""
        self.cache.truncate(position)
        with at_most(self.decoder.threads(len(tokens))):
            ids = torch.tensor(tokens, device=self.decoder.device)
            hidden = self.decoder.forward(ids, position, self.cache, self.view)
            self.cache.length = position + len(tokens)
            return self.decoder.logits(hidden[first:], self.view)


def score(pieces: Iterable[Tensor], continuation: Sequence[int]) -> Score:
    """What a reader's logits make of the continuation they were asked for. Sums are in float64."""
    total, greedy, place = 0.0, True, 0
    for piece in pieces:
        for rows in piece.split(DECODE_ROWS):
            tokens = torch.tensor(continuation[place : place + rows.shape[0]], device=rows.device).unsqueeze(1)
            place += rows.shape[0]
            exact = rows.double()
            total += float((exact.gather(1, tokens).squeeze(1) - exact.logsumexp(dim=1)).sum())
            greedy = greedy and bool((rows.argmax(dim=1, keepdim=True) == tokens).all())
    return Score(total, greedy)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    count = 0
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
