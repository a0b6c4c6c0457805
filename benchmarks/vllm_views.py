"""What vLLM holds and writes with the target view, the draft view, and the draft view drafting for the target.

    python benchmarks/vllm_views.py demo/SmolLM2-135M-Instruct-BitNest

Runs each in this process, in float32 on a CPU: bytes of parameters as loaded, greedy tokens, and for the
nested drafter what it shares with the target. `--transformers` compares with the same layers in transformers.
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

QUESTION = "Write a short story about a bird that builds a nest."
OPTIONS = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}


def tensors_of(model: Any) -> dict[int, int]:
    """Bytes of a model's parameters and of the codes that its layers unpacked, by address."""
    found = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    for module in model.modules():
        for product in getattr(module, "products", ()):
            weight = product.weight
            for name in ("draft", "target", "scale", "base", "refinement"):
                tensor = getattr(weight, name, None)
                if tensor is not None:
                    found[tensor.data_ptr()] = tensor.nbytes
    return found


def run(folder: str, ids: list[int], count: int, **options: Any) -> tuple[list[int], Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(folder, distributed_executor_backend="uni", disable_log_stats=False, **OPTIONS, **options)
    settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    target = tensors_of(runner.model)
    report: dict[str, Any] = {"MiB of weights": sum(target.values()) / 2**20}
    if hasattr(runner, "drafter"):
        drafter = tensors_of(runner.drafter.model)
        own = drafter.keys() - target.keys()
        report["MiB the drafter adds"] = sum(drafter[address] for address in own) / 2**20
        report["MiB the drafter shares"] = sum(size for address, size in drafter.items() if address not in own) / 2**20
        counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        rounds = counted["vllm:spec_decode_num_drafts"]
        report["drafts accepted"] = (
            counted["vllm:spec_decode_num_accepted_tokens"] / counted["vllm:spec_decode_num_draft_tokens"]
        )
        report["tokens a round"] = 1 + counted["vllm:spec_decode_num_accepted_tokens"] / rounds
    llm.llm_engine.engine_core.shutdown()
    del llm, runner
    cleanup_dist_env_and_memory()
    gc.collect()
    return list(answer.outputs[0].token_ids), report


def in_transformers(folder: str, ids: list[int], count: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    import bitnest_format.transformers  # noqa: F401

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([ids])
    text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
    )
    return text[0, len(ids) :].tolist()


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--transformers", action="store_true", help="compare with transformers, which takes a minute")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    ids = list(tokenizer(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    speculation = {
        "method": "draft_model",
        "model": arguments.folder,
        "quantization": "bitnest-draft",
        "num_speculative_tokens": arguments.gamma,
    }
    texts = {}
    for name, options in (
        ("target", {}),
        ("draft", {"quantization": "bitnest-draft"}),
        ("nested", {"speculative_config": speculation}),
    ):
        texts[name], report = run(arguments.folder, ids, arguments.tokens, **options)
        print(name, {key: round(value, 3) for key, value in report.items()}, flush=True)
    if arguments.transformers:
        texts["transformers"] = in_transformers(arguments.folder, ids, arguments.tokens)
    for name, tokens in texts.items():
        same = next((n for n, (a, b) in enumerate(zip(tokens, texts["target"], strict=True)) if a != b), len(tokens))
        print(f"{name}: {same} of {len(tokens)} tokens before the first that is not the target's")


if __name__ == "__main__":
    main()
