"""Where a model lies: a path on this machine, or a repository on the Hugging Face Hub.

One rule decides: **what exists locally wins.** Only a text that names nothing on disk is taken for a repository
id, and only if it can be one (`owner/name`), so that a mistyped path costs no network call. Offline mode
(`HF_HUB_OFFLINE=1`) is honoured, and a repository that cannot be asked about is taken from the cache if a
snapshot lies there. No message ever quotes a server's answer or a token.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from bitnest_format.errors import BitnestError, UsageError

RepoType = Literal["model", "dataset"]
Answer = TypeVar("Answer")

SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*")
DRAFT_FILES = (*SIDE_FILES, "bitnest-base-*.safetensors")
CHECKPOINT_FILES = (*SIDE_FILES, "bitnest-*.safetensors")
SOURCE_FILES = (*SIDE_FILES, "*.safetensors")
# Second copies of the same weights that some model repositories hold.
NOT_FETCHED = ("original/*", "consolidated*", "onnx/*")

DATASET_SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
NOT_DATA = ("dataset_info", "config.", "license", "readme")

# Answers that pass: too many requests, and the server's own faults.
PASSING = (429, 500, 502, 503, 504)
TRIES = 4
LONGEST_WAIT = 60.0

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
    return locate_remote(path_or_repo_id, revision=revision, patterns=patterns)


def locate_remote(
    repo_id: str,
    *,
    revision: str | None = None,
    patterns: tuple[str, ...] | None = None,
    needed: str | None = None,
    force: bool = False,
) -> Location:
    """`locate` of a repository, whatever lies on this disk.

    `needed` is a file without which nothing is downloaded; `force` downloads again what the cache holds.
    """
    check_repo_id(repo_id)
    return _snapshot(repo_id, "model", revision, patterns, needed=needed, force=force)


def download_into(
    folder: Path,
    repo_id: str,
    *,
    revision: str | None = None,
    patterns: tuple[str, ...] | None = None,
    needed: str | None = None,
    force: bool = False,
) -> Location:
    """Download a repository's files into a folder of their own; otherwise as `locate_remote`.

    Where the Hub cannot be asked, the location is that of the cache's copy, and `folder` is untouched.
    """
    check_repo_id(repo_id)
    return _snapshot(repo_id, "model", revision, patterns, needed=needed, force=force, folder=folder)


def fetch_dataset_text(dataset_id: str, *, revision: str | None = None) -> Location:
    """Download one text file of a dataset repository, for calibration.

    Files of the `train` split come first, then the suffixes in the order of `DATASET_SUFFIXES`, then names in
    order. Raises `UsageError` for an impossible id, `HubError` where nothing fitting can be had.
    """
    check_repo_id(dataset_id)
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(dataset_id, repo_type="dataset", revision=revision)
    except Exception as error:
        failure = explain(error, dataset_id, "dataset", revision)
        copy = cached(dataset_id, "dataset", revision, (), failure)
        names = [path.relative_to(copy.path).as_posix() for path in sorted(copy.path.rglob("*"))]
        return replace(copy, path=copy.path / choose_dataset_file(names, dataset_id))
    name = choose_dataset_file(names, dataset_id)
    snapshot = _snapshot(dataset_id, "dataset", revision, (name,))
    return replace(snapshot, path=snapshot.path / name)


def cache_folder() -> Path:
    """Where the Hub's client keeps what it downloads; it need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def token_place() -> str | None:
    """Where the Hub's client finds a token: the name of a variable or of a file; None where there is none."""
    from huggingface_hub import constants, get_token

    if get_token() is None:
        return None
    variables = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return next((name for name in variables if os.environ.get(name, "").strip()), str(constants.HF_TOKEN_PATH))


