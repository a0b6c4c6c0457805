"""The forward pass against transformers, and rows that do not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitnest_format import nesting
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.errors import CheckpointError, GenerationError, UnsupportedModelError
from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.kernels.reference_linear import View, code_type
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.kv_cache import KvCache
from bitnest_format.runtime.mlp import Mixture, Mlp
from bitnest_format.runtime.model import Decoder

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tied": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama one group a row": {"group_size": -1},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "model_type": "qwen2",
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2 window": {
        "model_type": "qwen2",
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 4},
    "mistral window": {"model_type": "mistral", "sliding_window": 16},
    "phi3": {"model_type": "phi3", "sliding_window": 16},
    "phi3 longrope": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + number / 24 for number in range(24)],
            "long_factor": [2.0 + number for number in range(24)],
        },
    },
    "mixtral": {"model_type": "mixtral"},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "qwen3_moe with dense layers": {"model_type": "qwen3_moe", "mlp_only_layers": [1], "norm_topk_prob": True},
    "gemma": {"model_type": "gemma", "tied": True},
    "gemma2": {"model_type": "gemma2"},
    "gemma3_text": {"model_type": "gemma3_text", "tied": True},
    "nested head": {"nested_head": True, "vocab_size": 323},
}

PROMPT = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(11)).tolist()


Load = Callable[..., nn.Module]


def _transformers_model(folder: Path, view: View, load: Load) -> nn.Module:
    """The same model with dequantized weights, in transformers."""
    checkpoint = Checkpoint(folder)
    tensors = {name: checkpoint.tensor(name).float() for name in checkpoint.manifest.unquantized}
    for name in checkpoint.manifest.modules:
        weight = checkpoint.weight(name)
        tensors[f"{name}.weight"] = weight.dequantize(view)
        if weight.bias is not None:
            tensors[f"{name}.bias"] = weight.bias.float()
    return load(checkpoint.config, tensors)


class FloatLinear:
    """Stands in for `StackedLinear` without any quantization of activations."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]):
        self.weights = [checkpoint.weight(name) for name in names]

    def __call__(self, x: Tensor, view: View) -> Tensor:
        outputs = []
        for weight in self.weights:
            bias = None if weight.bias is None else weight.bias.float()
            outputs.append(nn.functional.linear(x, weight.dequantize(view), bias))
        return torch.cat(outputs, dim=1)


class FloatCache:
    """Stands in for `KvCache` and keeps entries as they are."""

    def __init__(self, layers: int):
        self.entries: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def reserve(self, entries: int) -> None:
        pass

    def append(self, layer: int, keys: Tensor, values: Tensor, position: int) -> None:
        old = self.entries[layer]
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if old is not None:
            keys = torch.cat((old[0][:, :position], keys), dim=1)
            values = torch.cat((old[1][:, :position], values), dim=1)
        self.entries[layer] = keys, values

    def read(self, layer: int, stop: int, fine_from: int) -> tuple[Tensor, Tensor]:
        entry = self.entries[layer]
        assert entry is not None
        return entry[0][:, :stop], entry[1][:, :stop]


def _float_decoder(folder: Path) -> Decoder:
    checkpoint = Checkpoint(folder)
    decoder = Decoder(checkpoint, ("draft", "target"))
    for number, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{number}."

        def linear(*names: str, prefix: str = prefix) -> Any:
            return FloatLinear(checkpoint, [prefix + name for name in names])

        gelu = decoder.architecture.family.gelu
        mlps = [Mlp(linear(*inputs), linear(output), gelu) for inputs, output in decoder.architecture.mlps(number)]
        decoder.layers[number] = replace(
            layer,
            attention_inputs=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_output=linear("self_attn.o_proj"),
            mlp=replace(layer.mlp, experts=mlps) if isinstance(layer.mlp, Mixture) else mlps[0],
        )
    if decoder.nested_head:
        decoder.head = FloatLinear(checkpoint, ["lm_head"])  # type: ignore[assignment]
    return decoder


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_without_activation_quantization_logits_equal_transformers(
    name: str, view: View, tmp_path: Path, tiny_checkpoint: Callable[..., Path], in_transformers: Load
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", **MODELS[name])
    expected = _transformers_model(folder, view, in_transformers)(torch.tensor([PROMPT])).logits[0]
    decoder = _float_decoder(folder)
    cache: Any = FloatCache(len(decoder.layers))
    ids = torch.tensor(PROMPT)
    # A batched prefill, then rows of several lengths.
    pieces, first = [], 0
    for count in (20, 1, 5, 1, 13):
        hidden = decoder.forward(ids[first : first + count], first, cache, view)
        pieces.append(decoder.logits(hidden, view))
        first += count
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=1e-5)


