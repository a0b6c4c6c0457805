"""Looking into a repository of the Hub without downloading it: its listing, JSON files, headers by range requests.

What a stranger's repository makes this machine do is bounded: names come from the Hub's own listing, every read says
how many bytes it wants and stops there, and all reads together stay below `MOST_BYTES`. Nothing is written to disk.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bitnest_format import hub
from bitnest_format.errors import UsageError
from bitnest_format.hub import HubError
from bitnest_format.shards import Files, LocalFiles

MOST_BYTES = 200_000_000
TRIES = 3


@dataclass(slots=True)
class RemoteFiles:
    """The files of one commit of a model repository (see `shards.Files`). `moved` counts the bytes that were read."""

    name: str
    commit: str
    sizes: Mapping[str, int]
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
        if self.moved > MOST_BYTES:
            raise HubError(
                f"{self.name}: its indexes and headers alone are larger than {MOST_BYTES} bytes, which no honest "
                "checkpoint needs. Don't use it."
            )
        for attempt in range(1, TRIES + 1):
            try:
                return hub.asked(lambda: _range(self.name, self.commit, name, start, length))
            except Exception as error:
                # A connection that breaks off is worth another attempt, an answer is not.
                if getattr(error, "response", None) is not None or attempt == TRIES:
                    raise hub.explain(error, self.name, "model", self.commit) from None
        raise AssertionError("unreachable")


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
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return RemoteFiles(checkpoint, info.sha, sizes), hub.renamed(info, checkpoint)


def _range(repo_id: str, commit: str, name: str, start: int, length: int) -> bytearray:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo_id, name, revision=commit)
    raw = bytearray()
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        # A server that knows no ranges sends the file from its start.
        skipped = 0 if response.status_code == 206 else start
        for chunk in response.iter_raw():
            raw += chunk
            if len(raw) >= skipped + length:
                break
    if len(raw) < skipped + length:
        raise ConnectionError(f"{name}: {len(raw)} bytes came, {skipped + length} were announced")
    return raw[skipped : skipped + length]
