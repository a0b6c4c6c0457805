"""Conversions end to end on tiny models: right numbers, same bytes, and nothing half done."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitnest_format import nesting, shards
from bitnest_format.architecture import read_architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters import pipeline, quantize, work_folder
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import ConversionResult, convert
from bitnest_format.converters.rotation import make_rotation, rotate_head, rotate_layer
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import BitnestError, SourceError, UsageError
from bitnest_format.validation import validate

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Models = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]


@pytest.fixture
def model_folder(tmp_path: Path, tiny_model: Models) -> Callable[..., Path]:
    """`(name="source", change=None, dtype=None, **tiny_model arguments)` -> a Hugging Face folder."""

    def make(
        name: str = "source",
        change: Callable[[dict[str, Tensor]], None] | None = None,
        dtype: torch.dtype | None = None,
        **arguments: Any,
    ) -> Path:
        config, tensors = tiny_model(**arguments)
        tensors = {key: tensor.to(dtype or tensor.dtype) for key, tensor in tensors.items()}
        if change is not None:
            change(tensors)
        folder = tmp_path / name
        folder.mkdir()
        shards.write_json(folder / "config.json", config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., ConvertOptions]:
    """Options that calibrate on 8 random sequences of 64 token ids."""

    def make(**changes: Any) -> ConvertOptions:
        path = tmp_path / "ids.safetensors"
        if not path.exists():
            ids = torch.randint(0, 320, (8, 64), generator=torch.Generator().manual_seed(0))
            save_file({"input_ids": ids}, path)
        return ConvertOptions(
            **{"calibration": str(path), "sequence_length": 64, "base_sweeps": 1, "refinement_sweeps": 1, **changes}
        )

    return make


def _convert(folder: Path, output: Path, options: ConvertOptions, **more: Any) -> ConversionResult:
    return convert(open_source(folder), output, options, **more)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


ROUNDING = ({"base": "rtn", "refinement": "closed", "scale_search": "max"}, {"draft": 0.15, "target": 0.01})
# Error feedback spends weight error to save output error; its limits are wider.
FEEDBACK: Any = ({}, {"draft": 0.25, "target": 0.06})


@pytest.mark.parametrize("construction", [ROUNDING, FEEDBACK], ids=["rounding", "feedback"])
@pytest.mark.parametrize("rotation", ["none", "random", "hadamard"])
@pytest.mark.parametrize(
    ("model_type", "tied"),
    [("llama", False), ("llama", True), ("mistral", False), ("qwen2", False), ("qwen2", True), ("qwen3", False)],
)
def test_converted_checkpoints_are_valid_and_close_to_the_source(
    model_type: str, tied: bool, rotation: str, construction: Any, model_folder: Any, options: Any, tmp_path: Path
) -> None:
    changes, limits = construction
    source = model_folder(model_type=model_type, tied=tied)
    result = _convert(source, tmp_path / "out", options(rotation=rotation, **changes))
    assert result.folder == tmp_path / "out"
    assert validate(tmp_path / "out", deep=True) == []
    assert not list(tmp_path.glob(".*bitnest-work"))

    checkpoint = Checkpoint(tmp_path / "out")
    tensors = {name: tensor.float() for name, tensor in _source_tensors(source).items()}
    architecture = read_architecture(checkpoint.config)
    made = make_rotation(rotation, None, 0, architecture)
    for layer in range(architecture.layers):
        folded = {name: tensors[name] for name in architecture.layer_tensors(layer)}
        if made is not None:
            folded = {n: t.float() for n, t in rotate_layer(folded, layer, architecture, made)}
        for name, weight in folded.items():
            module = name.removesuffix(".weight")
            if module in checkpoint.manifest.modules:
                record = checkpoint.module(module)
                for view, limit in limits.items():
                    rebuilt = checkpoint.weight(module).dequantize(view)
                    error = float((rebuilt - weight).norm() / weight.norm())
                    assert error < limit
                    recorded = record.draft_error if view == "draft" else record.target_error
                    assert recorded == pytest.approx(error, abs=2e-6)
            else:
                torch.testing.assert_close(checkpoint.tensor(name).float(), weight, rtol=2**-8, atol=0)
    stored_tied = HEAD not in checkpoint.weight_map
    assert stored_tied == (tied and rotation == "none")
    assert checkpoint.config["tie_word_embeddings"] == stored_tied
    if rotation == "none":
        assert torch.equal(checkpoint.tensor(EMBEDDING).float(), tensors[EMBEDDING])
    else:
        assert torch.equal(checkpoint.tensor(FINAL_NORM).float(), torch.ones(256))
        assert checkpoint.manifest.rotation is not None
        assert checkpoint.manifest.rotation["folded"] == ["R1", "R2"]


@pytest.mark.parametrize("construction", [ROUNDING, FEEDBACK], ids=["rounding", "feedback"])
@pytest.mark.parametrize("rotation", ["none", "random"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_nested_head(
    tied: bool,
    rotation: str,
    construction: Any,
    model_folder: Any,
    options: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes, limits = construction
    source = model_folder(tied=tied)
    plain = _convert(source, tmp_path / "plain", options(rotation=rotation, **changes))
    # Four pieces, the last of them shorter.
    monkeypatch.setattr(quantize, "WEIGHTS_AT_ONCE", 100 * 256)
    nested = _convert(source, tmp_path / "out", options(rotation=rotation, quantize_lm_head=True, **changes))
    assert validate(tmp_path / "out", deep=True) == []

    checkpoint = Checkpoint(tmp_path / "out")
    assert HEAD not in checkpoint.weight_map and HEAD not in checkpoint.manifest.unquantized
    assert checkpoint.config["tie_word_embeddings"] is False
    assert {n: m for n, m in nested.manifest.modules.items() if n != "lm_head"} == plain.manifest.modules
    assert list(nested.manifest.modules)[-1] == "lm_head"
    whole = Checkpoint(tmp_path / "plain")
    for name in (EMBEDDING, FINAL_NORM):
        assert torch.equal(checkpoint.tensor(name), whole.tensor(name))
    tensors = _source_tensors(source)
    head = tensors[EMBEDDING if tied else HEAD]
    made = make_rotation(rotation, None, 0, read_architecture(checkpoint.config))
    weight = (rotate_head(head, tensors[FINAL_NORM], made) if made else head).float()
    record, stored = checkpoint.module("lm_head"), checkpoint.weight("lm_head")
    for view, limit in limits.items():
        error = float((stored.dequantize(view) - weight).norm() / weight.norm())
        assert error < limit
        assert (record.draft_error if view == "draft" else record.target_error) == pytest.approx(error, abs=2e-6)
    if construction is ROUNDING:
        base = stored.base_codes()
        assert torch.equal(base, nesting.encode_base(weight, stored.scale))
        assert torch.equal(
            stored.target_codes(), nesting.compose(base, nesting.encode_refinement(weight, base, stored.scale))
        )
        assert record.saturation == pytest.approx(nesting.saturation(weight, base, stored.scale), abs=2e-6)


def test_nested_head_makes_up_for_its_errors_where_its_inputs_lie(
    model_folder: Any, options: Any, tmp_path: Path
) -> None:
    """With the Hessian of its own input the head's output error is below that of rounding."""
    source = model_folder()
    shared = {"rotation": "none", "quantize_lm_head": True}
    _convert(source, tmp_path / "solved", options(**shared))
    _convert(source, tmp_path / "rounded", options(base="rtn", refinement="closed", **shared))
    inputs = _final_states(source, options().calibration)
    weight = _source_tensors(source)[HEAD].float()
    for view in ("draft", "target"):
        errors = []
        for name in ("solved", "rounded"):
            rebuilt = Checkpoint(tmp_path / name).weight("lm_head").dequantize(view)
            errors.append(float((inputs @ (rebuilt - weight).T).norm()))
        assert errors[0] < 0.9 * errors[1], view


