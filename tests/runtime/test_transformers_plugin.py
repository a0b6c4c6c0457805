"""Nested checkpoints in transformers: the numbers of our own runtime, two views of one set of tensors, refusals."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

import bitnest_format.transformers
from bitnest_format import nesting, packing
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.errors import CheckpointError, UnsupportedModelError, UnsupportedVersionError, UsageError
from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.kernels.reference_linear import nested_linear, prepare_linear
from bitnest_format.runtime.hf_linear import NestedLinear
from bitnest_format.transformers import draft_config

Make = Callable[..., Path]
BASE, REFINEMENT = (f"bitnest-{family}-00001-of-00001.safetensors" for family in ("base", "refinement"))
INDEXES = {"target": "bitnest.safetensors.index.json", "draft": "bitnest-draft.safetensors.index.json"}
VIEWS = ("draft", "target")
PROMPT = torch.randint(3, 320, (1, 24), generator=torch.Generator().manual_seed(0))


def load(folder: Path | str, view: str = "target", **options: Any) -> Any:
    """The documented ways, in float32 unless a test says otherwise."""
    options = {"dtype": torch.float32, **options}
    if view == "draft":
        options["config"] = draft_config(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model: Any, ids: Tensor = PROMPT) -> Tensor:
    return model(ids).logits[0]


@torch.no_grad()
def written(model: Any, **options: Any) -> list[int]:
    """48 tokens, greedy."""
    ones = torch.ones_like(PROMPT)
    return model.generate(PROMPT, attention_mask=ones, max_new_tokens=48, do_sample=False, **options)[0].tolist()


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint(tmp_path / "model", eos_token_id=None)


# -- the layer


def random_layer(outputs: int, inputs: int, group: int, dtype: torch.dtype, *, bias: bool, permuted: bool) -> Any:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    scale = nesting.round_scale(nesting.group_max_abs(weight, group) / 7, dtype)
    base = nesting.encode_base(weight, scale)
    return {
        "weight_packed": packing.pack(base),
        "weight_scale": scale.to(dtype),
        "weight_refinement": packing.pack(nesting.encode_refinement(weight, base, scale)),
        "bias": torch.randn(outputs, generator=generator).bfloat16() if bias else None,
        "weight_perm": torch.randperm(inputs, generator=generator).int() if permuted else None,
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "outputs, inputs, group, dtype, bias, permuted",
    [
        (64, 256, 128, torch.float16, False, False),
        (24, 96, 32, torch.float32, True, False),
        (7, 2048, 2048, torch.float16, True, True),
        (1, 8, 8, torch.float32, False, True),
    ],
)
def test_a_layer_is_the_reference_product_bit_for_bit(
    view: Any, outputs: int, inputs: int, group: int, dtype: torch.dtype, bias: bool, permuted: bool
) -> None:
    tensors = random_layer(outputs, inputs, group, dtype, bias=bias, permuted=permuted)
    layer = NestedLinear(view, **tensors)
    x = torch.randn(2, 5, inputs, generator=torch.Generator().manual_seed(3))
    weight = prepare_linear(*tensors.values(), views=(view,), unpack="load")  # type: ignore[call-overload]
    for dtype_of_x in (torch.float32, torch.bfloat16, torch.float16):
        rows = x.to(dtype_of_x)
        expected = nested_linear(*quantize_activation(rows.float().view(10, inputs)), weight, view)
        assert torch.equal(layer(rows), expected.to(dtype_of_x).view(2, 5, outputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            layer(x), nested_linear(*quantize_activation(x.view(10, inputs)), weight, view).view(2, 5, -1)
        )


def test_a_layer_takes_no_rows() -> None:
    tensors = random_layer(8, 32, 32, torch.float16, bias=True, permuted=False)
    assert NestedLinear("target", **tensors)(torch.zeros(2, 0, 32)).shape == (2, 0, 8)


# -- whole models


def leave_unquantized(folder: Path, name: str) -> None:
    """Store the target weight of a module as it is, in place of its planes."""
    weight = Checkpoint(folder).weight(name).dequantize("target")
    planes = {f"{name}.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_refinement")}
    for file in (BASE, REFINEMENT):
        tensors = {key: tensor for key, tensor in load_file(folder / file).items() if key not in planes}
        save_file(tensors | ({f"{name}.weight": weight} if file == BASE else {}), folder / file, {"format": "pt"})
    for index in INDEXES.values():
        edit_json(folder / index, lambda data: [data["weight_map"].pop(plane, None) for plane in planes])
        edit_json(folder / index, lambda data: data["weight_map"].update({f"{name}.weight": BASE}))
    edit_json(folder / "bitnest.json", lambda data: data["modules"].pop(name))
    edit_json(folder / "bitnest.json", lambda data: data["unquantized"].append(f"{name}.weight"))


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "scale_type": torch.float32},
        {"model_type": "mistral", "nested_head": True},
        {"model_type": "qwen2", "tied": True, "group_size": -1},
        {"model_type": "gemma"},
        {"model_type": "gemma2", "tied": True},
        {"model_type": "gemma3_text"},
        {"model_type": "qwen3", "intermediate_size": 480, "plain": "model.layers.0.self_attn.o_proj"},
    ],
    ids=[
        "llama",
        "biases and float32 scales",
        "nested head",
        "tied, a group a row",
        "gemma",
        "gemma 2",
        "gemma 3",
        "mixed groups, a plain layer",
    ],
)
def test_logits_are_those_of_our_own_runtime(
    settings: dict[str, Any], tmp_path: Path, tiny_checkpoint: Make, runtime_logits: Callable[..., Tensor]
) -> None:
    plain = settings.pop("plain", None)
    folder = tiny_checkpoint(tmp_path / "model", **settings)
    if plain is not None:
        leave_unquantized(folder, plain)
    groups = {module.group_size for module in Checkpoint(folder).manifest.modules.values()}
    assert (len(groups) > 1) == (settings.get("intermediate_size") == 480 or settings.get("group_size") == -1)
    model = load(folder)
    draft, ours = model.draft_view(), {view: runtime_logits(folder, PROMPT[0], view) for view in VIEWS}
    apart = (ours["target"] - ours["draft"]).abs().max()
    for view, found in (("target", logits(model)), ("draft", logits(draft))):
        # Where a last bit turns one INT8 code, a logit moves by about a hundredth of what parts the views.
        torch.testing.assert_close(found, ours[view], rtol=0, atol=float(apart) / 50)
        assert (found - ours[view]).abs().median() < 1e-5
    assert torch.equal(logits(load(folder, "draft")), logits(draft))


def test_permuted_columns_change_nothing(tmp_path: Path, tiny_checkpoint: Make) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", group_size=-1)
    permuted = Path(shutil.copytree(plain, tmp_path / "permuted"))
    name = "model.layers.1.mlp.down_proj"
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    for file, suffix in ((BASE, "weight_packed"), (REFINEMENT, "weight_refinement")):
        tensors = load_file(permuted / file)
        tensors[f"{name}.{suffix}"] = packing.pack(packing.unpack(tensors[f"{name}.{suffix}"])[:, order])
        save_file(tensors | ({f"{name}.weight_perm": order.int()} if file == BASE else {}), permuted / file)
    for index in INDEXES.values():
        edit_json(permuted / index, lambda data: data["weight_map"].update({f"{name}.weight_perm": BASE}))

    def declare(manifest: Any) -> None:
        manifest["required_features"] = ["input_permutation"]
        manifest["modules"][name]["permutation"] = f"{name}.weight_perm"

    edit_json(permuted / "bitnest.json", declare)
    for view in VIEWS:
        assert torch.equal(logits(load(plain, view)), logits(load(permuted, view)))


# -- two views of one set of tensors


def storages(*models: Any) -> dict[int, int]:
    """Bytes of every piece of memory that parameters lie in, by its address."""
    found = [tensor.untyped_storage() for model in models for tensor in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def test_both_views_share_every_byte(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    draft = model.draft_view()
    tensors = dict(model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in draft.named_parameters()} == {
        name: tensor.data_ptr() for name, tensor in tensors.items()
    }
    stored = json.loads((folder / INDEXES["target"]).read_text(encoding="utf-8"))["metadata"]["total_size"]
    assert sum(tensor.nbytes for tensor in tensors.values()) == stored
    assert storages(model, draft) == storages(model)
    assert {layer.view for layer in model.modules() if isinstance(layer, NestedLinear)} == {"target"}
    assert {layer.view for layer in draft.modules() if isinstance(layer, NestedLinear)} == {"draft"}
    assert draft.draft_view() is not draft
    assert torch.equal(logits(draft.draft_view()), logits(draft))


def test_moving_one_view_moves_the_other(folder: Path) -> None:
    model = load(folder)
    draft = model.draft_view()
    draft.to("meta")
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


@pytest.mark.parametrize("settings", [{}, {"nested_head": True}, {"model_type": "qwen2", "tied": True}])
def test_speculative_text_is_that_of_the_target(settings: Any, tmp_path: Path, tiny_checkpoint: Make) -> None:
    model = load(tiny_checkpoint(tmp_path / "model", eos_token_id=None, **settings))
    settings_before = model.generation_config.to_dict()
    draft = model.draft_view()
    assert draft.generation_config.num_assistant_tokens == 4
    rows: list[int] = []
    hook = model.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[1]))
    plain = written(model)
    assert len(plain) == PROMPT.shape[1] + 48
    passes = len(rows)
    assert written(model, assistant_model=draft) == plain
    assert passes == 48 > len(rows) - passes
    assert max(rows) == 5
    hook.remove()
    assert written(draft) != plain
    assert model.generation_config.to_dict() == settings_before


@pytest.mark.parametrize("settings", [{}, {"model_type": "gemma2"}], ids=["llama", "gemma 2"])
def test_a_verification_computes_the_bits_of_single_tokens(
    settings: dict[str, Any], tmp_path: Path, tiny_checkpoint: Make
) -> None:
    """The head is nested too, so not even its sums depend on the number of rows. Gemma 2 caps attention's scores."""
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None, nested_head=True, num_hidden_layers=4, **settings)
    model = load(folder, attn_implementation="bitnest")
    options = {"max_new_tokens": 48, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(PROMPT)
    plain = model.generate(PROMPT, attention_mask=mask, **options)
    speculative = model.generate(PROMPT, attention_mask=mask, assistant_model=model.draft_view(), **options)
    assert torch.equal(plain.sequences, speculative.sequences)
    for one, other in zip(plain.logits, speculative.logits, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(logits(model), logits(load(folder, attn_implementation="eager")), rtol=0, atol=0.02)


# -- what is read


def test_the_draft_view_reads_base_shards_alone(folder: Path) -> None:
    expected = logits(load(folder, "draft"))
    (folder / REFINEMENT).write_bytes(b"not a shard")
    assert torch.equal(logits(load(folder, "draft")), expected)
    (folder / REFINEMENT).unlink()
    (folder / INDEXES["target"]).unlink()
    draft = load(folder, "draft")
    assert torch.equal(logits(draft), expected)
    assert not [name for name, _ in draft.named_parameters() if name.endswith("weight_refinement")]


@pytest.mark.parametrize("draft", [True, False])
def test_a_view_is_fetched_by_its_repository_id(draft: bool, folder: Path, hub_server: Any, tmp_path: Path) -> None:
    first = hub_server.create("me/model", folder)
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "hub"), "dtype": torch.float32}
    if draft:
        options["config"] = draft_config("me/model", cache_dir=options["cache_dir"])
    found = logits(AutoModelForCausalLM.from_pretrained("me/model", **options))
    assert torch.equal(found, logits(load(folder, "draft" if draft else "target")))
    assert hub_server.sent(REFINEMENT) == (0 if draft else (folder / REFINEMENT).stat().st_size)
    (snapshot,) = (tmp_path / "hub" / "models--me--model" / "snapshots").iterdir()
    assert snapshot.name == first
    assert (snapshot / "bitnest.json").read_bytes() == (folder / "bitnest.json").read_bytes()


