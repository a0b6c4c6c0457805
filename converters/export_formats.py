"""What each export format makes of a quantized module: its tensors, and the config that names them. Pure functions.

A module's planes map onto other formats without a code being computed anew. compressed-tensors `pack-quantized` words
of 4-bit codes are the base plane itself, and GPTQ's `qweight` is its transpose; at 8 bits both hold the composed codes
with the scale `s4 / 16`. `hf` is the plain weight. `FORMATS` is the table of all of them.

Shapes: `O` outputs, `I` inputs, `G` groups. Words are int32, the first input in the lowest bits, a code stored as
`code + 2^(bits - 1)`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bitnest_format import __version__, nesting, packing
from bitnest_format.checkpoint import BASE_SUFFIX, SCALE_SUFFIX, NestedWeight, View
from bitnest_format.manifest import Module

Activations = Literal["none", "int8"]

PACKED = "pack-quantized"
WORD_BITS = 32
# Rows of a weight that are dequantized at a time.
ROW_PIECE_WEIGHTS = 1 << 24
PER_ROW = -1


class StoredModule(Protocol):
    """A quantized module as an export reads it; each call reads from disk."""

    def weight(self) -> NestedWeight: ...

    def scale(self) -> Tensor: ...

    def permutation(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One tensor of an exported module, `<module>.<suffix>`.

    `pieces` gives its content along the first dimension; floating-point pieces are float32, exact, and are rounded to
    `dtype` by whoever writes them.
    """

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[StoredModule], Iterable[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What the config of an export is made of.

    `modules` by name; `head` is the head's name, quantized or not; `per_row` says that the checkpoint has one group per
    row; `unquantized` names the linear layers that stay plain.
    """

    modules: Mapping[str, Module]
    head: str
    per_row: bool
    unquantized: tuple[str, ...]
    view: View
    activations: Activations = "none"

    @property
    def bits(self) -> int:
        return BITS[self.view]

    def group_sizes(self) -> dict[str, int]:
        """Group size by module, -1 for one group per row."""
        return {name: PER_ROW if self.per_row else module.group_size for name, module in self.modules.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """One row of `FORMATS`.

    views: what it can hold, the default first. tensors: the layout of one module, given its record, the view, and the
    type of its values (of scales, or of plain weights). config: the `quantization_config`, or None for plain weights;
    config_copy: a file that repeats it. scale_types: those in which scales can be stored, the widest last.
    keeps_base: base planes are stored as they are. packs_outputs: something is packed along outputs, which then have
    to fill words. permutations, activations: whether there is a word for input permutations and quantized inputs.
    """

    views: tuple[View, ...]
    tensors: Callable[[Module, View, torch.dtype], list[ExportedTensor]]
    config: Callable[[Quantized], dict[str, Any] | None]
    scale_types: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    keeps_base: bool = False
    packs_outputs: bool = False
    permutations: bool = False
    activations: bool = False
    config_copy: str | None = None

    @property
    def plain(self) -> bool:
        """Whether weights are dequantized."""
        return not self.scale_types


BITS: Mapping[View, int] = {"draft": 4, "target": 8}


def step(scale: Tensor, view: View) -> Tensor:
    """The value of one code of a view: float32 of the shape of `scale`; `s4`, or exactly `s4 / 16`."""
    return scale.float() if view == "draft" else scale.float() / nesting.STEPS_PER_BASE_STEP


def deviation(values: Tensor, dtype: torch.dtype) -> float:
    """The largest relative change of float32 `values` when they are rounded to `dtype`; inf where one does not fit."""
    rounded = values.to(dtype).float()
    if not bool((torch.isfinite(rounded) & (rounded > 0)).all()):
        return float("inf")
    return float(((rounded.double() - values.double()).abs() / values.double()).max()) if values.numel() else 0.0


def pack_bytes(codes: Tensor) -> Tensor:
    """int8 codes `[..., I]` -> int32 words `[..., I / 4]` of `code + 128`, the first input in the lowest byte."""
    return (codes.to(torch.int16) + 128).to(torch.uint8).contiguous().view(torch.int32)


def words(weight: NestedWeight, view: View) -> Tensor:
    """The codes of a view, packed along stored columns: int32 `[O, I * bits / 32]`. A draft's are the base plane."""
    return weight.base if view == "draft" else pack_bytes(weight.target_codes())


def in_source_order(columns: Tensor, permutation: Tensor | None) -> Tensor:
    """`[..., I]` with its columns where the source has them: stored column `j` belongs to input `permutation[j]`."""
    if permutation is None:
        return columns
    ordered = torch.empty_like(columns)
    ordered[..., permutation.long()] = columns
    return ordered


def words_in_source_order(weight: NestedWeight, view: View) -> Tensor:
    """`words` with the columns back where the source has them."""
    if weight.permutation is None:
        return words(weight, view)
    if view == "draft":
        return packing.pack(in_source_order(weight.base_codes(), weight.permutation))
    return pack_bytes(in_source_order(weight.target_codes(), weight.permutation))


def group_index(inputs: int, group_size: int, permutation: Tensor | None) -> Tensor:
    """The group of every input in the source's order: int32 `[I]`."""
    return in_source_order(torch.arange(inputs, dtype=torch.int32) // group_size, permutation)


def dequantized(weight: NestedWeight, view: View) -> Iterator[Tensor]:
    """The weight of a view in the source's order of columns, some rows at a time: float32 `[r, I]`."""
    outputs, inputs = weight.base.shape[0], weight.base.shape[1] * packing.CODES_PER_WORD
    rows = max(1, ROW_PIECE_WEIGHTS // inputs)
    for first in range(0, outputs, rows):
        yield in_source_order(weight.rows(slice(first, first + rows)).dequantize(view), weight.permutation)


def _compressed_tensors(module: Module, view: View, dtype: torch.dtype) -> list[ExportedTensor]:
    outputs, inputs = module.shape
    return [
        ExportedTensor(
            suffix=BASE_SUFFIX,
            dtype=torch.int32,
            shape=(outputs, inputs * BITS[view] // WORD_BITS),
            pieces=lambda stored: [words(stored.weight(), view)],
        ),
        ExportedTensor(
            suffix=SCALE_SUFFIX,
            dtype=dtype,
            shape=(outputs, module.groups),
            pieces=lambda stored: [step(stored.scale(), view)],
        ),
        ExportedTensor(
            suffix="weight_shape",
            dtype=torch.int64,
            shape=(2,),
            pieces=lambda stored: [torch.tensor(module.shape, dtype=torch.int64)],
        ),
    ]


def _gptq(zero_offset: int) -> Callable[[Module, View, torch.dtype], list[ExportedTensor]]:
    """The layout of GPTQ; version 1 stores zero points less one (`zero_offset` 1), version 2 as they are."""

    def tensors(module: Module, view: View, dtype: torch.dtype) -> list[ExportedTensor]:
        outputs, inputs = module.shape
        bits = BITS[view]
        zero = (1 << (bits - 1)) - zero_offset
        zeros = (module.groups, outputs * bits // WORD_BITS)
        # The same field over and over, as the signed number that the word is.
        word = int.from_bytes(sum(zero << shift for shift in range(0, WORD_BITS, bits)).to_bytes(4), signed=True)
        return [
            ExportedTensor(
                suffix="qweight",
                dtype=torch.int32,
                shape=(inputs * bits // WORD_BITS, outputs),
                pieces=lambda stored: [words_in_source_order(stored.weight(), view).T],
            ),
            ExportedTensor(
                suffix="qzeros",
                dtype=torch.int32,
                shape=zeros,
                pieces=lambda stored: [torch.full(zeros, word, dtype=torch.int32)],
            ),
            ExportedTensor(
                suffix="scales",
                dtype=dtype,
                shape=(module.groups, outputs),
                pieces=lambda stored: [step(stored.scale(), view).T],
            ),
            ExportedTensor(
                suffix="g_idx",
                dtype=torch.int32,
                shape=(inputs,),
                pieces=lambda stored: [group_index(inputs, module.group_size, stored.permutation())],
            ),
        ]

    return tensors


def _plain(module: Module, view: View, dtype: torch.dtype) -> list[ExportedTensor]:
    return [
        ExportedTensor(
            suffix="weight",
            dtype=dtype,
            shape=module.shape,
            pieces=lambda stored: dequantized(stored.weight(), view),
        )
    ]


def _compressed_tensors_config(export: Quantized) -> dict[str, Any]:
    """Only the keys that readers of every version know: newer ones have made older servers refuse a file."""
    groups = [_config_group(export, size, targets) for size, targets in _targets(export)]
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(export.unquantized),
        "kv_cache_scheme": None,
    }


def _config_group(export: Quantized, group_size: int, targets: list[str]) -> dict[str, Any]:
    grouped = {"strategy": "channel"} if group_size == PER_ROW else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": export.bits, "type": "int", "symmetric": True, **grouped, "dynamic": False}
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    if export.activations == "none":
        return group
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    # Readers take weights beside quantized inputs for unpacked ones unless the group says otherwise.
    return {**group, "input_activations": inputs, "format": PACKED}


def _targets(export: Quantized) -> list[tuple[int, list[str]]]:
    """Which modules have which group size, the most common size first: by class if there is one size, else by name."""
    sizes = export.group_sizes()
    counts = Counter(sizes.values()).most_common()
    if len(counts) == 1:
        return [(counts[0][0], ["Linear"])]
    return [(size, [_target(key) for key in _keys(sizes, size)]) for size, _ in counts]


def _target(key: str) -> str:
    """compressed-tensors' way to name a module, or every module whose last name follows a dot."""
    return rf"re:.*\.{re.escape(key[1:])}$" if key.startswith(".") else key


def _keys(sizes: Mapping[str, int], size: int) -> list[str]:
    """All modules of one group size: by their last name with its dot, by full name where a last name has two sizes."""
    kinds: dict[str, set[int]] = {}
    for name, found in sizes.items():
        kinds.setdefault(name.rpartition(".")[2], set()).add(found)
    names = [name for name, found in sizes.items() if found == size]
    keys = []
    for name in names:
        _, dot, kind = name.rpartition(".")
        keys.append(dot + kind if kinds[kind] == {size} else name)
    return list(dict.fromkeys(keys))


def _gptq_config(label: str) -> Callable[[Quantized], dict[str, Any]]:
    def config(export: Quantized) -> dict[str, Any]:
        sizes = export.group_sizes()
        common, *others = [size for size, _ in Counter(sizes.values()).most_common()]
        dynamic: dict[str, dict[str, int]] = {
            f"-:^{re.escape(name)}$": {} for name in export.unquantized if name != export.head
        }
        for size in others:
            dynamic |= {f"+:{_gptq_pattern(key)}": {"group_size": size} for key in _keys(sizes, size)}
        return {
            "quant_method": "gptq",
            "bits": export.bits,
            "group_size": common,
            "desc_act": any(module.permutation is not None for module in export.modules.values()),
            "sym": True,
            "lm_head": export.head in export.modules,
            **({"dynamic": dynamic} if dynamic else {}),
            "checkpoint_format": label,
            "format": label,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"bitnest-format:{__version__}"]},
        }

    return config


def _gptq_pattern(key: str) -> str:
    return rf".*\.{re.escape(key[1:])}$" if key.startswith(".") else f"^{re.escape(key)}$"


def _gptq_format(label: str, zero_offset: int) -> ExportFormat:
    return ExportFormat(
        views=("draft", "target"),
        tensors=_gptq(zero_offset),
        config=_gptq_config(label),
        # Its readers know no other type of scales.
        scale_types=(torch.float16,),
        packs_outputs=True,
        permutations=True,
        config_copy="quantize_config.json",
    )


def _compressed_tensors_format(view: View) -> ExportFormat:
    return ExportFormat(
        views=(view,),
        tensors=_compressed_tensors,
        config=_compressed_tensors_config,
        keeps_base=view == "draft",
        activations=True,
    )


FORMATS: Mapping[str, ExportFormat] = {
    "compressed-tensors-w4": _compressed_tensors_format("draft"),
    "compressed-tensors-w8": _compressed_tensors_format("target"),
    "gptq": _gptq_format("gptq", zero_offset=1),
    "gptq-v2": _gptq_format("gptq_v2", zero_offset=0),
    "hf": ExportFormat(
        views=("target", "draft"), tensors=_plain, config=lambda export: None, scale_types=(), permutations=True
    ),
}
