"""Every form of data gives the same documents, named, in any units; and says what is wrong with it."""

import json
from pathlib import Path

import numpy as np
import pytest

from MaxText import tokenizer
from MaxText.data import corpus, open_split, units
from MaxText.data.corpus import Words
from MaxText.data.formats import example, hub, jsonl, records
from MaxText.data.units import Unit
from MaxText.errors import DataError

from . import files
from .files import encode_example, frame, write_tfds
from .helpers import make_config

TEXTS = ["one", "two zwei", "", "naïve café", "line\nbreak", "six " * 9]
KEPT = [t for t in TEXTS if t]
WORDS = Words(tokenizer.ByteTokenizer(), 288, add_bos=True, add_eos=True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.load.cache_clear()  # its keys are paths


def write(name, texts=TEXTS):
    return files.write(name, texts)


def units_of(name, **more):
    whole = Unit(units.reader_of(name), name, name, 0, Path(name).stat().st_size, **more)
    return units.split(whole)


def read(name, words=WORDS, **more):
    """(documents as text, their names) of a file."""
    found = units_of(name, **more)
    whole = corpus.build(((u, corpus.tokenize(u, words)) for u in found), words.dtype)
    ends = np.cumsum(whole.lengths)
    ids = [whole.tokens.take(np.arange(e - n, e)) for e, n in zip(ends, whole.lengths, strict=True)]
    from MaxText.data.names import Names

    names = Names(whole.files, whole.records)
    return [tokenizer.ByteTokenizer().decode(i) for i in ids], [names.name(d) for d in range(len(ids))], whole


ALL = ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.array_record", "a.tfrecord"]


@pytest.mark.parametrize("name", ALL)
def test_every_form_gives_the_same_documents(name, monkeypatch):
    monkeypatch.setattr(jsonl, "UNIT_BYTES", 20)
    monkeypatch.setattr(records, "UNIT_RECORDS", 2)
    texts, names, whole = read(write(name))
    assert texts == KEPT
    numbers = [1, 2, 4, 5, 6] if "jsonl" in name else [0, 1, 3, 4, 5]
    assert names == [f"{name}{':' if 'jsonl' in name else '#'}{n}" for n in numbers]
    assert whole.dropped == {"empty": 1}
    assert whole.text_bytes == sum(len(t.encode()) for t in TEXTS)


@pytest.mark.parametrize("size", [1, 7, 33, 64, 10**6])
def test_units_of_any_size_hold_every_line_once(size, monkeypatch):
    monkeypatch.setattr(jsonl, "UNIT_BYTES", size)
    assert read(write("a.jsonl"))[:2] == (KEPT, [f"a.jsonl:{n}" for n in (1, 2, 4, 5, 6)])


@pytest.mark.parametrize("name", ALL)
def test_a_column_that_does_not_exist(name):
    with pytest.raises(DataError, match="text") as caught:
        read(write(name), column="txt")
    assert caught.value.id == "data.column"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.array_record", "a.tfrecord"])
def test_a_file_that_is_cut_short(name):
    write(name)
    Path(name).write_bytes(Path(name).read_bytes()[:-9])
    with pytest.raises(DataError, match=name) as caught:
        read(name)
    assert caught.value.id == "data.truncated"


BAD = {
    b'{"text": "a"}\n{"text": "caf\xe9"}\n': ("data.encoding", "byte offset 27"),
    b'{"text": "a"}\n{"text": "cut': ("data.truncated", "byte offset 27"),
    b'{"text": "a"}\n{"text": }\n': ("data.json", "byte offset 23"),
    b'{"text": "a"}\n[1]\n': ("data.json", "list"),
    b'{"text": "a"}\n{"txt": "b"}\n': ("data.schema", "it has txt"),
    b'{"text": "a"}\n{"text": 5}\n': ("data.schema", "int"),
    b'{"text": "a"}\n{"text": [5]}\n': ("data.schema", "tokenize_train_data=false"),
    b'{"text": "a"}\n{"text": "\\ud800"}\n': ("data.encoding", "byte offset"),
}


@pytest.mark.parametrize("content", BAD)
def test_a_bad_document_is_named_and_can_be_left_out(content):
    error, word = BAD[content]
    Path("x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=word) as caught:
        read("x.jsonl")
    assert caught.value.id == error
    assert "x.jsonl:2" in str(caught.value)
    texts, _, whole = read("x.jsonl", Words(WORDS.tokenizer, 288, True, True, refuse=False))
    assert texts == ["a"]
    assert whole.dropped == {"unreadable": 1}
    assert [name for name, _ in whole.bad] == ["x.jsonl:2"]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_document_at_all(texts):
    write("a.array_record", texts)
    cfg = make_config(train_files=["a.array_record"])
    with pytest.raises(DataError, match="no document") as caught:
        open_split(cfg, tokenizer.make(cfg), "train", 1)
    assert caught.value.id == ("data.no-targets" if texts else "data.no-documents")


def test_records_of_json_and_of_plain_text():
    for record, wanted in ((b'{"text": "x y"}', "x y"), (b"plain words", "plain words")):
        Path("a.tfrecord").write_bytes(frame(record) * 2)
        assert read("a.tfrecord")[0] == [wanted] * 2


def test_examples():
    data = encode_example(text=b"abc", ids=[1, 300, 70000], none=b"")
    assert example.parse(data) == {"text": b"abc", "ids": [1, 300, 70000], "none": b""}
    for cut in range(1, len(data)):
        with pytest.raises(example.NotAnExample):
            example.parse(data[:cut])


def test_columns_of_ids():
    Path("a.jsonl").write_text('{"text": [5, 6, 7]}\n{"text": [287, 0]}\n{"text": [1]}\n')
    found = units_of("a.jsonl", ids=True)
    part = corpus.tokenize(found[0], WORDS)
    assert (part.tokens.tolist(), part.lengths.tolist()) == ([5, 6, 7, 287, 0], [3, 2])
    assert part.dropped == {"single token": 1}
    Path("b.jsonl").write_text('{"text": [5, 6]}\n{"text": [5, 288]}\n')
    with pytest.raises(DataError, match="288") as caught:
        corpus.tokenize(units_of("b.jsonl", ids=True)[0], WORDS)
    assert caught.value.id == "data.token-range"


IDS = [256, 1, 2, 257, 256, 3, 257, 257, 9, 8]


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_ready_made_ids_are_cut_at_eos(name):
    ids = np.array(IDS, np.uint16)
    np.save(name, ids) if name == "a.npy" else ids.tofile(name)
    cfg = make_config(train_files=[name], num_epoch=1, max_target_length=3, enable_data_shuffling=False)
    data = open_split(cfg, tokenizer.make(cfg), "train", 1)
    assert (data.documents, data.tokens, data.dropped) == (3, 9, {"single token": 1})
    batch = [data.batch(s) for s in range(data.batches)]
    assert np.concatenate([b["targets"][b["loss_mask"] == 1] for b in batch]).tolist() == [1, 2, 257, 3, 257, 8]


def test_several_files_of_ids_are_one_line():
    for i in (0, 1):
        np.save(f"{i}.npy", np.array(IDS[5 * i : 5 * i + 5], np.int32))
    cfg = make_config(train_files=["0.npy", "1.npy"], num_epoch=1, max_target_length=2, enable_data_shuffling=False)
    data = open_split(cfg, tokenizer.make(cfg), "train", 1)
    targets = [data.batch(s) for s in range(data.batches)]
    assert np.concatenate([b["targets"][b["loss_mask"] == 1] for b in targets]).tolist() == [1, 2, 257, 257, 8]


@pytest.mark.parametrize(
    "array, error",
    [
        (np.zeros((2, 2), np.uint16), "data.truncated"),
        (np.zeros(3), "data.truncated"),
        (np.array([1, 288, 2]), "data.token-range"),
        (np.array([-1, 2]), "data.token-range"),
        (np.zeros(0, np.uint16), "data.empty-file"),
    ],
)
def test_arrays_that_are_no_ids(array, error):
    np.save("a.npy", array)
    with pytest.raises(DataError) as caught:
        corpus.tokenize(units_of("a.npy", vocabulary=288)[0], WORDS)
    assert caught.value.id == error


def test_folders_and_remote_files():
    """A folder is all data files below it; a URL is opened by fsspec."""
    fsspec = pytest.importorskip("fsspec")
    Path("d/e").mkdir(parents=True)
    Path("d/b.txt").write_text("bb")
    Path("d/e/a.jsonl").write_text('{"text": "aa"}\n')
    Path("d/.hidden.txt").write_text("no")
    Path("d/SHA256SUMS").write_text("no")
    memory = fsspec.filesystem("memory")
    for name in ("b.txt", "e/a.jsonl"):
        memory.pipe(f"/maxtext-test/{name}", Path("d", name).read_bytes())
    there = "memory://maxtext-test"
    for listed in (["d"], ["d/*.txt", "d/e"], [there], [f"{there}/*.txt", "d/e/a.jsonl"]):
        cfg = make_config(train_files=listed, num_epoch=1)
        data = open_split(cfg, tokenizer.make(cfg), "train", 1)
        assert (data.documents, data.bytes) == (2, 4)
    with pytest.raises(DataError) as caught:
        cfg = make_config(train_files=["memory://maxtext-test/none.txt"])
        open_split(cfg, tokenizer.make(cfg), "train", 1)
    assert caught.value.id == "data.missing"


def test_grain_files_are_a_mixture():
    for name, texts in (("a.array_record", KEPT * 4), ("b.array_record", ["x" * 20] * 30)):
        write(name, texts)
    cfg = make_config(dataset_type="grain", grain_train_files="a.array_record,0.25;b.array_record,0.75", num_epoch=-1)
    data = open_split(cfg, tokenizer.make(cfg), "train", 4)
    assert [part.name for part in data.parts] == ["a.array_record", "b.array_record"]
    Path("mix.json").write_text(json.dumps({n: {"path": f"{n}.array_record", "weight": 0.5} for n in "ab"}))
    cfg = make_config(dataset_type="grain", grain_train_mixture_config_path="mix.json", num_epoch=-1)
    assert len(open_split(cfg, tokenizer.make(cfg), "train", 4).parts) == 2
    for bad in ("a.array_record,0.5;b.array_record,0.6", "a.array_record,x;b.array_record,0.6"):
        cfg = make_config(dataset_type="grain", grain_train_files=bad)
        with pytest.raises(DataError) as caught:
            open_split(cfg, tokenizer.make(cfg), "train", 4)
        assert caught.value.id == "data.mixture"


def test_grain_files_of_another_format():
    write("a.tfrecord")
    cfg = make_config(dataset_type="grain", grain_train_files="a.tfrecord")
    with pytest.raises(DataError, match="grain_file_type") as caught:
        open_split(cfg, tokenizer.make(cfg), "train", 4)
    assert caught.value.id == "data.format"
    cfg = make_config(dataset_type="grain", grain_train_files="a.tfrecord", grain_file_type="tfrecord")
    assert open_split(cfg, tokenizer.make(cfg), "train", 4).documents == len(KEPT)


def test_a_library_that_is_missing_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    Path("a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="pip install pyarrow") as caught:
        units_of("a.parquet")
    assert caught.value.id == "data.no-library"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tfds_without_tensorflow(tmp_path):
    import sys

    names = [f"document {i}" for i in range(20)]
    keys = write_tfds(tmp_path / "sets", names, names[:5]) | {"num_epoch": 1}
    cfg = make_config(**keys)
    words = tokenizer.make(cfg)
    train, evaluation = open_split(cfg, words, "train", 1), open_split(cfg, words, "eval", 1)
    assert (train.documents, evaluation.documents) == (20, 5)
    assert "tensorflow" not in sys.modules
    half = open_split(make_config(**keys, train_split="train[10:]"), words, "train", 1)
    names = {half.parts[0].names.name(d).rpartition("#")[2] for d in range(10)}
    assert names == {str(n) for n in range(10, 20)}
    for change, error in (({"train_split": "test"}, "data.split"), ({"dataset_name": "no_such_set"}, "data.missing")):
        with pytest.raises(DataError) as caught:
            open_split(make_config(**keys | change), words, "train", 1)
        assert caught.value.id == error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tfds_stored_as_tfrecord(tmp_path):
    """The form in which most data sets of TFDS lie about: read without TensorFlow as well."""
    import sys

    keys = write_tfds(tmp_path / "sets", KEPT, KEPT[:2]) | {"num_epoch": 1}
    cfg = make_config(**keys)
    words = tokenizer.make(cfg)
    wanted = open_split(cfg, words, "train", 1)
    info = next((tmp_path / "sets").rglob("dataset_info.json"))
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    for old in list(info.parent.glob("*.array_record*")):
        whole = Unit("arrayrecord", old.name, str(old), 0, old.stat().st_size)
        found = b"".join(frame(record) for unit in units.split(whole) for record in records._by_index(unit))
        (old.parent / old.name.replace("array_record", "tfrecord")).write_bytes(found)
        old.unlink()
    stored = open_split(cfg, words, "train", 1)
    assert (stored.documents, stored.tokens) == (wanted.documents, wanted.tokens) == (len(KEPT), wanted.tokens)
    assert all(np.array_equal(stored.batch(s)["inputs"], wanted.batch(s)["inputs"]) for s in range(wanted.batches))
    assert stored.parts[0].names.name(0).endswith("#0") and "tensorflow" not in sys.modules


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_files_and_saved_folders():
    datasets = pytest.importorskip("datasets")
    write("a.jsonl", KEPT)
    keys = {"dataset_type": "hf", "num_epoch": 1}
    cfg = make_config(**keys, hf_path="json", hf_train_files=["a.jsonl"])
    words = tokenizer.make(cfg)
    data = open_split(cfg, words, "train", 1)
    assert (data.documents, data.bytes) == (5, sum(len(t.encode()) for t in KEPT))
    datasets.load_dataset("json", data_files=["a.jsonl"], split="train").save_to_disk("saved")
    saved = open_split(make_config(**keys, hf_path="saved"), words, "train", 1)
    assert np.array_equal(saved.batch(1)["inputs"], data.batch(1)["inputs"])
    with pytest.raises(DataError) as caught:
        open_split(make_config(**keys, hf_path="json", hf_train_files=["none.jsonl"]), words, "train", 1)
    assert caught.value.id == "data.hub"
    with pytest.raises(DataError) as caught:
        open_split(make_config(**keys, hf_path="json", hf_train_files=["a.jsonl"], train_split="x"), words, "train", 1)
    assert caught.value.id == "data.split"


@pytest.mark.filterwarnings("ignore")
def test_a_streamed_evaluation_reads_no_more_than_it_needs():
    pytest.importorskip("datasets")
    write("a.jsonl", [f"document {i} of some length" for i in range(400)])
    keys = {"dataset_type": "hf", "hf_path": "json", "hf_train_files": ["a.jsonl"], "hf_eval_split": "train"}
    words = tokenizer.ByteTokenizer()
    whole = open_split(make_config(**keys), words, "eval", 4)
    assert whole.documents == 400
    few = open_split(make_config(**keys, hf_streaming=True, eval_steps=3), words, "eval", 4)
    assert 0 < few.documents < 20
    assert all(np.array_equal(few.batch(s)[k], whole.batch(s)[k]) for s in range(3) for k in whole.batch(s))
    assert open_split(make_config(**keys, hf_streaming=True, eval_steps=-1), words, "eval", 4).documents == 400


@pytest.mark.filterwarnings("ignore")
def test_the_identity_of_a_streamed_data_set_is_that_of_its_files(tmp_path, monkeypatch):
    """On the hub the names of files hold their version; here their paths stand for that."""
    pytest.importorskip("datasets")
    from MaxText.data import open_train

    for name in ("a.jsonl", "b.jsonl"):
        write(name, KEPT)
    keys = {"dataset_type": "hf", "hf_path": str(tmp_path), "hf_streaming": True}
    cfg = make_config(**keys)
    both = open_train(cfg, tokenizer.make(cfg), 1).fingerprint
    assert open_train(cfg, tokenizer.make(cfg), 1).fingerprint == both
    Path("b.jsonl").unlink()
    hub.load.cache_clear()
    assert open_train(cfg, tokenizer.make(cfg), 1).fingerprint["stream"] != both["stream"]

    def offline(*_, **__):
        raise KeyError("of the library")

    monkeypatch.setattr("datasets.load_dataset_builder", offline)
    with pytest.raises(DataError, match="network") as caught:
        open_train(cfg, tokenizer.make(cfg), 1)
    assert caught.value.id == "data.hub"
