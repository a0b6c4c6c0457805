"""What a checkpoint says of its own conversion: entries of the manifest, and the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitnest_format.architecture import Architecture
from bitnest_format.checkpoint import checkpoint_config
from bitnest_format.converters.base import Provenance, Source, given_modules
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.preflight import Plan
from bitnest_format.converters.rotation import FOLDED_BEFORE, Rotation

# The base method of modules whose codes and scales are those of a quantized source.
GIVEN = "given"


def rotation_record(
    options: ConvertOptions, rotation: Rotation | None, turned: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The manifest's `rotation` entry. `turned`: tensors beside the language model that were rotated with it."""
    if options.rotation == "folded":
        return dict(FOLDED_BEFORE)
    if rotation is None:
        return None
    return {**rotation.record(), **({"turned": list(turned)} if turned else {})}


def nesting_record(options: ConvertOptions, plan: Plan, source: Source) -> dict[str, Any]:
    """The manifest's `nesting` entry; settings that the chosen methods do not use are left out."""
    given = given_modules(source)
    found = [name for name in plan.modules if name not in given]
    base_method: str = options.base
    if given:
        base_method = GIVEN if not found else f"{GIVEN}; {', '.join(found)}: {options.base}"
    record: dict[str, Any] = {
        "base_bits": 4,
        "refinement_bits": 4,
        "group_size": plan.preferred_group_size,
        "base_method": base_method,
        "base_bound": None,
        "refine_method": None if plan.draft_only else options.refinement,
    }
    if found:
        record["scale_search"] = options.scale_search
    if found and options.base == "gptq":
        record |= {"base_bound": options.base_bound, "base_sweeps": options.base_sweeps}
    feedback = record["refine_method"] == "feedback"
    if feedback or (found and options.base == "gptq"):
        record["damping"] = options.damping
    if feedback:
        record["refinement_sweeps"] = options.refinement_sweeps
    return record


def source_record(provenance: Provenance, plan: Plan) -> dict[str, Any]:
    """The manifest's `source` entry."""
    record = {**_provenance_record(provenance), "fingerprint": plan.fingerprint}
    if provenance.reference is not None:
        reference = _provenance_record(provenance.reference)
        record["reference"] = {**reference, "fingerprint": plan.reference_fingerprint}
    return record


def _provenance_record(provenance: Provenance) -> dict[str, Any]:
    return {
        "kind": provenance.kind,
        "name": provenance.name,
        "revision": provenance.revision,
        "license": provenance.license,
    }


def stored_config(config: Mapping[str, Any], architecture: Architecture, *, untied: bool) -> dict[str, Any]:
    """The source's config as the checkpoint's. `untied`: the head is a tensor of its own now."""
    stored = checkpoint_config(config)
    wrapped = stored["model_type"] != architecture.family.model_type
    if untied:
        stored["tie_word_embeddings"] = False
        if isinstance(stored.get("text_config"), Mapping):
            stored["text_config"] = {**stored["text_config"], "tie_word_embeddings": False}
    if wrapped or architecture.local_rope is not None:
        return stored
    # Both spellings of the rotary settings, so that old and new readers find the same numbers.
    rope = dict(architecture.rope)
    stored["rope_theta"] = rope["rope_theta"]
    stored["rope_parameters"] = rope
    return stored
