"""The kernels that are compiled ahead of time, each with the arguments of a typical launch."""

from __future__ import annotations

from bitnest_format.kernels.compilation import KernelCase

CASES: tuple[KernelCase, ...] = ()
