"""The plain read of `read_ceiling` in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def read_sums(source: Tensor, sums: Tensor, *, block: int, blocks: int, warps: int) -> None:
    """Write the sums of consecutive pieces of `source`, int32 `[N]`, to `sums`, int32 `[P]`.

    A piece is `blocks` blocks of `block` words; `N = P * blocks * block`. `warps` is for the kernel alone.
    """
    if source.numel() != sums.numel() * blocks * block:
        raise ValueError(f"{source.numel()} words are not {sums.numel()} pieces of {blocks} x {block}")
    torch.sum(source.view(sums.numel(), blocks * block), dim=1, dtype=torch.int32, out=sums)
