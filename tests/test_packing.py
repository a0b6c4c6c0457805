"""Codes as bytes, against golden bytes and a reader that shares nothing with the writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitnest_format import nesting, packing

CASES = json.loads(
    (Path(__file__).resolve().parents[1] / "spec" / "vectors" / "packing.json").read_text(encoding="utf-8")
)["cases"]
PACKED = [case for case in CASES if case["expected"] != "refused"]
REFUSED = [case for case in CASES if case["expected"] == "refused"]


def described(case):
    return case["description"]


def int8(codes):
    return torch.tensor(codes, dtype=torch.int8)


@pytest.mark.parametrize("case", PACKED, ids=described)
def test_pack(case):
    words = packing.pack(int8(case["input"]["codes"]))
    assert words.dtype == torch.int32
    assert words.tolist() == case["expected"]["words"]
    assert words.numpy().tobytes().hex() == case["expected"]["bytes"]


@pytest.mark.parametrize("case", PACKED, ids=described)
def test_unpack(case):
    codes = packing.unpack(torch.tensor(case["expected"]["words"], dtype=torch.int32))
    assert codes.dtype == torch.int8
    assert codes.tolist() == case["input"]["codes"]


@pytest.mark.parametrize("case", REFUSED, ids=described)
def test_pack_refuses(case):
    with pytest.raises(ValueError, match=r"codes per row do not fill words of 8|a nibble holds -8..7"):
        packing.pack(int8(case["input"]["codes"]))


def test_pack_messages():
    with pytest.raises(ValueError, match=r"^63 codes per row do not fill words of 8$"):
        packing.pack(torch.zeros(2, 63, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"^codes span -9..8, a nibble holds -8..7$"):
        packing.pack(int8([[8, -9] + [0] * 6]))


@st.composite
def codes(draw):
    rows, words = draw(st.integers(0, 5)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return torch.randint(-8, 8, (rows, 8 * words), generator=generator, dtype=torch.int8)


@given(codes())
def test_pack_and_unpack_are_inverse(original):
    words = packing.pack(original)
    assert words.shape == (original.shape[0], original.shape[1] // 8)
    torch.testing.assert_close(packing.unpack(words), original, rtol=0, atol=0)


@given(codes())
def test_every_code_lies_where_the_specification_says(original):
    words = packing.pack(original).tolist()
    for row, values in enumerate(original.tolist()):
        for column, code in enumerate(values):
            assert (words[row][column // 8] >> 4 * (column % 8)) % 16 == code + 8


@given(codes())
def test_codes_that_are_not_contiguous(original):
    wide = torch.stack((original, torch.zeros_like(original)), dim=-1)
    torch.testing.assert_close(packing.pack(wide[..., 0]), packing.pack(original), rtol=0, atol=0)
    words = packing.pack(original)
    torch.testing.assert_close(packing.unpack(words.t().contiguous().t()), original, rtol=0, atol=0)


def test_further_leading_dimensions():
    original = torch.randint(-8, 8, (2, 3, 16), dtype=torch.int8)
    assert packing.pack(original).shape == (2, 3, 2)
    torch.testing.assert_close(packing.unpack(packing.pack(original)), original, rtol=0, atol=0)


def test_a_plane_takes_half_a_byte_per_weight():
    """SF-7: 576 x 576 weights make 165,888 bytes."""
    words = packing.pack(torch.zeros(576, 576, dtype=torch.int8))
    assert words.numel() * words.element_size() == 165_888


@given(codes(), st.integers(0, 2**32 - 1))
def test_any_forbidden_pair_equals_the_unpacked_test(base, seed):
    generator = torch.Generator().manual_seed(seed)
    refinement = torch.randint(-8, 8, base.shape, generator=generator, dtype=torch.int8)
    allowed = torch.maximum(refinement, nesting.refinement_floor(base))
    for candidate in (refinement, allowed):
        expected = bool(nesting.forbidden_pairs(base, candidate).any())
        assert packing.any_forbidden_pair(packing.pack(base), packing.pack(candidate)) is expected


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("code", [-8, -1, 0, 7])
def test_a_forbidden_pair_in_each_nibble(place, code):
    base, refinement = torch.full((1, 8), 7, dtype=torch.int8), torch.full((1, 8), -8, dtype=torch.int8)
    base[0, place], refinement[0, place] = -8, code
    assert packing.any_forbidden_pair(packing.pack(base), packing.pack(refinement)) is (code < 0)
