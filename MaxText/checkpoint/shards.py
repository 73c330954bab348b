"""Arrays in pieces: each process writes those that its devices hold, and reads those that they need.

On disk a piece is a chunk of the zarr array that Orbax describes: an even split of every dim, one file each,
uncompressed, named by its place in the grid ("1.0"). The manifest's checksums of files are the checksums of pieces.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.checkpoint import arrays, manifest
from MaxText.checkpoint.manifest import File
from MaxText.checkpoint.tree import Leaf, folder_name, numpy_dtype

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Description:
    """Of one array on disk: its shape, and that of its chunks."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype

    @property
    def leaf(self) -> Leaf:
        """What the manifest says of it: its checksums are those of its files."""
        return Leaf(self.shape, self.dtype.name, "")


def describe(named: Mapping[str, Any]) -> dict[str, Description]:
    """The arrays of a state, cut as their shardings cut them."""
    return {
        name: Description(tuple(x.shape), tuple(x.sharding.shard_shape(x.shape)), np.dtype(x.dtype))
        for name, x in named.items()
    }


def own_pieces(named: Mapping[str, Any]) -> dict[str, Any]:
    """The pieces for this process to write, by path below the state's folder: of equal ones on several devices the
    first counts."""
    pieces = {}
    for name, described in describe(named).items():
        for shard in named[name].addressable_shards:
            if shard.replica_id == 0 and math.prod(described.shape):
                starts = (index.start or 0 for index in shard.index)
                place = [start // size for start, size in zip(starts, described.chunks, strict=True)]
                pieces[f"{folder_name(name)}/{chunk_name(place)}"] = shard.data
    return pieces


def chunk_name(place: Iterable[int]) -> str:
    """The file of the chunk at this place of the grid."""
    return ".".join(map(str, place)) or "0"


def outline(state: Path, described: Mapping[str, Description]) -> None:
    """Make the new folder `state` as Orbax would, without the arrays' bytes."""
    arrays.write(state, {name: np.zeros((), one.dtype) for name, one in described.items()})
    for name, one in described.items():
        reshape(state / folder_name(name), one.shape, one.chunks)


def reshape(folder: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    """Turn the scalar that was written to `folder` into an array of this shape, whose chunks are to come."""
    description = json.loads((folder / ".zarray").read_text())
    description |= {"shape": list(shape), "chunks": [max(1, size) for size in chunks]}
    (folder / ".zarray").write_text(json.dumps(description, separators=(",", ":"), sort_keys=True))
    (folder / "0").unlink(missing_ok=True)


def write(state: Path, pieces: arrays.Host) -> dict[str, File]:
    """Write `pieces` and send them to the disk; their sizes and checksums, by path. OSError if one reads back wrong."""
    crcs = arrays.start_checksums(pieces)
    for path, piece in pieces.items():
        with open(state / path, "wb") as file:
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    for folder in {(state / path).parent for path in pieces}:
        manifest.sync_folder(folder)
    files = {path: manifest.fingerprint(state / path, sync=True) for path in pieces}
    arrays.require_read_back(files, {path: piece.nbytes for path, piece in pieces.items()}, crcs)
    return files


# --- reading ---------------------------------------------------------------------------------------------------------


class Damaged(Exception):
    """The text says which file, and how."""


class Pieces:
    """One array on disk, read by regions; each file that is touched is checked against its checksum."""

    def __init__(self, state: Path, name: str, leaf: Leaf, files: Mapping[str, File]) -> None:
        """`files`: of the step, by path below `state`."""
        self._folder, self._leaf, self._files = state / folder_name(name), leaf, files
        self._dtype = numpy_dtype(leaf.dtype)
        self._chunks = _chunks(self._folder, leaf)
        self._loaded: dict[str, np.ndarray] = {}

    def read(self, index: Index | None) -> np.ndarray:
        """The region `index`: one slice for each dim."""
        assert index is not None
        spans = [one.indices(size)[:2] for one, size in zip(index, self._leaf.shape, strict=True)]
        region = np.empty([stop - start for start, stop in spans], self._dtype)
        for place in self._places(spans):
            origin = [p * size for p, size in zip(place, self._chunks, strict=True)]
            lows = [max(start, o) for (start, _), o in zip(spans, origin, strict=True)]
            highs = [min(stop, o + n) for (_, stop), o, n in zip(spans, origin, self._chunks, strict=True)]
            into = tuple(slice(lo - s, hi - s) for lo, hi, (s, _) in zip(lows, highs, spans, strict=True))
            from_ = tuple(slice(lo - o, hi - o) for lo, hi, o in zip(lows, highs, origin, strict=True))
            region[into] = self._chunk(chunk_name(place))[from_]
        return region

    def _places(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """The chunks that a region touches."""
        ranges = (
            range(start // n, -(-stop // n) if stop > start else start // n)
            for (start, stop), n in zip(spans, self._chunks, strict=True)
        )
        return itertools.product(*ranges)

    def _chunk(self, name: str) -> np.ndarray:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> np.ndarray:
        path = self._folder / name
        saved = self._files.get(f"{self._folder.name}/{name}")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Damaged(f"file {path}: {error.strerror}") from error
        if saved is None or len(data) != math.prod(self._chunks) * self._dtype.itemsize:
            raise Damaged(f"file {path}: {len(data)} bytes, for {self._leaf.dtype}{list(self._chunks)}")
        if (found := manifest.crc(data)) != saved.crc:
            raise Damaged(f"file {path}: its bytes have changed (CRC {found}, saved {saved.crc})")
        return np.frombuffer(data, self._dtype).reshape(self._chunks)


def _chunks(folder: Path, leaf: Leaf) -> tuple[int, ...]:
    """The chunk shape of the array in `folder`, if it is stored as this module stores arrays."""
    try:
        found = json.loads((folder / ".zarray").read_text())
        plain = (found["compressor"], found["order"], found.get("dimension_separator", ".")) == (None, "C", ".")
        if plain and tuple(found["shape"]) == leaf.shape:
            return tuple(found["chunks"])
        raise Damaged(f"file {folder / '.zarray'}: not an uncompressed array of shape {list(leaf.shape)}")
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"file {folder / '.zarray'}: {error}") from error


def read(state: Path, leaves: Mapping[str, Leaf], files: Mapping[str, File], targets: Mapping[str, Any]) -> list[Any]:
    """The arrays of `targets` on this process's devices, each with its target's `.sharding`, in their order.

    Raises Damaged. One array is in memory at a time, in so far as this process needs it.
    """
    import jax

    placed = []
    for name, target in targets.items():
        pieces = Pieces(state, name, leaves[name], files)
        sharding = target.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed.append(jax.make_array_from_callback(leaves[name].shape, sharding, pieces.read))
    return placed


def below(files: Mapping[str, File], folder: str) -> dict[str, File]:
    """Those in `folder`, by their paths from there."""
    return {path[len(folder) + 1 :]: file for path, file in files.items() if path.startswith(folder + os.sep)}
