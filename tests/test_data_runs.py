"""Whole runs whose data change form, documents or place, or that are killed: what must go on exactly, and what is
refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from MaxText import tokenizer
from MaxText.data import prepare
from tests import recorder
from tests.data.kinds import Kinds
from tests.runs import ROOT, arguments, kept, records, run, start, toy_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that read data

# Seventeen steps an epoch: the run ends in the second.
LONG: dict[str, Any] = {
    "steps": 24, "learning_rate_schedule_steps": 24, "checkpoint_period": 5, "num_epoch": -1, "eval_files": [],
    "log_period": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return Kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture
def web(tmp_path):
    random = np.random.default_rng(2)
    texts = [bytes(random.integers(97, 123, n).tolist()).decode() for n in random.integers(3, 300, 60)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return {"train_files": [tmp_path / "web.jsonl"], "eval_files": [], "num_epoch": -1}


def losses(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if "loss" in record]


# --- killed and gone on


@pytest.fixture(scope="module")
def mixed(kinds):
    """What can go wrong at once: rows of several documents, shares that change, documents in quarantine, epochs."""
    return LONG | kinds.keys("mixture") | {"packing_type": "best_fit", "quarantine": ["a.jsonl:5"]}


@pytest.fixture(scope="module")
def whole(mixed, tmp_path_factory):
    """The unbroken run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, **mixed) == 0
    return folder


def test_stopped_often_into_the_second_epoch(mixed, whole, tmp_path):
    for steps in (1, 2, 9, 24):
        assert run(tmp_path, **mixed | {"steps": steps}) == 0
        assert kept(tmp_path)[-1] == steps
    assert records(tmp_path) == records(whole)


FAULTS = ("data.batch:9", "step.dispatched:12", "save.state:2", "data.batch:7")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["first_fit", "array_record", "prepared_mixture", "hf_stream"])
def test_killed_again_and_again(kinds, tmp_path, clean_environ, kind):
    """kill -9 while a batch is prepared, a step runs, a checkpoint is written: then every metric of every step is that
    of the unbroken run, to the bit."""
    keys = LONG | kinds.keys(kind)
    environ = clean_environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    assert run(tmp_path / "whole", **keys) == 0
    for fault in FAULTS:
        process = start(tmp_path / "cut", environ | {"MAXTEXT_FAULT": fault}, **keys)
        assert process.communicate(timeout=120) and process.returncode == -signal.SIGKILL, fault
    assert 5 in kept(tmp_path / "cut") or 10 in kept(tmp_path / "cut")
    assert run(tmp_path / "cut", **keys) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_random_ids_of_which_the_tokenizer_has_fewer(tmp_path):
    """From the first step to the held-out loss and the sample; such ids are no bytes of a text."""
    assert run(tmp_path, dataset_type="synthetic", steps=2, eval_steps=1, sample_length=3) == 0
    (held_out,) = [record for record in records(tmp_path) if "eval_loss" in record]
    assert 5 < held_out["eval_loss"] < 7 and "eval_loss_per_byte" not in held_out


# --- other numbers of processes and devices


