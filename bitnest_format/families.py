"""The registry of architectures: one small frozen description for each `model_type` of `config.json`.

A description says how a family differs from Llama; everything that it does not mention is as in Llama. Reading a config
by it is `architecture.read_architecture`, which also turns names and sizes into tensors. CONTRIBUTING.md shows how an
architecture is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    if there is one. `first`: the field that names the first layer with a window. A config's own `layer_types` go
    before.
    """

    default: int | None = None
    switch: str | None = None
    first: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`, by what differs from Llama.

    `title`: for people. `attention_bias`: whether the field of that name counts for all four matrices of attention
    (`"config"`), or query, key and value always have a bias (`"inputs"`). `mlp_bias`: whether that field counts.
    `head_norms`: norms of each query and key head. `window`: see `WindowRule`; None where there are no windows.
    """

    model_type: str
    title: str
    attention_bias: Literal["config", "inputs"] = "config"
    mlp_bias: bool = False
    head_norms: bool = False
    window: WindowRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """What a model's tensors are called. `decoder`: the prefix of embedding, layers and final norm."""

    decoder: str = "model"
    head: str = "lm_head"


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="llama", title="Llama 2, 3 and 3.x", mlp_bias=True),
        Family(model_type="mistral", title="Mistral", window=WindowRule(default=4096)),
        Family(
            model_type="qwen2",
            title="Qwen2 and Qwen2.5",
            attention_bias="inputs",
            window=WindowRule(switch="use_sliding_window", first="max_window_layers"),
        ),
        Family(
            model_type="qwen3",
            title="Qwen3",
            head_norms=True,
            window=WindowRule(switch="use_sliding_window", first="max_window_layers"),
        ),
    )
}
