"""`convert --reference`, and what every command says of a checkpoint that can only draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from bitnest_format import report
from bitnest_format.card import card_text
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.cli import main

PEERS = Path(__file__).parent / "fixtures" / "peers"
LLAMA, GPTQ = PEERS / "tiny-llama", PEERS / "tiny-llama-gptq-g128"
ONLY = "draft only: the weights are of 4 bits; there is no refinement plane and no 8-bit target"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def calibration(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))}, path)
    return "--calibration", str(path), "--calibration-samples", "4", "--sequence-length", "64"


@pytest.fixture
def draft_only(tmp_path: Path) -> Path:
    assert run("convert", GPTQ, tmp_path / "draft-only").exit_code == 0
    return tmp_path / "draft-only"


def test_a_reference_gives_both_views(tmp_path: Path, calibration: tuple[str, ...]) -> None:
    result = run("convert", GPTQ, tmp_path / "out", "--reference", LLAMA, *calibration, "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["views"] == ["draft", "target"]
    assert summary["mean_target_error"] < summary["mean_draft_error"] / 1.5
    assert ONLY not in result.stderr
    inspected = run("inspect", tmp_path / "out").stdout
    assert "  source       gptq\n  reference    huggingface\n" in inspected
    assert "  base         given\n" in inspected


def test_the_plan_of_a_quantized_source(tmp_path: Path) -> None:
    result = run("convert", GPTQ, tmp_path / "out", "--dry-run")
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny-llama-gptq-g128 (llama), rotation none"
    assert lines[1].startswith(f"{ONLY}. A quantized source holds no more than that; give --reference")
    assert lines[2] == "7 modules to quantize: 7 with groups of 128"
    assert not any("refinement planes" in line or "target view" in line for line in lines)
    both = run("convert", GPTQ, tmp_path / "out", "--reference", LLAMA, "--dry-run", "--json")
    plan: dict[str, Any] = json.loads(both.stdout)
    assert plan["draft_only"] is False
    assert plan["refinement_bytes"] == plan["base_bytes"] > 0
    assert plan["reference_fingerprint"] != plan["fingerprint"]
    assert not list(tmp_path.iterdir())


def test_every_command_says_that_there_is_a_draft_only(draft_only: Path, tmp_path: Path) -> None:
    converted = run("convert", GPTQ, tmp_path / "again")
    assert converted.stdout.splitlines()[0].endswith(" bytes (draft only)")
    assert f"Warning: {ONLY}. A quantized source holds no more than that" in converted.stderr
    validated = run("validate", draft_only, "--deep")
    assert (validated.exit_code, validated.stdout) == (0, f"{draft_only}: valid\n")
    assert validated.stderr == f"Note: {ONLY}\n"
    assert f"  views        {ONLY}\n" in run("inspect", draft_only).stdout
    refused = run("generate", draft_only, "--prompt", "a")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "Error: bitnest.json: the only view is the draft, of 4 bits; the target view cannot be rebuilt. Open the draft "
        "(--view draft), or convert again from the full-precision model or with --reference.\n"
    )
    # These fixtures have no tokenizer; the note comes before it is missed.
    assert run("generate", draft_only, "--prompt", "a", "--view", "draft").stderr.startswith(f"Note: {ONLY}\n")
    checkpoint = Checkpoint(draft_only, "draft")
    sizes = report.inspect_checkpoint(draft_only).sizes
    card = card_text(checkpoint.manifest, checkpoint.config, sizes, repo_id="me/tiny")
    assert "A draft-only checkpoint in the format of" in card
    assert "| source kind | gptq |\n| base plane | given |\n" in card


def test_options_that_need_each_other(tmp_path: Path) -> None:
    result = run("convert", LLAMA, tmp_path / "out", "--reference", LLAMA)
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: --reference: {LLAMA} is not quantized; a reference is for GPTQ and compressed-tensors models. Leave "
        "it out.\n"
    )
    result = run("convert", GPTQ, tmp_path / "out", "--reference-revision", "main")
    assert (result.exit_code, result.stderr) == (2, "Error: --reference-revision: needs --reference\n")
    result = run("convert", GPTQ, tmp_path / "out", "--base", "rtn")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: --base: the base planes are the source's own and stay as they are. Leave it out.\n"
    )
    assert not list(tmp_path.iterdir())
