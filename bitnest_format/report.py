"""What a checkpoint holds, as records and as plain text: provenance, sizes, and the quality of every module.

Reads the manifest, the draft index and the headers of the base shards; a checkpoint whose refinement shards were not
downloaded can be inspected too. No tensor is read unless one is asked for by name.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.architecture import read_architecture
from bitnest_format.checkpoint import CONFIG_FILE, DRAFT_INDEX, TARGET_INDEX, Checkpoint, weight_map_of
from bitnest_format.errors import CheckpointError, Finding, UsageError
from bitnest_format.manifest import DRAFT_ONLY, MANIFEST_FILE, Manifest, Module
from bitnest_format.shards import DTYPE_NAMES, Files, LocalFiles, TensorEntry, header_in, json_in, tensor_sha256

FP16_BYTES = 2
LAYER_NUMBER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes on disk without headers; input permutations count as `scales`.

    `fp16` is what the same tensors would take at two bytes a value.

    `weights` counts the weights of quantized modules, `draft_bits` and `target_bits` are what one of them takes in each
    view, its share of the scales included.
    """

    base: int
    scales: int
    refinement: int
    unquantized: int
    fp16: int
    weights: int

    @property
    def draft(self) -> int:
        return self.base + self.scales + self.unquantized

    @property
    def target(self) -> int:
        return self.draft + self.refinement

    @property
    def draft_bits(self) -> float:
        return 8 * (self.base + self.scales) / self.weights

    @property
    def target_bits(self) -> float:
        return 8 * (self.base + self.scales + self.refinement) / self.weights

    def to_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("draft", "target", "draft_bits", "target_bits")}
        return asdict(self) | derived


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """One quantized module. `shape` is `(outputs, inputs)`; saturation and errors are shares, None if not recorded."""

    name: str
    shape: tuple[int, int]
    group_size: int
    groups: int
    scale_type: str
    bias: bool
    permuted: bool
    saturation: float | None
    draft_error: float | None
    target_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One stored tensor read in full.

    `histogram` counts each code of a plane; `minimum` and `maximum` of the finite values, and the number of the others,
    describe every other tensor.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    shard: str
    sha256: str
    histogram: Mapping[int, int] | None = None
    minimum: float | None = None
    maximum: float | None = None
    not_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor that is not quantized, as the header of its shard describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """Everything `inspect` shows. `tensors` is filled where one tensor or module was asked for."""

    name: str
    format_version: str
    created_by: Mapping[str, str]
    required_features: tuple[str, ...]
    views: tuple[str, ...]
    refinement_present: bool
    model: Mapping[str, Any]
    tied_embeddings: bool
    nested_head: bool
    source: Mapping[str, Any]
    rotation: Mapping[str, Any] | None
    calibration: Mapping[str, Any] | None
    nesting: Mapping[str, Any]
    activation: Mapping[str, Any]
    kv_cache: Mapping[str, Any]
    gamma: int | None
    sizes: Sizes
    group_sizes: Mapping[int, int]
    modules: tuple[ModuleReport, ...]
    unquantized: tuple[KeptTensor, ...]
    tensors: tuple[TensorReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `sizes` holds the derived numbers too."""
        return asdict(self) | {"sizes": self.sizes.to_dict()}


def inspect_checkpoint(checkpoint: Path | Files, tensor: str | None = None) -> CheckpointReport:
    """Describe a checkpoint, a folder or the files of a repository; reads JSON files and headers.

    `tensor` names a stored tensor, or a module for all its tensors, to be read in full; it needs a folder.

    Raises `BitnestError` naming what is missing or broken, `UsageError` with the nearest names for an unknown tensor.
    """
    files = LocalFiles(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    folder = files.folder if isinstance(files, LocalFiles) else None
    manifest, config, weight_map = _open(files)
    headers = {shard: header_in(files, shard)[0] for shard in sorted(set(weight_map.values()))}
    entries = {name: _entry(headers, name, shard) for name, shard in weight_map.items()}
    architecture = read_architecture(config, weight_map)
    target_map = _target_map(files, manifest)
    return CheckpointReport(
        name=folder.resolve().name if folder else files.name,
        format_version=manifest.format_version,
        created_by=manifest.created_by,
        required_features=manifest.required_features,
        views=manifest.views,
        refinement_present=bool(target_map),
        model={
            "type": architecture.model_type,
            "layers": architecture.layers,
            "hidden": architecture.hidden_size,
            "heads": architecture.heads,
            "kv_heads": architecture.kv_heads,
            "head_dim": architecture.head_dim,
            "vocabulary": architecture.vocab_size,
            "positions": architecture.max_positions,
        },
        tied_embeddings=architecture.tied_embeddings,
        nested_head=architecture.head_module in manifest.modules,
        source=manifest.source,
        rotation=manifest.rotation,
        calibration=manifest.calibration,
        nesting=manifest.nesting,
        activation=manifest.activation,
        kv_cache=manifest.kv_cache,
        gamma=manifest.speculation.get("gamma"),
        sizes=_sizes(manifest, entries),
        group_sizes=dict(sorted(Counter(module.group_size for module in manifest.modules.values()).items())),
        modules=tuple(_module_report(name, module, entries) for name, module in manifest.modules.items()),
        unquantized=tuple(
            KeptTensor(name=name, dtype=entry.dtype, shape=entry.shape, bytes=entry.size)
            for name in manifest.unquantized
            for entry in (_find(entries, name),)
        ),
        tensors=_tensor_reports(folder, tensor, manifest, weight_map | target_map) if tensor and folder else (),
    )


def _open(files: Files) -> tuple[Manifest, Mapping[str, Any], dict[str, str]]:
    """The manifest, the config and the draft's weight map."""
    if isinstance(files, LocalFiles):
        opened = Checkpoint(files.folder, "draft")
        return opened.manifest, opened.config, opened.weight_map
    for name in (MANIFEST_FILE, CONFIG_FILE, DRAFT_INDEX):
        if files.size(name) is None:
            raise CheckpointError(f"{files.name}: no {name}, so this is not a whole nested checkpoint.")
    manifest = Manifest.from_dict(json_in(files, MANIFEST_FILE))
    config = json_in(files, CONFIG_FILE)
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG_FILE}: found a JSON {type(config).__name__}, expected an object")
    weight_map = weight_map_of(json_in(files, DRAFT_INDEX), DRAFT_INDEX, Path(files.name))
    for shard in sorted(set(weight_map.values())):
        if files.size(shard) is None:
            raise CheckpointError(f"{DRAFT_INDEX}: names {shard}, which {files.name} does not hold.")
    return manifest, config, weight_map


