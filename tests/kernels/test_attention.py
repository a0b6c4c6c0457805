"""Attention kernels against their twins, and rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnest_format.kernels import attention, plain_attention
from bitnest_format.kernels.operands import (
    AttentionShape,
    KvPlanes,
    Partials,
    Rope,
    Splits,
)
from bitnest_format.kernels.reference_attention import attention as reference_attention
from bitnest_format.kernels.reference_attention import kv_decode, kv_encode

POSITIONS = 4096
# Weights of a split are rounded to float16 in the kernels, 2^-11 of the largest, and rounding errors average out.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
NEVER = 1 << 30

# The interpreter takes a tenth of a second for a program: few heads, few splits.
MHA = AttentionShape(1, 1, 64)
GQA = AttentionShape(4, 1, 64)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rope(shape: AttentionShape) -> Rope:
    angles = torch.arange(POSITIONS).unsqueeze(1) * 10000.0 ** -torch.linspace(0, 1, shape.head_dim // 2)
    return Rope(angles.cos(), angles.sin())


def _cache(shape: AttentionShape, length: int, capacity: int) -> KvPlanes:
    """A cache of random entries; what lies beyond `length` must not count, so it is as bad as can be."""
    spread = _random(2, shape.kv_heads, length, 1, seed=1).mul(1.5).exp()
    planes, scale = kv_encode(_random(2, shape.kv_heads, length, shape.head_dim, seed=2) * spread)
    cache = KvPlanes(
        torch.full((2, 2, shape.kv_heads, capacity, shape.head_dim // 2), 0xA5, dtype=torch.uint8),
        torch.full((2, shape.kv_heads, capacity), float("nan")),
    )
    cache.planes[..., :length, :] = planes
    cache.scale[..., :length] = scale
    return cache


def _copy(cache: KvPlanes) -> KvPlanes:
    return KvPlanes(cache.planes.clone(), cache.scale.clone())


def _partials(shape: AttentionShape, rows: int, capacity: int) -> Partials:
    """Poisoned: what a kernel leaves alone must not be read by the next."""
    partials = Partials.empty(rows, shape, capacity)
    for tensor in (partials.accumulator, partials.peak, partials.total, partials.merged):
        tensor.fill_(float("nan"))
    return partials


def _attend(module, qkv, shape, cache, length, *, capacity=0, head_norm=None, draft=False, switch=0, recent=0):
    """Attend with every row of `qkv` after `length` entries; the partial results."""
    rows = qkv.shape[0]
    partials = _partials(shape, rows, capacity or cache.scale.shape[2])
    position = torch.tensor([length - 1], dtype=torch.int32)
    module.attend(
        qkv,
        head_norm,
        _rope(shape),
        position,
        1,
        cache,
        shape,
        partials,
        rows,
        draft=draft,
        kv_switch=switch,
        kv_recent=recent,
    )
    return partials


def _combine(module, shape, partials, length):
    position = torch.tensor([length - 1], dtype=torch.int32)
    rows = partials.peak.shape[0]
    out = torch.empty(rows, shape.heads * shape.head_dim)
    module.combine(partials, position, 1, shape, out, rows)
    return out


def _check(shape, rows, length, *, head_norm=None, zeros=False, **options):
    """Kernel and twin leave the same cache and, merged, the same attention."""
    capacity = shape.splits.start(shape.splits.count(length + rows))
    qkv = _random(rows, shape.projections, seed=3) * 2
    if zeros:
        qkv[0, shape.heads * shape.head_dim :] = 0
    cache = _cache(shape, length, capacity)
    expected_cache = _copy(cache)
    partials = _attend(attention, qkv, shape, cache, length, head_norm=head_norm, **options)
    expected = _attend(plain_attention, qkv, shape, expected_cache, length, head_norm=head_norm, **options)
    assert torch.equal(cache.planes, expected_cache.planes)
    assert torch.equal(cache.scale[..., : length + rows], expected_cache.scale[..., : length + rows])
    seen = ~expected.peak.isnan()
    torch.testing.assert_close(partials.peak[seen], expected.peak[seen], **TOLERANCE)
    torch.testing.assert_close(partials.total[seen], expected.total[seen], **TOLERANCE)
    merged = _combine(attention, shape, partials, length)
    torch.testing.assert_close(merged, _combine(plain_attention, shape, expected, length), **TOLERANCE)


def test_splits_depend_on_nothing_but_their_number() -> None:
    splits = Splits(shorts=16, short=128, long=512)
    starts = [splits.start(split) for split in range(21)]
    assert starts[:3] == [0, 128, 256]
    assert starts[15:19] == [1920, 2048, 2560, 3072]
    assert [splits.count(length) for length in (0, 1, 128, 129, 2048, 2049, 2560, 2561)] == [0, 1, 1, 2, 16, 17, 17, 18]
    assert all(splits.count(start) == split for split, start in enumerate(starts))


@pytest.mark.parametrize(("kv_heads", "short", "long"), [(1, 16, 76), (4, 16, 76), (5, 8, 68), (8, 8, 68), (9, 8, 32)])
def test_fewer_kv_heads_take_more_splits(kv_heads: int, short: int, long: int) -> None:
    splits = AttentionShape(kv_heads, kv_heads, 64).splits
    assert (splits.count(2048), splits.count(32768)) == (short, long)
    assert splits.short % 128 == splits.long % 128 == 0


@pytest.mark.parametrize("sizes", [(6, 4, 64), (4, 4, 66), (4, 4, 0), (4, 4, 260)])
def test_attention_shape_refuses_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"^\d+ query heads are not|^head size \d+ is not a multiple of 4 up to 256$"):
        AttentionShape(*sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rows", "length"),
    [
        (2, 2, 64, 1, 130),
        (2, 1, 64, 5, 60),
        (4, 1, 64, 5, 126),
        (4, 1, 4, 9, 20),
        (7, 1, 20, 2, 20),
        (7, 1, 128, 1, 20),
        (1, 1, 80, 2, 66),
        (1, 1, 96, 1, 66),
        (9, 1, 16, 2, 7),
    ],
)
def test_attend(heads: int, kv_heads: int, size: int, rows: int, length: int) -> None:
    _check(AttentionShape(heads, kv_heads, size), rows, length)


@pytest.mark.parametrize("length", [1, 63, 127, 128, 256])
def test_attend_around_the_edges_of_splits(length: int) -> None:
    _check(MHA, 2, length)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("length", [255, 256, 767])
def test_attend_by_other_splits(length: int, draft: bool) -> None:
    shape = AttentionShape(2, 2, 32, cut=Splits(shorts=1, short=256, long=512))
    _check(shape, 2, length, draft=draft, switch=64, recent=40)


def test_attend_in_a_long_split() -> None:
    _check(AttentionShape(1, 1, 32, window=600), 2, 2559)


@pytest.mark.parametrize("window", [1, 3, 129])
def test_attend_within_a_window(window: int) -> None:
    _check(AttentionShape(2, 1, 64, window=window), 3, 255)


def test_attend_norms_heads() -> None:
    gains = _random(GQA.heads + GQA.kv_heads, GQA.head_dim, seed=5).exp()
    _check(GQA, 2, 50, head_norm=gains)


@pytest.mark.parametrize(
    ("switch", "recent"), [(NEVER, 0), (200, 3), (199, 0), (0, 1), (0, 80), (0, 500)], ids=lambda value: str(value)
)
def test_drafts_read_old_entries_coarsely(switch: int, recent: int) -> None:
    _check(MHA, 1, 199, draft=True, switch=switch, recent=recent)


def test_drafts_read_no_refinement_below_the_recent_entries() -> None:
    qkv = _random(1, MHA.projections)
    cache = _cache(MHA, 199, 256)
    changed = _copy(cache)
    changed.planes[1, :, :, :190] ^= 0xFF
    options = {"draft": True, "switch": 64, "recent": 10}
    plain = _attend(attention, qkv, MHA, cache, 199, **options)
    assert _equal(plain, _attend(attention, qkv, MHA, changed, 199, **options))
    changed.planes[1, :, :, 190] ^= 0xFF
    assert not _equal(plain, _attend(attention, qkv, MHA, changed, 199, **options))


def test_zero_vectors_are_entries_like_others() -> None:
    """DC-5: finite scales, zero codes, and no NaN."""
    _check(MHA, 2, 1, zeros=True)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_values_of_any_magnitude_survive(scale: float) -> None:
    """Weights stay in float16's range whatever the scales."""
    qkv = _random(1, MHA.projections, seed=3)
    qkv[:, -MHA.kv_heads * MHA.head_dim :] *= scale
    cache = _cache(MHA, 40, 128)
    cache.scale[1, :, :40] *= scale
    expected_cache = _copy(cache)
    merged = _combine(attention, MHA, _attend(attention, qkv, MHA, cache, 40), 40)
    expected = _combine(plain_attention, MHA, _attend(plain_attention, qkv, MHA, expected_cache, 40), 40)
    torch.testing.assert_close(merged / scale, expected / scale, **TOLERANCE)


