"""Threads are limited for a while and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.threads import at_most, worthwhile_threads


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "threads"), [(1, 1), (200_000, 1), (600_000, 2), (3 << 20, 12)])
def test_worthwhile_threads(size: int, threads: int) -> None:
    assert worthwhile_threads(size) == threads


@pytest.mark.usefixtures("three_threads")
def test_at_most_limits_and_restores() -> None:
    with at_most(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 3
    with at_most(8):
        assert torch.get_num_threads() == 3
    with pytest.raises(RuntimeError, match="inside"), at_most(1):
        raise RuntimeError("inside")
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_the_number_of_threads_does_not_show(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    model = NestedModel.open(tiny_checkpoint(tmp_path / "model", eos_token_id=None))
    expected = model.generate([5, 6], max_new_tokens=16, gamma=3)
    assert torch.get_num_threads() == 3
    assert model.decoder.threads(4) == 1
    model.decoder.product_bytes = 3 << 20
    assert model.decoder.threads(4) == 12
    assert model.generate([5, 6], max_new_tokens=16, gamma=3).token_ids == expected.token_ids
