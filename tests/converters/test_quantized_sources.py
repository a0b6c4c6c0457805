"""GPTQ and compressed-tensors models as sources: their base planes kept exactly, their references checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.checkpoint import Checkpoint, NestedWeight
from bitnest_format.converters.base import Source, given_modules
from bitnest_format.converters.given_base import relative_residual, with_reference
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import ConversionResult, convert
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import SourceError, UsageError
from bitnest_format.validation import validate

PEERS = Path(__file__).parents[1] / "fixtures" / "peers"
LLAMA, QWEN2 = PEERS / "tiny-llama", PEERS / "tiny-qwen2"
GPTQ, ACT, ASYM = (PEERS / f"tiny-llama-gptq-g128{kind}" for kind in ("", "-act", "-asym"))
V2_ZEROS = PEERS / "tiny-llama-gptq-g128-v2"
BIASED = PEERS / "tiny-qwen2-gptq-g128"
COMPRESSED = PEERS / "tiny-llama-ct-w4a16-g128"
CONVERTIBLE = [(GPTQ, LLAMA), (ACT, LLAMA), (BIASED, QWEN2), (COMPRESSED, LLAMA)]
IDS = ["gptq", "act-order", "biases", "compressed-tensors"]

LAYER = "model.layers.0."
Q, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"
WAY_OUT = "The base plane is 4 bits, symmetric, one scale per group. Convert the original model instead."
STATED = "config.json: quantization_config"


@pytest.fixture
def options(tmp_path: Path) -> ConvertOptions:
    """Options that calibrate on 8 random sequences of 64 token ids."""
    path = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(0))}, path)
    return ConvertOptions(
        calibration=str(path), calibration_samples=8, sequence_length=64, base_sweeps=1, refinement_sweeps=1
    )


Copy = Callable[..., Path]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """`(folder, change=None, settings=None, name="source")` -> a copy of it.

    `change` edits the tensors in place. `settings` is what config.json says of the quantization, `quantize_config.json`
    is then left out; an empty one says nothing.
    """

    def copy(
        folder: Path,
        change: Callable[[dict[str, Tensor]], Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        name: str = "source",
    ) -> Path:
        target = tmp_path / name
        shutil.copytree(folder, target)
        if change is not None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        if settings is not None:
            (target / "quantize_config.json").unlink(missing_ok=True)
            edit_json(target / "config.json", lambda config: config.update(quantization_config=settings))
        return target

    return copy


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def pair(folder: Path, reference: Path | None) -> Source:
    source = open_source(folder)
    return source if reference is None else with_reference(source, open_source(reference))


def converted(folder: Path, reference: Path | None, output: Path, options: ConvertOptions) -> ConversionResult:
    result = convert(pair(folder, reference), output, options)
    assert validate(output, deep=True) == []
    return result


def problems_of(folder: Path, reference: Path | None = None) -> list[str]:
    """What opening and reading a source finds."""
    try:
        return pair(folder, reference).inspect().problems
    except SourceError as error:
        return error.problems


def dequantized(weight: NestedWeight, view: Any = "draft") -> Tensor:
    """A view's weight in the order of inputs."""
    stored = weight.dequantize(view)
    if weight.permutation is None:
        return stored
    return torch.empty_like(stored).index_copy_(1, weight.permutation.long(), stored)


def true_weight(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """What a packed module means, computed entry by entry as its own format says: float32 `[O, I]`."""
    if f"{module}.weight_packed" in tensors:
        words, scale = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"].float()
        nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=-1).flatten(1)
        return (nibbles - 8) * scale.repeat_interleave(nibbles.shape[1] // scale.shape[1], dim=1)
    words, scale = tensors[f"{module}.qweight"], tensors[f"{module}.scales"].float()
    nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=1).flatten(0, 1)
    return ((nibbles - 8) * scale[tensors[f"{module}.g_idx"].long()]).T


# --- what peers made


