"""The fast tier beside the durable one: the newest intact of both counts, whichever it is. One process here; several
in tests/processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from MaxText.checkpoint import Local, Store, Tiers
from MaxText.processes import Alone
from tests import runs
from tests.checkpoint.helpers import DAMAGES, assert_same, flip, host_state, mesh, raises, state, target

META = {"config": {"steps": 30}}


def tiers(folder: Path, name: str = "run") -> Tiers:
    run = folder / name
    durable = Store(run / "checkpoints", keep=2, asynchronous=False)
    return Tiers(durable, Local(folder / "node", run, Alone(), asynchronous=False, seconds=10))


OPENED: list[Tiers] = []


def opened(folder: Path, name: str = "run") -> Tiers:
    made = tiers(folder, name)
    made.newest()
    made.prepare()
    OPENED.append(made)
    return made


@pytest.fixture(autouse=True)
def let_go():
    """Locks go, as when a process is killed."""
    yield
    unlock()


def unlock() -> None:
    for made in OPENED:
        for one in (made.durable, made._local._steps):
            one.unlock()
    OPENED.clear()


def node(folder: Path, name: str = "run") -> Path:
    """The one process's local folder."""
    return next((folder / "node").glob(f"{name}-*/0"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A durable step 10, a local step 13, and nothing that closed them: the process was killed."""
    made = opened(tmp_path)
    made.save(10, state(10), META)
    for step in (11, 13):
        made.save(step, state(step), META, local=True)
    unlock()
    return tmp_path


def test_the_newest_is_local_and_any_mesh_reads_it(folder):
    assert sorted(path.name for path in node(folder).iterdir() if path.name.isdecimal()) == ["13"]
    made = opened(folder)
    newest, notes = made.newest()
    assert (newest.step, notes) == (13, []) and newest.meta["config"] == {"steps": 30}
    assert newest.where == f"{node(folder)}/13 (local)"
    made.require_fit(13, target())
    found = made.restore_newest(target(mesh(2, 4)))
    assert (found.step, found.where, found.notes) == (13, newest.where, [])
    assert_same(found.state, host_state(13))


def test_a_durable_one_that_is_newer_wins_and_frees_the_room(folder):
    made = opened(folder)
    made.save(14, state(14), META)
    assert made.newest()[0].where == f"{folder}/run/checkpoints/14"
    assert made.restore_newest(target()).step == 14
    made.close()
    assert not list((folder / "node").iterdir()) and made.durable.steps() == [10, 14]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_any_kind_of_local_file_falls_back_by_name(folder, damage):
    kinds = ["state/params.embed/1.1", "state/params.embed/.zarray", "manifest.json"]
    whole = shutil.copytree(node(folder) / "13", folder / "copy")
    for kind in kinds:
        DAMAGES[damage](node(folder) / "13" / kind)
        made = opened(folder)
        _, notes = made.newest()
        found = made.restore_newest(target())
        assert found.step == 10 and "13" in "".join([*notes, *found.notes]), kind
        if damage == "flip" and "state" in kind:
            assert kind.removeprefix("state/") in found.notes[0]
        assert_same(found.state, host_state(10))
        unlock()
        shutil.rmtree(node(folder) / "13")
        shutil.copytree(whole, node(folder) / "13")


def test_what_is_damaged_is_moved_aside_by_the_next_save_and_only_the_newest_kept(folder):
    for _ in range(2):
        flip(next((node(folder) / f"{Store(node(folder)).latest()}").rglob("1.1")))
        made = opened(folder)
        assert made.restore_newest(target()).step == 10
        for step in (12, 13 + len(list(node(folder).glob("*.damaged")))):
            made.save(step, state(step), META, local=True)
        unlock()
    assert len(list(node(folder).glob("*.damaged"))) == 1


def test_saving_below_a_later_local_step_is_refused(folder):
    made = opened(folder)
    with raises("checkpoint.later-step"):
        made.save(13, state(13), META, local=True)


def test_another_run_at_the_same_place_does_not_see_it_and_clears_it(folder):
    old = node(folder)
    shutil.rmtree(folder / "run")
    assert tiers(folder).newest() == (None, [])
    opened(folder)
    assert not old.exists() and node(folder).is_dir()


def test_a_copy_of_the_run_does_not_see_it_either(folder):
    shutil.copytree(folder / "run", folder / "fork")
    made = opened(folder, "fork")
    assert made.newest()[0].step == 10
    assert (node(folder) / "13").is_dir()


def test_a_place_that_cannot_be_written(folder):
    (folder / "file").touch()
    made = Local(folder / "file" / "node", folder / "run", Alone(), asynchronous=False, seconds=10)
    assert made.survey() == {}
    with raises("checkpoint.not-writable") as caught:
        made.prepare()
    assert str(folder / "file") in str(caught.value)


def test_a_local_save_that_fails_in_the_background_is_told_at_the_next_step(folder, monkeypatch):
    made = Local(folder / "node", folder / "run", Alone(), asynchronous=True, seconds=10)
    made.survey()
    made.prepare()
    with monkeypatch.context() as patch:
        patch.setattr("MaxText.checkpoint.disk.require_room", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        made.save(14, state(14), META)
        made._background.pending.exception()
    with raises("checkpoint.not-saved") as caught:
        made.check()
    assert f"{node(folder)}/14" in str(caught.value) and "No space" in str(caught.value)
    made.close()


def test_a_full_node_ends_the_run_with_a_durable_checkpoint(tmp_path, capsys, monkeypatch):
    """Nothing that was trained is lost, and without the tier the run goes on."""
    how = {"checkpoint_period": 100, "eval_files": [], "learning_rate_schedule_steps": 6}
    fast = how | {"enable_emergency_checkpoint": True, "local_checkpoint_period": 2}
    fast |= {"local_checkpoint_directory": tmp_path / "node"}

    def no_room(folder: Path, nbytes: int) -> None:
        if "node" in folder.parts:
            raise OSError(28, "No space left on device", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("MaxText.checkpoint.disk.require_room", no_room)
        assert runs.run(tmp_path, **fast) == 7
    said = capsys.readouterr().err
    assert "Without enable_emergency_checkpoint" in said and "Traceback" not in said
    (saved,) = runs.kept(tmp_path)
    assert 2 <= saved < 6 and len([r for r in runs.records(tmp_path) if "loss" in r]) == saved
    assert runs.run(tmp_path, **how) == 0
    assert f"RESUMED after {saved} steps" in capsys.readouterr().out


def test_a_run_goes_on_from_its_local_checkpoint_to_the_bit(tmp_path, capsys, clean_environ):
    """Killed after 5 steps, of which 3 are durable and 4 are in the local tier."""
    how = {"learning_rate_schedule_steps": 6, "checkpoint_period": 3, "eval_files": [], "async_checkpointing": False}
    assert runs.run(tmp_path / "unbroken", **how) == 0
    fast = how | {"enable_emergency_checkpoint": True, "local_checkpoint_period": 2}
    fast |= {"local_checkpoint_directory": tmp_path / "node"}
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "MAXTEXT_FAULT": "step.dispatched:5"}
    killed = runs.start(tmp_path, clean_environ | eight, **fast)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL and runs.kept(tmp_path) == [3]
    capsys.readouterr()
    where = f"{node(tmp_path, 'toy')}/4 (local)"
    assert runs.run(tmp_path, **fast) == 0
    assert f"RESUMED after 4 steps from {where}" in capsys.readouterr().out
    assert runs.records(tmp_path) == runs.records(tmp_path / "unbroken")
    assert not list((tmp_path / "node").iterdir())
