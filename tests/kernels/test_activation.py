"""Norm and quantization kernels: interpreted, against their twins."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bitnest_format.kernels import activation, plain_activation, reference
from bitnest_format.kernels.operands import Activations

ROOM = 4
EPSILON = 1e-5
# Rows shorter than a slice, of several slices, of an odd number of runs.
COLUMNS = [32, 96, 544, 1184]
SENTINEL = 77


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _acts(columns: int, permuted: bool = False) -> Activations:
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)).int() if permuted else None
    acts = Activations.empty(ROOM, columns, permutation=order)
    for buffer in (acts.codes, acts.scale, acts.sums):
        buffer.fill_(SENTINEL)
    return acts


def _assert_same(found: Activations, expected: Activations, *, scale_exact: bool) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.sums, expected.sums)
    torch.testing.assert_close(found.scale, expected.scale, rtol=0 if scale_exact else 1e-6, atol=0)


@pytest.mark.parametrize("permuted", [False, True], ids=["in-order", "permuted"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_quantize(columns: int, permuted: bool) -> None:
    x = _random(ROOM, columns) * torch.tensor([[1.0], [1e-3], [50.0], [1.0]])
    found, expected = _acts(columns, permuted), _acts(columns, permuted)
    activation.quantize(x, found, 3)
    plain_activation.quantize(x, expected, 3)
    _assert_same(found, expected, scale_exact=True)
    assert bool((found.codes[3] == SENTINEL).all() and (found.sums[3] == SENTINEL).all())


def test_quantize_of_long_rows() -> None:
    x = _random(1, 8992)
    found, expected = _acts(8992), _acts(8992)
    activation.quantize(x, found, 1)
    plain_activation.quantize(x, expected, 1)
    _assert_same(found, expected, scale_exact=True)


def test_quantize_stores_even_columns_then_odd_ones() -> None:
    x = torch.arange(32.0).unsqueeze(0) * 4
    x[0, 31] = 127
    acts = _acts(32)
    activation.quantize(x, acts, 1)
    assert acts.codes[0, 0].tolist() == list(range(0, 128, 8))
    assert acts.codes[0, 1].tolist() == [*range(4, 124, 8), 127]
    assert acts.sums[0].tolist() == [sum(range(0, 124, 4)) + 127]
    assert acts.scale[0] == 1


def test_quantize_rounds_ties_to_even_and_keeps_zeros_and_extremes() -> None:
    x = torch.zeros(3, 32)
    x[0, :6] = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5, 126.5])
    x[2, :3] = torch.tensor([3e38, -3e38, 1.2e36])
    found, expected = _acts(32), _acts(32)
    activation.quantize(x, found, 3)
    plain_activation.quantize(x, expected, 3)
    _assert_same(found, expected, scale_exact=True)
    codes = torch.stack((found.codes[:, 0], found.codes[:, 1]), dim=-1).flatten(1)
    assert codes[0, :6].tolist() == [127, 0, 2, 0, -2, 126]
    assert not codes[1].any()
    assert found.scale[1] == 2.0**-120
    assert codes[2, :3].tolist() == [127, -127, 1]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("run", [activation, plain_activation], ids=["kernel", "twin"])
def test_a_row_with_nan_shows_it_in_its_scale(run: ModuleType) -> None:
    x = _random(2, 64)
    x[1, 40] = torch.nan
    acts = _acts(64)
    run.quantize(x, acts, 2)
    assert acts.scale.isnan().tolist() == [False, True, False, False]
    run.norm_quantize(x, torch.ones(64), EPSILON, acts, 2)
    assert acts.scale.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("permuted", [False, True], ids=["in-order", "permuted"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_norm_quantize(columns: int, permuted: bool) -> None:
    stream, gain = _random(ROOM, columns) * 3, _random(columns, seed=1) + 1
    stream[1] = 0
    found, expected = _acts(columns, permuted), _acts(columns, permuted)
    activation.norm_quantize(stream, gain, EPSILON, found, 3)
    plain_activation.norm_quantize(stream, gain, EPSILON, expected, 3)
    _assert_same(found, expected, scale_exact=False)


def test_norm_quantize_is_quantization_of_the_norm_up_to_ties() -> None:
    stream, gain = _random(ROOM, 512) * 3, _random(512, seed=1) + 1
    acts = _acts(512)
    plain_activation.norm_quantize(stream, gain, EPSILON, acts, ROOM)
    codes, scale = reference.quantize_activation(reference.rms_norm(stream, gain, EPSILON))
    found = torch.stack((acts.codes[:, 0], acts.codes[:, 1]), dim=-1).flatten(1)
    assert int((found.int() - codes.int()).abs().max()) <= 1
    assert float((found != codes).float().mean()) < 1e-3
    torch.testing.assert_close(acts.scale, scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_embed_norm_quantize(dtype: torch.dtype) -> None:
    embedding, gain = _random(11, 96).to(dtype), _random(96, seed=1)
    tokens = torch.tensor([9, 3, 10, 0, 3], dtype=torch.int32)
    found, expected = _acts(96, True), _acts(96, True)
    streams = torch.full((2, ROOM, 96), float(SENTINEL))
    activation.embed_norm_quantize(tokens, embedding, gain, EPSILON, streams[0], found, 3, token_offset=2)
    plain_activation.embed_norm_quantize(tokens, embedding, gain, EPSILON, streams[1], expected, 3, token_offset=2)
    _assert_same(found, expected, scale_exact=False)
    assert torch.equal(streams[0], streams[1])
    assert torch.equal(streams[0, :3], embedding[[10, 0, 3]].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_norm(columns: int, dtype: torch.dtype) -> None:
    stream, gain = _random(ROOM, columns).to(dtype), _random(columns, seed=1)
    hidden = torch.full((2, ROOM, columns), float(SENTINEL))
    activation.norm(stream, gain, EPSILON, hidden[0], 3)
    plain_activation.norm(stream, gain, EPSILON, hidden[1], 3)
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run", [activation, plain_activation], ids=["kernel", "twin"])
@pytest.mark.parametrize("name", ["quantize", "norm_quantize"])
def test_a_row_does_not_depend_on_its_neighbours(run: ModuleType, name: str) -> None:
    x, gain = _random(ROOM, 544), _random(544, seed=1)
    arguments = (gain, EPSILON) if name == "norm_quantize" else ()
    function: Callable[..., None] = getattr(run, name)
    together = _acts(544)
    function(x, *arguments, together, ROOM)
    for row in range(ROOM):
        alone = _acts(544)
        function(x[row : row + 1].clone(), *arguments, alone, 1)
        for buffer in ("codes", "scale", "sums"):
            assert torch.equal(getattr(alone, buffer)[0], getattr(together, buffer)[row])


def test_norm_half() -> None:
    stream, gain = _random(ROOM, 96).half(), _random(96, seed=1)
    out = torch.full((2, ROOM, 96), float(SENTINEL), dtype=torch.float16)
    activation.norm_half(stream, gain, EPSILON, out[0], 3)
    plain_activation.norm_half(stream, gain, EPSILON, out[1], 3)
    torch.testing.assert_close(out[0], out[1])


def test_embed_norm_half_rounds_the_embedding_to_the_stream() -> None:
    embedding, gain = _random(11, 96), _random(96, seed=1)
    tokens = torch.tensor([9, 3, 10, 0], dtype=torch.int32)
    stream, out = (torch.full((2, ROOM, 96), float(SENTINEL), dtype=torch.float16) for _ in range(2))
    activation.embed_norm_half(tokens, embedding, gain, EPSILON, stream[0], out[0], 2, token_offset=1)
    plain_activation.embed_norm_half(tokens, embedding, gain, EPSILON, stream[1], out[1], 2, token_offset=1)
    assert torch.equal(stream[0], stream[1])
    torch.testing.assert_close(out[0], out[1])


@pytest.mark.parametrize("columns", [32, 1120])
def test_silu_mul_half(columns: int) -> None:
    gate_up = _random(ROOM, 2 * columns).half()
    out = torch.full((2, ROOM, columns), float(SENTINEL), dtype=torch.float16)
    activation.silu_mul_half(gate_up, out[0], 3)
    plain_activation.silu_mul_half(gate_up, out[1], 3)
    torch.testing.assert_close(out[0], out[1])
