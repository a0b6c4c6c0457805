"""`bitnest-format export`: what it prints, what it downloads, and how it fails."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from bitnest_format import cli_checkpoint
from bitnest_format.cli import main
from bitnest_format.converters.export_formats import FORMATS
from bitnest_format.converters.export_options import PLAIN_TYPES

REPO = "someone/model"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_the_command_knows_every_format():
    assert tuple(FORMATS) == cli_checkpoint.EXPORT_FORMATS
    (dtype,) = [option for option in main.commands["export"].params if option.name == "dtype"]
    assert tuple(PLAIN_TYPES) == tuple(dtype.type.choices)


def test_what_is_printed(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested", nested_head=True)
    result = run("export", folder, tmp_path / "w4", "--format", "compressed-tensors-w4")
    size = sum(path.stat().st_size for path in (tmp_path / "w4").iterdir())
    assert (result.exit_code, result.stdout) == (
        0,
        f"{tmp_path}/w4: draft view as compressed-tensors-w4, {size:,} bytes\n"
        "  15 of 15 base planes stored byte for byte\n"
        "  nothing was rounded\n",
    )
    assert "Note: lm_head is nested in the checkpoint; here it is stored in 4 bits like every other module\n" in (
        result.stderr
    )
    result = run("export", folder, tmp_path / "hf", "--format", "hf", "--view", "draft", "--dtype", "bfloat16")
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path}/hf: draft view as hf, ")
    assert second.startswith("  weights rounded: relative norm of the change ")


def test_json(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "nested")
    result = run("export", folder, tmp_path / "w8", "--format", "compressed-tensors-w8", "--json")
    printed = json.loads(result.stdout)
    assert printed.pop("seconds") >= 0
    assert printed == {
        "folder": f"{tmp_path}/w8",
        "format": "compressed-tensors-w8",
        "view": "target",
        "modules": 14,
        "planes_equal": 0,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "w8").iterdir()),
        "rounding": 0.0,
        "largest_rounding": 0.0,
        "notes": [
            "config.json names bfloat16: programs that load the model in that type round its scales to it. Load it in "
            "float16 to keep them"
        ],
    }


def test_of_a_repository_only_what_is_needed_is_downloaded(hub_server, tiny_checkpoint, tmp_path):
    hub_server.create(REPO, tiny_checkpoint(tmp_path / "nested"))
    assert run("export", REPO, tmp_path / "w4", "--format", "compressed-tensors-w4").exit_code == 0
    assert hub_server.sent("bitnest-base") > 0
    assert hub_server.sent("bitnest-refinement") == 0
    card = (tmp_path / "w4" / "README.md").read_text(encoding="utf-8")
    assert "| exported from | [someone/model](https://huggingface.co/someone/model) at " in card
    assert run("export", REPO, tmp_path / "w8", "--format", "compressed-tensors-w8").exit_code == 0
    assert hub_server.sent("bitnest-refinement") > 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["--format", "gptq", "--activations", "int8"],
            2,
            "Error: --activations int8: gptq has no word for it. Use one of compressed-tensors-w4, "
            "compressed-tensors-w8.\n",
        ),
        (
            ["--format", "compressed-tensors-w8", "--view", "draft"],
            2,
            "Error: --view draft: compressed-tensors-w8 holds the target view alone\n",
        ),
    ],
)
def test_wrong_calls(tiny_checkpoint, tmp_path, arguments, status, message):
    result = run("export", tiny_checkpoint(tmp_path / "nested"), tmp_path / "out", *arguments)
    assert (result.exit_code, result.stderr) == (status, message)
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "model").mkdir()
    result = run("export", tmp_path / "model", tmp_path / "out", "--format", "hf")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1,
        f"Error: {tmp_path}/model: no bitnest.json, so this is not a nested checkpoint. Make one with "
        "'bitnest-format convert'.",
    )
