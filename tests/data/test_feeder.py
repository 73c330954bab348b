import threading
import time
from types import SimpleNamespace

import pytest

from MaxText.data import Feeder


class Source:
    """Batches that say their step; can fail or block at one of them."""

    def __init__(self, fail=None, block=None):
        self.fail, self.block, self.made, self.gate = fail, block, [], threading.Event()

    def batch(self, step):
        if step == self.block:
            assert self.gate.wait(10)
        if step == self.fail:
            raise OSError("the disk is gone")
        self.made.append(step)
        return {"step": step}


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("ahead", [1, 4, 100])
@pytest.mark.parametrize("start, stop", [(0, 20), (7, 9), (5, 5)])
def test_every_step_once_and_in_order(start, stop, ahead):
    with Feeder(Source(), start, stop, lambda b: -b["step"], ahead=ahead) as feeder:
        assert list(feeder) == [(s, -s) for s in range(start, stop)]
        assert list(feeder) == []


def test_at_most_so_many_are_prepared():
    source = Source()
    with Feeder(source, 0, 1000, lambda b: b, ahead=3) as feeder:
        until(lambda: len(source.made) == 3)
        time.sleep(0.02)  # a fourth would come at once
        assert source.made == [0, 1, 2]
        next(feeder)
        until(lambda: len(source.made) == 4)


def test_put_runs_in_the_background():
    names = []
    with Feeder(Source(), 0, 3, lambda b: names.append(threading.current_thread().name)) as feeder:
        list(feeder)
    assert names == ["feeder"] * 3


@pytest.mark.parametrize("where", ["batch", "put"])
def test_a_failure_reaches_the_consumer_after_what_was_ready(where):
    def put(b):
        if where == "put" and b["step"] == 3:
            raise OSError("the disk is gone")
        return b

    with Feeder(Source(fail=3 if where == "batch" else None), 0, 9, put) as feeder:
        assert [next(feeder)[0] for _ in range(3)] == [0, 1, 2]
        for _ in range(2):  # it does not look like the end of the data afterwards
            with pytest.raises(OSError, match="the disk is gone"):
                next(feeder)


@pytest.mark.parametrize("used", [0, 1, 5])
def test_close_ends_the_thread(used):
    before = threading.active_count()
    source = Source()
    with Feeder(source, 0, 10**9, lambda b: b) as feeder:
        for _ in range(used):
            next(feeder)
        until(lambda: len(source.made) == used + 4)
    assert threading.active_count() == before
    assert len(source.made) == used + 4
    feeder.close()
    with pytest.raises(RuntimeError):
        next(feeder)


def test_an_error_of_the_consumer_ends_the_thread_and_passes():
    before = threading.active_count()
    with pytest.raises(KeyError), Feeder(Source(), 0, 10**9, lambda b: b) as feeder:
        next(feeder)
        raise KeyError
    assert threading.active_count() == before


def test_close_waits_for_no_batch_but_the_one_in_hand():
    source = Source(block=2)
    with Feeder(source, 0, 10**9, lambda b: b) as feeder:
        until(lambda: source.made == [0, 1])
        closing = threading.Thread(target=feeder.close)
        closing.start()
        until(lambda: feeder._closed)
        source.gate.set()
        closing.join()
    assert source.made == [0, 1, 2]


def test_wait_is_measured_per_item(monkeypatch):
    clock = iter([10.0, 13.5, 20.0, 20.25])
    monkeypatch.setattr("MaxText.data.feeder.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with Feeder(Source(), 0, 2, lambda b: b) as feeder:
        next(feeder)
        assert feeder.wait_seconds == 3.5
        next(feeder)
        assert feeder.wait_seconds == 0.25


def test_outside_its_block_it_refuses():
    with pytest.raises(RuntimeError):
        next(Feeder(Source(), 0, 1, lambda b: b))
