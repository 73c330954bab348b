"""Named places at which a test may end this process as a power failure would: at once, with nothing flushed.

MAXTEXT_FAULT=NAME ends it when it first comes to NAME, MAXTEXT_FAULT=NAME:3 the third time. Without the variable a
place costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

POINTS = (
    "data.batch",
    "step.dispatched",
    "metrics.written",
    "eval.batch",
    "save.begun",
    "save.folder",
    "save.state",
    "save.surveyed",
    "save.manifest-temporary",
    "save.manifest",
    "prune.manifest",
    "prune.done",
    "restore.begun",
    "restore.read",
    "restore.done",
    "finish.saved",
)
_PLAN = os.environ.get("MAXTEXT_FAULT", "")
_hits: Counter[str] = Counter()


def point(name: str) -> None:
    """A place that the process has come to; one of POINTS."""
    if _PLAN:
        _hit(name)


def _hit(name: str) -> None:
    assert name in POINTS, name
    wanted, _, count = _PLAN.partition(":")
    _hits[name] += 1
    if name == wanted and _hits[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
