"""The nested product: exact integers, both backends, both memory modes, every group size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.kernels.reference_linear import LinearWeight, View, code_type, nested_linear, prepare_linear

BACKENDS = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(
        torch.int8,
        id="int8",
        marks=pytest.mark.skipif(
            code_type(torch.device("cpu")) != torch.int8, reason="this processor has no exact byte products"
        ),
    ),
]
MODES = [pytest.param("load", id="load"), pytest.param("call", id="call")]
VIEWS = [pytest.param("draft", id="draft"), pytest.param("target", id="target")]


def _codes(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    refinement = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    return base, torch.where(base == -8, refinement.abs().clamp_max(7), refinement)


def _scale(outputs: int, groups: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(outputs, groups, generator=generator) * 0.1 + 1e-3).half()


def _weight(outputs: int, inputs: int, groups: int, **options: Any) -> LinearWeight:
    base, refinement = _codes(outputs, inputs)
    options = {"views": ("draft", "target"), "unpack": "load", **options}
    return prepare_linear(packing.pack(base), _scale(outputs, groups), packing.pack(refinement), **options)


def _activations(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-127, 128, (rows, inputs), generator=generator, dtype=torch.int8)
    return codes, torch.rand(rows, generator=generator) + 0.01


def _by_integers(codes: Tensor, scale: Tensor, outputs: int, groups: int, view: View) -> Tensor:
    """The definition with Python integers in group sums and float64 everywhere else."""
    base, refinement = _codes(outputs, codes.shape[1])
    weight = base.long() if view == "draft" else 16 * base.long() + refinement.long()
    group_scale = _scale(outputs, groups).double() / (1 if view == "draft" else 16)
    size = codes.shape[1] // groups
    result = torch.zeros(codes.shape[0], outputs, dtype=torch.float64)
    for group in range(groups):
        columns = slice(group * size, (group + 1) * size)
        result += (codes[:, columns].long() @ weight[:, columns].T).double() * group_scale[:, group]
    return result * scale.double().unsqueeze(1)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("inputs", "groups"),
    [(32, 1), (64, 2), (576, 9), (896, 7), (13696, 107), (1536, 1), (8248, 1)],
    ids=["one group", "32", "64", "7 groups", "107 groups", "a row of 1536", "a row of 8248"],
)
def test_nested_linear_equals_integer_sums(
    inputs: int, groups: int, backend: torch.dtype, mode: str, view: View
) -> None:
    outputs = 24
    weight = _weight(outputs, inputs, groups, unpack=mode, codes_in=backend)
    for rows in (1, 4, 5, 17):
        codes, scale = _activations(rows, inputs)
        result = nested_linear(codes, scale, weight, view)
        expected = _by_integers(codes, scale, outputs, groups, view)
        # A few roundings of float32 in sums whose terms may cancel.
        bound = 4e-7 * expected.abs().max() * max(1, groups) ** 0.5
        assert float((result.double() - expected).abs().max()) <= bound


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_group_is_exact_to_the_last_integer(backend: torch.dtype) -> None:
    """The largest sums that can occur, 1024 inputs of -127 times -128, and the same less one."""
    base = torch.full((8, 1024), -8, dtype=torch.int8)
    refinement = torch.zeros(8, 1024, dtype=torch.int8)
    refinement[1, 0] = 1
    weight = prepare_linear(
        packing.pack(base),
        torch.full((8, 1), 16.0),
        packing.pack(refinement),
        views=("target",),
        unpack="load",
        codes_in=backend,
    )
    codes = torch.full((1, 1024), -127, dtype=torch.int8)
    result = nested_linear(codes, torch.ones(1), weight, "target")
    assert result[0, 0] == 1024 * 127 * 128
    assert result[0, 1] == 1024 * 127 * 128 - 127


@pytest.mark.parametrize("view", VIEWS)
def test_backends_and_memory_modes_give_the_same_bits(view: View) -> None:
    codes, scale = _activations(7, 1152)
    results = [
        nested_linear(codes, scale, _weight(40, 1152, 9, unpack=mode.values[0], codes_in=backend.values[0]), view)
        for mode in MODES
        for backend in BACKENDS
        if backend.values[0] != torch.int8 or code_type(torch.device("cpu")) == torch.int8
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours(backend: torch.dtype, mode: str, view: View) -> None:
    weight = _weight(72, 896, 7, unpack=mode, codes_in=backend, bias=torch.arange(72.0))
    codes, scale = _activations(40, 896)
    alone = torch.cat([nested_linear(codes[row : row + 1], scale[row : row + 1], weight, view) for row in range(40)])
    for rows in (*range(2, 10), 16, 40):
        assert torch.equal(nested_linear(codes[:rows], scale[:rows], weight, view), alone[:rows])


def test_blocks_of_rows_and_outputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = _activations(9, 512)
    whole = nested_linear(codes, scale, _weight(40, 512, 4), "target")
    monkeypatch.setattr("bitnest_format.kernels.reference_linear.BLOCK_SUMS", 4 * 40 * 2)
    assert torch.equal(nested_linear(codes, scale, _weight(40, 512, 4), "target"), whole)
    monkeypatch.setattr("bitnest_format.kernels.reference_linear.BLOCK_WEIGHTS", 7 * 512)
    assert torch.equal(nested_linear(codes, scale, _weight(40, 512, 4, unpack="call"), "target"), whole)


def test_nested_linear_agrees_with_the_dequantized_weight() -> None:
    base, refinement = _codes(48, 256)
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_activation(x)
    rounded = codes.float() * scale.unsqueeze(1)
    bias = torch.arange(48.0)
    weight = _weight(48, 256, 4, bias=bias)
    draft = rounded @ nesting.draft_weight(base, _scale(48, 4)).T + bias
    target = rounded @ nesting.target_weight(base, refinement, _scale(48, 4)).T + bias
    torch.testing.assert_close(nested_linear(codes, scale, weight, "draft"), draft, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(nested_linear(codes, scale, weight, "target"), target, atol=1e-4, rtol=1e-5)


def test_stored_columns_follow_the_input_permutation() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    codes, scale = _activations(3, 256)
    plain = nested_linear(codes[:, order].contiguous(), scale, _weight(16, 256, 2), "target")
    permuted = nested_linear(codes, scale, _weight(16, 256, 2, permutation=order.int()), "target")
    assert torch.equal(permuted, plain)


def test_a_draft_needs_no_refinement() -> None:
    base, _ = _codes(16, 64)
    weight = prepare_linear(packing.pack(base), _scale(16, 1), views=("draft",), unpack="load")
    codes, scale = _activations(2, 64)
    assert torch.equal(
        nested_linear(codes, scale, weight, "draft"), nested_linear(codes, scale, _weight(16, 64, 1), "draft")
    )
    with pytest.raises(ValueError, match="the target view needs the refinement plane"):
        prepare_linear(packing.pack(base), _scale(16, 1), views=("target",), unpack="load")


@pytest.mark.parametrize("mode", MODES)
def test_a_forbidden_pair_is_refused(mode: Any) -> None:
    base, refinement = torch.full((8, 64), -8, dtype=torch.int8), torch.zeros(8, 64, dtype=torch.int8)
    refinement[3, 5] = -1
    with pytest.raises(ValueError, match="a base code of -8 stands beside a negative refinement code"):
        prepare_linear(packing.pack(base), torch.ones(8, 1), packing.pack(refinement), views=("target",), unpack=mode)
