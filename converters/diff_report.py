"""What a comparison found, as records and as text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

Kind = Literal["nested", "source", "packed"]

WORST_SHOWN = 10
OTHERS_SHOWN = 20


@dataclass(slots=True)
class Distance:
    """How far weights lie from others: sums that grow piece by piece. `steps` is in codes of the view."""

    squared: float = 0.0
    squared_norm: float = 0.0
    steps: float = 0.0

    def add(self, mine: Tensor, reference: Tensor, step: Tensor | None = None) -> None:
        """Count some weights, float32 of one shape; `step` is the value of one code of each of them."""
        change = mine - reference
        self.squared += float(change.double().square().sum())
        self.squared_norm += float(reference.double().square().sum())
        if step is not None and change.numel():
            self.steps = max(self.steps, float((change.abs() / step).max()))

    def join(self, other: Distance) -> None:
        self.squared += other.squared
        self.squared_norm += other.squared_norm
        self.steps = max(self.steps, other.steps)

    @property
    def relative(self) -> float:
        """Frobenius norm of the difference over that of the reference."""
        if self.squared_norm:
            return math.sqrt(self.squared / self.squared_norm)
        return math.inf if self.squared else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDiff:
    """One quantized module of A beside B.

    *_equal: whether the stored bytes are the same; None where B has no such plane.
    *_error: the relative Frobenius norm of A's view less B's weight (or B's own view), *_steps: the largest distance of
        one weight, in codes of A's view; None where they were not compared.
    saturation: the share of refinement codes that the closed form would clip, measured where B is not quantized; what
        A's manifest records elsewhere. recorded_*: what A's manifest says.
    differs: whether it counts for the exit status.
    """

    name: str
    shape: tuple[int, int]
    group_size: int
    base_equal: bool | None = None
    scale_equal: bool | None = None
    refinement_equal: bool | None = None
    draft_error: float | None = None
    target_error: float | None = None
    draft_steps: float | None = None
    target_steps: float | None = None
    saturation: float | None = None
    recorded_draft_error: float | None = None
    recorded_target_error: float | None = None
    recorded_saturation: float | None = None
    remark: str | None = None
    differs: bool = False

    @property
    def badness(self) -> float:
        """What the table for people is sorted by."""
        worst = [error for error in (self.target_error, self.draft_error) if error is not None]
        return worst[0] if worst else -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing outside the modules that differs: `place` within `where`, and what it is."""

    where: str
    place: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """A comparison of the nested checkpoint A with B. `kind` says what B is; `notes` what could not be compared."""

    a: str
    b: str
    kind: Kind
    modules: Sequence[ModuleDiff]
    entries: Sequence[Entry]
    unquantized_equal: int
    unquantized: int
    draft: Distance = field(default_factory=Distance)
    target: Distance = field(default_factory=Distance)
    notes: Sequence[str] = ()

    @property
    def differs(self) -> bool:
        return bool(self.entries) or any(module.differs for module in self.modules)

    @property
    def complete(self) -> bool:
        """Whether every module was compared, by its bytes or its weights."""
        return all(module.base_equal is not None or module.draft_error is not None for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "b_is": self.kind,
            "differs": self.differs,
            "complete": self.complete,
            "totals": {
                "modules": len(self.modules),
                **{f"{plane}_equal": self.equal(plane) for plane in ("base", "scale", "refinement")},
                "draft_error": self.draft.relative if self.compared("draft") else None,
                "target_error": self.target.relative if self.compared("target") else None,
                "saturation": self.saturation,
                "unquantized": self.unquantized,
                "unquantized_equal": self.unquantized_equal,
            },
            "modules": [{**asdict(module), "shape": list(module.shape)} for module in self.modules],
            "entries": [asdict(entry) for entry in self.entries],
            "notes": list(self.notes),
        }

    def equal(self, plane: str) -> int:
        return sum(getattr(module, f"{plane}_equal") is True for module in self.modules)

    def compared(self, view: str) -> bool:
        return any(getattr(module, f"{view}_error") is not None for module in self.modules)

    @property
    def saturation(self) -> float | None:
        """The mean over all weights."""
        known = [(m.saturation, m.shape[0] * m.shape[1]) for m in self.modules if m.saturation is not None]
        weights = sum(count for _, count in known)
        return sum(share * count for share, count in known) / weights if weights else None


def render(report: DiffReport) -> str:
    """The report for a person: totals, the worst modules, and what else differs."""
    lines = [f"{report.a}", f"{report.b}: {_KINDS[report.kind]}"]
    lines += [f"note: {note}" for note in report.notes]
    lines.append("")
    lines += [f"  {label:<22}{value}" for label, value in _totals(report)]
    compared = [module for module in report.modules if module.badness > 0]
    shown = sorted(compared, key=lambda module: -module.badness)[:WORST_SHOWN]
    if shown:
        lines += ["", *_table(shown)]
        if len(compared) > len(shown):
            lines.append(f"  and {len(compared) - len(shown)} modules that are closer: --json lists all")
    remarks = [f"{module.name}: {module.remark}" for module in report.modules if module.remark]
    others = [*remarks, *(f"{entry.where}: {entry.place}: {entry.what}" for entry in report.entries)]
    if others:
        lines += ["", *others[:OTHERS_SHOWN]]
        if len(others) > OTHERS_SHOWN:
            lines.append(f"and {len(others) - OTHERS_SHOWN} more: --json lists all")
    same = _SAME[report.kind] if report.complete else "What could be compared does not differ."
    lines += ["", "They differ." if report.differs else same]
    return "\n".join(lines)


_KINDS = {
    "nested": "a nested checkpoint",
    "source": "full precision; errors and saturation are measured against it",
    "packed": "packed weights of another format",
}
_SAME = {
    "nested": "They do not differ.",
    "source": "The checkpoint is what its manifest says, made of this model.",
    "packed": "They do not differ.",
}


def _totals(report: DiffReport) -> list[tuple[str, str]]:
    count = len(report.modules)
    rows = []
    for plane in ("base", "scale", "refinement"):
        known = sum(getattr(module, f"{plane}_equal") is not None for module in report.modules)
        if known:
            name = "scales" if plane == "scale" else f"{plane} planes"
            how = "byte for byte equal" if report.kind == "nested" else "equal"
            rows.append((name, f"{report.equal(plane)} of {known} {how}"))
    for view, distance in (("draft", report.draft), ("target", report.target)):
        if report.compared(view):
            rows.append((f"{view} error", f"{distance.relative:.4%} over all modules"))
    if report.saturation is not None:
        rows.append(("saturation", f"{report.saturation:.2%} of refinement codes"))
    rows.append(("modules", f"{count}"))
    if report.unquantized:
        rows.append(("unquantized tensors", f"{report.unquantized_equal} of {report.unquantized} equal"))
    return rows


def _table(modules: Sequence[ModuleDiff]) -> list[str]:
    width = max(len(module.name) for module in modules)
    head = f"  {'farthest modules':<{width}}  draft error  steps  target error  steps  saturation"
    rows = [
        f"  {module.name:<{width}}  {_share(module.draft_error):>11}  {_steps(module.draft_steps):>5}"
        f"  {_share(module.target_error):>12}  {_steps(module.target_steps):>5}  {_share(module.saturation):>10}"
        for module in modules
    ]
    return [head, *rows]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"


def _steps(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
