"""Twins of `head` in plain torch: the vocabulary's logits, and the best of them block by block.

A logit is the float32 sum of `H` products of widened weights and hidden numbers; the order of that sum is free, so
values agree within some units of the last place of the largest product, and indices wherever no two logits are that
close. Equal logits: the lowest token wins. NaN counts as larger than any number, so that it shows in the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.kernels.operands import Best
from bitnest_format.kernels.reference import lm_head

# Tokens of a block, the same for every number of rows. More make the merge shorter, fewer spread the last work better.
BLOCK_TOKENS = 16


def head_blocks(vocabulary: int) -> int:
    """Blocks of the vocabulary: the second size of the `Best` that `head_argmax` writes."""
    return -(-vocabulary // BLOCK_TOKENS)


def head_argmax(hidden: Tensor, weight: Tensor, best: Best, rows: int) -> None:
    """The largest logit of every block and its token, for `rows` rows of `hidden`.

    `hidden` float32 `[R, H]`, `weight` `[V, H]` of float16, bfloat16 or float32 -> `best` `[R, head_blocks(V)]`.
    """
    logits = lm_head(hidden[:rows], weight)
    blocks, vocabulary = head_blocks(weight.shape[0]), weight.shape[0]
    padded = torch.full((rows, blocks * BLOCK_TOKENS), -torch.inf, device=logits.device)
    padded[:, :vocabulary] = logits
    # torch.max takes NaN for the largest number, but does not promise which of equal numbers it names.
    grouped = padded.view(rows, blocks, BLOCK_TOKENS)
    largest = grouped.amax(dim=-1)
    same = (grouped == largest.unsqueeze(-1)) | (grouped.isnan() & largest.isnan().unsqueeze(-1))
    first = torch.arange(blocks, device=logits.device) * BLOCK_TOKENS
    best.value[:rows] = largest
    best.index[:rows] = (first + same.int().argmax(dim=-1)).int()


def head_logits(hidden: Tensor, weight: Tensor, logits: Tensor, rows: int) -> None:
    """All logits: `hidden` float32 `[R, H]`, `weight` `[V, H]` of any float type -> `logits` float32 `[R, V]`."""
    logits[:rows] = lm_head(hidden[:rows], weight)
