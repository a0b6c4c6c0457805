"""`inspect`: sizes that add up, names that are found, texts compared whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bitnest_format import packing
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.errors import BitnestError, CheckpointError, Finding, UsageError
from bitnest_format.report import inspect_checkpoint, render, render_findings
from bitnest_format.shards import read_header, tensor_sha256

VALID = Path(__file__).resolve().parents[1] / "spec" / "vectors" / "valid"
MODULE = "model.layers.0.self_attn.k_proj"

ROTATED = """\
rotated
  format       1.0
  model        llama, 1 layer, hidden size 8, 1 head (1 for keys and values) of 8, vocabulary 4
  embeddings   not tied
  source       random
  licence      not stated
  views        draft, target
  base         rtn
  refinement   closed
  group sizes  8 (1 module)
  rotation     random, seed 3, file 000000000000; folded: R1, R2
  calibration  none
  activations  symmetric INT8, one scale per token
  KV cache     4 + 4 bits per token and KV head
  gamma        no suggestion

  stored             bytes  of fp16
  base planes           64     4.4%
  scales                32     2.2%
  not quantized      1,200    82.4%
  draft view         1,296    89.0%
  refinement planes     64     4.4%
  target view        1,360    93.4%
  all of it in fp16  1,456   100.0%
bits per quantized weight: draft 6.000, target 10.000

  module                         shape  group  scale  saturation  draft error  target error
  model.layers.0.mlp.down_proj  8 x 16      8    F16           -            -             -
  mean of 1 module                                             -            -             -

  not quantized                                   tensors  dtype   shape  bytes
  model.embed_tokens.weight                             1   BF16   4 x 8     64
  model.layers.*.input_layernorm.weight                 1   BF16       8     16
  model.layers.*.self_attn.q_proj.weight                1   BF16   8 x 8    128
  model.layers.*.self_attn.k_proj.weight                1   BF16   8 x 8    128
  model.layers.*.self_attn.v_proj.weight                1   BF16   8 x 8    128
  model.layers.*.self_attn.o_proj.weight                1   BF16   8 x 8    128
  model.layers.*.mlp.gate_proj.weight                   1   BF16  16 x 8    256
  model.layers.*.mlp.up_proj.weight                     1   BF16  16 x 8    256
  model.layers.*.post_attention_layernorm.weight        1   BF16       8     16
  model.norm.weight                                     1   BF16       8     16
  lm_head.weight                                        1   BF16   4 x 8     64"""


def lines(folder, **kw):
    text = render(inspect_checkpoint(folder, **kw))
    return {line.split("  ")[1].strip(): line.strip() for line in text.splitlines() if line.startswith("  ")}


def test_the_whole_text():
    assert render(inspect_checkpoint(VALID / "rotated")) == ROTATED


@pytest.mark.parametrize("name", sorted(path.parent.name for path in VALID.glob("*/bitnest.json")))
def test_every_valid_vector_can_be_shown(name):
    report = inspect_checkpoint(VALID / name)
    assert render(report).splitlines()[0] == name
    assert json.loads(json.dumps(report.to_dict()))["format_version"] == report.format_version


def test_sizes_are_those_of_the_shards(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", model_type="qwen2")
    sizes = inspect_checkpoint(folder).sizes
    stored = {name: e for path in folder.glob("*.safetensors") for name, e in read_header(path).items()}

    def total(suffix):
        return sum(entry.size for name, entry in stored.items() if name.endswith(suffix))

    assert sizes.base == total(".weight_packed")
    assert sizes.refinement == total(".weight_refinement")
    assert sizes.scales == total(".weight_scale")
    assert sizes.target == sum(entry.size for entry in stored.values())
    assert sizes.draft == sizes.target - sizes.refinement
    values = sum(math.prod(e.shape) for name, e in stored.items() if ".weight_" not in name)
    assert sizes.fp16 == 2 * (values + 2 * sizes.base)
    assert sizes.draft_bits == 4 + 16 / 128 and sizes.target_bits == 8 + 16 / 128


def test_records_of_modules(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", model_type="qwen2", group_size=64)
    report = inspect_checkpoint(folder)
    manifest = Checkpoint(folder).manifest
    assert [module.name for module in report.modules] == list(manifest.modules)
    assert report.group_sizes == {64: 14}
    module = next(module for module in report.modules if module.name == MODULE)
    record = manifest.modules[MODULE]
    assert (module.shape, module.group_size, module.groups, module.scale_type) == ((128, 256), 64, 4, "F16")
    assert module.bias and not module.permuted
    assert (module.saturation, module.draft_error, module.target_error) == (
        record.saturation,
        record.draft_error,
        record.target_error,
    )
    assert 0 < record.target_error < record.draft_error / 10
    assert {tensor.name for tensor in report.unquantized} == set(manifest.unquantized)


@pytest.mark.parametrize(
    ("tied", "nested_head", "text"),
    [
        (True, False, "embeddings   tied: one matrix is embedding and head"),
        (False, False, "embeddings   not tied"),
        (False, True, "embeddings   not tied; the head is nested"),
    ],
)
def test_ties_are_told(tied, nested_head, text, tiny_checkpoint, tmp_path):
    """TE-1"""
    folder = tiny_checkpoint(tmp_path / "model", tied=tied, nested_head=nested_head)
    assert inspect_checkpoint(folder).tied_embeddings is tied
    assert lines(folder)["embeddings"] == text


def test_a_nested_head_is_a_module(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", nested_head=True)
    report = inspect_checkpoint(folder)
    assert (report.modules[-1].name, report.modules[-1].shape) == ("lm_head", (320, 256))
    assert "lm_head.weight" not in {tensor.name for tensor in report.unquantized}
    assert report.sizes.base == sum(math.prod(module.shape) for module in report.modules) // 2
    assert [tensor.role for tensor in inspect_checkpoint(folder, "lm_head").tensors] == [
        "base plane",
        "refinement plane",
        "scale",
    ]


def test_unquantized_modules_are_listed():
    """TE-4: a plain head and plain linear layers are normal."""
    kept = {tensor.name for tensor in inspect_checkpoint(VALID / "some-layers").unquantized}
    assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight"} <= kept


def test_provenance(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    manifest = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    digest = "0123456789ab" + "0" * 52
    manifest |= {
        "rotation": {"kind": "spinquant", "seed": None, "sha256": digest, "folded": ["R1", "R2"]},
        "calibration": {"description": "builtin", "tokens": 32768, "sha256": digest},
        "source": {"kind": "huggingface", "name": "owner/model", "revision": "abc", "license": "mit"},
        "created_by": {"name": "other-tool", "version": "3"},
    }
    manifest["nesting"] |= {"base_method": "gptq", "base_bound": 0.8, "refine_method": "feedback"}
    (folder / "bitnest.json").write_text(json.dumps(manifest), encoding="utf-8")
    shown = lines(folder)
    assert shown["format"] == "format       1.0, written by other-tool 3"
    assert shown["source"] == "source       huggingface owner/model abc"
    assert shown["licence"] == "licence      mit"
    assert shown["base"] == "base         gptq, residual at most 0.8 steps"
    assert shown["refinement"] == "refinement   feedback"
    assert shown["rotation"] == "rotation     spinquant, file 0123456789ab; folded: R1, R2"
    assert shown["calibration"] == "calibration  builtin, 32,768 tokens, SHA-256 0123456789ab"
    assert shown["gamma"] == "gamma        4"


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_refinement"])
def test_a_plane_by_name(suffix, tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    (tensor,) = inspect_checkpoint(folder, f"{MODULE}.{suffix}").tensors
    family = "base" if suffix == "weight_packed" else "refinement"
    stored = load_file(folder / f"bitnest-{family}-00001-of-00001.safetensors")[tensor.name]
    codes = packing.unpack(stored)
    assert tensor.role == f"{family} plane"
    assert tensor.histogram == {code: int((codes == code).sum()) for code in range(-8, 8)}
    assert (tensor.dtype, tensor.shape, tensor.bytes) == ("I32", (128, 32), 128 * 32 * 4)
    assert tensor.sha256 == tensor_sha256(stored)
    assert tensor.shard == f"bitnest-{family}-00001-of-00001.safetensors"
    assert tensor.minimum is None and tensor.maximum is None


def test_a_module_by_name(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", model_type="qwen2")
    report = inspect_checkpoint(folder, MODULE)
    assert {tensor.role: tensor.name for tensor in report.tensors} == {
        "base plane": f"{MODULE}.weight_packed",
        "refinement plane": f"{MODULE}.weight_refinement",
        "scale": f"{MODULE}.weight_scale",
        "bias": f"{MODULE}.bias",
    }
    scale = next(tensor for tensor in report.tensors if tensor.role == "scale")
    stored = Checkpoint(folder).weight(MODULE).scale
    assert (scale.minimum, scale.maximum) == (float(stored.min()), float(stored.max()))
    assert scale.not_finite == 0 and scale.histogram is None
    json.dumps(report.to_dict())


def test_the_text_of_a_tensor():
    tensor = "model.layers.0.mlp.down_proj.weight_scale"
    report = inspect_checkpoint(VALID / "edge-codes", tensor)
    assert render(report) == (
        f"{tensor}\n"
        "  role      scale\n"
        "  dtype     F16\n"
        "  shape     8 x 2\n"
        "  bytes     32\n"
        "  shard     bitnest-base-00001-of-00001.safetensors\n"
        f"  sha256    {report.tensors[0].sha256}\n"
        "  minimum   5.96046e-08\n"
        "  maximum   65504"
    )


def test_values_that_are_not_finite_are_counted():
    (tensor,) = inspect_checkpoint(VALID.parent / "invalid" / "tensor-not-finite", "model.norm.weight").tensors
    assert tensor.not_finite == 2
    assert math.isfinite(tensor.minimum) and math.isfinite(tensor.maximum)
    json.dumps(tensor.not_finite, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "model.layers.0.self_attn.k_prj",
            "; nearest are model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj, "
            "model.layers.0.self_attn.v_proj",
        ),
        ("lm_head", "; nearest are lm_head.weight"),
        ("zzz", ""),
    ],
)
def test_unknown_names_get_the_nearest(name, hint, tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    with pytest.raises(UsageError) as error:
        inspect_checkpoint(folder, name)
    assert str(error.value) == f"model: no tensor or module {name!r}{hint}"


def test_a_draft_without_its_refinement_shards(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    whole = inspect_checkpoint(folder)
    (folder / "bitnest-refinement-00001-of-00001.safetensors").unlink()
    report = inspect_checkpoint(folder)
    assert whole.refinement_present and not report.refinement_present
    assert report.sizes == whole.sizes
    assert "(refinement shards not in the folder: only the draft can be loaded)" in render(report)
    roles = [tensor.role for tensor in inspect_checkpoint(folder, MODULE).tensors]
    assert roles == ["base plane", "scale"]
    with pytest.raises(CheckpointError):
        inspect_checkpoint(folder, f"{MODULE}.weight_refinement")


def test_a_draft_only_checkpoint_shows_no_target(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", draft_only=True)
    report = inspect_checkpoint(folder)
    assert report.sizes.refinement == 0 and report.sizes.target == report.sizes.draft
    text = render(report)
    assert "target view" not in text and "refinement planes" not in text
    assert lines(folder)["refinement"] == "refinement   none"


def test_broken_checkpoints_are_project_errors(tmp_path):
    """Each invalid vector is shown or refused in words, never with another exception."""
    refused = 0
    for folder in sorted(path for path in (VALID.parent / "invalid").iterdir() if path.is_dir()):
        try:
            render(inspect_checkpoint(folder))
        except BitnestError as error:
            refused += 1
            assert str(error)
    assert refused > 30


def test_render_findings():
    findings = [Finding("a.json", "x.y", "is 1, expected 2"), Finding("b", "(file)", "missing")]
    assert render_findings(findings) == "a.json: x.y: is 1, expected 2\nb: (file): missing"
    assert render_findings([]) == "valid"


def test_a_permuted_module_is_marked():
    assert "model.layers.0.mlp.down_proj +perm" in render(inspect_checkpoint(VALID / "input-permutation"))
    tensors = inspect_checkpoint(VALID / "input-permutation", "model.layers.0.mlp.down_proj").tensors
    permutation = next(tensor for tensor in tensors if tensor.role == "input permutation")
    assert (permutation.minimum, permutation.maximum, permutation.dtype) == (0.0, 15.0, "I32")
    assert torch.Size(permutation.shape) == (16,)
