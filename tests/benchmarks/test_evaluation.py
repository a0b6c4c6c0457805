"""The benchmarks' measures, held to what can be computed by hand."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SOURCE = Path(__file__).parents[2] / "benchmarks" / "evaluation.py"
VOCABULARY = 31
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    """The script as a module: `benchmarks` is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("bitnest_benchmark_evaluation", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    from bitnest_format.architecture import read_architecture

    generator = torch.Generator().manual_seed(1)
    shapes = read_architecture(CONFIG).tensors()
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}


def tokens_of(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


class FixedLogits:
    """Stands in for a model: the logits after a token depend on that token alone."""

    device = torch.device("cpu")

    def __init__(self, table: Tensor):
        self.table = table

    def __call__(self, input_ids: Tensor, cache: object = None, last: int = 0) -> Tensor:
        return self.table[input_ids][:, -last:]


def test_perplexity_equals_hand_computation(evaluation: ModuleType) -> None:
    # After token 0 the next is 0 or 1 with 3/4 and 1/4; after token 1 with 1/2 each.
    table = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    tokens = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]])
    probabilities = [3 / 4, 1 / 4, 1 / 2, 1 / 2, 1 / 4, 1 / 2]
    expected = math.prod(probabilities) ** (-1 / 6)
    assert evaluation.perplexity(FixedLogits(table), tokens) == pytest.approx(expected, rel=1e-6)


def test_perplexity_of_uniform_logits_is_the_vocabulary(evaluation: ModuleType) -> None:
    model = FixedLogits(torch.zeros(VOCABULARY, VOCABULARY))
    assert evaluation.perplexity(model, tokens_of(3, 7)) == pytest.approx(VOCABULARY, rel=1e-6)


@pytest.mark.parametrize(
    ("row", "lengths"),
    [
        pytest.param([1, 1, 1, 1, 1, 1, 1, 1], [2, 2, 2], id="all right"),
        pytest.param([0, 0, 0, 0], [0, 0, 0], id="all wrong"),
        pytest.param([1, 0, 1, 1, 0, 1, 1], [1, 2, 2], id="mixed"),
    ],
)
def test_replay_rounds_walks_from_round_to_round(evaluation: ModuleType, row: list[int], lengths: list[int]) -> None:
    # An agreement that does not depend on a round's start, gamma 2: windows of two over the row.
    agrees = torch.tensor([row], dtype=torch.bool).unfold(1, 2, 1)
    assert evaluation.replay_rounds(agrees) == lengths


def test_replay_rounds_ignores_agreement_after_the_first_wrong_draft(evaluation: ModuleType) -> None:
    agrees = torch.tensor([[[0, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0]]], dtype=torch.bool)
    assert evaluation.replay_rounds(agrees) == [0, 1, 2]


def test_summarize_rounds_states_every_ratio(evaluation: ModuleType) -> None:
    result = evaluation.summarize_rounds([4, 4, 0, 2], gamma=4, agreement=0.75)
    assert result.acceptance == 10 / 12
    assert result.accepted_of_drafted == 10 / 16
    assert result.tokens_per_round == 3.5
    assert result.accepted_lengths == (1, 0, 1, 0, 2)
    assert result.agreement == 0.75


def test_summarize_rounds_refuses_no_rounds(evaluation: ModuleType) -> None:
    with pytest.raises(ValueError, match="no round of drafts fits"):
        evaluation.summarize_rounds([], gamma=4, agreement=1.0)


def test_a_model_accepts_all_of_its_own_drafts(evaluation: ModuleType, weights: dict[str, Tensor]) -> None:
    view = evaluation.fake_quant_model(CONFIG, weights)
    result = evaluation.acceptance(view, view, tokens_of(3, 5), new_tokens=12, gamma=3)
    assert result.agreement == 1.0
    assert result.tokens_per_round == 4.0
    assert result.accepted_lengths[:3] == (0, 0, 0)


