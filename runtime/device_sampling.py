"""Sampling on the device: the rules of `sampling`, as tensor operations that a graph can hold.

Nothing is read back, so every decision is a tensor. Uniforms come from the host, drawn in the order in which
`sampling.Sampling` draws them: a round's proposals first, then one for each decision, and one for the last draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.runtime.sampling import SamplingSettings


class DeviceSampling:
    """Settings, the uniforms of a round, and the distributions its drafts were drawn from.

    `uniforms` float64 `[2 * 16 + 1]`: `gamma` numbers for the proposals, then `gamma + 1` for the acceptance.
    """

    def __init__(self, settings: SamplingSettings, vocabulary: int, device: torch.device):
        self.settings = settings
        self.generator = torch.Generator()
        self.restart(settings.seed)
        self.uniforms = torch.zeros(2 * DECODE_ROWS + 1, dtype=torch.float64, device=device)
        self.drafts = torch.zeros(DECODE_ROWS, vocabulary, dtype=torch.float32, device=device)

    def restart(self, seed: int) -> None:
        """Draw from the beginning of a seed's numbers."""
        self.generator.manual_seed(seed)

    def draw(self, gamma: int) -> None:
        """Enqueue fresh uniforms for a round of `gamma` drafts."""
        count = 2 * gamma + 1
        numbers = [torch.rand(1, dtype=torch.float64, generator=self.generator) for _ in range(gamma)]
        numbers.append(torch.rand(gamma + 1, dtype=torch.float64, generator=self.generator))
        drawn = torch.cat(numbers)
        if self.uniforms.is_cuda:
            drawn = drawn.pin_memory()
        self.uniforms[:count].copy_(drawn, non_blocking=True)

    def propose(self, logits: Tensor, state: DecodeState, step: int) -> None:
        """Draw draft `step` from row 0 of `logits` `[R, V]`."""
        row = probabilities(logits[:1], self.settings)
        self.drafts[step].copy_(row[0])
        _note_nan(logits[:1], state)
        state.tokens[step + 1] = choose(row[0], self.uniforms[step]).int()

    def accept(self, logits: Tensor, state: DecodeState, gamma: int, limit: int) -> None:
        """The rejection rule of `sampling.accept_sampled` on rows `0 .. gamma` of `logits`, and the commit."""
        targets = probabilities(logits[: gamma + 1], self.settings)
        _note_nan(logits[: gamma + 1], state)
        uniforms = self.uniforms[gamma : 2 * gamma + 1]
        tokens = state.tokens[1 : gamma + 1].long()
        # The row after the last draft stands for the token that follows when none falls; it is not looked at.
        drafts = torch.cat((self.drafts[:gamma], torch.zeros_like(targets[:1])))
        places = torch.arange(gamma, device=logits.device)
        stands = uniforms[:gamma] * drafts[places, tokens] < targets[places, tokens]
        count = stands.int().cumprod(0).sum().view(1)
        p, q = targets.index_select(0, count)[0], drafts.index_select(0, count)[0]
        left = (p - q).clamp_min(0)
        total = left.sum()
        fell = (count < gamma) & (total > 0)
        last = choose(torch.where(fell, left / total, p), uniforms[-1]).int().view(1)
        _commit(state, gamma, count, last, limit)


def probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """`sampling.probabilities` of every row: float32 `[M, V]` -> float32 `[M, V]`, on the device."""
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        smallest = logits.topk(settings.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    rows = logits.softmax(dim=-1)
    if settings.top_p is None or settings.top_p >= 1:
        return rows
    ordered, places = rows.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    kept = torch.zeros_like(rows).scatter(-1, places, ordered.masked_fill(before >= settings.top_p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)


def choose(weights: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.choose` without waiting: int64 `[]`, never a token of weight 0; the last one where a weight is NaN."""
    running = weights.double().cumsum(0)
    total = running[-1:]
    token = torch.searchsorted(running, total * uniform, right=True)
    return torch.minimum(token, torch.searchsorted(running, total))[0].clamp_max(weights.shape[0] - 1)


def _note_nan(logits: Tensor, state: DecodeState) -> None:
    state.broken.copy_(torch.maximum(state.broken, logits.isnan().any().int().view(1)))


def _commit(state: DecodeState, gamma: int, count: Tensor, last: Tensor, limit: int) -> None:
    """Commit `count` drafts and the token after them, as far as `limit` entries allow."""
    places = torch.arange(gamma + 1, device=last.device, dtype=torch.int32)
    following = torch.where(places == count, last, torch.cat((state.tokens[1 : gamma + 1], last)))
    taken = torch.minimum(count.int() + 1, limit - state.position).clamp_min(0)
    slots = ((state.committed + places) % state.ring.shape[0]).long()
    state.ring.scatter_(0, slots, torch.where(places < taken, following, state.ring.gather(0, slots)))
    newest = following.gather(0, (taken - 1).clamp_min(0).long())
    state.tokens[:1].copy_(torch.where(taken > 0, newest, state.tokens[:1]))
    some = (taken > 0).int()
    state.histogram.scatter_add_(0, (taken - 1).clamp_min(0).long(), some)
    state.rounds.add_(some)
    state.committed.add_(taken)
    state.position.add_(taken)
