"""The folder of checkpoints as the file system sees it: its lock, its room, and what it says when it refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from MaxText.errors import StorageError


def lock(folder: Path) -> IO[str]:
    """Lock `folder` for this process, or say who has it. File systems without locks are let pass."""
    import fcntl

    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(open(folder / ".lock", "a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StorageError(
                f"another process ({lock.read().strip() or 'unknown'}) is writing checkpoints to {folder}. "
                "Wait for it, end it, or use another run_name.",
                id="checkpoint.in-use",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        undo.pop_all()  # held until the store closes
        return lock


def cause(error: Exception) -> str:
    """What the system said, or the kind and first line of what a library said."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]


def require_room(folder: Path, nbytes: int) -> None:
    """Refuse at once what cannot fit, instead of filling the disk first. Some network file systems report no size."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "an unknown number"


@contextlib.contextmanager
def writing(folder: Path, step: int | None = None, nbytes: int = 0) -> Iterator[None]:
    """Turn what goes wrong while `step` is written to `folder` into a StorageError with the numbers."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if step is None:
            raise StorageError(
                f"checkpoints cannot be written to {folder}: {cause(error)}. "
                "Set base_output_directory to a place that can, or enable_checkpointing=false.",
                id="checkpoint.not-writable",
            ) from error
        raise StorageError(
            f"checkpoint {folder / str(step)} was not saved: {cause(error)}. "
            f"It needs {nbytes:,} bytes; {free(folder)} are free. "
            "Make room and start again: the run resumes from the newest complete checkpoint.",
            id="checkpoint.not-saved",
        ) from error
