"""Code blocks of Markdown pages: found, checked, and run as a reader would run them.

A fence's language says what happens to it:

    bash, python          run, in the order of the page, in one folder; Python blocks share their names
    console, text         shown; right after a block that ran, compared with its output (see `missing_output`)
    json                  shown, and parsed

Comments before a block, or (for all blocks) in the first line of a page, change that:

    <!-- not run: REASON -->    cannot run in CI; parsed, and its `bitnest-format` commands checked all the same
    <!-- run: NAME -->          runs in the environment of that name alone, such as `vllm`
    <!-- given: NAME ... -->    anywhere: inputs that lie in the folder before the first block runs

`python doc_blocks.py PAGE [--environment NAME]` runs a page in the current folder; `run_page` starts that.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

RUN = ("bash", "python")
SHOWN = ("console", "text", "json")
FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})[ \t]*(\S*)")
COMMENT = re.compile(r"^<!--\s*(not run|run|given)\s*:\s*(.*?)\s*-->$")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ANYTHING = "..."


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its first line of text, counted from 1.

    not_run: the reason why it does not run. environment: where it runs; empty is the ordinary one.
    follows: whether nothing but blank lines parts it from the block before it.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    environment: str = ""
    follows: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def runs_in(self, environment: str) -> bool:
        return self.language in RUN and self.not_run is None and self.environment == environment


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page. Raises `ValueError` for a fence without end and for an unknown language or mark."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    first = COMMENT.match(lines[0].strip()) if lines else None
    whole_page = {first[1]: first[2]} if first else {}
    marks = dict(whole_page)
    follows = False
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := COMMENT.match(line.strip()):
            if not comment[2]:
                raise ValueError(f"{page}:{number}: the mark {comment[1]!r} says nothing")
            marks[comment[1]], follows = comment[2], False
        elif fence := FENCE.match(line):
            start = number
            indent, ticks, language = fence.groups()
            while number < len(lines) and lines[number].strip() != ticks:
                number += 1
            if number == len(lines):
                raise ValueError(f"{page}:{start}: the block does not end")
            if language not in (*RUN, *SHOWN):
                known = ", ".join((*RUN, *SHOWN))
                raise ValueError(f"{page}:{start}: the block's language is {language or 'missing'}; known are {known}")
            text = "".join(f"{inner.removeprefix(indent)}\n" for inner in lines[start:number])
            reason, environment = marks.get("not run"), marks.get("run", "")
            blocks.append(Block(page, start + 1, language, text, reason, environment, follows))
            number += 1
            marks, follows = dict(whole_page), True
        elif line.strip():
            marks, follows = dict(whole_page), False
    return blocks


def given(page: Path) -> list[str]:
    """The names of the inputs that a page wants."""
    comments = (COMMENT.match(line.strip()) for line in page.read_text(encoding="utf-8").splitlines())
    return [name for comment in comments if comment and comment[1] == "given" for name in comment[2].split()]


def problems(block: Block) -> list[str]:
    """What can be seen to be wrong without running a block: syntax, and calls of `bitnest-format`."""
    found = []
    if block.language == "bash":
        done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, encoding="utf-8", check=False)
        found = [done.stderr.strip()] if done.returncode else command_problems(block.text)
    elif block.language in ("python", "json"):
        try:
            ast.parse(block.text) if block.language == "python" else json.loads(block.text)
        except ValueError as error:
            found = [str(error)]
        except SyntaxError as error:
            found = [f"line {error.lineno}: {error.msg}"]
    return [f"{block.place}: {problem}" for problem in found]


def command_problems(script: str) -> list[str]:
    """What the command line would refuse in the calls of `bitnest-format` in a shell script."""
    return [f"{shlex.join(words)}: {problem}" for words in commands(script) if (problem := call_problem(words[1:]))]


def commands(script: str) -> list[list[str]]:
    """Every call of `bitnest-format` in a shell script, split into words; `python -m bitnest_format` is one too."""
    found = []
    joined = re.sub(r"(?<=\s)\d+(?=[<>])", "", script.replace("\\\n", " "))  # a stream's number before a redirection
    lexer = shlex.shlex(joined.replace("\n", "\n ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter([*lexer, ";"])
    for word in tokens:
        if not set(word) <= set("();<>|&"):
            words.append(word)
            continue
        if {"<", ">"} & {*word}:
            next(tokens)  # where to
            continue
        for place, start in enumerate(words):
            called = start == "bitnest-format" or start.endswith("/bitnest-format")
            if called or (start == "bitnest_format" and words[place - 1] == "-m"):
                found.append(["bitnest-format", *words[place + 1 :]])
                break
        words = []
    return found


def call_problem(arguments: list[str]) -> str | None:
    """Why `bitnest-format ARGUMENTS` is a wrong call, or None; no command runs and no file is looked for."""
    import click

    from bitnest_format.cli import main

    def as_it_is(self: Any, value: Any, *_: Any) -> Any:
        return value

    with (
        patch.object(click.Command, "invoke", lambda *_: None),
        patch.object(click.Path, "convert", as_it_is),
        patch.object(click.File, "convert", as_it_is),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            main.main(list(arguments), prog_name="bitnest-format", standalone_mode=False)
        except click.ClickException as error:
            return error.format_message()
    return None


def missing_output(shown: str, output: str) -> str | None:
    """The first line of `shown` that `output` lacks after those before it, or None.

    Numbers and the width of white space do not count; `...` stands for any text inside a line, and alone for lines.
    """
    lines = iter(_masked(line) for line in output.splitlines())
    for line in shown.splitlines():
        pattern = ".*".join(map(re.escape, _masked(line).split(ANYTHING)))
        if line.strip() not in ("", ANYTHING) and not any(re.fullmatch(pattern, other) for other in lines):
            return line
    return None


def _masked(line: str) -> str:
    return NUMBER.sub("0", " ".join(line.split()))


def run_page(
    page: Path,
    folder: Path,
    environment: Mapping[str, str],
    *,
    name: str = "",
    python: str = "python",
    seconds: float = 300,
) -> None:
    """Run the blocks of a page that run in the environment `name`, in `folder`, with these variables.

    `environment["PATH"]` must lead to a `python` that has the package, and to its `bitnest-format`. Raises
    `AssertionError` with the place of the block and everything that it printed.
    """
    command = [python, str(Path(__file__).resolve()), str(page.resolve()), "--environment", name]
    done = subprocess.run(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def run_blocks(blocks: Iterable[Block], environment: str) -> str | None:
    """Run the blocks in this process and folder; the first failure, as text, or None."""
    names: dict[str, Any] = {"__name__": "__main__"}
    output = None
    for block in blocks:
        if block.runs_in(environment):
            failure, output = _run(block, names)
            if failure:
                return f"{block.place}: {failure}\n{output}"
        elif block.follows and output is not None and block.language in ("console", "text"):
            line = missing_output(block.text, output)
            if line is not None:
                return f"{block.place}: the line {line!r} is not in the output:\n{output}"
            output = None
        else:
            output = None
    return None


def _run(block: Block, names: dict[str, Any]) -> tuple[str | None, str]:
    """Why it failed, or None, and what it printed."""
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False)
        return f"exit status {done.returncode}" if done.returncode else None, done.stdout
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, names)
        except (Exception, SystemExit):
            return "an exception", printed.getvalue() + traceback.format_exc()
    return None, printed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the code blocks of a page in the current folder.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--environment", default="", help="run the blocks marked `run: NAME` instead")
    arguments = parser.parse_args()
    sys.exit(run_blocks(read_blocks(arguments.page), arguments.environment))


if __name__ == "__main__":
    main()
