"""Stopped anywhere and started again, a run is the unbroken run: every metric of every step, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from MaxText import faults, metrics, session, state
from MaxText.checkpoint import Store
from tests.resume.conftest import STEPS, WHOLE
from tests.runs import ROOT, TOY_RUN, arguments, kept, records, run, toy_config


def test_the_same_command_twice_gives_the_same_to_the_bit(unbroken, tmp_path):
    assert run(tmp_path, **WHOLE) == 0
    assert records(tmp_path) == records(unbroken)
    assert [r["step"] for r in records(unbroken) if "loss" in r] == list(range(STEPS))
    assert kept(unbroken) == [2, 4, 6]


@pytest.mark.parametrize("at", [1, 3, STEPS - 1], ids=["first", "middle", "last"])
def test_stopped_and_resumed_is_unbroken(unbroken, tmp_path, at):
    assert run(tmp_path, **WHOLE, steps=at) == 0
    assert kept(tmp_path)[-1] == at
    assert run(tmp_path, **WHOLE, start="resume") == 0
    assert steps_only(tmp_path) == steps_only(unbroken)
    assert [r for r in records(tmp_path) if "eval_loss" in r][-1] == [r for r in records(unbroken) if "eval_loss" in r][
        -1
    ]


def steps_only(folder: Path) -> list[dict]:
    return [record for record in records(folder) if "loss" in record]


def test_resumed_twice_is_unbroken(unbroken, tmp_path):
    for steps in (2, 3, STEPS):
        assert run(tmp_path, **WHOLE, steps=steps) == 0
    assert steps_only(tmp_path) == steps_only(unbroken)


def test_after_a_kill_steps_are_done_again_and_written_once(unbroken, halfway, capsys):
    assert run(halfway, **WHOLE) == 0
    assert "RESUMED after 4 steps" in capsys.readouterr().out
    assert records(halfway) == records(unbroken)


def test_a_damaged_checkpoint_is_passed_over(unbroken, halfway, capsys):
    for file in (halfway / "toy/checkpoints/4/state").rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    assert run(halfway, **WHOLE) == 0
    said = capsys.readouterr().out
    assert "RESUMED after 2 steps" in said and "step 4" in said
    assert records(halfway) == records(unbroken)


def test_resumed_with_a_padded_vocabulary_and_layers_in_a_loop(tmp_path, capsys):
    """291 rows are split over fsdp by width, and over tensor by rows, which pads them; the checkpoint has 291."""
    how = {"vocab_size": 291, "steps": 3, "learning_rate_schedule_steps": 3, "eval_files": []}
    other = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "scan_layers": True}
    assert run(tmp_path / "whole", **how) == 0
    assert run(tmp_path / "there", **how | {"steps": 2}) == 0
    assert run(tmp_path / "there", **how, **other) == 0
    assert "RESUMED after 2 steps" in capsys.readouterr().out
    leaves = Store(tmp_path / "there/toy/checkpoints").read_manifest(3).leaves.values()
    wide = [leaf.shape for leaf in leaves if max(leaf.shape, default=0) > 64]
    assert len(wide) >= 3 and all(291 in shape for shape in wide)
    made = session.prepare(toy_config(tmp_path, **how, **other))
    assert state.has_padding(made.plan.tree)
    for found, wanted in zip(records(tmp_path / "there"), records(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(wanted, rel=2e-4), found["step"]


@pytest.mark.parametrize(
    "mesh", [{"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, {"ici_data_parallelism": 4}]
)
def test_resumed_on_another_mesh(unbroken, halfway, mesh):
    """Another order of summing: equal to a few digits, not to the bit."""
    assert run(halfway, **WHOLE, **mesh) == 0
    for found, wanted in zip(records(halfway), records(unbroken), strict=True):
        assert found == pytest.approx(wanted, rel=2e-4), found["step"]


def test_resumed_with_other_microbatches(unbroken, halfway):
    assert run(halfway, **WHOLE, gradient_accumulation_steps=2) == 0
    for found, wanted in zip(records(halfway), records(unbroken), strict=True):
        assert found == pytest.approx(wanted, rel=2e-4), found["step"]


# --- signals


def test_sigterm_saves_and_the_same_command_is_unbroken(unbroken, tmp_path, capsys):
    """The signal arrives while this process trains; the loop notices after the step that is running."""
    metrics_file = tmp_path / "toy/metrics.jsonl"
    done = threading.Event()

    def watch():
        while not done.wait(0.002):
            if metrics_file.exists() and metrics_file.read_bytes().count(b"\n") >= 1:
                signal.raise_signal(signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = run(tmp_path, **WHOLE, checkpoint_period=1000)
    finally:
        done.set()
        watcher.join()
    stopped = kept(tmp_path)
    assert code == 75 and 0 < stopped[-1] < STEPS and len(stopped) == 1
    captured = capsys.readouterr()
    assert "SIGTERM" in captured.err and f"{stopped[0]} steps" in captured.err
    assert run(tmp_path, **WHOLE) == 0
    assert steps_only(tmp_path) == steps_only(unbroken)


class Signal:
    """Sends this process a signal when it first comes to a place."""

    def __init__(self, place: str, number: signal.Signals) -> None:
        self.place, self.number, self.sent = place, number, False

    def __call__(self, name: str) -> None:
        if name == self.place and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("compile", signal.SIGINT),
        ("eval.batch", signal.SIGTERM),
        ("save.state", signal.SIGINT),
        ("finish.begun", signal.SIGTERM),
    ],
)
def test_a_signal_at_any_moment_saves_and_the_same_command_is_unbroken(
    unbroken, tmp_path, capsys, monkeypatch, place, number
):
    """While the step is compiled, in an evaluation, while a save is written by its thread, and at the end."""
    send = Signal(place, number)
    with monkeypatch.context() as patch:
        compile_step = session.Session.compile_step
        patch.setattr(session.Session, "compile_step", lambda made: (send("compile"), compile_step(made))[1])
        patch.setattr(faults, "point", send)
        code = run(tmp_path, **WHOLE)
    assert send.sent
    captured = capsys.readouterr()
    done = kept(tmp_path)[-1]
    if place == "finish.begun":  # all steps are done; only the evaluation at the end is not
        assert code == 0 and done == STEPS
    else:
        assert code == 75 and f"stopped by {number.name} after {done} steps" in captured.err and done < STEPS
    assert run(tmp_path, **WHOLE) == 0
    assert records(tmp_path) == records(unbroken)


@pytest.mark.parametrize("done", [3, STEPS])
def test_an_evaluation_that_a_kill_came_before_is_done_at_the_next_start(unbroken, tmp_path, done, capsys):
    """The step is durable, its evaluation is not in the metrics: in the middle, and after all steps."""
    assert run(tmp_path, **WHOLE, steps=done, checkpoint_period=3) == 0
    file = tmp_path / "toy/metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert b"eval_loss" in lines[-1]
    file.write_bytes(b"".join(lines[:-1]))
    assert run(tmp_path, **WHOLE, checkpoint_period=3) == 0
    assert f"RESUMED after {done} steps" in capsys.readouterr().out
    assert records(tmp_path) == records(unbroken)


TWICE = """
import os, signal, sys, time
from MaxText import faults, train

