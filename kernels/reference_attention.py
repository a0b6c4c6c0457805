"""The nested KV cache's codes and attention over them, in plain torch.

A key or value vector is stored as one scale and two nibbles an element (arXiv 2610.02800, Eqs. 11-14). Planes hold two
elements a byte, the even one in the low nibble, each nibble `code + 8`: the layout of weights on disk.

Letters: `M` rows (tokens), `K` KV heads, `Q` query heads, `D` head size, `n` cached entries.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.kernels.reference import DECODE_ROWS, constant


def kv_encode(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Nested codes of key or value vectors: `[..., D]` float32 -> uint8 planes `[2, ..., D / 2]`, scale `[...]`.

    Plane 0 is the base, plane 1 the refinement. Codes and scales equal `nesting.encode_kv`; a vector of zeros gets
    codes 0 and the smallest scale.
    """
    device = entries.device
    largest = entries.abs().amax(dim=-1)
    scale = (largest / constant(nesting.BASE_MAX, device)).clamp_min(nesting.SMALLEST_SCALE[torch.float32])
    step = scale.unsqueeze(-1)
    base = (entries / step).round_().clamp_(nesting.BASE_MIN, nesting.BASE_MAX)
    residual = (entries - base * step) / (step / constant(nesting.STEPS_PER_BASE_STEP, device))
    refinement = residual.round_().clamp_(nesting.REFINEMENT_MIN, nesting.REFINEMENT_MAX)
    nibbles = torch.stack((base, refinement)).add_(packing.CODE_OFFSET)
    return torch.add(nibbles[..., 0::2], nibbles[..., 1::2], alpha=16).to(torch.uint8), scale


def kv_decode(planes: Tensor, scale: Tensor, *, fine: bool) -> Tensor:
    """The KV8 (`fine`) or KV4 view: uint8 planes `[2, ..., D / 2]`, scale `[...]` -> float32 `[..., D]`.

    KV4 reads plane 0 alone: `q4 * s`. KV8 is `(16 * q4 + qr) * (s / 16)`.
    """
    table = _nibble_table(planes.device)
    base = torch.embedding(table, planes[0].int()).flatten(-2)
    if not fine:
        return base * scale.unsqueeze(-1)
    refinement = torch.embedding(table, planes[1].int()).flatten(-2)
    codes = torch.add(refinement, base, alpha=nesting.STEPS_PER_BASE_STEP)
    return codes * (scale / constant(nesting.STEPS_PER_BASE_STEP, scale.device)).unsqueeze(-1)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    window: int | None,
    factor: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Causal attention of new tokens over cached entries, their own included.

    `queries` `[M, Q, D]` of positions `position .. position + M - 1`; `keys`, `values` `[K, n, D]` with
    `n = position + M`; `window`: how many entries up to its own a token sees, None for all. Scores are products times
    `factor`, `D ** -0.5` if None, bounded to `cap * tanh(score / cap)` where there is a cap. Returns `[M, Q, D]`.
    Up to `DECODE_ROWS` rows are computed one by one and do not depend on each other.
    """
    factor = queries.shape[-1] ** -0.5 if factor is None else factor
    if queries.shape[0] <= DECODE_ROWS:
        return _row_attention(queries, keys, values, position, window, factor, cap)
    return _block_attention(queries, keys, values, position, window, factor, cap)


def _row_attention(
    queries: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None, factor: float, cap: float | None
) -> Tensor:
    rows, heads, size = queries.shape
    grouped = (queries * constant(factor, queries.device)).view(rows, keys.shape[0], -1, size)
    outputs = []
    for number, query in enumerate(grouped.unbind(0)):
        stop = position + number + 1
        start = 0 if window is None else max(0, stop - window)
        scores = torch.bmm(query, keys[:, start:stop].transpose(1, 2))
        if cap is not None:
            scores = _capped(scores, cap)
        outputs.append(torch.bmm(scores.softmax(dim=-1), values[:, start:stop]))
    return torch.stack(outputs).view(rows, heads, size)


def _block_attention(
    queries: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None, factor: float, cap: float | None
) -> Tensor:
    places = torch.arange(keys.shape[1], device=keys.device)
    distance = places[position:].unsqueeze(1) - places
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    turned = queries.transpose(0, 1)
    if cap is not None:
        grouped = turned.unflatten(0, (keys.shape[0], -1))
        scores = _capped(grouped * factor @ keys.unsqueeze(1).transpose(2, 3), cap).masked_fill(~mask, float("-inf"))
        return (scores.softmax(dim=-1) @ values.unsqueeze(1)).flatten(0, 1).transpose(0, 1).contiguous()
    output = torch.nn.functional.scaled_dot_product_attention(
        turned.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, enable_gqa=True, scale=factor
    )
    return output[0].transpose(0, 1).contiguous()


def _capped(scores: Tensor, cap: float) -> Tensor:
    return (scores / constant(cap, scores.device)).tanh() * constant(cap, scores.device)


@cache
def _nibble_table(device: torch.device) -> Tensor:
    """float32 `[256, 2]`: the two codes of every byte."""
    with torch.inference_mode(False):
        byte = torch.arange(256, device=device)
        return torch.stack((byte & 0xF, byte >> 4), dim=-1).float() - packing.CODE_OFFSET
