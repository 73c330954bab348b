"""Data that can only be read front to back: batches in order, with the exact state of the consumer for each.

Rows are those of `rows.TextRows`: pairs of all documents in one line, cut every S. With enable_data_shuffling each
window of 1,024 rows is shuffled in itself. Every host reads the whole stream and takes its rows of each batch, so the
number of hosts, devices and processes changes nothing. The state before a row is where its window begins in the source,
how many pairs of the document there are used, and how many rows of the window; nothing that was read ahead is in it, so
nothing is lost or repeated at a resume.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from MaxText.data import opening, recipe, sources
from MaxText.data.corpus import Words, encode
from MaxText.data.dataset import Dataset, Shown, Split
from MaxText.data.formats import hub
from MaxText.data.order import fold, permute
from MaxText.data.rows import Batch, TextRows, starts_of
from MaxText.data.units import Fault, Unit
from MaxText.data.units import field as field_of
from MaxText.errors import ConfigError, DataError, DataExhausted
from MaxText.tokenizer import Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

WINDOW = 1024  # rows that are shuffled together
STREAM_VERSION = "stream-1024"  # part of the data fingerprint
_EPOCH = "pairs of an epoch"
_KEPT = 256  # steps whose state is kept: more than are ever prepared ahead of a checkpoint


class Records(Protocol):
    """A source that is read front to back: an `IterableDataset` of Hugging Face."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Place:
    """Where reading stands: before document `number` of the stream, of which `used` pairs are in earlier rows."""

    source: dict[str, Any]
    epoch: int = 0
    number: int = 0  # in this epoch
    used: int = 0
    # Of the first epoch: documents, tokens, documents dropped by reason; "pairs of an epoch" when it is over.
    seen: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "seen": dict(self.seen)}


class Reader:
    """Rows of pairs from a stream, one window at a time."""

    def __init__(self, records: Records, unit: Unit, words: Words, length: int, epochs: int | None):
        self._records, self._unit, self._words, self._length, self._epochs = records, unit, words, length, epochs
        self.start = json.loads(json.dumps(records.state_dict()))
        self.place = Place(self.start)
        self._documents: Iterator[dict[str, Any]] | None = None
        self._useful = False  # this epoch gave a document
        self.bad: dict[str, str] = {}  # name and fault of documents left out since the start of this process
        self._open: tuple[Place, np.ndarray] | None = None  # the document in hand and the place before it

    def seek(self, place: dict[str, Any]) -> None:
        """Go on from a place that `Place.as_dict` described."""
        self.place = Place(**place | {"seen": Counter(place["seen"])})
        self._open, self._documents = None, None
        self._useful = self.place.number > 0  # before the place there was something, or this seek would not be

    def window(self, rows: int) -> tuple[TextRows, Place] | None:
        """The next `rows` rows, fewer at the end; and the place after them. None where nothing is left."""
        documents, pairs, wanted = [], 0, rows * self._length
        while pairs < wanted and (found := self._next()) is not None:
            place, ids = found
            rest = ids[place.used :]
            take = min(len(rest) - 1, wanted - pairs)
            documents.append(rest[: take + 1])
            pairs += take
            self._after(place, ids, place.used + take)
        whole = pairs // self._length * self._length
        if not whole:
            return None
        stream, lengths = np.concatenate(documents), np.array([len(d) for d in documents], np.int64)
        return TextRows(stream, starts_of(lengths), self._length), self.place

    def _after(self, place: Place, ids: np.ndarray, used: int) -> None:
        """The place is inside a document, or before the next one."""
        if used < len(ids) - 1:
            self.place = Place(place.source, place.epoch, place.number, used, place.seen)
            self._open = (self.place, ids)
            return
        seen = place.seen if place.epoch else place.seen + Counter(documents=1, tokens=len(ids))
        self.place = Place(self._state(), place.epoch, place.number + 1, 0, seen)
        self._open = None

    def _state(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(self._records.state_dict())))

    def _next(self) -> tuple[Place, np.ndarray] | None:
        """The document in hand, or the next usable one."""
        if self._open is not None:
            return self._open
        while True:
            record = self._record()
            if record is None:
                if not self._again():
                    return None
                continue
            ids = self._ids(record)
            if ids is not None:
                self._useful = True
                return self.place, ids
            self.place = Place(self._state(), self.place.epoch, self.place.number + 1, 0, self.place.seen)

    def _record(self) -> dict[str, Any] | None:
        """The next record of the source; None at its end. DataError where it fails, as a network does."""
        try:
            if self._documents is None:
                self._records.load_state_dict(self.place.source)
                self._documents = iter(self._records)
            return next(self._documents, None)
        except Exception as error:  # of whatever library reads the form of data
            said = (str(error).strip().splitlines() or [""])[0]
            raise DataError(
                f"{self._unit.name} cannot be read on from document {self.place.number}: {type(error).__name__}: "
                f"{said}. After it is mended the same command goes on.",
                id="data.stream",
            ) from error

    def _again(self) -> bool:
        """The next epoch; False where there is none."""
        if not self._useful and self.place.used == 0:
            raise DataError(
                f"{self._unit.name} holds no document with two tokens: nothing to predict.", id="data.no-targets"
            )
        if self._epochs is not None and self.place.epoch + 1 >= self._epochs:
            return False
        seen = self.place.seen
        if not self.place.epoch:
            seen = seen + Counter({_EPOCH: seen["tokens"] - seen["documents"]})
        self.place = Place(self.start, self.place.epoch + 1, 0, 0, seen)
        self._documents, self._useful = None, False
        return True

    def _ids(self, record: dict[str, Any]) -> np.ndarray | None:
        """The ids of a document; None for one that gives nothing, which is counted."""
        item = field_of(self._unit, record, first=self.place.number == 0)
        found = item.fault or encode(item.content, self._words, self._unit.name)
        if isinstance(found, Fault):
            if self._words.refuse:
                raise DataError(f"{self._unit.name}#{self.place.number} {found.text}.", id=found.id)
            reason = "unreadable"
            self.bad[f"{self._unit.name}#{self.place.number}"] = found.text
        elif item.content is None or not len(item.content):
            reason = "empty"
        elif len(found) < 2:
            reason = "single token"
        else:
            return found
        if not self.place.epoch:
            self.place.seen = self.place.seen + Counter({reason: 1})
        return None