def test_a_repository_without_manifest_is_refused(folder: Path, hub_server: Any, tmp_path: Path) -> None:
    (folder / "bitnest.json").unlink()
    hub_server.create("me/model", folder)
    with pytest.raises(CheckpointError) as error:
        AutoModelForCausalLM.from_pretrained("me/model", cache_dir=str(tmp_path / "hub"))
    assert str(error.value) == (
        "me/model: bitnest.json cannot be had, so it is no nested checkpoint, or its push did not come to its end. "
        "Where access needs a token, log in ('hf auth login', or HF_TOKEN): the argument token does not reach here."
    )


# -- types and devices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_stay_exact_whatever_is_computed_in(dtype: torch.dtype, folder: Path) -> None:
    stored = {name: tensor for name, tensor in load_file(folder / BASE).items() if name.endswith("weight_scale")}
    for model in (load(folder, dtype=dtype), load(folder).to(dtype)):
        assert model.dtype == logits(model).dtype == dtype
        for name, scale in stored.items():
            found = model.get_parameter(name)
            assert found.dtype == scale.dtype == torch.float16
            assert torch.equal(found, scale)
    torch.testing.assert_close(logits(model).float(), logits(load(folder)), rtol=0, atol=0.3)


def test_without_a_type_in_the_config_floats_are_float32(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.pop("torch_dtype"))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


