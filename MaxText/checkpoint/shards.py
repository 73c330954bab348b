"""Arrays in pieces: each process writes those that its devices hold, and reads those that they need.

On disk a piece is a chunk of the zarr array that Orbax describes: an even split of every dim, one file each,
uncompressed, named by its place in the grid ("1.0"). The manifest's checksums of files are the checksums of pieces.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import crc
from MaxText.checkpoint import arrays, manifest
from MaxText.checkpoint.manifest import File
from MaxText.checkpoint.tree import Leaf, folder_name, numpy_dtype

Index = tuple[slice, ...]
_BLOCK = 1 << 18  # what was just read is still in the core's cache


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


def describe_in(state: Path, described: Mapping[str, Description]) -> None:
    """Make the new folder `state` with the arrays' descriptions, in the same words, but without Orbax's of the tree."""
    for name, one in described.items():
        words = one.dtype.name if one.dtype.kind == "V" else one.dtype.str
        content = {
            "chunks": [max(1, size) for size in one.chunks],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": words,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(one.shape),
            "zarr_format": 2,
        }
        (state / folder_name(name)).mkdir(parents=True)
        (state / folder_name(name) / ".zarray").write_text(json.dumps(content, separators=(",", ":"), sort_keys=True))


def write(state: Path, pieces: arrays.Host, *, sync: bool = True) -> dict[str, File]:
    """Write `pieces`, with `sync` to the disk; their sizes and checksums, by path. OSError if one reads back wrong."""
    crcs = arrays.start_checksums(pieces)
    for path, piece in pieces.items():
        with open(state / path, "wb") as file:
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    for folder in {(state / path).parent for path in pieces} if sync else ():
        manifest.sync_folder(folder)
    files = {path: manifest.fingerprint(state / path, sync=sync) for path in pieces}
    arrays.require_read_back(files, {path: piece.nbytes for path, piece in pieces.items()}, crcs)
    return files


# --- reading ---------------------------------------------------------------------------------------------------------


class Damaged(Exception):
    """The text says which file (by its path below the state's folder), of which array, and how."""

    def __init__(self, path: str, problem: str, array: str = "") -> None:
        super().__init__(f"file state/{path}" + (f" (array {array})" if array else "") + f": {problem}")
        self.path, self.problem = path, problem


Source = Callable[[str], np.ndarray]  # path below the state's folder -> its bytes, as they were saved; raises Damaged


@dataclass(frozen=True)
class Files:
    """A source: the files below `state`, each compared with its size and, with `verify`, its checksum."""

    state: Path
    saved: Mapping[str, File]
    verify: bool = True

    def __call__(self, path: str) -> np.ndarray:
        if (saved := self.saved.get(path)) is None:
            raise Damaged(path, "it is not in the manifest")
        try:
            data, found = _load(self.state / path, saved.size, self.verify)
        except OSError as error:
            raise Damaged(path, str(error.strerror or error)) from error
        if found not in (None, saved.crc):
            raise Damaged(path, f"its bytes have changed (CRC {found}, saved {saved.crc})")
        return data


def _load(path: Path, size: int, verify: bool) -> tuple[np.ndarray, str | None]:
    """The file's bytes, uint8, and their checksum, taken block by block while they are in the cache."""
    data = np.empty(size, np.uint8)
    rest, value = memoryview(data), 0
    with open(path, "rb", buffering=0) as file:
        while rest:
            count = file.readinto(rest[:_BLOCK])
            if not count:
                raise OSError(errno.EIO, f"{size - len(rest)} bytes, {size} were saved")
            if verify:
                value = crc.update(rest[:count], value)
            rest = rest[count:]
    return data, crc.text(value) if verify else None


class Pieces:
    """One array on disk, read by regions."""

    def __init__(self, source: Source, name: str, leaf: Leaf) -> None:
        self._source, self._name, self._leaf = source, name, leaf
        self._dtype = numpy_dtype(leaf.dtype)
        self._chunks = self._grid()
        self._loaded: dict[str, np.ndarray] = {}
        self._regions: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def _grid(self) -> tuple[int, ...]:
        """The chunk shape, if the array is stored as this module stores arrays."""
        path = f"{folder_name(self._name)}/.zarray"
        try:
            found = json.loads(self._source(path).tobytes())
            plain = (found["compressor"], found["order"], found.get("dimension_separator", ".")) == (None, "C", ".")
            if plain and tuple(found["shape"]) == self._leaf.shape:
                return tuple(found["chunks"])
        except (ValueError, KeyError) as error:
            raise Damaged(path, str(error), self._name) from error
        raise Damaged(path, f"not an uncompressed array of shape {list(self._leaf.shape)}", self._name)

    def read(self, index: Index | None) -> np.ndarray:
        """The region `index`: one slice for each dim."""
        assert index is not None
        spans = tuple(one.indices(size)[:2] for one, size in zip(index, self._leaf.shape, strict=True))
        if spans not in self._regions:
            self._regions[spans] = self._region(spans)
        return self._regions[spans]

    def _region(self, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
        shape = tuple(stop - start for start, stop in spans)
        places = list(self._places(spans))
        if len(places) == 1 and shape == self._chunks:
            return self._chunk(places[0])
        region = np.empty(shape, self._dtype)
        for place in places:
            origin = [p * size for p, size in zip(place, self._chunks, strict=True)]
            lows = [max(start, o) for (start, _), o in zip(spans, origin, strict=True)]
            highs = [min(stop, o + n) for (_, stop), o, n in zip(spans, origin, self._chunks, strict=True)]
            into = tuple(slice(lo - s, hi - s) for lo, hi, (s, _) in zip(lows, highs, spans, strict=True))
            from_ = tuple(slice(lo - o, hi - o) for lo, hi, o in zip(lows, highs, origin, strict=True))
            region[into] = self._chunk(place)[from_]
        return region

    def _places(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """The chunks that a region touches."""
        ranges = (
            range(start // n, -(-stop // n) if stop > start else start // n)
            for (start, stop), n in zip(spans, self._chunks, strict=True)
        )
        return itertools.product(*ranges)

    def _chunk(self, place: tuple[int, ...]) -> np.ndarray:
        name = chunk_name(place)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> np.ndarray:
        path = f"{folder_name(self._name)}/{name}"
        try:
            data = self._source(path)
        except Damaged as error:
            raise Damaged(path, error.problem, self._name) from error
        if data.size != math.prod(self._chunks) * self._dtype.itemsize:
            raise Damaged(path, f"{data.size} bytes for {self._leaf.dtype}{list(self._chunks)}", self._name)
        return data.view(self._dtype).reshape(self._chunks)


def read(source: Source, leaves: Mapping[str, Leaf], targets: Mapping[str, Any]) -> list[Any]:
    """The arrays of `targets` on this process's devices, each with its target's `.sharding`, in their order.

    Raises Damaged. A few arrays are in memory at a time, in so far as this process needs them: threads read and check
    those to come while one goes to the devices.
    """
    import jax

    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = {name: target.sharding or here for name, target in targets.items()}

    def load(name: str) -> Pieces:
        pieces = Pieces(source, name, leaves[name])
        for index in shardings[name].addressable_devices_indices_map(leaves[name].shape).values():
            pieces.read(index)
        return pieces

    placed = []
    for name, pieces in zip(targets, arrays.ahead(load, targets), strict=True):
        placed.append(jax.make_array_from_callback(leaves[name].shape, shardings[name], pieces.read))
    return placed


def below(files: Mapping[str, File], folder: str) -> dict[str, File]:
    """Those in `folder`, by their paths from there."""
    return {path[len(folder) + 1 :]: file for path, file in files.items() if path.startswith(folder + os.sep)}
