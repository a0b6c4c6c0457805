"""Sources of every architecture as transformers writes them: converted, validated, run, and compared with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnest_format import shards
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import ConversionResult, convert
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.validation import validate

PROMPT = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(11)).tolist()

Tiny = Callable[..., tuple[dict[str, Any], dict[str, torch.Tensor]]]


@pytest.fixture
def saved(tmp_path: Path, tiny_model: Tiny, in_transformers: Callable[..., Any]) -> Callable[..., Any]:
    """`(model_type, change=None, **tiny_model arguments)` -> transformers' model and the folder it was saved in."""

    def make(model_type: str, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **more: Any) -> Any:
        config, tensors = tiny_model(model_type, **more)
        if change is not None:
            change(tensors)
        model = in_transformers(config, tensors)
        model.save_pretrained(tmp_path / "source")
        return model, tmp_path / "source"

    return make


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., ConversionResult]:
    """`(folder, **options)`: converted by default settings, calibrated on 8 random sequences of 64 ids."""

    def make(folder: Path, **changes: Any) -> ConversionResult:
        ids = torch.randint(0, 320, (8, 64), generator=torch.Generator().manual_seed(0))
        save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
        few = {"sequence_length": 64, "base_sweeps": 1, "refinement_sweeps": 1}
        options = ConvertOptions(calibration=str(tmp_path / "ids.safetensors"), **{**few, **changes})
        return convert(open_source(folder), tmp_path / "out", options)

    return make


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("phi3", {"partial_rotary_factor": 0.75, "tied": True}),
        ("mixtral", {}),
        ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
        ("gemma", {"tied": True}),
        ("gemma2", {"tied": True}),
        ("gemma3_text", {"tied": True}),
    ],
    ids=["phi3", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3"],
)
def test_convert_and_generate(
    model_type: str, changes: dict[str, Any], saved: Callable[..., Any], converted: Callable[..., Any]
) -> None:
    reference, folder = saved(model_type, **changes)
    post_norms = model_type in ("gemma2", "gemma3_text")
    result = converted(folder, rotation="none" if post_norms else "random")
    assert validate(result.folder, deep=True) == []
    model = NestedModel.open(result.folder)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    logits = model.logits(PROMPT)
    assert float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).median()) < 0.1
    nested = model.generate(PROMPT, max_new_tokens=12)
    assert nested.token_ids == model.generate(PROMPT, max_new_tokens=12, view="target").token_ids
    assert nested.stats.rounds < 12


def test_fused_matrices_are_split_exactly(saved: Callable[..., Any], converted: Callable[..., Any]) -> None:
    """AR-4"""
    _, folder = saved("phi3")
    stored = load_file(folder / "model.safetensors")
    source = open_source(folder)
    assert not any("qkv" in name or "gate_up" in name for name in source.tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        fused = {
            "self_attn.qkv_proj": {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128},
            "mlp.gate_up_proj": {"mlp.gate_proj": 512, "mlp.up_proj": 512},
        }
        for whole, parts in fused.items():
            pieces = stored[f"{prefix}{whole}.weight"].split(list(parts.values()))
            for part, piece in zip(parts, pieces, strict=True):
                name = f"{prefix}{part}.weight"
                assert source.tensors[name].shape == piece.shape
                assert torch.equal(source.read(name), piece)
    result = converted(folder, rotation="none", base="rtn", refinement="closed", scale_search="max")
    checkpoint = Checkpoint(result.folder)
    piece = stored["model.layers.1.self_attn.qkv_proj.weight"][256:384]
    weight = checkpoint.weight("model.layers.1.self_attn.k_proj").dequantize("target")
    assert float((weight - piece).norm() / piece.norm()) < 0.01


def test_fused_matrices_of_another_size(saved: Callable[..., Any]) -> None:
    """AR-4"""
    _, folder = saved("phi3")
    config = shards.read_json(folder / "config.json")
    shards.write_json(folder / "config.json", config | {"num_key_value_heads": 4})
    with pytest.raises(SourceError) as error:
        open_source(folder)
    assert error.value.problems == [
        f"model.layers.{layer}.self_attn.qkv_proj.weight: has 512 rows, expected 768 (q_proj 256, k_proj 256, "
        "v_proj 256) by the sizes in config.json. Correct the config, or export the model again."
        for layer in range(2)
    ]


def test_experts_that_no_token_reaches(saved: Callable[..., Any], converted: Callable[..., Any]) -> None:
    """AR-5"""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            # What the mean of other experts' rows answers never exceeds the best of them.
            router = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
            router[6:] = router[:6].mean(dim=0)

    _, folder = saved("mixtral", change, num_local_experts=8, num_experts_per_tok=1, intermediate_size=256)
    result = converted(folder)
    assert result.warnings[-1] == (
        "model.layers.0.block_sparse_moe experts 6, 7; model.layers.1.block_sparse_moe experts 6, 7: too few "
        "calibration tokens reached these experts, so they were rounded to nearest; more calibration text may help"
    )
    assert validate(result.folder, deep=True) == []
    assert len(result.manifest.modules) == 2 * (4 + 8 * 3)
    for module in result.manifest.modules.values():
        assert 0 < (module.target_error or 0) < 0.06


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_post_norms_take_no_rotation(model_type: str, saved: Callable[..., Any], converted: Callable[..., Any]) -> None:
    """Refused before any work, with the reason and the way out."""
    _, folder = saved(model_type, tied=True)
    with pytest.raises(SourceError) as error:
        converted(folder)
    assert error.value.problems == [
        f"--rotation random: {model_type} norms the outputs of attention and MLP before they are added to the residual "
        "stream, and such norms cannot absorb R1. Pass --rotation none."
    ]
    assert not (folder.parent / "out").exists()
