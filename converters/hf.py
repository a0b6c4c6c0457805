"""Hugging Face folders as a source: safetensors in fp32, fp16 or bf16, one file or shards with an index.

Linear layers may be stored as 4-bit codes in a format that `quantized` knows; they then bring their base planes.

Opening reads `config.json`, the index and the shard headers, checks them against each other, and stops with every
contradiction at once. Tensors are then read one at a time straight from the file (not through a memory map, so a
long conversion does not keep the whole model resident). Nothing in the folder is ever executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.converters.base import GivenBase, GivenModule, Inspection, Provenance, TensorInfo
from bitnest_format.converters.fused import parts_of, split_entry, stored_shapes
from bitnest_format.converters.packed import Claim, PackedFormat, dequantize, listed
from bitnest_format.converters.quantized import CONFIG_KEYS, find_format, format_by_names, stated_settings
from bitnest_format.converters.rotation_file import describe_pickle
from bitnest_format.errors import FileFormatError, SourceError, UnsupportedModelError
from bitnest_format.families import FAMILIES, WRAPPERS
from bitnest_format.manifest import MANIFEST_FILE
from bitnest_format.shards import DTYPES, Files, LocalFiles, TensorEntry, header_in, inside, read_json

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

STORED_TYPES = ("F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "*.tiktoken",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    # What OpenVLA's actions are scaled by.
    "dataset_statistics.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "COPYING*",
    "USE_POLICY*",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer.model.v*", "*.tiktoken", "tekken.json", "vocab.json")

# Rotary tables and counted positions that old files store although they follow from the config.
DERIVED = re.compile(r"(^|\.)rotary_emb\.|(^|\.)rope\.freqs$|(^|\.)(inv_freq|position_ids)$")
NUMBERED_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors$")

READ_BYTES, FETCH_BYTES = 1 << 20, 1 << 25
READERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor's bytes lie."""

    files: Files
    file: str
    name: str
    entry: TensorEntry


