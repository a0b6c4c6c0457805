"""What kernels read and write: views of buffers that are allocated once and keep their addresses.

A captured graph stores addresses, so every operand of a decoding step is one of these, and a kernel is told only how
many of its rows count. Letters: `R` rows of room (`M` of them in use), `I` inputs, `O` outputs, `G` groups, `K` KV
heads, `D` head size, `C` cache entries of room.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format import packing

# Inputs that share one published sum of codes: the smallest group, so that every group is a whole number of runs.
RUN = 32


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows quantized to INT8 as the dual-plane kernels read them.

    `codes` int8 `[R, 2, I / 2]`: codes of even inputs, then of odd ones. In stored words even inputs are low nibbles
    and odd ones high nibbles, so four neighbours here meet the four bytes of one masked word. `scale` float32 `[R]`,
    `sums` int32 `[R, I / 32]`: the sum of the codes of each run of 32 inputs. `permutation` int32 `[I]`: the input that
    each stored column holds, None where columns stand in order.
    """

    codes: Tensor
    scale: Tensor
    sums: Tensor
    permutation: Tensor | None = None

    @classmethod
    def empty(
        cls, rows: int, inputs: int, device: torch.device | str = "cpu", permutation: Tensor | None = None
    ) -> Activations:
        """Room for `rows` rows of `inputs` inputs, a multiple of 32."""
        if inputs % RUN:
            raise ValueError(f"{inputs} inputs: not a multiple of {RUN}")
        return cls(
            codes=torch.empty(rows, 2, inputs // 2, dtype=torch.int8, device=device),
            scale=torch.empty(rows, dtype=torch.float32, device=device),
            sums=torch.empty(rows, inputs // RUN, dtype=torch.int32, device=device),
            permutation=permutation,
        )

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[2]


@dataclass(frozen=True, slots=True)
class DualPlaneWeight:
    """A nested weight as stored: `base` and `refinement` int32 words `[O, I / 8]`, `scale` float16 or float32 `[O, G]`.

    `refinement` is None where only the draft view will be asked for. `bias` float32 `[O]` or None.
    """

    base: Tensor
    refinement: Tensor | None
    scale: Tensor
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.base.shape[0]

    @property
    def inputs(self) -> int:
        return self.base.shape[1] * packing.CODES_PER_WORD

    @property
    def group_size(self) -> int:
        return self.inputs // self.scale.shape[1]


@dataclass(frozen=True, slots=True)
class KvPlanes:
    """One layer's nested cache: `planes` uint8 `[2 planes, 2 (keys, values), K, C, D / 2]`, `scale` float32 `[2, K, C]`.

    Layout and codes are those of `reference_attention.kv_encode`: two elements a byte, the even one in the low nibble.
    """

    planes: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines float32 `[positions, D / 2]`."""

    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True, slots=True)
class Best:
    """Per row and block of the vocabulary, the largest logit and its token: float32 and int32 `[R, blocks]`."""

    value: Tensor
    index: Tensor
