"""The layer-by-layer decoder against transformers' whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitnest_format.architecture import read_architecture
from bitnest_format.converters.float_model import FloatModel

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
    ],
    ids=lambda value: str(value),
)
def test_hessians_equal_those_of_the_whole_model(
    model_type: str, changes: dict[str, Any], tiny_model: Callable[..., Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config, tensors = tiny_model(model_type, **changes)
    architecture = read_architecture(config)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    fields = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    whole = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **fields), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    whole.load_state_dict(tensors)
    ids = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, torch.Tensor] = {}

    def remember(name: str) -> Callable[..., None]:
        return lambda module, arguments: inputs.__setitem__(name, arguments[0].flatten(0, -2))

    for layer in range(2):
        for linears in architecture.shared_inputs(0):
            name = f"{layer}.{linears[0]}"
            whole.model.layers[layer].get_submodule(linears[0]).register_forward_pre_hook(remember(name))
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
