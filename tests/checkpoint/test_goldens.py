"""Checkpoints as every version has written them are read by this one: one of each format (made at the last commit that
wrote it), and one of each way to write it."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpoint import FORMAT, Store
from MaxText.checkpoint.stream import Reader
from tests.checkpoint.helpers import assert_same, mesh, orbax, sharding

GOLDENS = Path(__file__).parents[1] / "goldens" / "checkpoints"
NAMES = sorted(path.name for path in GOLDENS.iterdir())


def wanted() -> dict:
    """What all of them hold, after 10 steps."""
    w = (np.arange(16).reshape(4, 4) / 3).astype(jnp.bfloat16)
    params = {"embed": np.arange(32, dtype=np.float32).reshape(8, 4) / 7, "layers": {"w": w}}
    opt = {"0": {"count": np.int32(10).reshape(()), "mu": np.zeros((8, 4), np.float32)}}
    return {"params": params, "opt": opt, "step": np.int32(10).reshape(())}


def test_there_is_one_of_each_format():
    formats = {Store(GOLDENS / name).manifest(10)["format"] for name in NAMES}
    assert formats == set(range(1, FORMAT + 1)), "make a golden checkpoint of the new format before it is released"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_it_is_restored_to_the_bit(name, shape):
    on = mesh(*shape)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(on, x)), wanted())
    store = Store(GOLDENS / name)
    store.verify(10)
    step, found, skipped = store.restore_newest(types)
    assert (step, skipped) == (10, [])
    assert_same(found, wanted())
    meta = store.manifest(10)["meta"]
    assert meta == {"config": {"steps": 30, "run_name": "golden"}, "data": {"files": "a", "seed": 0}, "steps_done": 10}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_piece_by_piece_and_by_orbax(name):
    reader = Reader(GOLDENS / name / "10", "params/")
    reader.verify()
    for path, array in (("embed", wanted()["params"]["embed"]), ("layers/w", wanted()["params"]["layers"]["w"])):
        assert np.asarray(reader.read(path)).tobytes() == array.tobytes()
    np.testing.assert_array_equal(orbax(GOLDENS / name / "10/state")["params"]["embed"], wanted()["params"]["embed"])


@pytest.mark.parametrize("name", NAMES)
def test_the_run_goes_on_behind_it(name, tmp_path):
    shutil.copytree(GOLDENS / name, tmp_path / name)
    with Store(tmp_path / name, asynchronous=False) as store:
        store.save(11, jax.tree.map(jnp.asarray, wanted()), {})
        assert store.steps() == [10, 11]
