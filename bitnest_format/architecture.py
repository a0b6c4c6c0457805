"""What a model's `config.json` says, checked and put into one frozen record.

`families` describes the architectures; here a config is read by its family's description, and names and shapes of
tensors follow. Reads both spellings that configs use (rotary settings at the top level or under `rope_parameters`).
Pure: a dictionary in, a record or one list of problems out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitnest_format.config_fields import MOST_LAYERS, ConfigFields, Experts
from bitnest_format.errors import UnsupportedModelError
from bitnest_format.families import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUT,
    FAMILIES,
    MLP_INPUTS,
    MLP_OUTPUT,
    WRAPPERS,
    Family,
    Spelling,
    Wrapper,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder. Counts are in elements; `rope` is the normalised rotary record.

    Names of linear layers are given within a layer, such as `mlp.down_proj`; all others in full. `rotary_size`: how
    many elements of each head, from the first on, rotary embedding turns. `max_positions`: the longest text that
    positions are right for; with `longrope`, whose short frequencies are used, the one that the model was first trained
    with, while `longest_positions` is what the config claims. `local_rope`: the rotary record of layers with a window,
    where it is another. Embeddings are multiplied by `embedding_factor`, scores of attention by `attention_factor`;
    `c * tanh(x / c)` bounds the latter by `attention_cap` and the model's outputs by `logit_cap`.
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
    rotary_size: int
    vocab_size: int
    max_positions: int
    longest_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    experts: Experts | None = None
    embedding_factor: float = 1.0
    attention_factor: float
    attention_cap: float | None = None
    logit_cap: float | None = None
    local_rope: Mapping[str, Any] | None = None

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

    def is_beside(self, name: str) -> bool:
        """Whether a tensor belongs to the model but not to its language model; such ones are never quantized."""
        return name.startswith(self.spelling.beside) if self.spelling.beside else False

    def enters_stream(self, name: str) -> bool:
        """Whether the outputs of a tensor beside the language model are put among the embeddings."""
        return name.removesuffix(".weight").removesuffix(".bias") in self.spelling.into_stream

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with, the last dot included."""
        return f"{self.spelling.decoder}.layers.{layer}."

    def shared_inputs(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """A layer's quantizable linear layers in forward order; those that read the same input together."""
        mlp = ((inputs, (output,)) for inputs, output in self.mlps(layer))
        return ATTENTION_INPUTS, (ATTENTION_OUTPUT,), *itertools.chain.from_iterable(mlp)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts in place of its MLP."""
        return self.experts is not None and layer in self.experts.layers

    def mlps(self, layer: int) -> tuple[tuple[tuple[str, str], str], ...]:
        """The gate and up, and the down, of a layer's MLP, or of each of its experts."""
        if self.experts is None or layer not in self.experts.layers:
            return ((MLP_INPUTS, MLP_OUTPUT),)
        return tuple(map(self.experts.linears, range(self.experts.count)))

    def linears(self, layer: int) -> tuple[str, ...]:
        """A layer's quantizable linear layers in forward order."""
        return tuple(linear for linears in self.shared_inputs(layer) for linear in linears)

    def stream_readers(self, layer: int) -> dict[str, str]:
        """A layer's linear layers that read the residual stream through a norm, with that norm's tensor name."""
        input_norm, mlp_norm = self.norm_names(layer)
        readers = dict.fromkeys(ATTENTION_INPUTS, input_norm)
        if self.experts is not None and layer in self.experts.layers:
            readers[self.experts.router] = mlp_norm
        return readers | dict.fromkeys((linear for inputs, _ in self.mlps(layer) for linear in inputs), mlp_norm)

    def stream_writers(self, layer: int) -> tuple[str, ...]:
        """A layer's linear layers whose outputs are added to the residual stream."""
        return ATTENTION_OUTPUT, *(output for _, output in self.mlps(layer))

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """`(outputs, inputs)` of a linear layer."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        expert = self.experts is not None and ".experts." in linear
        width = self.experts.width if self.experts is not None and expert else self.intermediate_size
        return {
            "q_proj": (query, self.hidden_size),
            "k_proj": (key_value, self.hidden_size),
            "v_proj": (key_value, self.hidden_size),
            "o_proj": (self.hidden_size, query),
            "gate_proj": (width, self.hidden_size),
            "up_proj": (width, self.hidden_size),
            "down_proj": (self.hidden_size, width),
        }[self.role(linear)]

    def role(self, linear: str) -> str:
        """What a linear layer does, whatever its family calls it: `q_proj` .. `down_proj`."""
        name = linear.rpartition(".")[2]
        if self.experts is None or ".experts." not in linear:
            return name
        names = self.experts.names
        return {names.gate: "gate_proj", names.up: "up_proj", names.down: "down_proj"}[name]

    def has_bias(self, linear: str) -> bool:
        if linear in ATTENTION_INPUTS:
            return self.attention_bias
        return self.attention_output_bias if linear == ATTENTION_OUTPUT else self.mlp_bias

    def norm_names(self, layer: int) -> tuple[str, str]:
        """Tensor names of the norms before attention and before the MLP."""
        prefix = self.layer_prefix(layer)
        before_mlp = "pre_feedforward_layernorm" if self.family.post_norms else "post_attention_layernorm"
        return f"{prefix}input_layernorm.weight", f"{prefix}{before_mlp}.weight"

    def post_norm_names(self, layer: int) -> tuple[str, ...]:
        """Tensor names of the norms after attention and after the MLP; empty where the model has none."""
        if not self.family.post_norms:
            return ()
        prefix = self.layer_prefix(layer)
        return f"{prefix}post_attention_layernorm.weight", f"{prefix}post_feedforward_layernorm.weight"

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
        for name in (*self.norm_names(layer), *self.post_norm_names(layer)):
            shapes[name] = (self.hidden_size,)
        for name in self.head_norm_names(layer):
            shapes[name] = (self.head_dim,)
        if self.experts is not None and layer in self.experts.layers:
            shapes[f"{prefix}{self.experts.router}.weight"] = (self.experts.count, self.hidden_size)
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
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    nested = isinstance(config.get("text_config"), Mapping)
    spelling = _spelling(wrapper, names)
    if wrapper is not None:
        config = language_config(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UnsupportedModelError(_unknown(config, wrapper))
    fields = ConfigFields(config, "text_config." if wrapper and nested else "")
    hidden = fields.positive("hidden_size")
    before = len(fields.problems)
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", default=heads)
    heads_are_known = len(fields.problems) == before
    head_dim = fields.positive("head_dim", default=hidden // heads)
    layers = fields.positive("num_hidden_layers", at_most=MOST_LAYERS)
    fields.activation(family.gelu)
    if config.get("use_bidirectional_attention"):
        fields.problems.append(f"{fields.place}use_bidirectional_attention is true; texts are generated one way only")
    if heads_are_known and heads % kv_heads:
        fields.problems.append(
            f"{fields.place}num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    rope = fields.rope(family)
    rotary_size = int(head_dim * rope.get("partial_rotary_factor", 1))
    if rotary_size % 2:
        part = (
            "head_dim" if rotary_size == head_dim else f"partial_rotary_factor {rotary_size / head_dim:g} of head_dim"
        )
        fields.problems.append(f"{fields.place}{part} {head_dim} is odd; rotary embedding needs pairs")
    inputs_only = family.attention_bias == "inputs"
    attention_bias = inputs_only or bool(config.get("attention_bias", False))
    architecture = Architecture(
        model_type=str(model_type),
        family=family,
        spelling=spelling,
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_size=rotary_size,
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.max_positions(rope),
        longest_positions=fields.positive("max_position_embeddings", default=2048),
        norm_epsilon=fields.number("rms_norm_eps", config.get("rms_norm_eps"), default=1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and not inputs_only,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        sliding_windows=fields.sliding_windows(layers, family.window),
        rope=rope,
        experts=fields.experts(family.experts, layers) if family.experts else None,
        embedding_factor=hidden**0.5 if family.scaled_embedding else 1.0,
        attention_factor=(fields.positive(family.query_scale, default=256) if family.query_scale else head_dim) ** -0.5,
        attention_cap=fields.cap("attn_logit_softcapping", family),
        logit_cap=fields.cap("final_logit_softcapping", family),
        local_rope=fields.local_rope(family.local_rope) if family.local_rope else None,
    )
    if fields.problems:
        raise UnsupportedModelError(fields.problems)
    return architecture


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model alone, in the form that its family has by itself.

    For a plain model that is a copy. For a wrapper: its `text_config`, completed by the defaults that such configs
    leave out, or the wrapper's own fields where it has none. Positions in three dimensions are those of a text, equal
    in all of them, which makes them ordinary ones.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return dict(config)
    nested = config.get("text_config")
    own = {key: value for key, value in config.items() if key not in ("text_config", "vision_config", "architectures")}
    if isinstance(nested, Mapping):
        own = dict(nested)
    model_type = wrapper.family or str(own.get("model_type", "llama"))
    family = FAMILIES.get(model_type)
    if family is not None and isinstance(nested, Mapping):
        own = {**family.defaults, **own}
    for key in ("rope_scaling", "rope_parameters"):
        record = own.get(key)
        if isinstance(record, Mapping) and "mrope_section" in record:
            kept = {name: value for name, value in record.items() if name not in ("mrope_section", "type", "rope_type")}
            kind = record.get("rope_type") or record.get("type")
            own[key] = {**kept, "rope_type": "default" if kind in (None, "mrope") else kind}
    tied = bool(config.get("tie_word_embeddings") or own.get("tie_word_embeddings"))
    if family is not None and family.tied:
        tied = bool(config.get("tie_word_embeddings", True) and own.get("tie_word_embeddings", True))
    return {**own, "model_type": model_type, "tie_word_embeddings": tied}


def _spelling(wrapper: Wrapper | None, names: Collection[str]) -> Spelling:
    """The spelling whose embedding is among `names`, or the usual one."""
    spellings = wrapper.spellings if wrapper else (Spelling(),)
    found = (spelling for spelling in spellings if f"{spelling.decoder}.embed_tokens.weight" in names)
    return next(found, spellings[0])


def _unknown(config: Mapping[str, Any], wrapper: Wrapper | None) -> list[str]:
    """Why a model is refused by its name, and what else is missing from a config whose sizes are nested."""
    model_type, named = config.get("model_type"), config.get("architectures") or []
    label = f"{model_type!r}" + (f" ({named[0]})" if isinstance(named, list) and named else "")
    place = "text_config.model_type" if wrapper else "model_type"
    supported = FAMILIES if wrapper else [*FAMILIES, *WRAPPERS]
    problem = f"config.json: {place} is {label}; supported are {', '.join(supported)}.{_why_not(model_type, config)}"
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return [problem]
    fields = ConfigFields(nested, "text_config.")
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"):
        fields.positive(name)
    return [problem, *fields.problems]


def _why_not(model_type: Any, config: Mapping[str, Any]) -> str:
    if "text_config" in config:
        return (
            " Its language model is nested under text_config, in a wrapper that is not known: export that part alone "
            "and convert it."
        )
    if model_type is None:
        return " config.json has no model_type."
    return ""
