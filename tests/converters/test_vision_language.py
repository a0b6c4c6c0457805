"""Models that see: the language model is nested, what stands beside it is kept, and both still fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitnest_format import shards
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters import rotation as rotations
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.validation import validate

IMAGE = 5
TEXT = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}

Made = tuple[torch.nn.Module, dict[str, Any]]


def _llava(cls: str = "Llava", **more: Any) -> Made:
    """A tiny LLaVA, and inputs of two images' patches between words."""
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = getattr(transformers, f"{cls}Config")(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE, **more
    )
    model = getattr(transformers, f"{cls}ForConditionalGeneration")(config)
    ids = torch.tensor([[7, *[IMAGE] * 4, 9, 11, 13]])
    return model, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28, generator=_seeded())}


def _llava_next() -> Made:
    """Its image is cut into one tile; rows of patches end with the learned `image_newline`."""
    model, _ = _llava("LlavaNext", image_grid_pinpoints=[[28, 28]])
    ids = torch.tensor([[7, *[IMAGE] * 10, 9, 11]])
    pixels = torch.randn(1, 2, 3, 28, 28, generator=_seeded())
    return model, {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[28, 28]])}


def _qwen2_vl() -> Made:
    import transformers

    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "patch_size": 14}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": dict(MROPE)},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=6,
        vision_start_token_id=8,
        vision_end_token_id=10,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    ids = torch.tensor([[7, 8, *[IMAGE] * 4, 10, 11, 13]])
    return model, {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=_seeded()),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


