"""The registry of architectures: one small frozen description for each `model_type` of `config.json`.

A description says how a family differs from Llama; everything that it does not mention is as in Llama. Reading a config
by it is `architecture.read_architecture`, which also turns names and sizes into tensors. docs/architectures.md
adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

VALUE = "self_attn.v_proj"
ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", VALUE)
ATTENTION_OUTPUT = "self_attn.o_proj"
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
MLP_OUTPUT = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """When a layer attends to the newest tokens alone.

    `default`: the window of a config that does not mention `sliding_window`. `switch`: the field that has to be true,
    if there is one. `first`: the field that names the first layer with a window. `full_every`: every so many layers one
    has no window. A config's own `layer_types` go before.
    """

    default: int | None = None
    switch: str | None = None
    first: str | None = None
    full_every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """A mixture of experts in place of the MLP: its names within a layer, and the config's fields that size it.

    `block` holds the router `gate` and `experts.N`, each with the linear layers `gate`, `up` and `down`. `normalized`:
    whether the weights of a token's experts are divided by their sum, or the field that says so. `count`: the spellings
    of the field that says how many experts there are. `dense`: the field
    that lists layers with an ordinary MLP; `step`: the field N by which every Nth layer is a mixture.
    """

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: tuple[str, ...]
    active: str = "num_experts_per_tok"
    width: str
    normalized: bool | str = True
    dense: str | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`, by what differs from Llama.

    `title`: for people. `attention_bias`: whether the field of that name counts for all four matrices of attention
    (`"config"`), or query, key and value always have a bias (`"inputs"`). `mlp_bias`: whether that field counts.
    `head_norms`: norms of each query and key head. `window`: see `WindowRule`; None where there are no windows.
    `fused`: linear layers that sources store as one matrix, with their parts in the order of its rows; checkpoints hold
    the parts. `partial_rotary`: whether `partial_rotary_factor` counts. `experts`: see `ExpertNames`.
    `norm_offset`: what is added to stored norm gains. `post_norms`: whether there are norms after attention and MLP,
    before the sum; such a model cannot take R1. `gelu`: whether MLPs gate by GELU (tanh form) instead of SiLU.
    `scaled_embedding`: whether embeddings are multiplied by `sqrt(hidden_size)`. `query_scale`: the field whose inverse
    root scales attention instead of that of `head_dim`. `local_rope`: the frequency base of layers with a window, where
    they have their own. `tied`, `caps`: `tie_word_embeddings` and the soft caps where a config leaves them out.
    `defaults`: what fields are that a `text_config` leaves out, as transformers does with its class's defaults.
    """

    model_type: str
    title: str
    attention_bias: Literal["config", "inputs"] = "config"
    mlp_bias: bool = False
    head_norms: bool = False
    window: WindowRule | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial_rotary: bool = False
    experts: ExpertNames | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    query_scale: str | None = None
    local_rope: float | None = None
    tied: bool = False
    caps: Mapping[str, float] = field(default_factory=dict)
    defaults: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """What a model's tensors are called.

    `decoder`: the prefix of embedding, layers and final norm. `beside`: how the names of tensors begin that belong to
    the model but not to its language model. `into_stream`: those of them, by module or tensor name, whose outputs are
    put among the embeddings and so have to turn with them.
    """

    decoder: str = "model"
    head: str = "lm_head"
    beside: tuple[str, ...] = ()
    into_stream: tuple[str, ...] = ()

    def inside(self, prefix: str) -> Spelling:
        """The same with `prefix` before every name beside the language model."""
        return replace(
            self,
            beside=tuple(f"{prefix}{name}" for name in self.beside),
            into_stream=tuple(f"{prefix}{name}" for name in self.into_stream),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """One `model_type` that has a language model of another family inside, described by `text_config`.

    `spellings`: what its tensors are called, by what files hold; the first is the default. `family`: the language
    model's, where `text_config` has a name of its own for it or is left out (its fields then lie beside the others).
    """

    model_type: str
    title: str
    spellings: tuple[Spelling, ...]
    family: str | None = None


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            title="Llama 2, 3 and 3.x",
            mlp_bias=True,
            defaults={
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
            },
        ),
        Family(
            model_type="mistral",
            title="Mistral",
            window=WindowRule(default=4096),
            defaults={
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
            },
        ),
        Family(
            model_type="qwen2",
            title="Qwen2 and Qwen2.5",
            attention_bias="inputs",
            window=WindowRule(switch="use_sliding_window", first="max_window_layers"),
            defaults={
                "vocab_size": 151936,
                "hidden_size": 4096,
                "intermediate_size": 22016,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
            },
        ),
        Family(
            model_type="qwen3",
            title="Qwen3",
            head_norms=True,
            window=WindowRule(switch="use_sliding_window", first="max_window_layers"),
        ),
        Family(
            model_type="phi3",
            title="Phi-3, Phi-3.5-mini and Phi-4",
            window=WindowRule(),
            fused={"self_attn.qkv_proj": ATTENTION_INPUTS, "mlp.gate_up_proj": MLP_INPUTS},
            partial_rotary=True,
        ),
        Family(
            model_type="mixtral",
            title="Mixtral",
            window=WindowRule(),
            experts=ExpertNames(
                block="block_sparse_moe",
                gate="w1",
                up="w3",
                down="w2",
                count=("num_local_experts",),
                width="intermediate_size",
            ),
        ),
        Family(
            model_type="qwen3_moe",
            title="Qwen3-MoE",
            head_norms=True,
            window=WindowRule(switch="use_sliding_window", first="max_window_layers"),
            experts=ExpertNames(
                block="mlp",
                count=("num_experts", "num_local_experts"),
                width="moe_intermediate_size",
                normalized="norm_topk_prob",
                dense="mlp_only_layers",
                step="decoder_sparse_step",
            ),
        ),
        Family(model_type="gemma", title="Gemma", norm_offset=1, gelu=True, scaled_embedding=True, tied=True),
        Family(
            model_type="gemma2",
            title="Gemma 2",
            window=WindowRule(default=4096, full_every=2),
            norm_offset=1,
            post_norms=True,
            gelu=True,
            scaled_embedding=True,
            query_scale="query_pre_attn_scalar",
            tied=True,
            caps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        Family(
            model_type="gemma3_text",
            title="Gemma 3",
            head_norms=True,
            window=WindowRule(default=4096, full_every=6),
            norm_offset=1,
            post_norms=True,
            gelu=True,
            scaled_embedding=True,
            query_scale="query_pre_attn_scalar",
            local_rope=10_000.0,
            tied=True,
            defaults={
                "vocab_size": 262208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "query_pre_attn_scalar": 256,
                "rope_theta": 1e6,
            },
        ),
    )
}


