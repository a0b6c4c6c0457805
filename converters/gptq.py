"""GPTQ checkpoints (AutoGPTQ, GPTQModel, Optimum) as base planes.

A module with `I` inputs and `O` outputs is stored as `qweight` int32 `[I / 8, O]`, eight codes of consecutive inputs to
a word; `scales` `[G, O]`; `qzeros` int32 `[G, O / 8]`; `g_idx` `[I]`, the group of each input, which is not in order
where columns were quantized by activation order. A code is the unsigned nibble; the weight is
`scale * (nibble - zero)`.

Two conventions store the zero point: v1 (`gptq`) as `zero - 1`, v2 (`gptq_v2`) as it is. Symmetric models have
`zero = 8` throughout, so every stored field is 7 or every one is 8, and the values themselves tell, which labels often
do not. The base code is then `nibble - 8`. Which modules are quantized, and how, is read off the tensors too: what
`dynamic` rules and `modules_in_block_to_quantize` say shows there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.converters.base import GivenBase
from bitnest_format.converters.packed import (
    BITS,
    NO_WAY_IN,
    SCALE_TYPES,
    Claim,
    PackedModule,
    Read,
    Remarks,
    group_size_of,
    listed,
    order_problem,
    scale_problems,
    settings_value,
    stored_base,
    stored_parts,
)
from bitnest_format.shards import TensorEntry

WORD_BITS = 32
# How the names of a module's tensors end, by what they are.
SUFFIXES = {"codes": "qweight", "zero": "qzeros", "scale": "scales", "order": "g_idx"}
CONVENTIONS = {"gptq": "v1", "gptq_v2": "v2"}
# What the zero point of a symmetric model, 8, looks like on disk.
STORED_ZEROS = {7: "v1", 8: "v2"}

SPELLINGS = {
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "sym": ("sym",),
    "desc_act": ("desc_act",),
    "checkpoint_format": ("checkpoint_format", "format"),
    "quant_method": ("quant_method", "method"),
}


class GptqFormat:
    """`settings`: what the folder says about its quantization, by the place that says it; may be empty."""

    kind = "gptq"

    def __init__(self, settings: Mapping[str, Mapping[str, Any]]):
        self.place = next(iter(settings), "")
        self.problems = _disagreements(settings)
        self.notes: list[str] = []
        stated = next(iter(settings.values()), {})
        self.dynamic = bool(stated.get("dynamic"))
        self.bits = settings_value(stated, *SPELLINGS["bits"])
        self.group_size = settings_value(stated, *SPELLINGS["group_size"])
        self.symmetric = stated.get("sym", False if stated.get("zero_point") else None)
        self.act_order = bool(stated.get("desc_act"))
        self.label = settings_value(stated, *SPELLINGS["checkpoint_format"])
        if stated.get("is_marlin_format"):
            self.label = "marlin"
        self.problems += _refusals(self.place, self.bits, self.label, stated.get("rotation"))

    def claim(self, stored: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, int]]) -> Claim:
        """Find the modules by their `qweight`."""
        claim = Claim()
        remarks = Remarks()
        for module, shape in shapes.items():
            if f"{module}.qweight" in stored:
                self._claim_module(claim, remarks, module, shape, stored)
        claim.problems += remarks.listed()
        if claim.modules and not self.place:
            sizes = sorted({module.group_size for module in claim.modules.values()})
            self.notes.append(
                "nothing states how the model was quantized (no quantization_config in config.json, no "
                f"quantize_config.json); by the shapes it is GPTQ with {BITS} bits and groups of "
                f"{', '.join(map(str, sizes))} inputs"
            )
        return claim

    def _claim_module(
        self,
        claim: Claim,
        remarks: Remarks,
        module: str,
        shape: tuple[int, int],
        stored: Mapping[str, TensorEntry],
    ) -> None:
        outputs, inputs = shape
        names, entries = stored_parts(module, SUFFIXES, stored)
        claim.names.update(names.values())
        missing = [SUFFIXES[role] for role in ("zero", "scale") if role not in entries]
        if self.act_order and "order" not in entries:
            missing.append("g_idx, though desc_act is true")
        if missing:
            remarks.add(f"no {' and no '.join(missing)}. The source is incomplete: download it again.", module)
            return
        found = entries["codes"].shape
        bits = found[0] * WORD_BITS / inputs if len(found) == 2 else 0.0
        if entries["codes"].dtype != "I32" or bits not in range(2, 9) or found[1] != outputs:
            kinds = f"{entries['codes'].dtype} {list(found)}"
            layout = "AWQ's order" if found == (inputs, outputs // 8) else "another layout, such as Marlin's"
            remarks.add(
                f"qweight is {kinds} for {inputs} inputs and {outputs} outputs: {layout}. Expected GPTQ's words of "
                "4-bit codes, I32 [inputs / 8, outputs]. Give a GPTQ copy that is not repacked, or the original model.",
                module,
            )
            return
        if bits != BITS:
            # A config that says so is refused as a whole.
            if self.bits in (None, BITS):
                remarks.add(f"{bits:.0f} bits beside modules of 4 bits (mixed precision). {NO_WAY_IN}", module)
            return
        scale, zero = entries["scale"], entries["zero"]
        groups = scale.shape[0] if len(scale.shape) == 2 else 0
        size = self._group_size(inputs, groups)
        if size is None:
            stated = f" and groups of {self.group_size} ({self.place})" if self.group_size is not None else ""
            remarks.add(
                f"{inputs} inputs, {groups} rows of scales{stated}: groups have to divide the inputs and be multiples "
                f"of {packing.CODES_PER_WORD}. Convert the original model instead.",
                module,
            )
            return
        expected_zeros = (groups, -(-outputs // packing.CODES_PER_WORD))
        if zero.dtype != "I32" and zero.shape == scale.shape:
            remarks.add(
                f"qzeros are not packed ({zero.dtype}), as asymmetric exporters store them. {NO_WAY_IN}", module
            )
        elif scale.dtype not in SCALE_TYPES or scale.shape != (groups, outputs):
            remarks.add(
                f"scales are {scale.dtype} {list(scale.shape)}, expected {', '.join(SCALE_TYPES)} {[groups, outputs]}",
                module,
            )
        elif zero.dtype != "I32" or zero.shape != expected_zeros:
            remarks.add(f"qzeros are {zero.dtype} {list(zero.shape)}, expected I32 {list(expected_zeros)}", module)
        elif "order" in entries and (
            entries["order"].dtype not in ("I32", "I64") or entries["order"].shape != (inputs,)
        ):
            remarks.add(
                f"g_idx is {entries['order'].dtype} {list(entries['order'].shape)}, expected I32 [{inputs}]", module
            )
        else:
            claim.modules[module] = PackedModule(shape=shape, group_size=size, tensors=names)

    def _group_size(self, inputs: int, groups: int) -> int | None:
        """The group size that the scales show, None where it does not fit or is not the one stated."""
        size = group_size_of(inputs, groups)
        stated = self.group_size
        if stated is None or self.dynamic:
            return size
        return size if size == (inputs if stated == -1 else stated) else None

    def judge(self, modules: Mapping[str, PackedModule], read: Read) -> tuple[list[str], list[str]]:
        """Whether all zero points are the symmetric one, and every scale and order is sound."""
        problems, notes = scale_problems(modules, read)
        remarks = Remarks()
        zeros: dict[str, set[int]] = {}
        for name, module in modules.items():
            zeros[name] = set(_zeros(read(module.tensors["zero"]), module.shape[0]).unique().tolist())
            if "order" in module.tensors:
                remarks.add(order_problem(read(module.tensors["order"]), module), module.tensors["order"])
        problems += remarks.listed()
        asymmetric = self._asymmetric(zeros)
        if asymmetric:
            problems.append(asymmetric)
        elif zeros:
            found = STORED_ZEROS[next(iter(next(iter(zeros.values()))))]
            label = self.label or "gptq"
            if CONVENTIONS.get(label) != found:
                stated = f"labelled {label!r}" if self.label else "not labelled, which means 'gptq'"
                right = next(name for name, convention in CONVENTIONS.items() if convention == found)
                notes.append(
                    f"the model is {stated}, but its zero points are stored as {right!r}; they are read as that"
                )
        return problems, notes

    def _asymmetric(self, zeros: Mapping[str, set[int]]) -> str | None:
        """Why the zero points are not all the symmetric one, or None."""
        values = set().union(*zeros.values())
        if len(values) == 1 and values <= STORED_ZEROS.keys():
            believed = STORED_ZEROS[next(iter(values))] == CONVENTIONS.get(self.label or "gptq")
            if self.symmetric is not False or believed:
                return None
        off = [name for name, found in zeros.items() if len(found) > 1 or not found <= STORED_ZEROS.keys()]
        stated = f"{self.place}: sym is false, and " if self.symmetric is False else ""
        return (
            f"{stated}zero points are stored as {min(values)} to {max(values)} in {listed(off or list(zeros), 3)}: the "
            f"model is asymmetric, and codes less their zero points do not fit -8 to 7. {NO_WAY_IN}"
        )

    def base(self, module: PackedModule, read: Read) -> GivenBase:
        """Codes and scales turned to `[O, I]` and `[O, G]`; columns sorted by group where `g_idx` mixes them."""
        codes = packing.unpack(read(module.tensors["codes"]).T)
        order = module.tensors.get("order")
        return stored_base(codes, read(module.tensors["scale"]).T, read(order) if order else None)


def _disagreements(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Files that state the same setting differently; none of them can be believed then."""
    problems = []
    for setting, spellings in SPELLINGS.items():
        values = {place: settings_value(stated, *spellings) for place, stated in settings.items()}
        known = {place: value for place, value in values.items() if value is not None}
        if len(set(map(repr, known.values()))) > 1:
            found = " but ".join(f"{value!r} in {place}" for place, value in known.items())
            problems.append(f"{setting} is {found}. Correct the one that is wrong, or remove that file.")
    return problems


