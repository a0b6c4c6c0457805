"""Drafting and verifying must not show in the text, nor in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.reference_linear import View
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.kv_cache import KvCache, KvSettings
from bitnest_format.runtime.model import Decoder
from bitnest_format.runtime.sampling import Greedy, SamplingSettings, decider, probabilities
from bitnest_format.runtime.speculative import SpeculativeLoop

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "tied": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "mistral window": {"model_type": "mistral", "sliding_window": 16},
    "nested head": {"nested_head": True},
}
GAMMAS = range(1, 9)


def _prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def _loop(decoder: Decoder, kv: KvSettings | None = None) -> SpeculativeLoop:
    return SpeculativeLoop(decoder, Greedy(), kv or KvSettings(), "target")


def _run(decoder: Decoder, prompt: list[int], gamma: int, count: int, kv: KvSettings | None = None) -> list[int]:
    loop = _loop(decoder, kv)
    tokens = [loop.start(prompt)]
    while len(tokens) < count:
        tokens += loop.round(tokens[-1], gamma)
        loop.cache.check()
        assert loop.cache.length == len(prompt) + len(tokens) - 1
    return tokens[:count]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_the_target_alone(
    name: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    decoder = Decoder(Checkpoint(tiny_checkpoint(tmp_path / "model", **MODELS[name])), ("draft", "target"))
    for seed in range(3):
        prompt = _prompt(1 + 14 * seed, seed)
        expected = _run(decoder, prompt, gamma=0, count=40)
        for gamma in GAMMAS:
            assert _run(decoder, prompt, gamma, count=40) == expected, f"seed {seed}, gamma {gamma}"


@pytest.mark.parametrize("keep_decoded", ["load", "call"])
@pytest.mark.parametrize(
    "kv",
    [
        KvSettings(draft_switch_length=0, recent=0),
        KvSettings(draft_switch_length=20, recent=0),
        KvSettings(draft_switch_length=20, recent=8),
        KvSettings(draft_switch_length=0, recent=1000),
    ],
    ids=["kv4", "switch", "recent", "all recent"],
)
def test_drafting_on_kv4_does_not_show_in_the_text(
    kv: KvSettings, keep_decoded: Any, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    decoder = Decoder(Checkpoint(tiny_checkpoint(tmp_path / "model")), ("draft", "target"), keep_decoded)
    prompt = _prompt(12, seed=1)
    expected = _run(decoder, prompt, gamma=0, count=40)
    for gamma in (1, 4, 8):
        assert _run(decoder, prompt, gamma, 40, kv) == expected


def test_drafts_read_kv4_past_the_switch(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    decoder = Decoder(Checkpoint(tiny_checkpoint(tmp_path / "model")), ("draft", "target"))
    loop = _loop(decoder, KvSettings(draft_switch_length=14, recent=3))
    pending = loop.start(_prompt(12, seed=1))
    read: list[tuple[int, int]] = []
    forward = decoder.forward

    def spy(ids: Tensor, position: int, cache: KvCache, view: View, fine_from: int = 0) -> Tensor:
        if view == "draft":
            read.append((position + len(ids), fine_from))
        else:
            assert fine_from == 0
        return forward(ids, position, cache, view, fine_from)

    decoder.forward = spy  # type: ignore[method-assign]
    loop.round(pending, gamma=4)
    assert read == [(13, 0), (14, 0), (15, 12), (16, 13)]


def test_rejected_drafts_leave_no_trace(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], edit_shard: Callable[..., None]
) -> None:
    """50 rounds of 4 drafts of which the second is always wrong; the cache equals that of plain decoding."""
    decoder = Decoder(Checkpoint(tiny_checkpoint(tmp_path / "model")), ("draft", "target"))
    prompt = _prompt(9, seed=4)
    plain = _loop(decoder)
    expected = [plain.start(prompt)]
    for _ in range(110):
        expected += plain.round(expected[-1], 0)

    class SecondIsWrong(Greedy):
        """Drafts the target's own tokens, but for the second of each block."""

        def __init__(self) -> None:
            self.next = 1
            self.place = 0

        def propose(self, logits: Tensor) -> tuple[int, Tensor | None]:
            self.place += 1
            right = expected[self.next + self.place - 1]
            return (right + 1) % 320 if self.place == 2 else right, None

        def accept(self, drafted: Any, proposals: Any, logits: Tensor) -> tuple[int, int]:
            count, following = super().accept(drafted, proposals, logits)
            self.next += count + 1
            self.place = 0
            return count, following

    loop = SpeculativeLoop(decoder, SecondIsWrong(), KvSettings(draft_switch_length=30, recent=4), "target")
    loop.decider.next = 0  # type: ignore[attr-defined]
    tokens = [loop.start(prompt)]
    for _ in range(50):
        block = loop.round(tokens[-1], 4)
        assert len(block) == 2
        tokens += block
        loop.cache.check()
        length = loop.cache.length
        assert length == len(prompt) + len(tokens) - 1
        assert torch.equal(loop.cache.planes[..., :length, :], plain.cache.planes[..., :length, :])
        assert torch.equal(loop.cache.scale[..., :length], plain.cache.scale[..., :length])
    assert tokens == expected[: len(tokens)]
    assert loop.counters.histogram == [0, 50]


