"""Speculative decoding inside vLLM: the base planes of the target's own tensors draft for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROMPT = list(range(7, 31))
TOKENS = 48
GAMMA = 4


def drafting(folder: Path, **options: Any) -> dict[str, Any]:
    method = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": GAMMA, **options}
    return {"speculative_config": {"quantization": "bitnest-draft", **method}, "disable_log_stats": False}


def counters(llm: Any) -> dict[str, int]:
    prefix = "vllm:spec_decode_num_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix) and hasattr(metric, "value")
    }


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.mark.parametrize("model", [{"tied": True}, {"nested_head": True, "attention_bias": True}], ids=str)
def test_drafts_come_from_the_tensors_of_the_target(model, tiny_checkpoint, engine, written, tmp_path):
    """The text is the target's own, some drafts are accepted, and the drafter holds nothing but gains of norms."""
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None, **model)
    with engine(folder) as llm:
        alone, _ = written(llm, PROMPT, TOKENS, numbers=False)
    with engine(folder, **drafting(folder)) as llm:
        together, _ = written(llm, PROMPT, TOKENS, numbers=False)
        count = counters(llm)
        target, drafter = runner(llm).model, runner(llm).drafter.model
        held = {parameter.data_ptr() for parameter in target.parameters()}
        own = {
            name: parameter.nbytes for name, parameter in drafter.named_parameters() if parameter.data_ptr() not in held
        }
    assert together == alone
    assert count["draft_tokens"] == GAMMA * count["drafts"]
    assert 0 < count["accepted_tokens"] <= count["draft_tokens"]
    assert all(name.endswith("norm.weight") for name in own)
    assert sum(own.values()) == (2 * 2 + 1) * 256 * 4


def test_a_model_of_its_own_drafts_too(tiny_checkpoint, engine, written, tmp_path):
    """Nothing is taken from a target that is another checkpoint."""
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    other = tiny_checkpoint(tmp_path / "other", eos_token_id=None, seed=1)
    with engine(folder) as llm:
        alone, _ = written(llm, PROMPT, TOKENS, numbers=False)
    with engine(folder, **drafting(other)) as llm:
        together, _ = written(llm, PROMPT, TOKENS, numbers=False)
        held = {parameter.data_ptr() for parameter in runner(llm).model.parameters()}
        assert all(parameter.data_ptr() not in held for parameter in runner(llm).drafter.model.parameters())
    assert together == alone
