"""Plain text: a file is one document. `.gz` is unpacked."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from MaxText.data.sources import open_binary, unreadable
from MaxText.data.units import Item, Unit, damaged


def split(unit: Unit) -> list[Unit]:
    return [unit]


def read(unit: Unit) -> Iterator[Item]:
    try:
        with unpacked(unit.path) as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(unit, error) from error
    except OSError as error:
        raise unreadable(unit.name, error) from error
    yield Item(content)


@contextlib.contextmanager
def unpacked(path: str) -> Iterator[BinaryIO]:
    """The file, unpacked where its name ends in .gz."""
    with open_binary(path) as file:
        if not path.lower().endswith(".gz"):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as inner:
            yield cast(BinaryIO, inner)
