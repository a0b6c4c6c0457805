"""The kernels that are compiled ahead of time, called with the sizes of LLaMA-3-8B, and what must stay true of them.

Groups of 128 inputs and float16 scales, as the converter writes them. Tensors have no memory (`device="meta"`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitnest_format.kernels import accept, activation, attention, dual_plane, head, prefill, prefill_tiles, read_ceiling
from bitnest_format.kernels.accept_state import DecodeState
from bitnest_format.kernels.compilation import DECODE_SHARED_BYTES, Expectation, KernelCase
from bitnest_format.kernels.operands import (
    Activations,
    AttentionShape,
    Best,
    DualPlaneWeight,
    KvPlanes,
    Partials,
    Rope,
    View,
    scale_pairs,
)

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
GROUP = 128
SHAPE = AttentionShape(heads=32, kv_heads=8, head_dim=128)
CAPACITY = 8192
# A verify pass: the pending token and four drafts; the longest one.
ROWS, MOST_ROWS = 5, 16
PROMPT_ROWS = 256
META = torch.device("meta")

WEIGHTS = {
    "qkv": (SHAPE.projections, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}


# The widest tile of the tensor cores: 255 registers and a few words more, and the fastest for many outputs.
MMA_LOCAL_BYTES = 32


def cases() -> list[KernelCase]:
    """Every case, products first."""
    return [
        *_dual_plane_cases(),
        *_head_cases(),
        *_accept_cases(),
        *_attention_cases(),
        *_activation_cases(),
        *_prefill_cases(),
        _case(
            "read_sums", read_ceiling.read_sums, _words(1 << 23), _words(1024), block=1024, blocks=8, warps=4, wide=8
        ),
    ]


def _dual_plane_cases() -> list[KernelCase]:
    found = []
    passes: tuple[tuple[View, int], ...] = (("draft", 1), ("target", 1), ("target", ROWS))
    for view, rows in passes:
        name = f"{view} M={rows}"
        for layer, (outputs, inputs) in WEIGHTS.items():
            acts, weight = Activations.empty(MOST_ROWS, inputs, META), _weight(outputs, inputs)
            if layer == "gate_up":
                launch, out = dual_plane.dual_plane_gate_up, _floats(MOST_ROWS, outputs // 2)
                options: dict[str, Any] = {}
            else:
                launch, out, options = (
                    dual_plane.dual_plane_linear,
                    _floats(MOST_ROWS, outputs),
                    {"add": layer != "qkv"},
                )
            if view == "target" and layer in ("gate_up", "down"):
                options["local_bytes"] = MMA_LOCAL_BYTES
            found.append(_product(f"dual_plane {layer} {name}", launch, acts, weight, view, out, rows, **options))
    # Groups of other sizes, and scales of other types, go without tensor cores.
    outputs, inputs = WEIGHTS["qkv"]
    acts, weight, out = (
        Activations.empty(MOST_ROWS, inputs, META),
        _weight(outputs, inputs, False),
        _floats(ROWS, outputs),
    )
    linear = dual_plane.dual_plane_linear
    return [*found, _product(f"dual_plane qkv dp4a target M={ROWS}", linear, acts, weight, "target", out, ROWS)]


def _head_cases() -> list[KernelCase]:
    hidden, best = _floats(MOST_ROWS, HIDDEN), Best(_floats(MOST_ROWS, 16384), _words(MOST_ROWS, 16384))
    weight, logits = _halves(VOCABULARY, HIDDEN), _floats(MOST_ROWS, VOCABULARY)
    nested = _weight(VOCABULARY, HIDDEN)
    acts = Activations.empty(MOST_ROWS, HIDDEN, META)
    return [
        _case("head_argmax M=1", head.head_argmax, hidden, weight, best, 1, wide=4),
        _case(f"head_argmax M={ROWS}", head.head_argmax, hidden, weight, best, ROWS, wide=4),
        _case(f"head_logits M={ROWS}", head.head_logits, hidden, weight, logits, ROWS, wide=4),
        _product("nested head draft M=1", dual_plane.dual_plane_argmax, acts, nested, "draft", best, 1),
        _product(
            f"nested head target M={ROWS}",
            dual_plane.dual_plane_argmax,
            acts,
            nested,
            "target",
            best,
            ROWS,
            local_bytes=MMA_LOCAL_BYTES,
        ),
    ]


def _accept_cases() -> list[KernelCase]:
    """The merge of the head's 8016 blocks is split so that each thread has four of them; loads need not be wide."""
    state, uniforms = DecodeState.empty(CAPACITY, META), _floats(4096)

    def best(rows: int) -> Best:
        blocks = head.head_blocks(VOCABULARY)
        return Best(_floats(rows, blocks), _words(rows, blocks))

    return [
        _case("stage_draft", accept.stage_draft, best(1), state, 0, wide=1),
        *(
            _case(f"accept_greedy gamma={gamma}", accept.accept_greedy, best(gamma + 1), state, gamma, 1 << 20, wide=1)
            for gamma in (4, 8, 15)
        ),
        _case("accept_synthetic", accept.accept_synthetic, best(5), state, 4, uniforms, 0.95, 1 << 20, wide=1),
    ]


