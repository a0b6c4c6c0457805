"""What a model's folder says about its quantization, and which of the known packed formats that makes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bitnest_format.converters.compressed_tensors import CompressedTensorsFormat
from bitnest_format.converters.gptq import GptqFormat
from bitnest_format.converters.packed import PackedFormat, listed
from bitnest_format.errors import FileFormatError
from bitnest_format.shards import read_json

CONFIG_FILE = "config.json"
CONFIG_KEYS = ("quantization_config", "compression_config")
GPTQ_FILE = "quantize_config.json"
QUANTIZATION_FILES = (GPTQ_FILE, "quant_config.json", "hf_quant_config.json")
QUANTIZED_NAMES = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8 or int8",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
READ = "expected plain fp32, fp16 or bf16 weights, or a symmetric 4-bit GPTQ or compressed-tensors model"
INSTEAD = "Give the original model instead."


def stated_settings(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every description of the quantization by its place, in the order in which they are to be believed."""
    found: dict[str, Any] = {}
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in CONFIG_KEYS:
            if part.get(key):
                found.setdefault(f"{CONFIG_FILE}: {key}", part[key])
    for file in QUANTIZATION_FILES:
        if (folder / file).is_file():
            try:
                found[file] = read_json(folder / file)
            except FileFormatError:
                found[file] = {}
    return found


def find_format(settings: Mapping[str, Any]) -> tuple[PackedFormat | None, list[str]]:
    """The packed format that the descriptions name, or why the model cannot be converted; neither for plain models."""
    if not settings:
        return None, []
    place, first = next(iter(settings.items()))
    method = _method(first) or ("gptq" if place == GPTQ_FILE else None)
    if method == "gptq":
        return GptqFormat({where: stated for where, stated in settings.items() if isinstance(stated, Mapping)}), []
    if method == "compressed-tensors":
        return CompressedTensorsFormat(place, first), []
    return None, [f"{place}: {_already_quantized(method)}"]


def format_by_names(names: Iterable[str]) -> tuple[PackedFormat | None, list[str]]:
    """The same from the names of the tensors alone, where nothing is stated."""
    names = list(names)
    if any(name.endswith(".qweight") for name in names) and any(name.endswith(".scales") for name in names):
        return GptqFormat({}), []
    for suffix, method in QUANTIZED_NAMES.items():
        found = [name for name in names if name.endswith(suffix)]
        if found:
            return None, [
                f"{listed(found, 3)}: looks already quantized ({method}), though no file says so; {READ}. {INSTEAD}"
            ]
    return None, []


def _method(settings: Any) -> str | None:
    if not isinstance(settings, Mapping):
        return None
    inner = settings.get("quantization")
    if isinstance(inner, Mapping) and inner.get("quant_algo"):
        return str(inner["quant_algo"])
    named = settings.get("quant_method") or settings.get("method")
    if named:
        return str(named)
    if "config_groups" in settings:
        return "compressed-tensors"
    if "desc_act" in settings:
        return "gptq"
    return "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & set(settings) else None


def _already_quantized(method: str | None) -> str:
    if method == "bitnest":
        return "quant_method is 'bitnest': the model is already converted. Load it, or give the original model."
    found = f"the model is already quantized with {method!r:.80}" if method else "the model is already quantized"
    return f"{found}, {READ}. {INSTEAD}"
