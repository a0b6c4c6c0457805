"""Nested KV codes and attention over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.kernels.reference_attention import attention, kv_decode, kv_encode


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kv_of_the_worked_vector() -> None:
    planes, scale = kv_encode(torch.tensor([1.4, -0.7, 0.31, 0.0]))
    torch.testing.assert_close(scale, torch.tensor(0.2))
    draft = kv_decode(planes, scale, fine=False)
    target = kv_decode(planes, scale, fine=True)
    torch.testing.assert_close(draft, torch.tensor([1.4, -0.8, 0.4, 0.0]))
    torch.testing.assert_close(target, torch.tensor([1.4, -0.7125, 0.3125, 0.0]))


def test_kv_of_a_zero_vector_is_zero() -> None:
    planes, scale = kv_encode(torch.zeros(2, 64))
    assert planes.tolist() == torch.full((2, 2, 32), 0x88).tolist()
    assert bool((torch.isfinite(scale) & (scale > 0)).all())
    assert not kv_decode(planes, scale, fine=True).any()
    assert not kv_decode(planes, scale, fine=False).any()


@pytest.mark.parametrize("size", [2, 64, 80, 128])
def test_kv_codes_equal_the_formats(size: int) -> None:
    entries = torch.cat((_random(500, size), _random(500, size, seed=1) * 1e-30, _random(9, size).round()))
    planes, scale = kv_encode(entries)
    base, refinement, expected_scale = nesting.encode_kv(entries)
    assert torch.equal(scale, expected_scale)
    nibbles = torch.stack((planes & 0xF, planes >> 4), dim=-1).flatten(-2)
    assert torch.equal(nibbles[0].to(torch.int8) - packing.CODE_OFFSET, base)
    assert torch.equal(nibbles[1].to(torch.int8) - packing.CODE_OFFSET, refinement)
    assert torch.equal(kv_decode(planes, scale, fine=False), nesting.draft_kv(base, scale))
    assert torch.equal(kv_decode(planes, scale, fine=True), nesting.target_kv(base, refinement, scale))


def _by_definition(queries: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None) -> Tensor:
    rows, heads, size = queries.shape
    result = torch.zeros(rows, heads, size, dtype=torch.float64)
    for row in range(rows):
        last = position + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(heads):
            shared = head * keys.shape[0] // heads
            scores = keys[shared, first : last + 1].double() @ queries[row, head].double() / size**0.5
            result[row, head] = scores.softmax(0) @ values[shared, first : last + 1].double()
    return result.float()


@pytest.mark.parametrize("window", [None, 1, 9, 1000])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("position", [0, 23])
def test_attention_equals_its_definition(
    position: int, heads: int, kv_heads: int, rows: int, window: int | None
) -> None:
    queries = _random(rows, heads, 16)
    keys, values = _random(kv_heads, position + rows, 16, seed=1), _random(kv_heads, position + rows, 16, seed=2)
    result = attention(queries, keys, values, position, window)
    torch.testing.assert_close(result, _by_definition(queries, keys, values, position, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("position", [0, 1, 63, 700])
def test_a_row_does_not_depend_on_its_neighbours(position: int, window: int | None, size: int) -> None:
    queries = _random(16, 9, size)
    # Room behind the valid entries, as in a cache, and not to be read.
    keys = torch.full((3, 1024, size), float("nan"))
    values = keys.clone()
    keys[:, : position + 16] = _random(3, position + 16, size, seed=1)
    values[:, : position + 16] = _random(3, position + 16, size, seed=2)

    def run(first: int, rows: int) -> Tensor:
        stop = position + first + rows
        return attention(
            queries[first : first + rows].clone(), keys[:, :stop], values[:, :stop], position + first, window
        )

    alone = torch.cat([run(row, 1) for row in range(16)])
    for rows in (*range(2, 10), 16):
        assert torch.equal(run(0, rows), alone[:rows])


@pytest.mark.parametrize("capacity", [128, 192, 4096])
def test_attention_does_not_depend_on_the_caches_capacity(capacity: int) -> None:
    keys, values = _random(3, 100, 64, seed=1), _random(3, 100, 64, seed=2)
    queries = _random(3, 9, 64)
    expected = attention(queries, keys, values, 97, None)
    wide = torch.full((2, 3, capacity, 64), float("nan"))
    wide[0, :, :100], wide[1, :, :100] = keys, values
    assert torch.equal(attention(queries, wide[0, :, :100], wide[1, :, :100], 97, None), expected)
