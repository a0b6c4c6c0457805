"""How likely a text is: against logits computed token by token, on both paths, whatever was read before."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnest_format.errors import GenerationError, UsageError
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.text_reader import LONGEST_EXACT, Score, common_length, score

VIEWS = ("draft", "target")


def some_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(tmp_path / "model", eos_token_id=None, max_position_embeddings=1024)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("context, continuation", [(1, 1), (1, 64), (300, 20), (256, 5)])
def test_a_score_is_that_of_decoding_token_by_token(
    folder: Path, token_by_token: Callable[..., Score], view: Any, context: int, continuation: int
) -> None:
    model = NestedModel.open(folder)
    ids = some_ids(context + continuation)
    found = model.score(ids[:context], ids[context:], view)
    expected = token_by_token(model, ids[:context], ids[context:], view)
    assert found.greedy == expected.greedy
    assert found.logprob == pytest.approx(expected.logprob, rel=1e-12)


@pytest.mark.parametrize("view", VIEWS)
def test_what_greedy_decoding_writes_is_greedy(open_model: Any, folder: Path, view: Any) -> None:
    """Bit for bit the same logits: nearly uniform ones, as a random model's, would soon part otherwise."""
    model = open_model(folder)
    prompt = some_ids(70)
    written = list(model.generate(prompt, max_new_tokens=40, view=view, gamma=0).token_ids)
    assert model.score(prompt, written, view).greedy
    other = [*written[:30], (written[30] + 1) % 320, *written[31:]]
    assert not model.score(prompt, other, view).greedy
    assert not model.score(prompt, some_ids(4, seed=1), view).greedy


def test_no_score_depends_on_what_was_read_before(open_model: Any, folder: Path) -> None:
    ids = some_ids(700)
    texts = [
        (ids[:600], ids[600:620]),
        (ids[:600], ids[640:641]),
        (ids[:530], ids[530:540]),
        (ids[:530] + some_ids(40, seed=2), ids[:3]),
        (ids[:1], ids[1:200]),
        (ids[:256], ids[256:260]),
        (ids[:512], ids[512:514]),
        (ids[:600], ids[600:620]),
    ]
    shared = open_model(folder)
    for context, continuation in texts:
        assert shared.score(context, continuation) == open_model(folder).score(context, continuation)


def test_a_shared_context_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = NestedModel.open(folder)
    computed: list[int] = []
    forward = model.decoder.forward  # type: ignore[union-attr]
    monkeypatch.setattr(
        model.decoder, "forward", lambda ids, *rest, **more: (computed.append(len(ids)), forward(ids, *rest, **more))[1]
    )
    ids = some_ids(600)
    for last in (1, 2, 3):
        model.score(ids[:560], [5, 6, last])
    assert computed == [256, 256, 48, 2, 2, 2]
    computed.clear()
    model.score([*ids[:540], 7], [5])
    assert computed == [29]


@pytest.mark.parametrize("view", VIEWS)
def test_a_long_continuation_is_read_like_a_prompt(folder: Path, view: Any) -> None:
    model = NestedModel.open(folder)
    ids = some_ids(400)
    rows = model.logits(ids[:-1], view).double().log_softmax(1)
    expected = rows[torch.arange(99, 399), torch.tensor(ids[100:])].sum()
    assert len(ids[100:]) > LONGEST_EXACT
    assert model.score(ids[:100], ids[100:], view).logprob == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("view", VIEWS)
def test_both_paths_score_alike(folder: Path, engine_model: Any, view: Any) -> None:
    """Their prompts are computed in other precisions, which INT8 rounding makes visible."""
    ids = some_ids(400)
    for cut in (100, 380):
        expected = NestedModel.open(folder).score(ids[:cut], ids[cut:], view).logprob
        assert engine_model(folder).score(ids[:cut], ids[cut:], view).logprob == pytest.approx(expected, rel=2e-3)


def test_the_draft_is_scored_from_base_shards_alone(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "draft", draft_only=True)
    ids = some_ids(20)
    model = NestedModel.open(folder, view="draft")
    assert model.score(ids[:10], ids[10:]) == model.score(ids[:10], ids[10:], "draft")
    with pytest.raises(UsageError, match="the target view was not opened"):
        model.score(ids[:10], ids[10:], "target")


def test_what_cannot_be_scored(open_model: Any, tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_model(tiny_checkpoint(tmp_path / "short", max_position_embeddings=32))
    assert model.score([5] * 32, [6]).logprob < 0  # the last token needs no place of its own
    refusals: list[tuple[list[int], list[int], str]] = [
        ([], [5], "the prompt is empty: at least one token is needed"),
        ([5], [], "the prompt is empty: at least one token is needed"),
        ([5], [320], "the prompt holds 320, expected token ids of 0 to 319"),
        ([5] * 32, [6, 7], "the prompt has 33 tokens, the model's context holds 32. Shorten it."),
    ]
    for context, continuation, message in refusals:
        with pytest.raises(GenerationError) as error:
            model.score(context, continuation)
        assert str(error.value) == message


def test_a_score_sums_in_float64_and_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 4)
    logits[2, 3] = 1e-3
    found = score([logits[:1], logits[1:]], [0, 0, 3])
    last = 1e-3 - math.log(3 + math.exp(1e-3))
    assert found.greedy and found.logprob == pytest.approx(-2 * math.log(4) + last, rel=1e-7)
    assert score([logits], [0, 1, 3]).greedy is False


def test_common_length() -> None:
    assert [common_length(a, b) for a, b in (("", "a"), ("ab", "ab"), ("abc", "abd"), ("a", "ab"))] == [0, 2, 2, 1]  # type: ignore[arg-type]
