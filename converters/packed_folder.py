"""A 4- or 8-bit checkpoint of another program, GPTQ or compressed-tensors, read as far as a comparison needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.checkpoint import NestedWeight, View, read_weight_map
from bitnest_format.converters.export_formats import BITS, WORD_BITS, group_index, step, words_in_source_order
from bitnest_format.converters.fused import Part, parts_of, stored_shapes
from bitnest_format.converters.hf import INDEX_FILE
from bitnest_format.errors import SourceError
from bitnest_format.manifest import Module
from bitnest_format.shards import read_header, read_json

QUANTIZE_CONFIGS = ("quantize_config.json", "quant_config.json")
METHODS = ("gptq", "compressed-tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModule:
    """One module of such a checkpoint. `codes`: int8 `[O, I]`; `scale`: float32 `[O, I]`, that of every weight."""

    view: View
    base_equal: bool
    scale_equal: bool
    codes: Tensor
    scale: Tensor

    def weight(self) -> Tensor:
        """float32 `[O, I]`."""
        return self.codes.float() * self.scale


def packing_method(folder: Path) -> str | None:
    """`gptq` or `compressed-tensors` where a folder's config names one of them, otherwise None."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    block = config.get("quantization_config") if isinstance(config, dict) else None
    method = block.get("quant_method") if isinstance(block, dict) else None
    if method is None and any((folder / name).is_file() for name in QUANTIZE_CONFIGS):
        method = "gptq"
    return method if method in METHODS else None


class PackedFolder:
    """The tensors of a folder, by name, read one at a time. Raises `SourceError` where it has no weights.

    `architecture` says which of its matrices are stored fused. `modules`: the linear layers that are packed, and which
    rows of a stored matrix each is; None for matrices that the architecture does not know.
    """

    def __init__(self, folder: Path, architecture: Architecture):
        self.folder = folder
        self.config: Mapping[str, Any] = read_json(folder / "config.json")
        if (folder / INDEX_FILE).is_file():
            files = sorted(set(read_weight_map(folder, INDEX_FILE).values()))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
        self._files = {name: file for file in files for name in read_header(folder / file)}
        self._open: dict[str, Any] = {}
        if not self._files:
            raise SourceError(f"{folder}: no safetensors file")
        ends = (".qweight", ".weight_packed")
        # Matrices as they are stored, and how the names of their codes end.
        self._wholes = {name.removesuffix(end): end for name in self._files for end in ends if name.endswith(end)}
        self._shapes = stored_shapes(architecture)
        parts = parts_of(self._shapes, architecture)
        split = {part.whole for part in parts.values()}
        self.modules: dict[str, Part | None] = {
            name: part for name, part in parts.items() if part.whole in self._wholes
        }
        self.modules |= {name: None for name in self._wholes if name not in split}

    @property
    def plain(self) -> list[str]:
        """Tensors that belong to no packed module; biases do count."""
        return [name for name in self._files if name.rpartition(".")[0] not in self._wholes or name.endswith(".bias")]

    def read(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def compare(self, name: str, module: Module, weight: NestedWeight) -> PackedModule | str:
        """One module beside the nested one of the same name, or why they cannot be compared."""
        outputs, inputs = module.shape
        part = self.modules[name]
        stored_as, rows = (name, slice(outputs)) if part is None else (part.whole, slice(part.start, part.stop))
        if stored_as != name:
            outputs = self._shapes[stored_as][0]
        ending = self._wholes[stored_as]
        gptq = ending == ".qweight"
        stored = self.read(f"{stored_as}{ending}")
        words = stored.T if gptq else stored
        bits = words.shape[1] * WORD_BITS // inputs if words.dim() == 2 else 0
        view: View = "draft" if bits == BITS["draft"] else "target"
        if tuple(words.shape) != (outputs, inputs * BITS[view] // WORD_BITS):
            return f"is packed as {list(stored.shape)}, which is neither 4 nor 8 bits of {outputs} x {inputs} weights"
        words = words[rows]
        if view == "target" and weight.refinement is None:
            return "holds 8 bits, and the nested checkpoint has no target view"
        if f"{stored_as}.weight_zero_point" in self._files or (
            gptq and not self._symmetric(f"{stored_as}.qzeros", bits)
        ):
            return "is asymmetric, which a base plane cannot be"
        scale = (self.read(f"{stored_as}.scales").T if gptq else self.read(f"{stored_as}.weight_scale"))[rows]
        groups = group_index(inputs, module.group_size, weight.permutation)
        index = groups
        if gptq and f"{stored_as}.g_idx" in self._files:
            index = self.read(f"{stored_as}.g_idx")
        elif scale.shape[1] != module.groups:
            index = torch.arange(inputs, dtype=torch.int32) // max(1, inputs // scale.shape[1])
        own = step(weight.scale, view)
        same = tuple(scale.shape) == tuple(own.shape) and torch.equal(scale.float(), own)
        return PackedModule(
            view=view,
            base_equal=torch.equal(words, words_in_source_order(weight, view)),
            scale_equal=same and torch.equal(index, groups),
            codes=fields(words, bits),
            scale=scale.float()[:, index.long()],
        )

    def _symmetric(self, name: str, bits: int) -> bool:
        """Whether every zero point is the middle code, stored as it is or less one."""
        found = set(fields(self.read(name), bits).unique().tolist())
        return len(found) == 1 and found <= {0, -1}


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 words `[O, W]` of unsigned fields -> int8 codes `[O, W * 32 / bits]`, `2^(bits - 1)` subtracted."""
    parts = [(words >> shift) & (2**bits - 1) for shift in range(0, WORD_BITS, bits)]
    return (torch.stack(parts, dim=-1).flatten(1) - 2 ** (bits - 1)).to(torch.int8)
