"""`diff`: against the same, a changed, a differently rotated checkpoint, against its source, against packed weights."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from bitnest_format import packing, shards
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.cli import main
from bitnest_format.converters.diff import diff
from bitnest_format.converters.diff_report import DiffReport, render
from bitnest_format.converters.export import export
from bitnest_format.converters.export_formats import FORMATS
from bitnest_format.converters.export_options import ExportOptions
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.rotation import random_orthogonal
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError, UsageError
from bitnest_format.shards import tensor_sha256

DOWN, QUERY = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
REFINEMENT = "bitnest-refinement-00001-of-00001.safetensors"
BASE = "bitnest-base-00001-of-00001.safetensors"


def compare(a: Path, b: Path, **options: Any) -> DiffReport:
    return diff(a, b, names=("A", "B"), **options)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


@pytest.fixture
def model_folder(tmp_path: Path, tiny_model: Callable[..., Any]) -> Callable[..., Path]:
    """`(name="source", **tiny_model arguments)` -> a Hugging Face folder."""

    def make(name: str = "source", **arguments: Any) -> Path:
        config, tensors = tiny_model(**arguments)
        folder = tmp_path / name
        folder.mkdir()
        shards.write_json(folder / "config.json", config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def nest(source: Path, output: Path, **options: Any) -> Path:
    convert(open_source(source), output, ConvertOptions(base="rtn", refinement="closed", **options))
    return output


def edit(folder: Path, file: str, plane: str, change: Callable[[torch.Tensor], torch.Tensor], name: str = DOWN) -> None:
    """Change one plane of a module, digest and all."""
    tensors = load_file(folder / file)
    stored = next(key for key in tensors if key.startswith(f"{name}.weight_") and key.endswith(plane))
    tensors[stored] = change(tensors[stored])
    save_file(tensors, folder / file, metadata={"format": "pt"})
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    planes = document["modules"][name]["planes"]
    next(p for p in planes.values() if p["name"] == stored)["sha256"] = tensor_sha256(tensors[stored])
    shards.write_json(folder / "bitnest.json", document)


def test_a_checkpoint_does_not_differ_from_itself(tiny_checkpoint, tmp_path):
    first, second = (tiny_checkpoint(tmp_path / name, nested_head=True) for name in ("a", "b"))
    report = compare(first, second)
    assert not report.differs
    assert [report.equal(plane) for plane in ("base", "scale", "refinement")] == [15, 15, 15]
    assert (report.draft.relative, report.target.relative, report.entries, report.notes) == (0.0, 0.0, [], [])
    assert report.draft.squared_norm > 0
    assert all(module.target_error == 0.0 and module.target_steps == 0.0 for module in report.modules)
    assert report.unquantized == report.unquantized_equal == 6
    assert render(report).endswith("\nThey do not differ.")


def test_one_refinement_code(tiny_checkpoint, tmp_path):
    """A code that is lower by 3 moves one target weight by three of its steps, and no draft weight."""
    first, second = (tiny_checkpoint(tmp_path / name) for name in ("a", "b"))

    def lower(plane: torch.Tensor) -> torch.Tensor:
        codes = packing.unpack(plane)
        codes[5, 200] = codes[5, 200] - 3 if codes[5, 200] >= 3 else codes[5, 200] + 3
        return packing.pack(codes)

    edit(second, REFINEMENT, "refinement", lower)
    report = compare(first, second)
    (module,) = [module for module in report.modules if module.differs]
    assert (module.name, module.base_equal, module.scale_equal, module.refinement_equal) == (DOWN, True, True, False)
    assert (module.draft_error, module.draft_steps) == (0.0, 0.0)
    assert module.target_steps == pytest.approx(3.0, rel=1e-6)
    weight = Checkpoint(second).weight(DOWN)
    moved = 3 * float(weight.scale[5, 1]) / 16
    assert module.target_error == pytest.approx(moved / float(weight.dequantize("target").norm()), rel=1e-5)
    assert report.differs
    result = run(first, second)
    assert result.exit_code == 1
    assert "  refinement planes     13 of 14 byte for byte equal\n" in result.stdout
    assert f"  {DOWN}       0.000%    0.0  " in result.stdout
    assert result.stdout.endswith("\nThey differ.\n")


def test_what_else_may_differ(tiny_checkpoint, tmp_path):
    first = tiny_checkpoint(tmp_path / "a", model_type="qwen2")
    second = tiny_checkpoint(tmp_path / "b", model_type="qwen2", draft_only=True, rope_theta=500000.0)
    tensors = load_file(second / BASE)
    tensors["model.norm.weight"][3] *= 2
    save_file(tensors, second / BASE, metadata={"format": "pt"})
    report = compare(first, second)
    listed = {(entry.where, entry.place): entry.what for entry in report.entries}
    assert listed[("config.json", "rope_theta")] == "is 10000.0 in A and 500000.0 in B"
    assert listed[("bitnest.json", "views")] == "is ['draft', 'target'] in A and ['draft'] in B"
    assert listed[("bitnest.json", "nesting.refine_method")] == "is 'closed' in A and None in B"
    assert listed[("tensors", "model.norm.weight")].startswith("differs by ")
    assert all(module.refinement_equal is None and module.target_error is None for module in report.modules)
    assert all(module.base_equal and module.draft_error == 0.0 and module.differs for module in report.modules)


def test_rotations_that_differ(model_folder, tmp_path):
    source = model_folder()
    first = nest(source, tmp_path / "a", seed=0)
    second = nest(source, tmp_path / "b", seed=1)
    report = compare(first, second)
    assert list(report.notes) == ["the rotations differ, so weights are not compared, only bytes"]
    assert all(module.base_equal is False and module.draft_error is None for module in report.modules)
    assert report.differs


@pytest.mark.parametrize("rotation", ["none", "random", "hadamard"])
@pytest.mark.parametrize(
    "model",
    [
        {"tied": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "tied": True, "head_dim": 128},
        {"model_type": "mistral", "intermediate_size": 576},
        {"model_type": "gemma", "tied": True},
    ],
    ids=["llama-tied", "qwen2", "qwen3-tied", "mistral", "gemma-tied"],
)
def test_a_checkpoint_against_its_source(model_folder, tmp_path, model, rotation):
    """Measured again from the source, errors are those that the conversion recorded."""
    source = model_folder(**model)
    folder = nest(source, tmp_path / "nested", rotation=rotation, quantize_lm_head=rotation == "random")
    report = compare(folder, source)
    assert not report.differs, render(report)
    assert report.notes == []
    for module in report.modules:
        assert module.draft_error == pytest.approx(module.recorded_draft_error, rel=1e-4, abs=1e-6)
        assert module.target_error == pytest.approx(module.recorded_target_error, rel=1e-4, abs=1e-6)
        assert module.saturation == pytest.approx(module.recorded_saturation, abs=1e-6)
        assert 0.4 < module.draft_steps < 4
    assert report.unquantized == report.unquantized_equal == len(Checkpoint(folder).manifest.unquantized)
    turned = compare(source, folder)
    assert turned.to_dict() == report.to_dict() | {"a": "B", "b": "A"}


def test_a_source_that_is_another_revision(model_folder, tmp_path):
    folder = nest(model_folder(), tmp_path / "nested")
    other = model_folder("other", seed=1)
    report = compare(folder, other)
    assert report.differs
    assert all(module.draft_error > 1 for module in report.modules)
    assert {module.remark for module in report.modules} == {
        "the manifest records other errors of the draft and target view"
    }
    assert run(folder, other).exit_code == 1


def test_a_rotation_from_a_file(model_folder, tmp_path):
    generator = torch.Generator().manual_seed(3)
    matrices = {"R1": random_orthogonal(256, generator)}
    matrices |= {f"model.layers.{layer}.self_attn.R2": random_orthogonal(64, generator) for layer in range(2)}
    torch.save({name: matrix.float() for name, matrix in matrices.items()}, tmp_path / "R.bin")
    source = model_folder()
    folder = nest(source, tmp_path / "nested", rotation=f"spinquant:{tmp_path / 'R.bin'}")
    report = compare(folder, source, rotation_file=tmp_path / "R.bin")
    assert not report.differs, render(report)
    assert report.modules[0].target_error is not None
    blind = compare(folder, source)
    assert list(blind.notes) == [
        "the checkpoint is rotated by 'spinquant', which cannot be made again from the manifest; give its file with "
        "--rotation-file to compare weights"
    ]
    assert all(module.draft_error is None for module in blind.modules)
    assert (blind.differs, blind.complete) == (False, False)
    assert render(blind).endswith("\nWhat could be compared does not differ.")
    matrices["R1"] = matrices["R1"].T.contiguous()
    torch.save(matrices, tmp_path / "other.bin")
    with pytest.raises(SourceError) as caught:
        compare(folder, source, rotation_file=tmp_path / "other.bin")
    recorded = Checkpoint(folder).manifest.rotation["sha256"]
    assert str(caught.value) == (
        f"--rotation-file {tmp_path}/other.bin: SHA-256 is {shards.file_sha256(tmp_path / 'other.bin')[:12]}..., the "
        f"checkpoint was made with {recorded[:12]}...; give the file it was made with"
    )


@pytest.mark.parametrize("format_name", [name for name in FORMATS if name != "hf"])
def test_an_export_against_its_checkpoint(tiny_checkpoint, tmp_path, format_name):
    folder = tiny_checkpoint(tmp_path / "nested", model_type="qwen2", intermediate_size=576, nested_head=True)
    export(folder, tmp_path / "out", ExportOptions(format=format_name))
    report = compare(folder, tmp_path / "out")
    assert not report.differs, render(report)
    target = format_name == "compressed-tensors-w8"
    assert report.equal("base") == report.equal("scale") == 15
    assert report.equal("refinement") == (15 if target else 0)
    assert (report.target if target else report.draft).relative == 0.0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = f"{DOWN}.qweight" if format_name.startswith("gptq") else f"{DOWN}.weight_packed"
    tensors[name][0, 0] ^= 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    report = compare(folder, tmp_path / "out")
    (module,) = [module for module in report.modules if module.differs]
    assert (module.name, module.base_equal, module.scale_equal) == (DOWN, False, True)
    assert (module.target_steps if target else module.draft_steps) == pytest.approx(1.0)


def test_a_plain_export_is_a_source(tiny_checkpoint, tmp_path):
    """The target's own weights as a source: they lie no step from the target."""
    folder = tiny_checkpoint(tmp_path / "nested")
    export(folder, tmp_path / "out", ExportOptions(format="hf", dtype="float32"))
    report = compare(folder, tmp_path / "out")
    assert report.target.relative == 0.0
    assert {entry.place for entry in report.entries} == {"torch_dtype"}


