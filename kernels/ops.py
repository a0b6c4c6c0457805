"""The operations of a decoding step as one choice: compiled (or interpreted) kernels, or their plain twins.

Modules of both kinds hold functions of the same names and signatures, so whatever enqueues a pass is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ops:
    """One module of functions for each family of operations. Modules are untyped here: two stand behind each name."""

    activation: Any
    dual_plane: Any
    attention: Any
    head: Any
    accept: Any
    prefill: Any


def triton_ops() -> Ops:
    """The Triton kernels: on a GPU, or on the CPU where `TRITON_INTERPRET=1` was set before the first import."""
    from bitnest_format.kernels import accept, activation, attention, dual_plane, head, prefill

    return Ops(activation, dual_plane, attention, head, accept, prefill)


def plain_ops() -> Ops:
    """The twins in plain torch, on any device."""
    from bitnest_format.kernels import (
        plain_accept,
        plain_activation,
        plain_attention,
        plain_dual_plane,
        plain_head,
        plain_prefill,
    )

    return Ops(plain_activation, plain_dual_plane, plain_attention, plain_head, plain_accept, plain_prefill)
