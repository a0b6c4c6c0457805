"""Perplexity of a text by both views, over windows of equal length.

python examples/perplexity.py CHECKPOINT TEXT_FILE [--window TOKENS]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional

import bitnest_format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder or a Hub repository id")
    parser.add_argument("text", type=Path)
    parser.add_argument("--window", type=int, default=256, help="tokens, each window scored by itself")
    options = parser.parse_args()

    model = bitnest_format.load(options.checkpoint)
    ids = model.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    windows = [ids[start : start + options.window] for start in range(0, len(ids) - 1, options.window)]
    windows = [window for window in windows if len(window) > 1]
    for view in ("draft", "target"):
        total, count = 0.0, 0
        for window in windows:
            scores = model.logits(window[:-1], view=view).cpu()
            total += float(functional.cross_entropy(scores, torch.tensor(window[1:]), reduction="sum"))
            count += len(window) - 1
        print(f"{view}: perplexity {math.exp(total / count):.3f} over {count} tokens")


if __name__ == "__main__":
    main()
