"""A nested checkpoint on disk: its file names, how to read it, how to write one.

Two families of shards lie in the folder. `bitnest-base-*` holds the base planes, the scales and every tensor
that is not quantized: all the draft needs. `bitnest-refinement-*` holds the refinement planes alone. Two indexes
say which tensor lies where; the draft's names base shards only, so a draft can be fetched without the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.errors import CheckpointError
from bitnest_format.manifest import MANIFEST_FILE, FileRecord, Manifest, Module
from bitnest_format.shards import (
    DTYPE_NAMES,
    Pending,
    file_sha256,
    inside,
    read_header,
    read_json,
    split_by_size,
    write_json,
    write_shard,
)
from bitnest_format.spec import FORMAT_VERSION

CONFIG_FILE = "config.json"
TARGET_INDEX = "bitnest.safetensors.index.json"
DRAFT_INDEX = "bitnest-draft.safetensors.index.json"
QUANT_METHOD = "bitnest"
# transformers only warns of a method that it does not know. Where this field of a config names no weight file, it fails
# and quotes the field; the plug-in puts the index of a view in its place.
WEIGHTS_FIELD = "transformers_weights"
WEIGHTS_HINT = "run 'pip install bitnest-format', and 'import bitnest_format.transformers' before loading"

BASE_SUFFIX = "weight_packed"
REFINEMENT_SUFFIX = "weight_refinement"
SCALE_SUFFIX = "weight_scale"
PERMUTATION_SUFFIX = "weight_perm"
PERMUTATION_FEATURE = "input_permutation"

BIAS_TYPES = (torch.float16, torch.bfloat16, torch.float32)

DEFAULT_SHARD_BYTES = 5_000_000_000

View = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class NestedWeight:
    """The stored tensors of one quantized module.

    `base` and `refinement`: int32 words `[O, I / 8]`; `scale`: float16 or float32 `[O, G]`; `bias`: `[O]` or
    None. `refinement` is None where the checkpoint was opened for drafting alone.
    """

    base: Tensor
    scale: Tensor
    refinement: Tensor | None = None
    bias: Tensor | None = None
    permutation: Tensor | None = None

    def rows(self, part: slice) -> NestedWeight:
        """Some outputs of the module, as views of its tensors."""
        refinement = None if self.refinement is None else self.refinement[part]
        bias = None if self.bias is None else self.bias[part]
        return NestedWeight(self.base[part], self.scale[part], refinement, bias, self.permutation)

    def base_codes(self) -> Tensor:
        """`q4`, int8 `[O, I]`."""
        return packing.unpack(self.base)

    def target_codes(self) -> Tensor:
        """`16 * q4 + qr`, int8 `[O, I]`. Raises `CheckpointError` where there is no refinement plane."""
        if self.refinement is None:
            raise CheckpointError("the target view needs the refinement plane, which was not loaded")
        return nesting.compose(packing.unpack(self.base), packing.unpack(self.refinement))

    def dequantize(self, view: View) -> Tensor:
        """The weight of a view, float32 `[O, I]`, in the order of stored columns."""
        if view == "draft":
            return nesting.draft_weight(self.base_codes(), self.scale)
        if self.refinement is None:
            raise CheckpointError("the target view needs the refinement plane, which was not loaded")
        return nesting.target_weight(self.base_codes(), packing.unpack(self.refinement), self.scale)


class Checkpoint:
    """A checkpoint folder opened for reading. Holds no tensors; each call reads what it returns.

    `view="draft"` needs only the base shards. Raises `CheckpointError` or `FileFormatError` naming what is
    missing or broken, `UnsupportedVersionError` for a format this reader does not know.
    """

    def __init__(self, folder: Path, view: View = "target"):
        if not (folder / MANIFEST_FILE).is_file():
            raise CheckpointError(_not_a_checkpoint(folder))
        self.folder = folder
        self.view: View = view
        self.manifest = Manifest.from_dict(read_json(folder / MANIFEST_FILE))
        self.config = _read_config(folder)
        if view not in self.manifest.views:
            raise CheckpointError(
                f"{MANIFEST_FILE}: the only view is the draft, of 4 bits; the {view} view cannot be rebuilt. Open the "
                "draft (--view draft), or convert again from the full-precision model or with --reference."
            )
        index_name = TARGET_INDEX if view == "target" else DRAFT_INDEX
        self.weight_map = read_weight_map(folder, index_name)
        missing = sorted({name for name in self.weight_map.values() if not (folder / name).is_file()})
        if missing:
            raise CheckpointError(
                f"{index_name}: names {', '.join(missing)}, not in the folder. Download the checkpoint again"
                + (", or open its draft view." if view == "target" else ".")
            )
        self._open: dict[str, Any] = {}

    def architecture(self) -> Architecture:
        """What `config.json` and the names of the tensors say. Raises `UnsupportedModelError`."""
        return read_architecture(self.config, self.weight_map)

    def tensor(self, name: str) -> Tensor:
        """One stored tensor, on the CPU."""
        shard = self.weight_map.get(name)
        if shard is None:
            raise CheckpointError(f"{self.folder.name}: no tensor {name} in the {self.view} index")
        try:
            if shard not in self._open:
                read_header(self.folder / shard)
                self._open[shard] = safe_open(self.folder / shard, framework="pt")
            tensor: Tensor = self._open[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard}: {name}: cannot be read ({error})") from error
        return tensor

    def weight(self, module: str) -> NestedWeight:
        """The planes, scale and bias of one quantized module.

        Raises `CheckpointError` where a tensor is missing, has another type or shape than the format gives it, or where
        a code pair is forbidden.
        """
        entry = self.module(module)
        if self.view == "target" and entry.refinement is None:
            raise CheckpointError(f"{MANIFEST_FILE}: {module}: no refinement plane, though views are draft and target")
        refinement = entry.refinement if self.view == "target" else None
        outputs, inputs = entry.shape
        words = (outputs, inputs // packing.CODES_PER_WORD)
        weight = NestedWeight(
            base=self._tensor(entry.base.name, (torch.int32,), words),
            scale=self.scale(module),
            refinement=self._tensor(refinement.name, (torch.int32,), words) if refinement else None,
            bias=self._tensor(entry.bias, BIAS_TYPES, (outputs,)) if entry.bias else None,
            permutation=self.permutation(module),
        )
        if weight.refinement is not None and packing.any_forbidden_pair(weight.base, weight.refinement):
            raise forbidden_pair(module)
        return weight

    def scale(self, module: str) -> Tensor:
        """The scale of one quantized module, float16 or float32 `[O, G]`. Raises as `weight` does."""
        entry = self.module(module)
        return self._tensor(entry.scale.name, (torch.float16, torch.float32), (entry.shape[0], entry.groups))

    def permutation(self, module: str) -> Tensor | None:
        """The input permutation of one quantized module, int32 `[I]`, if it has one. Raises as `weight` does."""
        entry = self.module(module)
        name = entry.permutation
        return self._tensor(name, (torch.int32,), (entry.shape[1],)) if name else None

    def _tensor(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensor(name)
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            expected = " or ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
            raise CheckpointError(
                f"{self.weight_map[name]}: {name}: is {DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}, "
                f"expected {expected} {list(shape)}"
            )
        return tensor

    def module(self, name: str) -> Module:
        """The manifest's record of a quantized module."""
        try:
            return self.manifest.modules[name]
        except KeyError:
            raise CheckpointError(f"{MANIFEST_FILE}: {name} is not a quantized module") from None