def places(second_layer: str) -> dict[str, str]:
    """A device map that has the second of two layers where it says, everything else on the CPU."""
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    return {**dict.fromkeys(parts, "cpu"), "model.layers.1": second_layer}


@pytest.mark.parametrize("device_map", ["auto", "disk"])
def test_accelerate_places_layers(device_map: str, folder: Path, tmp_path: Path) -> None:
    plain = load(folder)
    chosen = places("disk") if device_map == "disk" else device_map
    model = load(folder, device_map=chosen, offload_folder=str(tmp_path / "offload"))
    draft = model.draft_view()
    offloaded = model.model.layers[1].mlp.down_proj.weight_packed
    assert offloaded.device.type == ("meta" if device_map == "disk" else "cpu")
    assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(draft), logits(plain.draft_view()))
    assert written(model, assistant_model=draft) == written(plain)


# -- with and without the import


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)


ONE_PROCESS = """
import sys
from transformers import AutoModelForCausalLM

def load(folder):
    try:
        print(type(AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj).__name__)
    except Exception as error:
        print(type(error).__name__, error)

for folder in sys.argv[1:]:
    load(folder)
import bitnest_format.transformers
load(sys.argv[1])
"""


def test_without_the_import_loading_fails_and_names_the_package(folder: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(folder, tmp_path / "older"))
    edit_json(older / "config.json", lambda config: config.pop("transformers_weights"))
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ONE_PROCESS, str(folder), str(older)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=True)
    first, second, third = done.stdout.splitlines()
    assert first == (
        "ValueError The transformers file in the config seems to be incorrect: it is neither a safetensors file "
        "(*.safetensors) nor a safetensors index file (*.safetensors.index.json): "
        "run 'pip install bitnest-format', and 'import bitnest_format.transformers' before loading"
    )
    # Written before there was such a hint: transformers has to say it in its own words.
    assert second.startswith("OSError Error no file named model.safetensors")
    assert third == "NestedLinear"


