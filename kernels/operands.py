"""What kernels read and write: views of buffers that are allocated once and keep their addresses.

A captured graph stores addresses, so every operand of a decoding step is one of these, and a kernel is told only how
many of its rows count. Letters: `R` rows of room (`M` of them in use), `I` inputs, `O` outputs, `G` groups, `K` KV
heads, `D` head size, `C` cache entries of room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bitnest_format import packing
from bitnest_format.kernels.reference_linear import View as View

# Inputs that share one published sum of codes: the smallest group, so that every group is a whole number of runs.
RUN = 32

# Inputs of a group that tensor cores take, and scales that are fetched together.
MMA_GROUP = 128
MMA_SCALES = 8


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

    def ordered_for(self, weight: DualPlaneWeight) -> Activations:
        """The same buffers, to be filled in the order of a weight's stored columns."""
        return replace(self, permutation=weight.permutation)


@dataclass(frozen=True, slots=True)
class DualPlaneWeight:
    """A nested weight as stored: `base` and `refinement` int32 words `[O, I / 8]`, `scale` float16 or float32 `[O, G]`.

    `refinement` is None where only the draft view will be asked for. `bias` float32 `[O]` or None. `permutation` int32
    `[I]`: the input that each stored column belongs to, None where columns stand in order; whoever fills `Activations`
    obeys it. `scale_pairs`: see the function of that name; None where tensor cores are not to be used.
    """

    base: Tensor
    refinement: Tensor | None
    scale: Tensor
    bias: Tensor | None = None
    permutation: Tensor | None = None
    scale_pairs: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.base.shape[0]

    @property
    def inputs(self) -> int:
        return self.base.shape[1] * packing.CODES_PER_WORD

    @property
    def group_size(self) -> int:
        return self.inputs // self.scale.shape[1]


def scale_pairs(scale: Tensor, group_size: int) -> Tensor | None:
    """Scales as tensor cores are fed with them: int32 `[O, 4 * ceil(G / 8)]`, two float16 to a word, zeros at the end.

    Shares memory with `scale` where its rows already have such a length. None for scales that are not float16 and for
    groups of other sizes than 128.
    """
    if scale.dtype != torch.float16 or group_size != MMA_GROUP:
        return None
    missing = -scale.shape[1] % MMA_SCALES
    padded = torch.nn.functional.pad(scale, (0, missing)) if missing else scale
    return padded.contiguous().view(torch.int32)


@dataclass(frozen=True, slots=True)
class KvPlanes:
    """One layer's nested cache: `planes` uint8 `[2, 2 (keys, values), K, C, D / 2]`, `scale` float32 `[2, K, C]`.

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


@dataclass(frozen=True, slots=True)
class Splits:
    """How attention cuts the cache, one program to a split: `shorts` splits of `short` entries, then those of `long`.

    Where a split starts depends on nothing but its number, so a token's sums are the same for any length, capacity and
    number of rows. The first splits are short, so that a short context already occupies the device; later ones are
    longer, because each program has a start and an end to pay for. Lengths are multiples of 128, what a program of four
    warps reads at a step.
    """

    shorts: int
    short: int
    long: int

    def start(self, split: int) -> int:
        """The first entry of a split."""
        return self.short * min(split, self.shorts) + self.long * max(0, split - self.shorts)

    def count(self, length: int) -> int:
        """How many splits hold the first `length` entries."""
        shorts = min(self.shorts, -(-length // self.short))
        return shorts + max(0, -(-(length - self.shorts * self.short) // self.long))


def best_splits(kv_heads: int) -> Splits:
    """The cut for so many KV heads: the fewer they are, the more splits it takes to occupy a device.

    Measured in whole passes by `benchmarks/gpu_tiles.py`, the long splits alone by `benchmarks/gpu_attention.py`.
    """
    if kv_heads > 8:
        return Splits(shorts=8, short=256, long=1280)
    return Splits(shorts=8, short=256, long=512) if kv_heads > 4 else Splits(shorts=16, short=128, long=512)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`heads` query heads share `kv_heads` KV heads, groups of neighbours each; all have `head_dim` elements.

    A token sees itself and the `window - 1` entries before it, all of them where `window` is None. `norm_epsilon`
    belongs to the norms of query and key heads, where a model has them. `cut`: other splits than those measured best.
    Raises `ValueError` for sizes that attention cannot walk.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    norm_epsilon: float = 1e-6
    cut: Splits | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads")
        if self.head_dim % 4 or not 0 < self.head_dim <= 256:
            raise ValueError(f"head size {self.head_dim} is not a multiple of 4 up to 256")

    @property
    def splits(self) -> Splits:
        """How attention cuts the cache."""
        return self.cut or best_splits(self.kv_heads)

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads

    @property
    def projections(self) -> int:
        """Outputs of the stacked query, key and value projections."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Partials:
    """What each split found, before the splits of a token are merged.

    `accumulator` float32 `[R, Q, S, D]`: the sum of `2^(score - peak) * value` over a split; `total` float32
    `[R, Q, S]`: the sum of `2^(score - peak)`; `peak` float32 `[R, Q, S]`: the largest score, in units of `log 2`.
    Splits that a token does not see hold anything. `merged` float32 `[R, Q * D]`: tokens put together again.
    """

    accumulator: Tensor
    peak: Tensor
    total: Tensor
    merged: Tensor

    @classmethod
    def empty(cls, rows: int, shape: AttentionShape, capacity: int, device: torch.device | str = "cpu") -> Partials:
        """Room for `rows` rows over a cache of `capacity` entries."""
        places = (rows, shape.heads, shape.splits.count(capacity))
        return cls(
            accumulator=torch.empty(*places, shape.head_dim, dtype=torch.float32, device=device),
            peak=torch.empty(places, dtype=torch.float32, device=device),
            total=torch.empty(places, dtype=torch.float32, device=device),
            merged=torch.empty(rows, shape.heads * shape.head_dim, dtype=torch.float32, device=device),
        )
