"""The command line: exit statuses, whole messages, what goes to which stream, JSON."""

from __future__ import annotations

import errno
import inspect
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
from bitnest_format import cli, cli_shared, remote
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.errors import SourceError, UsageError
from bitnest_format.runtime.device import CPU, DeviceChoice
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.kv_cache import KvSettings

QUICK = ("--calibration-samples", "2", "--sequence-length", "32")
PROMPT = "Nests are made of twigs"


@pytest.fixture
def source(write_source, tmp_path) -> Path:
    """A tiny Llama with a tokenizer as a Hugging Face folder."""
    folder: Path = write_source(tmp_path / "source")
    return folder


@pytest.fixture
def nested(tiny_checkpoint, write_tokenizer, tmp_path) -> Path:
    """A tiny nested checkpoint with a tokenizer; its text ends at the asked-for length."""
    folder: Path = tiny_checkpoint(tmp_path / "nested", eos_token_id=None)
    write_tokenizer(folder)
    return folder


def run(*arguments: object, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], prog_name="bitnest-format", env=variables)


def refused(result: Result, message: str, status: int = 1) -> bool:
    """Nothing on stdout, one message on stderr, the status."""
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", f"Error: {message}\n")
    return True


def test_version():
    assert run("--version").stdout == f"bitnest-format, version {bitnest_format.__version__}\n"


def test_defaults_in_the_help_are_those_of_the_options():
    shown = {p.name: p.show_default for p in cli.main.commands["convert"].params if isinstance(p, click.Option)}
    options, paper = ConvertOptions(), ConvertOptions.paper()
    assert shown["rotation"] == f"{options.rotation_kind}; none where SOURCE is quantized"
    for name in (
        "base",
        "scale_search",
        "damping",
        "calibration",
        "calibration_samples",
        "seed",
        "learn_steps",
        "learn_rate",
    ):
        assert shown[name] == str(getattr(options, name)), name
    assert shown["sequence_length"] == str(options.sequence_length)
    assert shown["device"] == options.device
    assert shown["shard_bytes"] == f"{options.shard_bytes // 10**9}GB"
    assert shown["base_sweeps"] == f"{options.base_sweeps}; recipe paper: {paper.base_sweeps}"
    assert shown["refinement_sweeps"] == f"{options.refinement_sweeps}"
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
    assert cli_shared.Size().convert(text, None, None) == size


