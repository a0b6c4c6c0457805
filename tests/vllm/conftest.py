"""An engine of vLLM in this process, where it is installed: CI has an environment of its own for it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore_glob = ["test_*.py"]
if importlib.util.find_spec("vllm"):
    collect_ignore_glob = []
    # Imported here, because tests import our modules while warnings are errors.
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("bitnest_format.runtime.vllm_loader")

# Two workers on one memory node have to be told their cores; with one core, both get that one.
CORES = sorted(os.sched_getaffinity(0))
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and what it imports are not ours to mend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def engine() -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """`(folder, **options)` -> a context that gives `vllm.LLM`: float32, one process, without tokenizer."""
    return open_engine


@contextlib.contextmanager
def open_engine(folder: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_logprobs": -1,
        "kv_cache_memory_bytes": 1 << 26,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        **options,
    }
    llm = None
    try:
        llm = LLM(str(folder), **settings)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.fixture
def written() -> Callable[..., tuple[list[int], torch.Tensor]]:
    """`(llm, prompt, count, numbers=True)` -> greedy tokens, and log probabilities float32 `[prompt - 1, V]` of the
    prompt where numbers are wanted."""
    return write


def write(llm: Any, prompt: list[int], count: int, numbers: bool = True) -> tuple[list[int], torch.Tensor]:
    from vllm import SamplingParams

    options = {"prompt_logprobs": -1} if numbers else {}
    settings = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True, **options)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
    entries = answer.prompt_logprobs[1:] if numbers else []
    rows = [[entry[token].logprob for token in range(len(entry))] for entry in entries]
    return list(answer.outputs[0].token_ids), torch.tensor(rows)


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """The path of a program of this environment."""
    return lambda name: str(Path(sys.executable).parent / name)
