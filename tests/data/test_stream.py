"""A stream gives every token once and in order, and goes on from any step as if it had never stopped."""

import json

import numpy as np
import pytest

from MaxText import tokenizer
from MaxText.data import Feeder, stream
from MaxText.data.corpus import Words
from MaxText.data.stream import Reader, StreamDataset
from MaxText.data.units import Unit
from MaxText.errors import DataError, DataExhausted

WORDS = Words(tokenizer.ByteTokenizer(), 288, add_bos=True, add_eos=True)
UNIT = Unit("hf", "some/set", "", 0, 1 << 62)


class Listed:
    """A source that is read front to back, as an IterableDataset is."""

    def __init__(self, records):
        self.records, self.at = records, 0

    def __iter__(self):
        while self.at < len(self.records):
            self.at += 1
            yield self.records[self.at - 1]
        self.at = 0  # as the library does: the next pass begins anew

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


TEXTS = [bytes(np.random.default_rng(i).integers(97, 123, n).tolist()).decode() for i, n in
         enumerate([5, 70, 0, 1, 33, 400, 2, 18, 90, 16])]  # fmt: skip


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(stream, "WINDOW", 6)


def make(texts=TEXTS, *, batch=4, shuffle=False, epochs=None, words=WORDS):
    reader = Reader(Listed([t if isinstance(t, dict) else {"text": t} for t in texts]), UNIT, words, 16, epochs)
    return StreamDataset("test", 16, batch, {}, reader, seed=5, shuffle=shuffle)


def targets(batches):
    return np.concatenate([b["targets"][b["loss_mask"] == 1] for b in batches])


def drawn(d, *, most=10**6):
    found = []
    try:
        for step in range(most):
            found.append(d.batch(step))
    except DataExhausted as error:
        assert error.id == "data.exhausted"
    return found


def line(epochs=1):
    return [i for _ in range(epochs) for t in TEXTS if t for i in [*t.encode(), 257]]


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_token_once_and_in_order_up_to_the_last_whole_batch(epochs):
    batches = drawn(make(batch=2, epochs=epochs))
    assert len(batches) == len(line(epochs)) // 32
    assert targets(batches).tolist() == line(epochs)[: 32 * len(batches)]
    assert all(b["loss_mask"].all() for b in batches)


def test_windows_are_shuffled_in_themselves():
    plain, mixed = drawn(make(batch=6, epochs=2)), drawn(make(batch=6, epochs=2, shuffle=True))
    for one, other in zip(plain, mixed, strict=True):  # a batch is a window here
        rows = [sorted(map(tuple, b["targets"].tolist())) for b in (one, other)]
        assert rows[0] == rows[1]
    assert not all(np.array_equal(a["targets"], b["targets"]) for a, b in zip(plain, mixed, strict=True))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_any_step_is_gone_on_from_exactly(shuffle, batch):
    whole = make(batch=batch, shuffle=shuffle)
    steps = 3 * sum(len(t) + 1 for t in TEXTS) // (16 * batch)  # into the third epoch
    states, batches = [], []
    for step in range(steps):
        states.append(json.loads(json.dumps(whole.state_at(step))))
        batches.append(whole.batch(step))
    for start in range(0, steps, 5):
        again = make(batch=batch, shuffle=shuffle)
        again.seek(states[start])
        for step in range(start, min(start + 4, steps)):
            assert all(np.array_equal(again.batch(step)[k], batches[step][k]) for k in batches[step]), (start, step)
            assert again.state_at(step + 1) == (states + [whole.state_at(steps)])[step + 1]


def test_what_was_prepared_ahead_is_no_loss():
    """The feeder is steps ahead when the checkpoint is written: the state of an earlier step is still there."""
    d = make(batch=3)
    batches = [d.batch(s) for s in range(20)]
    state = json.loads(json.dumps(d.state_at(11)))
    again = make(batch=3)
    again.seek(state)
    assert np.array_equal(again.batch(11)["inputs"], batches[11]["inputs"])
    assert np.array_equal(d.batch(4)["inputs"], batches[4]["inputs"])  # also without a restart
    with pytest.raises(ValueError):
        d.state_at(10**6)


def test_states_are_asked_for_while_batches_are_drawn():
    d, states = make(batch=2), {}
    with Feeder(d, 0, 400, lambda batch: batch, ahead=50) as feeder:
        for step, _ in feeder:
            states[step] = d.state_at(step + 1)
    again = make(batch=2)
    for step in (0, 57, 398):
        again.seek(json.loads(json.dumps(states[step])))
        assert again.state_at(step + 1) == states[step]
        again.batch(step + 1)


