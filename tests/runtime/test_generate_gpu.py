"""Generating on a GPU: graphs, pinned records and events, which no other test has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnest_format.errors import GenerationError
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.gpu_decoder import GpuDecoder
from bitnest_format.runtime.kv_cache import KvSettings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("BITNEST_TEST_DEVICE") != "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU, and BITNEST_TEST_DEVICE=cuda"
)

Make = Callable[..., Path]
GAMMAS = range(9)


@pytest.fixture
def model(tmp_path: Path, tiny_checkpoint: Make) -> NestedModel:
    return NestedModel.open(tiny_checkpoint(tmp_path / "model", eos_token_id=None), device="cuda")


def _prompt(length: int) -> list[int]:
    ids: list[int] = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return ids


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "tied": True}, {"model_type": "qwen3", "head_dim": 128}, {"nested_head": True}],
    ids=["llama", "qwen2", "qwen3", "nested head"],
)
def test_the_text_is_the_same_for_every_gamma(changes: dict[str, Any], tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None, **changes)
    model = NestedModel.open(folder, device="cuda")
    for length in (1, 40, 150):
        expected = model.generate(_prompt(length), max_new_tokens=100, view="target").token_ids
        for gamma in GAMMAS:
            result = model.generate(_prompt(length), max_new_tokens=100, gamma=gamma)
            assert result.token_ids == expected, f"{length} tokens, gamma {gamma}"
            assert result.stats.device.startswith("cuda:")


@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("switch", [0, 8, 1000])
def test_drafting_on_kv4_does_not_show_in_the_text(switch: int, recent: int, model: NestedModel) -> None:
    kv = KvSettings(draft_switch_length=switch, recent=recent)
    expected = model.generate(_prompt(20), max_new_tokens=60, gamma=0).token_ids
    assert model.generate(_prompt(20), max_new_tokens=60, gamma=4, kv=kv).token_ids == expected


def test_the_chain_is_that_of_the_cpu(chain_checkpoint: Make) -> None:
    folder = chain_checkpoint("PabcXYdefghijklm", eos_token_id=None)
    for device in ("cpu", "cuda"):
        model = NestedModel.open(folder, device=device)
        for gamma in GAMMAS:
            for stop, text in ((["XY"], "abc"), (["Ydefg"], "abcX"), (["jk", "def"], "abcXY"), ([], "abcXYdefghij")):
                assert model.generate("P", max_new_tokens=12, gamma=gamma, stop=stop).text == text


@pytest.mark.parametrize("length", [1, 27, 29, 31])
def test_the_context_ends_the_text(length: int, tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", max_position_embeddings=32, eos_token_id=None)
    model = NestedModel.open(folder, device="cuda")
    expected = model.generate(_prompt(length), max_new_tokens=40, gamma=0).token_ids
    assert len(expected) == 32 - length
    for gamma in (1, 4, 15):
        assert model.generate(_prompt(length), max_new_tokens=40, gamma=gamma).token_ids == expected


def test_nothing_of_one_text_is_seen_by_the_next(model: NestedModel) -> None:
    """GP-3, with graphs that live on; then with other settings, which need other graphs."""
    assert isinstance(model.decoder, GpuDecoder)
    expected = {
        length: NestedModel.open(model.checkpoint.folder, device="cuda")
        .generate(_prompt(length), max_new_tokens=50, gamma=4)
        .token_ids
        for length in (3, 200)
    }
    for length in (200, 3, 200, 3):
        assert model.generate(_prompt(length), max_new_tokens=50, gamma=4).token_ids == expected[length]
    model.generate(_prompt(5), max_new_tokens=20, temperature=1.0)
    model.generate(_prompt(5), max_new_tokens=20, view="draft")
    assert model.generate(_prompt(200), max_new_tokens=50, gamma=4).token_ids == expected[200]
    assert model.generate(_prompt(200), max_new_tokens=300, gamma=2).token_ids[:50] == expected[200]


def test_choosing_gamma_by_acceptance_gives_the_same_text(model: NestedModel) -> None:
    expected = model.generate(_prompt(10), max_new_tokens=200, gamma=0).token_ids
    for _ in range(2):
        result = model.generate(_prompt(10), max_new_tokens=200, gamma="auto")
        assert result.token_ids == expected
    assert result.stats.seconds["setup"] < 0.05


def test_sampling_repeats_with_its_seed(model: NestedModel) -> None:
    def run(seed: int, gamma: int) -> tuple[int, ...]:
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
        return model.generate(_prompt(6), max_new_tokens=40, seed=seed, gamma=gamma, **options).token_ids

    assert run(1, 4) == run(1, 4) != run(2, 4)
    assert run(1, 0) == run(1, 0)


def test_sampling_from_a_large_vocabulary(tmp_path: Path, tiny_checkpoint: Make) -> None:
    """Sorting and searching so many logits takes other kernels of torch, which must be fit for a graph too."""
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=130000, num_hidden_layers=1, eos_token_id=None)
    model = NestedModel.open(folder, device="cuda")
    for options in ({}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}):
        texts = [
            model.generate(_prompt(6), max_new_tokens=20, temperature=0.8, gamma=3, seed=seed, **options).token_ids
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]


def test_a_draft_runs_without_the_refinement_shards(tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    expected = NestedModel.open(folder, device="cuda").generate([5, 6], max_new_tokens=20, view="draft").token_ids
    for path in folder.glob("bitnest-refinement-*"):
        path.unlink()
    opened = NestedModel.open(folder, view="draft", device="cuda")
    assert opened.generate([5, 6], max_new_tokens=20).token_ids == expected


def test_logits_are_near_those_of_the_cpu(model: NestedModel) -> None:
    reference = NestedModel.open(model.checkpoint.folder, device="cpu")
    for view in ("target", "draft"):
        found, expected = model.logits(_prompt(70), view).cpu(), reference.logits(_prompt(70), view)
        assert float((found - expected).norm() / expected.norm()) < 0.05
    assert torch.equal(model.logits(_prompt(70))[:20], model.logits(_prompt(70)[:20]))


def test_an_output_that_is_not_a_number(
    chain_checkpoint: Make, edit_shard: Callable[..., None], toy_ids_of: Callable[[str], list[int]]
) -> None:
    folder = chain_checkpoint("Pabcdefgh", eos_token_id=None)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][toy_ids_of("c")[0]] = float("nan")

    edit_shard(folder, "base", edit)
    model = NestedModel.open(folder, device="cuda")
    for gamma, temperature in ((0, 0.0), (4, 0.0), (4, 0.1)):
        with pytest.raises(GenerationError, match="the model's output is not a number"):
            model.generate("P", max_new_tokens=8, gamma=gamma, temperature=temperature)
    assert model.generate("P", max_new_tokens=1).text == "a"


def test_a_text_that_does_not_fit_into_memory(tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", max_position_embeddings=1 << 29, eos_token_id=None)
    model = NestedModel.open(folder, device="cuda")
    with pytest.raises(
        GenerationError, match=r"cuda:0: out of memory: decoding needs .* What fits: \d+ tokens of prompt"
    ):
        model.generate([5], max_new_tokens=1 << 29)
    assert len(model.generate([5], max_new_tokens=3).token_ids) == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu(tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    expected = NestedModel.open(folder, device="cuda:0").generate([5, 6], max_new_tokens=40, gamma=3).token_ids
    used = torch.cuda.memory_allocated(0)
    second = NestedModel.open(folder, device="cuda:1")
    assert second.generate([5, 6], max_new_tokens=40, gamma=3).token_ids == expected
    assert second.logits([5, 6]).device == torch.device("cuda", 1)
    assert torch.cuda.memory_allocated(0) == used
