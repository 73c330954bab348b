"""The walk from a command line to an exit code: every ending, what it says, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from MaxText import goodput
from MaxText.train import main
from tests.runs import ROOT, kept, records, run, start, tree


def refused(capsys, folder: Path, code: int, *words: str, **overrides) -> str:
    """A run that ends with `code` and one message holding `words`; no traceback, and nothing below `folder`."""
    before = tree(folder)
    assert run(folder, **overrides) == code
    captured = capsys.readouterr()
    message = captured.err.strip()
    assert message and all(word in message for word in words), message
    assert "Traceback" not in captured.err + captured.out
    assert tree(folder) == before
    return message


# --- a run that goes well


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, what was printed) of a run with evaluation and samples."""
    folder = tmp_path_factory.mktemp("finished")
    out = folder / "out.txt"
    how = {"sample_length": 8, "log_period": 2, "gradient_accumulation_steps": 2, "metrics_file": folder / "also.jsonl"}
    with out.open("w") as stream, contextlib.redirect_stdout(stream):
        assert run(folder, **how) == 0
    return folder, out.read_text()


def test_the_start_says_what_will_happen(finished):
    folder, said = finished
    screen = said[: said.index("compiled:")]
    where = [f"toy in {folder}/toy", "FRESH, seed 0", "log.txt", "emma.txt", "persuasion.txt"]
    what = ["parameters, all active", "fsdp=8", "16 rows x 16 = 256 tokens", "float32", "byte", "weight decay"]
    for word in where + what:
        assert word in screen, word


def test_the_lines_and_the_end(finished):
    folder, said = finished
    assert [line.split(",")[0] for line in said.splitlines() if line.startswith("completed step")] == [
        f"completed step: {n}" for n in (0, 1, 3, 5)
    ]
    for word in (
        "held-out loss after 6 steps",
        "nats/byte",
        "--- sample, greedy ---\nIt is a truth",
        f"{folder}/toy/checkpoints/6",
        "steps=12",
    ):
        assert word in said, word


def test_the_metrics_of_every_step(finished):
    folder, _ = finished
    lines = [json.loads(line) for line in (folder / "toy/metrics.jsonl").read_text().splitlines()]
    assert (folder / "also.jsonl").read_bytes() == (folder / "toy/metrics.jsonl").read_bytes()
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(6))
    for line in steps:
        assert line["total_weights"] == 256 and line["seconds"] > 0 and line["grad_norm"] > 0
        assert line["loss"] == pytest.approx(line["lm_loss"] + line["z_loss"])
        assert line["tokens_per_second_per_device"] == pytest.approx(256 / line["seconds"] / 8)
    assert steps[0]["loss"] == pytest.approx(math.log(288), rel=0.2) and steps[0]["learning_rate"] == pytest.approx(
        3e-3
    )
    assert [line["step"] for line in lines if "eval_loss" in line] == [5]


def test_what_the_folder_holds(finished):
    folder, _ = finished
    assert {path.name for path in (folder / "toy").iterdir()} == {
        "config.yml", "log.txt", "metrics.jsonl", "goodput.jsonl", "checkpoints", "plan.json",
    }  # fmt: skip
    assert kept(folder) == [2, 4, 6]
    assert yaml.safe_load((folder / "toy/config.yml").read_text())["base_emb_dim"] == 32
    log = (folder / "toy/log.txt").read_text()
    assert "FRESH" in log and "completed step: 5" in log and "held-out loss" in log
    assert "step time: planned" in log and "compiled: arguments" in log
    planned = json.loads((folder / "toy/plan.json").read_text())
    assert planned["measured"]["step_seconds"] > 0 and planned["compiled"]["argument_bytes"] > 0


def test_every_second_is_accounted_for(finished):
    folder, _ = finished
    report = goodput.read(folder / "toy/goodput.jsonl")
    text = goodput.format(report)
    for kind in ("startup", "compile", "step", "eval", "save", "sample"):
        assert kind in text, kind


def test_the_stored_config_repeats_the_run(finished, tmp_path):
    folder, _ = finished
    again = [str(folder / "toy/config.yml"), f"base_output_directory={tmp_path}", "sample_length=0", "metrics_file="]
    assert main(again) == 0
    assert records(tmp_path) == records(folder)


