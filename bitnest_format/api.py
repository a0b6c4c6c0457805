"""The library's front door: open a nested checkpoint and generate from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitnest_format import hub, pull

if TYPE_CHECKING:
    from bitnest_format.runtime.generate import NestedModel, OpenView
    from bitnest_format.runtime.model import Unpack


def load(
    path_or_repo_id: str,
    *,
    view: OpenView = "nested",
    revision: str | None = None,
    device: str = "auto",
    unpack: Unpack = "auto",
) -> NestedModel:
    """Open a checkpoint for generation.

    path_or_repo_id: a local folder, or a Hub repository id (`owner/name`) where no such folder exists.
    view: `nested` decodes speculatively from both planes, `target` with both planes and no drafts, `draft` from the
        base plane alone; `draft` downloads and reads only the base shards.
    revision: branch, tag or commit of the repository; refused for a local folder.
    device: where to compute: `auto` is a GPU where one can be used and otherwise the CPU; `cpu`, `cuda` or `cuda:1`.
        Where a GPU is there, or was asked for, but cannot be used, a `DeviceWarning` says why.
    unpack: on the CPU, when codes are unpacked: `load` (faster, more memory), `call` (at each use), or `auto`, which
        decides by the memory that is free.

    Returns a model whose `generate(prompt, max_new_tokens=..., gamma=4, ...)` gives the text, the token ids and the
    run's statistics. Greedy output of `nested` equals that of `target` token for token.

    Raises `UsageError` for a path that is no checkpoint, `HubError` where the repository cannot be had or does not hold
    what its manifest says,
    `CheckpointError` for a checkpoint that is broken or of an unknown version, `UnsupportedModelError` for one that the
    GPU that was asked for cannot run, `GenerationError` where it does not fit into that GPU's memory.
    """
    from bitnest_format.runtime.generate import NestedModel

    patterns = hub.DRAFT_FILES if view == "draft" else hub.CHECKPOINT_FILES
    located = hub.locate(path_or_repo_id, revision=revision, patterns=patterns)
    if located.repo_id is not None:
        pull.verify(located.path, located.repo_id, view="draft" if view == "draft" else "nested")
    return NestedModel.open(located.path, view=view, unpack=unpack, device=device)
