"""Exports: the bytes that peers wrote for the same codes, weights that equal the view's, and refusals."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitnest_format import nesting, packing, shards
from bitnest_format.checkpoint import Checkpoint, CheckpointWriter, checkpoint_config
from bitnest_format.converters import export_folder
from bitnest_format.converters.export import ExportResult, export
from bitnest_format.converters.export_formats import FORMATS
from bitnest_format.converters.export_options import ExportOptions
from bitnest_format.errors import BitnestError, CheckpointError, SourceError, UsageError
from bitnest_format.manifest import Manifest, Module, Plane
from bitnest_format.shards import pending_tensor, tensor_sha256
from bitnest_format.validation import validate

FIXTURES = Path(__file__).parents[1] / "fixtures" / "exports"
DOWN, QUERY = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
ZEROS = torch.zeros(1, dtype=torch.int8)


class Planes(NamedTuple):
    base: Tensor
    scale: Tensor
    permutation: Tensor | None = None


def nest(folder: Path, planes: Mapping[str, Planes], others: Mapping[str, Tensor], config: dict[str, Any]) -> Path:
    """A nested checkpoint of given planes by module, with refinement codes 0."""
    folder.mkdir()
    writer = CheckpointWriter(folder)
    modules: dict[str, Module] = {}
    for name, (base, scale, permutation) in planes.items():
        outputs, inputs = base.shape[0], base.shape[1] * packing.CODES_PER_WORD
        stored = {"weight_packed": base, "weight_scale": scale}
        stored |= {} if permutation is None else {"weight_perm": permutation}
        refinement = packing.pack(ZEROS.expand(outputs, inputs))
        writer.base |= {f"{name}.{suffix}": pending_tensor(tensor) for suffix, tensor in stored.items()}
        writer.refinement[f"{name}.weight_refinement"] = pending_tensor(refinement)
        modules[name] = Module(
            shape=(outputs, inputs),
            group_size=inputs // scale.shape[1],
            base=Plane(name=f"{name}.weight_packed", sha256=tensor_sha256(base)),
            scale=Plane(name=f"{name}.weight_scale", sha256=tensor_sha256(scale)),
            refinement=Plane(name=f"{name}.weight_refinement", sha256=tensor_sha256(refinement)),
            permutation=None if permutation is None else f"{name}.weight_perm",
        )
    writer.base |= {name: pending_tensor(tensor) for name, tensor in others.items()}
    permuted = any(plane.permutation is not None for plane in planes.values())
    manifest = Manifest(
        required_features=("input_permutation",) if permuted else (),
        nesting={
            "base_bits": 4,
            "refinement_bits": 4,
            "group_size": 128,
            "base_method": "gptq",
            "refine_method": "closed",
        },
        activation={"bits": 8, "granularity": "token", "symmetric": True},
        kv_cache={"base_bits": 4, "refinement_bits": 4, "granularity": "token_head"},
        rotation=None,
        source={"kind": "gptq"},
        modules=modules,
        unquantized=tuple(others),
        files={},
    )
    writer.finish(manifest, checkpoint_config(config))
    return folder


def from_gptq(tensors: Mapping[str, Tensor], name: str) -> Planes:
    """GPTQ's tensors of one module as planes; columns in the order of their groups where `g_idx` scatters them."""
    base = tensors[f"{name}.qweight"].T.contiguous()
    scale, index = tensors[f"{name}.scales"].T.contiguous(), tensors[f"{name}.g_idx"]
    order = torch.argsort(index, stable=True)
    if torch.equal(order, torch.arange(len(order))):
        return Planes(base, scale)
    return Planes(packing.pack(packing.unpack(base)[:, order]), scale, order.int())


@pytest.fixture
def compressed_tensors(tmp_path: Path) -> Path:
    """The peer's W4A16 checkpoint as a nested one."""
    config = json.loads((FIXTURES / "compressed-tensors" / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(FIXTURES / "compressed-tensors" / "model.safetensors")
    names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    planes = {name: Planes(tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]) for name in names}
    others = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in planes}
    return nest(tmp_path / "nested", planes, others, config)


