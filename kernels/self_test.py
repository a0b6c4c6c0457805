"""Whether Triton's kernels work on this machine: one small kernel, launched and compared, or only compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton import knobs

from bitnest_format.kernels import activation, plain_activation
from bitnest_format.kernels.compilation import compile_launches
from bitnest_format.kernels.operands import Activations

ROWS, COLUMNS = 2, 64


def launch_one(device: torch.device) -> None:
    """Launch the quantization kernel on `device` and compare its codes and scales with the definition's.

    Raises `RuntimeError` where they differ, and what Triton raises where it cannot compile or launch.
    """
    with _without_cache():
        _launch_and_compare(device)


def compile_one(architecture: int) -> None:
    """Compile the quantization kernel for a compute capability, such as 90, without a GPU.

    Raises what Triton raises where it cannot.
    """
    x = torch.empty(ROWS, COLUMNS, device="meta")
    acts = Activations.empty(ROWS, COLUMNS, device=x.device)
    with _without_cache():
        compile_launches(lambda: activation.quantize(x, acts, ROWS), architecture)


def _launch_and_compare(device: torch.device) -> None:
    x = torch.linspace(-1, 1, ROWS * COLUMNS, device=device).view(ROWS, COLUMNS)
    found, expected = (Activations.empty(ROWS, COLUMNS, device=device) for _ in range(2))
    activation.quantize(x, found, ROWS)
    plain_activation.quantize(x, expected, ROWS)
    if not torch.equal(found.codes, expected.codes) or not torch.equal(found.scale, expected.scale):
        raise RuntimeError("a kernel's results differ from those of its definition")


@contextmanager
def _without_cache() -> Iterator[None]:
    """Nothing that was compiled on another day counts."""
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        yield