class HuggingFaceSource:
    """A local folder in the Hugging Face layout. `name` and `revision` are recorded where it came from the Hub.

    `weights`: where the safetensors files lie if not in the folder. Files of a repository are never read twice without
    need: their fingerprint is made of the digests that the Hub knows, and tensors are checked when they are read.

    Raises `SourceError` listing every reason why the folder cannot be read as a model of a supported architecture,
    unquantized or in a packed format that can be a base plane. With `ignore_unknown_tensors`, tensors that the
    architecture does not know are left out and noted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        ignore_unknown_tensors: bool = False,
        weights: Files | None = None,
    ):
        self.folder = folder
        self.weights = weights or LocalFiles(folder)
        self.location = folder
        self.notes: list[str] = []
        stored_config = _read_config(folder)
        # Code of the model's own is not copied, so the config of the result must not point to it; nor to the place on
        # somebody's disk that a model was once loaded from.
        left_out = ("auto_map", "_name_or_path", *CONFIG_KEYS)
        self.config: Mapping[str, Any] = {key: value for key, value in stored_config.items() if key not in left_out}
        settings = stated_settings(folder, stored_config)
        packed, problems = find_format(settings)
        if problems:
            raise SourceError(problems)
        stored, file_problems = _find_tensors(folder, self.weights, self.notes)
        architecture, problems = _architecture(stored_config, stored, self.notes)
        problems += file_problems
        if not settings:
            packed, naming_problems = format_by_names(stored)
            problems += naming_problems
        problems += _prefix_problems(stored)
        if architecture is None or problems:
            raise SourceError(problems)
        claim = _claimed(packed, stored, architecture, settings)
        stored = _split_fused(stored, architecture, claim.names)
        self._architecture = architecture
        self._packed = packed
        self.notes += packed.notes if packed else []
        self.provenance = Provenance(
            kind=packed.kind if packed else "huggingface",
            name=name,
            revision=revision,
            license=_card_license(folder / "README.md"),
        )
        self._problems = _lfs_pointers(folder)
        self._packed_locations = {
            name: stored[name] for module in claim.modules.values() for name in module.tensors.values()
        }
        self._wholes = claim.modules
        self._parts = parts_of(claim.modules, architecture)
        # The latest fused matrix: its parts are asked for one after the other.
        self._unpacked: tuple[str, GivenBase] | None = None
        self._locations = self._choose(stored, architecture, claim.names, ignore_unknown_tensors)
        problems = _type_problems(self._locations)
        if problems:
            raise SourceError(problems)
        self.given: Mapping[str, GivenModule] = {
            name: GivenModule(
                shape=(part.stop - part.start, claim.modules[part.whole].shape[1]),
                group_size=claim.modules[part.whole].group_size,
            )
            for name, part in self._parts.items()
        }
        self.refinable = False
        infos = {
            name: TensorInfo(shape=location.entry.shape, dtype=DTYPES[location.entry.dtype])
            for name, location in self._locations.items()
        }
        for module, given in self.given.items():
            infos[f"{module}.weight"] = TensorInfo(shape=given.shape, dtype=torch.float32)
        # A tied head is compared with the embedding while the weights are read, but it is not a tensor of the model.
        beside = sorted(filter(architecture.is_beside, infos))
        self.tensors: Mapping[str, TensorInfo] = {
            name: infos[name] for name in (*architecture.tensors(), *beside) if name in infos
        }
        if not _side_files(folder, TOKENIZERS):
            self.notes.append(
                "no tokenizer files (tokenizer.json, tokenizer.model or vocab.json): generating from text needs them"
            )

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored type, in memory of its own; float32 where it is stored packed."""
        module = name.removesuffix(".weight")
        if module in self.given and name not in self._locations:
            return dequantize(self.given_base(module))
        return self._read_stored(name)

    def given_base(self, module: str) -> GivenBase:
        """The base plane of a module that is stored packed."""
        part = self._parts[module]
        if part.whole == module:
            return self._stored_base(module)
        if self._unpacked is None or self._unpacked[0] != part.whole:
            self._unpacked = part.whole, self._stored_base(part.whole)
        return part.of(self._unpacked[1])

    def _stored_base(self, whole: str) -> GivenBase:
        assert self._packed is not None
        return self._packed.base(self._wholes[whole], self._read_stored)

    def _read_stored(self, name: str) -> Tensor:
        return _read(self._locations.get(name) or self._packed_locations[name])

    def _known_digests(self) -> dict[str, str]:
        """Where the weights lie in a repository that knows its files' digests: each tensor's content, as a place."""
        found = {}
        for name, location in {**self._locations, **self._packed_locations}.items():
            digest = self.weights.digest(location.file)
            if digest is None:
                return {}
            found[name] = f"{digest} {location.entry.start}"
        return found

    def inspect(self) -> Inspection:
        """Read every tensor once, in the order of the files; nothing where a repository vouches for its files.

        The fingerprint then stands for the files' digests: the same weights in other shards have another one.
        """
        locations = {**self._locations, **self._packed_locations}
        order = {name: (location.file, location.entry.start) for name, location in locations.items()}
        head, embedding = self._architecture.head, self._architecture.embedding
        digests = self._known_digests()
        # Of a repository only what has to be compared is read here; the rest is checked when it is used.
        compared = (head, embedding) if head in order and head not in self.tensors else ()
        wanted = [name for name in order if not digests or name in compared]
        results = scan_all(lambda name: _scan(locations[name]), sorted(wanted, key=order.__getitem__))
        problems = [*self._problems]
        named = [name for name in self.tensors if name in results]
        # What stands in scales is judged by their format.
        for name in (*named, *(results.keys() - self.tensors.keys() - self._packed_locations.keys())):
            if results[name].bad:
                problems.append(_not_finite(locations[name], results[name].bad))
        if head in results and head not in self.tensors and embedding in results:
            if results[head].sha256 == results[embedding].sha256:
                note = f"{head}: repeats the embedding it is tied to; left out"
                self.notes += [note] if note not in self.notes else []
            else:
                problems.append(
                    f"{head}: differs from {embedding} although config.json has tie_word_embeddings true. "
                    "Set it to false to use the stored head, or remove the tensor."
                )
        if self._packed is not None:
            packed_problems, notes = self._packed.judge(self._wholes, self._read_stored)
            problems += packed_problems
            self.notes += [note for note in notes if note not in self.notes]
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode("utf-8"))
        for name in sorted({*(self.tensors.keys() & locations.keys()), *self._packed_locations}):
            entry = locations[name].entry
            content = digests[name] if digests else results[name].sha256
            digest.update(f"\n{name} {DTYPES[entry.dtype]} {list(entry.shape)} {content}".encode())
        return Inspection(problems=problems, fingerprint=digest.hexdigest())

    def write_side_files(self, folder: Path) -> list[str]:
        """Copy tokenizer, chat template, generation config and licence files into `folder`."""
        names = _side_files(self.folder, SIDE_FILES)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, folder / name)
        return names

    def _choose(
        self, stored: Mapping[str, Location], architecture: Architecture, packed: Collection[str], ignore_unknown: bool
    ) -> dict[str, Location]:
        """The plain tensors of the model among all that the files hold; the rest is dropped, noted, or a problem."""
        known = architecture.tensors()
        given = {*packed, *(f"{module}.weight" for module in self._parts)}
        chosen = {
            name: location
            for name, location in stored.items()
            if name not in given
            and (
                name in known
                or name == architecture.head
                or (architecture.is_beside(name) and not DERIVED.search(name))
            )
        }
        rest = [name for name in stored if name not in {*chosen, *packed} and not DERIVED.search(name)]
        # Old GPTQ writers gave every linear layer a bias, of zeros where the model has none.
        biases = [
            name for name in rest if name.removesuffix(".bias") in self._parts and not bool(_read(stored[name]).any())
        ]
        if biases:
            self.notes.append(f"biases of zeros that the model does not have are left out: {listed(biases)}")
            rest = [name for name in rest if name not in biases]
        prediction = [name for name in rest if _is_prediction_layer(name, stored, architecture, self.config)]
        if prediction:
            self.notes.append(f"extra prediction layers are dropped: {listed(prediction)}")
        unknown = [name for name in rest if name not in set(prediction)]
        if unknown and ignore_unknown:
            self.notes.append(f"tensors unknown to {architecture.model_type} are left out: {listed(unknown)}")
        elif unknown:
            self._problems += _unknown_problems(unknown, architecture)
        return chosen


