"""Where a conversion keeps its parts until the checkpoint is whole.

The folder lies beside the output (same disk, so the last rename is atomic) and is named after it. A part is a pair of
files that appear by renaming; a part that is there is complete. `state.json` says what the run was made of, and
`--resume` refuses to go on with anything else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bitnest_format.errors import SourceError, UsageError
from bitnest_format.manifest import Module
from bitnest_format.shards import (
    Pending,
    pending_copy,
    read_header,
    read_json,
    write_json,
    write_shard,
)

STATE_FILE = "state.json"
LOCK_FILE = "lock"
REFINEMENT_KEY = "refinement"


@dataclass(slots=True)
class Part:
    """Tensors to be stored, by name, the records of the modules they belong to, and what a person should know."""

    base: dict[str, Pending] = field(default_factory=dict)
    refinement: dict[str, Pending] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """`folder` holds the parts and the state; `checkpoint`, inside it, becomes the output."""

    folder: Path

    @classmethod
    def beside(cls, output: Path) -> WorkFolder:
        output = output.absolute()
        return cls(output.parent / f".{output.name}.bitnest-work")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def rotation(self) -> Path:
        """Where a learned rotation is kept."""
        return self.folder / "rotation.safetensors"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder where there is none, and keep other conversions out of it for the length of a block.

        Raises `UsageError` where one is at work in it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock: AbstractContextManager[Any]
        try:
            lock = FileLock(self.folder / LOCK_FILE).acquire(timeout=0)
        except NotImplementedError:  # a file system without locks
            lock = nullcontext()
        except Timeout as error:
            raise UsageError(
                f"{self.folder}: another conversion into the same output is at work. Wait for it, or choose another "
                "output."
            ) from error
        with lock:
            yield

    def start(self, fingerprint: Mapping[str, Any], *, resume: bool) -> None:
        """Make the folder, which is `held`, ready: empty, or as an equal run left it.

        Raises `SourceError` where `resume` finds no earlier run, or one of other ingredients, naming them.
        """
        if not resume:
            self._empty()
        elif not (self.folder / STATE_FILE).is_file():
            raise SourceError(f"--resume: no interrupted conversion at {self.folder}; run without --resume")
        else:
            self._compare(fingerprint)
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.checkpoint.mkdir(parents=True)
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        if not resume:
            self._write_state(dict(fingerprint))

    def _empty(self) -> None:
        """Delete everything but the lock, which a second conversion must find."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK_FILE:
                path.unlink()

    def pin(self, key: str, value: Any) -> None:
        """Add one more ingredient to the state, or compare it with the one an earlier run recorded."""
        state = read_json(self.folder / STATE_FILE)
        if key in state:
            self._compare({**state, key: value})
        else:
            self._write_state({**state, key: value})

    def _write_state(self, state: Mapping[str, Any]) -> None:
        unfinished = (self.folder / STATE_FILE).with_suffix(".tmp")
        write_json(unfinished, state)
        unfinished.replace(self.folder / STATE_FILE)

    def _compare(self, fingerprint: Mapping[str, Any]) -> None:
        earlier = _leaves(read_json(self.folder / STATE_FILE))
        now = _leaves(json.loads(json.dumps(fingerprint)))
        changed = [
            f"{key} was {earlier.get(key)!r} and is {value!r}"
            for key, value in now.items()
            if earlier.get(key) != value
        ]
        if changed:
            raise SourceError(
                "--resume: the interrupted conversion was made of other ingredients: "
                + "; ".join(changed)
                + ". Repeat it with the same ones, or run without --resume to start anew."
            )

    def finished(self, name: str) -> bool:
        return self._record(name).is_file()

    def all_finished(self) -> set[str]:
        """The names of all parts that are there."""
        return {path.stem for path in self.folder.glob("*.json") if path.name != STATE_FILE}

    def write(self, name: str, part: Part) -> None:
        """Store a part; its record is renamed into place last."""
        groups = {"base": part.base, REFINEMENT_KEY: part.refinement}
        for key, tensors in groups.items():
            if tensors:
                self._write_tensors(self._tensors(name, key), tensors)
        record = self._record(name)
        unfinished = record.with_suffix(".tmp")
        modules = {module: data.to_dict() for module, data in part.modules.items()}
        write_json(unfinished, {"modules": modules, "warnings": part.warnings})
        unfinished.replace(record)

    def read(self, name: str) -> Part:
        """A stored part, its tensors as copies yet to be made (`Pending`)."""
        modules = read_json(self._record(name))["modules"]
        return Part(
            base=self._pending(self._tensors(name, "base")),
            refinement=self._pending(self._tensors(name, REFINEMENT_KEY)),
            modules={module: Module.from_dict(data) for module, data in modules.items()},
        )

    def warnings(self, name: str) -> list[str]:
        """What was said when a part was made."""
        return list(read_json(self._record(name))["warnings"])

    def publish(self, output: Path) -> None:
        """Rename the finished checkpoint into place and drop the rest."""
        if output.is_dir():
            output.rmdir()
        self.checkpoint.rename(output)
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Delete what a failed write left, keeping the finished parts."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()

    def remove_if_empty(self) -> None:
        """Delete the folder unless it holds finished parts that `--resume` could use."""
        if not any(self.folder.glob("layer-*.json")):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _tensors(self, name: str, key: str) -> Path:
        return self.folder / f"{name}.{key}.safetensors"

    def _write_tensors(self, path: Path, tensors: Mapping[str, Pending]) -> None:
        unfinished = path.with_suffix(".tmp")
        write_shard(unfinished, tensors, {})
        unfinished.replace(path)

    def _pending(self, path: Path) -> dict[str, Pending]:
        if not path.is_file():
            return {}
        return {name: pending_copy(path, entry) for name, entry in read_header(path).items()}


def _leaves(data: Any, place: str = "") -> dict[str, Any]:
    if isinstance(data, dict) and data:
        return {
            key: value
            for name, inner in data.items()
            for key, value in _leaves(inner, f"{place}.{name}" if place else str(name)).items()
        }
    return {place: data}
