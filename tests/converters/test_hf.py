"""Hugging Face folders as sources: what is read, what is left out, and every way in which one can be wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitnest_format.architecture import read_architecture
from bitnest_format.converters.hf import HuggingFaceSource
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import FileFormatError, SourceError
from bitnest_format.families import FAMILIES, WRAPPERS

TinyModel = tuple[dict[str, Any], dict[str, Tensor]]
Make = Callable[..., TinyModel]

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIDE_FILES = {
    "dataset_statistics.json": b"{}",
    "preprocessor_config.json": b"{ }",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": '{"eos_token": "終"}'.encode(),
    "tokenizer.model": b"\x00\x01sentencepiece",
    "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
    "special_tokens_map.json": b"{ }",
    "added_tokens.json": b"{}\n",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "additional_chat_templates/x.jinja": b"{{ tools }}",
    "generation_config.json": b'{"do_sample":false,"temperature":0.9,"top_p":0.6}',
    "LICENSE.txt": b"terms",
    "NOTICE": b"notice",
}
OTHER_FILES = {"README.md": b"# card", "modeling_x.py": b"raise SystemExit", "training_args.bin": b"\x80\x04."}


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def write_single(folder: Path, model: TinyModel, **metadata: Any) -> Path:
    config, tensors = model
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", **metadata)
    return folder


def write_sharded(folder: Path, model: TinyModel) -> dict[str, str]:
    """Two shards with an index; returns the weight map."""
    config, tensors = model
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    names = list(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file)
        weight_map |= dict.fromkeys(half, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": dict(weight_map)})


def add_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def problems_of(folder: Path, **options: Any) -> list[str]:
    """What opening and inspecting a folder complain about."""
    try:
        return HuggingFaceSource(folder, **options).inspect().problems
    except SourceError as error:
        return error.problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_reads_every_tensor_as_stored(tmp_path: Path, tiny_model: Make, model_type: str, dtype: torch.dtype) -> None:
    config, tensors = tiny_model(model_type)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    source = HuggingFaceSource(add_tokenizer(write_single(tmp_path, (config, tensors))))
    assert source.config == config
    assert list(source.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert source.tensors[name].dtype == dtype
        assert source.tensors[name].shape == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor)
    assert source.inspect().problems == []
    assert source.notes == []


def test_mixed_types_are_kept_apart(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm] = tensors[norm].float()
    source = HuggingFaceSource(write_single(tmp_path, (config, tensors)))
    assert source.tensors[norm].dtype == torch.float32
    assert source.tensors["model.norm.weight"].dtype == torch.bfloat16
    assert source.read(norm).dtype == torch.float32


def test_a_tensor_read_is_not_tied_to_the_file(tmp_path: Path, tiny_model: Make) -> None:
    source = HuggingFaceSource(write_single(tmp_path, tiny_model()))
    first = source.read("model.norm.weight")
    first.zero_()
    assert bool(source.read("model.norm.weight").all())


@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx"}], ids=["absent", "empty", "mlx"])
def test_file_metadata_do_not_matter(tmp_path: Path, tiny_model: Make, metadata: dict[str, str] | None) -> None:
    assert problems_of(write_single(tmp_path, tiny_model(), metadata=metadata)) == []


def test_fingerprint_depends_on_content_alone(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    single = HuggingFaceSource(write_single(tmp_path / "single", (config, tensors))).inspect().fingerprint
    names = list(tensors)
    random.Random(0).shuffle(names)
    write_sharded(tmp_path / "sharded", (config, {name: tensors[name] for name in names}))
    assert HuggingFaceSource(tmp_path / "sharded").inspect().fingerprint == single
    reordered = dict(reversed(config.items()))
    other = HuggingFaceSource(write_single(tmp_path / "reordered", (reordered, tensors))).inspect().fingerprint
    assert other == single


@pytest.mark.parametrize("change", ["value", "dtype", "config"])
def test_fingerprint_changes_with_the_content(tmp_path: Path, tiny_model: Make, change: str) -> None:
    config, tensors = tiny_model()
    before = HuggingFaceSource(write_single(tmp_path, (config, tensors))).inspect().fingerprint
    if change == "value":
        tensors["model.norm.weight"][3] += 1
    elif change == "dtype":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    else:
        config = {**config, "rms_norm_eps": 1e-6}
    assert HuggingFaceSource(write_single(tmp_path, (config, tensors))).inspect().fingerprint != before


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen3", False)]
)
def test_reads_what_transformers_saves(tmp_path: Path, tiny_model: Make, model_type: str, tied: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config, tensors = tiny_model(model_type, tied)
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.bfloat16)
    model.load_state_dict(tensors, strict=not tied)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    assert (tmp_path / INDEX).is_file()
    source = HuggingFaceSource(add_tokenizer(tmp_path))
    assert source.inspect().problems == []
    assert set(source.tensors) == set(tensors)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())
    assert read_architecture(source.config) == read_architecture(config)


# --- NaN and infinite values


@pytest.mark.parametrize(
    ("name", "place", "value", "found"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (0, 0), float("nan"), "1 NaN value"),
        ("model.layers.1.self_attn.v_proj.weight", (3, 7), float("inf"), "1 infinite value"),
        ("model.norm.weight", slice(0, 3), float("nan"), "3 NaN values"),
    ],
    ids=["nan", "inf", "norm"],
)
def test_bad_values_are_counted_and_named(
    tmp_path: Path, tiny_model: Make, name: str, place: Any, value: float, found: str
) -> None:
    config, tensors = tiny_model()
    tensors[name][place] = value
    assert problems_of(write_single(tmp_path, (config, tensors))) == [
        f"model.safetensors: {name}: {found}, expected finite weights. Export the model again."
    ]


def test_all_bad_values_are_found_in_one_pass(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    tensors["model.norm.weight"][:2] = torch.tensor([float("nan"), float("-inf")])
    tensors["lm_head.weight"][5, 5] = float("inf")
    assert problems_of(write_single(tmp_path, (config, tensors))) == [
        "model.safetensors: model.norm.weight: 1 NaN and 1 infinite values, expected finite weights. "
        "Export the model again.",
        "model.safetensors: lm_head.weight: 1 infinite value, expected finite weights. Export the model again.",
    ]


# --- shards and indexes


def test_reads_shards_by_their_index(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    write_sharded(tmp_path, (config, tensors))
    source = HuggingFaceSource(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_reads_shards_without_an_index(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    write_sharded(tmp_path, (config, tensors))
    (tmp_path / INDEX).unlink()
    assert set(HuggingFaceSource(tmp_path).tensors) == set(tensors)


def test_every_missing_shard_is_listed(tmp_path: Path, tiny_model: Make) -> None:
    weight_map = write_sharded(tmp_path, tiny_model())
    (tmp_path / SHARDS[1]).unlink()
    assert problems_of(tmp_path) == [
        f"{INDEX}: 1 of 2 shards is not in the folder: {SHARDS[1]}. Download the model again."
    ]
    files = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    write_index(tmp_path, {name: files[place % 4] for place, name in enumerate(weight_map)})
    (tmp_path / SHARDS[0]).rename(tmp_path / files[1])
    assert problems_of(tmp_path) == [
        f"{INDEX}: 3 of 4 shards are not in the folder: {files[0]}, {files[2]}, {files[3]}. Download the model again."
    ]


def test_numbering_betrays_shards_that_the_index_forgot(tmp_path: Path, tiny_model: Make) -> None:
    weight_map = write_sharded(tmp_path, tiny_model())
    (tmp_path / SHARDS[1]).unlink()
    write_index(tmp_path, dict.fromkeys([name for name, file in weight_map.items() if file == SHARDS[0]], SHARDS[0]))
    missing = f"1 of 2 shards is not in the folder: {SHARDS[1]}. Download the model again."
    assert problems_of(tmp_path) == [f"{INDEX}: {missing}"]
    (tmp_path / INDEX).unlink()
    assert problems_of(tmp_path) == [f"the shard names: {missing}"]


def test_index_that_puts_a_tensor_into_the_wrong_shard(tmp_path: Path, tiny_model: Make) -> None:
    weight_map = write_sharded(tmp_path, tiny_model())
    name = "model.layers.1.mlp.up_proj.weight"
    assert weight_map[name] == SHARDS[1]
    write_index(tmp_path, {**weight_map, name: SHARDS[0]})
    assert problems_of(tmp_path) == [
        f"{INDEX}: {name}: not in {SHARDS[0]}, where the index puts it; it lies in {SHARDS[1]}"
    ]


def test_index_that_names_a_tensor_no_shard_holds(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    weight_map = write_sharded(tmp_path, (config, tensors))
    write_index(tmp_path, {**weight_map, name: SHARDS[0]})
    assert problems_of(tmp_path) == [f"{INDEX}: {name}: not in {SHARDS[0]}, where the index puts it; no shard holds it"]


def test_shard_that_holds_a_tensor_the_index_lacks(tmp_path: Path, tiny_model: Make) -> None:
    weight_map = write_sharded(tmp_path, tiny_model())
    name = "model.norm.weight"
    write_index(tmp_path, {key: file for key, file in weight_map.items() if key != name})
    assert problems_of(tmp_path) == [f"{INDEX}: {name}: in {SHARDS[1]}, but missing from the index"]


def test_tensor_that_lies_in_two_indexed_shards(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    weight_map = write_sharded(tmp_path, (config, tensors))
    name = "model.norm.weight"
    first = {key: tensors[key] for key, file in weight_map.items() if file == SHARDS[0]}
    save_file({**first, name: tensors[name] + 1}, tmp_path / SHARDS[0])
    assert problems_of(tmp_path) == [f"{INDEX}: {name}: in {SHARDS[0]}, {SHARDS[1]}; the index names {SHARDS[1]} alone"]


def test_duplicates_without_an_index(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    write_sharded(tmp_path, (config, tensors))
    (tmp_path / INDEX).unlink()
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "extra.safetensors")
    assert problems_of(tmp_path) == [
        f"model.norm.weight: in extra.safetensors and {SHARDS[1]}; without {INDEX} nothing says which one counts. "
        "Remove one of them."
    ]


@pytest.mark.parametrize("sharded", [True, False], ids=["index", "single"])
def test_stray_files_are_ignored_with_a_note(tmp_path: Path, tiny_model: Make, sharded: bool) -> None:
    config, tensors = tiny_model()
    if sharded:
        write_sharded(tmp_path, (config, tensors))
    else:
        write_single(tmp_path, (config, tensors))
    add_tokenizer(tmp_path)
    nines = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors.items()}
    save_file(nines, tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    source = HuggingFaceSource(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())
    assert source.notes == [
        "weight files that are not part of the model are ignored: consolidated.safetensors, pytorch_model.bin"
    ]


@pytest.mark.parametrize("name", ["../../secret/model.safetensors", "/etc/model.safetensors", "C:\\x.safetensors", ""])
def test_index_paths_stay_inside_the_folder(tmp_path: Path, tiny_model: Make, name: str) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    weight_map = write_sharded(folder, tiny_model())
    secret = tmp_path / "secret"
    secret.mkdir()
    save_file({"model.norm.weight": torch.ones(256)}, secret / "model.safetensors")
    write_index(folder, {**weight_map, "model.norm.weight": name})
    assert problems_of(folder) == [f"{INDEX}: {name!r} is not a file inside tiny: a plain relative name is expected"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_index_without_a_map(tmp_path: Path, tiny_model: Make, content: str) -> None:
    write_sharded(tmp_path, tiny_model())
    (tmp_path / INDEX).write_text(content, encoding="utf-8")
    (problem,) = problems_of(tmp_path)
    expected = f"{INDEX}: is not valid JSON" if content == "{" else f"{INDEX}: weight_map: missing or empty, expected"
    assert problem.startswith(expected)


# --- damaged files


@pytest.mark.parametrize("cut", ["last byte", "half", "header", "everything", "one byte more"])
def test_cut_files_are_named_with_their_size(tmp_path: Path, tiny_model: Make, cut: str) -> None:
    path = write_single(tmp_path, tiny_model()) / "model.safetensors"
    raw = path.read_bytes()
    kept = {
        "last byte": raw[:-1],
        "half": raw[: len(raw) // 2],
        "header": raw[:100],
        "everything": b"",
        "one byte more": raw + b"\0",
    }[cut]
    path.write_bytes(kept)
    expected = {
        "last byte": f"cut off: has {len(raw) - 1} bytes, its header describes {len(raw)} bytes. Download it again.",
        "half": f"cut off: has {len(raw) // 2} bytes, its header describes {len(raw)} bytes. Download it again.",
        "header": "cut off: has 100 bytes, its header is incomplete. Download it again.",
        "everything": "cut off: has 0 bytes, its header is incomplete. Download it again.",
        "one byte more": f"has {len(raw) + 1} bytes, its header describes {len(raw)}. Download it again.",
    }[cut]
    assert problems_of(tmp_path) == [f"model.safetensors: {expected}"]


def test_every_damaged_shard_is_listed(tmp_path: Path, tiny_model: Make) -> None:
    write_sharded(tmp_path, tiny_model())
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / SHARDS[0]).write_bytes(pointer)
    (tmp_path / SHARDS[1]).write_bytes(b"\0" * 5)
    assert problems_of(tmp_path) == [
        f"{SHARDS[0]}: a Git LFS pointer of {len(pointer)} bytes, the file itself was not downloaded. "
        "Run 'git lfs pull' or download it again.",
        f"{SHARDS[1]}: cut off: has 5 bytes, its header is incomplete. Download it again.",
    ]


def test_pointer_in_place_of_a_tokenizer(tmp_path: Path, tiny_model: Make) -> None:
    write_single(tmp_path, tiny_model())
    (tmp_path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert problems_of(tmp_path) == [
        "tokenizer.model: a Git LFS pointer, the file itself was not downloaded. Run 'git lfs pull' or download it "
        "again."
    ]


def test_file_that_shrinks_while_it_is_read(tmp_path: Path, tiny_model: Make) -> None:
    source = HuggingFaceSource(write_single(tmp_path, tiny_model()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SourceError, match=r"^model\.safetensors: ended while a tensor was read from it$"):
        source.inspect()


def test_file_that_vanishes(tmp_path: Path, tiny_model: Make) -> None:
    source = HuggingFaceSource(write_single(tmp_path, tiny_model()))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"^model\.safetensors: cannot be read \(No such file or directory\)$"):
        source.read("model.norm.weight")


# --- quantized sources and other types


PACKED = {"gptq": "gptq", "compressed-tensors": "pack-quantized"}
READ = (
    "expected plain fp32, fp16 or bf16 weights, or a symmetric 4-bit GPTQ or compressed-tensors model. Give the "
    "original model instead."
)


@pytest.mark.parametrize("method", ["awq", "fp8", "bitsandbytes", "mxfp4", "bitnet"])
def test_quantized_sources_are_refused_by_name(tmp_path: Path, tiny_model: Make, method: str) -> None:
    folder = write_single(tmp_path, tiny_model(quantization_config={"quant_method": method, "bits": 4}))
    assert problems_of(folder) == [
        f"config.json: quantization_config: the model is already quantized with '{method}', {READ}"
    ]


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_packed_formats_need_packed_weights(tmp_path: Path, tiny_model: Make, method: str) -> None:
    folder = write_single(tmp_path, tiny_model(quantization_config={"quant_method": method, "format": PACKED[method]}))
    assert problems_of(folder) == [
        f"config.json: quantization_config: says that the model is quantized with '{method}', but no linear layer of "
        "it is stored packed. Remove that statement if the weights are the original ones."
    ]


def test_own_format_is_already_converted(
    tmp_path: Path, tiny_model: Make, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = write_single(tmp_path / "config", tiny_model(quantization_config={"quant_method": "bitnest"}))
    assert problems_of(folder) == [
        "config.json: quantization_config: quant_method is 'bitnest': the model is already converted. Load it, or give "
        "the original model."
    ]
    nested = tiny_checkpoint(tmp_path / "nested")
    assert problems_of(nested) == [
        f"{nested}: is already converted (it holds bitnest.json). Load it as it is, or give the original model."
    ]


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("quantize_config.json", {"bits": 4, "quant_method": "awq"}, "the model is already quantized with 'awq'"),
        ("quant_config.json", {"w_bit": 4}, "the model is already quantized"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "the model is already quantized with 'FP8'"),
    ],
)
def test_quantization_files_are_refused(
    tmp_path: Path, tiny_model: Make, file: str, content: dict[str, Any], found: str
) -> None:
    write_json(write_single(tmp_path, tiny_model()) / file, content)
    assert problems_of(tmp_path) == [f"{file}: {found}, {READ}"]


def test_old_bitsandbytes_config_is_known_by_its_fields(tmp_path: Path, tiny_model: Make) -> None:
    folder = write_single(tmp_path, tiny_model(quantization_config={"load_in_4bit": True}))
    assert "already quantized with 'bitsandbytes'" in problems_of(folder)[0]


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_quantization_config_counts_as_none(tmp_path: Path, tiny_model: Make, empty: Any) -> None:
    assert problems_of(write_single(tmp_path, tiny_model(quantization_config=empty))) == []


@pytest.mark.parametrize(
    ("dtype", "label"),
    [(torch.float8_e4m3fn, "F8_E4M3 (fp8)"), (torch.int8, "I8"), (torch.int32, "I32"), (torch.float64, "F64")],
)
def test_other_types_are_refused_by_name(tmp_path: Path, tiny_model: Make, dtype: torch.dtype, label: str) -> None:
    config, tensors = tiny_model()
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    for name in names:
        tensors[name] = tensors[name].to(dtype)
    advice = "Cast them to F32." if label == "F64" else "The model is already quantized; give the original instead."
    assert problems_of(write_single(tmp_path, (config, tensors))) == [
        f"stored as {label}, expected F32, F16, BF16: {names[0]}, {names[1]}. {advice}"
    ]


@pytest.mark.parametrize(
    ("suffix", "method"),
    [
        ("qweight", "GPTQ or AWQ"),
        ("weight_packed", "compressed-tensors"),
        ("weight_scale_inv", "fp8"),
        ("weight.absmax", "bitsandbytes"),
    ],
)
def test_quantized_tensors_are_known_by_their_names(tmp_path: Path, tiny_model: Make, suffix: str, method: str) -> None:
    config, tensors = tiny_model()
    names = [f"model.layers.{layer}.mlp.up_proj.{suffix}" for layer in range(2)]
    assert problems_of(write_single(tmp_path, (config, {**tensors, **{name: torch.ones(2) for name in names}}))) == [
        f"{names[0]}, {names[1]}: looks already quantized ({method}), though no file says so; {READ}"
    ]


def test_decoder_without_its_head_is_known_by_its_names(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(tied=True)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert problems_of(write_single(tmp_path, (config, bare))) == [
        "the tensor names lack the prefix 'model.': they were saved from the decoder alone. Save the whole causal "
        "language model and convert that."
    ]


def test_pickles_alone_are_refused_with_the_way_out(tmp_path: Path, tiny_model: Make) -> None:
    config, _ = tiny_model()
    write_json(tmp_path / "config.json", config)
    for file in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (tmp_path / file).write_bytes(b"\x80\x04.")
    assert problems_of(tmp_path) == [
        f"{tmp_path}: has its weights only as pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin; "
        "these formats can carry code and are not opened. Convert them to safetensors in an environment you trust: "
        f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{tmp_path}', dtype='auto')"
        f".save_pretrained('{tmp_path}-safetensors')\""
    ]


def test_adapters_are_refused(tmp_path: Path, tiny_model: Make) -> None:
    write_json(tmp_path / "config.json", tiny_model()[0])
    write_json(tmp_path / "adapter_config.json", {})
    save_file({"x.lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert problems_of(tmp_path) == [
        f"{tmp_path}: holds an adapter, not a whole model; merge it into its base model and convert that"
    ]


def test_folder_without_weights(tmp_path: Path, tiny_model: Make) -> None:
    write_json(tmp_path / "config.json", tiny_model()[0])
    assert problems_of(tmp_path) == [f"{tmp_path}: no model.safetensors, no {INDEX} and no other .safetensors file"]


# --- tensors beside the model's own


def test_derived_buffers_are_left_out(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    derived = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope.freqs")
    extended = {**tensors, **{name: torch.rand(32) for name in derived}}
    source = HuggingFaceSource(add_tokenizer(write_single(tmp_path, (config, extended))))
    assert set(source.tensors) == set(tensors)
    assert source.inspect().problems == []
    assert source.notes == []


def test_unknown_tensor_stops_unless_it_is_to_be_ignored(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model("qwen3")
    name = "model.layers.0.self_attn.z_norm.weight"
    add_tokenizer(write_single(tmp_path, (config, {**tensors, name: torch.ones(64)})))
    assert problems_of(tmp_path) == [
        f"{name}: not part of a qwen3 model as config.json describes it, and leaving it out may change what the model "
        "computes. Correct the source, or pass --ignore-unknown-tensors to leave it out."
    ]
    source = HuggingFaceSource(tmp_path, ignore_unknown_tensors=True)
    assert source.inspect().problems == []
    assert set(source.tensors) == set(tensors)
    assert source.notes == [f"tensors unknown to qwen3 are left out: {name}"]


def test_biases_the_config_does_not_announce(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    names = [f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(2)]
    (problem,) = problems_of(write_single(tmp_path, (config, {**tensors, **{name: torch.ones(256) for name in names}})))
    assert problem == (
        f"{names[0]}, {names[1]}: not part of a llama model as config.json describes it, and leaving them out may "
        "change what the model computes. Biases count only where attention_bias or mlp_bias in config.json says so. "
        "Correct the source, or pass --ignore-unknown-tensors to leave them out."
    )


@pytest.mark.parametrize("announced", [True, False])
def test_prediction_layers_are_dropped_with_a_note(tmp_path: Path, tiny_model: Make, announced: bool) -> None:
    config, tensors = tiny_model(**({"num_nextn_predict_layers": 1} if announced else {}))
    extra = {
        "model.layers.2.eh_proj.weight": torch.ones(256, 512),
        "model.layers.2.input_layernorm.weight": torch.ones(256),
    }
    source = HuggingFaceSource(add_tokenizer(write_single(tmp_path, (config, {**tensors, **extra}))))
    assert source.inspect().problems == []
    assert set(source.tensors) == set(tensors)
    assert source.notes == [
        "extra prediction layers are dropped: model.layers.2.eh_proj.weight, model.layers.2.input_layernorm.weight"
    ]


def test_ordinary_layers_beyond_the_config_are_a_contradiction(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(num_hidden_layers=3)
    config["num_hidden_layers"] = 2
    (problem,) = problems_of(write_single(tmp_path, (config, tensors)))
    assert problem.startswith("model.layers.2.")
    assert problem.endswith(
        ": beyond num_hidden_layers 2 in config.json. Correct the config, or pass --ignore-unknown-tensors to leave "
        "them out."
    )


# --- tied embeddings


def test_tied_head_that_is_not_stored(tmp_path: Path, tiny_model: Make) -> None:
    source = HuggingFaceSource(write_single(tmp_path, tiny_model(tied=True)))
    assert "lm_head.weight" not in source.tensors
    assert source.inspect().problems == []


def test_tied_head_that_repeats_the_embedding(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(tied=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = HuggingFaceSource(add_tokenizer(write_single(tmp_path, (config, tensors))))
    assert source.inspect().problems == []
    assert "lm_head.weight" not in source.tensors
    assert source.inspect().problems == []
    assert source.notes == ["lm_head.weight: repeats the embedding it is tied to; left out"]


@pytest.mark.parametrize("change", ["value", "dtype"])
def test_tied_head_that_contradicts_the_embedding(tmp_path: Path, tiny_model: Make, change: str) -> None:
    config, tensors = tiny_model(tied=True)
    head = tensors["model.embed_tokens.weight"].clone()
    head[0, 0] += 1
    tensors["lm_head.weight"] = head if change == "value" else head.float()
    assert problems_of(write_single(tmp_path, (config, tensors))) == [
        "lm_head.weight: differs from model.embed_tokens.weight although config.json has tie_word_embeddings true. "
        "Set it to false to use the stored head, or remove the tensor."
    ]


def test_tied_head_without_an_embedding(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(tied=True)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    source = HuggingFaceSource(write_single(tmp_path, (config, tensors)))
    assert source.inspect().problems == []
    assert "model.embed_tokens.weight" not in source.tensors


# --- configs


def test_folder_without_a_config(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [f"{tmp_path}: has no config.json; expected a model in the Hugging Face layout"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"version https://git-lfs.github.com/spec/v1\n"])
def test_config_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (problem,) = problems_of(tmp_path)
    assert problem.startswith("config.json: ")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {
                "architectures": ["FooForConditionalGeneration"],
                "model_type": "foo",
                "text_config": {"hidden_size": 256},
            },
            "config.json: text_config.num_attention_heads is missing, expected a positive integer",
        ),
        (
            {"num_attention_heads": None},
            "config.json: num_attention_heads is missing, expected a positive integer",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "config.json: rope_theta is 10000.0 but rope_parameters.rope_theta is 1000000.0; keep the one the model "
            "was trained with",
        ),
    ],
    ids=["nested", "no heads", "two thetas"],
)
def test_config_problems_come_from_the_architecture(
    tmp_path: Path, tiny_model: Make, changes: dict[str, Any], problem: str
) -> None:
    config, tensors = tiny_model()
    assert problem in problems_of(write_single(tmp_path, ({**config, **changes}, tensors)))


@pytest.mark.parametrize("architectures", [None, []])
def test_architectures_may_be_missing(tmp_path: Path, tiny_model: Make, architectures: Any) -> None:
    assert problems_of(write_single(tmp_path, tiny_model(architectures=architectures))) == []


def test_config_and_file_problems_come_together(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    write_sharded(tmp_path, ({**config, "vocab_size": -1}, tensors))
    (tmp_path / SHARDS[1]).unlink()
    assert problems_of(tmp_path) == [
        "config.json: vocab_size is -1, expected a positive integer",
        f"{INDEX}: 1 of 2 shards is not in the folder: {SHARDS[1]}. Download the model again.",
    ]


def test_custom_code_of_a_known_model_is_not_executed(tmp_path: Path, tiny_model: Make) -> None:
    code = {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "org/repo--configuration_x.Y"}
    folder = add_tokenizer(write_single(tmp_path, tiny_model(auto_map=code, _name_or_path="/home/me/model")))
    (folder / "modeling_x.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    source = HuggingFaceSource(folder)
    assert source.notes == [
        "config.json: auto_map names code of the model's own (configuration_x.py, modeling_x.py); it is neither "
        "executed nor copied (there is no trust_remote_code), the model is read as llama"
    ]
    assert "auto_map" not in source.config
    assert "_name_or_path" not in source.config


def test_custom_code_of_an_unknown_model_is_refused(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    assert problems_of(write_single(tmp_path, ({**config, "model_type": "x"}, tensors))) == [
        f"config.json: model_type is 'x' (LlamaForCausalLM); supported are {', '.join([*FAMILIES, *WRAPPERS])}.",
        "config.json: auto_map names code of the model's own (modeling_x.py). It is never executed here; there is no "
        "trust_remote_code.",
    ]


# --- side files and provenance


def test_side_files_are_copied_byte_for_byte(tmp_path: Path, tiny_model: Make) -> None:
    source_folder, output = tmp_path / "source", tmp_path / "output"
    write_single(source_folder, tiny_model())
    output.mkdir()
    for name, content in {**SIDE_FILES, **OTHER_FILES}.items():
        (source_folder / name).parent.mkdir(exist_ok=True)
        (source_folder / name).write_bytes(content)
    source = HuggingFaceSource(source_folder)
    assert source.write_side_files(output) == sorted(SIDE_FILES)
    written = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in written.items()} == SIDE_FILES


def test_links_of_the_hub_cache_become_files(tmp_path: Path, tiny_model: Make) -> None:
    source_folder, output = tmp_path / "source", tmp_path / "output"
    write_single(source_folder, tiny_model())
    (tmp_path / "blob").write_bytes(b"{}")
    (source_folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    output.mkdir()
    assert HuggingFaceSource(source_folder).write_side_files(output) == ["tokenizer.json"]
    assert not (output / "tokenizer.json").is_symlink()


def test_missing_tokenizer_is_a_note(tmp_path: Path, tiny_model: Make) -> None:
    source = HuggingFaceSource(write_single(tmp_path, tiny_model()))
    assert source.notes == [
        "no tokenizer files (tokenizer.json, tokenizer.model or vocab.json): generating from text needs them"
    ]
    assert source.write_side_files(tmp_path) == []


@pytest.mark.parametrize(
    ("card", "license"),
    [
        (None, None),
        ("# no front matter\nlicense: mit\n", None),
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Card\nlicense: other\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: 'qwen-research'  # see LICENSE\n---\n", "qwen-research"),
        ("---\nlicense:\n---\n", None),
    ],
    ids=["absent", "plain", "yaml", "named", "empty"],
)
def test_provenance(tmp_path: Path, tiny_model: Make, card: str | None, license: str | None) -> None:
    write_single(tmp_path, tiny_model())
    if card is not None:
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
    provenance = HuggingFaceSource(tmp_path, name="org/name", revision="abc").provenance
    assert (provenance.kind, provenance.name, provenance.revision) == ("huggingface", "org/name", "abc")
    assert provenance.license == license
    assert HuggingFaceSource(tmp_path).provenance.name is None


# --- open_source


def test_open_source_takes_folders(tmp_path: Path, tiny_model: Make) -> None:
    source = open_source(write_single(tmp_path, tiny_model()), name="org/name", revision="abc")
    assert isinstance(source, HuggingFaceSource)
    assert source.provenance.name == "org/name"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("nothing", None, "{path}: no such file or folder"),
        ("model.safetensors", b"x" * 8, "{path}: give the folder that holds it and its config.json"),
        (
            "model.bin",
            b"\x80\x04",
            "{path}: is not a GGUF file; expected one, or a folder with config.json and safetensors",
        ),
    ],
)
def test_open_source_says_what_it_expects(tmp_path: Path, file: str, content: bytes | None, problem: str) -> None:
    path = tmp_path / file
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((SourceError, FileFormatError)) as caught:
        open_source(path)
    assert str(caught.value) == problem.format(path=path)
