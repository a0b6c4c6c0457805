"""Writes the checkpoints under valid/ and invalid/ beside this file, and what is expected of each.

Plain Python on purpose, with nothing of the package: the bytes of the planes, headers, indexes and manifests are
made here from the specification alone. Run it from anywhere:

    python spec/vectors/generate_checkpoints.py
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ITEM_BYTES = {"I32": 4, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1}
LAYER = "model.layers.0"
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
DOWN = f"{LAYER}.mlp.down_proj"
MANIFEST, CONFIG = "bitnest.json", "config.json"
TARGET, DRAFT = "bitnest.safetensors.index.json", "bitnest-draft.safetensors.index.json"
BASE, REFINEMENT = "bitnest-base-00001-of-00001.safetensors", "bitnest-refinement-00001-of-00001.safetensors"
WHOLE = "(file)"

Files = dict[str, bytes]
Header = dict[str, Any]
Found = tuple[str, str, str]
Step = Callable[[Any], object]


@dataclass
class Stored:
    """One tensor as it lies in a shard."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Nested:
    """The integers and scales of one module: `q4` and `qr` `[outputs][inputs]`, scales `[outputs][groups]`."""

    q4: list[list[int]]
    qr: list[list[int]]
    scale: list[list[float]]
    scale_type: str = "F16"
    permutation: list[int] | None = None


@dataclass
class Build:
    """A checkpoint before its files are made; every part may be changed."""

    config: dict[str, Any]
    nested: dict[str, Nested]
    plain: dict[str, Stored]
    views: list[str] = field(default_factory=lambda: ["draft", "target"])
    features: list[str] = field(default_factory=list)
    version: str = "1.0"
    group_size: int = 8
    rotation: dict[str, Any] | None = None
    shards: int = 1
    extra: Files = field(default_factory=dict)
    seen: dict[str, dict[str, Stored]] = field(default_factory=dict)