def test_importing_twice_changes_nothing(folder: Path) -> None:
    before = logits(load(folder))
    importlib.reload(importlib.import_module("bitnest_format.runtime.hf_quantizer"))
    importlib.reload(bitnest_format.transformers)
    assert torch.equal(logits(load(folder)), before)


# -- refusals


def test_saving_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load(folder).save_pretrained(tmp_path / "saved")
    assert str(error.value) == (
        "save_pretrained: a loaded model does not know all that a nested checkpoint holds. Copy the folder it came "
        "from (of a Hub repository: 'bitnest-format pull ID --out FOLDER'), or write one view of it with "
        "'bitnest-format export SOURCE FOLDER --format hf'."
    )
    assert not (tmp_path / "saved").exists()


def test_tensors_that_are_not_what_the_format_says_are_listed(folder: Path, edit_shard: Callable[..., None]) -> None:
    name = "model.layers.0.mlp.up_proj"

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}.weight_packed"]
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].bfloat16()

    edit_shard(folder, "base", spoil)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == (
        "model: tensors are not what the format says:\n"
        f"  - {name}.weight_packed: is missing, expected I32 [512, 32]\n"
        f"  - {name}.weight_scale: is BF16 [512, 2], expected F16 or F32 [512, 2]"
    )


def test_a_model_that_would_be_left_with_random_weights_is_refused(
    folder: Path, edit_shard: Callable[..., None]
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        AutoModelForSequenceClassification.from_pretrained(folder)
    assert str(error.value) == (
        "2 problems:\n  - model does not fit LlamaForSequenceClassification, which may hold some weights as one. "
        "Open it with bitnest_format.load\n"
        "  - score.weight: the model needs it, but the checkpoint has no such tensor"
    )
    edit_shard(folder, "base", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight: the model needs it, but"):
        load(folder)


@pytest.mark.parametrize("model_type", ["phi3", "mixtral", "qwen3_moe"])
def test_models_with_fused_weights_are_refused(model_type: str, tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type=model_type)
    with pytest.raises(
        UnsupportedModelError, match=r"\n  - model does not fit \w+, which may hold some weights as one"
    ):
        load(folder)


def test_modules_that_the_model_does_not_have_are_listed(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(intermediate_size=256, num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError) as error:
        load(folder)
    assert str(error.value).splitlines()[2:4] == [
        "  - model.layers.0.mlp.gate_proj: the model has no linear layer of 512 x 256 by that name",
        "  - model.layers.0.mlp.up_proj: the model has no linear layer of 512 x 256 by that name",
    ]
    assert "  - model.layers.1.mlp.down_proj: the model has no linear layer of 256 x 512 by that name" in str(
        error.value
    )


def test_a_decoder_without_head_can_be_loaded(tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", nested_head=True)
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder, dtype=torch.float32)(PROMPT).last_hidden_state
        assert torch.equal(hidden, load(folder).model(PROMPT).last_hidden_state)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_forbidden_pairs_are_refused(place: str, folder: Path, edit_shard: Callable[..., None], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj"
    edit_shard(folder, "base", lambda tensors: tensors[f"{name}.weight_packed"].zero_())
    edit_shard(folder, "refinement", lambda tensors: tensors[f"{name}.weight_refinement"].zero_())
    options = {"device_map": places(place), "offload_folder": str(tmp_path / "offload")}
    with pytest.raises(CheckpointError) as error:
        load(folder, **options)
    assert str(error.value) == (
        f"{name}: a base code of -8 stands beside a negative refinement code, which no 8-bit code can hold. "
        "Run 'bitnest-format validate' for the place."
    )
    load(folder, "draft")


def test_unknown_features_are_refused(folder: Path) -> None:
    edit_json(folder / "bitnest.json", lambda manifest: manifest.update(required_features=["wings"]))
    with pytest.raises(UnsupportedVersionError, match="required_features lists wings"):
        load(folder)


def test_a_draft_only_checkpoint_gives_its_draft(tmp_path: Path, tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(tmp_path / "model", draft_only=True)
    with pytest.raises(CheckpointError, match="the only view is the draft, of 4 bits"):
        load(folder)
    assert torch.isfinite(logits(load(folder, "draft"))).all()


def test_wrong_calls_are_refused(folder: Path) -> None:
    config = draft_config(folder)
    config.quantization_config["view"] = "traget"
    with pytest.raises(UsageError, match=r"^view is 'traget', expected 'target' or 'draft'$"):
        AutoModelForCausalLM.from_pretrained(folder, config=config)
    edit_json(folder / "config.json", lambda data: data.pop("quantization_config"))
    with pytest.raises(UsageError) as error:
        draft_config(folder)
    assert str(error.value) == f"{folder}: config.json does not name 'bitnest', so it is no nested checkpoint"


def test_what_cannot_be_loaded_whole_is_refused(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UsageError) as error:
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict={})
    assert str(error.value) == (
        "state_dict: a nested model is loaded from a folder or a repository, give its name instead"
    )
    config.distributed_config = object()
    with pytest.raises(UsageError) as error:
        AutoModelForCausalLM.from_pretrained(folder, config=config)
    assert str(error.value) == "tp_plan: nested layers are not split over processes; give a device_map instead"
