"""The local tier of several real processes: what one of them has lost comes from its peer's copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.checkpoint.helpers import flip
from tests.processes.worlds import World

STEPS = 8
HOW: dict[str, Any] = {"steps": STEPS, "learning_rate_schedule_steps": STEPS, "eval_files": [], "log_period": 1}
HOW |= {"checkpoint_period": 4, "async_checkpointing": False}


class Killed:
    """A run that was killed after 7 steps, of which 4 are durable and 6 in the local tier; it can be so again."""

    def __init__(self, folder: Path, environ: dict[str, str], count: int, devices: int) -> None:
        self.folder, self.environ, self.count, self.devices = folder, environ, count, devices
        self.how = HOW | {"enable_emergency_checkpoint": True, "local_checkpoint_period": 2}
        self.how |= {"local_checkpoint_directory": folder / "node"}
        world = World(folder, environ | {"MAXTEXT_FAULT": "step.dispatched:7"}, count, devices, **self.how)
        assert set(world.end()) <= {-9, 77}, world.said()
        assert runs.kept(folder) == [4]
        for name in ("toy", "node"):
            shutil.copytree(folder / name, folder / "before" / name)

    def node(self, id: int) -> Path:
        """The local folder of a process."""
        return next((self.folder / "node").glob(f"toy-*/{id}"))

    def again(self) -> None:
        """As it was when it was killed."""
        for name in ("toy", "node"):
            shutil.rmtree(self.folder / name)
            shutil.copytree(self.folder / "before" / name, self.folder / name)

    def resumed(self, count: int = 0, devices: int = 0) -> str:
        """What process 0 says when the run goes on to its end."""
        world = World(self.folder, self.environ, count or self.count, devices or self.devices, **self.how)
        assert set(world.end()) == {0}, world.said()
        return world.out[0]


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """As `clean_environ`, for the whole module."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("M_", "JAX_", "XLA_", "NPROC"))}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, environ) -> list[dict[str, Any]]:
    """The metrics of the run of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    world = World(folder, environ, 2, 1, **HOW)
    assert world.end() == [0, 0], world.said()
    return runs.records(folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, environ) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"), environ, 2, 1)


def test_a_lost_node_is_restored_from_its_peers_copy_to_the_bit(killed, unbroken):
    shutil.rmtree(killed.node(1))
    said = killed.resumed()
    assert "RESUMED after 6 steps from" in said and "(local)" in said, said
    assert "files of the local checkpoint for process 1 came from process 0" in said, said
    assert runs.records(killed.folder) == unbroken


@pytest.mark.slow
def test_a_flipped_byte_is_mended_from_the_peers_copy(killed, unbroken):
    killed.again()
    piece = killed.node(0) / "6/state/params.logits/0.0"
    flip(piece)
    said = killed.resumed()
    assert "RESUMED after 6 steps from" in said and "for process 0 came from process 1" in said, said
    assert "params.logits/0.0" in said and "CRC" in said
    assert runs.records(killed.folder) == unbroken


@pytest.mark.slow
def test_what_neither_has_falls_back_to_the_durable_step_and_says_so(killed, unbroken):
    killed.again()
    for id in range(2):
        flip(killed.node(id) / "6/state/params.logits/1.0")
    said = killed.resumed()
    assert "RESUMED after 4 steps instead of 6" in said and "params.logits/1.0" in said, said
    assert runs.records(killed.folder) == unbroken
    killed.again()
    shutil.rmtree(killed.folder / "node")
    assert "RESUMED after 4 steps from" in killed.resumed()
    assert runs.records(killed.folder) == unbroken


@pytest.mark.slow
def test_one_process_goes_on_from_what_two_have_left(killed, unbroken):
    killed.again()
    shutil.rmtree(killed.node(1))
    assert "(local)" in killed.resumed(1, 2)
    for found, wanted in zip(runs.records(killed.folder), unbroken, strict=True):
        assert found == pytest.approx(wanted, rel=2e-6)


@pytest.mark.slow
def test_four_processes_of_which_one_is_lost_or_two_neighbours(tmp_path, environ):
    killed = Killed(tmp_path, environ, 4, 1)
    shutil.rmtree(killed.node(2))
    said = killed.resumed()
    assert "RESUMED after 6 steps from" in said and "for process 2 came from process 3" in said, said
    killed.again()
    for id in (2, 3):  # nobody else has a copy of the pieces of 2
        shutil.rmtree(killed.node(id))
    said = killed.resumed()
    assert "RESUMED after 4 steps from" in said and "local checkpoint 6 cannot be used" in said, said
