"""Files of rotations: SpinQuant's and our own, what does not fit the model, and what is no rotation at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.converters.orthogonal import orthogonality_deviation
from bitnest_format.converters.rotation import Rotation, make_rotation
from bitnest_format.converters.rotation_file import describe_pickle, read_rotation_file, write_rotation_file
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError
from bitnest_format.shards import write_json


def _spinquant(tmp_path: Path, architecture: Architecture, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    made = _made(architecture)
    matrices: Any = {"R1": made.r1.float()}
    matrices |= {f"model.layers.{i}.self_attn.R2": made.r2(i).float() for i in range(architecture.layers)}
    matrices = change(matrices) or matrices
    torch.save(matrices, tmp_path / "R.bin")
    return tmp_path / "R.bin"


def test_spinquant_file(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    path = _spinquant(tmp_path, architecture, lambda matrices: None)
    loaded = make_rotation("spinquant", path, 0, architecture)
    made = _made(architecture)
    assert loaded is not None
    assert loaded.kind == "spinquant" and loaded.seed is None and len(loaded.sha256 or "") == 64
    torch.testing.assert_close(loaded.r1, made.r1, atol=1e-6, rtol=0)
    torch.testing.assert_close(loaded.r2(1), made.r2(1), atol=1e-6, rtol=0)
    assert orthogonality_deviation(loaded.r1) < 1e-12


def test_spinquant_file_in_bfloat16_is_made_orthogonal(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    path = _spinquant(tmp_path, architecture, lambda m: {name: matrix.bfloat16() for name, matrix in m.items()})
    loaded = read_rotation_file(path, architecture)
    assert orthogonality_deviation(loaded.r1) < 1e-12
    torch.testing.assert_close(loaded.r1, _made(architecture).r1, atol=1e-3, rtol=0)


def test_spinquant_files_that_do_not_fit(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])

    def spoil(matrices: dict[str, Tensor]) -> None:
        matrices["R1"] = torch.eye(128)
        matrices["model.layers.0.self_attn.R2"][0, 0] += 0.1
        del matrices["model.layers.1.self_attn.R2"]

    with pytest.raises(SourceError) as error:
        read_rotation_file(_spinquant(tmp_path, architecture, spoil), architecture)
    size, deviation, missing = error.value.problems
    assert size == "R.bin: R1: is 128 x 128, expected 256 x 256 for this model"
    assert deviation.startswith("R.bin: model.layers.0.self_attn.R2: is not orthogonal: R^T R differs from the")
    assert deviation.endswith("at most 0.003 can be repaired")
    assert missing == "R.bin: model.layers.1.self_attn.R2: missing"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such rotation file"),
        (b"", "cannot be read as a dictionary of tensors"),
        (b"not a pickle at all", "cannot be read as a dictionary of tensors"),
    ],
)
def test_spinquant_files_that_are_none(
    content: bytes | None, expected: str, tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    path = tmp_path / "R.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=expected):
        read_rotation_file(path, read_architecture(tiny_model()[0]))


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code inside the rotation file was executed",))


def test_spinquant_file_with_code_is_not_executed(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    torch.save({"R1": _Bomb()}, tmp_path / "R.bin")
    with pytest.raises(SourceError, match="cannot be read as a dictionary of tensors"):
        read_rotation_file(tmp_path / "R.bin", read_architecture(tiny_model()[0]))


def test_written_files_hold_the_very_matrices(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    made = _made(architecture)
    for name in ("rotation.safetensors", "again.safetensors"):
        write_rotation_file(tmp_path / name, made.r1, [made.r2(0), made.r2(1)], learning={"steps": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.safetensors", "rotation.safetensors"]
    found, again = (read_rotation_file(path, architecture) for path in tmp_path.iterdir())
    assert torch.equal(found.r1, made.r1) and torch.equal(found.r2[0], made.r2(0))
    assert torch.equal(found.r2[1], made.r2(1))
    assert found.learning == {"steps": 3}
    assert found.sha256 == again.sha256


def test_safetensors_are_told_by_their_content(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    made = _made(architecture)
    write_rotation_file(tmp_path / "rotation.safetensors", made.r1, [made.r2(0), made.r2(1)])
    (tmp_path / "rotation.safetensors").rename(tmp_path / "R.bin")
    assert torch.equal(read_rotation_file(tmp_path / "R.bin", architecture).r1, made.r1)
    (tmp_path / "R.bin").write_bytes((tmp_path / "R.bin").read_bytes()[:1000])
    with pytest.raises(SourceError, match="cannot be read as a dictionary of tensors"):
        read_rotation_file(tmp_path / "R.bin", architecture)


def test_a_rotation_for_more_layers_is_refused(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    path = _spinquant(tmp_path, architecture, lambda m: {**m, "model.layers.2.self_attn.R2": torch.eye(64)})
    with pytest.raises(SourceError) as error:
        read_rotation_file(path, architecture)
    assert str(error.value) == (
        "R.bin: model.layers.2.self_attn.R2: belongs to no layer of this model, which has 2; give the file that was "
        "made for it"
    )


class WeightQuantizer:
    """Stands for the class whose objects SpinQuant saves beside the weights."""


QUANTIZED_MODEL = (
    "is a model that SpinQuant quantized and saved (--save_qmodel_path): its weights are rounded already, and a "
    "Hadamard matrix that only its own run time undoes is folded into down_proj. Give the full-precision model as the "
    "source and the rotation file that was learned for it (R.bin) with --rotation spinquant:FILE"
)
ROTATION_ONLY = (
    "holds rotation matrices, not a model. Give the full-precision model as the source and this file with --rotation "
    "spinquant:FILE"
)


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "old pickle"])
@pytest.mark.parametrize("quantizer", [WeightQuantizer(), torch.ones(1)], ids=["objects", "tensors"])
def test_a_model_that_spinquant_saved_is_refused_with_the_way_out(
    quantizer: Any, legacy: bool, tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    config, _ = tiny_model()
    path = tmp_path / "model" / "qmodel.pth"
    path.parent.mkdir()
    write_json(path.parent / "config.json", config)
    model = {"model.layers.0.self_attn.q_proj.module.weight": torch.ones(2, 2)}
    dump = {"model": model, "w_quantizers": {"model.layers.0.self_attn.q_proj": quantizer}}
    torch.save(dump, path, _use_new_zipfile_serialization=not legacy)
    for open_it in (
        lambda: open_source(path),
        lambda: open_source(path.parent),
        lambda: read_rotation_file(path, read_architecture(config)),
    ):
        with pytest.raises(SourceError) as error:
            open_it()
        assert str(error.value) == f"{path}: {QUANTIZED_MODEL}"


def test_a_rotation_file_is_no_source(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    path = _spinquant(tmp_path, read_architecture(tiny_model()[0]), lambda matrices: None)
    with pytest.raises(SourceError) as error:
        open_source(path)
    assert str(error.value) == f"{path}: {ROTATION_ONLY}"


@pytest.mark.parametrize("content", [b"", b"some text", b"PK\x03\x04 no archive"])
def test_other_files_are_not_described(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(content)
    assert describe_pickle(tmp_path / "file.bin") is None
    assert describe_pickle(tmp_path / "missing.bin") is None


def _made(architecture: Architecture) -> Rotation:
    rotation = make_rotation("random", None, 5, architecture)
    assert rotation is not None
    return rotation