def _final_states(folder: Path, calibration: str) -> Tensor:
    """What the source's head reads on the calibration tokens, `[tokens, H]`."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model.model(load_file(calibration)["input_ids"]).last_hidden_state.flatten(0, 1)


def test_a_nested_head_far_beyond_float16_gets_float32_scales(
    model_folder: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stretch(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD][319, :128] *= 1e6 / float(tensors[HEAD][319, :128].abs().max())

    monkeypatch.setattr(quantize, "WEIGHTS_AT_ONCE", 100 * 256)
    _convert(model_folder(change=stretch), tmp_path / "out", options(rotation="none", quantize_lm_head=True))
    scale = Checkpoint(tmp_path / "out").weight("lm_head").scale
    assert scale.dtype == torch.float32 and float(scale[319, 0]) > 65504
    assert validate(tmp_path / "out", deep=True) == []


@pytest.mark.parametrize(
    ("stage", "done"),
    [("quantizing layers", 1), ("quantizing layers", 2), ("quantizing the head", 2), ("writing the checkpoint", 0)],
)
def test_resumed_nested_head_ends_with_the_same_bytes(
    stage: str, done: int, model_folder: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "WEIGHTS_AT_ONCE", 100 * 256)
    source = model_folder(tied=True)
    _convert(source, tmp_path / "whole", options(quantize_lm_head=True))
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(quantize_lm_head=True), progress=_interrupt_at(stage, done))
    with pytest.raises(SourceError, match=r"options\.quantize_lm_head was True and is False"):
        _convert(source, tmp_path / "out", options(), resume=True)
    _convert(source, tmp_path / "out", options(quantize_lm_head=True), resume=True)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_warnings_of_a_nested_head_survive_a_resume(
    model_folder: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitnest_format.converters.quantize.inverse_factor", lambda hessian, damping: None)
    source = model_folder()
    stop = _interrupt_at("writing the checkpoint", 0)
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(quantize_lm_head=True), progress=stop)
    result = _convert(source, tmp_path / "out", options(quantize_lm_head=True), resume=True)
    assert result.warnings[-1].endswith("; lm_head: the Hessian could not be inverted; rounded to nearest instead")
    assert validate(tmp_path / "out", deep=True) == []


def _source_tensors(folder: Path) -> dict[str, Tensor]:
    source = open_source(folder)
    return {name: source.read(name) for name in source.tensors}


def test_paper_recipe_is_the_closed_form_on_an_unbounded_base(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source = model_folder()
    paper = ConvertOptions.paper(rotation="none", calibration=options().calibration, sequence_length=64, group_size=128)
    result = _convert(source, tmp_path / "out", paper)
    assert result.manifest.nesting["refine_method"] == "closed"
    assert result.manifest.nesting["base_bound"] is None
    checkpoint, tensors = Checkpoint(tmp_path / "out"), _source_tensors(source)
    clipped = []
    for name, record in checkpoint.manifest.modules.items():
        nested, weight = checkpoint.weight(name), tensors[f"{name}.weight"].float()
        base = nested.base_codes()
        expected = nesting.encode_refinement(weight, base, nested.scale.float())
        assert torch.equal(nested.target_codes(), nesting.compose(base, expected))
        clipped.append(nesting.saturation(weight, base, nested.scale.float()))
        assert record.saturation == pytest.approx(clipped[-1], abs=2e-6)
    assert max(clipped) > 0.04


def test_same_inputs_give_the_same_bytes(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source = model_folder(tied=True)
    for name in ("one", "two"):
        _convert(source, tmp_path / name, options())
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")
    _convert(source, tmp_path / "three", options(seed=1))
    assert _bytes(tmp_path / "one") != _bytes(tmp_path / "three")


def test_bfloat16_and_float32_copies_give_the_same_planes(model_folder: Any, options: Any, tmp_path: Path) -> None:
    _convert(model_folder("narrow"), tmp_path / "one", options())
    _convert(model_folder("wide", dtype=torch.float32), tmp_path / "two", options())
    narrow, wide = Checkpoint(tmp_path / "one").manifest.modules, Checkpoint(tmp_path / "two").manifest.modules
    assert narrow == wide


def _interrupt_at(stage: str, done: int) -> Callable[[str, int, int], None]:
    def progress(now: str, count: int, total: int) -> None:
        if now == stage and count == done:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(
    ("stage", "done"),
    [("quantizing layers", 0), ("quantizing layers", 1), ("writing the checkpoint", 0), ("writing the checkpoint", 1)],
)
def test_resumed_run_ends_with_the_same_bytes(
    stage: str, done: int, model_folder: Any, options: Any, tmp_path: Path
) -> None:
    source = model_folder()
    _convert(source, tmp_path / "whole", options())
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(), progress=_interrupt_at(stage, done))
    assert not (tmp_path / "out").exists()
    _convert(source, tmp_path / "out", options(), resume=True)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")
    assert not list(tmp_path.glob(".*bitnest-work"))


def test_resume_quantizes_only_what_is_missing(
    model_folder: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_folder()
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(), progress=_interrupt_at("quantizing layers", 1))
    seen: list[int] = []
    original = pipeline._Conversion._quantize_layer

    def quantize(self: Any, layer: int, *rest: Any) -> Any:
        seen.append(layer)
        return original(self, layer, *rest)

    monkeypatch.setattr(pipeline._Conversion, "_quantize_layer", quantize)
    _convert(source, tmp_path / "out", options(), resume=True)
    assert seen == [1]


def test_killed_run_leaves_no_output_and_can_be_resumed_or_repeated(
    model_folder: Any, options: Any, tmp_path: Path
) -> None:
    source = model_folder(num_hidden_layers=4)
    script = (
        "import sys; from pathlib import Path; from bitnest_format.converters.options import ConvertOptions as O;"
        "from bitnest_format.converters.sources import open_source;"
        "from bitnest_format.converters.pipeline import convert;"
        "convert(open_source(Path(sys.argv[1])), Path(sys.argv[2]), O(calibration=sys.argv[3], sequence_length=64,"
        " base_sweeps=1, refinement_sweeps=1))"
    )
    calibration = options().calibration
    process = subprocess.Popen([sys.executable, "-c", script, str(source), str(tmp_path / "out"), calibration])
    first_layer = tmp_path / ".out.bitnest-work" / "layer-00000.json"
    deadline = time.monotonic() + 120
    while not first_layer.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert first_layer.exists() and not (tmp_path / "out").exists()
    _convert(source, tmp_path / "out", options(), resume=True)
    _convert(source, tmp_path / "whole", options())
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_resume_refuses_other_ingredients(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source = model_folder()
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(), progress=_interrupt_at("quantizing layers", 1))
    with pytest.raises(SourceError) as error:
        _convert(source, tmp_path / "out", options(seed=7, base_bound=0.9), resume=True)
    assert str(error.value) == (
        "--resume: the interrupted conversion was made of other ingredients: options.base_bound was 0.8 and is 0.9; "
        "options.seed was 0 and is 7; rotation.seed was 0 and is 7. Repeat it with the same ones, or run without "
        "--resume to start anew."
    )
    other = tmp_path / "other.safetensors"
    save_file({"input_ids": torch.zeros(8, 64, dtype=torch.int64)}, other)
    with pytest.raises(SourceError, match=r"other ingredients: calibration\.description was .*calibration\.sha256 was"):
        _convert(source, tmp_path / "out", options(calibration=str(other)), resume=True)
    with pytest.raises(SourceError, match="other ingredients: source was"):
        _convert(model_folder("source2", seed=5), tmp_path / "out", options(), resume=True)
    # None of the refusals has spoiled the work that was done.
    _convert(source, tmp_path / "out", options(), resume=True)
    assert validate(tmp_path / "out", deep=True) == []


def test_resume_of_nothing(model_folder: Any, options: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as error:
        _convert(model_folder(), tmp_path / "out", options(), resume=True)
    work = tmp_path / ".out.bitnest-work"
    assert str(error.value) == f"--resume: no interrupted conversion at {work}; run without --resume"
    assert not work.exists()


def test_running_again_without_resume_starts_anew(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source = model_folder()
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(), progress=_interrupt_at("quantizing layers", 1))
    _convert(source, tmp_path / "out", options(seed=3))
    _convert(source, tmp_path / "whole", options(seed=3))
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


@pytest.mark.parametrize("failing_write", [1, 3, 7])
def test_full_disk(
    failing_write: int, model_folder: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_folder()
    writes = 0

    def write_shard(path: Path, *arguments: Any) -> Any:
        nonlocal writes
        writes += 1
        if writes == failing_write:
            path.write_bytes(b"half a shard")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return shards.write_shard(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "write_shard", write_shard)
        patch.setattr("bitnest_format.checkpoint.write_shard", write_shard)
        with pytest.raises(BitnestError) as error:
            _convert(source, tmp_path / "out", options())
    assert str(error.value).startswith(f"{tmp_path}: the disk is full; about ")
    assert str(error.value).endswith("Free some space and run the same command with --resume.")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"half a shard"]
    _convert(source, tmp_path / "out", options(), resume=True)
    _convert(source, tmp_path / "whole", options())
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_two_conversions_into_one_output_do_not_meet(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source, work = model_folder(), work_folder.WorkFolder.beside(tmp_path / "out")
    with work.held():
        part = work.folder / "layer-00000.base.safetensors"
        part.write_bytes(b"of the conversion that is at work")
        for resume in (False, True):
            with pytest.raises(UsageError) as error:
                _convert(source, tmp_path / "out", options(), resume=resume)
            assert str(error.value) == (
                f"{work.folder}: another conversion into the same output is at work. Wait for it, or choose another "
                "output."
            )
            assert part.read_bytes() == b"of the conversion that is at work"
    _convert(source, tmp_path / "out", options())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.safetensors", "out", "source"]


def test_bad_sources_leave_nothing_behind(model_folder: Any, options: Any, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = torch.nan
        tensors["model.layers.1.self_attn.v_proj.weight"][3, 7] = torch.inf

    with pytest.raises(SourceError) as error:
        _convert(model_folder(change=spoil), tmp_path / "out", options())
    assert len(error.value.problems) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.safetensors", "source"]


def test_text_needs_a_tokenizer(model_folder: Any, options: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the source has no usable tokenizer, so text cannot calibrate it"):
        _convert(model_folder(), tmp_path / "out", options(calibration="builtin"))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*bitnest-work"))


def test_rounding_alone_needs_no_calibration(model_folder: Any, tmp_path: Path) -> None:
    options = ConvertOptions(base="rtn", refinement="closed", calibration="/no/such/file", rotation="none")
    result = _convert(model_folder(), tmp_path / "out", options)
    assert result.manifest.calibration is None
    assert validate(tmp_path / "out", deep=True) == []


def test_one_repeated_token_ends_with_finite_codes(model_folder: Any, options: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"input_ids": torch.full((8, 64), 5)}, path)
    _convert(model_folder(), tmp_path / "out", options(calibration=str(path)))
    assert validate(tmp_path / "out", deep=True) == []


def test_hessian_that_cannot_be_inverted_is_reported_and_survives_a_resume(
    model_folder: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitnest_format.converters.quantize.inverse_factor", lambda hessian, damping: None)
    source = model_folder()
    with pytest.raises(KeyboardInterrupt):
        _convert(source, tmp_path / "out", options(), progress=_interrupt_at("quantizing layers", 1))
    result = _convert(source, tmp_path / "out", options(), resume=True)
    reported = [warning for warning in result.warnings if "could not be inverted" in warning]
    assert len(reported) == 1
    places, _, message = reported[0].partition(": ")
    assert message == "the Hessian could not be inverted; rounded to nearest instead"
    assert len(places.split("; ")) == 8
    assert places.split("; ")[1] == "model.layers.0.self_attn.o_proj"
    assert validate(tmp_path / "out", deep=True) == []


def test_layer_that_never_fires_is_rounded_to_nearest(model_folder: Any, options: Any, tmp_path: Path) -> None:
    def silence(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"].zero_()

    source = model_folder(change=silence)
    _convert(source, tmp_path / "out", options(rotation="none"))
    checkpoint = Checkpoint(tmp_path / "out")
    name = "model.layers.0.self_attn.o_proj"
    nested, weight = checkpoint.weight(name), _source_tensors(source)[f"{name}.weight"].float()
    assert torch.equal(nested.base_codes(), nesting.encode_base(weight, nested.scale))
    assert bool((nested.base_codes() != 0).any())
    silent = checkpoint.weight("model.layers.0.self_attn.v_proj")
    assert float(silent.dequantize("target").abs().max()) == 0


def test_scales_beyond_float16_are_stored_in_float32(model_folder: Any, options: Any, tmp_path: Path) -> None:
    def stretch(tensors: dict[str, Tensor]) -> None:
        weight = tensors["model.layers.1.mlp.down_proj.weight"]
        weight[0, :128] *= 1e6 / float(weight[0, :128].abs().max())
        weight[1, :128] *= 1e-7 / float(weight[1, :128].abs().max())

    _convert(model_folder(change=stretch), tmp_path / "out", options(rotation="none"))
    checkpoint = Checkpoint(tmp_path / "out")
    scale = checkpoint.weight("model.layers.1.mlp.down_proj").scale
    assert scale.dtype == torch.float32 and bool(torch.isfinite(scale).all())
    assert float(scale[0, 0]) > 65504 and 0 < float(scale[1, 0]) < 1e-7
    assert checkpoint.weight("model.layers.0.mlp.down_proj").scale.dtype == torch.float16
    assert validate(tmp_path / "out", deep=True) == []


def test_small_shards_hold_every_tensor_once(model_folder: Any, options: Any, tmp_path: Path) -> None:
    result = _convert(model_folder(), tmp_path / "out", options(shard_bytes=200_000))
    names = [name for name in result.manifest.files if name.endswith(".safetensors")]
    assert sum("base" in name for name in names) > 2 and sum("refinement" in name for name in names) > 2
    assert validate(tmp_path / "out", deep=True) == []


def test_source_config_is_carried_over(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source = model_folder(eos_token_id=[301, 302, 303], rope_theta=1e6, some_unknown_field={"kept": True})
    (source / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}', encoding="utf-8")
    _convert(source, tmp_path / "out", options())
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == [301, 302, 303] and config["some_unknown_field"] == {"kept": True}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["quantization_config"]["quant_method"] == "bitnest"
    assert _bytes(tmp_path / "out")["generation_config.json"] == (source / "generation_config.json").read_bytes()


def test_plan_fingerprint_depends_on_content_alone(model_folder: Any, options: Any, tmp_path: Path) -> None:
    result = _convert(model_folder("a"), tmp_path / "one", options())
    again = _convert(model_folder("b"), tmp_path / "two", options())
    other = _convert(model_folder("c", seed=9), tmp_path / "three", options())
    fingerprints = [r.manifest.source["fingerprint"] for r in (result, again, other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_short_calibration_is_reported(model_folder: Any, options: Any, tmp_path: Path) -> None:
    source = model_folder()
    short = _convert(source, tmp_path / "short", options(calibration_samples=9))
    assert "the calibration text fills 8 sequences of the 9 asked for" in short.warnings
    whole = _convert(source, tmp_path / "whole", options(calibration_samples=8))
    assert not [warning for warning in whole.warnings if "calibration" in warning]
