"""Where to decode: a GPU that the kernels run on, or the CPU, and why not the GPU."""

from __future__ import annotations

import importlib
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from bitnest_format.errors import UsageError

CPU = torch.device("cpu")
# The oldest GPUs the kernels are compiled and checked for: Ampere (A100, RTX 30, Orin).
LEAST_CAPABILITY = (8, 0)
LEAST_TRITON = (3, 6)
NO_GPU = "torch finds no GPU"
NO_CUDA = "this torch is built without CUDA and finds no GPU"


class DeviceWarning(UserWarning):
    """A GPU was asked for, or is there, but decoding goes to the CPU."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """`device`: where to allocate and compute; a GPU comes with its number.

    `reason`: why it is no GPU though one was allowed, a clause, or None. `quiet`: nobody needs to be told.
    """

    device: torch.device
    reason: str | None = None
    quiet: bool = False

    @property
    def warning(self) -> str | None:
        """What to tell a person, one sentence, or None."""
        return None if self.reason is None or self.quiet else f"{self.reason}; decoding on the CPU instead"


def choose_device(requested: str | torch.device) -> DeviceChoice:
    """The device for `"auto"`, `"cpu"`, `"cuda"` or one GPU, as `"cuda:1"`.

    `"auto"` and `"cuda"` take the first GPU that can be used, the current one before others. Where there is none the
    choice is the CPU, with a warning that says why; without one where `"auto"` finds no GPU at all. Nothing is printed:
    the command line prints `warning` on stderr, the library passes it to `warnings.warn`, so that each says it once.

    Raises `UsageError` for a name of another kind and for the number of a GPU that does not exist.
    """
    kind, number = _parse(requested)
    if kind == "cpu":
        return DeviceChoice(CPU)
    reason = _why_no_gpu()
    if reason is not None:
        return DeviceChoice(CPU, reason, quiet=kind == "auto" and reason in (NO_GPU, NO_CUDA))
    count = torch.cuda.device_count()
    if number is not None and number >= count:
        raise UsageError(f"device is 'cuda:{number}', but this machine has {_list_gpus(count)}")
    candidates = [number] if number is not None else _in_order(count)
    reasons = []
    for candidate in candidates:
        obstacle = gpu_obstacle(candidate)
        if obstacle is None:
            return _with_triton(candidate)
        reasons.append(obstacle)
    return DeviceChoice(CPU, "; ".join(reasons))


def gpu_obstacle(number: int) -> str | None:
    """What keeps a GPU from running the kernels: a clause that names it and its compute capability, or None."""
    capability = torch.cuda.get_device_capability(number)
    if capability >= LEAST_CAPABILITY:
        return None
    found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
    name = torch.cuda.get_device_name(number)
    return f"cuda:{number} ({name}) has compute capability {found}, the GPU kernels need {least} or newer"


def triton_obstacle() -> str | None:
    """What keeps Triton from launching kernels here: a clause, or None. Needs a GPU, and starts Triton's driver."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        cause = "is not installed" if missing else f"cannot be imported ({_first_line(error)})"
        return f"triton {cause}, and the GPU kernels need it (pip install 'triton>={_text(LEAST_TRITON)}')"
    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
    if version < LEAST_TRITON:
        return f"triton is {triton.__version__}, the GPU kernels need {_text(LEAST_TRITON)} or newer"
    try:
        # The first use compiles a small C file: a missing compiler or missing Python headers show here.
        triton.runtime.driver.active.get_current_device()
    except Exception as error:
        return f"triton cannot start ({_first_line(error)})"
    return None


def warn_once(choice: DeviceChoice, stacklevel: int = 3) -> None:
    """Pass a choice's warning, if it has one, to `warnings.warn` as a `DeviceWarning` of the caller's caller."""
    if choice.warning is not None:
        warnings.warn(choice.warning, DeviceWarning, stacklevel=stacklevel)


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is the current one: Triton launches, streams and graphs go where that is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _parse(requested: str | torch.device) -> tuple[str, int | None]:
    match = re.fullmatch(r"(auto|cpu|cuda)(?:(?<=cuda):(\d{1,4}))?", str(requested))
    if match is None:
        raise UsageError(f"device is {str(requested)!r}, expected 'auto', 'cpu', 'cuda' or one GPU, as 'cuda:1'")
    return match[1], None if match[2] is None else int(match[2])


def _why_no_gpu() -> str | None:
    """Why torch can use no NVIDIA GPU: a clause, or None where it can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if torch.version.hip is not None:
        return "this torch is built for AMD GPUs, the GPU kernels need an NVIDIA GPU"
    if available:
        return None
    if torch.version.cuda is None:
        return NO_CUDA
    # Where there is a driver but it is too old or broken, torch says so by a warning of its own.
    return f"torch cannot use the GPU ({_first_line(caught[0].message).split('. ')[0]})" if caught else NO_GPU


def _in_order(count: int) -> list[int]:
    first = torch.cuda.current_device()
    return [first, *(number for number in range(count) if number != first)]


def _list_gpus(count: int) -> str:
    names = [f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count)]
    return f"{count} GPU{'s' if count > 1 else ''}: {', '.join(names)}"


def _with_triton(number: int) -> DeviceChoice:
    obstacle = triton_obstacle()
    if obstacle is not None:
        return DeviceChoice(CPU, obstacle)
    return DeviceChoice(torch.device("cuda", number))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
