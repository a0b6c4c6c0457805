"""How kernels are launched on a device: which instructions they may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Features:
    """`asm`: packed byte products by inline assembly, which the interpreter cannot run. `pdl`: programmatic dependent
    launch (compute capability 9.0 on): a kernel starts while the one before it ends and loads its weights meanwhile.
    """

    asm: bool
    pdl: bool


_pdl_allowed = True


def features(device: torch.device) -> Features:
    """What kernels may use on `device`; nothing special on a CPU, where they are interpreted."""
    found = _features(device)
    return found if _pdl_allowed else replace(found, pdl=False)


@contextmanager
def without_pdl() -> Iterator[None]:
    """Launch (or capture) kernels without overlap inside, to measure what it brings."""
    global _pdl_allowed
    before, _pdl_allowed = _pdl_allowed, False
    try:
        yield
    finally:
        _pdl_allowed = before


@cache
def _features(device: torch.device) -> Features:
    if device.type != "cuda":
        return Features(asm=False, pdl=False)
    return Features(asm=True, pdl=torch.cuda.get_device_capability(device) >= (9, 0))
