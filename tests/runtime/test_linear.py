"""Modules that share an input: one product where they can be, the same outputs where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.checkpoint import NestedWeight
from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.runtime.linear import StackedLinear


def _weight(outputs: int, group_size: int, seed: int, order: Tensor | None = None, bias: bool = False) -> NestedWeight:
    weight = torch.randn(outputs, 256, generator=torch.Generator().manual_seed(seed))
    scale = nesting.round_scale(nesting.group_max_abs(weight, group_size) / 7, torch.float16)
    base = nesting.encode_base(weight, scale)
    return NestedWeight(
        base=packing.pack(base),
        scale=scale.half(),
        refinement=packing.pack(nesting.encode_refinement(weight, base, scale)),
        bias=torch.randn(outputs, generator=torch.Generator().manual_seed(seed + 1)).bfloat16() if bias else None,
        permutation=order,
    )


class Store:
    """Stands in for a checkpoint and its manifest; a pair of a weight and a bias is a module left unquantized."""

    def __init__(self, weights: list[NestedWeight | tuple[Tensor, Tensor | None]]):
        self.weights = weights
        self.modules = {str(n) for n, weight in enumerate(weights) if isinstance(weight, NestedWeight)}
        self.weight_map = {f"{n}.bias" for n, w in enumerate(weights) if isinstance(w, tuple) and w[1] is not None}

    @property
    def manifest(self) -> Store:
        return self

    def weight(self, name: str) -> NestedWeight:
        weight = self.weights[int(name)]
        assert isinstance(weight, NestedWeight)
        return weight

    def tensor(self, name: str) -> Tensor:
        number, _, kind = name.partition(".")
        tensor = self.weights[int(number)][kind == "bias"]  # type: ignore[index]
        assert isinstance(tensor, Tensor)
        return tensor


ORDER = torch.randperm(256, generator=torch.Generator().manual_seed(9)).int()

CASES: dict[str, tuple[list[NestedWeight], int]] = {
    "alike": ([_weight(48, 64, 0), _weight(16, 64, 2), _weight(8, 64, 4)], 1),
    "with biases": ([_weight(48, 64, 0, bias=True), _weight(16, 64, 2, bias=True)], 1),
    "one bias": ([_weight(48, 64, 0, bias=True), _weight(16, 64, 2)], 2),
    "two group sizes": ([_weight(48, 64, 0), _weight(16, 128, 2), _weight(8, 128, 4)], 2),
    "one order": ([_weight(48, 64, 0, ORDER), _weight(16, 64, 2, ORDER.clone())], 1),
    "two orders": ([_weight(48, 64, 0, ORDER), _weight(16, 64, 2, ORDER.flip(0)), _weight(8, 64, 4)], 3),
}


@pytest.mark.parametrize("unpack", ["load", "call"])
@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_stacked_in_order(name: str, view: Any, unpack: Any) -> None:
    weights, products = CASES[name]
    store: Any = Store(weights)
    names = [str(number) for number in range(len(weights))]
    options: Any = {"views": ("draft", "target"), "unpack": unpack, "device": torch.device("cpu")}
    linear = StackedLinear(store, names, **options)
    assert len(linear.parts) == products
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(7))
    codes, scale = quantize_activation(x)
    rounded = codes.float() * scale.unsqueeze(1)
    expected = []
    for weight in weights:
        inputs = rounded if weight.permutation is None else rounded[:, weight.permutation.long()]
        output = inputs @ weight.dequantize(view).T
        expected.append(output if weight.bias is None else output + weight.bias.float())
    torch.testing.assert_close(linear(x, view), torch.cat(expected, dim=1), atol=1e-4, rtol=1e-5)
    # Joined or apart, every output has the same bits.
    apart = [StackedLinear(store, [name], **options)(x, view) for name in names]
    assert torch.equal(linear(x, view), torch.cat(apart, dim=1))


def test_plane_bytes_count_what_is_stored() -> None:
    weights = [_weight(48, 64, 0, ORDER, bias=True), _weight(16, 64, 2, ORDER, bias=True)]
    store: Any = Store(weights)
    linear = StackedLinear(store, ["0", "1"], views=("draft", "target"), unpack="load", device=torch.device("cpu"))
    draft = 64 * 256 // 2 + 64 * 4 * 2 + 64 * 2 + 2 * 256 * 4
    assert linear.plane_bytes == {"draft": draft, "target": draft + 64 * 256 // 2}


@pytest.mark.parametrize("unpack", ["load", "call"])
@pytest.mark.parametrize("view", ["draft", "target"])
def test_unquantized_modules_keep_their_weight_and_see_the_input_unrounded(view: Any, unpack: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(24, 256, generator=generator).bfloat16()
    bias = torch.randn(24, generator=generator).bfloat16()
    store: Any = Store([_weight(48, 64, 0), (plain, bias), (plain, None), _weight(16, 64, 2), _weight(8, 64, 4)])
    names = [str(number) for number in range(5)]
    options: Any = {"views": ("draft", "target"), "unpack": unpack, "device": torch.device("cpu")}
    linear = StackedLinear(store, names, **options)
    assert len(linear.parts) == 4
    x = torch.randn(9, 256, generator=generator)
    output = linear(x, view)
    torch.testing.assert_close(output[:, 48:72], x @ plain.float().T + bias.float(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(output[:, 72:96], x @ plain.float().T, atol=1e-4, rtol=1e-5)
    quantized = StackedLinear(store, ["0", "3", "4"], **options)(x, view)
    assert torch.equal(torch.cat((output[:, :48], output[:, 96:]), dim=1), quantized)
    for row in range(9):
        assert torch.equal(linear(x[row : row + 1], view)[0], output[row])
    stored = 24 * 256 * 2
    assert StackedLinear(store, ["1", "2"], **options).plane_bytes[view] == 2 * stored + 24 * 2
