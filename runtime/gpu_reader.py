"""How likely a given text is, on the GPU path: contexts by kernels of prompts, continuations by those of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bitnest_format.kernels.operands import View
from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.runtime.device import current
from bitnest_format.runtime.forward import NestedForward, Place
from bitnest_format.runtime.gpu_decoder import GpuDecoder
from bitnest_format.runtime.prefill import ROWS, nested_prefill
from bitnest_format.runtime.text_reader import common_length


class GpuReader:
    """A `text_reader.Reader` with buffers and a cache of its own, which grow with the texts. Drafts read KV8 too.

    Raises `GenerationError` where a text does not fit into the device's memory.
    """

    def __init__(self, decoder: GpuDecoder, view: View):
        self.decoder = decoder
        self.view = view
        self._forward: NestedForward | None = None
        self._capacity = 0
        self._tokens = torch.zeros(DECODE_ROWS, dtype=torch.int32, device=decoder.device)
        self._position = torch.zeros(1, dtype=torch.int32, device=decoder.device)
        self._prompt: list[int] = []
        # The logits after the last token of `_prompt`.
        self._last: Tensor | None = None

    @torch.inference_mode()
    def logits(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[Tensor]:
        """See `text_reader.Reader`."""
        prompt, text = list(context), [*context, *continuation[:-1]]
        yield self._guarded(len(text), partial(self._read_prompt, prompt))
        for start in range(len(prompt), len(text), DECODE_ROWS):
            yield self._guarded(len(text), partial(self._pass, text, start))

    def _guarded(self, entries: int, compute: Callable[[NestedForward], Tensor]) -> Tensor:
        try:
            with self.decoder.explained(entries), current(self.decoder.device):
                return self.decoder.checked(compute(self._forward_for(entries)))
        except Exception:
            self._forget()
            raise

    def _forward_for(self, entries: int) -> NestedForward:
        # A pass always computes 16 rows; those past the text are written again.
        room = entries + DECODE_ROWS
        if self._forward is None or self._capacity < room:
            self._forget()
            self._capacity = max(room, min(2 * self._capacity, self.decoder.architecture.max_positions + DECODE_ROWS))
            self._forward = self.decoder.passes(self._capacity)
        return self._forward

    def _forget(self) -> None:
        self._forward, self._prompt, self._last = None, [], None

    def _read_prompt(self, prompt: list[int], forward: NestedForward) -> Tensor:
        """The logits after a prompt `[1, V]`, reading what the cache does not hold."""
        if prompt == self._prompt and self._last is not None:
            return self._last
        begin = min(common_length(prompt, self._prompt), len(prompt) - 1) // ROWS * ROWS
        tokens = torch.tensor(prompt[begin:], dtype=torch.int32).to(self.decoder.device)
        nested_prefill(forward, tokens, self.view, begin)
        place = Place(self._position.fill_(len(prompt) - 1), self._tokens, 0, 1)
        self._prompt, self._last = prompt, forward.all_logits(place, self.view)[:1].clone()
        return self._last

    def _pass(self, text: list[int], position: int, forward: NestedForward) -> Tensor:
        """The logits of the next 16 tokens of a text, or of those that there are."""
        tokens = text[position : position + DECODE_ROWS]
        self._tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        place = Place(self._position.fill_(position), self._tokens, 0, DECODE_ROWS)
        forward.hidden(place, self.view)
        return forward.all_logits(place, self.view)[: len(tokens)].clone()
