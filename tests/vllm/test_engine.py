"""Nested checkpoints in vLLM's engine on the CPU: the tokens and numbers of our own layers, on one rank and on two.

The reference is the same checkpoint in transformers with the layers of this project, in float32: its cache holds keys
and values as they are, as vLLM's does. `bitnest_format.load` rounds them to 8 bits, so it writes other texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bitnest_format.transformers

PROMPT = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
TOKENS = 48
# float32 rounding: norms, attention and sums over ranks add in other orders. Rounding to INT8 hides the difference or
# makes a whole step of it, of which a model of two layers has too few inputs to show one.
CLOSE = {"rtol": 2e-6, "atol": 2e-5}
DRAFT = {"quantization": "bitnest-draft"}
NESTED = {"method": "draft_model", "quantization": "bitnest-draft", "num_speculative_tokens": 4}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Without a warm-up, vLLM's CPU runner lacks the buffers between stages, so `enforce_eager` is not for pipelines.
TWO_STAGES = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,
    "compilation_config": {"mode": 3, "backend": "eager"},
}


@torch.no_grad()
def expected(folder: Path, view: str = "target") -> tuple[list[int], torch.Tensor]:
    options = {"config": bitnest_format.transformers.draft_config(folder)} if view == "draft" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    ones = torch.ones_like(PROMPT)
    text = model.generate(PROMPT, attention_mask=ones, max_new_tokens=TOKENS, do_sample=False)
    return text[0, PROMPT.shape[1] :].tolist(), model(PROMPT).logits[0, :-1].log_softmax(-1)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "nested-head": {"nested_head": True, "vocab_size": 300},
    "one-group-a-row": {"group_size": -1},
    "float32-scales": {"scale_type": torch.float32},
    "biases": {"attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral"},
    "gemma": {"model_type": "gemma"},
    "gemma 2": {"model_type": "gemma2", "tied": True},
    "gemma 3": {"model_type": "gemma3_text", "tied": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_numbers_are_those_of_our_layers(name, tiny_checkpoint, engine, written, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None, **MODELS[name])
    tokens, numbers = expected(folder)
    with engine(folder) as llm:
        got, logprobs = written(llm, PROMPT[0].tolist(), TOKENS)
    assert got == tokens
    torch.testing.assert_close(logprobs, numbers, **CLOSE)


def test_phi_3_computes_what_our_runtime_does(tiny_checkpoint, engine, written, runtime_logits, tmp_path):
    """transformers fuses its layers, so our plug-in for it is no reference. Its attention adds in yet another order."""
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None, model_type="phi3")
    numbers = runtime_logits(folder, PROMPT[0], "target")[:-1].log_softmax(-1)
    with engine(folder) as llm:
        _, logprobs = written(llm, PROMPT[0].tolist(), 1)
    apart = (logprobs - numbers).abs().amax(dim=1)
    # Where a last bit turns one INT8 code, a row moves by a small share of what its logits differ by.
    assert (apart < CLOSE["atol"]).sum() >= len(apart) - 2
    assert apart.max() < 0.1 * numbers.std()


@pytest.mark.parametrize(
    "options", [DRAFT, {"hf_overrides": {"quantization_config": {"quant_method": "bitnest", "view": "draft"}}}]
)
def test_draft_view(options, tiny_checkpoint, engine, written, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    tokens, numbers = expected(folder, "draft")
    with engine(folder, **options) as llm:
        got, logprobs = written(llm, PROMPT[0].tolist(), TOKENS)
    assert got == tokens
    torch.testing.assert_close(logprobs, numbers, **CLOSE)
    assert tokens != expected(folder)[0]


@pytest.mark.parametrize(
    ("view", "options"),
    [("target", TWO_RANKS), ("draft", {**TWO_STAGES, **DRAFT})],
    ids=["target drafted for on two ranks", "draft in two stages"],
)
def test_two_processes(view, options, tiny_checkpoint, engine, written, tmp_path):
    """On two ranks, the target's own base planes draft for it; in two stages, the draft view stands alone."""
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None, nested_head=True, attention_bias=True)
    tokens, numbers = expected(folder, view)
    if view == "target":
        ranks = options["tensor_parallel_size"]
        options = {
            **options,
            "speculative_config": {**NESTED, "model": str(folder), "draft_tensor_parallel_size": ranks},
        }
    with engine(folder, disable_log_stats=False, **options) as llm:
        got, logprobs = written(llm, PROMPT[0].tolist(), TOKENS)
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert got == tokens
    torch.testing.assert_close(logprobs, numbers, **CLOSE)
    assert (metrics.get("vllm:spec_decode_num_accepted_tokens", 0) > 0) == (view == "target")


def test_draft_needs_no_refinement_files(tiny_checkpoint, engine, written, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    tokens, _ = expected(folder, "draft")
    for path in folder.glob("bitnest-refinement-*"):
        path.write_bytes(b"never read")
    with engine(folder, load_format="bitnest", **DRAFT) as llm:
        assert written(llm, PROMPT[0].tolist(), TOKENS)[0] == tokens
