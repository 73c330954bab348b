"""CRC-32, the one of zlib, whoever computes it: zlib-ng does so with the processor's carry-less multiplication, 15
times as fast, and is a dependency for that; where it is not installed the numbers are the same, later."""

from __future__ import annotations

import os
from io import FileIO
from typing import Any

try:
    from zlib_ng.zlib_ng import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

_BLOCK = 1 << 18  # what was just read is still in the core's cache


def update(data: Any, value: int = 0) -> int:
    """The CRC-32 of what `value` is the CRC-32 of, followed by the contiguous buffer `data`."""
    return _crc32(data, value)


def of_file(file: FileIO) -> tuple[int, int]:
    """(bytes, CRC-32) of what an unbuffered file holds from here on, read in blocks."""
    size = value = 0
    block = memoryview(bytearray(min(_BLOCK, os.fstat(file.fileno()).st_size + 1)))
    while count := file.readinto(block):
        value, size = update(block[:count], value), size + count
    return size, value


def text(value: int) -> str:
    """8 hexadecimal digits, as manifests have it."""
    return f"{value:08x}"
