"""The `bench` command: predictions anywhere, clear refusals without a GPU, and what its options mean."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bitnest_format import cli
from bitnest_format.errors import UsageError
from bitnest_format.runtime import bench_request
from bitnest_format.runtime.device import CPU, DeviceChoice


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bitnest-format", "bench", "..."])
    return lambda *arguments: CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.fixture
def no_gpu(monkeypatch):
    choice = DeviceChoice(CPU, "torch finds no GPU")
    monkeypatch.setattr(bench_request, "choose_device", lambda requested: choice)


@pytest.mark.parametrize("option", [(), ("--kernels",)])
def test_without_a_gpu_one_sentence(invoke, no_gpu, option):
    result = invoke("llama-2-7b", *option)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "Error: bench needs a GPU: torch finds no GPU. Use --simulate MACHINE for a prediction.\n"


def test_prediction_of_the_papers_orin(invoke, no_gpu):
    # There, drafts of a text of 2K tokens read KV8.
    options = ("--simulate", "orin-nx-16", "--acceptance", "0.95", "--acceptance-of", "drafts", "--kv-switch", "4096")
    result = invoke("llama-2-7b", *options, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["kind"] == "prediction"
    speeds = {row["mode"]: row["tokens_per_second"] for row in document["results"]}
    assert speeds["half"] == pytest.approx(6.0, rel=0.03)
    assert speeds["target"] == pytest.approx(7.8, rel=0.03)
    assert 9.0 <= speeds["nested"] <= 9.3
    text = invoke("llama-2-7b", *options).stdout
    assert text.startswith("PREDICTION from bytes and bandwidth, not a measurement: llama-2-7b")
    assert "synthetic acceptance: accepted / drafted 0.95" in text


def test_contexts_heads_and_files(invoke, tmp_path):
    out = tmp_path / "bench.json"
    result = invoke(
        "qwen2.5-7b", "--simulate", "bandwidth=273,memory=100,launch=3", "--context", "2K,8k", "--context", "3000",
        "--quantized-head", "--modes", "target,nested", "--kv-switch", "4096", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["settings"]["contexts"] == [2048, 8192, 3000]
    assert document["settings"]["modes"] == ["target", "nested"]
    assert document["settings"]["head"] == "nested"
    assert document["settings"]["draft_reads_kv8_from"] == {"2048": 0, "8192": 8065, "3000": 0}
    assert document["results"][0]["speedup"] == {"over_half": None, "over_target": 1.0}
    assert document["acceptance"]["given"] == 0.95


def test_checkpoint_sizes_are_its_own(invoke, tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    result = invoke(str(folder), "--simulate", "h200", "--context", "100", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"]["name"] == str(folder)
    result = invoke(str(folder), "--simulate", "h200", "--quantized-head")
    assert result.exit_code == 2
    assert result.stderr == ("Error: --quantized-head is for shapes; a checkpoint's head is measured as it is stored\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--simulate", "pdp-11"), "--simulate pdp-11: unknown machine"),
        (("--simulate", "h200", "--modes", "fp8"), "--modes is 'fp8', expected some of half, target, nested"),
        (("--simulate", "h200", "--gamma", "0"), "gamma is 0, expected 1 or more"),
        (("--simulate", "h200", "--acceptance", "2"), "--acceptance is 2, expected a rate from 0 to 1"),
        (("--context", "2X"), "'2X' is not a list of lengths such as 2K,8K or 3000"),
        (("--kv-switch", "-1"), "kv.draft_switch_length is -1, expected a whole number of tokens, 0 or more"),
    ],
)
def test_wrong_calls(invoke, options, message):
    result = invoke("llama-2-7b", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_shape_is_a_path_that_is_not_there(invoke):
    result = invoke("llama-9")
    assert result.exit_code in (1, 2)
    assert "llama-9" in result.stderr


def test_a_checkpoint_without_a_rate_decodes_text(tiny_checkpoint, tmp_path):
    from tokenizers import Tokenizer, models

    folder = tiny_checkpoint(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = __import__("tokenizers").pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "contexts": (10,), "modes": ("nested",), "gamma": 4, "acceptance": None, "acceptance_of": "tokens",
        "quantized_head": False, "kv_switch": None, "recent": None, "repeats": 1, "stated": False, "command": (),
    }  # fmt: skip
    bench = bench_request.make_request(str(folder), folder, text="a " * 20, **options)
    assert bench.acceptance is None
    assert list(bench.text) == [0] * 20
    with pytest.raises(UsageError, match="the text has 2 tokens"):
        bench_request.make_request(str(folder), folder, text="a a", **options)
    stated = bench_request.make_request(str(folder), folder, text="a a", **options | {"stated": True})
    assert stated.acceptance.given == 0.95
    assert stated.text is None
