"""Shares are exact, every row of a part comes in its turn, and any step is known without those before it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText import data, tokenizer
from MaxText.data import mixture, opening
from MaxText.data.mixture import PERIOD
from MaxText.errors import DataError, DataExhausted

from .helpers import make_config

shares = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(shares, st.integers(0, 3), st.integers(0, 2 * PERIOD), st.integers(1, 300))
def test_any_rows_are_those_of_the_whole_walk(weights, seed, first, count):
    m = mixture.make([(0, np.array(weights) / sum(weights)), (PERIOD + 77, np.ones(len(weights)) / len(weights))], seed)
    part, nth = m.at(0, first + count)
    for k in range(len(weights)):
        assert np.array_equal(nth[part == k], np.arange((part == k).sum()))  # its rows in its own order, none twice
    here = m.at(first, first + count)
    assert np.array_equal(here[0], part[first:]) and np.array_equal(here[1], nth[first:])
    assert np.array_equal(m.given(first), np.bincount(part[:first], minlength=len(weights)))


@given(shares)
def test_shares_of_a_period_are_whole_and_sum_to_it(weights):
    counts = mixture.shares_of_period(weights)
    assert sum(counts) == PERIOD
    exact = np.array(weights) * PERIOD / sum(weights)
    assert np.abs(np.array(counts) - exact).max() < 1
    assert all(c == 0 for c, w in zip(counts, weights, strict=True) if not w)


def test_the_deal_of_a_seed_never_changes():
    """If it does, a run with a mixture resumes wrongly: then MIXTURE_VERSION has to change as well."""
    part, nth = mixture.make([(0, (0.5, 0.3, 0.2))], seed=7).at(4090, 4102)
    assert part.tolist() == [0, 1, 2, 2, 1, 0, 0, 0, 0, 1, 2, 0]
    assert nth.tolist() == [2046, 1227, 817, 818, 1228, 2047, 2048, 2049, 2050, 1229, 819, 2051]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, word in (("a", "AAAAAAAA"), ("b", "bbbbbbbb"), ("c", "cccccccc")):
        (tmp_path / f"{name}.txt").write_text(word * 40)
    return ["a.txt", "b.txt", "c.txt"]


def open_mixture(files, batch=8, **keys):
    cfg = make_config(**{"train_files": files, "mixture_weights": [0.5, 0.25, 0.25], "num_epoch": -1} | keys)
    return data.open_split(cfg, tokenizer.make(cfg), "train", batch)


def letters(d, steps):
    """How many rows of each file the steps hold."""
    rows = np.concatenate([d.batch(s)["inputs"] for s in steps])
    return [int((rows == ord(c)).any(axis=1).sum()) for c in "Abc"]


def test_rows_come_in_the_shares(files):
    d = open_mixture(files)
    assert letters(d, range(512)) == [2048, 1024, 1024]
    assert d.summary(512)["parts"]["a.txt"][0] == 2048
    assert json.loads(json.dumps(d.fingerprint)) == d.fingerprint
    assert d.summary(512)["tokens"] == sum(int(d.batch(s)["loss_mask"].sum()) for s in range(512))


def test_a_schedule_changes_the_shares_from_its_step_on(files):
    d = open_mixture(files, mixture_schedule=["100:0/1/0", "200:0/0/1"])
    assert letters(d, range(100, 200)) == [0, 800, 0]
    assert letters(d, range(200, 250)) == [0, 0, 400]
    plain = open_mixture(files)
    assert letters(d, range(100)) == letters(plain, range(100))
    assert d.fingerprint != plain.fingerprint


def test_a_schedule_of_other_parts_is_refused(files):
    keys = {"dataset_type": "text", "mixture_weights": [1, 0, 0], "mixture_schedule": ["9:1/0/0"], "train_files": files}
    with pytest.raises(DataError) as caught:
        opening.mixture_of(make_config(**keys), [0.5, 0.5], 4)
    assert caught.value.id == "data.mixture"


@pytest.mark.parametrize("epochs", [1, 2])
def test_it_ends_when_a_part_has_no_row_left(files, epochs):
    d = open_mixture(files, num_epoch=epochs)
    limits = [p.rows * epochs for p in d.parts]
    used = d.mixture.given(d.batches * 8)
    after = d.mixture.given((d.batches + 1) * 8)
    assert (used <= limits).all() and not (after <= limits).all()
    d.batch(d.batches - 1)
    with pytest.raises(DataExhausted):
        d.batch(d.batches)
    with pytest.raises(DataExhausted, match="num_epoch"):
        data.check_enough(d, d.batches + 1)


def test_every_epoch_of_a_part_holds_its_rows_once(files):
    d = open_mixture(files)
    one = d.parts[1]
    shown = [r for s in range(60) for r in d.show(s) if r.part == "b.txt"]
    first_epoch = [r.row for r in shown if r.epoch == 0]
    assert sorted(first_epoch) == list(range(one.rows))
    assert shown[one.rows].epoch == 1


def test_hosts_join_to_the_global_batch(files):
    d = open_mixture(files)
    for step in (0, 3, 511):
        whole = d.batch(step)
        parts = [d.batch(step, slice(a, a + 2)) for a in range(0, 8, 2)]
        assert all(np.array_equal(np.concatenate([p[k] for p in parts]), whole[k]) for k in whole)


def test_held_out_of_a_mixture_is_one_set(files):
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20))
    for name in ("x.jsonl", "y.jsonl"):
        Path(name).write_text(lines)
    keys = {"mixture_weights": [0.5, 0.5], "held_out_every": 5}
    train = open_mixture(["x.jsonl", "y.jsonl"], **keys)
    cfg = make_config(train_files=["x.jsonl", "y.jsonl"], **keys)
    held_out = data.open_split(cfg, tokenizer.make(cfg), "eval", 4)
    assert (train.documents, held_out.documents, len(held_out.parts)) == (32, 8, 1)
