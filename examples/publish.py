"""Check a checkpoint, publish it, and read it back by its repository id. `--dry-run` stops after the checks.

python examples/publish.py CHECKPOINT OWNER/NAME [--dry-run]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import bitnest_format
from bitnest_format.push import PushError, preflight, push


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("repo_id")
    parser.add_argument("--dry-run", action="store_true", help="make no request")
    options = parser.parse_args()

    try:
        plan = preflight(options.checkpoint, options.repo_id)
    except PushError as error:
        sys.exit("\n".join(error.problems))
    sizes = [size for _, size in plan.first.values()] + [len(content) for content in plan.last.values()]
    print(f"{len(sizes)} files, {sum(sizes):,} bytes")
    if options.dry_run:
        return

    result = push(options.checkpoint, options.repo_id, private=True)
    print(result.load_lines())
    draft = bitnest_format.load(options.repo_id, revision=result.commit, view="draft")  # the base shards alone
    print(draft.generate("Why do birds build nests?", max_new_tokens=8).finish_reason)


if __name__ == "__main__":
    main()
