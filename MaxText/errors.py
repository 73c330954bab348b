"""The errors that people meet: each has an id that tests and scripts match, and a family that sets the exit code.

A message says what is wrong, where, both numbers, and what to type. `main` prints it without a traceback.
"""

from __future__ import annotations


class MaxTextError(Exception):
    """A condition that a person can act on. `id` is stable across versions; the wording is not."""

    exit_code = 1

    def __init__(self, message: str, *, id: str):
        super().__init__(message)
        self.id = id


class ConfigError(MaxTextError):
    """The configuration is wrong; nothing was started or written."""

    exit_code = 2


class PlanError(MaxTextError):
    """The configuration is well-formed but cannot run on this hardware (mesh, divisibility, memory)."""

    exit_code = 3


class DataError(MaxTextError):
    """A data source or tokenizer is missing, damaged, or does not fit the model."""

    exit_code = 4


class DataExhausted(MaxTextError):
    """The data ends before `steps`."""

    exit_code = 5


class NonFiniteError(MaxTextError):
    """Loss or gradient became NaN or infinite."""

    exit_code = 6


class StorageError(MaxTextError):
    """Something could not be written or read back: disk full, no permission, a damaged or unfit checkpoint."""

    exit_code = 7


class Preempted(MaxTextError):
    """Stopped by a signal after saving; the same command continues the run."""

    exit_code = 75


class PeerLost(MaxTextError):
    """Another process of this run ended or does not answer."""

    exit_code = 77