def test_attend_equals_the_reference() -> None:
    """Against attention over the decoded entries."""
    length, rows = 150, 3
    qkv = _random(rows, GQA.projections, seed=3)
    cache = _cache(GQA, length, 256)
    cache.scale[0] /= 30
    merged = _combine(attention, GQA, _attend(attention, qkv, GQA, cache, length), length)
    stop = length + rows
    keys, values = kv_decode(cache.planes[..., :stop, :], cache.scale[..., :stop], fine=True)
    queries = torch.empty(GQA.heads, rows, GQA.head_dim, dtype=torch.float16)
    plain_attention.kv_store(qkv, None, _rope(GQA), length, _copy(cache), GQA, queries, rows)
    expected = reference_attention(queries.transpose(0, 1).float(), keys, values, length, None)
    # Queries are rounded to float16 twice: 2^-11 of scores up to about 10.
    torch.testing.assert_close(merged, expected.flatten(1), rtol=5e-3, atol=5e-3)


MODULES = pytest.mark.parametrize("module", [attention, plain_attention], ids=["kernel", "twin"])


@MODULES
@pytest.mark.parametrize(
    ("shape", "norm"),
    [
        (AttentionShape(2, 2, 64), False),
        (AttentionShape(4, 1, 64), True),
        (AttentionShape(7, 1, 32, window=30), False),
        (AttentionShape(2, 1, 80), True),
    ],
    ids=["mha", "gqa4-norm", "gqa7-window", "gqa2-80-norm"],
)
def test_rows_do_not_depend_on_each_other(module, shape: AttentionShape, norm: bool) -> None:
    """One row at a time, in a larger cache, as many at once: the same bits in cache, partial and merged results."""
    rows, length = 3, 126
    gains = _random(shape.heads + shape.kv_heads, shape.head_dim, seed=5).exp() if norm else None
    qkv = _random(rows, shape.projections, seed=3) * 2
    together, alone = _cache(shape, length, 256), _cache(shape, length, 256)
    partials = _attend(module, qkv, shape, together, length, capacity=640, head_norm=gains)
    merged = _combine(module, shape, partials, length)
    for row in range(rows):
        single = _attend(module, qkv[row : row + 1].clone(), shape, alone, length + row, head_norm=gains)
        assert torch.equal(_combine(module, shape, single, length + row)[0], merged[row])
        seen = ~single.peak[0].isnan()
        splits = seen.shape[1]
        for one, many in zip(_parts(single), _parts(partials), strict=True):
            assert torch.equal(one[0][seen], many[row, :, :splits][seen])
    assert torch.equal(together.planes, alone.planes)
    stop = length + rows
    assert torch.equal(together.scale[..., :stop], alone.scale[..., :stop])


