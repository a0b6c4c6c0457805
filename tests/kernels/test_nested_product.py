"""Products as operators of torch: one definition, whatever multiplies, and rows whose inputs lie on several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.checkpoint import NestedWeight
from bitnest_format.kernels.operands import DualPlaneWeight, View, scale_pairs
from bitnest_format.kernels.ops import Ops, plain_ops, triton_ops
from bitnest_format.kernels.reference import activation_codes, activation_scale
from bitnest_format.runtime.nested_product import NestedProduct, kernel_product, packed_product, unpacked_product

VIEWS: tuple[View, ...] = ("draft", "target")
# float32 sums over groups or ranks in another order, relative to the largest output.
CLOSE = 1e-6
# Weights rounded to float16, as one of the ways for many rows does.
HALF = 2**-11


def stored(outputs: int, inputs: int, group: int, *, permuted: bool = False) -> NestedWeight:
    generator = torch.Generator().manual_seed(outputs + inputs + group)
    weight = torch.randn(outputs, inputs, generator=generator)
    scale = nesting.round_scale(nesting.group_max_abs(weight, group) / 7, torch.float16)
    base = nesting.encode_base(weight, scale)
    return NestedWeight(
        packing.pack(base),
        scale.half(),
        packing.pack(nesting.encode_refinement(weight, base, scale)),
        None,
        torch.randperm(inputs, generator=generator).int() if permuted else None,
    )


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs))


def by_definition(x: Tensor, weight: NestedWeight, view: View, bias: Tensor | None) -> Tensor:
    """The formula of the specification in float64."""
    step = activation_scale(x)
    codes = activation_codes(x, step).double()
    if weight.permutation is not None:
        codes = codes[:, weight.permutation.long()]
    product = codes @ weight.dequantize(view).double().T * step.double().unsqueeze(1)
    return product if bias is None else product + bias.double()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = CLOSE) -> None:
    assert float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()) < tolerance


@pytest.mark.parametrize("permuted", [False, True], ids=["in order", "permuted"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_words_and_codes_give_the_same_bits(count, view, permuted):
    weight, x, bias = stored(48, 256, 64, permuted=permuted), rows_of(count, 256), torch.linspace(-1, 1, 48)
    words = NestedProduct.of(weight, view, "call")(x, None, bias)
    codes = NestedProduct.of(weight, view, "load")(x, None, bias)
    assert torch.equal(words, codes)
    assert_close(words, by_definition(x, weight, view, bias))


@pytest.mark.parametrize("ops", [triton_ops, plain_ops])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("count", "tolerance"), [(5, CLOSE), (20, HALF)], ids=["few rows", "many rows"])
def test_kernels_give_the_same_numbers(count, tolerance, view, ops):
    """By the row's own scale, and by one that is given."""
    weight, x, bias = stored(64, 256, 64, permuted=True), rows_of(count, 256), torch.linspace(-1, 1, 64)
    planes = DualPlaneWeight(
        weight.base, weight.refinement, weight.scale, bias, weight.permutation, scale_pairs(weight.scale, 64)
    )
    chosen: Ops = ops()
    wanted = NestedProduct.of(weight, view, "call")(x, None, bias)
    assert_close(kernel_product(chosen, x, None, planes, view), wanted, tolerance)
    step = 2 * activation_scale(x)
    assert_close(
        kernel_product(chosen, x, step, planes, view),
        NestedProduct.of(weight, view, "call")(x, step, bias),
        tolerance,
    )


@pytest.mark.parametrize("view", VIEWS)
def test_ranks_that_agree_on_the_scale_add_up_to_one(view):
    """Inputs cut in two: both halves are rounded by the whole row's scale, so that all codes are those of one rank."""
    weight, x = stored(32, 512, 128), rows_of(6, 512)
    halves = x.chunk(2, dim=1)
    step = torch.stack([activation_scale(half) for half in halves]).amax(dim=0)
    assert torch.equal(step, activation_scale(x))
    assert torch.equal(
        torch.cat([activation_codes(half, step) for half in halves], dim=1), activation_codes(x, activation_scale(x))
    )
    assert weight.refinement is not None
    parts = zip(weight.base.chunk(2, 1), weight.scale.chunk(2, 1), weight.refinement.chunk(2, 1), strict=True)
    outputs = [
        NestedProduct.of(
            replace(weight, base=base.contiguous(), scale=scale.contiguous(), refinement=refinement.contiguous()),
            view,
            "load",
        )(half, step, None)
        for half, (base, scale, refinement) in zip(halves, parts, strict=True)
    ]
    assert_close(outputs[0] + outputs[1], by_definition(x, weight, view, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_torchs_rules(dtype):
    """Shapes without data, no aliasing, no change of operands."""
    weight, x = stored(16, 128, 32), rows_of(3, 128).to(dtype)
    words = (weight.base, weight.refinement, weight.scale, None)
    torch.library.opcheck(packed_product, (x, None, *words, None, None, "target"))
    prepared = NestedProduct.of(weight, "draft", "load").weight
    assert not isinstance(prepared, NestedWeight)
    bias = torch.zeros(16, dtype=dtype)
    torch.library.opcheck(unpacked_product, (x, None, prepared.draft, prepared.scale, bias, None, "draft"))
