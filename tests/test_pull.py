"""Pulling from a Hub and loading by repository id: which bytes move, and what is there after every kind of failure."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants, file_download

import bitnest_format
from bitnest_format import hub
from bitnest_format.cli import main
from bitnest_format.errors import UsageError
from bitnest_format.hub import HubError
from bitnest_format.pull import pull

REPO = "someone/model"
REFINEMENT = "bitnest-refinement-00001-of-00001.safetensors"
BASE = "bitnest-base-00001-of-00001.safetensors"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    return tiny_checkpoint(tmp_path / "model", eos_token_id=None)


@pytest.fixture
def commit(hub_server, folder) -> str:
    """The checkpoint as `someone/model`, with files that no view needs; returns its commit."""
    rest = {
        "README.md": b"# Hello",
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"x" * 1000,
        "train.py": b"import os",
    }
    hub_server.create(REPO, folder)
    return hub_server.commit(REPO, rest)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def published(server, *, draft: bool = False) -> dict[str, bytes]:
    """What a pull has to end in."""
    return {
        name: content
        for name, content in server.files(REPO).items()
        if not name.endswith((".bin", ".py")) and not (draft and "refinement" in name)
    }


def tree(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


def test_a_draft_moves_the_base_and_nothing_else(hub_server, commit):
    located = pull(REPO, view="draft")
    assert located.revision == commit
    assert contents(located.path) == published(hub_server, draft=True)
    assert hub_server.sent("refinement|bin$|py$") == 0
    assert hub_server.sent() == sum(map(len, published(hub_server, draft=True).values()))


def test_nested_after_draft_moves_the_refinement_alone(hub_server, commit):
    pull(REPO, view="draft")
    before = hub_server.sent()
    located = pull(REPO)
    assert hub_server.sent() - before == hub_server.sent("refinement") == len(hub_server.files(REPO)[REFINEMENT])
    assert contents(located.path) == published(hub_server)
    moved = hub_server.sent()
    assert pull(REPO, deep=True) == located
    assert hub_server.sent() == moved


def test_load_fetches_what_its_view_needs(hub_server, commit):
    draft = bitnest_format.load(REPO, view="draft", device="cpu")
    assert hub_server.sent("refinement") == 0
    assert len(draft.generate([5, 6], max_new_tokens=2).token_ids) == 2
    model = bitnest_format.load(REPO, revision=commit, device="cpu")
    assert hub_server.sent("refinement") == len(hub_server.files(REPO)[REFINEMENT])
    assert len(model.generate([5, 6], max_new_tokens=2).token_ids) == 2


def test_offline_and_read_only(hub_server, commit, tmp_path, monkeypatch):
    """HB-3, HB-4: no request, and nothing new beside the snapshot."""
    pull(REPO)
    requests, before = len(hub_server.log), tree(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for path in (tmp_path / "hub").rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o555)
    for revision in (None, "main", commit):
        bitnest_format.load(REPO, revision=revision, device="cpu")
    assert pull(REPO).revision == commit
    assert contents(pull(REPO, out=tmp_path / "out").path) == published(hub_server)
    assert len(hub_server.log) == requests
    assert tree(tmp_path / "hub") == before
    with pytest.raises(HubError, match="revision 'dev' is not complete in the cache, and offline mode is on"):
        pull(REPO, revision="dev")


def test_a_draft_in_the_cache_is_no_nested_checkpoint(hub_server, commit, monkeypatch):
    pull(REPO, view="draft")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(REPO, view="draft").revision == commit
    for refused in (lambda: pull(REPO), lambda: bitnest_format.load(REPO, device="cpu")):
        with pytest.raises(HubError) as caught:
            refused()
        assert str(caught.value) in (
            f"someone/model: {REFINEMENT} was not downloaded, or the repository lacks it. "
            "Run 'bitnest-format pull someone/model --view nested' with a connection to the Hub.",
            "someone/model: the repository is not complete in the cache, and offline mode is on (HF_HUB_OFFLINE). "
            "Unset it, or download the repository first.",
        )


def test_no_network(hub_server, commit, monkeypatch):
    pull(REPO)
    hub_server.fault("GET", "", drop="before", times=1000)
    located = pull(REPO)
    assert located.revision == commit
    assert located.note is not None
    assert located.note.startswith("someone/model: the Hub could not be reached (")
    assert located.note.endswith("Using the copy in the cache.")
    result = run("pull", "someone/other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: someone/other: the Hub could not be reached (")


def test_out_is_a_plain_folder(hub_server, commit, tmp_path):
    """No links, no notes of the client's, no second copy in the cache; a later view adds to it."""
    out = tmp_path / "out"
    pull(REPO, view="draft", out=out)
    assert contents(out) == published(hub_server, draft=True)
    assert not (out / ".cache").exists()
    assert not any(path.is_symlink() for path in out.rglob("*"))
    before = hub_server.sent("base")
    result = run("pull", REPO, "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert contents(out) == published(hub_server)
    assert hub_server.sent("base") == before
    assert run("validate", str(out), "--deep").exit_code == 0
    assert not (tmp_path / "hub").exists()


def test_out_with_other_files_is_refused(hub_server, commit, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="holds other files, expected an empty or a new folder"):
        pull(REPO, out=tmp_path)
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        pull(REPO, out=tmp_path / "notes.txt")
    assert not hub_server.log


def test_a_branch_that_moves_gives_one_commit(hub_server, commit, folder):
    """Between the first question and the client's own: everything is of one commit, the newer one."""
    changed = {"config.json": (folder / "config.json").read_bytes(), "README.md": b"newer"}
    hub_server.fault("GET", "/api/models/", skip=1, call=lambda: hub_server.commit(REPO, changed))
    located = pull(REPO)
    assert located.revision == hub_server.repositories[REPO].branches["main"] != commit
    assert contents(located.path) == published(hub_server)


def test_a_branch_that_moves_while_files_come(hub_server, commit):
    old = published(hub_server)
    hub_server.fault("GET", "/resolve/", call=lambda: hub_server.commit(REPO, {"config.json": b"{}", REFINEMENT: b""}))
    located = pull(REPO)
    assert located.revision == commit
    assert contents(located.path) == old


def test_a_client_that_takes_an_old_cache_is_not_believed(hub_server, commit):
    """The client answers a failing question with the snapshot it has; the newer commit is asked for again."""
    pull(REPO)
    newer = hub_server.commit(REPO, {"README.md": b"newer"})
    hub_server.fault("GET", "/api/models/", skip=1, status=502)
    assert pull(REPO).revision == newer


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("where", ["/api/models/", "/resolve/", "/cdn/"])
def test_answers_that_pass_are_waited_for(status, where, hub_server, commit, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fault = hub_server.fault("GET", where, status=status, headers={"Retry-After": "1"})
    assert contents(pull(REPO).path) == published(hub_server)
    assert fault.seen == 1


@pytest.mark.parametrize("where", ["/api/models/", "/tree/", "/resolve/.*json", "/cdn/.*base", "/cdn/.*refinement"])
def test_a_cut_connection_is_resumed_by_the_next_pull(where, hub_server, commit, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fault = hub_server.fault("GET", where, cut=2000 if "cdn" in where else 1, times=100)
    result = run("pull", REPO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("Error: someone/model: ")
    fault.times = 0
    located = pull(REPO, deep=True)
    assert contents(located.path) == published(hub_server)
    # The client goes on inside a file, or starts it over; it does not start over what is complete.
    assert hub_server.sent() < 2 * sum(map(len, published(hub_server).values()))


KILLED = "from bitnest_format.cli import main; main()"


@pytest.mark.parametrize("out", [False, True], ids=["cache", "out"])
def test_a_killed_pull_is_run_again(out, hub_server, commit, tmp_path):
    """SIGKILL while the second shard comes; the same command ends hash-equal."""
    arguments = ["pull", REPO, *(["--out", str(tmp_path / "out")] if out else [])]
    environment = hub_server.environment(tmp_path / "home") | {"PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    hub_server.fault("GET", "/cdn/.*refinement", cut=5000)
    hub_server.fault("GET", "/cdn/.*refinement", call=lambda: os.kill(process.pid, signal.SIGKILL), drop="before")
    assert process.wait(60) == -signal.SIGKILL
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip())
    assert contents(found) == published(hub_server)
    assert hub_server.sent("refinement") <= len(hub_server.files(REPO)[REFINEMENT]) + 5000


def test_a_full_disk_is_one_sentence(hub_server, commit, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    with monkeypatch.context() as patched:
        patched.setattr(file_download, "http_get", full)
        result = run("pull", REPO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == (
        "Error: someone/model: the disk is full. Free some space, or set HF_HOME to a folder on another disk, and run "
        "the same command again; finished files are kept."
    )
    assert contents(pull(REPO).path) == published(hub_server)


def test_a_shard_of_another_size_is_refused(hub_server, commit, folder):
    hub_server.commit(REPO, {REFINEMENT: (folder / REFINEMENT).read_bytes()[:-100]})
    size = (folder / REFINEMENT).stat().st_size
    for refused in (lambda: pull(REPO), lambda: bitnest_format.load(REPO, device="cpu")):
        with pytest.raises(HubError) as caught:
            refused()
        assert str(caught.value) == (
            f"someone/model: {REFINEMENT} has {size - 100} bytes, expected {size} bytes as in bitnest.json. Run "
            "'bitnest-format pull someone/model --force'; if that ends the same, the repository itself is damaged."
        )
    pull(REPO, view="draft")


def test_swapped_content_is_refused(hub_server, commit, folder, tmp_path):
    """Storage sends other bytes of the same length: hashes tell, and --force repairs the cache."""
    content = bytearray((folder / REFINEMENT).read_bytes())
    content[-1] ^= 1
    hub_server.fault("GET", "/cdn/.*refinement", body=bytes(content), times=2)
    with pytest.raises(HubError, match=r"refinement.* has SHA-256 \w{12}\.\.\., expected"):
        pull(REPO, out=tmp_path / "out")
    with pytest.raises(HubError, match=r"refinement.* has SHA-256 \w{12}\.\.\., expected"):
        pull(REPO, deep=True)
    assert contents(pull(REPO, deep=True, force=True).path) == published(hub_server)
    assert contents(pull(REPO, out=tmp_path / "out", force=True).path) == published(hub_server)


def test_what_is_no_nested_checkpoint_is_not_downloaded(hub_server):
    hub_server.create("someone/plain", {"config.json": b"{}", "model.safetensors": b"x" * 100_000})
    with pytest.raises(HubError) as caught:
        pull("someone/plain")
    assert str(caught.value) == (
        "someone/plain: holds no bitnest.json, so it is no nested checkpoint. Check the name and the revision."
    )
    assert hub_server.sent() == 0


def test_a_name_that_leads_out_of_the_repository(hub_server, commit, tmp_path):
    hub_server.commit(REPO, {"../evil.json": b"{}"})
    with pytest.raises(HubError, match=r"lists the file '\.\./evil\.json', which lies outside of it"):
        pull(REPO, out=tmp_path / "out")
    assert not (tmp_path / "evil.json").exists()


def test_access(hub_server, commit, monkeypatch):
    """HB-1: each refusal has its own sentence, and no token is in any of them."""
    hub_server.repositories[REPO].gated = True
    said = {"gated": run("pull", REPO).stderr}
    hub_server.repositories[REPO].gated = False
    hub_server.repositories[REPO].private = True
    said["private"] = run("pull", REPO).stderr
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    said["missing"] = run("pull", "someone/nothing").stderr
    hub_server.repositories[REPO].private = False
    said["revision"] = run("pull", REPO, "--revision", "v9").stderr
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said["token"] = run("pull", REPO).stderr
    assert {name: text.splitlines()[-1].removeprefix("Error: someone/") for name, text in said.items()} == {
        "gated": "model: access is restricted to people its owner let in. Ask for access at "
        "huggingface.co/someone/model, then log in with 'hf auth login' or set HF_TOKEN.",
        "private": "model: the Hub wants a login: the repository is private or does not exist, and no valid token was "
        "sent. Check the name, then log in with 'hf auth login' or set HF_TOKEN.",
        "missing": "nothing: there is no such repository on the Hub. Check the name.",
        "revision": "model: has no revision 'v9'. Its branches and tags are listed at huggingface.co/someone/model.",
        "token": "model: the Hub wants a login: the repository is private or does not exist, and no valid token was "
        "sent. Check the name, then log in with 'hf auth login' or set HF_TOKEN.",
    }
    assert "hf_" not in "".join(said.values()).replace("HF_TOKEN", "")


def test_a_renamed_repository_is_found(hub_server, commit):
    hub_server.rename(REPO, "someone/else")
    located = pull(REPO)
    assert located.note == "someone/model was renamed to someone/else. Use that name from now on."
    assert located.revision == commit


def test_bad_names_cost_no_request(hub_server):
    for name in ("model", "./a/b", "a/b/c", "https://evil.invalid/a"):
        with pytest.raises(UsageError):
            pull(name)
    assert not hub_server.log


def test_branches_tags_and_pull_requests(hub_server, commit):
    repository = hub_server.repositories[REPO]
    repository.tags["v1"] = commit
    repository.branches["refs/pr/1"] = commit
    hub_server.commit(REPO, {"README.md": b"newer"})
    for revision in ("v1", "refs/pr/1", commit):
        assert pull(REPO, view="draft", revision=revision).revision == commit
    assert hub.locate(REPO).revision == repository.branches["main"]