def test_acceptance_equals_a_real_speculative_loop(evaluation: ModuleType, weights: dict[str, Tensor]) -> None:
    from transformers import DynamicCache

    gamma, new_tokens = 3, 20
    target = evaluation.fake_quant_model(CONFIG, weights)
    draft = target.with_linears({n: w + 0.05 * torch.sin(w * 40) for n, w in weights.items()})
    prefixes = tokens_of(4, 6, seed=3)
    text, _ = evaluation.decode_greedily(target, prefixes, new_tokens)
    lengths = []
    for row, prefix in zip(text, prefixes, strict=True):
        produced = prefix.tolist()
        end = len(row)
        while len(produced) + gamma < end:
            cache = DynamicCache()
            with torch.inference_mode():
                target(torch.tensor([produced[:-1]]), cache)
                step, drafts = torch.tensor([produced[-1:]]), []
                for _ in range(gamma):
                    step = draft(step, cache, last=1).argmax(dim=-1)
                    drafts.append(int(step))
            right = row[len(produced) : len(produced) + gamma].tolist()
            accepted = next((i for i in range(gamma) if drafts[i] != right[i]), gamma)
            lengths.append(accepted)
            produced = row[: len(produced) + accepted + 1].tolist()
    result = evaluation.acceptance(draft, target, prefixes, new_tokens=new_tokens, gamma=gamma)
    assert 0 < sum(lengths) < gamma * len(lengths)
    assert result.accepted_lengths == tuple(lengths.count(n) for n in range(gamma + 1))


def test_decode_greedily_continues_with_the_most_likely_token(
    evaluation: ModuleType, weights: dict[str, Tensor]
) -> None:
    view = evaluation.fake_quant_model(CONFIG, weights)
    text, cache = evaluation.decode_greedily(view, tokens_of(2, 5), 8)
    assert cache.get_seq_length() == 12
    assert torch.equal(evaluation.predictions(view, text)[:, 4:-1], text[:, 5:])


def test_views_of_one_model_do_not_disturb_each_other(evaluation: ModuleType, weights: dict[str, Tensor]) -> None:
    tokens = tokens_of(2, 9)
    changed = evaluation.plain_w8(weights, 8)
    first = evaluation.fake_quant_model(CONFIG, weights, activation_bits=None)
    second = first.with_linears(changed)
    alone = evaluation.fake_quant_model(CONFIG, changed)
    before = first(tokens)
    assert torch.equal(second(tokens), alone(tokens))
    assert torch.equal(first(tokens), before)
    assert not torch.equal(second(tokens), before)


def test_fake_quant_model_without_rounding_is_the_transformers_model(
    evaluation: ModuleType, weights: dict[str, Tensor]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})).eval()
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    tokens = tokens_of(2, 9)
    view = evaluation.fake_quant_model(CONFIG, weights, activation_bits=None)
    torch.testing.assert_close(view(tokens), model(tokens).logits)


def test_fake_quant_model_names_tensors_that_do_not_fit(evaluation: ModuleType, weights: dict[str, Tensor]) -> None:
    wrong = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"missing tensors: \['model.norm.weight'\], unknown tensors: \[\]"):
        evaluation.fake_quant_model(CONFIG, wrong)


def test_fake_quantize_rounds_each_token_to_127_steps(evaluation: ModuleType) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.4], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, 5.1]])
    expected = torch.tensor([[127.0, 0.0, 2.0, -2.0], [0.0, 0.0, 0.0, 0.0], [-254.0, 0.0, 4.0, 6.0]])
    assert torch.equal(evaluation.fake_quantize(x), expected)


