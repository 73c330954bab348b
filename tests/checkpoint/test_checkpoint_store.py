"""Order, retention, and who may write where."""

import os

import jax.numpy as jnp
import pytest

from MaxText.checkpoint import Store

from .helpers import raises, state


def test_saving_below_a_later_step_is_refused(copy):
    for step in (15, 20):
        with raises("checkpoint.later-step"):
            copy.save(step, state(), {})
    assert copy.steps() == [10, 20]
    copy.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_retention(tmp_path, keep):
    with Store(tmp_path, keep=keep) as store:
        for step in range(1, 5):
            store.save(step, {"w": jnp.ones(3) * step}, {})
        store.wait()
        assert store.steps() == [1, 2, 3, 4][-keep:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *map(str, range(5 - keep, 5))]


def test_keep_none_of_them_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        Store(tmp_path, keep=0)


def test_nothing_old_goes_before_the_new_step_is_durable(tmp_path, monkeypatch):
    with Store(tmp_path, keep=1, asynchronous=False) as store:
        store.save(1, {"w": jnp.ones(3)}, {})
        with monkeypatch.context() as patch, raises("checkpoint.not-saved"):
            patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            store.save(2, {"w": jnp.ones(3)}, {})
        assert store.steps() == [1]
        store.save(2, {"w": jnp.ones(3)}, {})
        assert store.steps() == [2]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with Store(tmp_path / "file" / "checkpoints") as store, raises("checkpoint.not-writable") as caught:
        assert store.latest() is None
        store.prepare()
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and look anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with Store(tmp_path / "checkpoints") as store, raises("checkpoint.not-writable"):
            store.prepare()
        tmp_path.chmod(0)
        with raises("checkpoint.not-readable"):
            store.latest()
    finally:
        tmp_path.chmod(0o700)


def test_two_writers(tmp_path):
    with Store(tmp_path, asynchronous=False) as first:
        first.prepare()
        first.prepare()
        second = Store(tmp_path, asynchronous=False)
        with raises("checkpoint.in-use") as caught:
            second.prepare()
        assert str(os.getpid()) in str(caught.value)
        first.save(1, {"w": jnp.ones(3)}, {})
        assert second.steps() == [1]  # reading is free
    second.prepare()
    second.close()