def test_convert_then_validate_inspect_and_generate(source, tmp_path):
    output = tmp_path / "nested"
    converted = run("convert", source, output, *QUICK, "--json")
    assert converted.exit_code == 0, converted.stderr
    summary = json.loads(converted.stdout)
    assert (summary["folder"], summary["modules"]) == (str(output), 14)
    assert "quantizing layers: 2/2" in converted.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert run("validate", output, "--deep").stdout == f"{output}: valid\n"
    assert "random" in run("inspect", output).stdout
    generated = run("generate", output, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert generated.exit_code == 0, generated.stderr


def test_convert_reports_in_words(source, tmp_path):
    output = tmp_path / "nested"
    lines = run("convert", source, output, *QUICK, "--recipe", "paper").stdout.splitlines()
    assert lines[0].startswith(f"{output}: 14 modules, ")
    manifest = json.loads((output / "bitnest.json").read_text(encoding="utf-8"))
    assert (manifest["nesting"]["refine_method"], manifest["nesting"]["base_bound"]) == ("closed", None)


def test_convert_passes_every_given_option(source, tmp_path, monkeypatch):
    seen = {}

    def convert(model, output, options, *, resume, progress, **ranks):
        seen.update(options=options, output=output, resume=resume)
        raise SourceError("enough")

    monkeypatch.setattr("bitnest_format.converters.pipeline.convert", convert)
    text = tmp_path / "text.txt"
    text.write_text(PROMPT, encoding="utf-8")
    given = {
        "rotation": "hadamard",
        "learn_steps": 30,
        "learn_rate": 0.5,
        "save_rotation": tmp_path / "rotation.safetensors",
        "group_size": 64,
        "base": "rtn",
        "base_bound": None,
        "scale_search": "max",
        "refinement": "closed",
        "damping": 0.05,
        "calibration": str(text),
        "calibration_samples": 3,
        "sequence_length": 40,
        "seed": 7,
    }
    arguments = [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in given.items()]
    arguments += ["--max-shard-size", "1MB", "--resume", "--ignore-unknown-tensors", "--quantize-lm-head"]
    assert refused(run("convert", source, tmp_path / "x", *arguments), "enough")
    assert seen["resume"] is True
    assert seen["options"] == ConvertOptions(
        **given, shard_bytes=10**6, ignore_unknown_tensors=True, quantize_lm_head=True
    )


def test_convert_dry_run_writes_nothing(source, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    text = run("convert", source, tmp_path / "nested", "--dry-run")
    as_json = run("convert", source, tmp_path / "nested", "--dry-run", "--json")
    assert (text.exit_code, as_json.exit_code) == (0, 0)
    assert json.loads(as_json.stdout)["total_bytes"] > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_convert_lists_every_problem_and_leaves_nothing(source, tmp_path):
    output = tmp_path / "nested"
    before = sorted(tmp_path.rglob("*"))
    result = run("convert", source, output, "--group-size", 96)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "model.layers.0.self_attn.q_proj" in result.stderr
    assert "model.layers.1.mlp.down_proj" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_convert_says_how_to_continue_after_ctrl_c(source, tmp_path, monkeypatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitnest_format.converters.pipeline.convert", interrupted)
    result = run("convert", source, tmp_path / "nested")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted. Run the same command with --resume to continue.\n"


def test_generate_writes_the_text_to_stdout_and_statistics_to_stderr(nested):
    result = run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 12, "--gamma", 3, "--stats")
    assert result.exit_code == 0, result.stderr
    as_json = run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 12, "--gamma", 3, "--json")
    answer = json.loads(as_json.stdout)
    assert as_json.stderr == ""
    assert result.stdout == answer["text"] + "\n"
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["stats"]["new_tokens"] == 12
    stats = answer["stats"]
    lines = result.stderr.splitlines()
    assert lines[0] == f"{stats['prompt_tokens']} prompt tokens, 12 new, ended by length"
    assert lines[1] == (
        f"acceptance {stats['acceptance']:.3f} (accepted drafts / drafted tokens = {stats['accepted']} / "
        f"{stats['drafted']}, gamma 3)"
    )
    assert lines[2] == f"{stats['tokens_per_round']:.2f} tokens a round, {stats['rounds']} rounds"
    assert lines[3].startswith("rounds by drafts accepted: 0: ")


def test_generate_writes_the_same_text_with_and_without_drafts(nested):
    texts = {
        view: run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 16, "--view", view).stdout
        for view in ("nested", "target")
    }
    assert texts["nested"] == texts["target"]
    assert len(texts["target"]) > 2


def test_generate_from_the_draft_needs_no_refinement(nested):
    (nested / "bitnest-refinement-00001-of-00001.safetensors").unlink()
    result = run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 4, "--view", "draft", "--stats")
    assert result.exit_code == 0, result.stderr
    assert "acceptance" not in result.stderr


def test_generate_reads_the_prompt_from_a_file(nested, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    arguments = ["generate", str(nested), "--max-new-tokens", "6"]
    expected = run(*arguments, "--prompt", PROMPT).stdout
    assert run(*arguments, "--prompt-file", file).stdout == expected
    piped = CliRunner().invoke(cli.main, [*arguments, "--prompt-file", "-"], input=PROMPT)
    assert piped.stdout == expected


def test_generate_uses_the_chat_template_unless_told_otherwise(nested):
    def prompt_tokens(*options: str) -> int:
        result = run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 1, "--json", *options)
        tokens: int = json.loads(result.stdout)["stats"]["prompt_tokens"]
        return tokens

    assert prompt_tokens("--raw") == len(PROMPT)
    assert prompt_tokens() == prompt_tokens("--chat") == len(f"[user]{PROMPT}[assistant]")
    assert prompt_tokens("--system", "Be brief") == len(f"[system]Be brief[user]{PROMPT}[assistant]")


@pytest.mark.parametrize("gamma", [2, "auto"])
def test_generate_passes_every_option(nested, monkeypatch, gamma):
    seen = {}

    def generate(self, prompt, **options):
        seen.update(options, prompt=prompt)
        raise UsageError("enough")

    monkeypatch.setattr("bitnest_format.runtime.generate.NestedModel.generate", generate)
    options = {"gamma": gamma, "max_new_tokens": 9, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 3}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    arguments += ["--stop", "a", "--stop", "b", "--kv-switch", "64", "--recent", "16", "--raw", "--prompt", PROMPT]
    assert refused(run("generate", nested, *arguments), "enough", status=2)
    assert {name: seen[name] for name in options} == options
    assert (list(seen["stop"]), seen["chat"], seen["prompt"]) == (["a", "b"], False, PROMPT)
    assert seen["kv"] == KvSettings(draft_switch_length=64, recent=16)


