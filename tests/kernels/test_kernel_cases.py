"""Every kernel that `bench --kernels` times can be launched on the operands made for it (interpreted here)."""

from __future__ import annotations

import pytest
import torch

from bitnest_format.runtime.bench import Bench
from bitnest_format.runtime.byte_model import Storage, step_bytes
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.shapes import shape_config
from bitnest_format.runtime.synthetic_acceptance import SyntheticAcceptance

pytest.importorskip("triton")

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 24,
}
GAMMA = 1


def make_bench(config, context, **storage):
    return Bench(
        name="tiny",
        config=config,
        weights="random weights",
        contexts=(context,),
        gamma=GAMMA,
        acceptance=SyntheticAcceptance(0.9, "tokens", GAMMA),
        storage=Storage(**storage),
        kv=KvSettings(recent=4),
    )


def test_every_case_runs(monkeypatch):
    from bitnest_format.runtime import kernel_cases

    monkeypatch.setattr(kernel_cases, "PREFILL_ROWS", 3)
    names = []
    cases = kernel_cases.kernel_cases(
        make_bench(TINY, 9, group_size=32, head="nested"), torch.device("cpu"), rotation=1
    )
    for case in cases:
        case.launch(case.copies - 1)
        names.append(case.name)
    assert len(names) == len(set(names))
    linear = ["draft M=1", "target M=1", "target M=2", "prefill int8 M=3", "prefill dequantize M=3"]
    linear += ["fp16 cuBLAS M=1", "fp16 cuBLAS M=3"]
    assert names == [
        *(f"{name} {step}" for name in ("qkv", "o", "gate_up", "down") for step in linear),
        *("norm_quantize M=1", "quantize M=1", "norm_quantize M=2", "quantize M=2"),
        *("attend draft KV8 9 M=1", "attend draft KV4 9 M=1", "attend target 9 M=1", "attend target 9 M=2"),
        *("combine 9 M=1", "combine 9 M=2", "attend fp16 9 M=1"),
        *("head fp16 M=1", "head fp16 M=2", "head draft M=1", "head target M=1", "head target M=2"),
    ]


def test_bytes_add_up_to_a_step(monkeypatch):
    """A layer's kernels read what the byte model says of a layer."""
    from bitnest_format.runtime import kernel_cases

    bench = make_bench(shape_config("llama-3.2-3b"), 2048)
    monkeypatch.setattr(kernel_cases, "_weight", lambda *sizes: None)
    monkeypatch.setattr(kernel_cases, "_half_linear", lambda *sizes: ())
    monkeypatch.setattr(kernel_cases, "_half_head", lambda *sizes: ())
    monkeypatch.setattr(kernel_cases, "_activations", lambda *sizes: None)
    read = {case.name: case.bytes for case in kernel_cases.kernel_cases(bench, torch.device("meta"), rotation=1)}
    linears = ("qkv", "o", "gate_up", "down")
    for view, kernels in (
        ("draft", [f"{name} draft M=1" for name in linears] + ["attend draft KV8 2048 M=1"]),
        ("target", [f"{name} target M=2" for name in linears] + ["attend target 2048 M=2"]),
    ):
        step = step_bytes(bench.architecture, view, 2048, bench.storage)
        assert 28 * sum(read[name] for name in kernels) == step.linears + step.cache
