"""What the commands share: types of values, options, where a model lies, and how results are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from bitnest_format.errors import BitnestError, UsageError

if TYPE_CHECKING:
    from bitnest_format.hub import Location
    from bitnest_format.shards import Files

INTERRUPTED_STATUS = 130
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Command = TypeVar("Command", bound=Callable[..., Any])
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class Interrupted(BitnestError):
    """The user pressed Ctrl-C; the message says how to go on."""

    exit_status = INTERRUPTED_STATUS


class Size(click.ParamType[int]):
    """A number of bytes: `5GB`, `500MB`, `2GiB`, `1000000`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size such as 5GB, 500MB or 2GiB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])


class Bound(click.ParamType["float | None"]):
    """A number, or `none`."""

    name = "number|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if str(value).lower() == "none":
            return None
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'none'", param, ctx)


class Gamma(click.ParamType["int | str"]):
    """A whole number, or `auto`."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or str(value) == "auto":
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor 'auto'", param, ctx)


class Lengths(click.ParamType["tuple[int, ...]"]):
    """Lengths in tokens: `2048`, `2K`, `2K,8K`; K is 1024."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found = [re.fullmatch(r"([1-9]\d{0,8})([kK]?)", part.strip()) for part in str(value).split(",")]
        lengths = tuple(int(match[1]) * (1024 if match[2] else 1) for match in found if match)
        if len(lengths) < len(found):
            self.fail(f"{value!r} is not a list of lengths such as 2K,8K or 3000", param, ctx)
        return lengths


class Names(click.ParamType["tuple[str, ...]"]):
    """Words separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(part.strip() for part in str(value).split(","))


def example(*commands: str) -> str:
    """An epilog of one command a line, which click leaves as it is."""
    heading = "Example" if len(commands) == 1 else "Examples"
    return f"\b\n{heading}:\n" + "\n".join(f"  {command}" for command in commands)


def completing(*words: str, paths: bool = False) -> Complete:
    """What a shell offers for a value: those of `words` that fit, and `paths`, which the shell itself lists."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        fitting = [CompletionItem(word) for word in words if word.startswith(incomplete)]
        return [*fitting, CompletionItem(incomplete, type="file")] if paths and not fitting else fitting

    return complete


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def revision_option(command: Command) -> Command:
    return click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub repository.")(command)


def was_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def is_local(path_or_repo_id: str) -> bool:
    return bool(path_or_repo_id) and Path(path_or_repo_id).expanduser().exists()


def checkpoint_files(checkpoint: str, revision: str | None, patterns: tuple[str, ...]) -> Files:
    """The files of a checkpoint, those of a repository left where they are."""
    from bitnest_format.remote import open_files

    files, remark = open_files(checkpoint, revision=revision, patterns=patterns)
    if remark:
        click.echo(f"Note: {remark}", err=True)
    return files


def checkpoint_folder(checkpoint: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from bitnest_format import hub

    located = hub.locate(checkpoint, revision=revision, patterns=patterns)
    note(located)
    if not located.path.is_dir():
        raise UsageError(f"{checkpoint}: is a file, expected the folder of a nested checkpoint")
    return located.path


def note(located: Location) -> None:
    if located.note:
        click.echo(f"Note: {located.note}", err=True)


def warn(messages: Iterable[str]) -> None:
    for warning in messages:
        click.echo(f"Warning: {warning}", err=True)


def as_json_text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)