def test_generate_chooses_gamma_by_itself(nested):
    arguments = ["generate", nested, "--prompt", PROMPT, "--max-new-tokens", 12]
    chosen = run(*arguments, "--gamma", "auto", "--stats")
    assert chosen.exit_code == 0, chosen.stderr
    assert chosen.stdout == run(*arguments, "--gamma", 0).stdout
    answer = json.loads(run(*arguments, "--gamma", "auto", "--json").stdout)
    assert answer["stats"]["gamma"] == "auto"


def test_generate_passes_the_device_and_says_once_why_it_is_not_used(nested, monkeypatch):
    asked = []

    def choose(device):
        asked.append(device)
        return DeviceChoice(CPU, "the GPU is too old")

    monkeypatch.setattr("bitnest_format.runtime.generate.choose_device", choose)
    for device in ("auto", "cpu", "cuda", "cuda:1"):
        result = run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 2, "--device", device)
        assert result.exit_code == 0
        assert result.stderr == "Warning: the GPU is too old; decoding on the CPU instead\n"
    run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 2)
    assert asked == ["auto", "cpu", "cuda", "cuda:1", "auto"]


def test_generate_defaults_in_the_help_are_those_of_the_library():
    shown = {p.name: p.show_default for p in cli.main.commands["generate"].params if isinstance(p, click.Option)}
    assert shown["recent"] == str(KvSettings().recent)
    library = inspect.signature(NestedModel.generate).parameters
    for option in cli.main.commands["generate"].params:
        if option.name in ("max_new_tokens", "temperature", "seed"):
            assert option.default == library[option.name].default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the prompt with either --prompt or --prompt-file"),
        (
            ["--prompt", "x", "--system", "y", "--raw"],
            "--system needs the chat template, which --raw turns off. Leave one of them out.",
        ),
        (["--prompt", "x", "--gamma", "99"], "gamma is 99, expected a whole number, 0 to 15 or 'auto'"),
        (
            ["--prompt", "x", "--device", "gpu"],
            "device is 'gpu', expected 'auto', 'cpu', 'cuda' or one GPU, as 'cuda:1'",
        ),
        (["--prompt", "x", "--recent", "-1"], "kv.recent is -1, expected a whole number of tokens, 0 or more"),
    ],
    ids=["no prompt", "system and raw", "gamma", "device", "recent"],
)
def test_generate_refuses_a_wrong_call(nested, arguments, message):
    assert refused(run("generate", nested, *arguments), message, status=2)


def test_generate_without_a_tokenizer_names_the_file(tiny_checkpoint, tmp_path):
    """TK-3."""
    folder = tiny_checkpoint(tmp_path / "model")
    assert refused(
        run("generate", folder, "--prompt", "x"),
        "model: no tokenizer.json, so text cannot be read or written. Copy the tokenizer files of the source model "
        "into the folder, or give and take token ids.",
    )


def test_load_is_the_same_model(nested):
    answer = bitnest_format.load(str(nested)).generate(PROMPT, max_new_tokens=6)
    assert run("generate", nested, "--prompt", PROMPT, "--max-new-tokens", 6).stdout == f"{answer.text}\n"


def test_load_of_a_draft_does_not_open_the_refinement(nested):
    (nested / "bitnest-refinement-00001-of-00001.safetensors").unlink()
    assert bitnest_format.load(str(nested), view="draft").generate([5], max_new_tokens=2).token_ids


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

    monkeypatch.setattr(remote, "open_files", fail)
    assert refused(run("inspect", "owner/model"), "2 problems:\n  - first\n  - second")


def test_debug_shows_the_traceback(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise UsageError("wrong")

    monkeypatch.setattr(remote, "open_files", fail)
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

    monkeypatch.setattr(remote, "open_files", fail)
    result = run("inspect", "owner/model")
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", message)


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(remote, "open_files", fail)
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
        "from bitnest_format import cli, remote\n"
        "remote.open_files = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
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
