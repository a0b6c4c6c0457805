"""Rotations: the matrices themselves, files of them, and that folding leaves the function unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.converters import rotation as rotations
from bitnest_format.errors import SourceError

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

SIZES_WITH_HADAMARD = (1, 2, 4, 12, 20, 28, 36, 64, 76, 256, 576, 896, 1536, 2560, 3584, 4096, 5120)


@pytest.mark.parametrize("size", SIZES_WITH_HADAMARD)
def test_hadamard_is_orthogonal(size: int) -> None:
    assert rotations.hadamard_exists(size)
    matrix = rotations.hadamard(size)
    assert set(matrix.unique().tolist()) <= {-1, 1}
    # Sums of products of +-1 are exact in float32, up to 2^24 of them.
    product = matrix.float() @ matrix.float().T
    assert torch.equal(product, size * torch.eye(size))


def test_hadamard_of_order_4_is_the_known_one() -> None:
    # Sylvester's doubling of order 2 would give the same set of rows; Paley over GF(3) gives this matrix.
    assert rotations.hadamard(2).tolist() == [[1, 1], [1, -1]]
    assert rotations.hadamard(4).tolist() == [[1, 1, 1, 1], [-1, 1, -1, 1], [-1, 1, 1, -1], [-1, -1, 1, 1]]


@pytest.mark.parametrize("size", [3, 6, 13, 92, 13696 // 128])
def test_sizes_without_a_hadamard_matrix(size: int) -> None:
    assert not rotations.hadamard_exists(size)
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {size} at hand"):
        rotations.hadamard(size)


@pytest.mark.parametrize("kind", ["random", "hadamard"])
def test_made_rotations_are_orthogonal_seeded_and_distinct(kind: str, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    first = _made(kind, 3, architecture)
    again = _made(kind, 3, architecture)
    other = _made(kind, 4, architecture)
    assert torch.equal(first.r1, again.r1) and torch.equal(first.r2(1), again.r2(1))
    assert not torch.equal(first.r1, other.r1)
    assert not torch.equal(first.r2(0), first.r2(1))
    for matrix in (first.r1, first.r2(0), first.r2(1)):
        assert rotations.orthogonality_deviation(matrix) < 1e-12
    assert first.record() == {"kind": kind, "seed": 3, "sha256": None, "folded": ["R1", "R2"], "online": []}


def test_no_rotation_and_impossible_hadamard(tiny_model: Callable[..., Any]) -> None:
    config, _ = tiny_model()
    assert rotations.make_rotation("none", None, 0, read_architecture(config)) is None
    odd = read_architecture({**config, "hidden_size": 264, "head_dim": 66})
    with pytest.raises(SourceError) as error:
        rotations.make_rotation("hadamard", None, 0, odd)
    assert str(error.value) == "--rotation hadamard: no Hadamard matrix at hand for head_dim 66; use random"


@pytest.mark.parametrize("kind", ["random", "hadamard"])
@pytest.mark.parametrize(
    ("model_type", "tied", "changes"),
    [
        ("llama", False, {}),
        ("llama", True, {}),
        ("llama", False, {"attention_bias": True, "mlp_bias": True}),
        ("mistral", False, {}),
        ("qwen2", False, {}),
        ("qwen2", True, {}),
        ("qwen3", False, {"head_dim": 128}),
        ("qwen3", True, {}),
    ],
    ids=lambda value: str(value),
)
def test_rotated_logits_equal_the_sources(
    kind: str, model_type: str, tied: bool, changes: dict[str, Any], tiny_model: Callable[..., Any]
) -> None:
    config, tensors = tiny_model(model_type, tied, **changes)
    architecture = read_architecture(config)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    if tied:
        # An embedding that serves as a head makes logits of several hundred; 1e-4 is meant for usual ones.
        tensors[EMBEDDING] /= 16
    rotation = _made(kind, 0, architecture)
    head = tensors.get(HEAD, tensors[EMBEDDING])
    rotated = {
        EMBEDDING: rotations.rotate_embedding(tensors[EMBEDDING], rotation),
        FINAL_NORM: torch.ones_like(tensors[FINAL_NORM]),
        HEAD: rotations.rotate_head(head, tensors[FINAL_NORM], rotation),
    }
    for layer in range(architecture.layers):
        names = architecture.layer_tensors(layer)
        rotated |= rotations.rotate_layer({name: tensors[name] for name in names}, layer, architecture, rotation)
    rotated = {name: tensor.float() for name, tensor in rotated.items()}

    ids = torch.randint(0, architecture.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = _logits(config, tensors, ids)
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(
        _logits({**config, "tie_word_embeddings": False}, rotated, ids), expected, atol=1e-4, rtol=0
    )
    # The test must be able to fail: one matrix left unturned gives another function.
    name = "model.layers.1.self_attn.v_proj.weight"
    broken = {**rotated, name: tensors[name] * tensors["model.layers.1.input_layernorm.weight"] @ rotation.r1.float()}
    assert (_logits({**config, "tie_word_embeddings": False}, broken, ids) - expected).abs().max() > 1e-2
    if tied:
        assert not torch.equal(rotated[EMBEDDING], rotated[HEAD])


def test_head_norms_are_left_alone(tiny_model: Callable[..., Any]) -> None:
    config, tensors = tiny_model("qwen3")
    architecture = read_architecture(config)
    rotation = _made("random", 0, architecture)
    layer = {name: tensors[name] for name in architecture.layer_tensors(0)}
    turned = dict(rotations.rotate_layer(layer, 0, architecture, rotation))
    for name in architecture.head_norm_names(0):
        assert torch.equal(turned[name], tensors[name].double())
    for name in architecture.norm_names(0):
        assert torch.equal(turned[name], torch.ones(256, dtype=torch.float64))


def _spinquant(tmp_path: Path, architecture: Architecture, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    made = _made("random", 5, architecture)
    matrices: Any = {"R1": made.r1.float()}
    matrices |= {f"model.layers.{i}.self_attn.R2": made.r2(i).float() for i in range(architecture.layers)}
    matrices = change(matrices) or matrices
    torch.save(matrices, tmp_path / "R.bin")
    return tmp_path / "R.bin"


def test_spinquant_file(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    path = _spinquant(tmp_path, architecture, lambda matrices: None)
    loaded = rotations.make_rotation("spinquant", path, 0, architecture)
    made = _made("random", 5, architecture)
    assert loaded is not None
    assert loaded.kind == "spinquant" and loaded.seed is None and len(loaded.sha256 or "") == 64
    torch.testing.assert_close(loaded.r1, made.r1, atol=1e-6, rtol=0)
    torch.testing.assert_close(loaded.r2(1), made.r2(1), atol=1e-6, rtol=0)
    assert rotations.orthogonality_deviation(loaded.r1) < 1e-12


def test_spinquant_file_in_bfloat16_is_made_orthogonal(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])
    path = _spinquant(tmp_path, architecture, lambda m: {name: matrix.bfloat16() for name, matrix in m.items()})
    loaded = rotations.load_spinquant(path, architecture)
    assert rotations.orthogonality_deviation(loaded.r1) < 1e-12
    torch.testing.assert_close(loaded.r1, _made("random", 5, architecture).r1, atol=1e-3, rtol=0)


def test_spinquant_files_that_do_not_fit(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    architecture = read_architecture(tiny_model()[0])

    def spoil(matrices: dict[str, Tensor]) -> None:
        matrices["R1"] = torch.eye(128)
        matrices["model.layers.0.self_attn.R2"][0, 0] += 0.1
        del matrices["model.layers.1.self_attn.R2"]

    with pytest.raises(SourceError) as error:
        rotations.load_spinquant(_spinquant(tmp_path, architecture, spoil), architecture)
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
        rotations.load_spinquant(path, read_architecture(tiny_model()[0]))


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code inside the rotation file was executed",))


def test_spinquant_file_with_code_is_not_executed(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    torch.save({"R1": _Bomb()}, tmp_path / "R.bin")
    with pytest.raises(SourceError, match="cannot be read as a dictionary of tensors"):
        rotations.load_spinquant(tmp_path / "R.bin", read_architecture(tiny_model()[0]))


def _made(kind: str, seed: int, architecture: Architecture) -> rotations.Rotation:
    rotation = rotations.make_rotation(kind, None, seed, architecture)
    assert rotation is not None
    return rotation


@torch.inference_mode()
def _logits(config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {HEAD}
    logits: Tensor = model.eval()(ids).logits
    return logits