def forbidden_pair(module: str) -> CheckpointError:
    """What to raise where a composed code would fall below -128."""
    return CheckpointError(
        f"{module}: a base code of -8 stands beside a negative refinement code, which no 8-bit code can hold. "
        "Run 'bitnest-format validate' for the place."
    )


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG_FILE)
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG_FILE}: found a JSON {type(config).__name__}, expected an object")
    return config


def read_weight_map(folder: Path, index_name: str) -> dict[str, str]:
    """`{tensor: shard}` of an index whose shard names all stay inside the folder."""
    return weight_map_of(read_json(folder / index_name), index_name, folder)


def weight_map_of(index: Any, index_name: str, folder: Path) -> dict[str, str]:
    """`read_weight_map` of an index that was parsed already; `folder` serves for messages alone."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_name}: weight_map: missing or empty, expected tensor names with their shards")
    for shard in set(map(str, weight_map.values())):
        inside(folder, shard)
    return {str(name): str(shard) for name, shard in weight_map.items()}


def _not_a_checkpoint(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder"
    block = _read_config(folder).get("quantization_config") if (folder / CONFIG_FILE).is_file() else None
    method = block.get("quant_method") if isinstance(block, dict) else None
    hint = "Make one with 'bitnest-format convert'."
    if (folder / DRAFT_INDEX).is_file() or any(folder.glob("bitnest-base-*.safetensors")):
        hint = "Its weights are there: a push or a download did not come to its end. Push or download it again."
    elif method == "bitnet":
        hint = "Its quant_method is 'bitnet', the 1.58-bit method; this package reads 'bitnest'."
    elif method:
        hint = f"Its quant_method is {method!r}."
    return f"{folder}: no {MANIFEST_FILE}, so this is not a nested checkpoint. {hint}"


@dataclass(slots=True)
class CheckpointWriter:
    """Writes the shards, indexes, config and manifest of a checkpoint into an existing folder.

    Give it every tensor (in the order in which it should lie on disk), then call `finish`. Nothing outside
    `folder` is touched; making the result appear at once is up to the caller (write beside, then rename).
    """

    folder: Path
    shard_bytes: int = DEFAULT_SHARD_BYTES
    base: dict[str, Pending] = field(default_factory=dict)
    refinement: dict[str, Pending] = field(default_factory=dict)

    def finish(self, manifest: Manifest, config: Mapping[str, Any], side_files: Iterable[str] = ()) -> Manifest:
        """Write everything; returns the manifest as written, with `files` filled in.

        `side_files` are names of files that already lie in the folder (tokenizer, licence) and shall be listed.
        """
        files: dict[str, FileRecord] = {}
        base_map = self._write_family("base", self.base, files)
        refinement_map = self._write_family("refinement", self.refinement, files)
        parameters = count_parameters(manifest, {name: tensor.shape for name, tensor in self.base.items()})
        self._write_index(DRAFT_INDEX, base_map, self.base, parameters)
        self._write_index(TARGET_INDEX, base_map | refinement_map, self.base | self.refinement, parameters)
        write_json(self.folder / CONFIG_FILE, config)
        for name in (CONFIG_FILE, DRAFT_INDEX, TARGET_INDEX, *side_files):
            path = self.folder / name
            files[name] = FileRecord(size=path.stat().st_size, sha256=file_sha256(path))
        document = manifest.to_dict()
        document["files"] = {n: {"size": f.size, "sha256": f.sha256} for n, f in sorted(files.items())}
        complete = Manifest.from_dict(document)
        (self.folder / MANIFEST_FILE).write_text(complete.to_json(), encoding="utf-8")
        return complete

    def _write_family(self, plane: str, tensors: Mapping[str, Pending], files: dict[str, FileRecord]) -> dict[str, str]:
        shards = split_by_size(tensors, self.shard_bytes)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file_name = f"bitnest-{plane}-{number:05d}-of-{len(shards):05d}.safetensors"
            metadata = {"bitnest_format_version": FORMAT_VERSION, "bitnest_planes": plane}
            size, sha256 = write_shard(self.folder / file_name, {n: tensors[n] for n in names}, metadata)
            files[file_name] = FileRecord(size=size, sha256=sha256)
            weight_map |= dict.fromkeys(names, file_name)
        return weight_map

    def _write_index(
        self, name: str, weight_map: Mapping[str, str], tensors: Mapping[str, Pending], parameters: int
    ) -> None:
        # The Hub counts a model's parameters by this number; from words of packed codes it would guess wrongly.
        metadata = {"total_parameters": parameters, "total_size": sum(tensor.size for tensor in tensors.values())}
        write_json(self.folder / name, {"metadata": metadata, "weight_map": dict(weight_map)})


def count_parameters(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The parameters of the model itself: weights of quantized modules, and values of tensors that are not quantized.

    `shapes` are those of the base shards' tensors. Scales and permutations are not parameters, and a nested weight is
    one, not two.
    """
    nested = sum(module.shape[0] * module.shape[1] for module in manifest.modules.values())
    return nested + sum(math.prod(shapes[name]) for name in manifest.unquantized if name in shapes)


def checkpoint_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a source's config with the block that names this format, and a hint for who lacks the package."""
    block = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, "manifest": MANIFEST_FILE}
    return {**config, "quantization_config": block, WEIGHTS_FIELD: WEIGHTS_HINT}


def source_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint's config without what `checkpoint_config` added."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", WEIGHTS_FIELD)}
