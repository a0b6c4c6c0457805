"""Decode one prompt by the target, the draft and both, and show what speculation did.

python examples/compare_views.py CHECKPOINT [--prompt TEXT] [--gamma N]
"""

from __future__ import annotations

import argparse

import bitnest_format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder or a Hub repository id")
    parser.add_argument("--prompt", default="Why do birds build nests?")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=4)
    options = parser.parse_args()

    model = bitnest_format.load(options.checkpoint)  # holds both views; a draft alone would need view="draft"
    answers = {
        view: model.generate(
            options.prompt,
            view=view,
            max_new_tokens=options.max_new_tokens,
            gamma=options.gamma if view == "nested" else None,
        )
        for view in ("target", "draft", "nested")
    }
    for view, answer in answers.items():
        stats = answer.stats
        print(f"{view}: {stats.new_tokens} tokens, {stats.tokens_per_second:.1f} a second")
    stats = answers["nested"].stats
    print(f"acceptance {stats.acceptance:.3f}, {stats.tokens_per_round:.2f} tokens a round at gamma {stats.gamma}")
    print(f"bytes read a token: {stats.bytes_per_token / 1e6:.1f} MB")
    print("same tokens as the target:", answers["nested"].token_ids == answers["target"].token_ids)


if __name__ == "__main__":
    main()
