"""`validate`: one checkpoint per way to break the format, and whole messages compared."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bitnest_format import packing
from bitnest_format.checkpoint import DRAFT_INDEX, TARGET_INDEX, Checkpoint
from bitnest_format.errors import BitnestError, Finding, UsageError
from bitnest_format.report import inspect_checkpoint, render
from bitnest_format.shards import file_sha256
from bitnest_format.validation import validate

VECTORS = Path(__file__).resolve().parents[1] / "spec" / "vectors"
VALID = json.loads((VECTORS / "valid" / "expected.json").read_text(encoding="utf-8"))
INVALID = json.loads((VECTORS / "invalid" / "expected.json").read_text(encoding="utf-8"))
BASE, REFINEMENT = "bitnest-base-00001-of-00001.safetensors", "bitnest-refinement-00001-of-00001.safetensors"


def found(findings):
    return [{"file": f.file, "place": f.place, "message": f.message} for f in findings]


def refresh(folder, *names):
    """Record the present size and digest of files in the manifest."""
    path = folder / "bitnest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name in names:
        manifest["files"][name] = {"size": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
    path.write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize("name", VALID)
def test_valid_checkpoints(name):
    assert validate(VECTORS / "valid" / name) == []
    assert validate(VECTORS / "valid" / name, deep=True) == []


@pytest.mark.parametrize("name", INVALID)
def test_invalid_checkpoints(name):
    case = INVALID[name]
    assert found(validate(VECTORS / "invalid" / name, deep=case["deep"])) == case["findings"]


@pytest.mark.parametrize("name", [name for name, case in INVALID.items() if case["deep"]])
def test_what_only_deep_finds(name):
    assert validate(VECTORS / "invalid" / name) == []


def test_the_vectors_are_complete_and_small():
    for folder, expected in (("valid", VALID), ("invalid", INVALID)):
        assert {path.name for path in (VECTORS / folder).iterdir()} - {"expected.json"} == expected.keys()
    files = [path for path in VECTORS.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 1_100_000
    assert not any(path.name == "__init__.py" for path in files), "spec/vectors is data, not a package"


@pytest.mark.parametrize("folder", ["missing", "a-file"])
def test_no_folder(folder, tmp_path):
    (tmp_path / "a-file").write_bytes(b"")
    with pytest.raises(UsageError) as error:
        validate(tmp_path / folder)
    assert str(error.value) == f"{tmp_path / folder}: no such folder, expected the folder of a nested checkpoint"


def test_an_empty_folder(tmp_path):
    assert [(f.file, f.place) for f in validate(tmp_path)] == [
        ("bitnest.json", "(file)"),
        ("config.json", "(file)"),
        (DRAFT_INDEX, "(file)"),
        (TARGET_INDEX, "(file)"),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"model_type": "qwen2", "tied": True},
        {"model_type": "qwen3", "head_dim": 128},
        {"model_type": "mistral", "sliding_window": 16},
        {"group_size": -1},
        {"group_size": 32, "shard_bytes": 100_000},
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
        {"scale_type": torch.float32},
        {"draft_only": True},
    ],
    ids=str,
)
def test_what_our_writer_writes(options, tiny_checkpoint, tmp_path):
    assert validate(tiny_checkpoint(tmp_path / "model", **options), deep=True) == []


def test_a_forbidden_pair_in_a_real_plane_is_found_at_its_place(tiny_checkpoint, tmp_path):
    """ZN-4: q4 = -8 beside qr = -1 composes to -129."""
    folder = tiny_checkpoint(tmp_path / "model")
    module = "model.layers.1.mlp.up_proj"
    for file, name, code in (
        (BASE, f"{module}.weight_packed", -8),
        (REFINEMENT, f"{module}.weight_refinement", -1),
    ):
        tensors = load_file(folder / file)
        codes = packing.unpack(tensors[name])
        codes[300, 77] = code
        tensors[name] = packing.pack(codes)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    refresh(folder, BASE, REFINEMENT)
    assert validate(folder) == [
        Finding(
            REFINEMENT,
            f"{module}.weight_refinement",
            "1 forbidden code pair, the first at row 300, column 77: a negative refinement code beside the base code "
            "-8, where 0 to 7 are allowed",
        )
    ]


def test_pairs_are_counted_over_pieces_of_a_plane(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("bitnest_format.validation.VALUES_AT_ONCE", 3 * 256)
    folder = tiny_checkpoint(tmp_path / "model")
    module = "model.layers.0.self_attn.q_proj"
    tensors = load_file(folder / BASE), load_file(folder / REFINEMENT)
    for family, suffix, code in zip(tensors, ("weight_packed", "weight_refinement"), (-8, -3), strict=True):
        codes = packing.unpack(family[f"{module}.{suffix}"])
        codes[[7, 100, 255], 5] = code
        family[f"{module}.{suffix}"] = packing.pack(codes)
    for family, file in zip(tensors, (BASE, REFINEMENT), strict=True):
        save_file(family, folder / file, metadata={"format": "pt"})
    refresh(folder, BASE, REFINEMENT)
    (finding,) = validate(folder)
    assert finding.message.startswith("3 forbidden code pairs, the first at row 7, column 5: ")


def test_a_later_minor_version_with_unknown_fields_is_valid(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    for name, edit in (
        ("bitnest.json", {"format_version": "1.9", "colour": {"sky": "blue"}}),
        ("config.json", {"quantization_config": {"quant_method": "bitnest", "format_version": "1.9"}}),
    ):
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        for key, value in edit.items():
            data[key] = data[key] | value if key == "quantization_config" else value
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    refresh(folder, "config.json")
    assert validate(folder, deep=True) == []


def test_a_path_out_of_the_folder_is_not_opened(tiny_checkpoint, tmp_path):
    """SF-4: the file outside is a good shard that holds the wanted tensor."""
    folder = tiny_checkpoint(tmp_path / "model")
    outside = tmp_path / "secret"
    outside.mkdir()
    shutil.copy(folder / BASE, outside / "model.safetensors")
    index = json.loads((folder / TARGET_INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["model.norm.weight"] = "../secret/model.safetensors"
    (folder / TARGET_INDEX).write_text(json.dumps(index), encoding="utf-8")
    refresh(folder, TARGET_INDEX)
    (outside / "model.safetensors").chmod(0)
    assert validate(folder, deep=True) == [
        Finding(
            TARGET_INDEX,
            "weight_map",
            "'../secret/model.safetensors' is not a file inside model: a plain relative name is expected",
        )
    ]


def test_all_faults_are_collected(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / REFINEMENT).unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["quant_method"] = "bitnet"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert [(f.file, f.place) for f in validate(folder)] == [
        ("config.json", "quantization_config.quant_method"),
        (REFINEMENT, "(file)"),
        ("pytorch_model.bin", "(file)"),
        ("config.json", "(file)"),
    ]


def test_hidden_folders_are_left_alone(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    (folder / ".git").mkdir()
    (folder / ".git" / "pack.bin").write_bytes(b"")
    assert validate(folder) == []


@pytest.fixture(scope="module")
def files():
    folder = VECTORS / "valid" / "some-layers"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def read(folder):
    """What readers do with a checkpoint: project errors are all that may come of it."""
    try:
        render(inspect_checkpoint(folder))
        checkpoint = Checkpoint(folder)
        for name in checkpoint.manifest.modules:
            checkpoint.weight(name).dequantize("target")
    except BitnestError as error:
        assert str(error)


same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


@same_folder
@given(seed=st.integers(0, 2**32 - 1))
def test_no_damaged_file_makes_it_raise(seed, files, tmp_path):
    """Bytes changed, cut out, repeated and appended anywhere: findings or none, never an exception."""
    generator = random.Random(seed)
    name = generator.choice(list(files))
    data = bytearray(files[name])
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(data) + 1)
        match generator.randrange(4):
            case 0:
                data[place : place + 1] = bytes([generator.randrange(256)])
            case 1:
                del data[place : place + generator.randint(1, 100)]
            case 2:
                data[place:place] = data[max(0, place - 30) : place]
            case 3:
                data[:8] = struct.pack("<Q", generator.choice([0, 1, 7, 2**31, 2**63]))
    write(tmp_path / "damaged", files | {name: bytes(data)})
    validate(tmp_path / "damaged", deep=True)
    read(tmp_path / "damaged")


VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    2**70,
    "",
    "x\n\x1b[31m",
    "\ud800",
    "a" * 3000,
    "../x",
    [],
    [[]],
    {},
    {"a": None},
    json.loads("[" * 150 + "]" * 150),
]


def places(data, path=()):
    yield path
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from places(data[key], (*path, key))


@same_folder
@given(seed=st.integers(0, 2**32 - 1))
def test_no_json_content_makes_it_raise(seed, files, tmp_path):
    """Any value of a JSON file, or of a shard's header, replaced by something else."""
    generator = random.Random(seed)
    name = generator.choice(list(files))
    data = files[name]
    length = struct.unpack("<Q", data[:8])[0] if name.endswith(".safetensors") else 0
    document = {"": json.loads(data[8 : 8 + length] if length else data)}
    for _ in range(generator.randint(1, 2)):
        path = ("", *generator.choice(list(places(document[""]))))
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        value = copy.deepcopy(generator.choice(VALUES))
        if generator.random() < 0.2 and isinstance(parent, dict) and isinstance(value, str):
            parent[value] = parent.pop(path[-1])
            document.setdefault("", {})
        else:
            parent[path[-1]] = value
    raw = json.dumps(document[""]).encode("utf-8")
    changed = struct.pack("<Q", len(raw)) + raw + data[8 + length :] if length else raw
    write(tmp_path / "changed", files | {name: changed})
    for finding in validate(tmp_path / "changed", deep=True):
        assert str(finding).isprintable()
    read(tmp_path / "changed")
