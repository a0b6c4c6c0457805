"""Rotations of a model: what is made for it, and that folding leaves its function unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.converters import rotation as rotations
from bitnest_format.converters.orthogonal import orthogonality_deviation
from bitnest_format.errors import SourceError

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize("kind", ["random", "hadamard"])
def test_made_rotations_are_orthogonal_seeded_and_distinct(kind: str, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    first = _made(kind, 3, architecture)
    again = _made(kind, 3, architecture)
    other = _made(kind, 4, architecture)
    assert torch.equal(first.r1, again.r1) and torch.equal(first.r2(1), again.r2(1))
    assert not torch.equal(first.r1, other.r1)
    assert not torch.equal(first.r2(0), first.r2(1))
    for matrix in (first.r1, first.r2(0), first.r2(1)):
        assert orthogonality_deviation(matrix) < 1e-12
    assert first.record() == {"kind": kind, "seed": 3, "sha256": None, "folded": ["R1", "R2"], "online": []}


def test_no_rotation_and_impossible_hadamard(tiny_model: Callable[..., Any]) -> None:
    config, _ = tiny_model()
    for kind in ("none", "folded"):
        assert rotations.make_rotation(kind, None, 0, read_architecture(config)) is None
    odd = read_architecture({**config, "hidden_size": 264, "head_dim": 66})
    with pytest.raises(SourceError) as error:
        rotations.make_rotation("hadamard", None, 0, odd)
    assert str(error.value) == "--rotation hadamard: no Hadamard matrix at hand for head_dim 66; use random"


@pytest.mark.parametrize("kind", ["random", "hadamard"])
@pytest.mark.parametrize(
    ("model_type", "tied", "changes"),
    [
        ("llama", False, {}),
        ("llama", True, {}),
        # RO-1: 28 * 32 and 36 * 16; an intermediate size without a Hadamard matrix does not matter.
        ("qwen2", False, {"hidden_size": 896, "num_attention_heads": 14, "intermediate_size": 856}),
        ("llama", False, {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}),
        ("llama", False, {"attention_bias": True, "mlp_bias": True}),
        ("mistral", False, {}),
        ("qwen2", False, {}),
        ("qwen2", True, {}),
        ("qwen3", False, {"head_dim": 128}),
        ("qwen3", True, {}),
        ("gemma", True, {}),
        ("gemma", False, {}),
        ("phi3", True, {"partial_rotary_factor": 0.75, "sliding_window": 16}),
        ("mixtral", False, {}),
        ("qwen3_moe", False, {"mlp_only_layers": [0]}),
    ],
    ids=lambda value: str(value),
)
def test_rotated_logits_equal_the_sources(
    kind: str,
    model_type: str,
    tied: bool,
    changes: dict[str, Any],
    tiny_model: Callable[..., Any],
    in_transformers: Callable[..., Any],
) -> None:
    config, tensors = tiny_model(model_type, tied, **changes)
    architecture = read_architecture(config)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    if tied:
        # An embedding that serves as a head makes logits of several hundred; 1e-4 is meant for usual ones.
        tensors[EMBEDDING] /= 16
    rotation = _made(kind, 0, architecture)
    head = tensors.get(HEAD, tensors[EMBEDDING])
    offset = int(model_type == "gemma")
    rotated = {
        EMBEDDING: rotations.rotate_embedding(tensors[EMBEDDING], rotation),
        FINAL_NORM: torch.ones_like(tensors[FINAL_NORM]) - offset,
        HEAD: rotations.rotate_head(head, tensors[FINAL_NORM] + offset, rotation),
    }
    for layer in range(architecture.layers):
        names = architecture.layer_tensors(layer)
        rotated |= rotations.rotate_layer({name: tensors[name] for name in names}, layer, architecture, rotation)
    rotated = {name: tensor.float() for name, tensor in rotated.items()}

    ids = torch.randint(0, architecture.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def logits(config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
        result: Tensor = in_transformers(config, tensors)(ids).logits
        return result

    expected = logits(config, tensors)
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(logits({**config, "tie_word_embeddings": False}, rotated), expected, atol=1e-4, rtol=0)
    # The test must be able to fail: one matrix left unturned gives another function.
    name = "model.layers.1.self_attn.v_proj.weight"
    broken = {**rotated, name: tensors[name] * tensors["model.layers.1.input_layernorm.weight"] @ rotation.r1.float()}
    assert (logits({**config, "tie_word_embeddings": False}, broken) - expected).abs().max() > 1e-2
    if tied:
        assert not torch.equal(rotated[EMBEDDING], rotated[HEAD])


def test_head_norms_are_left_alone(tiny_model: Callable[..., Any]) -> None:
    config, tensors = tiny_model("qwen3")
    architecture = read_architecture(config)
    rotation = _made("random", 0, architecture)
    layer = {name: tensors[name] for name in architecture.layer_tensors(0)}
    turned = dict(rotations.rotate_layer(layer, 0, architecture, rotation))
    for name in architecture.head_norm_names(0):
        assert torch.equal(turned[name], tensors[name].double())
    for name in architecture.norm_names(0):
        assert torch.equal(turned[name], torch.ones(256, dtype=torch.float64))


def _made(kind: str, seed: int, architecture: Architecture) -> rotations.Rotation:
    rotation = rotations.make_rotation(kind, None, seed, architecture)
    assert rotation is not None
    return rotation