def launch(folder: Path, environ: dict[str, str], processes: int, devices: int, **keys: Any) -> str:
    """A toy run in real processes, which write down the rows that they draw; what it said."""
    keys = {"jax_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"]} | keys
    command = [
        sys.executable, "-m", "MaxText", "launch", f"processes={processes}", f"devices_per_process={devices}", "--",
        str(ROOT / "tests/recorder.py"), str(folder / "drawn"), *arguments(folder, **keys),
    ]  # fmt: skip
    environ = {key: value for key, value in environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ | {"JAX_PLATFORMS": "cpu"}, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same_rows(kinds: Kinds, kind: str, folder: Path, **more: Any) -> None:
    """What all processes drew, step by step, is the global batch that the data give when they are asked for it."""
    drawn, batch = recorder.read(folder / "drawn"), 16
    whole = kinds.open(kind, batch, **more)
    assert sorted(drawn) == list(range(24))
    for step in range(24):
        wanted = whole.batch(step)
        assert drawn[step] == {row: recorder.digest(wanted, row) for row in range(batch)}, step


def same_losses(folder: Path, other: Path) -> None:
    """Up to the order in which a sum over devices is taken."""
    found, wanted = losses(folder), losses(other)
    assert len(found) == len(wanted) == 24
    for one, two in zip(found, wanted, strict=True):
        assert one == pytest.approx(two, rel=5e-4), one["step"]


def test_begun_by_two_processes_and_ended_by_one(kinds, mixed, whole, tmp_path, clean_environ):
    launch(tmp_path, clean_environ, 2, 2, **mixed | {"steps": 10, "gradient_accumulation_steps": 2})
    assert "RESUMED after 10 steps" in launch(tmp_path, clean_environ, 1, 4, **mixed)
    same_rows(kinds, "mixture", tmp_path, packing_type="best_fit", quarantine=["a.jsonl:5"])
    same_losses(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grain_mixture", "hf_stream", "hf_stream_of_one_file"])
def test_one_two_and_four_processes_in_turn(kinds, tmp_path, clean_environ, kind):
    """(processes, devices of each, steps done at its end): the stream of tokens is one, and so is the loss."""
    more = {}
    if kind == "hf_stream_of_one_file":  # fewer files than processes
        kind, more = "hf_stream", {"hf_train_files": kinds.files("jsonl")[:1]}
    keys = LONG | kinds.keys(kind) | more
    for processes, devices, steps in ((1, 4, 3), (2, 2, 9), (4, 1, 16), (1, 1, 24)):
        said = launch(tmp_path / "cut", clean_environ, processes, devices, **keys | {"steps": steps})
        assert steps == 3 or "RESUMED after" in said
    same_rows(kinds, kind, tmp_path / "cut", **more)
    assert run(tmp_path / "whole", **keys) == 0
    same_losses(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_devices_and_microbatches_change_no_loss(kinds, tmp_path):
    """One global batch over 2, 4 and 8 shares of the devices, in 1, 2 and 4 microbatches."""
    keys = LONG | kinds.keys("first_fit") | {"steps": 3}
    assert run(tmp_path / "whole", **keys) == 0
    ways = [{"data": 8, "micro": 2}, {"data": 4, "tensor": 2, "micro": 4}, {"fsdp": 2, "context": 4, "micro": 1}]
    for number, way in enumerate(ways):
        mesh = {f"ici_{axis}_parallelism": size for axis, size in way.items() if axis != "micro"}
        mesh = {"ici_fsdp_parallelism": 1} | mesh | {"gradient_accumulation_steps": way["micro"]}
        assert run(tmp_path / str(number), **keys | mesh) == 0
        for one, two in zip(losses(tmp_path / str(number)), losses(tmp_path / "whole"), strict=True):
            assert one == pytest.approx(two, rel=1e-5), way


# --- other forms and documents


@pytest.mark.slow
def test_a_run_goes_over_from_sources_to_prepared_rows_and_back(tmp_path, web, capsys):
    assert run(tmp_path / "whole", **web) == 0
    assert run(tmp_path / "cut", **web, steps=2, learning_rate_schedule_steps=6) == 0
    cfg = toy_config(tmp_path, **web)
    prepare.prepare(cfg, tokenizer.make(cfg), tmp_path / "rows", 1)
    rows = {"dataset_type": "prepared", "dataset_path": tmp_path / "rows", "num_epoch": -1, "eval_files": []}
    assert run(tmp_path / "cut", **rows, steps=4, learning_rate_schedule_steps=6) == 0
    assert run(tmp_path / "cut", **web, learning_rate_schedule_steps=6) == 0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert "data: 96 rows, " in capsys.readouterr().out  # the account at the end


@pytest.mark.slow
def test_what_is_in_quarantine_stays_there(tmp_path, web, capsys):
    assert run(tmp_path, **web, steps=2) == 0
    assert run(tmp_path, **web, steps=3, quarantine=["web.jsonl:7"]) == 0
    assert "1 documents train nothing from here on: web.jsonl:7" in capsys.readouterr().out
    assert run(tmp_path, **web, steps=4) == 2
    assert "web.jsonl:7" in capsys.readouterr().err
    assert run(tmp_path, **web, steps=4, quarantine=["web.jsonl:7", "web.jsonl:9"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"packing_type": "best_fit"}, {"data_shuffle_seed": 5}, {"held_out_every": 9}])
def test_another_recipe_is_refused_with_the_difference(tmp_path, web, change, capsys):
    assert run(tmp_path, **web, steps=2) == 0
    assert run(tmp_path, **web | change, steps=4) == 2
    said = capsys.readouterr().err
    assert "run.other-data" in said or "was trained on other data" in said
    assert "in the checkpoint" in said


@pytest.mark.slow
def test_the_whole_state_of_another_run_goes_on_with_a_stream_from_its_beginning(kinds, mixed, whole, tmp_path, capsys):
    """It has no place of that run; the first step after the others' has its first rows."""
    keys = LONG | kinds.keys("hf_stream") | {"load_full_state_path": whole / "toy/checkpoints/20"}
    assert run(tmp_path, **keys | {"steps": 22}) == 0
    assert "warning: other data than there" in capsys.readouterr().out
    assert run(tmp_path, **keys) == 0
    assert run(tmp_path / "at once", **keys) == 0
    assert losses(tmp_path) == losses(tmp_path / "at once")
    assert [one["step"] for one in losses(tmp_path)] == [20, 21, 22, 23]


@pytest.mark.slow
def test_a_stream_goes_on_exactly(tmp_path, web):
    pytest.importorskip("datasets")
    keys = {
        "dataset_type": "hf", "hf_path": "json", "hf_train_files": web["train_files"], "hf_streaming": True,
        "num_epoch": -1, "eval_files": [], "learning_rate_schedule_steps": 7,
    }  # fmt: skip
    assert run(tmp_path / "whole", **keys, steps=7) == 0
    for steps in (1, 4, 7):
        assert run(tmp_path / "cut", **keys, steps=steps) == 0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
