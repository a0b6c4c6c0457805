"""What a rotation costs: the cross-entropy of the rotated model with 4-bit weights and 8-bit activations.

The weights are folded as in a conversion, rounded to 4-bit groups, and lent to the layers of `FloatModel`, whose linear
layers round their inputs to INT8. The loss is a function of R1 and of every R2 alone, with a gradient; it does not
change with them where nothing is rounded.

Memory: the source's weights if there is room for them (otherwise they are read again for every use), the residual
stream between layers, and one layer at a time, which the backward pass computes again.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bitnest_format.architecture import Architecture
from bitnest_format.converters.base import Source
from bitnest_format.converters.fake_quant import fake_quantize_activations, fake_quantize_weight
from bitnest_format.converters.float_model import FloatModel
from bitnest_format.converters.rotation import Rotation, rotate_embedding, rotate_layer

# Logits that exist at a time.
LOGITS_AT_ONCE = 1 << 26


class RotatedLoss:
    """The mean cross-entropy of the next token, float32, as a function of R1 and the R2 of all layers.

    `group_sizes`: inputs per scale of every module whose weights are rounded; `search`: whether scales are searched.
    The head and the embedding stay as they are. With `quantize` off it is the source's own loss.
    """

    def __init__(
        self,
        source: Source,
        architecture: Architecture,
        group_sizes: Mapping[str, int],
        device: str,
        *,
        search: bool = True,
    ):
        self.architecture = architecture
        self.group_sizes = group_sizes
        self.search = search
        self.quantize = True
        self.model = FloatModel(source.config, architecture, device)
        for layer in range(architecture.layers):
            for module in {self.model.linear(layer, linear) for linear in architecture.linears(layer)}:
                module.register_forward_pre_hook(self._round_inputs)
        self._read = _reader(source, architecture, device)

    def __call__(self, input_ids: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        """`input_ids` int64 `[B, T]`; `r1` float32 `[H, H]`, `r2` float32 `[L, D, D]` -> a scalar."""
        ids = input_ids.to(r1.device)
        hidden = rotate_embedding(self._read(self.architecture.embedding)[ids], Rotation("learned", r1, r2.__getitem__))
        hidden = hidden * self.architecture.embedding_factor
        for layer in range(self.architecture.layers):
            hidden = _recomputed(self._layer, layer, hidden, r1, r2[layer])
        # Turned back, the stream meets the source's own final norm and head.
        return self._cross_entropy(hidden @ r1.T, ids)

    def _layer(self, layer: int, hidden: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        tensors = {name: self._read(name) for name in self.architecture.layer_tensors(layer)}
        rotation = Rotation("learned", r1, lambda _: r2)
        folded = dict(rotate_layer(tensors, layer, self.architecture, rotation))
        if self.quantize:
            for name, weight in folded.items():
                size = self.group_sizes.get(name.removesuffix(".weight"))
                if size is not None:
                    folded[name] = fake_quantize_weight(weight, size, search=self.search)
        # Attention by the plain formula: the fused kernels sum gradients in an order that changes from run to run.
        with sdpa_kernel(SDPBackend.MATH):
            return self.model.forward_layer(layer, folded, hidden)

    def _round_inputs(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (fake_quantize_activations(inputs[0]), *inputs[1:]) if self.quantize else inputs

    def _cross_entropy(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Of every token but the first of each sequence, some rows at a time."""
        normed = self.model.final_norm(hidden, self._read(self.architecture.final_norm).float())
        tied = self.architecture.tied_embeddings
        head = self._read(self.architecture.embedding if tied else self.architecture.head)
        rows, targets = normed[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        total = torch.zeros((), device=hidden.device)
        size = max(1, LOGITS_AT_ONCE // head.shape[0])
        for some, wanted in zip(rows.split(size), targets.split(size), strict=True):
            total = total + _recomputed(_summed_cross_entropy, some, head, wanted)
        return total / targets.numel()


def _summed_cross_entropy(rows: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(rows @ head.float().T, targets, reduction="sum")


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function whose inner results are not kept for the backward pass but computed again there."""
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def _reader(source: Source, architecture: Architecture, device: str) -> Callable[[str], Tensor]:
    """Reads the source's tensors onto the device, in their stored type, and keeps them there if all of them fit."""
    infos = [source.tensors[name] for name in architecture.tensors()]
    needed = sum(info.dtype.itemsize * math.prod(info.shape) for info in infos)
    kept: dict[str, Tensor] = {}
    keep = needed <= _free_bytes(device) // 2

    def read(name: str) -> Tensor:
        if name in kept:
            return kept[name]
        tensor = source.read(name).to(device)
        if keep:
            kept[name] = tensor
        return tensor

    return read


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Not every system tells; there the weights are kept.
    free = "SC_AVPHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free else sys.maxsize
