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

from bitnest_format.architecture import read_architecture
from bitnest_format.card import CARD_FILE, export_card
from bitnest_format.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
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
from bitnest_format.converters.export_module import ExportedModule
from bitnest_format.converters.export_options import PLAIN_TYPES, ExportOptions
from bitnest_format.converters.fused import joined, stored_name
from bitnest_format.converters.hf import INDEX_FILE, SINGLE_FILE
from bitnest_format.converters.preflight import existing_parent, output_problems
from bitnest_format.errors import CheckpointError, SourceError
from bitnest_format.manifest import Module
from bitnest_format.shards import (
    DTYPE_NAMES,
    DTYPES,
    Pending,
    TensorEntry,
    inside,
    pending_copy,
    read_header,
    tensor_bytes,
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
        self.modules = self._stored_modules()
        self.headers = {shard: read_header(checkpoint.folder / shard) for shard in set(checkpoint.weight_map.values())}
        self.plain_type = self._plain_type()
        unjoined = [*self._fused_problems()]
        self.problems = [*unjoined, *self._permutation_problems(), *self._shape_problems()]
        self.scale_types = {} if self.format.plain or unjoined else self._scale_types()
        self.tensors = {} if unjoined else self._tensors()
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

    def _stored_modules(self) -> dict[str, ExportedModule]:
        """The modules as other programs know them: parts of a fused matrix as one, by its name."""
        modules = self.checkpoint.manifest.modules
        return {
            whole: ExportedModule(self.checkpoint, whole, {part: modules[part] for part in parts})
            for whole, parts in joined(modules, self.architecture).items()
        }

    def _fused_problems(self) -> Iterator[str]:
        """Fused matrices whose parts do not make one."""
        wanted = joined(dict(self.architecture.modules()), self.architecture)
        unlike: dict[str, str] = {}
        for whole, stored in self.modules.items():
            parts = list(stored.parts.values())
            absent = [name for name in wanted.get(whole, ()) if name not in stored.parts]
            if absent:
                unlike[whole] = f"{_listed(absent)} is not quantized"
            elif len({part.group_size for part in parts}) > 1:
                unlike[whole] = f"its parts have groups of {', '.join(str(part.group_size) for part in parts)}"
            elif not stored.one_permutation():
                unlike[whole] = "its parts have different input permutations"
        for whole, reason in unlike.items():
            yield f"{whole}: other programs store it as one matrix, but {reason}. Use the checkpoint with this package."

    def _permutation_problems(self) -> Iterator[str]:
        permuted = [name for name, stored in self.modules.items() if stored.module.permutation]
        if permuted and not self.format.permutations:
            able = ", ".join(name for name, known in FORMATS.items() if known.permutations)
            yield (
                f"{_listed(permuted)}: has an input permutation (quantized in activation order), which "
                f"{self.options.format} has no word for. Export to {able} instead."
            )

    def _shape_problems(self) -> Iterator[str]:
        if self.format.packs_outputs:
            per_word = WORD_BITS // BITS[self.view]
            odd = [name for name, stored in self.modules.items() if stored.module.shape[0] % per_word]
            if odd:
                yield (
                    f"{_listed(odd)}: the number of outputs is not a multiple of {per_word}, and the zero points of "
                    f"{self.options.format} would not fill their words. Export to another format."
                )

    def _scale_types(self) -> dict[str, torch.dtype]:
        """The type of each module's scales: as stored where it holds them exactly, otherwise the widest allowed."""
        types: dict[str, torch.dtype] = {}
        inexact: dict[str, float] = {}
        for name, stored in self.modules.items():
            scale = stored.scale()
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
        bases = {part.base.name: whole for whole, stored in self.modules.items() for part in stored.parts.values()}
        planes = {name for stored in self.modules.values() for part in stored.parts.values() for name in _planes(part)}
        tensors: dict[str, Pending] = {}
        plain: list[str] = []
        written: set[str] = set()
        for name in self.checkpoint.weight_map:
            whole = bases.get(name)
            if whole is not None and whole not in written:
                written.add(whole)
                stored = self.modules[whole]
                layout = self.format.tensors(stored.module, self.view, self.scale_types.get(whole, self.plain_type))
                tensors |= {f"{whole}.{tensor.suffix}": self._pending(stored, tensor) for tensor in layout}
                self.planes_equal += self.format.keeps_base * len(stored.parts)
            elif whole is None and name not in planes:
                plain.append(name)
        missing = [whole for base, whole in bases.items() if base not in self.checkpoint.weight_map]
        if missing:
            raise CheckpointError(f"{_listed(missing)}: the base plane is missing from the index")
        for whole, parts in self._joined_tensors(plain).items():
            tensors[whole] = self._copied(whole, parts)
        return tensors

    def _joined_tensors(self, names: list[str]) -> dict[str, list[str]]:
        """Tensors that are not quantized by the name they get: parts of one matrix, or of its bias, together."""
        kinds: dict[str, list[str]] = {}
        for name in names:
            module, _, kind = name.rpartition(".")
            kinds.setdefault(kind, []).append(module)
        found = {
            f"{whole}.{kind}": [f"{part}.{kind}" for part in parts]
            for kind, modules in kinds.items()
            for whole, parts in joined(modules, self.architecture).items()
        }
        order = {name: place for place, name in enumerate(names)}
        return dict(sorted(found.items(), key=lambda item: min(order[name] for name in item[1])))

    def _copied(self, whole: str, names: list[str]) -> Pending:
        """Stored tensors as they are, the rows of one after those of the other."""
        parts = []
        for name in names:
            shard, entry = self.checkpoint.weight_map[name], self._entry(name)
            if entry is None:
                raise CheckpointError(f"{shard}: {name}: missing, though the index names it")
            parts.append(pending_copy(self.checkpoint.folder / shard, entry))
        if len(parts) == 1:
            return parts[0]
        first, size = parts[0], sum(part.size for part in parts)
        wanted = joined(dict(self.architecture.modules()), self.architecture)[whole.rpartition(".")[0]]
        if len(names) != len(wanted) or any((p.dtype, p.shape[1:]) != (first.dtype, first.shape[1:]) for p in parts):
            self.problems.append(
                f"{whole}: cannot be joined of {', '.join(names)}, expected all of its parts in one type. Use the "
                "checkpoint with this package."
            )

        def chunks() -> Iterator[memoryview | bytes]:
            for part in parts:
                yield from part.chunks()

        return Pending(first.dtype, (sum(part.shape[0] for part in parts), *first.shape[1:]), size, chunks)

    def _pending(self, stored: ExportedModule, tensor: ExportedTensor) -> Pending:
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
                modules={name: stored.module for name, stored in self.modules.items()},
                head=self.architecture.head_module,
                per_row=manifest.nesting["group_size"] == PER_ROW,
                unquantized=tuple(dict.fromkeys(self._plain_linears())),
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
                yield stored_name(module, self.architecture)
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


def _planes(module: Module) -> Iterator[str]:
    yield from (module.base.name, module.scale.name)
    if module.refinement is not None:
        yield module.refinement.name
    if module.permutation is not None:
        yield module.permutation


def _listed(names: list[str]) -> str:
    rest = len(names) - NAMED_IN_MESSAGES
    return ", ".join(names[:NAMED_IN_MESSAGES]) + (f" and {rest} more" if rest > 0 else "")
