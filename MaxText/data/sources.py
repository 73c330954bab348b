"""The files of a split: found and checked, nothing read.

A name in a list of files is `builtin:NAME` (a text that comes with the package), a path (absolute, or relative to the
working directory, `~` allowed), a URL (`gs://`, `s3://`, ... : what fsspec opens), a folder (all data files below it),
or a glob pattern of any of these.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import logging
import os
import stat
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from MaxText.errors import DataError
from MaxText.tokenizer.library import need

BUILTIN = "builtin:"
TEXTS = Path(__file__).resolve().parent.parent / "texts"
ENDINGS = (
    ".txt", ".text", ".md", ".jsonl", ".ndjson", ".json", ".parquet", ".array_record", ".arrayrecord", ".tfrecord",
    ".npy", ".bin",
)  # fmt: skip
_BLOCK = 1 << 20
_SAMPLED = 1 << 32  # bytes; of a larger file every so many blocks are hashed
_SAMPLES = 1024


@dataclass(frozen=True)
class File:
    """A file of a split. `name` is what the user wrote, or the path that a pattern of theirs found."""

    name: str
    path: str  # local, or a URL
    size: int
    identity: Hashable  # the same for every name of one file


def find(names: Sequence[str], key: str) -> list[File]:
    """The files that configuration key `key` lists, in its order; those of a pattern or folder sorted by path.

    Raises DataError for a name without a file, a folder without data, anything that is not a plain file, and a file
    named twice.
    """
    if not names:
        raise DataError(f"{key} is empty: there is no text to read. Set {key}=[FILE, ...].", id="data.no-files")
    files: list[File] = []
    seen: dict[Hashable, File] = {}
    for file in (file for spec in names for file in _files(spec, key)):
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
            if file.identity == other.identity or digest(file) == digest(other):
                raise DataError(
                    f"training and held-out data hold the same file ({file.name} and {other.name}): the held-out loss "
                    "would be measured on training text. Remove it from one of them.",
                    id="data.leak",
                )


def open_binary(path: str) -> BinaryIO:
    """A local path or URL for reading. OSError as from `open`."""
    if "://" not in path:
        return open(path, "rb")
    system, inside = remote(path)
    with _only_os_errors():
        return io.BufferedReader(_Remote(system.open(inside, "rb")), _BLOCK)


def remote(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. DataError where its library is not installed."""
    core = need("fsspec.core", "fsspec", url)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback beside what it raises
    try:
        with _only_os_errors(ImportError, ValueError):
            return core.url_to_fs(url)
    except ImportError as error:
        said = str(error).strip().rstrip(".")
        raise DataError(f"{url} cannot be read: {said}.", id="data.no-library") from error
    except ValueError as error:
        raise DataError(f"{url} cannot be read: {error}", id="data.missing") from error
    except OSError as error:
        raise unreadable(url, error) from error


class _Remote(io.RawIOBase):
    """A file behind a URL, which fails as a local one does: by OSError."""

    def __init__(self, file: Any):
        self._file = file

    def readinto(self, buffer: Any) -> int:
        with _only_os_errors():
            found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextlib.contextmanager
def _only_os_errors(*others: type[Exception]) -> Iterator[None]:
    """Libraries of remote file systems have errors of their own kinds (gcsfs.retry.HttpError, google.auth's)."""
    known: tuple[type[Exception], ...] = (OSError, DataError, *others)
    try:
        yield
    except known:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise OSError(errno.EIO, f"{type(error).__name__}: {said}") from error


def read(file: File) -> bytes:
    """The content of `file`. DataError where it cannot be read or is empty."""
    try:
        with open_binary(file.path) as opened:
            content = opened.read()
    except OSError as error:
        raise unreadable(file.name, error) from error
    if not content:
        raise empty(file.name)
    return content


