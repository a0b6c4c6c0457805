"""The quantization methods `bitnest` and `bitnest-draft` of vLLM: which layers of a model are nested, and how.

vLLM asks for a method for every linear layer and embedding by its name. The manifest says which are nested; vLLM holds
some of them as one layer (`qkv_proj`, `gate_up_proj`), whose parts then have to be alike. What one rank holds of a
layer is checked for all layers at once, before any memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers.utils import cached_file
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from bitnest_format.checkpoint import QUANT_METHOD, REFINEMENT_SUFFIX, Checkpoint, View
from bitnest_format.errors import CheckpointError, UnsupportedModelError, UsageError
from bitnest_format.families import ATTENTION_INPUTS, ATTENTION_OUTPUT, MLP_INPUTS, MLP_OUTPUT
from bitnest_format.manifest import MANIFEST_FILE, Manifest, Module
from bitnest_format.runtime.vllm_linear import NestedLinearMethod
from bitnest_format.runtime.vllm_sharing import (
    DRAFT_METHOD,
    DRAFTER_PREFIX,
    SharedEmbeddingMethod,
    is_drafter,
)
from bitnest_format.shards import read_json

# The kernels' integer products and asynchronous copies need Ampere.
MIN_CAPABILITY = 80

# Layers that vLLM holds as one, by the last part of their names, with the modules of a checkpoint.
FUSED = {
    "qkv_proj": tuple(name.rpartition(".")[2] for name in ATTENTION_INPUTS),
    "gate_up_proj": tuple(name.rpartition(".")[2] for name in MLP_INPUTS),
}
# Modules whose inputs, not outputs, are cut over ranks.
ROW_PARALLEL = (ATTENTION_OUTPUT, MLP_OUTPUT)


class BitnestConfig(QuantizationConfig):  # type: ignore[misc]  # vLLM is not followed
    """The block `quantization_config` of a nested checkpoint, its manifest, and the view that is wanted.

    Raises `UsageError` for a view that does not exist.
    """

    method: ClassVar[str] = QUANT_METHOD
    default_view: ClassVar[View] = "target"

    def __init__(self, view: View):
        super().__init__()
        if view not in ("target", "draft"):
            raise UsageError(f"view is {view!r}, expected 'target' or 'draft'")
        self.view = view
        self.source = ""
        self.modules: Mapping[str, Module] = {}
        self._checked = False

    @classmethod
    def get_name(cls) -> str:
        return cls.method

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BitnestConfig:
        return cls(config.get("view", cls.default_view))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the manifest of a folder, or of a repository at the commit that its config was read from."""
        commit = getattr(hf_config, "_commit_hash", None) or revision
        manifest = Manifest.from_dict(read_json(manifest_path(model_name, commit)))
        if self.view not in manifest.views:
            raise CheckpointError(
                f"{MANIFEST_FILE}: the only view is the draft, of 4 bits; the {self.view} view cannot be rebuilt. "
                f"Serve the draft (--quantization {DRAFT_METHOD})."
            )
        if Path(model_name).is_dir():
            Checkpoint(Path(model_name), self.view)  # which looks for the files that its index names
        self.source = f"{model_name}@{commit}"
        self.modules = manifest.modules

    def get_checkpoint_weight_mapper(self) -> Any:
        """Refinement planes are dropped where only the draft is wanted."""
        unwanted = {f".{REFINEMENT_SUFFIX}": None} if self.view == "draft" else {}
        return WeightsMapper(orig_to_new_suffix=unwanted)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer by its name in vLLM.

        Raises `UnsupportedModelError` for layers that are nested only in part, for mixtures of experts, and where a
        rank would hold a part of a group.
        """
        if not self._checked:
            refuse(partition_problems(self.modules, get_tensor_model_parallel_world_size()))
            self._checked = True
        return self.layer_method(layer, prefix.removeprefix(DRAFTER_PREFIX))

    def layer_method(self, layer: torch.nn.Module, name: str) -> QuantizeMethodBase | None:
        """The same, for one layer by its name in a checkpoint."""
        if isinstance(layer, RoutedExperts):
            if any(module.startswith(f"{name.rpartition('.')[0]}.") for module in self.modules):
                raise UnsupportedModelError(
                    f"{name}: nested experts cannot be served by vLLM. Run the model with bitnest_format.load."
                )
            return None
        if isinstance(layer, LinearBase | ParallelLMHead):
            if parts := nested_parts(name, self.modules):
                return NestedLinearMethod(self.source, parts, self.view, is_drafter())
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return SharedEmbeddingMethod(self.source, name, is_drafter())
        return None


class BitnestDraftConfig(BitnestConfig):
    """The same, for the draft view: what `--quantization bitnest-draft` makes of a nested checkpoint."""

    method = DRAFT_METHOD
    default_view = "draft"

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        wanted = user_quant == DRAFT_METHOD and hf_quant_cfg.get("quant_method") == QUANT_METHOD
        return DRAFT_METHOD if wanted else None


def register() -> None:
    """Make both methods known to vLLM; calling it again changes nothing."""
    for config in (BitnestConfig, BitnestDraftConfig):
        if config.method not in QUANTIZATION_METHODS:
            register_quantization_config(config.method)(config)


def manifest_path(model: str, revision: str | None) -> Path:
    """The manifest of a folder, or of a repository. Raises `CheckpointError` where it cannot be had."""
    folder = Path(model)
    if folder.is_dir():
        return folder / MANIFEST_FILE
    try:
        found = cached_file(model, MANIFEST_FILE, revision=revision)
    except OSError as error:
        raise CheckpointError(
            f"{model}: {MANIFEST_FILE} cannot be had, so it is no nested checkpoint, or its push did not come to its "
            "end. Where access needs a token, log in ('hf auth login', or HF_TOKEN)."
        ) from error
    return Path(str(found))


def nested_parts(name: str, modules: Mapping[str, Module]) -> dict[str, Module]:
    """The nested modules that a layer of vLLM holds, in the order of its outputs; empty where it is not nested.

    Raises `UnsupportedModelError` where only some of its parts are nested, or where their groups differ.
    """
    parent, _, last = name.rpartition(".")
    names = [name] if name in modules else [f"{parent}.{part}" for part in FUSED.get(last, ())]
    parts = {part: modules[part] for part in names if part in modules}
    if not parts:
        return {}
    plain = [part for part in names if part not in parts]
    if plain:
        raise UnsupportedModelError(
            f"{name}: vLLM holds {', '.join(names)} as one layer, but {', '.join(plain)} is not quantized. "
            "Run the model with bitnest_format.load."
        )
    if len({module.group_size for module in parts.values()}) > 1:
        sizes = ", ".join(f"{part} {module.group_size}" for part, module in parts.items())
        raise UnsupportedModelError(
            f"{name}: vLLM holds its parts as one layer, but their group sizes differ: {sizes}. "
            "Convert the model with one --group-size."
        )
    return parts


def partition_problems(modules: Mapping[str, Module], ranks: int) -> list[str]:
    """Why modules whose inputs are cut over `ranks` cannot be: one sentence for all that have the same reason."""
    if ranks == 1:
        return []
    found: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not name.endswith(ROW_PARALLEL):
            continue
        inputs, group = module.shape[1], module.shape[1] // module.groups
        if module.permutation is not None:
            reason = f"its inputs stand in another order (weight_perm) and cannot be cut over {ranks} ranks"
        elif inputs % ranks or inputs // ranks % group:
            held = f"{inputs / ranks:g}"
            reason = f"{inputs} inputs over {ranks} ranks are {held} each, no whole number of groups of {group}"
        else:
            continue
        found.setdefault(reason, []).append(name)
    return [f"{_some(names)}: {reason}" for reason, names in found.items()]


def refuse(problems: Iterable[str]) -> None:
    """Raise `UnsupportedModelError` where there are problems with the number of ranks."""
    if listed := list(problems):
        remedy = "Choose another --tensor-parallel-size, use --pipeline-parallel-size, or convert with smaller groups"
        raise UnsupportedModelError([f"tensor parallelism does not fit the groups. {remedy}", *listed])


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
