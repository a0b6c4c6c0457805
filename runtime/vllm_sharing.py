"""Parameters of a loaded target that a drafter of the same checkpoint takes over, instead of a second copy.

vLLM loads the model that drafts after the target, in the same process and with the same ranks, as a model of its own
whose layers' names begin with `draft_model.`. Where that is the draft view of the same checkpoint, every tensor that it
needs is one of the target's already.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

DRAFTER_PREFIX = "draft_model."

_LAYERS: WeakValueDictionary[tuple[str, str], torch.nn.Module] = WeakValueDictionary()


def offer(source: str, name: str, layer: torch.nn.Module) -> None:
    """Let a drafter of the checkpoint `source` find a layer of the target."""
    _LAYERS[source, name] = layer


def adopt(source: str, name: str, layer: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Give a layer the target's parameters of these names and shapes, if there is such a target; whether there is."""
    target = _LAYERS.get((source, name))
    if target is None or any(tuple(getattr(target, key).shape) != shape for key, shape in shapes.items()):
        return False
    for key in shapes:
        layer.register_parameter(key, getattr(target, key))
    return True


class SharedEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is not followed
    """An embedding, or a head that is not nested; a drafter's is the target's."""

    def __init__(self, source: str, name: str, shared: bool):
        self.key = (source, name or "embedding")
        self.shared = shared

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        if self.shared and adopt(*self.key, layer, {"weight": shape}):
            return
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        if not self.shared:
            offer(*self.key, layer)
