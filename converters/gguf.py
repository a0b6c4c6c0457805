"""GGUF files as a source: metadata become a config, tensors get their Hugging Face names and order of rows back.

Covers the architectures `llama` (Mistral 7B included), `qwen2` and `qwen3`. Quantized tensors are dequantized to
float32, one at a time. Files of architecture `llama` store the query and key rows of each head with the two halves
of the rotary pairs interleaved; that is undone here, so the tensors equal those of the model the file was made from.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.converters.base import Inspection, Provenance, TensorInfo
from bitnest_format.converters.gguf_file import GGUF_MAGIC, GgufFile, GgufTensor, read_gguf
from bitnest_format.converters.gguf_tokenizer import write_tokenizer
from bitnest_format.converters.hf import Scan, count_non_finite, describe_non_finite, scan_all
from bitnest_format.errors import SourceError, UnsupportedModelError
from bitnest_format.shards import write_json

__all__ = ["GGUF_MAGIC", "GgufSource"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
INTERLEAVED = ("llama",)

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"^blk\.(\d+)\.")
LAYER_TENSOR = re.compile(r"^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")
ROPE_FACTORS = "rope_freqs.weight"

PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# What a dequantized tensor keeps where it stays unquantized: scales of GGUF blocks are float16 themselves.
DEQUANTIZED_TYPE = torch.float16
ELEMENTS_AT_ONCE = 1 << 22

# Where the float16 scales lie in a block, in bytes. Everything else in it is an integer, so a block whose scales are
# finite dequantizes to finite values. Types that are not listed are dequantized to find out.
SCALE_OFFSETS: Mapping[GGMLQuantizationType, tuple[int, ...]] = {
    GGMLQuantizationType.Q4_0: (0,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_0: (0,),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_NL: (0,),
    GGMLQuantizationType.IQ4_XS: (0,),
}

# Ways to write Llama 3's rotary scaling; published models use the first of each.
LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
LLAMA3_LOW_HIGH = ((1.0, 4.0),)


class GgufSource:
    """One GGUF file. `name` and `revision` are recorded where it came from the Hub.

    Raises `SourceError` (or `FileFormatError` for a damaged file) listing every reason why it cannot be read.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        ignore_unknown_tensors: bool = False,
    ):
        self.location = path
        self.notes: list[str] = []
        self._file = read_gguf(path)
        _refuse_by_kind(path.name, self._file)
        self.config: Mapping[str, Any] = _config(path.name, self._file)
        self.provenance = Provenance(
            kind="gguf", name=name, revision=revision, license=_text(self._file.metadata.get("general.license"))
        )
        try:
            architecture = read_architecture(self.config)
        except UnsupportedModelError as error:
            raise SourceError([f"{path.name}: {problem}" for problem in error.problems]) from error
        self._names, unknown = _hugging_face_names(self._file, architecture, self.notes)
        self._problems: list[str] = []
        known = architecture.tensors()
        unknown += [self._names.pop(name) for name in list(self._names) if name not in known]
        if unknown and ignore_unknown_tensors:
            self.notes.append(f"tensors unknown to {self._architecture} are left out: {', '.join(sorted(unknown))}")
        elif unknown:
            self._problems.append(
                f"{path.name}: {', '.join(sorted(unknown))}: not part of a {self._architecture} model, and leaving "
                f"{'it' if len(unknown) == 1 else 'them'} out may change what the model computes. "
                "Pass --ignore-unknown-tensors to leave them out."
            )
        used = {stored: self._file.tensors[stored].type for stored in self._names.values()}
        problems = [f"{path.name}: {problem}" for problem in _unreadable_types(used)]
        if problems:
            raise SourceError(problems)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=self._tensor(name).shape, dtype=PLAIN_TYPES.get(self._tensor(name).type, DEQUANTIZED_TYPE)
            )
            for name in known
            if name in self._names
        }
        packed = Counter(kind.name for kind in used.values() if kind not in PLAIN_TYPES)
        if packed:
            described = ", ".join(f"{count} x {kind}" for kind, count in sorted(packed.items()))
            self.notes.append(
                f"{path.name} is already quantized ({described}); the result cannot be better than it. An F16, BF16 or "
                "F32 file, or the original model, gives a better one"
            )

    @property
    def _architecture(self) -> str:
        return str(self._file.metadata["general.architecture"])

    def _tensor(self, name: str) -> GgufTensor:
        return self._file.tensors[self._names[name]]

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU: as stored for F32, F16 and BF16, otherwise dequantized to float32."""
        tensor = self._tensor(name)
        values = _decode(self._file.raw(tensor), tensor.type).view(tensor.shape)
        heads = self._interleaved_heads(name)
        return _undo_interleaving(values, heads) if heads else values

    def _interleaved_heads(self, name: str) -> int | None:
        if self._architecture not in INTERLEAVED:
            return None
        if ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".self_attn.k_proj." in name else None

    def inspect(self) -> Inspection:
        """Read every tensor once, in the order of the file."""
        names = sorted(self.tensors, key=lambda name: self._tensor(name).start)
        scans = scan_all(lambda name: _scan(self._file, self._tensor(name)), names)
        problems = [*self._problems]
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode("utf-8"))
        for name in self.tensors:
            if scans[name].bad:
                problems.append(
                    f"{self.location.name}: {self._names[name]}: {scans[name].bad}, expected finite weights. "
                    "Make the file again."
                )
        for name in sorted(self.tensors):
            tensor = self._tensor(name)
            digest.update(f"\n{name} {tensor.type.name} {list(tensor.shape)} {scans[name].sha256}".encode())
        return Inspection(problems=problems, fingerprint=digest.hexdigest())

    def write_side_files(self, folder: Path) -> list[str]:
        """Write the tokenizer with its chat template, and a generation config, as far as the metadata hold them."""
        written, notes = write_tokenizer(self._file.metadata, folder)
        self.notes += [f"{self.location.name}: {note}" for note in notes]
        fields = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {field: self.config[field] for field in fields if self.config.get(field) is not None}
        if generation:
            write_json(folder / "generation_config.json", generation)
            written.append("generation_config.json")
        return sorted(written)


def _refuse_by_kind(name: str, file: GgufFile) -> None:
    """Stop on files that hold no whole model, or one of another architecture."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise SourceError(
            f"{name}: is part {int(metadata.get('split.no', 0)) + 1} of {parts} of a split GGUF file. Join them first: "
            "llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        )
    if metadata.get("general.type", "model") != "model":
        raise SourceError(
            f"{name}: general.type is {metadata['general.type']!r}, expected 'model': a whole language model"
        )
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name}: general.architecture is {architecture!r}; supported in GGUF files are "
            f"{', '.join(ARCHITECTURES)}. If the original model is of a supported type, convert that instead."
        )
    if not file.tensors:
        raise SourceError(f"{name}: holds a vocabulary but no tensors; give the file with the weights")
    if metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(
            f"{name}: {architecture}.expert_count is {metadata[f'{architecture}.expert_count']}; mixtures of experts "
            "are not supported"
        )


