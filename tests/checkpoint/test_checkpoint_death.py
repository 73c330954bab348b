"""A save that dies at any moment loses nothing that was durable, and is told."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpoint import Store, arrays

from .helpers import ROOT, flip, raises, state, target


def test_leftovers_are_ignored_then_removed_by_the_next_save(copy):
    for name in ("30", "40"):
        shutil.copytree(copy.folder / "20", copy.folder / name)
        (copy.folder / name / "manifest.json").unlink()
    (copy.folder / "40" / "state").rename(copy.folder / "40" / "state.orbax-checkpoint-tmp")
    assert copy.steps() == [10, 20] and set(copy.incomplete()) == {30, 40}
    step, _, skipped = copy.restore_newest(target())
    assert step == 20 and len(skipped) == 2
    assert (copy.folder / "40").exists()
    copy.save(30, state(30), {})
    assert copy.steps() == [10, 20, 30] and not (copy.folder / "40").exists()
    copy.close()


KILLED = """
    import os, signal, sys, jax.numpy as jnp
    from pathlib import Path
    from MaxText.checkpoint import Store, arrays, manifest, store
    at, module = sys.argv[2], {"write": arrays, "survey": manifest, "sync_folder": manifest}
    die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    saver = Store(Path(sys.argv[1]))
    saver.save(1, {"w": jnp.ones((4, 4))}, {})
    saver.wait()
    if at == "replace":
        os.replace = die
    elif at == "inside":
        import orbax.checkpoint as ocp
        ocp.PyTreeCheckpointHandler.finalize = die
    else:
        setattr(module[at], at, die)
    saver.save(2, {"w": jnp.ones((4, 4)) * 2}, {})
    saver.wait()
"""


@pytest.mark.parametrize("moment", ["write", "inside", "survey", "sync_folder", "replace"])
def test_killed_at_any_boundary_of_a_save(tmp_path, moment):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), moment]
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE).returncode == -signal.SIGKILL
    assert (tmp_path / "2").exists()
    with Store(tmp_path, asynchronous=False) as store:
        assert store.steps() == [1]
        w = {"w": jax.ShapeDtypeStruct((4, 4), np.float32)}
        step, found, skipped = store.restore_newest(w)
        assert step == 1 and np.all(np.asarray(found["w"]) == 1) and len(skipped) == 1
        store.save(2, {"w": jnp.full((4, 4), 3.0)}, {})
        assert np.all(np.asarray(store.restore(2, w)["w"]) == 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1", "2"]


def test_a_failed_background_save_is_told_at_the_next_call(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing")

    with pytest.MonkeyPatch.context() as patch:
        for told in ("check", "wait", "save", "close"):
            store = Store(tmp_path / told)
            store.save(1, state(), {})
            store.wait()
            patch.setattr(arrays, "write", fail)
            store.save(2, state(), {})
            store._background.pending.exception()  # it is over
            patch.undo()
            call = (lambda: store.save(3, state(), {})) if told == "save" else getattr(store, told)  # noqa: B023
            with raises("checkpoint.not-saved") as caught:
                call()
            assert "RESOURCE_EXHAUSTED" in str(caught.value) and "bytes" in str(caught.value)
            assert store.steps() == [1]
            if told != "close":
                with raises("checkpoint.not-saved"):
                    store.check()
            store.close()  # told once is enough


def test_check_does_not_wait(tmp_path, monkeypatch):
    gate = threading.Event()
    write = arrays.write
    monkeypatch.setattr(arrays, "write", lambda *args: (gate.wait(), write(*args)))
    with Store(tmp_path) as store:
        store.save(1, state(), {})
        store.check()
        assert store.steps() == []
        gate.set()
        store.wait()
        assert store.steps() == [1]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], stderr=subprocess.DEVNULL
        ).returncode
    )
    if not mounted:
        pytest.skip("this user cannot mount a small disk; test_file_size_limit covers the rest")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_disk_full(small_disk):
    little = {"w": jnp.ones((1000,))}
    with Store(small_disk / "checkpoints") as store:
        store.save(1, little, {})
        store.save(2, {"w": jnp.ones((100_000,))}, {})  # 400 kB
        with raises("checkpoint.not-saved") as caught:
            store.wait()
        assert "400,000" in str(caught.value)
    with Store(small_disk / "checkpoints") as store:
        assert store.steps() == [1]
        store.save(2, little, {})  # the leftovers made room
        store.wait()
        assert store.steps() == [1, 2]


def test_file_size_limit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Store(tmp_path, asynchronous=False) as store:
            store.save(1, {"w": jnp.ones((10,))}, {})
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            with raises("checkpoint.not-saved"):
                store.save(2, {"w": jnp.ones((100_000,))}, {})
            assert store.steps() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_bytes_changed_on_the_way_to_the_disk_fail_the_save(store, monkeypatch):
    write = arrays.write

    def flipping(folder, host):
        write(folder, host)
        flip(next(folder.rglob("0.0")))

    monkeypatch.setattr(arrays, "write", flipping)
    with raises("checkpoint.not-saved"):
        store.save(1, state(), {})
    assert store.steps() == []
