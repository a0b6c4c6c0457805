"""What a GPU cannot take: checkpoints whose shapes the kernels do not cover, and texts that do not fit into memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.manifest import Module
from bitnest_format.runtime.byte_model import entry_bytes

INPUTS_STEP = 32
HEAD_DIM_STEP = 4
LARGEST_HEAD_DIM = 256
INSTEAD = "Use --device cpu."
GIB = 1 << 30


def gpu_obstacles(architecture: Architecture, checkpoint: Checkpoint) -> list[str]:
    """Why the GPU kernels cannot run a checkpoint, one sentence a reason; empty where they can.

    Reads the manifest, and the input permutations of layers that read the same input.
    """
    return shape_obstacles(architecture, checkpoint.manifest.modules, checkpoint.tensor)


def shape_obstacles(
    architecture: Architecture, modules: Mapping[str, Module], tensor: Callable[[str], Tensor]
) -> list[str]:
    """`gpu_obstacles` of the modules of a manifest; `tensor` reads a permutation by its name."""
    found = [
        f"config.json: {architecture.model_type} has {what}, which the GPU kernels do not run. {INSTEAD}"
        for what in beyond_kernels(architecture)
    ]
    size = architecture.head_dim
    if size % HEAD_DIM_STEP or size > LARGEST_HEAD_DIM:
        found.append(
            f"head_dim is {size}; the GPU kernels take multiples of {HEAD_DIM_STEP} up to {LARGEST_HEAD_DIM}. {INSTEAD}"
        )
    needed = dict(architecture.modules())
    plain = [name for name in needed if name not in modules]
    if plain:
        found.append(f"{_listed(plain)}: not quantized; the GPU kernels take quantized linear layers only. {INSTEAD}")
    used = {name: module for name, module in modules.items() if name in needed or name == architecture.head_module}
    multiples = f"the GPU kernels take multiples of {INPUTS_STEP}. {INSTEAD}"
    for inputs, names in _by_value({name: module.shape[1] for name, module in used.items()}).items():
        if inputs % INPUTS_STEP:
            found.append(f"{_listed(names)}: {inputs} inputs; {multiples}")
    for group, names in _by_value({name: module.group_size for name, module in used.items()}).items():
        if group % INPUTS_STEP:
            found.append(f"{_listed(names)}: groups of {group} inputs; {multiples}")
    joined = [names for names in _joined(architecture) if all(name in used for name in names)]
    by_groups = [names for names in joined if len({used[name].group_size for name in names}) > 1]
    if by_groups:
        sizes = ", ".join(str(used[name].group_size) for name in by_groups[0])
        found.append(
            f"{_listed(map(_short, by_groups))}: groups of {sizes} inputs; the GPU kernels compute them as one product "
            f"and need one size. {INSTEAD}"
        )
    by_order = [names for names in joined if not _one_order([used[name] for name in names], tensor)]
    if by_order:
        found.append(
            f"{_listed(map(_short, by_order))}: different input permutations; the GPU kernels compute them as one "
            f"product and need one order. {INSTEAD}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that decoding with one view takes on a device.

    `weights`: planes, scales, head and embedding. `entry`: one cache entry of all layers. `workspace`: all
    other buffers by the number of entries, with which they never shrink.
    """

    weights: int
    entry: int
    workspace: Callable[[int], int]

    def total(self, entries: int) -> int:
        """Bytes with a cache of `entries` entries."""
        return self.weights + self.workspace(entries) + entries * self.entry

    def entries_within(self, free: int) -> int:
        """The largest cache that fits into `free` bytes; 0 where not even the rest does."""
        most = max(0, free - self.weights) // self.entry
        return max(0, bisect_right(range(most + 1), free, key=self.total) - 1)


