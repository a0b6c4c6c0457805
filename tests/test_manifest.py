"""`bitnest.json` as records: round trips, versions and features, places of faults."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from bitnest_format.errors import Finding, ManifestError, UnsupportedVersionError
from bitnest_format.manifest import Manifest, check_readable, schema_findings
from bitnest_format.spec import manifest_schema

SPEC = Path(__file__).resolve().parents[1] / "spec"
VALID = sorted(path.parent for path in (SPEC / "vectors" / "valid").glob("*/bitnest.json"))
MODULE = "model.layers.0.mlp.down_proj"


def spec_example():
    text = (SPEC / "bitnest-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    return json.loads(block)


@pytest.fixture
def document():
    return spec_example()


def test_the_schema_is_a_valid_schema():
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(manifest_schema())


def test_the_example_of_the_specification_round_trips(document):
    written = Manifest.from_dict(document).to_dict()
    assert written.pop("calibration") == document.pop("calibration")
    assert written == document


@pytest.mark.parametrize("folder", VALID, ids=lambda folder: folder.name)
def test_manifests_of_other_writers_keep_every_listed_field(folder):
    document = json.loads((folder / "bitnest.json").read_text(encoding="utf-8"))
    manifest = Manifest.from_dict(document)
    written = manifest.to_dict()
    for key in document.keys() - {"modules"}:
        assert written[key] == document[key], key
    for name, module in document["modules"].items():
        for key in module.keys() - {"colour"}:
            assert written["modules"][name][key] == module[key], key
    assert Manifest.from_dict(json.loads(json.dumps(written))) == manifest


def test_every_field_of_the_table_is_in_the_schema():
    """The specification's tables and the schema name the same fields."""
    text = (SPEC / "bitnest-format.md").read_text(encoding="utf-8")
    section = text[text.index("## 7 Manifest") : text.index("Digests are 64")]
    named = set(
        re.findall(r"`([a-z_0-9.]+)`", "\n".join(row.split("|")[1] for row in section.splitlines() if "|" in row))
    )
    named = {part for name in named for part in name.strip(".").split(".")}
    known = set(property_names(manifest_schema())) - {"sequence_length", "online", "name", "version"}
    known -= {"seed", "kind", "folded", "description", "tokens", "dataset", "sha256", "size"}
    assert known <= named
    assert named <= set(property_names(manifest_schema())) | {"field"}


def property_names(schema):
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from property_names(value)


def test_module_properties(document):
    module = Manifest.from_dict(document).modules[MODULE]
    assert module.shape == (256, 512)
    assert module.groups == 4
    assert module.refinement is not None and module.refinement.name == f"{MODULE}.weight_refinement"


def test_whole_numbers_written_as_fractions_become_integers(document):
    document["modules"][MODULE]["shape"] = [256.0, 512]
    document["modules"][MODULE]["group_size"] = 128.0
    module = Manifest.from_dict(document).modules[MODULE]
    assert (*module.shape, module.group_size, module.groups) == (256, 512, 128, 4)
    assert all(type(number) is int for number in (*module.shape, module.group_size, module.groups))


def test_unknown_optional_fields_are_kept_and_written_back(document):
    document["wind"] = {"from": "the west"}
    document["format_version"] = "1.12"
    manifest = Manifest.from_dict(document)
    assert manifest.extra == {"wind": {"from": "the west"}}
    assert manifest.to_dict()["wind"] == {"from": "the west"}
    assert manifest.format_version == "1.12"


@pytest.mark.parametrize("version", ["2.0", "0.9", "17.3"])
def test_other_major_versions_are_refused(document, version):
    document["format_version"] = version
    with pytest.raises(UnsupportedVersionError) as error:
        Manifest.from_dict(document)
    assert str(error.value) == (
        f"bitnest.json: format_version is {version}, this reader knows 1.x. Install a newer bitnest-format."
    )


def test_unknown_features_are_refused_by_name_and_before_the_schema(document):
    document["required_features"] = ["input_permutation", "ternary_base", "sparse"]
    del document["views"]
    with pytest.raises(UnsupportedVersionError) as error:
        Manifest.from_dict(document)
    assert str(error.value) == (
        "bitnest.json: required_features lists sparse, ternary_base, which this reader does not know. "
        "Install a newer bitnest-format."
    )


