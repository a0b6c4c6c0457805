"""Which device is chosen, with GPUs that are only pretended, and what is said where it is not the one asked for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch

from bitnest_format.errors import UsageError
from bitnest_format.runtime.device import CPU, DeviceChoice, DeviceWarning, choose_device, current, warn_once

T4, PASCAL, A100, H200 = (
    ("Tesla T4", (7, 5)),
    ("GeForce GTX 1080", (6, 1)),
    ("A100", (8, 0)),
    ("NVIDIA H200", (9, 0)),
)
T4_SENTENCE = "cuda:0 (Tesla T4) has compute capability 7.5, the GPU kernels need 8.0 or newer"

Gpu = tuple[str, tuple[int, int]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`(gpus, current=0, triton="3.6.0")`: let torch see these GPUs; `triton` is a version, an exception or None."""

    def pretend(gpus: Sequence[Gpu], current: int = 0, triton: str | Exception | None = "3.6.0") -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: gpus[number][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: gpus[number][1])
        module = types.ModuleType("triton")
        if isinstance(triton, str):
            module.__version__ = triton  # type: ignore[attr-defined]
        module.runtime = types.SimpleNamespace(driver=_Driver(triton))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", module if triton is not None else None)
        if isinstance(triton, Exception):
            module.__version__ = "3.7.1"  # type: ignore[attr-defined]

    return pretend


class _Driver:
    """Triton's driver, which starts when it is first asked for."""

    def __init__(self, failure: object):
        self.failure = failure

    @property
    def active(self) -> types.SimpleNamespace:
        if isinstance(self.failure, Exception):
            raise self.failure
        return types.SimpleNamespace(get_current_device=lambda: 0)


@pytest.mark.parametrize("requested", ["cpu", torch.device("cpu")])
def test_the_cpu_is_the_cpu(requested: str | torch.device, machine: Callable[..., None]) -> None:
    machine([H200])
    assert choose_device(requested) == DeviceChoice(CPU, None)


