"""Token ids on disk, mapped into memory and never copied: `.npy` (one dim of integers) or `.bin` (raw little-endian
uint16, or uint32 where the model's vocabulary is above 65,536). Documents end with the eos id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from MaxText.data.units import Item, Unit, damaged, local_only, reading


def split(unit: Unit) -> list[Unit]:
    return [replace(unit, ids=True)]


def read(unit: Unit) -> Iterator[Item]:
    """All ids of the file as one Item; `tokenize` finds the documents in it."""
    yield Item(array(unit))


def array(unit: Unit) -> np.ndarray:
    """The ids of the file as a memory map [tokens]."""
    if "://" in unit.path:
        raise local_only(unit, "token ids are mapped into memory")
    with reading(unit):
        if unit.path.endswith(".npy"):
            ids = np.load(unit.path, mmap_mode="r")
        else:
            dtype = np.dtype("<u2" if unit.vocabulary <= 1 << 16 else "<u4")
            if unit.stop % dtype.itemsize:
                raise damaged(unit, f"{unit.stop} bytes are no whole number of {dtype.itemsize}-byte ids")
            ids = np.memmap(unit.path, dtype, mode="r")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise damaged(unit, f"it holds {ids.dtype} of shape {list(ids.shape)}, not integers [tokens]")
    return ids.view(np.ndarray)
