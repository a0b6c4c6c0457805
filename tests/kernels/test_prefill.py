"""The products of many rows: interpreted kernels against their plain twins, and the pure choices of shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.kernels import plain_prefill, prefill
from bitnest_format.kernels.operands import RUN, Activations, DualPlaneWeight
from bitnest_format.kernels.prefill_tiles import (
    TILES,
    Tile,
    candidates,
    choose,
    chunk_outputs,
    estimate,
    step_inputs,
    tail_rows,
)

VIEWS = ["draft", "target"]
SMALL = Tile(rows=32, outputs=64, warps=4, stages=2)
# Inputs and group size; the last has groups of a whole row, walked in steps of 32.
GROUPS = [
    pytest.param(896, 128, id="7 groups of 128"),
    pytest.param(192, 64, id="3 groups of 64"),
    pytest.param(160, 32, id="5 groups of 32"),
    pytest.param(512, 512, id="a row of 512"),
    pytest.param(192, 96, id="2 groups of 96"),
]


def _weight(
    outputs: int, inputs: int, group_size: int, scale_type: torch.dtype = torch.float16, bias: bool = False
) -> DualPlaneWeight:
    generator = torch.Generator().manual_seed(outputs + inputs)
    base = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    refinement = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    refinement = torch.where(base == -8, refinement.abs().clamp_max(7), refinement)
    scale = torch.rand(outputs, inputs // group_size, generator=generator) * 0.1 + 1e-4
    return DualPlaneWeight(
        packing.pack(base),
        packing.pack(refinement),
        scale.to(scale_type),
        torch.randn(outputs, generator=generator) if bias else None,
    )


def _activations(rows: int, inputs: int, spare: int = 2) -> Activations:
    """Rows in use and some to spare, whose codes and scales must not matter."""
    generator = torch.Generator().manual_seed(rows)
    acts = Activations.empty(rows + spare, inputs)
    acts.codes.copy_(torch.randint(-127, 128, acts.codes.shape, generator=generator))
    acts.scale.copy_(torch.rand(rows + spare, generator=generator) + 0.01)
    acts.scale[rows:] = torch.nan
    acts.sums.fill_(-(1 << 30))
    return acts


def _out(rows: int, outputs: int) -> Tensor:
    """A row to spare, to see that it is left alone."""
    return torch.randn(rows + 1, outputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("inputs", "group_size"), GROUPS)
def test_dequantize(inputs: int, group_size: int, view: str) -> None:
    weight = _weight(13, inputs, group_size)
    expected, found = torch.full((2, 7, inputs), torch.nan, dtype=torch.float16)
    plain_prefill.dequantize(weight, view, 5, expected)
    prefill.dequantize(weight, view, 5, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("view", VIEWS)
def test_dequantize_rounds_once_and_saturates(view: str) -> None:
    """Sixteenths of the smallest scale, values below half's normal numbers and above its largest."""
    weight = _weight(3, 64, 32, torch.float32)
    weight = replace(weight, scale=torch.tensor([[2.0**-14, 2.0**-120], [1e-5, 3e-8], [1e4, 1e9]]))
    expected, found = torch.full((2, 3, 64), torch.nan, dtype=torch.float16)
    plain_prefill.dequantize(weight, view, 0, expected)
    prefill.dequantize(weight, view, 0, found)
    assert torch.equal(found, expected)
    assert found.isfinite().all() and found.abs().max() == 65504


def test_dequantized_columns_stand_as_activation_codes() -> None:
    """Scales are powers of two, so that weights are exact in float16."""
    weight = _weight(8, 96, 32)
    weight = replace(weight, scale=torch.full((8, 3), 0.125, dtype=torch.float16))
    acts = _activations(3, 96)
    half = torch.empty(8, 96, dtype=torch.float16)
    prefill.dequantize(weight, "draft", 0, half)
    in_order = acts.codes[:3].transpose(1, 2).flatten(1).double()
    product = acts.codes[:3].view(3, 96).double() @ half.double().T
    assert torch.equal(product, in_order @ packing.unpack(weight.base).double().T * 0.125)


