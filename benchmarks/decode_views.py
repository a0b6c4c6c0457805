"""Tokens per second of one checkpoint by each view, in turns, and whether drafting leaves the text alone.

python benchmarks/decode_views.py CHECKPOINT
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import bitnest_format

PROMPTS = (
    "Write a short story about a bird that builds a nest.",
    "Explain how rainbows form.",
    "Write a Python function that reverses a string.",
    "What is the capital of France and why is it famous?",
)
MODES: dict[str, dict[str, Any]] = {
    "target": {"view": "target"},
    "nested, gamma 4": {"gamma": 4},
    "nested, gamma 2": {"gamma": 2},
    "draft": {"view": "draft"},
}
# Phases of a run that come before its rounds.
BEFORE_ROUNDS = ("setup", "prefill")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub repository id of a nested checkpoint")
    parser.add_argument("--new-tokens", type=int, default=96, help="per prompt (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each mode, in turns (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    model = bitnest_format.load(options.checkpoint, device=options.device)
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    rates: dict[str, float | None] = {}
    texts: dict[str, list[tuple[int, ...]]] = {}
    for _ in range(options.runs):
        for mode, settings in MODES.items():
            results = [model.generate(p, max_new_tokens=options.new_tokens, **settings) for p in PROMPTS]
            stats = [result.stats for result in results]
            seconds = sum(taken for s in stats for phase, taken in s.seconds.items() if phase not in BEFORE_ROUNDS)
            speeds[mode].append(sum(s.accepted + s.rounds for s in stats) / seconds)
            drafted = sum(s.drafted for s in stats)
            rates[mode] = sum(s.accepted for s in stats) / drafted if drafted else None
            texts[mode] = [result.token_ids for result in results]
    print("| view | tokens/s, median (range) | accepted / drafted |\n|---|---|---|")
    for mode, values in speeds.items():
        rate = "" if rates[mode] is None else f"{rates[mode]:.3f}"
        print(f"| {mode} | {statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f}) | {rate} |")
    changed = [mode for mode in MODES if mode.startswith("nested") and texts[mode] != texts["target"]]
    if changed:
        sys.exit(f"the text of {' and '.join(changed)} differs from the target's")
    print("nested and target wrote the same tokens")


if __name__ == "__main__":
    main()
