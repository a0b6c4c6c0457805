"""The measurement over the engine itself, on the CPU: everything but graphs and events."""

from __future__ import annotations

import time

import pytest
import torch

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.ops import plain_ops
from bitnest_format.runtime import bench as bench_module
from bitnest_format.runtime import engine as engine_module
from bitnest_format.runtime.bench import Bench, measure
from bitnest_format.runtime.synthetic_acceptance import SyntheticAcceptance


class WallClock:
    """Instruments of a CPU."""

    def seconds(self, work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def joules(self, work):
        work()
        return 1.0

    def captured(self, work):
        return work

    def read_ceiling(self):
        return {"bytes_per_second": 1e10}

    def free_bytes(self):
        return 8 << 30

    def release(self):
        pass

    def start_peak(self):
        pass

    def peak_bytes(self):
        return 0

    def machine(self):
        return {"name": "CPU"}

    def notes(self):
        return []


@pytest.mark.parametrize("text", [None, list(range(60))], ids=["synthetic", "text"])
def test_the_engine_itself_can_be_measured(monkeypatch, tiny_checkpoint, tmp_path, text):
    monkeypatch.setattr(bench_module, "BLOCK_SECONDS", 0.001)
    monkeypatch.setattr(bench_module, "ENERGY_SECONDS", 0.001)
    monkeypatch.setattr(bench_module, "WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(bench_module, "TEXT_TOKENS", 4)
    monkeypatch.setattr(bench_module, "TEXT_STRIDE", 3)
    monkeypatch.setattr(engine_module, "triton_ops", plain_ops)
    folder = tiny_checkpoint(tmp_path / "model")
    stated = SyntheticAcceptance(0.5, "tokens", 2) if text is None else None
    config = Checkpoint(folder).config
    bench = Bench(
        name="tiny",
        config=config,
        weights="checkpoint",
        contexts=(40,),
        gamma=2,
        acceptance=stated,
        text=text,
        repeats=2,
    )

    def build(capacity):
        return engine_module.checkpoint_engines(
            folder,
            modes=bench.modes,
            gamma=bench.gamma,
            capacity=capacity,
            acceptance=None if stated is None else stated.per_token,
            kv=bench.kv,
            device=torch.device("cpu"),
        )

    rows = {row["mode"]: row for row in measure(bench, build, WallClock())["results"]}
    for mode in bench.modes:
        assert rows[mode]["tokens_per_second"] > 0
        assert 1 <= rows[mode]["tokens_per_round_observed"] <= (3 if mode == "nested" else 1)
    assert 0 <= rows["nested"]["acceptance_observed"] <= 1
    assert rows["half"]["acceptance_observed"] is None
