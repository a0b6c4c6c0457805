"""From a source to a finished checkpoint, one decoder layer at a time.

    source -> preflight -> rotation -> [layer: fold -> calibrate -> base -> refinement -> part file] -> shards

The calibration activations run through the folded, unquantized layers, so a layer's Hessians do not depend on how
earlier layers were quantized, and a resumed run replays finished layers forward to reach the same bits. Each layer
becomes a part file in a work folder beside the output; the finished checkpoint is assembled there and renamed into
place, so the output either does not exist or is complete.

With `quantize_lm_head` the head becomes a module too, after the last layer. Memory holds one layer in float32, its
Hessians, the calibration activations, and one embedding matrix at a time, beside it the planes of a nested head.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format import __version__
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import PERMUTATION_FEATURE, CheckpointWriter
from bitnest_format.converters.base import BaseSource, GivenBase, Source, given_modules
from bitnest_format.converters.calibration import Calibration, load_calibration
from bitnest_format.converters.float_model import FloatModel
from bitnest_format.converters.folded_source import FoldedSource
from bitnest_format.converters.learn import learned_rotation, learning_remarks
from bitnest_format.converters.memory import release_freed_memory
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.preflight import (
    WHY_DRAFT_ONLY,
    Plan,
    needs_calibration,
    needs_hessians,
    preflight,
    settle,
)
from bitnest_format.converters.quantize import (
    Measured,
    Together,
    alike,
    draft_codes,
    measure,
    module_record,
    quantize_in_pieces,
    quantize_together,
    rows_at_once,
    stored_planes,
)
from bitnest_format.converters.ranks import ALONE, Ranks
from bitnest_format.converters.records import nesting_record, rotation_record, source_record, stored_config
from bitnest_format.converters.rotation import Rotation, make_rotation, rotate_embedding
from bitnest_format.converters.rotation_file import write_rotation_file
from bitnest_format.converters.work_folder import Part, WorkFolder
from bitnest_format.errors import BitnestError
from bitnest_format.manifest import Manifest, Module
from bitnest_format.shards import Pending, pending_tensor

Progress = Callable[[str, int, int], None]

HEAD_PART = "head"
BESIDE_PART = "beside"
STARVED = (
    "too few calibration tokens reached these experts, so they were rounded to nearest; more calibration text may help"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionResult:
    """What a conversion produced. `seconds` is wall time; `warnings` are worth a person's eye."""

    folder: Path
    manifest: Manifest
    warnings: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        modules = list(self.manifest.modules.values())
        rotation = self.manifest.rotation or {}
        return {
            "folder": str(self.folder),
            "views": list(self.manifest.views),
            "modules": len(modules),
            "bytes": sum(file.size for file in self.manifest.files.values()),
            "mean_saturation": _mean(module.saturation for module in modules),
            "mean_draft_error": _mean(module.draft_error for module in modules),
            "mean_target_error": _mean(module.target_error for module in modules),
            "learned_rotation": rotation.get("learning"),
            "warnings": self.warnings,
            "seconds": round(self.seconds, 3),
        }