def _fake_quantize(model: nn.Module, nested_head: bool = False) -> None:
    """Give transformers' model the runtime's INT8 inputs of linear layers and KV8 cache."""
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def round_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        codes, scale = quantize_activation(inputs[0].flatten(0, 1))
        return ((codes.float() * scale.unsqueeze(1)).view_as(inputs[0]),)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (name != "lm_head" or nested_head):
            module.register_forward_pre_hook(round_input)

    def nested_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        key, value = (nesting.target_kv(*nesting.encode_kv(entries)) for entries in (key, value))
        return eager_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("bitnest_test_nested", nested_attention)
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionMaskInterface.register("bitnest_test_nested", eager_mask)
    model.set_attn_implementation("bitnest_test_nested")


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("name", ["llama", "qwen2 window", "qwen3", "mistral window", "phi3 longrope", "nested head"])
def test_logits_equal_transformers_with_the_same_quantization(
    name: str, view: View, tmp_path: Path, tiny_checkpoint: Callable[..., Path], in_transformers: Load
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", **MODELS[name])
    reference = _transformers_model(folder, view, in_transformers)
    _fake_quantize(reference, nested_head=name == "nested head")
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    logits = NestedModel.open(folder).logits(PROMPT, view)
    # Rows agree to rounding until a sum in another order tips a code to its neighbour; that row and those that attend
    # to it then differ by one code's worth.
    error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.min()) < 2e-6
    assert float(error.max()) < 0.03


