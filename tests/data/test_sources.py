import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from MaxText import tokenizer
from MaxText.data import corpus, open_split, sources
from MaxText.data.corpus import Words
from MaxText.data.units import Unit
from MaxText.errors import DataError

from .helpers import make_config

AUSTEN = ["emma", "mansfieldpark", "persuasion", "prideprejudice", "sensesensibility"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.txt").write_text(f"text {name}")
    return tmp_path


def find_and_read(*names):
    """The documents of the files, checked."""
    words = Words(tokenizer.ByteTokenizer(), 288, add_bos=True, add_eos=True)
    found = []
    for file in sources.find(names, "train_files"):
        unit = Unit("text", file.name, file.path, 0, file.size)
        corpus.tokenize(unit, words)
        text = sources.read(file)
        found.append(SimpleNamespace(name=file.name, text=text, sha256=sources.digest(file).removeprefix("sha256:")))
    return found


def test_built_in_texts_are_those_of_the_checksums():
    sums = dict(reversed(line.split()) for line in (sources.TEXTS / "austen/SHA256SUMS").read_text().splitlines())
    documents = find_and_read("builtin:austen/*.txt")
    assert [d.name for d in documents] == [f"builtin:austen/{name}.txt" for name in AUSTEN]
    assert {d.name.rpartition("/")[2]: d.sha256 for d in documents} == sums
    assert sum(len(d.text) for d in documents) == 3_591_618


def test_paths_relative_absolute_and_patterns(folder):
    for names in (["a.txt", "b.txt"], [str(folder / "a.txt"), "b.txt"], ["*.txt"], [f"{folder}/?.txt"], ["**/*.txt"]):
        assert [d.text for d in find_and_read(*names)] == [b"text a", b"text b"]
    assert [d.text for d in find_and_read("b.txt", "a.txt")] == [b"text b", b"text a"]


def test_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert [d.text for d in find_and_read("~/a.txt")] == [b"text a"]


def test_a_file_whose_name_looks_like_a_pattern():
    Path("[a].txt").write_text("brackets")
    assert [d.text for d in find_and_read("[a].txt")] == [b"brackets"]


def test_bytes_are_kept_and_hashed_as_they_are():
    raw = "\ufeffone\r\ntwo\n\n".encode()
    Path("raw").write_bytes(raw)
    (document,) = find_and_read("raw")
    assert (document.text, document.sha256) == (raw, hashlib.sha256(raw).hexdigest())


def bad(name):
    match name:
        case "empty":
            Path("x").write_bytes(b"")
        case "folder":
            Path("x").mkdir()
        case "loop":
            Path("x").symlink_to("x")
        case "pipe":
            os.mkfifo("x")
        case "binary":
            Path("x").write_bytes(b"caf\xe9 noir")
        case "cut":
            Path("x").write_bytes("nice café".encode()[:-1])
        case "below-a-file":
            return ["a.txt/x"]
        case "missing-builtin":
            return ["builtin:austen/lady_susan.txt"]
        case "no-match":
            return ["*.json"]
        case "remote":
            return ["nonesuch://bucket/a.txt"]
        case "same":
            return ["a.txt", "b.txt", "./a.txt"]
        case "pattern-and-name":
            return ["*.txt", "a.txt"]
        case "hard-link":
            os.link("a.txt", "x")
            return ["a.txt", "x"]
        case "none":
            return []
    return ["x"]


@pytest.mark.parametrize(
    "name, error",
    {
        "missing": "data.missing",
        "below-a-file": "data.missing",
        "missing-builtin": "data.missing",
        "no-match": "data.missing",
        "remote": "data.missing",
        "none": "data.no-files",
        "empty": "data.empty-file",
        "folder": "data.folder",
        "loop": "data.unreadable",
        "pipe": "data.not-a-file",
        "binary": "data.encoding",
        "cut": "data.encoding",
        "same": "data.duplicate-file",
        "pattern-and-name": "data.duplicate-file",
        "hard-link": "data.duplicate-file",
    }.items(),
)
def test_refusals(name, error):
    with pytest.raises(DataError) as caught:
        find_and_read(*bad(name))
    assert caught.value.id == error


def test_the_message_gives_the_byte_offset():
    Path("x").write_bytes(b"one\ntwo\n" + b"caf\xe9 noir")
    with pytest.raises(DataError, match=r"byte offset 11 \(0xe9, line 3\)"):
        find_and_read("x")


def test_no_permission(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    files = sources.find(["a.txt"], "train_files")
    monkeypatch.setattr(sources, "open_binary", refuse)
    with pytest.raises(DataError) as caught:
        sources.read(files[0])
    assert caught.value.id == "data.unreadable"


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("held_out", ["a.txt", "copy.txt", "link.txt"])
def test_text_in_both_splits_is_refused(split, held_out):
    Path("copy.txt").write_bytes(Path("a.txt").read_bytes())
    Path("link.txt").symlink_to("a.txt")
    cfg = make_config(train_files=["b.txt", "a.txt"], eval_files=[held_out])
    with pytest.raises(DataError) as caught:
        open_split(cfg, tokenizer.make(cfg), split, 1)
    assert caught.value.id == "data.leak"


def test_equal_sizes_are_no_leak():
    cfg = make_config(train_files=["a.txt"], eval_files=["b.txt"])
    assert open_split(cfg, tokenizer.make(cfg), "eval", 1).bytes == 6
