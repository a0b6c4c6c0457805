"""What every command of the command line keeps: help with examples, JSON alone on stdout, completion that is quick."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bitnest_format.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-line.md"
# Its result is a script.
WITHOUT_JSON = {"completion"}
COMMANDS = tuple(main.commands)
REPORTING = tuple(name for name in COMMANDS if name not in WITHOUT_JSON)
NOT_RUN = {"bitnest-format bench llama-3-8b --context 2K,32K --acceptance 0.95 --out bench.json": "needs a GPU"}
SOURCE, NESTED = "./SmolLM2-135M-Instruct", "./SmolLM2-BitNest"
# A call of each command that succeeds where the fixture `folder` is the current one.
CALLS: dict[str, tuple[str, ...]] = {
    "convert": (SOURCE, "./new", "--calibration-samples", "2", "--sequence-length", "32"),
    "validate": (NESTED,),
    "inspect": (NESTED,),
    "push": (NESTED, "me/SmolLM2-BitNest"),
    "pull": ("someone/SmolLM2-BitNest",),
    "export": (NESTED, "./new", "--format", "hf"),
    "diff": (NESTED, NESTED),
    "generate": (NESTED, "--prompt", "Why do birds build nests?", "--max-new-tokens", "4"),
    "bench": ("llama-3-8b", "--simulate", "orin-nx-16"),
    "doctor": (),
}
# A call that fails though it is not wrong: the exit status and the message. `doctor` and a prediction always answer.
FAILING = {
    "convert": ((SOURCE, NESTED), 1),
    "validate": (("no-such-place",), 2),
    "inspect": (("no-such-place",), 2),
    "push": ((SOURCE, "me/SmolLM2-BitNest"), 1),
    "pull": (("someone/nothing",), 1),
    "export": ((NESTED, SOURCE, "--format", "hf"), 1),
    "diff": ((NESTED, "no-such-place"), 2),
    "generate": (("no-such-place", "--prompt", "x"), 2),
    "bench": (("no-such-place",), 2),
}


@pytest.fixture
def folder(tmp_path, documented_inputs, hub_server, monkeypatch):
    """The current folder holds a model and a nested checkpoint; the Hub holds one more, and knows the token's user."""
    place = tmp_path / "place"
    place.mkdir()
    documented_inputs(place, ["SmolLM2-135M-Instruct", "SmolLM2-BitNest"])
    hub_server.create("someone/SmolLM2-BitNest", place / "SmolLM2-BitNest")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    monkeypatch.chdir(place)
    return place


def call(*arguments):
    return CliRunner().invoke(main, list(arguments), prog_name="bitnest-format")


def examples(command: click.Command) -> list[str]:
    heading, *lines = (command.epilog or "").removeprefix("\b\n").splitlines() or [""]
    assert heading == ("Example:" if len(lines) == 1 else "Examples:"), command.name
    return [line.strip() for line in lines]


ALL_EXAMPLES = [(name, line) for name in COMMANDS for line in examples(main.commands[name])]


def test_the_lists_above_name_every_command():
    assert {*CALLS} == {*REPORTING}
    assert {*NOT_RUN} <= {line for _, line in ALL_EXAMPLES}


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_ends_with_examples_of_the_command(name):
    command = main.commands[name] if name else main
    found = examples(command)
    shown = call(*[name] * bool(name), "--help").stdout.rstrip().splitlines()
    assert [line.strip() for line in shown[-len(found) :]] == found
    assert all(line.startswith(f"bitnest-format {name}".rstrip()) for line in found)


@pytest.mark.parametrize("line", [line for _, line in ALL_EXAMPLES])
def test_examples_are_right_calls(helper, line):
    assert helper("doc_blocks").command_problems(line) == []


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize(("name", "line"), [pair for pair in ALL_EXAMPLES if pair[1] not in NOT_RUN])
def test_examples_run(helper, folder, name, line):
    if name == "convert":  # the example makes it
        shutil.rmtree(NESTED)
    ((_, *arguments),) = helper("doc_blocks").commands(line)
    result = call(*[word for word in arguments if not word.startswith("~")])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("name", REPORTING)
