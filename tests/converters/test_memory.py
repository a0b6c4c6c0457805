"""What a conversion holds in memory does not grow with the number of layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A model of HIDDEN inputs whose tensors are made when they are read, and are never all there.
SCRIPT = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from bitnest_format.architecture import read_architecture
from bitnest_format.converters.base import Inspection, Provenance, TensorInfo
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert

class Made:
    provenance, notes = Provenance(kind="random"), []

    def __init__(self, layers, folder):
        self.config = {
            "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1536,
            "num_hidden_layers": layers, "vocab_size": 1000, "max_position_embeddings": 512,
        }
        self.location = folder / "nowhere"
        shapes = read_architecture(self.config).tensors()
        self.tensors = {name: TensorInfo(shape=shape, dtype=torch.float16) for name, shape in shapes.items()}

    def read(self, name):
        return torch.randn(self.tensors[name].shape).mul_(0.02).half()

    def inspect(self):
        return Inspection(problems=[], fingerprint=f"{len(self.tensors):064x}")

    def write_side_files(self, folder):
        return []

folder = Path(sys.argv[1])
save_file({"input_ids": torch.randint(0, 1000, (8, 64))}, folder / "ids.safetensors")
options = ConvertOptions(
    calibration=str(folder / "ids.safetensors"), calibration_samples=8, sequence_length=64,
    base_sweeps=0, refinement_sweeps=0, scale_search="max",
)

def watch(stage, done, total):
    if stage == "quantizing layers":
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        print(1024 * int(status.partition("RssAnon:")[2].split()[0]))

convert(Made(6, folder), folder / "out", options, progress=watch)
"""
LAYER_BYTES = 4 * (4 * 512 * 512 + 3 * 512 * 1536)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_from_layer_to_layer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Before each of six layers, and after the last.
    held = list(map(int, done.stdout.split()))
    assert len(held) == 7
    # Three more layers; the allocator's own wants vary by a few megabytes.
    assert max(held[4:]) - max(held[1:4]) < LAYER_BYTES
