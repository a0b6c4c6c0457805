"""The comparison of speculative with plain decoding holds where it should, and sees a difference where there is one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.ops import plain_ops
from bitnest_format.runtime.gpu_weights import GpuWeights, load_weights
from bitnest_format.runtime.kv_cache import KvSettings

SOURCE = Path(__file__).parents[2] / "benchmarks" / "lossless.py"
PROMPTS = ([5, 6, 7, 8], [9, 10, 11])
TOKENS = 12


@pytest.fixture(scope="module")
def lossless() -> ModuleType:
    """The script as a module: `benchmarks` is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("bitnest_benchmark_lossless", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def weights(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> GpuWeights:
    folder = tiny_checkpoint(tmp_path / "nested", num_hidden_layers=1)
    return load_weights(Checkpoint(folder, "target"), "target", torch.device("cpu"))


@pytest.mark.parametrize("switch", [1 << 30, 8])
def test_every_gamma_writes_the_targets_tokens(lossless: ModuleType, weights: GpuWeights, switch: int) -> None:
    kv = KvSettings(draft_switch_length=switch, recent=2)
    results = lossless.compare(weights, plain_ops(), PROMPTS, TOKENS, kv, "part")
    assert [result.gamma for result in results] == list(range(1, 9))
    assert all(result.equal == result.prompts == len(PROMPTS) for result in results)
    assert all(0 < result.accepted <= result.drafted for result in results)


def test_a_difference_is_counted(lossless: ModuleType, weights: GpuWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = lossless._copy

    def wrong(source: object, target: object) -> None:
        copy(source, target)
        target.state.tokens[0] = 3  # type: ignore[attr-defined]

    monkeypatch.setattr(lossless, "_copy", wrong)
    results = lossless.compare(weights, plain_ops(), PROMPTS[:1], TOKENS, KvSettings(), "part")
    assert all(result.equal == 0 for result in results)
