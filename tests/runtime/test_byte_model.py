"""Bytes a step reads, against figures derived by hand."""

from __future__ import annotations

import pytest

from bitnest_format.architecture import read_architecture
from bitnest_format.runtime.byte_model import (
    Storage,
    cache_read_bytes,
    entry_bytes,
    head_bytes,
    linear_bytes,
    memory_bytes,
    step_bytes,
)
from bitnest_format.runtime.shapes import SHAPES, shape_config

GIB = 1 << 30


def architecture_of(name):
    return read_architecture(shape_config(name))


# GB of an fp16 step, a W8A8 step, a draft step on KV8 and on KV4; weight scales in 16, cache scales in 32 bits.
@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("llama-2-7b", 2048, (14.29, 7.39, 4.15, 3.89)),
        ("llama-2-7b", 32768, (30.39, 15.70, 12.46, 8.16)),
        ("llama-3-8b", 2048, (15.28, 8.28, 4.79, 4.72)),
        ("llama-3-8b", 32768, (19.30, 10.35, 6.86, 5.79)),
        ("qwen2.5-7b", 2048, (14.26, 7.78, 4.52, 4.49)),
        ("qwen2.5-7b", 32768, (16.02, 8.69, 5.42, 4.95)),
    ],
)
def test_step_bytes_of_known_shapes(name, context, expected):
    architecture, storage = architecture_of(name), Storage()
    half, target, draft = (step_bytes(architecture, view, context, storage) for view in ("half", "target", "draft"))
    coarse = step_bytes(architecture, "draft", context, storage, fine_from=context)
    found = [step.total / 1e9 for step in (half, target, draft, coarse)]
    assert found == pytest.approx(expected, abs=0.0051)


def test_nested_linears_of_llama_2_7b_take_6_13_gib():
    """With scales in 32 bits they take the paper's 6.22 GiB."""
    architecture = architecture_of("llama-2-7b")
    assert round(linear_bytes(architecture, Storage(), half=False) / GIB, 2) == 6.13
    assert round(linear_bytes(architecture, Storage(scale_bytes=4), half=False) / GIB, 2) == 6.22


def test_draft_reads_the_base_plane_and_the_scales():
    architecture = architecture_of("llama-3-8b")
    weights = sum(outputs * inputs for _, (outputs, inputs) in architecture.modules())
    scales = weights // 128 * 2
    assert linear_bytes(architecture, Storage(), half=False, planes=1) == weights // 2 + scales
    assert linear_bytes(architecture, Storage(), half=False) == weights + scales
    assert linear_bytes(architecture, Storage(), half=True) == 2 * weights


def test_nested_head():
    architecture = architecture_of("llama-3-8b")
    size = 128256 * 4096
    nested = Storage(head="nested")
    assert head_bytes(architecture, nested, half=False, planes=1) == size // 2 + size // 64
    assert head_bytes(architecture, nested, half=False) == size + size // 64
    assert head_bytes(architecture, nested, half=True) == 2 * size
    assert head_bytes(architecture, Storage(), half=False, planes=1) == 2 * size


def test_recent_entries_are_read_at_kv8():
    architecture = architecture_of("llama-3-8b")
    layers, coarse, fine = 32, 2 * 8 * (64 + 4), 2 * 8 * (128 + 4)
    assert entry_bytes(architecture, "coarse") == coarse
    assert cache_read_bytes(architecture, "draft", 1000, 872) == layers * (872 * coarse + 128 * fine)
    assert cache_read_bytes(architecture, "target", 1000, 872) == layers * 1000 * fine
    assert cache_read_bytes(architecture, "half", 1000) == layers * 1000 * 2 * 8 * 128 * 2


def test_windows_limit_what_is_read():
    config = shape_config("llama-3-8b") | {"model_type": "mistral", "sliding_window": 512}
    architecture = read_architecture(config)
    fine, coarse = entry_bytes(architecture, "fine"), entry_bytes(architecture, "coarse")
    assert cache_read_bytes(architecture, "target", 2000) == 32 * 512 * fine
    assert cache_read_bytes(architecture, "draft", 2000, 1800) == 32 * (312 * coarse + 200 * fine)
    assert cache_read_bytes(architecture, "draft", 2000, 1000) == 32 * 512 * fine


@pytest.mark.parametrize(("size", "inputs", "groups"), [(128, 4096, 32), (128, 576, 9), (128, 2144, 67), (-1, 100, 1)])
def test_groups_of_odd_inputs(size, inputs, groups):
    assert Storage(group_size=size).groups(inputs) == groups


def test_no_fitting_group_is_refused():
    with pytest.raises(ValueError, match="no group size up to 128 divides 100 inputs"):
        Storage().groups(100)


def test_memory_of_weights_and_cache():
    architecture, storage = architecture_of("llama-2-7b"), Storage()
    nested = memory_bytes(architecture, 2048, storage, half=False)
    assert nested.weights == linear_bytes(architecture, storage, half=False) + 2 * 2 * 32000 * 4096
    assert nested.cache == 2048 * 32 * entry_bytes(architecture, "fine")
    half = memory_bytes(architecture, 2048, storage, half=True)
    assert half.total / GIB == pytest.approx(13.55, abs=0.01)


def test_tied_head_is_kept_once():
    architecture = architecture_of("llama-3.2-3b")
    untied = read_architecture(shape_config("llama-3.2-3b") | {"tie_word_embeddings": False})
    head = 2 * 128256 * 3072
    for half in (True, False):
        tied = memory_bytes(architecture, 0, Storage(), half=half).weights
        assert memory_bytes(untied, 0, Storage(), half=half).weights == tied + head
    nested = Storage(head="nested")
    kept = memory_bytes(architecture, 0, nested, half=False).weights
    assert kept == memory_bytes(untied, 0, nested, half=False).weights


def test_shapes_are_supported_and_independent_of_each_other():
    for name in SHAPES:
        assert architecture_of(name).hidden_size % 128 == 0
    assert shape_config("llama-2-7b", 40000)["max_position_embeddings"] == 40000
    assert shape_config("llama-2-7b")["max_position_embeddings"] == 4096
