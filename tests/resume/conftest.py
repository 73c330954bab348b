"""A run that nobody disturbs, and the same as a kill leaves it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runs import TOY_RUN, run

STEPS = TOY_RUN["steps"]
# The schedule is that of the whole run, however early an attempt stops.
WHOLE = {"learning_rate_schedule_steps": STEPS, "eval_interval": 3}


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, **WHOLE) == 0
    return folder


@pytest.fixture
def halfway(unbroken, tmp_path) -> Path:
    """The run as a kill leaves it: checkpoints of 2 and 4 steps, metrics of later steps already written."""
    shutil.copytree(unbroken / "toy", tmp_path / "toy")
    shutil.rmtree(tmp_path / "toy/checkpoints" / str(STEPS))
    return tmp_path
