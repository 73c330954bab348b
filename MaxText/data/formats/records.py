"""Files of records: ArrayRecord through Grain, by index; TFRecord front to back, by its own few lines, no TensorFlow.

A record is a `tf.train.Example`, a JSON object (the document in one of their columns), or plain text; the first record
of a file says which. Where that is text, a later record of another form is a bad document.

https://www.tensorflow.org/tutorials/load_data/tfrecord has the frames of TFRecord and their masked CRC-32C.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from MaxText.data.formats import example
from MaxText.data.formats.text import unpacked
from MaxText.data.units import Fault, Item, Unit, damaged, field, local_only, reading
from MaxText.tokenizer.library import need

UNIT_RECORDS = 8192
_READ_AT_ONCE = 256


def split(unit: Unit) -> list[Unit]:
    if unit.reader == "tfrecord":
        return [replace(unit, start=0, stop=1 << 62)]
    return by_count(replace(unit, start=0, stop=len(_array_record(unit))))


def by_count(unit: Unit) -> list[Unit]:
    """A unit of many records cut into units of UNIT_RECORDS."""
    count = unit.stop - unit.start
    edges = [*range(unit.start, unit.stop, UNIT_RECORDS), unit.stop]
    size = unit.size * UNIT_RECORDS // max(count, UNIT_RECORDS)
    return [replace(unit, start=a, stop=b, size=size) for a, b in zip(edges, edges[1:], strict=False)]


def read(unit: Unit) -> Iterator[Item]:
    records = (
        islice(_tfrecords(unit), unit.start, min(unit.stop, sys.maxsize))
        if unit.reader == "tfrecord"
        else _by_index(unit)
    )
    form: Callable[[Unit, bytes, bool], Item] | None = None
    for i, record in enumerate(records):
        form = form or form_of(record)
        yield form(unit, record, i == 0 and unit.start == 0)


def form_of(record: bytes) -> Callable[[Unit, bytes, bool], Item]:
    """How the records of a file are read, by one of them."""
    if record[:1] == b"{":
        return _json
    try:
        example.parse(record)
    except example.NotAnExample:
        return _text
    return _example


def _example(unit: Unit, record: bytes, first: bool) -> Item:
    try:
        return field(unit, dict(example.parse(record)), first)
    except example.NotAnExample as error:
        return Item(None, Fault("data.schema", f"is no tf.train.Example, unlike those before it ({error})"))


def _json(unit: Unit, record: bytes, first: bool) -> Item:
    try:
        fields = json.loads(record)
    except RecursionError:
        return Item(None, Fault("data.json", "is nested too deeply to be read"))
    except ValueError as error:
        return Item(None, Fault("data.json", f"is not JSON: {error}"))
    if not isinstance(fields, dict):
        return Item(None, Fault("data.json", f"is no JSON object but {type(fields).__name__}"))
    return field(unit, fields, first)


def _text(unit: Unit, record: bytes, first: bool) -> Item:
    """An object in JSON is text too, but not what the writer of a file of records meant by it."""
    if record[:1] == b"{" and isinstance(_json(unit, record, first).content, bytes | np.ndarray):
        return Item(None, Fault("data.schema", "is a JSON object, and the file's first record is plain text"))
    if record and form_of(record) is _example:
        return Item(None, Fault("data.schema", "is a tf.train.Example, and the file's first record is plain text"))
    return Item(record)


def _array_record(unit: Unit) -> Any:
    if "://" in unit.path:
        raise local_only(unit, "the ArrayRecord library opens no other")
    grain = need("grain.python", "grain", f"{unit.name} (ArrayRecord)")
    with reading(unit):
        return grain.ArrayRecordDataSource([unit.path])


def _by_index(unit: Unit) -> Iterator[bytes]:
    source = _array_record(unit)
    for first in range(unit.start, unit.stop, _READ_AT_ONCE):
        last = min(first + _READ_AT_ONCE, unit.stop)
        with reading(replace(unit, name=f"{unit.name}, in records {first} to {last - 1},")):
            found = source.__getitems__(range(first, last))
        yield from found


def _tfrecords(unit: Unit) -> Iterator[bytes]:
    with reading(unit), unpacked(unit.path) as file:
        yield from _frames(unit, file)


def _frames(unit: Unit, file: BinaryIO) -> Iterator[bytes]:
    """Each record is its length (8 bytes), a checksum of that (4), the bytes, a checksum of those (4)."""
    offset = 0
    while head := file.read(12):
        if len(head) < 12:
            raise damaged(unit, f"no whole record at byte offset {offset}")
        length, checksum = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != checksum:  # or a changed length would be asked of the memory
            raise damaged(unit, f"the record's length at byte offset {offset} ({length}) is not that of its checksum")
        body = file.read(length + 4)
        if len(body) < length + 4:
            raise damaged(unit, f"no whole record at byte offset {offset}")
        yield body[:-4]
        offset += 16 + length


def masked_crc(data: bytes) -> int:
    """CRC-32C of a few bytes, rotated and moved as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_OF[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in table]
    return table


_CRC_OF = _table()
