"""Both planes of linear layers that read the same input, and the manifest's record of each.

Where a source brings a base plane, the refinement alone is found: with the columns, and the Hessian of their inputs, in
the order in which the base stores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.checkpoint import BASE_SUFFIX, PERMUTATION_SUFFIX, REFINEMENT_SUFFIX, SCALE_SUFFIX
from bitnest_format.converters import gptq_solver
from bitnest_format.converters.base import GivenBase
from bitnest_format.converters.hessian import InverseFactor, inverse_factor
from bitnest_format.converters.memory import release_freed_memory
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.ranks import ALONE, Ranks
from bitnest_format.manifest import Module, Plane
from bitnest_format.shards import tensor_sha256

# Weights that are solved at a time; about ten float32 copies of them exist meanwhile. Few large pieces keep a GPU busy.
WEIGHTS_AT_ONCE = 1 << 24
WEIGHTS_AT_ONCE_ON_GPU = 100_000_000


@dataclass(frozen=True, slots=True)
class SolvedModule:
    """One module's tensors as they lie on disk, by name, the manifest's record, and what went other than asked for."""

    base: dict[str, Tensor]
    refinement: dict[str, Tensor]
    record: Module
    remarks: list[str]


@dataclass(frozen=True, slots=True)
class Codes:
    """One module's int8 codes `[O, I]`, its scale `[O, G]` in its stored type, and the share of clipped codes.

    `permutation` int64 `[I]`: the input of each stored column, where they are not in order. A draft alone has neither
    refinement nor saturation.
    """

    base: Tensor
    refinement: Tensor | None
    scale: Tensor
    saturation: float | None
    permutation: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Together:
    """Modules that share their input, to be quantized as one matrix.

    `weights`: float32 `[O, I]` by module name; `hessian`: the mean `X^T X` of their input, float32 `[I, I]`, or None
    to round to nearest, both in the order of inputs. `bases`: base planes to keep, all of one permutation.
    """

    weights: Mapping[str, Tensor]
    hessian: Tensor | None
    group_size: int
    bases: Mapping[str, GivenBase] | None = None

    @property
    def permutation(self) -> Tensor | None:
        """The input of each stored column, int64 `[I]`, where they are not in order."""
        return None if self.bases is None else next(iter(self.bases.values())).permutation

    @property
    def inputs(self) -> int:
        return next(iter(self.weights.values())).shape[1]

    @property
    def outputs(self) -> int:
        return sum(weight.shape[0] for weight in self.weights.values())


@dataclass(frozen=True, slots=True)
class Block:
    """Solved rows of a matrix: codes int8 `[r, I]`, scales `[r, G]`, each row's share of clipped codes `[r]`.

    `damping` `[1]`, float64, is what the Hessian needed; NaN where it could not be inverted, or there is none.
    """

    base: Tensor
    refinement: Tensor
    scale: Tensor
    clipped: Tensor
    damping: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.base, self.refinement, self.scale, self.clipped, self.damping

    @classmethod
    def empty(cls, rows: int, inputs: int, groups: int, scale_type: torch.dtype) -> Block:
        codes = torch.empty(2, rows, inputs, dtype=torch.int8)
        scale = torch.empty(rows, groups, dtype=scale_type)
        return cls(codes[0], codes[1], scale, torch.empty(rows), torch.empty(1, dtype=torch.float64))


def rows_at_once(inputs: int, device: torch.device | str) -> int:
    """How many rows of a matrix are solved at a time."""
    weights = WEIGHTS_AT_ONCE_ON_GPU if torch.device(device).type == "cuda" else WEIGHTS_AT_ONCE
    return max(1, weights // inputs)


def quantize_together(
    matrices: Sequence[Together], options: ConvertOptions, ranks: Ranks = ALONE
) -> Iterator[tuple[dict[str, Codes], list[str]]]:
    """Quantize matrices one after the other: the codes of each one's modules, and what went other than asked for.

    Rows do not see each other: taking them in blocks bounds the memory and lets ranks share the work. The blocks do
    not depend on the number of ranks. Every rank calls this with the same matrices; rank 0 alone is given results.
    """
    tasks = [(number, block) for number, matrix in enumerate(matrices) for block in _blocks(matrix)]
    owners = ranks.share([(rows.stop - rows.start) * matrices[number].inputs ** 2 for number, rows in tasks])
    solved: list[Block] = []
    for number, matrix in enumerate(matrices):
        stacked = in_order(torch.cat(list(matrix.weights.values())), matrix.permutation)
        given = _stacked_bases(matrix)
        scale_type = torch.float32
        if given is None:
            scale_type = nesting.stored_scale_type(nesting.group_max_abs(stacked, matrix.group_size))
        todo = [(rows, owner) for (place, rows), owner in zip(tasks, owners, strict=True) if place == number]
        factor = None
        if matrix.hessian is not None and any(owner == ranks.index for _, owner in todo):
            factor = inverse_factor(_ordered(matrix.hessian, matrix.permutation), options.damping)
        blocks = []
        for rows, owner in todo:
            if owner == ranks.index:
                kept = None if given is None else gptq_solver.Base(given.codes[rows], given.scale[rows])
                blocks.append(_quantize(stacked[rows], factor, matrix.group_size, scale_type, options, kept))
            elif ranks.first:
                groups = matrix.inputs // matrix.group_size
                blocks.append(Block.empty(rows.stop - rows.start, matrix.inputs, groups, scale_type))
                ranks.receive(owner, blocks[-1].tensors())
        device = stacked.device
        del stacked, given, factor
        if ranks.first:
            joined = _joined(matrix, blocks, device, options.damping)
            del blocks
            yield joined
        else:
            solved += [Block(*(tensor.cpu() for tensor in block.tensors())) for block in blocks]
    # Not before all is solved: rank 0 does not listen while it has work of its own.
    for block in solved:
        ranks.send(block.tensors())


def _blocks(matrix: Together) -> Iterator[slice]:
    step = rows_at_once(matrix.inputs, next(iter(matrix.weights.values())).device)
    for first in range(0, matrix.outputs, step):
        yield slice(first, min(first + step, matrix.outputs))


def _joined(
    matrix: Together, blocks: Sequence[Block], device: torch.device, damping: float
) -> tuple[dict[str, Codes], list[str]]:
    """The codes of each module, and remarks."""
    columns = zip(*(block.tensors()[:4] for block in blocks), strict=True)
    base, refinement, scale, clipped = (torch.cat([part.to(device) for part in column]) for column in columns)
    codes = {}
    first = 0
    for name, weight in matrix.weights.items():
        rows = slice(first, first + weight.shape[0])
        saturation = float(clipped[rows].mean())
        if matrix.bases is None:
            codes[name] = Codes(base[rows], refinement[rows], scale[rows], saturation)
        else:
            kept = matrix.bases[name]
            codes[name] = Codes(kept.codes, refinement[rows], kept.scale, saturation, kept.permutation)
        first = rows.stop
    if matrix.hessian is None:
        return codes, []
    return codes, _remarks(list(matrix.weights), float(blocks[0].damping), damping)


def alike(bases: Mapping[str, GivenBase]) -> list[dict[str, GivenBase]]:
    """Modules that can be solved as one matrix: those of one number of groups and one permutation."""
    found: list[dict[str, GivenBase]] = []
    for name, base in bases.items():
        for others in found:
            other = next(iter(others.values()))
            if base.scale.shape[1] == other.scale.shape[1] and _equal(base.permutation, other.permutation):
                others[name] = base
                break
        else:
            found.append({name: base})
    return found


def draft_codes(base: GivenBase) -> Codes:
    """A given base plane as all there is of a module."""
    return Codes(base.codes, None, base.scale, None, base.permutation)


def in_order(weight: Tensor, permutation: Tensor | None) -> Tensor:
    """The columns of `[O, I]` in stored order."""
    return weight if permutation is None else weight.index_select(1, permutation)


def _ordered(hessian: Tensor, permutation: Tensor | None) -> Tensor:
    return hessian if permutation is None else hessian[permutation][:, permutation]


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


def _stacked_bases(matrix: Together) -> gptq_solver.Base | None:
    if matrix.bases is None:
        return None
    bases = [matrix.bases[name] for name in matrix.weights]
    return gptq_solver.Base(
        torch.cat([base.codes for base in bases]), torch.cat([base.scale.float() for base in bases])
    )


def quantize_in_pieces(
    name: str,
    pieces: Callable[[], Iterator[Tensor]],
    hessian: Tensor | None,
    group_size: int,
    options: ConvertOptions,
    progress: Callable[[int], None],
    given: GivenBase | None = None,
) -> SolvedModule:
    """Quantize a module whose weight is too large to be held in float32, such as the head.

    `pieces()` gives the rows of its weight, float32 `[r, I]`, in order and always alike; it is called twice, because
    the type of the scales has to be known first. `hessian` as in `Together`; `given` is the base plane where it is to
    be kept. What is held of a finished piece are its packed planes and scales. `progress` is called with the number of
    finished pieces, from 0 on.
    """
    order = None if given is None else given.permutation
    factor = None if hessian is None else inverse_factor(_ordered(hessian, order), options.damping)
    scale_type = torch.float16
    if given is not None:
        scale_type = given.scale.dtype
    elif any(nesting.stored_scale_type(nesting.group_max_abs(rows, group_size)) == torch.float32 for rows in pieces()):
        scale_type = torch.float32
    stored: dict[str, list[Tensor]] = {BASE_SUFFIX: [], SCALE_SUFFIX: [], REFINEMENT_SUFFIX: []}
    clipped = norm = draft_error = target_error = 0.0
    outputs = inputs = 0
    for number, weight in enumerate(pieces()):
        progress(number)
        weight = in_order(weight, order)
        kept = None
        if given is not None:
            rows = slice(outputs, outputs + weight.shape[0])
            kept = gptq_solver.Base(given.codes[rows], given.scale[rows].float())
        block = _quantize(weight, factor, group_size, scale_type, options, kept)
        stored[BASE_SUFFIX].append(packing.pack(block.base).cpu())
        stored[SCALE_SUFFIX].append(block.scale.cpu())
        stored[REFINEMENT_SUFFIX].append(packing.pack(block.refinement).cpu())
        clipped += float(block.clipped.double().sum())
        norm += _squared_norm(weight)
        draft_error += _squared_norm(nesting.draft_weight(block.base, block.scale) - weight)
        target_error += _squared_norm(nesting.target_weight(block.base, block.refinement, block.scale) - weight)
        outputs, inputs = outputs + weight.shape[0], weight.shape[1]
        del block, weight
        release_freed_memory()
    planes = {f"{name}.{suffix}": torch.cat(stored.pop(suffix)) for suffix in tuple(stored)}
    if order is not None:
        planes[f"{name}.{PERMUTATION_SUFFIX}"] = order.to(torch.int32).cpu()
    refinement_name = f"{name}.{REFINEMENT_SUFFIX}"
    measured = Measured(
        clipped / outputs,
        draft_error=(draft_error / norm) ** 0.5 if norm else 0.0,
        target_error=(target_error / norm) ** 0.5 if norm else 0.0,
    )
    return SolvedModule(
        base={stored_name: tensor for stored_name, tensor in planes.items() if stored_name != refinement_name},
        refinement={refinement_name: planes[refinement_name]},
        record=module_record(name, planes, measured, shape=(outputs, inputs), group_size=group_size, bias=None),
        remarks=[] if hessian is None else _remarks([name], factor.damping if factor else math.nan, options.damping),
    )


def _quantize(
    weight: Tensor,
    factor: InverseFactor | None,
    group_size: int,
    scale_type: torch.dtype,
    options: ConvertOptions,
    kept: gptq_solver.Base | None = None,
) -> Block:
    """Both planes of some rows, float32 `[r, I]`, with scales in their stored type; the base may be given."""
    gptq = options.base == "gptq"
    base = kept or gptq_solver.solve_base(
        weight,
        factor if gptq else None,
        group_size=group_size,
        scale_type=scale_type,
        search=options.scale_search == "mse",
        bound=options.base_bound if gptq else None,
        sweeps=options.base_sweeps,
    )
    release_freed_memory()
    if options.refinement == "feedback" and factor is not None:
        solved = gptq_solver.solve_refinement(weight, factor, base.codes, base.scale, options.refinement_sweeps)
        refinement, clipped = solved.codes, solved.clipped
    else:
        refinement = nesting.encode_refinement(weight, base.codes, base.scale)
        clipped = nesting.saturated(weight, base.codes, base.scale).float().mean(dim=1)
    damping = torch.tensor([factor.damping if factor else math.nan], dtype=torch.float64)
    return Block(base.codes, refinement, base.scale.to(scale_type), clipped, damping)


def _remarks(names: list[str], needed: float, damping: float) -> list[str]:
    where = ", ".join(names)
    if math.isnan(needed):
        return [f"{where}: the Hessian could not be inverted; rounded to nearest instead"]
    if needed == damping:
        return []
    return [f"{where}: the Hessian needed damping {needed:g} (asked for {damping:g}); more calibration text may help"]


def stored_planes(name: str, codes: Codes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's tensors as they lie on disk, by name: those of the base shards, and the refinement plane."""
    base = {
        f"{name}.{BASE_SUFFIX}": packing.pack(codes.base).cpu(),
        f"{name}.{SCALE_SUFFIX}": codes.scale.cpu(),
    }
    if codes.permutation is not None:
        base[f"{name}.{PERMUTATION_SUFFIX}"] = codes.permutation.to(torch.int32).cpu()
    if codes.refinement is None:
        return base, {}
    return base, {f"{name}.{REFINEMENT_SUFFIX}": packing.pack(codes.refinement).cpu()}