saves = 0


def point(name):
    global saves
    saves += name == sys.argv[1]
    if name == sys.argv[1] and saves == 2:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        time.sleep(60)


faults.point = point
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("place", ["save.state", pytest.param("save.manifest", marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once_without_damage(unbroken, tmp_path, clean_environ, place):
    """In the middle of the second save: the first one stays, and the run goes on from there to the bit."""
    command = [sys.executable, "-c", TWICE, place, *arguments(tmp_path, **WHOLE)]
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=clean_environ | eight, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    store = Store(tmp_path / "toy/checkpoints")
    assert store.steps() == ([2] if place == "save.state" else [2, 4])
    for step in store.steps():
        store.verify(step)
    assert run(tmp_path, **WHOLE) == 0
    assert steps_only(tmp_path) == steps_only(unbroken)


# --- saves


def test_the_last_step_is_saved_only_if_asked_for(tmp_path):
    assert run(tmp_path, **WHOLE, steps=3, save_checkpoint_on_completion=False) == 0
    assert kept(tmp_path) == [2]


def test_a_save_that_fails_in_the_background_stops_the_run_at_the_next_step(unbroken, tmp_path, capsys, monkeypatch):
    def point(name: str) -> None:
        if name == "save.state":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", point)
        code = run(tmp_path, **WHOLE | {"learning_rate_schedule_steps": 2000}, steps=2000, num_epoch=-1)
    captured = capsys.readouterr()
    assert code == 7 and "checkpoints/2 was not saved: No space left" in captured.err
    assert kept(tmp_path) == [] and len(steps_only(tmp_path)) < 1000


def test_the_manifest_says_how_the_step_came_about(unbroken):
    """What a person needs to repeat or to judge it, in the manifest itself."""
    made = Store(unbroken / "toy/checkpoints").manifest(4)
    meta = made["meta"]
    assert meta["config"]["base_emb_dim"] == TOY_RUN["base_emb_dim"] and meta["steps_done"] == 4
    assert meta["data"] == session.prepare(toy_config(unbroken, **WHOLE)).train.fingerprint
    assert meta["plan"]["mesh"] == "fsdp=8" and (meta["plan"]["devices"], meta["plan"]["processes"]) == (8, 1)
    assert {"maxtext", "jax", "numpy", "orbax-checkpoint", "python"} == set(made["versions"])
    assert "step" in made["leaves"] and all(leaf["crc"] for leaf in made["leaves"].values())


def test_the_stall_of_each_save_is_in_the_metrics(unbroken):
    lines = metrics.read(unbroken / "toy/metrics.jsonl")
    assert [line["step"] for line in lines if line.get("save_stall_seconds", 0) > 0] == [2, 4]


# --- another run's state


def test_the_whole_state_of_another_run_goes_on_as_it_would_have(unbroken, tmp_path, capsys):
    """Parameters, moments and the number of steps; the run's own checkpoint counts afterwards."""
    there = {"load_full_state_path": unbroken / "toy/checkpoints/4", "run_name": "fork"}
    assert run(tmp_path, **WHOLE, **there) == 0
    assert "after 4 steps" in capsys.readouterr().out
    wanted = [record for record in steps_only(unbroken) if record["step"] >= 4]
    assert [record for record in records(tmp_path, "fork") if "loss" in record] == wanted
    assert kept(tmp_path, "fork") == [6]
    assert run(tmp_path, **WHOLE, **there) == 0
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "code", "word"),
    [
        ({"load_full_state_path": "toy/checkpoints/6"}, 2, "6 steps already"),
        ({"load_full_state_path": "toy/checkpoints/4", "base_mlp_dim": 64}, 7, "mlp/wi_0"),
        ({"load_full_state_path": "nowhere"}, 4, "nowhere"),
        ({"load_full_state_path": "toy", "load_parameters_path": "toy"}, 2, "config.two-beginnings"),
    ],
)
def test_another_state_that_cannot_be_taken(unbroken, tmp_path, capsys, how, code, word):
    paths = {key: unbroken / value for key, value in how.items() if key.startswith("load_")}
    assert run(tmp_path, **WHOLE, **(how | paths), run_name="fork") == code
    assert word in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
