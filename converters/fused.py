"""Matrices that a source stores fused, seen as the linear layers they are made of.

The parts of a fused matrix are runs of its rows, and rows lie one after the other in a file, so each part is a shorter
stretch of the same bytes: splitting copies nothing and changes no value.
"""

from __future__ import annotations

from dataclasses import replace

from bitnest_format.architecture import Architecture
from bitnest_format.errors import SourceError
from bitnest_format.shards import TensorEntry


def split_entry(name: str, entry: TensorEntry, architecture: Architecture) -> dict[str, TensorEntry]:
    """The tensors that a stored one consists of, by name; itself alone where it is not a fused weight or bias.

    Raises `SourceError` where its rows are not those of its parts.
    """
    module, _, kind = name.rpartition(".")
    for fused, parts in architecture.family.fused.items():
        if module.endswith(f".{fused}"):
            prefix = module.removesuffix(fused)
            return _split(name, entry, {f"{prefix}{part}.{kind}": _rows(architecture, part) for part in parts})
    return {name: entry}


def _split(name: str, entry: TensorEntry, rows: dict[str, int]) -> dict[str, TensorEntry]:
    found, expected = entry.shape[0] if entry.shape else 0, sum(rows.values())
    if found != expected:
        described = ", ".join(f"{part.split('.')[-2]} {count}" for part, count in rows.items())
        raise SourceError(
            f"{name}: has {found} rows, expected {expected} ({described}) by the sizes in config.json. Correct the "
            "config, or export the model again."
        )
    size = entry.size // found
    entries: dict[str, TensorEntry] = {}
    start = entry.start
    for part, count in rows.items():
        end = start + count * size
        entries[part] = replace(entry, shape=(count, *entry.shape[1:]), start=start, end=end)
        start = end
    return entries


def _rows(architecture: Architecture, linear: str) -> int:
    return architecture.linear_shape(linear)[0]
