"""Signed 4-bit codes as bytes on disk, and back: pure functions, the same for both planes.

A code is stored as the nibble `code + 8`, eight nibbles to an int32 word, the first input in the lowest four
bits. Rows are outputs: codes `[O, I]` become words `[O, I / 8]`. On a little-endian disk that equals one byte
per two inputs, low nibble first, and it is the `pack-quantized` layout of compressed-tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES_PER_WORD = 8
CODE_OFFSET = 8

# One bit of each of the eight nibbles of a word.
_LOWEST_BITS = 0x11111111
_HIGHEST_BITS = 0x88888888 - (1 << 32)


def pack(codes: Tensor) -> Tensor:
    """int8 codes `[..., I]` in -8..7 -> int32 words `[..., I / 8]`.

    Raises `ValueError` where `I` is not a multiple of 8 or a code is out of range.
    """
    if codes.shape[-1] % CODES_PER_WORD:
        raise ValueError(f"{codes.shape[-1]} codes per row do not fill words of {CODES_PER_WORD}")
    if codes.numel() and (int(codes.min()) < -CODE_OFFSET or int(codes.max()) >= CODE_OFFSET):
        raise ValueError(f"codes span {int(codes.min())}..{int(codes.max())}, a nibble holds -8..7")
    nibbles = (codes.to(torch.int8) + CODE_OFFSET).view(torch.uint8)
    low, high = nibbles[..., 0::2], nibbles[..., 1::2]
    return (low | (high << 4)).contiguous().view(torch.int32)


def any_forbidden_pair(base: Tensor, refinement: Tensor) -> bool:
    """Whether a base code of -8 stands beside a negative refinement code anywhere: int32 words of equal shape.

    Equals `nesting.forbidden_pairs(unpack(base), unpack(refinement)).any()` without unpacking: such a pair is a base
    nibble of 0 beside a refinement nibble whose highest bit is 0.
    """
    nibbles = base | (refinement & _HIGHEST_BITS)
    nibbles |= nibbles >> 1
    nibbles |= nibbles >> 2
    return bool(((nibbles & _LOWEST_BITS) != _LOWEST_BITS).any())


def unpack(words: Tensor) -> Tensor:
    """int32 words `[..., W]` -> int8 codes `[..., 8 * W]` in -8..7; the inverse of `pack`."""
    packed = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return nibbles.view(torch.int8) - CODE_OFFSET
