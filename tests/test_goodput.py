"""The ledger partitions wall time exactly, whatever ends an attempt."""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText import goodput
from MaxText.errors import StorageError

ROOT = Path(__file__).parents[1]
SECOND = 1_000_000


class FakeClock:
    """Time moves when the test says so."""

    def __init__(self, boot="boot"):
        self.now = 5 * SECOND
        self.wall_offset = 1_700_000_000 * SECOND
        self.boot = lambda: boot

    def monotonic_us(self):
        return self.now

    def wall_us(self):
        return self.now + self.wall_offset

    def wait(self, seconds):
        self.now += round(seconds * SECOND)


def drive(ledger, clock, steps, seconds=0.1):
    for step in steps:
        ledger.enter("data_wait")
        clock.wait(seconds / 10)
        ledger.enter("step")
        clock.wait(seconds)
        ledger.step(step)


def total(report):
    return sum(report.us.values()) + report.unaccounted_us + report.downtime_us


def kill(ledger):
    """What kill -9 leaves: an open file and unwritten lines are gone."""
    os.close(ledger._file)


def test_one_attempt(tmp_path):
    clock = FakeClock()
    ledger = goodput.Ledger(tmp_path / goodput.FILE, clock, age=1.5)
    clock.wait(0.5)
    ledger.enter("compile")
    clock.wait(3)
    drive(ledger, clock, range(20))
    ledger.enter("save")
    clock.wait(0.25)
    ledger.enter("rest")
    ledger.finish("done")
    report = goodput.read(tmp_path)
    assert report == goodput.read(ledger.path)
    seconds = {kind: us / SECOND for kind, us in report.us.items() if us}
    assert seconds == {"startup": 2.0, "compile": 3.0, "data_wait": 0.2, "step": 2.0, "save": 0.25}
    assert report.wall_us == 7_450_000 == total(report)
    assert (report.unaccounted_us, report.downtime_us, report.rework_us) == (0, 0, 0)
    assert report.goodput == pytest.approx(2 / 7.45)
    (attempt,) = report.attempts
    assert attempt.steps == (0, 19) and attempt.reason == "done"
    assert attempt.began_us == 1_700_000_000 * SECOND + 3_500_000


def test_rework_is_the_time_of_steps_done_again(tmp_path):
    """Saved at step 10, killed after 18: 10..18 are done again, whatever windows they were written in."""
    clock = FakeClock()
    path = tmp_path / "ledger"
    first = goodput.Ledger(path, clock)
    drive(first, clock, range(10))
    first.enter("save")
    clock.wait(0.5)
    drive(first, clock, range(10, 19), seconds=0.2)
    first.enter("rest")  # on disk
    kill(first)
    clock.wait(60)
    second = goodput.Ledger(path, clock)
    drive(second, clock, range(10, 30))
    second.finish("done")
    report = goodput.read(path)
    assert report.rework_us == 9 * 0.2 * SECOND
    assert report.downtime_us == 60 * SECOND
    assert [attempt.reason for attempt in report.attempts] == [None, "done"]
    assert report.wall_us == total(report) == clock.now - 5 * SECOND


def test_rework_across_an_attempt_that_ran_no_step(tmp_path):
    clock = FakeClock()
    for steps in (range(0, 6), range(0), range(3, 5), range(4, 8)):
        ledger = goodput.Ledger(tmp_path / "ledger", clock)
        drive(ledger, clock, steps)
        ledger.finish("x")
    rework = [attempt.rework_us / SECOND for attempt in goodput.read(ledger.path).attempts]
    assert rework == [pytest.approx(0.3), 0, pytest.approx(0.1), 0]


def test_window_cut_by_the_resume_point_is_shared_by_steps(tmp_path):
    clock = FakeClock()
    for steps in (range(0, 4), range(3, 5)):
        ledger = goodput.Ledger(tmp_path / "ledger", clock)
        drive(ledger, clock, steps)
        ledger.finish("x")
    assert goodput.read(ledger.path).attempts[0].rework_us == 100_000


def test_small_activities_reach_the_disk_each_second(tmp_path):
    clock = FakeClock()
    ledger = goodput.Ledger(tmp_path / "ledger", clock)
    drive(ledger, clock, range(100))
    unseen = clock.now - 5 * SECOND - goodput.read(ledger.path).wall_us
    assert unseen <= 1.2 * SECOND
    lines = ledger.path.read_text().splitlines()
    assert len(lines) < 20  # and not one for each step


def test_clock_set_back_within_and_between_attempts(tmp_path):
    clock = FakeClock()
    first = goodput.Ledger(tmp_path / "ledger", clock)
    drive(first, clock, range(10))
    clock.wall_offset -= 3600 * SECOND
    drive(first, clock, range(10, 20))
    first.finish("done")
    clock.wait(7)
    goodput.Ledger(first.path, clock).finish("done")
    report = goodput.read(first.path)
    assert report.downtime_us == 7 * SECOND
    assert report.wall_us == total(report) == clock.now - 5 * SECOND


@pytest.mark.parametrize(("shift", "downtime"), [(100, 100), (-3600, 0)])
def test_downtime_over_a_reboot_is_by_the_wall_clock_and_never_negative(tmp_path, shift, downtime):
    before, after = FakeClock("one"), FakeClock("two")
    goodput.Ledger(tmp_path / "ledger", before).finish("done")
    after.now = 0
    after.wall_offset += 5 * SECOND + shift * SECOND
    goodput.Ledger(tmp_path / "ledger", after).finish("done")
    assert goodput.read(tmp_path / "ledger").downtime_us == downtime * SECOND


