"""Whole runs in several real processes: the same numbers, one stop for all, one end for all, and what they leave."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from MaxText.checkpoint import Store
from tests import runs
from tests.processes.worlds import World

SLICED = {"num_slices": 2, "ici_fsdp_parallelism": 4, "dcn_data_parallelism": 2}
HOW = {"learning_rate_schedule_steps": 6, "eval_interval": 3, "checkpoint_period": 2}


THREE: dict[str, Any] = {"ici_data_parallelism": 3, "ici_fsdp_parallelism": 1, "global_batch_size": 12}
THREE |= {"log_period": 1, "steps": 10_000, "eval_files": []}


def compare(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same records up to the order in which a sum over devices is taken."""
    assert [record.keys() for record in found] == [record.keys() for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=2e-6), one["step"]


def parameters(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, read back by one process."""
    store = Store(folder / "toy" / "checkpoints")
    leaves = store.manifest(step)["leaves"]
    target = {name: jax.ShapeDtypeStruct(leaf["shape"], np.dtype(leaf["dtype"])) for name, leaf in leaves.items()}
    nested: dict[str, Any] = {}
    for name, leaf in target.items():
        *parents, last = name.split("/")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    store.verify(step)
    found = store.restore(step, nested)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(found)}


def same_parameters(one: Path, other: Path, step: int) -> None:
    a, b = parameters(one, step), parameters(other, step)
    assert a.keys() == b.keys()
    for name, x in a.items():
        np.testing.assert_allclose(x, b[name], rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The run in one process with eight devices in two slices."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert runs.run(folder, **HOW, **SLICED) == 0
    return folder


def test_two_processes_two_slices_stopped_and_resumed_by_one(unbroken, tmp_path, clean_environ):
    """A signal to one process stops both at the same step; one process goes on from what they saved."""
    world = World(tmp_path, clean_environ, 2, 4, **HOW, **SLICED, log_period=1, steps=1000)
    world.until("completed step: 2,")
    world.processes[1].terminate()
    assert world.end() == [75, 75], world.said()
    done = runs.kept(tmp_path)[-1]
    assert f"stopped by SIGTERM after {done} steps" in world.err[0] and "SIGTERM" not in world.err[1]
    assert "completed" not in world.out[1]
    assert len([r for r in runs.records(tmp_path) if "loss" in r]) == done
    assert runs.tree(tmp_path / "toy") >= {"config.yml", "log.txt", "metrics.jsonl", "goodput.jsonl"}
    first = [r for r in runs.records(tmp_path) if r["step"] < min(done, 6)]
    reference = [r for r in runs.records(unbroken) if r["step"] < min(done, 6)][: len(first)]
    compare(first, reference)
    if done < 6:
        assert runs.run(tmp_path, **HOW, **SLICED) == 0
        compare(runs.records(tmp_path), runs.records(unbroken))
        same_parameters(tmp_path, unbroken, 6)


def test_a_killed_process_ends_the_other_at_once_by_name(tmp_path, clean_environ):
    world = World(tmp_path, clean_environ, 2, 1, log_period=1, steps=10_000, checkpoint_period=5, eval_files=[])
    world.until("completed step: 7,")
    while not runs.kept(tmp_path):
        time.sleep(0.05)
    pid = world.processes[1].pid
    killed = time.monotonic()
    world.processes[1].kill()
    assert world.end(20) == [77, -signal.SIGKILL]
    assert time.monotonic() - killed < 5
    assert f"process 1 ({os.uname().nodename}, pid {pid}) is gone" in world.err[0]
    assert "Traceback" not in world.err[0]
    assert f"pid {pid}" in (tmp_path / "toy" / "log.txt").read_text()
    assert runs.kept(tmp_path)


# --- slow: each start of a process costs seconds


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 4), (4, 2)])
def test_any_number_of_processes_writes_the_same(unbroken, tmp_path, clean_environ, count, devices):
    """Metrics, parameters and text of a whole run; two slices of two processes are one of the cases."""
    world = World(tmp_path, clean_environ, count, devices, **HOW, **SLICED, sample_length=4)
    assert world.end(200) == [0] * count, world.said()
    compare(runs.records(tmp_path), runs.records(unbroken))
    same_parameters(tmp_path, unbroken, 6)
    assert "--- sample, greedy ---" in world.out[0] and "sample" not in "".join(world.out[1:])


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_an_axis_that_spans_processes(tmp_path, clean_environ, axis):
    """Then both processes hold the same rows, or parts of each row."""
    mesh = {"ici_fsdp_parallelism": 1, f"ici_{axis}_parallelism": 2}
    world = World(tmp_path / "two", clean_environ, 2, 1, **HOW, **mesh)
    assert world.end() == [0, 0], world.said()
    alone = World(tmp_path / "one", clean_environ, 1, 2, **HOW, **mesh)
    assert alone.end() == [0], alone.said()
    compare(runs.records(tmp_path / "two"), runs.records(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("id", [0, 1])
def test_a_process_that_hangs_is_named(tmp_path, clean_environ, id):
    how = {"jax_distributed_heartbeat_timeout_seconds": 4, "log_period": 1, "steps": 10_000, "eval_files": []}
    world = World(tmp_path, clean_environ, 2, 1, **how)
    world.until("completed step: 5,")
    world.processes[id].send_signal(signal.SIGSTOP)
    other = 1 - id
    try:
        assert world.processes[other].wait(20) == 77
    finally:
        world.processes[id].kill()
        world.end()
    assert f"process {id} (" in world.err[other] and "not been heard" in world.err[other], world.said()


@pytest.mark.slow
def test_one_of_three_is_killed_and_both_others_name_it(tmp_path, clean_environ):
    world = World(tmp_path, clean_environ, 3, 1, **THREE)
    world.until("completed step: 5,")
    world.processes[1].kill()
    assert world.end(20) == [77, -signal.SIGKILL, 77]
    assert all("process 1 (" in world.err[id] and "is gone" in world.err[id] for id in (0, 2)), world.said()


@pytest.mark.slow
def test_the_first_process_is_killed(tmp_path, clean_environ):
    world = World(tmp_path, clean_environ, 3, 1, **THREE)
    world.until("completed step: 5,")
    world.processes[0].kill()
    assert world.end(20) == [-signal.SIGKILL, 77, 77]
    assert all("process 0 (" in text and "is gone" in text for text in world.err[1:]), world.said()


@pytest.mark.slow
def test_a_damaged_piece_makes_all_go_back(tmp_path, clean_environ):
    how = {**HOW, **SLICED, "eval_interval": -1, "eval_files": []}
    world = World(tmp_path, clean_environ, 2, 4, **how, steps=4)
    assert world.end() == [0, 0], world.said()
    piece = tmp_path / "toy/checkpoints/4/state/params.logits/3.0"
    data = bytearray(piece.read_bytes())
    data[7] ^= 1
    piece.write_bytes(data)
    world = World(tmp_path, clean_environ, 2, 4, **how, steps=6)
    assert world.end() == [0, 0], world.said()
    assert "3.0" in world.out[0] and "RESUMED after 2 steps instead of 4" in world.out[0]


@pytest.mark.slow
def test_what_one_process_finds_different_is_refused(tmp_path, clean_environ):
    """Text that differs between hosts; then devices that do. Nothing is written."""
    for id in range(2):
        (tmp_path / f"home{id}").mkdir()
        (tmp_path / f"home{id}" / "text.txt").write_text(f"Text of host {id}. " * 900)
    refused(tmp_path, clean_environ, 4, "sha256", {"train_files": ["~/text.txt"], "eval_files": []})
    refused(tmp_path, clean_environ, 3, "process 1 has 2", {}, unequal=True)


def refused(
    folder: Path, environ: dict[str, str], code: int, word: str, how: dict[str, Any], *, unequal: bool = False
) -> None:
    worlds = World(folder / "out", environ, 0, 1)
    address = worlds.address
    for id in range(2):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(id)}
        flags = f"--xla_force_host_platform_device_count={1 + (id if unequal else 0)}"
        worlds.add(
            runs.start(folder / "out", environ | place | {"XLA_FLAGS": flags, "HOME": str(folder / f"home{id}")}, **how)
        )
    assert worlds.end() == [code, code], worlds.said()
    assert word in worlds.err[0] and worlds.err[1] == "", worlds.said()
    assert not (folder / "out").exists() or not runs.tree(folder / "out")