def test_commands_that_report_take_json(name):
    options = {option for parameter in main.commands[name].params for option in parameter.opts}
    assert "--json" in options


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("name", [*REPORTING, "convert --dry-run"])
def test_json_is_the_documented_document_alone_on_stdout(folder, name):
    command, *options = name.split()
    result = call(command, *CALLS[command], *options, "--json")
    assert result.exit_code == 0, result.stderr
    page = PAGE.read_text(encoding="utf-8")
    shown = re.search(rf"^### {name}\n\n```json\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert shown is not None, f"{PAGE.name} says nothing about {name}"
    assert different_places(json.loads(shown[1]), json.loads(result.stdout)) == []


def different_places(shown, found, place="document") -> list[str]:
    """Where a documented value and a real one differ in their fields or kinds.

    `"..."` stands for anything, null for a value that may be missing; of lists, and of maps whose keys are names or
    numbers, the first elements are compared.
    """
    if shown == "..." or shown is None or found is None:
        return []
    if isinstance(shown, dict) and isinstance(found, dict):
        if any("." in key or key.isdecimal() for key in shown):
            return different_places(next(iter(shown.values())), next(iter(found.values())), f"{place}.*")
        differing = [f"{place}.{key}" for key in shown.keys() ^ found.keys()]
        both = [key for key in shown if key in found]
        return differing + [p for key in both for p in different_places(shown[key], found[key], f"{place}.{key}")]
    if isinstance(shown, list) and isinstance(found, list):
        return different_places(shown[0], found[0], f"{place}[]") if shown and found else []
    kinds = {type(shown), type(found)}
    return [] if len(kinds) == 1 or kinds == {int, float} else [place]


def test_differing_documents_are_told_apart():
    shown = {"a": 1, "b": [{"c": "x"}], "m": {"layers.0": 1}, "d": "...", "e": None}
    assert different_places(shown, {"a": 0.5, "b": [], "m": {"other.9": 2}, "d": [1], "e": {}}) == []
    found = {"a": "1", "b": [{"x": "x"}], "m": {"other.9": "2"}, "d": 1, "f": 1}
    places = different_places(shown, found)
    assert sorted(places) == [
        *("document.a", "document.b[].c", "document.b[].x"),
        *("document.e", "document.f", "document.m.*"),
    ]


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_a_document_too(folder, name):
    arguments, status = FAILING[name]
    result = call(name, *arguments, "--json")
    assert result.exit_code == status
    error = json.loads(result.stdout)["error"]
    assert {*error} == {"type", "message", "problems", "exit_status"}
    assert error["exit_status"] == status
    assert f"Error: {error['message']}\n" in result.stderr
    assert error["problems"] and all(problem in error["message"] for problem in error["problems"])
    plain = call(name, *arguments)
    assert (plain.exit_code, plain.stdout) == (status, "")
    assert f"Error: {error['message']}\n" in plain.stderr


@pytest.mark.parametrize("name", REPORTING)
def test_a_wrong_call_is_a_document_too(name):
    result = call(name, "--xyzzy", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (
        2,
        {
            "error": {
                "type": "NoSuchOption",
                "message": "No such option '--xyzzy'.",
                "problems": ["No such option '--xyzzy'."],
                "exit_status": 2,
            }
        },
    )
    assert result.stderr.endswith("Error: No such option '--xyzzy'.\n")


@pytest.mark.parametrize("arguments", [("nonsense", "--json"), ("--xyzzy", "validate", "x", "--json")])
def test_wrong_calls_of_no_command(arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"].startswith("No such ")


def test_an_interruption_is_a_document_too(folder, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitnest_format.converters.pipeline.convert", interrupted)
    result = call("convert", SOURCE, "./new", "--json")
    message = "Interrupted. Run the same command with --resume to continue."
    assert (result.exit_code, result.stderr) == (130, f"{message}\n")
    assert json.loads(result.stdout)["error"] == {
        "type": "Interrupted",
        "message": message,
        "problems": [message],
        "exit_status": 130,
    }


def test_every_problem_is_listed(folder):
    result = call("convert", SOURCE, NESTED, "--group-size", "96", "--json")
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_status"], result.exit_code) == ("SourceError", 1, 1)
    assert len(error["problems"]) > 1


def ask(shell: str, *words: str) -> tuple[list[str], set[str]]:
    """What the program answers a shell that completes the last of `words`, and the heavy modules that it loaded."""
    probe = "import sys; from bitnest_format.cli import main\ntry: main(prog_name='bitnest-format')\nfinally: "
    probe += "print(*{n.split('.')[0] for n in sys.modules}, file=sys.stderr)"
    line = {"COMP_WORDS": " ".join(("bitnest-format", *words)), "COMP_CWORD": str(len(words))}
    if shell == "fish":
        line["COMP_CWORD"] = words[-1]
    environment = os.environ | line | {"_BITNEST_FORMAT_COMPLETE": f"{shell}_complete", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), set(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("val",), ["plain,validate"]),
        (("validate", "--de"), ["plain,--deep"]),
        (("validate", "./Smol"), ["file,./Smol"]),
        (("export", "--format", "gptq"), ["plain,gptq", "plain,gptq-v2"]),
        (("convert", "--rotation", "h"), ["plain,hadamard"]),
        (("bench", "llama-3-"), ["plain,llama-3-8b"]),
        (("bench", "x", "--simulate", "orin-nx"), ["plain,orin-nx-8", "plain,orin-nx-16"]),
        (("completion", "z"), ["plain,zsh"]),
    ],
    ids=" ".join,
)
def test_bash_is_answered(words, answer):
    completions, loaded = ask("bash", *words)
    assert completions == answer
    assert loaded & {"torch", "numpy", "transformers", "huggingface_hub", "triton", "safetensors", "rich"} == set()


def test_zsh_and_fish_are_answered():
    assert ask("zsh", "val")[0][:2] == ["plain", "validate"]
    assert ask("fish", "val")[0][0] == "plain,validate"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "reply"), [("val", "validate"), ("validate --dee", "--deep"), ("export --format gptq-", "gptq-v2")]
)
def test_the_script_works_in_bash(tmp_path, line, reply):
    """The function that the script defines, called as bash calls it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bitnest-format").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m bitnest_format "$@"\n', encoding="utf-8"
    )
    (programs / "bitnest-format").chmod(0o755)
    script = (
        "source <(bitnest-format completion bash); compopt() { :; }\n"
        f"COMP_WORDS=(bitnest-format {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        'complete -p bitnest-format >&2; _bitnest_format_completion bitnest-format; echo "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, encoding="utf-8", check=False)
    assert (done.stdout, done.returncode) == (f"{reply}\n", 0), done.stderr
    assert done.stderr == "complete -o nosort -F _bitnest_format_completion bitnest-format\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell):
    result = call("completion", shell)
    assert result.exit_code == 0
    assert f"_BITNEST_FORMAT_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=result.stdout, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