def test_plain_w8_rounds_each_group_of_a_linear_weight(evaluation: ModuleType) -> None:
    name = "model.layers.0.mlp.up_proj"
    weight = torch.tensor([[127.0, 0.6, 63.5, 1.0], [-1.27, 0.0, 0.0, 0.0]])
    other = torch.tensor([[0.6]])
    result = evaluation.plain_w8({f"{name}.weight": weight, "model.norm.weight": other}, {name: 2})
    expected = torch.tensor([[127.0, 1.0, 63.5, 1.0], [-1.27, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(result[f"{name}.weight"], expected)
    assert result["model.norm.weight"] is other


def test_rotated_weights_compute_the_same_function(evaluation: ModuleType, weights: dict[str, Tensor]) -> None:
    from bitnest_format.architecture import read_architecture
    from bitnest_format.converters.rotation import make_rotation

    rotation = make_rotation("random", None, 5, read_architecture(CONFIG))
    tokens = tokens_of(2, 9)
    before = evaluation.fake_quant_model(CONFIG, weights, activation_bits=None)(tokens)
    turned = evaluation.rotated(CONFIG, weights, rotation)
    after = evaluation.fake_quant_model(CONFIG, turned, activation_bits=None)(tokens)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_in_source_order_puts_columns_back(evaluation: ModuleType) -> None:
    weight = torch.arange(8.0).view(2, 4)
    order = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    assert torch.equal(evaluation.in_source_order(weight[:, order], order), weight)


def test_chat_values_reads_a_file_that_is_cut_off(evaluation: ModuleType, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "plain"}, {"from": "gpt", "value": "na\u00efve"}]
    text = json.dumps([{"id": "a", "conversations": turns}, {"id": "b", "conversations": turns[:1]}], indent=1)
    path = tmp_path / "chat.json"
    path.write_text(text.rstrip("]\n") + ',\n {"id": "c", "conv', encoding="utf-8")
    assert evaluation.chat_values(path, count=2) == ["plain", "plain"]


def test_code_problems_join_prompt_and_solution(evaluation: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}) + "\n")
    assert evaluation.code_problems(path) == ["def f():\n    return 1\n"]


def test_tokens_survive_writing(evaluation: ModuleType, tmp_path: Path) -> None:
    tokens = evaluation.Tokens(*(tokens_of(2, n, seed=n) for n in (3, 4, 5, 6)))
    evaluation.write_tokens(tokens, tmp_path / "tokens.json")
    again = evaluation.read_tokens(tmp_path / "tokens.json")
    for name in evaluation.Tokens.__slots__:
        assert torch.equal(getattr(again, name), getattr(tokens, name))


def test_blocks_are_cut_from_either_end(evaluation: ModuleType) -> None:
    ids = list(range(10))
    assert evaluation.first_block(ids, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert evaluation.last_block(ids, (2, 3)).tolist() == [[4, 5, 6], [7, 8, 9]]
    with pytest.raises(ValueError, match="the text has 10 tokens, 4 x 3 are needed"):
        evaluation.first_block(ids, (4, 3))


def test_first_prefixes_skips_short_messages(evaluation: ModuleType) -> None:
    messages = [[1], [2, 3, 4], [5, 6], [7, 8]]
    assert evaluation.first_prefixes(messages, (2, 2)).tolist() == [[2, 3], [5, 6]]
    with pytest.raises(ValueError, match="3 messages have 2 tokens or more, 4 are needed"):
        evaluation.first_prefixes(messages, (4, 2))


@pytest.mark.parametrize(
    ("model_type", "nested_head"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)]
)
def test_load_views_rebuilds_both_weights(
    evaluation: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path, model_type: str, nested_head: bool
) -> None:
    from bitnest_format.checkpoint import Checkpoint

    folder = tiny_checkpoint(tmp_path / "nested", model_type=model_type, nested_head=nested_head)
    draft, target = evaluation.load_views(folder)
    for name in ("model.layers.1.mlp.down_proj", *(["lm_head"] if nested_head else [])):
        stored = Checkpoint(folder).weight(name)
        for view, kind in ((draft, "draft"), (target, "target")):
            weight = view.model.get_submodule(name).weights[view.index]
            assert torch.equal(weight, stored.dequantize(kind))
    assert not torch.equal(draft(tokens_of(1, 5)), target(tokens_of(1, 5)))


def test_evaluate_checkpoint_gives_a_row_per_model(
    evaluation: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path / "nested")
    ids = tokens_of(2, 140)
    tokens = evaluation.Tokens(calibration=ids, chat=ids, code=ids[:, :20], prefixes=ids[:, :8])
    rows = evaluation.evaluate_checkpoint(folder, tokens)
    draft, target = evaluation.load_views(folder)
    assert [row["name"] for row in rows] == ["draft", "target"]
    assert rows[0]["chat"] == evaluation.perplexity(draft, ids)
    assert rows[1]["code"] == evaluation.perplexity(target, ids[:, :20])
    assert rows[0]["gamma"] == 4 and "gamma" not in rows[1]
    assert evaluation.format_table(rows).count("\n") == 3


