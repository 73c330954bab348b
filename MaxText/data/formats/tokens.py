"""Token ids on disk, read from there again and again and never kept: `.npy` (one dim of integers) or `.bin` (raw
little-endian uint16, or uint32 where the model's vocabulary is above 65,536). Documents end with the eos id.

They are read, not mapped: a mapped file that gets shorter ends the process without a word.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from MaxText.data import blocks
from MaxText.data.units import Item, Unit, damaged, local_only, reading
from MaxText.errors import DataError

_BLOCK = 1 << 12  # ids that are read at once: a few rows of a small model
_SCANNED = 1 << 20  # ids that are looked at in one go at the start


class Stored:
    """The ids of a file: a `corpus.Stream`. DataError ("data.damaged") once the file is not what it was at the start.

    vocabulary: that of the model, of which all ids must be.
    """

    def __init__(self, unit: Unit, vocabulary: int) -> None:
        """Only opens it. DataError for anything but integers [tokens]."""
        if "://" in unit.path:
            raise local_only(unit, "token ids are read from there at every step")
        self._name, self._path, self._vocabulary = unit.name, unit.path, vocabulary
        with reading(unit):
            self._file = os.open(unit.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._state = self._now()
            self.dtype, self._first, self._count = _layout(unit, size=self._state[0])

    def __len__(self) -> int:
        return self._count

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """All of them, mapped: for who copies them once."""
        self._unchanged()
        return np.memmap(self._path, self.dtype, "r", self._first, (self._count,)).view(np.ndarray)

    def take(self, index: np.ndarray) -> np.ndarray:
        """ids at `index`, of its shape."""
        found = blocks.gather(index, _BLOCK, self.dtype, lambda number, into: self._read(number * _BLOCK, into))
        self._unchanged()
        if found.size and not 0 <= found.min() <= found.max() < self._vocabulary:
            raise self._damaged(f"ids {found.min()}..{found.max()}, not all within 0..{self._vocabulary - 1}")
        return found

    def scan(self) -> Iterator[tuple[int, np.ndarray]]:
        """All ids in order, in parts, each with the number of its first."""
        for first in range(0, self._count, _SCANNED):
            ids = np.empty(min(_SCANNED, self._count - first), self.dtype)
            self._read(first, ids)
            yield first, ids
        self._unchanged()

    def only(self, mask: np.ndarray) -> np.ndarray:
        """A copy of those where `mask` [tokens] holds."""
        return np.concatenate([ids[mask[first : first + len(ids)]] for first, ids in self.scan()])

    def _read(self, first: int, into: np.ndarray) -> None:
        """ids from number `first` on, as many as there is room for or as there are."""
        into = into[: self._count - first]
        try:
            count = os.preadv(self._file, [into.view(np.uint8)], self._first + first * self.dtype.itemsize)
        except OSError as error:
            raise self._damaged(str(error.strerror)) from error
        if count != into.nbytes:
            raise self._damaged(f"of {into.nbytes} bytes only {count} are left")

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _unchanged(self) -> None:
        if (now := self._now()) != self._state:
            raise self._damaged(f"{self._state[0]} bytes at the start, {now[0]} now, written to in between")

    def _damaged(self, problem: str) -> DataError:
        return DataError(
            f"{self._name} changed while it was read: {problem}. No step was trained on what it holds now. Put the "
            "file back as it was; then the same command goes on from the last checkpoint.",
            id="data.damaged",
        )


def split(unit: Unit) -> list[Unit]:
    return [replace(unit, ids=True)]


def read(unit: Unit) -> Iterator[Item]:
    """All ids of the file as one Item."""
    yield Item(np.concatenate([ids for _, ids in Stored(unit, unit.vocabulary).scan()]))


def _layout(unit: Unit, size: int) -> tuple[np.dtype, int, int]:
    """Type, byte offset and number of the ids."""
    if not unit.path.endswith(".npy"):
        dtype = np.dtype("<u2" if unit.vocabulary <= 1 << 16 else "<u4")
        if size % dtype.itemsize:
            raise damaged(unit, f"{size} bytes are no whole number of {dtype.itemsize}-byte ids")
        return dtype, 0, size // dtype.itemsize
    found = np.load(unit.path, mmap_mode="r")  # of which only the header is looked at
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise damaged(unit, f"it holds {found.dtype} of shape {list(found.shape)}, not integers [tokens]")
    return found.dtype, found.offset, len(found)
