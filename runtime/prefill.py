"""A prompt's pass: many rows at a time, enqueued piece by piece; nothing is captured, since every length differs."""

from __future__ import annotations

import torch
from torch import Tensor

from bitnest_format.kernels.operands import Activations, DualPlaneWeight, View
from bitnest_format.kernels.plain_attention import prefill_attention
from bitnest_format.kernels.prefill_tiles import SCRATCH_WEIGHTS
from bitnest_format.kernels.reference import apply_rope, rms_norm, silu_mul
from bitnest_format.runtime.forward import HalfForward, NestedForward

# Tokens computed together.
ROWS = 512


def nested_prefill(forward: NestedForward, ids: Tensor, view: View, start: int = 0) -> None:
    """Fill the cache from entry `start` on with `ids` int32 `[T]`.

    The last token's hidden state then stands in row 0 of the stream.
    """
    for first in range(0, ids.shape[0], ROWS):
        _nested_piece(forward, ids[first : first + ROWS], start + first, view)


def half_prefill(forward: HalfForward, ids: Tensor) -> None:
    """The same for the float16 baseline."""
    for first in range(0, ids.shape[0], ROWS):
        _half_piece(forward, ids[first : first + ROWS], first)


def _nested_piece(forward: NestedForward, ids: Tensor, start: int, view: View) -> None:
    weights, ops, rows, device = forward.weights, forward.ops, ids.shape[0], ids.device
    sizes, epsilon, stop = weights.architecture, weights.architecture.norm_epsilon, start + ids.shape[0]
    heads = sizes.heads * sizes.head_dim

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    stream, qkv = buffer(rows, sizes.hidden_size), buffer(rows, forward.qkv.shape[1])
    gate_up = buffer(rows, 2 * sizes.intermediate_size)
    queries = buffer(sizes.heads, rows, sizes.head_dim, dtype=torch.float16)
    keys, values = buffer(2, sizes.kv_heads, stop, sizes.head_dim, dtype=torch.float16)
    scratch = buffer(SCRATCH_WEIGHTS, dtype=torch.float16)
    acts = {width: Activations.empty(rows, width, device) for width in (sizes.hidden_size, heads)}
    mlp_acts = Activations.empty(rows, sizes.intermediate_size, device)

    def linear(operand: Activations, weight: DualPlaneWeight, out: Tensor, *, add: bool = False) -> None:
        ops.prefill.prefill_linear(operand, weight, view, out, rows, scratch, add=add)

    for number, layer in enumerate(forward.layers):
        operand = acts[sizes.hidden_size].ordered_for(layer.qkv)
        if number == 0:
            ops.activation.embed_norm_quantize(
                ids, weights.embedding, layer.input_norm, epsilon, stream, operand, rows, 0
            )
        else:
            ops.activation.norm_quantize(stream, layer.input_norm, epsilon, operand, rows)
        linear(operand, layer.qkv, qkv)
        cache = forward.cache[number]
        ops.attention.kv_store(qkv, layer.head_norm, forward.rope, start, cache, layer.shape, queries, rows)
        ops.attention.kv_load(cache, layer.shape, stop, keys, values)
        attended = prefill_attention(queries, keys, values, start, layer.shape.window)
        operand = acts[heads].ordered_for(layer.o)
        ops.activation.quantize(attended, operand, rows)
        linear(operand, layer.o, stream, add=True)
        operand = acts[sizes.hidden_size].ordered_for(layer.gate_up)
        ops.activation.norm_quantize(stream, layer.mlp_norm, epsilon, operand, rows)
        linear(operand, layer.gate_up, gate_up)
        pairs = gate_up.view(rows, -1, 2)
        mixed = torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]
        operand = mlp_acts.ordered_for(layer.down)
        ops.activation.quantize(mixed, operand, rows)
        linear(operand, layer.down, stream, add=True)
    forward.stream[0].copy_(stream[-1])


def _half_piece(forward: HalfForward, ids: Tensor, start: int) -> None:
    weights, rows, stop = forward.weights, ids.shape[0], start + ids.shape[0]
    sizes, epsilon = weights.architecture, weights.architecture.norm_epsilon
    stream = weights.embedding[ids.long()].half()
    cosine = forward.rope.cosine[start:stop].unsqueeze(1)
    sine = forward.rope.sine[start:stop].unsqueeze(1)

    def norm(gain: Tensor) -> Tensor:
        return rms_norm(stream.float(), gain, epsilon).half()

    for number, layer in enumerate(forward.layers):
        qkv = torch.nn.functional.linear(norm(layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.float().view(rows, -1, sizes.head_dim)
        turned = heads[:, : sizes.heads + sizes.kv_heads]
        if layer.head_norm is not None:
            turned = rms_norm(turned, layer.head_norm, epsilon)
        turned = apply_rope(turned, cosine, sine).half()
        keys, values = forward.entries[number]
        keys[:, start:stop] = turned[:, sizes.heads :].transpose(0, 1)
        values[:, start:stop] = heads[:, sizes.heads + sizes.kv_heads :].transpose(0, 1)
        queries = turned[:, : sizes.heads].transpose(0, 1).contiguous()
        attended = prefill_attention(queries, keys[:, :stop], values[:, :stop], start, layer.shape.window)
        stream = stream + torch.nn.functional.linear(attended.half(), layer.o)
        gate_up = torch.nn.functional.linear(norm(layer.mlp_norm), layer.gate_up)
        stream = stream + torch.nn.functional.linear(silu_mul(gate_up), layer.down)
    forward.stream[0].copy_(stream[-1])
