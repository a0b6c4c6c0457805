"""compressed-tensors checkpoints of the `pack-quantized` kind as base planes.

A module is stored as `weight_packed` int32 `[O, I / 8]`, which is this format's own packing, `weight_scale` `[O, G]`,
`weight_shape` (its two sizes) and, where columns were quantized by activation order, `weight_g_idx` `[I]`, the group of
each input. Asymmetric models have a `weight_zero_point` besides. `quantization_config` describes groups of modules; it
is read for what the tensors cannot show: number formats, sparsity, and rotations that a runtime would have to apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    order_problem,
    scale_problems,
    stored_base,
    stored_parts,
)
from bitnest_format.shards import TensorEntry

PACKED = "pack-quantized"
# How the names of a module's tensors end, by what they are.
SUFFIXES = {
    "codes": "weight_packed",
    "scale": "weight_scale",
    "shape": "weight_shape",
    "order": "weight_g_idx",
    "zero": "weight_zero_point",
}
# The places of a rotation that are folded into weights; at all others it is applied while the model runs.
FOLDED_LOCATIONS = ("weight_input", "weight_output")
# Scales of activations: this format's are found while the model runs.
ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")


class CompressedTensorsFormat:
    """`settings`: the folder's `quantization_config`, found at `place`."""

    kind = "compressed-tensors"

    def __init__(self, place: str, settings: Mapping[str, Any]):
        self.place = place
        self.notes: list[str] = []
        self.groups = {name: group for name, group in _objects(settings.get("config_groups"))}
        self.problems = [
            *_format_problems(place, settings, self.groups),
            *_transform_problems(place, settings, self.notes),
        ]
        if settings.get("kv_cache_scheme"):
            self.notes.append("the source's kv_cache_scheme is not used: the cache has a recipe of its own")

    def claim(self, stored: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, int]]) -> Claim:
        """Find the modules by their `weight_packed`."""
        claim = Claim()
        remarks = Remarks()
        for module, shape in shapes.items():
            if f"{module}.weight_packed" in stored:
                self._claim_module(claim, remarks, module, shape, stored)
                claim.names.update(name for suffix in ACTIVATION_SUFFIXES if (name := f"{module}.{suffix}") in stored)
        claim.problems += remarks.listed()
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
        codes = entries["codes"]
        if "zero" in entries:
            remarks.add(f"stores weight_zero_point: the model is asymmetric. {NO_WAY_IN}", module)
            return
        if "scale" not in entries:
            remarks.add("no weight_scale. The source is incomplete: download it again.", module)
            return
        if codes.dtype != "I32" or codes.shape != (outputs, inputs // packing.CODES_PER_WORD):
            bits = codes.shape[1] * 32 // inputs if codes.dtype == "I32" and len(codes.shape) == 2 else 0
            width = f", codes of {bits} bits" if bits not in (0, BITS) else ""
            remarks.add(
                f"weight_packed is {codes.dtype} {list(codes.shape)}{width}, expected I32 "
                f"{[outputs, inputs // packing.CODES_PER_WORD]} of 4-bit codes. {NO_WAY_IN}",
                module,
            )
            return
        scale = entries["scale"]
        groups = scale.shape[1] if len(scale.shape) == 2 else 0
        size = group_size_of(inputs, groups)
        if scale.dtype not in SCALE_TYPES or len(scale.shape) != 2 or scale.shape[0] != outputs:
            remarks.add(
                f"weight_scale is {scale.dtype} {list(scale.shape)}, expected {', '.join(SCALE_TYPES)} "
                f"[{outputs}, groups]",
                module,
            )
        elif size is None or not self._allows(inputs, size):
            stated = sorted({str(_weights(group).get("group_size")) for group in self.groups.values()})
            remarks.add(
                f"{inputs} inputs, {groups} columns of scales and groups of {', '.join(stated)} ({self.place}): groups "
                f"have to divide the inputs and be multiples of {packing.CODES_PER_WORD}. Convert the original model "
                "instead.",
                module,
            )
        else:
            claim.modules[module] = PackedModule(shape=shape, group_size=size, tensors=names)

    def _allows(self, inputs: int, size: int) -> bool:
        """Whether one of the config's groups has this group size; none or -1 is one group per row."""
        stated = [_weights(group).get("group_size") for group in self.groups.values()]
        return not stated or any(size == (value if value not in (None, -1) else inputs) for value in stated)

    def judge(self, modules: Mapping[str, PackedModule], read: Read) -> tuple[list[str], list[str]]:
        """Whether shapes, orders and scales are what they should be."""
        problems, notes = scale_problems(modules, read)
        remarks = Remarks()
        for name, module in modules.items():
            if "shape" in module.tensors:
                recorded = read(module.tensors["shape"]).tolist()
                if recorded != list(module.shape):
                    remarks.add(f"is {recorded}, expected {list(module.shape)}", module.tensors["shape"])
            if "order" in module.tensors:
                order = read(module.tensors["order"])
                if order.shape != (module.shape[1],):
                    remarks.add(f"has shape {list(order.shape)}, expected [{module.shape[1]}]", name)
                elif bool((order >= 0).any()):
                    remarks.add(order_problem(order, module), module.tensors["order"])
        return [*problems, *remarks.listed()], notes

    def base(self, module: PackedModule, read: Read) -> GivenBase:
        """Codes and scales as they are; columns sorted by group where `weight_g_idx` mixes them."""
        name = module.tensors.get("order")
        order = read(name) if name else None
        # Filled with -1 where the order was not used.
        if order is not None and bool((order < 0).all()):
            order = None
        return stored_base(packing.unpack(read(module.tensors["codes"])), read(module.tensors["scale"]), order)


def _objects(groups: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield str(name), group


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, Mapping) else {}


def _format_problems(place: str, settings: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    overall = settings.get("format")
    sparsity = settings.get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if sparse not in (None, "dense"):
        yield f"{place}: sparsity_config.format is {sparse!r:.80}; sparse weights are not read. Give the dense model."
    formats = {name: group.get("format") or overall for name, group in groups.items()} or {"": overall}
    for name, found in formats.items():
        where = f"{place}: config_groups.{name}" if name else place
        weights = _weights(groups.get(name, {}))
        wrong = [
            f"{key} is {weights[key]!r:.80}, expected {' or '.join(map(repr, allowed))}"
            for key, allowed in (
                ("num_bits", (BITS,)),
                ("type", ("int",)),
                ("symmetric", (True,)),
                ("strategy", ("group", "channel")),
            )
            if weights.get(key) is not None and weights[key] not in allowed
        ]
        if found != PACKED:
            wrong.insert(0, f"format is {found!r:.80}, expected {PACKED!r}")
        if wrong:
            yield f"{where}: {'; '.join(wrong)}. {NO_WAY_IN}"


def _transform_problems(place: str, settings: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    """Rotations that are applied at run time are refused, others noted."""
    config = settings.get("transform_config")
    schemes = config.get("config_groups") if isinstance(config, Mapping) else None
    online: list[str] = []
    folded: list[str] = []
    for name, scheme in _objects(schemes):
        applied = scheme.get("apply")
        places = [str(item.get("location")) for item in applied if isinstance(item, Mapping)] if applied else []
        running = sorted(set(places) - set(FOLDED_LOCATIONS))
        (online if running else folded).append(f"{name} ({', '.join(running)})" if running else name)
    if online:
        yield (
            f"{place}: transform_config applies {', '.join(online)} while the model runs, which a checkpoint of this "
            "format does not. Convert the original model instead, which rotates by itself."
        )
    elif folded:
        notes.append(
            f"the source was rotated before it was quantized ({', '.join(folded)}, folded into the weights); a "
            "reference has to be rotated alike"
        )