@dataclass(frozen=True, slots=True)
class Measured:
    """How well a module's codes do: the share that was clipped, and relative errors of both views' weights.

    None where it is not known: of a draft alone.
    """

    saturation: float | None = None
    draft_error: float | None = None
    target_error: float | None = None


def measure(codes: Codes, weight: Tensor) -> Measured:
    """Errors of both views against `weight` float32 `[O, I]`, which is in the order of inputs."""
    assert codes.refinement is not None
    weight = in_order(weight, codes.permutation)
    return Measured(
        codes.saturation,
        draft_error=_relative_error(nesting.draft_weight(codes.base, codes.scale), weight),
        target_error=_relative_error(nesting.target_weight(codes.base, codes.refinement, codes.scale), weight),
    )


def module_record(
    name: str,
    planes: Mapping[str, Tensor],
    measured: Measured,
    *,
    shape: tuple[int, int],
    group_size: int,
    bias: str | None,
) -> Module:
    """The manifest's record, with digests of the stored `planes`."""

    def plane(suffix: str) -> Plane:
        return Plane(name=f"{name}.{suffix}", sha256=tensor_sha256(planes[f"{name}.{suffix}"]))

    permutation = f"{name}.{PERMUTATION_SUFFIX}"
    return Module(
        shape=shape,
        group_size=group_size,
        base=plane(BASE_SUFFIX),
        scale=plane(SCALE_SUFFIX),
        refinement=plane(REFINEMENT_SUFFIX) if f"{name}.{REFINEMENT_SUFFIX}" in planes else None,
        bias=bias,
        permutation=permutation if permutation in planes else None,
        saturation=_rounded(measured.saturation),
        draft_error=_rounded(measured.draft_error),
        target_error=_rounded(measured.target_error),
    )


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)


def _relative_error(rebuilt: Tensor, weight: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(weight))
    return float(torch.linalg.vector_norm(rebuilt - weight)) / norm if norm else 0.0


def _squared_norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
