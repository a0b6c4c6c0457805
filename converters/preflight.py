"""Everything that could stop a conversion, found and told at once before any work; and the plan that remains."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bitnest_format.architecture import Architecture
from bitnest_format.converters.base import Inspection, Source, given_modules, is_draft_only
from bitnest_format.converters.calibration import BUILTIN
from bitnest_format.converters.options import DEFAULT_ROTATION, FALLBACK_GROUP_SIZES, PER_ROW, ConvertOptions
from bitnest_format.converters.rotation import sizes_without_hadamard
from bitnest_format.converters.rotation_file import check_rotation_file
from bitnest_format.converters.work_folder import WorkFolder
from bitnest_format.errors import SourceError
from bitnest_format.manifest import DRAFT_ONLY
from bitnest_format.packing import CODES_PER_WORD

PREFERRED_GROUP_SIZE = 128
BYTES_PER_SCALE = 2
WHY_DRAFT_ONLY = (
    f"{DRAFT_ONLY}. A quantized source holds no more than that; give --reference, the full-precision model that it was "
    "made from, for both views"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """A module to be quantized: `(outputs, inputs)` and the inputs that share one scale."""

    shape: tuple[int, int]
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a conversion will produce. All sizes are in bytes, estimated with fp16 scales and without side files.

    `name`: the source's name on the Hub, otherwise that of its file or folder. `fp16_bytes`: its tensors at two bytes
    an element. `work_bytes`: the disk space needed while the checkpoint is assembled, when its parts and the finished
    shards lie side by side. `draft_only`: there will be no refinement planes.
    """

    model_type: str
    name: str
    fingerprint: str
    reference_fingerprint: str | None
    draft_only: bool
    preferred_group_size: int
    rotation: str
    modules: Mapping[str, ModulePlan]
    base_bytes: int
    refinement_bytes: int
    scale_bytes: int
    unquantized_bytes: int
    fp16_bytes: int
    notes: tuple[str, ...]

    @property
    def group_sizes(self) -> dict[str, int]:
        return {name: module.group_size for name, module in self.modules.items()}

    @property
    def draft_bytes(self) -> int:
        return self.base_bytes + self.scale_bytes + self.unquantized_bytes

    @property
    def total_bytes(self) -> int:
        return self.draft_bytes + self.refinement_bytes

    @property
    def work_bytes(self) -> int:
        return 2 * self.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--dry-run --json`."""
        sums = {name: getattr(self, name) for name in ("draft_bytes", "total_bytes", "work_bytes")}
        return {**asdict(self), **sums}


def settle(options: ConvertOptions, source: Source, architecture: Architecture) -> ConvertOptions:
    """The options with what was left to the source: the default rotation, and whether the head is nested already."""
    given = given_modules(source)
    return replace(
        options,
        rotation=options.rotation or ("none" if given else DEFAULT_ROTATION),
        quantize_lm_head=options.quantize_lm_head or architecture.head_module in given,
    )


def needs_hessians(options: ConvertOptions, source: Source, architecture: Architecture) -> bool:
    """Whether any plane is to be found by error feedback."""
    given = given_modules(source)
    if not given:
        return options.needs_hessians
    if is_draft_only(source):
        return False
    plain_head = options.quantize_lm_head and architecture.head_module not in given
    return options.refinement == "feedback" or (plain_head and options.base == "gptq")


def needs_calibration(options: ConvertOptions, source: Source, architecture: Architecture) -> bool:
    """Whether a text is needed: for error feedback, or to learn a rotation on."""
    return options.learns or needs_hessians(options, source, architecture)


def nested_modules(source: Source, architecture: Architecture, options: ConvertOptions) -> dict[str, tuple[int, int]]:
    """The modules of the checkpoint as `(outputs, inputs)` by name.

    All linear layers, or those that a quantized source has quantized; the head where it is to be nested.
    """
    modules = dict(architecture.modules(nested_head=options.quantize_lm_head))
    given = given_modules(source)
    return {
        name: shape for name, shape in modules.items() if not given or name in given or name == architecture.head_module
    }


def preflight(source: Source, architecture: Architecture, options: ConvertOptions, output: Path) -> Plan:
    """Check everything that can be checked before work starts, reading the source once from end to end.

    Raises one `SourceError` that lists every problem.
    """
    options = settle(options, source, architecture)
    problems = [
        *_tensor_problems(source, architecture),
        *_given_problems(source, architecture, options),
        *_group_problems(source, architecture, options),
        *_option_problems(source, architecture, options),
        *_rotation_problems(source, architecture, options),
        *output_problems(source.location, output),
    ]
    inspection = source.inspect()
    plan = _plan(source, architecture, options, inspection)
    problems += [*inspection.problems, *_space_problems(plan, output)]
    if problems:
        raise SourceError(problems)
    return plan


def choose_group_size(inputs: int, preferred: int | None) -> int:
    """The group size of a module with `inputs` columns.

    `None` takes 128, or the larger of 64 and 32 that divides; a number is taken as it is; -1 is one group per row.
    Raises `ValueError` where that leaves no group size.
    """
    if preferred == PER_ROW:
        if inputs % CODES_PER_WORD:
            raise ValueError(f"{inputs} inputs do not fill words of {CODES_PER_WORD} codes")
        return inputs
    for size in (PREFERRED_GROUP_SIZE, *FALLBACK_GROUP_SIZES) if preferred is None else (preferred,):
        if inputs % size == 0:
            return size
    raise ValueError(f"{inputs} inputs cannot be divided into groups of {preferred or FALLBACK_GROUP_SIZES[-1]}")


def render_plan(plan: Plan) -> str:
    """The plan as text for a person."""
    groups: dict[int, int] = {}
    for module in plan.modules.values():
        groups[module.group_size] = groups.get(module.group_size, 0) + 1
    described = ", ".join(f"{count} with groups of {size}" for size, count in sorted(groups.items(), reverse=True))
    rows = [
        ("base planes", plan.base_bytes, ""),
        ("scales", plan.scale_bytes, ""),
        ("not quantized", plan.unquantized_bytes, ""),
        ("draft view", plan.draft_bytes, _share(plan.draft_bytes, plan.fp16_bytes)),
        ("refinement planes", plan.refinement_bytes, ""),
        ("target view", plan.total_bytes, _share(plan.total_bytes, plan.fp16_bytes)),
        ("source in fp16", plan.fp16_bytes, ""),
        ("disk for the work", plan.work_bytes, "  parts and finished shards side by side"),
    ]
    if plan.draft_only:
        rows = [row for row in rows if row[0] not in ("refinement planes", "target view")]
    lines = [
        f"{plan.name} ({plan.model_type}), rotation {plan.rotation}",
        *([WHY_DRAFT_ONLY] if plan.draft_only else []),
        f"{len(plan.modules)} modules to quantize: {described}",
        *(f"  {label:<18}{_megabytes(size):>12}{remark}" for label, size, remark in rows),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _plan(source: Source, architecture: Architecture, options: ConvertOptions, inspection: Inspection) -> Plan:
    """The plan as far as the sizes allow one: modules without a fitting group size count at the preferred one."""
    given = given_modules(source)
    preferred = PREFERRED_GROUP_SIZE if options.group_size is None else options.group_size
    if given:
        preferred = Counter(module.group_size for module in given.values()).most_common(1)[0][0]
    modules: dict[str, ModulePlan] = {}
    weights = scales = 0
    for name, (outputs, inputs) in nested_modules(source, architecture, options).items():
        try:
            size = given[name].group_size if name in given else choose_group_size(inputs, options.group_size)
        except ValueError:
            size = inputs
        modules[name] = ModulePlan(shape=(outputs, inputs), group_size=size)
        weights += outputs * inputs
        scales += outputs * (inputs // size)
    return Plan(
        model_type=architecture.model_type,
        name=source.provenance.name or source.location.resolve().name,
        fingerprint=inspection.fingerprint,
        reference_fingerprint=inspection.reference_fingerprint,
        draft_only=is_draft_only(source),
        preferred_group_size=preferred,
        rotation=options.rotation_kind,
        modules=modules,
        base_bytes=weights // 2,
        refinement_bytes=0 if is_draft_only(source) else weights // 2,
        scale_bytes=scales * BYTES_PER_SCALE,
        unquantized_bytes=sum(_kept_sizes(source, architecture, options)),
        fp16_bytes=2 * sum(map(_elements, _all_shapes(source, architecture))),
        notes=(*source.notes, *_head_notes(source, architecture, options, modules)),
    )


def _head_notes(
    source: Source, architecture: Architecture, options: ConvertOptions, modules: Mapping[str, ModulePlan]
) -> Iterator[str]:
    """What untying a nested head from the embedding costs."""
    embedding = source.tensors.get(architecture.embedding)
    if not options.quantize_lm_head or not architecture.tied_embeddings or embedding is None:
        return
    head = modules[architecture.head_module]
    weights = _elements(head.shape)
    nested = weights + weights // head.group_size * BYTES_PER_SCALE
    plain = weights * embedding.dtype.itemsize
    beside = f"; unquantized, the rotation would make it {_megabytes(plain)}" if options.rotates else ""
    yield (
        f"{architecture.head_module} is tied to the embedding, which stays as it is: the nested head takes "
        f"{_megabytes(nested)} beside it{beside}"
    )


def _all_shapes(source: Source, architecture: Architecture) -> Iterator[tuple[int, ...]]:
    yield from architecture.tensors().values()
    yield from (source.tensors[name].shape for name in filter(architecture.is_beside, source.tensors))


def _kept_sizes(source: Source, architecture: Architecture, options: ConvertOptions) -> Iterator[int]:
    """The sizes of the tensors that stay as they are; a rotation gives a tied model a head of its own."""
    nested_head = options.quantize_lm_head
    quantized = {f"{name}.weight" for name in nested_modules(source, architecture, options)}
    untied = architecture.tied_embeddings and options.rotates and not nested_head
    for name, shape in architecture.tensors().items():
        if name not in quantized:
            info = source.tensors.get(name)
            copies = 2 if name == architecture.embedding and untied else 1
            yield copies * _elements(shape) * (info.dtype.itemsize if info else BYTES_PER_SCALE)
    for name in filter(architecture.is_beside, source.tensors):
        yield _elements(source.tensors[name].shape) * source.tensors[name].dtype.itemsize


def _tensor_problems(source: Source, architecture: Architecture) -> Iterator[str]:
    expected = architecture.tensors()
    missing = [name for name in expected if name not in source.tensors]
    head = architecture.head
    if head in missing:
        missing.remove(head)
        yield (
            f"{head}: missing although tie_word_embeddings is false. If the head shares the embedding, set "
            "tie_word_embeddings to true in config.json; otherwise the source is incomplete."
        )
    if missing:
        yield f"{len(missing)} tensor{'s are' if len(missing) > 1 else ' is'} missing: {', '.join(missing)}"
    yield from _entry_problems(source, architecture)
    wrong: dict[tuple[tuple[int, ...], tuple[int, ...], str], list[str]] = {}
    for name, shape in expected.items():
        if name in source.tensors and source.tensors[name].shape != shape:
            key = (source.tensors[name].shape, shape, _config_fields(name, architecture))
            wrong.setdefault(key, []).append(name)
    for (found, shape, fields), names in wrong.items():
        yield f"{', '.join(names)}: shape {list(found)}, expected {list(shape)} (config.json: {fields})"


def _entry_problems(source: Source, architecture: Architecture) -> Iterator[str]:
    """What makes image features of the language model's width has to be known, for it turns with the stream."""
    for name in architecture.spelling.into_stream:
        found = [tensor for tensor in (f"{name}.weight", name) if tensor in source.tensors]
        if not found:
            yield (
                f"{name}: missing; its outputs stand among the embeddings of a {architecture.model_type} model. "
                "Export the whole model again."
            )
        elif source.tensors[found[0]].shape[:1] != (architecture.hidden_size,):
            yield (
                f"{found[0]}: shape {list(source.tensors[found[0]].shape)}, expected {architecture.hidden_size} rows, "
                "the hidden_size of the language model"
            )


def _config_fields(name: str, architecture: Architecture) -> str:
    """The config fields that decide a tensor's shape, with their values."""
    hidden = f"hidden_size {architecture.hidden_size}"
    head_dim = f"head_dim {architecture.head_dim}"
    width = f"intermediate_size {architecture.intermediate_size}"
    if architecture.experts is not None and ".experts." in name:
        width = f"{architecture.experts.names.width} {architecture.experts.width}"
    fields = {
        "q_proj": f"num_attention_heads {architecture.heads}, {head_dim}, {hidden}",
        "k_proj": f"num_key_value_heads {architecture.kv_heads}, {head_dim}, {hidden}",
        "v_proj": f"num_key_value_heads {architecture.kv_heads}, {head_dim}, {hidden}",
        "o_proj": f"{hidden}, num_attention_heads {architecture.heads}, {head_dim}",
        "gate_proj": f"{width}, {hidden}",
        "up_proj": f"{width}, {hidden}",
        "down_proj": f"{hidden}, {width}",
        "q_norm": head_dim,
        "k_norm": head_dim,
        "embed_tokens": f"vocab_size {architecture.vocab_size}, {hidden}",
        "lm_head": f"vocab_size {architecture.vocab_size}, {hidden}",
    }
    if architecture.experts is not None:
        fields["gate"] = f"{architecture.experts.count} experts, {hidden}"
    return fields.get(architecture.role(name.rpartition(".")[0]), hidden)


def _given_problems(source: Source, architecture: Architecture, options: ConvertOptions) -> Iterator[str]:
    """Options that would change base planes that the source gives, or that need more than it has."""
    given = given_modules(source)
    if not given:
        return
    if options.rotates:
        yield (
            f"--rotation {options.rotation_kind}: the base planes are the source's own, and a rotation would change "
            "them. Leave it out, or convert the full-precision model."
        )
    if architecture.head_module in given:
        return
    if options.group_size is not None and not options.quantize_lm_head:
        yield f"--group-size {options.group_size}: the base planes are the source's own, with its groups. Leave it out."
    if options.quantize_lm_head and is_draft_only(source):
        yield (
            f"--quantize-lm-head: the source's {architecture.head_module} is not quantized, and without --reference "
            "only a draft of what is quantized can be made. Leave it out, or give the reference."
        )


def _group_problems(source: Source, architecture: Architecture, options: ConvertOptions) -> Iterator[str]:
    """One problem that names every module whose inputs the groups do not divide."""
    preferred = options.group_size
    given = given_modules(source)
    offending = []
    for name, (_, inputs) in nested_modules(source, architecture, options).items():
        if name in given:
            continue
        try:
            choose_group_size(inputs, preferred)
        except ValueError:
            offending.append((name, inputs))
    if not offending:
        return
    described = ", ".join(f"{name} ({inputs} inputs)" for name, inputs in offending)
    if preferred is None:
        sizes = ", ".join(map(str, (PREFERRED_GROUP_SIZE, *FALLBACK_GROUP_SIZES)))
        yield f"no group size of {sizes} divides the inputs of {described}. {_fitting_sizes(architecture)}"
    elif preferred == PER_ROW:
        yield f"--group-size -1: rows must be multiples of {CODES_PER_WORD} inputs long: {described}"
    else:
        yield f"--group-size {preferred} does not divide the inputs of {described}. {_fitting_sizes(architecture)}"


def _fitting_sizes(architecture: Architecture) -> str:
    inputs = {shape[1] for _, shape in architecture.modules()}
    common = [size for size in range(1024, 0, -8) if all(count % size == 0 for count in inputs)]
    automatic = all(count % FALLBACK_GROUP_SIZES[-1] == 0 for count in inputs)
    ways = [f"--group-size {common[0]} fits every module"] if common else []
    if automatic:
        ways.append("without --group-size each module gets the largest of 128, 64 and 32 that fits")
    elif not common:
        ways.append("no group size fits this model")
    text = "; ".join(ways)
    return f"{text[0].upper() if text[0] != '-' else text[0]}{text[1:]}."


def _option_problems(source: Source, architecture: Architecture, options: ConvertOptions) -> Iterator[str]:
    if options.rotates and architecture.family.post_norms:
        yield (
            f"--rotation {options.rotation_kind}: {architecture.model_type} norms the outputs of attention and MLP "
            "before they are added to the residual stream, and such norms cannot absorb R1. Pass --rotation none."
        )
    if options.rotation_kind == "hadamard":
        bad = sizes_without_hadamard(architecture)
        if bad:
            yield f"--rotation hadamard: no Hadamard matrix at hand for {', '.join(bad)}; use random"
    file = options.rotation_file
    if file is not None and not file.is_file():
        yield f"--rotation spinquant: {file}: no such file"
    elif file is not None:
        try:
            check_rotation_file(file, architecture)
        except SourceError as error:
            yield from error.problems
    text = options.calibration
    if needs_calibration(options, source, architecture) and text != BUILTIN and not Path(text).is_file():
        yield f"--calibration {options.calibration}: no such file"
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        yield f"--device {options.device}: cannot be used ({str(error).splitlines()[0]})"


def _rotation_problems(source: Source, architecture: Architecture, options: ConvertOptions) -> Iterator[str]:
    """What the source's norms say about a rotation before this one, and whether the rotation can be saved."""
    scaled = _first_scaled_norm(source, architecture) if options.rotation != "none" else None
    if options.rotation == "folded" and scaled:
        yield (
            f"--rotation folded: {scaled} is not one everywhere, so no rotation of the residual stream can be folded "
            "into this source; use --rotation none to keep it as it is, or let it be rotated here"
        )
    if options.rotates and scaled is None:
        note = (
            "every norm's gain is exactly one, as in a model that a rotation was folded into already. If it was, pass "
            "--rotation folded: a second rotation undoes what the first was chosen for"
        )
        source.notes += [note] if note not in source.notes else []
    if options.save_rotation is not None:
        yield from _new_file_problems("--save-rotation", options.save_rotation)


def _first_scaled_norm(source: Source, architecture: Architecture) -> str | None:
    """The first norm whose gain differs from one somewhere; None where there is none, as after a folded rotation."""
    layers = (name for layer in range(architecture.layers) for name in architecture.norm_names(layer))
    stored = (name for name in (architecture.final_norm, *layers) if name in source.tensors)
    return next((name for name in stored if not bool((source.read(name) == 1).all())), None)


def _new_file_problems(option: str, file: Path) -> Iterator[str]:
    if file.exists():
        yield f"{option} {file}: exists already and is not overwritten; give another name"
    elif not file.absolute().parent.is_dir():
        yield f"{option} {file}: {file.absolute().parent} is no folder"
    elif not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        yield f"{option} {file}: {file.absolute().parent} cannot be written to"


def output_problems(source: Path, output: Path) -> Iterator[str]:
    """Why a new folder `output` cannot be made; `source` is what is read, and nothing is written inside it."""
    absolute = output.absolute()
    try:
        occupied = output.is_dir() and any(output.iterdir())
    except OSError as error:
        yield f"{output}: cannot be read ({error.strerror})"
        return
    if occupied:
        yield f"{output}: exists and is not empty; nothing in it is overwritten. Give another folder, or empty it."
    elif output.exists() and not output.is_dir():
        yield f"{output}: is a file, expected a folder that does not exist yet"
    where = source.resolve()
    if absolute.resolve().is_relative_to(where):
        yield f"{output}: lies inside the source {source}; give a folder outside of it"
    parent = existing_parent(absolute)
    if not parent.is_dir():
        yield f"{output}: {parent} is a file, expected a folder"
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield f"{output}: {parent} cannot be written to"


def _space_problems(plan: Plan, output: Path) -> Iterator[str]:
    """Free space against the estimate; what an earlier run left in its work folder is used again or deleted."""
    parent = existing_parent(output.absolute())
    reusable = sum(path.stat().st_size for path in WorkFolder.beside(output).folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(parent).free
    if free + reusable < plan.work_bytes:
        yield (
            f"{parent}: {_megabytes(free)} free, the conversion needs about {_megabytes(plan.work_bytes)} "
            f"(twice the checkpoint, while it is assembled). Free some space or choose another disk."
        )


def existing_parent(path: Path) -> Path:
    """The closest folder above `path` that exists."""
    return next(parent for parent in path.parents if parent.exists())


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _share(size: int, whole: int) -> str:
    return f"  {size / whole:.0%} of fp16" if whole else ""
