"""The manifest of a step: written last and atomically, it is the only sign that the step exists.

    {"format": 2, "step": 200, "leaves": {name: {shape, dtype, crc}}, "files": {path: {size, crc}},
     "meta": {…}, "versions": {…}, "written": "…", "checksum": "…"}

`path` is relative to the step's folder; `checksum` is the CRC-32 of the rest, as compact JSON with sorted keys.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from MaxText import crc as crc32
from MaxText import faults
from MaxText.checkpoint.tree import Leaf, folder_name
from MaxText.errors import StorageError

FORMAT = 2  # 1 had no arrays in pieces: every leaf had a checksum
NAME = "manifest.json"
_THREADS = 8


@dataclass(frozen=True)
class File:
    """One file of the step: its length in bytes and the CRC-32 of its content."""

    size: int
    crc: str


@dataclass(frozen=True)
class Manifest:
    """What one step holds. `meta` is the caller's: any JSON."""

    step: int
    leaves: dict[str, Leaf]
    files: dict[str, File]
    meta: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    written: str = ""
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it, without the checksum."""
        return vars(self) | {
            "leaves": {name: vars(leaf) | {"shape": list(leaf.shape)} for name, leaf in self.leaves.items()},
            "files": {path: vars(file) for path, file in self.files.items()},
        }


class Invalid(Exception):
    """There is no valid manifest here; the text says why. `newer`: a later version of this program wrote it."""

    def __init__(self, reason: str, *, newer: bool = False, absent: bool = False):
        super().__init__(reason)
        self.newer = newer
        self.absent = absent


def crc(data: Any) -> str:
    """Return the CRC-32 of a contiguous buffer."""
    return crc32.text(crc32.update(data))


def _checksum(content: Mapping[str, Any]) -> str:
    return crc(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write(folder: Path, manifest: Manifest) -> None:
    """Make the step in `folder` exist: on return its manifest is on the disk, and before that there is none."""
    content = manifest.as_dict()
    temporary = folder / (NAME + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content | {"checksum": _checksum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    faults.point("save.manifest-temporary")
    os.replace(temporary, folder / NAME)
    sync_folder(folder)
    faults.point("save.manifest")


def read(folder: Path) -> Manifest:
    """Read the manifest of the step in `folder`; raise Invalid where there is none that can be trusted."""
    try:
        content = json.loads((folder / NAME).read_bytes())
    except FileNotFoundError:
        raise Invalid("it has no manifest: its save did not finish", absent=True) from None
    except (OSError, ValueError) as error:
        raise Invalid(f"its manifest cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise Invalid("its manifest is damaged (checksum)")
    if content["format"] > FORMAT:
        raise Invalid(f"its format is {content['format']}; this version reads up to {FORMAT}", newer=True)
    if folder.name != str(content["step"]):
        raise Invalid(f"its manifest is of step {content['step']}")
    return from_dict(content)


def from_dict(content: Mapping[str, Any]) -> Manifest:
    """Invert `Manifest.as_dict`."""
    leaves = {name: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["crc"]) for name, leaf in content["leaves"].items()}
    files = {path: File(**file) for path, file in content["files"].items()}
    return Manifest(**{**content, "leaves": leaves, "files": files})


# --- the files of a step ---------------------------------------------------------------------------------------------


def survey(folder: Path, skip: Collection[str] = (), *, sync: bool = True) -> dict[str, File]:
    """Read every file below `folder`, with `sync` send it and its folder to the disk, and return sizes and checksums.

    Paths in `skip` are left out: their writers have done it.
    """
    found: dict[str, File] = {}
    for parent, _, names in os.walk(folder):
        paths = {Path(parent, name).relative_to(folder).as_posix(): Path(parent, name) for name in sorted(names)}
        found |= {name: fingerprint(path, sync=sync) for name, path in paths.items() if name not in skip}
        if sync:
            sync_folder(Path(parent))
    return found


def fingerprint(path: Path, *, sync: bool = False) -> File:
    """Size and checksum of a file's content; with `sync`, which is then on the disk."""
    with open(path, "rb", buffering=0) as file:
        size, value = crc32.of_file(file)
        if sync:
            os.fsync(file.fileno())
    return File(size, crc32.text(value))


def differences(folder: Path, manifest: Manifest, *, contents_up_to: float = math.inf) -> list[str]:
    """Return a sentence for each file that is missing, has another length, or holds other bytes than were saved.

    Files longer than `contents_up_to` bytes are not read.
    """
    with ThreadPoolExecutor(_THREADS) as pool:  # small files of a cold disk are mostly waiting
        paths, files = [folder / path for path in manifest.files], manifest.files.values()
        problems = list(pool.map(_difference, paths, files, itertools.repeat(contents_up_to)))
    return [
        f"{_locate(path, manifest)}: {problem}"
        for path, problem in zip(manifest.files, problems, strict=True)
        if problem
    ]


def _difference(path: Path, saved: File, contents_up_to: float) -> str | None:
    try:
        size = path.stat().st_size
        if size != saved.size:
            return f"{size} bytes, {saved.size} were saved"
        if size <= contents_up_to and (found := fingerprint(path).crc) != saved.crc:
            return f"its bytes have changed (CRC {found}, saved {saved.crc})"
    except OSError as error:
        return str(error.strerror)
    return None


def _locate(path: str, manifest: Manifest) -> str:
    """Name a file and the leaf that it holds."""
    parents = path.split("/")
    leaf = next((name for name in manifest.leaves if folder_name(name) in parents), None)
    return f"file {path}" + (f" (array {leaf})" if leaf else "")


def damaged(folder: Path, problems: Iterable[str]) -> StorageError:
    """Return the error for a step that has a manifest but does not hold what it says."""
    return StorageError(
        f"the checkpoint {folder} is damaged:\n" + "\n".join(f"  {problem}" for problem in problems),
        id="checkpoint.damaged",
    )


def sync_folder(folder: Path) -> None:
    """Send the entries of `folder` itself to the disk: a rename is durable only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
