"""How an export reaches the disk: standard shards, a folder that appears whole, and a count of what rounding moved."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bitnest_format.converters.hf import INDEX_FILE, SINGLE_FILE
from bitnest_format.errors import BitnestError, SourceError
from bitnest_format.shards import DTYPES, Pending, split_by_size, write_json, write_shard


@dataclass(slots=True)
class Movement:
    """How far rounding moved the values that were written."""

    squared_norm: float = 0.0
    squared_change: float = 0.0
    largest: float = 0.0

    @property
    def relative(self) -> float:
        return math.sqrt(self.squared_change / self.squared_norm) if self.squared_norm else 0.0

    def add(self, name: str, exact: Tensor, rounded: Tensor) -> None:
        """Count one piece. Raises `SourceError` where a value does not fit the type it is rounded to."""
        if not bool(torch.isfinite(rounded).all()):
            raise SourceError(
                f"{name}: its largest magnitude, {float(exact.abs().max()):g}, does not fit {rounded.dtype}. "
                "Export with --dtype bfloat16 or float32."
            )
        self.squared_norm += float(exact.double().square().sum())
        if rounded.dtype != exact.dtype:
            change = (rounded.double() - exact.double()).abs()
            self.squared_change += float(change.square().sum())
            self.largest = max(self.largest, float(change.max()))


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place if all goes well, and vanishes if not."""
    absolute = output.absolute()
    work = absolute.parent / f".{absolute.name}.bitnest-export"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        if absolute.is_dir():
            absolute.rmdir()
        work.rename(absolute)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise BitnestError(
            f"{absolute.parent}: the disk is full. Free some space and run the command again."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_shards(folder: Path, tensors: Mapping[str, Pending], shard_bytes: int, parameters: int) -> None:
    """One `model.safetensors`, or numbered shards with their index. Wide types come first, so that all is aligned."""
    shards = split_by_size(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        order = sorted(names, key=lambda name: (-DTYPES[tensors[name].dtype].itemsize, name))
        write_shard(folder / file, {name: tensors[name] for name in order}, {})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.size for tensor in tensors.values())
        metadata = {"total_parameters": parameters, "total_size": total}
        write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
