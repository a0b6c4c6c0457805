"""Everything that can be wrong with a nested checkpoint, found in one pass and said in one sentence each.

`validate` never stops at the first fault and never raises for what a folder may contain, hostile files included.
It holds checkpoints of any writer to `spec/bitnest-format.md`, not to the habits of our own converter. Structure is
the JSON Schema's matter; here stands what a schema cannot say: names against files, indexes against headers,
headers against the manifest, bytes against the rules of the codes.

Faults do not cascade: what lies in a file that is missing or broken is not reported missing once more.
Tensors are read one at a time.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import (
    BASE_SUFFIX,
    CONFIG_FILE,
    DRAFT_INDEX,
    PERMUTATION_FEATURE,
    PERMUTATION_SUFFIX,
    QUANT_METHOD,
    REFINEMENT_SUFFIX,
    SCALE_SUFFIX,
    TARGET_INDEX,
)
from bitnest_format.errors import (
    FileFormatError,
    Finding,
    ManifestError,
    UnsupportedModelError,
    UnsupportedVersionError,
    UsageError,
)
from bitnest_format.manifest import MANIFEST_FILE, Manifest, Module, Plane, check_readable, schema_findings
from bitnest_format.shards import (
    DTYPES,
    Files,
    LocalFiles,
    TensorEntry,
    file_sha256,
    header_in,
    inside,
    json_in,
    tensor_sha256,
)

WHOLE_FILE = "(file)"
SHARD_PATTERN = "bitnest-base-0000i-of-0000n.safetensors or bitnest-refinement-0000i-of-0000n.safetensors"
SHARD_NAME = re.compile(r"bitnest-(base|refinement)-(\d{5,6})-of-(\d{5,6})\.safetensors")
FLOAT_TYPES = ("F16", "BF16", "F32")
SCALE_TYPES = ("F16", "F32")

# A float32 scale in this range gives normal float32 numbers for a sixteenth of it and for 128 times it.
F32_SCALE_RANGE = (2.0**-120, 2.0**120)

EXECUTABLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
FOREIGN_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
LFS_POINTER = b"version https://git-lfs"

# Rows are unpacked this many codes at a time, so that a plane of any size needs little memory.
VALUES_AT_ONCE = 1 << 22
LONGEST_TEXT = 500
DEEPEST_JSON = 100

_quote = reprlib.Repr()
_quote.maxstring = _quote.maxother = 120


def validate(checkpoint: Path | Files, *, deep: bool = False) -> list[Finding]:
    """Every way in which a checkpoint breaks the format; an empty list means that it is valid.

    checkpoint: a folder, or the files of a repository on the Hub.

    Reads headers, indexes, the manifest, and the codes and scales of every module; of a repository that was not
    downloaded, everything but the tensors. `deep` also computes the SHA-256 of every plane and file, and looks for NaN
    and infinity in unquantized tensors; it needs a folder.

    Raises `UsageError` where there is no such folder, `HubError` where the Hub stops answering, and nothing else for
    anything that can lie in a checkpoint.
    """
    files = LocalFiles(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    if isinstance(files, LocalFiles) and not files.folder.is_dir():
        raise UsageError(f"{files.folder}: no such folder, expected the folder of a nested checkpoint")
    if deep and not files.local:
        raise UsageError(f"{files.name}: a deep check reads every byte. Download the checkpoint first.")
    return _Validation(files, deep).run()


class _Validation:
    """One run: what has been read so far, and the findings."""

    def __init__(self, files: Files, deep: bool):
        self.files = files
        self.folder = files.folder if isinstance(files, LocalFiles) else Path(files.name)
        self.deep = deep
        self.findings: list[Finding] = []
        self.manifest: Manifest | None = None
        self.architecture: Architecture | None = None
        self.required: dict[str, tuple[int, ...]] = {}
        self.indexes: dict[str, Any] = {}
        self.weight_maps: dict[str, dict[str, str]] = {}
        self.headers: dict[str, dict[str, TensorEntry]] = {}
        self.broken: set[str] = set()
        self.refused: set[str] = set()
        self.misshapen: set[str] = set()
        self.stored: dict[str, tuple[str, TensorEntry]] = {}
        self.out_of_reach: set[str] = set()

    def run(self) -> list[Finding]:
        self._read_manifest()
        self._read_config()
        for index in (DRAFT_INDEX, TARGET_INDEX):
            self._read_index(index)
        self._read_shards()
        self._look_for_strangers()
        self._compare_indexes()
        if self.architecture:
            self._check_architecture(self.architecture)
        if self.manifest:
            self._check_files(self.manifest)
            self._check_manifest(self.manifest)
            self._check_unquantized(self.manifest)
            for name, module in self.manifest.modules.items():
                self._check_module(name, module)
        return self.findings

    def _add(self, file: str, place: str, message: str) -> None:
        self.findings.append(Finding(_printable(file), _printable(place), _printable(message)))

    def _read_json(self, name: str, purpose: str) -> Any:
        """The parsed file, or None after a finding."""
        if self.files.size(name) is None:
            self.broken.add(name)
            self._add(name, WHOLE_FILE, f"missing. It holds {purpose}. Download the checkpoint again.")
            return None
        try:
            data = json_in(self.files, name, strict=name != CONFIG_FILE)
            if _depth(data) > DEEPEST_JSON:
                raise FileFormatError(f"{name}: is nested too deeply, expected at most {DEEPEST_JSON} levels")
            return data
        except FileFormatError as error:
            self.broken.add(name)
            self._add(name, WHOLE_FILE, _without_name(error, name))
            return None

    def _read_manifest(self) -> None:
        document = self._read_json(MANIFEST_FILE, "the manifest, without which nothing else can be judged")
        if document is None:
            return
        try:
            check_readable(document)
        except ManifestError as error:
            place = error.path or "(top level)"
            self._add(MANIFEST_FILE, place, str(error).removeprefix(f"{MANIFEST_FILE}: {place}: "))
            return
        except UnsupportedVersionError as error:
            place, _, message = _without_name(error, MANIFEST_FILE).partition(" ")
            self._add(MANIFEST_FILE, place, message)
            return
        findings = schema_findings(document)
        for finding in findings:
            self._add(finding.file, finding.place, finding.message)
        if not findings:
            self.manifest = Manifest.from_dict(document)

    def _read_config(self) -> None:
        config = self._read_json(CONFIG_FILE, "the sizes of the model")
        if config is None:
            return
        if not isinstance(config, dict):
            self._add(CONFIG_FILE, "(top level)", f"found a JSON {type(config).__name__}, expected an object")
            return
        self._check_block(config.get("quantization_config"))
        try:
            self.architecture = read_architecture(config, self.manifest.unquantized if self.manifest else ())
            self.required = self.architecture.tensors()
        except UnsupportedModelError as error:
            for problem in error.problems:
                place, _, message = problem.removeprefix(f"{CONFIG_FILE}: ").partition(" ")
                self._add(CONFIG_FILE, place, message)

    def _check_block(self, block: Any) -> None:
        place = "quantization_config"
        if not isinstance(block, dict):
            found = "missing" if block is None else f"a JSON {type(block).__name__}"
            self._add(CONFIG_FILE, place, f"{found}, expected an object with quant_method {QUANT_METHOD!r}")
            return
        method = block.get("quant_method")
        if method != QUANT_METHOD:
            hint = ". 'bitnet' is another method, for 1.58-bit models" if method == "bitnet" else ""
            self._add(
                CONFIG_FILE, f"{place}.quant_method", f"is {_quote.repr(method)}, expected {QUANT_METHOD!r}{hint}"
            )
        if block.get("manifest") != MANIFEST_FILE:
            self._add(
                CONFIG_FILE, f"{place}.manifest", f"is {_quote.repr(block.get('manifest'))}, expected {MANIFEST_FILE!r}"
            )
        version = block.get("format_version")
        if self.manifest and version != self.manifest.format_version:
            self._add(
                CONFIG_FILE,
                f"{place}.format_version",
                f"is {_quote.repr(version)}, expected {self.manifest.format_version!r} as in {MANIFEST_FILE}",
            )

    def _read_index(self, index: str) -> None:
        view = "draft" if index == DRAFT_INDEX else "target"
        data = self._read_json(index, f"the tensors of the {view} view and their shards")
        if data is None:
            return
        weight_map = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            self._add(index, "weight_map", "missing or empty, expected an object of tensor names and their shards")
            return
        self.indexes[index] = data
        self.weight_maps[index] = kept = {}
        complaints: dict[str, None] = {}
        for name, shard in weight_map.items():
            if isinstance(shard, str) and SHARD_NAME.fullmatch(shard):
                kept[name] = shard
                continue
            # A name that is not one of ours is never opened, wherever it points.
            self.out_of_reach.add(name)
            try:
                inside(self.folder, shard)
                self.refused.add(shard)
                complaints[f"names {_quote.repr(shard)}, expected {SHARD_PATTERN}"] = None
            except FileFormatError as error:
                complaints[str(error)] = None
        for complaint in complaints:
            self._add(index, "weight_map", complaint)
        if index == TARGET_INDEX:
            self._check_numbers(index, kept)

    def _check_numbers(self, index: str, weight_map: Mapping[str, str]) -> None:
        families: dict[str, set[tuple[int, int]]] = {}
        for shard in set(weight_map.values()):
            match = SHARD_NAME.fullmatch(shard)
            assert match is not None
            families.setdefault(match[1], set()).add((int(match[2]), int(match[3])))
        for family, numbers in sorted(families.items()):
            if numbers != {(number, len(numbers)) for number in range(1, len(numbers) + 1)}:
                found = ", ".join(f"{number} of {total}" for number, total in sorted(numbers)[:20])
                self._add(index, "weight_map", f"names bitnest-{family} shards {found}, expected all of 1 to n of n")

    def _read_shards(self) -> None:
        named = {shard: index for index, names in self.weight_maps.items() for shard in names.values()}
        if self.manifest:
            for name in self.manifest.files:
                if SHARD_NAME.fullmatch(name):
                    named.setdefault(name, MANIFEST_FILE)
        for shard, by in sorted(named.items()):
            if self.files.size(shard) is None:
                self.broken.add(shard)
                self._add(shard, WHOLE_FILE, f"missing, though {by} names it. Download the checkpoint again.")
                continue
            try:
                header, metadata = header_in(self.files, shard)
                self._check_metadata(shard, metadata)
                self.headers[shard] = header
            except FileFormatError as error:
                self.broken.add(shard)
                self._add(shard, WHOLE_FILE, _without_name(error, shard))
        for shard, header in self.headers.items():
            self._check_family(shard, header)
            for name, entry in header.items():
                self.stored.setdefault(name, (shard, entry))
        for weight_map in self.weight_maps.values():
            self.out_of_reach |= {name for name, shard in weight_map.items() if shard in self.broken}

    def _check_metadata(self, shard: str, metadata: Mapping[str, Any]) -> None:
        if self.files.local:
            try:
                with safe_open(self.folder / shard, framework="pt") as file:
                    metadata = file.metadata() or {}
            except (SafetensorError, OSError) as error:
                raise FileFormatError(f"{shard}: the safetensors library cannot open it ({error})") from error
        if metadata.get("format") != "pt":
            self._add(
                shard,
                "__metadata__.format",
                f"is {_quote.repr(metadata.get('format'))}, expected 'pt', which torch loaders ask for",
            )

    def _check_family(self, shard: str, header: Mapping[str, TensorEntry]) -> None:
        match = SHARD_NAME.fullmatch(shard)
        assert match is not None
        family = match[1]
        wrong = [name for name in header if _is_refinement(name) != (family == "refinement")]
        if wrong:
            what = "is no refinement plane" if family == "refinement" else "is a refinement plane"
            rule = (
                "expected refinement planes alone in bitnest-refinement shards and everything else in bitnest-base "
                "shards, so that a draft can be fetched by itself"
            )
            self._add(shard, wrong[0], f"{what} ({len(wrong)} such here); {rule}")

    def _look_for_strangers(self) -> None:
        known = {DRAFT_INDEX, TARGET_INDEX, *self.refused}
        for weight_map in self.weight_maps.values():
            known.update(weight_map.values())
        if self.manifest:
            known.update(self.manifest.files)
        for name in self.files.names():
            base_name = name.rpartition("/")[2]
            if Path(base_name).suffix.lower() in EXECUTABLE_SUFFIXES:
                self._add(
                    name,
                    WHOLE_FILE,
                    "may hold pickled Python objects, which can run code when they are loaded; "
                    "a nested checkpoint has none. Delete it.",
                )
            elif name in FOREIGN_WEIGHTS:
                self._add(
                    name,
                    WHOLE_FILE,
                    "must not lie in a nested checkpoint: transformers would load it in place of the planes and fill "
                    "what it does not find with random weights. Delete it.",
                )
            elif base_name.endswith((".safetensors", ".safetensors.index.json")) and name not in known:
                self._add(
                    name,
                    WHOLE_FILE,
                    f"is neither in an index nor listed in {MANIFEST_FILE}; left over from something else? Delete it.",
                )

    def _compare_indexes(self) -> None:
        holders: dict[str, list[str]] = {}
        for shard, header in self.headers.items():
            for name in header:
                holders.setdefault(name, []).append(shard)
        for index, weight_map in self.weight_maps.items():
            for name, shard in weight_map.items():
                if shard in self.headers and name not in self.headers[shard]:
                    found = holders.get(name)
                    where = f"it lies in {', '.join(found)}" if found else "no shard of the checkpoint holds it"
                    self._add(index, name, f"is not in the header of {shard}; {where}")
            self._check_total_size(index, weight_map)
        for name, shards in holders.items():
            if len(shards) > 1:
                self._add(shards[1], name, f"is stored twice; {shards[0]} holds it too")
        target_map = self.weight_maps.get(TARGET_INDEX)
        if target_map is not None:
            for name in sorted(self.stored.keys() - target_map.keys() - self.out_of_reach):
                self._add(TARGET_INDEX, name, f"missing; {self.stored[name][0]} holds it")
        draft_map = self.weight_maps.get(DRAFT_INDEX)
        if draft_map is not None:
            for name in sorted(filter(_is_refinement, draft_map)):
                self._add(DRAFT_INDEX, name, "is a refinement plane, which the draft view does not need")
            wanted = {name for name in self.stored if not _is_refinement(name)}
            for name in sorted(wanted - draft_map.keys() - self.out_of_reach):
                self._add(DRAFT_INDEX, name, "missing; a draft needs every tensor apart from the refinement planes")

    def _check_total_size(self, index: str, weight_map: Mapping[str, str]) -> None:
        if any(name not in self.headers.get(shard, ()) for name, shard in weight_map.items()):
            return
        if len(weight_map) < len(self.indexes[index]["weight_map"]):
            return
        metadata = self.indexes[index].get("metadata")
        found = metadata.get("total_size") if isinstance(metadata, dict) else None
        expected = sum(self.headers[shard][name].size for name, shard in weight_map.items())
        if isinstance(found, bool) or found != expected:
            self._add(
                index, "metadata.total_size", f"is {_quote.repr(found)}, expected {expected}, the bytes of its tensors"
            )

    def _check_architecture(self, architecture: Architecture) -> None:
        modules = self.manifest.modules if self.manifest else {}
        for name, shape in self.required.items():
            module = modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            if module is not None:
                if module.shape != shape:
                    self.misshapen.add(name.removesuffix(".weight"))
                    self._add(
                        MANIFEST_FILE,
                        f"modules.{name.removesuffix('.weight')}.shape",
                        f"is {list(module.shape)}, expected {list(shape)} as {CONFIG_FILE} has it",
                    )
            elif name in self.stored:
                shard, entry = self.stored[name]
                if entry.shape != shape:
                    self._add(
                        shard,
                        name,
                        f"shape is {list(entry.shape)}, expected {list(shape)} as {CONFIG_FILE} has it",
                    )
                if entry.dtype not in FLOAT_TYPES:
                    self._add(shard, name, f"dtype is {entry.dtype}, expected one of {', '.join(FLOAT_TYPES)}")
            elif self.manifest and self._in_reach(name):
                self.out_of_reach.add(name)
                self._add(
                    TARGET_INDEX,
                    name,
                    f"missing; a {architecture.model_type} model needs it with shape {list(shape)}",
                )
        head, head_module = architecture.head, architecture.head_module
        nested_head = head_module in modules
        for name in modules:
            # A head beside tied embeddings is a fault of config.json, reported below.
            if f"{name}.weight" not in self.required and name != head_module:
                self._add(
                    MANIFEST_FILE,
                    f"modules.{name}",
                    f"is no linear layer of a {architecture.model_type} model with {architecture.layers} layers",
                )
        if architecture.tied_embeddings and nested_head:
            self._add(
                CONFIG_FILE,
                "tie_word_embeddings",
                f"is true, but {MANIFEST_FILE} lists the module {head_module}; set it to false",
            )
        elif architecture.tied_embeddings and head in self.stored:
            self._add(
                CONFIG_FILE,
                "tie_word_embeddings",
                f"is true, but {self.stored[head][0]} holds {head}; set it to false or leave the tensor out",
            )
        elif nested_head and head in self.stored:
            self._add(
                self.stored[head][0],
                head,
                f"is stored although {MANIFEST_FILE} lists the module {head_module}; a model has one head. "
                "Leave it out.",
            )

    def _check_files(self, manifest: Manifest) -> None:
        for name, record in manifest.files.items():
            place = f"files.{name}"
            if name == MANIFEST_FILE:
                self._add(MANIFEST_FILE, place, "lists itself, but a file cannot hold its own digest. Remove it.")
                continue
            try:
                inside(self.folder, name)
            except FileFormatError as error:
                self._add(MANIFEST_FILE, place, str(error))
                continue
            if name in self.broken:
                continue
            size = self.files.size(name)
            if size is None:
                self._add(name, WHOLE_FILE, f"missing, though {MANIFEST_FILE} lists it. Download the checkpoint again.")
                continue
            if size != record.size:
                pointer = "a Git LFS pointer: " if self._is_pointer(name) else ""
                self._add(
                    name,
                    WHOLE_FILE,
                    f"{pointer}has {size} bytes, expected {record.size}. Download it again.",
                )
            elif self.deep and (found := file_sha256(self.folder / name)) != record.sha256:
                self._add(name, WHOLE_FILE, f"{_digests(found, record.sha256)}. Download it again.")
        shards = {shard for weight_map in self.weight_maps.values() for shard in weight_map.values()}
        for name in sorted({CONFIG_FILE, DRAFT_INDEX, TARGET_INDEX, *shards} - manifest.files.keys() - self.broken):
            self._add(MANIFEST_FILE, "files", f"does not list {name}; every weight, index and config must be listed")

    def _check_manifest(self, manifest: Manifest) -> None:
        has_target = "target" in manifest.views
        method = manifest.nesting.get("refine_method")
        if has_target != (method is not None):
            expected = "the name of a method" if has_target else "null without a target view"
            self._add(MANIFEST_FILE, "nesting.refine_method", f"is {_quote.repr(method)}, expected {expected}")
        permuted = [name for name, module in manifest.modules.items() if module.permutation]
        if permuted and PERMUTATION_FEATURE not in manifest.required_features:
            self._add(
                MANIFEST_FILE,
                "required_features",
                f"does not list {PERMUTATION_FEATURE!r}, though {permuted[0]} has a permutation",
            )

    def _check_unquantized(self, manifest: Manifest) -> None:
        suffixes = (BASE_SUFFIX, SCALE_SUFFIX, REFINEMENT_SUFFIX, PERMUTATION_SUFFIX)
        planes = {f"{name}.{suffix}": name for name in manifest.modules for suffix in suffixes}
        listed = set(manifest.unquantized)
        for name in manifest.unquantized:
            if name in planes:
                self._add(MANIFEST_FILE, "unquantized", f"lists {name}, which belongs to {planes[name]}")
            elif name not in self.stored and self._in_reach(name):
                self._add(MANIFEST_FILE, "unquantized", f"lists {name}, which no shard holds")
        for name, (shard, entry) in self.stored.items():
            if name in planes:
                continue
            if name.endswith(tuple(f".{suffix}" for suffix in suffixes)):
                self._add(shard, name, f"belongs to no module of {MANIFEST_FILE}")
            elif name not in listed:
                self._add(MANIFEST_FILE, "unquantized", f"does not list {name}, which {shard} holds")
            elif self.deep and entry.dtype in DTYPES and DTYPES[entry.dtype].is_floating_point:
                tensor = self._read(shard, entry)
                if tensor is not None and (bad := _count_not_finite(tensor)):
                    self._add(shard, name, f"{bad} of {tensor.numel()} values are NaN or infinite")

    def _check_module(self, name: str, module: Module) -> None:
        place = f"modules.{name}"
        outputs, inputs = module.shape
        if inputs % module.group_size:
            self._add(
                MANIFEST_FILE,
                f"{place}.group_size",
                f"is {module.group_size}, which does not divide the module's {inputs} inputs",
            )
            return
        self._check_names(name, module)
        self._check_refinement_record(name, module)
        if name in self.misshapen:
            return
        words = (outputs, inputs // packing.CODES_PER_WORD)
        base = self._tensor(place, f"{name}.{BASE_SUFFIX}", ("I32",), words)
        scale = self._tensor(place, f"{name}.{SCALE_SUFFIX}", SCALE_TYPES, (outputs, module.groups))
        refinement = None
        if module.refinement is not None:
            refinement = self._tensor(place, f"{name}.{REFINEMENT_SUFFIX}", ("I32",), words)
        if module.bias is not None:
            self._tensor(place, f"{name}.bias", FLOAT_TYPES, (outputs,), load=False)
        if module.permutation is not None:
            self._check_permutation(place, f"{name}.{PERMUTATION_SUFFIX}", inputs)
        if scale is not None:
            self._check_scale(f"{name}.{SCALE_SUFFIX}", scale)
        if base is not None and refinement is not None:
            self._check_pairs(f"{name}.{REFINEMENT_SUFFIX}", base, refinement)
        if self.deep:
            for (suffix, plane), tensor in zip(_planes(module), (base, scale, refinement), strict=False):
                if tensor is not None:
                    self._check_digest(f"{name}.{suffix}", plane, tensor)

    def _check_names(self, name: str, module: Module) -> None:
        """The names of a module's tensors follow from its own; a record that says otherwise is wrong."""
        roles = {BASE_SUFFIX: "base", SCALE_SUFFIX: "scale", REFINEMENT_SUFFIX: "refinement"}
        for suffix, plane in _planes(module):
            if plane.name != f"{name}.{suffix}":
                self._add(
                    MANIFEST_FILE,
                    f"modules.{name}.planes.{roles[suffix]}.name",
                    f"is {_quote.repr(plane.name)}, expected {f'{name}.{suffix}'!r}",
                )
        for field, found, suffix in (
            ("bias", module.bias, "bias"),
            ("permutation", module.permutation, PERMUTATION_SUFFIX),
        ):
            expected = f"{name}.{suffix}"
            if found is None and expected in self.stored:
                self._add(
                    MANIFEST_FILE,
                    f"modules.{name}.{field}",
                    f"is null, but {self.stored[expected][0]} holds {expected}",
                )
            elif found is not None and found != expected:
                self._add(MANIFEST_FILE, f"modules.{name}.{field}", f"is {_quote.repr(found)}, expected {expected!r}")

    def _check_refinement_record(self, name: str, module: Module) -> None:
        assert self.manifest is not None
        place = f"modules.{name}.planes.refinement"
        recorded = module.refinement is not None
        if "target" in self.manifest.views and not recorded:
            self._add(MANIFEST_FILE, place, "missing, though views are draft and target")
        if "target" not in self.manifest.views and (recorded or f"{name}.{REFINEMENT_SUFFIX}" in self.stored):
            self._add(MANIFEST_FILE, place, "there is a refinement plane, though views are draft alone")

    def _check_permutation(self, place: str, name: str, inputs: int) -> None:
        permutation = self._tensor(place, name, ("I32",), (inputs,))
        if permutation is not None and permutation.sort().values.tolist() != list(range(inputs)):
            self._add(self.stored[name][0], name, f"is no permutation of the inputs 0 to {inputs - 1}")

    def _tensor(
        self, place: str, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], load: bool = True
    ) -> Tensor | None:
        """The stored tensor where it is what it should be, or None, after findings."""
        if name not in self.stored:
            if self._in_reach(name):
                self._add(MANIFEST_FILE, place, f"no shard holds {name}")
            return None
        shard, entry = self.stored[name]
        if entry.dtype not in dtypes:
            self._add(shard, name, f"dtype is {entry.dtype}, expected {' or '.join(dtypes)}")
        # A bias of a known layer was compared with the config already; once is enough.
        if entry.shape != shape and (load or name not in self.required):
            self._add(shard, name, f"shape is {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype not in dtypes or entry.shape != shape or not load:
            return None
        return self._read(shard, entry)

    def _read(self, shard: str, entry: TensorEntry) -> Tensor | None:
        if not self.files.local:
            return None
        try:
            raw = self.files.read(shard, entry.start, entry.size)
        except OSError as error:
            self._add(shard, WHOLE_FILE, f"cannot be read ({error.strerror or error})")
            return None
        if not raw:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(raw, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def _check_scale(self, name: str, scale: Tensor) -> None:
        values = scale.float()
        bad = ~(torch.isfinite(values) & (values > 0))
        expected = "a finite number above 0"
        if scale.dtype == torch.float32 and not bool(bad.any()):
            bad = (values < F32_SCALE_RANGE[0]) | (values > F32_SCALE_RANGE[1])
            expected = "2^-120 to 2^120, where a sixteenth and 128 times of it are normal float32 numbers"
        if bool(bad.any()):
            row, group = bad.nonzero()[0].tolist()
            self._add(
                self.stored[name][0],
                name,
                f"{int(bad.sum())} of {bad.numel()} scales are out of range, the first at row {row}, group {group}: "
                f"{float(values[row, group]):g}, expected {expected}",
            )

    def _check_pairs(self, name: str, base: Tensor, refinement: Tensor) -> None:
        """Count `q4 = -8` beside `qr < 0`: base and refinement words `[O, I / 8]`."""
        if not packing.any_forbidden_pair(base, refinement):
            return
        count, first = 0, (0, 0)
        step = max(1, VALUES_AT_ONCE // max(1, base.shape[1] * packing.CODES_PER_WORD))
        for start in range(0, base.shape[0], step):
            rows = slice(start, start + step)
            pairs = nesting.forbidden_pairs(packing.unpack(base[rows]), packing.unpack(refinement[rows]))
            here = int(pairs.sum())
            if here and not count:
                row, column = pairs.nonzero()[0].tolist()
                first = (start + row, column)
            count += here
        self._add(
            self.stored[name][0],
            name,
            f"{count} forbidden code pair{'s' * (count > 1)}, the first at row {first[0]}, column {first[1]}: "
            "a negative refinement code beside the base code -8, where 0 to 7 are allowed",
        )

    def _check_digest(self, name: str, plane: Plane, tensor: Tensor) -> None:
        found = tensor_sha256(tensor)
        if found != plane.sha256:
            self._add(self.stored[name][0], name, f"{_digests(found, plane.sha256)} in {MANIFEST_FILE}")

    def _is_pointer(self, name: str) -> bool:
        try:
            # Of a repository, every such look would be a request, and the Hub does not hand pointers out.
            return self.files.local and self.files.read(name, 0, len(LFS_POINTER)) == LFS_POINTER
        except OSError:
            return False

    def _in_reach(self, name: str) -> bool:
        """False where the tensor's absence follows from a file that is missing or broken."""
        return name not in self.out_of_reach and bool(self.weight_maps or not self.broken)


def _planes(module: Module) -> Iterator[tuple[str, Plane]]:
    yield BASE_SUFFIX, module.base
    yield SCALE_SUFFIX, module.scale
    if module.refinement is not None:
        yield REFINEMENT_SUFFIX, module.refinement


def _is_refinement(name: str) -> bool:
    return name.endswith(f".{REFINEMENT_SUFFIX}")


def _count_not_finite(tensor: Tensor) -> int:
    pieces = tensor.flatten().split(VALUES_AT_ONCE)
    return sum(int((~torch.isfinite(piece.float())).sum()) for piece in pieces)


def _depth(data: Any) -> int:
    """How many objects and lists lie inside one another."""
    depth, level = 0, [data]
    while level:
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return depth


def _digests(found: str, expected: str) -> str:
    return f"SHA-256 is {found[:12]}..., expected {expected[:12]}..."


def _without_name(error: Exception, name: str) -> str:
    return str(error).removeprefix(f"{name}: ").removeprefix(f"{Path(name).name}: ")


def _printable(text: str) -> str:
    """One line that any terminal can show: control characters and half surrogates are written as escapes."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."
