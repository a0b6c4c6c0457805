"""Pushing with the real client to a Hub on loopback: order, resumption, refusals, and what is never published."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

import bitnest_format
from bitnest_format import card, push
from bitnest_format.card import BEGIN, END
from bitnest_format.cli import main
from bitnest_format.errors import BitnestError, UsageError
from bitnest_format.manifest import MANIFEST_FILE
from bitnest_format.push import PushError
from bitnest_format.shards import read_json, write_json
from bitnest_format.validation import validate

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/nested"
WEIGHTS = r"lfs/[0-9a-f]{64}"


SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "shard_bytes": 100_000,
}


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    """A small checkpoint in three base shards."""
    return tiny_checkpoint(tmp_path / "model", **SMALL)


@pytest.fixture
def hub(hub_server, monkeypatch):
    """The Hub, with a token in the environment, and no waiting."""
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return hub_server


def change(folder: Path, tiny_checkpoint) -> Path:
    """Another model of the same shape, in a folder beside."""
    return tiny_checkpoint(folder.with_name("other"), seed=1, **SMALL)


def assert_holds(hub, folder: Path, revision: str = "main", repo_id: str = REPO) -> None:
    """The revision holds the checkpoint, byte for byte, a card, and nothing else."""
    found = hub.files(repo_id, revision)
    expected = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    assert found.pop("README.md").startswith(b"---\n")
    assert {n: hashlib.sha256(c).hexdigest() for n, c in found.items()} == {
        n: hashlib.sha256(c).hexdigest() for n, c in expected.items()
    }


def assert_never_half(hub, *folders: Path, repo_id: str = REPO) -> None:
    """Every commit that has a manifest holds the whole checkpoint that it describes."""
    manifests = [(folder / MANIFEST_FILE).read_bytes() for folder in folders]
    for files in hub.repositories[repo_id].commits.values():
        if MANIFEST_FILE in files:
            folder = folders[manifests.index(files[MANIFEST_FILE])]
            for path in folder.iterdir():
                assert files[path.name] == path.read_bytes()


def test_first_push_publishes_the_manifest_in_the_last_commit(hub, folder):
    result = push.push(folder, REPO)
    assert_holds(hub, folder)
    assert_never_half(hub, folder)
    assert result.url == f"{hub.endpoint}/{REPO}"
    assert result.commit == hub.repositories[REPO].branches["main"]
    assert result.load_lines() == f'import bitnest_format\nmodel = bitnest_format.load("{REPO}")'
    commits = list(hub.repositories[REPO].commits.values())
    assert [("config.json" in c, MANIFEST_FILE in c, "README.md" in c) for c in commits] == [
        (False, False, False),
        (False, False, False),
        (True, True, True),
    ]


def test_second_push_uploads_nothing(hub, folder):
    first = push.push(folder, REPO)
    hub.log.clear()
    second = push.push(folder, REPO)
    assert (second.commit, second.uploaded) == (first.commit, ())
    assert not [entry for entry in hub.log if entry.method not in ("GET", "HEAD")]


def test_push_in_several_commits(hub, folder, monkeypatch):
    monkeypatch.setattr(push, "COMMIT_BYTES", 30_000)
    seen = []
    push.push(folder, REPO, progress=lambda *call: seen.append(call))
    assert_holds(hub, folder)
    assert_never_half(hub, folder)
    assert len(hub.repositories[REPO].commits) > 4
    assert seen[0] == (f"checking {folder}", 0, 1)
    assert seen[-1] == ("complete", 1, 1)


def test_push_over_an_older_checkpoint_takes_its_manifest_away_first(hub, folder, tiny_checkpoint):
    push.push(folder, REPO)
    hub.commit(REPO, {"picture.png": b"mine", "evaluation.json": b"[]", "tokenizer.model": b"old"})
    other = tiny_checkpoint(folder.with_name("other"), seed=1, **SMALL | {"shard_bytes": 10**9})
    push.push(other, REPO)
    assert_never_half(hub, folder, other)
    found = hub.files(REPO)
    assert found["picture.png"] == b"mine"
    for name in ("bitnest-base-00001-of-00003.safetensors", "evaluation.json", "tokenizer.model"):
        assert name not in found
    for path in other.iterdir():
        assert found[path.name] == path.read_bytes()


def test_shards_that_nobody_names_are_deleted(hub, folder):
    push.push(folder, REPO)
    hub.commit(REPO, {"bitnest-base-00009-of-00009.safetensors": b"old", "notes.txt": b"mine"})
    assert push.push(folder, REPO).uploaded == ()
    assert hub.files(REPO).pop("notes.txt") == b"mine"
    assert "bitnest-base-00009-of-00009.safetensors" not in hub.files(REPO)


STAGES = {
    "create": ("POST", "/api/repos/create", 0),
    "preupload": ("POST", "/preupload/", 0),
    "batch": ("POST", "/objects/batch", 0),
    "first weight": ("PUT", "/lfs/", 0),
    "third weight": ("PUT", "/lfs/", 2),
    "first commit": ("POST", "/commit/", 0),
    "last preupload": ("POST", "/preupload/", 1),
    "last commit": ("POST", "/commit/", 1),
}


INTERRUPTIONS = [
    *((stage, "before") for stage in STAGES),
    *((stage, how) for stage in ("first weight", "first commit", "last commit") for how in ("after", "500")),
]


@pytest.mark.parametrize(("stage", "how"), INTERRUPTIONS)
def test_interrupted_push_goes_on(stage, how, hub, folder, monkeypatch):
    method, path, skip = STAGES[stage]
    monkeypatch.setattr(push, "PAUSES_SECONDS", ())
    what = {"status": 500} if how == "500" else {"drop": how}
    # The client itself tries some requests six times, and several files at once.
    hub.fault(method, path, skip=skip, times=99, **what)
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO)
    assert "hf_me" not in str(caught.value)
    if REPO in hub.repositories:
        assert_never_half(hub, folder)
    hub.faults.clear()
    push.push(folder, REPO)
    assert_holds(hub, folder)
    assert_never_half(hub, folder)


@pytest.mark.parametrize("stage", ["preupload", "third weight", "first commit", "last commit"])
def test_interrupted_update_is_never_loadable(stage, hub, folder, tiny_checkpoint, monkeypatch):
    push.push(folder, REPO)
    other = change(folder, tiny_checkpoint)
    method, path, skip = STAGES[stage]
    monkeypatch.setattr(push, "PAUSES_SECONDS", ())
    hub.fault(method, path, skip=skip, times=99, drop="before")
    with pytest.raises(PushError, match=r"Push again: what has arrived is not sent twice\.$"):
        push.push(other, REPO)
    assert_never_half(hub, folder, other)
    hub.faults.clear()
    push.push(other, REPO)
    assert_holds(hub, other)
    assert_never_half(hub, folder, other)


@pytest.mark.parametrize("stage", ["third weight", "last commit"])
def test_killed_push_goes_on(stage, hub, folder, tmp_path):
    """Killed without warning in the middle of a request; the next push ends in the same state."""
    method, path, skip = STAGES[stage]
    command = [sys.executable, "-m", "bitnest_format", "push", str(folder), REPO]
    environment = hub.environment(tmp_path / "home", token="hf_me") | {"PYTHONSAFEPATH": "1"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    fault = hub.fault(method, path, skip=skip, call=child.kill, drop="before")
    assert child.wait(timeout=120) == -signal.SIGKILL
    assert fault.seen == 1
    assert MANIFEST_FILE not in hub.files(REPO)
    push.push(folder, REPO)
    assert_holds(hub, folder)
    assert_never_half(hub, folder)


def test_resumed_push_sends_only_what_is_missing(hub, folder, monkeypatch):
    """PU-3: the first of the weights have arrived, the last has not."""
    monkeypatch.setattr(push, "PAUSES_SECONDS", ())
    hub.fault("PUT", "/lfs/", skip=2, times=99, drop="before")
    with pytest.raises(PushError):
        push.push(folder, REPO)
    hub.faults.clear()
    hub.log.clear()
    push.push(folder, REPO)
    assert 1 <= len(hub.requests("PUT", "/lfs/")) < 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_waited_for(status, hub, folder, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    headers = {"Retry-After": "7"} if status == 429 else {}
    fault = hub.fault("POST", "/commit/main", times=2, status=status, headers=headers)
    push.push(folder, REPO)
    assert fault.seen == 2
    assert_holds(hub, folder)
    assert [pause for pause in pauses if pause >= 1][:2] == ([7, 7] if status == 429 else [1, 2])


def test_a_hub_that_stays_busy_is_named(hub, folder):
    hub.fault("POST", "/commit/main", times=9, status=503)
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO)
    assert str(caught.value) == (
        f"{REPO}: the Hub answered with HTTP status 503 after 0 files; not confirmed: "
        "bitnest-base-00001-of-00003.safetensors, bitnest-base-00002-of-00003.safetensors, "
        "bitnest-base-00003-of-00003.safetensors, ... (9 files). Push again: what has arrived is not sent twice."
    )


def test_somebody_elses_commit_stops_the_push(hub, folder):
    """Two pushes at once never mix: the last commit names the one that it builds on."""
    hub.fault("POST", "/commit/main", skip=1, call=lambda: hub.commit(REPO, {"x.txt": b"x"}))
    with pytest.raises(PushError, match="somebody else committed at the same time after 6 files"):
        push.push(folder, REPO)
    assert MANIFEST_FILE not in hub.files(REPO)
    push.push(folder, REPO)
    assert_never_half(hub, folder)


def test_a_file_that_changes_meanwhile_is_noticed(hub, folder):
    index = folder / "bitnest.safetensors.index.json"
    hub.fault("POST", "/api/repos/create", call=lambda: index.write_text("{}", encoding="utf-8"))
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO)
    assert str(caught.value) == (
        f"{REPO}: {index.name} was uploaded but is not there as {MANIFEST_FILE} has it. Was it changed meanwhile, here "
        "or there? Validate the folder and push again."
    )
    assert MANIFEST_FILE not in hub.files(REPO)


def test_private(hub, folder):
    push.push(folder, REPO, private=True)
    assert hub.repositories[REPO].private
    assert push.push(folder, REPO, private=True).uploaded == ()


def test_private_is_refused_for_a_public_repository(hub, folder):
    hub.create(REPO)
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO, private=True)
    assert str(caught.value) == (
        f"{REPO}: exists and is public, so --private cannot hold. Make it private in its settings, or choose another "
        "name."
    )
    assert hub.files(REPO) == {}


def test_branch(hub, folder):
    result = push.push(folder, REPO, revision="small/v2")
    assert_holds(hub, folder, "small/v2")
    assert hub.files(REPO) == {}
    assert result.url == f"{hub.endpoint}/{REPO}/tree/small/v2"
    assert result.load_lines().endswith('.load("me/nested", revision="small/v2")')
    assert push.push(folder, REPO, revision="small/v2").uploaded == ()


def test_tag(hub, folder, tiny_checkpoint):
    result = push.push(folder, REPO, tag="v1.0")
    assert hub.repositories[REPO].tags == {"v1.0": result.commit}
    assert push.push(folder, REPO, tag="v1.0").commit == result.commit
    with pytest.raises(PushError) as caught:
        push.push(change(folder, tiny_checkpoint), REPO, tag="v1.0")
    assert str(caught.value) == f"{REPO}: has a tag v1.0 already, of another commit. Choose another name."
    assert_holds(hub, folder)


def test_a_tag_that_failed_is_made_by_the_next_push(hub, folder, monkeypatch):
    monkeypatch.setattr(push, "PAUSES_SECONDS", ())
    hub.fault("POST", "/tag/", status=500, times=9)
    with pytest.raises(PushError):
        push.push(folder, REPO, tag="v1")
    hub.faults.clear()
    result = push.push(folder, REPO, tag="v1")
    assert (hub.repositories[REPO].tags, result.uploaded) == ({"v1": result.commit}, ())


def test_create_pr(hub, folder):
    hub.create(REPO, {"README.md": b"mine"})
    result = push.push(folder, REPO, create_pr=True)
    assert result.pull_request == f"{hub.endpoint}/{REPO}/discussions/1"
    assert result.revision == "refs/pr/1"
    assert_holds(hub, folder, "refs/pr/1")
    assert b"mine" in hub.files(REPO, "refs/pr/1")["README.md"]
    assert hub.files(REPO) == {"README.md": b"mine"}


def test_interrupted_pr_names_the_revision_to_go_on_with(hub, folder):
    hub.create(REPO)
    hub.fault("POST", "/commit/refs", times=9, status=500)
    with pytest.raises(PushError, match=r"Push again with --revision refs/pr/1: what has"):
        push.push(folder, REPO, create_pr=True)
    hub.faults.clear()
    push.push(folder, REPO, revision="refs/pr/1")
    assert_holds(hub, folder, "refs/pr/1")
    assert set(hub.repositories[REPO].branches) == {"main", "refs/pr/1"}


def test_a_pr_that_the_user_interrupts_names_its_revision(hub, folder):
    hub.create(REPO)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage.startswith("publishing"):
            raise KeyboardInterrupt

    with pytest.raises(PushError, match=r"^me/nested: interrupted\. Go on with --revision refs/pr/1\.$"):
        push.push(folder, REPO, create_pr=True, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        push.push(folder, REPO, progress=interrupt)


def test_message(hub, folder):
    push.push(folder, REPO, message="Groups of 64")
    assert list(hub.repositories[REPO].messages.values())[1:] == ["Groups of 64", "Groups of 64"]


REFUSALS = {
    "invalid token": ("hf_wrong", REPO, f"{REPO}: the Hub does not accept your token. Log in again with"),
    "no right to write": (
        "hf_reader",
        REPO,
        f"{REPO}: your token may not write there. Use one with write access to me",
    ),
    "somebody else's": ("hf_me", "you/nested", "you/nested: your token may not write there. Use one with write"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_the_hub(case, hub, folder, monkeypatch):
    token, repo_id, message = REFUSALS[case]
    hub.tokens["hf_reader"] = type(hub.tokens["hf_me"])("me", can_write=False)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PushError) as caught:
        push.push(folder, repo_id)
    assert str(caught.value).startswith(message)
    assert token not in str(caught.value)


def test_a_renamed_repository_is_named(hub, folder):
    hub.create(REPO)
    hub.rename(REPO, "me/newer")
    with pytest.raises(PushError, match=r"^me/nested: was renamed to me/newer\. Push to that name\.$"):
        push.push(folder, REPO)


def test_another_models_repository_is_refused(hub, folder):
    hub.create(REPO, {"model.safetensors": b"weights"})
    with pytest.raises(PushError, match=r"^me/nested: holds model\.safetensors, the weights of another model\."):
        push.push(folder, REPO)
    assert hub.files(REPO) == {"model.safetensors": b"weights"}


OPTIONS = {
    "a PR against a branch": ({"create_pr": True, "revision": "b"}, "--create-pr opens a pull request"),
    "a tag of a PR": ({"create_pr": True, "tag": "v1"}, "--tag names a commit of a branch"),
    "a tag with a space": ({"tag": "v 1"}, "--tag 'v 1': cannot be"),
    "a branch with ..": ({"revision": "a/../b"}, "--revision 'a/../b': cannot be"),
    "a commit": ({"revision": "0" * 40}, "--revision '0000"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_be(case, tmp_path):
    options, message = OPTIONS[case]
    with pytest.raises(UsageError, match=f"^{message}"):
        push.push(tmp_path, REPO, **options)


def test_preflight_lists_everything_before_any_request(hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    shard = folder / "bitnest-refinement-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(PushError) as caught:
        push.push(folder, "me/a--b")
    assert caught.value.problems[:2] == [
        "'me/a--b' is not a repository id; expected owner/name, such as me/SmolLM2-BitNest",
        "no token for the Hub was found. Log in with 'hf auth login', or set HF_TOKEN to one that may write.",
    ]
    assert caught.value.problems[2].startswith(f"{shard.name}: (file): cut off")
    assert str(caught.value).startswith("3 problems:\n  - 'me/a--b'")
    assert hub.log == []


def test_offline_mode_is_refused(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PushError, match=r"^offline mode is on \(HF_HUB_OFFLINE\)\. Unset it to push\.$"):
        push.push(folder, REPO)


def list_file(folder: Path, name: str, content: bytes) -> Path:
    """Put a file into the folder and into the manifest's list."""
    path = folder / name
    path.write_bytes(content)
    manifest = read_json(folder / MANIFEST_FILE)
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_json(folder / MANIFEST_FILE, manifest)
    return path


def test_stray_files_are_not_published(hub, folder, tmp_path):
    for name in ("notes.txt", ".env", "push.lock", "training.log"):
        (folder / name).write_text("mine", encoding="utf-8")
    (folder / ".work").mkdir()
    (folder / ".work" / "part.json").write_text("{}", encoding="utf-8")
    (tmp_path / "private.json").write_text("{}", encoding="utf-8")
    (folder / "link.json").symlink_to(tmp_path / "private.json")
    push.push(folder, REPO)
    manifest = read_json(folder / MANIFEST_FILE)
    assert set(hub.files(REPO)) == {*manifest["files"], MANIFEST_FILE, "README.md"}
    assert str(tmp_path).encode() not in b"".join(hub.files(REPO).values())


def local_path(folder: Path) -> str:
    return json.dumps({"name_or_path": str(folder)})


UNFIT = {
    "work file": (".env", lambda _: "{}", ".env: looks like a work file, but bitnest.json lists it."),
    "lock": ("a.lock", lambda _: "{}", "a.lock: looks like a work file"),
    "token": ("notes.txt", lambda _: f"hf_{'a' * 34}", "notes.txt: holds what looks like an access token of the Hub."),
    "local path": ("special_tokens_map.json", local_path, "special_tokens_map.json: name_or_path is a path of this"),
    "card": ("README.md", lambda _: "---\nlicense: mit\n---\n", "bitnest.json: files.README.md: the card changes with"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_must_not_be_published_is_refused(case, hub, folder):
    name, content, message = UNFIT[case]
    list_file(folder, name, content(folder).encode())
    assert validate(folder, deep=True) == []
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO)
    assert str(caught.value).startswith(message)
    assert hub.log == []


@pytest.mark.parametrize("name", ["LICENSE", "README.md"])
def test_a_link_out_of_the_folder_is_refused(name, hub, folder, tmp_path):
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    if name == "LICENSE":
        list_file(folder, name, b"secret").unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO)
    assert str(caught.value) == f"{name}: is a link to a file outside model. Put the file itself there."
    assert hub.log == []


def test_paths_of_other_machines_are_no_secret(hub, folder):
    list_file(folder, "tokenizer_config.json", b'{"name_or_path": "/no/such/folder/model", "x": "/"}')
    push.push(folder, REPO)
    assert_holds(hub, folder)


def test_edits_on_the_hub_survive(hub, folder):
    push.push(folder, REPO)
    text = hub.files(REPO)["README.md"].decode()
    edited = text.replace("---\n", "---\nlanguage: 'no'\n", 1).replace(END, f"{END}\n\nMy own words.")
    hub.commit(REPO, {"README.md": edited.encode()})
    push.push(folder, REPO)
    after = hub.files(REPO)["README.md"].decode()
    assert "My own words." in after
    assert "language: 'no'\n" in after


def test_the_local_card_is_the_earlier_one_where_there_is_one(hub, folder):
    (folder / "README.md").write_text("---\nauthor: me\n---\n# Mine\n", encoding="utf-8")
    push.push(folder, REPO)
    text = hub.files(REPO)["README.md"].decode()
    assert "author: me\n" in text
    assert text.endswith(f"{END}\n\n# Mine\n")
    assert (folder / "README.md").read_text(encoding="utf-8") == "---\nauthor: me\n---\n# Mine\n"
    assert push.push(folder, REPO).uploaded == ()


