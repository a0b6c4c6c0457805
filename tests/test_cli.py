"""The command line: exit statuses, whole messages, what goes to which stream, JSON."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import bitnest_format
from bitnest_format import cli, hub
from bitnest_format.errors import SourceError, UsageError

COMMANDS = ("convert", "validate", "inspect", "generate")


def run(*arguments: object, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], prog_name="bitnest-format", env=variables)


def refused(result: Result, message: str, status: int = 1) -> bool:
    """Nothing on stdout, one message on stderr, the status."""
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", f"Error: {message}\n")
    return True


def test_version():
    assert run("--version").stdout == f"bitnest-format, version {bitnest_format.__version__}\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_ends_with_an_example_that_parses(command):
    result = run(*[command] * bool(command), "--help")
    assert result.exit_code == 0
    *_, heading, example = result.stdout.rstrip().splitlines()
    assert heading.strip() == "Example:"
    program, name, *arguments = example.split('"')[0].split()
    assert program == "bitnest-format"
    assert name == (command or "convert")
    options = {option for parameter in cli.main.commands[name].params for option in parameter.opts}
    assert {a for a in arguments if a.startswith("--")} <= options


def test_defaults_in_the_help_are_those_of_the_options():
    from bitnest_format.converters.options import ConvertOptions

    shown = {p.name: p.show_default for p in cli.main.commands["convert"].params if isinstance(p, click.Option)}
    options, paper = ConvertOptions(), ConvertOptions.paper()
    for name in ("rotation", "base", "scale_search", "damping", "calibration", "calibration_samples", "seed"):
        assert shown[name] == str(getattr(options, name)), name
    assert shown["sequence_length"] == str(options.sequence_length)
    assert shown["device"] == options.device
    assert shown["shard_bytes"] == f"{options.shard_bytes // 10**9}GB"
    assert shown["base_bound"] == f"{options.base_bound}; recipe paper: none"
    assert paper.base_bound is None
    assert shown["refinement"] == f"{options.refinement}; recipe paper: {paper.refinement}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert"], "Missing argument 'SOURCE'."),
        (["nonsense"], "No such command 'nonsense'."),
        (["convert", "a", "b", "--base", "awq"], "Invalid value for '--base': 'awq' is not one of 'gptq', 'rtn'."),
        (
            ["convert", "a", "b", "--max-shard-size", "big"],
            "Invalid value for '--max-shard-size': 'big' is not a size such as 5GB, 500MB or 2GiB",
        ),
        (
            ["convert", "a", "b", "--base-bound", "wide"],
            "Invalid value for '--base-bound': 'wide' is neither a number nor 'none'",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_call_ends_with_status_2(arguments, message):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"Error: {message}"


@pytest.mark.parametrize("group_size", [0, 7])
def test_convert_refuses_an_impossible_group_size_at_once(group_size):
    """GS-4."""
    assert refused(
        run("convert", "a", "b", "--group-size", group_size),
        f"--group-size is {group_size}, expected -1 (one group per row) or a multiple of 8 from 8 to 1024; "
        "leave it out for 128 with 64 and 32 as fallbacks",
        status=2,
    )


def test_convert_refuses_an_unknown_calibration():
    assert refused(
        run("convert", "a", "b", "--calibration", "no.txt"),
        "--calibration no.txt: no such file, and neither 'builtin' nor a dataset id (expected owner/name)",
        status=2,
    )


def test_convert_refuses_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused(
        run("convert", "a", "b", "--device", "cuda"),
        "--device cuda: torch finds no CUDA device here. Use --device cpu.",
        status=2,
    )


@pytest.mark.parametrize("command", ["validate", "inspect"])
@pytest.mark.parametrize("path", ["", "no/such/path", "org/", "model.gguf"])
def test_a_path_that_does_not_exist(command, path):
    assert refused(
        run(command, path),
        f"{path!r}: no such file or folder, and not a Hub repository id (expected owner/name, "
        "such as HuggingFaceTB/SmolLM2-135M-Instruct)",
        status=2,
    )


@pytest.mark.parametrize("command", ["validate", "inspect"])
def test_a_file_is_no_checkpoint(command, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert refused(run(command, file), f"{file}: is a file, expected the folder of a nested checkpoint", status=2)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("123", 123)],
)
def test_size(text, size):
    assert cli.Size().convert(text, None, None) == size


def test_validate_a_valid_checkpoint(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    shallow, deep = run("validate", folder), run("validate", folder, "--deep")
    assert (shallow.exit_code, shallow.stderr) == (0, "")
    assert shallow.stdout == f"{folder}: valid (hashes not checked: use --deep)\n"
    assert (deep.exit_code, deep.stdout, deep.stderr) == (0, f"{folder}: valid\n", "")


def test_validate_an_invalid_checkpoint(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    (folder / "bitnest-refinement-00001-of-00001.safetensors").unlink()
    text, as_json = run("validate", folder), run("validate", folder, "--json")
    assert (text.exit_code, as_json.exit_code) == (1, 1)
    report = json.loads(as_json.stdout)
    assert report["valid"] is False
    assert report["path"] == str(folder)
    lines = [f"{f['file']}: {f['place']}: {f['message']}" for f in report["findings"]]
    assert text.stdout.splitlines() == lines
    assert text.stderr == f"{folder}: invalid, {len(lines)} finding{'s' * (len(lines) > 1)}\n"
    assert any("bitnest-refinement-00001-of-00001.safetensors" in line for line in lines)


def test_validate_json_of_a_valid_checkpoint(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    result = run("validate", folder, "--deep", "--json")
    assert json.loads(result.stdout) == {"path": str(folder), "deep": True, "valid": True, "findings": []}


def test_inspect_reports_text_and_json(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    text, as_json = run("inspect", folder), run("inspect", folder, "--json")
    assert (text.exit_code, as_json.exit_code, as_json.stderr) == (0, 0, "")
    assert isinstance(json.loads(as_json.stdout), dict)


def test_a_known_failure_is_one_message(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise SourceError(["first", "second"])

    monkeypatch.setattr(hub, "locate", fail)
    assert refused(run("inspect", "owner/model"), "2 problems:\n  - first\n  - second")


def test_debug_shows_the_traceback(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise UsageError("wrong")

    monkeypatch.setattr(hub, "locate", fail)
    assert isinstance(run("--debug", "inspect", "owner/model").exception, UsageError)
    assert isinstance(run("inspect", "owner/model", BITNEST_DEBUG="1").exception, UsageError)
    assert refused(run("inspect", "owner/model"), "wrong", status=2)


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x.safetensors"),
            "Error: out/x.safetensors: No space left on device. Free some space and run the command again.\n",
            1,
        ),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "Error: out: Permission denied.\n", 1),
        (KeyboardInterrupt(), "Interrupted.\n", 130),
    ],
    ids=["disk full", "no permission", "interrupted"],
)
def test_failures_of_the_machine(error, message, status, monkeypatch):
    """RS-3: one sentence that names the path."""

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(hub, "locate", fail)
    result = run("inspect", "owner/model")
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", message)


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hub, "locate", fail)
    assert isinstance(run("inspect", "owner/model").exception, ZeroDivisionError)


def test_a_local_folder_that_looks_like_an_id_is_announced(tiny_checkpoint, tmp_path, monkeypatch):
    """HB-6."""
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(Path("owner/model"))
    result = run("validate", "owner/model", "--deep")
    assert result.exit_code == 0
    assert result.stderr == "Note: owner/model: using the local folder, not the Hub\n"


def test_a_reader_that_goes_away_is_no_error(tiny_checkpoint, tmp_path):
    """`bitnest-format inspect ... | head -0`: quiet, whatever the status."""
    folder = tiny_checkpoint(tmp_path / "model")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        process = subprocess.run(
            [sys.executable, "-m", "bitnest_format", "inspect", str(folder)],
            stdout=closed,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            check=False,
        )
    assert process.stderr == ""


def test_ctrl_c_ends_with_one_line():
    """A real SIGINT in a real process."""
    code = (
        "import os, signal\n"
        "from bitnest_format import cli, hub\n"
        "hub.locate = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.main(['inspect', 'owner/model'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
        # A test run in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