def memory_needs(
    checkpoint: Checkpoint, architecture: Architecture, workspace: Callable[[int], int]
) -> dict[str, MemoryNeed]:
    """What each view of a checkpoint takes, by the sizes of its files: `nested`, `target` and `draft`.

    Where the refinement is not there, `draft` alone.
    """
    files = checkpoint.manifest.files
    base = sum(record.size for name, record in files.items() if name.startswith("bitnest-base-"))
    refinement = sum(record.size for name, record in files.items() if name.startswith("bitnest-refinement-"))
    entry = architecture.layers * entry_bytes(architecture, "fine")

    def need(weights: int) -> MemoryNeed:
        return MemoryNeed(weights=weights, entry=entry, workspace=workspace)

    needs = {"draft": need(base)}
    if "target" in checkpoint.manifest.views:
        needs = {"nested": need(base + refinement), "target": need(base + refinement), **needs}
    return needs


def explain_out_of_memory(
    needs: Mapping[str, MemoryNeed],
    view: str,
    entries: int,
    free: int,
    device: torch.device,
    capacities: Sequence[int] = (),
) -> str:
    """One message: how much `view` needs for `entries` tokens, how much there is, and what would fit.

    `free`: bytes that decoding may take in all, those of weights that are already loaded included. `capacities`: the
    sizes that caches come in, any size where empty.
    """
    need = needs[view]
    cache, workspace = entries * need.entry, need.workspace(entries)
    parts = f"{_gib(need.weights)} of weights, {_gib(cache)} of cache for {entries} tokens"
    return (
        f"{device}: out of memory: decoding needs {_gib(need.total(entries))} ({parts} and {_gib(workspace)} of "
        f"workspace), and {_gib(free)} is free. {fit_advice(needs, view, entries, free, capacities)}"
    )


def fit_advice(
    needs: Mapping[str, MemoryNeed], view: str, entries: int, free: int, capacities: Sequence[int] = ()
) -> str:
    """What would fit into `free` bytes instead of `view` with `entries` tokens: one sentence; the CPU always."""
    options = []
    context = _context(needs[view], free, capacities)
    if context:
        options.append(f"{context} tokens of prompt and --max-new-tokens together")
    for other, need in needs.items():
        if other == view or need.total(1) >= needs[view].total(1):
            continue
        if need.total(entries) <= free:
            options.append(f"--view {other}")
        elif (shorter := _context(need, free, capacities)) > context:
            options.append(f"--view {other} with {shorter} tokens")
    return f"What fits: {', '.join([*options, '--device cpu'])}."


def _context(need: MemoryNeed, free: int, capacities: Sequence[int]) -> int:
    fitting = need.entries_within(free)
    return max((size for size in capacities if size <= fitting), default=0) if capacities else fitting


def beyond_kernels(architecture: Architecture) -> Iterator[str]:
    """What a model computes that the GPU's passes have no node for."""
    if architecture.experts is not None:
        yield "mixtures of experts"
    if architecture.family.post_norms:
        yield "norms after attention and MLP"
    elif architecture.family.norm_offset or architecture.family.gelu:
        yield "GELU in its MLPs"
    if architecture.rotary_size != architecture.head_dim:
        yield "rotary embedding of a part of each head"


def _joined(architecture: Architecture) -> list[list[str]]:
    """The linear layers that read the same input, by layer of the model."""
    return [
        [f"{architecture.layer_prefix(layer)}{linear}" for linear in linears]
        for layer in range(architecture.layers)
        for linears in architecture.shared_inputs(layer)
        if len(linears) > 1
    ]


def _one_order(modules: list[Module], tensor: Callable[[str], Tensor]) -> bool:
    names = [module.permutation for module in modules]
    if None in names:
        return not any(names)
    first, *others = [tensor(name) for name in names if name is not None]
    return all(torch.equal(first, other) for other in others)


def _by_value(values: Mapping[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return found


def _short(names: Collection[str]) -> str:
    """`model.layers.0.self_attn.{q,k,v}_proj` of names that share beginning and end."""
    prefix = next(iter(names)).rpartition(".")[0]
    kinds = ",".join(name.rpartition(".")[2].removesuffix("_proj") for name in names)
    return f"{prefix}.{{{kinds}}}_proj"


def _listed(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
