"""A nested linear layer of vLLM: how its tensors are cut over ranks, loaded, and multiplied.

The arithmetic is that of this project's runtime: activations are rounded to INT8 per token, group sums are integers.
A rank that holds some of a row's inputs rounds by the scale of the whole row, which the ranks agree on first, so the
codes are those of one rank. Their partial sums are added by vLLM, in another order than one rank would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import BasevLLMParameter, GroupQuantScaleParameter, ModelWeightParameter

from bitnest_format import packing
from bitnest_format.checkpoint import (
    BASE_SUFFIX,
    PERMUTATION_SUFFIX,
    REFINEMENT_SUFFIX,
    SCALE_SUFFIX,
    NestedWeight,
    View,
    forbidden_pair,
)
from bitnest_format.errors import CheckpointError, UnsupportedModelError
from bitnest_format.kernels.reference import activation_scale
from bitnest_format.kernels.reference_linear import code_type
from bitnest_format.manifest import Module
from bitnest_format.runtime.nested_product import NestedProduct
from bitnest_format.runtime.vllm_sharing import adopt, base_planes_draft, offer
from bitnest_format.shards import DTYPE_NAMES

# A word of eight codes 0.
ZERO_CODES = 0x88888888 - (1 << 32)

TYPES = {
    BASE_SUFFIX: (torch.int32,),
    REFINEMENT_SUFFIX: (torch.int32,),
    SCALE_SUFFIX: (torch.float16, torch.float32),
    PERMUTATION_SUFFIX: (torch.int32,),
}


class PermutationParameter(BasevLLMParameter):  # type: ignore[misc]  # vLLM is not followed
    """The input permutation of a layer, whole on every rank: int32 `[I]`, or `[parts, I]` where it has parts."""

    def load_merged_column_weight(self, loaded_weight: Tensor, **options: Any) -> None:
        self.data[self._shard_id_as_int(options["shard_id"])].copy_(loaded_weight)

    load_qkv_weight = load_merged_column_weight


@register_weight_loader_v2_supported_method
class NestedLinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM is not followed
    """Creates, loads and multiplies the tensors of one layer, which holds the modules `parts` in their order.

    `source` names the checkpoint; `shared`: whether the layer belongs to a drafter, which takes the target's tensors.
    """

    def __init__(self, source: str, parts: Mapping[str, Module], view: View, shared: bool):
        self.source = source
        self.parts = parts
        self.view: View = view
        self.shared = shared
        self.target: Any = None
        self.loaded: set[str] = set()
        # Codes of one view are of no use to the other: target and drafter read the same words.
        self.keep_words = base_planes_draft()

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **_: object,
    ) -> None:
        """Room for what this rank holds: words `[O, I / 8]` of each plane, float32 scales `[O, G]`.

        Raises `UnsupportedModelError` where vLLM's layer is of another shape than the modules.
        """
        modules = list(self.parts.values())
        self._check_shape(layer, input_size, output_size)
        outputs, inputs = sum(output_partition_sizes), input_size_per_partition
        self.outputs = output_partition_sizes
        words = (outputs, inputs // packing.CODES_PER_WORD)
        shapes: dict[str, tuple[int, ...]] = {
            BASE_SUFFIX: words,
            SCALE_SUFFIX: (outputs, modules[0].groups * inputs // input_size),
        }
        if self.view == "target":
            shapes[REFINEMENT_SUFFIX] = words
        if any(module.permutation is not None for module in modules):
            shapes[PERMUTATION_SUFFIX] = (inputs,) if len(modules) == 1 else (len(modules), inputs)
        self.suffixes = tuple(shapes)
        if self.shared:
            self.target = adopt(self.source, self.name, layer, shapes)
        if self.target is not None:
            return
        for suffix, shape in shapes.items():
            dtype = torch.float32 if suffix == SCALE_SUFFIX else torch.int32
            data, loader = torch.zeros(shape, dtype=dtype), self._checked(suffix, weight_loader)
            if suffix == PERMUTATION_SUFFIX:
                data[...] = torch.arange(inputs)
                parameter = PermutationParameter(data=data, weight_loader=loader)
            else:
                kind = GroupQuantScaleParameter if suffix == SCALE_SUFFIX else ModelWeightParameter
                parameter = kind(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(suffix, parameter)
        if not self.shared:
            offer(self.source, self.name, layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything came, and bring it into the form that is multiplied.

        Raises `CheckpointError` for tensors that did not come and for forbidden pairs of codes.
        """
        stored = {suffix: getattr(layer, suffix) for suffix in self.suffixes}
        self._check_loaded(stored)
        if self.target is not None and layer.bias is not None:
            layer.bias = self.target.bias
        if isinstance(layer, ParallelLMHead):
            for suffix in stored.keys() & {BASE_SUFFIX, REFINEMENT_SUFFIX}:
                stored[suffix].data[layer.num_org_embeddings_per_partition :] = ZERO_CODES
        scale = stored[SCALE_SUFFIX]
        narrow = scale.data.half()
        # Scales are float16 in nearly all checkpoints; kernels read half the bytes, and some take no others.
        if scale.dtype == torch.float32 and torch.equal(narrow.float(), scale.data):
            scale.data = narrow
        weights = self._weights(stored)
        for name, weight in weights.items():
            if weight.refinement is not None and packing.any_forbidden_pair(weight.base, weight.refinement):
                raise forbidden_pair(name)
        unpack: Literal["load", "call"] = "load" if self._worth_unpacking(scale.device) else "call"
        layer.products = [NestedProduct.of(weight, self.view, unpack) for weight in weights.values()]
        if unpack == "load":
            for suffix in stored:
                delattr(layer, suffix)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` `[..., I]` -> `[..., O]` of the same type."""
        rows = x.reshape(-1, x.shape[-1])
        step = None
        if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
            own = activation_scale(rows.float())
            step = tensor_model_parallel_all_gather(own.unsqueeze(-1)).amax(dim=-1)
        outputs, first = [], 0
        for product in layer.products:
            part = None if bias is None else bias[first : first + product.outputs]
            outputs.append(product(rows, step, part))
            first += product.outputs
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return output.to(x.dtype).view(*x.shape[:-1], output.shape[-1])

    def _weights(self, stored: Mapping[str, Parameter]) -> dict[str, NestedWeight]:
        """What is multiplied at once, by name: the whole layer, or each part where inputs stand in different orders."""
        permutation = stored[PERMUTATION_SUFFIX].data if PERMUTATION_SUFFIX in stored else None
        refinement = stored[REFINEMENT_SUFFIX].data if REFINEMENT_SUFFIX in stored else None
        whole = NestedWeight(stored[BASE_SUFFIX].data, stored[SCALE_SUFFIX].data, refinement, None, permutation)
        if permutation is None or permutation.ndim == 1:
            return {self.name: whole}
        if bool((permutation == permutation[0]).all()):
            return {self.name: replace(whole, permutation=permutation[0])}
        weights, first = {}, 0
        for number, (name, outputs) in enumerate(zip(self.parts, self.outputs, strict=True)):
            part = whole.rows(slice(first, first + outputs))
            weights[name] = replace(part, permutation=permutation[number])
            first += outputs
        return weights

    @property
    def name(self) -> str:
        return ", ".join(self.parts)

    def _worth_unpacking(self, device: torch.device) -> bool:
        """Whether to keep codes instead of words: on a CPU that multiplies bytes, unless a drafter shares the words."""
        return device.type == "cpu" and code_type(device) == torch.int8 and not self.keep_words

    def _checked(self, suffix: str, load: Callable[..., None]) -> Callable[..., None]:
        """A loader of vLLM that first compares a tensor with the manifest, and notes that it came.

        Raises `CheckpointError` where type or shape are not those that the format gives.
        """
        names = list(self.parts)

        def loader(parameter: Parameter, tensor: Tensor, *shard: Any) -> None:
            part = names[{"q": 0, "k": 1, "v": 2}.get(shard[0], shard[0])] if shard else names[0]
            shape = stored_shape(self.parts[part], suffix)
            if tensor.dtype not in TYPES[suffix] or tuple(tensor.shape) != shape:
                wanted = " or ".join(DTYPE_NAMES[dtype] for dtype in TYPES[suffix])
                found = f"{DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))} {list(tensor.shape)}"
                raise CheckpointError(f"{part}.{suffix}: is {found}, expected {wanted} {list(shape)}")
            load(parameter, tensor, *shard)
            self.loaded.add(f"{part}.{suffix}")

        return loader

    def _check_loaded(self, stored: Mapping[str, Parameter]) -> None:
        wanted = {
            f"{name}.{suffix}"
            for name, module in self.parts.items()
            for suffix in stored
            if suffix != PERMUTATION_SUFFIX or module.permutation is not None
        }
        if self.target is None and (missing := sorted(wanted - self.loaded)):
            raise CheckpointError(f"the weight files lack {', '.join(missing)}. Download the checkpoint again.")

    def _check_shape(self, layer: nn.Module, input_size: int, output_size: int) -> None:
        if isinstance(layer, ParallelLMHead):
            output_size = layer.org_vocab_size
        inputs = next(iter(self.parts.values())).shape[1]
        outputs = sum(module.shape[0] for module in self.parts.values())
        replicas = getattr(layer, "num_kv_head_replicas", 1)
        if inputs != input_size or (replicas == 1 and outputs != output_size):
            raise UnsupportedModelError(
                f"{self.name}: {outputs} x {inputs} in the manifest, but {type(layer).__name__} of vLLM is "
                f"{output_size} x {input_size}. Run the model with bitnest_format.load."
            )


def stored_shape(module: Module, suffix: str) -> tuple[int, ...]:
    """The shape of a stored tensor of a module, by its suffix."""
    outputs, inputs = module.shape
    shapes: dict[str, tuple[int, ...]] = {
        SCALE_SUFFIX: (outputs, module.groups),
        PERMUTATION_SUFFIX: (inputs,),
    }
    return shapes.get(suffix, (outputs, inputs // packing.CODES_PER_WORD))
