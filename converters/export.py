"""A nested checkpoint written in another format: one view of it, for programs that know nothing of nesting.

    checkpoint -> types of scales, every problem -> shards, tensor by tensor -> config, tokenizer, card -> rename

Codes and scales go over as they are (see `export_formats`); every plane that is read is compared with its digest, and
tensors that are not quantized are copied byte for byte. Memory holds one module at a time. The result is assembled in
a folder beside the output and renamed into place, so the output either does not exist or is complete.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format.architecture import read_architecture
from bitnest_format.card import CARD_FILE, export_card
from bitnest_format.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    NestedWeight,
    View,
    count_parameters,
    source_config,
)
from bitnest_format.converters.export_folder import Movement, new_folder, write_shards
from bitnest_format.converters.export_formats import (
    BITS,
    FORMATS,
    PER_ROW,
    WORD_BITS,
    ExportedTensor,
    Quantized,
    deviation,
    step,
)
from bitnest_format.converters.export_options import PLAIN_TYPES, ExportOptions
from bitnest_format.converters.hf import INDEX_FILE, SINGLE_FILE
from bitnest_format.converters.preflight import existing_parent, output_problems
from bitnest_format.errors import CheckpointError, SourceError
from bitnest_format.manifest import Module, Plane
from bitnest_format.shards import (
    DTYPE_NAMES,
    DTYPES,
    Pending,
    TensorEntry,
    inside,
    pending_copy,
    read_header,
    tensor_bytes,
    tensor_sha256,
    write_json,
)

Progress = Callable[[str, int, int], None]

TYPE_KEYS = ("dtype", "torch_dtype")
NAMED_IN_MESSAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was written.

    modules: quantized modules of the checkpoint. planes_equal: how many of them the export stores with the very bytes
    of the base plane. rounding: what rounding changed in the stored scales, or in dequantized weights: the relative
    Frobenius norm over all of them. largest_rounding: the largest change of one value. Both are 0.0 where every value
    is exact.
    """

    folder: Path
    format: str
    view: View
    modules: int
    planes_equal: int
    bytes: int
    rounding: float
    largest_rounding: float
    notes: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder), "seconds": round(self.seconds, 3)}