@pytest.fixture
def exports() -> ModuleType:
    """The helpers of test_export.py: tests are no package."""
    spec = importlib.util.spec_from_file_location("exports_helpers", Path(__file__).with_name("test_export.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fixture", ["gptq", "gptq-act", "gptq-v2"])
def test_a_checkpoint_against_the_gptq_model_it_was_made_of(exports, tiny_model, tmp_path, fixture):
    tensors = load_file(exports.FIXTURES / f"{fixture}.safetensors")
    config, others = tiny_model(num_hidden_layers=1, vocab_size=512)
    planes = {name: exports.from_gptq(tensors, name) for name in (QUERY, DOWN)}
    others = {name: tensor for name, tensor in others.items() if name.rpartition(".")[0] not in planes}
    folder = exports.nest(tmp_path / "nested", planes, others, config)
    (tmp_path / "gptq").mkdir()
    shards.write_json(tmp_path / "gptq" / "config.json", {**config, "quantization_config": {"quant_method": "gptq"}})
    save_file(tensors | others, tmp_path / "gptq" / "model.safetensors", metadata={"format": "pt"})
    report = compare(folder, tmp_path / "gptq")
    assert not report.differs, render(report)
    assert (report.equal("base"), report.equal("scale"), report.draft.relative) == (2, 2, 0.0)
    tensors[f"{DOWN}.qzeros"][0, 0] -= 2
    save_file(tensors | others, tmp_path / "gptq" / "model.safetensors", metadata={"format": "pt"})
    report = compare(folder, tmp_path / "gptq")
    (module,) = [module for module in report.modules if module.differs]
    assert (module.name, module.remark) == (DOWN, "is asymmetric, which a base plane cannot be")


def test_a_source_that_came_rotated_is_compared_as_it_is(model_folder, tmp_path):
    source = model_folder()
    tensors = load_file(source / "model.safetensors")
    ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items() if name.endswith("norm.weight")}
    save_file(tensors | ones, source / "model.safetensors", metadata={"format": "pt"})
    report = compare(nest(source, tmp_path / "nested", rotation="folded"), source)
    assert not report.differs, render(report)
    assert report.modules[0].draft_error > 0


