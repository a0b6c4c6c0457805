"""This converter beside llm-compressor's GPTQModifier: time, peak memory, and the 4-bit perplexity of both.

Both tools read the same Hugging Face folder and the same calibration token ids, quantize the same linear layers
with the same group size on the CPU, and write a checkpoint. Each run is a process of its own, with its own
interpreter, the tools taking turns. Our run does more: it rotates the model and writes both planes; the peer
writes W4A16. The peer runs with its defaults (static activation order, damping 0.01, blocks of 128, min-max
scales, batches of one sequence, layers in sequence), symmetric codes.

    python -m venv peer && peer/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python benchmarks/evaluation.py extract --out tokens.json
    python benchmarks/convert_vs_peers.py prepare --source MODEL.gguf --out model
    python benchmarks/convert_vs_peers.py run --model model --tokens tokens.json --peer-python peer/bin/python

*Whole process* is everything from the start of the interpreter to its end. *Conversion* starts when all modules
are imported and ends when the checkpoint lies on the disk; its memory is the peak above what the imports hold.
Memory is resident memory, the kernel's own high-water mark of the process (`VmHWM`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TOOLS = ("ours", "peer")
GROUP_SIZE = 64
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.command == "prepare":
        prepare(options.source, options.out, options.dtype)
    elif options.command == "run":
        compare(options)
    elif options.command == "worker":
        _work(options)
    else:
        _measure_quality(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{prepare,run}")
    prepare_command = commands.add_parser("prepare", help="write the folder that both tools read")
    prepare_command.add_argument("--source", type=Path, required=True, help="GGUF file or model folder")
    prepare_command.add_argument("--out", type=Path, required=True, help="folder to make")
    prepare_command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    run = commands.add_parser("run", help="convert with both tools, in turns, and compare")
    run.add_argument("--model", type=Path, required=True, help="folder made by prepare")
    run.add_argument("--tokens", type=Path, required=True, help="file made by evaluation.py extract")
    run.add_argument("--peer-python", type=Path, required=True, help="interpreter that has llmcompressor")
    run.add_argument("--our-python", type=Path, default=Path(sys.executable))
    run.add_argument("--runs", type=int, default=3, help="runs of each tool (default: %(default)s)")
    run.add_argument("--samples", type=int, default=64, help="calibration sequences (default: %(default)s)")
    run.add_argument("--group-size", type=int, default=GROUP_SIZE)
    run.add_argument("--only", choices=TOOLS, help="one tool alone")
    run.add_argument("--no-quality", action="store_true", help="leave the perplexities out")
    run.add_argument("--json", type=Path, help="write every figure here")
    worker = commands.add_parser("worker")
    worker.add_argument("tool", choices=TOOLS)
    quality = commands.add_parser("quality")
    for command in (worker, quality):
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--report", type=Path, required=True)
    worker.add_argument("--calibration", type=Path, required=True)
    worker.add_argument("--out", type=Path, required=True)
    worker.add_argument("--group-size", type=int, required=True)
    quality.add_argument("--tokens", type=Path, required=True)
    quality.add_argument("--ours", type=Path)
    quality.add_argument("--peer", type=Path)
    return parser


# --- the comparison -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process: seconds and bytes, for all of it and for the conversion alone.

    `disturbance` is the CPU seconds that other processes of the machine used meanwhile.
    """

    tool: str
    disturbance: float
    process_seconds: float
    process_peak: int
    conversion_seconds: float
    conversion_peak: int


