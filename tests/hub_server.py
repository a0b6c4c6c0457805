"""A Hub on loopback: enough of the Hugging Face Hub's HTTP protocol for the unmodified `huggingface_hub` client.

Tests take the fixture `hub_server` of `conftest.py`, which starts one and points the client of this process at it
(endpoint, empty cache, no token, Xet off). What a test does with it:

    hub_server.create("me/model", {"config.json": b"{}"}, private=True)   # or gated=True; returns the commit
    hub_server.commit("me/model", {"a.txt": b"new", "old.txt": None})     # None deletes; branch="main"
    hub_server.files("me/model", "main")                                  # {path: content}
    hub_server.rename("me/model", "me/other")                             # answers 307 for the old name
    hub_server.tokens["hf_x"] = User("someone", orgs=("org",), can_write=False)   # "hf_me" is the user `me`
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    hub_server.environment(tmp_path, token="hf_me")                       # variables for a client in a child process
    hub_server.log                                                        # every request, with the bytes of its bodies
    hub_server.sent("safetensors")                                        # body bytes sent for files of matching name
    hub_server.fault("GET", r"/resolve/.*\\.safetensors", cut=1000)        # see `Fault`: the next such request fails

The client's own way to upload warns under `-W error`; tests that upload carry
`pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")`.

Storage is as on the Hub: weights are LFS objects, known by SHA-256 and served by a redirect to `/cdn/` on
another host (an origin of its own, which must never see a token: `Request.user`); small files
are git blobs inside the commit. Private and missing repositories look the same to whoever has no token (401), and
missing ones are 404 to whoever has one; gated files are 401 or 403 with `X-Error-Code: GatedRepo`.

What it leaves out: Xet, multipart uploads, signed and expiring links, pagination, datasets and Spaces.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".model")
LFS_BYTES = 10_000_000
WRITE = "write"


@dataclass(frozen=True)
class User:
    """Whose token it is; `can_write` is the token's role."""

    name: str
    orgs: tuple[str, ...] = ()
    can_write: bool = True


@dataclass
class Repository:
    """A model repository: commits are whole listings, refs name commits (`main`, `refs/pr/1`), tags too."""

    repo_id: str
    private: bool = False
    gated: bool = False
    allowed: set[str] = field(default_factory=set)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """One request and its answer. `file`: the repository file that it moved; `received` and `sent` are body bytes."""

    method: str
    path: str
    user: str | None
    received: int = 0
    status: int = 0
    sent: int = 0
    file: str | None = None


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method and path (regular expression) fit.

    skip: let this many fitting requests pass first. call: run before anything else, on the server's thread (a commit
    that moves, a client that is killed). status, headers: answer that, `Retry-After` for 429 and 503. cut: send this
    many bytes of the answer's body, then close. cut_upload: read this many bytes of the request's body, then close.
    drop: `before` closes without doing what was asked, `after` does it and closes without an answer. body: send this
    content with the right headers of the true one, except for its length. `seen` counts how often it struck.
    """

    method: str
    path: str
    times: int = 1
    skip: int = 0
    call: Callable[[], object] | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    cut_upload: int | None = None
    drop: str | None = None
    body: bytes | None = None
    seen: int = 0


class Refusal(Exception):
    """An answer that is not the one asked for."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, dict(headers or {})


