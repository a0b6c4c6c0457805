"""Checkpoints that the GPU kernels cannot run, and what is said where memory is short; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.manifest import Module, Plane
from bitnest_format.runtime.gpu_limits import (
    GIB,
    MemoryNeed,
    explain_out_of_memory,
    fit_advice,
    gpu_obstacles,
    memory_needs,
    shape_obstacles,
)

PLANE = Plane(name="plane", sha256="0" * 64)


def _architecture(**changes: object) -> Architecture:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        **changes,
    }
    return read_architecture(config)


def _modules(architecture: Architecture, group_size: int = 128) -> dict[str, Module]:
    return {
        name: Module(shape=shape, group_size=min(group_size, shape[1]), base=PLANE, scale=PLANE, refinement=PLANE)
        for name, shape in architecture.modules()
    }


def _no_tensor(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} was read")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_checkpoints_that_run(model_type: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = Checkpoint(tiny_checkpoint(tmp_path / "model", model_type=model_type))
    assert gpu_obstacles(read_architecture(checkpoint.config), checkpoint) == []


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 1024])
def test_groups_that_run(group_size: int) -> None:
    architecture = _architecture(hidden_size=1024, intermediate_size=2048)
    assert shape_obstacles(architecture, _modules(architecture, group_size), _no_tensor) == []


@pytest.mark.parametrize("size", [80, 96, 128, 256])
def test_head_sizes_that_run(size: int) -> None:
    architecture = _architecture(head_dim=size)
    assert shape_obstacles(architecture, _modules(architecture, 32), _no_tensor) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            "mixtures of experts",
        ),
        ({"model_type": "gemma", "hidden_act": "gelu"}, "GELU in its MLPs"),
        ({"model_type": "gemma2", "hidden_act": "gelu"}, "norms after attention and MLP"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "rotary embedding of a part of each head"),
    ],
    ids=["mixture", "gelu", "post-norms", "partial rotary"],
)
def test_architectures_beyond_the_kernels(changes: dict[str, object], what: str) -> None:
    architecture = _architecture(**changes)
    assert shape_obstacles(architecture, _modules(architecture), _no_tensor) == [
        f"config.json: {architecture.model_type} has {what}, which the GPU kernels do not run. Use --device cpu."
    ]


@pytest.mark.parametrize("size", [62, 260])
def test_odd_head_sizes(size: int) -> None:
    architecture = _architecture(head_dim=size, hidden_size=512, num_attention_heads=32)
    assert shape_obstacles(architecture, _modules(architecture, 32), _no_tensor) == [
        f"head_dim is {size}; the GPU kernels take multiples of 4 up to 256. Use --device cpu."
    ]


def test_inputs_and_groups_that_are_no_multiples_of_32() -> None:
    architecture = _architecture(hidden_size=240)
    assert shape_obstacles(architecture, _modules(architecture, 48), _no_tensor) == [
        "model.layers.0.self_attn.q_proj and 9 more: 240 inputs; the GPU kernels take multiples of 32. "
        "Use --device cpu.",
        "model.layers.0.self_attn.q_proj and 13 more: groups of 48 inputs; the GPU kernels take multiples of 32. "
        "Use --device cpu.",
    ]


def test_modules_left_unquantized() -> None:
    architecture = _architecture()
    modules = _modules(architecture)
    del modules["model.layers.1.mlp.down_proj"]
    assert shape_obstacles(architecture, modules, _no_tensor) == [
        "model.layers.1.mlp.down_proj: not quantized; the GPU kernels take quantized linear layers only. "
        "Use --device cpu."
    ]
    assert shape_obstacles(architecture, {}, _no_tensor) == [
        "model.layers.0.self_attn.q_proj and 13 more: not quantized; the GPU kernels take quantized linear layers "
        "only. Use --device cpu."
    ]


def test_joined_layers_of_different_groups() -> None:
    architecture = _architecture()
    modules = _modules(architecture)
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"):
        modules[name] = replace(modules[name], group_size=64)
    assert shape_obstacles(architecture, modules, _no_tensor) == [
        "model.layers.0.self_attn.{q,k,v}_proj and 1 more: groups of 128, 128, 64 inputs; the GPU kernels compute "
        "them as one product and need one size. Use --device cpu."
    ]


def test_joined_layers_of_different_permutations() -> None:
    architecture = _architecture()
    orders = {
        f"model.layers.{layer}.{name}.weight_perm": torch.arange(256)
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    modules = _modules(architecture)
    for name in orders:
        module = name.removesuffix(".weight_perm")
        modules[module] = replace(modules[module], permutation=name)
    assert shape_obstacles(architecture, modules, orders.__getitem__) == []
    turned = {**orders, "model.layers.1.mlp.up_proj.weight_perm": torch.arange(256).flip(0)}
    sentence = "different input permutations; the GPU kernels compute them as one product and need one order."
    assert shape_obstacles(architecture, modules, turned.__getitem__) == [
        f"model.layers.1.mlp.{{gate,up}}_proj: {sentence} Use --device cpu."
    ]
    name = "model.layers.0.self_attn.k_proj"
    modules[name] = replace(modules[name], permutation=None)
    assert shape_obstacles(architecture, modules, orders.__getitem__) == [
        f"model.layers.0.self_attn.{{q,k,v}}_proj: {sentence} Use --device cpu."
    ]


def _half_a_gib(entries: int) -> int:
    return GIB // 2


NESTED, DRAFT = (
    MemoryNeed(weights=weights, entry=GIB // 4096, workspace=_half_a_gib) for weights in (6 * GIB, 4 * GIB)
)
NEEDS = {"nested": NESTED, "target": NESTED, "draft": DRAFT}


def test_memory_need() -> None:
    assert NESTED.total(8192) == 8 * GIB + GIB // 2
    assert NESTED.entries_within(8 * GIB + GIB // 2) == 8192
    assert NESTED.entries_within(8 * GIB + GIB // 2 - 1) == 8191
    assert NESTED.entries_within(6 * GIB) == 0


def test_a_workspace_may_grow_with_the_text() -> None:
    need = MemoryNeed(weights=100, entry=3, workspace=lambda entries: 10 + 2 * entries)
    assert need.total(6) == 140
    assert [need.entries_within(free) for free in (50, 110, 114, 115, 139, 140)] == [0, 0, 0, 1, 5, 6]


def test_explain_out_of_memory() -> None:
    assert explain_out_of_memory(NEEDS, "nested", 16384, 9 * GIB, torch.device("cuda:1")) == (
        "cuda:1: out of memory: decoding needs 10.50 GiB (6.00 GiB of weights, 4.00 GiB of cache for 16384 tokens and "
        "0.50 GiB of workspace), and 9.00 GiB is free. "
        "What fits: 10240 tokens of prompt and --max-new-tokens together, --view draft, --device cpu."
    )


@pytest.mark.parametrize(
    ("free", "capacities", "advice"),
    [
        (
            9 * GIB,
            (2048, 8192, 32768),
            "8192 tokens of prompt and --max-new-tokens together, --view draft, --device cpu",
        ),
        (6 * GIB, (), "--view draft with 6144 tokens, --device cpu"),
        (6 * GIB, (2048, 8192), "--view draft with 2048 tokens, --device cpu"),
        (5 * GIB, (8192,), "--device cpu"),
        (1, (), "--device cpu"),
    ],
    ids=["by capacity", "draft", "draft by capacity", "no capacity", "nothing"],
)
def test_fit_advice(free: int, capacities: tuple[int, ...], advice: str) -> None:
    assert fit_advice(NEEDS, "nested", 16384, free, capacities) == f"What fits: {advice}."


def test_fit_advice_names_a_view_only_where_it_saves_memory() -> None:
    smaller = replace(NESTED, workspace=lambda entries: 0)
    assert fit_advice({"nested": NESTED, "target": smaller}, "nested", 8192, 8 * GIB) == (
        "What fits: 6144 tokens of prompt and --max-new-tokens together, --view target, --device cpu."
    )
    assert fit_advice({"draft": DRAFT}, "draft", 8192, 5 * GIB) == (
        "What fits: 2048 tokens of prompt and --max-new-tokens together, --device cpu."
    )


def test_memory_needs(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    checkpoint = Checkpoint(folder)
    architecture = read_architecture(checkpoint.config)
    (base,), (refinement,) = (
        [path.stat().st_size for path in folder.glob(f"bitnest-{family}-*")] for family in ("base", "refinement")
    )
    entry = 2 * 2 * 2 * (64 + 4)  # layers, keys and values, KV heads
    both = MemoryNeed(weights=base + refinement, entry=entry, workspace=_half_a_gib)
    draft = MemoryNeed(weights=base, entry=entry, workspace=_half_a_gib)
    assert memory_needs(checkpoint, architecture, _half_a_gib) == {"nested": both, "target": both, "draft": draft}
    folder = tiny_checkpoint(tmp_path / "draft", draft_only=True)
    assert list(memory_needs(Checkpoint(folder, "draft"), architecture, _half_a_gib)) == ["draft"]
