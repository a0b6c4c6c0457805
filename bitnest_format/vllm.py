"""Nested checkpoints in vLLM, which loads this plug-in by itself: installing both packages is all that it takes.

    vllm serve path_or_repo_id                                   # the target view
    vllm serve path_or_repo_id --quantization bitnest-draft      # the draft view

docs/serving.md says more. Nothing of vLLM is imported before it calls `register`.
"""

from __future__ import annotations


def register() -> None:
    """The entry point `vllm.general_plugins`: make the format known to vLLM; calling it again changes nothing."""
    from bitnest_format.runtime import vllm_config, vllm_loader

    vllm_config.register()
    vllm_loader.register()
