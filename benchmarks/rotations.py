"""Rotations against each other: none, random, Hadamard and learned, by what the views are worth in the end.

Every rotation is put into a conversion with the default options and groups of 64 and evaluated by the protocol of
`evaluation.py`; random ones with several seeds, since they differ among themselves. Beside that, each one's own loss:
cross-entropy with 4-bit weights rounded to nearest and INT8 activations, which is what learning lowers, on the
calibration sequences that learning never sees; and what other rates and numbers of steps make of it. Jobs are processes
of their own, `--workers` at a time: a conversion mostly waits for small kernels, so one GPU serves several.

    python benchmarks/evaluation.py extract --out tokens.json --calibration-out calibration.safetensors
    python benchmarks/rotations.py --source MODEL --tokens tokens.json --calibration calibration.safetensors
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from evaluation import CALIBRATION_SHAPE, Tokens, read_tokens
from frontier import COLUMNS, machine, variant

from bitnest_format.architecture import read_architecture
from bitnest_format.converters import learn
from bitnest_format.converters.learn_loss import RotatedLoss
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.rotation import make_rotation, sizes_without_hadamard
from bitnest_format.converters.sources import open_source

GROUP_SIZE = 64
SEEDS = (0, 1, 2)
# Learning alone, beside the default that is converted: (steps, rate).
LEARNED_OTHERWISE = ((100, 0.05), (100, 0.2), (100, 0.6), (100, 4.0), (200, 1.5), (400, 1.5))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    began = time.perf_counter()
    document: dict[str, Any] = {"machine": machine(), "command": sys.argv, "rows": [], "losses": [], "failed": []}
    context = multiprocessing.get_context("spawn")
    jobs = list(_jobs(options))
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        running: dict[Future[tuple[str, Any]], str] = {}
        while jobs or running:
            while jobs and len(running) < options.workers and time.perf_counter() - began < options.seconds:
                name, *job = jobs[0]
                try:
                    running[pool.submit(_run, options, *job)] = name
                except BrokenProcessPool:
                    # A job was killed, for memory perhaps; what is finished is reported.
                    break
                del jobs[0]
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                if future.exception() is not None:
                    document["failed"].append({"name": name, "error": repr(future.exception())})
                    print(f"{name}: {future.exception()!r}", flush=True)
                else:
                    key, found = future.result()
                    document[key] += found
                    print(f"[{time.perf_counter() - began:.0f} s] {name}", flush=True)
                document["seconds"] = round(time.perf_counter() - began, 1)
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if jobs:
        print(f"not run: {', '.join(name for name, *_ in jobs)}")
    print(report(document))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder or GGUF file of the model")
    parser.add_argument("--tokens", type=Path, required=True, help="file made by evaluation.py extract")
    parser.add_argument("--calibration", type=Path, required=True, help="token ids made by evaluation.py extract")
    parser.add_argument("--json", type=Path, required=True, help="write all figures here, after every job")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no job after this long")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="rotations of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=ConvertOptions().learn_steps, help="of learning, where converted")
    parser.add_argument("--rate", type=float, default=ConvertOptions().learn_rate)
    parser.add_argument("--tiny", action="store_true", help="few tokens, no sweeps: to see that all of it runs")
    return parser


def _jobs(options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """`(name, function, arguments...)`, what matters most first, long ones before short ones."""
    kinds = ["learn", "hadamard", "random"]
    if sizes_without_hadamard(read_architecture(open_source(options.source).config)):
        kinds.remove("hadamard")
    for seed in range(options.seeds):
        for kind in kinds:
            yield f"{kind}, seed {seed}", _converted, f"{kind}, seed {seed}", {"rotation": kind, "seed": seed}
        if seed == 0:
            yield "none", _converted, "none", {"rotation": "none"}
    yield "losses", _losses
    for steps, rate in LEARNED_OTHERWISE[:1] if options.tiny else LEARNED_OTHERWISE:
        yield f"learn, {steps} steps at {rate}", _learned, 2 if options.tiny else steps, rate


def _run(options: argparse.Namespace, job: Any, *arguments: Any) -> tuple[str, Any]:
    """Runs in a process of its own, with its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    result: tuple[str, Any] = job(options, *arguments)
    return result


