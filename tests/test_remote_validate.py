"""`validate` and `inspect` of a repository on a Hub: from its headers, and of whatever a stranger put there."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bitnest_format import remote, shards
from bitnest_format.cli import main
from bitnest_format.remote import open_files
from bitnest_format.report import inspect_checkpoint
from bitnest_format.validation import validate

REPO = "someone/model"
BASE = "bitnest-base-00001-of-00001.safetensors"
REFINEMENT = "bitnest-refinement-00001-of-00001.safetensors"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


def findings(server, files: Mapping[str, bytes | None]) -> list[str]:
    """What `validate` says after these files were put into the repository."""
    server.commit(REPO, files)
    return [str(finding) for finding in validate(open_files(REPO)[0])]


def test_a_valid_repository_is_judged_by_its_headers(hub_server, folder, tmp_path):
    hub_server.create(REPO, folder)
    result = run("validate", REPO)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "someone/model: valid (from its headers: codes, scales and hashes not checked: use --deep)\n"
    )
    headers = sum(8 + struct.unpack("<Q", (folder / name).read_bytes()[:8])[0] for name in (BASE, REFINEMENT))
    assert hub_server.sent("safetensors$") == headers
    assert not (tmp_path / "hub").exists()


def test_a_large_checkpoint_moves_less_than_a_megabyte(hub_server, tiny_checkpoint, tmp_path):
    """The shards are 40 times what may be moved; what is moved does not grow with them."""
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=40_000, hidden_size=256)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 40_000_000
    hub_server.create(REPO, folder)
    assert run("validate", REPO).exit_code == 0
    assert run("inspect", REPO).exit_code == 0
    assert sum(entry.sent for entry in hub_server.log) < 1_000_000


def test_a_model_of_70b_moves_less_than_a_megabyte(hub_server, tiny_checkpoint, tmp_path):
    """As many modules, of as long names, as LLaMA-3-70B has; its real sizes take 23 more digits a module."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=80, head_dim=32, vocab_size=64, **sizes)
    hub_server.create(REPO, folder)
    before = sum(entry.sent for entry in hub_server.log)
    assert validate(open_files(REPO)[0]) == []
    moved = sum(entry.sent for entry in hub_server.log) - before
    assert moved + 560 * 23 < 1_000_000
    assert moved / 560 < 1620


def test_inspect_says_the_same_as_of_the_folder(hub_server, folder):
    hub_server.create(REPO, folder)
    here, there = inspect_checkpoint(folder).to_dict(), inspect_checkpoint(open_files(REPO)[0]).to_dict()
    assert there == here | {"name": REPO}
    assert run("inspect", REPO).exit_code == 0


def test_deep_downloads_and_hashes(hub_server, folder):
    hub_server.create(REPO, folder)
    result = run("validate", REPO, "--deep")
    assert (result.exit_code, result.stdout) == (0, "someone/model: valid\n")
    raw = bytearray((folder / REFINEMENT).read_bytes())
    raw[-1] ^= 1
    hub_server.commit(REPO, {REFINEMENT: bytes(raw), "evil.pkl": b"cos\nsystem\n"})
    assert run("validate", REPO).exit_code == 1
    result = run("validate", REPO, "--deep")
    assert result.exit_code == 1
    assert f"{REFINEMENT}: (file): SHA-256 is" in result.stdout
    assert "evil.pkl: (file): may hold pickled Python objects" in result.stdout
    assert hub_server.sent("evil") == 0


def test_a_pinned_commit_is_not_left(hub_server, folder):
    """The branch moves to something broken between the first question and the reads."""
    hub_server.create(REPO, folder)
    hub_server.fault("GET", "/resolve/", call=lambda: hub_server.commit(REPO, {"bitnest.json": b"{"}))
    assert validate(open_files(REPO)[0]) == []
    assert validate(open_files(REPO)[0]) != []


def test_revisions(hub_server, folder):
    good = hub_server.create(REPO, folder)
    hub_server.repositories[REPO].tags["v1"] = good
    hub_server.commit(REPO, {"config.json": None})
    assert run("validate", REPO, "--revision", "v1").exit_code == 0
    assert run("validate", REPO, "--revision", good).exit_code == 0
    assert run("validate", REPO).exit_code == 1
    result = run("validate", REPO, "--revision", "v2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "Error: someone/model: has no revision 'v2'. Its branches and tags are listed at "
        "huggingface.co/someone/model.\n"
    )


def test_a_missing_shard_and_a_truncated_one(hub_server, folder):
    hub_server.create(REPO, folder)
    assert findings(hub_server, {REFINEMENT: None}) == [
        f"{REFINEMENT}: (file): missing, though bitnest.safetensors.index.json names it. Download the checkpoint again."
    ]
    cut = (folder / REFINEMENT).read_bytes()[:-5]
    (found,) = findings(hub_server, {REFINEMENT: cut})
    assert found.startswith(f"{REFINEMENT}: (file): cut off: has {len(cut)} bytes, its header describes")


