"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

TinyModel = tuple[dict[str, Any], dict[str, Tensor]]
Type = gguf.GGMLQuantizationType

STORED_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def stored_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    inner, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{STORED_NAMES[inner]}.{kind}"


def interleave(rows: Tensor, heads: int) -> Tensor:
    """The order of query and key rows in files of architecture llama: halves of each head become pairs."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def write_gguf(
    path: Path,
    model: TinyModel,
    *,
    kind: Type = Type.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    tokens: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file of a tiny model: matrices of type `kind`, vectors in F32."""
    config, tensors = model
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    values = {f"{architecture}.{key}": value for key, value in fields.items()} | dict(metadata or {})
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tokens:
        tokens(writer)
    for name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        array = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(stored_name(name), array)
        else:
            writer.add_tensor(stored_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokens(
    pre: str | None = "llama-bpe", merges: tuple[str, ...] = ("h e", "l l", "he ll"), **ids: int
) -> Callable[[gguf.GGUFWriter], None]:
    """A byte-level vocabulary: 256 bytes, the merged words, then control and user-defined tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    special = ["<|begin|>", "<|end|>", "<|eot|>", "<\uff5codd▁mark\uff5c>", "<think>"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*words, *special])
        writer.add_token_types([1] * len(words) + [3, 3, 3, 3, 4])
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(ids.get("bos", len(words)))
        writer.add_eos_token_id(len(words) + 1)
        if "eot" in ids:
            writer.add_eot_token_id(ids["eot"])
        writer.add_chat_template("{{ messages[0]['content'] }}")

    return add
