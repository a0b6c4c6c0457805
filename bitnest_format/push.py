"""Put a checkpoint on the Hub, so that no reader ever finds half of one.

`bitnest.json` is the switch: a repository without it is an unfinished push, and every reader refuses it. So weights,
indexes and tokenizer go up first, in commits of a few gigabytes; the first of them takes an older `bitnest.json` away.
`config.json`, `bitnest.json` and the card follow in one last commit, after the files before it were found on the Hub
as the manifest describes them. Each step looks at the repository anew and names the commit that it builds on, so an
interrupted push goes on where it stopped, and one that meets another push fails instead of mixing the two.

Only files that the manifest lists are published, and of the others `bitnest.json`, the card and `evaluation.json`.
No message quotes a server's answer or a token.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from bitnest_format import __version__, card, hub
from bitnest_format.card import CARD_FILE, EVALUATION_FILE, CardError
from bitnest_format.checkpoint import CONFIG_FILE
from bitnest_format.errors import BitnestError, UsageError
from bitnest_format.manifest import MANIFEST_FILE, Manifest
from bitnest_format.report import Sizes, inspect_checkpoint
from bitnest_format.shards import read_json
from bitnest_format.validation import validate

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi
    from huggingface_hub.hf_api import RepoFile

Progress = Callable[[str, int, int], None]

LAST_FILES = (CONFIG_FILE, MANIFEST_FILE, EVALUATION_FILE)
COMMIT_BYTES = 5_000_000_000
PAUSES_SECONDS = (1, 2, 4, 8)
LONGEST_PAUSE_SECONDS = 300
MOST_FINDINGS = 20
SCANNED_BYTES = 50_000_000

WORK_FILES = (".*", "*.lock", "*.tmp", "*.part", "*.incomplete", "*.log", "*.pyc")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
REF_NAME = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9][\w./-]{0,199}(?<![/.])")
COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
# What a repository holds under these names belongs to another model, and under those to an earlier state of this one.
FOREIGN = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "*.gguf", "adapter_model*")
OURS = (
    *("bitnest-*.safetensors", "bitnest*.safetensors.index.json", EVALUATION_FILE, "generation_config.json"),
    *(
        "tokenizer*",
        "vocab.*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "*.tiktoken",
        "tekken.json",
    ),
    *("spiece.model", "sentencepiece.bpe.model", "chat_template.*", "additional_chat_templates/*"),
)


class PushError(BitnestError):
    """A push that cannot begin, or did not come to its end; `problems` lists every reason that was found."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        listed = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems:{listed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """Where the checkpoint lies now.

    `commit` is the commit that holds it, `revision` the branch or PR reference (None: the main branch).
    `uploaded` names the files that were sent by this run, `files` counts all of them; `warnings` are for the user.
    """

    repo_id: str
    url: str
    commit: str
    revision: str | None
    pull_request: str | None
    tag: str | None
    uploaded: tuple[str, ...]
    files: int
    warnings: tuple[str, ...]

    def load_lines(self) -> str:
        """The two lines that open the checkpoint."""
        at = f", revision={json.dumps(self.revision)}" if self.revision else ""
        return f'import bitnest_format\nmodel = bitnest_format.load("{self.repo_id}"{at})'

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the local checks found: `first` are the digests (SHA-256) and sizes in bytes of what goes up first."""

    folder: Path
    repo_id: str
    manifest: Manifest
    config: Mapping[str, Any]
    sizes: Sizes
    evaluation: list[dict[str, Any]] | None
    card: str | None
    first: Mapping[str, tuple[str, int]]
    last: Mapping[str, bytes]
    warnings: tuple[str, ...]

    def card_text(self, previous: str | None) -> str:
        """The card to publish; the local one is the earlier one where there is one, otherwise the Hub's `previous`."""
        earlier = self.card if self.card is not None else previous
        return card.card_text(
            self.manifest, self.config, self.sizes, self.evaluation, previous=earlier, repo_id=self.repo_id
        )


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    tag: str | None = None,
    progress: Progress | None = None,
) -> PushResult:
    """Check the checkpoint in `folder` and publish it as `repo_id`, which is made if it does not exist.

    private: make the repository private; refused for one that is public. revision: a branch, made if it does not
    exist, or `refs/pr/N`. create_pr: open a pull request instead of writing to the main branch. message: the summary
    of the commits. tag: a name for the last commit. progress: called as `progress(stage, done, total)`, in MB.

    Nothing in `folder` is changed. Raises `UsageError` for options that exclude each other, `PushError` for a
    checkpoint or a repository that is not fit (every reason at once), and for an upload that stopped half-way: the
    same call then goes on.
    """
    _check_options(revision, create_pr, tag)
    report = progress or (lambda stage, done, total: None)
    report(f"checking {folder}", 0, 1)
    plan = preflight(folder, repo_id)
    return _Push(plan, revision, create_pr, message, report).run(private, tag)


