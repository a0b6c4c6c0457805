"""Fused matrices, as Phi-3 has them: split on the way in, plain or packed, and joined on the way out, exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters.base import BaseSource
from bitnest_format.converters.diff import diff
from bitnest_format.converters.export import export
from bitnest_format.converters.export_options import ExportOptions
from bitnest_format.converters.given_base import with_reference
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError
from bitnest_format.shards import read_json, write_json
from bitnest_format.validation import validate

Make = Callable[..., Any]
# The parts of Phi-3's fused matrices with their rows in the tiny model: 4 and 2 heads of 64, 512 inner values.
FUSED = {
    "self_attn.qkv_proj": {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128},
    "mlp.gate_up_proj": {"mlp.gate_proj": 512, "mlp.up_proj": 512},
}
ALONE = ("self_attn.o_proj", "mlp.down_proj")
PACKED = ("gptq", "gptq-v2", "compressed-tensors-w4")
PROMPT = torch.randint(3, 320, (1, 24), generator=torch.Generator().manual_seed(0))


def layer_names(layer: int) -> dict[str, list[str]]:
    """The matrices that other programs store, by name, with the modules of a checkpoint that each consists of."""
    prefix = f"model.layers.{layer}."
    wholes = {whole: list(parts) for whole, parts in FUSED.items()} | {name: [name] for name in ALONE}
    return {prefix + whole: [prefix + part for part in parts] for whole, parts in wholes.items()}


NAMES = layer_names(0) | layer_names(1)


@pytest.fixture
def phi3(tmp_path: Path, tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint(tmp_path / "phi3", model_type="phi3")


def dequantized(checkpoint: Checkpoint, view: Any) -> dict[str, Tensor]:
    """The joined weights of a checkpoint's modules, float32."""
    return {
        whole: torch.cat([checkpoint.weight(part).dequantize(view) for part in parts]) for whole, parts in NAMES.items()
    }


