"""The choices of a conversion, checked once, before anything is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bitnest_format.checkpoint import DEFAULT_SHARD_BYTES
from bitnest_format.errors import UsageError

Base = Literal["gptq", "rtn"]
Refinement = Literal["closed", "feedback"]
ScaleSearch = Literal["mse", "max"]

ROTATIONS = ("none", "random", "hadamard", "learn", "folded")
SAFETENSORS = ".safetensors"
FALLBACK_GROUP_SIZES = (64, 32)
PER_ROW = -1
DEFAULT_ROTATION = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How to build both planes. The defaults were chosen by `benchmarks/frontier.py`.

    rotation: `none`, `random`, `hadamard`, `learn`, `spinquant:FILE`, or `folded` for a source that came rotated. None
        is `random`, or `none` where the source brings base planes, which a rotation would change.
    learn_steps, learn_rate: steps of learning, and how far the first of them turns along a gradient.
    save_rotation: a file to write R1 and R2 to, as `spinquant:FILE` reads it.
    group_size: inputs per scale. None prefers 128 and falls back per module to 64 or 32 where that does not
        divide; a number is forced everywhere; -1 is one group per row.
    base: how `q4` is found; base_bound: largest distance in steps between a weight and its base code, or None.
    scale_search: `mse` tries shrink factors per group, `max` takes `max|w| / 7`.
    refinement: `closed` (the paper's Eq. 9) or `feedback` (error feedback on the refinement codes).
    base_sweeps, refinement_sweeps: passes of coordinate descent after error feedback; base passes refit the scales.
    damping: share of the Hessian's mean diagonal that is added to it.
    quantize_lm_head: nest the head too, apart from an embedding it is tied to.
    calibration: `builtin` or a path to text, JSONL or parquet; tokens = samples * sequence_length.
    """

    rotation: str | None = None
    learn_steps: int = 100
    learn_rate: float = 1.5
    save_rotation: Path | None = None
    group_size: int | None = None
    base: Base = "gptq"
    base_bound: float | None = 0.8
    scale_search: ScaleSearch = "mse"
    base_sweeps: int = 3
    refinement: Refinement = "feedback"
    refinement_sweeps: int = 3
    damping: float = 0.01
    quantize_lm_head: bool = False
    calibration: str = "builtin"
    calibration_samples: int = 64
    sequence_length: int = 512
    seed: int = 0
    shard_bytes: int = DEFAULT_SHARD_BYTES
    device: str = "cpu"
    ignore_unknown_tensors: bool = False

    def __post_init__(self) -> None:
        kind, _, file = (self.rotation or DEFAULT_ROTATION).partition(":")
        if kind not in (*ROTATIONS, "spinquant") or (kind == "spinquant") != bool(file):
            raise UsageError(
                f"--rotation is {self.rotation!r}, expected one of {', '.join(ROTATIONS)} or spinquant:FILE"
            )
        if self.save_rotation is not None and not self.rotates:
            raise UsageError(f"--save-rotation: with --rotation {self.rotation} there is no rotation to save")
        if self.save_rotation is not None and self.save_rotation.suffix != SAFETENSORS:
            raise UsageError(f"--save-rotation is {str(self.save_rotation)!r}, expected a name ending in {SAFETENSORS}")
        for name, allowed in (("base", Base), ("refinement", Refinement), ("scale_search", ScaleSearch)):
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)!r}, expected one of "
                    f"{', '.join(get_args(allowed))}"
                )
        size = self.group_size
        if size is not None and size != PER_ROW and (size < 8 or size % 8 or size > 1024):
            raise UsageError(
                f"--group-size is {size}, expected -1 (one group per row) or a multiple of 8 from 8 to 1024; "
                "leave it out for 128 with 64 and 32 as fallbacks"
            )
        if self.base_bound is not None and self.base_bound < 0.5:
            raise UsageError(f"--base-bound is {self.base_bound}, expected at least 0.5 steps (or 'none')")
        if not 0 < self.learn_rate < float("inf"):
            raise UsageError(f"--learn-rate is {self.learn_rate}, expected a number above 0")
        for name in ("base_sweeps", "refinement_sweeps"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected 0 or more")
        if not 0 < self.damping <= 1:
            raise UsageError(f"--damping is {self.damping}, expected a share of the mean diagonal in (0, 1]")
        for name in ("calibration_samples", "sequence_length", "shard_bytes", "learn_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected at least 1")

    @classmethod
    def paper(cls, **changes: Any) -> ConvertOptions:
        """The construction of arXiv 2610.02800: plain GPTQ base, closed-form refinement."""
        return cls(**{"base_bound": None, "base_sweeps": 0, "refinement": "closed", **changes})

    @property
    def needs_hessians(self) -> bool:
        """Whether either plane is found by error feedback."""
        return self.base == "gptq" or self.refinement == "feedback"

    @property
    def needs_calibration(self) -> bool:
        """Whether a text is needed: for error feedback, or to learn on; rounding alone needs none."""
        return self.needs_hessians or self.learns

    @property
    def learns(self) -> bool:
        return self.rotation_kind == "learn"

    @property
    def rotates(self) -> bool:
        """Whether the weights are turned by the conversion."""
        return self.rotation_kind not in ("none", "folded")

    @property
    def rotation_kind(self) -> str:
        return (self.rotation or DEFAULT_ROTATION).partition(":")[0]

    @property
    def rotation_file(self) -> Path | None:
        file = (self.rotation or DEFAULT_ROTATION).partition(":")[2]
        return Path(file) if file else None

    def fingerprint_fields(self) -> dict[str, Any]:
        """The options that change the result, for the fingerprint that guards `--resume`."""
        fields = asdict(self)
        del fields["calibration"], fields["rotation"], fields["save_rotation"]
        if not self.learns:
            del fields["learn_steps"], fields["learn_rate"]
        return {**fields, "rotation_kind": self.rotation_kind}
