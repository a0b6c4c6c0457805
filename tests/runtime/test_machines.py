"""Predictions, against what arXiv 2610.02800 measured on Orin NX: 2K context, gamma 4, 0.95 of all drafts accepted."""

from __future__ import annotations

import pytest

from bitnest_format.architecture import read_architecture
from bitnest_format.errors import UsageError
from bitnest_format.runtime.byte_model import Storage
from bitnest_format.runtime.machines import MACHINES, find_machine, predict
from bitnest_format.runtime.shapes import shape_config

MODES = ("half", "target", "nested")


def predicted(machine, name, context=2048, tokens_per_round=4.8):
    architecture = read_architecture(shape_config(name))
    found = predict(
        MACHINES[machine],
        architecture,
        Storage(),
        context=context,
        modes=MODES,
        gamma=4,
        tokens_per_round=tokens_per_round,
    )
    return {prediction.mode: prediction for prediction in found}


def test_llama_2_7b_on_orin_nx_16():
    """Table 13: 6.0 and 7.8 tokens/s, and 9.0 to 9.3 nested."""
    speeds = {mode: found.tokens_per_second for mode, found in predicted("orin-nx-16", "llama-2-7b").items()}
    assert speeds["half"] == pytest.approx(6.0, rel=0.03)
    assert speeds["target"] == pytest.approx(7.8, rel=0.03)
    assert 9.0 <= speeds["nested"] <= 9.3


def test_qwen2_5_7b_on_orin_nx_16():
    """Table 13: fp16 does not fit; 7.37 tokens/s, and 8.37 to 8.50 nested."""
    found = predicted("orin-nx-16", "qwen2.5-7b")
    assert not found["half"].fits
    assert found["target"].fits
    assert found["target"].tokens_per_second == pytest.approx(7.37, rel=0.03)
    assert found["nested"].tokens_per_second == pytest.approx(8.43, rel=0.03)


def test_llama_3_2_3b_on_orin_nx_8():
    """Table 13, of which nothing went into the machine's figures: 14.0 tokens/s, and 15.5 to 16.6 nested."""
    found = predicted("orin-nx-8", "llama-3.2-3b")
    assert found["target"].tokens_per_second == pytest.approx(14.0, rel=0.05)
    assert 15.5 <= found["nested"].tokens_per_second <= 16.6


def test_memory_decides_what_fits():
    """Table 14: fp16 reaches 13.9 GiB at 2K, and no longer context."""
    assert predicted("orin-nx-16", "llama-2-7b")["half"].memory / (1 << 30) == pytest.approx(13.9, abs=0.1)
    assert predicted("orin-nx-16", "llama-2-7b")["half"].fits
    assert not predicted("orin-nx-16", "llama-2-7b", context=4096)["half"].fits
    assert predicted("orin-nx-16", "llama-2-7b", context=10240)["nested"].fits


def test_no_prediction_beats_the_bytes():
    """A round on an H200 takes longer than its bytes at the whole bandwidth."""
    found = predicted("h200", "llama-3-8b", tokens_per_round=4.52)
    for prediction in found.values():
        for seconds, read in prediction.passes.values():
            assert seconds > read.total / MACHINES["h200"].bandwidth
    assert 1.8 < found["nested"].tokens_per_second / found["half"].tokens_per_second < 2.52


def test_machines_by_figures():
    machine = find_machine("bandwidth=273,memory=120,launch=3")
    assert machine.bandwidth == 273e9
    assert machine.memory == 120 * (1 << 30)
    assert machine.launch == pytest.approx(3e-6)
    assert find_machine("bandwidth=100").launch == pytest.approx(1.2e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth=fast", "'bandwidth=fast' is not one of"),
        ("bandwidth=0", "'bandwidth=0' is not one of"),
        ("speed=3", "'speed=3' is not one of"),
        ("memory=3", "bandwidth=GB/s is missing"),
        ("orin", "unknown machine; known are orin-nano-8"),
    ],
)
def test_unknown_machines_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        find_machine(text)
