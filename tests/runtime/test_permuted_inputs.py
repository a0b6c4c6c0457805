"""Checkpoints whose columns stand in another order than their inputs: the same function, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnest_format import packing
from bitnest_format.architecture import read_architecture
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.validation import validate

Make = Callable[..., Path]
Open = Callable[..., NestedModel]
BASE, REFINEMENT = (f"bitnest-{plane}-00001-of-00001.safetensors" for plane in ("base", "refinement"))
PROMPT = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def permute(folder: Path) -> None:
    """Reorder the columns of every module of a checkpoint with one group per row; one order for shared inputs."""
    manifest = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    architecture = read_architecture(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    base, refinement = load_file(folder / BASE), load_file(folder / REFINEMENT)
    generator = torch.Generator().manual_seed(1)
    for layer in range(architecture.layers):
        for linears in architecture.shared_inputs(layer):
            order = torch.randperm(architecture.linear_shape(linears[0])[1], generator=generator)
            for linear in linears:
                name = f"{architecture.layer_prefix(layer)}{linear}"
                for plane, suffix in ((base, "weight_packed"), (refinement, "weight_refinement")):
                    codes = packing.unpack(plane[f"{name}.{suffix}"])
                    plane[f"{name}.{suffix}"] = packing.pack(codes[:, order])
                base[f"{name}.weight_perm"] = order.int()
                manifest["modules"][name]["permutation"] = f"{name}.weight_perm"
    for file, tensors in ((BASE, base), (REFINEMENT, refinement)):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    for name in ("bitnest-draft.safetensors.index.json", "bitnest.safetensors.index.json"):
        index = json.loads((folder / name).read_text(encoding="utf-8"))
        index["weight_map"] |= {tensor: BASE for tensor in base}
        stored = [*base.values(), *(refinement.values() if "draft" not in name else ())]
        index["metadata"]["total_size"] = sum(tensor.nbytes for tensor in stored)
        (folder / name).write_text(json.dumps(index), encoding="utf-8")
    for file in manifest["files"]:
        manifest["files"][file]["size"] = (folder / file).stat().st_size
    manifest["required_features"] = ["input_permutation"]
    (folder / "bitnest.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.fixture
def models(tmp_path: Path, tiny_checkpoint: Make) -> tuple[Path, Path]:
    """A checkpoint, and the same with its columns reordered."""
    settings: dict[str, Any] = {"group_size": -1, "model_type": "qwen2", "eos_token_id": None, "num_hidden_layers": 1}
    plain, permuted = (tiny_checkpoint(tmp_path / name, **settings) for name in ("plain", "permuted"))
    permute(permuted)
    assert validate(permuted) == []
    return plain, permuted


@pytest.mark.parametrize("unpack", ["load", "call"])
def test_the_cpu_path_reads_inputs_in_stored_order(models: tuple[Path, Path], unpack: Any) -> None:
    plain, permuted = (NestedModel.open(folder, unpack=unpack) for folder in models)
    for view in ("draft", "target"):
        assert torch.equal(plain.logits(PROMPT, view), permuted.logits(PROMPT, view))  # type: ignore[arg-type]
    texts = [model.generate(PROMPT, max_new_tokens=24, gamma=3).token_ids for model in (plain, permuted)]
    assert texts[0] == texts[1]


def test_the_gpu_path_reads_inputs_in_stored_order(models: tuple[Path, Path], engine_model: Open) -> None:
    plain, permuted = (engine_model(folder) for folder in models)
    texts = [
        [model.generate(PROMPT, max_new_tokens=24, gamma=gamma).token_ids for gamma in (0, 3)]
        for model in (plain, permuted)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1]
