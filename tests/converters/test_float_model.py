"""The layer-by-layer decoder against transformers' whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitnest_format.architecture import read_architecture
from bitnest_format.converters.float_model import FloatModel
from bitnest_format.converters.hessian import shrunk

EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 12}),
        ("qwen3", {"head_dim": 128}),
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {"sliding_window": 16, "partial_rotary_factor": 0.5}),
    ],
    ids=lambda value: str(value),
)
def test_hessians_equal_those_of_the_whole_model(
    model_type: str, changes: dict[str, Any], tiny_model: Callable[..., Any], in_transformers: Callable[..., Any]
) -> None:
    config, tensors = tiny_model(model_type, **changes)
    architecture = read_architecture(config)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    whole = in_transformers(config, tensors)
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"} if model_type == "phi3" else {}
    ids = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, torch.Tensor] = {}

    def remember(name: str) -> Callable[..., None]:
        return lambda module, arguments: inputs.__setitem__(name, arguments[0].flatten(0, -2))

    for layer in range(2):
        for linears in architecture.shared_inputs(0):
            name = f"{layer}.{linears[0]}"
            block, _, leaf = linears[0].rpartition(".")
            seen_by = whole.model.layers[layer].get_submodule(f"{block}.{fused.get(leaf, leaf)}")
            seen_by.register_forward_pre_hook(remember(name))
    whole.lm_head.register_forward_pre_hook(remember("head"))
    with torch.inference_mode():
        whole(ids)

    model = FloatModel(config, architecture, "cpu")
    model.embed(ids, lambda distinct: tensors[EMBEDDING][distinct])
    for layer in range(2):
        weights = {name: tensors[name] for name in architecture.layer_tensors(layer)}
        hessians = model.run_layer(layer, weights, architecture.shared_inputs(0))
        assert list(hessians) == [linears[0] for linears in architecture.shared_inputs(0)]
        for name, hessian in hessians.items():
            seen = inputs[f"{layer}.{name}"]
            torch.testing.assert_close(hessian, seen.T @ seen / seen.shape[0], rtol=1e-3, atol=1e-4)
    seen = inputs["head"]
    hessian = model.final_hessian(tensors[FINAL_NORM])
    torch.testing.assert_close(hessian, seen.T @ seen / seen.shape[0], rtol=1e-3, atol=1e-4)
    assert model.hidden.shape == (3, 40, 256)


def test_a_layer_is_lent_its_weights_and_keeps_none(tiny_model: Callable[..., Any]) -> None:
    config, tensors = tiny_model()
    model = FloatModel(config, read_architecture(config), "cpu")
    model.embed(torch.tensor([[1, 2, 3]]), lambda distinct: tensors[EMBEDDING][distinct].float())
    weights = {n: tensors[n].float() for n in read_architecture(config).layer_tensors(0)}
    assert model.run_layer(0, weights, ()) == {}
    assert all(parameter.is_meta for parameter in model.decoder.parameters())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mixtral", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("qwen3_moe", {"mlp_only_layers": [0]})],
    ids=str,
)
def test_experts_see_their_own_tokens(
    model_type: str, changes: dict[str, Any], tiny_model: Callable[..., Any], in_transformers: Callable[..., Any]
) -> None:
    """Hessians by routing computed here from the router's input; the stream equals transformers' own."""
    config, tensors = tiny_model(model_type, **changes)
    architecture = read_architecture(config)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    whole = in_transformers(config, tensors)
    ids = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    inputs: dict[int, torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}
    for number, module in enumerate(whole.model.layers):
        module.mlp.register_forward_pre_hook(lambda _, given, n=number: inputs.__setitem__(n, given[0].flatten(0, 1)))
        module.register_forward_hook(lambda _, given, out, n=number: outputs.__setitem__(n, out))
    with torch.inference_mode():
        whole(ids)

    model = FloatModel(config, architecture, "cpu")
    model.embed(ids, lambda distinct: tensors[EMBEDDING][distinct])
    experts = architecture.experts
    assert experts is not None
    for layer in range(2):
        prefix = architecture.layer_prefix(layer)
        weights = {name: tensors[name] for name in architecture.layer_tensors(layer)}
        hessians = model.run_layer(layer, weights, architecture.shared_inputs(layer))
        torch.testing.assert_close(model.hidden, outputs[layer], rtol=1e-4, atol=1e-4)
        assert list(hessians) == [linears[0] for linears in architecture.shared_inputs(layer)]
        if not architecture.is_mixture(layer):
            continue
        chosen = (inputs[layer] @ tensors[f"{prefix}{experts.router}.weight"].T).topk(2, dim=-1).indices
        for number in range(4):
            (gate, up), down = experts.linears(number)
            seen = inputs[layer][(chosen == number).any(dim=1)]
            assert 16 < len(seen) < 120
            wanted = shrunk(seen.T @ seen / len(seen), len(seen))
            torch.testing.assert_close(hessians[gate], wanted, rtol=1e-3, atol=1e-4)
            gated = torch.nn.functional.silu(seen @ tensors[f"{prefix}{gate}.weight"].T)
            inner = gated * (seen @ tensors[f"{prefix}{up}.weight"].T)
            wanted = shrunk(inner.T @ inner / len(inner), len(inner))
            torch.testing.assert_close(hessians[down], wanted, rtol=1e-3, atol=1e-4)
