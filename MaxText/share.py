"""The rows of a global batch that this process's devices hold: each process makes those, and no others.

Legend: A microbatches, B rows of a microbatch, b of them in this process, S sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from MaxText import sequence
from MaxText.data import Train

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """What this process holds of arrays [A, B, S] with this sharding; A is never split."""

    sharding: NamedSharding
    order: sequence.Order
    microbatches: int
    rows: int
    length: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.microbatches, self.rows, self.length)

    @functools.cached_property
    def span(self) -> range:
        """The smallest range of B that holds every row of this process."""
        spans = [index[1].indices(self.rows) for index in self._indices(local=True).values()]
        return range(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))

    @functools.cached_property
    def counted(self) -> np.ndarray:
        """Which rows of `span` this process counts, bool [b]: of the processes that hold a row, the first does."""
        owner = np.full(self.rows, np.iinfo(np.int32).max)
        for device, index in self._indices(local=False).items():
            owner[index[1]] = np.minimum(owner[index[1]], device.process_index)
        return owner[self.span.start : self.span.stop] == jax.process_index()

    def _indices(self, *, local: bool) -> dict[jax.Device, Index]:
        ask = self.sharding.addressable_devices_indices_map if local else self.sharding.devices_indices_map
        found: dict[jax.Device, Index] = ask(self.shape)  # type: ignore[assignment]
        return found

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Rows [A * b, S] of this process to its devices, as parts of global arrays [A, B, S]. No collective."""
        return {name: self._put(rows) for name, rows in sequence.arrange(self.order, batch).items()}

    def _put(self, rows: np.ndarray) -> jax.Array:
        local = rows.reshape(self.microbatches, len(self.span), self.length)

        def piece(index: Index | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[1].indices(self.rows)
            return local[index[0], start - self.span.start : stop - self.span.start, index[2]]

        return jax.make_array_from_callback(self.shape, self.sharding, piece)


@dataclass(frozen=True)
class Share:
    """A dataset seen from one process: `batch(step)` has this process's rows only, in any number of processes."""

    dataset: Train
    part: Part

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """int32 [A * b, S] arrays, as `Dataset.batch`."""
        rows, span = self.part.rows, self.part.span
        if len(span) == rows:
            return self.dataset.batch(step)
        pieces = [
            self.dataset.batch(step, slice(start + span.start, start + span.stop))
            for start in range(0, self.part.microbatches * rows, rows)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def put(self, batch: dict[str, np.ndarray]) -> Any:
        """What `batch` gave, on the devices."""
        return self.part.put(batch)
