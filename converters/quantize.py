"""Both planes of linear layers that read the same input, and the manifest's record of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.checkpoint import BASE_SUFFIX, REFINEMENT_SUFFIX, SCALE_SUFFIX
from bitnest_format.converters import gptq_solver
from bitnest_format.converters.memory import release_freed_memory
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.manifest import Module, Plane
from bitnest_format.shards import tensor_sha256

# Weights that are solved at a time; about ten float32 copies of them exist meanwhile.
WEIGHTS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class SolvedModule:
    """One module's tensors as they lie on disk, by name, the manifest's record, and what went other than asked for."""

    base: dict[str, Tensor]
    refinement: dict[str, Tensor]
    record: Module
    remarks: list[str]


@dataclass(frozen=True, slots=True)
class Codes:
    """One module's int8 codes `[O, I]`, its scale `[O, G]` in its stored type, and the share of clipped codes."""

    base: Tensor
    refinement: Tensor
    scale: Tensor
    saturation: float


def quantize_together(
    weights: Mapping[str, Tensor], hessian: Tensor | None, group_size: int, options: ConvertOptions
) -> tuple[dict[str, Codes], list[str]]:
    """Quantize modules that share their input, as one matrix, and say what went other than asked for.

    `weights`: float32 `[O, I]` by module name; `hessian`: the mean `X^T X` of their input, float32 `[I, I]`, or None
    to round to nearest.
    """
    factor = None if hessian is None else gptq_solver.inverse_factor(hessian, options.damping)
    codes = {}
    stacked = torch.cat(list(weights.values()))
    scale_type = nesting.stored_scale_type(nesting.group_max_abs(stacked, group_size))
    # Rows do not see each other: taking them in parts bounds the memory and changes nothing.
    parts = [
        _quantize(rows, factor, group_size, scale_type, options)
        for rows in stacked.split(max(1, WEIGHTS_AT_ONCE // stacked.shape[1]))
    ]
    del stacked
    base, refinement, scale, clipped = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    first = 0
    for name, weight in weights.items():
        rows = slice(first, first + weight.shape[0])
        codes[name] = Codes(base[rows], refinement[rows], scale[rows], float(clipped[rows].mean()))
        first = rows.stop
    return codes, [] if hessian is None else _remarks(list(weights), factor, options.damping)


def quantize_in_pieces(
    name: str,
    pieces: Callable[[], Iterator[Tensor]],
    hessian: Tensor | None,
    group_size: int,
    options: ConvertOptions,
    progress: Callable[[int], None],
) -> SolvedModule:
    """Quantize a module whose weight is too large to be held in float32, such as the head.

    `pieces()` gives the rows of its weight, float32 `[r, I]`, in order and always alike; it is called twice, because
    the type of the scales has to be known first. `hessian` as in `quantize_together`. What is held of a finished
    piece are its packed planes and scales. `progress` is called with the number of finished pieces, from 0 on.
    """
    factor = None if hessian is None else gptq_solver.inverse_factor(hessian, options.damping)
    fits = all(
        nesting.stored_scale_type(nesting.group_max_abs(weight, group_size)) == torch.float16 for weight in pieces()
    )
    scale_type = torch.float16 if fits else torch.float32
    stored: dict[str, list[Tensor]] = {BASE_SUFFIX: [], SCALE_SUFFIX: [], REFINEMENT_SUFFIX: []}
    clipped = norm = draft_error = target_error = 0.0
    outputs = inputs = 0
    for number, weight in enumerate(pieces()):
        progress(number)
        base, refinement, scale, clipped_rows = _quantize(weight, factor, group_size, scale_type, options)
        stored[BASE_SUFFIX].append(packing.pack(base).cpu())
        stored[SCALE_SUFFIX].append(scale.cpu())
        stored[REFINEMENT_SUFFIX].append(packing.pack(refinement).cpu())
        clipped += float(clipped_rows.double().sum())
        norm += _squared_norm(weight)
        draft_error += _squared_norm(nesting.draft_weight(base, scale) - weight)
        target_error += _squared_norm(nesting.target_weight(base, refinement, scale) - weight)
        outputs, inputs = outputs + weight.shape[0], weight.shape[1]
        del base, refinement, scale, weight
        release_freed_memory()
    planes = {f"{name}.{suffix}": torch.cat(stored.pop(suffix)) for suffix in tuple(stored)}
    refinement_name = f"{name}.{REFINEMENT_SUFFIX}"
    return SolvedModule(
        base={stored_name: tensor for stored_name, tensor in planes.items() if stored_name != refinement_name},
        refinement={refinement_name: planes[refinement_name]},
        record=_record(
            name,
            planes,
            shape=(outputs, inputs),
            group_size=group_size,
            bias=None,
            saturation=clipped / outputs,
            draft_error=(draft_error / norm) ** 0.5 if norm else 0.0,
            target_error=(target_error / norm) ** 0.5 if norm else 0.0,
        ),
        remarks=[] if hessian is None else _remarks([name], factor, options.damping),
    )


def _quantize(
    weight: Tensor,
    factor: gptq_solver.InverseFactor | None,
    group_size: int,
    scale_type: torch.dtype,
    options: ConvertOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Base codes, refinement codes, scales in their stored type, and each row's share of clipped codes."""
    gptq = options.base == "gptq"
    base = gptq_solver.solve_base(
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
    return base.codes, refinement, base.scale.to(scale_type), clipped


def _remarks(names: list[str], factor: gptq_solver.InverseFactor | None, damping: float) -> list[str]:
    where = ", ".join(names)
    if factor is None:
        return [f"{where}: the Hessian could not be inverted; rounded to nearest instead"]
    if factor.damping == damping:
        return []
    return [
        f"{where}: the Hessian needed damping {factor.damping:g} (asked for {damping:g}); "
        "more calibration text may help"
    ]


def stored_planes(name: str, codes: Codes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's tensors as they lie on disk, by name: those of the base shards, and the refinement plane."""
    base = {
        f"{name}.{BASE_SUFFIX}": packing.pack(codes.base).cpu(),
        f"{name}.{SCALE_SUFFIX}": codes.scale.cpu(),
    }
    return base, {f"{name}.{REFINEMENT_SUFFIX}": packing.pack(codes.refinement).cpu()}


def module_record(
    name: str, codes: Codes, weight: Tensor, planes: Mapping[str, Tensor], *, group_size: int, bias: str | None
) -> Module:
    """The manifest's record: digests of the stored `planes`, and errors against `weight` float32 `[O, I]`."""
    return _record(
        name,
        planes,
        shape=(weight.shape[0], weight.shape[1]),
        group_size=group_size,
        bias=bias,
        saturation=codes.saturation,
        draft_error=_relative_error(nesting.draft_weight(codes.base, codes.scale), weight),
        target_error=_relative_error(nesting.target_weight(codes.base, codes.refinement, codes.scale), weight),
    )


def _record(
    name: str,
    planes: Mapping[str, Tensor],
    *,
    shape: tuple[int, int],
    group_size: int,
    bias: str | None,
    saturation: float,
    draft_error: float,
    target_error: float,
) -> Module:
    def plane(suffix: str) -> Plane:
        return Plane(name=f"{name}.{suffix}", sha256=tensor_sha256(planes[f"{name}.{suffix}"]))

    return Module(
        shape=shape,
        group_size=group_size,
        base=plane(BASE_SUFFIX),
        scale=plane(SCALE_SUFFIX),
        refinement=plane(REFINEMENT_SUFFIX),
        bias=bias,
        saturation=round(saturation, 6),
        draft_error=round(draft_error, 6),
        target_error=round(target_error, 6),
    )


def _relative_error(rebuilt: Tensor, weight: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(weight))
    return float(torch.linalg.vector_norm(rebuilt - weight)) / norm if norm else 0.0


def _squared_norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
