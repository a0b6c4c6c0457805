"""Cosines and sines of the rotary embedding, by position."""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.errors import UnsupportedModelError

# Kinds whose frequencies do not change while a text grows; others would make a token's numbers depend on the length
# of the text at the moment it is computed. Those of longrope change once, where `Architecture.max_positions` ends.
FIXED_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
TABLE_BLOCK = 256


class RopeTable:
    """Float32 cosines and sines, computed when a position is first asked for.

    Frequencies come from transformers' own rotary module, so that every scaling rule is the one the model was trained
    with. Tables grow in blocks that start at fixed positions: what a position gets never depends on who asked first.
    Raises `UnsupportedModelError` for scaling kinds outside `FIXED_KINDS` and for settings transformers refuses.
    """

    def __init__(self, architecture: Architecture, device: torch.device):
        frequencies, self.factor = _frequencies(architecture)
        self.frequencies = frequencies.to(device)
        self.cosine = torch.empty(0, 1, len(frequencies), device=device)
        self.sine = self.cosine

    def rows(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of `count` positions from `position` on, each `[count, 1, R / 2]`."""
        stop = position + count
        while self.cosine.shape[0] < stop:
            self._grow()
        return self.cosine[position:stop], self.sine[position:stop]

    def _grow(self) -> None:
        first = self.cosine.shape[0]
        places = torch.arange(first, first + TABLE_BLOCK, device=self.frequencies.device, dtype=torch.float32)
        angles = places.view(-1, 1, 1) * self.frequencies
        self.cosine = torch.cat((self.cosine, angles.cos() * self.factor))
        self.sine = torch.cat((self.sine, angles.sin() * self.factor))


def _frequencies(architecture: Architecture) -> tuple[Tensor, float]:
    """Radians per position `[R / 2]`, `R` being the rotary size, and the factor on cosines and sines."""
    kind = architecture.rope["rope_type"]
    if kind not in FIXED_KINDS:
        raise UnsupportedModelError(
            f"config.json: rotary scaling {kind!r} is not supported; supported are {', '.join(FIXED_KINDS)}"
        )
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # Frequencies of a part of each head are those of a head of that size.
    rope = {key: value for key, value in architecture.rope.items() if key != "partial_rotary_factor"}
    try:
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=architecture.hidden_size,
                num_attention_heads=architecture.heads,
                head_dim=architecture.rotary_size,
                max_position_embeddings=architecture.longest_positions,
                rope_parameters=rope,
            )
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModelError(f"config.json: rotary settings {dict(architecture.rope)}: {error}") from error
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
