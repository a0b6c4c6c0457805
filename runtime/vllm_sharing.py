"""Parameters of a loaded target that a drafter of the same checkpoint takes over, instead of a second copy.

With `speculative_config={"method": "draft_model", "quantization": "bitnest-draft", ...}` vLLM loads a drafter after the
target, in the same processes and with the same ranks, as a model of its own. Where that is the draft view of the same
checkpoint, its planes, scales, embedding and head are the target's already: layers of the target are noted here when
they are made, and those of the drafter register the very same parameters. Loading then writes the same bytes once more.
What is no linear layer or embedding (the gains of norms) is held twice, a few KiB a layer, and so is the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from bitnest_format.checkpoint import QUANT_METHOD

# What vLLM puts before the names of a drafter's layers (but not before that of its embedding).
DRAFTER_PREFIX = "draft_model."
DRAFT_METHOD = f"{QUANT_METHOD}-draft"

_LAYERS: WeakValueDictionary[tuple[str, str], torch.nn.Module] = WeakValueDictionary()


def is_drafter() -> bool:
    """Whether the model that vLLM is making drafts for another one."""
    config = get_current_vllm_config()
    speculation = config.speculative_config
    return speculation is not None and config.model_config is speculation.draft_model_config


def base_planes_draft() -> bool:
    """Whether vLLM was asked to draft by the draft view of a nested checkpoint, for or in the model it is making."""
    speculation = get_current_vllm_config().speculative_config
    drafter = None if speculation is None else speculation.draft_model_config
    return drafter is not None and drafter.quantization == DRAFT_METHOD


def offer(source: str, name: str, layer: torch.nn.Module) -> None:
    """Let a drafter of the checkpoint `source` find a layer of the target."""
    _LAYERS[source, name] = layer


def adopt(
    source: str, name: str, layer: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> torch.nn.Module | None:
    """Give a layer the parameters of these names and shapes of the target's layer, which is returned if there is one.

    None where the target is another checkpoint, or keeps codes that were unpacked.
    """
    target = _LAYERS.get((source, name))
    stored = {key: getattr(target, key, None) for key in shapes}
    if any(tensor is None or tuple(tensor.shape) != shapes[key] for key, tensor in stored.items()):
        return None
    for key, tensor in stored.items():
        layer.register_parameter(key, tensor)
    return target


class SharedEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is not followed
    """An embedding, or a head that is not nested; a drafter's is the target's."""

    def __init__(self, source: str, name: str, shared: bool):
        self.key = (source, name or "embedding")
        self.shared = shared
        self.target: torch.nn.Module | None = None

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
        if self.shared:
            self.target = adopt(*self.key, layer, {"weight": shape})
        if self.target is not None:
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

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """vLLM keeps a second form of the weight on CPUs, which is shared as well."""
        packed = getattr(self.target, "cpu_linear", None)
        if packed is None:
            super().process_weights_after_loading(layer)
        else:
            layer.cpu_linear = packed
