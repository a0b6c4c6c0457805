"""How many CPU threads a decoding step is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Bytes of one product below which another thread costs more in waiting than it saves: a product of 200 KB takes some
# 6 microseconds on one core, and waiting for a second core that is busy otherwise takes thousands.
BYTES_PER_THREAD = 256 << 10


def worthwhile_threads(product_bytes: int) -> int:
    """Threads for products that read `product_bytes` of weights each."""
    return max(1, product_bytes // BYTES_PER_THREAD)


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Let torch use `count` threads at most inside; its setting is that of the whole process, and is restored."""
    before = torch.get_num_threads()
    if before <= count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
