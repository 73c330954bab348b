"""Named places at which a test may end this process as a power failure would: at once, with nothing flushed; or at
which the disk may refuse.

MAXTEXT_FAULT=NAME ends it when it first comes to NAME, MAXTEXT_FAULT=NAME:3 the third time. MAXTEXT_FAULT=NAME=ENOSPC
raises that OSError there instead. Without the variable a place costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

SAVE = ("save.begun", "save.folder", "save.state", "save.surveyed")
MANIFEST = ("save.manifest-temporary", "save.manifest", "prune.manifest", "prune.done")
TOGETHER = ("save.together-begun", "save.together-folder", "save.together-pieces", "save.together-files")
LOCAL = ("local.begun", "local.pieces", "local.copies", "local.manifest", "local.pruned", "local.restore")
RUN = (
    "data.batch",
    "step.dispatched",
    "metrics.written",
    "eval.batch",
    "restore.begun",
    "restore.read",
    "restore.done",
    "finish.begun",
    "finish.saved",
)
POINTS = (*RUN, *SAVE, *MANIFEST, *TOGETHER, *LOCAL)
_PLAN = os.environ.get("MAXTEXT_FAULT", "")
_hits: Counter[str] = Counter()


def point(name: str) -> None:
    """A place that the process has come to; one of POINTS. Raises OSError where the plan says so."""
    if _PLAN:
        _hit(name)


def _hit(name: str) -> None:
    assert name in POINTS, name
    place, _, refusal = _PLAN.partition("=")
    wanted, _, count = place.partition(":")
    _hits[name] += 1
    if name != wanted or _hits[name] != int(count or 1):
        return
    if refusal:
        number = getattr(errno, refusal)
        raise OSError(number, os.strerror(number), name)
    os.kill(os.getpid(), signal.SIGKILL)