@MODULES
def test_verification_writes_over_drafts(module) -> None:
    """Entries that drafts have left in the cache do not change what is verified over them."""
    qkv = _random(3, MHA.projections, seed=3)
    drafts = _random(2, MHA.projections, seed=4)
    fresh, used = _cache(MHA, 126, 256), _cache(MHA, 126, 256)
    for step, row in enumerate(drafts.split(1)):
        _attend(module, row.clone(), MHA, used, 126 + step, draft=True, switch=64, recent=8)
    assert _equal(_attend(module, qkv, MHA, used, 126), _attend(module, qkv, MHA, fresh, 126))
    assert torch.equal(used.planes, fresh.planes)


def test_combine_over_more_splits_than_a_step_takes() -> None:
    shape = AttentionShape(2, 1, 64)
    length = shape.splits.start(35) + 7
    partials = Partials.empty(1, shape, length + 1)
    partials.accumulator.copy_(_random(*partials.accumulator.shape))
    partials.peak.copy_(_random(*partials.peak.shape, seed=1) * 5)
    partials.total.copy_(_random(*partials.total.shape, seed=2).exp())
    merged = _combine(attention, shape, partials, length)
    torch.testing.assert_close(merged, _combine(plain_attention, shape, partials, length), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_kv_store_and_load(norm: bool) -> None:
    shape = AttentionShape(2, 1, 80)
    gains = _random(3, 80, seed=5).exp() if norm else None
    rows, start = 19, 40
    qkv = _random(rows, shape.projections)
    cache = _cache(shape, start, 128)
    expected_cache = _copy(cache)
    found = torch.zeros(2, shape.heads, rows + 1, shape.head_dim, dtype=torch.float16)
    for module, kept, queries in zip((attention, plain_attention), (cache, expected_cache), found, strict=True):
        module.kv_store(qkv, gains, _rope(shape), start, kept, shape, queries, rows)
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=1e-3)
    assert torch.equal(cache.planes, expected_cache.planes)
    views = torch.zeros(2, 2, shape.kv_heads, 64, shape.head_dim, dtype=torch.float16)
    for module, (keys, values) in zip((attention, plain_attention), views, strict=True):
        module.kv_load(cache, shape, start + rows, keys, values)
    assert torch.equal(views[0], views[1])
    assert views[0, :, :, : start + rows].any()
    assert not views[0, :, :, start + rows :].any()


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("mask_elements", [1 << 25, 300])
def test_prefill_attention(monkeypatch: pytest.MonkeyPatch, window: int | None, mask_elements: int) -> None:
    monkeypatch.setattr(plain_attention, "MASK_ELEMENTS", mask_elements)
    queries, keys, values = (
        _random(4, 23, 64).half(),
        _random(2, 63, 64, seed=1).half(),
        _random(2, 63, 64, seed=2).half(),
    )
    for start in (0, 40):
        stop = start + 23
        found = plain_attention.prefill_attention(queries, keys[:, :stop], values[:, :stop], start, window)
        expected = reference_attention(
            queries.float().transpose(0, 1), keys[:, :stop].float(), values[:, :stop].float(), start, window
        )
        # Weights and results are float16.
        torch.testing.assert_close(found, expected.flatten(1), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "rows", "length"),
    [
        (AttentionShape(2, 2, 64), 1, 130),
        (AttentionShape(4, 1, 80), 5, 126),
        (AttentionShape(7, 1, 32, window=100), 2, 255),
    ],
)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_attend_half(shape: AttentionShape, rows: int, length: int, norm: bool) -> None:
    size = shape.head_dim
    gains = _random(shape.heads + shape.kv_heads, size, seed=5).exp() if norm else None
    qkv = _random(rows, shape.projections, seed=3).half()
    position = torch.tensor([length - 1], dtype=torch.int32)
    results = []
    for module in (attention, plain_attention):
        entries = torch.full((2, shape.kv_heads, 384, size), float("nan"), dtype=torch.float16)
        entries[:, :, :length] = _random(2, shape.kv_heads, length, size).half()
        partials = _partials(shape, rows, 384)
        module.attend_half(qkv, _rope(shape), position, 1, entries[0], entries[1], shape, partials, rows, gains)
        out = torch.empty(rows, shape.heads * size, dtype=torch.float16)
        module.combine_half(partials, position, 1, shape, out, rows)
        results.append((entries[:, :, : length + rows], out))
    # A norm's sum may round the other way, which moves a float16 by its last digit.
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3 if norm else 0.0, atol=1e-4 if norm else 0.0)
    torch.testing.assert_close(results[0][1], results[1][1], **TOLERANCE)


def _parts(partials: Partials) -> tuple[Tensor, Tensor, Tensor]:
    return partials.accumulator, partials.peak, partials.total


def _equal(one: Partials, other: Partials) -> bool:
    """Whether partial results are the same, what was left alone included."""
    return all(
        torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))
        for a, b in zip(_parts(one), _parts(other), strict=True)
    )