def _refusals(place: str, bits: Any, label: Any, rotation: Any) -> list[str]:
    problems = []
    if bits not in (None, BITS):
        problems.append(f"{place}: bits is {bits!r}, expected {BITS}. {NO_WAY_IN}")
    if label == "marlin":
        problems.append(
            f"{place}: the weights are packed for Marlin kernels, whose order is not GPTQ's. Give a GPTQ copy that was "
            "not repacked, or the original model."
        )
    elif label is not None and label not in CONVENTIONS:
        problems.append(
            f"{place}: the format is {label!r:.80}, expected {' or '.join(map(repr, CONVENTIONS))}. Give a GPTQ copy "
            "of that kind, or the original model."
        )
    if rotation:
        problems.append(
            f"{place}: rotation is {rotation!r:.80}: the model was rotated before it was quantized, with a Hadamard "
            "matrix that has to be applied while it runs, and the rotation is not stored. Quantize without it, or "
            "convert the original model, which rotates by itself."
        )
    return problems


def _zeros(words: Tensor, outputs: int) -> Tensor:
    """The fields of `qzeros` int32 `[G, ceil(O / 8)]`, 0..15 as int32 `[G, O]`."""
    return (packing.unpack(words).to(torch.int32) + packing.CODE_OFFSET)[:, :outputs]