def export(
    folder: Path,
    output: Path,
    options: ExportOptions,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a view of the nested checkpoint in `folder` to `output`, a new folder.

    `repo_id` and `revision` say where on the Hub the checkpoint came from, if it did; the card repeats them.
    `progress(stage, done, total)` is called as work goes on.

    Raises `SourceError` listing every problem before any work, `CheckpointError` for a checkpoint that is broken or
    lacks the view, `BitnestError` where the disk is full. A failed export leaves nothing.
    """
    began = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    report("reading the scales", 0, 1)
    run = _Export(Checkpoint(folder, options.chosen_view), options)
    problems = [*run.problems, *output_problems(folder, output), *run.space_problems(output)]
    if problems:
        raise SourceError(problems)
    with new_folder(output) as work:
        run.write(work, report)
        card = export_card(
            run.checkpoint.manifest,
            title=output.absolute().name,
            format_name=options.format,
            view=options.chosen_view,
            origin=(repo_id, revision),
            notes=run.notes,
        )
        (work / CARD_FILE).write_text(card, encoding="utf-8")
        size = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    return ExportResult(
        folder=output,
        format=options.format,
        view=options.chosen_view,
        modules=len(run.checkpoint.manifest.modules),
        planes_equal=run.planes_equal,
        bytes=size,
        rounding=run.movement.relative,
        largest_rounding=run.movement.largest,
        notes=run.notes,
        seconds=time.perf_counter() - began,
    )


class _Export:
    """One export: the tensors to be written, what stands in the way, and what a person should know."""

    def __init__(self, checkpoint: Checkpoint, options: ExportOptions):
        self.checkpoint = checkpoint
        self.options = options
        self.architecture = read_architecture(checkpoint.config, checkpoint.weight_map)
        self.format = FORMATS[options.format]
        self.view = options.chosen_view
        self.movement = Movement()
        self.notes: list[str] = []
        self.planes_equal = 0
        self.headers = {shard: read_header(checkpoint.folder / shard) for shard in set(checkpoint.weight_map.values())}
        self.plain_type = self._plain_type()
        self.problems = [*self._fused_problems(), *self._permutation_problems(), *self._shape_problems()]
        self.scale_types = {} if self.format.plain else self._scale_types()
        self.tensors = self._tensors()
        self.side_files = self._side_files()
        self._add_notes()

    def write(self, work: Path, report: Progress) -> None:
        """Fill a new folder with everything but the card."""
        done = 0

        def counted(tensor: Pending) -> Pending:
            def chunks() -> Iterator[memoryview | bytes]:
                nonlocal done
                report("writing", done, len(self.tensors))
                yield from tensor.chunks()
                done += 1

            return Pending(tensor.dtype, tensor.shape, tensor.size, chunks)

        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        parameters = count_parameters(self.checkpoint.manifest, shapes)
        tensors = {name: counted(tensor) for name, tensor in self.tensors.items()}
        write_shards(work, tensors, self.options.shard_bytes, parameters)
        report("writing", done, len(self.tensors))
        config, quantization = self._config()
        write_json(work / CONFIG_FILE, config)
        if self.format.config_copy:
            write_json(work / self.format.config_copy, quantization)
        for name in self.side_files:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoint.folder / name, work / name)

    def space_problems(self, output: Path) -> Iterator[str]:
        side = sum((self.checkpoint.folder / name).stat().st_size for name in self.side_files)
        needed = sum(tensor.size for tensor in self.tensors.values()) + side
        parent = existing_parent(output.absolute())
        free = shutil.disk_usage(parent).free
        if free < needed:
            yield (
                f"{parent}: {free / 1e6:,.1f} MB free, the export needs about {needed / 1e6:,.1f} MB. "
                "Free some space or choose another disk."
            )

    def _plain_type(self) -> torch.dtype:
        """The type of dequantized weights: the one asked for, the one the config names, or that of the embedding."""
        named = (self.options.dtype, *(self.checkpoint.config.get(key) for key in TYPE_KEYS))
        for name in named:
            if name in PLAIN_TYPES:
                return PLAIN_TYPES[name]
        embedding = self._entry(self.architecture.embedding)
        stored = DTYPES[embedding.dtype] if embedding else torch.float16
        return stored if stored in PLAIN_TYPES.values() else torch.float16

    def _fused_problems(self) -> Iterator[str]:
        fused = self.architecture.family.fused
        if fused:
            yield (
                f"{self.architecture.model_type}: other programs read {', '.join(fused)} of such a model as one "
                "matrix, which is stored here in parts; exports do not join them. Use the checkpoint with this package."
            )

    def _permutation_problems(self) -> Iterator[str]:
        permuted = [name for name, module in self.checkpoint.manifest.modules.items() if module.permutation]
        if permuted and not self.format.permutations:
            able = ", ".join(name for name, known in FORMATS.items() if known.permutations)
            yield (
                f"{_listed(permuted)}: has an input permutation (quantized in activation order), which "
                f"{self.options.format} has no word for. Export to {able} instead."
            )

    def _shape_problems(self) -> Iterator[str]:
        if self.format.packs_outputs:
            per_word = WORD_BITS // BITS[self.view]
            odd = [name for name, module in self.checkpoint.manifest.modules.items() if module.shape[0] % per_word]
            if odd:
                yield (
                    f"{_listed(odd)}: the number of outputs is not a multiple of {per_word}, and the zero points of "
                    f"{self.options.format} would not fill their words. Export to another format."
                )

    def _scale_types(self) -> dict[str, torch.dtype]:
        """The type of each module's scales: as stored where it holds them exactly, otherwise the widest allowed."""
        types: dict[str, torch.dtype] = {}
        inexact: dict[str, float] = {}
        for name, module in self.checkpoint.manifest.modules.items():
            scale = _Stored(self.checkpoint, name, module).scale()
            steps = step(scale, self.view)
            types[name] = scale.dtype
            if scale.dtype not in self.format.scale_types or deviation(steps, scale.dtype):
                types[name] = self.format.scale_types[-1]
            if changed := deviation(steps, types[name]):
                inexact[name] = changed
        lost = [name for name, changed in inexact.items() if changed >= 1]
        if lost:
            self.problems.append(
                f"{_listed(lost)}: a scale is too large or too small for float16, the one type of "
                f"{self.options.format}. Export to compressed-tensors-w4, compressed-tensors-w8 or hf instead."
            )
        elif inexact:
            self.notes.append(
                f"{_listed(list(inexact))}: scales are rounded to float16, the one type of {self.options.format}; the "
                f"largest change is {max(inexact.values()):.1e} of a scale"
            )
        return types

    def _tensors(self) -> dict[str, Pending]:
        """Every tensor of the export, in the order of the checkpoint."""
        modules = {module.base.name: (name, module) for name, module in self.checkpoint.manifest.modules.items()}
        planes = {name for _, module in modules.values() for name in _plane_names(module)}
        tensors: dict[str, Pending] = {}
        for name, shard in self.checkpoint.weight_map.items():
            if name in modules:
                module_name, module = modules[name]
                dtype = self.scale_types.get(module_name, self.plain_type)
                stored = _Stored(self.checkpoint, module_name, module)
                layout = self.format.tensors(module, self.view, dtype)
                tensors |= {f"{module_name}.{tensor.suffix}": self._pending(stored, tensor) for tensor in layout}
                self.planes_equal += self.format.keeps_base
            elif name not in planes:
                entry = self._entry(name)
                if entry is None:
                    raise CheckpointError(f"{shard}: {name}: missing, though the index names it")
                tensors[name] = pending_copy(self.checkpoint.folder / shard, entry)
        missing = [name for base, (name, _) in modules.items() if base not in self.checkpoint.weight_map]
        if missing:
            raise CheckpointError(f"{_listed(missing)}: the base plane is missing from the index")
        return tensors

    def _pending(self, stored: _Stored, tensor: ExportedTensor) -> Pending:
        def chunks() -> Iterator[memoryview]:
            for piece in tensor.pieces(stored):
                rounded = piece.to(tensor.dtype)
                if piece.is_floating_point():
                    self.movement.add(f"{stored.name}.{tensor.suffix}", piece, rounded)
                yield tensor_bytes(rounded)

        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        return Pending(DTYPE_NAMES[tensor.dtype], tensor.shape, size, chunks)

    def _entry(self, name: str) -> TensorEntry | None:
        return self.headers.get(self.checkpoint.weight_map.get(name, ""), {}).get(name)

    def _config(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """`config.json`, and the block in it that names the quantization."""
        config = source_config(self.checkpoint.config)
        manifest = self.checkpoint.manifest
        quantization = self.format.config(
            Quantized(
                modules=manifest.modules,
                head=self.architecture.head_module,
                per_row=manifest.nesting["group_size"] == PER_ROW,
                unquantized=tuple(self._plain_linears()),
                view=self.view,
                activations=self.options.activations,
            )
        )
        if quantization is not None:
            return {**config, "quantization_config": quantization}, quantization
        named = [key for key in TYPE_KEYS if key in config] or [TYPE_KEYS[0]]
        return {**config, **dict.fromkeys(named, str(self.plain_type).removeprefix("torch."))}, None

    def _plain_linears(self) -> Iterator[str]:
        """Linear layers that are not quantized; a head that shares the embedding is one of them."""
        head = self.architecture.head_module
        for name in self.checkpoint.manifest.unquantized:
            module, _, kind = name.rpartition(".")
            entry = self._entry(name)
            matrix = kind == "weight" and entry is not None and len(entry.shape) == 2
            if matrix and name != self.architecture.embedding and module != head:
                yield module
        if head not in self.checkpoint.manifest.modules:
            yield head

    def _side_files(self) -> list[str]:
        """Tokenizer, chat template, generation config and licence: what the manifest lists beside the weights."""
        ours = {CONFIG_FILE, CARD_FILE, INDEX_FILE, SINGLE_FILE, self.format.config_copy}
        listed = [
            name
            for name in self.checkpoint.manifest.files
            if name not in ours and not name.endswith((".safetensors", ".safetensors.index.json"))
        ]
        present = [name for name in listed if inside(self.checkpoint.folder, name).is_file()]
        if absent := sorted(set(listed) - set(present)):
            self.notes.append(f"not in the folder and left out: {', '.join(absent)}")
        return present

    def _add_notes(self) -> None:
        manifest = self.checkpoint.manifest
        head = self.architecture.head_module
        if head in manifest.modules:
            how = "dequantized" if self.format.plain else f"stored in {BITS[self.view]} bits like every other module"
            self.notes.append(f"{head} is nested in the checkpoint; here it is {how}")
        config_type = next((self.checkpoint.config[key] for key in TYPE_KEYS if self.checkpoint.config.get(key)), None)
        if not self.format.plain and config_type == "bfloat16":
            self.notes.append(
                "config.json names bfloat16: programs that load the model in that type round its scales to it. "
                "Load it in float16 to keep them"
            )


@dataclass(frozen=True, slots=True)
class _Stored:
    """One module on disk, each plane compared with the manifest's digest as it is read."""

    checkpoint: Checkpoint
    name: str
    module: Module

    def weight(self) -> NestedWeight:
        weight = self.checkpoint.weight(self.name)
        self._check(self.module.base, weight.base)
        self._check(self.module.scale, weight.scale)
        if weight.refinement is not None and self.module.refinement is not None:
            self._check(self.module.refinement, weight.refinement)
        return weight

    def scale(self) -> Tensor:
        scale = self.checkpoint.scale(self.name)
        self._check(self.module.scale, scale)
        return scale

    def permutation(self) -> Tensor | None:
        return self.checkpoint.permutation(self.name)

    def _check(self, plane: Plane, tensor: Tensor) -> None:
        if (found := tensor_sha256(tensor)) != plane.sha256:
            raise CheckpointError(
                f"{self.checkpoint.weight_map[plane.name]}: {plane.name}: SHA-256 is {found[:12]}..., expected "
                f"{plane.sha256[:12]}... as in the manifest. Restore the shard, or download the checkpoint again."
            )


def _plane_names(module: Module) -> Iterator[str]:
    yield from (module.base.name, module.scale.name)
    if module.refinement is not None:
        yield module.refinement.name
    if module.permutation is not None:
        yield module.permutation


def _listed(names: list[str]) -> str:
    rest = len(names) - NAMED_IN_MESSAGES
    return ", ".join(names[:NAMED_IN_MESSAGES]) + (f" and {rest} more" if rest > 0 else "")
