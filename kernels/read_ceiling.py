"""A plain read: the most bytes a second that a kernel of this kind can get out of memory.

Every program sums whole blocks of words, and nothing else is stored than one sum a program.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def read_sums(source: Tensor, sums: Tensor, *, block: int, blocks: int, warps: int) -> None:
    """Write the sums of consecutive pieces of `source`, int32 `[N]`, to `sums`, int32 `[P]`.

    A piece is `blocks` blocks of `block` words, all of whose loads are under way together; `N = P * blocks * block`,
    `block` a power of two. Equals `sums.copy_(source.view(P, -1).sum(1, dtype=torch.int32))`.
    """
    if source.numel() != sums.numel() * blocks * block:
        raise ValueError(f"{source.numel()} words are not {sums.numel()} pieces of {blocks} x {block}")
    _read_sums[(sums.numel(),)](source, sums, BLOCK=block, BLOCKS=blocks, num_warps=warps)


@triton.jit
def _read_sums(p_source, p_sums, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    o_words = program * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.int32)
    for number in tl.static_range(BLOCKS):
        b_sum += tl.load(p_source + o_words + number * BLOCK, eviction_policy="evict_first")
    tl.store(p_sums + program, tl.sum(b_sum))
