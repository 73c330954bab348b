"""A step written and read piece by piece, for weights that do not fit in memory: a piece is a slice of an array along
its first dim. What is written is a step like any other."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import crc
from MaxText.checkpoint import arrays, disk, manifest, shards, tree
from MaxText.checkpoint.manifest import Manifest
from MaxText.checkpoint.store import Store
from MaxText.checkpoint.tree import numpy_dtype as numpy_dtype


@dataclass(frozen=True)
class Stream:
    """An array to come: its pieces in order, each a slice of one or more rows along the first dim."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Iterable[np.ndarray]


def save(store: Store, step: int, streams: Mapping[str, Stream], meta: dict[str, Any]) -> None:
    """Write `streams` (by leaf name) as `step` of `store`; only one piece is in memory at a time.

    If anything fails, a StorageError or another, nothing of the step is left. Raises as `Store.save`.
    """
    store.prepare()
    latest = store.latest()
    assert latest is None or step > latest, "a step is written after all that exist"
    path = store.folder / str(step)
    with disk.writing(store.folder, step, sum(math.prod(s.shape) * s.dtype.itemsize for s in streams.values())):
        store.clean()
        path.mkdir()
    try:
        skeleton = {name: np.zeros((), stream.dtype) for name, stream in streams.items()}
        with disk.writing(store.folder, step):
            arrays.write(path / "state", skeleton)  # Orbax's own description of the tree
        leaves = {name: _write(path / "state", name, stream) for name, stream in streams.items()}
        with disk.writing(store.folder, step):
            files = manifest.survey(path)
            manifest.sync_folder(store.folder)
            written = datetime.now(UTC).isoformat(timespec="seconds")
            manifest.write(path, Manifest(step, leaves, files, meta, arrays.versions(), written))
    except BaseException:
        shutil.rmtree(path)
        raise


def _write(state: Path, name: str, stream: Stream) -> tree.Leaf:
    """Replace the scalar of that name by the stream, in one chunk without compression, as the store writes."""
    folder = state / tree.folder_name(name)
    shards.reshape(folder, stream.shape, stream.shape)
    value = size = 0
    with open(folder / _chunk(stream.shape), "wb") as file:
        for piece in stream.pieces:
            data = np.ascontiguousarray(piece, stream.dtype).reshape(-1).view(np.uint8).data
            value, size = crc.update(data, value), size + len(data)
            file.write(data)
    assert size == math.prod(stream.shape) * stream.dtype.itemsize, f"{name}: {size} bytes for {stream.shape}"
    return tree.Leaf(stream.shape, stream.dtype.name, crc.text(value))


def _chunk(shape: tuple[int, ...]) -> str:
    return ".".join(["0"] * max(1, len(shape)))


class Reader:
    """The arrays of a complete step, read when asked for; slices along the first dim cost only themselves.

    `meta` is what the step's writer said of it. Only names that begin with `prefix` are seen, and without it.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Raises StorageError: "checkpoint.no-step"; "checkpoint.damaged" where a file has another length."""
        store = Store(folder.absolute().parent)
        self._folder, self._prefix = folder, prefix
        self._manifest = store.read_manifest(int(folder.name))
        if problems := manifest.differences(folder, self._manifest, contents_up_to=0):
            raise manifest.damaged(folder, problems)
        self.meta: dict[str, Any] = self._manifest.meta

    def verify(self) -> None:
        """Read every file of the arrays that are seen here, block by block; raise StorageError "checkpoint.damaged"."""
        seen = {tree.folder_name(self._prefix + name) for name in self.names()}
        files = {path: file for path, file in self._manifest.files.items() if seen & set(path.split("/"))}
        if problems := manifest.differences(self._folder, replace(self._manifest, files=files)):
            raise manifest.damaged(self._folder, problems)

    def names(self) -> Iterator[str]:
        """Names of the arrays."""
        start = len(self._prefix)
        return (name[start:] for name in self._manifest.leaves if name.startswith(self._prefix))

    def leaf(self, name: str) -> tree.Leaf:
        """Shape and dtype of an array."""
        return self._manifest.leaves[self._prefix + name]

    def read(self, name: str, *index: int) -> np.ndarray:
        """An array, or its slice at `index` of the first dims; no more than that is in memory."""
        leaf = self.leaf(name)
        dtype, count = numpy_dtype(leaf.dtype), math.prod(leaf.shape)
        folder = self._folder / "state" / tree.folder_name(self._prefix + name)
        file = folder / _chunk(leaf.shape)
        if not file.is_file() or file.stat().st_size != count * dtype.itemsize:
            return _of_chunks(folder, index).astype(dtype, copy=False)
        shape = leaf.shape[len(index) :]
        each = math.prod(shape)
        place = int(np.ravel_multi_index(index, leaf.shape[: len(index)])) if index else 0
        return np.fromfile(file, dtype, each, offset=place * each * dtype.itemsize).reshape(shape)


def _of_chunks(folder: Path, index: tuple[int, ...]) -> np.ndarray:
    """The slice of an array that is stored in several chunks, which is how several processes write one."""
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
    return tensorstore.open(spec, open=True, read=True).result()[index].read().result()