def digest(file: File) -> str:
    """`sha256:HEX` of the content; of a file above 4 GiB of 1,024 even blocks of it (`sampled-sha256:HEX`)."""
    try:
        with open_binary(file.path) as opened:
            if file.size <= _SAMPLED:
                sha = hashlib.sha256()
                while block := opened.read(_BLOCK):
                    sha.update(block)
                return "sha256:" + sha.hexdigest()
            sha = hashlib.sha256(str(file.size).encode())
            for i in range(_SAMPLES):
                opened.seek((file.size - _BLOCK) * i // (_SAMPLES - 1))
                sha.update(opened.read(_BLOCK))
            return "sampled-sha256:" + sha.hexdigest()
    except OSError as error:
        raise unreadable(file.name, error) from error


def unreadable(name: str, error: OSError) -> DataError:
    return DataError(f"{name} cannot be read: {error.strerror or error}.", id="data.unreadable")


def empty(name: str) -> DataError:
    return DataError(f"{name} is empty (0 bytes). Remove it from the list.", id="data.empty-file")


def _files(spec: str, key: str) -> list[File]:
    """The files that one entry of the list stands for."""
    if "://" in spec:
        return _remote_files(spec, key)
    path = _resolve(spec)
    if path.is_dir():
        return [_file(_name(p), p, key) for p in _inside(spec, path, key)]
    if not glob.has_magic(str(path)) or path.exists():
        return [_file(spec, path, key)]
    # A pattern means the files; folders that it matches too are not text.
    found = sorted(p for p in glob.glob(str(path), recursive=True) if not os.path.isdir(p))
    if not found:
        raise DataError(f"{key}: the pattern {spec} matches no file (looked for {path}).", id="data.missing")
    return [_file(_name(p), Path(p), key) for p in found]


def is_data(path: str) -> bool:
    """Whether a file of a folder is taken: by its ending, hidden ones left out."""
    name = path.rpartition("/")[2].lower()
    # tfds numbers its shards behind the ending: NAME.array_record-00000-of-00001
    return not name.startswith((".", "_")) and name.removesuffix(".gz").partition("-0")[0].endswith(ENDINGS)


def _inside(spec: str, folder: Path, key: str) -> list[str]:
    try:
        there = (p for p in folder.rglob("*") if is_data(str(p)))
        found = sorted(str(p) for p in there if p.is_file() or _leads_nowhere(p))
    except OSError as error:
        raise DataError(f"{key}: the folder {spec} cannot be read: {error.strerror}.", id="data.unreadable") from error
    if not found:
        raise DataError(
            f"{key}: the folder {spec} holds no data file ({', '.join(ENDINGS)}). Name its files: "
            f"{key}=[{spec.rstrip('/')}/*].",
            id="data.folder",
        )
    return found


def _leads_nowhere(path: Path) -> bool:
    """A link to what is not there: `_file` refuses it, as it does a missing file, rather than train on the rest."""
    return path.is_symlink() and not path.exists()


def _remote_files(spec: str, key: str) -> list[File]:
    system, path = remote(spec)
    try:
        with _only_os_errors():
            found = _remote_paths(system, path)
            if not found:
                raise DataError(f"{key}: {spec} matches no file.", id="data.missing")
            return [_remote_file(system, p) for p in found]
    except OSError as error:
        raise DataError(f"{key}: {spec} cannot be opened: {error.strerror or error}.", id="data.unreadable") from error


def _remote_paths(system: Any, path: str) -> list[str]:
    if glob.has_magic(path):
        return sorted(p for p in system.glob(path) if not system.isdir(p))
    if system.isdir(path):
        return sorted(p for p in system.find(path) if is_data(p))
    return [path] if system.exists(path) else []


def _remote_file(system: Any, path: str) -> File:
    url, size = system.unstrip_protocol(path), int(system.size(path))
    if not size:
        raise empty(url)
    return File(url, url, size, url)


def _resolve(spec: str) -> Path:
    if spec.startswith(BUILTIN):
        return TEXTS / spec.removeprefix(BUILTIN)
    return Path(spec).expanduser().absolute()


def _name(path: str) -> str:
    inside = Path(path).is_relative_to(TEXTS)
    return BUILTIN + Path(path).relative_to(TEXTS).as_posix() if inside else path


def _file(name: str, path: str | Path, key: str) -> File:
    path = Path(path)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{key}: {name} does not exist{_where(name, path)}.", id="data.missing") from error
    except OSError as error:
        raise DataError(f"{key}: {name} cannot be opened: {error.strerror}.", id="data.unreadable") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{key}: {name} is not a plain file (a device, pipe or socket).", id="data.not-a-file")
    if not status.st_size:
        raise empty(name)
    return File(name, str(path), status.st_size, (status.st_dev, status.st_ino))


def _where(name: str, path: Path) -> str:
    """Completes "does not exist" with what helps: the built-in texts there are, or the path that was looked for."""
    if name.startswith(BUILTIN):
        return "; built-in texts: " + ", ".join(_name(str(p)) for p in sorted(TEXTS.glob("**/*.txt")))
    if path.is_symlink():
        return f" (it is a link to {os.readlink(path)})"
    return "" if name == str(path) else f" (looked for {path})"
