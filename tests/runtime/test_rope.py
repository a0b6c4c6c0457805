"""Rotary tables: values by transformers, and positions that do not depend on who asked first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitnest_format.architecture import read_architecture
from bitnest_format.errors import UnsupportedModelError
from bitnest_format.runtime.rope import RopeTable

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 512,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


def _table(**changes: Any) -> RopeTable:
    config = {**CONFIG, **changes}
    return RopeTable(read_architecture(config), torch.device("cpu"))


def test_plain_frequencies() -> None:
    cosine, sine = _table().rows(100, 2)
    assert cosine.shape == sine.shape == (2, 1, 32)
    angles = torch.tensor([100.0, 101.0], dtype=torch.float64).view(2, 1, 1) * 10000.0 ** (
        -torch.arange(0, 64, 2, dtype=torch.float64) / 64
    )
    torch.testing.assert_close(cosine, angles.cos().float(), atol=2e-5, rtol=0)
    torch.testing.assert_close(sine, angles.sin().float(), atol=2e-5, rtol=0)


def test_a_given_head_size_counts() -> None:
    """64 frequencies for heads of 128, although 256 / 4 would make heads of 64."""
    assert _table(head_dim=128).rows(0, 1)[0].shape == (1, 1, 64)


def test_a_position_does_not_depend_on_who_asked_first() -> None:
    at_once, bit_by_bit = _table(), _table()
    cosine, sine = at_once.rows(0, 1500)
    for position in (0, 255, 256, 700, 1499):
        row = bit_by_bit.rows(position, 1)
        assert torch.equal(row[0][0], cosine[position])
        assert torch.equal(row[1][0], sine[position])


def test_settings_that_transformers_refuses_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="rotary settings"):
        _table(rope_scaling={"rope_type": "yarn"})
