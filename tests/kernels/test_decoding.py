"""A text by the kernels themselves: the same as by their twins, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.ops import Ops, plain_ops, triton_ops
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.gpu_decoder import GpuDecoder

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}


def test_kernels_write_the_text_of_their_twins(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], kernel_device: str
) -> None:
    if kernel_device != "cpu":
        pytest.skip("tests/runtime/test_generate_gpu.py does this on a GPU")
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model", **SIZES))

    def tokens(ops: Ops, gamma: int) -> tuple[int, ...]:
        decoder = GpuDecoder(checkpoint, "nested", torch.device("cpu"), ops)
        return NestedModel(checkpoint, decoder, "nested").generate([5, 6, 7], max_new_tokens=3, gamma=gamma).token_ids

    expected = tokens(plain_ops(), 0)
    assert tokens(triton_ops(), 0) == expected
    assert tokens(triton_ops(), 1) == expected
