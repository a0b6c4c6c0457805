"""GP-1: a machine where triton is not installed, and without a GPU: every command works, each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# What `pip uninstall triton` leaves: no finder knows the package.
WITHOUT_TRITON = """
import sys


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
"""
RUN_COMMAND = """
from bitnest_format.cli import main

main(sys.argv[1:], prog_name="bitnest-format")
"""
# A GPU is pretended, so that triton is asked for at all.
ASK_FOR_THE_GPU = """
import torch

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda number: "NVIDIA H200"
torch.cuda.get_device_capability = lambda number: (9, 0)

from bitnest_format.runtime.device import choose_device

for requested in ("auto", "cuda", "cuda:0"):
    choice = choose_device(requested)
    print(choice.device, choice.warning)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT_TRITON + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)


def command(*arguments: object) -> str:
    """What a command that must succeed writes to stdout."""
    done = run(RUN_COMMAND, *arguments)
    assert done.returncode == 0, done.stderr
    assert "triton" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["convert", "validate", "inspect", "generate"])
def test_help(name: str) -> None:
    assert command(name, "--help").startswith(f"Usage: bitnest-format {name} [OPTIONS]")


def test_convert_validate_inspect_and_generate(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    source, nested = tmp_path / "source", tmp_path / "nested"
    source.mkdir()
    config, tensors = tiny_model(num_hidden_layers=1)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, source / "model.safetensors")
    alphabet = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(source / "tokenizer.json"))
    quick = ("--calibration-samples", "2", "--sequence-length", "32", "--json")
    assert json.loads(command("convert", source, nested, *quick))["modules"] == 7
    assert command("validate", nested, "--deep") == f"{nested}: valid\n"
    assert command("inspect", nested).startswith("nested\n")
    assert command("generate", nested, "--prompt", "nest", "--max-new-tokens", 4)


def test_asking_for_the_gpu_gives_one_clear_line() -> None:
    done = run(ASK_FOR_THE_GPU)
    assert done.returncode == 0, done.stderr
    line = (
        "cpu triton is not installed, and the GPU kernels need it (pip install 'triton>=3.6'); "
        "decoding on the CPU instead\n"
    )
    assert done.stdout == 3 * line
