"""Twins of `attention` in plain torch, and the attention of prefill.

Decoding is computed token by token and split by split, with shapes and addresses that only the token decides, so that
it does not depend on the tokens beside it. Queries are rounded to float16 as tensor cores read them; the rest is
float32, where the kernels round the weights of a split to float16 (within 2^-11 of the largest).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitnest_format.kernels.operands import (
    AttentionShape,
    KvPlanes,
    Partials,
    Rope,
)
from bitnest_format.kernels.reference import apply_rope, constant, rms_norm
from bitnest_format.kernels.reference_attention import kv_decode, kv_encode

# Elements of the mask that one piece of a prefill may take.
MASK_ELEMENTS = 1 << 25


def attend(
    qkv: Tensor,
    head_norm: Tensor | None,
    rope: Rope,
    position: Tensor,
    offset: int,
    cache: KvPlanes,
    shape: AttentionShape,
    partials: Partials,
    rows: int,
    *,
    draft: bool,
    kv_switch: int,
    kv_recent: int,
) -> None:
    """Append the entries of `rows` new tokens and attend over all entries, split by split, into `partials`.

    `qkv` float32 `[R, (Q + 2K) * D]`: query, key and value heads of the tokens at `position + offset + r`; `position`
    int32 `[1]` on the device. `head_norm`: float32 `[Q + K, D]`, gains of query and key heads, or None. The target
    reads KV8. A draft reads KV8 while no more than `kv_switch` entries exist, then KV4 apart from the newest
    `kv_recent`.
    """
    start = int(position) + offset
    stop = start + rows
    queries, keys, values = _heads(qkv, head_norm, rope, start, shape, rows)
    _append(cache, keys, values, start)
    fine_from = max(0, stop - kv_recent) if draft and stop > kv_switch else 0
    coarse = kv_decode(cache.planes[..., :stop, :], cache.scale[..., :stop], fine=False)
    entries = kv_decode(cache.planes[..., :stop, :], cache.scale[..., :stop], fine=True)
    entries[..., :fine_from, :] = coarse[..., :fine_from, :]
    _attend(queries, entries[0], entries[1], start, shape, partials)


def attend_half(
    qkv: Tensor,
    rope: Rope,
    position: Tensor,
    offset: int,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    partials: Partials,
    rows: int,
    head_norm: Tensor | None = None,
) -> None:
    """`attend` of the half-precision engine: `qkv` float16, cache `keys` and `values` float16 `[K, C, D]`."""
    start = int(position) + offset
    stop = start + rows
    queries, new_keys, new_values = _heads(qkv.float(), head_norm, rope, start, shape, rows)
    keys[:, start:stop] = new_keys.transpose(0, 1)
    values[:, start:stop] = new_values.transpose(0, 1)
    _attend(queries, keys[:, :stop].float(), values[:, :stop].float(), start, shape, partials)


def combine(partials: Partials, position: Tensor, offset: int, shape: AttentionShape, out: Tensor, rows: int) -> None:
    """Merge the splits of each token: `out` float32 `[R, Q * D]`."""
    _combine(partials, position, offset, shape, out, rows)


def combine_half(
    partials: Partials, position: Tensor, offset: int, shape: AttentionShape, out: Tensor, rows: int
) -> None:
    """Merge the splits of each token: `out` float16 `[R, Q * D]`."""
    _combine(partials, position, offset, shape, out, rows)


def kv_store(
    qkv: Tensor,
    head_norm: Tensor | None,
    rope: Rope,
    start: int,
    cache: KvPlanes,
    shape: AttentionShape,
    queries: Tensor,
    rows: int,
) -> None:
    """Turn the heads of `rows` tokens from position `start` on, and store their entries.

    `qkv` float32 `[T, (Q + 2K) * D]`, `head_norm` as in `attend`; writes `queries` float16 `[Q, T, D]`, contiguous, and
    entries `start .. start + rows - 1` of the cache.
    """
    turned, keys, values = _heads(qkv, head_norm, rope, start, shape, rows)
    queries[:, :rows] = turned.transpose(0, 1)
    _append(cache, keys, values, start)


def kv_load(cache: KvPlanes, shape: AttentionShape, stop: int, keys: Tensor, values: Tensor) -> None:
    """Decode entries `0 .. stop - 1` at KV8 into `keys` and `values` float16 `[K, n, D]`, `n >= stop`."""
    entries = kv_decode(cache.planes[..., :stop, :], cache.scale[..., :stop], fine=True)
    keys[:, :stop] = entries[0]
    values[:, :stop] = entries[1]


def prefill_attention(queries: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Causal attention of `T` tokens from position `start` on over `n = start + T` entries.

    `queries` float16 `[Q, T, D]`, `keys` and `values` float16 `[K, n, D]` -> float32 `[T, Q * D]`. A token sees the
    `window` entries up to its own, None for all. A prompt's first piece needs no mask; later ones are cut so that
    their masks stay below 64 MiB.
    """
    heads, rows, size = queries.shape
    out = torch.empty(rows, heads * size, dtype=torch.float32, device=queries.device)
    step = rows
    if start or window is not None:
        step = max(1, min(rows, MASK_ELEMENTS // (start + rows)))
    for first in range(0, rows, step):
        piece = queries[:, first : first + step]
        stop = start + first + piece.shape[1]
        lowest = 0 if window is None else max(0, start + first + 1 - window)
        seen = slice(lowest, stop)
        mask = None
        if stop - lowest != piece.shape[1] or window is not None:
            places = torch.arange(lowest, stop, device=queries.device)
            distance = places[-piece.shape[1] :].unsqueeze(1) - places
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
        attended = torch.nn.functional.scaled_dot_product_attention(
            piece.unsqueeze(0),
            keys[:, seen].unsqueeze(0),
            values[:, seen].unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        out[first : first + step] = attended[0].transpose(0, 1).reshape(-1, heads * size)
    return out


def _heads(
    qkv: Tensor, head_norm: Tensor | None, rope: Rope, start: int, shape: AttentionShape, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[M, Q, D]`, keys and values `[M, K, D]` after norm and RoPE."""
    heads = qkv[:rows].view(rows, -1, shape.head_dim)
    turned, values = heads.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
    if head_norm is not None:
        turned = rms_norm(turned, head_norm, shape.norm_epsilon)
    angles = slice(start, start + rows)
    turned = apply_rope(turned, rope.cosine[angles].unsqueeze(1), rope.sine[angles].unsqueeze(1))
    return turned[:, : shape.heads], turned[:, shape.heads :], values


def _append(cache: KvPlanes, keys: Tensor, values: Tensor, start: int) -> None:
    planes, scale = kv_encode(torch.stack((keys, values)).transpose(1, 2))
    stop = start + keys.shape[0]
    cache.planes[..., start:stop, :] = planes
    cache.scale[..., start:stop] = scale


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, start: int, shape: AttentionShape, partials: Partials
) -> None:
    """Partial results of queries `[M, Q, D]` over `keys` and `values` float32 `[K, n, D]`."""
    factor = constant(math.log2(math.e) / shape.head_dim**0.5, queries.device)
    scaled = (queries * factor).half().float()
    for row, query in enumerate(scaled.unbind(0)):
        query = query.reshape(shape.kv_heads, shape.group, shape.head_dim)
        for split, first, stop in _seen_splits(start + row, shape):
            scores = torch.bmm(query, keys[:, first:stop].transpose(1, 2).contiguous())
            peak = scores.amax(dim=-1)
            weights = (scores - peak.unsqueeze(-1)).exp2()
            partials.peak[row, :, split] = peak.flatten()
            partials.total[row, :, split] = weights.sum(dim=-1).flatten()
            partials.accumulator[row, :, split] = torch.bmm(weights, values[:, first:stop].contiguous()).flatten(0, 1)


def _combine(partials: Partials, position: Tensor, offset: int, shape: AttentionShape, out: Tensor, rows: int) -> None:
    for row in range(rows):
        splits = _seen_splits(int(position) + offset + row, shape)
        seen = slice(splits[0][0], splits[-1][0] + 1)
        peak = partials.peak[row, :, seen]
        share = (peak - peak.amax(dim=-1, keepdim=True)).exp2()
        total = (partials.total[row, :, seen] * share).sum(dim=-1, keepdim=True)
        merged = (partials.accumulator[row, :, seen] * share.unsqueeze(-1)).sum(dim=1) / total
        out[row] = merged.flatten()


def _seen_splits(position: int, shape: AttentionShape) -> list[tuple[int, int, int]]:
    """The splits that the token at a position sees, and which of their entries: from the second to before the third."""
    first = 0 if shape.window is None else max(0, position + 1 - shape.window)
    splits = shape.splits
    return [
        (split, max(first, splits.start(split)), min(position + 1, splits.start(split + 1)))
        for split in range(splits.count(first + 1) - 1, splits.count(position + 1))
    ]
