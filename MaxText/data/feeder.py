"""Batches prepared ahead of the loop by one background thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from MaxText import faults
from MaxText.data.rows import Batch


class _Batches(Protocol):
    def batch(self, step: int) -> Batch: ...


class Feeder:
    """Iterator over (step, put(dataset.batch(step))) for step = start .. stop-1, at most `ahead` of them prepared.

    A context manager: the thread starts on entry and has ended on exit. `put` runs in the thread, typically a transfer
    to devices; JAX context managers of the consumer (`jax.set_mesh`) do not reach it, so it must name its shardings.
    What fails in the thread is raised in the consumer, after the batches that were ready before it.

    Nothing needs to be saved: batches are a pure function of the step, so what was prepared and not used is no loss.
    """

    wait_seconds: float = 0.0  # how long the consumer waited for its latest item

    def __init__(self, dataset: _Batches, start: int, stop: int, put: Callable[[Batch], Any], *, ahead: int = 4):
        self._dataset, self._put, self._steps, self._ahead = dataset, put, range(start, stop), max(1, ahead)
        self._ready: deque[tuple[int, Any]] = deque()
        self._changed = threading.Condition()
        self._ended = False  # the thread will add nothing more
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="feeder", daemon=True)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._closed or self._thread.ident is None:
            raise RuntimeError("a Feeder gives batches inside its `with` block only")
        begin = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            self.wait_seconds = time.perf_counter() - begin
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def close(self) -> None:
        """Ends the thread: at once when it waits for room, otherwise after the batch in hand. May be called again."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _fill(self) -> None:
        try:
            for step in self._steps:
                if not self._room():
                    break
                item = (step, self._put(self._dataset.batch(step)))
                faults.point("data.batch")
                with self._changed:
                    if not self._closed:
                        self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, it belongs to the consumer: see __next__
            self._failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _room(self) -> bool:
        """Waits until another batch may be prepared; False when the feeder was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed
