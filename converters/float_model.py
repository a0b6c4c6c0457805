"""The unquantized decoder, run one layer at a time over the calibration tokens to collect Hessians.

The layers are transformers' own modules, built without weights; a layer's tensors are lent to it for one call. What
stays in memory between layers is the residual stream alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitnest_format.architecture import Architecture
from bitnest_format.converters.hessian import HessianSum
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

        fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        fields.pop("quantization_config", None)
        self.config = AutoConfig.for_model(config["model_type"], **fields)
        self.config._attn_implementation = "sdpa"
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
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
        vectors = rows(distinct)
        place = self.device if own.numel() * vectors[:1].nbytes <= STREAM_BYTES_ON_GPU else "cpu"
        self.hidden = vectors.to(place)[places.to(place)]

    @torch.inference_mode()
    def run_layer(
        self, layer: int, weights: Mapping[str, Tensor], collect: Iterable[Sequence[str]]
    ) -> dict[str, Tensor]:
        """Advance the stream through one layer; return the mean `X^T X` of each collected input.

        `weights`: the layer's tensors by full checkpoint name. `collect`: sequences of linear layers that share an
        input, such as `("mlp.gate_proj", "mlp.up_proj")`; the first name of each is the key of its Hessian
        `[I, I]`.
        """
        module = self.decoder.layers[layer]
        prefix = self.architecture.layer_prefix(layer)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        sums: dict[str, HessianSum] = {}
        hooks = []
        for linears in collect:
            linear = module.get_submodule(linears[0])
            sums[linears[0]] = HessianSum(linear.in_features, self.device)
            hooks.append(linear.register_forward_pre_hook(_collector(sums[linears[0]])))
        try:
            for hidden in self._batches():
                hidden.copy_(self._forward(module, tensors, hidden.to(self.device), layer))
        finally:
            for hook in hooks:
                hook.remove()
        return {name: self._mean(sums.pop(name)) for name in tuple(sums)}

    def _batches(self) -> list[Tensor]:
        return list(self.hidden.split(self.batch)) if len(self.hidden) else []

    def _mean(self, total: HessianSum) -> Tensor:
        total.combine(self.ranks.add)
        return total.mean()

    def forward_layer(self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """One layer's output for the stream `hidden` `[B, T, H]`, differentiable; the stream kept here stays."""
        prefix = self.architecture.layer_prefix(layer)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        return self._forward(self.decoder.layers[layer], tensors, hidden, layer)

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
        return self._mean(total)

    def _forward(self, module: nn.Module, tensors: Mapping[str, Tensor], hidden: Tensor, layer: int) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        cosine_sine = self.decoder.rotary_emb(hidden, positions)
        output = torch.func.functional_call(
            module,
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
        """None for plain causal attention (the kernel knows it); a boolean mask where a window cuts it short."""
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if kinds is not None and kinds[layer] != "sliding_attention":
            window = None
        length = hidden.shape[1]
        if not window or window >= length:
            return None
        distance = torch.arange(length, device=hidden.device).unsqueeze(1) - torch.arange(length, device=hidden.device)
        return ((distance >= 0) & (distance < window))[None, None]


def _collector(total: HessianSum) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def collect(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        total.add(inputs[0])

    return collect