def compare(options: argparse.Namespace) -> None:
    """Run both tools in turns and print medians, ratios and perplexities; see the module's text."""
    tools = [options.only] if options.only else list(TOOLS)
    pythons = {"ours": options.our_python, "peer": options.peer_python}
    with tempfile.TemporaryDirectory(prefix="convert-vs-peers-") as folder:
        work = Path(folder)
        calibration = work / "calibration.safetensors"
        _write_calibration(options, calibration)
        runs = []
        for number in range(options.runs):
            # Whoever goes first changes from turn to turn.
            for tool in tools if number % 2 == 0 else tools[::-1]:
                out = work / tool
                shutil.rmtree(out, ignore_errors=True)
                runs.append(_one_run(tool, pythons[tool], options, calibration, out))
                print(_describe(runs[-1]), file=sys.stderr)
        quality = {} if options.no_quality else _quality(options, {tool: work / tool for tool in tools}, work)
        versions = {tool: _version(pythons[tool], tool) for tool in tools}
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "samples": options.samples,
        "group_size": options.group_size,
        "versions": versions,
        "load_average": os.getloadavg(),
        "runs": [asdict(run) for run in runs],
        "perplexity": quality,
    }
    print(format_report(runs, quality))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _write_calibration(options: argparse.Namespace, path: Path) -> None:
    """In a process of its own: this one stays small and quick, it only watches."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import evaluation as e; from pathlib import Path; "
        "e.write_calibration(e.read_tokens(Path(sys.argv[2])).calibration[:int(sys.argv[3])], Path(sys.argv[4]))"
    )
    here = str(Path(__file__).parent)
    command = [options.our_python, "-c", code, here, options.tokens, options.samples, path]
    subprocess.run([str(part) for part in command], check=True)


def _one_run(tool: str, python: Path, options: argparse.Namespace, calibration: Path, out: Path) -> Run:
    report = out.with_suffix(".json")
    command = [python, __file__, "worker", tool, "--model", options.model, "--calibration", calibration]
    command += ["--out", out, "--group-size", options.group_size, "--report", report]
    others = _others_seconds()
    began = time.perf_counter()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, encoding="utf-8")
    seconds = time.perf_counter() - began
    others = _others_seconds() - others
    if done.returncode != 0:
        sys.exit(f"{tool} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    figures = json.loads(report.read_text(encoding="utf-8"))
    return Run(tool=tool, disturbance=max(others, 0.0), process_seconds=seconds, **figures)


def _others_seconds() -> float:
    """CPU seconds of the whole machine since it started, less those of this process's finished children."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    counts = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1 : 1 + len(names)]
    ticks = sum(int(n) for name, n in zip(names, counts, strict=True) if name not in ("idle", "iowait"))
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ticks / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


def _describe(run: Run) -> str:
    return (
        f"{run.tool}: {run.process_seconds:.1f} s ({run.conversion_seconds:.1f} s converting), "
        f"{run.process_peak / MIB:.0f} MiB ({run.conversion_peak / MIB:.0f} MiB converting), "
        f"others used {run.disturbance:.0f} s of CPU"
    )


def _quality(options: argparse.Namespace, outputs: Mapping[str, Path], work: Path) -> dict[str, dict[str, float]]:
    report = work / "quality.json"
    command = [options.our_python, __file__, "quality", "--model", options.model, "--tokens", options.tokens]
    command += ["--report", report]
    for tool, folder in outputs.items():
        command += [f"--{tool}", folder]
    subprocess.run([str(part) for part in command], check=True)
    figures: dict[str, dict[str, float]] = json.loads(report.read_text(encoding="utf-8"))
    return figures


