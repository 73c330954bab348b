import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from MaxText import data, tokenizer
from MaxText.errors import DataError, DataExhausted

from .helpers import make_config, open_texts

TEXTS = [np.random.default_rng(n).integers(32, 127, n, np.uint8).tobytes() for n in (1, 40, 7, 300, 16, 15, 129)]
KEYS = {"inputs", "targets", "positions", "segments", "loss_mask"}


def equal(a, b):
    return a.keys() == b.keys() == KEYS and all(np.array_equal(a[k], b[k]) for k in a)


def rows_of(batches):
    """All rows as hashable values, to be counted."""
    return [tuple(np.concatenate([b[k][i] for k in sorted(KEYS)])) for b in batches for i in range(len(b["inputs"]))]


def synthetic(split="train", batch=4, **keys):
    cfg = make_config(dataset_type="synthetic", **keys)
    return data.open_split(cfg, tokenizer.make(cfg), split, batch)


@pytest.fixture(params=["text", "unpacked", "synthetic"])
def dataset(request, tmp_path):
    if request.param == "synthetic":
        return synthetic()
    return open_texts(tmp_path, TEXTS, packing=request.param == "text", num_epoch=-1)


def test_batches_do_not_depend_on_what_was_asked_before(dataset):
    steps = list(range(30))
    straight = {s: dataset.batch(s) for s in steps}
    random.Random(0).shuffle(steps)
    assert all(equal(dataset.batch(s), straight[s]) for s in steps + steps[:5])
    assert not equal(straight[0], straight[1])


def test_nobody_else_can_change_a_batch(dataset):
    first = dataset.batch(3)
    for value in first.values():
        value[:] = 77
    assert not any((v == 77).all() for v in dataset.batch(3).values())


def test_shapes_and_types(dataset):
    batch = dataset.batch(2)
    assert batch.keys() == KEYS
    assert all(v.shape == (4, 16) and v.dtype == np.int32 for v in batch.values())


