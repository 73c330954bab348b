"""A unit: a part of the data that can be read by itself, in any process, always with the same documents.

Documents of a file are numbered in the order in which its units stand; a document's name (`web.jsonl:17`) is that of
its file and its number there, which never changes while the file does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from MaxText.data import sources
from MaxText.errors import DataError


@dataclass(frozen=True)
class Unit:
    """What one reader reads in one go. start, stop: bytes, records or row groups, as the reader counts.

    column: the column of a record that holds the document. ids: it holds token ids. size: bytes, about.
    """

    reader: str
    name: str  # of the file, for people
    path: str
    start: int
    stop: int
    column: str = "text"
    ids: bool = False
    size: int = 0
    vocabulary: int = 0  # of the model: the width of raw ids in a .bin file


class Fault(NamedTuple):
    """Why one document cannot be used. id: of the error; text: completes "DOCUMENT ..."."""

    id: str
    text: str


class Item(NamedTuple):
    """The next document of a unit: text in UTF-8 or token ids; None with a fault, or for an empty line."""

    content: bytes | np.ndarray | None
    fault: Fault | None = None


READERS = {
    "text": "text",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "arrayrecord": "records",
    "tfrecord": "records",
    "tokens": "tokens",
    "hf": "hub",
}
"""Reader → its module in `formats`."""

COUNTED = frozenset({"arrayrecord", "tfrecord", "hf"})
"""Readers whose units begin with a record that is known by its number."""

_BY_ENDING = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrayrecord": (".array_record", ".arrayrecord"),
    "tfrecord": (".tfrecord",),
    "tokens": (".npy", ".bin"),
}


def reader_of(path: str) -> str:
    """The reader for a file, by the ending of its name: text for an unknown one."""
    name = path.rpartition("/")[2].lower().removesuffix(".gz")
    shard = name.partition("-0")[0]  # tfds: NAME.tfrecord-00000-of-00001
    for reader, endings in _BY_ENDING.items():
        if name.endswith(endings) or shard.endswith(endings):
            return reader
    return "text"


def split(unit: Unit) -> list[Unit]:
    """`unit`, a whole file, cut where its reader can begin. Raises DataError for a file of another form."""
    return _module(unit).split(unit)


def read(unit: Unit) -> Iterator[Item]:
    """The documents of `unit`, in order. Raises DataError for a damaged file; one bad document is an Item's fault."""
    reader: Callable[[Unit], Iterator[Item]] = _module(unit).read
    return reader(unit)


def document_name(unit: Unit, number: int) -> str:
    """The name of document `number` (from 0) of a file: `a.txt`, `web.jsonl:LINE` (from 1), `x.parquet#ROW`."""
    return name_of(unit.name, unit.reader, number)


def name_of(file: str, reader: str, number: int) -> str:
    if reader == "text":
        return file
    return f"{file}:{number + 1}" if reader == "jsonl" else f"{file}#{number}"


def field(unit: Unit, record: dict[str, Any], first: bool) -> Item:
    """The document in the column of `record`.

    The first record of a file decides whether the column exists (DataError); a later one without it is a bad document.
    """
    if unit.column not in record:
        there = ", ".join(sorted(map(str, record))) or "nothing"
        if first:
            raise missing_column(unit, there)
        return Item(None, Fault("data.schema", f"has no column {unit.column}, unlike those before it (it has {there})"))
    return content(unit, record[unit.column])


def content(unit: Unit, value: Any) -> Item:
    """The value of a column as a document."""
    if value is None:
        return Item(b"")
    if unit.ids:
        ids = np.asarray(value)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):
            return Item(ids.astype(np.int64))
        return Item(None, Fault("data.schema", f"holds {type(value).__name__} in column {unit.column}, not token ids"))
    if isinstance(value, str):
        return Item(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return Item(value)
    what = type(value).__name__
    hint = "; for token ids set tokenize_train_data=false" if what in ("list", "ndarray") else ""
    return Item(None, Fault("data.schema", f"holds {what} in column {unit.column}, not text{hint}"))


def missing_column(unit: Unit, there: str) -> DataError:
    return DataError(
        f"{unit.name} has no column {unit.column}; it has {there}. Set train_data_columns=[NAME] "
        "(or eval_data_columns for held-out data).",
        id="data.column",
    )


def local_only(unit: Unit, why: str) -> DataError:
    return DataError(
        f"{unit.name} is not a local path, and {why}. Copy the file, or mount its folder.", id="data.local"
    )


def damaged(unit: Unit, why: object) -> DataError:
    return DataError(
        f"{unit.name} is damaged or cut short: {_said(why)}. Make or copy it again.",
        id="data.truncated",
    )


def _said(why: object) -> str:
    """The first line of it; libraries raise errors without a word too."""
    return (str(why).strip().splitlines() or [type(why).__name__])[0]


@contextlib.contextmanager
def reading(unit: Unit) -> Iterator[None]:
    """What a library raises on damaged bytes, of whatever kind, as DataError with the file's name."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise (damaged(unit, error) if error.errno is None else sources.unreadable(unit.name, error)) from error
    except Exception as error:  # there is no list of them: they are of the library, and of what it is made of
        raise damaged(unit, error) from error


def _module(unit: Unit) -> Any:
    return import_module(f"MaxText.data.formats.{READERS[unit.reader]}")