def token_owner() -> str:
    """The user name that the Hub knows the token by. Raises `HubError` where it accepts none or cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return str(asked(lambda: HfApi().whoami())["name"])
    except Exception as error:
        if _status(error) == 401:
            raise HubError("the Hub does not accept this token") from None
        raise explain(error, "whoami", "model", None) from None


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


def check_repo_id(text: str) -> None:
    if not is_repo_id(text):
        raise UsageError(
            f"{text!r}: no such file or folder, and not a Hub repository id (expected owner/name, "
            "such as HuggingFaceTB/SmolLM2-135M-Instruct)"
        )


def _snapshot(
    repo_id: str,
    repo_type: RepoType,
    revision: str | None,
    patterns: tuple[str, ...] | None,
    *,
    needed: str | None = None,
    force: bool = False,
    folder: Path | None = None,
) -> Location:
    """Ask for the repository first, so that each failure keeps its own reason, then download or use the cache.

    All files are of one commit: the client pins them to the commit that it finds, and what it found is compared with
    the first answer, since a client whose question fails takes whatever the cache holds.
    """
    from huggingface_hub import HfApi, snapshot_download

    for _ in range(TRIES):
        try:
            info = asked(lambda: HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision))
        except Exception as error:
            return cached(repo_id, repo_type, revision, patterns, explain(error, repo_id, repo_type, revision))
        commit = getattr(info, "sha", None)
        _check_listing(info, repo_id, needed)
        # The cache learns what a branch's commit is when it is asked for the branch; a folder has nothing to learn.
        options: dict[str, Any] = (
            {"revision": revision} if folder is None else {"revision": commit, "local_dir": folder}
        )
        if force:
            options["force_download"] = True
        try:
            path = asked(
                partial(
                    snapshot_download,
                    repo_id,
                    repo_type=repo_type,
                    allow_patterns=None if patterns is None else list(patterns),
                    ignore_patterns=list(NOT_FETCHED),
                    **options,
                )
            )
        except PermissionError as error:
            unwritable = HubError(f"{repo_id}: cannot be downloaded: {error.filename} is not writable.")
            return cached(repo_id, repo_type, revision, patterns, unwritable)
        except Exception as error:
            raise explain(error, repo_id, repo_type, revision) from None
        if folder is not None:
            return Location(path=folder, repo_id=repo_id, revision=commit, note=renamed(info, repo_id))
        if commit in (None, Path(path).name):
            note = renamed(info, repo_id)
            return Location(path=Path(path), repo_id=repo_id, revision=Path(path).name, note=note)
    raise HubError(f"{repo_id}: has changed while it was downloaded. Run the command again, or give a --revision.")


def _check_listing(info: Any, repo_id: str, needed: str | None) -> None:
    """Refuse a repository without the file `needed`, or with a name that leads out of a folder."""
    names = [file.rfilename for file in getattr(info, "siblings", None) or ()]
    for name in names:
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise HubError(f"{repo_id}: lists the file {name[:100]!r}, which lies outside of it. Don't use it.")
    if needed is not None and needed not in names:
        raise HubError(f"{repo_id}: holds no {needed}, so it is no nested checkpoint. Check the name and the revision.")


def asked(question: Callable[[], Answer]) -> Answer:
    """Ask the Hub again where its answer is one that passes; waits as long as `Retry-After` says, or shortly."""
    for attempt in range(1, TRIES):
        try:
            return question()
        except Exception as error:
            if _status(error) not in PASSING:
                raise
            said = error.response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
            time.sleep(min(float(said), LONGEST_WAIT) if said.isdecimal() else 0.2 * attempt)
    return question()


def renamed(info: Any, repo_id: str) -> str | None:
    """The remark for a repository that the Hub answers for under another name."""
    name = getattr(info, "id", None)
    if not isinstance(name, str) or name.lower() == repo_id.lower():
        return None
    return f"{repo_id} was renamed to {name}. Use that name from now on."


def cached(
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


def explain(error: Exception, repo_id: str, repo_type: RepoType, revision: str | None) -> HubError:
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
    status = _status(error)
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
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return HubError(
            f"{what}: the disk is full. Free some space, or set HF_HOME to a folder on another disk, and run the same "
            "command again; finished files are kept."
        )
    network = isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError, HfHubHTTPError))
    # The client's transport is httpx or its successor, by version; neither is a dependency of ours.
    if network or type(error).__module__.partition(".")[0] in ("httpx", "httpx2"):
        return HubError(
            f"{what}: the Hub could not be reached ({type(error).__name__}). Check the connection, or give a "
            "local folder."
        )
    if isinstance(error, OSError) and error.errno is None:
        # The client's check of what it downloaded: the size is not the one that was announced.
        return HubError(f"{what}: a download broke off ({type(error).__name__}). Run the same command again.")
    if isinstance(error, EntryNotFoundError):
        return HubError(f"{what}: {at} does not hold the files that were asked for.")
    raise error


def _status(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)