def convert(
    source: Source,
    output: Path,
    options: ConvertOptions,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> ConversionResult:
    """Convert `source` into a nested checkpoint at `output`.

    `progress(stage, done, total)` is called as work goes on. `resume` continues an interrupted run of the same
    source, calibration and options and ends with the same bytes; anything else found in the work folder makes it
    fail. Without `resume` an earlier work folder is thrown away. With several `ranks` (see `ranks.joined`) each calls
    this with the same arguments; rank 0 writes, and its result alone has all warnings.

    Raises `SourceError` listing every problem before any work, `UsageError` for options that contradict each
    other, `BitnestError` where the disk is full (finished layers are kept for `resume`).
    """
    began = time.perf_counter()
    report = progress if progress and ranks.first else (lambda stage, done, total: None)
    architecture = read_architecture(source.config, source.tensors)
    options = settle(options, source, architecture)
    report("checking the source", 0, 1)
    plan = ranks.once(lambda: preflight(source, architecture, options, output))
    rotation = None
    if not options.learns:
        # The last bits of a random one depend on how many threads made it: ranks must not make one each.
        rotation = ranks.once(
            lambda: make_rotation(options.rotation_kind, options.rotation_file, options.seed, architecture)
        )
    work = WorkFolder.beside(output)

    def begin() -> tuple[list[str], Calibration | None, set[str]]:
        """The files that lie beside the weights already, the calibration text, and the parts that are finished."""
        work.start(_fingerprint(plan, options, rotation), resume=resume)
        side_files = source.write_side_files(work.checkpoint)
        calibration = None
        if needs_calibration(options, source, architecture):
            calibration = _calibration(options, work.checkpoint, architecture)
        work.pin("calibration", calibration.record() if calibration else None)
        return side_files, calibration, work.all_finished()

    def learn() -> Rotation:
        assert calibration is not None
        ids, sizes = calibration.input_ids, plan.group_sizes
        return learned_rotation(work.rotation, source, architecture, ids, sizes, options, report)

    with ExitStack() as stack:
        ranks.once(lambda: stack.enter_context(work.held()))
        try:
            side_files, calibration, finished = ranks.once(begin)
            if options.learns:
                rotation = ranks.once(learn)
            conversion = _Conversion(
                source, architecture, plan, options, rotation, calibration, work, finished, report, ranks
            )
            conversion.run()
            manifest = ranks.once(lambda: conversion.assemble(side_files))
            if options.save_rotation is not None and rotation is not None and ranks.first:
                r2 = map(rotation.r2, range(architecture.layers))
                learning = rotation.details.get("learning")
                write_rotation_file(options.save_rotation, rotation.r1, r2, learning=learning)
        except OSError as error:
            if error.errno != errno.ENOSPC or not ranks.first:
                raise
            work.remove_unfinished()
            raise BitnestError(
                f"{output.parent}: the disk is full; about {plan.work_bytes:,} bytes are needed in all. "
                "Free some space and run the same command with --resume."
            ) from error
        except BitnestError:
            if ranks.first:
                work.remove_if_empty()
            raise
        ranks.once(lambda: work.publish(output))
    return ConversionResult(
        folder=output, manifest=manifest, warnings=conversion.all_warnings(), seconds=time.perf_counter() - began
    )


def _fingerprint(plan: Plan, options: ConvertOptions, rotation: Rotation | None) -> dict[str, Any]:
    """Everything that decides the result apart from the calibration tokens, which are pinned once known."""
    return {
        "tool": __version__,
        "torch": torch.__version__,
        # Sums of floats depend on how many threads share them.
        "threads": torch.get_num_threads(),
        "source": plan.fingerprint,
        "reference": plan.reference_fingerprint,
        "options": options.fingerprint_fields(),
        "rotation": rotation_record(options, rotation),
    }


def _calibration(options: ConvertOptions, tokenizer: Path, architecture: Architecture) -> Calibration:
    return load_calibration(
        options.calibration,
        tokenizer,
        samples=options.calibration_samples,
        sequence_length=min(options.sequence_length, architecture.max_positions),
        vocab_size=architecture.vocab_size,
    )


class _Conversion:
    """The state of one run: the layers in order, then the shards."""

    def __init__(
        self,
        source: Source,
        architecture: Architecture,
        plan: Plan,
        options: ConvertOptions,
        rotation: Rotation | None,
        calibration: Calibration | None,
        work: WorkFolder,
        finished: set[str],
        report: Progress,
        ranks: Ranks,
    ):
        self.source = source
        self.architecture = architecture
        self.plan = plan
        self.options = options
        self.folded = FoldedSource(source, architecture, rotation, options.device)
        self.nested_head = options.quantize_lm_head
        self.calibration = calibration
        self.work = work
        self.finished = finished
        self.report = report
        self.ranks = ranks
        self.warnings: list[str] = list(source.notes)
        if options.learns and rotation is not None:
            self.warnings += learning_remarks(rotation)
        if plan.draft_only:
            self.warnings.append(WHY_DRAFT_ONLY)
        self.remarks: list[str] = []
        if calibration and len(calibration.input_ids) < options.calibration_samples:
            self.warnings.append(
                f"the calibration text fills {len(calibration.input_ids)} sequences of the "
                f"{options.calibration_samples} asked for"
            )

    def run(self) -> None:
        """Write one part per decoder layer, and a nested head, skipping those an interrupted run has finished."""
        model = None
        if needs_hessians(self.options, self.source, self.architecture):
            model = FloatModel(self.source.config, self.architecture, self.options.device, self.ranks)
        # While a layer is solved, one thread hashes and writes the one before it, and one may read the next.
        with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as reader:
            self._run_layers(model, writer, reader)
        if self.nested_head:
            self._write_nested_head(model)

    def _run_layers(self, model: FloatModel | None, writer: Executor, reader: Executor) -> None:
        layers = self.architecture.layers
        needed = self._layers_needed()
        if model and self.calibration and needed:
            model.embed(self.calibration.input_ids, self.folded.embedding_rows)
            if self.ranks.first:
                self._write_outer_parts(self.folded.held)
            self.folded.release()
        missing = [layer for layer in range(layers) if _layer_part(layer) not in self.finished]
        written: Future[None] | None = None
        for layer, tensors in self._read_layers(range(needed) if model else missing, reader):
            self.report("quantizing layers", layer, layers)
            name = _layer_part(layer)
            weights = self.folded.fold_layer(layer, tensors)
            del tensors
            release_freed_memory()
            # Linear layers that read the same input share one Hessian and are solved as one matrix.
            collect = () if name in self.finished else self.architecture.shared_inputs(layer)
            hessians = model.run_layer(layer, weights, collect) if model else {}
            release_freed_memory()
            if name in self.finished:
                continue
            build = self._quantize_layer(layer, weights, hessians)
            del weights, hessians
            if written is not None:
                written.result()
            if self.ranks.first:
                written = writer.submit(self._store, name, build)
        if written is not None:
            written.result()
        self.report("quantizing layers", layers, layers)
        if self.ranks.first:
            self.remarks += [text for layer in range(layers) for text in self.work.warnings(_layer_part(layer))]

    def _read_layers(self, layers: Sequence[int], reader: Executor) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Each layer's tensors on the CPU, in their stored types; for a GPU, the next layer's are read meanwhile."""
        ahead = self.options.device != "cpu"
        coming: Future[dict[str, Tensor]] | None = None
        for place, layer in enumerate(layers):
            tensors = self._read_layer(layer) if coming is None else coming.result()
            if ahead and place + 1 < len(layers):
                coming = reader.submit(self._read_layer, layers[place + 1])
            yield layer, tensors
            del tensors

    def _read_layer(self, layer: int) -> dict[str, Tensor]:
        known = given_modules(self.source) if self.plan.draft_only else {}
        names = self.architecture.layer_tensors(layer)
        return {name: self.source.read(name) for name in names if name.removesuffix(".weight") not in known}

    def _store(self, name: str, build: Callable[[], Part]) -> None:
        self.work.write(name, build())

    def all_warnings(self) -> list[str]:
        """What is worth a person's eye: about the source, then about modules, as few sentences as there are kinds."""
        return [*self.warnings, *merged_remarks(self.remarks)]

    def _layers_needed(self) -> int:
        """How many layers the calibration text has to run through: up to the last part that is missing."""
        layers = self.architecture.layers
        if self.nested_head and HEAD_PART not in self.finished:
            return layers
        return max((layer + 1 for layer in range(layers) if _layer_part(layer) not in self.finished), default=0)

    def _write_nested_head(self, model: FloatModel | None) -> None:
        if HEAD_PART not in self.finished:
            norm = self.folded.final_norm()
            hessian = model.final_hessian(norm.float()) if model else None
            if model:
                # The calibration activations have served; their memory is needed now.
                model.hidden = torch.empty(0)
            if self.ranks.first:
                self.work.write(HEAD_PART, self._quantize_head(norm, hessian))
        if self.ranks.first:
            self.remarks += self.work.warnings(HEAD_PART)

    def _quantize_head(self, norm: Tensor, hessian: Tensor | None) -> Part:
        """The final norm as it is stored, and the head as a module, solved some rows at a time."""
        head_module, final_norm = self.architecture.head_module, self.architecture.final_norm
        given = self._given_base(head_module)
        if given is not None and self.plan.draft_only:
            return self._draft_head(norm, given)
        name, fold = self.folded.head()
        matrix = self.folded.matrix(name)
        chunks = matrix.split(rows_at_once(matrix.shape[1], self.options.device))

        def progress(done: int) -> None:
            self.report("quantizing the head", done, len(chunks))

        solved = quantize_in_pieces(
            head_module,
            lambda: (self.folded.fold_rows(rows, fold) for rows in chunks),
            hessian,
            self.plan.group_sizes[head_module],
            self.options,
            progress,
            given,
        )
        progress(len(chunks))
        return Part(
            base={final_norm: pending_tensor(self.folded.kept(final_norm, norm)), **_pending(solved.base)},
            refinement=_pending(solved.refinement),
            modules={head_module: solved.record},
            warnings=solved.remarks,
        )

    def _draft_head(self, norm: Tensor, given: GivenBase) -> Part:
        head_module, final_norm = self.architecture.head_module, self.architecture.final_norm
        planes, _ = stored_planes(head_module, draft_codes(given))
        record = module_record(
            head_module,
            planes,
            Measured(),
            shape=self.architecture.head_shape,
            group_size=self.plan.group_sizes[head_module],
            bias=None,
        )
        return Part(
            base={final_norm: pending_tensor(self.folded.kept(final_norm, norm)), **_pending(planes)},
            modules={head_module: record},
        )

    def _given_base(self, module: str) -> GivenBase | None:
        """A module's base plane on the device, where the source brings one."""
        if not isinstance(self.source, BaseSource) or module not in self.source.given:
            return None
        base = self.source.given_base(module)
        device = self.options.device
        order = base.permutation
        return GivenBase(
            codes=base.codes.to(device),
            scale=base.scale.to(device),
            permutation=None if order is None else order.to(device),
        )

    def _matrices(
        self, layer: int, weights: Mapping[str, Tensor], hessians: Mapping[str, Tensor]
    ) -> Iterator[Together]:
        """What a layer has to solve: modules that share their input, apart where their base planes differ in order."""
        prefix = self.architecture.layer_prefix(layer)
        for linears in self.architecture.shared_inputs(layer):
            names = [prefix + linear for linear in linears if prefix + linear in self.plan.modules]
            given = {name: base for name in names if (base := self._given_base(name)) is not None}
            for bases in alike(given) if given else [None] if names else []:
                yield Together(
                    {name: weights[f"{name}.weight"] for name in bases or names},
                    hessians.get(linears[0]),
                    self.plan.group_sizes[next(iter(bases or names))],
                    bases,
                )

    def _draft_layer(self, layer: int, weights: Mapping[str, Tensor]) -> Callable[[], Part]:
        """The part of a layer whose base planes are all there is."""
        part = Part()
        names = [name for name, _ in self.architecture.modules() if name in self.plan.modules]
        for name in names:
            if name.startswith(self.architecture.layer_prefix(layer)):
                base = self._given_base(name)
                assert base is not None
                planes, _ = stored_planes(name, draft_codes(base))
                part.base |= _pending(planes)
                part.modules[name] = module_record(
                    name,
                    planes,
                    Measured(),
                    shape=(base.codes.shape[0], base.codes.shape[1]),
                    group_size=self.plan.group_sizes[name],
                    bias=f"{name}.bias" if f"{name}.bias" in weights else None,
                )
        part.base |= {name: pending_tensor(self.folded.kept(name, tensor)) for name, tensor in weights.items()}
        return lambda: part

    def _quantize_layer(
        self, layer: int, weights: Mapping[str, Tensor], hessians: Mapping[str, Tensor]
    ) -> Callable[[], Part]:
        """Solve a layer's modules. What comes back makes the part of them: it hashes, and holds CPU tensors alone."""
        if self.plan.draft_only:
            return self._draft_layer(layer, weights)
        matrices = list(self._matrices(layer, weights, hessians))
        part = Part()
        records: dict[str, Callable[[], Module]] = {}
        solved = quantize_together(matrices, self.options, self.ranks)
        for matrix, (codes, remarks) in zip(matrices, solved, strict=self.ranks.first):
            part.warnings += remarks
            for name, weight in matrix.weights.items():
                base, refinement = stored_planes(name, codes[name])
                part.base |= _pending(base)
                part.refinement |= _pending(refinement)
                records[name] = partial(
                    module_record,
                    name,
                    base | refinement,
                    measure(codes[name], weight),
                    shape=(weight.shape[0], weight.shape[1]),
                    group_size=matrix.group_size,
                    bias=f"{name}.bias" if f"{name}.bias" in weights else None,
                )
            del codes
            release_freed_memory()
        if hessians:
            part.warnings += _starved_remarks(self.architecture, layer, hessians)
        if self.ranks.first:
            for name in self.architecture.layer_tensors(layer):
                if name.removesuffix(".weight") not in records:
                    part.base[name] = pending_tensor(self.folded.kept(name, weights[name]))

        def complete() -> Part:
            part.modules |= {name: record() for name, record in records.items()}
            return part

        return complete

    def _outer_parts(self) -> Iterator[tuple[str, str, Callable[[], Part]]]:
        """The parts around the layers: their names, the matrix that each is made of, and how."""

        def embedding() -> Part:
            name = self.architecture.embedding
            return Part(base={name: self.folded.pending_matrix(name, rotate_embedding)})

        def final() -> Part:
            name = self.architecture.final_norm
            part = Part(base={name: pending_tensor(self.folded.kept(name, self.folded.final_norm()))})
            if self.folded.rotation is not None or not self.architecture.tied_embeddings:
                part.base[self.architecture.head] = self.folded.pending_matrix(*self.folded.head())
            return part

        def beside() -> Part:
            return Part(base={name: self.folded.pending_beside(name) for name in self.folded.names_beside()})

        yield "embedding", self.architecture.embedding, embedding
        if not self.nested_head:
            yield HEAD_PART, self.folded.head_matrix, final
        if self.folded.names_beside():
            yield BESIDE_PART, BESIDE_PART, beside

    def _write_outer_parts(self, matrices: Container[str]) -> None:
        """Write those made of certain matrices that are not finished."""
        for name, matrix, build in self._outer_parts():
            if matrix in matrices and name not in self.finished:
                self.work.write(name, build())
                self.finished.add(name)

    def assemble(self, side_files: list[str]) -> Manifest:
        """Join the parts into shards and write indexes, config and manifest into the work folder."""
        release_freed_memory()
        self.report("writing the checkpoint", 0, 1)
        self._write_outer_parts({self.architecture.embedding, self.folded.head_matrix, BESIDE_PART})
        self.folded.release()
        order = ["embedding", *map(_layer_part, range(self.architecture.layers)), HEAD_PART]
        order += [BESIDE_PART] if self.folded.names_beside() else []
        writer = CheckpointWriter(self.work.checkpoint, self.options.shard_bytes)
        modules: dict[str, Module] = {}
        for name in order:
            part = self.work.read(name)
            writer.base |= part.base
            writer.refinement |= part.refinement
            modules |= part.modules
        own = [(module.base.name, module.scale.name, module.permutation) for module in modules.values()]
        quantized = {name for names in own for name in names}
        permuted = any(module.permutation for module in modules.values())
        manifest = Manifest(
            required_features=(PERMUTATION_FEATURE,) if permuted else (),
            views=("draft",) if self.plan.draft_only else ("draft", "target"),
            created_by={"name": "bitnest-format", "version": __version__},
            nesting=nesting_record(self.options, self.plan, self.source),
            activation={"bits": 8, "granularity": "token", "symmetric": True},
            kv_cache={"base_bits": 4, "refinement_bits": 4, "granularity": "token_head"},
            speculation={"gamma": 4},
            rotation=rotation_record(self.options, self.folded.rotation, self.folded.turned()),
            source=source_record(self.source.provenance, self.plan),
            calibration=self.calibration.record() if self.calibration else None,
            modules=modules,
            unquantized=tuple(name for name in writer.base if name not in quantized),
            files={},
        )
        untied = self.folded.rotation is not None or self.nested_head
        config = stored_config(self.source.config, self.architecture, untied=untied)
        written = writer.finish(manifest, config, side_files)
        self.report("writing the checkpoint", 1, 1)
        return written


def _starved_remarks(architecture: Architecture, layer: int, hessians: Mapping[str, Tensor]) -> list[str]:
    """One remark that names a layer's experts without a Hessian."""
    starved = [linears[0] for linears in architecture.shared_inputs(layer) if linears[0] not in hessians]
    if architecture.experts is None or not starved:
        return []
    block = f"{architecture.layer_prefix(layer)}{architecture.experts.names.block}"
    numbers = sorted({int(linear.partition(".experts.")[2].partition(".")[0]) for linear in starved})
    return [f"{block} experts {', '.join(map(str, numbers))}: {STARVED}"]


def merged_remarks(remarks: Iterable[str]) -> list[str]:
    """Remarks of the form `place: message`, those with the same message as one."""
    places: dict[str, list[str]] = {}
    for remark in remarks:
        place, _, message = remark.partition(": ")
        places.setdefault(message, []).append(place)
    return [f"{'; '.join(names)}: {message}" for message, names in places.items()]


def _layer_part(layer: int) -> str:
    return f"layer-{layer:05d}"


def _pending(tensors: Mapping[str, Tensor]) -> dict[str, Pending]:
    return {name: pending_tensor(tensor) for name, tensor in tensors.items()}


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 6) if known else None
