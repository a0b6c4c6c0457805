"""Where a model is looked up, and what is said when the Hub does not give it. No test opens a socket."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from bitnest_format import hub
from bitnest_format.errors import UsageError
from bitnest_format.hub import HubError

REPO = "owner/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_SecretSecretSecretSecretSecret"


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a test opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache folder that huggingface_hub uses; returns it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def fill_cache(cache: Path, kind: str = "models", name: str = "bitnest.json") -> Path:
    """A snapshot as a download leaves it: `refs/main` and one file; returns the snapshot's folder."""
    repository = cache / f"{kind}--owner--model"
    snapshot = repository / "snapshots" / COMMIT
    (snapshot / name).parent.mkdir(parents=True)
    (snapshot / name).write_text("{}", encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return snapshot


def answer(monkeypatch, error: Exception) -> None:
    """Let every question to the Hub fail with `error`."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = SimpleNamespace(url=f"https://hub.invalid/{REPO}?token={TOKEN}", headers={"authorization": TOKEN})
    response: Any = SimpleNamespace(status_code=status, headers={}, request=request)
    return kind(f"{status} for a request with {TOKEN}", response=response)


def test_locate_prefers_a_local_folder_and_says_so(monkeypatch, tmp_path):
    """HB-6: an existing folder wins over a repository of the same name."""
    monkeypatch.chdir(tmp_path)
    Path(REPO).mkdir(parents=True)
    located = hub.locate(REPO)
    assert located == hub.Location(path=Path(REPO), note="owner/model: using the local folder, not the Hub")
    assert hub.resolve("owner/model/") == Path(REPO)


def test_locate_takes_an_absolute_path_without_a_note(tmp_path):
    assert hub.locate(str(tmp_path)) == hub.Location(path=tmp_path)


def test_locate_refuses_a_revision_of_a_local_folder(tmp_path):
    with pytest.raises(UsageError) as caught:
        hub.locate(str(tmp_path), revision="v1")
    assert str(caught.value) == (
        f"--revision v1: {tmp_path} is a local path, which has no revisions. "
        "Leave --revision out, or rename the folder to reach the repository of that name."
    )


BAD_IDS = ["", "a/b/c", "org/", "/org", "org/na me", "model", "./org/name", "org/a--b", "org/..", "org/x.gguf", "~/x"]


@pytest.mark.parametrize("text", BAD_IDS)
def test_locate_refuses_an_impossible_id_without_a_call(text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        hub.locate(text)
    assert str(caught.value) == (
        f"{text!r}: no such file or folder, and not a Hub repository id (expected owner/name, "
        "such as HuggingFaceTB/SmolLM2-135M-Instruct)"
    )


@pytest.mark.parametrize("text", ["owner/model", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b", "Q1/x_y.z-0"])
def test_is_repo_id(text):
    assert hub.is_repo_id(text)


FAILURES = {
    "login wanted": (
        http_error(errors.RepositoryNotFoundError, 401),
        "owner/model: the Hub wants a login: the repository is private or does not exist, and no valid token was "
        "sent. Check the name, then log in with 'hf auth login' or set HF_TOKEN.",
    ),
    "gated": (
        http_error(errors.GatedRepoError, 403),
        "owner/model: access is restricted to people its owner let in. Ask for access at "
        "huggingface.co/owner/model, then log in with 'hf auth login' or set HF_TOKEN.",
    ),
    "forbidden": (
        http_error(errors.HfHubHTTPError, 403),
        "owner/model: your token has no access to it. Ask for access at huggingface.co/owner/model, or use a token "
        "that may read it.",
    ),
    "no such repository": (
        http_error(errors.RepositoryNotFoundError, 404),
        "owner/model: there is no such repository on the Hub. Check the name.",
    ),
    "no such revision": (
        http_error(errors.RevisionNotFoundError, 404),
        "owner/model: has no revision 'dev'. Its branches and tags are listed at huggingface.co/owner/model.",
    ),
    "server error": (
        http_error(errors.HfHubHTTPError, 503),
        "owner/model: the Hub answered with HTTP status 503. Try again later.",
    ),
    "no connection": (
        ConnectionError(f"refused, with {TOKEN}"),
        "owner/model: the Hub could not be reached (ConnectionError). Check the connection, or give a local folder.",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_has_its_own_sentence_and_no_token(name, monkeypatch, cache):
    """HB-1."""
    error, message = FAILURES[name]
    answer(monkeypatch, error)
    with pytest.raises(HubError) as caught:
        hub.locate(REPO, revision="dev")
    assert str(caught.value) == message
    assert TOKEN not in str(caught.value)


def test_an_unknown_error_is_not_swallowed(monkeypatch, cache):
    answer(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        hub.locate(REPO)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_mode_uses_the_cache(revision, offline, cache):
    """HB-2, HB-3."""
    snapshot = fill_cache(cache)
    located = hub.locate(REPO, revision=revision, patterns=hub.CHECKPOINT_FILES)
    assert located == hub.Location(path=snapshot, repo_id=REPO, revision=COMMIT)


def test_offline_mode_without_the_revision(offline, cache):
    fill_cache(cache)
    with pytest.raises(HubError) as caught:
        hub.locate(REPO, revision="dev")
    assert str(caught.value) == (
        "owner/model: revision 'dev' is not complete in the cache, and offline mode is on (HF_HUB_OFFLINE). "
        "Unset it, or download the repository first."
    )


def test_no_connection_falls_back_to_the_cache_with_a_note(monkeypatch, cache):
    """HB-3."""
    snapshot = fill_cache(cache)
    answer(monkeypatch, ConnectionError("refused"))
    located = hub.locate(REPO)
    assert located.path == snapshot
    assert located.note == (
        "owner/model: the Hub could not be reached (ConnectionError). Check the connection, or give a local folder. "
        "Using the copy in the cache."
    )


def test_a_missing_revision_does_not_fall_back_to_the_cache(monkeypatch, cache):
    fill_cache(cache)
    answer(monkeypatch, http_error(errors.RevisionNotFoundError, 404))
    with pytest.raises(HubError):
        hub.locate(REPO)


def test_locate_downloads_only_what_fits_the_patterns(monkeypatch, cache):
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(fill_cache(cache))

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    located = hub.locate(REPO, revision="v1", patterns=hub.DRAFT_FILES)
    assert located.revision == COMMIT
    assert asked["revision"] == "v1"
    allowed = asked["allow_patterns"]
    chosen = {n for n in LISTING if any(Path(n).match(pattern) for pattern in allowed)}
    assert chosen == LISTING - {"bitnest-refinement-00001-of-00001.safetensors", "model.safetensors", "code.py"}


LISTING = {
    "bitnest.json",
    "bitnest-draft.safetensors.index.json",
    "bitnest.safetensors.index.json",
    "bitnest-base-00001-of-00001.safetensors",
    "bitnest-refinement-00001-of-00001.safetensors",
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "README.md",
    "LICENSE",
    "code.py",
}


def test_an_unwritable_cache_is_read(monkeypatch, cache):
    """HB-4: a cached snapshot needs no writes."""
    snapshot = fill_cache(cache)
    real = huggingface_hub.snapshot_download

    def download(repo_id: str, *, local_files_only: bool = False, **options: Any) -> str:
        if not local_files_only:
            raise PermissionError(13, "Permission denied", str(cache))
        return str(real(repo_id, local_files_only=True, **options))

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.locate(REPO).path == snapshot


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a.txt", "data/test.jsonl", "data/train.parquet"], "data/train.parquet"),
        (["train.txt", "train.json", "train.jsonl"], "train.jsonl"),
        (["b.txt", "a.txt", ".gitattributes", "README.md"], "a.txt"),
        (["dataset_infos.json", "config.json", "x.parquet"], "x.parquet"),
    ],
)
def test_choose_dataset_file(names, chosen):
    assert hub.choose_dataset_file(names, REPO) == chosen


def test_choose_dataset_file_without_text():
    with pytest.raises(HubError) as caught:
        hub.choose_dataset_file(["a.zip", "README.md"], REPO)
    assert str(caught.value) == (
        "owner/model: the dataset holds no .jsonl, .json, .txt, .parquet file. "
        "Download it and give --calibration a file of text."
    )


def test_fetch_dataset_text_offline(offline, cache):
    snapshot = fill_cache(cache, kind="datasets", name="data/train.jsonl")
    located = hub.fetch_dataset_text(REPO)
    assert located == hub.Location(path=snapshot / "data/train.jsonl", repo_id=REPO, revision=COMMIT)


def test_fetch_dataset_text_downloads_one_file(monkeypatch, cache):
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options)
        return str(fill_cache(cache, kind="datasets", name="train.jsonl"))

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *a, **k: ["train.jsonl", "test.jsonl"])
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch_dataset_text(REPO).path.name == "train.jsonl"
    assert (asked["repo_type"], asked["allow_patterns"]) == ("dataset", ["train.jsonl"])


def test_fetch_dataset_text_of_a_missing_dataset(monkeypatch, cache):
    answer(monkeypatch, http_error(errors.RepositoryNotFoundError, 404))
    with pytest.raises(HubError) as caught:
        hub.fetch_dataset_text(REPO)
    assert str(caught.value) == "dataset owner/model: there is no such repository on the Hub. Check the name."
