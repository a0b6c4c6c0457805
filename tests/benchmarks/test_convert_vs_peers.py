"""The comparison's own arithmetic: its table, its reading of the peer's files, its memory figures."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from bitnest_format import nesting, packing

SOURCE = Path(__file__).parents[2] / "benchmarks" / "convert_vs_peers.py"
MIB = 2**20


@pytest.fixture(scope="module")
def comparison() -> ModuleType:
    """The script as a module: `benchmarks` is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("bitnest_benchmark_convert_vs_peers", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_format_report_gives_medians_ranges_and_ratios(comparison: ModuleType) -> None:
    def run(tool: str, seconds: float, mib: int) -> object:
        return comparison.Run(
            tool=tool,
            disturbance=0.0,
            process_seconds=seconds,
            process_peak=mib * MIB,
            conversion_seconds=seconds - 1,
            conversion_peak=mib * MIB // 2,
        )

    runs = [
        run("ours", 11, 300),
        run("peer", 21, 800),
        run("peer", 19, 600),
        run("ours", 13, 100),
        run("ours", 12, 200),
    ]
    quality = {"source": {"code": 4.25, "chat": 5.5}}
    assert comparison.format_report(runs, quality).splitlines() == [
        "| median of runs (range) | ours | peer | ours / peer |",
        "|---|---|---|---|",
        "| whole process, s | 12.0 (11.0-13.0) | 20.0 (19.0-21.0) | 0.60 |",
        "| whole process, peak MiB | 200 (100-300) | 700 (600-800) | 0.29 |",
        "| conversion, s | 11.0 (10.0-12.0) | 19.0 (18.0-20.0) | 0.58 |",
        "| conversion, peak MiB above imports | 100 (50-150) | 350 (300-400) | 0.29 |",
        "",
        "| 4-bit weights, activations as they are | code ppl | chat ppl |",
        "|---|---|---|",
        "| source | 4.2500 | 5.5000 |",
    ]


def test_format_report_leaves_out_what_one_tool_alone_cannot_say(comparison: ModuleType) -> None:
    only = comparison.Run(
        tool="peer", disturbance=0.0, process_seconds=2, process_peak=MIB, conversion_seconds=1, conversion_peak=MIB
    )
    assert comparison.format_report([only], {}).splitlines()[2] == "| whole process, s |  | 2.0 (2.0-2.0) |  |"


def test_peer_weights_reads_pack_quantized_modules(comparison: ModuleType, tmp_path: Path) -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).view(1, 16)
    scale = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)
    stored = {
        "model.layers.0.mlp.up_proj.weight_packed": packing.pack(codes),
        "model.layers.0.mlp.up_proj.weight_scale": scale,
        "model.layers.0.mlp.up_proj.weight_shape": torch.tensor([1, 16]),
        "model.norm.weight": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    save_file(stored, tmp_path / "model.safetensors")
    weights = comparison.peer_weights(tmp_path)
    assert set(weights) == {"model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], nesting.draft_weight(codes, scale))
    assert weights["model.norm.weight"].dtype == torch.float32


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of the process")
def test_resident_memory_grows_with_what_is_held(comparison: ModuleType) -> None:
    before = comparison._resident("VmRSS")
    held = torch.ones(8 * MIB)
    after = comparison._resident("VmRSS")
    assert after - before >= 0.9 * held.nbytes
    assert comparison._resident("VmHWM") >= after


def test_main_reports_a_tool_that_fails(comparison: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n", encoding="utf-8")
    broken.chmod(0o755)
    options = comparison._parser().parse_args(
        ["run", "--model", str(tmp_path), "--tokens", "t.json", "--peer-python", str(broken)]
    )
    with pytest.raises(SystemExit, match="peer failed:\nit broke"):
        comparison._one_run("peer", broken, options, tmp_path / "calibration", tmp_path / "out")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads Linux's account of the machine")
def test_own_children_do_not_count_as_disturbance(comparison: ModuleType) -> None:
    before = comparison._others_seconds()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    seconds = time.perf_counter() - began
    others = comparison._others_seconds() - before
    # Everything but the child: at most what the other cores can do, and two clock ticks of rounding.
    assert -0.05 <= others <= (os.cpu_count() or 1) * seconds - 0.5 + 0.05
