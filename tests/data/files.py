"""The same documents as files of every form, written without the libraries that MaxText reads them by where that is
possible."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from MaxText import tokenizer


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def block(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def encode_example(**features: bytes | list[int]) -> bytes:
    """tf.train.Example as TensorFlow writes it."""
    entries = b""
    for name, value in features.items():
        ids = isinstance(value, list)
        kind = block(3, block(1, b"".join(varint(v) for v in value))) if ids else block(1, block(1, value))
        entries += block(1, block(1, name.encode()) + block(2, kind))
    return block(1, entries)


def frame(record: bytes) -> bytes:
    """A record of a TFRecord file; the checksum of the record itself is not looked at."""
    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked_crc(length)) + record + b"crc."


def masked_crc(data: bytes) -> int:
    """CRC-32C bit by bit, masked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def write(path: Path | str, texts: Sequence[str]) -> str:
    """A file of these documents, of the form that its ending names; returns its path."""
    path = Path(path)
    bare = path.name.removesuffix(".gz")
    form = {".jsonl": _jsonl, ".parquet": _parquet, ".array_record": _array_record, ".npy": _ids, ".txt": _text}
    form.get(Path(bare).suffix, _tfrecord)(path, texts)
    if bare != path.name:
        path.write_bytes(gzip.compress(path.read_bytes()))
    return str(path)


def _jsonl(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": t, "n": i}) + "\n" for i, t in enumerate(texts)))


def _parquet(path: Path, texts: Sequence[str]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": list(texts), "n": range(len(texts))}), path, row_group_size=2)


def _array_record(path: Path, texts: Sequence[str]) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(encode_example(text=text.encode()))
    writer.close()


def _tfrecord(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(b"".join(frame(encode_example(n=[5], text=t.encode())) for t in texts))


def _ids(path: Path, texts: Sequence[str]) -> None:
    """Byte ids, each document between bos and eos, as the byte tokenizer would have them."""
    words = tokenizer.ByteTokenizer()
    documents = [np.concatenate([[256], words.encode(text), [257]]) for text in texts]
    np.save(path, np.concatenate(documents).astype(np.uint16))


def _text(path: Path, texts: Sequence[str]) -> None:
    """A file is one document."""
    path.write_text("\n".join(texts))


def write_tfds(folder: Path, texts: Sequence[str], held_out: Sequence[str] = ()) -> dict[str, str]:
    """A TFDS data set tiny_books with splits train and validation, without TensorFlow; the keys that open it."""
    tfds = pytest.importorskip("tensorflow_datasets")
    parts = {"train": texts, "validation": held_out or texts[:1]}

    class TinyBooks(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # tests make it again and again
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            return {name: self._some(name) for name in parts}

        def _some(self, name):
            yield from ((i, {"text": text}) for i, text in enumerate(parts[name]))

        def _generate_examples(self):
            raise AssertionError

    TinyBooks(data_dir=str(folder), file_format="array_record").download_and_prepare()
    return {"dataset_type": "tfds", "dataset_name": "tiny_books", "dataset_path": str(folder)}
