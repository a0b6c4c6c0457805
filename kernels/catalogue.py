"""The kernels that are compiled ahead of time, called with the sizes of LLaMA-3-8B, and what must stay true of them.

Groups of 128 inputs and float16 scales, as the converter writes them. Tensors have no memory (`device="meta"`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bitnest_format.kernels import activation, read_ceiling
from bitnest_format.kernels.compilation import Expectation, KernelCase
from bitnest_format.kernels.operands import Activations

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
# A verify pass: the pending token and four drafts.
ROWS = 5
META = torch.device("meta")


def cases() -> list[KernelCase]:
    """Every case, in the order of a decoding step."""
    return [*_activation_cases(), *_read_ceiling_cases()]


def _activation_cases() -> list[KernelCase]:
    acts, wide = Activations.empty(ROWS, HIDDEN, META), Activations.empty(ROWS, INTERMEDIATE, META)
    permuted = Activations.empty(ROWS, HIDDEN, META, _integers(HIDDEN))
    stream, gain = _floats(ROWS, HIDDEN), _floats(HIDDEN)
    embedding, tokens = _halves(VOCABULARY, HIDDEN), _integers(16)
    streaming = (Expectation(wide_loads=1),)
    return [
        KernelCase("quantize", partial(activation.quantize, _floats(ROWS, INTERMEDIATE), wide, ROWS), streaming),
        KernelCase("quantize permuted", partial(activation.quantize, stream, permuted, ROWS), streaming),
        KernelCase("norm_quantize", partial(activation.norm_quantize, stream, gain, 1e-5, acts, ROWS), streaming),
        KernelCase(
            "embed_norm_quantize",
            partial(activation.embed_norm_quantize, tokens, embedding, gain, 1e-5, stream, acts, ROWS),
            streaming,
        ),
        KernelCase("norm", partial(activation.norm, stream, gain, 1e-5, _floats(ROWS, HIDDEN), ROWS), streaming),
    ]


def _read_ceiling_cases() -> list[KernelCase]:
    words, sums = _integers(1024 * 8 * 1024), _integers(1024)
    read = partial(read_ceiling.read_sums, words, sums, block=1024, blocks=8, warps=4)
    return [KernelCase("read_sums", read, (Expectation(wide_loads=8),))]


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=META)


def _halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=META)


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
