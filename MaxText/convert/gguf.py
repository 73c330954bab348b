"""GGUF files (llama.cpp): metadata, tensor descriptions, then blocks of numbers; Llama's architecture.

Layouts of the blocks: https://github.com/ggml-org/ggml, docs/gguf.md and src/ggml-common.h. 32 numbers share a
float16 scale d (and offset m): Q8_0 is d * int8, Q4_0 is d * (q - 8), Q4_1 is d * q + m, with number i in the low half
of byte i and number i + 16 in its high half."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from MaxText.errors import ConfigError, StorageError

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 31


def _plain(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda raw: raw.view(dtype)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 18)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scale * (_nibbles(blocks[:, 2:]) - 8.0)).reshape(-1)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 20)
    scale, offset = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    return (scale * _nibbles(blocks[:, 4:]) + offset).reshape(-1)


@dataclass(frozen=True)
class Kind:
    """How numbers of one type are stored: `numbers` to a block of `size` bytes."""

    name: str
    numbers: int
    size: int
    dtype: np.dtype
    unpack: Callable[[np.ndarray], np.ndarray]


_F32, _F16, _BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
KINDS = {
    0: Kind("F32", 1, 4, _F32, _plain(_F32)),
    1: Kind("F16", 1, 2, _F16, _plain(_F16)),
    2: Kind("Q4_0", 32, 18, _F32, _q4_0),
    3: Kind("Q4_1", 32, 20, _F32, _q4_1),
    8: Kind("Q8_0", 32, 34, _F32, _q8_0),
    30: Kind("BF16", 1, 2, _BF16, _plain(_BF16)),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor; `shape` slowest dim first, as everywhere but in the file."""

    file: Path
    kind: Kind
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> np.dtype:
        return self.kind.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.numbers * self.kind.size

    def read(self) -> np.ndarray:
        """Its numbers; quantised ones as float32."""
        raw = np.fromfile(self.file, np.uint8, self.nbytes, offset=self.begin)
        return self.kind.unpack(raw).reshape(self.shape)