@pytest.mark.parametrize(
    "shard", ["../../../etc/passwd", "/etc/passwd", "http://evil.invalid/x.safetensors", "a\\b", "", "x/../../y"]
)
def test_no_name_is_followed(shard, hub_server, folder):
    """Neither out of the repository nor to another host: the only requests are for names of the Hub's own listing."""
    hub_server.create(REPO, folder)
    index = json.loads((folder / "bitnest.safetensors.index.json").read_bytes())
    index["weight_map"] = dict.fromkeys(index["weight_map"], shard)
    changed = json.dumps(index).encode()
    assert findings(hub_server, {"bitnest.safetensors.index.json": changed})
    assert run("inspect", REPO).exit_code in (0, 1)
    names = {entry.path.rpartition("/")[2].partition("?")[0] for entry in hub_server.requests("GET", "/(resolve|cdn)/")}
    assert names <= set(hub_server.files(REPO))
    # The draft index leads `inspect`.
    hub_server.commit(REPO, {"bitnest-draft.safetensors.index.json": changed})
    result = run("inspect", REPO)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    names = {entry.path.rpartition("/")[2].partition("?")[0] for entry in hub_server.requests("GET", "/(resolve|cdn)/")}
    assert names <= set(hub_server.files(REPO))


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8 + 1, 30_000_000])
def test_a_header_that_claims_too_much_is_not_read(length, hub_server, folder, monkeypatch):
    hub_server.create(REPO, folder)
    monkeypatch.setattr(shards, "MAX_JSON_BYTES", 100_000)
    content = struct.pack("<Q", length) + b"{" + b" " * 200_000
    found = findings(hub_server, {BASE: content})
    assert any(f.startswith(f"{BASE}: (file): cut off: has") for f in found)
    assert hub_server.sent(BASE) <= 8


def test_a_header_within_its_file_is_bounded(hub_server, folder, monkeypatch):
    hub_server.create(REPO, folder)
    monkeypatch.setattr(shards, "MAX_JSON_BYTES", 100_000)
    found = findings(hub_server, {BASE: struct.pack("<Q", 150_000) + b"{" + b" " * 200_000})
    assert f"{BASE}: (file): its header has 150000 bytes, expected at most 100000" in found
    assert hub_server.sent(BASE) <= 8


def test_a_json_file_is_bounded(hub_server, folder, monkeypatch):
    hub_server.create(REPO, folder)
    monkeypatch.setattr(shards, "MAX_JSON_BYTES", 1000)
    found = findings(hub_server, {"bitnest.json": b"[" * 2000})
    assert "bitnest.json: (file): has 2000 bytes, expected at most 1000" in found
    assert hub_server.sent(r"bitnest\.json") == 0
    result = run("inspect", REPO)
    assert result.stderr == "Error: bitnest.json: has 2000 bytes, expected at most 1000\n"


def test_all_reads_together_are_bounded(hub_server, folder, monkeypatch):
    hub_server.create(REPO, folder)
    monkeypatch.setattr(remote, "MOST_BYTES", 10_000)
    result = run("validate", REPO)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: someone/model: its indexes and headers alone are larger than 10000 bytes")
    assert sum(entry.sent for entry in hub_server.log if entry.file) <= 10_000


def test_a_server_that_ignores_ranges_does_not_fill_the_memory(hub_server, folder):
    hub_server.create(REPO, folder)
    files, _ = open_files(REPO)
    hub_server.ignore_ranges = True
    assert files.read(BASE, 8, 100) == (folder / BASE).read_bytes()[8:108]


def test_interruptions_are_tried_again(hub_server, folder):
    hub_server.create(REPO, folder)
    hub_server.fault("GET", "/api/models/", status=429, headers={"Retry-After": "0"})
    hub_server.fault("GET", "/resolve/.*json", status=503, headers={"Retry-After": "0"})
    hub_server.fault("GET", "/cdn/", cut=3)
    hub_server.fault("GET", "/cdn/", drop="before", skip=1)
    assert validate(open_files(REPO)[0]) == []
    assert all(fault.seen == 1 for fault in hub_server.faults)


def test_a_hub_that_stays_away_ends_it_in_a_sentence(hub_server, folder):
    hub_server.create(REPO, folder)
    hub_server.fault("GET", "/cdn/", cut=3, times=100)
    result = run("validate", REPO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: someone/model: the Hub could not be reached (")


def test_the_token_stays_on_the_hub(hub_server, folder, monkeypatch):
    """A private repository is read with the token; storage, which is another origin, never sees it."""
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    hub_server.create("me/model", folder, private=True)
    assert validate(open_files("me/model")[0]) == []
    assert all(entry.user == "me" for entry in hub_server.requests("GET", "/resolve/|/api/models/"))
    stored = hub_server.requests("GET", "/cdn/")
    assert stored
    assert all(entry.user is None for entry in stored)
    monkeypatch.delenv("HF_TOKEN")
    result = run("validate", "me/model")
    assert result.stderr.startswith("Error: me/model: the Hub wants a login")


def test_gated_missing_and_renamed(hub_server, folder, monkeypatch):
    hub_server.create(REPO, folder, gated=True)
    result = run("validate", REPO)
    assert result.stderr.startswith("Error: someone/model: access is restricted to people its owner let in.")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    assert "access is restricted" in run("inspect", REPO).stderr
    result = run("inspect", "someone/nothing")
    assert result.stderr == "Error: someone/nothing: there is no such repository on the Hub. Check the name.\n"
    hub_server.repositories[REPO].gated = False
    hub_server.rename(REPO, "someone/else")
    result = run("validate", REPO)
    assert result.exit_code == 0
    assert result.stderr == "Note: someone/model was renamed to someone/else. Use that name from now on.\n"


def test_offline_reads_the_cache(hub_server, folder, monkeypatch):
    from huggingface_hub import constants

    hub_server.create(REPO, folder)
    assert run("pull", REPO).exit_code == 0
    before = len(hub_server.log)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = run("validate", REPO, "--deep")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "someone/model: valid\n", "")
    assert run("inspect", REPO).exit_code == 0
    assert len(hub_server.log) == before