def _read_config(folder: Path) -> dict[str, Any]:
    if (folder / MANIFEST_FILE).is_file():
        raise SourceError(
            f"{folder}: is already converted (it holds {MANIFEST_FILE}). Load it as it is, or give the original model."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise SourceError(f"{folder}: has no {CONFIG_FILE}; expected a model in the Hugging Face layout")
    try:
        config = read_json(folder / CONFIG_FILE)
    except FileFormatError as error:
        raise SourceError(str(error)) from error
    if not isinstance(config, dict):
        raise SourceError(f"{CONFIG_FILE}: holds a JSON {type(config).__name__}, expected an object")
    return config


def _claimed(
    packed: PackedFormat | None,
    stored: Mapping[str, Location],
    architecture: Architecture,
    settings: Mapping[str, Any],
) -> Claim:
    """The modules of a packed format; raises `SourceError` where they cannot be base planes, or there are none."""
    if packed is None:
        return Claim()
    if packed.problems:
        raise SourceError(packed.problems)
    entries = {name: location.entry for name, location in stored.items()}
    claim = packed.claim(entries, stored_shapes(architecture))
    if claim.problems:
        raise SourceError(claim.problems)
    if not claim.modules:
        place = next(iter(settings), "the tensors' names")
        raise SourceError(
            f"{place}: says that the model is quantized with {packed.kind!r}, but no linear layer of it is stored "
            "packed. Remove that statement if the weights are the original ones."
        )
    return claim


def _architecture(
    config: Mapping[str, Any], names: Collection[str], notes: list[str]
) -> tuple[Architecture | None, list[str]]:
    custom = config.get("auto_map")
    try:
        architecture = read_architecture(config, names)
    except UnsupportedModelError as error:
        problems = list(error.problems)
        if custom and config.get("model_type") not in {*FAMILIES, *WRAPPERS}:
            problems.append(
                f"{CONFIG_FILE}: auto_map names code of the model's own ({listed(_code_files(custom))}). It is never "
                "executed here; there is no trust_remote_code."
            )
        return None, problems
    if custom:
        notes.append(
            f"{CONFIG_FILE}: auto_map names code of the model's own ({listed(_code_files(custom))}); it is neither "
            f"executed nor copied (there is no trust_remote_code), the model is read as {architecture.model_type}"
        )
    return architecture, []


def _code_files(auto_map: Any) -> list[str]:
    values = list(auto_map.values()) if isinstance(auto_map, Mapping) else [auto_map]
    return sorted({f"{str(value).rpartition('--')[2].split('.')[0]}.py" for value in values})


def _find_tensors(folder: Path, weights: Files, notes: list[str]) -> tuple[dict[str, Location], list[str]]:
    """Every stored tensor by name, or the problems that make this impossible."""
    index = (folder / INDEX_FILE).is_file()
    weight_map: dict[str, str] = {}
    if index:
        try:
            weight_map = _read_index(folder)
        except (FileFormatError, SourceError) as error:
            return {}, error.problems if isinstance(error, SourceError) else [str(error)]
        files = sorted(set(weight_map.values()))
    elif weights.size(SINGLE_FILE) is not None:
        files = [SINGLE_FILE]
    else:
        files = [name for name in _top_level(weights) if name.endswith(".safetensors") and not _is_stray(name)]
    if not files:
        return {}, [_no_weights(folder, weights)]
    problems = _missing_shards(weights, files, INDEX_FILE if index else "the shard names")
    headers: dict[str, dict[str, TensorEntry]] = {}
    for file in files:
        if weights.size(file) is not None:
            try:
                headers[file] = header_in(weights, file)[0]
            except FileFormatError as error:
                problems.append(str(error))
    if not problems:
        problems = _index_problems(weight_map, headers) if index else _duplicates(headers)
    _note_ignored_files(weights, files, notes)
    tensors = {
        name: Location(weights, file, name, entry) for file, header in headers.items() for name, entry in header.items()
    }
    return tensors, problems


def _split_fused(
    stored: Mapping[str, Location], architecture: Architecture, packed: Collection[str]
) -> dict[str, Location]:
    """Fused matrices as their parts, `packed` tensors as they are. Raises `SourceError` naming all that do not fit."""
    split: dict[str, Location] = {}
    problems: list[str] = []
    for name, location in stored.items():
        if name in packed:
            split[name] = location
            continue
        try:
            entries = split_entry(name, location.entry, architecture)
        except SourceError as error:
            problems += error.problems
        else:
            split |= {part: replace(location, entry=entry) for part, entry in entries.items()}
    if problems:
        raise SourceError(problems)
    return split


def _read_index(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{INDEX_FILE}: weight_map: missing or empty, expected tensor names with their shards")
    problems = []
    for file in sorted({str(value) for value in weight_map.values()}):
        try:
            inside(folder, file)
        except FileFormatError as error:
            problems.append(f"{INDEX_FILE}: {error}")
    if problems:
        raise SourceError(problems)
    return {str(name): str(file) for name, file in weight_map.items()}


def _missing_shards(weights: Files, files: Iterable[str], source: str) -> list[str]:
    """Shards that the index names, or that the numbering `-00001-of-0000N` implies, but that are not there."""
    expected = set(files)
    for file in files:
        match = NUMBERED_SHARD.match(file)
        if match and int(match["count"]) < 10_000:
            width = len(match["number"])
            expected |= {
                f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors"
                for number in range(1, int(match["count"]) + 1)
            }
    missing = sorted(file for file in expected if weights.size(file) is None)
    if not missing:
        return []
    return [
        f"{source}: {len(missing)} of {len(expected)} shards {'is' if len(missing) == 1 else 'are'} not in the folder: "
        f"{', '.join(missing)}. Download the model again."
    ]


def _index_problems(weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorEntry]]) -> list[str]:
    """Where index and headers contradict each other, in either direction."""
    homes: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header:
            homes.setdefault(name, []).append(file)
    problems = []
    for name, file in weight_map.items():
        if file not in homes.get(name, []):
            where = f"it lies in {', '.join(homes[name])}" if name in homes else "no shard holds it"
            problems.append(f"{INDEX_FILE}: {name}: not in {file}, where the index puts it; {where}")
    for name, files in homes.items():
        strays = [file for file in files if file != weight_map.get(name)]
        if name not in weight_map and not DERIVED.search(name):
            problems.append(f"{INDEX_FILE}: {name}: in {', '.join(files)}, but missing from the index")
        elif name in weight_map and weight_map[name] in files and strays:
            problems.append(f"{INDEX_FILE}: {name}: in {', '.join(files)}; the index names {weight_map[name]} alone")
    return problems


