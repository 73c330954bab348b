"""Rows of fixed length from documents of any length.

Legend: B rows, S row length (max_target_length), D documents, P pairs.

A document of n tokens holds n-1 *pairs* (token, next token); its last token predicts nothing. With
packing_type=concat_then_split the pairs of all documents stand in one line, which is cut every S pairs: row i holds the
pairs i*S .. (i+1)*S-1. So every token that has a predecessor in its document is a target exactly once, also at the
borders of rows; no pair reaches into another document; every slot of every row is trained on, except in the last row,
which is padded. A document that goes on in the next row starts there as a new segment with positions from 0. With first
or best fit a row holds the pieces that a plan (`packing`) gives it; with packing=false each piece has a row of its own.

Packing never copies: a row is computed from the document starts when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from MaxText.data import packing
from MaxText.data.corpus import Stream
from MaxText.data.order import fold, mix

Batch = dict[str, np.ndarray]
NONE_MASKED = np.zeros(0, np.int64)


class Piece(NamedTuple):
    """A part of a document in a row: pairs `offset` .. `offset + pairs - 1` of it, from `column` on."""

    document: int
    offset: int
    pairs: int
    column: int


class Rows(Protocol):
    """Random access to rows."""

    @property
    def count(self) -> int | None:
        """Number of rows; None = endless."""

    @property
    def total(self) -> int:
        """Real (trained) slots in all rows; 0 = endless."""

    def take(self, index: np.ndarray) -> Batch:
        """Rows `index` [B] as int32 [B, S] arrays inputs, targets, positions, segments, loss_mask; -1 = all padding."""

    def pairs(self, index: np.ndarray) -> np.ndarray:
        """Real (trained) slots in each of the rows `index`, int64 [B]."""

    def pieces(self, row: int) -> list[Piece]:
        """What row `row` holds."""


def make(
    stream: Stream,
    starts: np.ndarray,
    length: int,
    kind: str,
    masked: np.ndarray = NONE_MASKED,
    cache: str = "",
    plan: packing.Plan | None = None,
) -> TextRows | PlannedRows:
    """The rows of a stream of tokens.

    stream: token ids of all documents one after the other, [tokens], any integer type.
    starts: the first pair of each document, int64 [D]: `starts_of` its lengths.
    kind: concat_then_split, first_fit, best_fit, or none. masked: documents [M], sorted, that train nothing.
    plan: of this kind, if there is one already.
    """
    if kind == "concat_then_split":
        return TextRows(stream, starts, length, masked)
    if plan is None:
        lengths = np.diff(starts, append=len(stream) - len(starts)) + 1
        plan = packing.alone(lengths, length) if kind == "none" else packing.plan(lengths, length, kind, cache)
    return PlannedRows(stream, starts, plan, length, masked)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """The first pair of each document when all stand in one line, int64 [D]."""
    return np.cumsum(lengths.astype(np.int64) - 1) - (lengths - 1)


class _Masking:
    """What rows of documents share: slots of some documents are read but not trained on."""

    stream: Stream
    masked: np.ndarray
    length: int

    def take(self, index: np.ndarray) -> Batch:
        raise NotImplementedError

    def _spans(self, index: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def pairs(self, index: np.ndarray) -> np.ndarray:
        if not len(self.masked):
            return self._spans(index)
        return self.take(index)["loss_mask"].sum(axis=1, dtype=np.int64)

    def _batch(
        self,
        token: np.ndarray,
        real: np.ndarray,
        nth: np.ndarray,
        chunk: np.ndarray,
        document: Callable[[], np.ndarray],
    ) -> Batch:
        """From [B, S] each: token (its place in the stream), real, nth (documents that began in the row before), chunk
        (the column where the slot's document began), document."""
        trained = real & ~np.isin(document(), self.masked) if len(self.masked) else real
        return {
            "inputs": _masked(self.stream.take(token), real),
            "targets": _masked(self.stream.take(np.where(real, token + 1, 0)), real),
            "positions": _masked(np.arange(self.length) - chunk, real),
            "segments": _masked(nth + 1, real),
            "loss_mask": trained.astype(np.int32),
        }


class TextRows(_Masking):
    """Rows by concatenation and splitting: no table, only the starts of documents."""

    def __init__(self, stream: Stream, starts: np.ndarray, length: int, masked: np.ndarray = NONE_MASKED):
        self.stream, self.starts, self.length, self.masked = stream, starts, length, masked
        self._all = len(stream) - len(starts)
        self.count = -(-self._all // length)
        self._column = np.arange(length)

    @property
    def total(self) -> int:
        ends = np.append(self.starts[1:], self._all)
        return self._all - int((ends - self.starts)[self.masked].sum()) if len(self.masked) else self._all

    def take(self, index: np.ndarray) -> Batch:
        first, pairs = self._span(index)
        real = self._column < pairs[:, None]
        document = np.searchsorted(self.starts, first, "right") - 1
        nth, chunk = self._segments(first, pairs, document)
        # Each document before a pair has one token more than it has pairs.
        token = np.where(real, first[:, None] + self._column + document[:, None] + nth, 0)
        return self._batch(token, real, nth, chunk, lambda: document[:, None] + nth)

    def pieces(self, row: int) -> list[Piece]:
        first, stop = row * self.length, min((row + 1) * self.length, self._all)
        document = int(np.searchsorted(self.starts, first, "right")) - 1
        found = []
        while first < stop:
            end = int(self.starts[document + 1]) if document + 1 < len(self.starts) else self._all
            pairs = min(end, stop) - first
            found.append(Piece(document, first - int(self.starts[document]), pairs, first - row * self.length))
            document, first = document + 1, first + pairs
        return found

    def _spans(self, index: np.ndarray) -> np.ndarray:
        return self._span(index)[1]

    def _span(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First pair of each row and the number of its pairs, [B] each."""
        first = np.maximum(index, 0) * self.length
        return first, np.where(index < 0, 0, np.minimum(self.length, self._all - first))

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


class PlannedRows(_Masking):
    """Rows of a plan: each holds whole pieces of documents."""

    def __init__(
        self,
        stream: Stream,
        starts: np.ndarray,
        plan: packing.Plan,
        length: int,
        masked: np.ndarray = NONE_MASKED,
    ):
        self.stream, self.plan, self.length, self.masked = stream, plan, length, masked
        self.count = len(plan.first) - 1
        self._starts = starts
        self._column = np.arange(length)

    @cached_property
    def total(self) -> int:
        untrained = self.plan.pairs[np.isin(self.plan.document, self.masked)].sum() if len(self.masked) else 0
        return int(self.plan.pairs.sum() - untrained)

    def take(self, index: np.ndarray) -> Batch:
        row, piece, column, size = self._layout(np.maximum(index, 0))
        real = self._column < self._filled(index, row, size)[:, None]
        document = self.plan.document[piece]
        shape = (len(index), self.length)
        begins = np.zeros(shape, np.int64)
        begins[row, column] = 1
        which = np.cumsum(begins, axis=1) - 1  # nth piece of its row, [B, S]
        flat = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(index)))])[:-1, None] + which
        chunk = column[flat]
        # Each document before this one has one token more than it has pairs.
        first = self._starts[document] + document + self.plan.offset[piece]
        token = np.where(real, first[flat] + self._column - chunk, 0)
        return self._batch(token, real, which, chunk, lambda: document[flat])

    def pieces(self, row: int) -> list[Piece]:
        _, piece, column, size = self._layout(np.array([row]))
        values = (self.plan.document[piece], self.plan.offset[piece], size, column)
        return [Piece(*map(int, one)) for one in zip(*values, strict=True)]

    def _layout(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each piece of `rows`, in order: which of them, which piece of the plan, its first column, its pairs."""
        first = self.plan.first[rows]
        count = self.plan.first[rows + 1] - first
        row = np.repeat(np.arange(len(rows)), count)
        opens = np.cumsum(count) - count  # the first piece of each row
        piece = np.arange(len(row)) + (first - opens)[row]
        size = self.plan.pairs[piece]
        before = np.cumsum(size) - size
        return row, piece, before - before[opens][row], size

    def _filled(self, index: np.ndarray, row: np.ndarray, size: np.ndarray) -> np.ndarray:
        pairs = np.bincount(row, size, minlength=len(index)).astype(np.int64)
        return np.where(index < 0, 0, pairs)

    def _spans(self, index: np.ndarray) -> np.ndarray:
        row, _, _, size = self._layout(np.maximum(index, 0))
        return self._filled(index, row, size)


class SyntheticRows:
    """Rows of ids drawn evenly from 0 .. vocabulary-1, each row one document. Nothing to learn: for speed runs.

    count: rows; None = endless.
    """

    def __init__(self, seed: int, vocabulary: int, length: int, count: int | None = None):
        self.seed, self.vocabulary, self.length, self.count = seed, vocabulary, length, count
        self.total = (count or 0) * length

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

    def pieces(self, row: int) -> list[Piece]:
        return [Piece(row, 0, self.length, 0)]


def _masked(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    return np.multiply(values, real, dtype=np.int32, casting="unsafe")