def test_the_loss_falls(tmp_path):
    how = {"steps": 30, "learning_rate": 1e-2, "eval_files": [], "enable_checkpointing": False, "max_target_length": 32}
    assert run(tmp_path, **how) == 0
    losses = [record["loss"] for record in records(tmp_path)]
    assert losses[0] > 5.4 and sum(losses[-5:]) / 5 < 3.6
    assert not (tmp_path / "toy/checkpoints").exists()


def test_plan_only_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    assert run(tmp_path, plan_only=True, ici_tensor_parallelism=2) == 0
    said = capsys.readouterr().out
    assert "fsdp=4 x tensor=2" in said and "tokens a step" in said and tree(tmp_path) == set()


# --- refused before anything is written


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        ({"leraning_rate": 1e-3}, 2, ("leraning_rate", "learning_rate")),
        ({"steps": 2.5}, 2, ("steps", "2.5")),
        ({"steps": "soon"}, 2, ("steps", "soon")),
        ({"adam_b1": 1.5}, 2, ("adam_b1", "1.5")),
        ({"model_name": "nonesuch"}, 2, ("nonesuch",)),
        ({"ici_fsdp_parallelism": 3}, 3, ("3", "8", "ici_fsdp_parallelism")),
        ({"ici_tensor_parallelism": 4}, 3, ("num_kv_heads=2", "4 ways", "1, 2")),
        ({"global_batch_size": 12}, 3, ("12 rows", "multiple of 8", "global_batch_size=8")),
        ({"ici_context_parallelism": 2, "max_target_length": 30}, 3, ("max_target_length=30", "4 equal chunks")),
        ({"vocab_size": 100}, 4, ("vocab_size", "100", "258")),
        ({"train_files": ["nonesuch.txt"]}, 4, ("nonesuch.txt",)),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_and_nothing_is_written(tmp_path, capsys, overrides, code, words):
    refused(capsys, tmp_path, code, *words, **overrides)