def test_views_with_a_nested_head_agree_with_the_runtime(
    evaluation: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from bitnest_format.runtime.generate import NestedModel

    folder = tiny_checkpoint(tmp_path / "nested", nested_head=True)
    runtime = NestedModel.open(folder)
    tokens = tokens_of(1, 24)
    draft, target = evaluation.load_views(folder)

    def error(view: Any, kind: str) -> float:
        expected = runtime.logits(tokens[0].tolist(), kind)
        return float((view(tokens)[0] - expected).norm() / expected.norm())

    # The runtime's cache is rounded too.
    assert error(draft, "draft") < 0.05 and error(target, "target") < 0.05
    assert error(draft, "target") > 0.1


def convert_by_rounding(model: tuple[Any, dict[str, Tensor]], folder: Path, **options: Any) -> Path:
    """Write `model` to `folder / "source"` and convert it to `folder / "nested"`; returns the source's folder."""
    from safetensors.torch import save_file

    from bitnest_format.converters.options import ConvertOptions
    from bitnest_format.converters.pipeline import convert
    from bitnest_format.converters.sources import open_source

    config, tensors = model
    source = folder / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rounding = ConvertOptions(base="rtn", refinement="closed", base_bound=None, **options)
    convert(open_source(source), folder / "nested", rounding)
    return source


def test_plain_w8a8_of_a_tied_source_rounds_a_nested_head(
    evaluation: ModuleType, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    config, tensors = tiny_model(tied=True)
    source = convert_by_rounding((config, tensors), tmp_path, rotation="none", quantize_lm_head=True)
    full, baseline = evaluation._reference_views(tmp_path / "nested", source, None, "cpu")
    weights = full.model.lm_head.weights
    embedding = tensors["model.embed_tokens.weight"].float()
    assert torch.equal(full.model.model.embed_tokens.weight, embedding)
    assert torch.equal(weights[full.index], embedding)
    rounded = evaluation.plain_w8({"lm_head.weight": embedding}, {"lm_head": 128})["lm_head.weight"]
    assert torch.equal(weights[baseline.index], rounded) and not torch.equal(rounded, embedding)


@pytest.mark.parametrize(("rotation", "nested_head"), [("none", False), ("random", False), ("random", True)])
def test_evaluate_checkpoint_adds_the_source_and_plain_w8a8(
    evaluation: ModuleType, tiny_model: Callable[..., Any], tmp_path: Path, rotation: str, nested_head: bool
) -> None:
    config, tensors = tiny_model()
    source = convert_by_rounding((config, tensors), tmp_path, rotation=rotation, quantize_lm_head=nested_head)
    ids = tokens_of(2, 40)
    tokens = evaluation.Tokens(calibration=ids, chat=ids, code=ids[:, :20], prefixes=ids[:, :8])

    rows = evaluation.evaluate_checkpoint(tmp_path / "nested", tokens, source=source, with_acceptance=False)

    assert [row["name"] for row in rows] == ["draft", "target", "source", "plain W8A8"]
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    expected = evaluation.perplexity(evaluation.fake_quant_model(config, plain, activation_bits=None), ids)
    draft, target, full, eight_bits = (row["chat"] for row in rows)
    assert full == pytest.approx(expected, rel=1e-4)
    assert abs(eight_bits / full - 1) < 0.05
    assert abs(target / full - 1) < abs(draft / full - 1)


def test_main_evaluates_a_checkpoint(
    evaluation: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny_checkpoint(tmp_path / "nested")
    ids = tokens_of(2, 12)
    evaluation.write_tokens(evaluation.Tokens(ids, ids, ids, ids), tmp_path / "tokens.json")
    report = tmp_path / "report.json"
    arguments = ["evaluate", str(folder), "--tokens", str(tmp_path / "tokens.json"), "--no-acceptance"]
    evaluation.main([*arguments, "--json", str(report)])
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == ["draft", "target"]
    assert capsys.readouterr().out == evaluation.format_table(rows) + "\n"