def _entry(headers: Mapping[str, Mapping[str, TensorEntry]], name: str, shard: str) -> TensorEntry:
    if name not in headers[shard]:
        raise CheckpointError(f"{DRAFT_INDEX}: {name}: is not in the header of {shard}. Run 'bitnest-format validate'.")
    return headers[shard][name]


def _find(entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    if name not in entries:
        raise CheckpointError(
            f"{DRAFT_INDEX}: {name}: missing, though bitnest.json names it. Run 'bitnest-format validate'."
        )
    return entries[name]


def _target_map(files: Files, manifest: Manifest) -> dict[str, str]:
    """The target's tensors and shards where all of them are there, otherwise nothing."""
    if "target" not in manifest.views or files.size(TARGET_INDEX) is None:
        return {}
    weight_map = weight_map_of(json_in(files, TARGET_INDEX), TARGET_INDEX, Path(files.name))
    return weight_map if all(files.size(shard) is not None for shard in set(weight_map.values())) else {}


def _sizes(manifest: Manifest, entries: Mapping[str, TensorEntry]) -> Sizes:
    modules = manifest.modules.values()
    weights = sum(module.shape[0] * module.shape[1] for module in modules)
    names = [name for module in modules for name in (module.scale.name, module.permutation) if name]
    scales = sum(_find(entries, name).size for name in names)
    kept = [_find(entries, name) for name in manifest.unquantized]
    plane = weights // 2
    return Sizes(
        base=plane,
        scales=scales,
        refinement=plane if "target" in manifest.views else 0,
        unquantized=sum(entry.size for entry in kept),
        fp16=FP16_BYTES * (weights + sum(math.prod(entry.shape) for entry in kept)),
        weights=weights,
    )


def _module_report(name: str, module: Module, entries: Mapping[str, TensorEntry]) -> ModuleReport:
    return ModuleReport(
        name=name,
        shape=module.shape,
        group_size=module.group_size,
        groups=module.groups,
        scale_type=_find(entries, module.scale.name).dtype,
        bias=module.bias is not None,
        permuted=module.permutation is not None,
        saturation=module.saturation,
        draft_error=module.draft_error,
        target_error=module.target_error,
    )


def _tensor_reports(
    folder: Path, wanted: str, manifest: Manifest, weight_map: Mapping[str, str]
) -> tuple[TensorReport, ...]:
    roles = {name: "unquantized" for name in manifest.unquantized}
    modules: dict[str, list[str]] = {}
    for module_name, module in manifest.modules.items():
        named = {
            "base plane": module.base.name,
            "refinement plane": module.refinement.name if module.refinement else None,
            "scale": module.scale.name,
            "bias": module.bias,
            "input permutation": module.permutation,
        }
        present = {name: role for role, name in named.items() if name}
        roles |= present
        modules[module_name] = list(present)
    names = modules.get(wanted) or [wanted]
    if wanted not in modules and wanted not in roles:
        near = difflib.get_close_matches(wanted, [*modules, *roles], n=3, cutoff=0.5)
        hint = f"; nearest are {', '.join(near)}" if near else ""
        raise UsageError(f"{folder.name}: no tensor or module {wanted!r}{hint}")
    reader = Checkpoint(folder, "target" if set(names) <= weight_map.keys() and "target" in manifest.views else "draft")
    # A module's refinement plane is left out where it was not downloaded; asked for by itself it is an error.
    here = [name for name in names if name in weight_map] if wanted in modules else names
    return tuple(_tensor_report(name, roles[name], reader.tensor(name), weight_map) for name in here)


def _tensor_report(name: str, role: str, tensor: Tensor, weight_map: Mapping[str, str]) -> TensorReport:
    histogram = None
    minimum = maximum = None
    not_finite = 0
    if role.endswith("plane"):
        counts = torch.bincount(packing.unpack(tensor).flatten().int() + packing.CODE_OFFSET, minlength=16)
        histogram = {code - packing.CODE_OFFSET: count for code, count in enumerate(counts.tolist())}
    else:
        values = tensor.float().flatten()
        finite = values[torch.isfinite(values)]
        not_finite = values.numel() - finite.numel()
        if finite.numel():
            minimum, maximum = float(finite.min()), float(finite.max())
    return TensorReport(
        name=name,
        role=role,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        bytes=tensor.numel() * tensor.element_size(),
        shard=weight_map[name],
        sha256=tensor_sha256(tensor),
        histogram=histogram,
        minimum=minimum,
        maximum=maximum,
        not_finite=not_finite,
    )


def render(report: CheckpointReport) -> str:
    """The report as plain text; the tensors alone where some were asked for."""
    if report.tensors:
        return "\n\n".join(_render_tensor(tensor) for tensor in report.tensors)
    blocks = [_render_head(report), _render_sizes(report), _render_modules(report.modules)]
    if report.unquantized:
        blocks.append(_render_unquantized(report.unquantized))
    return "\n\n".join(blocks)


def render_findings(findings: Sequence[Finding]) -> str:
    """One finding a line as `file: place: message`; "valid" where there is none."""
    return "\n".join(map(str, findings)) if findings else "valid"


def _render_head(report: CheckpointReport) -> str:
    model, nesting = report.model, report.nesting
    features = f"; needs {', '.join(report.required_features)}" if report.required_features else ""
    views = ", ".join(report.views) if "target" in report.views else DRAFT_ONLY
    if "target" in report.views and not report.refinement_present:
        views += " (refinement shards not in the folder: only the draft can be loaded)"
    groups = ", ".join(f"{size} ({_count(count, 'module')})" for size, count in report.group_sizes.items())
    bound = nesting.get("base_bound")
    reference = report.source.get("reference")
    rows = [
        ("format", f"{report.format_version}{_joined(', written by', report.created_by, 'name', 'version')}{features}"),
        (
            "model",
            f"{model['type']}, {_count(model['layers'], 'layer')}, hidden size {model['hidden']}, "
            f"{_count(model['heads'], 'head')} ({model['kv_heads']} for keys and values) of {model['head_dim']}, "
            f"vocabulary {model['vocabulary']}",
        ),
        ("embeddings", _embeddings(report)),
        ("source", _joined("", report.source, "kind", "name", "revision").strip()),
        *([("reference", _joined("", reference, "kind", "name", "revision").strip())] if reference else []),
        ("licence", str(report.source.get("license") or "not stated")),
        ("views", views),
        ("base", f"{nesting['base_method']}" + (f", residual at most {bound:g} steps" if bound else "")),
        ("refinement", str(nesting["refine_method"] or "none")),
        ("group sizes", groups),
        ("rotation", _rotation(report.rotation)),
        ("calibration", _calibration(report.calibration)),
        ("activations", f"symmetric INT{report.activation['bits']}, one scale per {report.activation['granularity']}"),
        (
            "KV cache",
            f"{report.kv_cache['base_bits']} + {report.kv_cache['refinement_bits']} bits per token and KV head",
        ),
        ("gamma", str(report.gamma or "no suggestion")),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join([report.name, *(f"  {label:<{width}}  {text}" for label, text in rows)])


def _embeddings(report: CheckpointReport) -> str:
    if report.tied_embeddings:
        return "tied: one matrix is embedding and head"
    return "not tied; the head is nested" if report.nested_head else "not tied"


def _rotation(rotation: Mapping[str, Any] | None) -> str:
    if rotation is None:
        return "none"
    seed = f", seed {rotation['seed']}" if rotation.get("seed") is not None else ""
    digest = f", file {rotation['sha256'][:12]}" if rotation.get("sha256") else ""
    folded = ", ".join(rotation["folded"]) or "nothing"
    if rotation["kind"] == "folded":
        return f"folded before the conversion: {folded}"
    return f"{rotation['kind']}{seed}{digest}; folded: {folded}"


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "none"
    return f"{calibration['description']}, {calibration['tokens']:,} tokens, SHA-256 {calibration['sha256'][:12]}"


def _render_sizes(report: CheckpointReport) -> str:
    sizes = report.sizes
    rows = [
        ("base planes", sizes.base),
        ("scales", sizes.scales),
        ("not quantized", sizes.unquantized),
        ("draft view", sizes.draft),
    ]
    if "target" in report.views:
        rows += [("refinement planes", sizes.refinement), ("target view", sizes.target)]
    rows.append(("all of it in fp16", sizes.fp16))
    table = [["stored", "bytes", "of fp16"]]
    table += [[label, f"{size:,}", f"{size / sizes.fp16:.1%}"] for label, size in rows]
    bits = f"bits per quantized weight: draft {sizes.draft_bits:.3f}"
    if "target" in report.views:
        bits += f", target {sizes.target_bits:.3f}"
    return f"{_table(table, left=1)}\n{bits}"


def _render_modules(modules: Sequence[ModuleReport]) -> str:
    table = [["module", "shape", "group", "scale", "saturation", "draft error", "target error"]]
    for module in modules:
        shape = f"{module.shape[0]} x {module.shape[1]}"
        marks = ("+bias" if module.bias else "") + ("+perm" if module.permuted else "")
        table.append(
            [f"{module.name}{marks and ' '}{marks}", shape, str(module.group_size), module.scale_type]
            + [_share(value) for value in (module.saturation, module.draft_error, module.target_error)]
        )
    means = [_mean(getattr(m, field) for m in modules) for field in ("saturation", "draft_error", "target_error")]
    table.append([f"mean of {_count(len(modules), 'module')}", "", "", "", *map(_share, means)])
    return _table(table, left=1)


def _render_unquantized(tensors: Sequence[KeptTensor]) -> str:
    kinds: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for tensor in tensors:
        kind = (LAYER_NUMBER.sub("*", tensor.name), tensor.dtype, tensor.shape)
        kinds.setdefault(kind, []).append(tensor.bytes)
    table = [["not quantized", "tensors", "dtype", "shape", "bytes"]]
    for (name, dtype, shape), sizes in kinds.items():
        table.append([name, str(len(sizes)), dtype, " x ".join(map(str, shape)), f"{sum(sizes):,}"])
    return _table(table, left=1)


def _render_tensor(tensor: TensorReport) -> str:
    rows = [
        ("role", tensor.role),
        ("dtype", tensor.dtype),
        ("shape", " x ".join(map(str, tensor.shape)) or "a single value"),
        ("bytes", f"{tensor.bytes:,}"),
        ("shard", tensor.shard),
        ("sha256", tensor.sha256),
    ]
    if tensor.minimum is not None:
        rows += [("minimum", f"{tensor.minimum:.6g}"), ("maximum", f"{tensor.maximum:.6g}")]
    if tensor.not_finite:
        rows.append(("NaN or infinite", f"{tensor.not_finite:,}"))
    lines = [tensor.name, *(f"  {label:<8}  {text}" for label, text in rows)]
    if tensor.histogram is not None:
        total = sum(tensor.histogram.values())
        table = [["code", "count", "share"]]
        table += [[str(code), f"{count:,}", _share(count / total)] for code, count in tensor.histogram.items()]
        lines.append(_table(table, left=0))
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns padded to equal width; the first `left` columns are set left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _joined(lead: str, record: Mapping[str, Any], *fields: str) -> str:
    values = [str(record[field]) for field in fields if record.get(field)]
    return f"{lead} {' '.join(values)}" if values else ""


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
