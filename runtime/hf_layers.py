"""Nested layers put into the skeleton of a transformers model, from what manifest and headers say of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitnest_format import packing
from bitnest_format.checkpoint import (
    BASE_SUFFIX,
    BIAS_TYPES,
    PERMUTATION_SUFFIX,
    REFINEMENT_SUFFIX,
    SCALE_SUFFIX,
    Checkpoint,
    View,
)
from bitnest_format.errors import CheckpointError, UnsupportedModelError
from bitnest_format.manifest import Module
from bitnest_format.runtime.hf_linear import NestedLinear
from bitnest_format.shards import DTYPE_NAMES, DTYPES, TensorEntry, read_header

Expected = tuple[tuple[torch.dtype, ...], tuple[int, ...]]


def put_nested_layers(model: Any, checkpoint: Checkpoint) -> None:
    """Replace the linear layers that the manifest lists by nested ones, whose parameters are still without data.

    `model` is one of transformers', without data too; where it has no head, modules and tensors of the head are left
    out. Raises `FileFormatError` for a shard that is broken; `CheckpointError` listing every tensor that is missing or
    is not of the type and shape that the format gives it; `UnsupportedModelError` listing every module that is no
    linear layer of the model, and every tensor of the model that would be left without a value.
    """
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(checkpoint.weight_map.values())):
        entries |= read_header(checkpoint.folder / shard)
    # A model without head spells all names without the prefix of its decoder.
    prefix = f"{model.base_model_prefix}." if model.base_model is model else ""
    modules = {name: module for name, module in checkpoint.manifest.modules.items() if name.startswith(prefix)}
    _check_tensors(checkpoint, modules, entries)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    problems: list[str] = []
    for name, module in modules.items():
        place = name.removeprefix(prefix)
        linear = linears.get(place)
        if linear is None or (linear.out_features, linear.in_features) != module.shape:
            outputs, inputs = module.shape
            problems.append(f"{name}: the model has no linear layer of {outputs} x {inputs} by that name")
            continue
        tensors = {suffix: entries[f"{name}.{suffix}"] for suffix in _expected(module, checkpoint.view)}
        parameters = {suffix: _without_data(entry) for suffix, entry in tensors.items()}
        model.set_submodule(place, NestedLinear(checkpoint.view, **parameters))
    given = {name.removeprefix(prefix) for name in entries}
    for name in model.state_dict():
        if name not in given and name not in model.all_tied_weights_keys:
            problems.append(f"{name}: the model needs it, but the checkpoint has no such tensor")
    if problems:
        what = f"{checkpoint.folder.name} does not fit {type(model).__name__}, which may hold some weights as one"
        raise UnsupportedModelError([f"{what}. Open it with bitnest_format.load", *problems])


def _check_tensors(checkpoint: Checkpoint, modules: Mapping[str, Module], entries: Mapping[str, TensorEntry]) -> None:
    faults = []
    for name, module in modules.items():
        for suffix, (types, shape) in _expected(module, checkpoint.view).items():
            entry = entries.get(f"{name}.{suffix}")
            if entry is not None and DTYPES.get(entry.dtype) in types and entry.shape == shape:
                continue
            found = "is missing" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
            wanted = " or ".join(DTYPE_NAMES[dtype] for dtype in types)
            faults.append(f"  - {name}.{suffix}: {found}, expected {wanted} {list(shape)}")
    if faults:
        raise CheckpointError("\n".join((f"{checkpoint.folder.name}: tensors are not what the format says:", *faults)))


def _expected(module: Module, view: View) -> dict[str, Expected]:
    """The tensors of a module that a view reads, by suffix, with the types and the shape that each may have."""
    outputs, inputs = module.shape
    words = (outputs, inputs // packing.CODES_PER_WORD)
    tensors: dict[str, Expected] = {
        BASE_SUFFIX: ((torch.int32,), words),
        SCALE_SUFFIX: ((torch.float16, torch.float32), (outputs, module.groups)),
    }
    if view == "target":
        tensors[REFINEMENT_SUFFIX] = ((torch.int32,), words)
    if module.bias is not None:
        tensors["bias"] = (BIAS_TYPES, (outputs,))
    if module.permutation is not None:
        tensors[PERMUTATION_SUFFIX] = ((torch.int32,), (inputs,))
    return tensors


def _without_data(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
