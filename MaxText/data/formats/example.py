"""`tf.train.Example` read from its protocol buffer encoding, so that no TensorFlow is needed.

Example{1: Features{1: map entry{1: name, 2: Feature{1: BytesList | 2: FloatList | 3: Int64List}}}}; lists hold field 1,
packed or not. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

Value = bytes | list[int] | None
_INT64 = 1 << 64


class NotAnExample(ValueError):
    """Bytes that are no Example."""


def parse(data: bytes) -> dict[str, Value]:
    """Feature name → its first bytes, its integers as a list, or None for floats and empty ones."""
    found: dict[str, Value] = {}
    for number, features in _fields(data):
        if number != 1 or not isinstance(features, bytes):
            raise NotAnExample("no Features in field 1")
        for _, entry in _fields(features):
            parts = dict(_fields(_bytes(entry)))
            found[_bytes(parts.get(1)).decode("utf-8", "replace")] = _feature(_bytes(parts.get(2, b"")))
    if not found:
        raise NotAnExample("no features")
    return found


def _feature(data: bytes) -> Value:
    for kind, body in _fields(data):
        values = list(_fields(_bytes(body)))
        if kind == 1:
            return _bytes(values[0][1]) if values else b""
        if kind == 3:
            return [_signed(number) for _, value in values for number in _numbers(value)]
    return None


def _numbers(value: int | bytes) -> Iterator[int]:
    """One integer, or those of a packed list."""
    if isinstance(value, int):
        yield value
        return
    position = 0
    while position < len(value):
        number, position = _varint(value, position)
        yield number


def _signed(value: int) -> int:
    return value - _INT64 if value >= _INT64 // 2 else value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) for each field: an int for varints, bytes for everything else."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise NotAnExample(f"wire type {wire}")
        if not number or position + size > len(data):
            raise NotAnExample("a field beyond the end")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
        shift += 7
    raise NotAnExample("a number beyond the end")


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise NotAnExample("a number where bytes belong")
    return value