@pytest.mark.parametrize(("folder", "reference"), CONVERTIBLE, ids=IDS)
def test_base_planes_are_the_peers_exactly(
    folder: Path, reference: Path, tmp_path: Path, options: ConvertOptions
) -> None:
    result = converted(folder, reference, tmp_path / "out", options)
    tensors, originals = load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "out")
    assert len(result.manifest.modules) == 7
    for name, record in result.manifest.modules.items():
        weight = checkpoint.weight(name)
        if f"{name}.weight_packed" in tensors:
            assert torch.equal(weight.base, tensors[f"{name}.weight_packed"])
            assert torch.equal(weight.scale, tensors[f"{name}.weight_scale"])
        else:
            assert torch.equal(weight.scale, tensors[f"{name}.scales"].T)
            if weight.permutation is None:
                assert torch.equal(weight.base, tensors[f"{name}.qweight"].T)
        assert (weight.permutation is not None) == (folder == ACT)
        assert torch.equal(dequantized(weight), true_weight(tensors, name))
        original = originals[f"{name}.weight"].float()
        error = float((dequantized(weight, "target") - original).norm() / original.norm())
        assert record.target_error == pytest.approx(error, abs=2e-6)
        assert error < 0.7 * float(record.draft_error or 0)
    kept = {
        name for name in tensors if name.endswith((".bias", "norm.weight", "embed_tokens.weight", "lm_head.weight"))
    }
    assert kept == set(result.manifest.unquantized)
    for name in kept:
        assert torch.equal(checkpoint.tensor(name), tensors[name])


@pytest.mark.parametrize("folder", [GPTQ, ACT, BIASED], ids=["gptq", "act-order", "biases"])
def test_drafts_are_what_gptqmodel_dequantizes(folder: Path, tmp_path: Path, options: ConvertOptions) -> None:
    converted(folder, None, tmp_path / "out", options)
    checkpoint = Checkpoint(tmp_path / "out", "draft")
    expected = load_file(folder / "expected_dequantized.safetensors")
    assert len(expected) == 2
    for name, weight in expected.items():
        # It rounds through bfloat16.
        found = dequantized(checkpoint.weight(name.removesuffix(".weight")))
        torch.testing.assert_close(found, weight.float(), rtol=0, atol=2**-7 * float(weight.float().abs().max()))


@pytest.mark.parametrize("refinement", ["closed", "feedback"])
@pytest.mark.parametrize("folder", [GPTQ, ACT], ids=["gptq", "act-order"])
def test_feedback_lowers_the_output_error(
    folder: Path, refinement: Any, tmp_path: Path, options: ConvertOptions
) -> None:
    """Without calibration the refinement is the closed form of the base and the reference, column by column."""
    result = converted(folder, LLAMA, tmp_path / "out", replace(options, refinement=refinement))
    assert result.manifest.nesting["refine_method"] == refinement
    assert (result.manifest.calibration is None) == (refinement == "closed")
    weight = Checkpoint(tmp_path / "out").weight(DOWN)
    original = load_file(LLAMA / "model.safetensors")[f"{DOWN}.weight"].float()
    if weight.permutation is not None:
        original = original[:, weight.permutation.long()]
    assert weight.refinement is not None
    closed = nesting.encode_refinement(original, weight.base_codes(), weight.scale)
    assert torch.equal(packing.unpack(weight.refinement), closed) == (refinement == "closed")


def test_both_sources_stand_in_the_manifest(tmp_path: Path, options: ConvertOptions) -> None:
    source = with_reference(
        open_source(GPTQ, name="someone/tiny-gptq", revision="abc"),
        open_source(LLAMA, name="maker/tiny", revision="def"),
    )
    manifest = convert(source, tmp_path / "out", options).manifest
    assert manifest.source["kind"] == "gptq"
    assert (manifest.source["name"], manifest.source["revision"]) == ("someone/tiny-gptq", "abc")
    reference = manifest.source["reference"]
    assert reference["kind"] == "huggingface"
    assert (reference["name"], reference["revision"]) == ("maker/tiny", "def")
    assert manifest.source["fingerprint"] == open_source(GPTQ).inspect().fingerprint
    assert reference["fingerprint"] == open_source(LLAMA).inspect().fingerprint
    assert manifest.nesting == {
        "base_bits": 4,
        "refinement_bits": 4,
        "group_size": 128,
        "base_method": "given",
        "base_bound": None,
        "refine_method": "feedback",
        "damping": 0.01,
        "refinement_sweeps": 1,
    }
    assert manifest.rotation is None
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "bitnest"


