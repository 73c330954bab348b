"""JSON Lines: one JSON object a line, the document in one of its columns. Cut into units at line ends; `.gz` is one."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from MaxText.data.formats.text import unpacked
from MaxText.data.sources import unreadable
from MaxText.data.units import Fault, Item, Unit, damaged, field

UNIT_BYTES = 8 << 20


def split(unit: Unit) -> list[Unit]:
    if unit.path.lower().endswith(".gz"):
        return [unit]
    edges = [*range(0, unit.stop, UNIT_BYTES), unit.stop]
    return [replace(unit, start=a, stop=b, size=b - a) for a, b in zip(edges, edges[1:], strict=False)]


def read(unit: Unit) -> Iterator[Item]:
    """The lines that begin in start .. stop-1; an empty line is an Item without content."""
    try:
        with unpacked(unit.path) as file:
            yield from _lines(unit, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(unit, error) from error
    except OSError as error:
        raise unreadable(unit.name, error) from error


def _lines(unit: Unit, file: BinaryIO) -> Iterator[Item]:
    packed = unit.path.lower().endswith(".gz")
    if unit.start:  # the line in which the unit before this one ends is that one's
        file.seek(unit.start - 1)
        file.readline()
    offset = file.tell()
    while packed or offset < unit.stop:
        line = file.readline()
        if not line:
            return
        yield _item(unit, line, offset)
        offset += len(line)


def _item(unit: Unit, line: bytes, offset: int) -> Item:
    if not line.strip():
        return Item(None)
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as error:
        at = offset + error.start
        return Item(None, Fault("data.encoding", f"is not UTF-8: {error.reason} at byte offset {at}"))
    except RecursionError:
        return Item(None, Fault("data.json", f"is nested too deeply to be read (byte offset {offset})"))
    except json.JSONDecodeError as error:
        if line.endswith(b"\n"):
            return Item(None, Fault("data.json", f"is not JSON: {error.msg} at byte offset {offset + error.pos}"))
        return Item(None, Fault("data.truncated", f"is cut short at byte offset {offset + len(line)}, the file's end"))
    if not isinstance(record, dict):
        return Item(None, Fault("data.json", f"is no JSON object but {type(record).__name__} (byte offset {offset})"))
    return field(unit, record, first=offset == 0)