@pytest.mark.parametrize("view", ["draft", "target"])
def test_transformers_reads_what_was_joined(phi3: Path, tmp_path: Path, view: Any) -> None:
    export(phi3, tmp_path / "out", ExportOptions(format="hf", view=view, dtype="float32"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in stored if "layers" in name and "norm" not in name} == {f"{name}.weight" for name in NAMES}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = dequantized(Checkpoint(phi3, "target"), view)
    for name, weight in expected.items():
        assert torch.equal(model.get_submodule(name).weight.detach(), weight)
    # The parts' products are rows of the whole's.
    q, k, v = (
        Checkpoint(phi3, "target").weight(part).dequantize(view) for part in NAMES["model.layers.0.self_attn.qkv_proj"]
    )
    seen: list[Tensor] = []
    module = model.model.layers[0].self_attn.qkv_proj
    module.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    with torch.no_grad():
        model(PROMPT)
    torch.testing.assert_close(seen[1], torch.cat([seen[0] @ part.T for part in (q, k, v)], dim=-1))


@pytest.mark.parametrize("format_name", PACKED)
def test_packed_exports_come_back_as_the_same_base(phi3: Path, tmp_path: Path, format_name: str) -> None:
    result = export(phi3, tmp_path / "out", ExportOptions(format=format_name))
    assert result.modules == 14
    assert result.planes_equal == (14 if format_name.startswith("compressed") else 0)
    source = open_source(tmp_path / "out")
    assert isinstance(source, BaseSource)
    assert set(source.given) == {part for parts in NAMES.values() for part in parts}
    checkpoint = Checkpoint(phi3, "draft")
    for name, given in source.given.items():
        stored, found = checkpoint.weight(name), source.given_base(name)
        assert given.shape == tuple(found.codes.shape)
        assert torch.equal(found.codes, stored.base_codes())
        assert torch.equal(found.scale, stored.scale)
        assert torch.equal(source.read(f"{name}.weight"), stored.dequantize("draft"))
    assert source.inspect().problems == []
    compared = diff(phi3, tmp_path / "out", names=("A", "B"))
    assert [entry for entry in compared.entries if entry.where != "config.json"] == []
    assert all(module.base_equal and module.scale_equal and not module.differs for module in compared.modules)
    assert compared.unquantized_equal == compared.unquantized == 7


def packed_by_hand(weight: Tensor, order: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as GPTQ stores it, symmetric with groups of 64, and what it stands for; nothing of the package's."""
    outputs, inputs = weight.shape
    index = torch.arange(inputs) // 64 if order is None else order
    scales = torch.stack([weight[:, index == group].abs().amax(dim=1) for group in range(inputs // 64)]).div(7).half()
    steps = scales.float().T[:, index]
    nibbles = (weight / steps).round().clamp(-8, 7).long() + 8
    words = torch.zeros(inputs // 8, outputs, dtype=torch.int64)
    for place in range(8):
        words |= nibbles.T[place::8] << (4 * place)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    tensors = {
        "qweight": words.int(),
        "qzeros": torch.full((inputs // 64, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.contiguous(),
        "g_idx": index.int(),
    }
    return tensors, (nibbles - 8).float() * steps


@pytest.fixture
def gptq(tmp_path: Path, tiny_model: Make, in_transformers: Make) -> Make:
    """`(act_order)` -> a Phi-3 saved by transformers, the same packed by hand, and the weights that stands for."""

    def make(act_order: bool = False) -> tuple[Path, Path, Mapping[str, Tensor]]:
        config, tensors = tiny_model("phi3")
        original, folder = tmp_path / "original", tmp_path / "gptq"
        in_transformers(config, tensors).save_pretrained(original)
        stored = load_file(original / "model.safetensors")
        meant: dict[str, Tensor] = {}
        for number, name in enumerate(NAMES):
            weight = stored.pop(f"{name}.weight").float()
            order = torch.arange(weight.shape[1]) // 64
            generator = torch.Generator().manual_seed(number)
            order = order[torch.randperm(len(order), generator=generator)] if act_order else None
            packed, meant[name] = packed_by_hand(weight, order)
            stored |= {f"{name}.{suffix}": tensor for suffix, tensor in packed.items()}
        folder.mkdir()
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": act_order}
        write_json(folder / "config.json", read_json(original / "config.json") | {"quantization_config": settings})
        return original, folder, meant

    return make


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_packed_fused_matrices_are_split_exactly(gptq: Make, tmp_path: Path, act_order: bool) -> None:
    original, folder, meant = gptq(act_order)
    source = with_reference(open_source(folder), open_source(original))
    assert source.inspect().problems == []
    ids = torch.randint(0, 320, (8, 64), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    options = ConvertOptions(
        calibration=str(tmp_path / "ids.safetensors"), calibration_samples=8, sequence_length=64, refinement_sweeps=1
    )
    result = convert(source, tmp_path / "out", options)
    assert validate(result.folder, deep=True) == []
    checkpoint, stored = Checkpoint(result.folder, "target"), load_file(original / "model.safetensors")
    for whole, parts in NAMES.items():
        columns = [checkpoint.weight(part).permutation for part in parts]
        assert all((order is not None) == act_order for order in columns)
        order = torch.arange(meant[whole].shape[1]) if columns[0] is None else columns[0].long()
        drafts = torch.cat([checkpoint.weight(part).dequantize("draft") for part in parts])
        targets = torch.cat([checkpoint.weight(part).dequantize("target") for part in parts])
        assert torch.equal(drafts, meant[whole][:, order])
        weight = stored[f"{whole}.weight"].float()[:, order]
        assert float((targets - weight).norm() / weight.norm()) < 0.02
    # Out again: what another program wrote, to the bit.
    export(result.folder, tmp_path / "again", ExportOptions(format="gptq"))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_a_wrong_reference_is_found_by_its_parts(gptq: Make) -> None:
    original, folder, _ = gptq()
    stored = load_file(original / "model.safetensors")
    stored["model.layers.1.self_attn.qkv_proj.weight"][256:384].neg_()
    save_file(stored, original / "model.safetensors", metadata={"format": "pt"})
    (problem,) = with_reference(open_source(folder), open_source(original)).inspect().problems
    assert re.search(r"distances to the base of model\.layers\.1\.self_attn\.k_proj \((1\.9|2\.0)\d\), exp", problem)


def test_problems_name_the_stored_matrix(gptq: Make) -> None:
    _, folder, _ = gptq()
    name = "model.layers.0.self_attn.qkv_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.qzeros"][0, 0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (problem,) = open_source(folder).inspect().problems
    assert f"zero points are stored as 0 to 7 in {name}: the model is asymmetric" in problem
    tensors[f"{name}.qweight"] = tensors[f"{name}.qweight"][:, :504].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError) as error:
        open_source(folder)
    assert error.value.problems == [
        f"{name}: qweight is I32 [32, 504] for 256 inputs and 512 outputs: another layout, such as Marlin's. Expected "
        "GPTQ's words of 4-bit codes, I32 [inputs / 8, outputs]. Give a GPTQ copy that is not repacked, or the "
        "original model."
    ]


def test_a_fused_matrix_may_stay_plain_beside_packed_ones(gptq: Make) -> None:
    original, folder, meant = gptq()
    name = "model.layers.0.mlp.gate_up_proj"
    tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if name not in key}
    plain = load_file(original / "model.safetensors")[f"{name}.weight"]
    save_file({**tensors, f"{name}.weight": plain}, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    assert torch.equal(source.read("model.layers.0.mlp.up_proj.weight"), plain[512:])
    assert torch.equal(source.read("model.layers.1.mlp.up_proj.weight"), meant["model.layers.1.mlp.gate_up_proj"][512:])


def test_parts_that_make_no_whole(tmp_path: Path, tiny_checkpoint: Make) -> None:
    """As another writer's checkpoint might have them."""
    folder = tiny_checkpoint(tmp_path / "phi3", model_type="phi3")
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    prefix = "model.layers.0."
    document["modules"][f"{prefix}mlp.up_proj"]["group_size"] = 64
    del document["modules"][f"{prefix}self_attn.k_proj"]
    write_json(folder / "bitnest.json", document)
    with pytest.raises(SourceError) as error:
        export(folder, tmp_path / "out", ExportOptions(format="compressed-tensors-w4"))
    use = "Use the checkpoint with this package."
    assert error.value.problems == [
        f"{prefix}self_attn.qkv_proj: other programs store it as one matrix, but {prefix}self_attn.k_proj is not "
        f"quantized. {use}",
        f"{prefix}mlp.gate_up_proj: other programs store it as one matrix, but its parts have groups of 128, 64. {use}",
    ]
