"""The dual-plane products: both ways of walking against their twins, and each against itself with other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.kernels import dual_plane, plain_dual_plane
from bitnest_format.kernels.dual_plane import MmaTile, Tile
from bitnest_format.kernels.operands import Activations, Best, DualPlaneWeight, View, scale_pairs
from bitnest_format.kernels.reference import quantize_activation

ROOM = 16
VIEWS: tuple[View, ...] = ("draft", "target")
# Float32 sums over groups in another order than the twin's.
CLOSE = 1e-6

DP4A = [Tile(4, 128, 1, True), Tile(8, 256, 2, False)]
MMA = [MmaTile(2, 2), MmaTile(4, 4)]


def _weight(outputs: int, inputs: int, group_size: int, *, bias: bool = True) -> DualPlaneWeight:
    generator = torch.Generator().manual_seed(outputs + inputs + group_size)
    base = torch.randint(-8, 8, (outputs, inputs), generator=generator).to(torch.int8)
    refinement = torch.randint(-8, 8, (outputs, inputs), generator=generator).to(torch.int8)
    refinement[base == -8] &= 7
    scale = (torch.rand(outputs, inputs // group_size, generator=generator) * 0.1 + 1e-3).half()
    return DualPlaneWeight(
        packing.pack(base),
        packing.pack(refinement),
        scale,
        torch.randn(outputs, generator=generator) if bias else None,
        scale_pairs=scale_pairs(scale, group_size),
    )


def _acts(rows: int, inputs: int) -> Activations:
    """`rows` filled rows of `ROOM`; the others hold codes that must not be read."""
    x = torch.randn(ROOM, inputs, generator=torch.Generator().manual_seed(inputs))
    x[0, 0], x[-1, -1] = 50.0, -50.0
    codes, scale = quantize_activation(x)
    acts = Activations.empty(ROOM, inputs, codes.device)
    acts.codes.copy_(torch.stack((codes[:, 0::2], codes[:, 1::2]), dim=1))
    acts.scale.copy_(scale)
    acts.sums.copy_(codes.view(ROOM, -1, 32).sum(dim=-1, dtype=torch.int32))
    acts.scale[rows:] = torch.nan
    return acts


def _row(acts: Activations, row: int) -> Activations:
    """The same operands with one row moved to the front."""
    return Activations(*(torch.roll(part, -row, 0).contiguous() for part in (acts.codes, acts.scale, acts.sums)))


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs().max() <= CLOSE * expected.abs().max()).item())


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("walk", "outputs", "inputs", "group_size"),
    [
        (DP4A[0], 20, 896, 128),
        (DP4A[1], 20, 576, 64),
        (DP4A[0], 8, 160, 32),
        (DP4A[1], 8, 224, 224),
        (MMA[0], 20, 896, 128),
        (MMA[1], 16, 1280, 128),
    ],
)
def test_equals_the_twin(view: View, walk: Tile | MmaTile, outputs: int, inputs: int, group_size: int) -> None:
    weight, acts = _weight(outputs, inputs, group_size), _acts(3, inputs)
    expected, found = torch.full((2, ROOM, outputs), 7.0)
    plain_dual_plane.dual_plane_linear(acts, weight, view, expected, 3)
    dual_plane.launch_linear(acts, weight, view, found, 3, walk)
    assert _close(found, expected)
    assert torch.equal(found[3:], expected[3:])


@pytest.mark.parametrize("walk", [DP4A[0], MMA[0]])
def test_a_row_does_not_depend_on_the_others(walk: Tile | MmaTile) -> None:
    weight, acts = _weight(16, 384, 128, bias=False), _acts(ROOM, 384)
    together = torch.empty(ROOM, 16)
    dual_plane.launch_linear(acts, weight, "target", together, 9, walk)
    for row in (0, 4, 8):
        alone = torch.empty(ROOM, 16)
        dual_plane.launch_linear(_row(acts, row), weight, "target", alone, 1, walk)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("inputs", [256, 192])
def test_epilogues(inputs: int) -> None:
    weight, acts = _weight(24, inputs, 128 if inputs % 128 == 0 else 64), _acts(2, inputs)
    for view in VIEWS:
        expected, found = torch.full((2, ROOM, 24), 7.0)
        for module, out in ((plain_dual_plane, expected), (dual_plane, found)):
            module.dual_plane_linear(acts, weight, view, out, 2, add=True)
        assert _close(found, expected)
        expected, found = torch.full((2, ROOM, 12), 7.0)
        for module, out in ((plain_dual_plane, expected), (dual_plane, found)):
            module.dual_plane_gate_up(acts, weight, view, out, 2)
        assert _close(found, expected)
        blocks = dual_plane.argmax_blocks(24)
        assert blocks == plain_dual_plane.argmax_blocks(24)
        best = [Best(torch.zeros(ROOM, blocks), torch.zeros(ROOM, blocks, dtype=torch.int32)) for _ in range(2)]
        plain_dual_plane.dual_plane_argmax(acts, weight, view, best[0], 2)
        dual_plane.dual_plane_argmax(acts, weight, view, best[1], 2)
        assert _close(best[1].value, best[0].value)
        assert torch.equal(best[1].index, best[0].index)


def test_a_nan_shows_in_the_best_value() -> None:
    weight, acts = _weight(24, 256, 128), _acts(1, 256)
    assert weight.bias is not None
    weight.bias[20] = torch.nan
    best = Best(torch.zeros(ROOM, 3), torch.zeros(ROOM, 3, dtype=torch.int32))
    dual_plane.dual_plane_argmax(acts, weight, "target", best, 1)
    assert best.value[0].isnan().tolist() == [False, False, True]


def test_extreme_codes_are_summed_exactly() -> None:
    ones = torch.ones(16, 256, dtype=torch.int8)
    for code, (base, refinement) in {-128: (-8, 0), 119: (7, 7)}.items():
        scale = torch.ones(16, 2, dtype=torch.float16)
        weight = DualPlaneWeight(
            packing.pack(base * ones), packing.pack(refinement * ones), scale, None, None, scale_pairs(scale, 128)
        )
        acts = Activations.empty(ROOM, 256, ones.device)
        acts.codes.fill_(-127)
        acts.scale.fill_(16.0)
        acts.sums.fill_(-127 * 32)
        for walk in (DP4A[0], MMA[0]):
            out = torch.empty(ROOM, 16)
            dual_plane.launch_linear(acts, weight, "target", out, 1, walk)
            assert out[0].tolist() == [-127.0 * 256 * code] * 16


def test_scale_pairs() -> None:
    scale = torch.rand(3, 7).half()
    pairs = scale_pairs(scale, 128)
    assert pairs is not None and pairs.shape == (3, 4) and pairs.dtype == torch.int32
    assert torch.equal(pairs.view(torch.float16)[:, :7], scale)
    assert scale_pairs(scale, 64) is None and scale_pairs(scale.float(), 128) is None
    whole = torch.rand(3, 8).half()
    shared = scale_pairs(whole, 128)
    assert shared is not None and shared.data_ptr() == whole.data_ptr()