@pytest.mark.parametrize("joins", [False, True], ids=["two products", "joined"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("inputs", "group_size"), GROUPS)
def test_linear_int8(inputs: int, group_size: int, view: str, joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_joins", lambda: joins)
    weight, acts = _weight(65, inputs, group_size), _activations(33, inputs)
    expected, found = _out(33, 65), _out(33, 65)
    plain_prefill.linear_int8(acts, weight, view, expected, 33, add=False)
    prefill.linear_int8(acts, weight, view, found, 33, add=False, tile=SMALL)
    _close(found, expected)
    assert torch.equal(found[33], _out(33, 65)[33])


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("scale_type", [torch.float16, torch.float32], ids=["half scales", "float scales"])
def test_linear_int8_epilogues(scale_type: torch.dtype, bias: bool, add: bool) -> None:
    weight, acts = _weight(65, 128, 64, scale_type, bias), _activations(17, 128)
    expected, found = _out(17, 65), _out(17, 65)
    plain_prefill.linear_int8(acts, weight, "target", expected, 17, add=add)
    prefill.linear_int8(acts, weight, "target", found, 17, add=add, tile=SMALL)
    _close(found, expected)
    assert torch.equal(found[17], _out(17, 65)[17])


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.outputs}")
def test_linear_int8_is_the_same_for_every_tile_and_number_of_rows(tile: Tile) -> None:
    weight, acts = _weight(136, 128, 64), _activations(144, 128)
    expected, found = _out(144, 136), _out(144, 136)
    prefill.linear_int8(acts, weight, "target", expected, 144, add=False, tile=SMALL)
    prefill.linear_int8(acts, weight, "target", found, 129, add=False, tile=tile)
    assert torch.equal(found[:129], expected[:129])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("refinement", [0, 7], ids=["lowest code", "next"])
def test_linear_int8_is_exact_at_the_ends_of_its_range(refinement: int, view: str) -> None:
    """Every product as large as it can be: each group sums to the extreme, and nothing is rounded."""
    ones = torch.ones(64, 256, dtype=torch.int8)
    weight = DualPlaneWeight(
        packing.pack(-8 * ones), packing.pack(refinement * ones), torch.ones(64, 2, dtype=torch.float16)
    )
    acts = Activations.empty(2, 256)
    acts.codes[0], acts.codes[1] = 127, -127
    acts.scale.fill_(1)
    found = torch.empty(2, 64)
    prefill.linear_int8(acts, weight, view, found, 2, add=False, tile=SMALL)
    code = -8 if view == "draft" else (-128 + refinement) / 16
    assert torch.equal(found, torch.tensor([[127 * 256 * code], [-127 * 256 * code]]).expand(2, 64))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_linear_by_dequantize(bias: bool, add: bool, view: str) -> None:
    """Three chunks, the last one shorter. Both sides round weights alike: only float32 sums differ."""
    weight, acts = _weight(300, 160, 32, bias=bias), _activations(33, 160)
    expected, found = _out(33, 300), _out(33, 300)
    scratch = torch.full((140, 160), torch.nan, dtype=torch.float16)
    plain_prefill.linear_by_dequantize(acts, weight, view, expected, 33, scratch, add=add)
    prefill.linear_by_dequantize(acts, weight, view, found, 33, scratch, add=add)
    _close(found, expected)
    assert torch.equal(found[33], _out(33, 300)[33])


@pytest.mark.parametrize("view", VIEWS)
def test_linear_by_dequantize_is_off_by_the_rounding_of_weights(view: str) -> None:
    weight, acts = _weight(40, 896, 128), _activations(17, 896)
    expected, found = _out(17, 40), _out(17, 40)
    plain_prefill.linear_int8(acts, weight, view, expected, 17, add=False)
    prefill.linear_by_dequantize(acts, weight, view, found, 17, torch.empty(896 * 64, dtype=torch.float16), add=False)
    half = torch.empty(40, 896, dtype=torch.float16)
    plain_prefill.dequantize(weight, view, 0, half)
    magnitude = acts.codes[:17].view(17, 896).abs().float() @ half.abs().float().T * acts.scale[:17, None]
    assert ((found - expected).abs()[:17] <= 2**-11 * magnitude).all()


@pytest.mark.parametrize("group_size", [32, 64])
def test_prefill_linear(group_size: int) -> None:
    weight, acts = _weight(70, 64, group_size), _activations(18, 64)
    expected, found = _out(18, 70), _out(18, 70)
    scratch = torch.empty(64 * 128, dtype=torch.float16)
    plain_prefill.prefill_linear(acts, weight, "target", expected, 18, scratch, add=True)
    prefill.prefill_linear(acts, weight, "target", found, 18, scratch, add=True)
    _close(found, expected)


def test_refusals() -> None:
    weight, acts = _weight(8, 64, 64), _activations(1, 64)
    out, scratch = _out(1, 8), torch.empty(63, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^the target view needs the refinement plane$"):
        prefill.linear_int8(acts, replace(weight, refinement=None), "target", out, 1, add=False)
    with pytest.raises(ValueError, match=r"^scratch of 63 weights does not hold one output of 64 inputs$"):
        prefill.linear_by_dequantize(acts, weight, "target", out, 1, scratch, add=False)
    with pytest.raises(ValueError, match=r"^groups of 48 inputs: not a multiple of 32$"):
        step_inputs(48)


def test_steps_divide_groups() -> None:
    assert [step_inputs(size) for size in (32, 64, 96, 128, 192, 4096, 11008)] == [32, 64, 32, 128, 64, 128, 128]


def test_candidates_are_sorted_and_fill_a_tile() -> None:
    for rows, outputs, inputs in ((1, 64, 64), (17, 4096, 4096), (288, 12288, 4096), (4096, 22016, 4096)):
        found = candidates(rows, outputs, inputs)
        costs = [estimate(tile, rows, outputs, inputs) for tile in found]
        assert found and costs == sorted(costs)
        assert all(tile.rows <= max(rows, 32) for tile in found)


def test_tails_hold_what_fills_no_whole_tile() -> None:
    wide = TILES[0]
    sizes = (1, 32, 33, 64, 65, 128, 129, 256, 288, 300)
    assert [tail_rows(wide, rows) for rows in sizes] == [32, 32, 64, 64, 0, 0, 32, 0, 32, 64]


def test_chunks_cover_the_outputs_evenly() -> None:
    assert chunk_outputs(12288, 4096, 8 << 20) == 2048
    assert chunk_outputs(4096, 11008, 8 << 20) == 640
    assert chunk_outputs(22016, 4096, 8 << 20) == 2048
    assert chunk_outputs(4096, 4096, 4096 * 3000) == 2048
    assert chunk_outputs(10, 4096, 4096 * 3) == 3


def test_small_groups_are_dequantized() -> None:
    assert choose(288, 4096, 4096, 32) == "dequantize"
    assert choose(288, 4096, 4096, 128) == "int8"
    assert RUN == 32


def _close(found: Tensor, expected: Tensor) -> None:
    """Float additions differ in order only: within 1e-6 of the largest output."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
