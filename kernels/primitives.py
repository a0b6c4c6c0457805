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


@triton.jit
def divide(x, divisor, ASM: tl.constexpr):
    """`x / divisor` rounded once, for many `x` and one divisor.

    The instruction sequence of a single division branches, so that divisions wait for each other. Two corrections of
    the product with the divisor's reciprocal give the same bits (Markstein 1990) wherever the remainder is a normal
    number; a smaller quotient is far below half a code. The interpreter has no fused multiply-add: it divides.
    """
    if ASM:
        reciprocal = tl.div_rn(1.0, divisor)
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
        return tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    else:
        return tl.div_rn(x, divisor)
