"""The benchmark of a 7B conversion, tried on a tiny shape."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from bitnest_format.converters import gptq_solver

SOURCE = Path(__file__).parents[2] / "benchmarks" / "convert_7b.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with little text to calibrate on: `benchmarks` is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("bitnest_benchmark_convert_7b", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SAMPLES", 4)
    monkeypatch.setattr(module, "LENGTH", 32)
    return module


def test_every_stage_is_timed_and_left_as_it_was(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = [getattr(owner, name) for _, owner, name in benchmark.STAGES]
    output = tmp_path / "result.json"
    benchmark.main(
        ["--shape=tiny", "--layers=1", "--device=cpu", "--validate", f"--output={output}", f"--folder={tmp_path}"]
    )
    figures = json.loads(output.read_text(encoding="utf-8"))
    assert list(figures["stages"]) == [label for label, *_ in benchmark.STAGES]
    assert figures["valid"] and figures["calibration_tokens"] == 128
    assert 0 < figures["stages"]["  solve base"] <= figures["stages"]["quantize layers"] <= figures["seconds"]
    printed = capsys.readouterr().out
    assert printed.startswith("{") and printed.splitlines()[-1].startswith("its anonymous part")
    assert [getattr(owner, name) for _, owner, name in benchmark.STAGES] == functions
    assert gptq_solver._walk is functions[[name for *_, name in benchmark.STAGES].index("_walk")]
    assert list(tmp_path.iterdir()) == [output]