def test_hosts_and_microbatches_ask_several_times():
    d, other = make(batch=4), make(batch=4)
    for step in range(10):
        whole = other.batch(step)
        parts = [d.batch(step, slice(a, a + 2)) for a in (2, 0)]
        assert np.array_equal(np.concatenate([parts[1]["inputs"], parts[0]["inputs"]]), whole["inputs"])


def test_documents_that_are_no_use():
    texts = ["a" * 40, {"text": 5}, "", {"txt": "b"}, "b" * 40]
    with pytest.raises(DataError) as caught:
        drawn(make(texts, batch=1, epochs=1))
    assert caught.value.id == "data.schema"
    lenient = Words(WORDS.tokenizer, 288, True, True, refuse=False)
    d = make(texts, batch=1, epochs=1, words=lenient)
    batches = drawn(d)
    assert len(batches) == 82 // 16
    assert d.bad == (
        ("some/set#1", "holds int in column text, not text"),
        ("some/set#3", "has no column text, unlike those before it (it has txt)"),
    )
    with pytest.raises(DataError) as caught:
        make([{"txt": "a"}]).batch(0)
    assert caught.value.id == "data.column"
    for nothing in ([], ["", ""]):
        with pytest.raises(DataError) as caught:
            make(nothing).batch(0)
        assert caught.value.id == "data.no-targets"


def test_after_other_data_it_begins_at_its_beginning():
    one, other = make(batch=2), make(batch=2)
    one.batch(0)
    one.begin(7)
    for step in range(4):
        assert np.array_equal(one.batch(step + 7)["inputs"], other.batch(step)["inputs"])
    again = make(batch=2)
    again.seek(json.loads(json.dumps(one.state_at(9))))
    assert np.array_equal(again.batch(9)["inputs"], one.batch(9)["inputs"])


def test_the_account_knows_what_was_seen_twice():
    """Also after a restart in the second epoch: rows, epochs, and what was dropped, which counts once."""
    one, pairs = make(batch=2), len(line(1))
    for _ in range(2):
        steps = 3 * pairs // 32
        for step in range(one._step, steps):
            one.batch(step)
        found = one.summary(steps)
        assert found["rows"] == 2 * steps and found["tokens"] == 32 * steps
        assert found["epochs"] == pytest.approx(32 * steps / pairs)
        assert found["rows_repeated"] == 2 * steps - pairs // 16
        assert found["dropped"] == {"empty": 1}
        again, middle = make(batch=2), steps * 2 // 3
        again.seek(json.loads(json.dumps(one.state_at(middle))))
        one = again
    assert make(batch=2).summary(1)["rows_repeated"] == 0


def test_a_state_of_something_else_is_refused():
    with pytest.raises(DataError) as caught:
        make().seek({"step": 3})
    assert caught.value.id == "data.state"


def test_a_source_that_fails_in_the_middle_is_gone_on_with():
    """As a network does: one message, and what was read before it is neither lost nor repeated."""

    class Torn(Listed):
        torn = True

        def __iter__(self):
            for record in super().__iter__():
                if self.torn and self.at == 6:
                    raise ConnectionError("the peer is gone\nand more")
                yield record

    def torn():
        return StreamDataset("test", 16, 4, {}, Reader(Torn([{"text": t} for t in TEXTS]), UNIT, WORDS, 16, 2), 5, True)

    one, place = torn(), None
    with pytest.raises(DataError, match="ConnectionError: the peer is gone[.] After") as caught:
        for step in range(10):
            place = json.loads(json.dumps(one.state_at(step)))
            one.batch(step)
    assert caught.value.id == "data.stream"
    again = torn()
    again.reader._records.torn = False
    again.seek(place)
    wanted = make(epochs=2, shuffle=True)
    for after in range(place["step"] + 5):
        batch = wanted.batch(after)
        if after >= place["step"]:
            assert np.array_equal(again.batch(after)["inputs"], batch["inputs"])


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_streams(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from MaxText.data import open_train

    from .helpers import make_config

    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name + t}) + "\n" for t in TEXTS * 3))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    cfg = make_config(dataset_type="hf", hf_path="json", hf_train_files=files, hf_streaming=True, num_epoch=2)

    def fresh():
        return open_train(cfg, tokenizer.make(cfg), 4)

    whole = fresh()
    states, batches = [], []
    for step in range(80):
        states.append(json.loads(json.dumps(whole.state_at(step))))
        batches.append(whole.batch(step))
    for start in range(0, 76, 15):
        again = fresh()
        again.seek(states[start])
        for step in range(start, start + 4):
            assert np.array_equal(again.batch(step)["inputs"], batches[step]["inputs"]), (start, step)
