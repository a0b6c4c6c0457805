"""What cannot be served is refused before any text, in one sentence or a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.fused_moe import RoutedExperts

from bitnest_format.errors import BitnestError, CheckpointError, UnsupportedModelError, UsageError
from bitnest_format.manifest import Module, Plane
from bitnest_format.runtime import vllm_config
from bitnest_format.runtime.vllm_config import BitnestConfig, nested_parts, partition_problems

LAYER = "model.layers.0"


def refused(engine: Any, folder: Path, **options: Any) -> str:
    """The message with which the model is refused; vLLM wraps what is raised before a worker starts."""
    with pytest.raises(Exception) as caught, engine(folder, **options):
        pass
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, BitnestError):
        error = error.__cause__ or error.__context__
    assert error is not None, caught.value
    return str(error)


def module(outputs: int, inputs: int, group: int, permutation: str | None = None) -> Module:
    plane = Plane(name="x", sha256="0" * 64)
    return Module(shape=(outputs, inputs), group_size=group, base=plane, scale=plane, permutation=permutation)


def edit(folder: Path, family: str, change: Any) -> None:
    (path,) = folder.glob(f"bitnest-{family}-*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_groups_that_do_not_divide_the_partition(tiny_checkpoint, engine, tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=3, group_size=256)
    monkeypatch.setattr(vllm_config, "get_tensor_model_parallel_world_size", lambda: 4)
    assert refused(engine, folder) == (
        "3 problems:\n"
        "  - tensor parallelism does not fit the groups. Choose another --tensor-parallel-size, use "
        "--pipeline-parallel-size, or convert with smaller groups\n"
        "  - model.layers.0.self_attn.o_proj and 2 more: 256 inputs over 4 ranks are 64 each, no whole number of "
        "groups of 256\n"
        "  - model.layers.0.mlp.down_proj and 2 more: 512 inputs over 4 ranks are 128 each, no whole number of groups "
        "of 256"
    )


def test_partitions():
    modules = {
        f"{LAYER}.self_attn.q_proj": module(576, 576, -1),
        f"{LAYER}.self_attn.o_proj": module(576, 576, 64),
        f"{LAYER}.mlp.down_proj": module(576, 1536, 64, "x.weight_perm"),
    }
    assert partition_problems(modules, 1) == []
    moved = f"{LAYER}.mlp.down_proj: its inputs stand in another order (weight_perm) and cannot be cut over {{}} ranks"
    assert partition_problems(modules, 3) == [moved.format(3)]
    halves = f"{LAYER}.self_attn.o_proj: 576 inputs over 2 ranks are 288 each, no whole number of groups of 64"
    assert partition_problems(modules, 2) == [halves, moved.format(2)]


def test_layers_that_are_nested_in_part():
    query, key, value = (f"{LAYER}.self_attn.{letter}_proj" for letter in "qkv")
    layer = f"{LAYER}.self_attn.qkv_proj"
    modules = {query: module(64, 256, 128), value: module(32, 256, 64)}
    with pytest.raises(UnsupportedModelError) as caught:
        nested_parts(layer, modules)
    assert str(caught.value) == (
        f"{layer}: vLLM holds {query}, {key}, {value} as one layer, but {key} is not quantized. "
        "Run the model with bitnest_format.load."
    )
    modules[key] = module(32, 256, 128)
    with pytest.raises(UnsupportedModelError) as caught:
        nested_parts(layer, modules)
    assert str(caught.value) == (
        f"{layer}: vLLM holds its parts as one layer, but their group sizes differ: {query} 128, {key} 128, "
        f"{value} 64. Convert the model with one --group-size."
    )
    assert nested_parts(f"{LAYER}.mlp.gate_up_proj", modules) == {}


def test_mixtures_of_experts():
    experts = f"{LAYER}.block_sparse_moe.experts"
    config = BitnestConfig("target")
    layer = RoutedExperts.__new__(RoutedExperts)
    config.modules = {f"{experts}.0.w1": module(64, 256, 128)}
    with pytest.raises(UnsupportedModelError) as caught:
        config.layer_method(layer, experts)
    assert str(caught.value) == (
        f"{experts}: nested experts cannot be served by vLLM. Run the model with bitnest_format.load."
    )
    config.modules = {f"{LAYER}.self_attn.q_proj": module(64, 256, 128)}
    assert config.layer_method(layer, experts) is None


def test_view_that_does_not_exist():
    with pytest.raises(UsageError) as caught:
        BitnestConfig.from_config({"quant_method": "bitnest", "view": "fine"})
    assert str(caught.value) == "view is 'fine', expected 'target' or 'draft'"


def test_target_of_a_draft_only_checkpoint(tiny_checkpoint, engine, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", draft_only=True)
    with pytest.raises(CheckpointError) as caught:
        BitnestConfig("target").maybe_update_config(str(folder))
    assert str(caught.value) == (
        "bitnest.json: the only view is the draft, of 4 bits; the target view cannot be rebuilt. "
        "Serve the draft (--quantization bitnest-draft)."
    )


def test_repository_without_manifest(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        BitnestConfig("target").maybe_update_config("nobody/nothing")
    assert str(caught.value) == (
        "nobody/nothing: bitnest.json cannot be had, so it is no nested checkpoint, or its push did not come to its "
        "end. Where access needs a token, log in ('hf auth login', or HF_TOKEN)."
    )


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER}.mlp.up_proj.weight_packed"]


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.self_attn.k_proj.weight_scale"
    tensors[name] = tensors[name].bfloat16()


def short(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.self_attn.k_proj.weight_packed"
    tensors[name] = tensors[name][:-1].clone()


def forbidden(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.mlp.down_proj.weight_packed"][0, 0] = 0
    # The refinement beside it is random, and one of its eight codes is negative.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            missing,
            f"the weight files lack {LAYER}.mlp.up_proj.weight_packed. Download the checkpoint again.",
        ),
        (narrow, f"{LAYER}.self_attn.k_proj.weight_scale: is BF16 [128, 2], expected F16 or F32 [128, 2]"),
        (short, f"{LAYER}.self_attn.k_proj.weight_packed: is I32 [127, 32], expected I32 [128, 32]"),
        (
            forbidden,
            f"{LAYER}.mlp.down_proj: a base code of -8 stands beside a negative refinement code, which no 8-bit code "
            "can hold. Run 'bitnest-format validate' for the place.",
        ),
    ],
    ids=["missing", "narrow", "short", "forbidden"],
)
def test_broken_tensors(change, message, tiny_checkpoint, engine, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    edit(folder, "base", change)
    assert refused(engine, folder) == message


def test_load_format_of_another_model(engine, write_source, tmp_path):
    folder = write_source(tmp_path / "model")
    assert refused(engine, folder, load_format="bitnest") == (
        f"{folder}: no nested checkpoint, so it cannot have the load format bitnest"
    )
