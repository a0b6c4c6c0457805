"""Fields of a model's `config.json`, read one by one by the rules of its family.

Pure: a dictionary in, values out, and every problem remembered on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnest_format.families import ExpertNames, Family, WindowRule

DEFAULT_ROPE_THETA = 10000.0
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
LARGEST_NUMBER = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: `count` of them, of which each token takes `active`, `width` wide; `layers` that have one.

    `normalized`: whether the weights of a token's experts are divided by their sum.
    """

    names: ExpertNames
    count: int
    active: int
    width: int
    normalized: bool
    layers: frozenset[int]

    @property
    def router(self) -> str:
        return f"{self.names.block}.gate"

    def linears(self, expert: int) -> tuple[tuple[str, str], str]:
        """The names of an expert's gate and up, and of its down."""
        prefix = f"{self.names.block}.experts.{expert}."
        return (f"{prefix}{self.names.gate}", f"{prefix}{self.names.up}"), f"{prefix}{self.names.down}"


class ConfigFields:
    """Reads fields and remembers every problem, so that all of them can be reported together."""

    def __init__(self, config: Mapping[str, Any], place: str):
        self.config = config
        self.place = f"config.json: {place}"
        self.problems: list[str] = []

    def positive(self, name: str, default: int | None = None, at_most: int = LARGEST_SIZE) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            found = "missing" if value is None else f"{value!r:.100}"
            limit = "" if at_most == LARGEST_SIZE else f" of at most {at_most}"
            self.problems.append(f"{self.place}{name} is {found}, expected a positive integer{limit}")
            return 1
        return value

    def number(self, name: str, value: Any, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST_NUMBER:
            self.problems.append(f"{self.place}{name} is {value!r:.100}, expected a finite number, 0 or more")
            return default
        return float(value)

    def activation(self, gelu: bool) -> None:
        # Gemma's first configs say gelu and mean its tanh form; a later field replaces that one.
        expected = ("gelu_pytorch_tanh", "gelu") if gelu else ("silu", "swish")
        name = "hidden_activation" if gelu and self.config.get("hidden_activation") else "hidden_act"
        found = self.config.get(name) or expected[0]
        if found not in expected:
            self.problems.append(f"{self.place}{name} is {found!r}, expected {expected[0]!r}")

    def cap(self, name: str, family: Family) -> float | None:
        value = self.config.get(name, family.caps.get(name))
        return self.number(name, value, 0.0) or None

    def local_rope(self, default: float) -> dict[str, Any]:
        nested = self.config.get("rope_parameters")
        local = nested.get("sliding_attention") if isinstance(nested, Mapping) else None
        record = dict(local) if isinstance(local, Mapping) else {}
        theta = record.get("rope_theta") or self.config.get("rope_local_base_freq") or default
        return {"rope_type": "default", **record, "rope_theta": self.number("rope_local_base_freq", theta, default)}

    def max_positions(self, rope: Mapping[str, Any]) -> int:
        limit = self.positive("max_position_embeddings", default=2048)
        first = rope.get("original_max_position_embeddings")
        return min(limit, first) if rope["rope_type"] == "longrope" and isinstance(first, int) else limit

    def experts(self, names: ExpertNames, layers: int) -> Experts:
        config = self.config
        count = self.positive(next((name for name in names.count if config.get(name)), names.count[0]))
        step = self.positive(names.step, default=1) if names.step else 1
        active = self.positive(names.active, at_most=count)
        dense = config.get(names.dense) or [] if names.dense else []
        if not isinstance(dense, list):
            self.problems.append(f"{self.place}{names.dense} is {dense!r:.100}, expected a list of layers or null")
            dense = []
        normalized = names.normalized
        return Experts(
            names=names,
            count=count,
            active=active,
            width=self.positive(names.width),
            normalized=bool(config.get(normalized, False)) if isinstance(normalized, str) else normalized,
            layers=frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
        )

    def rope(self, family: Family) -> dict[str, Any]:
        """One rotary record: `rope_type`, `rope_theta` and the settings of that type."""
        partial, usual = family.partial_rotary, family.defaults.get("rope_theta", DEFAULT_ROPE_THETA)
        nested = self.config.get("rope_parameters") or {}
        if isinstance(nested, Mapping) and isinstance(nested.get("full_attention"), Mapping):
            nested = nested["full_attention"]
        scaling = self.config.get("rope_scaling") or {}
        top = self.config.get("rope_theta")
        if not isinstance(nested, Mapping) or not isinstance(scaling, Mapping):
            self.problems.append(f"{self.place}rope_parameters and rope_scaling must be objects or null")
            return {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
        if top is not None and "rope_theta" in nested and nested["rope_theta"] != top:
            self.problems.append(
                f"{self.place}rope_theta is {top} but rope_parameters.rope_theta is {nested['rope_theta']}; "
                "keep the one the model was trained with"
            )
        record = {**scaling, **nested}
        kind = record.pop("rope_type", None) or record.pop("type", None) or "default"
        record.pop("type", None)
        theta = record.pop("rope_theta", None) or top or usual
        part = record.pop("partial_rotary_factor", None) or self.config.get("partial_rotary_factor") or 1
        if part != 1 and not partial:
            self.problems.append(f"{self.place}partial_rotary_factor other than 1 is not supported")
        elif part != 1:
            record["partial_rotary_factor"] = min(self.number("partial_rotary_factor", part, 1.0), 1.0)
        # Phi-3's own names for what became longrope; its first training length stands beside them.
        if partial and kind in ("su", "yarn"):
            kind = "longrope"
        original = self.config.get("original_max_position_embeddings")
        if kind == "longrope" and original is not None:
            record.setdefault("original_max_position_embeddings", original)
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
        if rule.full_every is not None:
            named = ("sliding_window_pattern", "_sliding_window_pattern")
            field = next((name for name in named if self.config.get(name)), named[0])
            step = self.positive(field, default=rule.full_every)
            return tuple(window if (layer + 1) % step else None for layer in range(layers))
        first = self.positive(rule.first) if rule.first and self.config.get(rule.first) else 0
        return tuple(window if layer >= first else None for layer in range(layers))
