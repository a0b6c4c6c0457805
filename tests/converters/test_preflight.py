"""The pre-flight check: all problems at once, in whole sentences; and a plan whose sizes come true."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitnest_format.architecture import read_architecture
from bitnest_format.checkpoint import TARGET_INDEX
from bitnest_format.converters.hf import HuggingFaceSource
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.preflight import ModulePlan, Plan, choose_group_size, preflight, render_plan
from bitnest_format.converters.work_folder import WorkFolder
from bitnest_format.errors import SourceError

TinyModel = tuple[dict[str, Any], dict[str, Tensor]]
Make = Callable[..., TinyModel]
Usage = namedtuple("Usage", "total used free")

ROUNDED = ConvertOptions(base="rtn", refinement="closed", rotation="none")


def write(folder: Path, model: TinyModel) -> HuggingFaceSource:
    config, tensors = model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return HuggingFaceSource(folder)


def plan_of(source: HuggingFaceSource, output: Path, options: ConvertOptions = ROUNDED) -> Plan:
    return preflight(source, read_architecture(source.config), options, output)


def problems_of(source: HuggingFaceSource, output: Path, options: ConvertOptions = ROUNDED) -> list[str]:
    with pytest.raises(SourceError) as caught:
        plan_of(source, output, options)
    return caught.value.problems


# --- group sizes


@pytest.mark.parametrize(
    ("inputs", "preferred", "size"),
    [
        (4096, None, 128),
        (128, None, 128),
        (576, None, 64),
        (1536, None, 128),
        (96, None, 32),
        (13696, None, 128),
        (576, 64, 64),
        (576, 32, 32),
        (576, 288, 288),
        (576, -1, 576),
        (8, -1, 8),
    ],
)
def test_choose_group_size(inputs: int, preferred: int | None, size: int) -> None:
    assert choose_group_size(inputs, preferred) == size


@pytest.mark.parametrize(
    ("inputs", "preferred", "reason"),
    [
        (80, None, "80 inputs cannot be divided into groups of 32"),
        (576, 128, "576 inputs cannot be divided into groups of 128"),
        (100, -1, "100 inputs do not fill words of 8 codes"),
    ],
)
def test_choose_group_size_refuses(inputs: int, preferred: int | None, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        choose_group_size(inputs, preferred)


def test_group_sizes_follow_the_modules(tmp_path: Path, tiny_model: Make) -> None:
    model = tiny_model(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    plan = plan_of(write(tmp_path / "source", model), tmp_path / "output")
    assert {name.split(".", 3)[3]: size for name, size in plan.group_sizes.items()} == {
        "self_attn.q_proj": 64,
        "self_attn.k_proj": 64,
        "self_attn.v_proj": 64,
        "self_attn.o_proj": 64,
        "mlp.gate_proj": 64,
        "mlp.up_proj": 64,
        "mlp.down_proj": 128,
    }
    assert plan.preferred_group_size == 128


def test_one_group_per_row(tmp_path: Path, tiny_model: Make) -> None:
    options = ConvertOptions(base="rtn", refinement="closed", group_size=-1)
    plan = plan_of(write(tmp_path / "source", tiny_model()), tmp_path / "output", options)
    assert {plan.group_sizes[name] for name in plan.modules if name.endswith("down_proj")} == {512}
    assert {plan.group_sizes[name] for name in plan.modules if not name.endswith("down_proj")} == {256}
    assert plan.preferred_group_size == -1
    assert plan.scale_bytes == 2 * sum(module.shape[0] for module in plan.modules.values())


def test_forced_group_size_names_every_offending_module(tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model(intermediate_size=576))
    options = ConvertOptions(base="rtn", refinement="closed", group_size=128)
    assert problems_of(source, tmp_path / "output", options) == [
        "--group-size 128 does not divide the inputs of model.layers.0.mlp.down_proj (576 inputs), "
        "model.layers.1.mlp.down_proj (576 inputs). --group-size 64 fits every module; without --group-size each "
        "module gets the largest of 128, 64 and 32 that fits."
    ]
    assert not (tmp_path / "output").exists()


def test_no_group_size_fits(tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model(intermediate_size=80, num_hidden_layers=1))
    assert problems_of(source, tmp_path / "output") == [
        "no group size of 128, 64, 32 divides the inputs of model.layers.0.mlp.down_proj (80 inputs). --group-size "
        "16 fits every module."
    ]


def test_rows_that_fill_no_words(tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model(intermediate_size=84, num_hidden_layers=1))
    options = ConvertOptions(base="rtn", refinement="closed", group_size=-1)
    assert problems_of(source, tmp_path / "output", options) == [
        "--group-size -1: rows must be multiples of 8 inputs long: model.layers.0.mlp.down_proj (84 inputs)"
    ]
    assert problems_of(source, tmp_path / "output") == [
        "no group size of 128, 64, 32 divides the inputs of model.layers.0.mlp.down_proj (84 inputs). No group size "
        "fits this model."
    ]


# --- tensors


def test_missing_tensors_are_listed(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.norm.weight"]
    assert problems_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output") == [
        "2 tensors are missing: model.layers.0.self_attn.q_proj.weight, model.norm.weight"
    ]


def test_missing_biases_are_listed(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model("qwen2")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    assert problems_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output") == [
        "1 tensor is missing: model.layers.1.self_attn.k_proj.bias"
    ]


def test_untied_model_without_a_head(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    del tensors["lm_head.weight"]
    assert problems_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output") == [
        "lm_head.weight: missing although tie_word_embeddings is false. If the head shares the embedding, set "
        "tie_word_embeddings to true in config.json; otherwise the source is incomplete."
    ]


def test_intermediate_size_that_contradicts_the_tensors(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(num_hidden_layers=2)
    config["intermediate_size"] = 1024
    layers = range(2)
    gate, up = ([f"model.layers.{layer}.mlp.{name}.weight" for layer in layers] for name in ("gate_proj", "up_proj"))
    down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in layers]
    assert problems_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output") == [
        f"{gate[0]}, {up[0]}, {gate[1]}, {up[1]}: shape [512, 256], expected [1024, 256] (config.json: "
        "intermediate_size 1024, hidden_size 256)",
        f"{down[0]}, {down[1]}: shape [256, 512], expected [256, 1024] (config.json: hidden_size 256, "
        "intermediate_size 1024)",
    ]


def test_key_value_heads_that_contradict_the_tensors(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(num_key_value_heads=4, num_hidden_layers=1)
    config["num_key_value_heads"] = 2
    assert problems_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output") == [
        "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight: shape [256, 256], expected "
        "[128, 256] (config.json: num_key_value_heads 2, head_dim 64, hidden_size 256)"
    ]


def test_missing_key_value_heads_mean_one_each(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(num_key_value_heads=4)
    del config["num_key_value_heads"]
    plan = plan_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output")
    assert plan.modules["model.layers.0.self_attn.k_proj"].shape == (256, 256)


def test_head_size_of_its_own(tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model("qwen3", head_dim=128))
    plan = plan_of(source, tmp_path / "output")
    assert plan.modules["model.layers.0.self_attn.q_proj"].shape == (512, 256)
    assert plan.modules["model.layers.0.self_attn.o_proj"].shape == (256, 512)


@pytest.mark.parametrize(
    ("name", "shape", "fields"),
    [
        ("model.embed_tokens.weight", [321, 256], "vocab_size 320, hidden_size 256"),
        ("lm_head.weight", [319, 256], "vocab_size 320, hidden_size 256"),
        ("model.norm.weight", [255], "hidden_size 256"),
        ("model.layers.0.self_attn.q_norm.weight", [32], "head_dim 64"),
        ("model.layers.0.self_attn.o_proj.weight", [256, 1], "hidden_size 256, num_attention_heads 4, head_dim 64"),
        ("model.layers.0.self_attn.q_proj.weight", [1], "num_attention_heads 4, head_dim 64, hidden_size 256"),
    ],
)
def test_wrong_shapes_name_the_fields_that_decide(
    tmp_path: Path, tiny_model: Make, name: str, shape: list[int], fields: str
) -> None:
    config, tensors = tiny_model("qwen3")
    expected = list(tensors[name].shape)
    tensors[name] = torch.ones(shape)
    assert problems_of(write(tmp_path / "source", (config, tensors)), tmp_path / "output") == [
        f"{name}: shape {shape}, expected {expected} (config.json: {fields})"
    ]


# --- options, output, disk


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"rotation": "hadamard", "base": "rtn", "refinement": "closed"},
            "--rotation hadamard: no Hadamard matrix at hand for hidden_size 184, head_dim 46; use random",
        ),
        (
            {"rotation": "spinquant:/nowhere/R.bin", "base": "rtn", "refinement": "closed"},
            "--rotation spinquant: /nowhere/R.bin: no such file",
        ),
        ({"calibration": "/nowhere/text.txt"}, "--calibration /nowhere/text.txt: no such file"),
        (
            {"device": "nonsense", "base": "rtn", "refinement": "closed"},
            "--device nonsense: cannot be used (",
        ),
    ],
    ids=["hadamard", "spinquant", "calibration", "device"],
)
def test_options_are_checked(tmp_path: Path, tiny_model: Make, options: dict[str, Any], problem: str) -> None:
    model = tiny_model(hidden_size=184, head_dim=46, intermediate_size=512)
    found = problems_of(write(tmp_path / "source", model), tmp_path / "output", ConvertOptions(group_size=8, **options))
    assert len(found) == 1
    assert found[0] == problem or (problem.endswith("(") and found[0].startswith(problem))


def test_calibration_file_is_not_asked_for_where_none_is_read(tmp_path: Path, tiny_model: Make) -> None:
    options = ConvertOptions(base="rtn", refinement="closed", calibration="/nowhere/text.txt")
    assert plan_of(write(tmp_path / "source", tiny_model()), tmp_path / "output", options)


def test_output_that_is_not_empty(tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model())
    output = tmp_path / "output"
    output.mkdir()
    assert plan_of(source, output)
    (output / "thesis.txt").write_text("mine", encoding="utf-8")
    assert problems_of(source, output) == [
        f"{output}: exists and is not empty; nothing in it is overwritten. Give another folder, or empty it."
    ]
    assert (output / "thesis.txt").read_text(encoding="utf-8") == "mine"


def test_output_that_is_a_file(tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model())
    output = tmp_path / "output"
    output.write_text("mine", encoding="utf-8")
    assert problems_of(source, output) == [f"{output}: is a file, expected a folder that does not exist yet"]
    assert problems_of(source, output / "inner") == [f"{output / 'inner'}: {output} is a file, expected a folder"]


def test_output_inside_the_source(tmp_path: Path, tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", tiny_model())
    inner = source.folder / "nested"
    expected = f"lies inside the source {source.folder}; give a folder outside of it"
    assert problems_of(source, inner) == [f"{inner}: {expected}"]
    monkeypatch.chdir(source.folder)
    assert problems_of(source, Path("nested")) == [f"nested: {expected}"]


def test_output_in_folders_yet_to_be_made(tmp_path: Path, tiny_model: Make) -> None:
    assert plan_of(write(tmp_path / "source", tiny_model()), tmp_path / "a" / "b" / "output")
    assert not (tmp_path / "a").exists()


def test_parent_that_cannot_be_written(tmp_path: Path, tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", tiny_model())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert problems_of(source, tmp_path / "output") == [f"{tmp_path / 'output'}: {tmp_path} cannot be written to"]


def test_disk_that_is_too_small(tmp_path: Path, tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", tiny_model())
    need = plan_of(source, tmp_path / "output").work_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(need, 0, need))
    assert plan_of(source, tmp_path / "output")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(need, 1, need - 1))
    assert problems_of(source, tmp_path / "output") == [
        f"{tmp_path}: {(need - 1) / 1e6:.1f} MB free, the conversion needs about {need / 1e6:.1f} MB (twice the "
        "checkpoint, while it is assembled). Free some space or choose another disk."
    ]
    work = WorkFolder.beside(tmp_path / "output").folder
    work.mkdir()
    (work / "layer-00000.base.safetensors").write_bytes(b"x")
    assert plan_of(source, tmp_path / "output")


def test_a_rotation_file_that_does_not_fit_is_a_problem_among_others(tmp_path: Path, tiny_model: Make) -> None:
    """RO-3: R1 of another model, an R2 with one entry changed by 0.1; found before any work, in a dry run too."""
    source = write(tmp_path / "source", tiny_model())
    second = torch.eye(64)
    second[3, 5] += 0.1
    matrices = {
        "R1": torch.eye(128),
        "model.layers.0.self_attn.R2": torch.eye(64),
        "model.layers.1.self_attn.R2": second,
    }
    torch.save(matrices, tmp_path / "R.bin")
    options = ConvertOptions(rotation=f"spinquant:{tmp_path / 'R.bin'}", calibration="/nowhere/text.txt")
    with pytest.raises(SourceError) as caught:
        plan_of(source, tmp_path / "output", options)
    assert caught.value.problems == [
        "R.bin: R1: is 128 x 128, expected 256 x 256 for this model",
        "R.bin: model.layers.1.self_attn.R2: is not orthogonal: R^T R differs from the identity by 0.1, at most 0.003 "
        "can be repaired",
        "--calibration /nowhere/text.txt: no such file",
    ]


def test_every_problem_comes_at_once(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(intermediate_size=576, num_hidden_layers=1)
    config["vocab_size"] = 300
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
    tensors["model.layers.0.self_attn.z_norm.weight"] = torch.ones(64)
    source = write(tmp_path / "source", (config, tensors))
    output = tmp_path / "output"
    output.mkdir()
    (output / "x").touch()
    options = ConvertOptions(group_size=128, rotation="spinquant:/nowhere/R.bin", calibration="/nowhere/text.txt")
    with pytest.raises(SourceError) as caught:
        plan_of(source, output, options)
    assert str(caught.value).split("\n  - ") == [
        "8 problems:",
        "1 tensor is missing: model.layers.0.self_attn.v_proj.weight",
        "model.embed_tokens.weight, lm_head.weight: shape [320, 256], expected [300, 256] (config.json: vocab_size "
        "300, hidden_size 256)",
        "--group-size 128 does not divide the inputs of model.layers.0.mlp.down_proj (576 inputs). --group-size 64 "
        "fits every module; without --group-size each module gets the largest of 128, 64 and 32 that fits.",
        "--rotation spinquant: /nowhere/R.bin: no such file",
        "--calibration /nowhere/text.txt: no such file",
        f"{output}: exists and is not empty; nothing in it is overwritten. Give another folder, or empty it.",
        "model.layers.0.self_attn.z_norm.weight: not part of a llama model as config.json describes it, and leaving "
        "it out may change what the model computes. Correct the source, or pass --ignore-unknown-tensors to leave "
        "it out.",
        "model.safetensors: model.layers.0.self_attn.q_proj.weight: 1 NaN value, expected finite weights. Export "
        "the model again.",
    ]


# --- the plan


@pytest.mark.parametrize("head", ["plain", "nested"])
@pytest.mark.parametrize("rotation", ["none", "random"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_planned_sizes_are_those_of_the_result(
    tmp_path: Path, tiny_model: Make, model_type: str, tied: bool, rotation: str, head: str
) -> None:
    source = write(tmp_path / "source", tiny_model(model_type, tied, num_hidden_layers=1))
    options = ConvertOptions(base="rtn", refinement="closed", rotation=rotation, quantize_lm_head=head == "nested")
    plan = plan_of(source, tmp_path / "output", options)
    result = convert(source, tmp_path / "output", options)
    index = json.loads((tmp_path / "output" / TARGET_INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == plan.total_bytes
    assert {name: module.group_size for name, module in result.manifest.modules.items()} == plan.group_sizes
    assert result.manifest.source["fingerprint"] == plan.fingerprint


def test_planned_sizes_by_hand(tmp_path: Path, tiny_model: Make) -> None:
    plan = plan_of(write(tmp_path / "source", tiny_model(tied=True, num_hidden_layers=1)), tmp_path / "output")
    weights = 256 * 256 * 2 + 128 * 256 * 2 + 512 * 256 * 3
    groups = (256 + 128 + 128 + 256 + 512 + 512) * 2 + 256 * 4
    kept = 320 * 256 + 3 * 256
    assert plan.base_bytes == plan.refinement_bytes == weights // 2
    assert plan.scale_bytes == 2 * groups
    assert plan.unquantized_bytes == 2 * kept
    assert plan.draft_bytes == weights // 2 + 2 * groups + 2 * kept
    assert plan.total_bytes == weights + 2 * groups + 2 * kept
    assert plan.work_bytes == 2 * plan.total_bytes
    assert plan.fp16_bytes == 2 * (weights + kept)


@pytest.mark.parametrize(
    ("tied", "rotation", "note"),
    [
        (True, "none", "the nested head takes 0.1 MB beside it"),
        (True, "random", "the nested head takes 0.1 MB beside it; unquantized, the rotation would make it 0.2 MB"),
        (False, "random", None),
    ],
    ids=["tied", "tied and rotated", "untied"],
)
def test_plan_of_a_nested_head(tied: bool, rotation: str, note: str | None, tmp_path: Path, tiny_model: Make) -> None:
    source = write(tmp_path / "source", tiny_model(tied=tied, num_hidden_layers=1))
    plain = plan_of(source, tmp_path / "output", replace(ROUNDED, rotation=rotation))
    plan = plan_of(source, tmp_path / "output", replace(ROUNDED, rotation=rotation, quantize_lm_head=True))
    assert plan.modules == {**plain.modules, "lm_head": ModulePlan(shape=(320, 256), group_size=128)}
    assert plan.base_bytes - plain.base_bytes == 320 * 256 // 2
    assert plan.scale_bytes - plain.scale_bytes == 320 * 2 * 2
    kept = 0 if tied and rotation == "none" else 320 * 256 * 2
    assert plain.unquantized_bytes - plan.unquantized_bytes == kept
    assert plan.fp16_bytes == plain.fp16_bytes
    expected = () if note is None else (f"lm_head is tied to the embedding, which stays as it is: {note}",)
    assert plan.notes == expected and plain.notes == ()


def test_groups_that_do_not_fit_a_nested_head(tmp_path: Path, tiny_model: Make) -> None:
    model = tiny_model(hidden_size=192, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1)
    options = replace(ROUNDED, group_size=128, quantize_lm_head=True)
    (problem,) = problems_of(write(tmp_path / "source", model), tmp_path / "output", options)
    assert "model.layers.0.mlp.up_proj (192 inputs), lm_head (192 inputs). --group-size 64 fits every module" in problem


def test_plan_as_data(tmp_path: Path, tiny_model: Make) -> None:
    plan = plan_of(write(tmp_path / "source", tiny_model(num_hidden_layers=1)), tmp_path / "output")
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["modules"]["model.layers.0.mlp.down_proj"] == {"shape": [256, 512], "group_size": 128}
    assert data["total_bytes"] == plan.total_bytes
    assert data["draft_bytes"] == plan.draft_bytes
    assert data["work_bytes"] == plan.work_bytes
    assert data["fingerprint"] == plan.fingerprint
    assert data["rotation"] == "none"


def test_render_plan(tmp_path: Path, tiny_model: Make) -> None:
    model = tiny_model(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, tied=True)
    source = write(tmp_path / "source", model)
    source.notes.append("a remark")
    assert render_plan(plan_of(source, tmp_path / "output")) == (
        "source (llama), rotation none\n"
        "14 modules to quantize: 2 with groups of 128, 12 with groups of 64\n"
        "  base planes             3.5 MB\n"
        "  scales                  0.2 MB\n"
        "  not quantized           0.4 MB\n"
        "  draft view              4.1 MB  28% of fp16\n"
        "  refinement planes       3.5 MB\n"
        "  target view             7.6 MB  53% of fp16\n"
        "  source in fp16         14.5 MB\n"
        "  disk for the work      15.3 MB  parts and finished shards side by side\n"
        "note: a remark"
    )
