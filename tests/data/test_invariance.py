"""Any split of one global batch over hosts, devices, workers and accumulation is the same stream of tokens; and stopped
anywhere, any number of times, it goes on as if it had never stopped. For every kind of data."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from MaxText import data
from MaxText.data import stream
from MaxText.share import Share

from .kinds import BY_INDEX, STREAMS, Kinds

BATCH, STEPS = 12, 50
TFDS = pytest.param("tfds", marks=pytest.mark.slow)  # its import takes seconds
EVERY = [*BY_INDEX, TFDS, *STREAMS]

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that read data


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return Kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module", autouse=True)
def windows_end_inside_of_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "WINDOW", 40)
        yield


@pytest.fixture(scope="module")
def walk(kinds):
    """kind → (batches, states as a checkpoint holds them) of the unbroken run."""
    made: dict[str, tuple] = {}

    def of(kind):
        if kind not in made:
            one, states, batches = kinds.open(kind, BATCH), [], []
            for step in range(STEPS):
                states.append(json.dumps(one.state_at(step)))
                batches.append(one.batch(step))
            made[kind] = batches, states, one
        return made[kind][:2]

    return of


def joined(pieces):
    return {k: np.concatenate([p[k] for p in pieces]) for k in pieces[0]}


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


class Hosts:
    """Processes that have opened the data themselves; a stream of each begins anew when it is asked for."""

    def __init__(self, kinds, states):
        self.kinds, self.states, self.opened = kinds, states, {}

    def at(self, kind, number, step):
        key = kind, number
        if key not in self.opened:
            self.opened[key] = self.kinds.open(kind, BATCH)
        self.opened[key].seek(json.loads(self.states(kind)[1][step]))
        return self.opened[key]


@pytest.fixture(scope="module")
def hosts(kinds, walk):
    return Hosts(kinds, walk)


CUTS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.mark.parametrize("kind", EVERY)
@given(
    cuts=st.sets(st.integers(0, BATCH), max_size=3),
    microbatches=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, STEPS - 2),
)
@settings(max_examples=12, **CUTS)
def test_hosts_and_accumulation(walk, hosts, kind, cuts, microbatches, step):
    """Each host takes its rows of each microbatch: together they have the global batch, in its order."""
    rows = BATCH // microbatches
    edges = sorted({0, rows, *(cut * rows // BATCH for cut in cuts)})
    spans = [range(*span) for span in pairwise(edges)]
    shares = [
        Share(hosts.at(kind, number, step), SimpleNamespace(rows=rows, span=span, microbatches=microbatches))
        for number, span in enumerate(spans)
    ]
    for now in (step, step + 1):
        pieces = [share.batch(now) for share in shares]
        for name, wanted in walk(kind)[0][now].items():
            parts = [
                piece[name].reshape(microbatches, len(span), -1) for piece, span in zip(pieces, spans, strict=True)
            ]
            assert np.array_equal(np.concatenate(parts, axis=1).reshape(BATCH, -1), wanted)


# The first fifty steps. One that changes has another order, packing or form than before: then ORDER_VERSION,
# MIXTURE_VERSION, PLAN_VERSION, STREAM_VERSION or FORMAT must change as well, or a resumed run goes wrong unseen.
DIGESTS = dict.fromkeys(
    ["jsonl", "jsonl.gz", "parquet", "array_record", "tfrecord", "npy", "grain", "hf", "saved", "prepared"],
    "686245e52295ac83",
) | {
    "txt": "7809beae490b1585", "first_fit": "b9e6eec6bced4dd1", "best_fit": "94a5d4182e4585b1",
    "unpacked": "78fcd712a357fc5e", "held_out": "6c5f4a7330748e33", "quarantine": "b5a0134045c8adbc",
    "mixture": "043964095e86d2ba", "grain_mixture": "82f8f18f49eb05bd", "prepared_fit": "94a5d4182e4585b1",
    "prepared_mixture": "043964095e86d2ba", "synthetic": "d02300966e0ecb28", "stream": "43268259924df247",
    "stream_shuffled": "81b230d592ea5e23", "hf_stream": "eec879514860bed0",
    "tfds": "6b88a5cd795a48ff",  # it stores documents in the order of their hashes
}  # fmt: skip


@pytest.mark.parametrize("kind", EVERY)
def test_the_stream_of_tokens_is_that_of_every_version_before(walk, kind):
    """On every Python, with every numpy; and one for all forms of the same documents."""
    sha = hashlib.sha256()
    for batch in walk(kind)[0]:
        for name in sorted(batch):
            sha.update(np.ascontiguousarray(batch[name], np.int32).tobytes())
    assert sha.hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", [*BY_INDEX, TFDS])
def test_workers(kinds, walk, kind):
    """Steps asked for by many threads at once, in any order."""
    shared = kinds.open(kind, BATCH)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(shared.batch, range(STEPS)[::-1]))
    assert all(map(equal, found[::-1], walk(kind)[0]))


@pytest.mark.parametrize("kind", EVERY)
def test_killed_at_any_step(kinds, walk, kind):
    """The state before each step, in a process that has just started, gives that step and the one after it."""
    batches, states = walk(kind)
    started = kinds.open(kind, BATCH)
    for step in np.random.default_rng(0).permutation(STEPS - 1):
        started.seek(json.loads(states[step]))
        assert equal(started.batch(int(step)), batches[step]) and equal(started.batch(int(step) + 1), batches[step + 1])


@pytest.mark.parametrize("kind", EVERY)
def test_resumed_many_times(kinds, walk, kind):
    """The feeder, which prepares beyond where it is killed, begun anew again and again, into a later epoch."""
    wanted, done, place, got = walk(kind)[0], 0, "null", []
    for stop in (1, 5, 6, 17, 23, 41, STEPS):
        one = kinds.open(kind, BATCH)
        if done:
            one.seek(json.loads(place))
        with data.Feeder(one, done, STEPS, lambda batch: batch) as feeder:
            for step, batch in feeder:
                got.append(batch)
                if step == stop - 1:
                    break
        place, done = json.dumps(one.state_at(stop)), stop
    assert len(got) == STEPS and all(map(equal, got, wanted))
    if kind in STREAMS:
        assert one.state_at(STEPS)["place"]["epoch"] >= 1 and one.state_at(STEPS)["window"] >= 3
    elif kind != "synthetic":
        assert all(
            epochs > 1
            for _, epochs in one.summary(STEPS).get("parts", {"": (0, one.summary(STEPS)["epochs"])}).values()
        )


@pytest.mark.parametrize("kind", [*BY_INDEX, TFDS])
def test_the_walk_begins_inside_of_what_was_packed_together(kinds, kind):
    """Of the steps above, some end in the middle of a document that goes on in the next."""
    if kind in ("synthetic", "first_fit", "best_fit", "unpacked", "prepared_fit"):
        return
    one = kinds.open(kind, BATCH, enable_data_shuffling=False)
    ends = [one.show(step)[-1].pieces[-1] for step in range(8)]
    begins = [one.show(step + 1)[0].pieces[0] for step in range(8)]
    assert any(a[0] == b[0] and b[1].offset for a, b in zip(ends, begins, strict=True))
