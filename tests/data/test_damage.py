"""Damaged files give the documents that were written, or a DataError that names the file; never anything else."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from MaxText import config, tokenizer
from MaxText.data import corpus, open_split, sources, teach, units
from MaxText.data.corpus import Words
from MaxText.data.formats import hub
from MaxText.data.units import Unit
from MaxText.errors import ConfigError, DataError

from .files import encode_example, frame, write

TEXTS = ["one", "two zwei", "naïve café", "line\nbreak", "six " * 9]
WORDS = Words(tokenizer.ByteTokenizer(), 288, add_bos=True, add_eos=True)
TRIALS = 200


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def documents(name, refuse=True):
    """The documents of a file, as bytes."""
    words = Words(WORDS.tokenizer, WORDS.vocabulary, True, True, refuse)
    parts = [corpus.tokenize(u, words) for u in units.split(Unit(units.reader_of(name), name, name, 0, size(name)))]
    ends = [np.cumsum(p.lengths) for p in parts]
    return [
        WORDS.tokenizer.decode(np.asarray(p.tokens)[e - n : e])
        for p, es in zip(parts, ends, strict=True)
        for e, n in zip(es, p.lengths, strict=True)
    ]


def size(name):
    return Path(name).stat().st_size


def mangled(whole, trial):
    """The bytes cut, or with one to three of them changed."""
    random = np.random.default_rng(trial)
    if trial % 4 == 0:
        return whole[: random.integers(1, len(whole))]
    changed = bytearray(whole)
    for place in random.integers(0, len(whole), random.integers(1, 4)):
        changed[place] ^= int(random.integers(1, 256))
    return bytes(changed)


@pytest.mark.parametrize("form", ["txt", "txt.gz", "jsonl", "jsonl.gz", "parquet", "array_record", "tfrecord", "npy"])
def test_damaged_bytes(form):
    """Nothing but DataError; forms with a checksum over everything give the same documents, or that error."""
    name = f"a.{form}"
    write(name, TEXTS)
    whole, wanted, refused = Path(name).read_bytes(), documents(name), 0
    for trial in range(TRIALS):
        Path(name).write_bytes(mangled(whole, trial))
        try:
            found = documents(name)
        except DataError as error:
            refused += 1
            assert name in str(error)
            continue
        assert not form.endswith("gz") or found == wanted, trial
    assert refused > TRIALS // 10


def test_a_large_file_of_records_that_is_cut_in_half():
    write("a.array_record", ["a document " * 40] * 3000)
    os.truncate("a.array_record", size("a.array_record") // 2)
    with pytest.raises(DataError, match="a.array_record") as caught:
        documents("a.array_record")
    assert caught.value.id == "data.truncated"


def test_a_library_that_fails_without_a_word(monkeypatch):
    class Table(list):
        def __getitem__(self, i):
            raise IndexError

    monkeypatch.setattr(hub, "load", lambda how: Table([0]))
    with pytest.raises(DataError, match="books.*IndexError") as caught:
        list(units.read(Unit("hf", "books/train", "{}", 0, 1)))
    assert caught.value.id == "data.truncated"


def test_parquet_with_checksums():
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = ["a document without any repetition " * 20]
    parquet.write_table(arrow.table({"text": text}), "a.parquet", write_page_checksum=True, compression="none")
    whole = Path("a.parquet").read_bytes()
    assert documents("a.parquet") == text
    Path("a.parquet").write_bytes(whole.replace(b"any rep", b"ani rep", 1))
    with pytest.raises(DataError) as caught:
        documents("a.parquet")
    assert caught.value.id == "data.truncated"


def test_a_changed_length_of_a_record():
    first, second = frame(encode_example(text=b"first")), frame(encode_example(text=b"second"))
    huge = struct.pack("<Q", 1 << 38) + second[8:]
    Path("a.tfrecord").write_bytes(first + huge)
    with pytest.raises(DataError, match=f"byte offset {len(first)} ") as caught:
        documents("a.tfrecord")
    assert caught.value.id == "data.truncated"


def test_records_of_two_forms():
    other = [b'{"text": "json"}', encode_example(text=b"example")]
    for later in other:
        Path("a.tfrecord").write_bytes(frame(b"plain words") + frame(later) + frame(b"{braces} in a text"))
        with pytest.raises(DataError, match="a.tfrecord#1") as caught:
            documents("a.tfrecord")
        assert caught.value.id == "data.schema"
        assert documents("a.tfrecord", refuse=False) == ["plain words", "{braces} in a text"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.tfrecord"])
def test_json_that_is_nested_too_deeply(name):
    deep, good = b'{"text": ' + b"[" * 100_000, b'{"text": "good"}'
    lines = (good, deep, good)
    Path(name).write_bytes(b"".join(map(frame, lines)) if name == "a.tfrecord" else b"\n".join(lines) + b"\n")
    with pytest.raises(DataError) as caught:
        documents(name)
    assert caught.value.id == "data.json"
    assert documents(name, refuse=False) == ["good", "good"]


@pytest.mark.parametrize("names", [["d"], ["d/*.txt"], ["d/b.txt"]])
def test_a_link_to_nothing(names):
    Path("d").mkdir()
    Path("d/a.txt").write_text("aa")
    Path("d/b.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match="b.txt.*gone.txt") as caught:
        sources.find(names, "train_files")
    assert caught.value.id == "data.missing"


@pytest.mark.parametrize("out, library", [("w.model", "sentencepiece"), ("w.json", "tokenizers")])
def test_a_tokenizer_learns_from_no_damaged_text(out, library):
    pytest.importorskip(library)
    good = Path(sources.TEXTS / "austen/persuasion.txt").read_bytes()[:100_000]
    Path("a.txt").write_bytes(good)
    Path("b.txt").write_bytes(b"caf\xe9 noir")
    Path("c.jsonl").write_bytes(b'{"text": "good"}\n{"text": }\n')
    for bad, place in (("b.txt", "byte offset 3"), ("c.jsonl", "c.jsonl:2.*byte offset 26")):
        cfg = config.make(train_files=["a.txt", bad], eval_files=[])
        with pytest.raises(DataError, match=place):
            teach.train(cfg, Path(out), 400)
        assert not Path(out).exists()
    cfg = config.make(train_files=["a.txt", "b.txt", "c.jsonl"], eval_files=[], bad_documents="drop")
    assert "without 2 documents" in teach.train(cfg, Path(out), 400)
    before = Path(out).read_bytes()
    with pytest.raises(ConfigError) as caught:
        teach.train(cfg, Path(out), 410)
    assert caught.value.id == "tokenizer.exists"
    assert Path(out).read_bytes() == before


@pytest.mark.parametrize("names", [["a.bin"], ["a.npy"], ["a.npy", "b.bin"]])
@pytest.mark.parametrize("change", ["overwritten", "cut", "emptied", "touched back"])
def test_ready_made_ids_that_change_while_they_are_read(names, change):
    """Read anew at every step: a changed file must end the run, and never train it."""
    ids = np.arange(40_000).astype(np.uint16) % 250
    np.save("a.npy", ids)
    ids.tofile("a.bin")
    ids[::-1].tofile("b.bin")
    cfg = config.make(train_files=names, eval_files=[], num_epoch=-1, max_target_length=100)
    opened = open_split(cfg, tokenizer.make(cfg), "train", 4)
    before = [opened.batch(step)["inputs"] for step in range(30)]
    path = Path(names[0])
    was, whole = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        if change in ("overwritten", "touched back"):
            file.seek(200)
            file.write(b"\xff" * (len(whole) - 200))
        else:
            file.truncate(300 if change == "cut" else 0)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns + (change != "touched back")))
    with pytest.raises(DataError, match=names[0]) as caught:
        for step in range(30):
            opened.batch(step)
    assert caught.value.id == "data.damaged"
    path.write_bytes(whole)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert all(np.array_equal(opened.batch(step)["inputs"], before[step]) for step in range(30))
