"""The comparison of rotations: its order of work and its table."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import save_file

from bitnest_format.shards import write_json

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the scripts that it imports beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("bitnest_benchmark_rotations", FOLDER / "rotations.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name in ("evaluation", "frontier"):
        monkeypatch.delitem(sys.modules, name)
    return module


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["learn, seed 0", "hadamard, seed 0", "random, seed 0", "none", "learn, seed 1"]),
        ({"hidden_size": 88, "head_dim": 22}, ["learn, seed 0", "random, seed 0", "none", "learn, seed 1"]),
    ],
    ids=["all kinds", "no Hadamard matrix"],
)
def test_what_matters_most_comes_first(
    changes: dict[str, int], expected: list[str], rotations: ModuleType, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    config, tensors = tiny_model(**changes)
    write_json(tmp_path / "config.json", config)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    needed = ["--tokens", "t", "--calibration", "c", "--json", "j"]
    options = rotations._parser().parse_args(["--source", str(tmp_path), *needed, "--seeds", "2"])
    names = [job[0] for job in rotations._jobs(options)]
    assert names[: len(expected)] == expected
    assert names[-7:] == ["losses", *(f"learn, {steps} steps at {rate}" for steps, rate in rotations.LEARNED_OTHERWISE)]


def test_report_gives_rows_ranges_and_losses(rotations: ModuleType) -> None:
    learning = {"steps": 100, "rate": 1.5, "loss_before": 2.0, "loss_after": 1.75, "loss_unquantized": 1.5}
    rows = [
        {"name": "random, seed 1", "draft_code": 4.75, "acceptance": 0.9},
        {"name": "random, seed 0", "draft_code": 4.25, "acceptance": 0.95},
        {"name": "learn, seed 0", "draft_code": 4.0, "acceptance": 0.96, "learned_rotation": learning},
    ]
    losses = [
        {"name": "none", "seed": 0, "loss": 2.5},
        {"name": "learned, 200 steps at 1.5", "seed": 0, "loss": 1.7, "seconds": 12.5, "peak_gib": 3.25},
    ]
    document = {"rows": rows, "losses": losses, "machine": {"torch": "2"}, "seconds": 7.5}
    assert rotations.report(document).splitlines() == [
        "| rotation | draft code | acceptance |",
        "|---|---|---|",
        "| learn, seed 0 | 4.000 | 0.9600 |",
        "| random, seed 0 | 4.250 | 0.9500 |",
        "| random, seed 1 | 4.750 | 0.9000 |",
        "| **random**, 2 seeds | 4.500 (4.250-4.750) | 0.9250 (0.9000-0.9500) |",
        "",
        "| rounding loss, nats a token, on text kept out | loss | s | peak GiB |",
        "|---|---|---|---|",
        "| none, seed 0 | 2.5000 |  |  |",
        "| learned, 200 steps at 1.5, seed 0 | 1.7000 | 12.5 | 3.25 |",
        "| learn, seed 0, 100 steps at 1.5 | 1.7500 (from 2.0000; unquantized 1.5000) | | |",
        "",
        '7.5 s in all; {"torch": "2"}',
    ]