def _attention_cases() -> list[KernelCase]:
    kv_heads, size = SHAPE.kv_heads, SHAPE.head_dim
    cache = KvPlanes(
        torch.empty(2, 2, kv_heads, CAPACITY, size // 2, dtype=torch.uint8, device=META),
        _floats(2, kv_heads, CAPACITY),
    )
    rope = Rope(_floats(CAPACITY, size // 2), _floats(CAPACITY, size // 2))
    partials, position = Partials.empty(MOST_ROWS, SHAPE, CAPACITY, META), _words(1)
    qkv = _floats(MOST_ROWS, SHAPE.projections)
    merged, halves = _floats(MOST_ROWS, SHAPE.heads * size), _halves(kv_heads, CAPACITY, size)
    gain = _floats(SHAPE.heads + kv_heads, size)

    def attend(name: str, rows: int, draft: bool, head_norm: Tensor | None = None) -> KernelCase:
        operands = (qkv, head_norm, rope, position, 1, cache, SHAPE, partials, rows)
        return _case(
            name, attention.attend, *operands, draft=draft, kv_switch=2048, kv_recent=128, wide=2, tensor_cores=True
        )

    half = (_halves(MOST_ROWS, SHAPE.projections), rope, position, 0, halves, halves, SHAPE, partials, 1)
    return [
        attend("attend draft M=1", 1, True),
        attend("attend target M=1", 1, False),
        attend(f"attend target M={ROWS}", ROWS, False),
        attend(f"attend target M={ROWS} head norms", ROWS, False, gain),
        # The half-precision engine's graph is its own.
        _case("attend_half M=1", attention.attend_half, *half, wide=2, tensor_cores=True, shared_bytes=None),
        _case("combine", attention.combine, partials, position, 0, SHAPE, merged, ROWS, wide=1),
        _case(
            "kv_store",
            attention.kv_store,
            *(_floats(PROMPT_ROWS, SHAPE.projections), None, rope, 256, cache, SHAPE),
            *(_halves(SHAPE.heads, PROMPT_ROWS, size), PROMPT_ROWS),
            wide=0,
        ),
        _case("kv_load", attention.kv_load, cache, SHAPE, 4096, halves, halves, wide=1),
    ]


def _activation_cases() -> list[KernelCase]:
    acts, wide = Activations.empty(ROWS, HIDDEN, META), Activations.empty(ROWS, INTERMEDIATE, META)
    permuted = Activations.empty(ROWS, HIDDEN, META, _words(HIDDEN))
    stream, gain, tokens = _floats(ROWS, HIDDEN), _floats(HIDDEN), _words(MOST_ROWS)
    embedding = _halves(VOCABULARY, HIDDEN)
    embed = partial(activation.embed_norm_quantize, tokens, embedding, gain, 1e-5)
    return [
        _case("quantize", activation.quantize, _floats(ROWS, INTERMEDIATE), wide, ROWS, wide=1),
        _case("quantize permuted", activation.quantize, stream, permuted, ROWS, wide=1),
        _case("norm_quantize", activation.norm_quantize, stream, gain, 1e-5, acts, ROWS, wide=1),
        _case("embed_norm_quantize", embed, stream, acts, ROWS, wide=1),
        _case("norm", activation.norm, stream, gain, 1e-5, _floats(ROWS, HIDDEN), ROWS, wide=1),
    ]


def _prefill_cases() -> list[KernelCase]:
    """Every tile of the int8 product; its shared memory may be large, since nothing runs beside it."""
    acts, weight = Activations.empty(PROMPT_ROWS, HIDDEN, META), _weight(HIDDEN, HIDDEN)
    out = _floats(PROMPT_ROWS, HIDDEN)
    views: tuple[View, ...] = ("draft", "target")
    products = [
        _product(
            f"prefill {tile.rows}x{tile.outputs} {view}",
            prefill.linear_int8,
            *(acts, weight, view, out, PROMPT_ROWS),
            add=False,
            tile=tile,
            tensor_cores=True,
            shared_bytes=None,
        )
        for tile in prefill_tiles.TILES
        for view in views
        if view == "target" or tile == prefill_tiles.TILES[0]
    ]
    return [*products, _case("dequantize", prefill.dequantize, weight, "target", 0, _halves(1024, HIDDEN), wide=2)]


def _product(
    name: str,
    launch: Callable[..., object],
    *operands: object,
    tensor_cores: bool = False,
    shared_bytes: int | None = DECODE_SHARED_BYTES,
    local_bytes: int = 0,
    **options: object,
) -> KernelCase:
    """A call that multiplies bytes of planes, which it reads 16 at a time."""
    expect = Expectation(
        wide_loads=2,
        byte_products=True,
        tensor_cores=tensor_cores,
        shared_bytes=shared_bytes,
        local_bytes=local_bytes,
    )
    return KernelCase(name, partial(launch, *operands, **options), (expect,))


def _case(
    name: str,
    launch: Callable[..., object],
    *operands: object,
    wide: int,
    tensor_cores: bool = False,
    shared_bytes: int | None = DECODE_SHARED_BYTES,
    **options: object,
) -> KernelCase:
    """A call of one kernel with at least `wide` loads of 16 bytes."""
    expect = Expectation(wide_loads=wide, tensor_cores=tensor_cores, shared_bytes=shared_bytes)
    return KernelCase(name, partial(launch, *operands, **options), (expect,))


def _weight(outputs: int, inputs: int, paired: bool = True) -> DualPlaneWeight:
    """`paired`: with scales as tensor cores take them."""
    planes, scale = _words(outputs, inputs // 8), _halves(outputs, inputs // GROUP)
    return DualPlaneWeight(planes, planes, scale, scale_pairs=scale_pairs(scale, GROUP) if paired else None)


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=META)


def _halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=META)


def _words(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
