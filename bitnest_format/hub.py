"""Where a model lies: a path on this machine, or a repository on the Hugging Face Hub.

One rule decides: **what exists locally wins.** Only a text that names nothing on disk is taken for a repository
id, and only if it can be one (`owner/name`), so that a mistyped path costs no network call. Offline mode
(`HF_HUB_OFFLINE=1`) is honoured, and a repository that cannot be asked about is taken from the cache if a
snapshot lies there. No message ever quotes a server's answer or a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from bitnest_format.errors import BitnestError, UsageError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

RepoType = Literal["model", "dataset"]

SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*")
DRAFT_FILES = (*SIDE_FILES, "bitnest-base-*.safetensors")
CHECKPOINT_FILES = (*SIDE_FILES, "bitnest-*.safetensors")
SOURCE_FILES = (*SIDE_FILES, "*.safetensors")
# Second copies of the same weights that some model repositories hold.
NOT_FETCHED = ("original/*", "consolidated*", "onnx/*")

DATASET_SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
NOT_DATA = ("dataset_info", "config.", "license", "readme")

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"{_NAME}/{_NAME}")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".json", ".jsonl", ".txt", ".parquet", ".git")


class HubError(BitnestError):
    """A repository that cannot be had: no such repository or revision, no access, no connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A model on this disk. `repo_id` and `revision` (a commit hash) are None for local paths.

    `note` is a remark for the user: a local folder stood in for a repository id, or the Hub could not be reached.
    """

    path: Path
    repo_id: str | None = None
    revision: str | None = None
    note: str | None = None


def resolve(path_or_repo_id: str, *, revision: str | None = None, patterns: tuple[str, ...] | None = None) -> Path:
    """The local path of a model: `locate` without the provenance. Raises as `locate` does."""
    return locate(path_or_repo_id, revision=revision, patterns=patterns).path


def locate(path_or_repo_id: str, *, revision: str | None = None, patterns: tuple[str, ...] | None = None) -> Location:
    """Find a model locally or download its snapshot into the Hub's cache.

    `revision`: a branch, tag or commit of the repository. `patterns`: file name patterns to fetch (None: all).
    An existing local file or folder wins over a repository of the same name.

    Raises `UsageError` for a text that is neither, or a revision given for a local path; `HubError` where the
    repository cannot be had.
    """
    local = Path(path_or_repo_id).expanduser()
    if path_or_repo_id and local.exists():
        if revision is not None:
            raise UsageError(
                f"--revision {revision}: {path_or_repo_id} is a local path, which has no revisions. "
                "Leave --revision out, or rename the folder to reach the repository of that name."
            )
        looks_remote = _REPO_ID.fullmatch(path_or_repo_id) is not None and local.is_dir()
        note = f"{path_or_repo_id}: using the local folder, not the Hub" if looks_remote else None
        return Location(path=local, note=note)
    _check_repo_id(path_or_repo_id)
    return _snapshot(path_or_repo_id, "model", revision, patterns)


def fetch_dataset_text(dataset_id: str, *, revision: str | None = None) -> Location:
    """Download one text file of a dataset repository, for calibration.

    Files of the `train` split come first, then the suffixes in the order of `DATASET_SUFFIXES`, then names in
    order. Raises `UsageError` for an impossible id, `HubError` where nothing fitting can be had.
    """
    _check_repo_id(dataset_id)
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(dataset_id, repo_type="dataset", revision=revision)
    except Exception as error:
        failure = _explain(error, dataset_id, "dataset", revision)
        cached = _cached(dataset_id, "dataset", revision, (), failure)
        names = [path.relative_to(cached.path).as_posix() for path in sorted(cached.path.rglob("*"))]
        return replace(cached, path=cached.path / choose_dataset_file(names, dataset_id))
    name = choose_dataset_file(names, dataset_id)
    snapshot = _snapshot(dataset_id, "dataset", revision, (name,))
    return replace(snapshot, path=snapshot.path / name)


def choose_dataset_file(names: list[str], dataset_id: str) -> str:
    """The file of a dataset to take text from; raises `HubError` where none has a known suffix."""
    fitting = [
        name
        for name in names
        if PurePosixPath(name).suffix in DATASET_SUFFIXES
        and not PurePosixPath(name).name.lower().startswith((".", *NOT_DATA))
    ]
    if not fitting:
        raise HubError(
            f"{dataset_id}: the dataset holds no {', '.join(DATASET_SUFFIXES)} file. "
            "Download it and give --calibration a file of text."
        )
    return min(
        fitting,
        key=lambda name: (
            "train" not in name.lower(),
            DATASET_SUFFIXES.index(PurePosixPath(name).suffix),
            name,
        ),
    )


def is_repo_id(text: str) -> bool:
    """Whether a text can be a repository id: `owner/name` in the Hub's characters, and no file name."""
    return (
        _REPO_ID.fullmatch(text) is not None
        and "--" not in text
        and ".." not in text
        and not text.endswith(_FILE_SUFFIXES)
    )


