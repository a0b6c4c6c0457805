"""Device functions that order logits: the largest wins, the lowest token among equals, NaN before any number.

A logit and its token become one int64 whose order is that order, so that a maximum over any number of threads finds
both, whatever it is grouped by.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

# Below every rank of a token.
LOWEST = tl.constexpr(-(2**63))

_TOKEN_BITS = tl.constexpr(32)
_LAST_TOKEN = tl.constexpr(0x7FFFFFFF)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def rank(value, token):
    """The rank of float32 `value` with int32 `token`, of the same shape: int64."""
    # Both zeros are equal; every NaN is the same one. Tokens are turned round, so that the lowest ranks highest.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits, _NAN_BITS)
    return (_turned(bits).to(tl.int64) << _TOKEN_BITS) | (token ^ _LAST_TOKEN).to(tl.int64)


@triton.jit
def ranked_value(ranks):
    """The float32 value that a rank holds."""
    return _turned((ranks >> _TOKEN_BITS).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def ranked_token(ranks):
    """The int32 token that a rank holds."""
    return (ranks & _LAST_TOKEN).to(tl.int32) ^ _LAST_TOKEN


@triton.jit
def _turned(bits):
    """Bits of float32 as integers of the same order, and back: those of negative numbers are turned round."""
    return bits ^ ((bits >> 31) & _MAGNITUDE_BITS)
