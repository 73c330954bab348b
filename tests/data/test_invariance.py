"""Any split of one global batch over hosts, devices, workers and accumulation is the same stream of tokens."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from MaxText import data, tokenizer
from MaxText.data import prepare

from .helpers import make_config
from .test_stream import UNIT, WORDS, Listed, Reader, StreamDataset

BATCH = 12
TEXTS = [bytes(np.random.default_rng(i).integers(97, 123, 3 + 37 * i % 211).tolist()).decode() for i in range(40)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A data set of every kind, each able to be opened anew."""
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("a", TEXTS[:20]), ("b", TEXTS[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    files = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    np.save(folder / "ids.npy", np.concatenate([WORDS.tokenizer.encode(t + "\n") for t in TEXTS]).astype(np.uint16))
    plain = {"train_files": files, "num_epoch": -1, "eval_files": []}
    cfg = make_config(**plain)
    prepare.prepare(cfg, tokenizer.make(cfg), Path(folder / "rows"), 1)
    keys = {
        "concat": plain,
        "first_fit": plain | {"packing_type": "first_fit"},
        "unpacked": plain | {"packing": False},
        "mixture": plain | {"mixture_weights": [0.25, 0.75], "mixture_schedule": ["7:1/0"]},
        "ids": plain | {"train_files": [str(folder / "ids.npy")]},
        "prepared": {"dataset_type": "prepared", "dataset_path": str(folder / "rows"), "num_epoch": -1},
        "synthetic": {"dataset_type": "synthetic"},
    }

    def fresh(kind):
        if kind == "stream":
            reader = Reader(Listed([{"text": t} for t in TEXTS]), UNIT, WORDS, 16, None)
            return StreamDataset("test", 16, BATCH, {}, reader, seed=1, shuffle=True)
        one = make_config(**keys[kind])
        return data.open_train(one, tokenizer.make(one), BATCH)

    return fresh


KINDS = ["concat", "first_fit", "unpacked", "mixture", "ids", "prepared", "synthetic", "stream"]


def joined(pieces):
    return {k: np.concatenate([p[k] for p in pieces]) for k in pieces[0]}


def equal(a, b):
    return all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", KINDS)
@given(cuts=st.sets(st.integers(1, BATCH - 1)), steps=st.lists(st.integers(0, 12), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hosts(sets, kind, cuts, steps):
    """Each host opens the data itself and takes its rows: together they have the global batch."""
    edges = [0, *sorted(cuts), BATCH]
    whole = sets(kind)
    hosts = [sets(kind) for _ in edges[1:]]
    for step in sorted(set(steps)) if kind != "stream" else range(max(steps) + 1):
        parts = [h.batch(step, slice(*e)) for h, e in zip(hosts, zip(edges, edges[1:], strict=False), strict=True)]
        assert equal(joined(parts), whole.batch(step))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "stream"])
def test_workers(sets, kind):
    """Steps asked for by many threads at once, in any order."""
    whole, shared = sets(kind), sets(kind)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(shared.batch, list(range(40))[::-1]))
    assert all(equal(one, whole.batch(step)) for one, step in zip(found, range(39, -1, -1), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_feeder_and_restarts(sets, kind):
    """The feeder's stream, begun anew at any step, is that of batch(step)."""
    whole = sets(kind)
    wanted = [whole.batch(s) for s in range(24)]
    done, place, got = 0, None, []
    for stop in (5, 6, 17, 24):
        d = sets(kind)
        if place is not None:
            d.seek(place)
        with data.Feeder(d, done, 24, lambda batch: batch) as feeder:  # prepares beyond `stop`, as before a kill
            for step, batch in feeder:
                got.append(batch)
                if step == stop - 1:
                    break
        place, done = json.loads(json.dumps(d.state_at(stop))), stop
    assert len(got) == 24 and all(equal(a, b) for a, b in zip(got, wanted, strict=True))