@given(cuts=st.sets(st.integers(1, 3)), step=st.integers(0, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_shards_of_any_split_over_hosts_join_to_the_global_batch(dataset, cuts, step):
    edges = [0, *sorted(cuts), 4]
    shards = [dataset.batch(step, slice(a, b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    joined = {k: np.concatenate([s[k] for s in shards]) for k in KEYS}
    assert equal(joined, dataset.batch(step))


@pytest.mark.parametrize("rows", [slice(0, 5), slice(0, 4, 2), slice(3, 0, -1)])
def test_a_shard_outside_the_batch_is_refused(dataset, rows):
    with pytest.raises(ValueError):
        dataset.batch(0, rows)


def test_a_negative_step_is_refused(dataset):
    with pytest.raises(ValueError):
        dataset.batch(-1)


@pytest.mark.parametrize("small, large", [(1, 4), (2, 8)])
def test_the_stream_of_rows_does_not_depend_on_the_global_batch(tmp_path, small, large):
    a, b = (open_texts(tmp_path, TEXTS, batch=g, num_epoch=3) for g in (small, large))
    steps = b.batches
    assert rows_of(a.batch(s) for s in range(steps * large // small)) == rows_of(b.batch(s) for s in range(steps))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_holds_every_row_once_and_batches_straddle_epochs(tmp_path, packing, shuffle):
    d = open_texts(tmp_path, TEXTS, batch=3, num_epoch=-1, packing=packing, enable_data_shuffling=shuffle)
    rows = rows_of(d.batch(s) for s in range(d.rows))
    epochs = [rows[e * d.rows : (e + 1) * d.rows] for e in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert (epochs[0] == epochs[1]) is not shuffle


def test_targets_are_all_tokens_but_bos(tmp_path):
    """Bytes and eos of every document, each exactly once in an epoch."""
    d = open_texts(tmp_path, TEXTS, batch=1)
    batches = [d.batch(s) for s in range(d.batches)]
    targets = np.concatenate([b["targets"][b["loss_mask"] == 1] for b in batches])
    assert np.array_equal(np.sort(targets), np.sort([*b"".join(TEXTS), *[257] * len(TEXTS)]))
    assert (d.documents, d.tokens, d.bytes) == (7, 508 + 14, 508)


@pytest.mark.parametrize("bos, eos", [(True, False), (False, True), (False, False)])
def test_special_tokens(tmp_path, bos, eos):
    d = open_texts(tmp_path, [b"abc"], batch=1, add_bos=bos, add_eos=eos, max_target_length=8)
    b = d.batch(0)
    line = [256] * bos + [*b"abc"] + [257] * eos
    assert b["inputs"][0][: len(line) - 1].tolist() == line[:-1]
    assert b["targets"][0][: len(line) - 1].tolist() == line[1:]
    assert b["loss_mask"].sum() == len(line) - 1


def test_another_seed_is_another_order(tmp_path):
    a, b = (open_texts(tmp_path, TEXTS, data_shuffle_seed=s) for s in (0, 1))
    assert not equal(a.batch(0), b.batch(0))
    assert not equal(synthetic().batch(0), synthetic(data_shuffle_seed=1).batch(0))


def test_the_first_batch_of_the_first_run_never_changes():
    """If it does, every checkpoint resumes wrongly: then FORMAT or ORDER_VERSION has to change as well."""
    cfg = make_config(train_files=["builtin:austen/emma.txt", "builtin:austen/prideprejudice.txt"])
    batch = data.open_split(cfg, tokenizer.make(cfg), "train", 4).batch(0)
    text = tokenizer.make(cfg).decode(batch["inputs"].ravel())
    assert text == "r a time from Hibusiness to remebehaved, polite,, he is\n_not_ a "


# The end of the data


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_training_data_end_with_the_last_whole_batch(tmp_path, epochs):
    d = open_texts(tmp_path, TEXTS, num_epoch=epochs)
    assert d.batches == d.rows * epochs // 4
    assert d.batch(d.batches - 1)["loss_mask"].any(axis=1).all()
    data.check_enough(d, d.batches)
    for ask in (lambda: d.batch(d.batches), lambda: data.check_enough(d, d.batches + 1), lambda: d.batch(10**9)):
        with pytest.raises(DataExhausted) as caught:
            ask()
        assert caught.value.id == "data.exhausted"


def test_the_advice_of_exhausted_data_is_right(tmp_path):
    d = open_texts(tmp_path, TEXTS, num_epoch=1)
    with pytest.raises(DataExhausted, match=rf"num_epoch=3 .*steps={d.batches}\.") as caught:
        data.check_enough(d, 2 * d.rows // 4 + 1)
    assert f"{(2 * d.rows // 4 + 1) * 4 * 16:,} tokens" in str(caught.value)
    data.check_enough(open_texts(tmp_path, TEXTS, num_epoch=3), 2 * d.rows // 4 + 1)


def test_less_than_one_batch(tmp_path):
    d = open_texts(tmp_path, [b"short"], num_epoch=1)
    assert d.batches == 0
    with pytest.raises(DataExhausted, match="smaller batch"):
        data.check_enough(d, 1)


def test_endless_data(tmp_path):
    for d in (open_texts(tmp_path, TEXTS, num_epoch=-1), synthetic()):
        assert d.batches is None
        data.check_enough(d, 10**12)
        assert d.batch(10**9)["loss_mask"].any(axis=1).all()


# Evaluation


@pytest.mark.parametrize("batch", [1, 3, 4, 100])
def test_eval_is_every_row_once_in_order_and_full_batches(tmp_path, batch):
    d = open_texts(tmp_path, TEXTS, split="eval", batch=batch, num_epoch=5)
    whole = open_texts(tmp_path, TEXTS, split="eval", batch=1)
    batches = [d.batch(s) for s in range(d.batches)]
    assert d.batches == -(-d.rows // batch)
    assert all(len(b["inputs"]) == batch for b in batches)
    rows = rows_of(batches)
    assert rows[: d.rows] == rows_of(whole.batch(s) for s in range(whole.batches))
    assert not np.any(rows[d.rows :])
    assert sum(b["loss_mask"].sum() for b in batches) == sum(len(t) + 1 for t in TEXTS)
    with pytest.raises(DataExhausted):
        d.batch(d.batches)
    with pytest.raises(DataExhausted, match=f"eval_steps={d.batches}"):
        data.check_enough(d, d.batches + 1)


def test_synthetic_eval_is_fixed_and_not_the_training_text():
    assert synthetic("eval").batches == 8
    assert synthetic("eval", eval_steps=3).batches == 3
    assert not equal(synthetic("eval").batch(0), synthetic("train").batch(0))


# Accounting


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("split, steps", [("train", 0), ("train", 3), ("train", None), ("eval", None), ("eval", 2)])
def test_summary_counts_what_the_batches_hold(tmp_path, split, steps, packing):
    d = open_texts(tmp_path, [b"x", *TEXTS], split=split, num_epoch=3, packing=packing, add_bos=False, add_eos=False)
    batches = [d.batch(s) for s in range(d.batches if steps is None else steps)]
    summary = d.summary(steps)
    tokens = sum(int(b["loss_mask"].sum()) for b in batches)
    assert summary["tokens"] == tokens
    assert summary["tokens"] + summary["padding"] == len(batches) * 4 * 16
    assert summary["rows"] == sum(int(b["loss_mask"].any(axis=1).sum()) for b in batches)
    assert summary["rows_unseen"] == d.rows - len(set(rows_of(batches)) - {(0,) * 80})
    assert summary["rows_repeated"] == max(0, summary["rows"] - d.rows)
    assert summary["epochs"] == summary["rows"] / d.rows
    assert summary["dropped"] == {"single token": 2}  # "x" and the first of TEXTS


def test_packing_efficiency(tmp_path):
    assert open_texts(tmp_path, [b"x" * 31, b"y" * 31]).summary(1)["packing_efficiency"] == 1.0
    assert open_texts(tmp_path, [b"y" * 7], packing=False, batch=1).summary()["packing_efficiency"] == 0.5
    assert synthetic().summary(3)["packing_efficiency"] == 1.0
    with pytest.raises(ValueError):
        synthetic().summary()


# The recipe


def test_fingerprint_names_everything_that_changes_a_batch(tmp_path):
    base = {"max_target_length": 16, "batch": 4}
    fingerprint = open_texts(tmp_path, TEXTS, **base).fingerprint
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert open_texts(tmp_path, TEXTS, **base | {"num_epoch": 7}).fingerprint == fingerprint
    for change in (
        {"max_target_length": 8}, {"batch": 2}, {"packing": False}, {"add_bos": False}, {"add_eos": False},
        {"data_shuffle_seed": 1}, {"enable_data_shuffling": False},
    ):  # fmt: skip
        assert open_texts(tmp_path, TEXTS, **base | change).fingerprint != fingerprint
    assert open_texts(tmp_path, [*TEXTS[:-1], b"other"], **base).fingerprint != fingerprint
    assert open_texts(tmp_path, TEXTS[:-1], **base).fingerprint != fingerprint


def test_fingerprint_does_not_depend_on_the_folder(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    assert open_texts(tmp_path / "here", TEXTS).fingerprint == open_texts(tmp_path / "there", TEXTS).fingerprint


@pytest.mark.parametrize(
    "keys, error",
    [
        ({"vocab_size": 257}, "data.vocabulary"),
        ({"split": "eval", "eval_files": []}, "data.no-files"),
        ({"add_bos": False, "add_eos": False}, "data.no-targets"),
    ],
)
def test_refusals(tmp_path, keys, error):
    with pytest.raises(DataError) as caught:
        open_texts(tmp_path, [b"x"], **keys)
    assert caught.value.id == error


def test_a_tokenizer_that_emits_more_than_it_says(tmp_path):
    class Liar(tokenizer.ByteTokenizer):
        def encode(self, text):
            return super().encode(text) + 65536

    (tmp_path / "a").write_bytes(b"abc")
    cfg = make_config(train_files=[str(tmp_path / "a")])
    with pytest.raises(DataError) as caught:
        data.open_split(cfg, Liar(), "train", 1)
    assert caught.value.id == "data.token-range"
