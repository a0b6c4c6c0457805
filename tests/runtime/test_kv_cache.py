"""The nested cache: what is read equals what the format says was written, through growth, rewinding and both views."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.errors import UsageError
from bitnest_format.runtime.kv_cache import SWITCH_LENGTH, KvCache, KvSettings


def _entries(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 16, generator=generator), torch.randn(count, 2, 16, generator=generator)


def _cache(keep_decoded: bool, capacity: int = 64) -> KvCache:
    return KvCache(layers=2, kv_heads=2, head_dim=16, max_positions=500, keep_decoded=keep_decoded, capacity=capacity)


def _expected(entries: Tensor, fine_from: int) -> Tensor:
    base, refinement, scale = nesting.encode_kv(entries.transpose(0, 1))
    fine, coarse = nesting.target_kv(base, refinement, scale), nesting.draft_kv(base, scale)
    return torch.cat((coarse[:, :fine_from], fine[:, fine_from:]), dim=1)


@pytest.mark.parametrize("keep_decoded", [True, False], ids=["kept", "decoded at each read"])
def test_read_gives_both_views_and_their_mix(keep_decoded: bool) -> None:
    cache = _cache(keep_decoded)
    keys, values = _entries(20, seed=0)
    cache.append(1, keys, values, 0)
    for fine_from in (0, 1, 13, 19, 20, 25):
        read_keys, read_values = cache.read(1, 20, fine_from)
        assert torch.equal(read_keys, _expected(keys, fine_from))
        assert torch.equal(read_values, _expected(values, fine_from))


@pytest.mark.parametrize("keep_decoded", [True, False], ids=["kept", "decoded at each read"])
def test_rewriting_replaces_entries_in_every_view(keep_decoded: bool) -> None:
    cache = _cache(keep_decoded)
    keys, values = _entries(12, seed=0)
    for layer in range(2):
        cache.append(layer, keys, values, 0)
        cache.read(layer, 12, 0)
        cache.read(layer, 12, 6)
    cache.truncate(9)
    cache.check()
    newer_keys, newer_values = _entries(4, seed=1)
    for layer in range(2):
        cache.append(layer, newer_keys, newer_values, 7)
    cache.length = 11
    cache.check()
    joined = torch.cat((keys[:7], newer_keys))
    for fine_from in (0, 8, 11):
        assert torch.equal(cache.read(0, 11, fine_from)[0], _expected(joined, fine_from))


def test_growth_keeps_entries_and_ends_at_the_context() -> None:
    cache = _cache(keep_decoded=True)
    assert cache.capacity == 64
    keys, values = _entries(60, seed=0)
    for layer in range(2):
        cache.append(layer, keys, values, 0)
        cache.read(layer, 60, 0)
    cache.length = 60
    cache.reserve(65)
    assert cache.capacity == 128
    cache.check()
    assert torch.equal(cache.read(1, 60, 0)[0], _expected(keys, 0))
    cache.reserve(300)
    assert cache.capacity == 320
    cache.reserve(500)
    assert cache.capacity == 512
    assert torch.equal(cache.read(0, 60, 60)[1], _expected(values, 60))


def test_check_sees_a_view_that_differs_from_the_planes() -> None:
    cache = _cache(keep_decoded=True)
    keys, values = _entries(4, seed=0)
    for layer in range(2):
        cache.append(layer, keys, values, 0)
        cache.read(layer, 4, 0)
    cache.length = 4
    cache.check()
    cache.planes[1, 0, 0, 1, 2, 3] ^= 0x10
    with pytest.raises(AssertionError, match="layer 1: the view kept differs from the planes"):
        cache.check()


def test_check_sees_entries_that_were_never_written() -> None:
    cache = _cache(keep_decoded=True)
    keys, values = _entries(4, seed=0)
    for layer in range(2):
        cache.append(layer, keys, values, 0)
    cache.length = 5
    with pytest.raises(AssertionError, match="a stored scale is not finite and positive"):
        cache.check()


def test_entry_bytes() -> None:
    cache = _cache(keep_decoded=False)
    # Two heads, keys and values: 16 elements at 4 or 8 bits and a float32 scale.
    assert cache.entry_bytes(fine=False) == 2 * 2 * (8 + 4)
    assert cache.entry_bytes(fine=True) == 2 * 2 * (16 + 4)
    assert cache.memory_bytes() == 64 * 2 * cache.entry_bytes(fine=True)


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (100, 0), (101, 91), (110, 100)], ids=["empty", "at", "past", "further"]
)
def test_draft_fine_from(length: int, expected: int) -> None:
    settings = KvSettings(draft_switch_length=100, recent=10)
    for keep_decoded in (True, False):
        assert settings.draft_fine_from(length, keep_decoded=keep_decoded) == expected


def test_draft_reads_everything_at_kv4_without_recent_entries() -> None:
    assert KvSettings(draft_switch_length=0, recent=0).draft_fine_from(7, keep_decoded=True) == 7
    assert KvSettings(draft_switch_length=0, recent=50).draft_fine_from(7, keep_decoded=True) == 0


def test_by_default_drafts_switch_only_where_entries_are_decoded_at_each_read() -> None:
    settings = KvSettings(recent=10)
    assert settings.draft_fine_from(100_000, keep_decoded=True) == 0
    assert settings.draft_fine_from(SWITCH_LENGTH, keep_decoded=False) == 0
    assert settings.draft_fine_from(SWITCH_LENGTH + 1, keep_decoded=False) == SWITCH_LENGTH + 1 - 10


@pytest.mark.parametrize("name", ["draft_switch_length", "recent"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_settings_out_of_range(name: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        KvSettings(**{name: value})  # type: ignore[arg-type]
    assert str(error.value) == f"kv.{name} is {value!r}, expected a whole number of tokens, 0 or more"