MODELS: dict[str, Callable[[], Made]] = {"llava": _llava, "llava_next": _llava_next, "qwen2_vl": _qwen2_vl}
TURNED = {
    "llava": ["multi_modal_projector.linear_2.bias", "multi_modal_projector.linear_2.weight"],
    "llava_next": [
        "image_newline",
        "multi_modal_projector.linear_2.bias",
        "multi_modal_projector.linear_2.weight",
    ],
    "qwen2_vl": ["visual.merger.mlp.2.bias", "visual.merger.mlp.2.weight"],
}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def _randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights of the size of trained ones, gains around 1 and biases that show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 and "embed_tokens" not in name:
                values /= parameter[0].numel() ** 0.5
            parameter.copy_(1 + values / 4 if "norm" in name and parameter.dim() == 1 else values)
    return model.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[torch.nn.Module, dict[str, Any], Path]]:
    """`(name, new_names=False)` -> transformers' model, inputs with an image, and the folder it was saved in."""

    def make(name: str, *, new_names: bool = False) -> tuple[torch.nn.Module, dict[str, Any], Path]:
        model, inputs = MODELS[name]()
        _randomized(model)
        folder = tmp_path / "source"
        model.save_pretrained(folder)  # type: ignore[operator]
        if new_names:
            tensors = load_file(folder / "model.safetensors")
            save_file({_new_name(key): tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
        return model, inputs, folder

    return make


def _new_name(name: str) -> str:
    """As files are spelled that newer versions of transformers wrote."""
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.", "model.language_model."),
        ("lm_head.", "lm_head."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return f"model.{name}"


def _folded(source: Any, architecture: Architecture, rotation: rotations.Rotation) -> dict[str, Tensor]:
    """Every tensor of the source, rotated as a conversion does it."""
    tensors = {name: source.read(name) for name in source.tensors}
    gain, embedding = tensors[architecture.final_norm], tensors[architecture.embedding]
    head = tensors[architecture.embedding if architecture.tied_embeddings else architecture.head]
    result: dict[str, Tensor] = {
        architecture.embedding: rotations.rotate_embedding(embedding, rotation),
        architecture.head: rotations.rotate_head(head, gain, rotation),
        architecture.final_norm: torch.ones_like(gain),
    }
    for layer in range(architecture.layers):
        names = architecture.layer_tensors(layer)
        result |= rotations.rotate_layer({name: tensors[name] for name in names}, layer, architecture, rotation)
    for name in filter(architecture.is_beside, tensors):
        turned = architecture.enters_stream(name)
        result[name] = rotations.rotate_outputs(tensors[name], rotation) if turned else tensors[name]
    assert result.keys() == tensors.keys() | {architecture.head}
    return {name: tensor.float().contiguous() for name, tensor in result.items()}


@torch.inference_mode()
def _logits(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    result: Tensor = model(**inputs).logits
    return result


@pytest.mark.parametrize("new_names", [False, True], ids=["old names", "new names"])
@pytest.mark.parametrize("name", MODELS)
def test_rotated_logits_with_an_image_equal_the_sources(
    name: str, new_names: bool, saved: Callable[..., Any], tmp_path: Path
) -> None:
    model, inputs, folder = saved(name, new_names=new_names)
    source = open_source(folder)
    architecture = read_architecture(source.config, source.tensors)
    rotation = rotations.make_rotation("random", None, 0, architecture)
    assert rotation is not None
    turned = tmp_path / "turned"
    turned.mkdir()
    shards.write_json(turned / "config.json", source.config)
    tensors = _folded(source, architecture, rotation)
    save_file(tensors, turned / "model.safetensors", metadata={"format": "pt"})
    expected = _logits(model, inputs)
    loaded = type(model).from_pretrained(turned).eval()  # type: ignore[attr-defined]
    torch.testing.assert_close(_logits(loaded, inputs), expected, atol=1e-4, rtol=1e-5)
    # The test must be able to fail: what makes the image features left unturned gives another function.
    for entry in architecture.spelling.into_stream:
        key = entry if entry in tensors else f"{entry}.weight"
        save_file({**tensors, key: source.read(key)}, turned / "model.safetensors", metadata={"format": "pt"})
        broken = type(model).from_pretrained(turned).eval()  # type: ignore[attr-defined]
        assert float((_logits(broken, inputs) - expected).abs().max()) > 1e-2


def _convert(folder: Path, output: Path, **changes: Any) -> Any:
    ids = torch.randint(0, 320, (4, 64), generator=_seeded())
    save_file({"input_ids": ids}, output.parent / "ids.safetensors")
    few = {"sequence_length": 64, "base_sweeps": 1, "refinement_sweeps": 1}
    options = ConvertOptions(calibration=str(output.parent / "ids.safetensors"), **{**few, **changes})
    return convert(open_source(folder), output, options)


@pytest.mark.parametrize("name", MODELS)
def test_the_language_model_is_nested_and_the_rest_kept(name: str, saved: Callable[..., Any], tmp_path: Path) -> None:
    model, _, folder = saved(name)
    result = _convert(folder, tmp_path / "out")
    assert validate(result.folder, deep=True) == []
    checkpoint = Checkpoint(result.folder)
    architecture = checkpoint.architecture()
    assert architecture.model_type == name
    assert list(checkpoint.manifest.modules) == [module for module, _ in architecture.modules()]
    stored = load_file(folder / "model.safetensors")
    beside = {key: tensor for key, tensor in stored.items() if key.split(".")[0] not in ("language_model", "model")}
    beside.pop("lm_head.weight", None)
    assert {key for key in beside if not torch.equal(checkpoint.tensor(key), beside[key])} == set(TURNED[name])
    assert checkpoint.manifest.rotation is not None
    assert checkpoint.manifest.rotation["turned"] == TURNED[name]
    assert checkpoint.config["text_config"]["tie_word_embeddings"] is False
    nested = NestedModel.open(result.folder)
    assert nested.end_ids == {2}
    prompt = list(range(20, 60))
    expected = _logits(model, {"input_ids": torch.tensor([prompt])})[0]
    error = (nested.logits(prompt) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.median()) < 0.1
    speculative = nested.generate(prompt, max_new_tokens=8)
    assert speculative.token_ids == nested.generate(prompt, max_new_tokens=8, view="target").token_ids


def test_without_a_rotation_nothing_beside_is_turned(saved: Callable[..., Any], tmp_path: Path) -> None:
    _, _, folder = saved("llava", new_names=True)
    quick = {"rotation": "none", "base": "rtn", "refinement": "closed", "scale_search": "max"}
    checkpoint = Checkpoint(_convert(folder, tmp_path / "out", **quick).folder)
    assert checkpoint.manifest.rotation is None
    assert "model.language_model.layers.1.mlp.up_proj" in checkpoint.manifest.modules
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in checkpoint.manifest.unquantized:
            assert torch.equal(checkpoint.tensor(name), tensor)


def test_openvla_by_its_names(tmp_path: Path) -> None:
    """OpenVLA-7B: its `text_config` names little more than the family, and its code is its own."""
    config = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
        "use_fused_vision_backbone": True,
    }
    architecture = read_architecture(config)
    assert (architecture.hidden_size, architecture.layers, architecture.vocab_size) == (4096, 32, 32064)
    assert architecture.head == "language_model.lm_head.weight"
    assert "language_model.model.layers.31.mlp.down_proj" in dict(architecture.modules())
    assert architecture.is_beside("vision_backbone.featurizer.blocks.0.attn.qkv.weight")
    assert architecture.enters_stream("projector.fc3.bias")
    assert not architecture.enters_stream("projector.fc2.weight")


def test_a_projector_that_is_not_there(saved: Callable[..., Any], tmp_path: Path) -> None:
    _, _, folder = saved("llava")
    tensors = load_file(folder / "model.safetensors")
    del tensors["multi_modal_projector.linear_2.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError) as error:
        _convert(folder, tmp_path / "out")
    assert error.value.problems == [
        "multi_modal_projector.linear_2: missing; its outputs stand among the embeddings of a llava model. Export the "
        "whole model again."
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma3_text"])
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    from bitnest_format.families import FAMILIES

    config = AutoConfig.for_model(model_type)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    for field, value in FAMILIES[model_type].defaults.items():
        assert (rope[field] if field == "rope_theta" else getattr(config, field)) == value
