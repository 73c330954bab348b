"""Every second of a run accounted for, across restarts, from one append-only local file.

At each moment exactly one *activity* is current, so the intervals partition the time of an attempt:

    wall  = sum over attempts of (sum of activities + unaccounted) + downtime between attempts
    rework = time of those steps that a later attempt ran again
    goodput = (step - rework) / wall

All times are whole microseconds, so these are equalities. Time comes from the monotonic clock, which nobody can set;
the wall clock is read once per attempt, to date it. Where two attempts ran within one boot of the machine the downtime
between them comes from the monotonic clock as well, otherwise from the wall clock, and counts as 0 if that went back.

The file holds one JSON object per line:

    {"event": "start", "attempt": 1, "wall_us": …, "monotonic_us": …, "boot": "…", "age_us": …}
    {"attempt": 1, "from_us": 0, "to_us": 1200000, "us": {"step": 1100000, "data_wait": 100000}, "steps": [0, 9]}
    {"event": "finish", "attempt": 1, "at_us": …, "reason": "done"}

`from_us` and `to_us` count from the start of the attempt's process. A window is at most about a second of small
activities (`step`, `data_wait`), or ends where another activity begins. Steps inside a window count as equally long.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from MaxText.errors import StorageError

FILE = "goodput.jsonl"  # in the run folder
KINDS = ("startup", "compile", "data_wait", "step", "eval", "save", "restore", "sample", "rest")
_FREQUENT = frozenset({"step", "data_wait"})
_FLUSH_US = 1_000_000
_KEEP_LINES = 10_000  # while the disk refuses them


def _boot_id() -> str:
    """Name of this boot of the machine: monotonic times of different processes compare only within one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Clock:
    """The three readings that the ledger takes; tests give their own."""

    monotonic_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000
    boot: Callable[[], str] = _boot_id


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Ledger:
    """Writes one attempt. A failure to write never stops the run: it is told once, and stands in `failure`.

    What is not on disk yet (at most a second of steps, or the current activity) is lost to a kill -9, and then counts
    as downtime.
    """

    def __init__(
        self, path: Path, clock: Clock | None = None, *, age: float = 0.0, warn: Callable[[str], None] = _warn
    ) -> None:
        """Open the ledger at `path` (created if absent) and enter "startup".

        Args:
          age: seconds that the process had lived before this call; they count as start-up.
          warn: called with a sentence when writing fails for the first time.
        """
        self.path = path
        self.failure: str | None = None
        self._clock = clock or Clock()
        self._warn = warn
        self._lines: list[str] = []
        self._file: int | None = None
        self._finished = False
        self._kind = "startup"
        self._us: Counter[str] = Counter()
        self._steps: list[int] = []
        age_us = round(age * 1e6)
        self._origin = self._clock.monotonic_us() - age_us
        self._window = self._since = 0
        self.attempt = self._open() + 1
        self._put(
            event="start",
            wall_us=self._clock.wall_us() - age_us,
            monotonic_us=self._origin,
            boot=self._clock.boot(),
            age_us=age_us,
        )
        self._flush()

    def enter(self, kind: str) -> None:
        """End the current activity and begin `kind`, one of KINDS. Costs microseconds; rare kinds reach the disk."""
        assert kind in KINDS, kind
        now = self._charge()
        rare = kind not in _FREQUENT or self._kind not in _FREQUENT
        self._kind = kind
        if rare or now - self._window >= _FLUSH_US:
            self._close_window(now)

    def step(self, step: int) -> None:
        """Count `step`, whose time is charged to the current window."""
        if self._steps:
            self._steps[1] = step
        else:
            self._steps = [step, step]

    def finish(self, reason: str) -> None:
        """Write the rest and why the attempt ended; safe to call again (the first reason stands)."""
        if self._finished:
            return
        self._finished = True
        now = self._charge()
        self._close_window(now)
        self._put(event="finish", at_us=now, reason=reason)
        self._flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _charge(self) -> int:
        now = self._clock.monotonic_us() - self._origin
        self._us[self._kind] += now - self._since
        self._since = now
        return now

    def _close_window(self, now: int) -> None:
        spent = {kind: us for kind, us in self._us.items() if us}
        if spent or self._steps:
            steps = {"steps": self._steps} if self._steps else {}
            self._put(from_us=self._window, to_us=now, us=spent, **steps)
        self._us.clear()
        self._steps = []
        self._window = now
        self._flush()

    def _put(self, **record: Any) -> None:
        event = {"event": record.pop("event")} if "event" in record else {}
        if len(self._lines) < _KEEP_LINES:
            self._lines.append(json.dumps({**event, "attempt": self.attempt, **record}))

    def _open(self) -> int:
        """Open the file for appending; return the number of attempts in it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with open(self.path, "rb") as file:
                content = file.read()
        except OSError as error:
            self._fail(error)
            return 0
        if content and not content.endswith(b"\n"):  # torn by a kill: keep it apart from our first line
            self._lines.append("")
        return content.count(b'{"event": "start"')

    def _flush(self) -> None:
        """Append what is waiting; after a failure it waits for the next try."""
        if not self._lines or self._file is None:
            return
        data = "".join(f"{line}\n" for line in self._lines).encode()
        try:
            written = os.write(self._file, data)
        except OSError as error:
            self._fail(error)
            return
        self._lines.clear()
        if written < len(data):  # the disk filled up on the way: the rest of the torn line is its own, damaged, line
            torn = data[written:].decode(errors="replace").splitlines()
            self._lines.extend(["", *torn[1:]])
            self._fail(OSError(f"wrote {written} of {len(data)} bytes"))

    def _fail(self, error: OSError) -> None:
        first = self.failure is None
        self.failure = f"the goodput ledger {self.path} cannot be written: {error}"
        if first:
            self._warn(f"warning: {self.failure}. The run continues; its goodput report will have a hole.")


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One process of the run. Times are whole microseconds; `steps` are inclusive (first, last), None without any."""

    number: int
    began_us: int
    """wall clock at the start of the process, microseconds since 1970"""
    us: Mapping[str, int]
    """time per activity"""
    unaccounted_us: int
    rework_us: int
    downtime_us: int
    """between the end of the attempt before and the start of this one; holds what a kill kept off the disk"""
    steps: tuple[int, int] | None
    reason: str | None
    """why it ended; None: it was killed, or still runs"""

    @property
    def wall_us(self) -> int:
        """All time of the process that the ledger knows of."""
        return sum(self.us.values()) + self.unaccounted_us


