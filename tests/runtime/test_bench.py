"""The measurement, rehearsed with an engine and instruments whose time is counted and not measured."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from bitnest_format.errors import GenerationError, UsageError
from bitnest_format.runtime import bench as bench_module
from bitnest_format.runtime import bench_report
from bitnest_format.runtime.bench import Bench, check_memory, measure, simulate
from bitnest_format.runtime.kernel_bench import TimedKernel, time_kernels
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.machines import MACHINES
from bitnest_format.runtime.shapes import shape_config
from bitnest_format.runtime.synthetic_acceptance import SyntheticAcceptance

SECONDS = {"half": 4e-3, "target": 2.5e-3, "nested": 8e-3, "draft": 1.2e-3, "verify": 3e-3}
CEILING = 4.5e12
GIB = 1 << 30
STATED = SyntheticAcceptance(0.95, "tokens", 4)


class Clock:
    """Instruments that read the time fake engines have spent."""

    def __init__(self, free=80 * GIB):
        self.now, self.free = 0.0, free

    def seconds(self, work):
        before = self.now
        work()
        return self.now - before

    def joules(self, work):
        return 100 * self.seconds(work)

    def captured(self, work):
        return work

    def read_ceiling(self):
        return {"bytes_per_second": CEILING}

    def free_bytes(self):
        return self.free

    def release(self):
        pass

    def start_peak(self):
        pass

    def peak_bytes(self):
        return 7 * GIB

    def machine(self):
        return {"name": "fake"}

    def notes(self):
        return []


class FakeEngine:
    """Accepts `accepted` of its drafts in every round, and keeps a log of what was asked."""

    def __init__(self, mode, clock, log, capacity, accepted=3.5244):
        self.mode, self.gamma, self.capacity = mode, 4, capacity
        self.clock, self.log, self.accepted = clock, log, accepted
        self.node_counts = {"draft_layer": 9, "verify_layer": 8}
        self.memory_bytes = {"weights": 6 * GIB, "cache": GIB}
        self.rounds = 0

    def set_context(self, length):
        self.log.append((self.mode, "context", length))

    def prefill(self, ids):
        self.log.append((self.mode, "prefill", tuple(ids[:1]), len(ids)))

    def replay(self, rounds):
        self.log.append((self.mode, "replay", rounds))
        self.rounds += rounds
        self.clock.now += rounds * SECONDS[self.mode]

    def replay_phase(self, phase, times):
        self.log.append((self.mode, phase, times))
        self.clock.now += times * SECONDS[phase]

    def counters(self):
        nested = self.mode == "nested"
        kept = round(self.rounds * self.accepted) if nested else 0
        return {
            "rounds": self.rounds,
            "committed": self.rounds + kept,
            "drafted": 4 * self.rounds if nested else 0,
            "accepted": kept,
        }


MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def make_bench(**changes):
    given = {
        "name": "llama-3-8b",
        "config": shape_config("llama-3-8b", 40000),
        "weights": "random weights",
        "contexts": (2048,),
        "acceptance": STATED,
        "kv": KvSettings(draft_switch_length=4096),
    }
    return Bench(**given | changes)


def run(bench, clock=None, **engine):
    clock, log = clock or Clock(), []
    document = measure(
        bench, lambda capacity: {mode: FakeEngine(mode, clock, log, capacity, **engine) for mode in bench.modes}, clock
    )
    return document, log


def rows_of(document):
    return {(row["context"], row["mode"]): row for row in document["results"]}


def test_speeds_follow_from_times_and_the_stated_rate():
    document, _ = run(make_bench())
    rows = rows_of(document)
    assert rows[2048, "half"]["tokens_per_second"] == pytest.approx(250)
    assert rows[2048, "target"]["tokens_per_second"] == pytest.approx(400)
    nested = rows[2048, "nested"]
    assert nested["tokens_per_second"] == pytest.approx(STATED.tokens_per_round / 8e-3)
    assert nested["speedup"]["over_half"] == pytest.approx(STATED.tokens_per_round / 8e-3 / 250)
    assert nested["speedup"]["over_target"] == pytest.approx(STATED.tokens_per_round / 8e-3 / 400)
    assert nested["tokens_per_round_observed"] == pytest.approx(4.524, abs=0.01)
    assert nested["acceptance_observed"] == pytest.approx(0.881, abs=0.01)
    assert nested["joules_per_token"] == pytest.approx(100 * 8e-3 / 4.524, rel=0.01)
    assert document["notes"] == []


def test_phases_are_weighed_by_the_byte_model():
    nested = rows_of(run(make_bench())[0])[2048, "nested"]
    draft, verify = nested["phases"]["draft"], nested["phases"]["verify"]
    assert draft["seconds"] == pytest.approx(1.2e-3)
    assert draft["bytes"]["total"] == pytest.approx(4.79e9, rel=0.002)
    assert draft["bytes_per_second"] == pytest.approx(draft["bytes"]["total"] / 1.2e-3)
    assert draft["share_of_read_ceiling"] == pytest.approx(draft["bytes_per_second"] / CEILING)
    assert verify["bytes"]["total"] == pytest.approx(8.28e9, rel=0.002)
    assert nested["bytes_per_round"] == 4 * draft["bytes"]["total"] + verify["bytes"]["total"]
    assert len(draft["blocks"]) == 5


def test_modes_take_turns():
    _, log = run(make_bench())
    blocks = [(mode, what) for mode, what, count in log if what == "replay" and count > bench_module.WARM_UP_ROUNDS]
    assert blocks[:15] == [("half", "replay"), ("target", "replay"), ("nested", "replay")] * 5
    assert {what for mode, what, *_ in log if mode != "nested"} == {"context", "replay", "verify"}


def test_every_block_is_kept():
    document, _ = run(make_bench(repeats=7))
    for row in document["results"]:
        assert len(row["blocks"]) == 7
        assert row["blocks"][0]["rounds"] * SECONDS[row["mode"]] >= bench_module.BLOCK_SECONDS


def test_engines_are_built_for_each_context():
    document, log = run(make_bench(contexts=(2048, 8192)))
    assert [entry[2] for entry in log if entry[1] == "context"] == [2048] * 3 + [8192] * 3
    assert [row["context"] for row in document["results"]] == [2048] * 3 + [8192] * 3
    assert document["settings"]["draft_reads_kv8_from"] == {"2048": 0, "8192": 8193 - 128}


def test_a_rate_that_is_not_played_is_noted():
    document, _ = run(make_bench(), accepted=2.0)
    assert document["notes"] == ["nested at 2048: 3.000 tokens a round were committed, 4.524 stated"]


def test_real_text_counts_what_was_committed():
    bench = make_bench(acceptance=None, text=list(range(5000)), contexts=(1000,), repeats=2)
    document, log = run(bench, accepted=3.0)
    nested = rows_of(document)[1000, "nested"]
    assert nested["tokens_per_round"] == 4.0
    assert nested["tokens_per_second"] == pytest.approx(4 / 8e-3)
    assert document["acceptance"]["kind"] == "real text"
    starts = [entry[2] for entry in log if entry[0] == "nested" and entry[1] == "prefill"]
    assert starts == [(0,), (0,), (509,), (0,), (0,), (0,)]
    assert bench.capacity(1000) == 1000 + 256 + 10
    assert [row["blocks"][0]["rounds"] for row in document["results"]] == [256, 256, 52]


def test_text_must_be_long_enough():
    with pytest.raises(UsageError) as caught:
        make_bench(acceptance=None, text=[1] * 100, contexts=(50,))
    assert str(caught.value) == (
        "the text has 100 tokens; 5 prefixes of 50 need 2086. Give a longer --text or a smaller --context."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("fp8",)}, "--modes is 'fp8', expected some of half, target, nested"),
        ({"contexts": (0,)}, "--context must be 1 or more"),
        ({"gamma": 0}, "--gamma is 0, expected 1 or more"),
        ({"repeats": 0}, "--repeats is 0, expected 1 or more"),
        ({"acceptance": None}, "give either a stated --acceptance or a text to decode"),
        (
            {"config": shape_config("llama-3-8b") | MIXTURE},
            "llama-3-8b: mixtures of experts: the GPU kernels, which bench is about, do not run such a model",
        ),
    ],
)
def test_wrong_requests_are_refused(changes, message):
    with pytest.raises(UsageError) as caught:
        make_bench(**changes)
    assert str(caught.value) == message


def test_too_little_memory_says_what_fits():
    bench = make_bench(contexts=(2048, 32768))
    with pytest.raises(GenerationError) as caught:
        check_memory(bench, 28 * GIB)
    assert str(caught.value) == (
        "llama-3-8b: half, target, nested with 32768 tokens of context need about 32.7 GiB; 28.0 GiB of GPU memory "
        "are free. What would fit: --context 13824 or --modes target,nested."
    )
    check_memory(make_bench(contexts=(13824,)), 28 * GIB)
    check_memory(make_bench(contexts=(32768,), modes=("target", "nested")), 28 * GIB)
    with pytest.raises(GenerationError, match="No mode of this model fits"):
        check_memory(bench, GIB)


def test_memory_that_runs_out_later_says_what_fits():
    def build(capacity):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(GenerationError) as caught:
        measure(make_bench(), build, Clock())
    assert str(caught.value) == (
        "llama-3-8b: GPU memory ran out with 2048 tokens of context; about 25.1 GiB were expected and 80.0 GiB free. "
        "Take a smaller --context or fewer --modes."
    )


def test_document_is_json_and_labelled():
    document, _ = run(make_bench())
    again = json.loads(json.dumps(document))
    assert again["document"] == "bitnest-format bench 1"
    assert again["kind"] == "measurement"
    assert again["acceptance"]["kind"] == "synthetic"
    assert set(again) == {
        *("document", "kind", "date", "command", "machine", "versions", "model", "settings"),
        *("acceptance", "notes", "read_ceiling", "results"),
    }


def test_rendered_text_shows_the_figures_and_the_label():
    text = bench_report.render(run(make_bench())[0])
    assert text.startswith("Measurement: llama-3-8b (random weights) on fake, ")
    assert "synthetic acceptance: each draft accepted with probability 0.95; 4.52 tokens a round" in text
    assert "read ceiling 4.50 TB/s" in text
    (nested,) = [line for line in text.splitlines() if "nested" in line and "565.5" in line]
    assert nested.split()[:6] == ["2048", "nested", "565.5", "2.26", "1.41", "4.52"]


def test_prediction_is_marked():
    document = simulate(make_bench(contexts=(2048, 32768)), MACHINES["orin-nx-16"])
    assert document["kind"] == "prediction"
    text = bench_report.render(document)
    assert text.startswith("PREDICTION from bytes and bandwidth, not a measurement: llama-3-8b (sizes alone)")
    assert text.splitlines()[-1].startswith("Note: a prediction from bytes and bandwidth, not a measurement")
    measured = rows_of(run(make_bench())[0])[2048, "nested"]
    predicted = rows_of(document)[2048, "nested"]
    assert predicted["bytes_per_round"] == measured["bytes_per_round"]
    assert set(predicted) <= set(measured) | {"fits"}
    assert "(too much)" in text
    assert predicted["speedup"]["over_half"] is None, "fp16 does not fit, so nothing is faster than it"
    assert predicted["speedup"]["over_target"] > 1


def test_plot_without_matplotlib_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    document, _ = run(make_bench())
    assert bench_report.draw(document, tmp_path / "x.png") == "no plot was drawn: install matplotlib for it"
    assert not (tmp_path / "x.png").exists()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    measured, _ = run(make_bench(contexts=(2048, 8192)))
    for name, document in {"m.png": measured, "p.png": simulate(make_bench(), MACHINES["orin-nx-16"])}.items():
        assert bench_report.draw(document, tmp_path / name) is None
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_single_kernels_rotate_over_their_copies():
    clock, launched = Clock(), []

    def launch(copy):
        launched.append(copy)
        clock.now += 1e-5

    (row,) = time_kernels([TimedKernel("linear", 9_000_000, 30, launch)], clock, CEILING, repeats=3)
    assert row["seconds"] == pytest.approx(1e-5)
    assert row["bytes_per_second"] == pytest.approx(9e11)
    assert row["share_of_read_ceiling"] == pytest.approx(0.2)
    assert launched[:31] == [*range(30), 0]
    assert len(row["blocks"]) == 3
    document = run(make_bench())[0] | {"results": [], "kernels": [row]}
    assert "linear  10.00     9.00   900  20" in bench_report.render(document)


def test_nvml_that_is_missing_is_a_note(monkeypatch):
    from bitnest_format.runtime import nvml

    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-not-there.so.1")
    with pytest.raises(nvml.NvmlError, match=r"the driver's libnvidia-ml-not-there\.so\.1 is not there"):
        nvml.Nvml("0")


def test_nvml_reads_joules(monkeypatch):
    from bitnest_format.runtime import nvml

    def energy(handle, value):
        value._obj.value = 1_234_567
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda uuid, handle: 0 if uuid.value == b"GPU-7" else 2,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlSystemGetDriverVersion=lambda text, length: text.__setattr__("value", b"580.1") or 0,
    )
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: library)
    device = nvml.Nvml("7")
    assert device.joules() == pytest.approx(1234.567)
    assert device.driver() == "580.1"
    with pytest.raises(nvml.NvmlError, match="nvmlDeviceGetHandleByUUID failed with status 2"):
        nvml.Nvml("8")
