"""Generating text: what ends it, what is refused, and that drafting never shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnest_format.errors import CheckpointError, GenerationError, UsageError
from bitnest_format.runtime.device import DeviceWarning
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.kv_cache import KvSettings

GAMMAS = (0, 1, 2, 4, 8)
Open = Callable[..., NestedModel]
VALID = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "valid"


@pytest.fixture
def model(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> NestedModel:
    return NestedModel.open(tiny_checkpoint(tmp_path / "model", eos_token_id=None))


def _set_json(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**document, **fields}), encoding="utf-8")


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("listed", [False, True], ids=["one id", "a list"])
def test_an_end_token_inside_a_block_ends_the_text(
    where: str, listed: bool, open_model: Open, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    prompt = [5, 6, 7]
    expected = open_model(folder).generate(prompt, max_new_tokens=8, view="target").token_ids
    third = expected[2]
    assert third not in expected[:2]
    _set_json(folder / where, eos_token_id=[301, third] if listed else third)
    model = open_model(folder)
    for gamma in GAMMAS:
        result = model.generate(prompt, max_new_tokens=20, gamma=gamma)
        assert result.token_ids == expected[:3]
        assert result.finish_reason == "eos"


def test_every_end_token_of_a_list_ends_the_text(
    open_model: Open, chain_checkpoint: Callable[..., Path], toy_ids_of: Callable[[str], list[int]]
) -> None:
    ends = toy_ids_of("xyz")
    folder = chain_checkpoint("abcz", eos_token_id=ends)
    for view in ("nested", "target", "draft"):
        result = open_model(folder, view=view).generate("a", max_new_tokens=20)
        assert result.token_ids == tuple(toy_ids_of("bcz"))
        assert (result.text, result.finish_reason) == ("bcz", "eos")


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_stop_string_inside_a_block_or_over_two(
    gamma: int, open_model: Open, chain_checkpoint: Callable[..., Path]
) -> None:
    model = open_model(chain_checkpoint("PabcXYdefghijklm", eos_token_id=None))
    for stop, text in ((["XY"], "abc"), (["Ydefg"], "abcX"), (["a"], ""), (["jk", "def"], "abcXY"), (["Q"], None)):
        pieces: list[str] = []
        result = model.generate("P", max_new_tokens=12, gamma=gamma, stop=stop, stream=pieces.append)
        if text is None:
            assert (result.text, result.finish_reason) == ("abcXYdefghij", "length")
        else:
            assert (result.text, result.finish_reason) == (text, "stop")
        assert result.text is not None
        assert list(result.token_ids) == model.tokenizer.encode(result.text)
        assert "".join(pieces) == result.text


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 17])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_exactly_as_many_tokens_as_asked_for(count: int, gamma: int, model: NestedModel) -> None:
    result = model.generate([9, 8, 7], max_new_tokens=count, gamma=gamma)
    assert len(result.token_ids) == count
    assert result.finish_reason == "length"
    assert result.token_ids == model.generate([9, 8, 7], max_new_tokens=17, view="target").token_ids[:count]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_context_ends_the_text(gamma: int, tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", max_position_embeddings=32, eos_token_id=None)
    model = NestedModel.open(folder)
    highest: list[int] = []
    rows = model.decoder.rope.rows

    def spy(position: int, count: int) -> Any:
        highest.append(position + count - 1)
        return rows(position, count)

    model.decoder.rope.rows = spy  # type: ignore[method-assign]
    prompt = list(range(3, 32))
    result = model.generate(prompt, max_new_tokens=10, gamma=gamma)
    assert len(prompt) == 29
    assert len(result.token_ids) == 3
    assert result.finish_reason == "length"
    assert max(highest) < 32
    assert result.token_ids == model.generate(prompt, max_new_tokens=10, gamma=0).token_ids


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    model = NestedModel.open(tiny_checkpoint(tmp_path / "model", max_position_embeddings=32, eos_token_id=None))
    assert len(model.generate([5] * 31, max_new_tokens=9).token_ids) == 1
    with pytest.raises(GenerationError) as error:
        model.generate([5] * 32)
    assert str(error.value) == (
        "the prompt has 32 tokens, the model's context holds 32, the first new one included. Shorten it."
    )
    assert model.logits([5] * 32).shape == (32, 320)
    with pytest.raises(GenerationError, match="the prompt has 33 tokens, the model's context holds 32"):
        model.logits([5] * 33)


def test_a_prompt_of_one_token(model: NestedModel) -> None:
    expected = model.generate([5], max_new_tokens=12, view="target").token_ids
    assert expected[0] == int(model.logits([5])[0].argmax())
    for gamma in GAMMAS:
        assert model.generate([5], max_new_tokens=12, gamma=gamma).token_ids == expected


def test_a_long_prompt_is_run_in_pieces(model: NestedModel) -> None:
    prompt = torch.randint(3, 320, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = model.generate(prompt, max_new_tokens=20, view="target").token_ids
    assert expected[0] == int(model.logits(prompt)[-1].argmax())
    kv = KvSettings(draft_switch_length=305, recent=16)
    assert model.generate(prompt, max_new_tokens=20, gamma=4, kv=kv).token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty: at least one token is needed"),
        (torch.tensor([], dtype=torch.long), "the prompt is empty: at least one token is needed"),
        ([[]], "the prompt is a batch of 1; one prompt at a time can be decoded. Call generate for each."),
        (
            [[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]],
            "the prompt is a batch of 2; one prompt at a time can be decoded. Call generate for each.",
        ),
        (["one", "two"], "the prompt is a batch of 2; one prompt at a time can be decoded. Call generate for each."),
        (
            torch.zeros(3, 4, dtype=torch.long),
            "the prompt is a batch of 3; one prompt at a time can be decoded. Call generate for each.",
        ),
        ([5, 320], "the prompt holds 320, expected token ids of 0 to 319"),
        ([5, -1], "the prompt holds -1, expected token ids of 0 to 319"),
        ([5, 1.5], "the prompt holds 1.5, expected token ids of 0 to 319"),
    ],
    ids=["empty", "empty tensor", "batch of nothing", "batch", "texts", "batch tensor", "past", "negative", "float"],
)
def test_prompts_that_cannot_be_served(prompt: Any, message: str, model: NestedModel) -> None:
    with pytest.raises(GenerationError) as error:
        model.generate(prompt)
    assert str(error.value) == message


def test_an_empty_text_with_and_without_a_first_token(model: NestedModel, toy_tokenizer: Callable[..., None]) -> None:
    folder = model.checkpoint.folder
    toy_tokenizer(folder)
    with pytest.raises(GenerationError, match="the prompt is empty"):
        model.generate("")
    toy_tokenizer(folder, bos=True)
    opened = NestedModel.open(folder)
    assert opened.generate("", max_new_tokens=3).token_ids == opened.generate([1], max_new_tokens=3).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 16}, "gamma is 16, expected a whole number, 0 to 15 or 'auto'"),
        ({"gamma": -1}, "gamma is -1, expected a whole number, 0 to 15 or 'auto'"),
        ({"gamma": "some"}, "gamma is 'some', expected a whole number, 0 to 15 or 'auto'"),
        ({"gamma": 2, "view": "target"}, "gamma is 2 but the target view alone drafts nothing; use the nested view"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a whole number, 1 or more"),
        ({"temperature": -0.5}, "temperature is -0.5, expected 0 (greedy) or a positive number"),
        ({"temperature": float("nan")}, "temperature is nan, expected 0 (greedy) or a positive number"),
        ({"top_k": 0}, "top_k is 0, expected a whole number, 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0, expected a number above 0 and at most 1"),
        ({"stop": "XY"}, "stop is 'XY', expected a list of strings, none of them empty"),
        ({"stop": [""]}, "stop is [''], expected a list of strings, none of them empty"),
        ({"view": "both"}, "view is 'both', expected one of nested, target, draft"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_options_out_of_range(options: dict[str, Any], message: str, model: NestedModel) -> None:
    with pytest.raises(UsageError) as error:
        model.generate([5], **options)
    assert str(error.value) == message


def test_a_view_that_was_not_opened(open_model: Open, tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_model(tiny_checkpoint(tmp_path / "model"), view="target")
    with pytest.raises(UsageError) as error:
        model.generate([5], view="nested")
    assert str(error.value) == "the draft view was not opened (view='target'); open the checkpoint as 'nested'"
    with pytest.raises(UsageError, match="the draft view was not opened"):
        model.logits([5], "draft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"view": "base"}, "view is 'base', expected one of nested, target, draft"),
        ({"unpack": "never"}, "unpack is 'never', expected one of auto, load, call"),
        ({"device": "tpu-9"}, "device is 'tpu-9', expected 'auto', 'cpu', 'cuda' or one GPU, as 'cuda:1'"),
    ],
    ids=["view", "unpack", "device"],
)
def test_open_with_options_out_of_range(
    options: dict[str, Any], message: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    with pytest.raises(UsageError) as error:
        NestedModel.open(folder, **options)
    assert str(error.value) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    with pytest.warns(DeviceWarning, match="GPU.*; decoding on the CPU instead") as warned:
        model = NestedModel.open(folder, device="cuda")
    assert len(warned) == 1
    assert str(warned[0].message) == model.device_choice.warning
    assert model.generate([5], max_new_tokens=2).stats.device == "cpu"


def test_a_draft_runs_without_the_refinement_shards(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    expected = NestedModel.open(folder).generate([5, 6], max_new_tokens=10, view="draft").token_ids
    for path in folder.glob("bitnest-refinement-*"):
        path.unlink()
    assert NestedModel.open(folder, view="draft").generate([5, 6], max_new_tokens=10).token_ids == expected
    with pytest.raises(CheckpointError, match="not in the folder"):
        NestedModel.open(folder)


def test_a_draft_only_checkpoint_has_no_other_view(
    open_model: Open, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", draft_only=True)
    assert open_model(folder, view="draft").generate([5], max_new_tokens=4).stats.new_tokens <= 4
    with pytest.raises(CheckpointError, match="the target view cannot be rebuilt"):
        open_model(folder)


def test_without_a_tokenizer_ids_still_work(model: NestedModel) -> None:
    result = model.generate([5, 6], max_new_tokens=4)
    assert result.text is None
    assert len(result.token_ids) == 4
    for call in (
        lambda: model.generate("text"),
        lambda: model.generate([5], stop=["x"]),
        lambda: model.generate([5], stream=print),
        lambda: model.generate([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(GenerationError, match=r"model: no tokenizer\.json, so text cannot be read or written"):
            call()


def test_a_text_goes_through_the_chat_template_where_there_is_one(
    chain_checkpoint: Callable[..., Path], toy_tokenizer: Callable[..., None]
) -> None:
    folder = chain_checkpoint("abcdef", eos_token_id=None)
    plain = NestedModel.open(folder)
    assert plain.generate("a", max_new_tokens=3).text == "bcd"
    with pytest.raises(GenerationError, match="the tokenizer has no chat template"):
        plain.generate("a", chat=True)
    toy_tokenizer(folder, template="{{ messages[0]['content'] }}c")
    chat = NestedModel.open(folder)
    assert chat.generate("a", max_new_tokens=3).text == "def"
    assert chat.generate("a", max_new_tokens=3, chat=False).text == "bcd"
    assert chat.generate([{"role": "user", "content": "a"}], max_new_tokens=3).text == "def"
    assert chat.generate("a", max_new_tokens=3).stats.prompt_tokens == 2


def test_streamed_pieces_make_up_the_text(open_model: Open, chain_checkpoint: Callable[..., Path]) -> None:
    model = open_model(chain_checkpoint("Pabcdefgh", eos_token_id=None))
    pieces: list[str] = []
    result = model.generate("P", max_new_tokens=8, gamma=3, stream=pieces.append)
    assert result.text == "abcdefgh"
    assert pieces == ["a", "bcde", "fgh"]


def test_a_block_never_reaches_past_the_asked_for_length(chain_checkpoint: Callable[..., Path]) -> None:
    """Every draft is right here, so each round would commit gamma + 1 tokens if the cap let it."""
    model = NestedModel.open(chain_checkpoint("Pabcdefgh", eos_token_id=None))
    result = model.generate("P", max_new_tokens=7, gamma=4)
    assert result.text == "abcdefg"
    assert result.stats.rounds == 2
    assert result.stats.drafted == 4 + 0
    assert result.stats.acceptance == 1.0
    assert result.stats.accepted_lengths == (1, 0, 0, 0, 1)


def test_stats_of_a_run(model: NestedModel) -> None:
    nested = model.generate([5, 6, 7], max_new_tokens=30, gamma=4).stats
    assert (nested.prompt_tokens, nested.new_tokens, nested.gamma) == (3, 30, 4)
    assert sum(nested.accepted_lengths) == nested.rounds
    assert sum(i * count for i, count in enumerate(nested.accepted_lengths)) == nested.accepted
    assert nested.acceptance == nested.accepted / nested.drafted
    assert nested.tokens_per_round == (nested.accepted + nested.rounds) / nested.rounds
    assert nested.accepted + nested.rounds == 29
    target = model.generate([5, 6, 7], max_new_tokens=30, view="target").stats
    assert (target.rounds, target.drafted, target.acceptance, target.tokens_per_round) == (29, 0, None, 1.0)
    decoder = model.decoder
    cache = sum(2 * 2 * 2 * (64 + 4) * length for length in range(4, 33)) / 29
    assert target.bytes_per_token == pytest.approx(decoder.view_bytes["target"] + decoder.head_bytes["target"] + cache)
    assert set(target.seconds) == {"prefill", "draft", "verify"}
    assert target.device == "cpu"
    json.dumps(nested.to_dict())


def test_a_run_of_one_token_has_no_rounds(model: NestedModel) -> None:
    stats = model.generate([5], max_new_tokens=1).stats
    assert (stats.rounds, stats.acceptance, stats.tokens_per_round, stats.bytes_per_token) == (0, None, None, None)
    assert stats.accepted_lengths == ()
    assert stats.tokens_per_second is None


def test_the_checkpoint_suggests_gamma(model: NestedModel) -> None:
    assert model.generate([5], max_new_tokens=9).stats.gamma == 4
    assert model.generate([5], max_new_tokens=9, view="draft").stats.gamma == 0


def test_a_seed_repeats_a_sampled_text(model: NestedModel) -> None:
    def run(seed: int, gamma: int) -> tuple[int, ...]:
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
        return model.generate([5, 6], max_new_tokens=20, seed=seed, gamma=gamma, **options).token_ids

    assert run(1, 4) == run(1, 4) != run(2, 4)
    assert run(1, 0) == run(1, 0)


@pytest.mark.parametrize("value", ["2", True, [2, "x"]])
def test_end_tokens_that_are_no_ids(value: Any, tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    _set_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError) as error:
        NestedModel.open(folder)
    assert str(error.value) == (
        f"generation_config.json: eos_token_id is {value!r}, expected a token id or a list of them"
    )


def test_it_runs_without_triton_and_without_a_gpu(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from pathlib import Path\n"
        "from bitnest_format.runtime.generate import NestedModel\n"
        f"print(NestedModel.open(Path({str(folder)!r})).generate([5], max_new_tokens=3).token_ids)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    expected = NestedModel.open(folder).generate([5], max_new_tokens=3).token_ids
    assert run.stdout.strip() == str(expected)


@pytest.mark.parametrize("name", sorted(path.name for path in VALID.iterdir() if path.is_dir()))
def test_published_checkpoints_decode(name: str) -> None:
    draft_only = name == "draft-only"
    model = NestedModel.open(VALID / name, view="draft" if draft_only else "nested")
    alone = model.generate([1, 2, 3], max_new_tokens=12, view="draft" if draft_only else "target")
    assert len(alone.token_ids) == 12 or alone.finish_reason == "eos"
    if not draft_only:
        assert model.generate([1, 2, 3], max_new_tokens=12).token_ids == alone.token_ids