@dataclass(frozen=True)
class Report:
    """All attempts of a run. `wall_us` equals the sum of `us`, `unaccounted_us` and `downtime_us` exactly."""

    attempts: tuple[Attempt, ...]
    damaged_lines: int = 0

    @property
    def us(self) -> dict[str, int]:
        """Time per activity over all attempts, every kind present."""
        return {kind: sum(attempt.us.get(kind, 0) for attempt in self.attempts) for kind in KINDS}

    @property
    def unaccounted_us(self) -> int:
        return sum(attempt.unaccounted_us for attempt in self.attempts)

    @property
    def downtime_us(self) -> int:
        return sum(attempt.downtime_us for attempt in self.attempts)

    @property
    def rework_us(self) -> int:
        """The part of `us["step"]` that was lost and done again."""
        return sum(attempt.rework_us for attempt in self.attempts)

    @property
    def wall_us(self) -> int:
        return sum(attempt.wall_us for attempt in self.attempts) + self.downtime_us

    @property
    def goodput(self) -> float:
        """(step - rework) / wall, from 0 to 1."""
        return (self.us["step"] - self.rework_us) / self.wall_us if self.wall_us else 0.0


@dataclass
class _Raw:
    start: dict[str, Any]
    windows: list[dict[str, Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None

    @property
    def end_us(self) -> int:
        ends = [window["to_us"] for window in self.windows]
        return max([*ends, self.finish["at_us"] if self.finish else 0, self.start["age_us"]])

    @property
    def steps(self) -> tuple[int, int] | None:
        spans = [window["steps"] for window in self.windows if "steps" in window]
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None

    def rework_us(self, resumed: int) -> int:
        """Step time of the steps from `resumed` on."""
        return sum(_share_from(window, resumed) for window in self.windows if "steps" in window)


def _share_from(window: dict[str, Any], resumed: int) -> int:
    low, high = window["steps"]
    again = max(0, high - max(low, resumed) + 1)
    return window["us"].get("step", 0) * again // (high - low + 1)


def read(path: Path) -> Report:
    """Read the ledger at `path`, a file or a run folder. Lines torn by a kill or a full disk are counted, not fatal.

    Raises:
      StorageError: there is no ledger to read ("goodput.unreadable").
    """
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StorageError(
            f"no goodput ledger can be read at {path}: {error.strerror}", id="goodput.unreadable"
        ) from error
    raws, damaged = _parse(lines)
    attempts: list[Attempt] = []
    for index, raw in enumerate(raws):
        later = [other.steps[0] for other in raws[index + 1 :] if other.steps]
        down = _downtime(raws[index - 1], raw) if index else 0
        attempt = _attempt(raw, down)
        attempts.append(replace(attempt, rework_us=raw.rework_us(min(later))) if later else attempt)
    return Report(tuple(attempts), damaged)


def _parse(lines: Iterable[bytes]) -> tuple[list[_Raw], int]:
    raws: dict[int, _Raw] = {}
    damaged = 0
    for line in filter(None, lines):
        try:
            record = json.loads(line)
            number = record["attempt"]
            if record.get("event") == "start":
                raws[number] = _Raw(record)
            elif record.get("event") == "finish":
                raws[number].finish = record
            else:
                raws[number].windows.append(_window(record))
        except (ValueError, KeyError, TypeError):
            damaged += 1
    return [raws[number] for number in sorted(raws)], damaged


def _window(record: dict[str, Any]) -> dict[str, Any]:
    """Return `record` if it can be added up; otherwise raise ValueError, KeyError or TypeError."""
    if not 0 <= sum(record["us"].values()) <= record["to_us"] - record["from_us"]:
        raise ValueError("activities last longer than their window")
    return record


def _attempt(raw: _Raw, downtime_us: int) -> Attempt:
    us: Counter[str] = Counter()
    for window in raw.windows:
        us.update(window["us"])
    return Attempt(
        number=raw.start["attempt"],
        began_us=raw.start["wall_us"],
        us=dict(us),
        unaccounted_us=raw.end_us - us.total(),
        rework_us=0,
        downtime_us=downtime_us,
        steps=raw.steps,
        reason=raw.finish["reason"] if raw.finish else None,
    )


def _downtime(before: _Raw, after: _Raw) -> int:
    same_boot = before.start["boot"] and before.start["boot"] == after.start["boot"]
    clock = "monotonic_us" if same_boot else "wall_us"
    return max(0, after.start[clock] - before.start[clock] - before.end_us)


# --- printing --------------------------------------------------------------------------------------------------------


def format(report: Report) -> str:
    """Return the report as a table of plain text."""
    wall = report.wall_us
    rework = report.rework_us
    us = report.us
    rows = [
        ("step, kept", us.pop("step") - rework),
        ("step, done again later (rework)", rework),
        *((kind, spent) for kind, spent in us.items() if spent),
        ("between attempts", report.downtime_us),
        ("unaccounted", report.unaccounted_us),
        ("wall", wall),
    ]
    lines = [f"{name:<34}{spent / 1e6:>12.3f} s {_percent(spent, wall):>7}" for name, spent in rows]
    lines.insert(-1, "-" * len(lines[0]))
    lines.append(f"goodput {100 * report.goodput:.1f} % over {_attempts(len(report.attempts))}")
    if report.damaged_lines:
        lines.append(f"{report.damaged_lines} damaged lines of the ledger were left out")
    return "\n".join(["", *map(_describe, report.attempts), "", *lines]).strip("\n")


def summary(report: Report) -> str:
    """Return the report in one line."""
    lost = (report.rework_us + report.downtime_us) / 1e6
    return (
        f"goodput {100 * report.goodput:.1f} % of {report.wall_us / 1e6:.1f} s "
        f"in {_attempts(len(report.attempts))}; {lost:.1f} s lost to rework and downtime"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _attempts(count: int) -> str:
    return f"{count} attempt" + "s" * (count != 1)


def _describe(attempt: Attempt) -> str:
    began = datetime.fromtimestamp(attempt.began_us / 1e6).isoformat(sep=" ", timespec="seconds")
    steps = f"steps {attempt.steps[0]} to {attempt.steps[1]}" if attempt.steps else "no steps"
    reason = attempt.reason or "killed, or still running"
    return f"attempt {attempt.number}  {began}  {attempt.wall_us / 1e6:>10.1f} s  {steps}  ({reason})"
