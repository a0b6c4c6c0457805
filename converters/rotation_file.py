"""Files of rotations: SpinQuant's `R.bin`, and the same matrices as safetensors.

Both hold `R1` and, for every layer, `model.layers.{i}.self_attn.R2`. An `R.bin` is a pickle: it is read without running
any code in it. What is written is float64, so that a file gives the same folded weights as the run that wrote it.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.converters.orthogonal import nearest_orthogonal, orthogonality_deviation
from bitnest_format.errors import SourceError
from bitnest_format.shards import file_sha256, pending_tensor, write_shard

# How far R^T R may lie from the identity before a given matrix is refused; below it (bf16 rounding of an
# orthogonal matrix stays there) the nearest orthogonal matrix is taken.
ORTHOGONALITY_BOUND = 3e-3
EXACT_ENOUGH = 1e-12

LEARNING = "learning"
# Reading a pickle fails in as many ways as it can be broken.
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError, SafetensorError)
# What `--save_qmodel_path` of SpinQuant's own script puts beside the weights.
SPINQUANT_MODEL_KEY = b"w_quantizers"
SPINQUANT_ROTATION_KEY = b"self_attn.R2"
PICKLE_BYTES = 1 << 20
QUANTIZED_MODEL = (
    "is a model that SpinQuant quantized and saved (--save_qmodel_path): its weights are rounded already, and a "
    "Hadamard matrix that only its own run time undoes is folded into down_proj. Give the full-precision model as the "
    "source and the rotation file that was learned for it (R.bin) with --rotation spinquant:FILE"
)
ROTATION_ALONE = (
    "holds rotation matrices, not a model. Give the full-precision model as the source and this file with --rotation "
    "spinquant:FILE"
)


@dataclass(frozen=True, slots=True)
class RotationFile:
    """R1 `[hidden, hidden]` and every layer's R2 `[head_dim, head_dim]`, float64; the SHA-256 of the file.

    `learning`: how they were learned, where this package wrote the file.
    """

    r1: Tensor
    r2: Sequence[Tensor]
    sha256: str
    learning: Mapping[str, Any] | None = None


def read_rotation_file(path: Path, architecture: Architecture) -> RotationFile:
    """The matrices of a file that was made for this model, exactly orthogonal. Raises as `check_rotation_file` does."""
    matrices = {
        name: nearest_orthogonal(matrix) if orthogonality_deviation(matrix) > EXACT_ENOUGH else matrix.double()
        for name, matrix in check_rotation_file(path, architecture).items()
    }
    r2 = [matrices[_r2_name(layer)] for layer in range(architecture.layers)]
    return RotationFile(matrices["R1"], r2, file_sha256(path), _learning(path))


def check_rotation_file(path: Path, architecture: Architecture) -> dict[str, Tensor]:
    """The matrices of a file as they are stored.

    Raises `SourceError` where the file is no dictionary of tensors, and listing matrices that are missing, of the wrong
    size, or not orthogonal within `ORTHOGONALITY_BOUND` (largest entry of `R^T R - I`).
    """
    stored = _read(path)
    sizes = {"R1": architecture.hidden_size}
    sizes |= {_r2_name(layer): architecture.head_dim for layer in range(architecture.layers)}
    problems = [
        f"{path.name}: {name}: {fault}" for name, size in sizes.items() if (fault := _fault(stored, name, size))
    ]
    further = [name for name in stored if str(name).endswith("self_attn.R2") and name not in sizes]
    if further:
        problems.append(
            f"{path.name}: {further[0]}: belongs to no layer of this model, which has {architecture.layers}; "
            "give the file that was made for it"
        )
    if problems:
        raise SourceError(problems)
    return {name: stored[name] for name in sizes}


def _fault(stored: Mapping[Any, Any], name: str, size: int) -> str | None:
    matrix = stored.get(name)
    if not isinstance(matrix, Tensor):
        return "missing"
    if tuple(matrix.shape) != (size, size):
        return f"is {' x '.join(map(str, matrix.shape))}, expected {size} x {size} for this model"
    deviation = orthogonality_deviation(matrix)
    if deviation <= ORTHOGONALITY_BOUND:
        return None
    return (
        f"is not orthogonal: R^T R differs from the identity by {deviation:.2g}, at most {ORTHOGONALITY_BOUND:g} can "
        "be repaired"
    )


def write_rotation_file(
    path: Path, r1: Tensor, r2: Iterable[Tensor], *, learning: Mapping[str, Any] | None = None
) -> None:
    """Write R1 and every layer's R2, float64, as safetensors; the same matrices always give the same bytes.

    The file appears whole or not at all.
    """
    matrices = {"R1": r1, **{_r2_name(layer): matrix for layer, matrix in enumerate(r2)}}
    tensors = {name: pending_tensor(matrix.detach().double().cpu()) for name, matrix in matrices.items()}
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        write_shard(unfinished, tensors, {LEARNING: json.dumps(learning)} if learning else {})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def describe_pickle(path: Path) -> str | None:
    """What a pickled file of SpinQuant's is and what to do with it, told by its names alone; None for all others."""
    names = _pickled_names(path)
    if SPINQUANT_MODEL_KEY in names:
        return QUANTIZED_MODEL
    return ROTATION_ALONE if SPINQUANT_ROTATION_KEY in names else None


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        if _is_safetensors(path):
            return load_file(path)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SourceError(f"{path}: no such rotation file") from None
    except UNREADABLE as error:
        if SPINQUANT_MODEL_KEY in _pickled_names(path):
            raise SourceError(f"{path}: {QUANTIZED_MODEL}") from error
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{path}: cannot be read as a dictionary of tensors ({reason})") from error
    if not isinstance(stored, Mapping):
        raise SourceError(f"{path}: holds a {type(stored).__name__}, expected a dictionary of tensors")
    if SPINQUANT_MODEL_KEY.decode() in stored:
        raise SourceError(f"{path}: {QUANTIZED_MODEL}")
    return stored


def _is_safetensors(path: Path) -> bool:
    """Told by the content: eight bytes of length, then the header's brace."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _learning(path: Path) -> Mapping[str, Any] | None:
    if not _is_safetensors(path):
        return None
    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get(LEARNING)
    try:
        learning = json.loads(stored) if stored else None
    except ValueError:
        return None
    return learning if isinstance(learning, dict) else None


def _pickled_names(path: Path) -> bytes:
    """The bytes that hold a pickle's names: the pickle inside torch's archive, or the start of an older file."""
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                return file.read(PICKLE_BYTES)
        with zipfile.ZipFile(path) as archive:
            inner = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
            return archive.read(inner) if inner else b""
    except (OSError, zipfile.BadZipFile):
        return b""


def _r2_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.R2"
