"""What GPTQ and compressed-tensors folders have in common: linear layers stored as packed 4-bit codes and scales.

A `PackedFormat` knows one such layout. It says which stored tensors belong to a module, from their headers alone;
judges their values once; and gives a module's base plane. The rest of the folder (embedding, norms, biases, layers that
were left out) is read like that of any other model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.converters.base import GivenBase, GivenModule
from bitnest_format.packing import CODES_PER_WORD
from bitnest_format.shards import TensorEntry

Read = Callable[[str], Tensor]

BITS = 4
# The format's own limit for float32 scales.
LARGEST_SCALE = 2.0**120
SCALE_TYPES = ("F16", "BF16", "F32")
NO_WAY_IN = "The base plane is 4 bits, symmetric, one scale per group. Convert the original model instead."


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModule(GivenModule):
    """A module and the stored names of its tensors, by what they are: `codes`, `scale`, `zero`, `order`, `shape`."""

    tensors: Mapping[str, str]


@dataclass(slots=True)
class Claim:
    """The modules found in a folder, every tensor that belongs to one, and what stands against converting them."""

    modules: dict[str, PackedModule] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


class Remarks:
    """The same sentence about several modules, told once."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def add(self, sentence: str | None, module: str) -> None:
        """None says that nothing is wrong."""
        if sentence is not None:
            self.found.setdefault(sentence, []).append(module)

    def listed(self) -> list[str]:
        return [f"{listed(modules)}: {sentence}" for sentence, modules in self.found.items()]


class PackedFormat(Protocol):
    """One way of storing linear layers as 4-bit codes."""

    kind: str
    """The manifest's `source.kind`."""

    problems: list[str]
    """What the folder's own description says against converting it."""

    notes: list[str]

    def claim(self, stored: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, int]]) -> Claim:
        """Find the modules among all stored tensors. `shapes`: `(outputs, inputs)` of the model's linear layers."""
        ...

    def judge(self, modules: Mapping[str, PackedModule], read: Read) -> tuple[list[str], list[str]]:
        """Read what is small (scales, zero points, orders) once: problems, and notes for the user."""
        ...

    def base(self, module: PackedModule, read: Read) -> GivenBase:
        """A module's base plane."""
        ...


def stored_parts(
    module: str, suffixes: Mapping[str, str], stored: Mapping[str, TensorEntry]
) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Names and entries of those of a module's tensors that are stored, by what they are; `suffixes` end the names."""
    names = {role: f"{module}.{suffix}" for role, suffix in suffixes.items() if f"{module}.{suffix}" in stored}
    return names, {role: stored[name] for role, name in names.items()}


def group_size_of(inputs: int, groups: int) -> int | None:
    """The inputs per group where `groups` of equal size cover them in whole words, otherwise None."""
    if groups < 1 or inputs % groups:
        return None
    size = inputs // groups
    return None if size % CODES_PER_WORD else size


def scale_problems(modules: Mapping[str, PackedModule], read: Read) -> tuple[list[str], list[str]]:
    """Scales that cannot stand in a checkpoint: problems, and notes about zeros."""
    bad: dict[str, list[str]] = {"not finite": [], "negative": [], "above 2^120": []}
    zero: list[str] = []
    for module, packed in modules.items():
        name = packed.tensors["scale"]
        scale = read(name).float()
        finite = torch.isfinite(scale)
        if not bool(finite.all()):
            bad["not finite"].append(f"{name} ({int((~finite).sum())})")
        elif bool((scale < 0).any()):
            bad["negative"].append(f"{name} ({int((scale < 0).sum())})")
        elif bool((scale > LARGEST_SCALE).any()):
            bad["above 2^120"].append(f"{name} ({int((scale > LARGEST_SCALE).sum())})")
        elif bool((scale < nesting.SMALLEST_SCALE[torch.float32]).any()):
            zero.append(module)
    problems = [
        f"scales that are {what}, with their numbers: {listed(found)}. Expected finite scales above zero. The source "
        "is damaged: quantize the original model again."
        for what, found in bad.items()
        if found
    ]
    notes = [f"groups whose scale is zero become groups of zeros: {listed(zero)}"] if zero else []
    return problems, notes


def stored_base(codes: Tensor, scale: Tensor, order: Tensor | None) -> GivenBase:
    """A base plane from codes int8 `[O, I]` in input order, scales `[O, G]` and each input's group `[I]`, if stored.

    bfloat16 scales are widened, which is exact. A zero scale stands for a group of zeros whatever its codes are, which
    a checkpoint says with codes of zero.
    """
    permutation = None if order is None else order.long().argsort(stable=True)
    if permutation is not None:
        if torch.equal(permutation, torch.arange(len(permutation))):
            permutation = None
        else:
            codes = codes.index_select(1, permutation)
    scale = scale.contiguous() if scale.dtype == torch.float16 else scale.float().contiguous()
    empty = scale.float() < nesting.SMALLEST_SCALE[torch.float32]
    if bool(empty.any()):
        codes = codes.masked_fill(nesting.expand_groups(empty, codes.shape[1]), 0)
        scale = torch.where(empty, torch.tensor(nesting.SMALLEST_SCALE[scale.dtype], dtype=scale.dtype), scale)
    return GivenBase(codes=codes.contiguous(), scale=scale, permutation=permutation)


def order_problem(order: Tensor, module: PackedModule) -> str | None:
    """What is wrong with the groups of a module's inputs `[I]`; every group has to have its share of them."""
    inputs = module.shape[1]
    groups = inputs // module.group_size
    numbers = order.long()
    if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) >= groups):
        return f"names groups {int(numbers.min())} to {int(numbers.max())}, expected 0 to {groups - 1}"
    counts = torch.bincount(numbers, minlength=groups)
    if bool((counts != module.group_size).any()):
        return f"its groups have {int(counts.min())} to {int(counts.max())} inputs, expected {module.group_size} each"
    return None


def dequantize(base: GivenBase) -> Tensor:
    """The weight of a base plane, float32 `[O, I]` in the order of inputs."""
    weight = nesting.draft_weight(base.codes, base.scale)
    if base.permutation is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, base.permutation, weight)


def settings_value(settings: Mapping[str, Any], *keys: str) -> Any:
    """The first of several spellings of a setting that is there and not null."""
    return next((settings[key] for key in keys if settings.get(key) is not None), None)


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Names separated by commas; beyond `limit` of them only their number."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
