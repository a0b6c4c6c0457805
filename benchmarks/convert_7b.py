"""A LLaMA-2-7B-shaped conversion: time by stage, memory, and the machine it ran on.

python benchmarks/convert_7b.py --device cuda --output result.json

Makes a random checkpoint of that shape in fp16 in a temporary folder, converts it through the public API with the
default options on 64 x 512 random token ids, and prints the seconds of each stage as JSON and as a table. `--layers N`
shortens the model, `--shape tiny` tries the script out. Stages of the main thread wait for the GPU at their ends;
hashing and writing of parts run beside them, so all stages add up to more than the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from bitnest_format.architecture import read_architecture
from bitnest_format.converters import gptq_solver, pipeline, quantize, work_folder
from bitnest_format.converters.float_model import FloatModel
from bitnest_format.converters.folded_source import FoldedSource
from bitnest_format.converters.hf import HuggingFaceSource
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import ConversionResult, convert
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import BitnestError
from bitnest_format.shards import Pending, tensor_bytes, write_json, write_shard
from bitnest_format.validation import validate

SHAPES = {
    "llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "layers": 32, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "heads": 4, "layers": 2, "vocab_size": 512},
}
SAMPLES, LENGTH = 64, 512

# What is timed: a label, where a function is looked up, and its name. An indented label is part of the one above it.
STAGES: tuple[tuple[str, Any, str], ...] = (
    ("preflight (reads and hashes the source)", pipeline, "preflight"),
    ("rotation", pipeline, "make_rotation"),
    ("read (beside, on a GPU)", HuggingFaceSource, "read"),
    ("fold layers", FoldedSource, "fold_layer"),
    ("calibrate (forward and Hessians)", FloatModel, "run_layer"),
    ("quantize layers", pipeline._Conversion, "_quantize_layer"),
    ("  factor", quantize, "inverse_factor"),
    ("  solve base", gptq_solver, "solve_base"),
    ("    scale search", gptq_solver, "group_scales"),
    ("    walks, both planes", gptq_solver, "_walk"),
    ("    sweeps, both planes", gptq_solver, "_sweep"),
    ("  solve refinement", gptq_solver, "solve_refinement"),
    ("  pack", pipeline, "stored_planes"),
    ("  measure errors", pipeline, "measure"),
    ("hash planes (beside)", pipeline, "module_record"),
    ("write parts (beside)", work_folder, "write_shard"),
    ("assemble shards", pipeline._Conversion, "assemble"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-2-7b")
    parser.add_argument("--layers", type=int, help="Decoder layers; the shape's own if left out.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--folder", type=Path, help="Where the temporary folder is made; about 35 GB for all layers.")
    parser.add_argument("--output", type=Path, help="Write the JSON here as well.")
    parser.add_argument("--no-stages", action="store_true", help="Time the whole alone: nothing waits for the GPU.")
    parser.add_argument("--validate", action="store_true", help="Check the result with all digests; not timed.")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("Error: --device cuda: torch finds no CUDA device here. Use --device cpu.")
    with tempfile.TemporaryDirectory(prefix="bitnest-7b-", dir=given.folder) as folder:
        figures = measure(Path(folder), given)
    text = json.dumps(figures, indent=2)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    print(table(figures))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Make the model, convert it, and return every figure."""
    sizes = {**SHAPES[given.shape], **({"layers": given.layers} if given.layers else {})}
    began = time.perf_counter()
    ids = make_model(folder / "source", sizes)
    made = time.perf_counter() - began
    print(f"made the model in {made:.0f} s", file=sys.stderr, flush=True)
    options = ConvertOptions(
        calibration=str(ids), calibration_samples=SAMPLES, sequence_length=LENGTH, device=given.device
    )
    cuda = given.device == "cuda"
    if cuda:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    seconds: dict[str, float] = defaultdict(float)
    before = _peak_rss()
    with _Memory() as memory, timed_stages(None if given.no_stages else seconds, cuda):
        result = convert(open_source(folder / "source"), folder / "out", options, progress=_report)
    if given.validate:
        findings = validate(folder / "out", deep=True)
        if findings:
            raise BitnestError(f"the result is invalid: {findings[0]}")
    return {
        "machine": machine(given.device),
        "shape": sizes,
        "calibration_tokens": SAMPLES * LENGTH,
        "seconds": round(result.seconds, 2),
        "stages": {label: round(seconds[label], 2) for label, *_ in STAGES if label in seconds},
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_gpu_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_rss_bytes": _peak_rss(),
        "rss_before_bytes": before,
        # Pages of the page cache do not count here, as they do not in the resident size.
        "peak_anonymous_bytes": memory.peak,
        "made_in_seconds": round(made, 1),
        "valid": True if given.validate else None,
        **_quality(result),
    }


