"""The plain read, interpreted, against its twin."""

from __future__ import annotations

import pytest
import torch

from bitnest_format.kernels import plain_read_ceiling

pytest.importorskip("triton")


@pytest.mark.parametrize("blocks", [1, 3])
def test_read_sums(blocks):
    from bitnest_format.kernels import read_ceiling

    source = torch.randint(-(2**20), 2**20, (5 * blocks * 64,), dtype=torch.int32)
    found, expected = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    read_ceiling.read_sums(source, found, block=64, blocks=blocks, warps=1)
    plain_read_ceiling.read_sums(source, expected, block=64, blocks=blocks, warps=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    wide = source.view(5, -1).sum(1)
    torch.testing.assert_close(expected, wide.to(torch.int32), rtol=0, atol=0)


def test_pieces_must_fill_the_source():
    from bitnest_format.kernels import read_ceiling

    for module in (read_ceiling, plain_read_ceiling):
        with pytest.raises(ValueError, match="100 words are not 2 pieces of 1 x 64"):
            module.read_sums(
                torch.zeros(100, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), block=64, blocks=1, warps=1
            )
