"""Small files that say whether they are whole: JSON for people and tables for programs, each with its own checksum.

A changed bit of them would be as plausible as the right one: a weight, a type, a place in a file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import crc

_DIGEST = 32  # bytes of a SHA-256, the end of a file of tables


class Broken(Exception):
    """The file is not as it was written; the text says why."""


def text(content: dict[str, Any]) -> str:
    """`content` as JSON, its CRC-32 last."""
    checksum = crc.text(crc.update(json.dumps(content, separators=(",", ":")).encode()))
    return json.dumps(content | {"checksum": checksum}, indent=1) + "\n"


def content(data: bytes) -> dict[str, Any]:
    """What `text` was given. Raises Broken unless `data` is, byte for byte, what it returned."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Broken(f"it is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise Broken("it holds no JSON object")
    if not isinstance(found.get("checksum"), str):
        raise Broken("it has no checksum")
    written = {key: value for key, value in found.items() if key != "checksum"}
    # Not only the values: a bit can change how a number is written and leave its value.
    if text(written).encode() != data:
        raise Broken(f"it does not agree with its checksum, {found['checksum']}")
    return written


def write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all, and on the disk before this returns."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text(content))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def settle(folder: Path) -> None:
    """Send the files of `folder` to the disk: a file that says they are whole may be written after this."""
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(path: Path, **arrays: np.ndarray) -> None:
    """Tables under their names, then the SHA-256 of all of it; under another name first."""
    buffer, named = io.BytesIO(), dict[str, Any](arrays)
    np.savez(buffer, **named)
    data = buffer.getbuffer()
    temporary = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    with temporary.open("wb") as file:
        file.write(data)
        file.write(hashlib.sha256(data).digest())
    os.replace(temporary, path)


def load(path: Path) -> dict[str, np.ndarray]:
    """What `save` was given, in memory. Raises Broken where a byte differs, OSError where it cannot be read."""
    data = path.read_bytes()
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise Broken("it does not agree with its checksum")
    with np.load(io.BytesIO(data[:-_DIGEST])) as found:
        return dict(found)