@pytest.mark.parametrize("requested", ["auto", "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_a_gpu_that_can_be_used(requested: str | torch.device, machine: Callable[..., None]) -> None:
    for gpu in (A100, H200):
        machine([gpu])
        assert choose_device(requested) == DeviceChoice(torch.device("cuda:0"), None)


def test_without_a_gpu_auto_is_silent_and_cuda_warns(machine: Callable[..., None]) -> None:
    machine([], triton=None)
    assert choose_device("auto") == DeviceChoice(CPU, "torch finds no GPU", quiet=True)
    assert choose_device("auto").warning is None
    for requested in ("cuda", "cuda:1"):
        assert choose_device(requested) == DeviceChoice(CPU, "torch finds no GPU")
        assert choose_device(requested).warning == "torch finds no GPU; decoding on the CPU instead"


def test_a_torch_without_cuda(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine([])
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("auto").warning is None
    assert choose_device("cuda").reason == "this torch is built without CUDA and finds no GPU"


def test_a_torch_for_amd(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine([("MI300X", (9, 4))])
    monkeypatch.setattr(torch.version, "hip", "6.4")
    sentence = "this torch is built for AMD GPUs, the GPU kernels need an NVIDIA GPU"
    for requested in ("auto", "cuda"):
        assert choose_device(requested) == DeviceChoice(CPU, sentence)


def test_a_driver_that_torch_complains_about(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine([])

    def unavailable() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update "
            "your GPU driver.\nAlternatively, install an older torch.",
            stacklevel=1,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    sentence = (
        "torch cannot use the GPU (CUDA initialization: The NVIDIA driver on your system is too old "
        "(found version 11040))"
    )
    for requested in ("auto", "cuda"):
        assert choose_device(requested) == DeviceChoice(CPU, sentence)


@pytest.mark.parametrize("requested", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("gpu", "sentence"),
    [
        (T4, T4_SENTENCE),
        (PASCAL, "cuda:0 (GeForce GTX 1080) has compute capability 6.1, the GPU kernels need 8.0 or newer"),
    ],
    ids=["7.5", "6.1"],
)
def test_a_gpu_that_is_too_old(gpu: Gpu, sentence: str, requested: str, machine: Callable[..., None]) -> None:
    """GP-2: the message names the capability and the alternative; nothing is compiled."""
    machine([gpu], triton=None)
    assert choose_device(requested) == DeviceChoice(CPU, sentence)


def test_a_second_gpu(machine: Callable[..., None]) -> None:
    machine([H200, A100])
    assert choose_device("cuda:1") == DeviceChoice(torch.device("cuda:1"), None)
    assert choose_device("cuda") == DeviceChoice(torch.device("cuda:0"), None)
    machine([H200, A100], current=1)
    assert choose_device("cuda") == choose_device("auto") == DeviceChoice(torch.device("cuda:1"), None)


def test_the_first_gpu_that_can_be_used_is_taken(machine: Callable[..., None]) -> None:
    machine([T4, A100])
    assert choose_device("auto") == choose_device("cuda") == DeviceChoice(torch.device("cuda:1"), None)
    assert choose_device("cuda:0") == DeviceChoice(CPU, T4_SENTENCE)
    machine([T4, PASCAL])
    assert choose_device("auto").reason == (
        f"{T4_SENTENCE}; cuda:1 (GeForce GTX 1080) has compute capability 6.1, the GPU kernels need 8.0 or newer"
    )


def test_a_gpu_that_does_not_exist(machine: Callable[..., None]) -> None:
    for gpus, found in (
        ([H200], "1 GPU: cuda:0 (NVIDIA H200)"),
        ([H200, T4], "2 GPUs: cuda:0 (NVIDIA H200), cuda:1 (Tesla T4)"),
    ):
        machine(gpus)
        with pytest.raises(UsageError) as error:
            choose_device("cuda:7")
        assert str(error.value) == f"device is 'cuda:7', but this machine has {found}"


@pytest.mark.parametrize("requested", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "auto:1", "mps", "", "CUDA"])
def test_a_name_that_is_no_device(requested: str) -> None:
    with pytest.raises(UsageError) as error:
        choose_device(requested)
    assert str(error.value) == f"device is {requested!r}, expected 'auto', 'cpu', 'cuda' or one GPU, as 'cuda:1'"


@pytest.mark.parametrize("requested", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("triton", "sentence"),
    [
        (None, "triton is not installed, and the GPU kernels need it (pip install 'triton>=3.6')"),
        ("3.3.1", "triton is 3.3.1, the GPU kernels need 3.6 or newer"),
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore."),
            "triton cannot start (Failed to find C compiler. Please specify via CC environment variable)",
        ),
        (AssertionError(), "triton cannot start (AssertionError)"),
    ],
    ids=["missing", "old", "no compiler", "silent failure"],
)
def test_triton_that_cannot_be_used(
    triton: str | Exception | None, sentence: str, requested: str, machine: Callable[..., None]
) -> None:
    machine([H200], triton=triton)
    assert choose_device(requested) == DeviceChoice(CPU, sentence)


def test_triton_that_is_broken(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine([H200])

    def broken(name: str) -> types.ModuleType:
        raise ImportError("libtriton.so: cannot open shared object file", name="triton._C.libtriton")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert choose_device("cuda").reason == (
        "triton cannot be imported (libtriton.so: cannot open shared object file), and the GPU kernels need it "
        "(pip install 'triton>=3.6')"
    )


def test_triton_is_not_loaded_where_there_is_no_gpu() -> None:
    code = (
        "import sys\n"
        "from bitnest_format.runtime.device import choose_device\n"
        "print(choose_device('auto').warning, choose_device('cuda').device, 'triton' in sys.modules)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=environment, check=True
    )
    assert done.stdout == "None cpu False\n"


def test_warn_once(machine: Callable[..., None]) -> None:
    machine([T4])

    def load() -> None:
        warn_once(choose_device("cuda"))

    with pytest.warns(DeviceWarning) as caught:
        load()
    assert [str(warning.message) for warning in caught] == [f"{T4_SENTENCE}; decoding on the CPU instead"]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once(choose_device("cpu"))


def test_current(monkeypatch: pytest.MonkeyPatch) -> None:
    with current(CPU):
        pass
    entered: list[torch.device] = []

    class Context:
        def __init__(self, device: torch.device):
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", Context)
    with current(torch.device("cuda:1")):
        assert entered == [torch.device("cuda:1")]