def model(
    model_type: str = "llama",
    *,
    hidden: int = 8,
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 8,
    intermediate: int = 16,
    tied: bool = False,
    quantized: tuple[str, ...] = ("mlp.down_proj",),
    group_size: int = 8,
    scale_type: str = "F16",
    nested_head: bool = False,
    **changes: Any,
) -> Build:
    """A one-layer model. `group_size` -1 is one group per row; linears outside `quantized` stay bfloat16."""
    config = {
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type] + "ForCausalLM"
        ],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "vocab_size": 4,
        "max_position_embeddings": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    query, key = heads * head_dim, kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    generator = random.Random(f"{model_type} {hidden} {intermediate} {tied}")
    nested: dict[str, Nested] = {}
    plain = {"model.embed_tokens.weight": halves(generator, 4, hidden)}
    plain[f"{LAYER}.input_layernorm.weight"] = halves(generator, hidden)
    for linear in LINEARS:
        name = f"{LAYER}.{linear}"
        outputs, inputs = shapes[linear]
        if linear in quantized:
            groups = 1 if group_size == -1 else inputs // group_size
            nested[name] = codes(generator, outputs, inputs, groups, scale_type)
        else:
            plain[f"{name}.weight"] = halves(generator, outputs, inputs)
        if model_type == "qwen2" and linear in LINEARS[:3]:
            plain[f"{name}.bias"] = halves(generator, outputs)
    if model_type == "qwen3":
        for norm in ("q_norm", "k_norm"):
            plain[f"{LAYER}.self_attn.{norm}.weight"] = halves(generator, head_dim)
    plain[f"{LAYER}.post_attention_layernorm.weight"] = halves(generator, hidden)
    plain["model.norm.weight"] = halves(generator, hidden)
    if nested_head:
        nested["lm_head"] = codes(generator, 4, hidden, 1 if group_size == -1 else hidden // group_size, scale_type)
    elif not tied:
        plain["lm_head.weight"] = halves(generator, 4, hidden)
    return Build(config=config, nested=nested, plain=plain, group_size=group_size, **changes)


def halves(generator: random.Random, *shape: int) -> Stored:
    """Random bfloat16 values: the upper halves of small float32 numbers."""
    count = 1
    for size in shape:
        count *= size
    data = b"".join(struct.pack("<f", generator.randint(1, 31) / 16)[2:] for _ in range(count))
    return Stored("BF16", list(shape), data)


def codes(generator: random.Random, outputs: int, inputs: int, groups: int, scale_type: str) -> Nested:
    q4 = [[generator.randint(-8, 7) for _ in range(inputs)] for _ in range(outputs)]
    qr = [[generator.randint(0 if q == -8 else -8, 7) for q in row] for row in q4]
    scale = [[generator.randint(64, 127) / 2**13 for _ in range(groups)] for _ in range(outputs)]
    return Nested(q4, qr, scale, scale_type)


def packed(rows: list[list[int]]) -> Stored:
    """Eight offset nibbles to a little-endian int32 word, the first input in the lowest four bits."""
    data = bytearray()
    for row in rows:
        for low, high in zip(row[0::2], row[1::2], strict=True):
            data.append((low + 8) | (high + 8) << 4)
    return Stored("I32", [len(rows), len(rows[0]) // 8], bytes(data))


def scales(nested: Nested) -> Stored:
    letter = {"F16": "e", "F32": "f"}[nested.scale_type]
    data = b"".join(struct.pack(f"<{letter}", value) for row in nested.scale for value in row)
    return Stored(nested.scale_type, [len(nested.scale), len(nested.scale[0])], data)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shard(tensors: dict[str, Stored], plane: str, edit: Step | None = None) -> bytes:
    """The bytes of a safetensors file."""
    header: Header = {"__metadata__": {"format": "pt", "bitnest_format_version": "1.0", "bitnest_planes": plane}}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    if edit is not None:
        edit(header)
    return with_header(json.dumps(header, separators=(",", ":")), b"".join(t.data for t in tensors.values()))


def with_header(text: str, data: bytes) -> bytes:
    raw = text.encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def json_bytes(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False) + "\n").encode("utf-8")


def files_of(build: Build) -> tuple[Files, dict[str, Any]]:
    """Every file but the manifest, and the manifest without its list of files."""
    modules: dict[str, Any] = {}
    base: dict[str, Stored] = dict(build.plain)
    refinement: dict[str, Stored] = {}
    for name, nested in build.nested.items():
        planes = {"base": ("weight_packed", packed(nested.q4)), "scale": ("weight_scale", scales(nested))}
        if "target" in build.views:
            planes["refinement"] = ("weight_refinement", packed(nested.qr))
        for role, (suffix, tensor) in planes.items():
            (refinement if role == "refinement" else base)[f"{name}.{suffix}"] = tensor
        outputs, inputs = len(nested.q4), len(nested.q4[0])
        modules[name] = {
            "shape": [outputs, inputs],
            "group_size": inputs // len(nested.scale[0]),
            "planes": {
                role: {"name": f"{name}.{suffix}", "sha256": sha256(tensor.data)}
                for role, (suffix, tensor) in planes.items()
            },
        }
        if f"{name}.bias" in build.plain:
            modules[name]["bias"] = f"{name}.bias"
        if nested.permutation is not None:
            data = struct.pack(f"<{inputs}i", *nested.permutation)
            base[f"{name}.weight_perm"] = Stored("I32", [inputs], data)
            modules[name]["permutation"] = f"{name}.weight_perm"
    files: Files = {}
    draft_map = write_family(files, "base", base, build.shards)
    target_map = draft_map | write_family(files, "refinement", refinement, build.shards)
    for index, weight_map in ((DRAFT, draft_map), (TARGET, target_map)):
        total = sum(len((base | refinement)[name].data) for name in weight_map)
        files[index] = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    block = {"quant_method": "bitnest", "format_version": build.version, "manifest": MANIFEST}
    files[CONFIG] = json_bytes({**build.config, "quantization_config": block})
    build.seen = {BASE: base, REFINEMENT: refinement}
    manifest = {
        "format": "bitnest",
        "format_version": build.version,
        "required_features": build.features,
        "views": build.views,
        "nesting": {
            "base_bits": 4,
            "refinement_bits": 4,
            "group_size": build.group_size,
            "base_method": "rtn",
            "refine_method": "closed" if "target" in build.views else None,
        },
        "activation": {"bits": 8, "granularity": "token", "symmetric": True},
        "kv_cache": {"base_bits": 4, "refinement_bits": 4, "granularity": "token_head"},
        "rotation": build.rotation,
        "source": {"kind": "random"},
        "modules": modules,
        "unquantized": list(build.plain),
    }
    return files, manifest


def write_family(files: Files, plane: str, tensors: dict[str, Stored], count: int) -> dict[str, str]:
    names = list(tensors)
    step = -(-len(names) // count) or 1
    runs = [names[first : first + step] for first in range(0, len(names), step)]
    weight_map: dict[str, str] = {}
    for number, run in enumerate(runs, start=1):
        file = f"bitnest-{plane}-{number:05d}-of-{len(runs):05d}.safetensors"
        files[file] = shard({name: tensors[name] for name in run}, plane)
        weight_map |= dict.fromkeys(run, file)
    return weight_map


@dataclass
class Case:
    """A fault: where it is put in, and what a validator has to say. Only `deep` validation finds some faults.

    The steps run in this order: `build` before any file exists; `files` on the finished files, whose sizes and
    digests the manifest then lists; `manifest` on the manifest; `last` on everything, with nothing refreshed.
    """

    name: str
    description: str
    findings: list[Found]
    build: Step = lambda build: None
    files: Step = lambda files: None
    manifest: Step = lambda manifest: None
    last: Step = lambda files: None
    start: Callable[[], Build] = model
    deep: bool = False

    def make(self) -> Files:
        build = self.start()
        self.build(build)
        files, manifest = files_of(build)
        files |= build.extra
        self.files(files)
        listed = {name: data for name, data in sorted(files.items()) if name != "README.md"}
        manifest["files"] = {name: {"size": len(data), "sha256": sha256(data)} for name, data in listed.items()}
        self.manifest(manifest)
        files[MANIFEST] = json_bytes(manifest)
        self.last(files)
        return files


def edit_json(name: str, edit: Step) -> Step:
    """A step that changes a parsed JSON file in place, or replaces it by what `edit` returns."""

    def step(files: Files) -> None:
        data = json.loads(files[name])
        result = edit(data)
        files[name] = json_bytes(data if result is None else result)

    return step


def edit_header(name: str, edit: Step) -> Step:
    """A step that changes the header of a shard and leaves its data as they are."""

    def step(files: Files) -> None:
        raw = files[name]
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        files[name] = with_header(json.dumps(header, separators=(",", ":")), raw[8 + length :])

    return step


def remove(name: str) -> Step:
    return lambda files: files.pop(name)


def put(name: str, data: bytes) -> Step:
    return lambda files: files.update({name: data})


def both(*steps: Step) -> Step:
    def step(target: Any) -> None:
        for each in steps:
            each(target)

    return step


def set_at(*path: Any) -> Step:
    """A step that sets the value at a path of keys; the last argument is the value."""
    *keys, last, value = path

    def step(data: Any) -> None:
        for key in keys:
            data = data[key]
        data[last] = value

    return step


def delete_at(*path: Any) -> Step:
    def step(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return step


MISSING = "Download the checkpoint again."
LEAVE_OUT = "a model has one head. Leave it out."
DOWN_BASE, DOWN_SCALE, DOWN_REFINEMENT = f"{DOWN}.weight_packed", f"{DOWN}.weight_scale", f"{DOWN}.weight_refinement"
PATTERN = "bitnest-base-0000i-of-0000n.safetensors or bitnest-refinement-0000i-of-0000n.safetensors"
FOREIGN = (
    "must not lie in a nested checkpoint: transformers would load it in place of the planes and fill what it does not "
    "find with random weights. Delete it."
)
PICKLE = (
    "may hold pickled Python objects, which can run code when they are loaded; a nested checkpoint has none. Delete it."
)
STRANGER = "is neither in an index nor listed in bitnest.json; left over from something else? Delete it."
FAMILIES = (
    "expected refinement planes alone in bitnest-refinement shards and everything else in bitnest-base shards, so that "
    "a draft can be fetched by itself"
)


def two_modules() -> Build:
    return model(quantized=("self_attn.q_proj", "mlp.down_proj"))


def valid_cases() -> list[Case]:
    everything: dict[str, Any] = {
        "hidden": 32,
        "heads": 2,
        "head_dim": 16,
        "intermediate": 64,
        "quantized": LINEARS,
        "group_size": 32,
    }
    permutation = [(5 * column + 3) % 16 for column in range(16)]
    later = {"format_version": "1.7", "spin": {"kind": "from the future"}}
    fold = {"kind": "random", "seed": 3, "sha256": "0" * 64, "folded": ["R1", "R2"], "online": []}

    def permuted(build: Build) -> None:
        build.nested[DOWN].permutation = permutation
        build.features.append("input_permutation")

    def mixed(build: Build) -> None:
        down, query = build.nested[DOWN], build.nested[f"{LAYER}.self_attn.q_proj"]
        down.scale = [[row[0]] for row in down.scale]
        assert len(query.q4[0]) // len(query.scale[0]) == 8

    def edges(build: Build) -> None:
        nested = build.nested[DOWN]
        nested.q4[0], nested.qr[0] = [-8, -8, 7, 7, 0, 0, -1, -7] * 2, [0, 7, -8, 7, -8, 7, -8, -8] * 2
        nested.scale[0], nested.scale[1] = [2.0**-24, 65504.0], [2.0**-14, 1.0]

    def strange_metadata(header: Header) -> None:
        header["__metadata__"] = {"format": "pt", "made_by": "another program"}

    return [
        Case("llama-untied", "every linear layer quantized, groups of 32", [], start=lambda: model(**everything)),
        Case("llama-tied", "one matrix is embedding and head", [], start=lambda: model(tied=True)),
        Case("some-layers", "one of seven linear layers quantized, the others kept in bfloat16", []),
        Case("qwen2-biases", "biases of q, k and v", [], start=lambda: model("qwen2", quantized=("self_attn.q_proj",))),
        Case("qwen3-head-norms", "norms of queries and keys", [], start=lambda: model("qwen3")),
        Case("mistral", "a sliding window in the config", [], start=lambda: model("mistral")),
        Case("float32-scales", "scales in float32", [], start=lambda: model(scale_type="F32")),
        Case(
            "one-group-per-row",
            "group size -1: every module records its inputs",
            [],
            start=lambda: model(group_size=-1),
        ),
        Case("mixed-groups", "modules with different group sizes", [], build=mixed, start=two_modules),
        Case(
            "edge-codes", "q4 = -8 and 7 beside the ends of qr, the smallest and largest float16 scale", [], build=edges
        ),
        Case("draft-only", "no refinement planes at all", [], start=lambda: model(views=["draft"])),
        Case(
            "several-shards", "three base shards and two refinement shards", [], build=lambda b: setattr(b, "shards", 3)
        ),
        Case("input-permutation", "stored columns in another order than the inputs", [], build=permuted),
        Case("nested-head", "the head is a module too", [], start=lambda: model(nested_head=True)),
        Case("rotated", "R1 and R2 folded", [], build=lambda b: setattr(b, "rotation", fold)),
        Case(
            "later-minor-version",
            "version 1.7 with optional fields that 1.0 does not know",
            [],
            build=lambda b: setattr(b, "version", "1.7"),
            manifest=lambda m: m.update(later) or m["modules"][DOWN].update(colour="blue"),
        ),
        Case(
            "other-writer",
            "other metadata in a shard, an unlisted model card",
            [],
            files=edit_header(BASE, strange_metadata),
            last=put("README.md", b"# a model card\n"),
        ),
    ]


def manifest_cases() -> list[Case]:
    def at(name: str, description: str, place: str, message: str, step: Step, **kw: Any) -> Case:
        return Case(f"manifest-{name}", description, [(MANIFEST, place, message)], manifest=step, **kw)

    def raw(name: str, description: str, message: str, step: Step) -> Case:
        return Case(f"manifest-{name}", description, [(MANIFEST, WHOLE, message)], last=step)

    down = f"modules.{DOWN}"
    purpose = "It holds the manifest, without which nothing else can be judged."
    return [
        raw("missing", "no bitnest.json", f"missing. {purpose} {MISSING}", remove(MANIFEST)),
        raw(
            "not-json",
            "two bytes of it",
            "is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 3 (char 2))",
            put(MANIFEST, b"{ "),
        ),
        raw(
            "duplicate-key",
            "a key that stands twice, of which parsers keep either",
            "is not valid JSON (the name 'a' stands twice in one object)",
            put(MANIFEST, b'{"a": 1, "a": 2}'),
        ),
        raw(
            "nan",
            "NaN is no JSON number",
            "is not valid JSON (NaN is no JSON number)",
            lambda files: files.update({MANIFEST: files[MANIFEST].replace(b'"random"', b"NaN")}),
        ),
        raw(
            "git-lfs-pointer",
            "a clone without Git LFS",
            "a Git LFS pointer, the file itself was not downloaded",
            put(MANIFEST, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        ),
        Case(
            "manifest-not-an-object",
            "a list",
            [(MANIFEST, "(top level)", "found a JSON list, expected an object")],
            last=put(MANIFEST, b"[1]"),
        ),
        at(
            "other-format", "another format", "format", "format is 'gguf', expected 'bitnest'", set_at("format", "gguf")
        ),
        at(
            "major-version-2",
            "a later major version",
            "format_version",
            "is 2.0, this reader knows 1.x. Install a newer bitnest-format.",
            set_at("format_version", "2.0"),
        ),
        at(
            "unknown-feature",
            "a required feature from the future",
            "required_features",
            "lists sparse_codes, which this reader does not know. Install a newer bitnest-format.",
            set_at("required_features", ["sparse_codes"]),
        ),
        at(
            "online-rotation",
            "R4 has to be applied at run time",
            "rotation",
            "names R4; only R1 and R2, folded into the weights, can be read. A rotation applied at run time needs a "
            "reader that knows it.",
            set_at("rotation", {"kind": "spinquant", "folded": ["R1", "R2"], "online": ["R4"]}),
        ),
        at("field-missing", "no views", "(top level)", "'views' is a required property", delete_at("views")),
        at(
            "field-type",
            "gamma as text",
            "speculation.gamma",
            "'4' is not of type 'integer'",
            set_at("speculation", {"gamma": "4"}),
        ),
        at(
            "bad-digest",
            "a digest in capitals",
            f"{down}.planes.base.sha256",
            f"'{'AB' * 32}' does not match '^[0-9a-f]{{64}}$'",
            set_at("modules", DOWN, "planes", "base", "sha256", "AB" * 32),
        ),
        at(
            "group-does-not-divide",
            "groups of 24 in 16 inputs",
            f"modules.{DOWN}.group_size",
            "is 24, which does not divide the module's 16 inputs",
            set_at("modules", DOWN, "group_size", 24),
        ),
        at(
            "group-of-twelve",
            "groups are multiples of eight",
            f"{down}.group_size",
            "12 is not a multiple of 8",
            set_at("modules", DOWN, "group_size", 12),
        ),
        at(
            "plane-name",
            "a plane under a free name",
            f"{down}.planes.scale.name",
            f"is 'other', expected '{DOWN_SCALE}'",
            set_at("modules", DOWN, "planes", "scale", "name", "other"),
        ),
        at(
            "refinement-not-recorded",
            "a target view without the plane",
            f"{down}.planes.refinement",
            "missing, though views are draft and target",
            delete_at("modules", DOWN, "planes", "refinement"),
        ),
        at(
            "no-refine-method",
            "a target view without a method",
            "nesting.refine_method",
            "is None, expected the name of a method",
            set_at("nesting", "refine_method", None),
        ),
        at(
            "bias-not-recorded",
            "a stored bias that readers would not find",
            f"modules.{LAYER}.self_attn.q_proj.bias",
            f"is null, but {BASE} holds {LAYER}.self_attn.q_proj.bias",
            delete_at("modules", f"{LAYER}.self_attn.q_proj", "bias"),
            start=lambda: model("qwen2", quantized=("self_attn.q_proj",)),
        ),
        at(
            "permutation-without-feature",
            "older readers would not permute",
            "required_features",
            f"does not list 'input_permutation', though {DOWN} has a permutation",
            set_at("required_features", []),
            build=lambda b: setattr(b.nested[DOWN], "permutation", list(range(16))),
        ),
        at(
            "unquantized-lists-nothing-stored",
            "a tensor that is not there",
            "unquantized",
            "lists model.extra.weight, which no shard holds",
            lambda m: m["unquantized"].append("model.extra.weight"),
        ),
        at(
            "unquantized-lacks-a-tensor",
            "a norm that the manifest does not name",
            "unquantized",
            f"does not list model.norm.weight, which {BASE} holds",
            lambda m: m["unquantized"].remove("model.norm.weight"),
        ),
        at(
            "unquantized-lists-a-plane",
            "a scale is no unquantized tensor",
            "unquantized",
            f"lists {DOWN_SCALE}, which belongs to {DOWN}",
            lambda m: m["unquantized"].append(DOWN_SCALE),
        ),
        at(
            "module-shape",
            "the record disagrees with config.json and with the planes",
            f"{down}.shape",
            "is [12, 16], expected [8, 16] as config.json has it",
            set_at("modules", DOWN, "shape", [12, 16]),
        ),
        at(
            "lists-itself",
            "its own digest cannot be known",
            f"files.{MANIFEST}",
            "lists itself, but a file cannot hold its own digest. Remove it.",
            set_at("files", MANIFEST, {"size": 1, "sha256": "0" * 64}),
        ),
        at(
            "lists-a-file-outside",
            "a path that leaves the folder",
            "files.../secret.txt",
            "'../secret.txt' is not a file inside manifest-lists-a-file-outside: a plain relative name is expected",
            set_at("files", "../secret.txt", {"size": 1, "sha256": "0" * 64}),
        ),
        at(
            "shard-not-listed",
            "a shard without size and digest",
            "files",
            f"does not list {BASE}; every weight, index and config must be listed",
            delete_at("files", BASE),
        ),
        Case(
            "file-missing",
            "a tokenizer that was not downloaded",
            [("tokenizer.json", WHOLE, f"missing, though bitnest.json lists it. {MISSING}")],
            files=put("tokenizer.json", b"{}"),
            last=remove("tokenizer.json"),
        ),
        Case(
            "file-size",
            "a tokenizer that was cut off",
            [("tokenizer.json", WHOLE, "has 1 bytes, expected 2. Download it again.")],
            files=put("tokenizer.json", b"{}"),
            last=put("tokenizer.json", b"{"),
        ),
        Case(
            "file-git-lfs-pointer",
            "a clone without Git LFS",
            [("tokenizer.model", WHOLE, "a Git LFS pointer: has 42 bytes, expected 100. Download it again.")],
            files=put("tokenizer.model", b"m" * 100),
            last=put("tokenizer.model", b"version https://git-lfs.github.com/spec/v1"),
        ),
        Case(
            "file-digest",
            "same size, other content",
            [("tokenizer.json", WHOLE, f"{digests(b'[]', b'{}')}. Download it again.")],
            files=put("tokenizer.json", b"{}"),
            last=put("tokenizer.json", b"[]"),
            deep=True,
        ),
    ]


def digests(found: bytes, expected: bytes) -> str:
    return f"SHA-256 is {sha256(found)[:12]}..., expected {sha256(expected)[:12]}..."


def config_cases() -> list[Case]:
    def at(name: str, description: str, place: str, message: str, edit: Step, **kw: Any) -> Case:
        return Case(f"config-{name}", description, [(CONFIG, place, message)], files=edit_json(CONFIG, edit), **kw)

    block = "quantization_config"
    hint = "'bitnet' is another method, for 1.58-bit models"
    return [
        Case(
            "config-missing",
            "no config.json",
            [(CONFIG, WHOLE, f"missing. It holds the sizes of the model. {MISSING}")],
            last=remove(CONFIG),
        ),
        at("not-an-object", "a list", "(top level)", "found a JSON list, expected an object", lambda data: [data]),
        at(
            "no-block",
            "no quantization_config",
            block,
            "missing, expected an object with quant_method 'bitnest'",
            delete_at(block),
        ),
        at(
            "bitnet",
            "one letter away",
            f"{block}.quant_method",
            f"is 'bitnet', expected 'bitnest'. {hint}",
            set_at(block, "quant_method", "bitnet"),
        ),
        at(
            "version-differs",
            "two versions in one folder",
            f"{block}.format_version",
            "is '1.1', expected '1.0' as in bitnest.json",
            set_at(block, "format_version", "1.1"),
        ),
        at(
            "manifest-name",
            "another name for the manifest",
            f"{block}.manifest",
            "is None, expected 'bitnest.json'",
            delete_at(block, "manifest"),
        ),
        at(
            "unknown-architecture",
            "a model type that format 1.0 does not cover",
            "model_type",
            "is 'mamba' (LlamaForCausalLM); supported are llama, mistral, qwen2, qwen3, phi3, mixtral, qwen3_moe, "
            "gemma, gemma2, gemma3_text, llava, llava_next, openvla, gemma3, qwen2_vl, qwen2_5_vl.",
            set_at("model_type", "mamba"),
        ),
        at(
            "size-missing",
            "no number of heads",
            "num_attention_heads",
            "is missing, expected a positive integer",
            delete_at("num_attention_heads"),
        ),
        at(
            "tied-with-head",
            "two heads to choose from",
            "tie_word_embeddings",
            f"is true, but {BASE} holds lm_head.weight; set it to false or leave the tensor out",
            set_at("tie_word_embeddings", True),
        ),
        at(
            "tied-with-nested-head",
            "two heads to choose from, one of them nested",
            "tie_word_embeddings",
            "is true, but bitnest.json lists the module lm_head; set it to false",
            set_at("tie_word_embeddings", True),
            start=lambda: model(nested_head=True),
        ),
        Case(
            "config-two-heads",
            "a nested head and lm_head.weight beside it",
            [(BASE, "lm_head.weight", f"is stored although {MANIFEST} lists the module lm_head; {LEAVE_OUT}")],
            build=lambda build: build.plain.update(model().plain | build.plain),
            start=lambda: model(nested_head=True),
        ),
    ]


def index_cases() -> list[Case]:
    def at(name: str, description: str, found: list[Found], file: str, edit: Step, **kw: Any) -> Case:
        return Case(f"index-{name}", description, found, files=edit_json(file, edit), **kw)

    def rename(data: Any, new: str) -> None:
        data["weight_map"] = {k: new if v == BASE else v for k, v in data["weight_map"].items()}

    def set_total(change: int) -> Step:
        return lambda data: data["metadata"].update(total_size=data["metadata"]["total_size"] + change)

    def drop(name: str, size: int) -> Step:
        return both(delete_at("weight_map", name), set_total(-size))

    outside = (
        "'../../secret/model.safetensors' is not a file inside index-shard-outside: a plain relative name is expected"
    )
    purpose = "It holds the tensors of the {} view and their shards."
    three = "bitnest-base-00002-of-00003.safetensors"
    return [
        Case(
            "index-target-missing",
            "no target index",
            [(TARGET, WHOLE, f"missing. {purpose.format('target')} {MISSING}")],
            last=remove(TARGET),
        ),
        Case(
            "index-draft-missing",
            "no draft index",
            [(DRAFT, WHOLE, f"missing. {purpose.format('draft')} {MISSING}")],
            last=remove(DRAFT),
        ),
        at(
            "no-weight-map",
            "an empty map",
            [(TARGET, "weight_map", "missing or empty, expected an object of tensor names and their shards")],
            TARGET,
            set_at("weight_map", {}),
        ),
        at(
            "shard-outside",
            "a path that leaves the folder",
            [(TARGET, "weight_map", outside)],
            TARGET,
            set_at("weight_map", "model.norm.weight", "../../secret/model.safetensors"),
        ),
        at(
            "shard-name",
            "a shard under a free name",
            [(TARGET, "weight_map", f"names 'weights.safetensors', expected {PATTERN}")],
            TARGET,
            set_at("weight_map", "model.norm.weight", "weights.safetensors"),
        ),
        at(
            "shard-is-no-text",
            "a number for a shard",
            [
                (
                    TARGET,
                    "weight_map",
                    "7 is not a file inside index-shard-is-no-text: a plain relative name is expected",
                )
            ],
            TARGET,
            set_at("weight_map", "model.norm.weight", 7),
        ),
        Case(
            "index-shards-absent",
            "30 shards are promised and one lies there",
            [
                (TARGET, "weight_map", "names bitnest-base shards 1 of 30, expected all of 1 to n of n"),
                ("bitnest-base-00001-of-00030.safetensors", WHOLE, f"missing, though {TARGET} names it. {MISSING}"),
                (BASE, WHOLE, STRANGER),
            ],
            files=both(
                edit_json(TARGET, lambda d: rename(d, "bitnest-base-00001-of-00030.safetensors")),
                edit_json(DRAFT, lambda d: rename(d, "bitnest-base-00001-of-00030.safetensors")),
            ),
            manifest=delete_at("files", BASE),
        ),
        at(
            "wrong-shard",
            "a tensor that lies in another shard",
            [(TARGET, "model.norm.weight", f"is not in the header of {REFINEMENT}; it lies in {BASE}")],
            TARGET,
            set_at("weight_map", "model.norm.weight", REFINEMENT),
        ),
        at(
            "tensor-nowhere",
            "a tensor that no shard holds",
            [(TARGET, "model.norm.bias", f"is not in the header of {BASE}; no shard of the checkpoint holds it")],
            TARGET,
            set_at("weight_map", "model.norm.bias", BASE),
        ),
        at(
            "tensor-not-indexed",
            "a stored tensor that the index does not name",
            [(TARGET, "model.norm.weight", f"missing; {BASE} holds it")],
            TARGET,
            drop("model.norm.weight", 16),
        ),
        at(
            "total-size",
            "the sum of another checkpoint",
            [(TARGET, "metadata.total_size", f"is 7, expected {total_of(model())}, the bytes of its tensors")],
            TARGET,
            set_at("metadata", "total_size", 7),
        ),
        at(
            "draft-incomplete",
            "a draft without its final norm",
            [(DRAFT, "model.norm.weight", "missing; a draft needs every tensor apart from the refinement planes")],
            DRAFT,
            drop("model.norm.weight", 16),
        ),
        at(
            "draft-names-refinement",
            "a draft that would fetch the refinement shard",
            [(DRAFT, DOWN_REFINEMENT, "is a refinement plane, which the draft view does not need")],
            DRAFT,
            both(set_at("weight_map", DOWN_REFINEMENT, REFINEMENT), set_total(64)),
        ),
        Case(
            "shard-missing",
            "one of three shards was not downloaded",
            [(three, WHOLE, f"missing, though {TARGET} names it. {MISSING}")],
            build=lambda b: setattr(b, "shards", 3),
            last=remove(three),
        ),
    ]


def total_of(build: Build) -> int:
    files, _ = files_of(build)
    total: int = json.loads(files[TARGET])["metadata"]["total_size"]
    return total


def shard_cases() -> list[Case]:
    size = len(files_of(model())[0][BASE])
    again = "Download it again."

    def at(name: str, description: str, message: str, step: Step, place: str = WHOLE) -> Case:
        return Case(f"shard-{name}", description, [(BASE, place, message)], files=step)

    def cut(keep: int) -> Step:
        return lambda files: files.update({BASE: files[BASE][:keep]})

    def head(text: str) -> Step:
        return lambda files: files.update({BASE: with_header(text, b"")})

    def move(name: str, start: int, end: int) -> Step:
        return edit_header(BASE, lambda header: header[name]["data_offsets"].__setitem__(slice(None), [start, end]))

    def mixed(build: Build) -> None:
        build.plain[f"{DOWN}.weight_refinement"] = packed(build.nested[DOWN].qr)

    return [
        at(
            "git-lfs-pointer",
            "a clone without Git LFS",
            "a Git LFS pointer of 51 bytes, the file itself was not downloaded. "
            "Run 'git lfs pull' or download it again.",
            put(BASE, b"version https://git-lfs.github.com/spec/v1\nsize 999\n"[:51]),
        ),
        at("empty", "no bytes at all", f"cut off: has 0 bytes, its header is incomplete. {again}", cut(0)),
        at("cut-in-header", "100 bytes of it", f"cut off: has 100 bytes, its header is incomplete. {again}", cut(100)),
        at(
            "cut-by-one",
            "the last byte is gone",
            f"cut off: has {size - 1} bytes, its header describes {size} bytes. {again}",
            cut(size - 1),
        ),
        at(
            "one-byte-more",
            "something was appended",
            f"has {size + 1} bytes, its header describes {size}. {again}",
            lambda files: files.update({BASE: files[BASE] + b"x"}),
        ),
        at(
            "huge-header",
            "a header of 2^60 bytes",
            f"cut off: has {size} bytes, its header is incomplete. {again}",
            lambda files: files.update({BASE: struct.pack("<Q", 2**60) + files[BASE][8:]}),
        ),
        at(
            "header-no-json",
            "text",
            "its safetensors header is not valid (Expecting value: line 1 column 1 (char 0))",
            head("hello!!!"),
        ),
        at(
            "header-no-object",
            "a list",
            "its safetensors header is not valid (found a JSON list, expected an object)",
            head("[1, 2]"),
        ),
        at(
            "header-name-twice",
            "a tensor that stands twice",
            "its safetensors header is not valid (the name 'a' stands twice in one object)",
            head('{"a":{},"a":{}}'),
        ),
        at(
            "header-fraction",
            "a fraction for an offset",
            "its safetensors header is not valid "
            "(a: dtype, shape and two data_offsets are expected, the numbers 0 or more)",
            head('{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2.0]}}'),
        ),
        at(
            "overlap",
            "two tensors share bytes",
            f"{LAYER}.input_layernorm.weight: its bytes overlap or leave a gap before them",
            move(f"{LAYER}.input_layernorm.weight", 60, 76),
        ),
        at(
            "gap",
            "bytes that belong to no tensor",
            f"{LAYER}.self_attn.q_proj.weight: its bytes overlap or leave a gap before them",
            edit_header(BASE, delete_at(f"{LAYER}.input_layernorm.weight")),
        ),
        at(
            "size-against-shape",
            "more elements than bytes",
            "model.norm.weight: 16 bytes for shape [9] of BF16, expected 18",
            edit_header(BASE, set_at("model.norm.weight", "shape", [9])),
        ),
        at(
            "no-metadata",
            "loaders of torch files ask for format = pt",
            "is None, expected 'pt', which torch loaders ask for",
            edit_header(BASE, delete_at("__metadata__")),
            "__metadata__.format",
        ),
        Case(
            "shard-mixed-families",
            "a refinement plane in a base shard",
            [(BASE, DOWN_REFINEMENT, f"is a refinement plane (1 such here); {FAMILIES}")],
            files=mix_families,
            start=two_modules,
        ),
        Case(
            "shard-tensor-twice",
            "one tensor in two shards",
            [
                (REFINEMENT, "model.norm.weight", f"is no refinement plane (1 such here); {FAMILIES}"),
                (REFINEMENT, "model.norm.weight", f"is stored twice; {BASE} holds it too"),
            ],
            files=repeat_tensor,
        ),
    ]


def mix_families(files: Files) -> None:
    """Move a refinement plane into the base shard, and say so in the target index."""
    build = two_modules()
    files_of(build)
    base, refinement = build.seen[BASE], build.seen[REFINEMENT]
    base[DOWN_REFINEMENT] = refinement.pop(DOWN_REFINEMENT)
    files[BASE], files[REFINEMENT] = shard(base, "base"), shard(refinement, "refinement")
    edit_json(TARGET, set_at("weight_map", DOWN_REFINEMENT, BASE))(files)


def repeat_tensor(files: Files) -> None:
    build = model()
    files_of(build)
    refinement = build.seen[REFINEMENT] | {"model.norm.weight": build.seen[BASE]["model.norm.weight"]}
    files[REFINEMENT] = shard(refinement, "refinement")


def tensor_cases() -> list[Case]:
    def at(name: str, description: str, found: list[Found], build: Step, **kw: Any) -> Case:
        return Case(f"tensor-{name}", description, found, build=build, **kw)

    def scale(value: float, kind: str = "F16") -> Step:
        def step(build: Build) -> None:
            build.nested[DOWN].scale_type = kind
            build.nested[DOWN].scale[3][0] = value

        return step

    def bad_scale(text: str, expected: str = "a finite number above 0") -> list[Found]:
        message = f"1 of 16 scales are out of range, the first at row 3, group 0: {text}, expected {expected}"
        return [(BASE, DOWN_SCALE, message)]

    def twice(build: Build) -> None:
        build.nested[DOWN].permutation = [0, *range(15)]
        build.features.append("input_permutation")

    def pair(build: Build) -> None:
        build.nested[DOWN].q4[2][5], build.nested[DOWN].qr[2][5] = -8, -1
        build.nested[DOWN].q4[7][0], build.nested[DOWN].qr[7][0] = -8, -8

    def plain(name: str, dtype: str, shape: list[int], data: bytes) -> Step:
        return lambda build: build.plain.update({name: Stored(dtype, shape, data)})

    def retype(name: str, dtype: str, shape: list[int], file: str = BASE) -> Step:
        return edit_header(file, lambda header: header[name].update(dtype=dtype, shape=shape))

    def not_finite(build: Build) -> None:
        norm = build.plain["model.norm.weight"]
        norm.data = struct.pack("<HH", 0x7FC0, 0xFF80) + norm.data[4:]

    range_32 = "2^-120 to 2^120, where a sixteenth and 128 times of it are normal float32 numbers"
    norm = "model.norm.weight"
    bias = f"{LAYER}.self_attn.q_proj.bias"
    # -7 and 7 exchanged: other bytes, and no pair becomes a forbidden one.
    flipped = packed([[{-7: 7, 7: -7}.get(q, q) for q in row] for row in model().nested[DOWN].q4])
    return [
        at(
            "forbidden-pair",
            "q4 = -8 with qr = -1 and -8: composed codes of -129 and -136",
            [
                (
                    REFINEMENT,
                    DOWN_REFINEMENT,
                    "2 forbidden code pairs, the first at row 2, column 5: a negative refinement code beside the base "
                    "code -8, where 0 to 7 are allowed",
                )
            ],
            pair,
        ),
        at("scale-zero", "a scale of zero", bad_scale("0"), scale(0.0)),
        at("scale-negative", "a negative scale", bad_scale("-0.5"), scale(-0.5)),
        at("scale-nan", "a scale that is no number", bad_scale("nan"), scale(float("nan"))),
        at("scale-infinite", "an infinite scale", bad_scale("inf"), scale(float("inf"), "F32")),
        at("scale-too-small", "a float32 scale of 2^-121", bad_scale("3.76158e-37", range_32), scale(2.0**-121, "F32")),
        at("scale-too-large", "a float32 scale of 2^121", bad_scale("2.65846e+36", range_32), scale(2.0**121, "F32")),
        at(
            "permutation",
            "an input that stands twice",
            [(BASE, f"{DOWN}.weight_perm", "is no permutation of the inputs 0 to 15")],
            twice,
        ),
        Case(
            "tensor-base-type",
            "a base plane of floats",
            [
                (BASE, DOWN_BASE, "dtype is F32, expected I32"),
            ],
            files=retype(DOWN_BASE, "F32", [8, 2]),
        ),
        Case(
            "tensor-scale-type",
            "bfloat16 scales",
            [(BASE, DOWN_SCALE, "dtype is BF16, expected F16 or F32")],
            files=retype(DOWN_SCALE, "BF16", [8, 2]),
        ),
        Case(
            "tensor-scale-shape",
            "scales transposed",
            [(BASE, DOWN_SCALE, "shape is [2, 8], expected [8, 2]")],
            files=retype(DOWN_SCALE, "F16", [2, 8]),
        ),
        Case(
            "tensor-refinement-shape",
            "rows too long",
            [(REFINEMENT, DOWN_REFINEMENT, "shape is [4, 4], expected [8, 2]")],
            files=retype(DOWN_REFINEMENT, "I32", [4, 4], REFINEMENT),
        ),
        at(
            "missing",
            "no final norm anywhere",
            [(TARGET, norm, "missing; a llama model needs it with shape [8]")],
            lambda b: b.plain.pop(norm),
        ),
        at(
            "shape",
            "a norm of another model",
            [(BASE, norm, "shape is [4], expected [8] as config.json has it")],
            plain(norm, "BF16", [4], b"\x80\x3f" * 4),
        ),
        at(
            "type",
            "a norm of integers",
            [(BASE, norm, "dtype is I8, expected one of F16, BF16, F32")],
            plain(norm, "I8", [8], b"\x01" * 8),
        ),
        at(
            "bias-shape",
            "a bias of another layer",
            [(BASE, bias, "shape is [4], expected [8] as config.json has it")],
            plain(bias, "BF16", [4], bytes(8)),
            start=lambda: model("qwen2", quantized=("self_attn.q_proj",)),
        ),
        at(
            "unknown-module",
            "planes of a layer that the model does not have",
            [
                (
                    MANIFEST,
                    "modules.model.layers.5.mlp.down_proj",
                    "is no linear layer of a llama model with 1 layers",
                )
            ],
            lambda b: b.nested.update({"model.layers.5.mlp.down_proj": b.nested[DOWN]}),
        ),
        Case(
            "tensor-without-module",
            "planes that the manifest does not know",
            [
                (TARGET, f"{DOWN}.weight", "missing; a llama model needs it with shape [8, 16]"),
                *(
                    (file, name, "belongs to no module of bitnest.json")
                    for file, name in ((BASE, DOWN_BASE), (BASE, DOWN_SCALE), (REFINEMENT, DOWN_REFINEMENT))
                ),
            ],
            manifest=delete_at("modules", DOWN),
            start=two_modules,
        ),
        at(
            "not-finite",
            "NaN and minus infinity in a norm",
            [(BASE, norm, "2 of 8 values are NaN or infinite")],
            not_finite,
            deep=True,
        ),
        Case(
            "tensor-digest",
            "other base codes than the manifest's digest",
            [(BASE, DOWN_BASE, f"{digests(flipped.data, packed(model().nested[DOWN].q4).data)} in bitnest.json")],
            files=lambda files: files.update(
                {BASE: files[BASE].replace(packed(model().nested[DOWN].q4).data, flipped.data)}
            ),
            deep=True,
        ),
    ]


def stranger_cases() -> list[Case]:
    def at(name: str, file: str, description: str, message: str, data: bytes = b"nothing") -> Case:
        return Case(f"stranger-{name}", description, [(file, WHOLE, message)], last=put(file, data))

    return [
        at("pickle", "pytorch_model.bin", "weights that can run code", PICKLE),
        at("pickle-deeper", "old/optimizer.pt", "the same in a folder below", PICKLE),
        at("model-safetensors", "model.safetensors", "a name that transformers looks for", FOREIGN),
        at("model-index", "model.safetensors.index.json", "an index that transformers looks for", FOREIGN),
        at("consolidated", "consolidated.safetensors", "weights that no index names", STRANGER),
        at("old-index", "old.safetensors.index.json", "an index of an earlier upload", STRANGER),
    ]


def invalid_cases() -> list[Case]:
    return [
        *manifest_cases(),
        *config_cases(),
        *index_cases(),
        *shard_cases(),
        *tensor_cases(),
        *stranger_cases(),
    ]


def write_cases(folder: str, cases: list[Case]) -> None:
    root = HERE / folder
    shutil.rmtree(root, ignore_errors=True)
    expected: dict[str, Any] = {}
    for case in cases:
        for name, data in case.make().items():
            path = root / case.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        expected[case.name] = {"description": case.description}
        if case.findings:
            found = [dict(zip(("file", "place", "message"), finding, strict=True)) for finding in case.findings]
            expected[case.name] |= {"deep": case.deep, "findings": found}
    text = json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    (root / "expected.json").write_text(text, encoding="utf-8")


def main() -> None:
    write_cases("valid", valid_cases())
    write_cases("invalid", invalid_cases())


if __name__ == "__main__":
    main()
