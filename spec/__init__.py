"""The published side of the format: `manifest.schema.json` and the version this tree writes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

FORMAT_NAME = "bitnest"
FORMAT_VERSION = "1.0"
SUPPORTED_MAJOR = 1

# Features a checkpoint may list under `required_features`; a reader refuses any other.
KNOWN_FEATURES = frozenset({"input_permutation"})


@cache
def manifest_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `bitnest.json`."""
    text = files(__name__).joinpath("manifest.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
