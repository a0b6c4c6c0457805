"""Reading a repository of the Hub without downloading it: its listing, and ranges of its files.

What a stranger's repository makes this machine do is bounded: names come from the Hub's own listing, every read says
how many bytes it wants and stops there, and all reads together stay below `MOST_BYTES`, unless weights are wanted.
Nothing is written to disk.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitnest_format import hub
from bitnest_format.errors import UsageError
from bitnest_format.hub import HubError, Location
from bitnest_format.shards import Files, LocalFiles

MOST_BYTES = 200_000_000
# Attempts in a row that bring less than this: a connection that breaks off after every few bytes is no connection.
TRIES = 3
LEAST_PROGRESS = 1 << 14


@dataclass(slots=True)
class RemoteFiles:
    """The files of one commit of a model repository (see `shards.Files`). `moved` counts the bytes that were read.

    `digests`: SHA-256 of weights, git's id of small files. `most`: where reading stops; None for as much as is asked.
    """

    name: str
    commit: str
    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    most: int | None
    moved: int = field(default=0, compare=False)

    @property
    def local(self) -> bool:
        return False

    def size(self, name: str) -> int | None:
        return self.sizes.get(name)

    def names(self) -> Iterable[str]:
        return sorted(name for name in self.sizes if not any(part.startswith(".") for part in name.split("/")[:-1]))

    def read(self, name: str, start: int, length: int) -> bytearray:
        """Bytes of a file by a range request. Raises `HubError` where the Hub does not give them."""
        size = self.sizes.get(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        length = min(length, size - start)
        if length <= 0:
            return bytearray()
        self.moved += length
        if self.most is not None and self.moved > self.most:
            raise HubError(
                f"{self.name}: its indexes and headers alone are larger than {self.most} bytes, which no honest "
                "checkpoint needs. Don't use it."
            )
        raw = bytearray()
        failures = 0
        while len(raw) < length:
            before = len(raw)
            try:
                hub.asked(lambda: _append_range(raw, self.name, self.commit, name, start, length))
            except Exception as error:
                # A connection that breaks off is worth another attempt, which goes on where it broke; an answer is not.
                failures = 1 if len(raw) - before >= LEAST_PROGRESS else failures + 1
                if getattr(error, "response", None) is not None or failures == TRIES:
                    raise hub.explain(error, self.name, "model", self.commit) from None
        return raw

    def digest(self, name: str) -> str | None:
        return self.digests.get(name)


def open_files(
    checkpoint: str, *, revision: str | None = None, patterns: tuple[str, ...] | None = None
) -> tuple[Files, str | None]:
    """The files of a checkpoint that may lie anywhere, and a remark for the user.

    A local folder wins, as in `hub.locate`. A repository is not downloaded. Where the Hub cannot be asked, a copy in
    its cache serves; `patterns` say which files that copy has to hold.

    Raises as `hub.locate` does.
    """
    if checkpoint and Path(checkpoint).expanduser().exists():
        located = hub.locate(checkpoint, revision=revision)
        if not located.path.is_dir():
            raise UsageError(f"{checkpoint}: is a file, expected the folder of a nested checkpoint")
        return LocalFiles(located.path), located.note
    hub.check_repo_id(checkpoint)
    from huggingface_hub import HfApi

    try:
        info = hub.asked(lambda: HfApi().model_info(checkpoint, revision=revision, files_metadata=True))
    except Exception as error:
        located = hub.cached(checkpoint, "model", revision, patterns, hub.explain(error, checkpoint, "model", revision))
        return LocalFiles(located.path), located.note
    if info.sha is None:
        raise HubError(f"{checkpoint}: the Hub does not say which commit this is. Give a --revision.")
    files = info.siblings or ()
    sizes = {file.rfilename: file.size or 0 for file in files}
    digests = {file.rfilename: file.lfs.sha256 if file.lfs else str(file.blob_id) for file in files}
    return RemoteFiles(checkpoint, info.sha, sizes, digests, MOST_BYTES), hub.renamed(info, checkpoint)


def locate_weights(repo_id: str, *, revision: str | None = None) -> tuple[Location, Files | None]:
    """A model's small files, downloaded, and the repository at the same commit to read its weights from.

    Where the Hub cannot be asked and the cache holds the model, there is no repository: the weights lie there too.
    Raises as `hub.locate`.
    """
    files, note = open_files(repo_id, revision=revision, patterns=hub.SOURCE_FILES)
    if not isinstance(files, RemoteFiles):
        return hub.locate(repo_id, revision=revision, patterns=hub.SOURCE_FILES), None
    located = hub.locate_remote(repo_id, revision=files.commit, patterns=hub.SIDE_FILES)
    if located.revision != files.commit:
        raise HubError(f"{repo_id}: its small files cannot be had at commit {files.commit}. Run the command again.")
    return replace(located, note=note), replace(files, most=None)


def _append_range(raw: bytearray, repo_id: str, commit: str, name: str, start: int, length: int) -> None:
    """Read on where `raw` ends, up to `length` bytes from `start` in all; what came before a failure is kept."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status

    first, last = start + len(raw), start + length - 1
    headers = build_hf_headers() | {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo_id, name, revision=commit)
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        # A server that knows no ranges sends the file from its start.
        skip = 0 if response.status_code == 206 else first
        for chunk in response.iter_raw():
            raw += chunk[skip : skip + length - len(raw)]
            skip = max(0, skip - len(chunk))
            if len(raw) == length:
                return
    raise ConnectionError(f"{name}: {len(raw)} bytes came, {length} were announced")
