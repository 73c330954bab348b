"""Output appears whole or not at all, and what the system refuses becomes one message."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from MaxText.errors import ConfigError, StorageError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end, or nothing if anything fails.

    Raises:
      ConfigError: "convert.not-empty". StorageError: "convert.not-written".
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} is there already and not empty; choose another name. [convert.not-empty]", id="convert.not-empty"
        )
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    with writing(out, partial):
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)


@contextlib.contextmanager
def writing(out: Path, partial: Path | None = None) -> Iterator[None]:
    """Whatever fails inside, `partial` is removed. Raises StorageError "convert.not-written" for an OSError."""
    try:
        yield
    except BaseException as error:
        _remove(partial)
        if not isinstance(error, OSError):
            raise
        raise StorageError(
            f"{out} cannot be written: {error.strerror or error}. Nothing was left. [convert.not-written]",
            id="convert.not-written",
        ) from error


def _remove(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