@given(st.lists(st.tuples(st.sampled_from(goodput.KINDS), st.integers(0, 3 * SECOND)), max_size=40), st.randoms())
def test_the_parts_sum_to_wall_time_with_any_lines_lost(tmp_path_factory, moves, rng: random.Random):
    clock = FakeClock()
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    ledger = goodput.Ledger(path, clock)
    for kind, us in moves:
        ledger.enter(kind)
        clock.now += us
    ledger.finish("done")
    report = goodput.read(path)
    assert total(report) == report.wall_us == clock.now - 5 * SECOND
    assert report.unaccounted_us == 0
    start, *windows, finish = path.read_text().splitlines()
    kept = [line for line in windows if rng.random() < 0.7]
    path.write_text("\n".join([start, *kept, finish]) + "\n")
    holed = goodput.read(path)
    assert total(holed) == holed.wall_us == report.wall_us
    assert holed.unaccounted_us == sum(sum(json.loads(line)["us"].values()) for line in set(windows) - set(kept))


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_torn_last_line(tmp_path, cut):
    clock = FakeClock()
    first = goodput.Ledger(tmp_path / "ledger", clock)
    drive(first, clock, range(30))
    kill(first)
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-cut])
    lost = goodput.read(first.path)
    assert lost.damaged_lines == (cut > 1)
    second = goodput.Ledger(first.path, clock)
    drive(second, clock, range(20, 30))
    second.finish("done")
    report = goodput.read(first.path)
    assert [attempt.number for attempt in report.attempts] == [1, 2]
    assert report.attempts[1].steps == (20, 29)
    assert total(report) == report.wall_us == clock.now - 5 * SECOND


def test_kill_9_of_a_real_process(tmp_path):
    code = """
        import sys, time, pathlib
        from MaxText import goodput
        ledger = goodput.Ledger(pathlib.Path(sys.argv[1]))
        for step in range(5):
            ledger.enter("step"); time.sleep(.01); ledger.step(step)
        ledger.enter("eval")
        print("ready", flush=True)
        time.sleep(60)
    """
    path = tmp_path / "ledger"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    goodput.Ledger(path).finish("done")
    report = goodput.read(path)
    assert report.us["step"] >= 50_000 and report.attempts[0].steps == (0, 4)
    assert [attempt.reason for attempt in report.attempts] == [None, "done"]
    assert total(report) == report.wall_us


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path, monkeypatch):
    clock, warnings = FakeClock(), []
    ledger = goodput.Ledger(tmp_path / "ledger", clock, warn=warnings.append)
    write = os.write

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    drive(ledger, clock, range(30))
    assert len(warnings) == 1 and "No space left" in warnings[0] and ledger.failure
    monkeypatch.setattr(os, "write", write)
    ledger.finish("done")  # there is room again: nothing is lost
    report = goodput.read(ledger.path)
    assert report.us["step"] == 3 * SECOND and report.unaccounted_us == 0


def test_a_write_cut_short_costs_one_line(tmp_path, monkeypatch):
    clock = FakeClock()
    ledger = goodput.Ledger(tmp_path / "ledger", clock, warn=lambda text: None)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    drive(ledger, clock, range(15))
    monkeypatch.setattr(os, "write", write)
    drive(ledger, clock, range(15, 30))
    ledger.finish("done")
    report = goodput.read(ledger.path)
    assert ledger.failure and report.damaged_lines and report.unaccounted_us > 0
    assert total(report) == report.wall_us == clock.now - 5 * SECOND


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    warnings = []
    ledger = goodput.Ledger(tmp_path / "file" / "ledger", FakeClock(), warn=warnings.append)
    ledger.enter("step")
    ledger.finish("done")
    assert len(warnings) == 1 and ledger.failure


def test_no_ledger():
    with pytest.raises(StorageError) as caught:
        goodput.read(Path("/nonexistent/ledger"))
    assert caught.value.id == "goodput.unreadable"


def test_finish_twice_keeps_the_first_reason(tmp_path):
    ledger = goodput.Ledger(tmp_path / "ledger", FakeClock())
    ledger.finish("preempted")
    ledger.finish("done")
    (attempt,) = goodput.read(ledger.path).attempts
    assert attempt.reason == "preempted"


def test_format(tmp_path):
    clock = FakeClock()
    for steps in (range(0, 20), range(10, 30)):
        ledger = goodput.Ledger(tmp_path / "ledger", clock)
        drive(ledger, clock, steps)
        ledger.finish("done")
        clock.wait(1)
    report = goodput.read(ledger.path)
    text = goodput.format(report)
    seconds = dict(re.findall(r"^(\S.*?) +([\d.]+) s +[\d.]+ %$", text, re.M))
    wall = seconds.pop("wall")
    assert sum(map(float, seconds.values())) == pytest.approx(float(wall))
    assert float(seconds["step, kept"]) == pytest.approx(3.0)
    assert "steps 10 to 29" in text and "goodput 55.6 % over 2 attempts" in text
    assert goodput.summary(report).startswith("goodput 55.6 % of 5.4 s in 2 attempts")


def test_an_empty_ledger_formats(tmp_path):
    (tmp_path / "ledger").write_text("")
    assert "0 attempts" in goodput.format(goodput.read(tmp_path / "ledger"))