def make_model(folder: Path, sizes: dict[str, int]) -> Path:
    """A random fp16 checkpoint in shards of about 5 GB, and token ids to calibrate on; returns the ids' file."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "num_hidden_layers": sizes["layers"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    write_json(folder / "config.json", config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def chunks(name: str, shape: tuple[int, ...]) -> Callable[[], list[memoryview]]:
        def make() -> list[memoryview]:
            values = torch.randn(shape, generator=generator, device=device)
            values = 1 + 0.1 * values if name.endswith("norm.weight") else values.mul_(0.02)
            return [tensor_bytes(values.half())]

        return make

    shapes = read_architecture(config).tensors()
    runs: list[dict[str, Pending]] = [{}]
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if sum(tensor.size for tensor in runs[-1].values()) + size > 5_000_000_000:
            runs.append({})
        runs[-1][name] = Pending("F16", shape, size, chunks(name, shape))
    weight_map = {}
    for number, run in enumerate(runs, 1):
        file = f"model-{number:05d}-of-{len(runs):05d}.safetensors"
        write_shard(folder / file, run, {})
        weight_map |= dict.fromkeys(run, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    ids = torch.randint(0, sizes["vocab_size"], (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    file = folder.parent / "ids.safetensors"
    shape = (SAMPLES, LENGTH)
    write_shard(file, {"input_ids": Pending("I64", shape, 8 * SAMPLES * LENGTH, lambda: [tensor_bytes(ids)])}, {})
    return file


@contextmanager
def timed_stages(seconds: dict[str, float] | None, cuda: bool) -> Iterator[None]:
    """Add up the time that each stage takes, for the length of a block; nothing where `seconds` is not wanted."""
    kept = []
    for label, owner, name in STAGES if seconds is not None else ():
        function = getattr(owner, name)
        kept.append((owner, name, function))
        setattr(owner, name, _timed(function, label, seconds, cuda))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _timed(function: Callable[..., Any], label: str, seconds: dict[str, float], cuda: bool) -> Callable[..., Any]:
    lock = threading.Lock()

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # Other threads do no work on the GPU.
        wait = torch.cuda.synchronize if cuda and threading.current_thread() is threading.main_thread() else int
        wait()
        began = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            wait()
            with lock:
                seconds[label] += time.perf_counter() - began

    return call


class _Memory:
    """Samples this process's anonymous memory ten times a second, and keeps the largest."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.peak = max(self.peak, _anonymous_bytes())

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(found[0]) if found else 0


def _peak_rss() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _quality(result: ConversionResult) -> dict[str, Any]:
    summary = result.to_dict()
    return {name: summary[name] for name in ("mean_draft_error", "mean_target_error", "mean_saturation", "warnings")}


def machine(device: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _report(stage: str, done: int, total: int) -> None:
    print(f"{time.strftime('%H:%M:%S')} {stage} {done}/{total}", file=sys.stderr, flush=True)


def table(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    rows = [*figures["stages"].items(), ("whole conversion", figures["seconds"])]
    lines = [f"{label:<44}{seconds:>10.1f} s" for label, seconds in rows]
    for label, name in (
        ("peak GPU memory", "peak_gpu_bytes"),
        ("peak GPU memory, reserved", "peak_gpu_reserved_bytes"),
        ("peak memory of the process", "peak_rss_bytes"),
        ("its anonymous part", "peak_anonymous_bytes"),
    ):
        if figures[name]:
            lines.append(f"{label:<44}{figures[name] / 1e9:>10.2f} GB")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except BitnestError as error:
        sys.exit(f"Error: {error}")
