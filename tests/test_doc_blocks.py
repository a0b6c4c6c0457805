"""What finds, checks and runs the documentation's code blocks, on pages that are wrong on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def blocks(helper):
    return helper("doc_blocks")


@pytest.fixture
def page(tmp_path):
    """`(text)` -> a page with it."""

    def write(text):
        file = tmp_path / "page.md"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_marks_hold_for_the_next_block_alone(blocks, page):
    text = """<!-- given: model data -->
<!-- not run: needs a GPU -->
```bash
one
```
Words.
```bash
two
```

```console
three
```
<!-- run: vllm -->

```python
four
```
<!-- not run: forgotten -->
Words.
```json
{}
```
"""
    found = blocks.read_blocks(page(text))
    assert [(b.line, b.language, b.text, b.not_run, b.environment, b.follows) for b in found] == [
        (4, "bash", "one\n", "needs a GPU", "", False),
        (8, "bash", "two\n", None, "", False),
        (12, "console", "three\n", None, "", True),
        (17, "python", "four\n", None, "vllm", False),
        (22, "json", "{}\n", None, "", False),
    ]
    assert [b.runs_in("") for b in found] == [False, True, False, False, False]
    assert [b.runs_in("vllm") for b in found] == [False, False, False, True, False]
    assert blocks.given(page(text)) == ["model", "data"]


def test_a_mark_in_the_first_line_holds_for_the_page(blocks, page):
    found = blocks.read_blocks(page("<!-- run: vllm -->\n# Title\n\n```bash\na\n```\n\n```bash\nb\n```\n"))
    assert [block.environment for block in found] == ["vllm", "vllm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\nx\n", "{page}:1: the block does not end"),
        ("```\nx\n```\n", "{page}:1: the block's language is missing; known are bash, python, console, text, json"),
        ("a\n```rust\n```\n", "{page}:2: the block's language is rust; known are bash, python, console, text, json"),
        ("<!-- not run: -->\n```bash\n```\n", "{page}:1: the mark 'not run' says nothing"),
    ],
    ids=["open", "no language", "unknown language", "no reason"],
)
def test_a_page_that_cannot_be_read(blocks, page, text, message):
    file = page(text)
    with pytest.raises(ValueError) as error:
        blocks.read_blocks(file)
    assert str(error.value) == message.format(page=file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```bash\nif true\n```\n", "syntax error"),
        ("```python\nx = (\n```\n", "line 1: '(' was never closed"),
        ("```json\n{\n```\n", "Expecting property name"),
        ("```bash\nbitnest-format validate a --depe\n```\n", "No such option '--depe'"),
        ("<!-- not run: x -->\n```bash\nX=1 bitnest-format nothing\n```\n", "No such command 'nothing'"),
        ("```bash\na | .venv/bin/bitnest-format validate\n```\n", "Missing argument 'CHECKPOINT'"),
        ("```bash\ntorchrun -m bitnest_format convert a b --base awq\n```\n", "'awq' is not one of 'gptq', 'rtn'"),
        ("```bash\nbitnest-format convert a \\\n  b c  # d\n```\n", "Got unexpected extra argument (c)"),
    ],
)
def test_problems_are_seen_without_running(blocks, page, text, problem):
    (found,) = (line for block in blocks.read_blocks(page(text)) for line in blocks.problems(block))
    assert problem in found


@pytest.mark.parametrize(
    "script",
    [
        "bitnest-format convert no-such-place out --group-size 64 > log 2>&1 && echo bitnest-format nothing || true",
        "bitnest-format push no-such-folder me/x --private",
        "bitnest-format generate x --prompt-file no-such-file --gamma auto; ls",
        "bitnest-format validate x 2>&1 | tail; bitnest-format validate x --json 2> /dev/null < y\n",
        "bitnest-format --version\n# bitnest-format nothing\nbitnest-format diff --help",
    ],
)
def test_calls_that_are_right_though_their_files_are_missing(blocks, script):
    problems = [p for p in blocks.command_problems(script) if "bitnest-format nothing" not in p]
    assert problems == []


@pytest.mark.parametrize(
    ("shown", "output", "missing"),
    [
        ("14 modules, 1,234 bytes\n", "noise\n7   modules, 99 bytes\n", None),
        ("a\n...\nd\n", "a\nb\nc\nd\n", None),
        ("from ... to\n", "from here (1) to\n", None),
        ("commit ..., 2 of 2\n", "commit a5c3, 1 of 7\n", None),
        ("b\na\n", "a\nb\n", "a"),
        ("valid\n", "invalid\n", "valid"),
    ],
)
def test_shown_output_is_compared(blocks, shown, output, missing):
    assert blocks.missing_output(shown, output) == missing


def run_page(blocks, file, **keywords):
    blocks.run_page(file, file.parent, os.environ, python=sys.executable, **keywords)


def test_blocks_run_in_order_in_one_folder_and_share_names(blocks, page, tmp_path):
    text = """```python
x = 20
print("x is", x)
```
```text
x is 1
```
```bash
echo $((1 + 1)) > number
```
```python
from pathlib import Path
Path("sum").write_text(str(x + int(Path("number").read_text())))
```
<!-- run: vllm -->
```bash
touch elsewhere
```
<!-- not run: would fail -->
```bash
false
```
"""
    run_page(blocks, page(text))
    assert (tmp_path / "sum").read_text(encoding="utf-8") == "22"
    assert not (tmp_path / "elsewhere").exists()
    run_page(blocks, page(text), name="vllm")
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\necho before\nfalse | true\necho after\n```\n", "{page}:2: exit status 1\nbefore\n"),
        ("```bash\necho 1 bird\n```\n\n```console\n1 bee\n```\n", "{page}:6: the line '1 bee' is not in the output:"),
        ("\n```python\nx = 1\nx.y\n```\n", "{page}:3: an exception\nTraceback (most recent call last):\n"),
        ("\n```python\nx = 1\nx.y\n```\n", 'File "{page}", line 4, in <module>\n    x.y\n'),
    ],
    ids=["shell", "output", "exception", "its line"],
)
def test_a_block_that_fails_is_named_with_its_output(blocks, page, text, message):
    file = page(text)
    with pytest.raises(AssertionError) as error:
        run_page(blocks, file)
    assert message.format(page=file) in str(error.value)


def test_a_warm_python_is_a_python(helper, tmp_path):
    """Arguments, folder, variables, streams, exit status; and an own interpreter where imports would have differed."""
    code = (
        "import json, os, sys; print(json.dumps([sys.argv, os.getcwd(), os.environ['BIRD'], sys.stdin.read(), "
        "'fractions' in sys.modules])); print('e', file=sys.stderr); sys.exit(7)"
    )
    variables = os.environ | {"BIRD": "tit"}
    with helper("warm_python").WarmPython(tmp_path, ("fractions",), variables) as warm:

        def run(*arguments, **more):
            environment = variables | {"PATH": warm.path} | more
            return subprocess.run(
                ["python", *arguments],
                cwd="/",
                env=environment,
                input="in",
                capture_output=True,
                encoding="utf-8",
                check=False,
            )

        done = run("-c", code, "a b", "c")
        assert done.stdout == '[["-c", "a b", "c"], "/", "tit", "in", true]\n'
        assert (done.stderr, done.returncode) == ("e\n", 7)
        other = run("-c", code, HF_HUB_OFFLINE="1")
        assert other.stdout == '[["-c"], "/", "tit", "in", false]\n'
        file = tmp_path / "program.py"
        file.write_text("import sys; sys.exit('no')", encoding="utf-8")
        assert (run(str(file)).stderr, run(str(file)).returncode) == ("no\n", 1)
        assert run("-c", "import os; os.abort()").returncode == 1
        assert run("-c", "1 / 0").stderr.endswith("ZeroDivisionError: division by zero\n")
        assert run("-m", "json.tool", "--help").stdout.startswith("usage: ")