def test_an_empty_text_is_refused(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    refused(capsys, tmp_path, 4, "empty.txt", train_files=[tmp_path / "empty.txt"])


def test_data_that_end_too_early_are_refused_before_the_first_step(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("A short text. " * 40)
    message = refused(capsys, tmp_path, 5, "steps", train_files=[tmp_path / "short.txt"], num_epoch=1)
    assert "2" in message and "6" in message


@pytest.mark.parametrize("enable", [True, False], ids=["", "no-checkpoints"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys, enable):
    (tmp_path / "file").touch()
    where = tmp_path / "file" / "runs"
    refused(capsys, tmp_path, 7, str(tmp_path / "file"), base_output_directory=where, enable_checkpointing=enable)


# --- endings that are not the last step


NOT_FINITE = {"learning_rate": 1e30, "warmup_steps_fraction": 0.2, "gradient_clipping_threshold": 0}


def test_a_loss_that_is_not_finite_ends_the_run_and_nothing_is_saved(tmp_path, capsys):
    assert run(tmp_path, checkpoint_period=1000, **NOT_FINITE) == 6
    captured = capsys.readouterr()
    assert "is nan at step" in captured.err or "is inf at step" in captured.err
    assert "Traceback" not in captured.err and "learning_rate" in captured.err
    bad = int(captured.err.split("at step ")[1].split(",")[0])
    assert bad == next(r["step"] for r in records(tmp_path) if not math.isfinite(r["loss"] + r["grad_norm"]))
    assert kept(tmp_path) == []


def test_parameters_that_an_update_blew_up_are_not_saved(tmp_path, capsys):
    """Saved after each step: the update that made them bad is in no loss yet."""
    assert run(tmp_path, checkpoint_period=1, **NOT_FINITE) == 6
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "norm of the parameters" in captured.err
    blown = int(captured.err.split("after ")[1].split(" steps")[0])
    assert kept(tmp_path) and all(step < blown for step in kept(tmp_path))


def test_a_run_may_go_on_regardless(tmp_path):
    how = {"learning_rate": 1e30, "warmup_steps_fraction": 0.2, "abort_on_nan_loss": False, "abort_on_inf_loss": False}
    assert run(tmp_path, **how, eval_files=[], gradient_clipping_threshold=0) == 0
    assert len(records(tmp_path)) == 6 and 6 not in kept(tmp_path)


def processes_end(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the run hung:\n{out}\n{err}")
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_of_the_start_ends_with_a_word(tmp_path, clean_environ, number):
    """Imports take a second; inside them Ctrl-C would be a traceback, or another exception."""
    for wait in (0.1, 0.25, 0.4, 0.6, 0.9):
        process = start(tmp_path, clean_environ, steps=4000, num_epoch=-1, eval_files=[])
        time.sleep(wait)
        process.send_signal(number)
        code, _, err = processes_end(process)
        assert code in (75, 130 if number == signal.SIGINT else 75), (wait, err)
        assert "Traceback" not in err and "Error" not in err, (wait, err)


def test_sigterm_to_a_process(tmp_path, clean_environ):
    """In a process of its own, with nothing of the tests' environment: saved and said."""
    how = {"steps": 4000, "checkpoint_period": 10_000, "num_epoch": -1, "eval_files": [], "ici_fsdp_parallelism": 2}
    how |= {"learning_rate_schedule_steps": 4000}
    process = start(tmp_path, clean_environ, **how)
    metrics_file = tmp_path / "toy/metrics.jsonl"
    give_up = time.monotonic() + 90
    while not (metrics_file.exists() and metrics_file.stat().st_size) and process.poll() is None:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, out, err = processes_end(process)
    assert code == 75, err
    done = kept(tmp_path)
    assert len(done) == 1 and 0 < done[0] < 4000 and f"SIGTERM after {done[0]} steps" in err and "Traceback" not in err
    assert len(records(tmp_path)) == done[0]
    assert f"checkpoint of {done[0]} steps" in out
    assert goodput.read(tmp_path / "toy/goodput.jsonl")


def test_a_thousand_steps_on_eight_devices_do_not_hang(tmp_path, clean_environ):
    """JAX 0.10.2 deadlocks on CPU when many sharded steps are in flight; nobody who runs MaxText may meet that."""
    how = {
        "steps": 1000, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "eval_files": [], "log_period": 250,
        "base_num_decoder_layers": 1, "checkpoint_period": 10_000, "global_batch_size": 8,
    }  # fmt: skip
    code, out, err = processes_end(start(tmp_path, clean_environ, **how), 150)
    assert code == 0, err
    assert "fsdp=4 x tensor=2" in out and len(records(tmp_path)) == 1000 and kept(tmp_path) == [1000]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB; skipped where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no tmpfs may be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_full_disk_ends_the_run_with_one_message(small_disk, clean_environ, asynchronous):
    """A checkpoint of 1.8 MB does not fit. The run stops at the next step, with what it knows of the disk."""
    how = {"base_emb_dim": 64, "base_mlp_dim": 256, "async_checkpointing": asynchronous, "ici_fsdp_parallelism": 1}
    code, out, err = processes_end(start(small_disk, clean_environ, eval_files=[], **how))
    assert code == 7, err
    assert "Traceback" not in err + out and "checkpoints/2" in err and "No space left" in err
    assert len(err.strip().splitlines()) == 1, err
    assert kept(small_disk) == []


# The room is taken by somebody else between the look and the write.
RACE = """
import shutil, sys, types
from pathlib import Path
import numpy as np
from MaxText.checkpoint import Store
from MaxText.errors import StorageError

shutil.disk_usage = lambda folder: types.SimpleNamespace(total=1 << 40, free=1 << 39)
arrays = {f"a{i}": np.random.rand(100, 300) for i in range(30)}
try:
    with Store(Path(sys.argv[1])) as store:
        store.save(1, arrays, {})
except StorageError as error:
    print(error.id)
"""


def test_a_disk_that_fills_up_meanwhile_is_one_error_too(small_disk, clean_environ):
    command = [sys.executable, "-c", RACE, str(small_disk / "checkpoints")]
    environ = clean_environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "checkpoint.not-saved\n", "")


def test_a_closed_pipe_is_no_traceback(tmp_path, clean_environ):
    """`train.py ... | head -1`."""
    process = start(tmp_path, clean_environ, eval_files=[], ici_fsdp_parallelism=1)
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    code, _, err = processes_end(process)
    assert "Traceback" not in err, err