def _prediction_layers(file: GgufFile) -> int:
    """How many of the counted layers only predict further tokens; they come last."""
    count = file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers", 0)
    return count if isinstance(count, int) else 0


class _Metadata:
    """Typed access to the keys of one architecture; remembers every problem."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata = metadata
        self.architecture = architecture
        self.problems: list[str] = []

    def count(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "missing" if value is None else repr(value)[:80]
            self.problems.append(f"{self.architecture}.{key} is {found}, expected a positive integer")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.problems.append(f"{self.architecture}.{key} is {value!r}, expected a number")
            return default
        return shortest_float32(value)


def _config(name: str, file: GgufFile) -> dict[str, Any]:
    """The `config.json` content that the metadata describe. Raises `SourceError` with every problem of theirs."""
    architecture = str(file.metadata["general.architecture"])
    fields = _Metadata(file.metadata, architecture)
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", default=max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, default=head_dim) != head_dim:
            fields.problems.append(
                f"{architecture}.{key} is {fields.count(key)}, expected {head_dim}, the size of a head"
            )
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count") - _prediction_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "vocab_size": embedding.shape[0] if embedding else fields.count("vocab_size"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "float16",
        **_rope(fields, file, head_dim),
    }
    if fields.problems:
        raise SourceError([f"{name}: {problem}" for problem in fields.problems])
    return config | _token_ids(file.metadata, config["vocab_size"])


def _token_ids(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Ids of the special tokens; `eos_token_id` is a list where several tokens end a turn or a message."""

    def named(kind: str) -> int | None:
        token = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return token if isinstance(token, int) and 0 <= token < vocab_size else None

    ends = list(dict.fromkeys(token for token in map(named, ("eos", "eot", "eom")) if token is not None))
    ids = {
        "bos_token_id": named("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": named("padding"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _rope(fields: _Metadata, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """`rope_theta` and, where positions are scaled, `rope_scaling`."""
    theta = fields.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta}
    prefix = f"{fields.architecture}.rope"
    kind = file.metadata.get(f"{prefix}.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" and f"{prefix}.scale_linear" in file.metadata and factor != 1:
        kind = "linear"
    if kind == "linear":
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        context = fields.count("rope.scaling.original_context_length")
        rope["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    elif kind != "none":
        fields.problems.append(f"{prefix}.scaling.type is {kind!r}, expected none, linear or yarn")
    if ROPE_FACTORS in file.tensors:
        factors = _decode(file.raw(file.tensors[ROPE_FACTORS]), file.tensors[ROPE_FACTORS].type).double().flatten()
        scaling = llama3_scaling(factors, theta, head_dim)
        if scaling is None or kind != "none":
            fields.problems.append(
                f"{ROPE_FACTORS}: its factors are not those of Llama 3's rotary scaling, and config.json has no other "
                "way to write them. Convert the original model instead."
            )
        elif scaling:
            rope["rope_scaling"] = scaling
    return rope


def llama3_scaling(factors: Tensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` record whose frequency divisors are `factors` `[head_dim / 2]`; {} where all are one.

    A frequency whose wavelength is below `original / high` stays, one above `original / low` is divided by the whole
    factor, those between are interpolated (Llama 3.1). None where no published combination gives these factors.
    """
    if len(factors) != head_dim // 2 or not bool(torch.isfinite(factors).all()):
        return None
    factor = shortest_float32(float(factors.max()))
    if factor == 1 and bool((factors == 1).all()):
        return {}
    for original in LLAMA3_CONTEXTS:
        for low, high in LLAMA3_LOW_HIGH:
            expected = llama3_factors(theta, head_dim, factor, low, high, original)
            if torch.allclose(factors, expected, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    return None


def llama3_factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> Tensor:
    """What Llama 3's scaling divides each rotary frequency by, float64 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelengths = 2 * math.pi * torch.tensor(theta, dtype=torch.float64) ** exponents
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _hugging_face_names(
    file: GgufFile, architecture: Architecture, notes: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Stored names by Hugging Face name, and the stored names that have none. Notes layers that are dropped."""
    outer = {
        "token_embd.weight": architecture.embedding,
        "output_norm.weight": architecture.final_norm,
        "output.weight": architecture.head,
    }
    layers = architecture.layers
    names: dict[str, str] = {}
    unknown: list[str] = []
    dropped: list[str] = []
    for stored in file.tensors:
        layer, match = LAYER.match(stored), LAYER_TENSOR.match(stored)
        if stored in outer:
            names[outer[stored]] = stored
        elif layer and layers <= int(layer[1]) < layers + _prediction_layers(file):
            dropped.append(stored)
        elif match and match[2] in LAYER_NAMES:
            names[f"{architecture.layer_prefix(int(match[1]))}{LAYER_NAMES[match[2]]}.{match[3]}"] = stored
        elif stored != ROPE_FACTORS and not stored.endswith("attn_rot_embd"):
            unknown.append(stored)
    if dropped:
        notes.append(f"extra prediction layers are dropped: {', '.join(sorted(dropped))}")
    return names, unknown


def _unreadable_types(tensors: Mapping[str, GGMLQuantizationType]) -> Iterator[str]:
    """Types that the `gguf` package cannot dequantize, found out on one block of zeros each; with their tensors."""
    for kind in dict.fromkeys(tensors.values()):
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            names = ", ".join(name for name, of in tensors.items() if of == kind)
            yield (
                f"{names}: stored as {kind.name}, which cannot be dequantized here. Give a file of another type, such "
                "as F16, BF16 or Q8_0."
            )


def _decode(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType) -> Tensor:
    """Stored bytes `[rows, bytes per row]` as values `[rows, row length]`: in the stored type, or in float32."""
    if kind in PLAIN_TYPES:
        return torch.from_numpy(raw).view(PLAIN_TYPES[kind])
    return torch.from_numpy(dequantize(raw, kind))


def _scan(file: GgufFile, tensor: GgufTensor) -> Scan:
    """Digest of the stored bytes, and the NaN and Inf values after dequantization."""
    digest = hashlib.sha256()
    not_a_number = infinite = 0
    total = math.prod(tensor.shape[:-1])
    step = max(1, ELEMENTS_AT_ONCE // tensor.shape[-1])
    for first in range(0, total, step):
        raw = file.raw(tensor, first, step)
        digest.update(raw.reshape(-1).data)
        if _scales_are_finite(raw, tensor.type):
            continue
        more = count_non_finite(_decode(raw, tensor.type))
        not_a_number, infinite = not_a_number + more[0], infinite + more[1]
    return Scan(digest.hexdigest(), describe_non_finite(not_a_number, infinite))


def _scales_are_finite(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType) -> bool:
    """Whether every block's scales are finite, where `SCALE_OFFSETS` says where they lie; otherwise False."""
    offsets = SCALE_OFFSETS.get(kind, ())
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    scales = [np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16) for offset in offsets]
    return bool(scales) and all(bool(np.isfinite(scale).all()) for scale in scales)


def _undo_interleaving(rows: Tensor, heads: int) -> Tensor:
    """Rows `[heads * head_dim, ...]`: of each head's pairs (0, 1), (2, 3), ... all first members, then all second."""
    values: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return values


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