def _duplicates(headers: Mapping[str, Mapping[str, TensorEntry]]) -> list[str]:
    homes: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header:
            homes.setdefault(name, []).append(file)
    return [
        f"{name}: in {' and '.join(files)}; without {INDEX_FILE} nothing says which one counts. Remove one of them."
        for name, files in homes.items()
        if len(files) > 1
    ]


def _no_weights(folder: Path, weights: Files) -> str:
    pickles = [name for name in _top_level(weights) if name.endswith(PICKLES)]
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: holds an adapter, not a whole model; merge it into its base model and convert that"
    for file in pickles:
        known = describe_pickle(folder / file)
        if known:
            return f"{folder / file}: {known}"
    if pickles:
        return (
            f"{folder}: has its weights only as {listed(pickles)}; these formats can carry code and are not opened. "
            'Convert them to safetensors in an environment you trust: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
            f".save_pretrained('{folder}-safetensors')\""
        )
    return f"{folder}: no {SINGLE_FILE}, no {INDEX_FILE} and no other .safetensors file"


def _is_stray(file: str) -> bool:
    """Weights in other layouts that lie beside many models: Mistral's own, and adapters."""
    return file.startswith(("consolidated", "adapter_"))


def _top_level(files: Files) -> list[str]:
    return sorted(name for name in files.names() if "/" not in name)


