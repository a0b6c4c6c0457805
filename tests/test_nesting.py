"""The arithmetic of nested codes, against the published vectors and against exact fractions."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitnest_format import nesting

VECTORS = Path(__file__).resolve().parents[1] / "spec" / "vectors"


def load(name):
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


def floats(patterns):
    return torch.tensor([struct.unpack(">f", bytes.fromhex(p))[0] for p in patterns], dtype=torch.float32)


def bit_patterns(tensor):
    return [struct.pack(">f", value).hex() for value in tensor.flatten().tolist()]


def stored_scale(record):
    letter, dtype = {"F16": (">e", torch.float16), "F32": (">f", torch.float32)}[record["type"]]
    return torch.tensor([struct.unpack(letter, bytes.fromhex(record["bits"]))[0]], dtype=dtype)


COMPOSING, REFINEMENT, KV = load("composing.json"), load("refinement.json"), load("kv.json")
ALLOWED = [pair for pair in COMPOSING["pairs"] if pair["allowed"]]


def described(case):
    return case["description"]


def test_the_vectors_hold_every_pair():
    assert [(pair["q4"], pair["qr"]) for pair in COMPOSING["pairs"]] == [
        (q4, qr) for q4 in range(-8, 8) for qr in range(-8, 8)
    ]
    assert len(ALLOWED) == 256 - 8


@pytest.mark.parametrize("pair", COMPOSING["pairs"], ids=lambda pair: f"{pair['q4']},{pair['qr']}")
def test_compose(pair):
    base, refinement = (torch.tensor([[pair[key]]], dtype=torch.int8) for key in ("q4", "qr"))
    assert bool(nesting.forbidden_pairs(base, refinement)) is not pair["allowed"]
    if pair["allowed"]:
        composed = nesting.compose(base, refinement)
        assert composed.dtype == torch.int8
        assert composed.item() == pair["composed"]
        assert nesting.COMPOSED_MIN <= pair["composed"] <= nesting.COMPOSED_MAX
    else:
        with pytest.raises(ValueError, match=r"^a base code of -8 stands beside a negative refinement code$"):
            nesting.compose(base, refinement)


@pytest.mark.parametrize("case", COMPOSING["views"], ids=described)
def test_views(case):
    scale = stored_scale(case["scale"]).unsqueeze(0)
    codes = torch.arange(-8, 8, dtype=torch.int8).unsqueeze(0)
    assert bit_patterns(nesting.draft_weight(codes, scale)) == case["draft"]
    base = torch.tensor([[pair["q4"] for pair in ALLOWED]], dtype=torch.int8)
    refinement = torch.tensor([[pair["qr"] for pair in ALLOWED]], dtype=torch.int8)
    assert bit_patterns(nesting.target_weight(base, refinement, scale)) == case["target"]


@pytest.mark.parametrize("case", REFINEMENT["closed_form"], ids=described)
def test_encode_refinement(case):
    weight = floats(case["input"]["weights"]).unsqueeze(0)
    base = torch.full_like(weight, case["input"]["q4"]).to(torch.int8)
    refinement = nesting.encode_refinement(weight, base, stored_scale(case["input"]["scale"]).unsqueeze(0))
    assert refinement.flatten().tolist() == case["expected"]["qr"]
    nesting.compose(base, refinement)


@pytest.mark.parametrize("case", REFINEMENT["round_to_nearest"], ids=described)
def test_encode_base(case):
    weight = floats(case["input"]["weights"]).unsqueeze(0)
    base = nesting.encode_base(weight, stored_scale(case["input"]["scale"]).unsqueeze(0))
    assert base.dtype == torch.int8
    assert base.flatten().tolist() == case["expected"]["q4"]


@pytest.mark.parametrize("case", KV["cases"], ids=described)
def test_encode_kv(case):
    expected = case["expected"]
    base, refinement, scale = nesting.encode_kv(floats(case["input"]["vector"]))
    assert base.tolist() == expected["q4"]
    assert refinement.tolist() == expected["qr"]
    assert bool(torch.isfinite(scale)) and float(scale) > 0
    if expected["scale"] is not None:
        assert bit_patterns(scale) == [expected["scale"]["bits"]]
        assert bit_patterns(nesting.draft_kv(base, scale)) == expected["draft"]
        assert bit_patterns(nesting.target_kv(base, refinement, scale)) == expected["target"]


def test_the_worked_kv_vector_in_decimals():
    base, refinement, scale = nesting.encode_kv(torch.tensor([1.4, -0.7, 0.31, 0.0]))
    torch.testing.assert_close(scale, torch.tensor(0.2))
    torch.testing.assert_close(nesting.draft_kv(base, scale), torch.tensor([1.4, -0.8, 0.4, 0.0]))
    torch.testing.assert_close(nesting.target_kv(base, refinement, scale), torch.tensor([1.4, -0.7125, 0.3125, 0.0]))


def test_encode_kv_gives_one_scale_per_vector_and_keeps_zero_vectors_zero():
    entries = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    entries[1, 0] = 0
    base, refinement, scale = nesting.encode_kv(entries)
    assert scale.shape == (3, 2) and bool((scale > 0).all())
    assert not base[1, 0].any() and not refinement[1, 0].any()
    assert not nesting.target_kv(base, refinement, scale)[1, 0].any()
    error = (nesting.target_kv(base, refinement, scale) - entries).abs()
    assert bool((error <= scale.unsqueeze(-1) / 16 * 1.001).all())


@st.composite
def weights(draw):
    """A weight of odd sizes and its group size."""
    outputs, groups = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    group_size = 8 * draw(st.integers(1, 4))
    seed, exponent = draw(st.integers(0, 2**32 - 1)), draw(st.integers(-6, 12))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, groups * group_size, generator=generator) * 2.0**exponent
    if draw(st.booleans()):
        weight[0, :group_size] = 0
    return weight, group_size


@given(weights())
def test_both_views_are_exact_in_float32(case):
    weight, group_size = case
    scale, base, refinement = encoded(weight, group_size)
    assert scale.dtype == torch.float16
    exact = nesting.expand_groups(scale.double(), weight.shape[1])
    torch.testing.assert_close(nesting.draft_weight(base, scale).double(), base.double() * exact, rtol=0, atol=0)
    composed = 16 * base.double() + refinement.double()
    torch.testing.assert_close(
        nesting.target_weight(base, refinement, scale).double(), composed * exact / 16, rtol=0, atol=0
    )
    place = (0, weight.shape[1] - 1)
    fraction = Fraction(int(composed[place])) * Fraction(float(exact[place])) / 16
    assert Fraction(float(nesting.target_weight(base, refinement, scale)[place])) == fraction


@given(weights())
def test_composing_never_changes_the_base(case):
    weight, group_size = case
    scale, base, refinement = encoded(weight, group_size)
    kept_base, kept_refinement = base.clone(), refinement.clone()
    composed = nesting.compose(base, refinement)
    nesting.target_weight(base, refinement, scale)
    torch.testing.assert_close(base, kept_base, rtol=0, atol=0)
    torch.testing.assert_close(refinement, kept_refinement, rtol=0, atol=0)
    # The base can be read off the composed code: the draft is contained in the target.
    torch.testing.assert_close((composed.to(torch.int16) + 8 >> 4).to(torch.int8), base, rtol=0, atol=0)


@given(weights())
def test_round_to_nearest_with_closed_refinement_is_within_a_sixteenth(case):
    weight, group_size = case
    scale, base, refinement = encoded(weight, group_size)
    step = nesting.expand_groups(scale.float(), weight.shape[1])
    inside = (weight - nesting.draft_weight(base, scale)).abs() <= step / 2
    error = (weight - nesting.target_weight(base, refinement, scale)).abs()
    assert bool((error <= step / 16 * 1.001)[inside].all())
    assert bool((base[weight == 0] == 0).all()) and bool((refinement[weight == 0] == 0).all())
    assert not nesting.target_weight(base, refinement, scale)[weight == 0].any()


def encoded(weight, group_size):
    largest = nesting.group_max_abs(weight, group_size)
    dtype = nesting.stored_scale_type(largest)
    scale = nesting.round_scale(largest / 7, dtype)
    base = nesting.encode_base(weight, scale)
    return scale.to(dtype), base, nesting.encode_refinement(weight, base, scale)


def test_target_of_a_forbidden_pair_is_refused_and_never_wraps():
    base, refinement = torch.tensor([[-8]], dtype=torch.int8), torch.tensor([[-1]], dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^a base code of -8 stands beside a negative refinement code$"):
        nesting.target_weight(base, refinement, torch.ones(1, 1))


def test_saturation_is_the_share_outside_the_range():
    weight = torch.tensor([[0.0, 0.4, 0.6, -0.6, -8.2, -7.9, 7.6, 1.0]])
    base = torch.tensor([[0, 0, 0, 0, -8, -8, 7, 1]], dtype=torch.int8)
    # 0.6 steps are 10 sixteenths, -8.2 needs -3 beside -8, 7.6 needs 10; -7.9 needs 2 and 0.4 needs 6.
    assert nesting.saturation(weight, base, torch.ones(1, 1)) == pytest.approx(4 / 8)


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [
        ([5e5], torch.float32),
        ([1e-7], torch.float32),
        ([0.02, 5e5], torch.float32),
        ([0.02, 3.0], torch.float16),
        ([0.0, 3.0], torch.float16),
        ([0.0], torch.float16),
        ([7 * 2.0**-14], torch.float16),
    ],
)
def test_stored_scale_type_can_hold_every_group(largest, dtype):
    """DT-1: a group with a maximum of 5e5 or 1e-7 gets neither an infinite nor a zero scale."""
    maxima = torch.tensor([largest])
    assert nesting.stored_scale_type(maxima) == dtype
    scale = nesting.round_scale(maxima / 7, dtype).to(dtype)
    assert bool(torch.isfinite(scale).all()) and bool((scale > 0).all())


@pytest.mark.parametrize("value", [5e5, -7e4, 1e-7, 3e-3])
def test_large_and_tiny_weights_survive_in_float32_scales(value):
    weight = torch.full((1, 8), value, dtype=torch.bfloat16).float()
    scale, base, refinement = encoded(weight, 8)
    torch.testing.assert_close(nesting.target_weight(base, refinement, scale), weight, rtol=1e-2, atol=0)


def test_round_scale_refuses_what_the_type_cannot_hold():
    with pytest.raises(OverflowError, match=r"^a group's scale does not fit torch.float16: 71429$"):
        nesting.round_scale(torch.tensor([0.5, 71429.0]), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_round_scale_never_gives_zero(dtype):
    scale = nesting.round_scale(torch.tensor([0.0, 1e-44]), dtype)
    assert bool((scale == nesting.SMALLEST_SCALE[dtype]).all())
    torch.testing.assert_close(scale.to(dtype).float(), scale, rtol=0, atol=0)
    assert bool((scale / 16 * 16 == scale).all())


def test_scales_are_rounded_before_any_code():
    """A weight between two codes of the exact scale takes the code of the rounded one."""
    exact = torch.tensor([[1.0 + 2.0**-12]])
    scale = nesting.round_scale(exact, torch.float16)
    assert float(scale) == 1.0
    weight = torch.tensor([[2.5 + 2.0**-12]])
    assert float(nesting.encode_base(weight, exact)) == 2.0
    assert float(nesting.encode_base(weight, scale)) == 3.0
