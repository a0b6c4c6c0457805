"""Progress of long work, on stderr: a bar with the time left on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_INTERVAL_SECONDS = 10.0
# The pace is that of the last few calls: what a resumed run skips says nothing about what is left.
PACE_CALLS = 8


class StageProgress:
    """A context manager whose instance is called as `progress(stage, done, total)`.

    A new stage name starts a new line; `total` may be 1 for work that cannot be counted. Nothing is drawn before
    the first call.
    """

    def __init__(self) -> None:
        self._bars = _bars() if sys.stderr.isatty() else None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._printed = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=PACE_CALLS)

    def __enter__(self) -> StageProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            self._draw(self._bars, stage, done, total)
        else:
            self._print(stage, done, total)

    def _draw(self, bars: Progress, stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._task is None:
            self._finish(bars)
            self._stage, self._task = stage, bars.add_task(stage, total=total)
        bars.update(self._task, completed=done, total=total)

    def _finish(self, bars: Progress) -> None:
        """A stage that gave way to the next one is over, whether or not it said so."""
        if self._task is not None:
            bars.update(self._task, completed=bars.tasks[self._task].total)

    def _print(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        recent = stage == self._stage and now - self._printed < PLAIN_INTERVAL_SECONDS
        if stage != self._stage:
            self._stage = stage
            self._seen.clear()
        elif total == 1:
            return
        self._seen.append((now, done))
        if recent and done < total:
            return
        self._printed = now
        line = stage if total <= 1 else f"{stage}: {done}/{total}"
        began, first = self._seen[0]
        left = time_left(done - first, total - done, now - began)
        if left is not None:
            line += f", about {format_seconds(left)} left"
        print(line, file=sys.stderr, flush=True)


def time_left(done: int, remaining: int, elapsed: float) -> float | None:
    """Seconds until `remaining` more units are done, at the pace so far; None where that says nothing."""
    return elapsed / done * remaining if done > 0 and remaining > 0 else None


def format_seconds(seconds: float) -> str:
    """`75` -> `1:15`, `3700` -> `1:01:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bars() -> Progress:
    return Progress(
        SpinnerColumn(finished_text="*"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
