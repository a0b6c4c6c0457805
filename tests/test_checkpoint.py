"""Checkpoint folders: what is written, what is read back, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bitnest_format import nesting, packing
from bitnest_format.architecture import read_architecture
from bitnest_format.checkpoint import (
    DRAFT_INDEX,
    TARGET_INDEX,
    Checkpoint,
    CheckpointWriter,
    checkpoint_config,
    read_weight_map,
    source_config,
)
from bitnest_format.errors import CheckpointError, FileFormatError, UnsupportedVersionError
from bitnest_format.shards import file_sha256, pending_tensor, read_header, tensor_sha256

VALID = Path(__file__).resolve().parents[1] / "spec" / "vectors" / "valid"
MODULE = "model.layers.0.self_attn.k_proj"


def edit_json(path, edit):
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def refusal(call, kind=CheckpointError):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 400_000, 1])
def test_files_of_a_checkpoint(shard_bytes, tiny_checkpoint, tmp_path):
    """SF-8, SF-10: format=pt everywhere; indexes cover exactly what lies on disk, and their sums are right."""
    folder = tiny_checkpoint(tmp_path / "model", shard_bytes=shard_bytes)
    headers = {path.name: read_header(path) for path in folder.glob("*.safetensors")}
    assert {
        name for name in headers if not re.fullmatch(r"bitnest-(base|refinement)-\d{5}-of-\d{5}.safetensors", name)
    } == set()
    if shard_bytes == 1:
        assert all(len(header) == 1 for header in headers.values())
    for name, header in headers.items():
        refinement = name.startswith("bitnest-refinement")
        assert all(tensor.endswith(".weight_refinement") == refinement for tensor in header)
        with safe_open(folder / name, framework="pt") as file:
            plane = "refinement" if refinement else "base"
            assert file.metadata() == {"format": "pt", "bitnest_format_version": "1.0", "bitnest_planes": plane}
    for index, wanted in ((TARGET_INDEX, "bitnest-"), (DRAFT_INDEX, "bitnest-base-")):
        data = json.loads((folder / index).read_text(encoding="utf-8"))
        stored = {t: name for name, header in headers.items() if name.startswith(wanted) for t in header}
        assert data["weight_map"] == stored
        assert data["metadata"]["total_size"] == sum(headers[shard][tensor].size for tensor, shard in stored.items())
    assert not list(folder.glob("model.safetensors*"))


def test_files_are_listed_with_size_and_digest(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    files = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))["files"]
    assert files.keys() == {path.name for path in folder.iterdir()} - {"bitnest.json"}
    for name, record in files.items():
        assert record == {"size": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"draft_only": True}, {"nested_head": True}], ids=str)
def test_indexes_count_the_parameters_of_the_model(options, tiny_checkpoint, tiny_model, tmp_path):
    """Each weight once, however it is stored; scales are none."""
    folder = tiny_checkpoint(tmp_path / "model", model_type="qwen2", **options)
    _, tensors = tiny_model("qwen2", tied=options.get("tied", False))
    expected = sum(tensor.numel() for tensor in tensors.values())
    for index in (DRAFT_INDEX, TARGET_INDEX):
        assert json.loads((folder / index).read_text(encoding="utf-8"))["metadata"]["total_parameters"] == expected


def test_side_files_are_listed(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    checkpoint = Checkpoint(folder)
    writer = CheckpointWriter(folder)
    for name, shard in checkpoint.weight_map.items():
        family = writer.refinement if shard.startswith("bitnest-refinement") else writer.base
        family[name] = pending_tensor(checkpoint.tensor(name))
    written = writer.finish(checkpoint.manifest, checkpoint.config, ["tokenizer.json"])
    assert written.files["tokenizer.json"].size == 2


def test_the_same_input_gives_the_same_bytes(tiny_checkpoint, tmp_path):
    first, second = (tiny_checkpoint(tmp_path / name, seed=3) for name in ("first", "second"))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name
    other = tiny_checkpoint(tmp_path / "other", seed=4)
    assert (other / "bitnest.json").read_bytes() != (first / "bitnest.json").read_bytes()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_weights_read_back(model_type, tiny_checkpoint, tiny_model, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", model_type=model_type)
    config, tensors = tiny_model(model_type)
    checkpoint = Checkpoint(folder)
    for name, shape in read_architecture(config).modules():
        weight = checkpoint.weight(name)
        source = tensors[f"{name}.weight"].float()
        assert weight.base.dtype == torch.int32 and weight.base.shape == (shape[0], shape[1] // 8)
        base, target = weight.base_codes(), weight.target_codes()
        torch.testing.assert_close(base, nesting.encode_base(source, weight.scale), rtol=0, atol=0)
        step = nesting.expand_groups(weight.scale.float(), shape[1])
        torch.testing.assert_close(weight.dequantize("draft"), base.float() * step, rtol=0, atol=0)
        torch.testing.assert_close(weight.dequantize("target"), target.float() * (step / 16), rtol=0, atol=0)
        assert float((weight.dequantize("target") - source).abs().max()) <= float(step.max()) / 16
        assert (weight.bias is not None) == (f"{name}.bias" in tensors)
        if weight.bias is not None:
            torch.testing.assert_close(weight.bias, tensors[f"{name}.bias"], rtol=0, atol=0)
        record = checkpoint.module(name)
        assert record.refinement is not None and weight.refinement is not None
        assert tensor_sha256(weight.base) == record.base.sha256
        assert tensor_sha256(weight.refinement) == record.refinement.sha256
    for name in checkpoint.manifest.unquantized:
        torch.testing.assert_close(checkpoint.tensor(name), tensors[name], rtol=0, atol=0)


def test_tied_embeddings_are_stored_once(tiny_checkpoint, tmp_path):
    """TE-1"""
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model", tied=True))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "model.embed_tokens.weight" in checkpoint.weight_map and "lm_head.weight" not in checkpoint.weight_map


def test_no_bias_is_made_up(tiny_checkpoint, tmp_path):
    """BI-2"""
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model"))
    assert not [name for name in checkpoint.weight_map if name.endswith(".bias")]


@pytest.mark.parametrize("group_size", [-1, 64, 32])
def test_group_sizes(group_size, tiny_checkpoint, tmp_path):
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model", group_size=group_size))
    assert checkpoint.manifest.nesting["group_size"] == group_size
    for name, module in checkpoint.manifest.modules.items():
        expected = module.shape[1] if group_size == -1 else group_size
        assert module.group_size == expected
        assert checkpoint.weight(name).scale.shape == (module.shape[0], module.shape[1] // expected)


def test_group_size_falls_back_per_module(tiny_checkpoint, tmp_path):
    """GS-1, GS-2: 576 inputs take groups of 64, 96 of 32; nothing is padded."""
    folder = tiny_checkpoint(
        tmp_path / "model",
        hidden_size=576,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=1536,
        num_hidden_layers=1,
    )
    modules = Checkpoint(folder).manifest.modules
    assert {name.rsplit(".", 1)[1]: module.group_size for name, module in modules.items()} == {
        "q_proj": 64,
        "k_proj": 64,
        "v_proj": 64,
        "o_proj": 32,
        "gate_proj": 64,
        "up_proj": 64,
        "down_proj": 128,
    }
    assert Checkpoint(folder).weight("model.layers.0.mlp.up_proj").dequantize("target").shape == (1536, 576)


def test_scales_in_float32(tiny_checkpoint, tmp_path):
    weight = Checkpoint(tiny_checkpoint(tmp_path / "model", scale_type=torch.float32)).weight(MODULE)
    assert weight.scale.dtype == torch.float32
    assert bool((weight.scale.half().float() != weight.scale).any()), "float32 scales keep more bits"


def test_draft_view_needs_base_shards_alone(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    both = Checkpoint(folder).weight(MODULE)
    for path in folder.glob("bitnest-refinement-*"):
        path.unlink()
    draft = Checkpoint(folder, "draft").weight(MODULE)
    assert draft.refinement is None
    torch.testing.assert_close(draft.dequantize("draft"), both.dequantize("draft"), rtol=0, atol=0)
    message = "the target view needs the refinement plane, which was not loaded"
    assert refusal(lambda: draft.dequantize("target")) == message
    assert refusal(draft.target_codes) == message
    assert refusal(lambda: Checkpoint(folder)) == (
        f"{TARGET_INDEX}: names bitnest-refinement-00001-of-00001.safetensors, not in the folder. "
        "Download the checkpoint again, or open its draft view."
    )


def test_every_missing_shard_is_named(tiny_checkpoint, tmp_path):
    """SF-1"""
    folder = tiny_checkpoint(tmp_path / "model", shard_bytes=500_000)
    gone = sorted(path.name for path in folder.glob("bitnest-base-*"))[1:]
    assert gone
    for name in gone:
        (folder / name).unlink()
    assert refusal(lambda: Checkpoint(folder, "draft")) == (
        f"{DRAFT_INDEX}: names {', '.join(gone)}, not in the folder. Download the checkpoint again."
    )


def test_draft_only_checkpoint(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", draft_only=True)
    assert refusal(lambda: Checkpoint(folder)) == (
        "bitnest.json: the only view is the draft, of 4 bits; the target view cannot be rebuilt. Open the draft "
        "(--view draft), or convert again from the full-precision model or with --reference."
    )
    assert Checkpoint(folder, "draft").weight(MODULE).dequantize("draft").shape == (128, 256)


def test_a_missing_folder(tmp_path):
    assert refusal(lambda: Checkpoint(tmp_path / "none")) == f"{tmp_path / 'none'}: no such folder"


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (None, "Make one with 'bitnest-format convert'."),
        ({}, "Make one with 'bitnest-format convert'."),
        (
            {"quantization_config": {"quant_method": "bitnet"}},
            "Its quant_method is 'bitnet', the 1.58-bit method; this package reads 'bitnest'.",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "Its quant_method is 'awq'."),
    ],
    ids=["empty", "plain", "bitnet", "awq"],
)
def test_other_models(config, hint, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert refusal(lambda: Checkpoint(tmp_path)) == (
        f"{tmp_path}: no bitnest.json, so this is not a nested checkpoint. {hint}"
    )


@pytest.mark.parametrize("left", ["bitnest-draft.safetensors.index.json", "bitnest-base-00001-of-00001.safetensors"])
def test_weights_without_a_manifest_are_half_a_push(left, tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    for path in folder.iterdir():
        if path.name not in (left, "config.json"):
            path.unlink()
    assert refusal(lambda: Checkpoint(folder)) == (
        f"{folder}: no bitnest.json, so this is not a nested checkpoint. Its weights are there: a push or a download "
        "did not come to its end. Push or download it again."
    )


@pytest.mark.parametrize("shard", ["../../secret/model.safetensors", "/etc/passwd", "c:\\x", ""])
@pytest.mark.parametrize("view", ["draft", "target"])
def test_names_that_leave_the_folder_are_refused_before_anything_is_opened(view, shard, tiny_checkpoint, tmp_path):
    """SF-4"""
    folder = tiny_checkpoint(tmp_path / "model")
    index = DRAFT_INDEX if view == "draft" else TARGET_INDEX
    edit_json(folder / index, lambda data: data["weight_map"].update({"model.norm.weight": shard}))
    assert refusal(lambda: Checkpoint(folder, view), FileFormatError) == (
        f"{shard!r} is not a file inside model: a plain relative name is expected"
    )


def test_an_online_rotation_is_refused_at_load(tiny_checkpoint, tmp_path):
    """RO-2"""
    folder = tiny_checkpoint(tmp_path / "model")
    rotation = {"kind": "spinquant", "folded": ["R1", "R2"], "online": ["R4"]}
    edit_json(folder / "bitnest.json", lambda data: data.update(rotation=rotation))
    assert "rotation names R4" in refusal(lambda: Checkpoint(folder), UnsupportedVersionError)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(weight_map, tmp_path):
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert refusal(lambda: read_weight_map(tmp_path, "i.json")) == (
        "i.json: weight_map: missing or empty, expected tensor names with their shards"
    )


def test_unknown_names(tiny_checkpoint, tmp_path):
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model"))
    assert refusal(lambda: checkpoint.tensor("a.b")) == "model: no tensor a.b in the target index"
    assert refusal(lambda: checkpoint.weight("a.b")) == "bitnest.json: a.b is not a quantized module"


def test_a_tensor_that_its_shard_does_not_hold(tiny_checkpoint, tmp_path):
    """SF-2"""
    folder = tiny_checkpoint(tmp_path / "model")
    shard = "bitnest-refinement-00001-of-00001.safetensors"
    edit_json(folder / TARGET_INDEX, lambda data: data["weight_map"].update({"model.norm.weight": shard}))
    message = refusal(lambda: Checkpoint(folder).tensor("model.norm.weight"))
    assert message.startswith(f"{shard}: model.norm.weight: cannot be read (")


def test_a_shard_that_is_a_pointer_or_cut(tiny_checkpoint, tmp_path):
    """SF-5, SF-6"""
    folder = tiny_checkpoint(tmp_path / "model")
    shard = folder / "bitnest-base-00001-of-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert refusal(lambda: Checkpoint(folder).weight(MODULE), FileFormatError) == (
        f"{shard.name}: cut off: has {len(data) - 1} bytes, its header describes {len(data)} bytes. Download it again."
    )
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refusal(lambda: Checkpoint(folder).weight(MODULE), FileFormatError).startswith(
        f"{shard.name}: a Git LFS pointer of 43 bytes, the file itself was not downloaded."
    )


def rewrite(folder, family, name, change):
    path = folder / f"bitnest-{family}-00001-of-00001.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("suffix", "change", "found", "expected"),
    [
        ("weight_packed", lambda t: t[:, :4].clone(), "I32 [128, 4]", "I32 [128, 32]"),
        ("weight_packed", lambda t: t.long(), "I64 [128, 32]", "I32 [128, 32]"),
        ("weight_scale", lambda t: t.t().contiguous(), "F16 [2, 128]", "F16 or F32 [128, 2]"),
        ("weight_scale", lambda t: t.bfloat16(), "BF16 [128, 2]", "F16 or F32 [128, 2]"),
        ("bias", lambda t: t[:5].clone(), "BF16 [5]", "F16 or BF16 or F32 [128]"),
    ],
)
def test_planes_of_another_type_or_shape_are_refused(suffix, change, found, expected, tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", model_type="qwen2")
    rewrite(folder, "base", f"{MODULE}.{suffix}", change)
    assert refusal(lambda: Checkpoint(folder).weight(MODULE)) == (
        f"bitnest-base-00001-of-00001.safetensors: {MODULE}.{suffix}: is {found}, expected {expected}"
    )


def test_a_forbidden_pair_is_refused_at_load(tiny_checkpoint, tmp_path):
    """ZN-4: the target never wraps from -129 to +127."""
    folder = tiny_checkpoint(tmp_path / "model")

    def put(code):
        def change(words):
            codes = packing.unpack(words)
            codes[100, 200] = code
            return packing.pack(codes)

        return change

    rewrite(folder, "base", f"{MODULE}.weight_packed", put(-8))
    rewrite(folder, "refinement", f"{MODULE}.weight_refinement", put(-1))
    assert refusal(lambda: Checkpoint(folder).weight(MODULE)) == (
        f"{MODULE}: a base code of -8 stands beside a negative refinement code, which no 8-bit code can hold. "
        "Run 'bitnest-format validate' for the place."
    )
    assert Checkpoint(folder, "draft").weight(MODULE).base_codes()[100, 200] == -8


def test_checkpoint_config_keeps_the_source():
    source = {"model_type": "llama", "vocab_size": 7, "quantization_config": {"quant_method": "old"}}
    written = checkpoint_config(source)
    block = {"quant_method": "bitnest", "format_version": "1.0", "manifest": "bitnest.json"}
    hint = "run 'pip install bitnest-format', and 'import bitnest_format.transformers' before loading"
    rest = {"model_type": "llama", "vocab_size": 7}
    assert written == {**rest, "quantization_config": block, "transformers_weights": hint}
    assert source == {**rest, "quantization_config": {"quant_method": "old"}}
    assert source_config(written) == rest


@pytest.mark.parametrize("folder", sorted(path.parent for path in VALID.glob("*/bitnest.json")), ids=lambda f: f.name)
def test_checkpoints_of_another_writer(folder, tmp_path):
    """Every valid vector opens, and its views agree with codes that are unpacked here bit by bit."""
    copy = shutil.copytree(folder, tmp_path / folder.name)
    view = "draft" if folder.name == "draft-only" else "target"
    checkpoint = Checkpoint(copy, view)
    for name, module in checkpoint.manifest.modules.items():
        weight = checkpoint.weight(name)
        raw = weight.base.numpy().tobytes()
        codes = [(byte >> shift & 15) - 8 for byte in raw for shift in (0, 4)]
        assert weight.base_codes().flatten().tolist() == codes
        scales = weight.scale.double().repeat_interleave(module.group_size, dim=1)
        draft = torch.tensor(codes, dtype=torch.float64).reshape(module.shape) * scales
        torch.testing.assert_close(weight.dequantize("draft").double(), draft, rtol=1e-7, atol=0)
        if view == "target":
            target = weight.target_codes().double() * scales / 16
            torch.testing.assert_close(weight.dequantize("target").double(), target, rtol=1e-7, atol=0)
            assert bool(((target - draft).abs() <= scales / 2).all())
