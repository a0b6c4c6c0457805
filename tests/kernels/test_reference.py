"""The operations around the products: values against float64, and rows that do not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from bitnest_format.kernels import reference


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_quantize_activation_of_a_worked_row() -> None:
    codes, scale = reference.quantize_activation(torch.tensor([[1.27, -0.635, 0.004, 0.0]]))
    assert codes.dtype == torch.int8
    # -63.5 steps is a tie in decimal, and float32 keeps it one: ties go to even.
    assert codes.tolist() == [[127, -64, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([0.01]))


def test_quantize_activation_of_zeros_and_extremes() -> None:
    codes, scale = reference.quantize_activation(torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [3e38, -3e38]]))
    assert codes[0].tolist() == [0, 0]
    assert codes[2].tolist() == [127, -127]
    assert bool((torch.isfinite(scale) & (scale > 0)).all())


@pytest.mark.parametrize("size", [1, 63, 137, 256])
def test_quantize_activation_stays_within_half_a_step(size: int) -> None:
    x = _random(5, size)
    codes, scale = reference.quantize_activation(x)
    assert int(codes.abs().max()) == 127
    error = (codes.double() * scale.double().unsqueeze(1) - x.double()).abs().amax(dim=1)
    assert bool((error <= scale.double() * 0.5000001).all())


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
def test_rms_norm_equals_float64(rows: int) -> None:
    x, gain = _random(rows, 137), _random(137, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    torch.testing.assert_close(reference.rms_norm(x, gain, 1e-5), expected.float())


def test_rms_norm_per_head_uses_each_heads_own_mean() -> None:
    heads = _random(3, 4, 64) * torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1)
    normed = reference.rms_norm(heads, torch.ones(4, 64), 1e-6)
    torch.testing.assert_close(normed.pow(2).mean(dim=-1), torch.ones(3, 4))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not reference.rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-5).any()


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_silu_mul_equals_float64(rows: int) -> None:
    gate_up = _random(rows, 2 * 137) * 20
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(reference.silu_mul(gate_up), (gate / (1 + (-gate).exp()) * up).float())


def test_apply_rope_turns_pairs_of_halves() -> None:
    heads = _random(7, 3, 64)
    angles = _random(7, 1, 32, seed=1)
    turned = reference.apply_rope(heads, angles.cos(), angles.sin())
    pairs = torch.complex(heads[..., :32].double(), heads[..., 32:].double())
    expected = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_lm_head_equals_float64(rows: int, dtype: torch.dtype) -> None:
    hidden, weight = _random(rows, 96), _random(5003, 96, seed=1).to(dtype)
    expected = (hidden.double() @ weight.double().T).float()
    torch.testing.assert_close(reference.lm_head(hidden, weight), expected, atol=1e-4, rtol=1e-5)


ROW_WISE: dict[str, Callable[[Tensor], Tensor]] = {
    "quantize_activation": lambda x: reference.quantize_activation(x)[0],
    "activation_scale": lambda x: reference.quantize_activation(x)[1],
    "rms_norm": lambda x: reference.rms_norm(x, _random(x.shape[1], seed=1), 1e-5),
    "rms_norm_heads": lambda x: reference.rms_norm(x.view(x.shape[0], 2, -1), torch.ones(2, x.shape[1] // 2), 1e-6),
    "silu_mul": reference.silu_mul,
    "lm_head": lambda x: reference.lm_head(x, _head(x.shape[1])),
}


@cache
def _head(size: int) -> Tensor:
    return _random(1021, size, seed=2)


@pytest.mark.parametrize("size", [2, 62, 250, 576, 28672])
@pytest.mark.parametrize("name", ROW_WISE)
def test_a_row_does_not_depend_on_its_neighbours(name: str, size: int) -> None:
    operation = ROW_WISE[name]
    x = _random(16, size) * 3
    alone = [operation(x[row : row + 1].clone())[0] for row in range(16)]
    for rows in (*range(2, 10), 16):
        together = operation(x[:rows].clone())
        for row in range(rows):
            assert torch.equal(together[row], alone[row]), f"row {row} of {rows}"
