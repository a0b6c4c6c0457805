"""Keeping the memory that a conversion holds near what it needs."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Ask the C library to hand freed memory back to the system; does nothing where it cannot (only glibc can).

    A layer's many temporaries leave holes between what stays; without this they add up to a fifth of the peak.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
