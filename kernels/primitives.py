"""Small device functions that several kernels share."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next kernel of the stream start: first statement of every kernel, so that it loads its weights early."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until every earlier kernel has finished and its writes can be seen.

    Every program calls this before it touches anything but constant weights, and before it may exit: a kernel's end
    must imply the end of all before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