def _note_ignored_files(weights: Files, used: Iterable[str], notes: list[str]) -> None:
    suffixes = (".safetensors", ".gguf", *PICKLES)
    ignored = [name for name in _top_level(weights) if name.endswith(suffixes) and name not in used]
    if ignored:
        notes.append(f"weight files that are not part of the model are ignored: {listed(ignored)}")


def _lfs_pointers(folder: Path) -> list[str]:
    problems = []
    for name in _side_files(folder, SIDE_FILES):
        with (folder / name).open("rb") as file:
            if file.read(23) == b"version https://git-lfs":
                problems.append(
                    f"{name}: a Git LFS pointer, the file itself was not downloaded. Run 'git lfs pull' or download it "
                    "again."
                )
    return problems


def _prefix_problems(names: Iterable[str]) -> list[str]:
    """Whether the names alone say that these are not the tensors of a causal language model."""
    if any(name.startswith("layers.0.") for name in names) and not any(name.startswith("model.") for name in names):
        return [
            "the tensor names lack the prefix 'model.': they were saved from the decoder alone. Save the whole causal "
            "language model and convert that."
        ]
    return []


def _type_problems(locations: Mapping[str, Location]) -> list[str]:
    by_type: dict[str, list[str]] = {}
    for name, location in locations.items():
        if location.entry.dtype not in STORED_TYPES:
            by_type.setdefault(location.entry.dtype, []).append(name)
    return [
        f"stored as {dtype}{' (fp8)' if dtype.startswith('F8') else ''}, expected {', '.join(STORED_TYPES)}: "
        f"{listed(names)}. "
        + ("Cast them to F32." if dtype == "F64" else "The model is already quantized; give the original instead.")
        for dtype, names in by_type.items()
    ]


def _is_prediction_layer(
    name: str, stored: Mapping[str, Location], architecture: Architecture, config: Mapping[str, Any]
) -> bool:
    """Whether a tensor belongs to layers that predict further tokens and take no part in ordinary decoding."""
    if name.startswith(("mtp.", "model.mtp.")):
        return True
    layer = _layer_of(name, architecture)
    if layer is None or layer < architecture.layers:
        return False
    extra = config.get("num_nextn_predict_layers")
    announced = extra if isinstance(extra, int) else 0
    return layer < architecture.layers + announced or f"{architecture.layer_prefix(layer)}eh_proj.weight" in stored


def _layer_of(name: str, architecture: Architecture) -> int | None:
    """The layer whose tensors' names begin as this one does, however many layers the config counts."""
    before, after = architecture.layer_prefix(0).split("0")
    number = name.removeprefix(before).partition(after)[0] if name.startswith(before) else ""
    return int(number) if number.isdecimal() else None


