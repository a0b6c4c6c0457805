"""What a model's `config.json` says, checked and put into one frozen record.

Covers the decoder families whose RMS norms can absorb a rotation and whose linear layers go by the Llama
names: Llama, Mistral, Qwen2, Qwen3. Reads both spellings that configs use (rotary settings at the top level or
under `rope_parameters`). Pure: a dictionary in, a record or one list of problems out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitnest_format.errors import UnsupportedModelError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_MISTRAL_WINDOW = 4096
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
LARGEST_NUMBER = 1e30

VALUE = "self_attn.v_proj"
ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", VALUE)
ATTENTION_OUTPUT = "self_attn.o_proj"
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
MLP_OUTPUT = "mlp.down_proj"
LINEARS = (*ATTENTION_INPUTS, ATTENTION_OUTPUT, *MLP_INPUTS, MLP_OUTPUT)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD_MODULE = "lm_head"
HEAD = f"{HEAD_MODULE}.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder. Counts are in elements; `rope` is the normalised rotary record."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    head_norms: bool
    sliding_windows: tuple[int | None, ...]
    rope: Mapping[str, Any]

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """`(outputs, inputs)` of a linear layer by its name within a layer, such as `mlp.down_proj`."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, self.hidden_size),
            "self_attn.k_proj": (key_value, self.hidden_size),
            "self_attn.v_proj": (key_value, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, query),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }[linear]

    @property
    def head_shape(self) -> tuple[int, int]:
        """`(outputs, inputs)` of the head."""
        return self.vocab_size, self.hidden_size

    def has_bias(self, linear: str) -> bool:
        if linear in ATTENTION_INPUTS:
            return self.attention_bias
        return self.attention_output_bias if linear == ATTENTION_OUTPUT else self.mlp_bias

    def norm_names(self, layer: int) -> tuple[str, str]:
        """Tensor names of the norms before attention and before the MLP."""
        prefix = f"model.layers.{layer}"
        return f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"

    def head_norm_names(self, layer: int) -> tuple[str, ...]:
        """Tensor names of the per-head query and key norms; empty where the model has none."""
        if not self.head_norms:
            return ()
        prefix = f"model.layers.{layer}.self_attn"
        return f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"

    def modules(self, *, nested_head: bool = False) -> Iterator[tuple[str, tuple[int, int]]]:
        """Every quantizable module as `(name, (outputs, inputs))`, in forward order; the head only if it is nested."""
        for layer in range(self.layers):
            for linear in LINEARS:
                yield f"model.layers.{layer}.{linear}", self.linear_shape(linear)
        if nested_head:
            yield HEAD_MODULE, self.head_shape

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the forward pass needs, by name, with its shape; `lm_head` only where it is untied."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.layers):
            shapes |= self.layer_tensors(layer)
        shapes[FINAL_NORM] = (self.hidden_size,)
        if not self.tied_embeddings:
            shapes[HEAD] = self.head_shape
        return shapes

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors of one decoder layer, by full name, with their shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.norm_names(layer):
            shapes[name] = (self.hidden_size,)
        for name in self.head_norm_names(layer):
            shapes[name] = (self.head_dim,)
        for linear in LINEARS:
            outputs, inputs = self.linear_shape(linear)
            shapes[f"model.layers.{layer}.{linear}.weight"] = (outputs, inputs)
            if self.has_bias(linear):
                shapes[f"model.layers.{layer}.{linear}.bias"] = (outputs,)
        return shapes


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Build the record from a parsed `config.json`.

    Raises `UnsupportedModelError` listing every missing, malformed or unsupported field at once.
    """
    model_type = config.get("model_type")
    named = config.get("architectures") or []
    label = f"{model_type!r}" + (f" ({named[0]})" if isinstance(named, list) and named else "")
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"config.json: model_type is {label}; supported are {', '.join(SUPPORTED)}."
            + (_why_not(model_type, config))
        )
    fields = _Fields(config)
    hidden = fields.positive("hidden_size")
    before = len(fields.problems)
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", default=heads)
    heads_are_known = len(fields.problems) == before
    head_dim = fields.positive("head_dim", default=hidden // heads)
    layers = fields.positive("num_hidden_layers", at_most=MOST_LAYERS)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.problems.append(f"config.json: hidden_act is {activation!r}, expected 'silu'")
    if heads_are_known and heads % kv_heads:
        fields.problems.append(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        fields.problems.append(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    rope = fields.rope()
    qwen_bias = model_type == "qwen2"
    attention_bias = qwen_bias or bool(config.get("attention_bias", False))
    architecture = Architecture(
        model_type=str(model_type),
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("max_position_embeddings", default=2048),
        norm_epsilon=fields.number("rms_norm_eps", config.get("rms_norm_eps"), default=1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and not qwen_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
        head_norms=model_type == "qwen3",
        sliding_windows=fields.sliding_windows(layers),
        rope=rope,
    )
    if fields.problems:
        raise UnsupportedModelError(fields.problems)
    return architecture


class _Fields:
    """Reads fields and remembers every problem, so that all of them can be reported together."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.problems: list[str] = []

    def positive(self, name: str, default: int | None = None, at_most: int = LARGEST_SIZE) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            found = "missing" if value is None else f"{value!r:.100}"
            limit = "" if at_most == LARGEST_SIZE else f" of at most {at_most}"
            self.problems.append(f"config.json: {name} is {found}, expected a positive integer{limit}")
            return 1
        return value

    def number(self, name: str, value: Any, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST_NUMBER:
            self.problems.append(f"config.json: {name} is {value!r:.100}, expected a finite number, 0 or more")
            return default
        return float(value)

    def rope(self) -> dict[str, Any]:
        """One rotary record: `rope_type`, `rope_theta` and the settings of that type."""
        nested = self.config.get("rope_parameters") or {}
        scaling = self.config.get("rope_scaling") or {}
        top = self.config.get("rope_theta")
        if not isinstance(nested, Mapping) or not isinstance(scaling, Mapping):
            self.problems.append("config.json: rope_parameters and rope_scaling must be objects or null")
            return {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
        if top is not None and "rope_theta" in nested and nested["rope_theta"] != top:
            self.problems.append(
                f"config.json: rope_theta is {top} but rope_parameters.rope_theta is {nested['rope_theta']}; "
                "keep the one the model was trained with"
            )
        record = {**scaling, **nested}
        kind = record.pop("rope_type", None) or record.pop("type", None) or "default"
        record.pop("type", None)
        theta = record.pop("rope_theta", None) or top or DEFAULT_ROPE_THETA
        if self.config.get("partial_rotary_factor", 1.0) != 1.0 or record.get("partial_rotary_factor", 1) != 1:
            self.problems.append("config.json: partial_rotary_factor other than 1 is not supported")
        return {"rope_type": str(kind), "rope_theta": self.number("rope_theta", theta, DEFAULT_ROPE_THETA), **record}

    def sliding_windows(self, layers: int) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens; None where a layer attends to everything."""
        model_type = self.config["model_type"]
        # Llama has no windows; Qwen applies its window only where use_sliding_window says so, Mistral always.
        qwen = model_type.startswith("qwen")
        on = model_type == "mistral" or (qwen and self.config.get("use_sliding_window", False))
        # A Mistral config that does not mention the window has one; null is how later models turn it off.
        stated = self.config.get("sliding_window", DEFAULT_MISTRAL_WINDOW if model_type == "mistral" else None)
        if not on or not stated:
            return (None,) * layers
        window = self.positive("sliding_window", default=DEFAULT_MISTRAL_WINDOW)
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = self.positive("max_window_layers") if qwen and self.config.get("max_window_layers") else 0
        return tuple(window if layer >= first else None for layer in range(layers))


def _why_not(model_type: Any, config: Mapping[str, Any]) -> str:
    if isinstance(model_type, str) and model_type.startswith("gemma"):
        return " Gemma's norms stand after the sublayers too and cannot absorb a rotation."
    if isinstance(model_type, str) and model_type.startswith("phi3"):
        return " Phi-3 fuses its query, key and value matrices; split them first."
    if "text_config" in config:
        return " Its language model is nested under text_config: export that part alone and convert it."
    if model_type is None:
        return " config.json has no model_type."
    return ""
