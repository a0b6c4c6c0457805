"""Learned rotations: the loss and its gradient, what learning brings, and conversions that learn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters import learn, learn_loss
from bitnest_format.converters.base import Source
from bitnest_format.converters.learn import LearnedRotation, learn_rotation
from bitnest_format.converters.learn_loss import RotatedLoss
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.orthogonal import orthogonality_deviation
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.rotation import make_rotation
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError, UsageError
from bitnest_format.report import inspect_checkpoint, render
from bitnest_format.shards import file_sha256, write_json
from bitnest_format.validation import validate

Models = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 96,
}
GROUP = 32


@pytest.fixture
def source(tmp_path: Path, tiny_model: Models) -> Callable[..., Source]:
    """`(model_type="llama", change=None, **config changes)` -> a small model of two layers, opened."""

    def make(
        model_type: str = "llama", change: Callable[[dict[str, Tensor]], None] | None = None, **more: Any
    ) -> Source:
        config, tensors = tiny_model(model_type, **{**SMALL, **more})
        if change is not None:
            change(tensors)
        folder = tmp_path / "source"
        folder.mkdir()
        write_json(folder / "config.json", config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return open_source(folder)

    return make


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., ConvertOptions]:
    """Options of a conversion that learns for two steps on 8 sequences of 24 ids."""
    save_file({"input_ids": _ids(8, 24)}, tmp_path / "ids.safetensors")

    def make(**changes: Any) -> ConvertOptions:
        shared = {"rotation": "learn", "learn_steps": 2, "sequence_length": 24, "group_size": GROUP}
        sweeps = {"base_sweeps": 0, "refinement_sweeps": 0}
        return ConvertOptions(calibration=str(tmp_path / "ids.safetensors"), **{**shared, **sweeps, **changes})

    return make


def _ids(sequences: int, length: int, seed: int = 0) -> Tensor:
    """Text with something to predict: every token is followed by one of three."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 96, (sequences,), generator=generator)]
    for _ in range(length - 1):
        rows.append((5 * rows[-1] + torch.randint(0, 3, (sequences,), generator=generator)) % 96)
    return torch.stack(rows, dim=1)


def _groups(architecture: Architecture) -> dict[str, int]:
    return {name: GROUP for name, _ in architecture.modules()}


def _start(architecture: Architecture, kind: str = "hadamard", seed: int = 0) -> tuple[Tensor, Tensor]:
    made = make_rotation(kind, None, seed, architecture)
    assert made is not None
    return made.r1, torch.stack([made.r2(layer) for layer in range(architecture.layers)])


def _loss(source: Source) -> tuple[RotatedLoss, Architecture]:
    architecture = read_architecture(source.config, source.tensors)
    return RotatedLoss(source, architecture, _groups(architecture), "cpu"), architecture


def _float(matrices: tuple[Tensor, ...]) -> list[Tensor]:
    return [matrix.float().requires_grad_() for matrix in matrices]