def test_a_bad_card_stops_the_push_before_any_request(hub, folder):
    """PU-1"""
    (folder / "README.md").write_text("---\nmodel-index: not correct\n---\n", encoding="utf-8")
    with pytest.raises(PushError) as caught:
        push.push(folder, REPO)
    assert str(caught.value) == "README.md: model-index is not a list of objects with a name and a list of results"
    assert hub.log == []


def test_a_card_that_is_no_text_stops_the_push(hub, folder):
    (folder / "README.md").write_bytes(b"caf\xe9")
    with pytest.raises(PushError, match=r"^README\.md: is not UTF-8 text \(unexpected end of data at byte 3\)$"):
        push.push(folder, REPO)


def test_a_bad_card_on_the_hub_is_named(hub, folder):
    hub.create(REPO, {"README.md": BEGIN.encode()})
    with pytest.raises(
        PushError, match=f"^{REPO}: the repository's README.md: holds {BEGIN} 1 times and {END} 0 times"
    ):
        push.push(folder, REPO)
    assert MANIFEST_FILE not in hub.files(REPO)


def test_evaluation_is_published_and_shown(hub, folder):
    rows = [{"name": "draft", "code": 4.7, "chat": 6.1, "acceptance": 0.946, "gamma": 4}]
    (folder / "evaluation.json").write_text(json.dumps(rows), encoding="utf-8")
    push.push(folder, REPO)
    assert_holds(hub, folder)
    assert b"| draft | 4.700 | 6.100 | 0.946 |  | 4 |" in hub.files(REPO)["README.md"]
    (folder / "evaluation.json").write_text("[{}]", encoding="utf-8")
    with pytest.raises(PushError, match=r"^evaluation\.json: row 1: expected an object with a name$"):
        push.push(folder, REPO)