def test_a_rotation_file_that_is_not_needed(model_folder, tmp_path):
    source = model_folder()
    (tmp_path / "R.bin").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        compare(nest(source, tmp_path / "nested"), source, rotation_file=tmp_path / "R.bin")
    assert str(caught.value) == (
        f"--rotation-file {tmp_path}/R.bin: the checkpoint's rotation is 'random', which needs no file. Leave it out."
    )


def test_neither_is_nested(model_folder, tmp_path):
    first, second = model_folder("one"), model_folder("two")
    with pytest.raises(UsageError) as caught:
        compare(first, second)
    assert str(caught.value) == "A, B: neither is a nested checkpoint; expected one of them to be"
    result = run(first, second)
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: {first}, {second}: neither is a nested checkpoint; expected one of them to be\n",
    )


def test_json_lists_everything(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "a")
    printed = json.loads(run(folder, folder, "--json").stdout)
    assert printed["totals"] == {
        "modules": 14,
        "base_equal": 14,
        "scale_equal": 14,
        "refinement_equal": 14,
        "draft_error": 0.0,
        "target_error": 0.0,
        "saturation": pytest.approx(0.031, abs=0.01),
        "unquantized": 7,
        "unquantized_equal": 7,
    }
    assert (printed["b_is"], printed["differs"], printed["entries"], printed["notes"]) == ("nested", False, [], [])
    (down,) = [module for module in printed["modules"] if module["name"] == DOWN]
    assert down["shape"] == [256, 512]
    assert down["recorded_target_error"] == Checkpoint(folder).module(DOWN).target_error


def test_long_lists_are_cut_for_people(tiny_checkpoint, tmp_path):
    report = compare(*(tiny_checkpoint(tmp_path / name, num_hidden_layers=4) for name in ("a", "b")))
    far = [replace(module, target_error=0.5, remark="is far away") for module in report.modules]
    text = render(replace(report, modules=far))
    assert "  and 18 modules that are closer: --json lists all\n" in text
    assert "\nand 8 more: --json lists all\n" in text


def test_a_repository_against_its_source(hub_server, model_folder, tmp_path):
    source = model_folder()
    hub_server.create("someone/nested", nest(source, tmp_path / "nested"))
    assert run("someone/nested", source).exit_code == 0