def test_a_draft_of_a_perturbed_base_plane_changes_no_token(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    decoder = Decoder(Checkpoint(folder), ("draft", "target"))
    expected = _run(decoder, _prompt(5, seed=2), 0, 50)
    for layer in decoder.layers:
        for part in layer.mlp.output.parts:
            assert part.draft is not None
            part.draft.copy_(part.draft.flip(1))
    assert _run(decoder, _prompt(5, seed=2), 4, 50) == expected


def test_without_refinement_every_draft_is_accepted(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], edit_shard: Callable[..., None]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")

    def erase(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(-0x77777778)

    edit_shard(folder, "refinement", erase)
    model = NestedModel.open(folder)
    runs = [model.generate(_prompt(6, seed=3), max_new_tokens=51, gamma=4, chat=False) for _ in range(2)]
    for run in runs:
        assert run.stats.acceptance == 1.0
        assert run.stats.accepted_lengths == (0, 0, 0, 0, 10)
        assert run.stats.tokens_per_round == 5.0
    assert runs[0].token_ids == runs[1].token_ids


@pytest.mark.parametrize("nested_head", [False, True])
def test_counters_add_up(nested_head: bool, tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", nested_head=nested_head)
    decoder = Decoder(Checkpoint(folder), ("draft", "target"))
    loop = _loop(decoder, KvSettings(draft_switch_length=10, recent=0))
    token = loop.start(_prompt(9, seed=0))
    block = loop.round(token, 3)
    counters = loop.counters
    assert (counters.rounds, counters.drafted, counters.accepted) == (1, 3, len(block) - 1)
    assert sum(counters.histogram) == 1
    assert counters.histogram[counters.accepted] == 1
    fine, coarse = 2 * 2 * (64 + 4), 2 * 2 * (32 + 4)
    weights = {view: decoder.view_bytes[view] + decoder.head_bytes[view] for view in decoder.views}
    draft = 3 * weights["draft"] + 2 * (10 * fine + 11 * coarse + 12 * coarse)
    assert counters.bytes_read == draft + weights["target"] + 2 * 13 * fine


def test_windows_bound_the_cache_bytes(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type="mistral", sliding_window=16)
    loop = _loop(Decoder(Checkpoint(folder), ("draft", "target")))
    weights = loop.decoder.view_bytes["target"] + loop.decoder.head_bytes["target"]
    fine, coarse = 2 * 2 * (64 + 4), 2 * 2 * (32 + 4)
    assert loop.bytes_of_pass(100, "target", 0) == weights + 2 * 16 * fine
    assert loop.bytes_of_pass(100, "target", 90) == weights + 2 * (6 * coarse + 10 * fine)
    assert loop.bytes_of_pass(100, "target", 100) == weights + 2 * 16 * coarse


def test_sampled_text_follows_the_targets_distribution(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """The second and third token of 600 sampled runs against the target's own probabilities, chi-square."""
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=8, num_hidden_layers=1, eos_token_id=None)
    model = NestedModel.open(folder)
    prompt = [3, 1]
    settings = SamplingSettings(temperature=1.3, top_k=6)
    runs = 600
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for seed in range(runs):
        loop = SpeculativeLoop(
            model.decoder, decider(SamplingSettings(temperature=1.3, top_k=6, seed=seed)), KvSettings(), "target"
        )
        tokens = [loop.start(prompt)]
        while len(tokens) < 3:
            tokens += loop.round(tokens[-1], 2)
        counts[tuple(tokens[:2])] += 1
        counts[(-1, tokens[2])] += 1
        accepted += loop.counters.accepted
        drafted += loop.counters.drafted
    # Some drafts stand and some fall, or nothing is tested.
    assert 0.2 < accepted / drafted < 0.95

    first = probabilities(model.logits(prompt)[-1], settings).double()
    expected: dict[tuple[int, ...], float] = {}
    third = torch.zeros(8, dtype=torch.float64)
    for one in range(8):
        second = probabilities(model.logits([*prompt, one])[-1], settings).double()
        for two in range(8):
            joint = float(first[one] * second[two])
            expected[one, two] = joint
            third += joint * probabilities(model.logits([*prompt, one, two])[-1], settings).double()
    assert _chi_square_below_bound(counts, expected, runs)
    assert _chi_square_below_bound(counts, {(-1, token): float(third[token]) for token in range(8)}, runs)


def _chi_square_below_bound(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], runs: int
) -> bool:
    """Cells that expect fewer than 5 are pooled; the bound lies 4 standard deviations above the mean."""
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for key, probability in expected.items():
        if probability * runs >= 5:
            cells.append((counts[key], probability * runs))
        else:
            rest = [rest[0] + counts[key], rest[1] + probability * runs]
    if rest[1] > 0:
        cells.append((rest[0], max(rest[1], 1e-9)))
    freedom = len(cells) - 1
    return sum((found - wanted) ** 2 / wanted for found, wanted in cells) < freedom + 4 * (2 * freedom) ** 0.5
