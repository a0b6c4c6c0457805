"""Progress on stderr: plain lines where there is no terminal, a bar with the time left where there is one."""

from __future__ import annotations

import sys

import pytest

from bitnest_format import progress
from bitnest_format.progress import StageProgress, format_seconds, time_left


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move by hand: `clock.now += seconds`."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    hand = Clock()
    monkeypatch.setattr(progress, "time", hand)
    return hand


def test_plain_lines_come_at_intervals_and_say_what_is_left(clock, capsys):
    with StageProgress() as report:
        report("checking", 0, 1)
        report("quantizing", 0, 30)
        for done in range(1, 31):
            clock.now += 4
            report("quantizing", done, 30)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "checking",
        "quantizing: 0/30",
        "quantizing: 3/30, about 1:48 left",
        *[f"quantizing: {done}/30, about {format_seconds(4 * (30 - done))} left" for done in range(6, 30, 3)],
        "quantizing: 30/30",
    ]


def test_what_a_resumed_run_skips_does_not_count(clock, capsys):
    report = StageProgress()
    for done in range(30):
        clock.now += 0.01 if done <= 10 else 10
        report("quantizing", done, 40)
    assert capsys.readouterr().err.splitlines()[-1] == "quantizing: 29/40, about 1:50 left"


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with StageProgress() as report:
        report("checking", 0, 1)
        report("quantizing", 3, 30)
        report("writing", 1, 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "30/30" in err
    assert "left" in err


@pytest.mark.parametrize(
    ("done", "remaining", "elapsed", "expected"), [(0, 5, 3.0, None), (5, 0, 3.0, None), (2, 6, 3.0, 9.0)]
)
def test_time_left(done, remaining, elapsed, expected):
    assert time_left(done, remaining, elapsed) == expected


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.4, "1:15"), (3700, "1:01:40")])
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text
