"""What `data prepare` has done of its work: a folder with a part for each unit, which may be torn, or damaged since.

<folder>/recipe.json      what the parts depend on, sealed
        /NNNNNNN.npy      ids of a unit's documents
        /NNNNNNN.npz      their lengths and names, and the checksum of the ids, sealed: the sign that the part is whole
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import crc
from MaxText.data import sealed
from MaxText.data.corpus import Part
from MaxText.data.sealed import Broken
from MaxText.data.units import Fault

RECIPE = "recipe.json"
_OURS = re.compile(r"[0-9]{7}(\.[0-9]+)?\.np[yz]|recipe\.json(\.new)?")


def save(where: Path, part: Part) -> None:
    """Write a part; `where` is its path without ending."""
    temporary = f"{where}.{os.getpid()}.npy"
    np.save(temporary, part.tokens)
    about = {
        "name": where.name,
        "seen": part.seen,
        "dropped": part.dropped,
        "bad": part.bad,
        "tokens": _checksum(temporary),
    }
    os.replace(temporary, f"{where}.npy")
    text = np.array(json.dumps(about))
    sealed.save(
        Path(f"{where}.npz"), lengths=part.lengths, records=part.records, text_bytes=part.text_bytes, about=text
    )


def load(where: Path) -> Part:
    """A part, its ids mapped. Raises Broken where one of its files is missing or not as it was written."""
    try:
        found = sealed.load(Path(f"{where}.npz"))
        about = json.loads(str(found["about"]))
        if about["name"] != where.name:
            raise Broken(f"it is the part {about['name']}")
        if _checksum(f"{where}.npy") != about["tokens"]:
            raise Broken("its ids do not agree with their checksum")
        tokens = np.load(f"{where}.npy", mmap_mode="r")
    except OSError as error:
        raise Broken(f"{error.filename}: {error.strerror}") from error
    bad = [(record, Fault(*fault)) for record, fault in about["bad"]]
    return Part(tokens, found["lengths"], found["records"], found["text_bytes"], about["seen"], about["dropped"], bad)


def whole(folder: Path, names: Iterable[str], refuse: bool) -> set[str]:
    """Those of `names` whose part need not be made again; what is damaged is told. refuse: as of `Words`."""
    found, broken = set(), []
    for name in names:
        if not (folder / f"{name}.npz").exists():
            continue
        try:
            if not (load(folder / name).bad and refuse):
                found.add(name)
        except Broken as error:
            broken.append(f"{name} ({error})")
    if broken:
        _tell(f"{len(broken)} parts in {folder} are damaged and made again: {', '.join(broken[:3])}")
    return found


def finished(folder: Path) -> Iterator[Path]:
    """The signs of parts, whole or not."""
    return (path for path in folder.glob("*.npz") if re.fullmatch("[0-9]{7}", path.stem))


def recipe_of(folder: Path) -> dict[str, Any] | None:
    """What the parts of `folder` depend on. None, and no part left, where there is none that can be trusted."""
    try:
        return sealed.content((folder / RECIPE).read_bytes())
    except (FileNotFoundError, Broken) as error:
        if clear(folder):
            _tell(f"the parts in {folder} are made again, since their {RECIPE} is missing or damaged ({error})")
        return None


def clear(folder: Path) -> bool:
    """Remove what `data prepare` wrote to `folder`, and it, if it is empty then; whether a part was among it."""
    mine = [path for path in folder.iterdir() if _OURS.fullmatch(path.name)] if folder.is_dir() else []
    for path in mine:
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return any(path.suffix == ".npz" for path in mine)


def _checksum(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return crc.text(crc.of_file(file)[1])


def _tell(text: str) -> None:
    print(f"warning: {text}.", file=sys.stderr)
