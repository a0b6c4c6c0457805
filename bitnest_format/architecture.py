"""What a model's `config.json` says, checked and put into one frozen record.

`families` describes the architectures; here a config is read by its family's description, and names and shapes of
tensors follow. Reads both spellings that configs use (rotary settings at the top level or under `rope_parameters`).
Pure: a dictionary in, a record or one list of problems out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitnest_format.errors import UnsupportedModelError
from bitnest_format.families import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUT,
    FAMILIES,
    MLP_INPUTS,
    MLP_OUTPUT,
    Family,
    Spelling,
    WindowRule,
)

DEFAULT_ROPE_THETA = 10000.0
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
LARGEST_NUMBER = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder. Counts are in elements; `rope` is the normalised rotary record.

    Names of linear layers are given within a layer, such as `mlp.down_proj`; all others in full.
    """

    model_type: str
    family: Family
    spelling: Spelling
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
    sliding_windows: tuple[int | None, ...]
    rope: Mapping[str, Any]

    @property
    def embedding(self) -> str:
        """The embedding's tensor name."""
        return f"{self.spelling.decoder}.embed_tokens.weight"

    @property
    def final_norm(self) -> str:
        """Tensor name of the norm after the last layer."""
        return f"{self.spelling.decoder}.norm.weight"

    @property
    def head_module(self) -> str:
        """The head's name as a module."""
        return self.spelling.head

    @property
    def head(self) -> str:
        """The head's tensor name; a tied model has no such tensor."""
        return f"{self.spelling.head}.weight"

    @property
    def head_shape(self) -> tuple[int, int]:
        """`(outputs, inputs)` of the head."""
        return self.vocab_size, self.hidden_size

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with, the last dot included."""
        return f"{self.spelling.decoder}.layers.{layer}."

    def shared_inputs(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """A layer's quantizable linear layers in forward order; those that read the same input together."""
        return ATTENTION_INPUTS, (ATTENTION_OUTPUT,), MLP_INPUTS, (MLP_OUTPUT,)

    def linears(self, layer: int) -> tuple[str, ...]:
        """A layer's quantizable linear layers in forward order."""
        return tuple(linear for linears in self.shared_inputs(layer) for linear in linears)

    def stream_readers(self, layer: int) -> dict[str, str]:
        """A layer's linear layers that read the residual stream through a norm, with that norm's tensor name."""
        input_norm, mlp_norm = self.norm_names(layer)
        return {**dict.fromkeys(ATTENTION_INPUTS, input_norm), **dict.fromkeys(MLP_INPUTS, mlp_norm)}

    def stream_writers(self, layer: int) -> tuple[str, ...]:
        """A layer's linear layers whose outputs are added to the residual stream."""
        return ATTENTION_OUTPUT, MLP_OUTPUT

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """`(outputs, inputs)` of a linear layer."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden_size),
            "k_proj": (key_value, self.hidden_size),
            "v_proj": (key_value, self.hidden_size),
            "o_proj": (self.hidden_size, query),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }[linear.rpartition(".")[2]]

    def has_bias(self, linear: str) -> bool:
        if linear in ATTENTION_INPUTS:
            return self.attention_bias
        return self.attention_output_bias if linear == ATTENTION_OUTPUT else self.mlp_bias

    def norm_names(self, layer: int) -> tuple[str, str]:
        """Tensor names of the norms before attention and before the MLP."""
        prefix = self.layer_prefix(layer)
        return f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"

    def head_norm_names(self, layer: int) -> tuple[str, ...]:
        """Tensor names of the per-head query and key norms; empty where the model has none."""
        if not self.family.head_norms:
            return ()
        prefix = self.layer_prefix(layer)
        return f"{prefix}self_attn.q_norm.weight", f"{prefix}self_attn.k_norm.weight"

    def modules(self, *, nested_head: bool = False) -> Iterator[tuple[str, tuple[int, int]]]:
        """Every quantizable module as `(name, (outputs, inputs))`, in forward order; the head only if it is nested."""
        for layer in range(self.layers):
            for linear in self.linears(layer):
                yield f"{self.layer_prefix(layer)}{linear}", self.linear_shape(linear)
        if nested_head:
            yield self.head_module, self.head_shape

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the forward pass needs, by name, with its shape; a head only where it is untied."""
        shapes: dict[str, tuple[int, ...]] = {self.embedding: (self.vocab_size, self.hidden_size)}
        for layer in range(self.layers):
            shapes |= self.layer_tensors(layer)
        shapes[self.final_norm] = (self.hidden_size,)
        if not self.tied_embeddings:
            shapes[self.head] = self.head_shape
        return shapes

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors of one decoder layer, by full name, with their shapes."""
        prefix = self.layer_prefix(layer)
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.norm_names(layer):
            shapes[name] = (self.hidden_size,)
        for name in self.head_norm_names(layer):
            shapes[name] = (self.head_dim,)
        for linear in self.linears(layer):
            outputs, inputs = self.linear_shape(linear)
            shapes[f"{prefix}{linear}.weight"] = (outputs, inputs)
            if self.has_bias(linear):
                shapes[f"{prefix}{linear}.bias"] = (outputs,)
        return shapes


def read_architecture(config: Mapping[str, Any], names: Collection[str] = ()) -> Architecture:
    """Build the record from a parsed `config.json`.

    `names`: the tensors that the model is stored in, which tell apart the ways to spell one and the same model.

    Raises `UnsupportedModelError` listing every missing, malformed or unsupported field at once.
    """
    model_type = config.get("model_type")
    named = config.get("architectures") or []
    label = f"{model_type!r}" + (f" ({named[0]})" if isinstance(named, list) and named else "")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"config.json: model_type is {label}; supported are {', '.join(FAMILIES)}." + (_why_not(model_type, config))
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
    inputs_only = family.attention_bias == "inputs"
    attention_bias = inputs_only or bool(config.get("attention_bias", False))
    architecture = Architecture(
        model_type=family.model_type,
        family=family,
        spelling=Spelling(),
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
        attention_output_bias=attention_bias and not inputs_only,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        sliding_windows=fields.sliding_windows(layers, family.window),
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

    def sliding_windows(self, layers: int, rule: WindowRule | None) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens; None where a layer attends to everything."""
        everywhere = (None,) * layers
        if rule is None or (rule.switch is not None and not self.config.get(rule.switch, False)):
            return everywhere
        # A config that does not mention the window has the family's; null is how later models turn it off.
        if not self.config.get("sliding_window", rule.default):
            return everywhere
        window = self.positive("sliding_window", default=rule.default)
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = self.positive(rule.first) if rule.first and self.config.get(rule.first) else 0
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
