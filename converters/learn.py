"""Learned rotations: R1 and R2 moved to where rounding costs the model least (SpinQuant, arXiv 2405.16406).

Stochastic gradient descent by Cayley steps on `RotatedLoss`, from a randomised Hadamard rotation where there is one of
the model's sizes, from a random one otherwise. Written from the paper's mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.converters.base import Source
from bitnest_format.converters.cayley import CayleyDescent
from bitnest_format.converters.learn_loss import RotatedLoss
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.orthogonal import nearest_orthogonal, orthogonality_deviation
from bitnest_format.converters.rotation import Rotation, make_rotation, sizes_without_hadamard
from bitnest_format.converters.rotation_file import read_rotation_file, write_rotation_file
from bitnest_format.errors import SourceError

Progress = Callable[[str, int, int], None]

STAGE = "learning the rotation"
# Tokens of one step: enough for a gradient that points somewhere, few enough for the widest layer's activations.
TOKENS_PER_STEP = 4096
# One sequence in so many is kept out of the learning, to see what was learned; and no more tokens than this.
HELD_OUT_SHARE = 8
HELD_OUT_TOKENS = 8192
LARGEST_DEVIATION = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRotation:
    """R1 `[H, H]` and R2 `[L, D, D]`, float64 on the CPU, and the losses on text that was kept out of the learning.

    start: the kind of rotation it began as. Losses are nats a token: `unquantized` of the source, `before` with the
    rotation at the start, `after` with the learned one.
    """

    r1: Tensor
    r2: Tensor
    start: str
    unquantized: float
    before: float
    after: float


def learn_rotation(
    source: Source,
    architecture: Architecture,
    input_ids: Tensor,
    group_sizes: Mapping[str, int],
    *,
    steps: int,
    rate: float,
    search: bool = True,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> LearnedRotation:
    """Learn a rotation on the token ids `[N, T]`, int64.

    `group_sizes`: inputs per scale of every module; `search`: whether their scales are searched. Steps get shorter in
    a straight line down to zero. The same arguments give the same rotation on the same machine. Returns the start
    where learning has made nothing better. Raises `SourceError` where the loss is not a number.
    """
    report = progress or (lambda stage, done, total: None)
    start = "random" if sizes_without_hadamard(architecture) else "hadamard"
    made = make_rotation(start, None, seed, architecture)
    assert made is not None
    first = [made.r1.to(device), torch.stack([made.r2(layer) for layer in range(architecture.layers)]).to(device)]
    held, learned_from = split_sequences(input_ids)
    batches = _batches(learned_from, seed)
    loss = RotatedLoss(source, architecture, group_sizes, device, search=search)
    with _faster_products(device):
        loss.quantize = False
        unquantized = mean_loss(loss, held, first)
        loss.quantize = True
        before = mean_loss(loss, held, first)
        if not all(map(math.isfinite, (unquantized, before))):
            raise _no_number("before any step")
        descent = CayleyDescent(first)
        for step in range(steps):
            report(STAGE, step, steps)
            descent.step(_gradients(loss, next(batches), descent.matrices, step), rate, 1 - step / steps)
        report(STAGE, steps, steps)
        after = mean_loss(loss, held, descent.matrices)
    # What got worse, or lost its way, is not used.
    matrices, after = (descent.matrices, after) if after < before else (first, before)
    r1, r2 = (_checked(matrix.cpu()) for matrix in matrices)
    return LearnedRotation(r1=r1, r2=r2, start=start, unquantized=unquantized, before=before, after=after)


def learned_rotation(
    kept: Path,
    source: Source,
    architecture: Architecture,
    input_ids: Tensor,
    group_sizes: Mapping[str, int],
    options: ConvertOptions,
    progress: Progress,
) -> Rotation:
    """The rotation of a conversion that learns it: the one in the file `kept`, or else a new one, written there first.

    So an interrupted conversion goes on with the very same matrices. See `learn_rotation`.
    """
    if not kept.is_file():
        learned = learn_rotation(
            source,
            architecture,
            input_ids,
            group_sizes,
            steps=options.learn_steps,
            rate=options.learn_rate,
            search=options.scale_search == "mse",
            seed=options.seed,
            device=options.device,
            progress=progress,
        )
        record = {
            "start": learned.start,
            "steps": options.learn_steps,
            "rate": options.learn_rate,
            "loss_unquantized": round(learned.unquantized, 6),
            "loss_before": round(learned.before, 6),
            "loss_after": round(learned.after, 6),
        }
        write_rotation_file(kept, learned.r1, learned.r2, learning=record)
    found = read_rotation_file(kept, architecture)
    return Rotation("learned", found.r1, found.r2.__getitem__, options.seed, found.sha256, {"learning": found.learning})


def learning_remarks(rotation: Rotation) -> list[str]:
    """What a person should know about how a rotation was learned."""
    learning = rotation.details["learning"]
    if learning["loss_after"] < learning["loss_before"]:
        return []
    return [
        f"{learning['steps']} steps of learning found no better rotation than the {learning['start']} one they began "
        "with, which is used; give more steps, another --learn-rate or more calibration text"
    ]


def split_sequences(input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences to measure on, from the end of the text, and those to learn from; a single one is both."""
    count = min(len(input_ids) // HELD_OUT_SHARE, HELD_OUT_TOKENS // input_ids.shape[1])
    count = min(max(count, 1), max(len(input_ids) - 1, 1))
    return input_ids[-count:], input_ids[: max(len(input_ids) - count, 1)]


def _batches(input_ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless batches of whole sequences; every sequence is seen once before any is seen again."""
    generator = torch.Generator().manual_seed(seed)
    size = min(max(1, TOKENS_PER_STEP // input_ids.shape[1]), len(input_ids))
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(input_ids), generator=generator)])
        yield input_ids[order[:size]]
        order = order[size:]


def _gradients(loss: RotatedLoss, ids: Tensor, matrices: list[Tensor], step: int) -> tuple[Tensor, ...]:
    r1, r2 = (matrix.float().requires_grad_() for matrix in matrices)
    value = loss(ids, r1, r2)
    if not bool(torch.isfinite(value)):
        raise _no_number(f"at step {step + 1}")
    return torch.autograd.grad(value, (r1, r2))


@torch.no_grad()
def mean_loss(loss: RotatedLoss, input_ids: Tensor, matrices: list[Tensor]) -> float:
    r1, r2 = (matrix.float() for matrix in matrices)
    rows = max(1, TOKENS_PER_STEP // input_ids.shape[1])
    return sum(float(loss(ids, r1, r2)) * len(ids) for ids in input_ids.split(rows)) / len(input_ids)


def _no_number(when: str) -> SourceError:
    return SourceError(
        f"--rotation learn: the loss is not a finite number {when}; the weights, or what they make of the calibration "
        "text, overflow float32. Check the source, or use --rotation random."
    )


def _checked(matrices: Tensor) -> Tensor:
    """Orthogonal to the last bit of float64, `[..., N, N]`; a Cayley step leaves rounding alone to be mended."""
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    worst = max(orthogonality_deviation(matrix) for matrix in flat)
    assert worst <= LARGEST_DEVIATION, f"learned matrices are off by {worst:g}"
    return torch.stack([nearest_orthogonal(matrix) for matrix in flat]).view_as(matrices)


@contextmanager
def _faster_products(device: str) -> Iterator[None]:
    """Products with inputs of ten bits on a GPU: their error is far below that of a 4-bit step."""
    earlier = torch.get_float32_matmul_precision()
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(earlier)