def _llava(*more: str) -> tuple[Spelling, ...]:
    """LLaVA's names before and since transformers moved them into one model; `more`: what else enters the stream."""
    parts = Spelling(
        beside=("vision_tower.", "multi_modal_projector.", *more), into_stream=("multi_modal_projector.linear_2", *more)
    )
    return (
        replace(parts, decoder="language_model.model", head="language_model.lm_head"),
        replace(parts, decoder="model.language_model").inside("model."),
    )


_QWEN_VISION = Spelling(beside=("visual.",), into_stream=("visual.merger.mlp.2",))
_QWEN_SPELLINGS = (_QWEN_VISION, replace(_QWEN_VISION, decoder="model.language_model").inside("model."))

WRAPPERS: Mapping[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper(model_type="llava", title="LLaVA", spellings=_llava()),
        Wrapper(model_type="llava_next", title="LLaVA-NeXT", spellings=_llava("image_newline")),
        Wrapper(
            model_type="openvla",
            title="OpenVLA",
            spellings=(
                Spelling(
                    decoder="language_model.model",
                    head="language_model.lm_head",
                    beside=("vision_backbone.", "projector."),
                    into_stream=("projector.fc3",),
                ),
            ),
        ),
        Wrapper(
            model_type="gemma3",
            title="Gemma 3 with vision",
            spellings=tuple(replace(spelling, into_stream=()) for spelling in _llava()),
            family="gemma3_text",
        ),
        Wrapper(model_type="qwen2_vl", title="Qwen2-VL", spellings=_QWEN_SPELLINGS, family="qwen2"),
        Wrapper(model_type="qwen2_5_vl", title="Qwen2.5-VL", spellings=_QWEN_SPELLINGS, family="qwen2"),
    )
}
