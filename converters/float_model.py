"""The unquantized decoder, run one layer at a time over the calibration tokens to collect Hessians.

The layers are transformers' own modules, built without weights; a layer's tensors are lent to it for one call. What
stays in memory between layers is the residual stream alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitnest_format.architecture import Architecture, language_config
from bitnest_format.converters.float_parts import (
    fitting,
    is_expert,
    module_name,
    separate_experts,
    starved_experts,
)
from bitnest_format.converters.hessian import HessianSum, shrunk
from bitnest_format.converters.ranks import ALONE, Ranks

TOKENS_AT_ONCE = 2048
# The calibration text is cut into at least so many batches, if it has as many sequences, for ranks to share.
BATCHES = 8
# Residual streams beyond so many bytes stay in the CPU's memory, and a batch at a time goes to the GPU.
STREAM_BYTES_ON_GPU = 2_000_000_000


class FloatModel:
    """A decoder of the source's architecture whose weights are given layer by layer, on `device`, in float32."""

    def __init__(self, config: Mapping[str, Any], architecture: Architecture, device: str, ranks: Ranks = ALONE):
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        dropped = ("model_type", "architectures", "quantization_config")
        fields = {key: value for key, value in language_config(config).items() if key not in dropped}
        self.config = AutoConfig.for_model(architecture.family.model_type, **fields)
        # torch's fused attention bounds no scores.
        self.config._attn_implementation = "sdpa" if architecture.attention_cap is None else "eager"
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
            separate_experts(model.model.layers, architecture)
        self.decoder = model.model.eval()
        self.architecture = architecture
        self.device = device
        self.ranks = ranks
        self.batch = 1
        self.hidden = torch.empty(0)

    @torch.inference_mode()
    def embed(self, input_ids: Tensor, rows: Callable[[Tensor], Tensor]) -> None:
        """Start the residual stream of this rank's share of `input_ids` `[N, T]`.

        `rows(ids)` gives the embedding rows `[n, H]` of distinct ids. Batches are the same for any number of ranks.
        """
        sequences, length = input_ids.shape
        self.batch = max(1, min(TOKENS_AT_ONCE // length, -(-sequences // BATCHES)))
        # One more than the share, of no sequences, for a rank that has none.
        own = torch.cat([*self.ranks.mine(input_ids.split(self.batch)), input_ids[:0]])
        distinct, places = torch.unique(own, return_inverse=True)
        vectors = rows(distinct) * self.architecture.embedding_factor
        place = self.device if own.numel() * vectors[:1].nbytes <= STREAM_BYTES_ON_GPU else "cpu"
        self.hidden = vectors.to(place)[places.to(place)]

    @torch.inference_mode()
    def run_layer(
        self, layer: int, weights: Mapping[str, Tensor], collect: Iterable[Sequence[str]]
    ) -> dict[str, Tensor]:
        """Advance the stream through one layer; return the mean `X^T X` of each collected input.

        `weights`: the layer's tensors by full checkpoint name. `collect`: sequences of linear layers that share an
        input, such as `("mlp.gate_proj", "mlp.up_proj")`; the first name of each is the key of its Hessian
        `[I, I]`. Those of experts, which see a share of the tokens each, are `shrunk`; experts that too few tokens
        reached have none (`starved_experts`).
        """
        tensors = self._lent(layer, weights)
        sums: dict[str, HessianSum] = {}
        hooks = []
        for linears in collect:
            sums[linears[0]] = HessianSum(self.architecture.linear_shape(linears[0])[1], self.device)
            linear = self.linear(layer, linears[0])
            hooks.append(linear.register_forward_pre_hook(_collector(sums[linears[0]])))
        try:
            for hidden in self._batches():
                hidden.copy_(self._forward(layer, tensors, hidden.to(self.device)))
        finally:
            for hook in hooks:
                hook.remove()
        for total in sums.values():
            total.combine(self.ranks.add)
        tokens = {name: total.tokens for name, total in sums.items()}
        starved = starved_experts(tokens, self.architecture)
        means = {name: sums.pop(name).mean() for name in tuple(sums) if name not in starved}
        return {
            name: shrunk(mean, tokens[name]) if is_expert(name, self.architecture) else mean
            for name, mean in means.items()
        }

    def _batches(self) -> list[Tensor]:
        return list(self.hidden.split(self.batch)) if len(self.hidden) else []

    def forward_layer(self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """One layer's output for the stream `hidden` `[B, T, H]`, differentiable; the stream kept here stays."""
        return self._forward(layer, self._lent(layer, weights), hidden)

    def linear(self, layer: int, linear: str) -> nn.Module:
        """The module that computes a linear layer, alone or together with others that read the same input."""
        return self.decoder.layers[layer].get_submodule(module_name(linear, self.architecture))

    def _lent(self, layer: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        prefix = self.architecture.layer_prefix(layer)
        return fitting({name.removeprefix(prefix): tensor for name, tensor in weights.items()}, self.architecture)

    def final_norm(self, hidden: Tensor, gain: Tensor) -> Tensor:
        """The norm after the last layer, with `gain` `[H]`: `[..., H]`."""
        normed: Tensor = torch.func.functional_call(self.decoder.norm, {"weight": gain}, (hidden,))
        return normed

    @torch.inference_mode()
    def final_hessian(self, gain: Tensor) -> Tensor:
        """The mean `X^T X` of the head's input `[H, H]`: the stream after all layers, normed with `gain` `[H]`."""
        total = HessianSum(self.hidden.shape[-1], self.device)
        for hidden in self._batches():
            total.add(self.final_norm(hidden.to(self.device), gain))
        total.combine(self.ranks.add)
        return total.mean()

    def _forward(self, layer: int, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        kinds = () if self.architecture.local_rope is None else (self.config.layer_types[layer],)
        cosine_sine = self.decoder.rotary_emb(hidden, positions, *kinds)
        output = torch.func.functional_call(
            self.decoder.layers[layer],
            dict(tensors),
            (hidden,),
            {
                "attention_mask": self._mask(hidden, layer),
                "position_ids": positions,
                "position_embeddings": cosine_sine,
                "use_cache": False,
            },
        )
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _mask(self, hidden: Tensor, layer: int) -> Tensor | None:
        """None for plain causal attention (the kernel knows it); a boolean mask where a window cuts it short.

        Where scores are bounded, what is added to them.
        """
        window = self.architecture.sliding_windows[layer]
        length = hidden.shape[1]
        fused = self.architecture.attention_cap is None
        if fused and (not window or window >= length):
            return None
        distance = torch.arange(length, device=hidden.device).unsqueeze(1) - torch.arange(length, device=hidden.device)
        mask = ((distance >= 0) & (distance < (window or length)))[None, None]
        return mask if fused else torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))


def _collector(total: HessianSum) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def collect(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        total.add(inputs[0])

    return collect
