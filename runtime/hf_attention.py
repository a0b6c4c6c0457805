"""Attention for transformers models in which a token's numbers do not depend on how many tokens are computed beside it.

Rounding to INT8 turns a difference in the last bit into a whole step, and a few layers later into another text. In a
transformers model on the CPU, attention is what makes such differences between one token and the few that a
verification takes; norms, activations and nested layers do not. So `attn_implementation="bitnest"` attends token by
token, with the shapes that decoding one token has, and greedy speculative text becomes the target's own. Prompts are no
exception, since the first verification holds the prompt: a long one takes that many small products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "bitnest"


def attend_by_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`sdpa` of transformers, one query token at a time; with scores capped as Gemma 2 does, which `sdpa` cannot.

    `query` `[B, Q, M, D]`, `key` and `value` `[B, K, T, D]`, the newest `M` entries being those of the queries;
    `attention_mask` bool or float, or None -> `[B, M, Q, D]`.
    """
    rows, entries = query.shape[2], key.shape[2]
    outputs = []
    for row in range(rows):
        seen = entries - rows + row + 1
        mask = None if attention_mask is None else attention_mask[..., row : row + 1, :seen]
        # A single token comes without a mask where it sees everything.
        if mask is not None and bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all()):
            mask = None
        tensors = (query[:, :, row : row + 1], key[:, :, :seen], value[:, :, :seen], mask)
        if softcap is None:
            output, _ = sdpa_attention_forward(module, *tensors, **options)
        else:
            scaling = options.get("scaling")
            output = _attend_capped(*tensors, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """One query token `[B, Q, 1, D]` over `[B, K, T, D]`, scores bounded by `softcap` -> `[B, 1, Q, D]`."""
    batch, heads, _, size = query.shape
    scores = query.reshape(batch, key.shape[1], -1, size) @ key.transpose(2, 3) * scaling
    scores = (scores / softcap).tanh() * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, size)


def register_attention() -> None:
    """Make `attn_implementation="bitnest"` known to transformers."""
    AttentionInterface.register(NAME, attend_by_rows)
    AttentionMaskInterface.register(NAME, sdpa_mask)
