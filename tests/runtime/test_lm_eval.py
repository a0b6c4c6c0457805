"""The model type of lm-evaluation-harness, run by the harness on a small task; every number computed again by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("lm_eval", reason="needs the extra eval")

import datasets
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from bitnest_format.errors import GenerationError, UsageError
from bitnest_format.lm_eval import BitnestLM
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.text_reader import Score
from bitnest_format.transformers import draft_config

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "fixtures" / "lm_eval"
VIEWS = ("draft", "target", "nested")
LIMIT = 8
SECONDS = 1800  # each command takes some ten, on a machine that is busy much longer
PREFIX = [1]  # the toy tokenizer's begin-of-text token
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}{% if shout is defined %}!{% endif %}"
)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks a hub fails; tables are cached for one test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Callable[..., Path], toy_tokenizer: Callable[..., None]) -> Path:
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    toy_tokenizer(folder)
    return folder


def task(name: str) -> dict[str, Any]:
    """A task of the fixtures, with the path of its file made whole."""
    config: dict[str, Any] = yaml.safe_load((TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {split: str(ROOT / path) for split, path in files.items()}
    return config


def evaluate(model: Any, arguments: dict[str, Any] | None = None, *names: str, **options: Any) -> dict[str, Any]:
    # Without the index of the harness's own tasks, which takes seconds to make.
    manager = TaskManager(include_defaults=False)
    options = {"limit": LIMIT, "bootstrap_iters": 0, "task_manager": manager, **options}
    results = simple_evaluate(model, arguments, tasks=[task(name) for name in names], **options)
    assert results is not None
    return dict(results)


def questions() -> list[dict[str, Any]]:
    lines = (TASKS / "nests.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:LIMIT]]


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def scoring_view(view: str) -> str:
    return "draft" if view == "draft" else "target"


# -- whole evaluations


@pytest.mark.parametrize("view", VIEWS)
def test_answers_are_told_apart_by_their_log_probabilities(
    folder: Path, token_by_token: Callable[..., Score], toy_ids_of: Callable[[str], list[int]], view: str
) -> None:
    found = evaluate("bitnest", {"pretrained": str(folder), "view": view}, "nests")
    model = NestedModel.open(folder)
    right = right_by_length = 0
    samples = sorted(found["samples"]["nests"], key=lambda sample: sample["doc_id"])
    for question, sample in zip(questions(), samples, strict=True):
        context = toy_ids_of(f"Question: {question['question']} Answer:")
        scores = [
            token_by_token(model, context, toy_ids_of(f" {choice}"), scoring_view(view))
            for choice in question["choices"]
        ]
        for (logprob, greedy), score in zip(sample["filtered_resps"], scores, strict=True):
            assert (logprob, greedy) == (pytest.approx(score.logprob, rel=1e-12), score.greedy)
        logprobs = [score.logprob for score in scores]
        by_length = [logprob / len(choice) for logprob, choice in zip(logprobs, question["choices"], strict=True)]
        right += logprobs.index(max(logprobs)) == question["answer"]
        right_by_length += by_length.index(max(by_length)) == question["answer"]
    assert found["results"]["nests"]["acc,none"] == right / LIMIT
    assert found["results"]["nests"]["acc_norm,none"] == right_by_length / LIMIT
    assert found["config"]["model_view"] == view
    assert found["config"]["model_device"] == "cpu"


@pytest.mark.parametrize("view", VIEWS)
def test_perplexity_counts_every_token_after_the_prefix(
    folder: Path, token_by_token: Callable[..., Score], toy_ids_of: Callable[[str], list[int]], view: str
) -> None:
    found = evaluate("bitnest", {"pretrained": str(folder), "view": view}, "nests_text")
    model = NestedModel.open(folder)
    texts = [f"{question['question']} {question['choices'][question['answer']]}" for question in questions()]
    total = sum(token_by_token(model, PREFIX, toy_ids_of(text), scoring_view(view)).logprob for text in texts)
    words, size = sum(len(text.split()) for text in texts), sum(map(len, texts))
    results = found["results"]["nests_text"]
    assert results["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-6)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-6)


@pytest.mark.parametrize("view", VIEWS)
def test_answers_are_written_by_the_view(folder: Path, toy_ids_of: Callable[[str], list[int]], view: str) -> None:
    found = evaluate("bitnest", {"pretrained": str(folder), "view": view, "gamma": 3 if view == "nested" else None},
                     "nests_written")  # fmt: skip
    model = NestedModel.open(folder)
    samples = sorted(found["samples"]["nests_written"], key=lambda sample: sample["doc_id"])
    for question, sample in zip(questions(), samples, strict=True):
        ids = greedy(model, toy_ids_of(f"Question: {question['question']} Answer:"), 16, scoring_view(view))
        text = model.tokenizer.decode(ids)
        for stop in ("\n", "Question:", "."):
            text = text.split(stop)[0]
        assert sample["resps"] == [[text]]
    assert ("acceptance" in found["config"]) == (view == "nested")
    if view == "nested":
        assert 0 < found["config"]["acceptance"] <= 1 < found["config"]["tokens_per_round"] <= 4


@torch.inference_mode()
def greedy(model: NestedModel, prompt: list[int], count: int, view: Any) -> list[int]:
    """Token by token, without any loop of the runtime."""
    decoder: Any = model.decoder
    cache = decoder.new_cache()
    token = int(decoder.prefill(torch.tensor(prompt), cache, view).argmax())
    written = [token]
    for place in range(len(prompt), len(prompt) + count - 1):
        token = int(decoder.logits(decoder.forward(torch.tensor([token]), place, cache, view), view)[0].argmax())
        written.append(token)
    return written


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers, about arguments that the harness passes
def test_the_models_of_transformers_agree(folder: Path, view: str) -> None:
    """`--model hf`: the same layers in the attention and cache of transformers, which round no cache entries."""
    ours = evaluate("bitnest", {"pretrained": str(folder), "view": view}, "nests", "nests_text")
    if view == "target":
        theirs = evaluate("hf", {"pretrained": str(folder), "dtype": "float32"}, "nests", "nests_text", device="cpu")
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, config=draft_config(folder), dtype=torch.float32)
        theirs = evaluate(HFLM(pretrained=model, tokenizer=str(folder)), None, "nests", "nests_text")
    assert theirs["results"]["nests"]["acc,none"] == ours["results"]["nests"]["acc,none"]
    for name in ("nests", "nests_text"):
        for one, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            first = torch.tensor([resp[0][0] if name == "nests" else resp[0] for resp in one["resps"]])
            second = torch.tensor([resp[0][0] if name == "nests" else resp[0] for resp in other["resps"]])
            torch.testing.assert_close(first, second, rtol=1e-2, atol=0)


# -- the requests


def test_the_harness_knows_the_model() -> None:
    assert get_model("bitnest") is BitnestLM


def test_an_empty_context_is_the_prefix_token(
    folder: Path, token_by_token: Callable[..., Score], toy_ids_of: Callable[[str], list[int]]
) -> None:
    model = BitnestLM(str(folder))
    ((logprob, greedy),) = model.loglikelihood([request("", "abc")], disable_tqdm=True)
    expected = token_by_token(NestedModel.open(folder), PREFIX, toy_ids_of("abc"), "target")
    assert (logprob, greedy) == (pytest.approx(expected.logprob, rel=1e-12), expected.greedy)
    other = BitnestLM(str(folder), prefix_token_id=2)
    assert other.loglikelihood([request("", "abc")], disable_tqdm=True)[0][0] != logprob


@pytest.mark.parametrize("begins", [False, True])
def test_begin_of_text_is_put_in_front_once(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], toy_tokenizer: Callable[..., None], begins: bool
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    toy_tokenizer(folder, bos=begins)
    model = BitnestLM(str(folder))
    plain = model.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert model.tok_encode("ab") == ([*PREFIX, *plain] if begins else plain)
    assert model.tok_encode("<s>ab") == [*PREFIX, *plain]
    assert model.tok_encode("ab", add_special_tokens=False) == plain
    if begins:
        assert BitnestLM(str(folder), add_bos_token=False).tok_encode("ab") == plain


def test_long_texts_are_scored_in_windows(
    folder: Path, token_by_token: Callable[..., Score], toy_ids_of: Callable[[str], list[int]]
) -> None:
    text = "abcdefghijklmnopqrstuvw"  # 23 tokens in windows of 10: 10, 10 and 3, the last with 7 tokens of context
    ids = toy_ids_of(text)
    model = NestedModel.open(folder)
    windows = [(PREFIX, ids[:10]), (ids[9:10], ids[10:20]), (ids[12:20], ids[20:])]
    expected = [token_by_token(model, context, rest, "target").logprob for context, rest in windows]
    found = BitnestLM(str(folder), max_length=10).loglikelihood_rolling([request(text), request("")], disable_tqdm=True)
    assert found == [pytest.approx(sum(expected), rel=1e-12), 0.0]


def test_a_long_context_is_cut_from_the_left(
    folder: Path,
    token_by_token: Callable[..., Score],
    toy_ids_of: Callable[[str], list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = BitnestLM(str(folder), max_length=8)
    ((logprob, _),) = model.loglikelihood([request("abcdefghij", "klm")], disable_tqdm=True)
    expected = token_by_token(NestedModel.open(folder), toy_ids_of("efghij"), toy_ids_of("klm"), "target")
    assert logprob == pytest.approx(expected.logprob, rel=1e-12)
    assert "a context of 10 tokens is cut by 4 from the left" in caplog.text
    with pytest.raises(GenerationError) as error:
        model.loglikelihood([request("a", "bcdefghij")], disable_tqdm=True)
    assert str(error.value) == (
        f"{folder}: a continuation has 9 tokens, max_length is 8. "
        "Score it as a rolling log-likelihood, or raise max_length."
    )


def written(model: BitnestLM, context: str, **options: Any) -> str:
    (text,) = model.generate_until([request(context, options)], disable_tqdm=True)
    return text


def test_a_written_answer_ends_where_the_task_says(chain_checkpoint: Callable[..., Path]) -> None:
    model = BitnestLM(str(chain_checkpoint("abcdefghij", eos_token_id=None)))
    assert written(model, "ab", until=["gh", ""], max_gen_toks=20) == "cdef"
    assert written(model, "ab", until="e", max_gen_toks=20) == "cd"
    assert written(model, "ab", max_gen_toks=3) == "cde"
    assert written(model, "ab", max_new_tokens=2) == "cd"
    assert len(written(model, "ab")) == 256
    assert written(BitnestLM(model.pretrained, max_gen_toks=5), "ab") == "cdefg"
    # 8 tokens of context leave room for 5 of the prompt
    assert written(BitnestLM(model.pretrained, max_length=8), "xxxxxxab", max_gen_toks=3) == "cde"
    assert written(BitnestLM(model.pretrained, think_end_token="e"), "ab", until=["i"]) == "fgh"


@pytest.mark.parametrize("until", [[], ["</s>"], ["<s>"]])
def test_special_tokens_end_an_answer_where_they_are_asked_for(
    tmp_path: Path, chain_checkpoint: Callable[..., Path], edit_shard: Callable[..., None], until: list[str]
) -> None:
    """The model writes `c`, `<s>` and goes on; a stop string that is a special token is none of the text."""
    folder = chain_checkpoint("abcdef", eos_token_id=None)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        head, rows = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
        end = 2 if until == ["</s>"] else 1
        head[end] = head[6] * 1  # what wrote `d` writes the special token
        head[6] = rows[end]  # which `d` follows

    edit_shard(folder, "base", edit)
    text = written(BitnestLM(str(folder)), "ab", until=until, max_gen_toks=5)
    assert text == ("cdef" if not until else "c")


def test_an_answer_ends_at_the_tokenizers_end_of_text(
    chain_checkpoint: Callable[..., Path], edit_shard: Callable[..., None]
) -> None:
    """As with the harness's own models, whatever the checkpoint's configs say."""
    folder = chain_checkpoint("abcdef", eos_token_id=None)
    edit_shard(folder, "base", lambda tensors: tensors["lm_head.weight"][2].copy_(tensors["lm_head.weight"][6] * 2))
    assert written(BitnestLM(str(folder)), "ab", until=[]) == "c"


def test_a_written_answer_to_nothing_follows_the_prefix_token(folder: Path) -> None:
    model = BitnestLM(str(folder))
    expected = greedy(NestedModel.open(folder), PREFIX, 4, "target")
    assert written(model, "", max_gen_toks=4) == model.model.tokenizer.decode(expected)


def test_sampled_answers_differ_and_repeat(folder: Path) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 0.9, "max_gen_toks": 8}
    first = [written(model := BitnestLM(str(folder)), "abc", **options), written(model, "abc", **options)]
    assert first[0] != first[1]
    model = BitnestLM(str(folder), seed=1)
    assert written(model, "abc", **options) == first[1]
    cold = {**options, "do_sample": False}
    assert written(model, "abc", **cold) == written(model, "abc", max_gen_toks=8)


def test_chat_templates(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], toy_tokenizer: Callable[..., None]
) -> None:
    folder = tiny_checkpoint(tmp_path / "chat")
    toy_tokenizer(folder, template=TEMPLATE)
    model = BitnestLM(str(folder))
    messages = [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(messages) == "<user>hi;<answer>"
    assert model.apply_chat_template(messages, add_generation_prompt=False) == "<user>hi"
    assert BitnestLM(str(folder), chat_template_args={"shout": 1}).apply_chat_template(messages) == "<user>hi;<answer>!"
    assert model.chat_template(True) == TEMPLATE
    assert model.tokenizer_name == str(folder).replace("/", "__")
    found = evaluate(model, None, "nests_written", limit=1, apply_chat_template=True)
    (sample,) = found["samples"]["nests_written"]
    assert sample["arguments"][0][0].startswith("<user>Question: Which animal")
    toy_tokenizer(folder)
    with pytest.raises(GenerationError) as error:
        BitnestLM(str(folder)).apply_chat_template(messages)
    assert str(error.value) == "chat: the tokenizer has no chat template; give the prompt as plain text"


def test_answers_are_kept_by_the_harness(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"pretrained": str(folder)}
    names = ("nests", "nests_text", "nests_written")
    first = evaluate("bitnest", arguments, *names, limit=2, use_cache=str(tmp_path / "cache"))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(NestedModel, "score", fail)
    monkeypatch.setattr(NestedModel, "generate", fail)
    second = evaluate("bitnest", arguments, *names, limit=2, use_cache=str(tmp_path / "cache"))
    assert second["results"] == first["results"]


# -- refusals


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_length": 513}, "max_length is 513, expected 2 to 512, the model's own context"),
        ({"view": "both"}, "view is 'both', expected one of nested, target, draft"),
    ],
)
def test_arguments_out_of_range(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        BitnestLM(str(folder), **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_beams": 4, "repetition_penalty": 1.2, "min_p": 0.1, "use_cache": True},
            "generation settings num_beams=4, repetition_penalty=1.2, min_p=0.1: the runtime knows do_sample, "
            "temperature, top_k, top_p, until and max_gen_toks. Leave them out, or evaluate with --model hf.",
        ),
        ({"max_gen_toks": 512}, "max_gen_toks is 512, expected 1 to 511: less than max_length"),
    ],
)
def test_settings_that_the_runtime_lacks(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        written(BitnestLM(str(folder)), "abc", **options)
    assert str(error.value) == message


def test_batches_are_computed_one_by_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert BitnestLM(str(folder), batch_size="auto").batch_size == 1
    assert caplog.text == ""
    assert BitnestLM(str(folder), batch_size=8).batch_size == 1
    assert "batch_size is 8; texts are computed one by one, with the same results" in caplog.text


# -- the command


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}


def command(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bitnest_format.lm_eval", "run", *arguments],
        capture_output=True, encoding="utf-8", cwd=ROOT, env=environment(home), timeout=SECONDS, check=False,
    )  # fmt: skip


def test_the_command(folder: Path, tmp_path: Path) -> None:
    done = command(
        "--model", "bitnest", "--model_args", f"pretrained={folder},view=draft", "--include_path", str(TASKS),
        "--tasks", "nests", "--limit", "2", "--output_path", str(tmp_path / "results"), home=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bitnest ({'pretrained'" in done.stdout
    assert "Warning" not in done.stderr  # the harness names a GPU where the caller names none
    (path,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["config"]["model_view"] == "draft"
    assert results["results"]["nests"]["acc,none"] in (0, 0.5, 1)


def test_the_command_ends_with_one_sentence(tmp_path: Path) -> None:
    done = command("--model", "bitnest", "--model_args", f"pretrained={tmp_path}/none", "--include_path", str(TASKS),
                   "--tasks", "nests", home=tmp_path)  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"Error: '{tmp_path}/none': no such file or folder")


def test_the_page(
    tmp_path: Path, helper: Callable[[str], Any], documented_inputs: Callable[[Path, list[str]], None]
) -> None:
    """The blocks of docs/evaluation.md that need the harness."""
    blocks, page = helper("doc_blocks"), ROOT / "docs" / "evaluation.md"
    documented_inputs(tmp_path, blocks.given(page))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    blocks.run_page(
        page, tmp_path, environment(tmp_path) | {"PATH": path}, name="lm_eval", python=sys.executable, seconds=SECONDS
    )