@pytest.mark.parametrize("unpack", ["load", "call"])
@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize(
    "name",
    [
        "llama tied",
        "qwen2 window",
        "qwen3",
        "mistral window",
        "phi3 longrope",
        "mixtral",
        "qwen3_moe",
        "gemma2",
        "nested head",
    ],
)
@torch.inference_mode()
def test_logits_of_a_row_do_not_depend_on_its_neighbours(
    name: str, view: View, unpack: Any, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", **MODELS[name])
    decoder = Decoder(Checkpoint(folder), ("draft", "target"), unpack)
    ids = torch.tensor(PROMPT[:29])

    def start() -> KvCache:
        cache = decoder.new_cache()
        decoder.prefill(ids[:20], cache, "target")
        return cache

    cache = start()
    alone = []
    for position in range(20, 29):
        hidden = decoder.forward(ids[position : position + 1], position, cache, view)
        alone.append(decoder.logits(hidden, view)[0])
    for rows in range(2, 10):
        together = start()
        logits = decoder.logits(decoder.forward(ids[20 : 20 + rows], 20, together, view), view)
        for row in range(rows):
            assert torch.equal(logits[row], alone[row]), f"row {row} of {rows}"
        stop = 20 + rows
        assert torch.equal(together.planes[..., :stop, :], cache.planes[..., :stop, :])
        assert torch.equal(together.scale[..., :stop], cache.scale[..., :stop])


@pytest.mark.parametrize("nested_head", [False, True])
@torch.inference_mode()
def test_both_memory_modes_give_the_same_bits(
    nested_head: bool, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", nested_head=nested_head)
    loaded = NestedModel.open(folder, unpack="load")
    called = NestedModel.open(folder, unpack="call")
    for view in ("draft", "target"):
        assert torch.equal(loaded.logits(PROMPT, view), called.logits(PROMPT, view))
        assert torch.equal(loaded.logits(PROMPT[:9], view), called.logits(PROMPT[:9], view))


def test_both_spellings_of_the_rotary_base_are_one(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    ids = torch.randint(0, 320, (501,), generator=torch.Generator().manual_seed(0)).tolist()
    at_top = tiny_checkpoint(tmp_path / "a", rope_theta=1_000_000.0)
    nested = tiny_checkpoint(
        tmp_path / "b", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}
    )
    plain = tiny_checkpoint(tmp_path / "c")
    first, second, third = (NestedModel.open(folder).logits(ids)[500] for folder in (at_top, nested, plain))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_contradicting_rotary_bases_are_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_theta is 5000\.0 but rope_parameters\.rope_theta is 1000"):
        tiny_checkpoint(tmp_path / "model", rope_theta=5000.0, rope_parameters={"rope_theta": 1000.0})


def test_null_and_empty_rope_scaling_mean_none(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    plain = NestedModel.open(tiny_checkpoint(tmp_path / "plain")).logits(PROMPT)
    for number, scaling in enumerate((None, {})):
        folder = tiny_checkpoint(tmp_path / f"{number}", rope_scaling=scaling)
        assert torch.equal(NestedModel.open(folder).logits(PROMPT), plain)
    old, new = (
        NestedModel.open(tiny_checkpoint(tmp_path / key, rope_scaling={key: "linear", "factor": 2.0})).logits(PROMPT)
        for key in ("type", "rope_type")
    )
    assert torch.equal(old, new)
    assert not torch.equal(old, plain)


@pytest.mark.parametrize("kind", ["dynamic", "unheard-of"])
def test_rotary_scaling_that_changes_with_the_length_is_refused(
    kind: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(UnsupportedModelError) as error:
        NestedModel.open(folder)
    assert str(error.value) == (
        f"config.json: rotary scaling {kind!r} is not supported; supported are default, linear, llama3, yarn, longrope"
    )


def test_a_window_counts_only_where_it_is_switched_on(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    ids = [*PROMPT, *PROMPT[:24]]

    def logits(**changes: Any) -> Tensor:
        folder = tiny_checkpoint(tmp_path / str(len(list(tmp_path.iterdir()))), model_type="qwen2", **changes)
        return NestedModel.open(folder).logits(ids)

    without = logits(sliding_window=None)
    assert torch.equal(logits(sliding_window=16, use_sliding_window=False), without)
    windowed = logits(sliding_window=16, use_sliding_window=True, max_window_layers=0)
    assert torch.equal(windowed[:16], without[:16])
    assert not torch.equal(windowed[16:], without[16:])


def test_missing_kv_heads_are_as_many_as_heads(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    missing = tiny_checkpoint(tmp_path / "missing", num_key_value_heads=None)
    given = tiny_checkpoint(tmp_path / "given", num_key_value_heads=4)
    assert NestedModel.open(missing).decoder.architecture.kv_heads == 4
    assert torch.equal(NestedModel.open(missing).logits(PROMPT), NestedModel.open(given).logits(PROMPT))


def test_a_config_that_contradicts_the_planes_is_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_key_value_heads=4)
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8").replace('"num_key_value_heads": 4', '"num_key_value_heads": 2')
    config.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        NestedModel.open(folder)
    assert str(error.value) == "model.layers.0.self_attn.k_proj: is 256 x 256, config.json makes it 128 x 256"


def test_zero_rows_of_embedding_and_head_are_ordinary(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], edit_shard: Callable[..., None]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")

    def erase(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][300:] = 0
        tensors["lm_head.weight"][300:] = 0

    edit_shard(folder, "base", erase)
    model = NestedModel.open(folder)
    for ids in (PROMPT[:5], [305], [7, 305, 319, 8]):
        for view in ("draft", "target"):
            logits = model.logits(ids, view)
            assert bool(logits.isfinite().all())
            assert not logits[:, 300:].any()
    assert model.generate([305], max_new_tokens=5).stats.new_tokens == 5


def test_zero_keys_and_values_leave_attention_finite(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], edit_shard: Callable[..., None], in_transformers: Load
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")

    def erase(tensors: dict[str, Tensor]) -> None:
        for name in ("k_proj", "v_proj"):
            tensors[f"model.layers.0.self_attn.{name}.weight_packed"].fill_(-0x77777778)

    edit_shard(folder, "base", erase)
    edit_shard(
        folder,
        "refinement",
        lambda tensors: [
            tensors[f"model.layers.0.self_attn.{name}.weight_refinement"].fill_(-0x77777778)
            for name in ("k_proj", "v_proj")
        ],
    )
    model = NestedModel.open(folder)
    reference = _transformers_model(folder, "target", in_transformers)
    _fake_quantize(reference)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    logits = model.logits(PROMPT)
    assert float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 0.03
    cache = model.decoder.new_cache()
    with torch.inference_mode():
        model.decoder.prefill(torch.tensor(PROMPT), cache, "target")
    assert bool((cache.planes[0, ..., : len(PROMPT), :] == 0x88).all())


def test_logits_that_are_not_numbers_are_reported(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], edit_shard: Callable[..., None]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    edit_shard(folder, "base", lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(GenerationError) as error:
        NestedModel.open(folder).generate([5])
    assert str(error.value) == (
        "model: the model's output is not a number. Look for broken tensors with 'bitnest-format validate --deep'."
    )


def test_a_forbidden_pair_is_refused_by_name(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], edit_shard: Callable[..., None]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    name = "model.layers.1.mlp.down_proj"
    # Nibble 0 is code -8; beside it nibble 7 is code -1.
    edit_shard(folder, "base", lambda tensors: tensors[f"{name}.weight_packed"][0].fill_(0))
    edit_shard(folder, "refinement", lambda tensors: tensors[f"{name}.weight_refinement"][0].fill_(0x77777777))
    with pytest.raises(CheckpointError) as error:
        NestedModel.open(folder)
    assert str(error.value) == (
        f"{name}: a base code of -8 stands beside a negative refinement code, which no 8-bit code can hold. "
        "Run 'bitnest-format validate' for the place."
    )
    assert NestedModel.open(folder, view="draft").generate([5], max_new_tokens=2).stats.new_tokens == 2


def test_bytes_of_a_view_are_the_bytes_of_its_tensors(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type="qwen2")
    decoder = NestedModel.open(folder).decoder
    checkpoint = Checkpoint(folder)
    weights = [checkpoint.weight(name) for name in checkpoint.manifest.modules]
    draft = sum(w.base.nbytes + w.scale.nbytes + (0 if w.bias is None else w.bias.nbytes) for w in weights)
    refinement = sum(w.refinement.nbytes for w in weights if w.refinement is not None)
    assert decoder.view_bytes == {"draft": draft, "target": draft + refinement}
    head = checkpoint.tensor("lm_head.weight").nbytes
    assert decoder.head_bytes == {"draft": head, "target": head}


def test_bytes_of_a_nested_head_depend_on_the_view(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    plain = NestedModel.open(tiny_checkpoint(tmp_path / "plain")).decoder
    nested = NestedModel.open(tiny_checkpoint(tmp_path / "nested", nested_head=True)).decoder
    weight = Checkpoint(tmp_path / "nested").weight("lm_head")
    draft = weight.base.nbytes + weight.scale.nbytes
    assert draft == 320 * 256 // 2 + 320 * 2 * 2
    assert nested.head_bytes == {"draft": draft, "target": draft + 320 * 256 // 2}
    assert nested.view_bytes == plain.view_bytes
    saved = 4 * 320 * 256 - 2 * code_type(torch.device("cpu")).itemsize * 320 * 256
    assert plain.unpacked_bytes() - nested.unpacked_bytes() == saved


def test_a_nested_head_beside_tied_embeddings_is_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", nested_head=True)
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8").replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    config.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        NestedModel.open(folder)
    assert str(error.value) == (
        "config.json: tie_word_embeddings is true, but bitnest.json lists the module lm_head; set it to false"
    )


def test_a_nested_head_of_another_size_is_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", nested_head=True)
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8").replace('"vocab_size": 320', '"vocab_size": 321')
    config.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        NestedModel.open(folder)
    assert str(error.value) == "lm_head: is 320 x 256, config.json makes it 321 x 256"
