"""The output head: interpreted, against its twin, and rows that do not depend on their neighbours."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from bitnest_format.kernels import head, plain_head
from bitnest_format.kernels.operands import Best

TYPES = [torch.float16, torch.bfloat16, torch.float32]
EITHER = pytest.mark.parametrize("module", [head, plain_head], ids=["kernel", "twin"])
ROOM = 5


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _best(vocabulary: int) -> Best:
    blocks = head.head_blocks(vocabulary)
    return Best(torch.full((ROOM, blocks), 7.0), torch.full((ROOM, blocks), 77, dtype=torch.int32))


def _argmax(module: ModuleType, hidden: Tensor, weight: Tensor, rows: int) -> Best:
    best = _best(weight.shape[0])
    module.head_argmax(hidden, weight, best, rows)
    return best


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary", "columns"), [(1, 48, 256), (3, 37, 288), (5, 16, 544), (2, 5, 32)])
def test_head_argmax(rows: int, vocabulary: int, columns: int, dtype: torch.dtype) -> None:
    hidden, weight = _random(ROOM, columns), _random(vocabulary, columns, seed=1).to(dtype)
    found, expected = (_argmax(module, hidden, weight, rows) for module in (head, plain_head))
    torch.testing.assert_close(found.value, expected.value, rtol=1e-6, atol=1e-5)
    assert torch.equal(found.index, expected.index)
    assert bool((found.value[rows:] == 7).all() and (found.index[rows:] == 77).all())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary", "columns"), [(1, 37, 288), (4, 16, 544)])
def test_head_logits(rows: int, vocabulary: int, columns: int, dtype: torch.dtype) -> None:
    hidden, weight = _random(ROOM, columns), _random(vocabulary, columns, seed=1).to(dtype)
    logits = torch.full((2, ROOM, vocabulary), 7.0)
    head.head_logits(hidden, weight, logits[0], rows)
    plain_head.head_logits(hidden, weight, logits[1], rows)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-6, atol=1e-5)
    assert bool((logits[:, rows:] == 7).all())


@EITHER
def test_equal_logits_give_the_lowest_token(module: ModuleType) -> None:
    weight = torch.zeros(40, 32)
    weight[[3, 9, 15, 20, 33, 39], 0] = 1
    best = _argmax(module, torch.ones(ROOM, 32), weight, 2)
    assert best.index[:2].tolist() == [[3, 20, 33]] * 2
    assert bool((best.value[:2] == 1).all())
    # Zeros of both signs are equal, and so are numbers below all others.
    weight = torch.full((32, 32), -0.0)
    weight[16:, 0] = -torch.inf
    best = _argmax(module, torch.ones(ROOM, 32), weight, 1)
    assert best.index[0].tolist() == [0, 16]


@EITHER
def test_negative_logits_are_ordered(module: ModuleType) -> None:
    weight = torch.zeros(20, 32)
    weight[:, 0] = -torch.arange(20.0, 0.0, -1.0)
    best = _argmax(module, torch.ones(ROOM, 32), weight, 1)
    assert best.index[0].tolist() == [15, 19]
    assert best.value[0].tolist() == [-5, -1]


@EITHER
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_shows_in_the_value_of_its_block_and_row(module: ModuleType) -> None:
    hidden, weight = _random(ROOM, 32), _random(48, 32, seed=1)
    weight[20] = torch.nan
    best = _argmax(module, hidden, weight, 2)
    assert best.value[:2].isnan().tolist() == [[False, True, False]] * 2
    assert best.index[:2, 1].tolist() == [20, 20]
    hidden[1, 5] = torch.nan
    assert _argmax(module, hidden, _random(48, 32, seed=1), 3).value[:3].isnan().all(dim=1).tolist() == [0, 1, 0]


@EITHER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(module: ModuleType, dtype: torch.dtype) -> None:
    hidden, weight = _random(ROOM, 288), _random(37, 288, seed=1).to(dtype)
    together = torch.empty(ROOM, 37)
    module.head_logits(hidden, weight, together, ROOM)
    best = _argmax(module, hidden, weight, ROOM)
    for row in range(ROOM):
        alone = torch.empty(1, 37)
        module.head_logits(hidden[row : row + 1].clone(), weight, alone, 1)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(best.value[row].max(), alone.max())
