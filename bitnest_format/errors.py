"""What can go wrong, as classes a caller can catch, and the shape of one finding.

Every message says where, what was found, what was expected and what to do, in that order. The command
line turns any `BitnestError` into one sentence on stderr and the class's exit status.
"""

from __future__ import annotations

from dataclasses import dataclass


class BitnestError(Exception):
    """A known failure: its message is complete and needs no traceback."""

    exit_status = 1


class UsageError(BitnestError):
    """The call itself is wrong: an unknown option value, a combination that makes no sense."""

    exit_status = 2


class SourceError(BitnestError):
    """The model to convert cannot be converted; lists every problem that was found."""

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(_as_list(self.problems))


class FileFormatError(BitnestError):
    """A file's bytes are not what its name promises: cut off, a Git LFS pointer, a broken header."""


class CheckpointError(BitnestError):
    """A nested checkpoint contradicts itself or the specification."""


class ManifestError(CheckpointError):
    """`bitnest.json` breaks the schema; `path` is the place in the document, such as `modules.x.shape`."""

    def __init__(self, message: str, path: str = ""):
        self.path = path
        super().__init__(f"bitnest.json: {path or '(top level)'}: {message}")


class UnsupportedVersionError(CheckpointError):
    """The checkpoint is of a format version, or needs a feature, that this reader does not know."""


class UnsupportedModelError(SourceError):
    """The architecture is outside what the converters and the runtime cover."""


class GenerationError(BitnestError):
    """A request to generate that cannot be served: empty prompt, no tokenizer, no room."""


class FailedElsewhere(BitnestError):
    """Another process of the same run failed and says why; this one has nothing to add."""

    def __init__(self) -> None:
        super().__init__("")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a checkpoint: the file, the place inside it, and what is wrong there."""

    file: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.place}: {self.message}"


def _as_list(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in problems)
