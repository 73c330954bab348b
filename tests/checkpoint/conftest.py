"""Stores, and a folder of two good steps to be copied and damaged."""

import shutil
from pathlib import Path

import pytest

from MaxText.checkpoint import Store

from .helpers import state


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "checkpoints", asynchronous=False) as made:
        yield made


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 10 and 20 on disk, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Store(folder, asynchronous=False) as made:
        for step in (10, 20):
            made.save(step, state(step), {"config": {"steps": 30}})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Store(Path(shutil.copytree(saved, tmp_path / "checkpoints")), asynchronous=False)