@dataclass
class StreamDataset:
    """A training split that is read front to back; the same surface as `Dataset`, but batches come in order.

    `batch(step)` gives the step after the last one, or again one of the latest 256; another is refused.
    `state_at(step)` is what `seek` needs to make batch(step) the next.
    """

    source: str
    length: int
    global_batch: int
    fingerprint: dict[str, Any]
    reader: Reader
    seed: int
    shuffle: bool
    split: Split = "train"
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    rows: int = 0
    batches: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def bad(self) -> tuple[tuple[str, str], ...]:
        """(name, fault) of documents that were left out since the start of this process."""
        return tuple(self.reader.bad.items())

    def __post_init__(self) -> None:
        self._step = 0
        self._latest: tuple[int, Batch] = (-1, {})  # hosts and microbatches ask for a step several times
        self._lock = threading.Lock()  # the feeder draws while the loop asks for the state of an earlier step
        self._states: dict[int, dict[str, Any]] = {}
        self._begin(0, self.reader.place.as_dict(), 0)
        self._remember()

    def _begin(self, window: int, place: dict[str, Any], used: int) -> None:
        """Stand before row `used` of window number `window`, which begins at `place`."""
        self.reader.seek(place)
        self._window, self._place, self._used = window, place, used
        self._rows: TextRows | None = None

    def state_at(self, step: int) -> dict[str, Any]:
        """The state of the consumer before batch `step`: JSON-able."""
        with self._lock:
            if step in self._states:
                return self._states[step]
            kept = f"{min(self._states)}..{max(self._states)}"
        raise ValueError(f"the state before step {step} is not kept; those before {kept} are")

    def _remember(self) -> None:
        """Keep the state before the next step, and drop the oldest."""
        state = {"step": self._step, "window": self._window, "place": self._place, "used": self._used}
        with self._lock:
            self._states[self._step] = state
            self._states.pop(self._step - _KEPT, None)

    def seek(self, state: dict[str, Any]) -> None:
        """Go on from what `state_at` gave. DataError for a state of something else."""
        try:
            self._begin(state["window"], state["place"], state["used"])
            self._step = int(state["step"])
        except (KeyError, TypeError) as error:
            raise DataError(f"the checkpoint holds no state of this stream ({error!r}).", id="data.state") from error
        self._latest = -1, {}
        with self._lock:
            self._states.clear()
        self._remember()

    def begin(self, step: int) -> None:
        """Stand before the first row, which is then that of step `step`: earlier ones were of other data."""
        self._begin(0, Place(self.reader.start).as_dict(), 0)
        self._step, self._latest = step, (-1, {})
        with self._lock:
            self._states.clear()
        self._remember()

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """As `Dataset.batch`, for the step that is next. Raises DataExhausted where the stream ends before it."""
        if step != self._latest[0]:
            self._latest = step, self._draw(step)
        return {name: values[rows] for name, values in self._latest[1].items()} if rows else self._latest[1]

    def _draw(self, step: int) -> Batch:
        if step != self._step:
            self.seek(self.state_at(step))
        parts, missing = [], self.global_batch
        while missing:
            part = self._take(missing, step)
            missing -= len(part["inputs"])
            parts.append(part)
        self._step = step + 1
        self._remember()
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _take(self, most: int, step: int) -> Batch:
        """Up to `most` further rows, out of one window."""
        if self._rows is None:
            found = self.reader.window(WINDOW)
            if found is None:
                raise DataExhausted(
                    f"The stream ends before step {step} is full. Set num_epoch=-1, or steps={step}.",
                    id="data.exhausted",
                )
            self._rows, self._following = found
        whole = (len(self._rows.stream) - len(self._rows.starts)) // self.length
        index = np.arange(self._used, min(self._used + most, whole))
        taken = permute(index, whole, fold(self.seed, np.full(len(index), self._window))) if self.shuffle else index
        batch = self._rows.take(taken)
        self._used += len(index)
        if self._used == whole:
            self._begin_next()
        return batch

    def _begin_next(self) -> None:
        self._window, self._place, self._used = self._window + 1, self._following.as_dict(), 0
        self._rows = None

    def show(self, step: int, rows: slice | None = None) -> list[Shown]:
        raise ConfigError("a stream cannot be asked for a step; set hf_streaming=false", id="cli.usage")

    def summary(self, steps: int | None = None) -> dict[str, Any]:
        """Accounting after `steps` batches, as `Dataset.summary`; documents as far as the stream was read. How long an
        epoch is, is known at the end of the first; until then epochs are 0."""
        if steps is None:
            raise ValueError("the data are endless: say how many steps")
        seen = dict(self._following.seen if self._rows is not None else self._place["seen"])
        of_epoch = seen.pop(_EPOCH, 0)
        dropped = {reason: count for reason, count in seen.items() if reason not in ("documents", "tokens")}
        slots = steps * self.global_batch
        return {
            "rows": slots,
            "rows_repeated": max(0, slots - of_epoch // self.length) if of_epoch else 0,
            "rows_unseen": 0,
            "epochs": slots * self.length / of_epoch if of_epoch else 0.0,
            "tokens": slots * self.length,
            "padding": 0,
            "dropped": dropped,
            "packing_efficiency": 1.0,
        }


def open_train(cfg: Config, tokenizer: Tokenizer, global_batch: int) -> Dataset | StreamDataset:
    """The training split: by index, or as a stream where hf_streaming says so. Raises DataError."""
    if not cfg.hf_streaming:
        return opening.open_split(cfg, tokenizer, "train", global_batch)
    opening.check_tokenizer(cfg, tokenizer)
    return open_stream(cfg, tokenizer, global_batch)


def open_stream(cfg: Config, tokenizer: Tokenizer, global_batch: int) -> StreamDataset:
    """The training split of a Hugging Face data set, streamed. Raises DataError."""
    words = opening.words_of(cfg, tokenizer)
    how = recipe.hf_arguments(cfg, "train", streaming=True)
    unit = Unit("hf", f"{cfg.hf_path}/{cfg.train_split}", how, 0, 1 << 62, **recipe.column(cfg, "train"))
    epochs = None if cfg.num_epoch < 0 else cfg.num_epoch
    reader = Reader(hub.stream(how), unit, words, cfg.max_target_length, epochs)
    fingerprint = opening.fingerprint_of(cfg, "train", global_batch) | {
        "stream": [STREAM_VERSION, *_identity(cfg, how)],
        "tokenizer": tokenizer.fingerprint,
        "add_bos": cfg.add_bos,
        "add_eos": cfg.add_eos,
        "column": cfg.train_data_columns[0],
    }
    return StreamDataset(
        source=f"hf: {cfg.hf_path}, streamed",
        length=cfg.max_target_length,
        global_batch=global_batch,
        fingerprint=fingerprint,
        reader=reader,
        seed=cfg.data_shuffle_seed,
        shuffle=cfg.enable_data_shuffling,
    )


def _identity(cfg: Config, how: str) -> list[str]:
    """Local files by their content; a data set of the hub by the names of its files, which hold their version."""
    local = [name for name in cfg.hf_train_files if "://" not in name]
    if len(local) == len(cfg.hf_train_files) and local:
        files = sources.find(local, "hf_train_files")
        return [f"{f.name.rpartition('/')[2]} {f.size} bytes {sources.digest(f)}" for f in files]
    return [how, *hub.versions(how)]
