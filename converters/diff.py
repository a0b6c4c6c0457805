"""Comparing a nested checkpoint with another one, with the model it was made of, or with a packed one it was made of.

Planes are compared by their digests first; only what differs is decoded. Against an unquantized source the recorded
rotation is folded into the source again, layer by layer, so that weights of the same basis meet; where that rotation
cannot be had, only what it leaves alone is compared, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import WEIGHTS_FIELD, Checkpoint, View
from bitnest_format.converters.base import Source
from bitnest_format.converters.diff_report import DiffReport, Distance, Entry, Kind, ModuleDiff
from bitnest_format.converters.export_formats import dequantized, group_index, in_source_order, step
from bitnest_format.converters.folded_source import FoldedSource, Pieces, recorded_rotation, whole
from bitnest_format.converters.packed_folder import PackedFolder, packing_method
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import UsageError
from bitnest_format.manifest import MANIFEST_FILE
from bitnest_format.shards import DTYPE_NAMES, tensor_sha256

Progress = Callable[[str, int, int], None]

VIEWS: tuple[View, ...] = ("draft", "target")
# A recorded error is rounded to six decimals, and summed in another order on another machine.
RECORD_TOLERANCE = 1e-2
RECORD_FLOOR = 5e-6
# Config keys that a conversion writes anew, with the same meaning.
REWRITTEN = (
    "quantization_config",
    WEIGHTS_FIELD,
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "auto_map",
    "_name_or_path",
)


def kind_of(path: Path) -> Kind:
    """What a file or folder holds, by its content."""
    if (path / MANIFEST_FILE).is_file():
        return "nested"
    return "packed" if path.is_dir() and packing_method(path) else "source"


def diff(
    a: Path, b: Path, *, names: tuple[str, str], rotation_file: Path | None = None, progress: Progress | None = None
) -> DiffReport:
    """Compare two models, one of which at least is a nested checkpoint; that one is A of the report.

    `names` are those of the report. `rotation_file` is the rotation that the checkpoint was made with, for kinds that a
    manifest cannot make again. `progress(stage, done, total)` is called as work goes on.

    Raises `UsageError` where neither is nested, `CheckpointError` for a broken checkpoint, `SourceError` for a source
    that cannot be read or a rotation file that is another.
    """
    kinds = kind_of(a), kind_of(b)
    if "nested" not in kinds:
        raise UsageError(f"{names[0]}, {names[1]}: neither is a nested checkpoint; expected one of them to be")
    if kinds[0] != "nested":
        a, b, names, kinds = b, a, (names[1], names[0]), (kinds[1], kinds[0])
    run = _Comparison(_open(a), progress or (lambda stage, done, total: None))
    if kinds[1] == "nested":
        run.with_nested(_open(b))
    elif kinds[1] == "packed":
        run.with_packed(PackedFolder(b, run.checkpoint.architecture()))
    else:
        run.with_source(open_source(b), rotation_file)
    return run.report(*names, kinds[1])


def _open(folder: Path) -> Checkpoint:
    """A checkpoint with every view it has."""
    draft = Checkpoint(folder, "draft")
    return draft if "target" not in draft.manifest.views else Checkpoint(folder, "target")


class _Comparison:
    """One comparison: what was found so far."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress):
        self.checkpoint = checkpoint
        self.modules = checkpoint.manifest.modules
        self.progress = progress
        self.found: dict[str, ModuleDiff] = {
            name: ModuleDiff(
                name=name,
                shape=module.shape,
                group_size=module.group_size,
                saturation=module.saturation,
                recorded_draft_error=module.draft_error,
                recorded_target_error=module.target_error,
                recorded_saturation=module.saturation,
            )
            for name, module in self.modules.items()
        }
        self.entries: list[Entry] = []
        self.notes: list[str] = []
        self.unquantized = 0
        self.unquantized_equal = 0
        self.totals = {view: Distance() for view in VIEWS}

    def report(self, a: str, b: str, kind: Kind) -> DiffReport:
        return DiffReport(
            a=a,
            b=b,
            kind=kind,
            modules=list(self.found.values()),
            entries=self.entries,
            unquantized=self.unquantized,
            unquantized_equal=self.unquantized_equal,
            draft=self.totals["draft"],
            target=self.totals["target"],
            notes=self.notes,
        )

    # --- another nested checkpoint

    def with_nested(self, other: Checkpoint) -> None:
        ours, theirs = self.checkpoint.manifest, other.manifest
        self._compare_names(set(theirs.modules), "module")
        self._compare_fields("config.json", self.checkpoint.config, other.config)
        left, right = (_manifest_fields(manifest.to_dict()) for manifest in (ours, theirs))
        self._compare_fields(MANIFEST_FILE, left, right)
        same_basis = _basis(ours.rotation) == _basis(theirs.rotation)
        if not same_basis:
            self.notes.append("the rotations differ, so weights are not compared, only bytes")
        shared = [name for name in self.modules if name in theirs.modules]
        for number, name in enumerate(shared):
            self.progress("comparing", number, len(shared))
            self._compare_modules(name, other, same_basis)
        names = [name for name in ours.unquantized if name in other.weight_map]
        self._compare_names(set(theirs.unquantized), "tensor")
        for name in names:
            self._compare_tensor(name, other.tensor(name))

    def _compare_modules(self, name: str, other: Checkpoint, same_basis: bool) -> None:
        mine, theirs = self.modules[name], other.manifest.modules[name]
        pairs = ((mine.base, theirs.base), (mine.scale, theirs.scale), (mine.refinement, theirs.refinement))
        base, scale, refinement = (
            None if left is None or right is None else left.sha256 == right.sha256 for left, right in pairs
        )
        same_columns = (mine.permutation is None) == (theirs.permutation is None)
        if same_columns and mine.permutation is not None:
            same_columns = _equal(self.checkpoint.permutation(name), other.permutation(name))
        found = replace(
            self.found[name],
            base_equal=base,
            scale_equal=scale,
            refinement_equal=refinement,
            differs=not (base and scale and refinement is not False and same_columns)
            or (mine.refinement is None) != (theirs.refinement is None),
        )
        if mine.shape != theirs.shape:
            found = replace(found, remark=f"is {list(mine.shape)} in A and {list(theirs.shape)} in B")
        elif same_basis:
            draft_equal = bool(base and scale and same_columns)
            both = mine.refinement is not None and theirs.refinement is not None
            equal = {"draft": draft_equal, "target": draft_equal and bool(refinement)}
            views = [view for view in VIEWS if view == "draft" or both]
            pieces = {view: _pieces_of(other, name, view, equal[view]) for view in views}
            found = self._measured(found, pieces)
        self.found[name] = found

    # --- the model it was made of

    def with_source(self, source: Source, rotation_file: Path | None) -> None:
        architecture = read_architecture(source.config, source.tensors.keys())
        rotation, why_not = recorded_rotation(self.checkpoint.manifest, rotation_file, architecture)
        self._compare_configs(source.config, architecture)
        if why_not:
            self.notes.append(why_not)
            self._compare_unrotated(source, architecture)
            return
        folded = FoldedSource(source, architecture, rotation)
        kept = set(self.checkpoint.manifest.unquantized)
        seen: set[str] = set()
        total = len(architecture.tensors()) + 1
        for number, (name, pieces) in enumerate(folded.tensors()):
            self.progress("comparing", number, total)
            module = name.removesuffix(".weight")
            seen |= {name, module}
            if name.endswith(".weight") and module in self.modules:
                self._compare_with_source(module, pieces)
            elif name in kept:
                dtype = source.tensors[name].dtype if name in source.tensors else self.checkpoint.tensor(name).dtype
                tensor = torch.cat([piece.to(dtype) for piece in pieces()])
                # Products in float64 round alike almost everywhere, but not on every machine.
                self._compare_tensor(name, tensor, tolerance=0.0 if rotation is None else torch.finfo(dtype).eps)
            elif name != architecture.head or not self._is_tied(architecture):
                self.entries.append(Entry(where="tensors", place=name, what="only in B"))
        for name in [*self.modules, *kept]:
            if name not in seen:
                self.entries.append(Entry(where="tensors", place=name, what="only in A"))

    def _is_tied(self, architecture: Architecture) -> bool:
        return architecture.tied_embeddings and bool(self.checkpoint.config.get("tie_word_embeddings"))

    def _compare_configs(self, other: Mapping[str, Any], architecture: Architecture) -> None:
        """Configs but for what a conversion writes anew; of the rotary settings their meaning."""
        own = read_architecture(self.checkpoint.config, self.checkpoint.weight_map)
        untied = not own.tied_embeddings and (
            self.checkpoint.manifest.rotation is not None or own.head_module in self.modules
        )
        left_out = (*REWRITTEN, *(["tie_word_embeddings"] if untied else []))
        left, right = _without(self.checkpoint.config, left_out), _without(other, left_out)
        rope = {"rope_parameters": dict(own.rope)}, {"rope_parameters": dict(architecture.rope)}
        self._compare_fields("config.json", left | rope[0], right | rope[1])

    def _compare_with_source(self, name: str, pieces: Pieces) -> None:
        views = VIEWS if self.modules[name].refinement else VIEWS[:1]
        found = self._measured(self.found[name], dict.fromkeys(views, pieces))
        if self.modules[name].refinement is not None and found.remark is None:
            found = replace(found, saturation=self._saturation(name, pieces))
        off = [
            view for view in views if _is_off(getattr(found, f"recorded_{view}_error"), getattr(found, f"{view}_error"))
        ]
        if off and found.remark is None:
            found = replace(found, remark=f"the manifest records other errors of the {' and '.join(off)} view")
        self.found[name] = replace(found, differs=found.remark is not None)

    def _saturation(self, name: str, pieces: Pieces) -> float:
        """The share of refinement codes that the closed form would have had to clip."""
        weight = self.checkpoint.weight(name)
        columns = None if weight.permutation is None else weight.permutation.long()
        base, clipped, first = weight.base_codes(), 0, 0
        for piece in pieces():
            rows = slice(first, first + len(piece))
            stored = piece if columns is None else piece[:, columns]
            clipped += int(nesting.saturated(stored, base[rows], weight.scale[rows]).sum())
            first = rows.stop
        return clipped / base.numel()

    def _compare_unrotated(self, source: Source, architecture: Architecture) -> None:
        """What no rotation touches: the norms of queries and keys, and which tensors there are."""
        untouched = [name for layer in range(architecture.layers) for name in architecture.head_norm_names(layer)]
        for name in untouched:
            if name in self.checkpoint.weight_map and name in source.tensors:
                self._compare_tensor(name, source.read(name))
        for name, shape in architecture.modules():
            if name in self.modules and self.modules[name].shape != shape:
                self._remark(name, f"is {list(self.modules[name].shape)} in A and {list(shape)} in B")

    # --- packed weights of another format

    def with_packed(self, other: PackedFolder) -> None:
        manifest = self.checkpoint.manifest
        self._compare_names(set(other.modules), "module")
        self._compare_configs(other.config, read_architecture(other.config, other.plain))
        if manifest.rotation is not None:
            self.notes.append(
                "the nested checkpoint is rotated; the weights agree only if the other one is rotated alike"
            )
        shared = [name for name in self.modules if name in other.modules]
        for number, name in enumerate(shared):
            self.progress("comparing", number, len(shared))
            compared = other.compare(name, self.modules[name], self.checkpoint.weight(name))
            if isinstance(compared, str):
                self._remark(name, compared)
                continue
            found = replace(
                self.found[name],
                base_equal=compared.base_equal,
                scale_equal=compared.scale_equal,
                refinement_equal=compared.base_equal if compared.view == "target" else None,
                differs=not (compared.base_equal and compared.scale_equal),
            )
            weight = compared.weight()
            self.found[name] = self._measured(found, {compared.view: whole(weight)})
        plain = set(other.plain)
        self._compare_names(plain, "tensor")
        for name in manifest.unquantized:
            if name in plain:
                self._compare_tensor(name, other.read(name))

    # --- what all of them share

    def _measured(self, found: ModuleDiff, references: Mapping[View, Pieces | None]) -> ModuleDiff:
        """Errors and steps of the module's views against reference weights; None stands for its own."""
        weight = self.checkpoint.weight(found.name)
        outputs, inputs = found.shape
        groups = group_index(inputs, found.group_size, weight.permutation).long()
        values: dict[str, float] = {}
        for view, pieces in references.items():
            distance, first = Distance(), 0
            for reference in pieces() if pieces else dequantized(weight, view):
                part = weight.rows(slice(first, first + len(reference)))
                mine = in_source_order(part.dequantize(view), weight.permutation)
                if mine.shape != reference.shape:
                    break
                distance.add(mine, reference, step(part.scale, view)[:, groups])
                first += len(reference)
            if first != outputs:
                return replace(found, differs=True, remark=f"B's weight has another shape than {list(found.shape)}")
            values |= {f"{view}_error": distance.relative, f"{view}_steps": distance.steps}
            self.totals[view].join(distance)
        return replace(found, **values)  # type: ignore[arg-type]  # floats by field name

    def _compare_tensor(self, name: str, other: Tensor, tolerance: float = 0.0) -> None:
        """An unquantized tensor of A beside the one of B; equal are also those no farther apart than `tolerance`."""
        mine = self.checkpoint.tensor(name)
        self.unquantized += 1
        if mine.dtype == other.dtype and mine.shape == other.shape and tensor_sha256(mine) == tensor_sha256(other):
            self.unquantized_equal += 1
            return
        if mine.shape != other.shape:
            what = f"is {list(mine.shape)} in A and {list(other.shape)} in B"
        elif mine.dtype != other.dtype and torch.equal(mine.double(), other.double()):
            what = f"is {DTYPE_NAMES[mine.dtype]} in A and {DTYPE_NAMES[other.dtype]} in B, the same values"
        else:
            distance = Distance()
            distance.add(mine.float(), other.float())
            if mine.dtype == other.dtype and distance.relative <= tolerance:
                self.unquantized_equal += 1
                return
            what = f"differs by {distance.relative:.2e} of its norm"
        self.entries.append(Entry(where="tensors", place=name, what=what))

    def _compare_names(self, others: set[str], what: str) -> None:
        """Modules or unquantized tensors that only one side has."""
        own = set(self.modules) if what == "module" else set(self.checkpoint.manifest.unquantized)
        for name in sorted(own ^ others):
            side = "A" if name in own else "B"
            self.entries.append(Entry(where=f"{what}s", place=name, what=f"only in {side}"))

    def _compare_fields(self, where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        left, right = dict(_leaves(ours)), dict(_leaves(theirs))
        for key in sorted(left.keys() | right.keys()):
            if left.get(key, _ABSENT) != right.get(key, _ABSENT):
                shown = [_shown(side.get(key, _ABSENT)) for side in (left, right)]
                self.entries.append(Entry(where=where, place=key, what=f"is {shown[0]} in A and {shown[1]} in B"))

    def _remark(self, name: str, remark: str) -> None:
        self.found[name] = replace(self.found[name], remark=remark, differs=True)


_ABSENT = object()


def _pieces_of(other: Checkpoint, name: str, view: View, equal: bool) -> Pieces | None:
    return None if equal else lambda: dequantized(other.weight(name), view)


def _is_off(recorded: float | None, measured: float | None) -> bool:
    """Whether a manifest's error is another than the measured one; nothing is said of one that is not recorded."""
    if recorded is None or measured is None:
        return False
    return abs(recorded - measured) > RECORD_TOLERANCE * measured + RECORD_FLOOR


def _basis(rotation: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """What decides in which basis weights are stored."""
    return None if rotation is None else tuple(rotation.get(key) for key in ("kind", "seed", "sha256"))


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def _manifest_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of the whole checkpoint; modules and tensors are compared one by one, files not at all."""
    return _without(document, ("modules", "unquantized", "files"))


def _without(data: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys}


def _leaves(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{place}.{key}" if place else str(key))
    else:
        yield place, data


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else f"{value!r:.80}"
