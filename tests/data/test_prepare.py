"""Prepared rows are the rows of their sources, bit for bit; whatever interrupts the making, the next try ends it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from MaxText import config, data, tokenizer
from MaxText.data import prepare, prepared
from MaxText.errors import ConfigError, DataError, Preempted, StorageError

from .helpers import make_config
from .preparing import keys_of, make, pair

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"packing": False},
        {"packing_type": "first_fit"},
        {"packing_type": "best_fit"},
        {"mixture_weights": [0.3, 0.7], "mixture_schedule": ["9:1/0"]},
        {"held_out_every": 0, "eval_files": ["y.jsonl"], "train_files": ["x.jsonl"], "quarantine": ["x.jsonl:4"]},
    ],
)
def test_they_are_the_rows_of_their_sources(files, more):
    keys = keys_of(files, **more)
    said = make(keys)
    assert "rows of 16" in said
    for split in ("train", "eval"):
        a, b = pair(keys, split)
        assert (a.documents, a.tokens, a.bytes, a.dropped) == (b.documents, b.tokens, b.bytes, b.dropped)
        assert a.fingerprint == b.fingerprint
        for step in range(a.batches or 20):
            one, other = a.batch(step), b.batch(step)
            assert all(np.array_equal(one[k], other[k]) for k in one)
            assert a.show(step) == b.show(step)
        steps = a.batches or 20
        assert a.summary(steps) == b.summary(steps)
    assert not Path("rows/parts").exists()
    assert prepared.verify("rows")


def test_the_splits_hold_every_document_once(files):
    make(keys_of(files))
    train, held_out = (next(iter(pair(keys_of(files), split))) for split in ("train", "eval"))
    names = [[d.parts[0].names.name(i) for i in range(d.documents)] for d in (train, held_out)]
    assert not set(names[0]) & set(names[1])
    whole = data.open_split(make_config(train_files=files), tokenizer.ByteTokenizer(), "train", 1)
    assert sorted(names[0] + names[1]) == sorted(whole.parts[0].names.name(i) for i in range(whole.documents))


def test_workers_change_nothing(files):
    make(keys_of(files), "one")
    make(keys_of(files), "two", workers=2)
    one, two = (json.loads(Path(f, "manifest.json").read_text()) for f in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("after", [0, 3, 9])
def test_interrupted_while_tokenizing(files, after, monkeypatch):
    made, tokenize = [], prepare.corpus.tokenize

    def interrupted(unit, words):
        if len(made) == after:
            raise KeyboardInterrupt
        made.append(unit)
        return tokenize(unit, words)

    monkeypatch.setattr(prepare.corpus, "tokenize", interrupted)
    with pytest.raises(Preempted) as stopped:
        make(keys_of(files))
    assert stopped.value.id == "data.interrupted"
    with pytest.raises(DataError) as caught:
        prepared.manifest("rows")
    assert caught.value.id == "data.not-prepared"
    again = []
    monkeypatch.setattr(prepare.corpus, "tokenize", lambda unit, *how: again.append(unit) or tokenize(unit, *how))
    make(keys_of(files))
    assert not set(made) & set(again)  # what was done is not done again
    a, b = pair(keys_of(files))
    assert all(np.array_equal(a.batch(s)["inputs"], b.batch(s)["inputs"]) for s in range(5))


@pytest.mark.parametrize("where", ["_join", "write", "_save_rows"])
def test_interrupted_while_joining(files, where, monkeypatch):
    owner = prepare.sealed if where == "write" else prepare
    whole, calls = getattr(owner, where), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", "rows/file")
        return whole(*arguments)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(StorageError) as caught:
        make(keys_of(files))
    assert caught.value.id == "data.write"
    monkeypatch.setattr(owner, where, whole)
    make(keys_of(files))
    assert prepared.verify("rows")


def test_a_complete_folder_stays_as_it_is(files):
    make(keys_of(files))
    before = {p: p.stat().st_mtime_ns for p in Path("rows").rglob("*")}
    assert "complete" in make(keys_of(files))
    assert {p: p.stat().st_mtime_ns for p in Path("rows").rglob("*")} == before
    with pytest.raises(ConfigError, match="max_target_length: 16 there, 32 now") as caught:
        make(keys_of(files, max_target_length=32))
    assert caught.value.id == "data.prepare-other"


@pytest.mark.parametrize(
    "now, error",
    [
        ({"max_target_length": 32}, "data.prepared-otherwise"),
        ({"packing_type": "best_fit"}, "data.prepared-otherwise"),
        ({"add_bos": False}, "data.prepared-otherwise"),
        ({"mixture_weights": [0.5, 0.5]}, "data.mixture"),
        ({"dataset_path": "none"}, "data.not-prepared"),
        ({"quarantine": ["z.jsonl:3"]}, "data.quarantine"),
    ],
)
def test_rows_that_do_not_fit_are_refused(files, now, error):
    make(keys_of(files))
    with pytest.raises(DataError) as caught:
        list(pair(keys_of(files), **now))
    assert caught.value.id == error


@pytest.mark.parametrize("packing", ["concat_then_split", "best_fit"])
def test_a_part_whose_documents_are_all_in_quarantine_is_refused(files, packing):
    keys = keys_of(files, packing_type=packing, held_out_every=0, mixture_weights=[0.5, 0.5])
    make(keys)
    whole = data.open_split(make_config(**keys), tokenizer.ByteTokenizer(), "train", 1).parts[1]
    every = [whole.names.name(i) for i in range(len(whole.names.records))]
    cfg, words = make_config(**keys, quarantine=every), tokenizer.ByteTokenizer()
    here = cfg.replace(dataset_type="prepared", dataset_path="rows", train_files=[])
    for one in (cfg, here):
        with pytest.raises(DataError, match="quarantine") as caught:
            data.open_split(one, words, "train", 4)
        assert caught.value.id == "data.no-targets"
        rest = one.replace(quarantine=every[1:])
        assert data.open_split(rest, words, "train", 4).parts[1].contents.total > 0


def test_bad_documents_stay_left_out(files):
    with open("x.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError) as caught:
        make(keys_of(files))
    assert caught.value.id == "data.json"
    assert "x.jsonl:31" in make(keys_of(files, bad_documents="drop"))
    _, b = pair(keys_of(files, bad_documents="drop"))
    assert [name for name, _ in b.bad] == ["x.jsonl:31"]
    assert b.dropped["unreadable"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGINT])
def test_killed_with_workers(tmp_path, signal_):
    """At any moment: no worker stays behind, no traceback, and the same command ends what was begun."""
    line = json.dumps({"text": "some words of a text " * 200}) + "\n"
    for i in range(12):
        (tmp_path / f"{i}.jsonl").write_text(line * 700)
    (tmp_path / "run.yml").write_text("train_files: ['*.jsonl']\neval_files: []\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("M_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "MaxText", "data", "prepare", "run.yml", "out=rows", "workers=2"]
    keys = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed = 0
    for wait in (0.0, 0.2, 0.4):
        parts = tmp_path / "rows/parts"
        before = len(list(parts.glob("*.npz")))
        process = subprocess.Popen(command, start_new_session=True, **keys)
        end = time.monotonic() + 60
        while len(list(parts.glob("*.npz"))) == before and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(wait)
        killed += process.poll() is None
        if process.poll() is None:
            os.killpg(process.pid, signal_) if signal_ == signal.SIGINT else process.kill()  # Ctrl-C is for the group
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said
        while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout and time.monotonic() < end:
            time.sleep(0.05)
        assert not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout
    assert killed
    assert subprocess.run(command, timeout=120, **keys).returncode == 0
    assert prepared.verify(str(tmp_path / "rows"))


def test_the_command_line(files, tmp_path):
    """prepare, show and verify as a person types them, with two worker processes."""
    (tmp_path / "run.yml").write_text("train_files: [x.jsonl, y.jsonl]\nheld_out_every: 7\nmax_target_length: 16\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("M_")} | {"PYTHONPATH": str(ROOT)}

    def run(*arguments):
        command = [sys.executable, "-m", "MaxText", "data", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert run("prepare", "run.yml", "out=rows", "workers=2").returncode == 0
    assert "files are as they were written" in run("verify", "rows").stdout
    shown = run("show", "run.yml", "step=3", "global_batch_size=4", "row=2")
    dataset = data.open_split(config.load([str(tmp_path / "run.yml")]), tokenizer.ByteTokenizer(), "train", 4)
    (one,) = dataset.show(3, slice(2, 3))
    assert f"row 2 (epoch 0, row {one.row} of text)" in shown.stdout
    assert all(name in shown.stdout for name, _ in one.pieces)
    for arguments, code in ((["show", "run.yml"], 2), (["verify", "none"], 4), (["prepare", "run.yml", "out="], 2)):
        done = run(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