def _unknown_problems(unknown: list[str], architecture: Architecture) -> list[str]:
    way_out = f"pass --ignore-unknown-tensors to leave {'it' if len(unknown) == 1 else 'them'} out."
    beyond = [name for name in unknown if (_layer_of(name, architecture) or 0) >= architecture.layers]
    inner = [name for name in unknown if name not in set(beyond)]
    problems = []
    if inner:
        hint = (
            " Biases count only where attention_bias or mlp_bias in config.json says so."
            if any(name.endswith(".bias") for name in inner)
            else ""
        )
        problems.append(
            f"{listed(inner)}: not part of a {architecture.model_type} model as config.json describes it, and leaving "
            f"{'it' if len(inner) == 1 else 'them'} out may change what the model computes.{hint} Correct the "
            f"source, or {way_out}"
        )
    if beyond:
        problems.append(
            f"{listed(beyond)}: beyond num_hidden_layers {architecture.layers} in config.json. Correct the config, "
            f"or {way_out}"
        )
    return problems


def _side_files(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Files of the folder that match, as sorted relative names with `/`."""
    found = {path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    return sorted(name for name in found if (folder / name).is_file())


def _card_license(card: Path) -> str | None:
    """The `license` of a model card's front matter, or `license_name` where that is `other`."""
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    fields: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, colon, value = line.partition(":")
        if colon:
            fields[key] = value.split(" #")[0].strip().strip("'\"")
    found = fields.get("license") or None
    return fields.get("license_name") or found if found == "other" else found


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over a tensor found: the digest of its bytes, and its NaN and Inf values in words or ''."""

    sha256: str
    bad: str


def scan_all(scan: Callable[[str], Scan], names: Iterable[str]) -> dict[str, Scan]:
    """Scan tensors in the given order, a few at a time (hashing and reading release the interpreter lock)."""
    names = list(names)
    pool = ThreadPoolExecutor(READERS)
    try:
        return dict(zip(names, pool.map(scan, names), strict=True))
    finally:
        # An interrupt must not wait for the tensors that have not been started.
        pool.shutdown(cancel_futures=True)


def _scan(location: Location) -> Scan:
    dtype = DTYPES[location.entry.dtype]
    digest = hashlib.sha256()
    not_a_number = infinite = 0
    step = READ_BYTES if location.files.local else FETCH_BYTES
    for start in range(location.entry.start, location.entry.end, step):
        data = _read_bytes(location, start, min(step, location.entry.end - start))
        digest.update(data)
        more = count_non_finite(torch.frombuffer(data, dtype=dtype))
        not_a_number, infinite = not_a_number + more[0], infinite + more[1]
    return Scan(digest.hexdigest(), describe_non_finite(not_a_number, infinite))


def _read(location: Location) -> Tensor:
    """One tensor, in memory of its own. Raises `SourceError` for NaN and Inf in files that are not checked at once."""
    entry = location.entry
    if not entry.size:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    tensor = torch.frombuffer(_read_bytes(location, entry.start, entry.size), dtype=DTYPES[entry.dtype])
    if not location.files.local and tensor.is_floating_point():
        bad = describe_non_finite(*count_non_finite(tensor))
        if bad:
            raise SourceError(_not_finite(location, bad))
    return tensor.view(entry.shape)


def _read_bytes(location: Location, start: int, length: int) -> bytearray:
    """Bytes of a file. Failures of the disk become `SourceError`."""
    try:
        data = location.files.read(location.file, start, length)
    except OSError as error:
        raise SourceError(f"{location.file}: cannot be read ({error.strerror or error})") from error
    if len(data) < length:
        raise SourceError(f"{location.file}: ended while a tensor was read from it")
    return data


def _not_finite(location: Location, bad: str) -> str:
    return f"{location.file}: {location.name}: {bad}, expected finite weights. Export the model again."


def count_non_finite(values: Tensor) -> tuple[int, int]:
    """How many values are NaN and how many are infinite."""
    if values.numel() == 0:
        return 0, 0
    # The extremes are NaN or infinite if any value is; they come at memory speed, counting does not.
    low, high = values.aminmax()
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return 0, 0
    return int(values.isnan().sum()), int(values.isinf().sum())


def describe_non_finite(not_a_number: int, infinite: int) -> str:
    """`1 NaN and 2 infinite values`, or an empty string where there are none."""
    kinds = [f"{count} {kind}" for count, kind in ((not_a_number, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(kinds)} value{'s' if not_a_number + infinite > 1 else ''}" if kinds else ""
