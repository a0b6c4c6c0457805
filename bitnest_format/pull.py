"""Downloading a nested checkpoint from the Hub: the files that a view needs, of one commit, and whether they arrived.

Without a folder of its own a pull fills the Hub's cache, where `load` finds it, online or not. Nothing is written
beside the cache's snapshots. What was downloaded before is not downloaded again: a nested view after a draft costs its
refinement shards alone, and an interrupted pull goes on where it stopped.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from bitnest_format import hub
from bitnest_format.checkpoint import CONFIG_FILE, DRAFT_INDEX, TARGET_INDEX
from bitnest_format.errors import CheckpointError, FileFormatError, UsageError
from bitnest_format.hub import HubError, Location
from bitnest_format.manifest import MANIFEST_FILE, Manifest
from bitnest_format.shards import LocalFiles, file_sha256, inside, json_in

PullView = Literal["draft", "nested"]
REFINEMENT_PREFIX = "bitnest-refinement-"
# Where the client notes what a folder holds already, so that an interrupted pull can go on.
CLIENT_NOTES = ".cache/huggingface"


def pull(
    repo_id: str,
    *,
    view: PullView = "nested",
    revision: str | None = None,
    out: Path | None = None,
    deep: bool = False,
    force: bool = False,
) -> Location:
    """Download what a view of a nested checkpoint needs; returns where it lies.

    view: `draft` leaves the refinement shards out. revision: branch, tag or commit. out: a folder to fill with plain
    files in place of the Hub's cache; it may hold an earlier pull. deep: compare the SHA-256 of every file with the
    manifest, which is always done for `out`; sizes are compared in any case. force: download again what is there.

    Raises `UsageError` for an impossible id or a folder with other files in it, `HubError` where the repository cannot
    be had, is no nested checkpoint, or does not hold what its manifest says.
    """
    hub.check_repo_id(repo_id)
    patterns = hub.DRAFT_FILES if view == "draft" else hub.CHECKPOINT_FILES
    if out is not None:
        _check_out(out)
        located = _pull_into(out, repo_id, revision, patterns, force)
    else:
        located = hub.locate_remote(repo_id, revision=revision, patterns=patterns, needed=MANIFEST_FILE, force=force)
    verify(located.path, repo_id, view=view, deep=deep or out is not None)
    if out is not None:
        shutil.rmtree(out / CLIENT_NOTES, ignore_errors=True)
        if (out / ".cache").is_dir() and not any((out / ".cache").iterdir()):
            (out / ".cache").rmdir()
    return located


def verify(folder: Path, repo_id: str, *, view: PullView, deep: bool = False) -> None:
    """Compare a download with its manifest: every file of the view is there with its size and, if `deep`, its SHA-256.

    Raises `HubError` naming the first file that is not what the manifest says.
    """
    files = LocalFiles(folder)
    if files.size(MANIFEST_FILE) is None:
        raise HubError(f"{repo_id}: holds no {MANIFEST_FILE}, so it is no nested checkpoint.")
    try:
        manifest = Manifest.from_dict(json_in(files, MANIFEST_FILE, strict=True))
        for name in manifest.files:
            inside(folder, name)
    except (CheckpointError, FileFormatError) as error:
        raise HubError(f"{repo_id}: {error}") from None
    needed = {CONFIG_FILE, DRAFT_INDEX} | ({TARGET_INDEX} if view == "nested" else set())
    for name, record in manifest.files.items():
        if view == "draft" and name.startswith(REFINEMENT_PREFIX):
            continue
        size = files.size(name)
        if size is None and not name.endswith(".safetensors") and name not in needed:
            continue
        if size is None:
            raise HubError(
                f"{repo_id}: {name} was not downloaded, or the repository lacks it. "
                f"Run 'bitnest-format pull {repo_id} --view {view}' with a connection to the Hub."
            )
        found, expected = f"has {size} bytes", f"{record.size} bytes"
        if size == record.size:
            if not deep or (digest := file_sha256(folder / name)) == record.sha256:
                continue
            found, expected = f"has SHA-256 {digest[:12]}...", f"{record.sha256[:12]}..."
        raise HubError(
            f"{repo_id}: {name} {found}, expected {expected} as in {MANIFEST_FILE}. "
            f"Run 'bitnest-format pull {repo_id} --force'; if that ends the same, the repository itself is damaged."
        )


def _check_out(out: Path) -> None:
    if out.is_dir():
        if any(out.iterdir()) and not (out / MANIFEST_FILE).is_file() and not (out / CLIENT_NOTES).is_dir():
            raise UsageError(f"{out}: holds other files, expected an empty or a new folder, or that of an earlier pull")
    elif out.exists():
        raise UsageError(f"{out}: is a file, expected a folder")


def _pull_into(out: Path, repo_id: str, revision: str | None, patterns: tuple[str, ...], force: bool) -> Location:
    located = hub.download_into(out, repo_id, revision=revision, patterns=patterns, needed=MANIFEST_FILE, force=force)
    if located.path == out:
        return located
    # The Hub could not be asked; the cache holds what is wanted.
    out.mkdir(parents=True, exist_ok=True)
    for name in LocalFiles(located.path).names():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(located.path / name, target)
    return replace(located, path=out)
