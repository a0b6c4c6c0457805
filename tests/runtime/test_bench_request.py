"""What a checkpoint's storage is for the byte model."""

from __future__ import annotations

import pytest
import torch

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.runtime.bench_request import storage_of
from bitnest_format.runtime.byte_model import Storage, step_bytes
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.model import Decoder
from bitnest_format.runtime.sampling import Greedy
from bitnest_format.runtime.speculative import SpeculativeLoop


@pytest.mark.parametrize(
    ("options", "storage"),
    [
        ({"group_size": 32}, Storage(group_size=32)),
        ({"scale_type": torch.float32}, Storage(group_size=128, scale_bytes=4)),
        ({"nested_head": True, "group_size": 64}, Storage(group_size=64, head="nested")),
    ],
    ids=["groups of 32", "float32 scales", "nested head"],
)
def test_a_checkpoint_reads_what_the_byte_model_says(tiny_checkpoint, tmp_path, options, storage):
    """The sizes of the loaded tensors, which the CPU's statistics add up, give the same bytes."""
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model", **options))
    assert storage_of(checkpoint) == storage
    loop = SpeculativeLoop(Decoder(checkpoint, ("draft", "target")), Greedy(), KvSettings(), "target")
    sizes = loop.decoder.architecture
    for view, fine_from in (("draft", 0), ("draft", 30), ("target", 0)):
        expected = step_bytes(sizes, view, 50, storage, fine_from=fine_from)
        assert loop.bytes_of_pass(50, view, fine_from) == expected.total