@pytest.mark.parametrize(("folder", "reference"), CONVERTIBLE, ids=IDS)
def test_without_a_reference_there_is_a_draft_only(
    folder: Path, reference: Path, tmp_path: Path, options: ConvertOptions
) -> None:
    alone = converted(folder, None, tmp_path / "alone", options)
    assert alone.manifest.views == ("draft",)
    assert alone.manifest.nesting["refine_method"] is None
    assert not list((tmp_path / "alone").glob("bitnest-refinement-*"))
    assert alone.warnings[-1].startswith("draft only: ")
    whole = converted(folder, reference, tmp_path / "whole", options)
    base = "bitnest-base-00001-of-00001.safetensors"
    assert (tmp_path / "alone" / base).read_bytes() == (tmp_path / "whole" / base).read_bytes()
    planes = [{name: module.base for name, module in run.manifest.modules.items()} for run in (alone, whole)]
    assert planes[0] == planes[1]
    assert not any("draft only" in warning for warning in whole.warnings)


def test_asymmetric_models_are_refused() -> None:
    modules = ", ".join(f"{LAYER}self_attn.{kind}_proj" for kind in "qkv")
    assert problems_of(ASYM) == [
        f"{STATED}: sym is false, and zero points are stored as 4 to 9 in {modules} and 4 more: the model is "
        f"asymmetric, and codes less their zero points do not fit -8 to 7. {WAY_OUT}"
    ]


# --- zero points


@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("stored", [7, 8])
def test_zero_points_are_read_by_their_values(stored: int, label: str | None, copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        if stored == 8:
            tensors.update(load_file(V2_ZEROS / "model.safetensors"))
        assert int(tensors[f"{Q}.qzeros"][0, 0]) == {7: 2004318071, 8: -2004318072}[stored]

    settings = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq"}
    source = open_source(copied(GPTQ, change, settings | ({"checkpoint_format": label} if label else {})))
    assert source.inspect().problems == []
    plain = open_source(GPTQ)
    for module in given_modules(plain):
        found, expected = source.given_base(module), plain.given_base(module)  # type: ignore[attr-defined]
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)
    right = {7: "gptq", 8: "gptq_v2"}[stored]
    mislabelled = (label or "gptq") != right
    stated = f"labelled {label!r}" if label else "not labelled, which means 'gptq'"
    note = f"the model is {stated}, but its zero points are stored as {right!r}; they are read as that"
    assert (note in source.notes) == mislabelled


