"""Text files as documents: found, opened and checked. One file is one document.

A name in `train_files` or `eval_files` is `builtin:NAME` (a text that comes with the package), a path (absolute, or
relative to the working directory, `~` allowed), or a glob pattern of either.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from MaxText.errors import DataError

BUILTIN = "builtin:"
TEXTS = Path(__file__).resolve().parent.parent / "texts"


@dataclass(frozen=True)
class File:
    """A file of a split. `name` is what the user wrote, or the path that a pattern of theirs found."""

    name: str
    path: Path
    size: int
    identity: tuple[int, int]  # device and inode: the same for every name of one file


@dataclass(frozen=True)
class Document:
    """The UTF-8 bytes of one document and where they are from."""

    name: str
    text: bytes
    sha256: str


def find(names: Sequence[str], key: str) -> list[File]:
    """The files that configuration key `key` lists, in its order; those of a pattern sorted by path.

    Raises DataError for a name without a file, a folder, anything that is not a plain file, and a file named twice.
    """
    if not names:
        raise DataError(f"{key} is empty: there is no text to read. Set {key}=[FILE, ...].", id="data.no-files")
    files: list[File] = []
    seen: dict[tuple[int, int], File] = {}
    for file in (_file(name, path, key) for spec in names for name, path in _expand(spec, key)):
        if file.identity in seen:
            raise DataError(
                f"{key} names the same file twice: {seen[file.identity].name} and {file.name}. Remove one of them; "
                "to read the text several times set num_epoch.",
                id="data.duplicate-file",
            )
        seen[file.identity] = file
        files.append(file)
    return files


def refuse_overlap(train: Iterable[File], held_out: Iterable[File]) -> None:
    """DataError when a file of `held_out` is also in `train`: by identity, or, where sizes are equal, by content."""
    by_size: dict[int, list[File]] = {}
    for file in train:
        by_size.setdefault(file.size, []).append(file)
    for other in held_out:
        for file in by_size.get(other.size, ()):
            if file.identity == other.identity or read(file).sha256 == read(other).sha256:
                raise DataError(
                    f"train_files and eval_files hold the same text ({file.name} and {other.name}): the held-out loss "
                    "would be measured on training text. Remove it from one of them.",
                    id="data.leak",
                )


def read(file: File) -> Document:
    """The checked content of `file`. Raises DataError for an unreadable or empty file, or bytes that are not UTF-8."""
    try:
        text = file.path.read_bytes()
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror} ({file.path}).", id="data.unreadable") from error
    if not text:
        raise DataError(f"{file.name} is empty (0 bytes). Remove it from the list.", id="data.empty-file")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.name} is not UTF-8: {error.reason} at byte offset {error.start} "
            f"(0x{text[error.start]:02x}, line {text.count(10, 0, error.start) + 1}). "
            "Convert it first, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW.",
            id="data.encoding",
        ) from error
    return Document(file.name, text, hashlib.sha256(text).hexdigest())


def _expand(spec: str, key: str) -> list[tuple[str, Path]]:
    """(name, path) for each file that one entry of the list stands for."""
    path = _resolve(spec)
    if not glob.has_magic(str(path)) or path.exists():
        return [(spec, path)]
    # A pattern means the files; folders that it matches too are not text.
    found = sorted(p for p in glob.glob(str(path), recursive=True) if not os.path.isdir(p))
    if not found:
        raise DataError(f"{key}: the pattern {spec} matches no file (looked for {path}).", id="data.missing")
    return [(_name(p), Path(p)) for p in found]


def _resolve(spec: str) -> Path:
    if spec.startswith(BUILTIN):
        return TEXTS / spec.removeprefix(BUILTIN)
    return Path(spec).expanduser().absolute()


def _name(path: str) -> str:
    inside = Path(path).is_relative_to(TEXTS)
    return BUILTIN + Path(path).relative_to(TEXTS).as_posix() if inside else path


def _file(name: str, path: Path, key: str) -> File:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{key}: {name} does not exist{_where(name, path)}.", id="data.missing") from error
    except OSError as error:
        raise DataError(f"{key}: {name} cannot be opened: {error.strerror}.", id="data.unreadable") from error
    if stat.S_ISDIR(status.st_mode):
        pattern = f"{name.rstrip('/')}/*.txt"
        raise DataError(f"{key}: {name} is a folder. Name its files: {key}=[{pattern}].", id="data.folder")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{key}: {name} is not a plain file (a device, pipe or socket).", id="data.not-a-file")
    return File(name, path, status.st_size, (status.st_dev, status.st_ino))


def _where(name: str, path: Path) -> str:
    """Completes "does not exist" with what helps: the built-in texts there are, or the path that was looked for."""
    if name.startswith(BUILTIN):
        return "; built-in texts: " + ", ".join(_name(str(p)) for p in sorted(TEXTS.glob("**/*.txt")))
    if "://" in name:
        return ": only local paths and builtin: texts can be read"
    return "" if name == str(path) else f" (looked for {path})"