@pytest.mark.parametrize("kind", ["hadamard", "random"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("mixtral", {}),
        ("qwen3_moe", {"moe_intermediate_size": 32, "mlp_only_layers": [0]}),
        ("gemma", {}),
    ],
    ids=lambda value: str(value),
)
def test_unquantized_loss_is_transformers_for_every_rotation(
    model_type: str,
    changes: dict[str, Any],
    kind: str,
    source: Any,
    tiny_model: Models,
    in_transformers: Callable[..., torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the whole model's own loss; without rounding, the gradient along rotations is zero."""
    monkeypatch.setattr(learn_loss, "LOGITS_AT_ONCE", 96 * 7)
    tied = changes.pop("tie_word_embeddings", False)
    opened = source(model_type, tied=tied, **changes)
    ids = _ids(3, 20)
    loss, architecture = _loss(opened)
    loss.quantize = False
    r1, r2 = _float(_start(architecture, kind))
    value = loss(ids, r1, r2)
    config, tensors = tiny_model(model_type, tied, **{**SMALL, **changes})
    whole = in_transformers(config, tensors)
    with torch.no_grad():
        logits = whole(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(value.detach(), expected, atol=2e-5, rtol=2e-5)
    gradients = torch.autograd.grad(value, (r1, r2))
    loss.quantize = True
    felt = torch.autograd.grad(loss(ids, r1, r2), (r1, r2))
    for matrix, still, moved in zip((r1, r2), gradients, felt, strict=True):
        turns = [float((g @ matrix.detach().mT - matrix.detach() @ g.mT).norm()) for g in (still, moved)]
        assert turns[0] < 1e-3 * turns[1]


def test_quantized_loss_is_that_of_the_rounded_model(source: Any) -> None:
    """Weights rounded by the encoder's arithmetic and inputs per token, in a model that is put together by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from bitnest_format import nesting
    from bitnest_format.converters.fake_quant import fake_quantize_activations
    from bitnest_format.converters.rotation import Rotation, rotate_embedding, rotate_head, rotate_layer

    opened = source()
    architecture = read_architecture(opened.config, opened.tensors)
    loss = RotatedLoss(opened, architecture, _groups(architecture), "cpu", search=False)
    ids = _ids(2, 16)
    r1, r2 = (matrix.float() for matrix in _start(architecture, "random"))
    with torch.no_grad():
        value = loss(ids, r1, r2)
    rotation = Rotation("random", r1, r2.__getitem__)
    weights = {
        architecture.embedding: rotate_embedding(opened.read(architecture.embedding), rotation),
        architecture.final_norm: torch.ones(64),
        architecture.head: rotate_head(opened.read("lm_head.weight"), opened.read("model.norm.weight"), rotation),
    }
    for layer in range(2):
        tensors = {name: opened.read(name) for name in architecture.layer_tensors(layer)}
        for name, folded in rotate_layer(tensors, layer, architecture, rotation):
            if name.removesuffix(".weight") in _groups(architecture):
                scale = nesting.group_max_abs(folded, GROUP) / 7
                folded = nesting.draft_weight(nesting.encode_base(folded, scale), scale)
            weights[name] = folded
    fields = {key: setting for key, setting in opened.config.items() if key not in ("model_type", "torch_dtype")}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields), dtype=torch.float32).eval()
    whole.load_state_dict(weights)
    for name in _groups(architecture):
        whole.get_submodule(name).register_forward_pre_hook(lambda _, inputs: (fake_quantize_activations(inputs[0]),))
    with torch.no_grad():
        logits = whole(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(value, expected, atol=1e-4, rtol=0)


def test_weights_without_room_are_read_for_every_use(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = source()
    ids = _ids(2, 16)
    kept, architecture = _loss(opened)
    monkeypatch.setattr(learn_loss, "_free_bytes", lambda device: 0)
    streamed, _ = _loss(opened)
    values = []
    for loss in (kept, streamed):
        r1, r2 = _float(_start(architecture))
        value = loss(ids, r1, r2)
        values.append((value, *torch.autograd.grad(value, (r1, r2))))
    for left, right in zip(*values, strict=True):
        assert torch.equal(left, right)


def _learn(opened: Source, ids: Tensor, **changes: Any) -> LearnedRotation:
    architecture = read_architecture(opened.config, opened.tensors)
    return learn_rotation(opened, architecture, ids, _groups(architecture), **{"steps": 12, "rate": 1.5, **changes})


def test_learning_lowers_the_loss_and_keeps_the_function(source: Any) -> None:
    """One sequence is learned from and measured on: the descent itself is what is tested, not what text it saw."""
    opened = source()
    ids = _ids(1, 200)
    seen: list[tuple[str, int, int]] = []
    learned = _learn(opened, ids, progress=lambda *report: seen.append(report))
    assert learned.start == "hadamard"
    assert seen == [(learn.STAGE, step, 12) for step in range(13)]
    gap = learned.before - learned.unquantized
    assert learned.before - learned.after > 0.2 * abs(gap), learned
    for matrix in (learned.r1, *learned.r2):
        assert orthogonality_deviation(matrix) < 1e-12
    loss, architecture = _loss(opened)
    assert float((learned.r1 - _start(architecture)[0]).norm()) > 0.1
    loss.quantize = False
    with torch.no_grad():
        turned = loss(ids, learned.r1.float(), learned.r2.float())
    assert float(turned) == pytest.approx(learned.unquantized, abs=1e-4)


def test_learning_is_deterministic_by_its_seed(source: Any) -> None:
    opened = source()
    ids = _ids(6, 16)
    first, again, other = (_learn(opened, ids, steps=3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.r1, again.r1) and torch.equal(first.r2, again.r2)
    assert (first.before, first.after) == (again.before, again.after)
    assert not torch.equal(first.r1, other.r1)


def test_what_learning_does_not_improve_is_the_start(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uphill: every step makes it worse.
    monkeypatch.setattr(learn, "_gradients", _uphill(learn._gradients))
    opened = source()
    learned = _learn(opened, _ids(1, 100), steps=4)
    architecture = read_architecture(opened.config, opened.tensors)
    assert learned.after == learned.before
    torch.testing.assert_close(learned.r1, _start(architecture)[0], atol=1e-12, rtol=0)


def _uphill(gradients: Any) -> Any:
    return lambda *arguments: tuple(-gradient for gradient in gradients(*arguments))


def test_start_without_a_hadamard_matrix(source: Any) -> None:
    """There is none of 22, the size of a head: learning begins with a random rotation."""
    sizes = {"hidden_size": 88, "head_dim": 22, "num_attention_heads": 4, "intermediate_size": 96}
    opened = source(**sizes)
    architecture = read_architecture(opened.config, opened.tensors)
    groups = {name: inputs for name, (_, inputs) in architecture.modules()}
    learned = learn_rotation(opened, architecture, _ids(2, 8), groups, steps=1, rate=0.1)
    assert learned.start == "random"


def test_overflow_is_a_clear_error(source: Any) -> None:
    def stretch(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1e30
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e30

    with pytest.raises(SourceError) as error:
        _learn(source(change=stretch), _ids(2, 8), steps=1)
    assert str(error.value) == (
        "--rotation learn: the loss is not a finite number before any step; the weights, or what they make of the "
        "calibration text, overflow float32. Check the source, or use --rotation random."
    )


@pytest.mark.parametrize(
    ("shape", "held", "rest"), [((1, 512), 1, 1), ((2, 512), 1, 1), ((64, 512), 8, 56), ((400, 2048), 4, 396)]
)
def test_some_sequences_are_held_out(shape: tuple[int, int], held: int, rest: int) -> None:
    ids = torch.arange(shape[0]).unsqueeze(1).expand(shape)
    measured, learned_from = learn.split_sequences(ids)
    assert (len(measured), len(learned_from)) == (held, rest)
    if len(ids) > 1:
        assert set(measured[:, 0].tolist()) | set(learned_from[:, 0].tolist()) == set(range(shape[0]))


def test_batches_see_everything_before_anything_twice() -> None:
    ids = torch.arange(10).unsqueeze(1).expand(10, 1024)
    batches = learn._batches(ids, seed=3)
    drawn = torch.cat([next(batches)[:, 0] for _ in range(5)]).tolist()
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


# --- conversions --------------------------------------------------------------------------------------------


def test_conversion_with_a_learned_rotation(source: Any, options: Any, tmp_path: Path) -> None:
    """What is saved can be given again: the same planes; the manifest and `inspect` say where it came from."""
    opened = source()
    saved = tmp_path / "rotation.safetensors"
    result = convert(opened, tmp_path / "out", options(save_rotation=saved, seed=3))
    rotation = result.manifest.rotation
    assert rotation is not None
    learning = rotation["learning"]
    assert {key: rotation[key] for key in ("kind", "seed", "folded", "online")} == {
        "kind": "learned",
        "seed": 3,
        "folded": ["R1", "R2"],
        "online": [],
    }
    assert (learning["start"], learning["steps"], learning["rate"]) == ("hadamard", 2, 1.5)
    assert result.to_dict()["learned_rotation"] == learning
    assert validate(tmp_path / "out", deep=True) == []
    shown = render(inspect_checkpoint(tmp_path / "out"))
    assert re.search(r"rotation +learned, seed 3, file [0-9a-f]{12}; folded: R1, R2\n", shown)
    assert rotation["sha256"] == file_sha256(saved)
    given = convert(opened, tmp_path / "again", options(rotation=f"spinquant:{saved}", seed=3))
    assert given.manifest.rotation == {**rotation, "kind": "spinquant", "seed": None}
    assert given.manifest.modules == result.manifest.modules
    assert not (tmp_path / ".out.bitnest-work").exists()


@pytest.mark.parametrize("kind", ["random", "hadamard"])
def test_any_rotation_can_be_saved(kind: str, source: Any, options: Any, tmp_path: Path) -> None:
    result = convert(source(), tmp_path / "out", options(rotation=kind, save_rotation=tmp_path / "r.safetensors"))
    again = options(rotation=f"spinquant:{tmp_path / 'r.safetensors'}")
    given = convert(open_source(tmp_path / "source"), tmp_path / "again", again)
    assert given.manifest.modules == result.manifest.modules
    assert result.to_dict()["learned_rotation"] is None


def test_rounding_alone_learns_too(source: Any, options: Any, tmp_path: Path) -> None:
    result = convert(source(), tmp_path / "out", options(base="rtn", refinement="closed"))
    assert result.manifest.rotation is not None and result.manifest.rotation["kind"] == "learned"
    assert result.manifest.calibration is not None


def test_resume_uses_the_rotation_that_was_learned(
    source: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = source()
    with pytest.raises(KeyboardInterrupt):
        convert(opened, tmp_path / "out", options(), progress=_interrupt_at("quantizing layers", 1))
    kept = tmp_path / ".out.bitnest-work" / "rotation.safetensors"
    before = load_file(kept)["R1"]
    with pytest.raises(SourceError, match=r"options\.learn_steps was 2 and is 3"):
        convert(opened, tmp_path / "out", options(learn_steps=3), resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(learn, "learn_rotation", lambda *a, **k: pytest.fail("it was learned again"))
        resumed = convert(opened, tmp_path / "out", options(), resume=True)
    whole = convert(opened, tmp_path / "whole", options(save_rotation=tmp_path / "whole.safetensors"))
    assert torch.equal(load_file(tmp_path / "whole.safetensors")["R1"], before)
    assert resumed.manifest.modules == whole.manifest.modules
    assert resumed.manifest.rotation == whole.manifest.rotation


def test_interrupted_learning_leaves_nothing_half_written(source: Any, options: Any, tmp_path: Path) -> None:
    opened = source()
    with pytest.raises(KeyboardInterrupt):
        convert(opened, tmp_path / "out", options(), progress=_interrupt_at(learn.STAGE, 1))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.bitnest-work" / "rotation.safetensors").exists()
    convert(opened, tmp_path / "out", options(), resume=True)
    assert validate(tmp_path / "out", deep=True) == []


def test_a_rotation_no_better_than_its_start_is_told(
    source: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "_gradients", _uphill(learn._gradients))
    result = convert(source(), tmp_path / "out", options(learn_steps=4))
    assert (
        "4 steps of learning found no better rotation than the hadamard one they began with, which is used; give more "
        "steps, another --learn-rate or more calibration text"
    ) in result.warnings


def _interrupt_at(stage: str, done: int) -> Callable[[str, int, int], None]:
    def progress(name: str, position: int, total: int) -> None:
        if (name, position) == (stage, done):
            raise KeyboardInterrupt

    return progress


# --- sources that came rotated ------------------------------------------------------------------------------

UNIT_GAINS = (
    "every norm's gain is exactly one, as in a model that a rotation was folded into already. If it was, pass "
    "--rotation folded: a second rotation undoes what the first was chosen for"
)


def _flatten(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") and "q_norm" not in name and "k_norm" not in name:
            tensor.fill_(1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_source_that_came_rotated(model_type: str, source: Any, options: Any, tmp_path: Path) -> None:
    opened = source(model_type, change=_flatten)
    kept = convert(opened, tmp_path / "kept", options(rotation="folded"))
    plain = convert(opened, tmp_path / "plain", options(rotation="none"))
    turned = convert(opened, tmp_path / "turned", options(rotation="random"))
    assert kept.manifest.modules == plain.manifest.modules
    assert plain.manifest.rotation is None
    assert kept.manifest.rotation == {"kind": "folded", "seed": None, "sha256": None, "folded": ["R1"], "online": []}
    assert "rotation     folded before the conversion: R1\n" in render(inspect_checkpoint(tmp_path / "kept"))
    assert Checkpoint(tmp_path / "kept").config["tie_word_embeddings"] is False
    assert validate(tmp_path / "kept", deep=True) == []
    assert UNIT_GAINS in turned.warnings
    assert UNIT_GAINS not in [*kept.warnings, *plain.warnings]


def test_a_source_with_gains_did_not_come_rotated(source: Any, options: Any, tmp_path: Path) -> None:
    def leave_one(tensors: dict[str, Tensor]) -> None:
        _flatten(tensors)
        tensors["model.layers.1.input_layernorm.weight"][5] = 1.5

    opened = source(change=leave_one)
    with pytest.raises(SourceError) as error:
        convert(opened, tmp_path / "out", options(rotation="folded"))
    assert str(error.value) == (
        "--rotation folded: model.layers.1.input_layernorm.weight is not one everywhere, so no rotation of the "
        "residual stream can be folded into this source; use --rotation none to keep it as it is, or let it be "
        "rotated here"
    )
    assert UNIT_GAINS not in convert(opened, tmp_path / "out", options(rotation="random")).warnings


def test_a_rotation_cannot_be_saved_over_something(source: Any, options: Any, tmp_path: Path) -> None:
    (tmp_path / "r.safetensors").write_bytes(b"mine")
    for place, message in (
        (tmp_path / "r.safetensors", "exists already and is not overwritten; give another name"),
        (tmp_path / "none" / "r.safetensors", f"{tmp_path / 'none'} is no folder"),
    ):
        with pytest.raises(SourceError) as error:
            convert(
                open_source(tmp_path / "source") if (tmp_path / "source").exists() else source(),
                tmp_path / "out",
                options(save_rotation=place),
            )
        assert str(error.value) == f"--save-rotation {place}: {message}"
    assert (tmp_path / "r.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rotation": "spin"},
            "--rotation is 'spin', expected one of none, random, hadamard, learn, folded or spinquant:FILE",
        ),
        (
            {"rotation": "spinquant"},
            "--rotation is 'spinquant', expected one of none, random, hadamard, learn, folded or spinquant:FILE",
        ),
        (
            {"rotation": "learn:R.bin"},
            "--rotation is 'learn:R.bin', expected one of none, random, hadamard, learn, folded or spinquant:FILE",
        ),
        (
            {"rotation": "none", "save_rotation": Path("R.bin")},
            "--save-rotation: with --rotation none there is no rotation to save",
        ),
        (
            {"rotation": "folded", "save_rotation": Path("R.bin")},
            "--save-rotation: with --rotation folded there is no rotation to save",
        ),
        (
            {"save_rotation": Path("R.bin")},
            "--save-rotation is 'R.bin', expected a name ending in .safetensors",
        ),
        ({"learn_rate": 0.0}, "--learn-rate is 0.0, expected a number above 0"),
        ({"learn_rate": float("nan")}, "--learn-rate is nan, expected a number above 0"),
        ({"learn_steps": 0}, "--learn-steps is 0, expected at least 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ConvertOptions(**changes)
    assert str(error.value) == message


def test_fingerprint_holds_what_decides_the_result() -> None:
    learned = ConvertOptions(rotation="learn", save_rotation=Path("r.safetensors")).fingerprint_fields()
    assert (learned["learn_steps"], learned["learn_rate"]) == (100, 1.5)
    assert "save_rotation" not in learned
    assert "learn_steps" not in ConvertOptions(learn_steps=7).fingerprint_fields()