@pytest.mark.parametrize(
    ("settings", "values", "found"),
    [
        ({"sym": True}, (6, 7), "zero points are stored as 6 to 7 in"),
        ({"sym": True}, (7, 8), "zero points are stored as 7 to 8 in"),
        ({"sym": True}, (4, 4), "zero points are stored as 4 to 7 in"),
        ({"sym": False}, (2, 11), f"{STATED}: sym is false, and zero points are stored as 2 to 11 in"),
    ],
    ids=["mixture", "both-conventions", "another", "field-case"],
)
def test_other_zero_points_are_asymmetric(
    settings: dict[str, Any], values: tuple[int, int], found: str, copied: Copy
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        low, high = values
        word = sum((low if place % 2 else high) << (4 * place) for place in range(8))
        tensors[f"{Q}.qzeros"][:] = torch.tensor(word - (1 << 32) if word >> 31 else word, dtype=torch.int32)

    folder = copied(GPTQ, change, {"bits": 4, "group_size": 128, "quant_method": "gptq", **settings})
    (problem,) = problems_of(folder)
    assert problem == (
        f"{found} {Q}: the model is asymmetric, and codes less their zero points do not fit -8 to 7. {WAY_OUT}"
    )


def test_symmetric_zeros_of_a_model_that_is_not_labelled_so(copied: Copy) -> None:
    """With sym false the label decides: 8 is zero 8 in v2, and zero 9 in v1."""
    settings = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"}

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update(load_file(V2_ZEROS / "model.safetensors"))

    assert problems_of(copied(GPTQ, change, settings)) == []
    (problem,) = problems_of(copied(GPTQ, change, settings | {"checkpoint_format": "gptq"}, name="v1"))
    assert problem.startswith(f"{STATED}: sym is false, and zero points are stored as 8 to 8 in")


def test_unpacked_zero_points_are_asymmetric(copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.qzeros"] = torch.full_like(tensors[f"{Q}.scales"], 3)

    assert problems_of(copied(GPTQ, change)) == [
        f"{Q}: qzeros are not packed (F16), as asymmetric exporters store them. {WAY_OUT}"
    ]


# --- order of columns, groups, scales


def test_scales_follow_the_group_of_each_column(copied: Copy, tmp_path: Path, options: ConvertOptions) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.cat([torch.zeros(128), torch.ones(128)])[torch.randperm(256, generator=generator)].int()

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.g_idx"] = groups
        tensors[f"{Q}.scales"][:] = torch.tensor([[0.01], [1.0]])

    folder = copied(GPTQ, change)
    converted(folder, None, tmp_path / "out", options)
    checkpoint = Checkpoint(tmp_path / "out", "draft")
    weight = checkpoint.weight(Q)
    assert weight.permutation is not None
    assert weight.permutation.tolist() == sorted(range(256), key=lambda column: int(groups[column]))
    assert torch.equal(dequantized(weight), true_weight(load_file(folder / "model.safetensors"), Q))
    assert checkpoint.manifest.required_features == ("input_permutation",)
    assert checkpoint.weight(DOWN).permutation is None


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0] * 127 + [1] * 129, "its groups have 127 to 129 inputs, expected 128 each"),
        ([0] * 128 + [2] * 128, "names groups 0 to 2, expected 0 to 1"),
        ([-1] * 128 + [1] * 128, "names groups -1 to 1, expected 0 to 1"),
    ],
    ids=["uneven", "too-high", "negative"],
)
def test_orders_that_are_none(values: list[int], found: str, copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.g_idx"] = torch.tensor(values, dtype=torch.int32)

    assert problems_of(copied(GPTQ, change)) == [f"{Q}.g_idx: {found}"]


def test_missing_order(copied: Copy) -> None:
    settings = {"bits": 4, "group_size": 128, "quant_method": "gptq", "desc_act": True}
    assert problems_of(copied(GPTQ, lambda tensors: tensors.pop(f"{Q}.g_idx"), settings)) == [
        f"{Q}: no g_idx, though desc_act is true. The source is incomplete: download it again."
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("folder", [GPTQ, COMPRESSED], ids=["gptq", "compressed-tensors"])
def test_scales_of_any_type_are_exact(
    folder: Path, dtype: torch.dtype, copied: Copy, tmp_path: Path, options: ConvertOptions
) -> None:
    scales = "weight_scale" if folder == COMPRESSED else "scales"

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(scales)]:
            tensors[name] = tensors[name].to(dtype)

    source = copied(folder, change)
    converted(source, None, tmp_path / "out", options)
    weight = Checkpoint(tmp_path / "out", "draft").weight(DOWN)
    assert weight.scale.dtype == (torch.float16 if dtype == torch.float16 else torch.float32)
    assert torch.equal(dequantized(weight), true_weight(load_file(source / "model.safetensors"), DOWN))


def test_zero_scales_are_groups_of_zeros(copied: Copy, tmp_path: Path, options: ConvertOptions) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.scales"][1, 3] = 0

    result = converted(copied(GPTQ, change), None, tmp_path / "out", options)
    assert f"groups whose scale is zero become groups of zeros: {Q}" in result.warnings
    weight = Checkpoint(tmp_path / "out", "draft").weight(Q)
    assert int(weight.base_codes()[3, 128:].count_nonzero()) == 0
    assert float(weight.scale[3, 1]) == 2**-14
    assert torch.equal(weight.base_codes()[4:], Checkpoint(tmp_path / "out", "draft").weight(Q).base_codes()[4:])


@pytest.mark.parametrize(
    ("value", "found"), [(-0.5, "negative"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
def test_scales_that_are_no_scales(value: float, found: str, copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.scales"][0, :2] = value

    assert problems_of(copied(GPTQ, change)) == [
        f"scales that are {found}, with their numbers: {Q}.scales (2). Expected finite scales above zero. The source "
        "is damaged: quantize the original model again."
    ]


@pytest.mark.parametrize("groups", [8, 1], ids=["groups-of-32", "one-per-row"])
def test_other_group_sizes(groups: int, copied: Copy, tmp_path: Path, options: ConvertOptions) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            inputs = 8 * tensors[f"{name}.qweight"].shape[0]
            count = groups * inputs // 256 if groups > 1 else 1
            scales, zeros = tensors[f"{name}.scales"], tensors[f"{name}.qzeros"]
            tensors[f"{name}.scales"] = scales[:1] * torch.linspace(1, 2, count).half().unsqueeze(1)
            tensors[f"{name}.qzeros"] = zeros[:1].repeat(count, 1)
            tensors[f"{name}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // (inputs // count)

    size = 32 if groups > 1 else -1
    folder = copied(GPTQ, change, {"bits": 4, "group_size": size, "quant_method": "gptq"})
    result = converted(folder, None, tmp_path / "out", options)
    assert {module.group_size for module in result.manifest.modules.values()} == ({32} if groups > 1 else {256, 512})
    weight = Checkpoint(tmp_path / "out", "draft").weight(DOWN)
    assert torch.equal(dequantized(weight), true_weight(load_file(folder / "model.safetensors"), DOWN))


# --- what folders say


def test_settings_lie_in_either_file_or_in_none(copied: Copy, tmp_path: Path, options: ConvertOptions) -> None:
    both = copied(GPTQ, name="both")
    config_only = copied(GPTQ, name="config-only")
    (config_only / "quantize_config.json").unlink()
    file_only = copied(GPTQ, name="file-only")
    neither = copied(GPTQ, name="neither", settings={})
    for folder in (file_only, neither):
        edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
        (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
        (folder / "expected_dequantized.safetensors").unlink()
    found = [
        converted(folder, None, tmp_path / f"out-{folder.name}", options)
        for folder in (both, config_only, file_only, neither)
    ]
    assert len({json.dumps(result.manifest.to_dict()["modules"]) for result in found}) == 1
    note = (
        "nothing states how the model was quantized (no quantization_config in config.json, no quantize_config.json); "
        "by the shapes it is GPTQ with 4 bits and groups of 128 inputs"
    )
    assert [note in result.warnings for result in found] == [False, False, False, True]


def test_files_that_disagree(copied: Copy) -> None:
    folder = copied(GPTQ)
    edit_json(folder / "quantize_config.json", lambda data: data.update(group_size=64, desc_act=True))
    assert problems_of(folder) == [
        f"group_size is 128 in {STATED} but 64 in quantize_config.json. Correct the one that is wrong, or remove that "
        "file.",
        f"desc_act is False in {STATED} but True in quantize_config.json. Correct the one that is wrong, or remove "
        "that file.",
    ]


def test_stated_groups_that_the_scales_do_not_have(copied: Copy) -> None:
    folder = copied(GPTQ, settings={"bits": 4, "group_size": 64, "quant_method": "gptq"})
    (one, other) = problems_of(folder)
    assert other == (
        f"{DOWN}: 512 inputs, 4 rows of scales and groups of 64 ({STATED}): groups have to divide the inputs and be "
        "multiples of 8. Convert the original model instead."
    )
    assert one.startswith(f"{Q}, ")


MARLIN = (
    f"{STATED}: the weights are packed for Marlin kernels, whose order is not GPTQ's. Give a GPTQ copy that was not "
    "repacked, or the original model."
)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bits": 3}, f"{STATED}: bits is 3, expected 4. {WAY_OUT}"),
        ({"bits": 8}, f"{STATED}: bits is 8, expected 4. {WAY_OUT}"),
        ({"w_bit": 2}, f"{STATED}: bits is 2, expected 4. {WAY_OUT}"),
        ({"checkpoint_format": "marlin"}, MARLIN),
        ({"is_marlin_format": True}, MARLIN),
        (
            {"format": "gptq_p"},
            f"{STATED}: the format is 'gptq_p', expected 'gptq' or 'gptq_v2'. Give a GPTQ copy of that kind, or the "
            "original model.",
        ),
        (
            {"rotation": "hadamard"},
            f"{STATED}: rotation is 'hadamard': the model was rotated before it was quantized, with a Hadamard matrix "
            "that has to be applied while it runs, and the rotation is not stored. Quantize without it, or convert the "
            "original model, which rotates by itself.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_gptq_of_other_kinds_is_refused(settings: dict[str, Any], problem: str, copied: Copy) -> None:
    assert problems_of(copied(GPTQ, settings={"quant_method": "gptq", **settings})) == [problem]


def test_dynamic_rules_show_in_the_tensors(copied: Copy, tmp_path: Path, options: ConvertOptions) -> None:
    """A module that a rule leaves out has its plain weight, and stays as it is."""

    def change(tensors: dict[str, Tensor]) -> None:
        for kind in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{DOWN}.{kind}"]
        tensors[f"{DOWN}.weight"] = load_file(LLAMA / "model.safetensors")[f"{DOWN}.weight"]

    settings = {"bits": 4, "group_size": 128, "quant_method": "gptq", "dynamic": {"-:.*down_proj": {}}}
    result = converted(copied(GPTQ, change, settings), LLAMA, tmp_path / "out", options)
    assert DOWN not in result.manifest.modules and len(result.manifest.modules) == 6
    stored = Checkpoint(tmp_path / "out").tensor(f"{DOWN}.weight")
    assert torch.equal(stored, load_file(LLAMA / "model.safetensors")[f"{DOWN}.weight"])


def test_mixed_bits_are_refused_by_name(copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.qweight"] = torch.cat([tensors[f"{DOWN}.qweight"]] * 2)
        tensors[f"{Q}.qweight"] = tensors[f"{Q}.qweight"][:24]

    settings = {"bits": 4, "group_size": 128, "quant_method": "gptq", "dynamic": {".*down_proj": {"bits": 8}}}
    assert problems_of(copied(GPTQ, change, settings)) == [
        f"{Q}: 3 bits beside modules of 4 bits (mixed precision). {WAY_OUT}",
        f"{DOWN}: 8 bits beside modules of 4 bits (mixed precision). {WAY_OUT}",
    ]


def test_awq_packing_under_a_gptq_label(copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.qweight"] = torch.zeros(256, 32, dtype=torch.int32)

    assert problems_of(copied(GPTQ, change)) == [
        f"{Q}: qweight is I32 [256, 32] for 256 inputs and 256 outputs: AWQ's order. Expected GPTQ's words of 4-bit "
        "codes, I32 [inputs / 8, outputs]. Give a GPTQ copy that is not repacked, or the original model."
    ]


def test_incomplete_modules_are_listed_together(copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for module in (Q, DOWN):
            del tensors[f"{module}.scales"], tensors[f"{module}.qzeros"]

    assert problems_of(copied(GPTQ, change)) == [
        f"{Q}, {DOWN}: no qzeros and no scales. The source is incomplete: download it again."
    ]


def test_biases_of_zeros_are_left_out(copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.bias"] = torch.zeros(256, dtype=torch.float16)

    folder = copied(GPTQ, change)
    source = open_source(folder)
    assert source.inspect().problems == []
    assert f"biases of zeros that the model does not have are left out: {DOWN}.bias" in source.notes
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.bias"][3] = 1
    save_file(tensors, folder / "model.safetensors")
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{DOWN}.bias: not part of a llama model as config.json describes it")


# --- compressed-tensors


def scheme(**weights: Any) -> dict[str, Any]:
    settings = json.loads((COMPRESSED / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    settings["config_groups"]["group_0"]["weights"].update(weights)
    return dict(settings)


GROUP = f"{STATED}: config_groups.group_0"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (scheme(num_bits=8), f"{GROUP}: num_bits is 8, expected 4. {WAY_OUT}"),
        (scheme(symmetric=False), f"{GROUP}: symmetric is False, expected True. {WAY_OUT}"),
        (
            {
                **scheme(num_bits=8),
                "config_groups": {"group_0": {"format": "int-quantized", "weights": {"num_bits": 8}}},
            },
            f"{GROUP}: format is 'int-quantized', expected 'pack-quantized'; num_bits is 8, expected 4. {WAY_OUT}",
        ),
        (
            {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": {"type": "float"}}}},
            f"{GROUP}: format is 'nvfp4-pack-quantized', expected 'pack-quantized'; type is 'float', expected 'int'. "
            f"{WAY_OUT}",
        ),
        (
            {**scheme(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            f"{STATED}: sparsity_config.format is 'sparse-24-bitmask'; sparse weights are not read. Give the dense "
            "model.",
        ),
        (
            {
                **scheme(),
                "transform_config": {
                    "config_groups": {
                        "R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]},
                        "R4": {"apply": [{"location": "input"}, {"location": "weight_input"}]},
                    }
                },
            },
            f"{STATED}: transform_config applies R4 (input) while the model runs, which a checkpoint of this format "
            "does not. Convert the original model instead, which rotates by itself.",
        ),
    ],
    ids=["w8", "asymmetric", "int-quantized", "nvfp4", "sparse", "online-transform"],
)
def test_compressed_tensors_of_other_kinds_are_refused(settings: dict[str, Any], problem: str, copied: Copy) -> None:
    settings = {"quant_method": "compressed-tensors", **settings}
    assert problems_of(copied(COMPRESSED, settings=settings)) == [problem]


def test_folded_transforms_are_noted(copied: Copy) -> None:
    transform = {"config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}}
    source = open_source(copied(COMPRESSED, settings={**scheme(), "transform_config": transform}))
    assert source.notes[0] == (
        "the source was rotated before it was quantized (R1, folded into the weights); a reference has to be rotated "
        "alike"
    )


def _zero_point(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.weight_zero_point"] = torch.zeros(32, 2, dtype=torch.int32)


def _eight_bits(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.weight_packed"] = torch.zeros(256, 64, dtype=torch.int32)


def _another_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.weight_shape"] = torch.tensor([256, 255])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_zero_point, f"{Q}: stores weight_zero_point: the model is asymmetric. {WAY_OUT}"),
        (
            _eight_bits,
            f"{Q}: weight_packed is I32 [256, 64], codes of 8 bits, expected I32 [256, 32] of 4-bit codes. {WAY_OUT}",
        ),
        (_another_shape, f"{Q}.weight_shape: is [256, 255], expected [256, 256]"),
    ],
    ids=["zero-point", "bits", "shape"],
)
def test_packed_tensors_that_contradict_the_format(change: Any, problem: str, copied: Copy) -> None:
    assert problems_of(copied(COMPRESSED, change)) == [problem]


@pytest.mark.parametrize("unused", [False, True], ids=["scattered", "filled-with-minus-one"])
def test_activation_order_of_compressed_tensors(
    unused: bool, copied: Copy, tmp_path: Path, options: ConvertOptions
) -> None:
    order = torch.arange(256, dtype=torch.int32) % 2

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight_g_idx"] = torch.full_like(order, -1) if unused else order

    folder = copied(COMPRESSED, change)
    converted(folder, None, tmp_path / "out", options)
    weight = Checkpoint(tmp_path / "out", "draft").weight(Q)
    tensors = load_file(folder / "model.safetensors")
    expected = true_weight(tensors, Q)
    if not unused:
        scale = tensors[f"{Q}.weight_scale"].float()
        expected = (packing.unpack(tensors[f"{Q}.weight_packed"]).float()) * scale[:, order.long()]
    assert (weight.permutation is None) == unused
    assert torch.equal(dequantized(weight), expected)


# --- references


def _shift_layer(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    for name in (f"{Q}.weight", f"{DOWN}.weight"):
        tensors[name] = (torch.randn(tensors[name].shape, generator=generator) * tensors[name].float().std()).half()


def test_wrong_references_are_found_before_work(copied: Copy, tmp_path: Path, options: ConvertOptions) -> None:
    wrong = copied(LLAMA, _shift_layer, name="wrong")
    with pytest.raises(SourceError) as caught:
        convert(pair(GPTQ, wrong), tmp_path / "out", options)
    assert str(caught.value) == (
        f"--reference: the weights of {wrong} are not those that {GPTQ} was quantized from: relative distances to the "
        f"base of {Q} (1.41), {DOWN} (1.41), expected at most 0.6; another model, another revision, or weights that "
        "were rotated first. Give the model that was quantized, or leave --reference out for a draft-only checkpoint."
    )
    assert not list(tmp_path.glob("*out*"))


def test_rotated_references_are_found(copied: Copy) -> None:
    rotation, _ = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("q_proj.weight", "up_proj.weight"))]:
            tensors[name] = (tensors[name].float() @ rotation).half()

    (problem,) = problems_of(GPTQ, copied(LLAMA, change, name="rotated"))
    assert "relative distances to the base of" in problem
    assert f"{Q} (1.4" in problem and f"{LAYER}mlp.up_proj (1.4" in problem
    assert DOWN not in problem


def test_other_revisions_are_known_by_their_norms(copied: Copy) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][:64] *= 1.05
        tensors["model.embed_tokens.weight"] *= 1.001

    wrong = copied(LLAMA, change, name="wrong")
    assert problems_of(GPTQ, wrong) == [
        f"--reference: {wrong} is another model than {GPTQ} was made from: both store model.norm.weight (25.0% of its "
        "values), and they differ by more than rounding. Give the revision that was quantized."
    ]


def test_references_of_another_architecture() -> None:
    first, second = problems_of(BIASED, LLAMA)
    assert first == (
        "--reference: config.json of the quantized model and of the reference describe different models: model_type "
        "qwen2 and llama, attention_bias True and False. Give the model that was quantized."
    )
    assert second.startswith(f"--reference: {LLAMA} lacks {LAYER}self_attn.q_proj.bias, ")


def test_references_are_for_quantized_models_alone() -> None:
    with pytest.raises(UsageError) as usage:
        pair(LLAMA, LLAMA)
    assert str(usage.value) == (
        f"--reference: {LLAMA} is not quantized; a reference is for GPTQ and compressed-tensors models. Leave it out."
    )
    assert problems_of(GPTQ, ACT) == [
        f"--reference: {ACT} is quantized itself, expected the full-precision model that {GPTQ} was made from"
    ]


def test_residual_of_the_right_weights_and_of_others() -> None:
    source, reference = open_source(ACT), open_source(LLAMA)
    base = source.given_base(DOWN)  # type: ignore[attr-defined]
    weight = reference.read(f"{DOWN}.weight")
    expected = true_weight(load_file(ACT / "model.safetensors"), DOWN)
    distance = float((weight.float() - expected).norm() / expected.norm())
    assert relative_residual(weight, base) == pytest.approx(distance, rel=1e-5)
    assert distance < 0.2
    assert relative_residual(weight.flip(0), base) > 1.3
    assert relative_residual(torch.zeros_like(weight), base) == 1.0


# --- options, the head, going on


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rotation": "random"},
            "--rotation random: the base planes are the source's own, and a rotation would change them. Leave it "
            "out, or convert the full-precision model.",
        ),
        (
            {"group_size": 64},
            "--group-size 64: the base planes are the source's own, with its groups. Leave it out.",
        ),
        (
            {"quantize_lm_head": True},
            "--quantize-lm-head: the source's lm_head is not quantized, and without --reference only a draft of what "
            "is quantized can be made. Leave it out, or give the reference.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_a_given_base_excludes(
    changes: dict[str, Any], problem: str, tmp_path: Path, options: ConvertOptions
) -> None:
    with pytest.raises(SourceError) as caught:
        convert(open_source(BIASED), tmp_path / "out", replace(options, **changes))
    assert caught.value.problems == [problem]


def _quantize_head(tensors: dict[str, Tensor]) -> None:
    """The head by rounding, as GPTQ stores it."""
    weight = tensors.pop("lm_head.weight").float()
    scale = nesting.round_scale(nesting.group_max_abs(weight, 128) / 7, torch.float16)
    tensors["lm_head.qweight"] = packing.pack(nesting.encode_base(weight, scale)).T.contiguous()
    tensors["lm_head.scales"] = scale.half().T.contiguous()
    tensors["lm_head.qzeros"] = torch.full((2, 8), 0x77777777, dtype=torch.int32)
    tensors["lm_head.g_idx"] = torch.arange(256, dtype=torch.int32) // 128


@pytest.mark.parametrize("reference", [None, QWEN2], ids=["alone", "with-reference"])
def test_quantized_heads_are_nested(
    reference: Path | None, copied: Copy, tmp_path: Path, options: ConvertOptions
) -> None:
    folder = copied(BIASED, _quantize_head)
    result = converted(folder, reference, tmp_path / "out", options)
    assert "lm_head" in result.manifest.modules
    assert "lm_head.weight" not in result.manifest.unquantized
    tensors = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "out", "target" if reference else "draft")
    assert torch.equal(dequantized(checkpoint.weight("lm_head")), true_weight(tensors, "lm_head"))
    assert result.manifest.nesting["base_method"] == "given"
    record = result.manifest.modules["lm_head"]
    if reference:
        assert (record.target_error or 1) < (record.draft_error or 0) / 5


def test_plain_heads_can_be_nested_beside_given_planes(tmp_path: Path, options: ConvertOptions) -> None:
    result = converted(BIASED, QWEN2, tmp_path / "out", replace(options, quantize_lm_head=True))
    assert result.manifest.nesting["base_method"] == "given; lm_head: gptq"
    assert len(result.manifest.modules) == 8


def test_resuming_gives_the_same_bytes(tmp_path: Path, options: ConvertOptions) -> None:
    whole = converted(ACT, LLAMA, tmp_path / "whole", options)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "writing the checkpoint":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(pair(ACT, LLAMA), tmp_path / "out", options, progress=stop)
    with pytest.raises(SourceError, match="reference was"):
        convert(pair(ACT, None), tmp_path / "out", options, resume=True)
    result = convert(pair(ACT, LLAMA), tmp_path / "out", options, resume=True)
    assert result.manifest.to_dict() == whole.manifest.to_dict()