@pytest.mark.parametrize(
    "rotation",
    [
        {"kind": "spinquant", "folded": ["R1", "R2"], "online": ["R4"]},
        {"kind": "spinquant", "folded": ["R1", "R2", "R4"]},
    ],
    ids=["online", "folded"],
)
def test_online_rotations_are_refused_by_name(document, rotation):
    """RO-2: a rotation that nobody applies would give noise without an error."""
    document["rotation"] = rotation
    with pytest.raises(UnsupportedVersionError) as error:
        Manifest.from_dict(document)
    assert str(error.value) == (
        "bitnest.json: rotation names R4; only R1 and R2, folded into the weights, can be read. "
        "A rotation applied at run time needs a reader that knows it."
    )


def test_folded_rotations_are_recorded(document):
    assert Manifest.from_dict(document).rotation == {"kind": "random", "seed": 0, "folded": ["R1", "R2"]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "bitnest.json: (top level): found a JSON list, expected an object"),
        ({}, "bitnest.json: format: format is None, expected 'bitnest'"),
        ({"format": "bitnet"}, "bitnest.json: format: format is 'bitnet', expected 'bitnest'"),
    ],
)
def test_check_readable(data, message):
    with pytest.raises(ManifestError) as error:
        check_readable(data)
    assert str(error.value) == message


def delete(*path):
    def step(document):
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return step


def put(*path_and_value):
    *path, last, value = path_and_value

    def step(document):
        for key in path:
            document = document[key]
        document[last] = value

    return step


@pytest.mark.parametrize(
    ("edit", "place", "message"),
    [
        (delete("views"), "(top level)", "'views' is a required property"),
        (put("views", ["target"]), "views", "['target'] is not one of [['draft', 'target'], ['draft']]"),
        (put("nesting", "base_bits", 3), "nesting.base_bits", "4 was expected"),
        (put("activation", "symmetric", False), "activation.symmetric", "True was expected"),
        (put("rotation", "seed", "zero"), "rotation.seed", "'zero' is not of type 'integer', 'null'"),
        (delete("rotation", "kind"), "rotation", "'kind' is a required property"),
        (put("calibration", "tokens", 0), "calibration.tokens", "0 is less than the minimum of 1"),
        (put("modules", {}), "modules", "{} should be non-empty"),
        (put("modules", MODULE, "shape", [1]), f"modules.{MODULE}.shape", "[1] is too short"),
        (put("modules", MODULE, "shape", 1, True), f"modules.{MODULE}.shape.1", "True is not of type 'integer'"),
        (put("modules", MODULE, "group_size", -1), f"modules.{MODULE}.group_size", "-1 is less than the minimum of 8"),
        (
            put("modules", MODULE, "saturation", 1.5),
            f"modules.{MODULE}.saturation",
            "1.5 is greater than the maximum of 1",
        ),
        (put("unquantized", ["a", "a"]), "unquantized", "['a', 'a'] has non-unique elements"),
        (put("files", "config.json", "size", -1), "files.config.json.size", "-1 is less than the minimum of 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_places_of_schema_faults(document, edit, place, message):
    before = copy.deepcopy(document)
    edit(document)
    assert document != before
    assert schema_findings(document)[0] == Finding("bitnest.json", place, message)
    with pytest.raises(ManifestError) as error:
        Manifest.from_dict(document)
    assert error.value.path == place
    assert str(error.value) == f"bitnest.json: {place}: {message}"


def test_all_schema_faults_are_listed(document):
    document["views"] = []
    document["source"] = {}
    document["modules"][MODULE]["planes"]["base"]["sha256"] = "0"
    assert [finding.place for finding in schema_findings(document)] == [
        f"modules.{MODULE}.planes.base.sha256",
        "source",
        "views",
    ]


def test_each_module_and_file_has_a_line_of_its_own(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "模型")
    text = (folder / "bitnest.json").read_text(encoding="utf-8")
    document = json.loads(text)
    manifest = Manifest.from_dict(document)
    assert manifest.to_json() == text
    lines = text.splitlines()
    assert len(lines) < 100
    for name, entry in [*document["modules"].items(), *document["files"].items()]:
        (line,) = [line for line in lines if line.startswith(f'    "{name}": {{')]
        assert json.loads("{" + line.strip().rstrip(",") + "}") == {name: entry}
    assert lines[0] == "{"
    assert lines[1:4] == ['  "format": "bitnest",', '  "format_version": "1.0",', '  "required_features": [],']
    assert text.endswith("  }\n}\n")
