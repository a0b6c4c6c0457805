"""The decoding kernels of one model's sizes, each with operands of its own, to be timed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.families import ATTENTION_INPUTS, ATTENTION_OUTPUT, MLP_INPUTS, MLP_OUTPUT
from bitnest_format.kernels.operands import (
    Activations,
    AttentionShape,
    Best,
    DualPlaneWeight,
    KvPlanes,
    Partials,
    Rope,
    View,
)
from bitnest_format.runtime.bench import Bench
from bitnest_format.runtime.byte_model import HALF_BYTES, Storage, entry_bytes
from bitnest_format.runtime.kernel_bench import ROTATION_BYTES, TimedKernel

# Rows of a prompt's chunk that prefill is timed with: the multimodal prefix of arXiv 2610.02800, appendix A.4.
PREFILL_ROWS = 288
# Small enough for sums that are added to again and again to stay finite.
SCALE = 1e-6


def kernel_cases(bench: Bench, device: torch.device, *, rotation: int = ROTATION_BYTES) -> Iterator[TimedKernel]:
    """Every kernel of a draft step, a verify pass, a target step and an fp16 step, in that order within each operation.

    Operands are made as the iterator goes on and freed with it. `rotation`: bytes over which large operands rotate.
    """
    sizes = bench.architecture
    verify = bench.gamma + 1
    for name, outputs, inputs in stacked_shapes(sizes):
        yield from _linear_cases(name, outputs, inputs, bench.storage, verify, device, rotation)
        yield from _half_linear(name, outputs, inputs, device, rotation)
    yield from _row_cases(sizes, verify, device)
    for context in bench.contexts:
        yield from _attention_cases(sizes, context, bench.kv.recent, verify, device, rotation)
        yield from _half_attention(sizes, context, device, rotation)
    yield from _half_head(sizes, verify, device, rotation)
    if bench.storage.head == "nested":
        yield from _nested_head(sizes, bench.storage, verify, device, rotation)


def stacked_shapes(sizes: Architecture) -> list[tuple[str, int, int]]:
    """The linear layers as the engine stacks them: name, outputs, inputs."""
    stacks = {"qkv": ATTENTION_INPUTS, "o": (ATTENTION_OUTPUT,), "gate_up": MLP_INPUTS, "down": (MLP_OUTPUT,)}
    shapes = []
    for name, linears in stacks.items():
        found = [sizes.linear_shape(linear) for linear in linears]
        shapes.append((name, sum(outputs for outputs, _ in found), found[0][1]))
    return shapes


def _copies(read: int, rotation: int) -> int:
    return max(2, -(-rotation // max(read, 1)))


def _linear_cases(
    name: str, outputs: int, inputs: int, storage: Storage, verify: int, device: torch.device, rotation: int
) -> Iterator[TimedKernel]:
    from bitnest_format.kernels import dual_plane, prefill
    from bitnest_format.kernels.prefill_tiles import SCRATCH_WEIGHTS

    base_bytes, both_bytes = (storage.matrix_bytes(outputs, inputs, planes) for planes in (1, 2))
    weights = [_weight(outputs, inputs, storage, device) for _ in range(_copies(base_bytes, rotation))]
    acts = _activations(max(verify, PREFILL_ROWS), inputs, device)
    out = torch.zeros(PREFILL_ROWS, outputs, dtype=torch.float32, device=device)
    steps: tuple[tuple[View, int], ...] = (("draft", 1), ("target", 1), ("target", verify))
    for view, rows in steps:

        def launch(copy: int, view: View = view, rows: int = rows) -> None:
            if name == "gate_up":
                dual_plane.dual_plane_gate_up(acts, weights[copy], view, out, rows)
            else:
                dual_plane.dual_plane_linear(acts, weights[copy], view, out, rows, add=name in ("o", "down"))

        read = base_bytes if view == "draft" else both_bytes
        yield TimedKernel(f"{name} {view} M={rows}", read, len(weights), launch)
    scratch = torch.empty(SCRATCH_WEIGHTS, dtype=torch.float16, device=device)

    def many_rows(copy: int, product: Callable[..., None]) -> None:
        product(acts, weights[copy], "target", out, PREFILL_ROWS, add=False)

    paths: dict[str, Callable[..., None]] = {
        "int8": prefill.linear_int8,
        "dequantize": partial(prefill.linear_by_dequantize, scratch=scratch),
    }
    for path, product in paths.items():
        launch_path = partial(many_rows, product=product)
        yield TimedKernel(f"{name} prefill {path} M={PREFILL_ROWS}", both_bytes, len(weights), launch_path)


def _half_linear(name: str, outputs: int, inputs: int, device: torch.device, rotation: int) -> Iterator[TimedKernel]:
    read = HALF_BYTES * outputs * inputs
    weights = [
        torch.full((outputs, inputs), SCALE, dtype=torch.float16, device=device).normal_(0, 0.02)
        for _ in range(_copies(read, rotation))
    ]
    for rows in (1, PREFILL_ROWS):
        x = torch.ones(rows, inputs, dtype=torch.float16, device=device)
        out = torch.empty(rows, outputs, dtype=torch.float16, device=device)

        def launch(copy: int, x: Tensor = x, out: Tensor = out) -> None:
            torch.mm(x, weights[copy].T, out=out)

        yield TimedKernel(f"{name} fp16 cuBLAS M={rows}", read, len(weights), launch)


def _row_cases(sizes: Architecture, verify: int, device: torch.device) -> Iterator[TimedKernel]:
    """Norms and quantization: a few kilobytes, so what counts is the time of a node."""
    from bitnest_format.kernels import activation

    hidden, wide = sizes.hidden_size, sizes.intermediate_size
    stream = torch.randn(verify, hidden, dtype=torch.float32, device=device)
    product = torch.randn(verify, wide, dtype=torch.float32, device=device)
    gain = torch.ones(hidden, dtype=torch.float32, device=device)
    narrow_acts, wide_acts = _activations(verify, hidden, device), _activations(verify, wide, device)
    for rows in (1, verify):

        def norm(_: int, rows: int = rows) -> None:
            activation.norm_quantize(stream, gain, sizes.norm_epsilon, narrow_acts, rows)

        def quantize(_: int, rows: int = rows) -> None:
            activation.quantize(product, wide_acts, rows)

        yield TimedKernel(f"norm_quantize M={rows}", 4 * hidden * (rows + 1), 1, norm)
        yield TimedKernel(f"quantize M={rows}", 4 * wide * rows, 1, quantize)


def _attention_cases(
    sizes: Architecture, context: int, recent: int, verify: int, device: torch.device, rotation: int
) -> Iterator[TimedKernel]:
    from bitnest_format.kernels import attention

    shape, capacity = _attention_shape(sizes), _capacity(context, verify)
    rope, position, partials = _attention_places(shape, context, capacity, verify, device)
    gains = _head_gains(sizes, device)
    fine, coarse = entry_bytes(sizes, "fine"), entry_bytes(sizes, "coarse")
    qkv = torch.randn(verify, shape.projections, dtype=torch.float32, device=device)
    caches = [_cache(shape, capacity, device) for _ in range(_copies(context * coarse, rotation))]
    newest = min(recent, context)
    # Beyond every context drafts read KV8; from 0 on KV4 but for the newest entries.
    steps = (
        ("draft KV8", 1, True, 1 << 30, context * fine),
        ("draft KV4", 1, True, 0, (context - newest) * coarse + newest * fine),
        ("target", 1, False, 0, context * fine),
        ("target", verify, False, 0, context * fine),
    )
    for name, rows, draft, switch, read in steps:

        def attend(copy: int, rows: int = rows, draft: bool = draft, switch: int = switch) -> None:
            attention.attend(
                qkv, gains, rope, position, 0, caches[copy], shape, partials, rows,
                draft=draft, kv_switch=switch, kv_recent=recent,
            )  # fmt: skip

        yield TimedKernel(f"attend {name} {context} M={rows}", read, len(caches), attend)
    for rows in (1, verify):

        def combine(_: int, rows: int = rows) -> None:
            attention.combine(partials, position, 0, shape, partials.merged, rows)

        read = rows * shape.heads * partials.peak.shape[2] * 4 * (shape.head_dim + 2)
        yield TimedKernel(f"combine {context} M={rows}", read, 1, combine)


def _half_attention(sizes: Architecture, context: int, device: torch.device, rotation: int) -> Iterator[TimedKernel]:
    from bitnest_format.kernels import attention

    shape, capacity = _attention_shape(sizes), _capacity(context, 1)
    rope, position, partials = _attention_places(shape, context, capacity, 1, device)
    gains = _head_gains(sizes, device)
    qkv = torch.randn(1, shape.projections, dtype=torch.float32, device=device).half()
    read = context * entry_bytes(sizes, "half")
    caches = [
        torch.zeros(2, shape.kv_heads, capacity, shape.head_dim, dtype=torch.float16, device=device)
        for _ in range(_copies(read, rotation))
    ]

    def attend(copy: int) -> None:
        keys, values = caches[copy]
        attention.attend_half(qkv, rope, position, 0, keys, values, shape, partials, 1, gains)

    yield TimedKernel(f"attend fp16 {context} M=1", read, len(caches), attend)


def _attention_shape(sizes: Architecture) -> AttentionShape:
    return AttentionShape(sizes.heads, sizes.kv_heads, sizes.head_dim, norm_epsilon=sizes.norm_epsilon)


def _capacity(context: int, rows: int) -> int:
    return -(-(context + rows) // 64) * 64


def _attention_places(
    shape: AttentionShape, context: int, capacity: int, rows: int, device: torch.device
) -> tuple[Rope, Tensor, Partials]:
    angles = torch.zeros(capacity, shape.head_dim // 2, dtype=torch.float32, device=device)
    position = torch.tensor([context], dtype=torch.int32, device=device)
    return Rope(angles.cos(), angles.sin()), position, Partials.empty(rows, shape, capacity, device)


def _head_gains(sizes: Architecture, device: torch.device) -> Tensor | None:
    """Gains of query and key heads, where the model has them."""
    if not sizes.family.head_norms:
        return None
    return torch.ones(sizes.heads + sizes.kv_heads, sizes.head_dim, dtype=torch.float32, device=device)


def _half_head(sizes: Architecture, verify: int, device: torch.device, rotation: int) -> Iterator[TimedKernel]:
    from bitnest_format.kernels import head

    vocabulary, hidden = sizes.vocab_size, sizes.hidden_size
    read = HALF_BYTES * vocabulary * hidden
    x = torch.randn(verify, hidden, dtype=torch.float32, device=device)
    weights = [
        torch.zeros(vocabulary, hidden, dtype=torch.float16, device=device) for _ in range(_copies(read, rotation))
    ]
    best = _best(verify, head.head_blocks(vocabulary), device)
    for rows in (1, verify):

        def launch(copy: int, rows: int = rows) -> None:
            head.head_argmax(x, weights[copy], best, rows)

        yield TimedKernel(f"head fp16 M={rows}", read, len(weights), launch)


def _nested_head(
    sizes: Architecture, storage: Storage, verify: int, device: torch.device, rotation: int
) -> Iterator[TimedKernel]:
    from bitnest_format.kernels import dual_plane

    vocabulary, hidden = sizes.vocab_size, sizes.hidden_size
    base_bytes, both_bytes = (storage.matrix_bytes(vocabulary, hidden, planes) for planes in (1, 2))
    weights = [_weight(vocabulary, hidden, storage, device) for _ in range(_copies(base_bytes, rotation))]
    acts = _activations(verify, hidden, device)
    steps: tuple[tuple[View, int, int], ...] = (
        ("draft", 1, base_bytes),
        ("target", 1, both_bytes),
        ("target", verify, both_bytes),
    )
    best = _best(verify, dual_plane.argmax_blocks(vocabulary), device)
    for view, rows, read in steps:

        def launch(copy: int, view: View = view, rows: int = rows) -> None:
            dual_plane.dual_plane_argmax(acts, weights[copy], view, best, rows)

        yield TimedKernel(f"head {view} M={rows}", read, len(weights), launch)


def _weight(outputs: int, inputs: int, storage: Storage, device: torch.device) -> DualPlaneWeight:
    """Random codes under a constant scale."""
    shape = (outputs, inputs // 8)
    base, refinement = (torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device) for _ in range(2))
    kind = torch.float16 if storage.scale_bytes == HALF_BYTES else torch.float32
    scale = torch.full((outputs, storage.groups(inputs)), SCALE, dtype=kind, device=device)
    return DualPlaneWeight(base=base, refinement=refinement, scale=scale)


def _activations(rows: int, inputs: int, device: torch.device) -> Activations:
    acts = Activations.empty(rows, inputs, device)
    acts.codes.fill_(1)
    acts.sums.fill_(32)
    acts.scale.fill_(SCALE)
    return acts


def _cache(shape: AttentionShape, capacity: int, device: torch.device) -> KvPlanes:
    sizes = (2, 2, shape.kv_heads, capacity, shape.head_dim // 2)
    planes = torch.randint(0, 256, sizes, dtype=torch.uint8, device=device)
    return KvPlanes(planes, torch.full((2, shape.kv_heads, capacity), 0.01, dtype=torch.float32, device=device))


def _best(rows: int, blocks: int, device: torch.device) -> Best:
    return Best(
        torch.empty(rows, blocks, dtype=torch.float32, device=device),
        torch.empty(rows, blocks, dtype=torch.int32, device=device),
    )