@pytest.fixture
def gptq(tmp_path: Path, tiny_model: Callable[..., Any]) -> Callable[[str], Path]:
    """`(fixture)` -> a nested checkpoint with GPTQModel's `q_proj` and `down_proj` of layer 0, its rest random."""

    def make(fixture: str) -> Path:
        config, others = tiny_model(num_hidden_layers=1, vocab_size=512)
        tensors = load_file(FIXTURES / f"{fixture}.safetensors")
        planes = {name: from_gptq(tensors, name) for name in (QUERY, DOWN)}
        others = {name: tensor for name, tensor in others.items() if name.rpartition(".")[0] not in planes}
        return nest(tmp_path / "nested", planes, others, config)

    return make


def run(folder: Path, output: Path, format_name: str, **options: Any) -> ExportResult:
    return export(folder, output, ExportOptions(format=format_name, **options))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def rebuilt(folder: Path, format_name: str, module: str, view: str) -> Tensor:
    """A module's weight from an export alone, float32, with this test's own reading of each format."""
    tensors = load_file(folder / "model.safetensors")
    if format_name == "hf":
        return tensors[f"{module}.weight"].float()
    bits = 4 if view == "draft" else 8
    gptq = format_name.startswith("gptq")
    words = tensors[f"{module}.qweight"].T if gptq else tensors[f"{module}.weight_packed"]
    fields = [(words.long() >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    codes = torch.stack(fields, dim=-1).flatten(1).float()
    if not gptq:
        assert tensors[f"{module}.weight_shape"].tolist() == list(codes.shape)
        scale = tensors[f"{module}.weight_scale"].float()
        return (codes - 2 ** (bits - 1)) * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
    zeros = tensors[f"{module}.qzeros"].long()
    zeros = torch.stack([(zeros >> shift) & (2**bits - 1) for shift in range(0, 32, bits)], dim=-1).flatten(1)
    zeros = zeros + (1 if format_name == "gptq" else 0)
    groups = tensors[f"{module}.g_idx"].long()
    return (codes - zeros[groups].T) * tensors[f"{module}.scales"].float()[groups].T


def expected(folder: Path, module: str, view: Any) -> Tensor:
    """The view's weight with its columns in the source's order."""
    weight = Checkpoint(folder, view).weight(module)
    stored = weight.dequantize(view)
    if weight.permutation is None:
        return stored
    return stored[:, torch.argsort(weight.permutation.long())]


def test_every_byte_equals_the_peers_file(compressed_tensors, tmp_path):
    result = run(compressed_tensors, tmp_path / "out", "compressed-tensors-w4")
    peer = FIXTURES / "compressed-tensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (peer / "model.safetensors").read_bytes()
    assert (result.modules, result.planes_equal, result.rounding) == (14, 14, 0.0)
    ours, theirs = read_config(tmp_path / "out"), read_config(peer)
    weights = ours["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights.items() <= theirs["quantization_config"]["config_groups"]["group_0"]["weights"].items()
    for key in ("quant_method", "format", "ignore", "quantization_status", "kv_cache_scheme"):
        assert ours["quantization_config"][key] == theirs["quantization_config"][key]
    assert {key: ours[key] for key in theirs if key != "quantization_config"} == {
        key: value for key, value in theirs.items() if key != "quantization_config"
    }


@pytest.mark.parametrize(("fixture", "format_name"), [("gptq", "gptq"), ("gptq-act", "gptq"), ("gptq-v2", "gptq-v2")])
def test_every_tensor_equals_that_of_gptqmodel(gptq, tmp_path, fixture, format_name):
    run(gptq(fixture), tmp_path / "out", format_name)
    peer, ours = load_file(FIXTURES / f"{fixture}.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in peer.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert read_config(tmp_path / "out")["quantization_config"]["desc_act"] == (fixture == "gptq-act")


@pytest.mark.parametrize(("format_name", "view"), [(name, view) for name in FORMATS for view in FORMATS[name].views])
@pytest.mark.parametrize("model", [{}, {"intermediate_size": 576, "model_type": "qwen2"}, {"group_size": -1}])
def test_weights_equal_the_view(tiny_checkpoint, tmp_path, format_name, view, model):
    folder = tiny_checkpoint(tmp_path / "nested", nested_head=True, **model)
    options = {"dtype": "float32"} if format_name == "hf" else {}
    result = run(folder, tmp_path / "out", format_name, view=view, **options)
    assert result.rounding == 0.0
    for module in Checkpoint(folder).manifest.modules:
        weight = expected(folder, module, view)
        assert torch.equal(rebuilt(tmp_path / "out", format_name, module, view), weight), module


@pytest.mark.parametrize(("format_name", "view"), [("gptq", "draft"), ("gptq", "target"), ("hf", "target")])
def test_a_permutation_is_undone(gptq, tmp_path, format_name, view):
    folder = gptq("gptq-act")
    run(folder, tmp_path / "out", format_name, view=view, **({"dtype": "float32"} if format_name == "hf" else {}))
    for module in (QUERY, DOWN):
        weight = expected(folder, module, view)
        assert torch.equal(rebuilt(tmp_path / "out", format_name, module, view), weight)


def test_eight_bit_words_by_hand(tmp_path, tiny_model):
    """q4 = -8, -1, 0, 7 with qr = 3, -8, 0, 7 compose to -125, -24, 0, 119, stored as 3, 104, 128, 247."""
    codes = torch.tensor([-8, -1, 0, 7], dtype=torch.int8).repeat(256, 64)
    config, others = tiny_model(num_hidden_layers=1)
    others.pop(f"{QUERY}.weight")
    scale = torch.full((256, 2), 2.0**-5, dtype=torch.float16)
    folder = nest(tmp_path / "nested", {QUERY: Planes(packing.pack(codes), scale)}, others, config)
    fine = packing.pack(torch.tensor([3, -8, 0, 7], dtype=torch.int8).repeat(256, 64))
    replace_refinement(folder, fine)
    run(folder, tmp_path / "out", "compressed-tensors-w8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors[f"{QUERY}.weight_packed"][0, 0].item() == 3 + (104 << 8) + (128 << 16) + (247 << 24) - (1 << 32)
    assert tensors[f"{QUERY}.weight_scale"].dtype == torch.float16
    assert set(tensors[f"{QUERY}.weight_scale"].flatten().tolist()) == {2.0**-9}
    run(folder, tmp_path / "gptq", "gptq", view="target")
    assert load_file(tmp_path / "gptq" / "model.safetensors")[f"{QUERY}.qzeros"][0, 0].item() == 0x7F7F7F7F
    run(folder, tmp_path / "gptq2", "gptq-v2", view="target")
    zeros = load_file(tmp_path / "gptq2" / "model.safetensors")[f"{QUERY}.qzeros"]
    assert zeros[0, 0].item() == 0x80808080 - (1 << 32)


def replace_refinement(folder: Path, plane: Tensor) -> None:
    """Put another refinement plane in place of the only one."""
    file = folder / "bitnest-refinement-00001-of-00001.safetensors"
    save_file({f"{QUERY}.weight_refinement": plane}, file, metadata={"format": "pt"})
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    document["modules"][QUERY]["planes"]["refinement"]["sha256"] = tensor_sha256(plane)
    shards.write_json(folder / "bitnest.json", document)


def test_scales_that_a_sixteenth_would_blur_are_stored_in_float32(tiny_checkpoint, tmp_path):
    """A scale of 2^-12 * 1.001 has bits that its sixteenth has no room for in float16."""
    folder = tiny_checkpoint(tmp_path / "nested")
    stored = load_file(folder / "bitnest-base-00001-of-00001.safetensors")
    small = (stored[f"{DOWN}.weight_scale"].float() / 512).half()
    assert bool(((small.float() / 16).half().float() != small.float() / 16).any())
    stored[f"{DOWN}.weight_scale"] = small
    save_file(stored, folder / "bitnest-base-00001-of-00001.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    document["modules"][DOWN]["planes"]["scale"]["sha256"] = tensor_sha256(small)
    shards.write_json(folder / "bitnest.json", document)
    result = run(folder, tmp_path / "w8", "compressed-tensors-w8")
    scales = load_file(tmp_path / "w8" / "model.safetensors")
    assert scales[f"{DOWN}.weight_scale"].dtype == torch.float32
    assert scales[f"{QUERY}.weight_scale"].dtype == torch.float16
    assert torch.equal(
        rebuilt(tmp_path / "w8", "compressed-tensors-w8", DOWN, "target"), expected(folder, DOWN, "target")
    )
    assert result.rounding == 0.0
    result = run(folder, tmp_path / "gptq", "gptq", view="target")
    assert 0 < result.rounding < 2**-8
    note = next(note for note in result.notes if note.startswith(DOWN))
    assert note.startswith(f"{DOWN}: scales are rounded to float16, the one type of gptq; the largest change is ")


def test_a_scale_outside_float16_is_refused_where_it_has_to_fit(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", scale_type=torch.float32, num_hidden_layers=1)
    base = folder / "bitnest-base-00001-of-00001.safetensors"
    stored = load_file(base)
    scale = stored[f"{DOWN}.weight_scale"]
    scale[0, 0] = 71429.0
    save_file(stored, base, metadata={"format": "pt"})
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    document["modules"][DOWN]["planes"]["scale"]["sha256"] = tensor_sha256(scale)
    shards.write_json(folder / "bitnest.json", document)
    with pytest.raises(SourceError) as caught:
        run(folder, tmp_path / "out", "gptq")
    assert str(caught.value) == (
        "model.layers.0.mlp.down_proj: a scale is too large or too small for float16, the one type of gptq. Export to "
        "compressed-tensors-w4, compressed-tensors-w8 or hf instead."
    )
    with pytest.raises(SourceError) as caught:
        run(folder, tmp_path / "out", "hf", dtype="float16")
    assert str(caught.value).startswith("model.layers.0.mlp.down_proj.weight: its largest magnitude, ")
    assert str(caught.value).endswith(", does not fit torch.float16. Export with --dtype bfloat16 or float32.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nested"]
    run(folder, tmp_path / "out", "compressed-tensors-w4")
    assert torch.equal(
        rebuilt(tmp_path / "out", "compressed-tensors-w4", DOWN, "draft"), expected(folder, DOWN, "draft")
    )


def test_mixed_group_sizes_and_plain_linears_are_named(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", intermediate_size=576, nested_head=True)
    run(folder, tmp_path / "w4", "compressed-tensors-w4", activations="int8")
    block = read_config(tmp_path / "w4")["quantization_config"]
    sizes = {
        size: group["targets"] for group in block["config_groups"].values() for size in [group["weights"]["group_size"]]
    }
    assert sizes[64] == [r"re:.*\.down_proj$"]
    assert sizes[128] == [
        rf"re:.*\.{name}$" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    ] + ["lm_head"]
    assert block["ignore"] == []
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert [group["input_activations"] for group in block["config_groups"].values()] == [inputs, inputs]
    assert {group["format"] for group in block["config_groups"].values()} == {"pack-quantized"}
    run(folder, tmp_path / "gptq", "gptq")
    block = read_config(tmp_path / "gptq")["quantization_config"]
    assert (block["group_size"], block["lm_head"]) == (128, True)
    assert block["dynamic"] == {r"+:.*\.down_proj$": {"group_size": 64}}
    copy = json.loads((tmp_path / "gptq" / "quantize_config.json").read_text(encoding="utf-8"))
    assert copy == block


def test_one_group_per_row(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", group_size=-1)
    run(folder, tmp_path / "w4", "compressed-tensors-w4")
    groups = read_config(tmp_path / "w4")["quantization_config"]["config_groups"]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    assert [(group["targets"], group["weights"]) for group in groups.values()] == [(["Linear"], weights)]
    run(folder, tmp_path / "gptq", "gptq")
    assert read_config(tmp_path / "gptq")["quantization_config"]["group_size"] == -1


def test_linears_that_are_not_quantized_are_left_out_by_name(gptq, tmp_path):
    """All but two of the linear layers are plain."""
    folder = gptq("gptq")
    run(folder, tmp_path / "w4", "compressed-tensors-w4")
    plain = [f"model.layers.0.self_attn.{name}_proj" for name in "kvo"]
    plain += [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    assert read_config(tmp_path / "w4")["quantization_config"]["ignore"] == [*plain, "lm_head"]
    run(folder, tmp_path / "gptq", "gptq")
    dynamic = read_config(tmp_path / "gptq")["quantization_config"]["dynamic"]
    assert list(dynamic) == ["-:^" + name.replace(".", r"\.") + "$" for name in plain]


def test_a_permutation_needs_a_format_that_has_a_word_for_it(gptq, tmp_path):
    with pytest.raises(SourceError) as caught:
        run(gptq("gptq-act"), tmp_path / "out", "compressed-tensors-w4")
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj, model.layers.0.mlp.down_proj: has an input permutation (quantized in "
        "activation order), which compressed-tensors-w4 has no word for. Export to gptq, gptq-v2, hf instead."
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_weights_are_what_transformers_loads(tiny_checkpoint, tmp_path, tied, dtype):
    """Logits of the export equal those of a model whose weights are set by hand."""
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(tmp_path / "nested", tied=tied, model_type="qwen2", num_hidden_layers=1)
    result = run(folder, tmp_path / "out", "hf", dtype=dtype, view="draft")
    assert (result.rounding == 0.0) == (dtype == "float32")
    assert result.rounding <= {"float32": 0.0, "float16": 2**-12, "bfloat16": 2**-9}[dtype]
    assert read_config(tmp_path / "out")["torch_dtype"] == dtype
    assert "quantization_config" not in read_config(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    checkpoint = Checkpoint(folder, "draft")
    for name in checkpoint.manifest.modules:
        weight = checkpoint.weight(name).dequantize("draft").to(getattr(torch, dtype)).float()
        assert torch.equal(model.get_submodule(name).weight, weight)
    for name in checkpoint.manifest.unquantized:
        assert torch.equal(model.get_parameter(name), checkpoint.tensor(name).float())


def test_unquantized_tensors_keep_their_bytes_and_side_files_come_along(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested")
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_bytes(b'{"a": 1}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").write_bytes(b"{{ x }}")
    for name in ("tokenizer.json", "additional_chat_templates/x.jinja", "gone.txt"):
        document["files"][name] = {"size": 8, "sha256": "0" * 64}
    shards.write_json(folder / "bitnest.json", document)
    result = run(folder, tmp_path / "out", "gptq")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"a": 1}'
    assert (tmp_path / "out" / "additional_chat_templates" / "x.jinja").read_bytes() == b"{{ x }}"
    assert "not in the folder and left out: gone.txt" in result.notes
    checkpoint, ours = Checkpoint(folder), load_file(tmp_path / "out" / "model.safetensors")
    for name in checkpoint.manifest.unquantized:
        assert (ours[name].dtype, tensor_sha256(ours[name])) == (
            checkpoint.tensor(name).dtype,
            tensor_sha256(checkpoint.tensor(name)),
        )


def test_shards_and_their_index(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested")
    run(folder, tmp_path / "one", "compressed-tensors-w8")
    run(folder, tmp_path / "many", "compressed-tensors-w8", shard_bytes=300_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    joined = {name: tensor for file in files for name, tensor in load_file(tmp_path / "many" / file).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert joined.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


def test_the_card_says_what_it_is(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", nested_head=True)
    export(
        folder,
        tmp_path / "out",
        ExportOptions(format="compressed-tensors-w4"),
        repo_id="someone/nested",
        revision="0123456789abcdef0123456789abcdef01234567",
    )
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    name = Checkpoint(folder).manifest.source["name"]
    assert card.startswith(f"---\nbase_model: {name}\nbase_model_relation: quantized\nlibrary_name: transformers\n")
    assert "tags:\n- 4-bit\n- compressed-tensors\n- bitnest\n" in card
    assert "| exported from | [someone/nested](https://huggingface.co/someone/nested) at 0123456789abcdef" in card
    assert "- lm\\_head is nested in the checkpoint; here it is stored in 4 bits like every other module." in card


def test_a_draft_needs_the_base_shards_alone(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested")
    (folder / "bitnest-refinement-00001-of-00001.safetensors").unlink()
    run(folder, tmp_path / "w4", "compressed-tensors-w4")
    with pytest.raises(CheckpointError) as caught:
        run(folder, tmp_path / "w8", "compressed-tensors-w8")
    assert "names bitnest-refinement-00001-of-00001.safetensors, not in the folder" in str(caught.value)
    draft_only = tiny_checkpoint(tmp_path / "draft-only", draft_only=True)
    with pytest.raises(CheckpointError) as caught:
        run(draft_only, tmp_path / "w8", "hf")
    assert str(caught.value).startswith("bitnest.json: the only view is the draft, of 4 bits; the target view cannot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"format": "awq"},
            "--format is 'awq', expected one of compressed-tensors-w4, compressed-tensors-w8, gptq, gptq-v2, hf",
        ),
        (
            {"format": "compressed-tensors-w4", "view": "target"},
            "--view target: compressed-tensors-w4 holds the draft view alone",
        ),
        (
            {"format": "gptq", "dtype": "float16"},
            "--dtype float16: gptq keeps codes and scales; hf alone has a choice of types",
        ),
        ({"format": "hf", "dtype": "int8"}, "--dtype is 'int8', expected one of float16, bfloat16, float32"),
        ({"format": "hf", "activations": "int4"}, "--activations is 'int4', expected one of none, int8"),
        (
            {"format": "gptq", "activations": "int8"},
            "--activations int8: gptq has no word for it. Use one of compressed-tensors-w4, compressed-tensors-w8.",
        ),
        ({"format": "hf", "shard_bytes": 0}, "--max-shard-size is 0, expected at least 1"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(UsageError) as caught:
        ExportOptions(**options)
    assert str(caught.value) == message


def test_nothing_of_the_users_is_overwritten(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(SourceError) as caught:
        run(folder, tmp_path / "out", "hf")
    assert str(caught.value) == (
        f"{tmp_path}/out: exists and is not empty; nothing in it is overwritten. Give another folder, or empty it."
    )
    with pytest.raises(SourceError) as caught:
        run(folder, folder / "out", "hf")
    assert str(caught.value) == f"{folder}/out: lies inside the source {folder}; give a folder outside of it"
    assert validate(folder, deep=True) == []


def test_a_damaged_plane_is_found_and_nothing_is_left(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested")
    file = folder / "bitnest-base-00001-of-00001.safetensors"
    entry = shards.read_header(file)[f"{QUERY}.weight_packed"]
    raw = bytearray(file.read_bytes())
    raw[entry.start] ^= 1
    file.write_bytes(bytes(raw))
    with pytest.raises(CheckpointError) as caught:
        run(folder, tmp_path / "out", "compressed-tensors-w4")
    assert str(caught.value).startswith(f"{file.name}: {QUERY}.weight_packed: SHA-256 is ")
    assert str(caught.value).endswith(" as in the manifest. Restore the shard, or download the checkpoint again.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nested"]


def test_a_full_disk(tiny_checkpoint, tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "nested")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(SourceError) as caught:
            run(folder, tmp_path / "out", "hf")
    assert str(caught.value).startswith(f"{tmp_path}: 0.0 MB free, the export needs about ")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_folder, "write_shard", full)
    with pytest.raises(BitnestError) as caught:
        run(folder, tmp_path / "out", "hf")
    assert str(caught.value) == f"{tmp_path}: the disk is full. Free some space and run the command again."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nested"]


def test_outputs_that_do_not_fill_words(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", vocab_size=323, nested_head=True)
    with pytest.raises(SourceError) as caught:
        run(folder, tmp_path / "out", "gptq")
    assert str(caught.value) == (
        "lm_head: the number of outputs is not a multiple of 8, and the zero points of gptq would not fill their "
        "words. Export to another format."
    )
    run(folder, tmp_path / "out", "compressed-tensors-w4")


def test_float32_scales_are_rounded_where_the_format_knows_float16_alone(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", scale_type=torch.float32)
    scale = load_file(folder / "bitnest-base-00001-of-00001.safetensors")[f"{DOWN}.weight_scale"]
    assert nesting.round_scale(scale, torch.float16).ne(scale).any()
    result = run(folder, tmp_path / "out", "gptq")
    assert 0 < result.rounding < 2**-11
