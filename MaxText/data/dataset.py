"""A split of the data as global batches: `batch(step)`, a pure function of (recipe, seed, global batch, step)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from MaxText.data.mixture import Mixture
from MaxText.data.names import Names
from MaxText.data.order import Order
from MaxText.data.rows import Batch, Piece, Rows
from MaxText.errors import DataExhausted

Split = Literal["train", "eval"]
_BLOCK = 1 << 16  # rows looked at in one go when a summary counts


@dataclass(frozen=True)
class Part:
    """What one entry of a mixture gives; a split that is no mixture has one part."""

    name: str
    contents: Rows
    order: Order
    names: Names | None = None

    @property
    def rows(self) -> int:
        """Rows in one epoch; 0 = endless."""
        return self.contents.count or 0

    def targets(self, rows: int) -> int:
        """Real targets in the first `rows` rows of the order."""
        whole, rest = divmod(rows, self.rows) if self.rows else (0, rows)
        first = whole * self.rows
        return whole * self.contents.total + self._count(first, first + rest)

    def _count(self, first: int, stop: int) -> int:
        blocks = ((i, min(i + _BLOCK, stop)) for i in range(first, stop, _BLOCK))
        return sum(int(self.contents.pairs(self.order.rows_at(*block)).sum()) for block in blocks)


class Batches(Protocol):
    """What every kind of data set has."""

    @property
    def batches(self) -> int | None: ...


class Shown(NamedTuple):
    """A row of a step, for people: its place in the batch, what it is of, and the documents in it."""

    place: int
    part: str
    epoch: int
    row: int
    pieces: list[tuple[str, Piece]]


@dataclass(frozen=True)
class Dataset:
    """One split in rows of `length` tokens, `global_batch` rows to a step. Nothing in here changes after it is opened.

    source: one line for people. documents, tokens (with special tokens), bytes (of text): 0 for endless data.
    dropped: documents without a row, counted by reason. bad: (name, fault) of those that could not be read.
    fingerprint: the recipe, JSON-able; equal recipes give equal batches.
    """

    split: Split
    source: str
    documents: int
    tokens: int
    bytes: int
    length: int
    global_batch: int
    dropped: dict[str, int]
    fingerprint: dict[str, Any]
    parts: tuple[Part, ...]
    mixture: Mixture | None = None
    bad: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> int:
        """Rows in one epoch, of all parts; 0 = endless."""
        return sum(part.rows for part in self.parts)

    @cached_property
    def batches(self) -> int | None:
        """Global batches; None = endless. Train: whole batches until a part has given num_epoch epochs.
        Eval: the last one is padded."""
        if self.mixture is None:
            return self.parts[0].order.batches
        limits = self._limits()
        if limits is None:
            return None
        low, high = 0, int(limits.sum()) // self.global_batch + 1
        while high - low > 1:  # `low` batches are there, `high` are not
            middle = (low + high) // 2
            enough = (self.mixture.given(middle * self.global_batch) <= limits).all()
            low, high = (middle, high) if enough else (low, middle)
        return low

    def _limits(self) -> np.ndarray | None:
        """Rows that each part may give, int64 [parts]; None = no limit."""
        epochs = self.parts[0].order.epochs
        return None if epochs is None else np.array([part.rows * epochs for part in self.parts], np.int64)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Global batch `step`, or its `rows` (a host's share): int32 [rows, length] arrays
        inputs, targets, positions, segments, loss_mask.

        Raises DataExhausted when `step` is past the end.
        """
        if step < 0:
            raise ValueError(f"step {step} < 0")
        check_enough(self, step + 1)
        first, stop, stride = (rows or slice(None)).indices(self.global_batch)
        if stride != 1 or (rows and (rows.stop or 0) > self.global_batch):
            raise ValueError(f"{rows} is no contiguous part of a global batch of {self.global_batch} rows")
        first, stop = step * self.global_batch + first, step * self.global_batch + stop
        if self.mixture is None:
            return self.parts[0].contents.take(self.parts[0].order.rows_at(first, stop))
        return self._mixed(*self.mixture.at(first, stop))

    def _mixed(self, part: np.ndarray, nth: np.ndarray) -> Batch:
        batch: Batch = {}
        for number in np.unique(part):
            here, one = part == number, self.parts[number]
            for name, values in one.contents.take(one.order.rows_of(nth[here])).items():
                batch.setdefault(name, np.empty((len(part), self.length), np.int32))[here] = values
        return batch

    def state_at(self, step: int) -> None:
        """What a checkpoint has to keep so that batch(step) can be the next: nothing, it is arithmetic."""

    def seek(self, state: Any) -> None:
        """Go on from what `state_at` gave."""

    def begin(self, step: int) -> None:
        """Go on with step `step` after other data: nothing to do, it is arithmetic."""

    def show(self, step: int, rows: slice | None = None) -> list[Shown]:
        """What the rows of global batch `step` hold."""
        check_enough(self, step + 1)
        places = range(self.global_batch)[rows or slice(None)]
        shown = []
        for place in places:
            index = step * self.global_batch + place
            number, nth = (int(a[0]) for a in self.mixture.at(index, index + 1)) if self.mixture else (0, index)
            one = self.parts[number]
            row = int(one.order.rows_of(np.array([nth]))[0])
            pieces = one.contents.pieces(row) if row >= 0 else []
            named = [(one.names.name(p.document) if one.names else f"row {row}", p) for p in pieces]
            shown.append(Shown(place, one.name, nth // one.rows if one.rows else 0, row, named))
        return shown

    def summary(self, steps: int | None = None) -> dict[str, Any]:
        """Accounting after `steps` global batches (default: all there are).

        rows seen; rows_repeated (seen in an earlier epoch) and rows_unseen; epochs; tokens: real targets;
        padding: slots without one; dropped: documents by reason; packing_efficiency: tokens / (tokens + padding);
        parts of a mixture: their rows and epochs by name.
        """
        steps = steps if steps is not None else self.batches
        if steps is None:
            raise ValueError("the data are endless: say how many steps")
        slots = steps * self.global_batch
        given = self._given(slots)
        rows, tokens = sum(given), sum(part.targets(n) for part, n in zip(self.parts, given, strict=True))
        seen = list(zip(self.parts, given, strict=True))
        return {
            "rows": rows,
            "rows_repeated": sum(max(0, n - part.rows) for part, n in seen if part.rows),
            "rows_unseen": sum(max(0, part.rows - n) for part, n in seen),
            "epochs": rows / self.rows if self.rows else 0.0,
            "tokens": tokens,
            "padding": slots * self.length - tokens,
            "dropped": dict(self.dropped),
            "packing_efficiency": tokens / (slots * self.length) if slots else 0.0,
        } | ({"parts": {part.name: (n, n / part.rows) for part, n in seen}} if self.mixture else {})

    def _given(self, slots: int) -> list[int]:
        """Rows that each part gives in the first `slots` slots of the order."""
        if self.mixture:
            return [int(n) for n in self.mixture.given(slots)]
        (part,) = self.parts
        return [slots if part.order.epochs is None or not part.rows else min(slots, part.rows * part.order.epochs)]


def check_enough(dataset: Batches, steps: int) -> None:
    """DataExhausted when the split holds fewer than `steps` global batches. For the time before anything starts."""
    available = dataset.batches
    if available is None or steps <= available or not isinstance(dataset, Dataset):
        return
    order, batch, rows = dataset.parts[0].order, dataset.global_batch, dataset.rows
    need = f"{steps * batch * dataset.length:,} tokens in {steps * batch:,} rows"
    if dataset.split == "eval":
        raise DataExhausted(
            f"eval_steps={steps} needs {need}, but the eval data hold {rows:,} rows = {available} batches of "
            f"{batch}. Set eval_steps={available}, or -1 for all.",
            id="data.exhausted",
        )
    epochs, cure = order.epochs or 0, f"steps={available}" if available else "a smaller batch"
    what = (
        f"{rows:,} rows x num_epoch={epochs} give {rows * epochs * dataset.length:,} tokens = {available} whole steps"
    )
    if dataset.mixture:
        needed = dataset.mixture.given(steps * batch)
        most = max(-(-int(n) // part.rows) for n, part in zip(needed, dataset.parts, strict=True))
        what = f"with num_epoch={epochs} a part of the mixture ends after {available} whole steps"
    else:
        most = -(-steps * batch // rows)
    raise DataExhausted(
        f"The data end before step {steps}: {steps} steps of {batch} x {dataset.length} need {need}, but {what}. "
        f"Set num_epoch={most} (or -1: for ever), or {cure}.",
        id="data.exhausted",
    )
