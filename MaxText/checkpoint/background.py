"""One save at a time in a thread of its own, and its failure told once, at the next chance."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from MaxText.errors import StorageError


class Background:
    """Runs saves one after another: in a thread, or, not `asynchronous`, at once."""

    def __init__(self, *, asynchronous: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self.pending: Future[None] | None = None
        self._failure: StorageError | None = None
        self._reported = False

    @property
    def asynchronous(self) -> bool:
        return self._thread is not None

    def start(self, action: Callable[[], None]) -> None:
        """Do `action`; `wait` must have returned before."""
        if self._thread is None:
            action()
        else:
            self.pending = self._thread.submit(action)

    def check(self) -> None:
        """Raise the StorageError of an action that has failed; costs nothing."""
        if self.pending is not None and self.pending.done():
            self.wait()
        elif self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return once the last action is over; raise its StorageError, now or earlier."""
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                pending.result()
            except StorageError as error:
                self._failure = error
        if self._failure is not None:
            self._reported = True
            raise self._failure

    def close(self) -> None:
        """Wait, and end the thread; raises a failure only if nobody has seen it."""
        try:
            if self.pending is not None or not self._reported:
                self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
