"""A file of token ids with a checksum for each block, compared whenever a block is read.

Between the disk and the model nothing else would notice a changed byte: it is a legal token. Blocks are read, not
mapped, since a mapped file that gets shorter, or that its disk cannot read, ends the process without a word.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from MaxText import crc
from MaxText.errors import DataError

BLOCK = 1 << 14
"""Bytes of a block: a few rows of a small model, so that little is read in vain; 4 bytes of checksum for each."""


class Writer:
    """Writes bytes to `file` one after the other and keeps `checksums`, the CRC-32 of each block, [blocks] uint32, and
    `sha256` of all: those of what was given, whatever became of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._done, self._value, self._filled = file, list[int](), 0, 0
        self.sha256 = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        """The bytes of `array` in C order."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._file.write(data)
        self.sha256.update(data)
        while len(data):
            now = data[: BLOCK - self._filled]
            self._value, self._filled = crc.update(now, self._value), self._filled + len(now)
            if self._filled == BLOCK:
                self._done.append(self._value)
                self._value = self._filled = 0
            data = data[len(now) :]

    @property
    def checksums(self) -> np.ndarray:
        return np.array([*self._done, *([self._value] if self._filled else [])], np.uint32)


def gather(index: np.ndarray, each: int, dtype: np.dtype, read: Callable[[int, np.ndarray], None]) -> np.ndarray:
    """ids at `index`, of its shape, from blocks of `each`: `read(number, ids)` fills those of one block that are
    wanted at all, once."""
    block, within = np.divmod(index.reshape(-1), each)
    wanted = np.unique(block[np.flatnonzero(np.diff(block, prepend=-1))])  # neighbours are mostly in one block
    ids = np.zeros((len(wanted), each), dtype)
    for place, number in enumerate(wanted):
        read(int(number), ids[place])
    return ids.reshape(-1)[np.searchsorted(wanted, block) * each + within].reshape(index.shape)


class Checked:
    """The ids of `path`, of type `dtype`: a `corpus.Stream` that gives no byte that was not written."""

    def __init__(self, path: Path, dtype: np.dtype, checksums: np.ndarray) -> None:
        """checksums: those of `Writer`. DataError ("data.truncated") where there are not as many as blocks."""
        self._path, self._dtype, self._checksums = path, dtype, checksums
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.", id="data.damaged") from error
        weakref.finalize(self, os.close, self._file)
        self._size = os.fstat(self._file).st_size
        if len(checksums) != -(-self._size // BLOCK):
            raise DataError(
                f"{path} has {self._size} bytes, and checksums for {len(checksums)} blocks of {BLOCK}. Prepare the "
                "data again.",
                id="data.truncated",
            )

    def __len__(self) -> int:
        return self._size // self._dtype.itemsize

    def take(self, index: np.ndarray) -> np.ndarray:
        """ids at `index`, of its shape. DataError ("data.damaged"), with the bytes' place, for those that changed."""
        return gather(index, BLOCK // self._dtype.itemsize, self._dtype, self._read)

    def _read(self, block: int, into: np.ndarray) -> None:
        first = block * BLOCK
        data = memoryview(into.view(np.uint8))[: min(BLOCK, self._size - first)]
        try:
            count = os.preadv(self._file, [data], first)
        except OSError as error:
            raise self._damaged(first, len(data), str(error.strerror)) from error
        if count != len(data):
            raise self._damaged(first, len(data), f"only {count} of them are left")
        if (found := crc.update(data)) != self._checksums[block]:
            raise self._damaged(
                first,
                len(data),
                f"they have changed (CRC {crc.text(found)}, written {crc.text(int(self._checksums[block]))})",
            )

    def _damaged(self, first: int, count: int, problem: str) -> DataError:
        return DataError(
            f"{self._path}, bytes {first} to {first + count - 1}: {problem}. No step was trained on them. Copy the "
            "file from where it is whole, or delete its folder and prepare the data again; then the same command goes "
            "on from the last checkpoint.",
            id="data.damaged",
        )
