"""Where transformers' layers are built otherwise than their checkpoints are stored.

transformers fuses some linear layers into one matrix and a layer's experts into two tensors of three dimensions.
Here tensors of one layer, by the names of `Architecture`, are made to fit its modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bitnest_format.architecture import Architecture
from bitnest_format.config_fields import Experts

# What transformers calls every layer's MLP, a mixture or not, whatever its checkpoints call it.
MLP_BLOCK = "mlp"

# Fewer tokens than this share of a matrix's inputs say too little of an expert: it is rounded, and the user is told.
# What error feedback makes of that many depends on their spectrum: with a flat one it leaves the target view 1.06 times
# as wrong as rounding, Hessians shrunk, with a steep one a fifth as wrong (`benchmarks/few_tokens.py`).
FEWEST_TOKENS_PER_INPUT = 1 / 16


class ExpertModules(nn.Module):
    """Stands in for transformers' fused experts: the same sum, with linear layers of their own that can be observed.

    Takes what their `forward` takes: hidden states `[T, H]`, and the numbers and weights of each token's experts, both
    `[T, active]`.
    """

    def __init__(self, experts: Experts, hidden_size: int):
        super().__init__()
        self.names = experts.names
        for number in range(experts.count):
            expert = nn.Module()
            expert.add_module(self.names.gate, nn.Linear(hidden_size, experts.width, bias=False))
            expert.add_module(self.names.up, nn.Linear(hidden_size, experts.width, bias=False))
            expert.add_module(self.names.down, nn.Linear(experts.width, hidden_size, bias=False))
            self.add_module(str(number), expert)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for name, expert in self.named_children():
            rows, places = torch.where(chosen == int(name))
            if rows.numel():
                gate, up = expert.get_submodule(self.names.gate), expert.get_submodule(self.names.up)
                inner = nn.functional.silu(gate(hidden[rows])) * up(hidden[rows])
                outputs = expert.get_submodule(self.names.down)(inner)
                total.index_add_(0, rows, outputs * weights[rows, places, None])
        return total


def separate_experts(layers: nn.ModuleList, architecture: Architecture) -> None:
    """Replace the fused experts of transformers' decoder layers by `ExpertModules`."""
    for number, layer in enumerate(layers):
        if architecture.experts is not None and architecture.is_mixture(number):
            block = layer.get_submodule(MLP_BLOCK)
            block.add_module("experts", ExpertModules(architecture.experts, architecture.hidden_size))


def module_name(linear: str, architecture: Architecture) -> str:
    """The submodule of transformers' layer that a linear layer belongs to."""
    for fused, parts in architecture.family.fused.items():
        if linear in parts:
            return fused
    experts = architecture.experts
    if experts is not None and linear.startswith(f"{experts.names.block}."):
        return MLP_BLOCK + linear.removeprefix(experts.names.block)
    return linear


def fitting(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """A layer's tensors, by name within the layer, as `separate_experts`' modules name and join them."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        linear, _, kind = name.rpartition(".")
        target = f"{module_name(linear, architecture)}.{kind}"
        result[target] = torch.cat((result[target], tensor)) if target in result else tensor
    return result


def starved_experts(tokens: Mapping[str, int], architecture: Architecture) -> set[str]:
    """Which linear layers belong to experts that too few tokens reached; `tokens` counts those each has seen."""
    if architecture.experts is None:
        return set()
    needed = FEWEST_TOKENS_PER_INPUT * max(architecture.hidden_size, architecture.experts.width)
    return {linear for linear, seen in tokens.items() if is_expert(linear, architecture) and seen < needed}


def is_expert(linear: str, architecture: Architecture) -> bool:
    """Whether a linear layer belongs to one expert of a mixture, which sees some tokens only."""
    return architecture.experts is not None and ".experts." in linear