def _check_repo_id(text: str) -> None:
    if not is_repo_id(text):
        raise UsageError(
            f"{text!r}: no such file or folder, and not a Hub repository id (expected owner/name, "
            "such as HuggingFaceTB/SmolLM2-135M-Instruct)"
        )


def _snapshot(repo_id: str, repo_type: RepoType, revision: str | None, patterns: tuple[str, ...] | None) -> Location:
    """Ask for the repository first, so that each failure keeps its own reason, then download or use the cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision)
    except Exception as error:
        return _cached(repo_id, repo_type, revision, patterns, _explain(error, repo_id, repo_type, revision))
    try:
        folder = snapshot_download(
            repo_id,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=None if patterns is None else list(patterns),
            ignore_patterns=list(NOT_FETCHED),
        )
    except PermissionError as error:
        unwritable = HubError(f"{repo_id}: cannot be downloaded: {error.filename} is not writable.")
        return _cached(repo_id, repo_type, revision, patterns, unwritable)
    except Exception as error:
        raise _explain(error, repo_id, repo_type, revision) from None
    return Location(path=Path(folder), repo_id=repo_id, revision=Path(folder).name)


def _cached(
    repo_id: str,
    repo_type: RepoType,
    revision: str | None,
    patterns: tuple[str, ...] | None,
    failure: HubError,
) -> Location:
    """The snapshot in the cache, without a network call; raises `failure` where it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(failure, _NoSuchRevision):
        raise failure
    try:
        folder = snapshot_download(
            repo_id,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=None if patterns is None else list(patterns),
            ignore_patterns=list(NOT_FETCHED),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        raise failure from None
    note = None if isinstance(failure, _Offline) else f"{failure} Using the copy in the cache."
    return Location(path=Path(folder), repo_id=repo_id, revision=Path(folder).name, note=note)


class _NoSuchRevision(HubError):
    """The repository answers and has no such revision: an older cached one would be the wrong one."""


class _Offline(HubError):
    """Offline mode is on, so the cache is where to look and nothing is amiss."""


def _explain(error: Exception, repo_id: str, repo_type: RepoType, revision: str | None) -> HubError:
    """A failure of the Hub's client as one sentence; re-raises what is not the Hub's doing."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = repo_id if repo_type == "model" else f"dataset {repo_id}"
    page = f"huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
    at = f"revision {revision!r}" if revision else "the repository"
    if isinstance(error, OfflineModeIsEnabled):
        return _Offline(
            f"{what}: {at} is not complete in the cache, and offline mode is on (HF_HUB_OFFLINE). "
            "Unset it, or download the repository first."
        )
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{what}: access is restricted to people its owner let in. Ask for access at {page}, then log in "
            "with 'hf auth login' or set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return _NoSuchRevision(f"{what}: has no {at}. Its branches and tags are listed at {page}.")
    status = _status(error) if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return HubError(
            f"{what}: the Hub wants a login: the repository is private or does not exist, and no valid token was "
            "sent. Check the name, then log in with 'hf auth login' or set HF_TOKEN."
        )
    if status == 403:
        return HubError(
            f"{what}: your token has no access to it. Ask for access at {page}, or use a token that may read it."
        )
    if isinstance(error, RepositoryNotFoundError):
        return HubError(f"{what}: there is no such repository on the Hub. Check the name.")
    if status is not None:
        return HubError(f"{what}: the Hub answered with HTTP status {status}. Try again later.")
    network = isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError, HfHubHTTPError))
    # The client's transport is httpx or its successor, by version; neither is a dependency of ours.
    if network or type(error).__module__.partition(".")[0] in ("httpx", "httpx2"):
        return HubError(
            f"{what}: the Hub could not be reached ({type(error).__name__}). Check the connection, or give a "
            "local folder."
        )
    if isinstance(error, EntryNotFoundError):
        return HubError(f"{what}: {at} does not hold the files that were asked for.")
    raise error


def _status(error: HfHubHTTPError) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)