@dataclass(frozen=True)
class File:
    """What a GGUF file says before its numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
    with open(path, "rb") as stream:
        return stream.read(4) == MAGIC


class _Cursor:
    """Reads the little-endian values of a header."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream, self._path = stream, path

    def take(self, count: int) -> bytes:
        data = self._stream.read(count) if 0 <= count < _LONGEST else b""
        if len(data) != count:
            raise _damaged(self._path, f"it ends inside its header, at byte {self._stream.tell():,}")
        return data

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.scalar("<Q")).decode(errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            if count >= _LONGEST:
                raise _damaged(self._path, f"it lists {count:,} values")
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise _damaged(self._path, f"a value has the unknown type {kind}", "convert.damaged")
        return self.scalar(_SCALARS[kind])


def _damaged(path: Path, why: str, id: str = "convert.truncated") -> StorageError:
    return StorageError(f"{path}: {why}. Nothing was written. Copy the file again. [{id}]", id=id)


def read_file(path: Path) -> File:
    """Metadata and tensor descriptions.

    Raises:
      StorageError: "convert.truncated", "convert.damaged"; "convert.dtype" for a type of block that is not read here.
    """
    with open(path, "rb") as stream:
        cursor = _Cursor(stream, path)
        cursor.take(4)
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise _damaged(path, f"version {version} of GGUF is not read here, only 2 and 3", "convert.damaged")
        tensors, pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata = {}
        for _ in range(pairs):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.scalar("<I"))
        described = [_described(cursor) for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise _damaged(path, f"its alignment is {align}", "convert.damaged")
        start = -(-stream.tell() // align) * align
    return File(path, metadata, _placed(path, described, start))


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dims = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
    return name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")


def _placed(path: Path, described: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, Tensor]:
    unknown = [f"{name} (type {kind})" for name, _, kind, _ in described if kind not in KINDS]
    if unknown:
        known = ", ".join(kind.name for kind in KINDS.values())
        text = f"{len(unknown)} tensors have a type that is not read here, first {unknown[0]}; known: {known}"
        raise _damaged(path, text, "convert.dtype")
    size = path.stat().st_size
    tensors = {name: Tensor(path, KINDS[kind], shape, start + begin) for name, shape, kind, begin in described}
    for name, tensor in tensors.items():
        if tensor.shape[-1:] and tensor.shape[-1] % tensor.kind.numbers:
            text = f"{name} has rows of {tensor.shape[-1]} numbers, not whole blocks of {tensor.kind.numbers}"
            raise _damaged(path, text, "convert.damaged")
        if tensor.begin + tensor.nbytes > size:
            raise _damaged(path, f"{size:,} bytes, but {name} ends at byte {tensor.begin + tensor.nbytes:,}")
    return tensors


# --- what it says of the model ---------------------------------------------------------------------------------------

_KEYS = {
    "embedding_length": "base_emb_dim",
    "block_count": "base_num_decoder_layers",
    "feed_forward_length": "base_mlp_dim",
    "attention.head_count": "base_num_query_heads",
    "attention.head_count_kv": "base_num_kv_heads",
    "attention.layer_norm_rms_epsilon": "normalization_layer_epsilon",
    "rope.freq_base": "rope_max_timescale",
}
_INT = {"rope_max_timescale"}
_SCALING = "rope.scaling.type"


def recipe(file: File) -> dict[str, Any]:
    """Our keys. Raises ConfigError: "convert.unknown-family", "convert.refused"."""
    name = file.metadata.get("general.architecture")
    if name != "llama":
        raise ConfigError(
            f"{file.path}: architecture {name!r}; of GGUF files only llama is read here. [convert.unknown-family]",
            id="convert.unknown-family",
        )
    given = {key.removeprefix("llama."): value for key, value in file.metadata.items() if key.startswith("llama.")}
    given.setdefault("attention.head_count_kv", given.get("attention.head_count"))
    given.setdefault("rope.freq_base", 10_000.0)
    refused = [f"llama.{key} is {given.get(key, 'missing')}" for key in _KEYS if not _positive(given.get(key))]
    if refused:
        raise ConfigError(f"{file.path}: {'; '.join(refused)}. [convert.refused]", id="convert.refused")
    if given.get(_SCALING, "none") != "none" or "rope_freqs.weight" in file.tensors:
        refused.append(f"rope is stretched ({given.get(_SCALING, 'rope_freqs.weight')})")
    width = given.get("attention.key_length") or int(given["embedding_length"] // given["attention.head_count"])
    if given.get("rope.dimension_count", width) != width:
        refused.append(f"rope turns {given['rope.dimension_count']} of {width} channels")
    if given.get("expert_count"):
        refused.append(f"it has {given['expert_count']} experts")
    if refused:
        raise ConfigError(f"{file.path}: {'; '.join(refused)}. [convert.refused]", id="convert.refused")
    ours: dict[str, Any] = {"decoder_block": "llama2"}
    ours |= {key: int(given[name]) if key in _INT else given[name] for name, key in _KEYS.items()}
    epsilon = np.float32(ours["normalization_layer_epsilon"])  # as it was meant, not as float32 holds it
    ours["normalization_layer_epsilon"] = float(np.format_float_positional(epsilon))
    ours["head_dim"] = width
    ours["vocab_size"] = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    ours |= {"logits_via_embedding": "output.weight" not in file.tensors, "normalize_embedding_logits": False}
    if "context_length" in given:
        ours["max_position_embeddings"] = given["context_length"]
    return ours


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def notes(file: File) -> list[str]:
    """What a person should know: the types of the numbers."""
    kinds = sorted({tensor.kind.name for tensor in file.tensors.values()})
    return [f"numbers stored as {', '.join(kinds)}; quantised ones become float32"]


def words(file: File) -> Any:
    """The tokenizer that the file carries; None if it is of a kind that is not read here."""
    from MaxText.convert.gguf_words import make

    return make(file.metadata)