def _check_options(revision: str | None, create_pr: bool, tag: str | None) -> None:
    if create_pr and revision is not None:
        raise UsageError(
            f"--create-pr opens a pull request against the main branch; --revision {revision} names a branch. "
            "Leave one of them out."
        )
    if tag is not None and (create_pr or (revision or "").startswith("refs/pr/")):
        raise UsageError("--tag names a commit of a branch, and a pull request is not merged yet. Leave --tag out.")
    for option, name in (("--revision", revision), ("--tag", tag)):
        if name is not None and (not REF_NAME.fullmatch(name) or COMMIT_HASH.fullmatch(name)):
            raise UsageError(f"{option} {name!r}: cannot be the name of a branch or tag")


# --- what can be said without the network -------------------------------------------------------------------


def preflight(folder: Path, repo_id: str) -> Plan:
    """Everything that can be checked on this machine. Raises `PushError` listing every problem."""
    problems: list[str] = []
    if not hub.is_repo_id(repo_id):
        problems.append(f"{repo_id!r} is not a repository id; expected owner/name, such as me/SmolLM2-BitNest")
    problems += _client_problems()
    findings = validate(folder, deep=True)
    problems += [str(finding) for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        problems.append(f"{len(findings) - MOST_FINDINGS} findings more: run 'bitnest-format validate {folder} --deep'")
    if findings:
        raise PushError(*problems)
    manifest = Manifest.from_dict(read_json(folder / MANIFEST_FILE))
    extra = [name for name in (MANIFEST_FILE, CARD_FILE, EVALUATION_FILE) if (folder / name).is_file()]
    names = sorted({*manifest.files, *extra})
    for name in names:
        problems += _file_problems(folder, name, listed=name in manifest.files)
    if CARD_FILE in manifest.files:
        problems.append(f"{MANIFEST_FILE}: files.{CARD_FILE}: the card changes with every push. Remove the entry.")
    if problems:
        raise PushError(*problems)
    try:
        plan = _plan(folder, repo_id, manifest, extra)
        plan.card_text(None)
    except BitnestError as error:
        raise PushError(str(error)) from error
    return plan


def _plan(folder: Path, repo_id: str, manifest: Manifest, extra: list[str]) -> Plan:
    evaluation = None
    if EVALUATION_FILE in extra:
        evaluation = card.read_evaluation(read_json(folder / EVALUATION_FILE))
    warnings: tuple[str, ...] = ()
    text = _read_card(folder / CARD_FILE) if CARD_FILE in extra else None
    if not manifest.source.get("license") and not re.search(r"(?m)^license:", text or ""):
        warnings = (
            "the licence of the source is not recorded, so the card names none. Add 'license:' to the front matter of "
            f"{CARD_FILE}.",
        )
    last = {name: (folder / name).read_bytes() for name in LAST_FILES if (folder / name).is_file()}
    return Plan(
        folder=folder,
        repo_id=repo_id,
        manifest=manifest,
        config=json.loads(last[CONFIG_FILE]),
        sizes=inspect_checkpoint(folder).sizes,
        evaluation=evaluation,
        card=text,
        first={name: (file.sha256, file.size) for name, file in manifest.files.items() if name not in last},
        last=last,
        warnings=warnings,
    )


def _read_card(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CardError(f"{path.name}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _client_problems() -> Iterator[str]:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield "offline mode is on (HF_HUB_OFFLINE). Unset it to push."
    elif get_token() is None:
        yield "no token for the Hub was found. Log in with 'hf auth login', or set HF_TOKEN to one that may write."


def _file_problems(folder: Path, name: str, *, listed: bool) -> Iterator[str]:
    """Why a file must not be published: it lies elsewhere, is a work file, or says what others should not know."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        yield f"{name}: is a link to a file outside {folder.name}. Put the file itself there."
        return
    if listed and any(_matches(part, WORK_FILES) for part in PurePosixPath(name).parts):
        yield f"{name}: looks like a work file, but {MANIFEST_FILE} lists it. Remove it and its entry."
        return
    if name.endswith(".safetensors") or path.stat().st_size > SCANNED_BYTES:
        return
    content = path.read_bytes()
    if TOKEN.search(content):
        yield f"{name}: holds what looks like an access token of the Hub. Remove it, and revoke the token."
    if name.endswith(".json") and PurePosixPath(name).name not in ("tokenizer.json", "vocab.json"):
        data = read_json(path)
        if name == MANIFEST_FILE:
            data = {key: value for key, value in data.items() if key not in ("modules", "unquantized", "files")}
        for place, text in _texts(data):
            if _is_local_path(text):
                yield f"{name}: {place} is a path of this machine ({text}). Remove it in the source and convert again."


def _texts(data: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text inside a JSON document, and where it stands."""
    if isinstance(data, str):
        yield place, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _texts(value, f"{place}.{key}" if place else str(key))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _texts(value, f"{place}[{number}]")


def _is_local_path(text: str) -> bool:
    """Whether a text is an absolute path of this machine; paths of other machines are in many public models."""
    if len(text) > 4096 or not text.isprintable():
        return False
    path = Path(text)
    if not path.is_absolute() or len(path.parts) < 3:
        return False
    return os.path.exists(path) or path.is_relative_to(Path.home())


# --- the Hub ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Push:
    """One run: what has been sent, and the revision it goes to."""

    plan: Plan
    revision: str | None
    create_pr: bool
    message: str | None
    report: Progress
    uploaded: dict[str, None] = field(default_factory=dict)
    pull_request: str | None = None
    sent: int = 0
    tagged: str | None = None
    api: HfApi = field(init=False)

    def run(self, private: bool, tag: str | None) -> PushResult:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        self.api = HfApi(library_name="bitnest-format", library_version=__version__)
        # Two sets of bars on one terminal would overwrite each other; what the environment says stands.
        bars = not are_progress_bars_disabled() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
        if bars:
            disable_progress_bars()
        try:
            self._patiently(lambda: self._open(private))
            self._patiently(lambda: self._check_tag(tag))
            while (commit := self._patiently(self._step)) is None:
                pass
            self._patiently(lambda: self._tag(tag, commit))
        except KeyboardInterrupt:
            if self.pull_request is None:
                raise
            raise PushError(f"{self.plan.repo_id}: interrupted. Go on with --revision {self.revision}.") from None
        finally:
            if bars:
                enable_progress_bars()
        page = f"{self.api.endpoint}/{self.plan.repo_id}"
        return PushResult(
            repo_id=self.plan.repo_id,
            url=page if self.revision is None else f"{page}/tree/{self.revision}",
            commit=commit,
            revision=self.revision,
            pull_request=self.pull_request,
            tag=tag,
            uploaded=tuple(self.uploaded),
            files=len(self.plan.first) + len(self.plan.last) + 1,
            warnings=self.plan.warnings,
        )

    def _open(self, private: bool) -> None:
        """Find the repository or make it, and the branch."""
        from huggingface_hub.errors import RepositoryNotFoundError

        repo_id = self.plan.repo_id
        self.report(f"looking at {repo_id}", 0, 1)
        try:
            info = self.api.repo_info(repo_id)
        except RepositoryNotFoundError as error:
            if self.create_pr or _status(error) == 401:
                raise
            self.api.create_repo(repo_id, private=private or None, exist_ok=True)
            info = self.api.repo_info(repo_id)
        if info.id != repo_id:
            raise PushError(f"{repo_id}: was renamed to {info.id}. Push to that name.")
        if private and not info.private:
            raise PushError(
                f"{repo_id}: exists and is public, so --private cannot hold. Make it private in its settings, or "
                "choose another name."
            )
        if self.revision == "main":
            self.revision = None
        if self.revision is not None and not self.revision.startswith("refs/pr/"):
            self.api.create_branch(repo_id, branch=self.revision, exist_ok=True)

    def _check_tag(self, tag: str | None) -> None:
        """A tag that exists already must name what is there now: it is never moved."""
        found = self._find_tag(tag)
        if found is not None and found != self.api.repo_info(self.plan.repo_id, revision=self.revision).sha:
            raise self._tag_taken(tag)
        self.tagged = tag if found is not None else None

    def _tag_taken(self, tag: str | None) -> PushError:
        return PushError(f"{self.plan.repo_id}: has a tag {tag} already, of another commit. Choose another name.")

    def _find_tag(self, tag: str | None) -> str | None:
        if tag is None:
            return None
        tags = self.api.list_repo_refs(self.plan.repo_id).tags
        return next((ref.target_commit for ref in tags if ref.name == tag), None)

    def _tag(self, tag: str | None, commit: str) -> None:
        found = self._find_tag(tag)
        if found is not None and found != commit:
            raise self._tag_taken(tag)
        if tag is not None and found is None:
            self.api.create_tag(self.plan.repo_id, tag=tag, revision=commit)

    def _step(self) -> str | None:
        """Make the next commit; the commit that holds everything where there is nothing left to do."""
        plan = self.plan
        head = str(self.api.repo_info(plan.repo_id, revision=self.revision).sha)
        remote = self._files(head)
        foreign = [name for name in remote if _matches(name, FOREIGN)]
        if foreign:
            raise PushError(
                f"{plan.repo_id}: holds {', '.join(foreign[:3])}, the weights of another model. Push to a repository "
                "of its own, or delete them there."
            )
        missing = [name for name in plan.first if not self._is_there(remote.get(name), name)]
        if missing:
            batch = self._batch(missing)
            self.report("uploading weights (MB)", self.sent // 10**6, _total(plan, missing, self.sent) // 10**6)
            withdrawn = [MANIFEST_FILE] if MANIFEST_FILE in remote else []
            self._commit(plan.folder, batch, withdrawn, head, self.message or "Upload planes, indexes and tokenizer")
            self.sent += sum(plan.first[name][1] for name in batch)
            return None
        with tempfile.TemporaryDirectory(prefix="bitnest-push-") as temporary:
            staged = Path(temporary)
            contents = {**plan.last, CARD_FILE: self._card(remote, head, staged)}
            names = [name for name, content in contents.items() if not _same_content(remote.get(name), content)]
            ours = plan.first.keys() | plan.last.keys()
            stale = [name for name in remote if name not in ours and _matches(name, OURS)]
            if not names and not stale:
                self.report("complete", 1, 1)
                return head
            self._refuse_repeats(names)
            self.report("publishing config, manifest and card", 0, 1)
            for name in names:
                (staged / name).write_bytes(contents[name])
            self._commit(staged, names, stale, head, self.message or "Publish config, manifest and card")
        return None

    def _files(self, commit: str) -> dict[str, RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        tree = self.api.list_repo_tree(self.plan.repo_id, recursive=True, revision=commit)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def _is_there(self, remote: RepoFile | None, name: str) -> bool:
        sha256, size = self.plan.first[name]
        if remote is None or remote.size != size:
            return False
        if remote.lfs is not None:
            return remote.lfs.sha256 == sha256
        return _same_content(remote, (self.plan.folder / name).read_bytes())

    def _card(self, remote: Mapping[str, RepoFile], head: str, folder: Path) -> bytes:
        previous = None
        if self.plan.card is None and CARD_FILE in remote:
            path = self.api.hf_hub_download(self.plan.repo_id, CARD_FILE, revision=head, local_dir=folder / "hub")
            previous = Path(path).read_text(encoding="utf-8", errors="replace")
        try:
            return self.plan.card_text(previous).encode("utf-8")
        except CardError as error:
            place = "" if previous is None else f"{self.plan.repo_id}: the repository's "
            raise PushError(f"{place}{error}") from error

    def _batch(self, missing: list[str]) -> list[str]:
        """The next files, up to `COMMIT_BYTES` of them, at least one; what was sent and did not stay is an error."""
        self._refuse_repeats(missing)
        batch: list[str] = []
        size = 0
        for name in missing:
            size += self.plan.first[name][1]
            if batch and size > COMMIT_BYTES:
                break
            batch.append(name)
        return batch

    def _refuse_repeats(self, names: list[str]) -> None:
        again = [name for name in names if name in self.uploaded]
        if again:
            raise PushError(
                f"{self.plan.repo_id}: {again[0]} was uploaded but is not there as {MANIFEST_FILE} has it. Was it "
                "changed meanwhile, here or there? Validate the folder and push again."
            )

    def _commit(self, folder: Path, names: list[str], deleted: list[str], parent: str, message: str) -> None:
        if self.tagged is not None:
            raise self._tag_taken(self.tagged)
        info: CommitInfo = self.api.upload_folder(
            repo_id=self.plan.repo_id,
            folder_path=folder,
            # An empty list would mean everything.
            allow_patterns=[_literal(name) for name in names] or ["(nothing)"],
            delete_patterns=[_literal(name) for name in deleted] or None,
            commit_message=message,
            revision=self.revision,
            create_pr=self.create_pr or None,
            parent_commit=parent,
        )
        if self.create_pr:
            self.pull_request, self.revision, self.create_pr = info.pr_url, info.pr_revision, False
        self.uploaded |= dict.fromkeys(names)

    def _patiently(self, step: Callable[[], Any]) -> Any:
        """Run a step, again after a pause where the Hub is busy or the connection broke; each step looks anew."""
        for pause in (*PAUSES_SECONDS, None):
            try:
                return step()
            except (BitnestError, KeyboardInterrupt):
                raise
            except Exception as error:
                cause = _cause(error)
                status = _status(cause)
                passing = status == 429 if self.create_pr else status is None or status == 429 or status >= 500
                if not _is_hubs(cause):
                    raise
                if pause is None or not passing:
                    raise self._explain(cause) from None
                time.sleep(_retry_after(cause) or pause)
        raise AssertionError("unreachable")

    def _explain(self, error: BaseException) -> PushError:
        repo_id, status = self.plan.repo_id, _status(error)
        owner = repo_id.partition("/")[0]
        if status == 401:
            return PushError(f"{repo_id}: the Hub does not accept your token. Log in again with 'hf auth login'.")
        if status == 403:
            return PushError(
                f"{repo_id}: your token may not write there. Use one with write access to {owner}, or --create-pr."
            )
        if status == 404:
            return PushError(
                f"{repo_id}: no such repository, or no branch {self.revision or 'main'} in it. Check the name."
            )
        what = f"the Hub answered with HTTP status {status}"
        if status == 412:
            what = "somebody else committed at the same time"
        elif status is None:
            what = f"the connection to the Hub broke ({type(error).__name__})"
        done = len(self.uploaded)
        pending = [name for name in (*self.plan.first, *self.plan.last, CARD_FILE) if name not in self.uploaded]
        more = f", ... ({len(pending)} files)" if len(pending) > 3 else ""
        go_on = f" with --revision {self.revision}" if self.pull_request else ""
        return PushError(
            f"{repo_id}: {what} after {done} files; not confirmed: {', '.join(pending[:3])}{more}. Push again{go_on}: "
            "what has arrived is not sent twice."
        )


def _total(plan: Plan, missing: list[str], sent: int) -> int:
    return sent + sum(plan.first[name][1] for name in missing)


def _same_content(remote: RepoFile | None, content: bytes) -> bool:
    """Whether the Hub holds this content: it names LFS files by SHA-256 and the others as git does."""
    if remote is None:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _literal(name: str) -> str:
    """A pattern that fits this name alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _cause(error: BaseException) -> BaseException:
    """What the client wrapped: it raises a RuntimeError from the true reason where a file cannot be sent."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_hubs(error: BaseException) -> bool:
    """Whether a failure is the Hub's or the connection's, not a bug and not this disk's."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # The transport is httpx or its successor, by version, and hf_xet; none of them is a dependency of ours.
    transport = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "hf_xet")
    # hf_xet reports what went wrong on the way as a bare RuntimeError.
    return (
        transport
        or type(error) is RuntimeError
        or isinstance(error, (HfHubHTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError))
    )


def _retry_after(error: BaseException) -> float | None:
    value = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(float(value), LONGEST_PAUSE_SECONDS) if re.fullmatch(r"\d{1,6}", value) else None
