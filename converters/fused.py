"""Matrices that other programs store fused, seen as the linear layers they are made of.

The parts of a fused matrix are runs of its rows. Plain rows lie one after the other in a file, so each part is a
shorter stretch of the same bytes: splitting copies nothing and changes no value. A packed matrix is quantized row by
row, so its rows are its parts' codes and scales, whatever the order in which a format packs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bitnest_format.architecture import Architecture
from bitnest_format.converters.base import GivenBase
from bitnest_format.errors import SourceError
from bitnest_format.shards import TensorEntry


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer as rows `start .. stop - 1` of a stored matrix; alone in it where it is stored under its name."""

    whole: str
    start: int
    stop: int

    def of(self, base: GivenBase) -> GivenBase:
        """Its rows of the stored matrix's base plane; nothing is copied."""
        rows = slice(self.start, self.stop)
        return GivenBase(codes=base.codes[rows], scale=base.scale[rows], permutation=base.permutation)


def stored_name(module: str, architecture: Architecture) -> str:
    """The matrix that other programs store a linear layer in; its own name where it is not fused."""
    for fused, parts in architecture.family.fused.items():
        for part in parts:
            if module.endswith(f".{part}"):
                return module.removesuffix(part) + fused
    return module


def joined(modules: Iterable[str], architecture: Architecture) -> dict[str, list[str]]:
    """Linear layers by the matrix that they are stored in, in the order of its rows."""
    found: dict[str, list[str]] = {}
    for module in modules:
        found.setdefault(stored_name(module, architecture), []).append(module)
    order = [part for parts in architecture.family.fused.values() for part in parts]
    for parts in found.values():
        if len(parts) > 1:
            parts.sort(key=lambda module: next(place for place, part in enumerate(order) if module.endswith(part)))
    return found


def stored_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """`(outputs, inputs)` of every matrix that a source may store, the head's too."""
    shapes = dict(architecture.modules(nested_head=True))
    return {
        whole: (sum(shapes[part][0] for part in parts), shapes[parts[0]][1])
        for whole, parts in joined(shapes, architecture).items()
    }


def parts_of(wholes: Iterable[str], architecture: Architecture) -> dict[str, Part]:
    """Where each linear layer of some stored matrices lies, by its name."""
    shapes = dict(architecture.modules(nested_head=True))
    names = joined(shapes, architecture)
    found: dict[str, Part] = {}
    for whole in wholes:
        start = 0
        for part in names[whole]:
            found[part] = Part(whole, start, start + shapes[part][0])
            start += shapes[part][0]
    return found


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
