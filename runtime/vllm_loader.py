"""The load format `bitnest` of vLLM: only the files of the view that is wanted, and every tensor accounted for.

vLLM's own formats work as well. They take all safetensors files of a folder or a repository, where a draft needs only
the base shards, and do not look for tensors of a quantized model that did not come.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from bitnest_format.checkpoint import QUANT_METHOD, View
from bitnest_format.errors import UsageError

FILES: dict[View, str] = {"draft": "bitnest-base-*.safetensors", "target": "bitnest-*.safetensors"}


class BitnestLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not followed
    """vLLM's own loader for safetensors, shown the files of one view."""

    def __init__(self, load_config: LoadConfig):
        super().__init__(replace(load_config, load_format="safetensors"))
        self.enable_weights_track = True

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        view = getattr(getattr(model, "quant_config", None), "view", None)
        if view not in FILES:
            raise UsageError(f"{model_config.model}: no nested checkpoint, so it cannot have the load format bitnest")
        source = self.Source(model_config.model, model_config.revision, allow_patterns_overrides=[FILES[view]])
        yield from self._get_weights_iterator(source)


def register() -> None:
    """Make the load format known to vLLM; calling it again changes nothing."""
    if QUANT_METHOD not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(QUANT_METHOD)(BitnestLoader)
