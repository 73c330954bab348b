"""A progress bar on terminals, a line now and then on pipes."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

_PERIOD = 10.0  # seconds between lines on a pipe


class Progress:
    """A context manager around `total` bytes of work, `done` of which were there before."""

    def __init__(self, what: str, total: int, done: int = 0):
        self._what, self._total, self._done = what, max(total, 1), done
        self._bar: Any = None
        self._task: Any = None
        self._begin = self._said = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                       TimeRemainingColumn())  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def add(self, size: int) -> None:
        self._done += size
        if self._bar:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._said > _PERIOD:
            self._said = time.monotonic()
            print(f"{self._what}: {self._done:,} of {self._total:,} bytes", file=sys.stderr, flush=True)
