"""The safetensors format: a JSON header of names, types, shapes and places, then the bytes (huggingface/safetensors).

Read and written here, tensor by tensor and without a further package: files are never in memory as a whole, and what is
written has the bytes that the reference library would write."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from MaxText.errors import DataError, StorageError

# In the order of the library: tensors lie in a file from the last of these types to the first, then by name.
TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
_BLOCK = 1 << 20
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `begin` is the place of its first byte in the file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Its values, in memory of their own."""
        return np.fromfile(self.file, self.dtype, math.prod(self.shape), offset=self.begin).reshape(self.shape)

    def equals(self, other: Tensor) -> bool:
        """Whether type, shape and bytes are the same; both are read block by block."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        with open(self.file, "rb") as left, open(other.file, "rb") as right:
            left.seek(self.begin), right.seek(other.begin)
            blocks = (min(_BLOCK, self.nbytes - done) for done in range(0, self.nbytes, _BLOCK))
            return all(left.read(size) == right.read(size) for size in blocks)


def _damaged(file: Path, why: str, id: str = "convert.damaged") -> StorageError:
    return StorageError(f"{file}: {why}. Nothing was written. Copy the file again. [{id}]", id=id)


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name; reads the header only.

    Raises:
      StorageError: "convert.truncated" (both lengths), "convert.damaged", "convert.dtype".
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise _damaged(file, f"{size:,} bytes do not hold the header of {length:,} bytes", "convert.truncated")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise _damaged(file, str(error.strerror)) from error
    except ValueError as error:
        raise _damaged(file, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(file: Path, name: str, entry: Any, start: int, size: int) -> Tensor:
    try:
        kind, shape = entry["dtype"], tuple(map(operator.index, entry["shape"]))
        begin, end = map(operator.index, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, f"the entry of {name} is not readable ({entry})") from error
    if min((begin, *shape)) < 0:
        raise _damaged(file, f"the entry of {name} has a negative number ({entry})")
    if kind not in TYPES:
        raise _damaged(file, f"{name} has type {kind}; known: {', '.join(TYPES)}", "convert.dtype")
    tensor = Tensor(file, np.dtype(TYPES[kind]), shape, start + begin)
    if end - begin != tensor.nbytes:
        raise _damaged(file, f"{name} has {end - begin:,} bytes; {kind}{list(shape)} needs {tensor.nbytes:,}")
    if start + end > size:
        raise _damaged(file, f"{size:,} bytes, but {name} ends at byte {start + end:,}", "convert.truncated")
    return tensor


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: those that its index lists, or else those of its *.safetensors files.

    Raises:
      StorageError: as `read_file`; "convert.index" where index and files disagree. DataError: "convert.no-weights".
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"{folder} holds no *.safetensors file; only this format of weights is read. [convert.no-weights]",
            id="convert.no-weights",
        )
    found: dict[str, Tensor] = {}
    for file in files:
        found |= read_file(file)
    return found


def _indexed(folder: Path, index: Path) -> dict[str, Tensor]:
    try:
        places: dict[str, str] = dict(json.loads(index.read_text())["weight_map"].items())
        if not all(isinstance(name, str) and Path(name).name == name for name in places.values()):
            raise ValueError("a value of weight_map is no file name")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"it cannot be read ({error!r})") from error
    missing = sorted({name for name in places.values() if not (folder / name).is_file()})
    if missing:
        raise _damaged(index, f"it names files that are not there: {', '.join(missing)}", "convert.index")
    files = {name: read_file(folder / name) for name in sorted(set(places.values()))}
    absent = [f"{tensor} in {file}" for tensor, file in places.items() if tensor not in files[file]]
    if absent:
        raise _damaged(index, f"it names tensors that are not there: {', '.join(absent[:8])}", "convert.index")
    return {tensor: files[file][tensor] for tensor, file in places.items()}


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shards(tensors: Sequence[Wanted], limit: int = SHARD_BYTES) -> list[list[Wanted]]:
    """`tensors` in their order, cut into files of at most `limit` bytes (a larger tensor has its own)."""
    cut: list[list[Wanted]] = [[]]
    room = limit
    for tensor in tensors:
        if cut[-1] and tensor.nbytes > room:
            cut.append([])
            room = limit
        cut[-1].append(tensor)
        room -= tensor.nbytes
    return cut


def write_folder(
    folder: Path, tensors: Sequence[Wanted], produce: Callable[[str], np.ndarray], limit: int = SHARD_BYTES
) -> None:
    """Write `tensors` to `folder`, each made by `produce` when its turn comes, and the index if there are several
    files."""
    cut = shards(tensors, limit)
    names = [SINGLE] if len(cut) == 1 else [f"model-{i + 1:05}-of-{len(cut):05}.safetensors" for i in range(len(cut))]
    for name, part in zip(names, cut, strict=True):
        write_file(folder / name, part, produce)
    if len(cut) > 1:
        places = {tensor.name: name for name, part in zip(names, cut, strict=True) for tensor in part}
        total = sum(tensor.nbytes for tensor in tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def write_file(file: Path, tensors: Iterable[Wanted], produce: Callable[[str], np.ndarray]) -> None:
    """One file. Tensors are asked for in the order given, whatever their places."""
    tensors = list(tensors)
    rank = {np.dtype(kind): i for i, kind in enumerate(TYPES.values())}
    placed = sorted(tensors, key=lambda tensor: (-rank[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = {}
    end = 0
    for tensor in placed:
        begin[tensor.name] = end
        end += tensor.nbytes
        offsets = [begin[tensor.name], end]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.seek(8 + len(text) + begin[tensor.name])
            _write(stream, tensor, produce(tensor.name))
        stream.truncate(8 + len(text) + end)
        stream.flush()
        os.fsync(stream.fileno())


def _write(stream: Any, tensor: Wanted, value: np.ndarray) -> None:
    assert value.shape == tensor.shape and value.dtype == tensor.dtype, (tensor, value.shape, value.dtype)
    stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