def _converted(options: argparse.Namespace, name: str, changes: dict[str, Any]) -> tuple[str, Any]:
    learning = {"learn_steps": options.steps, "learn_rate": options.rate}
    shared = {"group_size": GROUP_SIZE, "calibration": str(options.calibration), **learning, **changes}
    tokens = read_tokens(options.tokens)
    if options.tiny:
        shared |= {"calibration_samples": 2, "sequence_length": 64, "base_sweeps": 0, "refinement_sweeps": 0}
        tokens = Tokens(tokens.calibration, tokens.chat[:1, :64], tokens.code[:1, :64], tokens.prefixes[:1, :8])
    return "rows", [variant(name, shared, options.source, tokens, options.device)]


def _losses(options: argparse.Namespace) -> tuple[str, Any]:
    """The loss of rotations that nobody learned, on the sequences that learning keeps out."""
    source = open_source(options.source)
    architecture = read_architecture(source.config, source.tensors)
    held, _ = learn.split_sequences(_calibration(options))
    loss = RotatedLoss(source, architecture, _groups(architecture), options.device)
    found = []
    for kind in ("none", "random", "hadamard"):
        for seed in range(1 if kind == "none" else options.seeds):
            if kind == "hadamard" and sizes_without_hadamard(architecture):
                continue
            made = make_rotation(kind, None, seed, architecture)
            r1 = made.r1 if made else torch.eye(architecture.hidden_size)
            r2 = [made.r2(n) if made else torch.eye(architecture.head_dim) for n in range(architecture.layers)]
            matrices = [r1.to(options.device), torch.stack(r2).to(options.device)]
            found.append({"name": kind, "seed": seed, "loss": learn.mean_loss(loss, held, matrices)})
    return "losses", found


def _learned(options: argparse.Namespace, steps: int, rate: float) -> tuple[str, Any]:
    """Learning alone."""
    source = open_source(options.source)
    architecture = read_architecture(source.config, source.tensors)
    began = time.perf_counter()
    learned = learn.learn_rotation(
        source,
        architecture,
        _calibration(options),
        _groups(architecture),
        steps=steps,
        rate=rate,
        device=options.device,
    )
    row: dict[str, Any] = {
        "name": f"learned, {steps} steps at {rate}",
        "seed": 0,
        "loss": learned.after,
        "loss_before": learned.before,
        "loss_unquantized": learned.unquantized,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if options.device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return "losses", [row]


def _calibration(options: argparse.Namespace) -> torch.Tensor:
    ids = read_tokens(options.tokens).calibration
    assert tuple(ids.shape) == CALIBRATION_SHAPE
    return ids[:2, :64] if options.tiny else ids


def _groups(architecture: Any) -> dict[str, int]:
    return {name: GROUP_SIZE for name, _ in architecture.modules()}


def report(document: dict[str, Any]) -> str:
    """All rows, each kind's mean and range over its seeds, and the losses, as Markdown."""
    rows = sorted(document["rows"], key=lambda row: str(row["name"]))
    columns = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows)}
    lines = [f"| rotation | {' | '.join(title for title, _ in columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = (format(row[key], style) if key in row else "" for key, (_, style) in columns.items())
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    for kind in dict.fromkeys(row["name"].partition(",")[0] for row in rows):
        same = [row for row in rows if row["name"].partition(",")[0] == kind]
        if len(same) > 1:
            cells = (_mean_and_range([row[key] for row in same], style) for key, (_, style) in columns.items())
            lines.append(f"| **{kind}**, {len(same)} seeds | {' | '.join(cells)} |")
    lines += ["", "| rounding loss, nats a token, on text kept out | loss | s | peak GiB |", "|---|---|---|---|"]
    lines += [
        f"| {loss['name']}, seed {loss['seed']} | {loss['loss']:.4f} | {loss.get('seconds', '')} "
        f"| {loss.get('peak_gib', '')} |"
        for loss in document["losses"]
    ]
    for row in rows:
        if "learned_rotation" in row:
            learning = row["learned_rotation"]
            lines.append(
                f"| {row['name']}, {learning['steps']} steps at {learning['rate']} | {learning['loss_after']:.4f} "
                f"(from {learning['loss_before']:.4f}; unquantized {learning['loss_unquantized']:.4f}) | | |"
            )
    return "\n".join([*lines, "", f"{document.get('seconds')} s in all; {json.dumps(document['machine'])}"])


def _mean_and_range(values: Sequence[float], style: str) -> str:
    return f"{statistics.mean(values):{style}} ({min(values):{style}}-{max(values):{style}})"


if __name__ == "__main__":
    main()
