"""`bitnest.json` as frozen records: parse, check against the schema, write. No files are touched here.

The JSON Schema checks structure; this module adds only what a schema cannot say and what decides whether a
reader may go on at all: the version and the required features. Fields this version does not know are kept in
`extra` and written back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitnest_format.errors import Finding, ManifestError, UnsupportedVersionError
from bitnest_format.spec import FORMAT_NAME, FORMAT_VERSION, KNOWN_FEATURES, SUPPORTED_MAJOR, manifest_schema

MANIFEST_FILE = "bitnest.json"
# Objects with an entry for every module or file: each entry takes one line.
LINE_PER_ENTRY = ("modules", "files")
# What users are told of a checkpoint without target view, wherever they meet it.
DRAFT_ONLY = "draft only: the weights are of 4 bits; there is no refinement plane and no 8-bit target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One stored tensor of a module and the SHA-256 of its bytes as they lie in the shard."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One quantized linear layer. `shape` is `(outputs, inputs)`; errors are relative Frobenius norms."""

    shape: tuple[int, int]
    group_size: int
    base: Plane
    scale: Plane
    refinement: Plane | None = None
    bias: str | None = None
    permutation: str | None = None
    saturation: float | None = None
    draft_error: float | None = None
    target_error: float | None = None

    @property
    def groups(self) -> int:
        return self.shape[1] // self.group_size

    def to_dict(self) -> dict[str, Any]:
        planes = {"base": _plane_dict(self.base), "scale": _plane_dict(self.scale)}
        if self.refinement is not None:
            planes["refinement"] = _plane_dict(self.refinement)
        return {
            "shape": list(self.shape),
            "group_size": self.group_size,
            "planes": planes,
            "bias": self.bias,
            "permutation": self.permutation,
            "saturation": self.saturation,
            "draft_error": self.draft_error,
            "target_error": self.target_error,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Module:
        """Build from a part of a document that the schema has accepted."""
        planes = data["planes"]
        refinement = planes.get("refinement")
        return cls(
            shape=(int(data["shape"][0]), int(data["shape"][1])),
            group_size=int(data["group_size"]),
            base=_plane(planes["base"]),
            scale=_plane(planes["scale"]),
            refinement=_plane(refinement) if refinement is not None else None,
            bias=data.get("bias"),
            permutation=data.get("permutation"),
            saturation=data.get("saturation"),
            draft_error=data.get("draft_error"),
            target_error=data.get("target_error"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of the checkpoint: its size in bytes and the SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole document. Records whose fields only people read stay plain dictionaries."""

    format_version: str = FORMAT_VERSION
    required_features: tuple[str, ...] = ()
    created_by: Mapping[str, str] = field(default_factory=dict)
    views: tuple[str, ...] = ("draft", "target")
    nesting: Mapping[str, Any]
    activation: Mapping[str, Any]
    kv_cache: Mapping[str, Any]
    speculation: Mapping[str, Any] = field(default_factory=dict)
    rotation: Mapping[str, Any] | None
    source: Mapping[str, Any]
    calibration: Mapping[str, Any] | None = None
    modules: Mapping[str, Module]
    unquantized: tuple[str, ...]
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def draft_only(self) -> bool:
        """Whether there is no target view: the checkpoint is a 4-bit model and no more."""
        return "target" not in self.views

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "format_version": self.format_version,
            "required_features": list(self.required_features),
            **({"created_by": dict(self.created_by)} if self.created_by else {}),
            "views": list(self.views),
            "nesting": dict(self.nesting),
            "activation": dict(self.activation),
            "kv_cache": dict(self.kv_cache),
            "speculation": dict(self.speculation),
            "rotation": None if self.rotation is None else dict(self.rotation),
            "source": dict(self.source),
            "calibration": None if self.calibration is None else dict(self.calibration),
            "modules": {name: module.to_dict() for name, module in self.modules.items()},
            "unquantized": list(self.unquantized),
            "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in self.files.items()},
            **self.extra,
        }

    def to_json(self) -> str:
        """The text of `bitnest.json`: indented by two, and each module and each file on a line of its own.

        So it stays readable, also in a line-wise diff, and is a quarter smaller than with indents throughout.
        """
        lines = [f"  {_compact(key)}: {_indented(key, value)}" for key, value in self.to_dict().items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_dict(cls, data: Any) -> Manifest:
        """Check `data` and build the record.

        Raises `UnsupportedVersionError` for a version or feature this reader does not know, `ManifestError`
        naming the first place that breaks the schema.
        """
        check_readable(data)
        for finding in schema_findings(data):
            raise ManifestError(finding.message, finding.place)
        known = {*cls.__dataclass_fields__, "format"} - {"extra"}
        return cls(
            format_version=data["format_version"],
            required_features=tuple(data["required_features"]),
            created_by=data.get("created_by", {}),
            views=tuple(data["views"]),
            nesting=data["nesting"],
            activation=data["activation"],
            kv_cache=data["kv_cache"],
            speculation=data.get("speculation", {}),
            rotation=data["rotation"],
            source=data["source"],
            calibration=data.get("calibration"),
            modules={name: Module.from_dict(module) for name, module in data["modules"].items()},
            unquantized=tuple(data["unquantized"]),
            files={name: FileRecord(size=int(f["size"]), sha256=f["sha256"]) for name, f in data["files"].items()},
            extra={key: value for key, value in data.items() if key not in known},
        )


def check_readable(data: Any) -> None:
    """Refuse what this reader cannot serve whatever else is right: another format, version or feature.

    Raises `ManifestError` or `UnsupportedVersionError`.
    """
    if not isinstance(data, Mapping):
        raise ManifestError(f"found a JSON {type(data).__name__}, expected an object")
    if data.get("format") != FORMAT_NAME:
        raise ManifestError(f"format is {data.get('format')!r}, expected {FORMAT_NAME!r}", "format")
    version = data.get("format_version")
    major = version.split(".")[0] if isinstance(version, str) else ""
    if major.isdecimal() and int(major) != SUPPORTED_MAJOR:
        raise UnsupportedVersionError(
            f"bitnest.json: format_version is {version}, this reader knows {SUPPORTED_MAJOR}.x. "
            "Install a newer bitnest-format."
        )
    features = data.get("required_features")
    unknown = sorted(set(map(str, features)) - KNOWN_FEATURES) if isinstance(features, list) else []
    if unknown:
        raise UnsupportedVersionError(
            f"bitnest.json: required_features lists {', '.join(unknown)}, which this reader does not know. "
            "Install a newer bitnest-format."
        )
    rotation = data.get("rotation")
    online = rotation.get("online") if isinstance(rotation, Mapping) else None
    folded = rotation.get("folded") if isinstance(rotation, Mapping) else None
    strange = [name for name in folded if name not in ("R1", "R2")] if isinstance(folded, list) else []
    if online or strange:
        names = ", ".join(map(str, [*(online or []), *strange]))
        raise UnsupportedVersionError(
            f"bitnest.json: rotation names {names}; only R1 and R2, folded into the weights, can be read. "
            "A rotation applied at run time needs a reader that knows it."
        )


def schema_findings(data: Any) -> list[Finding]:
    """Every place where `data` breaks the JSON Schema, in document order."""
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(manifest_schema()).iter_errors(data)
    return [
        Finding(MANIFEST_FILE, ".".join(map(str, error.absolute_path)) or "(top level)", error.message[:300])
        for error in sorted(errors, key=lambda error: list(map(str, error.absolute_path)))
    ]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _indented(key: str, value: Any) -> str:
    """A field of the document as JSON, its lines indented by two but for the first."""
    if key in LINE_PER_ENTRY and value:
        lines = [f"    {_compact(name)}: {_compact(entry)}" for name, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n  }"
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")


def _plane(data: Mapping[str, Any]) -> Plane:
    return Plane(name=data["name"], sha256=data["sha256"])


def _plane_dict(plane: Plane) -> dict[str, str]:
    return {"name": plane.name, "sha256": plane.sha256}
