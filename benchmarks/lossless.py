"""Whether speculative decoding on a GPU writes what the target alone writes, token for token.

python benchmarks/lossless.py CHECKPOINT

Greedy, gamma 1 to 8 against gamma 0, for prompts that are pieces of the built-in text; once with drafts that read KV8
and once with texts that grow past the length at which drafts switch to KV4. Ends with an error where a token differs.
Engines of all gammas decode at the same time, each on a stream of its own. `--device cpu` runs the kernels' twins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters.calibration import builtin_text
from bitnest_format.errors import BitnestError
from bitnest_format.kernels.ops import Ops, plain_ops, triton_ops
from bitnest_format.runtime.bench_request import find_gpu
from bitnest_format.runtime.engine import Engine, state_tensors
from bitnest_format.runtime.forward import NestedForward
from bitnest_format.runtime.gpu_weights import GpuWeights, load_weights
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.tokenizer import Tokenizer

GAMMAS = tuple(range(1, 9))
PROMPT_TOKENS = 64
PROMPT_STRIDE = 331
# Entries at which drafts switch to KV4 in the second part, and the newest that stay at KV8.
SWITCH, RECENT = 128, 32
NEVER = 1 << 30


@dataclass(slots=True)
class Result:
    """Of one gamma in one part: prompts whose tokens all equal the target's, and the drafts of all rounds."""

    part: str
    gamma: int
    prompts: int = 0
    equal: int = 0
    drafted: int = 0
    accepted: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a nested checkpoint")
    parser.add_argument("--prompts", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write the counts as JSON too")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.device == "cpu" else find_gpu(options.device)
    weights = load_weights(Checkpoint(options.checkpoint, "target"), "target", device)
    ids = Tokenizer(options.checkpoint).encode(builtin_text())
    prompts = [ids[first : first + PROMPT_TOKENS] for first in range(0, options.prompts * PROMPT_STRIDE, PROMPT_STRIDE)]
    results = []
    for part, kv in (
        ("KV8", KvSettings(draft_switch_length=NEVER)),
        (f"KV4 past {SWITCH}", KvSettings(draft_switch_length=SWITCH, recent=RECENT)),
    ):
        began = time.perf_counter()
        found = compare(
            weights, triton_ops() if device.type == "cuda" else plain_ops(), prompts, options.tokens, kv, part
        )
        results += found
        for result in found:
            rate = result.accepted / result.drafted
            print(
                f"{part}, gamma {result.gamma}: {result.equal} of {result.prompts} prompts of {options.tokens} tokens "
                f"equal, acceptance {rate:.3f}",
                flush=True,
            )
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    if any(result.equal < result.prompts for result in results):
        sys.exit("tokens differ from the target's")
    print("every token equals the target's")


@torch.inference_mode()
def compare(
    weights: GpuWeights, ops: Ops, prompts: Sequence[Sequence[int]], tokens: int, kv: KvSettings, part: str
) -> list[Result]:
    """Decode every prompt by every gamma. The prompt's pass is run once: it is the same for all."""
    device = weights.embedding.device
    # Rounds go on until enough is committed; nothing wraps around in the ring of committed tokens.
    capacity = max(map(len, prompts)) + tokens + max(GAMMAS) + 1
    engines = {
        gamma: Engine(weights, ops, mode="nested", gamma=gamma, capacity=capacity, kv=kv, ring=capacity, device=device)
        for gamma in (0, *GAMMAS)
    }
    streams = {gamma: torch.cuda.Stream(device) if device.type == "cuda" else None for gamma in engines}
    results = {gamma: Result(part, gamma) for gamma in GAMMAS}
    for prompt in prompts:
        engines[0].prefill(prompt)
        for gamma, engine in engines.items():
            if gamma:
                _copy(engines[0], engine)
        _wait(device)
        _decode(engines, streams, tokens)
        texts = {gamma: engine.state.ring[:tokens].tolist() for gamma, engine in engines.items()}
        for gamma, result in results.items():
            counted = engines[gamma].counters()
            result.prompts += 1
            result.equal += texts[gamma] == texts[0]
            result.drafted += counted["drafted"]
            result.accepted += counted["accepted"]
    return list(results.values())


def _decode(engines: dict[int, Engine], streams: dict[int, torch.cuda.Stream | None], tokens: int) -> None:
    """Rounds of every engine until each has committed `tokens`, as many at a time as surely are needed."""
    left = dict.fromkeys(engines, tokens - 1)
    while any(count > 0 for count in left.values()):
        for gamma, engine in engines.items():
            with _on(streams[gamma]):
                for _ in range(-(-left[gamma] // (gamma + 1)) if left[gamma] > 0 else 0):
                    engine.round()
        _wait(engines[0].device)
        left = {gamma: tokens - int(engine.state.committed) for gamma, engine in engines.items()}


def _copy(source: Engine, target: Engine) -> None:
    """Let one engine stand where another stands."""
    assert isinstance(source.forward, NestedForward) and isinstance(target.forward, NestedForward)
    target.forward.planes.copy_(source.forward.planes)
    target.forward.scale.copy_(source.forward.scale)
    for ours, theirs in zip(state_tensors(target.state), state_tensors(source.state), strict=True):
        ours.copy_(theirs)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    try:
        main()
    except BitnestError as error:
        sys.exit(f"Error: {error}")
