"""Ctrl-C and SIGTERM before anything has begun: a word and an exit code, at any moment of the imports.

Python's own answer to Ctrl-C is an exception out of whatever runs just then, and inside an import that is a traceback,
or another exception in its place. Imports nothing of this program."""

from __future__ import annotations

import os
import signal
from types import FrameType


def install() -> None:
    """Until `runtime.Signals` takes over. What the parent process has told this one to ignore stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    """Nothing is under way: before the walk nothing is written, and after it everything is."""
    os.write(2, b"interrupted while no step was under way; nothing is lost.\n")
    os._exit(130 if number == signal.SIGINT else 75)
