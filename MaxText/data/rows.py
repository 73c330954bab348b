"""Rows of fixed length from documents of any length.

Legend: B rows, S row length (max_target_length), D documents, P pairs.

A document of n tokens holds n-1 *pairs* (token, next token); its last token predicts nothing. The pairs of all
documents stand in one line, which is cut every S pairs: row i holds the pairs i*S .. (i+1)*S-1. So every token that
has a predecessor in its document is a target exactly once, also at the borders of rows; no pair reaches into another
document; every slot of every row is trained on, except in the last row, which is padded. A document that goes on in
the next row starts there as a new segment with positions from 0. With packing=false each document is cut on its own.

Packing never copies: a row is computed from the document starts when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from MaxText.data.order import fold, mix

Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Random access to rows."""

    @property
    def count(self) -> int | None:
        """Number of rows; None = endless."""

    def take(self, index: np.ndarray) -> Batch:
        """Rows `index` [B] as int32 [B, S] arrays inputs, targets, positions, segments, loss_mask; -1 = all padding."""

    def pairs(self, index: np.ndarray) -> np.ndarray:
        """Real (trained) slots in each of the rows `index`, int64 [B]."""


class TextRows:
    """Rows of a stream of tokens in memory.

    stream: token ids of all documents one after the other, [tokens], any integer type.
    lengths: tokens of each document, [D], each at least 2.
    """

    def __init__(self, stream: np.ndarray, lengths: np.ndarray, length: int, *, packing: bool):
        self.stream, self.length, self.packing = stream, length, packing
        ends = np.cumsum(lengths.astype(np.int64) - 1)
        self.starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)  # first pair of each document, [D]
        self.total = int(ends[-1])
        if not packing:
            self._starts, self._stops = _cut_each(self.starts, ends, length)
        self.count = -(-self.total // length) if packing else len(self._starts)
        self._column = np.arange(length)

    def take(self, index: np.ndarray) -> Batch:
        first, pairs = self._span(index)
        real = self._column < pairs[:, None]
        document = np.searchsorted(self.starts, first, "right") - 1
        nth, chunk = self._segments(first, pairs, document)
        # Each document before a pair has one token more than it has pairs.
        token = np.where(real, first[:, None] + self._column + document[:, None] + nth, 0)
        return {
            "inputs": _masked(self.stream[token], real),
            "targets": _masked(self.stream[np.where(real, token + 1, 0)], real),
            "positions": _masked(self._column - chunk, real),
            "segments": _masked(nth + 1, real),
            "loss_mask": real.astype(np.int32),
        }

    def pairs(self, index: np.ndarray) -> np.ndarray:
        return self._span(index)[1]

    def _span(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First pair of each row and the number of its pairs, [B] each."""
        row = np.maximum(index, 0)
        if self.packing:
            first = row * self.length
            pairs = np.minimum(self.length, self.total - first)
        else:
            first = self._starts[row]
            pairs = self._stops[row] - first
        return first, np.where(index < 0, 0, pairs)

    def _segments(self, first: np.ndarray, pairs: np.ndarray, document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B, S] each: how many documents began in the row up to a slot, and the column where the slot's own began."""
        last = np.searchsorted(self.starts, first + pairs - 1, "right") - 1
        more = np.maximum(last - document, 0)
        nth = np.zeros((len(first), self.length), np.int64)
        chunk = np.zeros_like(nth)
        if more.any():
            row = np.repeat(np.arange(len(first)), more)
            following = 1 + np.arange(len(row)) - np.repeat(np.cumsum(more) - more, more)
            column = self.starts[document[row] + following] - first[row]
            nth[row, column] = 1
            chunk[row, column] = column
            np.cumsum(nth, axis=1, out=nth)
            np.maximum.accumulate(chunk, axis=1, out=chunk)
        return nth, chunk


class SyntheticRows:
    """Rows of ids drawn evenly from 0 .. vocabulary-1, each row one document. Nothing to learn: for speed runs.

    count: rows; None = endless.
    """

    def __init__(self, seed: int, vocabulary: int, length: int, count: int | None = None):
        self.seed, self.vocabulary, self.length, self.count = seed, vocabulary, length, count

    def take(self, index: np.ndarray) -> Batch:
        real = np.repeat(index[:, None] >= 0, self.length, axis=1)
        word = np.arange(self.length + 1, dtype=np.uint64)
        ids = mix(fold(self.seed, index)[:, None] + word * np.uint64(0x9E3779B97F4A7C15)) % np.uint64(self.vocabulary)
        return {
            "inputs": _masked(ids[:, :-1], real),
            "targets": _masked(ids[:, 1:], real),
            "positions": _masked(np.arange(self.length), real),
            "segments": real.astype(np.int32),
            "loss_mask": real.astype(np.int32),
        }

    def pairs(self, index: np.ndarray) -> np.ndarray:
        return np.where(index < 0, 0, self.length)


def join(documents: Iterable[np.ndarray], dtype: type[np.integer]) -> tuple[np.ndarray, np.ndarray]:
    """One stream [tokens] of `dtype` and the length of each document [D]."""
    parts = [d.astype(dtype, copy=False) for d in documents]
    return np.concatenate(parts) if parts else np.zeros(0, dtype), np.array([len(p) for p in parts], np.int64)


def _cut_each(starts: np.ndarray, ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last pair of each row when rows do not share documents."""
    per_document = -(-(ends - starts) // length)
    document = np.repeat(np.arange(len(starts)), per_document)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    first = starts[document] + nth * length
    return first, np.minimum(first + length, ends[document])


def _masked(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    return np.multiply(values, real, dtype=np.int32, casting="unsafe")
