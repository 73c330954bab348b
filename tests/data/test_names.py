"""Names of documents: `show` says what a step sees, the quarantine takes them, a resume compares recipes."""

import json
from pathlib import Path

import numpy as np
import pytest

from MaxText import data, tokenizer
from MaxText.errors import DataError

from .helpers import make_config


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ["alpha " * 4, "", "beta " * 9, "gamma", "delta " * 20]
    Path("web.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    Path("sub").mkdir()
    Path("sub/book.txt").write_text("a book of words. " * 12)


FILES = ["web.jsonl", "sub/book.txt"]


def open_train(batch=3, **keys):
    cfg = make_config(**{"train_files": FILES, "num_epoch": -1} | keys)
    return data.open_split(cfg, tokenizer.make(cfg), "train", batch)


@pytest.mark.parametrize("packing", ["concat_then_split", "first_fit", "best_fit"])
def test_show_says_which_documents_a_step_sees(packing):
    d = open_train(packing_type=packing)
    words = tokenizer.ByteTokenizer()
    texts = {
        f"web.jsonl:{n}": json.loads(line)["text"]
        for n, line in enumerate(Path("web.jsonl").read_text().splitlines(), 1)
    }
    texts["sub/book.txt"] = Path("sub/book.txt").read_text()
    ids = {name: [256, *words.encode(text), 257] for name, text in texts.items()}
    seen = set()
    for step in range(d.rows // 3 + 1):
        batch = d.batch(step)
        for one, inputs, mask in zip(d.show(step), batch["inputs"], batch["loss_mask"], strict=True):
            assert sum(p.pairs for _, p in one.pieces) == mask.sum()
            for name, p in one.pieces:
                seen.add(name)
                assert inputs[p.column : p.column + p.pairs].tolist() == ids[name][p.offset : p.offset + p.pairs]
    assert seen == {"web.jsonl:1", "web.jsonl:3", "web.jsonl:4", "web.jsonl:5", "sub/book.txt"}


@pytest.mark.parametrize("name", ["web.jsonl:3", "sub/book.txt", "book.txt"])
def test_a_quarantined_document_trains_nothing_and_moves_nothing(name):
    plain, masked = open_train(), open_train(quarantine=[name])
    full = next(n for n in ("web.jsonl:3", "sub/book.txt") if n.endswith(name))
    for step in range(30):
        a, b = plain.batch(step), masked.batch(step)
        assert all(np.array_equal(a[k], b[k]) for k in a if k != "loss_mask")
        for i, one in enumerate(masked.show(step)):
            for who, p in one.pieces:
                here = slice(p.column, p.column + p.pairs)
                assert b["loss_mask"][i, here].any() == (who != full)
    steps = plain.rows
    assert masked.summary(steps)["tokens"] == sum(int(masked.batch(s)["loss_mask"].sum()) for s in range(steps))


@pytest.mark.parametrize("name", ["web.jsonl:2", "web.jsonl:9", "web.jsonl", "none.txt", "eb.jsonl:3", "book.txt:1"])
def test_a_name_of_which_there_is_no_document(name):
    with pytest.raises(DataError) as caught:
        open_train(quarantine=[name])
    assert caught.value.id == "data.quarantine"


def test_what_may_change_at_a_resume():
    before = json.loads(json.dumps(open_train().fingerprint))
    more = open_train(quarantine=["web.jsonl:3"]).fingerprint
    assert data.differences(before, open_train().fingerprint) == []
    assert data.differences(before, more) == []
    assert "web.jsonl:3" in data.notes(before, more)[0]
    assert "web.jsonl:3" in data.differences(json.loads(json.dumps(more)), before)[0]  # it stays out
    Path("web.jsonl").write_text(Path("web.jsonl").read_text() + '{"text": "new"}\n')
    (line,) = data.differences(before, open_train().fingerprint)
    assert line.startswith("files:") and "book.txt" not in line and line.count("web.jsonl") == 2
    (line,) = data.differences(before, open_train(batch=4).fingerprint | {"files": before["files"]})
    assert line == "global_batch: 3 in the checkpoint, 4 now"


def test_bad_documents_can_be_left_out_and_are_named():
    with Path("web.jsonl").open("a") as file:
        file.write('{"text": 5}\n')
    d = open_train(bad_documents="drop")
    assert d.bad == (("web.jsonl:6", "holds int in column text, not text"),)
    assert d.summary(3)["dropped"] == {"empty": 1, "unreadable": 1}
    assert open_train(bad_documents="drop").fingerprint == d.fingerprint  # the same after a restart


def test_train_and_held_out_share_no_document_and_miss_none():
    keys = {"train_files": FILES, "held_out_every": 3, "num_epoch": 1}
    cfg = make_config(**keys)
    words = tokenizer.make(cfg)
    both = [data.open_split(cfg, words, split, 1) for split in ("train", "eval")]
    names = [{d.parts[0].names.name(i) for i in range(d.documents)} for d in both]
    assert names == [{"web.jsonl:1", "web.jsonl:4", "web.jsonl:5"}, {"web.jsonl:3", "sub/book.txt"}]
    assert data.has_eval(cfg) and not data.has_eval(make_config())


@pytest.mark.parametrize("files", [FILES, [f"./{name}" for name in FILES]])
def test_one_document_in_several_spellings_is_one(files):
    """A resume with another spelling has the same data."""
    plain = open_train(train_files=files, quarantine=["web.jsonl:3", "sub/book.txt"])
    other = open_train(train_files=files, quarantine=["sub/../web.jsonl:3", "./web.jsonl:3", "sub//book.txt"])
    assert other.fingerprint == plain.fingerprint
    assert all(np.array_equal(plain.batch(s)["loss_mask"], other.batch(s)["loss_mask"]) for s in range(20))