def test_a_missing_licence_is_a_warning(hub, folder):
    manifest = read_json(folder / MANIFEST_FILE)
    del manifest["source"]["license"]
    write_json(folder / MANIFEST_FILE, manifest)
    assert push.push(folder, REPO).warnings[0].startswith("the licence of the source is not recorded")
    assert b"license" not in hub.files(REPO)["README.md"].split(b"---\n")[1]
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    assert push.push(folder, REPO).warnings == ()
    assert b"license: mit" in hub.files(REPO)["README.md"]


def test_push_leaves_the_folder_alone(hub, folder):
    def state() -> dict[str, tuple[int, bytes]]:
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}

    before = state()
    push.push(folder, REPO)
    assert state() == before


def test_what_was_pushed_loads_and_half_of_it_does_not(hub, folder, monkeypatch):
    monkeypatch.setattr(push, "PAUSES_SECONDS", ())
    fault = hub.fault("POST", "/commit/main", skip=1, times=9, drop="before")
    with pytest.raises(PushError):
        push.push(folder, REPO)
    with pytest.raises(BitnestError, match=r"no bitnest\.json"):
        bitnest_format.load(REPO)
    fault.times = 0
    push.push(folder, REPO)
    text = bitnest_format.load(REPO).generate([5, 6], max_new_tokens=3).token_ids
    assert text == bitnest_format.load(str(folder)).generate([5, 6], max_new_tokens=3).token_ids


def run(*arguments: str) -> int:
    try:
        main(["push", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_push_command(hub, folder, capsys):
    assert run(str(folder), REPO) == 0
    out, err = capsys.readouterr()
    commit = hub.repositories[REPO].branches["main"]
    assert out == (
        f"{hub.endpoint}/{REPO}\n  commit {commit}, 9 of 9 files sent\n\n"
        f'import bitnest_format\nmodel = bitnest_format.load("{REPO}")\n'
    )
    assert err.splitlines()[0] == f"checking {folder}"
    assert "hf_me" not in out + err
    assert run(str(folder), REPO, "--json") == 0
    assert json.loads(capsys.readouterr().out)["uploaded"] == []


def test_push_command_fails_with_one_message(hub, folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert run(str(folder), REPO) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"Error: {REPO}: the Hub does not accept your token.")
    assert run(str(folder), REPO, "--create-pr", "--tag", "v1") == 2


def test_card_module_is_pure():
    """The card needs no client of the Hub."""
    assert "huggingface_hub" not in Path(card.__file__).read_text(encoding="utf-8").replace("bitnest", "")
