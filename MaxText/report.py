"""What a run says when it ends: pure functions from values to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText import goodput

BAD_SHOWN = 20  # documents that could not be read, by name

LABELS = {
    "startup": "start-up",
    "compile": "compile",
    "restore": "restore",
    "data_wait": "data wait",
    "step": "step",
    "eval": "eval",
    "save": "save stall",
    "sample": "sample",
    "rest": "rest",
}


def summary(report: goodput.Report, *, attempt: int | None = None, files: Mapping[str, Any] | None = None) -> str:
    """Return the block for the end of a run: where the time of one attempt went, the goodput of all, the files.

    Args:
      attempt: its number; None: the last one.
      files: what lies where, as shown: {"checkpoint": path, ...}.
    """
    if not report.attempts:
        return "no time was recorded"
    chosen = next((one for one in report.attempts if one.number == attempt), report.attempts[-1])
    blocks = [wall_clock(chosen), goodput.summary(report), locations(files or {})]
    return "\n".join(filter(None, blocks))


def data(summary: Mapping[str, Any], bad: Sequence[tuple[str, str]] = ()) -> str:
    """Return what became of the data: one line, one for each part of a mixture, and the documents that were no use.

    Args:
      summary: of `data.Dataset.summary`.
      bad: name and fault of documents that could not be read.
    """
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in summary["dropped"].items()) or "none"
    lines = [
        f"data: {summary['rows']:,} rows, {summary['tokens']:,} tokens trained on, {summary['padding']:,} slots of "
        f"padding; {summary['epochs']:.2f} epochs, {summary['rows_repeated']:,} rows repeated, "
        f"{summary['rows_unseen']:,} not seen; documents dropped: {dropped}"
    ]
    parts: Mapping[str, tuple[int, float]] = summary.get("parts", {})
    lines += [f"  {name}: {rows:,} rows, {epochs:.2f} epochs" for name, (rows, epochs) in parts.items()]
    lines += [f"  left out: {name} {fault}" for name, fault in bad[:BAD_SHOWN]]
    return "\n".join(lines + ([f"  and {len(bad) - BAD_SHOWN} more"] if len(bad) > BAD_SHOWN else []))


def wall_clock(attempt: goodput.Attempt) -> str:
    """Return one line per activity with its seconds and its share of the attempt; the lines add up to the last."""
    wall = attempt.wall_us
    rows = [(label, attempt.us.get(kind, 0)) for kind, label in LABELS.items()]
    rows.append(("unaccounted", attempt.unaccounted_us))
    shown = [row for row in rows if row[1]]
    return "\n".join(_row(label, us, wall) for label, us in [*shown, ("wall clock", wall)])


def locations(files: Mapping[str, Any]) -> str:
    """Return a line for each file."""
    width = max(map(len, files), default=0)
    return "\n".join(f"{name:<{width}}  {path}" for name, path in files.items())


def _row(label: str, us: int, wall: int) -> str:
    share = 100 * us / wall if wall else 0.0
    return f"{label:<12}{us / 1e6:>12.3f} s {share:>6.1f} %"