def _version(python: Path, tool: str) -> str:
    first = "bitnest-format" if tool == "ours" else "llmcompressor"
    code = "import sys; from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in sys.argv[1:]))"
    command = [str(python), "-c", code, first, "torch", "transformers"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def format_report(runs: Sequence[Run], quality: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: medians (smallest to largest) of each tool, the ratio ours / peer, and the perplexities."""
    rows: dict[str, tuple[Callable[[Run], float], str]] = {
        "whole process, s": (lambda run: run.process_seconds, ".1f"),
        "whole process, peak MiB": (lambda run: run.process_peak / MIB, ".0f"),
        "conversion, s": (lambda run: run.conversion_seconds, ".1f"),
        "conversion, peak MiB above imports": (lambda run: run.conversion_peak / MIB, ".0f"),
    }
    lines = ["| median of runs (range) | ours | peer | ours / peer |", "|---|---|---|---|"]
    for label, (value, style) in rows.items():
        values = {tool: [value(run) for run in runs if run.tool == tool] for tool in TOOLS}
        cells = [_spread(values[tool], style) for tool in TOOLS]
        both = all(values.values())
        ratio = f"{statistics.median(values['ours']) / statistics.median(values['peer']):.2f}" if both else ""
        lines.append(f"| {label} | {cells[0]} | {cells[1]} | {ratio} |")
    if quality:
        lines += ["", "| 4-bit weights, activations as they are | code ppl | chat ppl |", "|---|---|---|"]
        lines += [f"| {name} | {row['code']:.4f} | {row['chat']:.4f} |" for name, row in quality.items()]
    return "\n".join(lines)


def _spread(values: Sequence[float], style: str) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):{style}} ({min(values):{style}}-{max(values):{style}})"


# --- one conversion, in a process of its own -----------------------------------------------------------------


def _work(options: argparse.Namespace) -> None:
    """Convert with one tool and report seconds and bytes; runs under that tool's interpreter."""
    convert = _ours(options) if options.tool == "ours" else _peer(options)
    held = _resident("VmRSS")
    began = time.perf_counter()
    convert()
    seconds = time.perf_counter() - began
    peak = _resident("VmHWM")
    figures = {"process_peak": peak, "conversion_seconds": seconds, "conversion_peak": peak - held}
    options.report.write_text(json.dumps(figures), encoding="utf-8")


def _ours(options: argparse.Namespace) -> Callable[[], None]:
    from bitnest_format.converters.options import ConvertOptions
    from bitnest_format.converters.pipeline import convert
    from bitnest_format.converters.sources import open_source

    choices = ConvertOptions(
        group_size=options.group_size,
        calibration=str(options.calibration),
        calibration_samples=sys.maxsize,
    )

    def run() -> None:
        convert(open_source(options.model), options.out, choices)

    return run


def _peer(options: argparse.Namespace) -> Callable[[], None]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def run() -> None:
        ids = load_file(options.calibration)["input_ids"].tolist()
        data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        # The preset W4A16 with another group size.
        weights = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=options.group_size)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        oneshot(
            model=model,
            tokenizer=tokenizer,
            dataset=data,
            recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
            num_calibration_samples=len(ids),
            max_seq_length=len(ids[0]),
        )
        model.save_pretrained(options.out, save_compressed=True)
        tokenizer.save_pretrained(options.out)

    return run


def _resident(field: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` the most this process has held since it was loaded."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


# --- quality ------------------------------------------------------------------------------------------------


def _measure_quality(options: argparse.Namespace) -> None:
    """Perplexities of the source and of both tools' 4-bit weights, in float32 without rounding activations."""
    sys.path.insert(0, str(Path(__file__).parent))
    import evaluation

    tokens = evaluation.read_tokens(options.tokens)
    config, weights = evaluation.read_source(options.model)
    views = {"source": lambda: evaluation.fake_quant_model(config, weights, activation_bits=None)}
    if options.ours:
        views["ours, draft view"] = lambda: evaluation.load_views(options.ours, activation_bits=None)[0]
    if options.peer:
        peer = peer_weights(options.peer)
        views["llm-compressor"] = lambda: evaluation.fake_quant_model(config, peer, activation_bits=None)
    figures = {}
    for name, build in views.items():
        view = build()
        figures[name] = {part: evaluation.perplexity(view, getattr(tokens, part)) for part in ("code", "chat")}
    options.report.write_text(json.dumps(figures), encoding="utf-8")


def peer_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a compressed-tensors `pack-quantized` checkpoint, float32, its 4-bit modules dequantized.

    Its layout is the one of our base plane, so `nesting` and `packing` read it as it is.
    """
    from safetensors.torch import load_file

    from bitnest_format import nesting, packing

    stored: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored |= load_file(shard)
    result = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            scale = stored[f"{module}.weight_scale"].float()
            result[f"{module}.weight"] = nesting.draft_weight(packing.unpack(tensor), scale)
        elif not suffix.startswith("weight_"):
            result[name] = tensor.float()
    return result


# --- the folder that both tools read ------------------------------------------------------------------------


def prepare(source: Path, folder: Path, dtype_name: str) -> None:
    """Write `source` as a plain Hugging Face folder: one safetensors file, config, tokenizer."""
    import torch
    from safetensors.torch import save_file

    from bitnest_format.converters.sources import open_source

    opened = open_source(source)
    folder.mkdir(parents=True)
    opened.write_side_files(folder)
    dtype = getattr(torch, dtype_name)
    tensors = {name: opened.read(name).to(dtype).contiguous() for name in opened.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**opened.config, "torch_dtype": dtype_name, "dtype": dtype_name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
