"""Both views of a checkpoint in transformers: the memory they share, and whether speculation leaves the text alone.

python benchmarks/transformers_views.py CHECKPOINT
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from decode_views import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

import bitnest_format.transformers  # noqa: F401  # makes from_pretrained read nested checkpoints

MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub repository id of a nested checkpoint")
    parser.add_argument("--new-tokens", type=int, default=48, help="per prompt (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="what is computed in (default: %(default)s)")
    parser.add_argument("--attention", default="bitnest", help="attn_implementation (default: %(default)s)")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=getattr(torch, options.dtype), attn_implementation=options.attention
    )
    draft = model.draft_view()
    print(f"target {held_bytes(model) / MIB:.1f} MiB, target and draft {held_bytes(model, draft) / MIB:.1f} MiB")
    seconds = {"target": 0.0, "speculative": 0.0}
    equal = total = passes = 0
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        texts = []
        for mode, assistant in (("target", None), ("speculative", draft)):
            calls: list[Any] = []
            hook = model.register_forward_hook(lambda *_, calls=calls: calls.append(None))
            start = time.perf_counter()
            answer = model.generate(
                **inputs, max_new_tokens=options.new_tokens, do_sample=False, assistant_model=assistant
            )
            seconds[mode] += time.perf_counter() - start
            hook.remove()
            texts.append(answer[0, inputs["input_ids"].shape[1] :].tolist())
        passes += len(calls)
        plain, speculative = texts
        same = next((at for at, pair in enumerate(zip(plain, speculative, strict=False)) if pair[0] != pair[1]), None)
        total += len(plain)
        equal += len(plain) if same is None and len(plain) == len(speculative) else same or 0
    print(f"{equal} of {total} tokens equal up to the first difference, {total / passes:.2f} tokens a target pass")
    print(", ".join(f"{mode} {total / taken:.1f} tokens/s" for mode, taken in seconds.items()))


def held_bytes(*models: Any) -> int:
    """Bytes of all memory that the parameters of some models lie in, each piece counted once."""
    storages = [tensor.untyped_storage() for model in models for tensor in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main()
