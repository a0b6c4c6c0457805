"""Where a decoding loop stands, on the device: written by the acceptance at the end of a round, read by the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format.kernels.reference import DECODE_ROWS


@dataclass(frozen=True, slots=True)
class DecodeState:
    """One sequence's state; all int32, one number each unless said otherwise.

    `position`: valid cache entries, which is the position of the pending token. `tokens` `[17]`: the pending token,
    then the drafts of this round. `ring`: committed tokens in order, the pending one included; number `n` stands at
    `n % len(ring)`. `committed`: tokens committed so far. `rounds`: rounds that committed something. `histogram`
    `[17]`: rounds by the number of drafts they accepted. `broken`: set to 1, and never cleared, once a logit was NaN.
    """

    position: Tensor
    tokens: Tensor
    ring: Tensor
    committed: Tensor
    histogram: Tensor
    rounds: Tensor
    broken: Tensor

    @classmethod
    def empty(cls, ring: int, device: torch.device | str = "cpu") -> DecodeState:
        """Zeros everywhere, with room for `ring` tokens before the oldest is overwritten."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            position=zeros(1),
            tokens=zeros(DECODE_ROWS + 1),
            ring=zeros(ring),
            committed=zeros(1),
            histogram=zeros(DECODE_ROWS + 1),
            rounds=zeros(1),
            broken=zeros(1),
        )
