"""Speculative decoding in transformers: the draft is a second reading of the target's own tensors.

python examples/transformers_speculative.py CHECKPOINT [--prompt TEXT]
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bitnest_format.transformers  # noqa: F401 - makes from_pretrained read nested checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder or a Hub repository id")
    parser.add_argument("--prompt", default="Why do birds build nests?")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    target = AutoModelForCausalLM.from_pretrained(options.checkpoint, attn_implementation="bitnest")
    draft = target.draft_view()
    inputs = tokenizer(options.prompt, return_tensors="pt")
    greedy = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    alone = target.generate(**inputs, **greedy)
    together = target.generate(**inputs, **greedy, assistant_model=draft)
    print(tokenizer.decode(together[0], skip_special_tokens=True))
    print("same tokens as the target:", torch.equal(alone, together))
    print(f"memory of both: {stored_bytes(target, draft) / stored_bytes(target):.2f} of one")


def stored_bytes(*models: torch.nn.Module) -> int:
    """Bytes of all tensors, each storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for model in models
        for tensor in model.state_dict().values()
    }
    return sum(storages.values())


if __name__ == "__main__":
    main()