@dataclass
class Answer:
    """A status, a body and headers, where a route does not simply return JSON with status 200."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)


class HubServer:
    """The state of the Hub, and its HTTP server; a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.renamed: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens: dict[str, User] = {"hf_me": User("me", orgs=("org",))}
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.yaml_errors: list[str] = []
        self.ignore_ranges = False
        self.lock = threading.RLock()
        # Weights come from a host of another name, as from the Hub's content network: clients tell hosts apart, by
        # name alone or by name and port.
        self._servers = [_Server(("127.0.0.1", 0), _Handler) for _ in range(2)]
        for server in self._servers:
            server.hub = self
        ports = [server.server_address[1] for server in self._servers]
        self.endpoint, self.storage = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in self._servers
        ]

    def __enter__(self) -> HubServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def create(
        self,
        repo_id: str,
        files: Mapping[str, bytes] | Path | None = None,
        *,
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """A repository with a first commit of `files` (contents, or a folder); returns the commit."""
        self.repositories[repo_id] = repository = Repository(repo_id, private, gated)
        _commit(repository, "main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        return self.commit(repo_id, files) if files else repository.branches["main"]

    def commit(self, repo_id: str, files: Mapping[str, bytes | None], *, branch: str = "main") -> str:
        """Add or replace files (None deletes one); returns the new commit."""
        with self.lock:
            for content in files.values():
                if content is not None:
                    self.objects[hashlib.sha256(content).hexdigest()] = content
            return _commit(self.repositories[repo_id], branch, files, "change")

    def rename(self, old: str, new: str) -> None:
        """Move a repository; the old name answers with redirects."""
        self.repositories[new] = self.repositories.pop(old)
        self.repositories[new].repo_id = new
        self.renamed[old] = new

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds, without `.gitattributes`."""
        repository = self.repositories[repo_id]
        files = repository.commits[_find(repository, revision)]
        return {name: content for name, content in files.items() if name != ".gitattributes"}

    def fault(self, method: str, path: str, **what: Any) -> Fault:
        """Arrange a `Fault`; returns it."""
        self.faults.append(fault := Fault(method, path, **what))
        return fault

    def sent(self, pattern: str = "") -> int:
        """Body bytes of repository files sent so far, for files whose path fits the regular expression."""
        return sum(entry.sent for entry in self.log if entry.file is not None and re.search(pattern, entry.file))

    def requests(self, method: str, path: str) -> list[Request]:
        """The requests so far whose path fits the regular expression."""
        return [entry for entry in self.log if entry.method == method and re.search(path, entry.path)]

    def environment(self, home: Path, *, token: str | None = None) -> dict[str, str]:
        """The variables of a child process whose client talks to this server alone."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return kept | ours | ({"HF_TOKEN": token} if token else {}) | {"NO_PROXY": "127.0.0.1,localhost"}


def _commit(repository: Repository, branch: str, files: Mapping[str, bytes | None], message: str) -> str:
    parent = repository.branches.get(branch)
    listing = dict(repository.commits[parent]) if parent else {}
    for name, content in files.items():
        if content is None:
            listing.pop(name, None)
        else:
            listing[name] = content
    text = f"{repository.repo_id} {parent} {branch} {message} {len(repository.commits)}"
    commit = hashlib.sha1(text.encode()).hexdigest()
    repository.commits[commit] = listing
    repository.messages[commit] = message
    repository.branches[branch] = commit
    return commit


def _find(repository: Repository, revision: str) -> str:
    if revision in repository.commits:
        return revision
    commit = repository.branches.get(revision) or repository.tags.get(revision)
    if commit is None:
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def _is_lfs(name: str, size: int) -> bool:
    return size > 0 and (name.endswith(LFS_SUFFIXES) or size >= LFS_BYTES)


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _blob_id(content)}
    if _is_lfs(name, len(content)):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed or hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body go out in two pieces; held back, the second would wait 40 ms for an answer to the first.
    disable_nagle_algorithm = True
    server: _Server
    entry: Request
    fault: Fault
    unread: int

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        hub = self.server.hub
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.user = hub.tokens.get(token) if token else None
        self.entry = Request(self.command, self.path, self.user.name if self.user else None)
        self.unread = int(self.headers.get("Content-Length") or 0)
        with hub.lock:
            hub.log.append(self.entry)
            self.fault = self._strike()
        try:
            if self.fault.call is not None:
                self.fault.call()
            if self.fault.cut_upload is not None or self.fault.drop == "before":
                self._read(min(self.unread, self.fault.cut_upload or 0))
                self._hang_up()
                return
            body = self._body()
            if self.fault.status is not None:
                raise Refusal(self.fault.status, "injected", headers=self.fault.headers)
            if token and self.user is None and not self.path.startswith(("/cdn/", "/lfs/")):
                raise Refusal(401, "Invalid credentials in Authorization header")
            with hub.lock:
                answer = self._route(body)
            if self.fault.drop == "after":
                self._hang_up()
                return
            self._answer(answer if isinstance(answer, Answer) else Answer(200, answer))
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message, **refusal.headers}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self._answer(Answer(refusal.status, {"error": refusal.message}, headers))

    def _strike(self) -> Fault:
        for fault in self.server.hub.faults:
            if fault.times and fault.method == self.command and re.search(fault.path, self.path):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                fault.seen += 1
                return fault
        return Fault("", "")

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        self.unread -= len(data)
        self.entry.received += len(data)
        return data

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            data = self._read(self.unread)
            if self.unread:
                raise ConnectionError("the client went away")
            return data
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        data = b"".join(pieces)
        self.entry.received += len(data)
        return data

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, answer: Answer) -> None:
        """Send an answer; a body of bytes as it is, anything else as JSON."""
        raw = isinstance(answer.body, bytes)
        body = answer.body if raw else json.dumps(answer.body).encode()
        kind = "application/octet-stream" if raw else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **answer.headers}
        self.entry.status = answer.status
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.cut is not None and self.fault.cut < len(body):
            body = body[: self.fault.cut]
            self.entry.sent += len(body)
            self.wfile.write(body)
            self._hang_up()
            return
        self.entry.sent += len(body)
        self.wfile.write(body)

    # The rest of the class is the protocol: what stands where, and who may see it.

    def _route(self, body: bytes) -> Any:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        match (self.command, *parts):
            case ("GET", "api", "whoami-v2"):
                user = self._require_user()
                orgs = [{"name": name, "type": "org"} for name in user.orgs]
                role = WRITE if user.can_write else "read"
                return {"type": "user", "name": user.name, "orgs": orgs, "auth": {"accessToken": {"role": role}}}
            case ("POST", "api", "validate-yaml"):
                errors = [{"message": message} for message in self.server.hub.yaml_errors]
                if errors:
                    return Answer(400, {"errors": errors, "warnings": []})
                return {"errors": [], "warnings": []}
            case ("POST", "api", "repos", "create"):
                return self._create(json.loads(body))
            case (_, "api", "models", owner, name, *rest):
                return self._model(f"{owner}/{name}", rest, body)
            case ("POST", owner, name, "info", "lfs", "objects", "batch"):
                return self._lfs_batch(f"{owner}/{name.removesuffix('.git')}", json.loads(body))
            case ("PUT", "lfs", oid):
                if hashlib.sha256(body).hexdigest() != oid:
                    raise Refusal(400, "the content does not match its SHA-256")
                self.server.hub.objects[oid] = body
                return {}
            case ("POST", "lfs", "verify", oid):
                known = self.server.hub.objects.get(oid)
                if known is None or len(known) != json.loads(body)["size"]:
                    raise Refusal(404, "no such object")
                return {}
            case ("GET" | "HEAD", "cdn", oid, *name):
                self.entry.file = "/".join(name)
                return self._content(self.server.hub.objects[oid], {"ETag": f'"{oid}"'})
            case ("GET" | "HEAD", owner, name, "resolve", revision, *path):
                return self._resolve(f"{owner}/{name}", revision, "/".join(path))
        raise Refusal(404, "no such page")

    def _require_user(self) -> User:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        return self.user

    def _require_writer(self, owner: str) -> User:
        user = self._require_user()
        if not user.can_write or owner not in (user.name, *user.orgs):
            raise Refusal(403, f"You don't have the rights to write under the namespace {owner}.")
        return user

    def _repository(self, repo_id: str, *, write: bool = False) -> Repository:
        hub = self.server.hub
        if repo_id in hub.renamed:
            target = self.path.replace(repo_id, hub.renamed[repo_id], 1)
            raise Refusal(307, "moved", headers={"Location": target})
        repository = hub.repositories.get(repo_id)
        owner = repo_id.partition("/")[0]
        hidden = repository is None or (
            repository.private and (self.user is None or owner not in (self.user.name, *self.user.orgs))
        )
        if hidden or repository is None:
            if self.user is None:
                raise Refusal(401, "Invalid username or password.", "RepoNotFound")
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if write:
            self._require_writer(owner)
        return repository

    def _create(self, data: dict[str, Any]) -> Any:
        hub = self.server.hub
        user = self._require_user()
        owner = data.get("organization") or user.name
        self._require_writer(owner)
        repo_id = f"{owner}/{data['name']}"
        url = f"{hub.endpoint}/{repo_id}"
        if repo_id in hub.repositories:
            return Answer(409, {"error": "You already created this model repo", "url": url})
        hub.create(repo_id, private=bool(data.get("private")) or data.get("visibility") == "private")
        return {"url": url, "name": repo_id, "id": repo_id}

    def _model(self, repo_id: str, rest: list[str], body: bytes) -> Any:
        write = self.command != "GET" and rest[:1] != ["paths-info"]
        repository = self._repository(repo_id, write=write)
        match (self.command, *rest):
            case ("GET",):
                return self._info(repository, repository.branches["main"])
            case ("GET", "revision", revision):
                return self._info(repository, _find(repository, revision))
            case ("GET", "auth-check"):
                self._require_access(repository)
                return {}
            case ("GET", "refs"):
                return _refs(repository)
            case ("GET", "commits", revision):
                return self._history(repository, _find(repository, revision))
            case ("GET", "tree", revision, *folder):
                return _tree(repository.commits[_find(repository, revision)], "/".join(folder), self.query)
            case ("POST", "paths-info", revision):
                files = repository.commits[_find(repository, revision)]
                form = parse_qs(body.decode())
                wanted = form.get("paths") or json.loads(body or b"{}").get("paths", [])
                return [_entry(name, files[name]) for name in wanted if name in files]
            case ("POST", "preupload", revision):
                listing = repository.commits[_find(repository, revision)]
                return {"files": [_mode(file, listing) for file in json.loads(body)["files"]]}
            case ("POST", "commit", revision):
                return self._commit(repository, revision, body)
            case ("POST", "branch", branch):
                if branch in repository.branches:
                    raise Refusal(409, "Reference already exists")
                start = json.loads(body or b"{}").get("startingPoint", "main")
                repository.branches[branch] = _find(repository, start)
                return {}
            case ("POST", "tag", revision):
                tag = json.loads(body)["tag"]
                if tag in repository.tags:
                    raise Refusal(409, "Tag reference exists already")
                repository.tags[tag] = _find(repository, revision)
                return {}
        raise Refusal(404, "no such page")

    def _info(self, repository: Repository, commit: str) -> Any:
        siblings = []
        for name, content in repository.commits[commit].items():
            entry = _entry(name, content)
            more = {"size": entry["size"], "blobId": entry["oid"]}
            if "lfs" in entry:
                more["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 134}
            siblings.append({"rfilename": name} | (more if "blobs" in self.query else {}))
        gated = "manual" if repository.gated else False
        return {
            "_id": "0" * 24,
            "id": repository.repo_id,
            "modelId": repository.repo_id,
            "sha": commit,
            "private": repository.private,
            "gated": gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }

    def _history(self, repository: Repository, commit: str) -> Any:
        return [
            {
                "id": sha,
                "title": repository.messages[sha],
                "message": "",
                "date": "2026-01-01T00:00:00.000Z",
                "authors": [],
            }
            for sha in reversed(list(repository.commits)[: list(repository.commits).index(commit) + 1])
        ]

    def _require_access(self, repository: Repository) -> None:
        owner = repository.repo_id.partition("/")[0]
        if not repository.gated:
            return
        if self.user is None:
            raise Refusal(401, "Access to this model is restricted. Please log in.", "GatedRepo")
        if self.user.name not in repository.allowed and owner not in (self.user.name, *self.user.orgs):
            raise Refusal(403, "Access to this model is restricted and you are not in the list.", "GatedRepo")

    def _resolve(self, repo_id: str, revision: str, name: str) -> Any:
        repository = self._repository(repo_id)
        self._require_access(repository)
        commit = _find(repository, revision)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        content = repository.commits[commit].get(name)
        if content is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", headers)
        if _is_lfs(name, len(content)):
            oid = hashlib.sha256(content).hexdigest()
            location = f"{self.server.hub.storage}/cdn/{oid}/{quote(name)}?X-Signature=secret"
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{oid}"', "Location": location}
            return Answer(302, b"", headers | linked)
        self.entry.file = name
        return self._content(content, headers | {"ETag": f'"{_blob_id(content)}"'})

    def _content(self, content: bytes, headers: dict[str, str]) -> Any:
        if self.fault.body is not None:
            content = self.fault.body
        status = 200
        if (asked := self.headers.get("Range")) and not self.server.hub.ignore_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            size = len(content)
            start = int(first) if first else max(0, size - int(last))
            end = min(int(last), size - 1) if first and last else size - 1
            if start > end:
                raise Refusal(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{end}/{size}"
            content, status = content[start : end + 1], 206
        return Answer(status, content, headers)

    def _lfs_batch(self, repo_id: str, data: dict[str, Any]) -> Any:
        self._repository(repo_id, write=True)
        hub, answers = self.server.hub, []
        for wanted in data["objects"]:
            answer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in hub.objects:
                upload = {"href": f"{hub.endpoint}/lfs/{wanted['oid']}"}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{hub.endpoint}/lfs/verify/{wanted['oid']}"}}
            answers.append(answer)
        return {"transfer": "basic", "objects": answers}

    def _commit(self, repository: Repository, revision: str, body: bytes) -> Any:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        pull = self.query.get("create_pr") == "1"
        if not pull and revision not in repository.branches:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        tip = repository.branches[revision if not pull else "main"]
        if header.get("parentCommit") not in (None, tip):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changes: dict[str, bytes | None] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.hub.objects:
                    raise Refusal(400, f"the object of {value['path']} was not uploaded")
                changes[value["path"]] = self.server.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                changes[value["path"]] = None
            elif line["key"] == "deletedFolder":
                folder = value["path"].rstrip("/") + "/"
                changes |= {name: None for name in repository.commits[tip] if name.startswith(folder)}
        answer: dict[str, Any] = {"success": True}
        if pull:
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.branches)
            revision = f"refs/pr/{number}"
            repository.branches[revision] = tip
            answer["pullRequestUrl"] = f"{self.server.hub.endpoint}/{repository.repo_id}/discussions/{number}"
        commit = _commit(repository, revision, changes, header["summary"])
        url = f"{self.server.hub.endpoint}/{repository.repo_id}/commit/{commit}"
        return answer | {"commitOid": commit, "commitUrl": url, "hookOutput": ""}


def _refs(repository: Repository) -> Any:
    def listed(kind: str, refs: Mapping[str, str]) -> list[dict[str, str]]:
        return [
            {"name": n, "ref": n if n.startswith("refs/") else f"refs/{kind}/{n}", "targetCommit": c}
            for n, c in refs.items()
        ]

    pulls = {name: commit for name, commit in repository.branches.items() if name.startswith("refs/pr/")}
    branches = {name: commit for name, commit in repository.branches.items() if name not in pulls}
    answer = {"branches": listed("heads", branches), "tags": listed("tags", repository.tags), "converts": []}
    return answer | {"pullRequests": listed("pr", pulls)}


def _tree(files: Mapping[str, bytes], folder: str, query: Mapping[str, str]) -> Any:
    recursive = query.get("recursive", "").lower() in ("true", "1")
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if folder and not name.startswith(f"{folder}/"):
            continue
        inner = name.removeprefix(f"{folder}/") if folder else name
        parents = [str(parent) for parent in PurePosixPath(inner).parents if str(parent) not in (".", "/")]
        for parent in reversed(parents if recursive else parents[-1:]):
            path = f"{folder}/{parent}" if folder else parent
            entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
        if recursive or not parents:
            entries[name] = _entry(name, content)
    if folder and not entries:
        raise Refusal(404, "no such folder", "EntryNotFound")
    return list(entries.values())


def _mode(file: dict[str, Any], listing: Mapping[str, bytes]) -> dict[str, Any]:
    path = file["path"]
    mode = "lfs" if _is_lfs(path, file["size"]) else "regular"
    answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
    if path in listing:
        content = listing[path]
        lfs = _is_lfs(path, len(content))
        answer["oid"] = hashlib.sha256(content).hexdigest() if lfs else _blob_id(content)
    return answer


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something has happened in a child process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
